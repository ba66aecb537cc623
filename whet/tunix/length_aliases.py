"""Tunix's names of the length limit of a completion. Each is accepted wherever whet.tunix takes the limit.

Tunix calls it max_tokens_to_generate in a configuration and max_generation_steps in a call; engines call it max_tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pydantic_core import ArgsKwargs

from whet.errors import ConfigError

__all__ = ["COMPLETION", "accepts_length_aliases", "resolve_length_alias"]

P = ParamSpec("P")
R = TypeVar("R")

COMPLETION = ("max_tokens_to_generate", "max_tokens", "max_generation_steps")
"""Names of the longest completion, in tokens, stop token included."""


def resolve_length_alias(arguments: Any, own: str) -> Any:
    """Returns the arguments of a configuration or a call, with the length limit under its own name there.

    Args: arguments: a mapping, or pydantic's arguments; anything else stays as it is. own: one of COMPLETION.
    Raises: ConfigError: the length is given under two names.

    >>> resolve_length_alias({"max_tokens": 8, "top_k": 1}, "max_tokens_to_generate")
    {'max_tokens_to_generate': 8, 'top_k': 1}
    """
    words = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
    if not isinstance(words, Mapping):
        return arguments
    names = [name for name in COMPLETION if name in words]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are the same length; give only {own}")
    if names in ([], [own]):
        return arguments
    renamed = {own if key in names else key: value for key, value in words.items()}
    return ArgsKwargs((), renamed) if isinstance(arguments, ArgsKwargs) else renamed


def accepts_length_aliases(own: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function take the length under any of its names. Args: own: its name there.

    >>> accepts_length_aliases("max_tokens")(lambda max_tokens: max_tokens)(max_generation_steps=3)  # pyright: ignore
    3
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **resolve_length_alias(kwargs, own))  # pyright: ignore[reportCallIssue]

        return call

    return wrap
