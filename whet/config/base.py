"""The machinery of configuration classes: frozen, keyword-only, checked, and documented field by field.

A configuration is an ordinary frozen dataclass. pydantic's TypeAdapter checks it, from Python exactly as from YAML:
a wrong keyword raises ConfigError with the nearest match, and a wrong type raises it with the path. whet.config.fields
has the types of fields with their limits, and whet.config.validation_errors the messages.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from whet.config.fields import Fn
from whet.config.validation_errors import to_config_error, written_path
from whet.errors import ConfigError, format_value, nearest

__all__ = [
    "CALLABLE_TYPES",
    "adapter",
    "check_instance",
    "check_keywords",
    "config",
    "config_from_dict",
    "partial_config_from_dict",
]

T = TypeVar("T")
Init = TypeVar("Init", bound=Callable[..., None])
CALLABLE_TYPES = (Fn,)
"""Types of functions. On a command line a function is given by its name, as text."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Returns the decorator of every configuration class: makes it a frozen keyword-only dataclass that checks its
    fields.

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
            raise ConfigError(f"{type(self).__name__} takes keywords only: give each value its name")
        try:
            adapter(type(self)).validator.validate_python(ArgsKwargs((), keywords), self_instance=self)
        except ValidationError as error:
            raise to_config_error(type(self), error, keywords, root=type(self).__name__) from None

    checked.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
    return checked


@functools.cache
def adapter(cls: type) -> TypeAdapter[Any]:
    """Returns the TypeAdapter of a configuration class. It is built at first use, so importing whet.config
    stays fast.
    """
    return TypeAdapter(cls)


def config_from_dict(cls: type[T], tree: Mapping[str, Any], *, short: Mapping[str, str] | None = None) -> T:
    """Returns a configuration from plain nested dicts.

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
    """Returns a configuration from nested dicts, without the keys that `config_from_dict` refuses.

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
            paths = [written_path(cls, item["loc"], known) for item in error.errors(include_url=False)]
        before = known
        for path in sorted(paths, key=len, reverse=True):  # a section after its keys
            known = _without(known, path)
        if known == before:
            return None, frozenset(lacks)
        lacks |= {path[0] for path in paths if path}


def _without(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Returns a tree without the key at a path. If there is no such key, the tree without the first part of the
    path.
    """
    inner = tree.get(path[0]) if path else None
    if len(path) > 1 and isinstance(inner, Mapping) and path[1] in inner:
        return {**tree, path[0]: _without(inner, path[1:])}
    return {key: value for key, value in tree.items() if path[:1] != (str(key),)}


def check_instance(value: Any, cls: type[T], name: str) -> T:
    """Returns the value, if it is an instance of a class. Args: name: in the message. Raises: ConfigError: it is not.

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


def check_keywords(init: Init) -> Init:
    """Returns the decorator of an __init__: an unknown keyword raises ConfigError with the known ones, as in a
    configuration class.

    >>> from whet import Sampler
    >>> Sampler(transfomer="my/model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: unknown keyword Sampler.transfomer; did you mean transformer? Known: ...
    """
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        for word in keywords:
            if word not in known:
                hint = nearest(word, known) or "."
                raise ConfigError(f"unknown keyword {type(self).__name__}.{word}{hint} Known: {', '.join(known)}")
        init(self, *args, **keywords)

    return cast(Init, __init__)
