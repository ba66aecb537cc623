"""Divergence: a request for x.divergence, of losses that compare whole distributions with a teacher's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.train.worker import ModelWorker

__all__ = ["Divergence", "teacher_on_device"]


@dataclass(frozen=True)
class Divergence:
    """A request for x.divergence from a teacher's distributions, for a loss.

    The teacher runs the trained model's own micro-batches, without a gradient, so its states of a whole batch are never
    in memory. It needs the same token budget, and must be packable if the trained model is.

    Example: worker.forward_backward(batch, loss, divergence=Divergence(teacher, gkd_beta=0.5)).
    """

    teacher: ModelWorker
    """A worker that is not trained."""
    gkd_beta: float = 0.5
    """β: 0 the forward KL, 1 the reverse KL; see ops.generalized_jsd."""


def teacher_on_device(divergence: Divergence | None) -> AbstractContextManager[None]:
    """A context for passes that read a teacher: its weights are on the device that computes."""
    return nullcontext() if divergence is None else divergence.teacher.placement.during("read")
