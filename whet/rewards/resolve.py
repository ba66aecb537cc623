"""Resolves reward functions from names and references, and chooses their names in metrics."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.config.rewards import REWARD_MODEL
from whet.errors import ConfigError, nearest
from whet.rewards.call import RewardFn, function_name
from whet.rewards.conversation import batch_conversation_function, is_conversation_function
from whet.rewards.library import REWARDS
from whet.rewards.maths import check_math_verify, math_match
from whet.util.references import is_ref, resolve_name

__all__ = ["as_list", "resolve_reward", "resolve_rewards", "with_reward_model"]


def as_list(reward_fns: Any) -> list[Any]:
    """Converts one reward function, several, or None to a list.

    >>> as_list("exact_match"), as_list(None)
    (['exact_match'], [])
    """
    return [reward_fns] if isinstance(reward_fns, str) or callable(reward_fns) else list(reward_fns or ())


def with_reward_model(reward_fns: Any, model: RewardFn) -> list[Any]:
    """Adds a reward model to reward functions, in place of "reward_model" or at the end.

    >>> with_reward_model(["reward_model", "boxed"], len), with_reward_model("boxed", len)
    ([<built-in function len>, 'boxed'], ['boxed', <built-in function len>])
    """
    fns = as_list(reward_fns)
    return [model if fn == REWARD_MODEL else fn for fn in fns] + ([] if REWARD_MODEL in fns else [model])


def resolve_reward(ref: Any) -> RewardFn:
    """Resolves a reward function; fn(messages, answer) becomes a function of a batch.

    Args: ref: a callable, a name in REWARDS, "package.module:name" or "file.py:name".
    Raises: ConfigError: an unknown name, an object that can't be called, wrong bound arguments, or math-verify is
        needed and not installed.

    >>> resolve_reward("exact_match").__name__
    'exact_match'
    """
    if isinstance(ref, str) and ref not in REWARDS and not is_ref(ref) and ("/" in ref or Path(ref).is_dir()):
        raise ConfigError(
            f"unknown reward function {ref!r}; if it is a reward model, give it as reward_model.model={ref}"
        )
    fn = resolve_name(ref, REWARDS, "reward function")
    _check_bound(fn)
    if fn is math_match:
        check_math_verify()
    return batch_conversation_function(fn) if is_conversation_function(fn) else fn


def resolve_rewards(refs: Sequence[Any]) -> dict[str, RewardFn]:
    """Reward functions by name. If several have the same name, the second is name_2, the third name_3.

    Args: refs: each as resolve_reward takes it.
    Raises: ConfigError: as resolve_reward does.

    >>> list(resolve_rewards(["exact_match", "exact_match"]))
    ['exact_match', 'exact_match_2']
    """
    named: dict[str, RewardFn] = {}
    for ref in refs:
        fn = resolve_reward(ref)
        name = base = _name(ref, fn)
        count = 1
        while name in named:
            count += 1
            name = f"{base}_{count}"
        named[name] = fn
    return named


def _name(ref: Any, fn: RewardFn) -> str:
    """Returns a function's name. A partial, lambda or object from a reference has the name in the reference."""
    is_named = inspect.isroutine(fn) or inspect.isclass(fn)  # Python 3.14: a partial is a routine without a name
    has_name = is_named and getattr(fn, "__name__", "").isidentifier()
    return function_name(fn) if has_name or not (isinstance(ref, str) and is_ref(ref)) else re.split("[.:]", ref)[-1]


def _check_bound(fn: Any) -> None:
    """Raises ConfigError for a wrong argument that functools.partial has bound to one of whet's rewards.

    The function is called without completions, which costs nothing and raises the errors of the first step.

    >>> _check_bound(functools.partial(REWARDS["number_match"], tol=0.1))
    Traceback (most recent call last):
    whet.errors.ConfigError: reward function number_match has no argument 'tol'. Arguments that can be bound: tolerance
    """
    if not isinstance(fn, functools.partial) or fn.func not in REWARDS.values():
        return
    arguments = inspect.signature(fn.func).parameters
    optional = [word for word, argument in arguments.items() if argument.default is not argument.empty]
    if wrong := next((word for word in fn.keywords if word not in arguments), None):
        raise ConfigError(
            f"reward function {fn.func.__name__} has no argument {wrong!r}{nearest(wrong, optional) or '.'} "
            f"Arguments that can be bound: {', '.join(optional) or 'none'}"
        )
    required = [word for word in arguments if word not in optional]
    if not fn.args and not any(word in fn.keywords for word in required):
        fn(**{word: [] for word in required})
