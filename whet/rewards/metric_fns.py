"""Calls a user's metric functions on a batch.

    fn(prompts=, completions=, advantages=, rewards=, **columns) -> {name: (value, aggregation)}

As for reward functions, a function receives copies of the arguments of its signature, or of all with **kwargs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import RewardError, format_exception, format_value
from whet.rewards.call import RewardInputs, copy_argument, function_name, select_keywords

__all__ = ["aggregate_metrics", "call_metric_fns"]


def call_metric_fns(
    fns: Sequence[Callable[..., Any]], inputs: RewardInputs, *, advantages: Any, rewards: Any
) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
    """Calls metric functions on a batch of N trajectories.

    Args:
        fns: the functions, called one after the other.
        inputs: the arguments of reward functions.
        advantages: one per trajectory, or one per token; NaN if no token is trained.
        rewards: one per trajectory; NaN if no reward function applied.

    Returns:
        name -> (value, aggregation): the aggregation reduces the values of a step (e.g. numpy.mean); None = no
            reduction.

    Raises:
        ConfigError: a function needs an argument that is not available. RewardError: a function raised, returned
            another form, or a metric with the name of another function's.

    >>> x = RewardInputs(prompts=["a"], completions=["b"], completion_ids=[[98]], trajectory_ids=["0_0"])
    >>> call_metric_fns([lambda rewards, **kw: {"best": (max(rewards), max)}], x, advantages=[0.0], rewards=[1.0])
    {'best': (1.0, <built-in function max>)}
    """
    offered = {**inputs.keywords(), "advantages": advantages, "rewards": rewards}
    metrics: dict[str, tuple[Any, Callable[..., Any] | None]] = {}
    for fn in fns:
        name = function_name(fn)
        arguments = select_keywords(fn, offered, {}, name=name, kind="metric function")
        try:
            returned = fn(**{word: copy_argument(value) for word, value in arguments.items()})
        except KeyboardInterrupt:  # on the caller's thread it is the user's
            raise
        except BaseException as error:
            raise RewardError(f"metric function {name} raised {format_exception(error)}") from error
        if not isinstance(returned, Mapping):
            raise RewardError(
                f"metric function {name} returned {type(returned).__name__}; return {{name: (value, np.mean)}}"
            )
        for key, pair in returned.items():
            if problem := _problem(key, pair):
                raise RewardError(f"metric function {name} returned {problem}")
            if key in metrics:
                raise RewardError(f"metric {key!r} comes from two functions, the second {name}; rename one")
            metrics[key] = pair
    return metrics


def aggregate_metrics(metrics: Mapping[str, tuple[Any, Callable[..., Any] | None]]) -> dict[str, float]:
    """Reduces metrics, name -> (value, aggregation), to numbers; those without an aggregation are left out.

    >>> aggregate_metrics({"reward": ([1.0, 0.0], np.mean), "note": ("hi", None)})
    {'reward': 0.5}
    """
    return {
        name: float(how(np.ravel(np.asarray(value, dtype=np.float64)).tolist()))
        for name, (value, how) in metrics.items()
        if how is not None
    }


def _problem(key: Any, pair: Any) -> str | None:
    """Returns the problem with a metric; None = no problem."""
    if not isinstance(key, str):
        return f"the name {format_value(key)}; names are texts"
    if not isinstance(pair, tuple) or len(pair) != 2 or not (pair[1] is None or callable(pair[1])):
        return (
            f"{format_value(pair)} for {key!r}; give (value, aggregation), the aggregation a function such as "
            "numpy.mean, or None"
        )
    if pair[1] is not None and not _is_numeric(pair[0]):
        return (
            f"{format_value(pair[0])} for {key!r}, which an aggregation can't reduce; give a number or a list of "
            "numbers, or None instead of the aggregation"
        )
    return None


def _is_numeric(value: Any) -> bool:
    """Returns whether aggregate_metrics can convert a value to numbers."""
    try:
        np.asarray(value, dtype=np.float64)
    except Exception:  # a value's own methods may raise anything
        return False
    return True
