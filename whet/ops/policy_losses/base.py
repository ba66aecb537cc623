"""The return value of policy losses, and their declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

__all__ = ["compares_with_teacher", "metrics_without_advantage", "teacher_column", "zero_without_advantage"]

LossOutput = tuple[Tensor, dict[str, Tensor]]
"""(loss [s], {metric: [s]})."""
LossFn = TypeVar("LossFn", bound=Callable[..., Any])

_OF_RATIOS = ("cispo_clip_ratio", "clip_ratio/high", "clip_ratio/low", "clip_ratio/region")
"""Metrics that count ratios: where a ratio is a sequence's, sequences are counted and not tokens."""


def zero_without_advantage(*metrics: str) -> Callable[[LossFn], LossFn]:
    """Declares that a policy loss has no gradient where the advantage is 0, and that these metrics are 0 there.

    The learner then skips sequences without an advantage, and counts their tokens in the means of these metrics.
    Args: metrics: names, as the loss returns them.
    Returns: a decorator that marks the loss and returns it.

    >>> @zero_without_advantage("far")
    ... def own(x):
    ...     return -x.need("advantages") * x.logprobs, {"far": (x.logprobs < -5) & (x.advantages > 0)}
    >>> metrics_without_advantage(own), metrics_without_advantage(print)
    (('far',), None)
    """

    def declare(loss: LossFn) -> LossFn:
        loss.zero_without_advantage = metrics  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    return declare


def metrics_without_advantage(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """The metrics that a loss has declared by zero_without_advantage; None = it declares nothing.

    A partial has the declaration of its function, with the names of clip metrics at the level that it binds.

    >>> @zero_without_advantage("clip_ratio/high")
    ... def own(x, *, importance_sampling_level="token"): ...
    >>> metrics_without_advantage(partial(own, importance_sampling_level="sequence"))
    ('sequence_clip_ratio/high',)
    """
    level = None
    while not hasattr(loss, "zero_without_advantage") and isinstance(loss, partial):
        level = level or loss.keywords.get("importance_sampling_level")
        loss = loss.func
    declared = getattr(loss, "zero_without_advantage", None)
    return declared if declared is None else tuple(name_metrics_by_level(dict.fromkeys(declared), level or "token"))


def compares_with_teacher(column: Literal["teacher_logprobs", "divergence"]) -> Callable[[LossFn], LossFn]:
    """Declares that a policy loss needs a column from a teacher. The learner then computes it.

    Args: column: "teacher_logprobs" [s], of the tokens; or "divergence" [s], from the teacher's distribution before
        each token, with gradient.
    Returns: a decorator that marks the loss and returns it.

    >>> @compares_with_teacher("teacher_logprobs")
    ... def own(x):
    ...     return (x.logprobs - x.need("teacher_logprobs")).square()
    >>> teacher_column(partial(own)), teacher_column(print)
    ('teacher_logprobs', None)
    """

    def declare(loss: LossFn) -> LossFn:
        loss.teacher_column = column  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    return declare


def teacher_column(loss: Callable[..., Any]) -> str | None:
    """The column that a loss, or a partial's function, has declared by compares_with_teacher; None = no teacher.

    >>> teacher_column(compares_with_teacher("divergence")(lambda x: x.divergence))
    'divergence'
    """
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "teacher_column", None)


def name_metrics_by_level(metrics: Mapping[str, Any], level: str) -> dict[str, Any]:
    """The metrics; those that count ratios are renamed if ratios are of sequences: sequence_clip_ratio/high."""
    whole = level != "token"
    return {f"sequence_{name}" if whole and name in _OF_RATIOS else name: value for name, value in metrics.items()}


def output(loss: Tensor, metrics: Mapping[str, Tensor]) -> LossOutput:
    """A loss and its metrics, with pg_loss, the loss itself: detached, in the loss's dtype."""
    named = {**metrics, "pg_loss": loss}
    return loss, {name: value.detach().to(loss.dtype) for name, value in named.items()}
