"""What a loss that compares whole distributions asks a worker for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from whet.models.loaded_model import LoadedModel
from whet.parallel.placement import Placement

__all__ = ["Divergence", "Teacher", "read_by"]


class Teacher(Protocol):
    """What is asked of a teacher; a ModelWorker is one."""

    loaded: LoadedModel
    placement: Placement

    def layers(self) -> AbstractContextManager[None]:
        """Around forward passes."""
        ...


@dataclass(frozen=True)
class Divergence:
    """What a loss that compares whole distributions asks for: x.divergence, from a teacher's.

    The teacher runs the trained model's own micro-batches, without a gradient: its states of a whole batch are never
    held. It needs as wide a token budget as that has, and to be packable where that is.

    Example: worker.forward_backward(batch, loss, divergence=Divergence(teacher, gkd_beta=0.5)).
    """

    teacher: Teacher
    """A worker that is only read."""
    gkd_beta: float = 0.5
    """β: 0 the forward KL, 1 the reverse KL; see ops.generalized_jsd."""


def read_by(divergence: Divergence | None) -> AbstractContextManager[None]:
    """Around passes that read a teacher: its weights are where it computes."""
    return nullcontext() if divergence is None else divergence.teacher.placement.during("read")
