"""The machinery of configuration classes: frozen, keyword-only, checked, and documented field by field.

A configuration is an ordinary frozen dataclass. pydantic's TypeAdapter checks it, from Python exactly as from YAML:
a wrong keyword raises ConfigError with the nearest match, and a wrong type raises it with the path. whet.config.fields
has the types of fields with their limits.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from whet.config.fields import TYPE_NAMES, Fn
from whet.config.synonyms import NOTES, find_owner, find_synonym, leaf_paths
from whet.errors import ConfigError, format_value, nearest

__all__ = [
    "CALLABLE_TYPES",
    "adapter",
    "check_instance",
    "choices",
    "config",
    "config_from_dict",
    "field_docs",
    "leaves",
    "partial_config_from_dict",
    "section_at",
    "to_config_error",
    "type_text",
    "types_at",
]

T = TypeVar("T")
CALLABLE_TYPES = (Fn,)
"""Types of functions. On a command line a function is given by its name, as text."""

_EXPECTED = {
    "dict_type": "expected keys with their values, {key: value}",
    "list_type": "expected a list, [a, b]",
    "string_type": "expected text",
    "tuple_type": "expected a list, [a, b]",
}
"""Error type of pydantic -> whet's message."""
_LIKELY_FIELDS = {True: ("preset", "model", "path", "name", "log_dir", "metric"), False: ("lr", "r", "temperature")}
"""Whether a value is text -> the fields of a section that the user probably meant by it."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """The decorator of every configuration class: makes it a frozen keyword-only dataclass that checks its fields.

    Args: cls: annotated fields, each with a docstring line under it; `__post_init__` may raise ConfigError.
        A class attribute REFUSED = {keyword: reason} explains keywords that peers have and whet does not.
    Returns: the same class.

    >>> from whet.config import OptimConfig
    >>> OptimConfig(lrr=1.0)
    Traceback (most recent call last):
    whet.errors.ConfigError: unknown keyword OptimConfig.lrr; did you mean lr?
    """
    checked = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    checked.__pydantic_config__ = {"extra": "forbid"}  # pyright: ignore
    plain = checked.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        if args:
            raise ConfigError(f"{type(self).__name__} takes keywords only, got {len(args)} positional value(s)")
        try:
            adapter(type(self)).validator.validate_python(ArgsKwargs((), keywords), self_instance=self)
        except ValidationError as error:
            raise to_config_error(type(self), error, keywords, root=type(self).__name__) from None

    checked.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
    return checked


@functools.cache
def adapter(cls: type) -> TypeAdapter[Any]:
    """The TypeAdapter of a configuration class. It is built at first use, so importing whet.config stays fast."""
    return TypeAdapter(cls)


def config_from_dict(cls: type[T], tree: Mapping[str, Any], *, short: Mapping[str, str] | None = None) -> T:
    """A configuration from plain nested dicts.

    Args: cls: a configuration class. tree: as from YAML. short: shorthands, named in suggestions.
    Returns: the instance.
    Raises: ConfigError: every unknown key, missing key and wrong value at once, a line each.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"a configuration is a mapping of keys, got {format_value(tree, 80)} ({type(tree).__name__})")
    try:
        return adapter(cls).validate_python(dict(tree))
    except ValidationError as error:
        raise to_config_error(cls, error, tree, short=short) from None


def partial_config_from_dict(cls: type[T], tree: Mapping[str, Any]) -> tuple[T | None, frozenset[str]]:
    """A configuration from nested dicts, without the keys that `config_from_dict` refuses.

    Returns: the instance, or None if the other keys contradict one another; and the top-level keys with a refused key.

    >>> from whet.config import RunConfig
    >>> config, lacks = partial_config_from_dict(RunConfig, {"actor": {"lrr": 1.0, "model": "a/b"}, "modle": "a/b"})
    >>> config.actor.model, sorted(lacks)
    ('a/b', ['actor', 'modle'])
    """
    known: dict[str, Any] = dict(tree)
    lacks: set[str] = set()
    while True:
        try:
            return adapter(cls).validate_python(known), frozenset(lacks)
        except ValidationError as error:
            paths = [_path(cls, item["loc"], known) for item in error.errors(include_url=False)]
        before = known
        for path in sorted(paths, key=len, reverse=True):  # a section after its keys
            known = _without(known, path)
        if known == before:
            return None, frozenset(lacks)
        lacks |= {path[0] for path in paths if path}


def _without(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A tree without the key at a path. If there is no such key, the tree without the first part of the path."""
    inner = tree.get(path[0]) if path else None
    if len(path) > 1 and isinstance(inner, Mapping) and path[1] in inner:
        return {**tree, path[0]: _without(inner, path[1:])}
    return {key: value for key, value in tree.items() if path[:1] != (str(key),)}


def check_instance(value: Any, cls: type[T], name: str) -> T:
    """The value, if it is an instance of a class. Args: name: in the message. Raises: ConfigError: it is not.

    >>> from whet.config import OptimConfig
    >>> check_instance([OptimConfig()], OptimConfig, "optim")
    Traceback (most recent call last):
    whet.errors.ConfigError: optim is of class list, and must be of OptimConfig; give the object without the brackets
    """
    if isinstance(value, cls):
        return value
    fix = f"write {cls.__name__}(key=value, ...)"
    if isinstance(value, list | tuple) and len(value) == 1:
        fix = "give the object without the brackets"
    elif isinstance(value, Mapping):
        fix = f"write {cls.__name__}(**it)"
    raise ConfigError(f"{name} is of class {type(value).__name__}, and must be of {cls.__name__}; {fix}")


def to_config_error(
    cls: type, error: ValidationError, value: Any, *, root: str = "", short: Mapping[str, str] | None = None
) -> ConfigError:
    """A ConfigError from pydantic's ValidationError: one line per path, and of a union only the deepest error.

    Args:
        cls: the class that was checked.
        error: pydantic's.
        value: the checked value.
        root: class name, from Python.
        short: shorthands, named in suggestions.

    Returns: the ConfigError, to be raised by the caller.

    An example: actor_optimizer is a section, a name or a function, so a misspelt key of the section is found three
    times, and pydantic's locations contain the members of the union, which no user has written:

    >>> from whet.config import RLTrainingConfig
    >>> value = {"actor_optimizer": {"lrr": 1.0}}
    >>> try:
    ...     adapter(RLTrainingConfig).validate_python(value)
    ... except ValidationError as error:
    ...     found = error
    >>> for item in found.errors():
    ...     print(item["type"], item["loc"])
    unexpected_keyword_argument ('actor_optimizer', 'OptimConfig', 'lrr')
    string_type ('actor_optimizer', 'function-after[as_name(), str]')
    callable_type ('actor_optimizer', 'callable')

    `_path` keeps the keys that the user wrote: ("actor_optimizer", "lrr"), and ("actor_optimizer",) twice. The first is
    the deepest, and `_error_line` makes the message from it:

    >>> print(to_config_error(RLTrainingConfig, found, value))
    unknown key actor_optimizer.lrr; did you mean actor_optimizer.lr?
    """
    found: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_path(cls, item["loc"], value), []).append(item)
    lines = [
        _error_line(cls, path, items, root, short or {})
        for path, items in found.items()
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found)
    ]
    return ConfigError("\n".join(lines))


def _path(cls: type, loc: tuple[Any, ...], value: Any) -> tuple[str, ...]:
    """The keys in pydantic's location that the user wrote, without the members of unions."""
    path: tuple[str, ...] = ()
    for part in loc:
        section = section_at(cls, path)
        if (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
        elif section is None or part not in [f.name for f in dataclasses.fields(section)]:
            continue
        path = (*path, str(part))
    return path


def _error_line(cls: type, path: tuple[str, ...], items: list[Any], root: str, short: Mapping[str, str]) -> str:
    key = ".".join([root, *path] if root else path) or "the configuration"
    first = items[0]
    if "error" in (first.get("ctx") or {}) and len(items) == 1:
        usual = _default_hint(section_at(cls, path[:-1]), path) if first["input"] is None else ""
        message = f"{first['ctx']['error']}{usual}{_suggest_fix(first['input'], first['type'])}"
        lines = [
            _prefix_message(cls, path, key, line, whole=not root) if path else line for line in message.splitlines()
        ]
        return "\n".join(lines)
    if first["type"] == "unexpected_keyword_argument":
        return _unknown(cls, path, key, root, short, first["input"])
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"{key} is required"
    if first["type"].startswith("dataclass") and len(items) == 1:
        return _not_a_section(section_at(cls, path), key, root, first["input"])
    owner = section_at(cls, path[:-1])
    if len(items) > 1 and owner and path[-1] in (f.name for f in dataclasses.fields(owner)):
        return f"{key}: expected {type_text(owner, path[-1])}, got {format_value(first['input'])}"
    if owner and first["type"] in ("missing", "too_long"):  # of a list that has a length of its own
        length = len(typing.get_args(_hints(owner)[path[-1]]))
        return f"{key}: expected {length} values, got {len(first['input'])}: {format_value(first['input'])}"
    messages = dict.fromkeys(
        _EXPECTED.get(item["type"]) or f"{item['msg'][0].lower()}{item['msg'][1:]}" for item in items
    )
    fix = _suggest_fix(first["input"], first["type"], key.split(".")[-1])
    return f"{key}: {'; '.join(messages)}, got {format_value(first['input'])}{fix}"


def _not_a_section(section: type, key: str, root: str, value: Any) -> str:
    """The message about a value in place of a section."""
    names = [f.name for f in dataclasses.fields(section)]
    if not root and "preset" in _refused(section):
        names.append("preset")
    usual = _LIKELY_FIELDS[isinstance(value, str)]
    some = next((name for name in usual if name in names), names[0])
    if not root:
        return (
            f"{key} is a section: give its keys, e.g. {key}.{some}, got {format_value(value)}{_suggest_fix(value, '')}"
        )
    name = section.__name__
    fix = f"give the {name} without the brackets" if isinstance(value, list | tuple) else f"write {name}({some}=...)"
    return f"{key} takes the class {name}, or a dict of its fields, got {format_value(value, 80)}; {fix}"


def _default_hint(section: Any, path: tuple[str, ...]) -> str:
    """The hint for a None that a field does not accept: its default; "" if it has none."""
    field = next((f for f in dataclasses.fields(section) if path and f.name == path[-1]), None) if section else None
    if field is None or not isinstance(field.default, str | int | float):
        return ""
    return f"; leave it out for its default, {field.default!r}"


def _suggest_fix(value: Any, kind: str, name: str = "") -> str:
    """The fix for a common mistake in a value; "" if it is none. Args: name: of its field."""
    if isinstance(value, str) and value == "None":  # an array is compared place by place
        return "; nothing is null in YAML"
    if kind == "string_type" and value is True and name == "resume":
        return "; write latest, for the newest checkpoint of trainer.run_dir, or a checkpoint's folder"
    if kind == "string_type" and isinstance(value, bool | int | float):
        text = f'"{format_value(value, 40)}"'
        return f"; quote it: '{text}' on a command line, {text} in a file"
    if kind in ("", "dict_type") and isinstance(value, str) and re.match(r"\w+:\S", value):
        return f"; a colon that ends a key has a blank behind it: {value.replace(':', ': ', 1)}"
    if kind in ("", "dict_type") and isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return "; its keys have no dashes before them"
    return ""


def _refused(section: type) -> dict[str, str]:
    """Keywords that a section refuses, with the reason."""
    return {k: v for c in reversed(section.__mro__) for k, v in vars(c).get("REFUSED", {}).items()}


def _prefix_message(cls: type, path: tuple[str, ...], key: str, message: str, *, whole: bool) -> str:
    """A section's own message with the path of its key. If the message begins with a field, the path ends with it.

    Args: whole: add the path to the other fields that the message names, too. Fields of one word are left unchanged,
        because they may be ordinary words.
    """
    section = section_at(cls, path)
    names = [f.name for f in dataclasses.fields(section)] if section else []
    if (word := re.match(r"(\w+)(?=[ .:=])", message)) and word[0] in names:
        first, rest = word[0], message[word.end() :]
        if whole:
            compound = "|".join(name for name in names if "_" in name)
            rest = re.sub(rf"(?<![\w.\"'])({compound})(?=[ ,;:)=]|$)", rf"{key}.\1", rest)
        return f"{key}.{first}{rest}"
    return f"{key} {message}" if message.startswith(("must ", "is ", "holds ")) else f"{key}: {message}"


def _unknown(cls: type, path: tuple[str, ...], key: str, root: str, short: Mapping[str, str], value: Any) -> str:
    """The message about an unknown keyword (from Python) or key, with its name in whet or the nearest match."""
    section = section_at(cls, path[:-1])
    if section and path[-1] in (refused := _refused(section)):
        return f"{key}: {refused[path[-1]]}"
    inside = [f.name for f in dataclasses.fields(section)] if section else []
    if root:
        own = find_owner(path[-1], inside)
        return f"unknown keyword {key}{f'; did you mean {own}?' if own else nearest(path[-1], inside)}"
    keys = _keys(cls)
    whole = dict.fromkeys(k.rsplit(".", n)[0] for k in keys for n in range(k.count(".") + 1))  # sections too
    hints = {leaf: _synonym_hint(leaf, {*whole, *short}) for leaf in leaf_paths(path, value)}
    if any(hints.values()):
        return "\n".join(f"unknown key {'.'.join(leaf)}{hint}" for leaf, hint in hints.items())
    same = [k for k in whole if k.split(".")[-1] == path[-1]]
    near = nearest(path[-1], inside, prefix=".".join((*path[:-1], "")))
    near = near or (f"; did you mean {' or '.join(same[:3])}?" if same else nearest(key, [*keys, *short]))
    return f"unknown key {key}{near}"


def _synonym_hint(path: tuple[str, ...], known: Collection[str]) -> str:
    """The hint about a key of another library; "" if no table has it."""
    if (hint := find_synonym(path, known)) is not None:
        return f"; did you mean {hint}?"
    return f": {NOTES[path[-1]]}" if path[-1] in NOTES else ""


@functools.cache
def _keys(cls: type) -> tuple[str, ...]:
    """Every dotted key below a class."""
    return tuple(key for key, *_ in leaves(cls, True))


def section_at(cls: type, path: tuple[str, ...]) -> Any:
    """The configuration class at a path of keys; None if there is none.

    >>> from whet.config import TrainingConfig
    >>> section_at(TrainingConfig, ("checkpointing_options",)).__name__
    'CheckpointingOptions'
    """
    kind: Any = cls
    for part in path:
        if dataclasses.is_dataclass(kind):
            kind = _hints(kind).get(part)
        else:
            kind = next((a[1] for a in map(typing.get_args, _members(kind)) if len(a) == 2), None)
        kind = next((m for m in _members(kind) if dataclasses.is_dataclass(m)), kind)
    return kind if dataclasses.is_dataclass(kind) else None


NESTED_KEY_TYPES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("chat_template_kwargs", "chat_template"): (str, type(None))
}
"""Types of keys inside mappings of arguments for other libraries, by the last two names of their path."""


def types_at(cls: type, path: tuple[str, ...]) -> tuple[Any, ...]:
    """The types that a key accepts, with those of a list's items if a single item counts as a list; () if there is no
    such key.

    >>> from whet.config import RunConfig
    >>> types_at(RunConfig, ("trainer", "run_dir"))
    (<class 'str'>, <class 'NoneType'>)
    >>> str in types_at(RunConfig, ("rollout", "stop")), str in types_at(RunConfig, ("rollout", "eval", "stop"))
    (True, True)
    """
    if path[-2:] in NESTED_KEY_TYPES:
        return NESTED_KEY_TYPES[path[-2:]]
    for place in range(1, len(path) - 1):  # a mapping of a section's own fields has the types of the section
        if path[place] in getattr(section_at(cls, path[:place]), "OVERRIDES", ()):
            return types_at(cls, (*path[:place], *path[place + 1 :]))
    owner = section_at(cls, path[:-1]) if path[1:] else cls
    if owner is None or path[-1] not in _hints(owner):
        return ()
    kinds = _members(_hints(owner)[path[-1]])
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is tuple:
        kinds += _members(typing.get_args(kinds[0])[0])
    return kinds


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def type_text(cls: type, name: str) -> str:
    """A field's type, as help and messages show it.

    >>> from whet.config import OptimConfig
    >>> type_text(OptimConfig, "total_steps")
    'positive int | None'
    """
    text = next(f.type for f in dataclasses.fields(cls) if f.name == name)  # pyright: ignore[reportArgumentType]
    tree = ast.parse(str(text), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = TYPE_NAMES.get(node.id, node.id)
    return re.sub(r"InstanceOf\[(\w+)\]", r"\1", ast.unparse(tree))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field, inherited fields included.

    Args: cls: a configuration class.
    Returns: field -> text. If several classes define a field, the text of the most derived one.

    >>> from whet.config import OptimConfig
    >>> field_docs(OptimConfig)["warmup_steps"]
    'Updates over which the rate rises from 0. 0 = off.'
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # pyright: ignore
        for field, under in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = inspect.cleandoc(ast.literal_eval(under.value))
    return docs


def choices(cls: type, name: str) -> Mapping[str, str]:
    """The names that a field accepts, with when to choose each: from CHOICES of the class or its bases.

    >>> from whet.config import GRPOConfig
    >>> choices(GRPOConfig, "advantage_estimator")["rloo"]
    'it compares with the mean of the others, which is unbiased, also in small groups'
    """
    for base in cls.__mro__:
        if name in (known := vars(base).get("CHOICES", {})):
            return known[name]
    return {}


def leaves(cls: type, optional: bool = False, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], type]]:
    """Every dotted key below a class.

    Args: cls: a configuration class. optional: also the keys of sections that are None by default.
        prefix: put before each key.
    Returns: (key, field, class that has the field), in order.
    """
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        section = section_at(cls, (field.name,))
        if section and (optional or field.default_factory is section):
            yield from leaves(section, optional, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, cls
