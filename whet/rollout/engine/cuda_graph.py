"""Decode steps of fixed shape, so that a CUDA graph of one can be replayed: launches cost nothing then.

A step is captured per bucket of rows; rows beyond the live ones are padding, whose state is zero and whose draws nobody
reads. Whatever a step reads lies at a fixed address; where an address changes (a store has grown), a new graph is
captured and the old ones are forgotten. On a CPU nothing is captured, and the same steps run one by one.
Left out on purpose: capture over several plans, with penalties or truncation: those steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

__all__ = ["FixedTensors", "StepGraphs", "bucket_rows"]

CAPTURED = 32
"""Graphs kept at most."""


def bucket_rows(count: int, most: int) -> int:
    """Rows that a step of `count` live rows is run with: a power of two up to 16, then a multiple of 16.

    Args: count: live rows. most: never more than these.
    Returns: count or a little more.

    >>> bucket_rows(3, 256), bucket_rows(17, 256), bucket_rows(17, 20)
    (4, 32, 20)
    """
    return min(most, 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16)


class FixedTensors:
    """Tensors that change their content and keep their address, as long as they keep their shape.

    >>> fixed = FixedTensors()
    >>> a = fixed.keep("x", torch.tensor([1, 2]))
    >>> b = fixed.keep("x", torch.tensor([3, 4]))
    >>> a is b, a, fixed.epoch
    (True, tensor([3, 4]), 1)
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}
        self.epoch = 0
        """Rises when an address changes."""

    def keep(self, key: Hashable, value: Tensor) -> Tensor:
        """The tensor of this key, with this content."""
        old = self._kept.get(key)
        if old is None or old.shape != value.shape or old.dtype != value.dtype or old.device != value.device:
            self._kept[key] = value
            self.epoch += 1
            return value
        return old.copy_(value)


class StepGraphs:
    """Steps by key: the first of a key runs eagerly and warms up, the second is captured, the others are replayed.

    Args: device: CUDA, or any other, where every step runs eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._epoch: Hashable = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]] | None] = {}
        self._pool = None

    def step(self, key: Hashable, epoch: Hashable, body: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Runs a step.

        Args: key: of its shapes and choices. epoch: of the addresses it reads; a new one forgets all graphs.
            body: the step; it must do the same work at the same addresses whenever key and epoch are the same.
        Returns: what the body returned; overwritten by the next replay of this key, so take a copy.
        """
        if not self._captures:
            return body()
        if epoch != self._epoch or (len(self._graphs) >= CAPTURED and key not in self._graphs):
            self._graphs.clear()
            self._epoch = epoch
        if key not in self._graphs:
            self._graphs[key] = None
            return body()
        made = self._graphs[key]
        if made is None:
            made = self._capture(body)
            self._graphs[key] = made
        made[0].replay()
        return made[1]

    def _capture(self, body: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Captures a step without running it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            out = body()
        return graph, out

    def clear(self) -> None:
        """Forgets all graphs."""
        self._graphs.clear()
