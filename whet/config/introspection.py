"""What a configuration class declares: its keys, their types, their docstrings and the names that they accept."""

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
from collections.abc import Iterator, Mapping
from typing import Any

from whet.config.fields import TYPE_NAMES

__all__ = [
    "choices",
    "field_docs",
    "field_types",
    "leaves",
    "section_at",
    "type_text",
    "types_at",
    "union_members",
]


def section_at(cls: type, path: tuple[str, ...]) -> Any:
    """Returns the configuration class at a path of keys; None if there is none.

    >>> from whet.config import TrainingConfig
    >>> section_at(TrainingConfig, ("checkpointing_options",)).__name__
    'CheckpointingOptions'
    """
    kind: Any = cls
    for part in path:
        if dataclasses.is_dataclass(kind):
            kind = field_types(kind).get(part)
        else:
            kind = next((a[1] for a in map(typing.get_args, union_members(kind)) if len(a) == 2), None)
        kind = next((m for m in union_members(kind) if dataclasses.is_dataclass(m)), kind)
    return kind if dataclasses.is_dataclass(kind) else None


NESTED_KEY_TYPES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("chat_template_kwargs", "chat_template"): (str, type(None))
}
"""Types of keys inside mappings of arguments for other libraries, by the last two names of their path."""


def types_at(cls: type, path: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the types that a key accepts, with those of a list's items if a single item counts as a list; () if there
    is no such key.

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
    if owner is None or path[-1] not in field_types(owner):
        return ()
    kinds = union_members(field_types(owner)[path[-1]])
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is tuple:
        kinds += union_members(typing.get_args(kinds[0])[0])
    return kinds


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the resolved type of each field of a class."""
    return typing.get_type_hints(cls)


def union_members(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union. Another type is returned as its only member.

    >>> union_members(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def type_text(cls: type, name: str) -> str:
    """Returns a field's type, as help and messages show it.

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
    """Returns the docstring under each field, inherited fields included.

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
    """Returns the names that a field accepts, with when to choose each: from CHOICES of the class or its bases.

    >>> from whet.config import GRPOConfig
    >>> choices(GRPOConfig, "advantage_estimator")["rloo"]
    'it compares with the mean of the others, which is unbiased, also in small groups'
    """
    for base in cls.__mro__:
        if name in (known := vars(base).get("CHOICES", {})):
            return known[name]
    return {}


def leaves(cls: type, optional: bool = False, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], type]]:
    """Yields every dotted key below a class.

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
