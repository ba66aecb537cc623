"""The errors of a configuration: unknown keys with the nearest match, missing keys, and values of a wrong type.

pydantic's ValidationError becomes a ConfigError with one line for each key that the user wrote. A key of another
library is answered with whet's key for it (whet.config.synonyms).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from whet.config.introspection import field_types, leaves, section_at, type_text
from whet.config.synonyms import NOTES, SYNONYMS, find_owner, find_synonym, leaf_paths
from whet.errors import ConfigError, format_value, nearest

__all__ = ["to_config_error", "written_path"]

_EXPECTED = {
    "dict_type": "expected keys with their values, {key: value}",
    "list_type": "expected a list, [a, b]",
    "string_type": "expected text",
    "tuple_type": "expected a list, [a, b]",
}
"""Error type of pydantic -> whet's message."""
_LIKELY_FIELDS = {True: ("preset", "model", "path", "name", "log_dir", "metric"), False: ("lr", "r", "temperature")}
"""Whether a value is text -> the fields of a section that the user probably meant by it."""


def to_config_error(
    cls: type, error: ValidationError, value: Any, *, root: str = "", short: Mapping[str, str] | None = None
) -> ConfigError:
    """Returns a ConfigError from pydantic's ValidationError: one line per path, and of a union only the deepest error.

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
    >>> from whet.config.base import adapter
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

    `written_path` keeps the keys that the user wrote: ("actor_optimizer", "lrr"), and ("actor_optimizer",) twice. The
    first is the deepest, and `_error_line` makes the message from it:

    >>> print(to_config_error(RLTrainingConfig, found, value))
    unknown key actor_optimizer.lrr; did you mean actor_optimizer.lr?
    """
    items_by_path: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors(include_url=False):
        items_by_path.setdefault(written_path(cls, item["loc"], value), []).append(item)
    lines = [
        _error_line(cls, path, items, root, short or {})
        for path, items in items_by_path.items()
        if not any(len(other) > len(path) and other[: len(path)] == path for other in items_by_path)
    ]
    return ConfigError("\n".join(lines))


def written_path(cls: type, loc: tuple[Any, ...], value: Any) -> tuple[str, ...]:
    """Returns the keys in pydantic's location that the user wrote, without the members of unions."""
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
        length = len(typing.get_args(field_types(owner)[path[-1]]))
        return f"{key}: expected {length} values, got {len(first['input'])}: {format_value(first['input'])}"
    messages = dict.fromkeys(
        _EXPECTED.get(item["type"]) or f"{item['msg'][0].lower()}{item['msg'][1:]}" for item in items
    )
    fix = _suggest_fix(first["input"], first["type"], key.split(".")[-1])
    return f"{key}: {'; '.join(messages)}, got {format_value(first['input'])}{fix}"


def _not_a_section(section: type, key: str, root: str, value: Any) -> str:
    """Returns the message about a value in place of a section."""
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
    """Returns the hint for a None that a field does not accept: its default; "" if it has none."""
    field = next((f for f in dataclasses.fields(section) if path and f.name == path[-1]), None) if section else None
    if field is None or not isinstance(field.default, str | int | float):
        return ""
    return f"; leave it out for its default, {field.default!r}"


def _suggest_fix(value: Any, kind: str, name: str = "") -> str:
    """Returns the fix for a common mistake in a value; "" if it is none. Args: name: of its field."""
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
    """Returns a section's own message with the path of its key. If the message begins with a field, the path ends with
    it.

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
    """Returns the message about an unknown keyword (from Python) or key, with its name in whet or the nearest match."""
    section = section_at(cls, path[:-1])
    refused = _refused(section) if section else {}
    for name in (path[-1], *(target.rpartition(".")[2] for target in SYNONYMS.get(path[-1], ()))):
        if name in refused:
            return f"{key}: {refused[name]}"
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
    if not near and hasattr(cls, "COMMAND"):
        near = f"; `whet {cls.COMMAND} --help {'.'.join(path[:-1]) if inside and path[1:] else 'all'}` lists the keys"
    return f"unknown key {key}{near}"


def _synonym_hint(path: tuple[str, ...], known: Collection[str]) -> str:
    """Returns the hint about a key of another library; "" if no table has it."""
    if (hint := find_synonym(path, known)) is not None:
        return f"; did you mean {hint}?"
    return f": {NOTES[path[-1]]}" if path[-1] in NOTES else ""


@functools.cache
def _keys(cls: type) -> tuple[str, ...]:
    """Returns every dotted key below a class."""
    return tuple(key for key, *_ in leaves(cls, True))
