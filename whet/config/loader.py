"""Configuration from YAML files and key=value words, and back.

`load` merges every --config file, then every key=value with or without leading dashes, expands shorthands, and checks
the whole at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

import yaml

from whet.config.base import CALLABLE_TYPES, config_from_dict
from whet.config.fields import MAX_DEPTH
from whet.config.introspection import choices, field_docs, leaves, section_at, type_text, types_at
from whet.config.positional_words import is_config_file, rest_of_value, suggest_key
from whet.config.yaml12 import Dumper, parse, read_text
from whet.errors import ConfigError, format_value
from whet.util.references import is_ref

__all__ = [
    "default_text",
    "diff",
    "dump",
    "dump_tree",
    "flatten",
    "help_text",
    "load",
    "merge",
    "parse_config_args",
    "read_yaml",
    "takes_text",
]

T = TypeVar("T")


YAML_STARTS = ("[", "{", '"', "'")
"""The first characters of a value that is YAML and not text, for a key that accepts both: a list, a mapping, a
quote."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Args: path: the file; an empty one is an empty mapping.
    Raises: ConfigError: no such file, not YAML (or another encoding than UTF-8, a key given twice ...), not a mapping.
    """
    content = parse(read_text(path), str(path), lines=True)
    if content is None:
        return {}
    if not isinstance(content, dict):
        fix = "write `key: value` lines, sections indented below their name"
        if isinstance(content, list):
            fix = "take the dashes away: `key: value` lines, sections indented below their name"
        elif isinstance(content, str) and ":" in content:
            fix = f"a colon that ends a key has a blank behind it, in {format_value(content, 60)}"
        raise ConfigError(f"{path}: a configuration is a mapping of keys, got {type(content).__name__}; {fix}")
    return content


def parse_config_args(
    argv: Sequence[str],
    short: Mapping[str, str] | None = None,
    cls: type | None = None,
    texts: Callable[[Sequence[str], str], bool] | None = None,
) -> dict[str, Any]:
    """Returns the nested dict of command-line arguments: files first, then key=value in order.

    A value is YAML, unless its key takes text: see `takes_text`.

    Args: argv: `--config FILE`, `FILE.yaml`, `key=value`, `--key=value`, `--key value`. short: shorthand -> full key; a
        key that is also a section (`data`) is a shorthand only for a plain value. cls: the class of
        the keys; None = every value is YAML, unless texts(names of the key, its value) is True, which means text.
    Raises: ConfigError: a key without a value, a key given twice (by its shorthand too), a value in place of a section.

    >>> short = {"actor.lr": "actor.optim.lr", "data": "data.path"}
    >>> parse_config_args(["actor.lr=1e-6", "--data", "train.jsonl"], short)
    {'actor': {'optim': {'lr': 1e-06}}, 'data': {'path': 'train.jsonl'}}
    """
    if isinstance(argv, str | Mapping):
        raise ConfigError(
            f"expected a list of words, e.g. ['model=a/b', 'data=rows.jsonl'], got {format_value(argv, 80)}"
        )
    short = short or {}
    files: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    words = iter(enumerate(argv))
    for place, word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if is_config_file(word):
            key, text = "config", word
        elif not equals:
            if not word.startswith("--"):
                raise ConfigError(f"{word!r}: expected key=value or --config FILE{suggest_key(argv, place, short)}")
            _, text = next(words, (0, ""))
            if not text or text.startswith("--"):
                fix = "--config FILE" if key == "config" else f"{key}=VALUE"
                raise ConfigError(f"{key}: no value; write {fix}")
        if key == "config":
            if not text:
                raise ConfigError("config: no file; write --config FILE")
            files = merge(files, _expand(resolve_files(read_yaml(text), Path(text).parent), short))
            continue
        parts = key.replace("-", "_").split(".")
        if "" in parts or len(parts) > MAX_DEPTH:
            raise ConfigError(
                f"{format_value(word, 60)}: expected key=value, where a key is names joined by single dots"
            )
        if cls is not None:
            texts = partial(takes_text, cls, short=short)
        typed = not text or (texts is not None and texts(parts, text))
        node: Any = text if typed else _parse_value(key, text, argv[place + 1 :])
        for part in reversed(parts):
            node = {part: node}
        pairs = merge(pairs, _expand(node, short))
    return merge(files, pairs)


def resolve_files(node: Any, folder: Path) -> Any:
    """Returns a tree in which Python files, also those in references, are paths relative to a folder, if the folder has
    them.

    Args: node: of the tree. folder: of the YAML file that the tree comes from.
    """
    if isinstance(node, Mapping):
        return {resolve_files(key, folder): resolve_files(value, folder) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve_files(value, folder) for value in node]
    place = node.rpartition(":")[0] if isinstance(node, str) and is_ref(node) else node
    if not isinstance(place, str) or not place.endswith(".py") or not (folder / place).is_file():
        return node
    return f"{folder / place}{node[len(place) :]}"


def takes_text(cls: type, key: Sequence[str], text: str, short: Mapping[str, str] | None = None) -> bool:
    """Returns whether the value of an argument is text, taken literally, and not YAML.

    A key that takes only text takes every value literally; an optional key takes `null` as None. If a key takes text or
    something else (a list, a mapping, a section), a value that begins with one of YAML_STARTS is YAML.

    Args: cls: the class of the key. key: the names of the key. text: the value. short: shorthand -> full key.

    >>> from whet.config import RunConfig
    >>> [takes_text(RunConfig, ["data", "system_prompt"], text) for text in ("be: brief # now", "[a]", "null")]
    [True, True, True]
    >>> [takes_text(RunConfig, ["trainer", "run_dir"], text) for text in ("runs/a #1", "null")]
    [True, False]
    >>> [takes_text(RunConfig, ["rollout", "stop"], text) for text in ("# end", '["# end"]')]
    [True, False]
    """
    full = (short or {}).get(".".join(key))
    kinds = types_at(cls, tuple(key if full is None else full.split(".")))
    if str not in kinds:
        return False
    if text == "null" and type(None) in kinds:
        return False
    only_text = {*kinds} <= {str, type(None), *CALLABLE_TYPES, *(kind for kind in kinds if get_origin(kind) is Literal)}
    section = full is not None and section_at(cls, tuple(key)) is not None  # data={path: ...}, where data=FILE is short
    return not text.startswith("{" if only_text and section else () if only_text else YAML_STARTS)


def _parse_value(key: str, text: str, after: Sequence[str]) -> Any:
    """Returns the value of an argument's text. Args: after: the arguments that follow."""
    try:
        return parse(text, key)
    except ConfigError as error:
        raise ConfigError(f"{error}{rest_of_value(key, text, after)}") from None


def load(cls: type[T], argv: Sequence[str], short: Mapping[str, str] | None = None) -> T:
    """Returns a checked configuration from command-line arguments.

    Args: cls: a configuration class. argv, short: see `parse_config_args`.
    Returns: the instance.
    Raises: ConfigError: every problem at once, a line each, with its path and the nearest key.
    """
    return config_from_dict(cls, parse_config_args(argv, short, cls), short=short)


def merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two nested mappings key by key into a new one; the second has precedence.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    both = {k: merge(a[k], v) if isinstance(v, Mapping) and isinstance(a.get(k), Mapping) else v for k, v in b.items()}
    return {**a, **both}


def _expand(values: Mapping[str, Any], short: Mapping[str, str]) -> dict[str, Any]:
    """Moves the values of shorthands to their full keys."""
    full = merge({}, _copied(values))
    for key, target in short.items():
        *parents, name = key.split(".")
        node = _at(full, parents)
        if node is None or name not in node:
            continue
        value = node[name]
        if target.startswith(f"{key}.") and (value is None or isinstance(value, Mapping)):
            continue
        del node[name]
        for depth in range(len(parents), 0, -1):  # a section that had nothing else
            if _at(full, parents[:depth]) == {}:
                del _at(full, parents[: depth - 1])[parents[depth - 1]]  # pyright: ignore[reportOptionalSubscript]
        *parents, name = target.split(".")
        there = _at(full, parents)
        if there is not None and name in there:
            raise ConfigError(f"{key} and {target} are the same key; give it once")
        for part in reversed([*parents, name]):
            value = {part: value}
        full = merge(full, value)
    return full


def _copied(node: Any) -> Any:
    return {k: _copied(v) for k, v in node.items()} if isinstance(node, Mapping) else node


def _at(node: Any, parts: Iterable[str]) -> dict[str, Any] | None:
    for part in parts:
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None


def dump_tree(value: Any) -> Any:
    """Returns a configuration as plain dicts, lists and scalars.

    Args: value: a configuration or anything inside one. A function becomes "module:name", which whet reads back; an
        object becomes the "module:name" of its class, so that no memory address makes two equal runs differ.
    """
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: dump_tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(k): dump_tree(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [dump_tree(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, functools.partial):
        return dump_tree(value.func)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _key(key: Any) -> Any:
    """Returns a key of a mapping, in a form that can be read back."""
    plain = dump_tree(key)
    return plain if plain is None or isinstance(plain, str | bool | int | float) else str(plain)


def dump(config: Any) -> str:
    """Returns a configuration as YAML that `load` reads back to an equal one.

    >>> from whet.config import CheckpointingOptions
    >>> print(dump(CheckpointingOptions(max_to_keep=2)), end="")
    save_interval_steps: null
    save_interval_s: 180.0
    max_to_keep: 2
    sharded: false
    enable_async_checkpointing: false
    """
    return yaml.dump(dump_tree(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of a tree by their dotted keys. Args: node: of the tree. prefix: of its keys, with the dot.

    >>> flatten({"actor": {"lr": 1.0}, "data": {}})
    {'actor.lr': 1.0, 'data': {}}
    """
    if not isinstance(node, Mapping) or not node:
        return {prefix[:-1]: node}
    return {k: v for key, value in node.items() for k, v in flatten(value, f"{prefix}{key}.").items()}


def diff(old: Any, new: Any) -> list[str]:
    """Returns the differences between two configurations.

    Args: old, new: configurations, or the trees that `read_yaml` gives.
    Returns: "key: old -> new", a line per key; a key that one side lacks is "(none)" there.

    >>> from whet.config import OptimConfig
    >>> diff(OptimConfig(), OptimConfig(lr=3e-6))
    ['lr: None -> 3e-06']
    """
    a, b = flatten(dump_tree(old)), flatten(dump_tree(new))
    absent = object()
    say = lambda v: "(none)" if v is absent else repr(v)
    keys = [*a, *(k for k in b if k not in a)]
    return [
        f"{key}: {say(a.get(key, absent))} -> {say(b.get(key, absent))}"
        for key in keys
        if a.get(key, absent) != b.get(key, absent)
    ]


def _one_line(value: Any) -> str:
    return yaml.dump(dump_tree(value), Dumper=Dumper, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def default_text(cls: type, key: str, short: Mapping[str, str] | None = None) -> str:
    """Returns a key's default, as it is written on the command line; "..." if it has none.

    Args: cls: a configuration class. key: dotted, or a shorthand. short: shorthand -> full key.
    Raises: ConfigError: there is no such key.

    >>> from whet.config import OptimConfig
    >>> default_text(OptimConfig, "max_grad_norm"), default_text(OptimConfig, "lr")
    ('1.0', '...')
    """
    key = (short or {}).get(key, key)
    for name, field, _ in itertools.chain(leaves(cls), leaves(cls, optional=True)):
        if name == key:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            return "..." if default is None or default is dataclasses.MISSING else _one_line(default)
    raise ConfigError(f"{cls.__name__} has no key {key!r}")


def help_text(cls: type, short: Mapping[str, str] | None = None, *, hidden: Sequence[str] = (), only: str = "") -> str:
    """Help: every key with its default, its type and its docstring; then the shorthands.

    The keys of a section that is None by default follow it, with the defaults of the section. For a class that was
    listed before, help names the place of that list.

    Args: cls: a configuration class. short: shorthand -> full key. hidden: beginnings of names that are left out.
        only: a key or section: nothing else is shown.
    """
    lines: list[str] = []
    inside = lambda key: not only or key == only or key.startswith(f"{only}.")
    _show(cls, "", lambda key: inside(key) and not key.startswith(tuple(hidden)), {}, lines)
    if short:
        full: dict[str, list[str]] = {}
        for key, target in short.items():
            if inside(target) and not key.startswith("rollout."):
                full.setdefault(target, []).append(key)
        lines += ["", "Shorthands:", *(f"  {', '.join(keys)} = {target}" for target, keys in full.items())]
    return "\n".join(lines)


def _show(cls: type, prefix: str, wanted: Callable[[str], bool], listed: dict[type, str], lines: list[str]) -> None:
    """Adds the lines of a section's keys; `listed` has the prefix under which each class was listed first."""
    for key, field, owner in leaves(cls, prefix=prefix):
        if wanted(key):
            listed.setdefault(owner, key.removesuffix(field.name))
            lines += _lines(key, field, owner)
        section = section_at(owner, (field.name,))
        if section is None or type_text(owner, field.name) != f"{section.__name__} | None":
            continue
        if section not in listed:
            _show(section, f"{key}.", wanted, listed, lines)
        elif wanted(key):
            lines.append(f"      Keys: {key}.* as {listed[section]}* above.")


def _lines(key: str, field: dataclasses.Field[Any], owner: type) -> list[str]:
    """Returns a key with its default and type, its docstring, and what it may be by name."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = "(required)" if default is dataclasses.MISSING else _one_line(default)
    named = choices(owner, field.name)
    width = max(map(len, named), default=0)
    return [
        f"  {key}={text}  ({type_text(owner, field.name)})",
        *(f"      {line}" for line in field_docs(owner).get(field.name, "").splitlines()),
        *(f"        {name:{width}}  {when}" for name, when in named.items()),
    ]
