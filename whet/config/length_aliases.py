"""The names of the length limit of a completion. Each is accepted wherever the limit is set.

Tunix calls it max_tokens_to_generate in a configuration, max_generation_steps in a call and max_response_length in the
penalty of overlong completions; engines call it max_tokens. The limit of a prompt has one name, max_prompt_length.
Left out on purpose: the names of other libraries (whet.config.synonyms), and data.max_length and max_episode_tokens,
which are other lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pydantic_core import ArgsKwargs

from whet.errors import ConfigError

__all__ = ["COMPLETION", "accepts_length_aliases", "length_shorthands", "resolve_length_alias"]

P = ParamSpec("P")
R = TypeVar("R")

COMPLETION = ("max_tokens_to_generate", "max_tokens", "max_generation_steps", "max_response_length")
"""Names of the longest completion, in tokens, stop token included."""
PROMPT = "max_prompt_length"


def resolve_length_alias(given: Any, own: str) -> Any:
    """The arguments of a configuration or a call, with the length limit under its own name there.

    Args: given: a mapping, or pydantic's arguments; anything else stays as it is. own: one of COMPLETION.
    Raises: ConfigError: the length is given under two names.

    >>> resolve_length_alias({"max_tokens": 8, "top_k": 1}, "max_tokens_to_generate")
    {'max_tokens_to_generate': 8, 'top_k': 1}
    """
    words = given.kwargs if isinstance(given, ArgsKwargs) else given
    if not isinstance(words, Mapping):
        return given
    names = [name for name in COMPLETION if name in words]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are the same length; give {own} alone")
    if names in ([], [own]):
        return given
    found = {own if key in names else key: value for key, value in words.items()}
    return ArgsKwargs((), found) if isinstance(given, ArgsKwargs) else found


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


def length_shorthands(own: str, prompt: str = PROMPT) -> dict[str, str]:
    """The shorthands of a command for its lengths: every name, with and without the section rollout.

    Args: own, prompt: the full keys of the longest completion and the longest prompt; prompt "" = none.

    >>> made = length_shorthands("max_tokens")
    >>> made["rollout.max_tokens_to_generate"], made["rollout.max_prompt_length"]
    ('max_tokens', 'max_prompt_length')
    """
    places = {f"{section}{name}": own for section in ("", "rollout.") for name in COMPLETION}
    if own.startswith("rollout."):
        places |= {f"rollout.eval.{name}": "rollout.eval.max_tokens_to_generate" for name in COMPLETION}
    if prompt:
        places |= {PROMPT: prompt, f"rollout.{PROMPT}": prompt}
    return {name: full for name, full in places.items() if name != full}
