"""Where a model's tensors lie while it trains, scores and generates.

A ModelWorker defines what is computed. Its Placement decides where the weights are at each moment, and which process
computes which part. Learners and losses know neither.

    Placement             one process, everything on the model's device: nothing moves
    OffloadPlacement      train/offload.py: tensors that the current phase does not need lie on the host
    FSDPPlacement         parallel/fsdp.py: parameters, gradients and moments are sharded over several processes

Dim legend: S tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from whet.models.fast_layers import FastLayers

if TYPE_CHECKING:
    from whet.packing.micro_batch import MicroBatch
    from whet.train.optimizer import Optim
    from whet.types import TokenStats

__all__ = ["Phase", "Placement"]

Phase = Literal["read", "backward", "step", "save", "load", "export"]
"""What a worker does: it scores, adds gradients, steps, writes a checkpoint, restores one, exports the model."""
Result = TypeVar("Result")


class Placement:
    """One process, everything on the model's device. Subclasses override what they do differently.

    A worker calls `prepare` before it makes the optimizer and `attach` after that, then `during` around each phase.
    """

    offloads = False
    """Whether an optimizer's state lies on the host while passes run."""
    repeats_passes = True
    """Whether an update may start again with other passes, which several processes would have to agree on."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._optim: Optim | None = None

    def prepare(self, module: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
        """Puts parameters where they will be trained.

        Args: module: the whole model. dtype: that it will compute in; None = its own.
        Returns: the dtype that the parameters are still to be cast to; None = they stay as they are.
        """
        return dtype

    def find_fast_layers(self, module: nn.Module) -> FastLayers:
        """Returns whet's own forwards of a model that is prepared; all processes find the same."""
        return FastLayers(module)

    def attach(self, module: nn.Module, optim: Optim | None) -> None:
        """Takes charge of a model. Args: module: the model. optim: its optimizer; None = it is not trained."""
        self._module, self._optim = module, optim

    def release(self) -> None:
        """Drops the references to the optimizer's tensors."""
        self._optim = None

    @property
    def module(self) -> nn.Module:
        """The model."""
        assert self._module is not None, "a placement holds a model once its worker is made"
        return self._module

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return next(self.module.parameters()).dtype

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        """Returns a context for a phase: the tensors that it needs are on the device that computes."""
        return nullcontext()

    @contextmanager
    def weights(self, *, parts: bool = False) -> Iterator[nn.Module]:
        """Returns a context for engines: the model's parameters are plain tensors in the dtype that it computes in.

        Args: parts: where processes divide its matrices, each has its part of them, and they run the model together;
            otherwise each has the whole model.
        """
        yield self.module

    @contextmanager
    def whole_module(self) -> Iterator[nn.Module]:
        """Returns a context for files: the module with all of its weights. Where the model is sharded, rank 0 has a
        copy with the optimizer's fp32 masters on the CPU, and the other ranks a module without weights.
        """
        yield self.module

    # ---- several processes ---------------------------------------------------------------------------------------

    def call_on_writer(self, fn: Callable[[], Result]) -> Result:
        """Calls a function that writes files, in the one process that writes; the others wait for it."""
        return fn()

    def reshard(self) -> None:
        """Leaves this process its shards only, if the model is sharded."""

    @property
    def data_size(self) -> int:
        """The number of processes, or of groups that run a pass together, which run different passes."""
        return 1

    @property
    def pass_size(self) -> int:
        """The number of processes that run a pass together."""
        return 1

    def forward(self, fn: Callable[[], Result]) -> Result:
        """Runs a function that calls the model or reads its parameters. Args: fn: returns a TokenStats."""
        return fn()

    def split_passes(self, passes: Sequence[Result]) -> list[tuple[Result, bool]]:
        """This process's part of the forward passes of a batch.

        Returns: each pass, and whether it counts. A rank with fewer passes repeats one, which must have weight 0.
        """
        return [(x, True) for x in passes]

    def split_tokens(self, micro: MicroBatch) -> MicroBatch:
        """This process's part of a pass. Args: micro: a pass that it runs, alone or together with others."""
        return micro

    def gather_tokens(self, stats: TokenStats, micro: MicroBatch) -> TokenStats:
        """Returns the statistics of all targets of a pass. Args: stats: of this process's part. micro: that part."""
        return stats

    def check_same_passes(self, facts: Mapping[str, Any]) -> None:
        """Raises WhetError if the processes are about to run different passes. Args: facts: of this process's batch."""

    def set_gradient_sync(self, last: bool) -> None:
        """Called before each pass with a gradient. Args: last: gradients are summed over the processes after it."""

    def gather_columns(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds up columns [S] that each process has filled at its own tokens, with 0 at the others."""
        return dict(columns)

    def gather_results(self, results: list[Result]) -> list[Result]:
        """Returns the results of all passes, in order, on every process. Args: results: of this process's passes that
        count.
        """
        return results

    def grad_norm(self, grads: Sequence[Tensor], local: Callable[[Sequence[Tensor]], float]) -> float:
        """Returns the norm of the whole gradient. Args: grads: of this process. local: computes the norm of plain
        tensors.
        """
        return local(grads)
