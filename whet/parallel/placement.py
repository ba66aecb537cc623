"""Where a model's tensors lie while it trains, scores and rolls out: behind the worker, by composition.

A ModelWorker says what is computed; its Placement says where the weights are at that moment and which process computes
which part. Learners and losses know neither.

    Placement             one process, everything on the model's device: nothing moves
    OffloadPlacement      train/offload.py: what nothing needs lies on the host
    FSDPPlacement         parallel/fsdp.py: parameters, gradients and moments in parts over several processes

Dim letters: S tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from whet.parallel.ranks import Ranks

__all__ = ["Phase", "Placement", "Trained"]

Phase = Literal["read", "backward", "step", "save", "load", "export"]
"""What a worker does: scores, adds gradients, steps, writes a checkpoint, restores one, writes the model."""
Result = TypeVar("Result")


class Trained(Protocol):
    """What a placement knows of an optimizer: see train.optim.Optim."""

    params: dict[str, Any]
    masters: dict[str, Tensor]
    optimizer: torch.optim.Optimizer


class Placement:
    """One process, everything on the model's device. Others override what they do differently.

    A worker calls `materialise` before the optimizer is made and `hold` after it, then `during` around each phase.
    """

    fast_layers = True
    """Whether layers may have other forwards: they read parameters as plain tensors where they lie."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        """The processes that train this model."""
        self._module: nn.Module | None = None
        self._trained: Trained | None = None

    def materialise(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Puts parameters where they will be trained. Args: module: whole. dtype: what it is to compute in."""

    def hold(self, module: nn.Module, trained: Trained | None) -> None:
        """Takes charge of a model. Args: module: its own. trained: its optimizer; None = it is only read."""
        self._module, self._trained = module, trained

    def release(self) -> None:
        """Lets go of the optimizer's tensors."""
        self._trained = None

    @property
    def module(self) -> nn.Module:
        """The model."""
        assert self._module is not None, "a placement holds a model once its worker is made"
        return self._module

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.module.parameters()).device

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        """Around a phase: what it needs is where it computes."""
        return nullcontext()

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """Inside, the model's parameters are plain tensors in the dtype that it computes in: what engines read."""
        yield self.module

    # ---- several processes ---------------------------------------------------------------------------------------

    def forward(self, fn: Callable[[], Result]) -> Result:
        """Runs what calls the model or reads its parameters. Args: fn: returns a TokenStats."""
        return fn()

    def share(self, passes: Sequence[Result]) -> list[tuple[Result, bool]]:
        """This process's part of the forward passes of a batch.

        Returns: of each, whether it counts: where a rank has fewer, it repeats one that must weigh nothing.
        """
        return [(x, True) for x in passes]

    def sync(self, last: bool) -> None:
        """Before a pass with a gradient. Args: last: gradients are added over the processes after this one."""

    def gather(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns [S] that each process has filled at its own tokens, 0 elsewhere; whole on every one."""
        return dict(columns)

    def in_order(self, found: list[Result]) -> list[Result]:
        """What each of this process's counting passes gave; that of all passes, in their order, on every process."""
        return found

    def norm(self, grads: Sequence[Tensor], local: Callable[[Sequence[Tensor]], float]) -> float:
        """The norm of the whole gradient. Args: grads: as they lie here. local: the norm of plain tensors."""
        return local(grads)
