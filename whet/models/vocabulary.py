"""VocabularyPart: the rows of a head that one of several processes has (Megatron-LM, arXiv 1909.08053, section 3).

    logits          each process computes those of its token ids
    statistics      each process makes those of the softmax over its own ids; those of the whole softmax follow from
                    all of them, a few numbers of each target, which are gathered once a pass
    gradients       a process has that of its own rows; that of the hidden states is summed over the processes

A head that is divided so is a DTensor (parallel/tensor.py). Where a row is needed whole, as for top-k and top-p, the
head's own forward gathers the logits.
Dim legend: s rows (hidden states with a target), V vocabulary, v = V/t ids of one process, t processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whet.util.collectives import change_gradient, summed
from whet.util.tensor_subclasses import is_sharded

__all__ = ["VocabularyPart", "local_rows"]


@dataclass(frozen=True)
class VocabularyPart:
    """The token ids of one process: consecutive ones, and fewer or none on the last processes if t does not divide V.

    Example: 2 processes divide 5 ids into 0, 1, 2 and 3, 4.
    """

    size: int
    """V."""
    group: dist.ProcessGroup
    """The t processes."""

    @staticmethod
    def of(weight: Tensor) -> VocabularyPart | None:
        """Returns the part that a process has of a weight [V D]; None = it has all of it."""
        mesh: Any = getattr(weight, "device_mesh", None)
        return None if mesh is None else VocabularyPart(weight.shape[0], mesh.get_group())

    @property
    def most(self) -> int:
        """The most ids that a process has."""
        return -(-self.size // self.group.size())

    @property
    def ids(self) -> slice:
        """The ids of this process."""
        start = self.group.rank() * self.most
        return slice(min(start, self.size), min(start + self.most, self.size))

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of token ids in this process's part, 0 for ids of others, and which are its own."""
        own = (ids >= self.ids.start) & (ids < self.ids.stop)
        return torch.where(own, ids - self.ids.start, 0), own

    def gather(self, columns: Sequence[Tensor]) -> Tensor:
        """Returns k columns [s] of each process: [k t s]."""
        return torch.stack(_of_each(torch.stack(list(columns)), self.group), 1)

    def log_sum(self, z: Tensor) -> Tensor:
        """Returns the log-sum-exp of all logits from this process's own, [s v] -> [s]."""
        return self.gather([z.logsumexp(1)])[0].logsumexp(0)

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states, whose gradient is then summed over the processes."""
        return change_gradient(hidden, lambda grad: summed(grad, self.group))

    def gather_logits(self, z: Tensor) -> Tensor:
        """Returns all logits from each process's own: [... v] -> [... V]."""
        return _GatherLogits.apply(z, self)


def local_rows(weight: Tensor, ids: slice, is_own: bool) -> Tensor:
    """Returns the rows of some token ids of a head's weight or bias; without a copy where a process has them.

    Args: weight: [V ...]. ids: consecutive. is_own: they are the first ones of this process's part, if it has a part.

    >>> local_rows(torch.ones(4, 2), slice(0, 3), is_own=False).shape
    torch.Size([3, 2])
    """
    whole: Any = weight
    if is_sharded(weight):
        return whole.to_local()[: max(0, ids.stop - ids.start)] if is_own else whole.full_tensor()[ids]
    return weight if ids == slice(0, len(weight)) else weight[ids]


def _of_each(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors of all processes, of one shape."""
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own.contiguous(), group=group)
    return every


class _GatherLogits(torch.autograd.Function):
    """See VocabularyPart.gather_logits. Each process computes the same with the result, and has the same gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, part: VocabularyPart) -> Tensor:
        ctx.part = part
        rows = z.reshape(-1, z.shape[-1])
        every = torch.cat(_of_each(F.pad(rows, (0, part.most - rows.shape[1])), part.group), 1)
        return every[:, : part.size].reshape(*z.shape[:-1], part.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0][..., ctx.part.ids].contiguous(), None
