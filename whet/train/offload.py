"""Weights and optimizer state that lie on the host while nothing needs them.

    a model that is only read     its weights     on the device while it scores
    a model that is trained       its masters     on the device from the first backward pass of an update to its end
                                  its moments     on the device during the optimizer's step

What a trained model computes with stays where it is: the engine reads it, and gradients are made from it. A bf16 actor
with AdamW and a bf16 reference so take 2 of their 16 bytes a parameter while they roll out.
The copies are exact. Left out on purpose: moving layer by layer, or while something else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.models.types import LoadedModel
from whet.train.worker import Loss, Metrics, ModelWorker
from whet.types import TokenBatch, TokenStats
from whet.util.experimental import warn_experimental

__all__ = ["Offload", "OffloadedWorker"]

Copy = Callable[[Tensor, torch.device], Tensor]


def copied(tensor: Tensor, place: torch.device) -> Tensor:
    """A copy of a tensor elsewhere; from a GPU to the host into pinned memory, so that both ways are fast."""
    if tensor.is_cuda and place.type == "cpu":
        warn_experimental("offload_to_cpu through pinned memory")
        return torch.empty_like(tensor, device=place, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(place, non_blocking=True, copy=True)


class Offload:
    """Moves the data of tensors between the device that computes and the host; the tensors stay the objects they are.

    Args: device: where tensors are used. host: where they lie otherwise. copy: how one place's data becomes the
        other's; it must not change a bit.

    >>> weight, offload = torch.ones(2), Offload(torch.device("cpu"), "cpu:0")
    >>> offload.out([weight]), offload.held_bytes
    (None, 8)
    >>> offload.back([weight]), offload.held_bytes, weight
    (None, 0, tensor([1., 1.]))
    """

    def __init__(self, device: torch.device, host: torch.device | str = "cpu", *, copy: Copy = copied) -> None:
        self.device, self.host, self.copy = device, torch.device(host), copy
        self._held: dict[int, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that lie on the host now."""
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def out(self, tensors: Iterable[Tensor]) -> None:
        """To the host, those that are on the device; the others (an optimizer's counts, what lies there) stay."""
        for t in _parts(tensors):
            if id(t) not in self._held and t.device == self.device and self.device != self.host:
                t.data = self.copy(t.data, self.host)
                self._held[id(t)] = t
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # a reader on the host waits for no stream

    def back(self, tensors: Iterable[Tensor]) -> None:
        """To the device, those that `out` took from it."""
        for t in _parts(tensors):
            if self._held.pop(id(t), None) is not None:
                t.data = self.copy(t.data, self.device)

    def forget(self) -> None:
        """Holds nothing any more; what lies on the host stays there as long as others hold it."""
        self._held.clear()


class OffloadedWorker(ModelWorker):
    """A ModelWorker that keeps on its device what it needs at the moment: see the head of this module.

    Args: loaded: as ModelWorker's. offload: what moves the tensors; None = between the model's device and the host.
        options: ModelWorker's own.
    """

    def __init__(self, loaded: LoadedModel, *, offload: Offload | None = None, **options: Any) -> None:
        super().__init__(loaded, **options)
        self.offload = offload or Offload(super().device)
        self._rest()

    @property
    def device(self) -> torch.device:
        """Where the model computes, also while its weights lie on the host."""
        return self.offload.device

    def _read(self, *args: Any, **options: Any) -> TokenStats:
        with self._here(self._weights()):
            return super()._read(*args, **options)

    def forward_backward(self, batch: TokenBatch, loss: Loss, **options: Any) -> Metrics:
        """See ModelWorker; gradients are added to the masters, which come first and stay until the step."""
        self.offload.back(self._masters())
        return super().forward_backward(batch, loss, **options)

    def optim_step(self) -> Metrics:
        """See ModelWorker; the moments come for it, and leave with the masters."""
        self.offload.back([*self._masters(), *self._moments()])
        found = super().optim_step()
        self._rest()
        return found

    def load(self, folder: Path) -> None:
        """See ModelWorker; done on the device, where an optimizer puts the state that it is given."""
        with self._here([*self._weights(), *self._masters(), *self._moments()]):
            super().load(folder)

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        """See ModelWorker."""
        with self._here([*self._weights(), *self._masters()]):
            super().export(folder, tokenizer)

    def close(self) -> None:
        """See ModelWorker; what lay on the host goes with the rest."""
        super().close()
        self.offload.forget()

    # ---- what moves ----------------------------------------------------------------------------------------------

    @contextmanager
    def _here(self, tensors: list[Tensor]) -> Iterator[None]:
        """These are on the device inside; afterwards what nothing needs leaves it again."""
        self.offload.back(tensors)
        try:
            yield
        finally:
            if tensors:
                self._rest()

    def _rest(self) -> None:
        self.offload.out([*self._weights(), *self._masters(), *self._moments()])

    def _weights(self) -> list[Tensor]:
        """Those of a model that is only read."""
        return list(self.module.parameters()) if self.optim is None else []

    def _masters(self) -> list[Tensor]:
        """The masters beside the model; where it computes in fp32 its own weights are, and stay."""
        if self.optim is None:
            return []
        return [m for name, m in self.optim.masters.items() if m is not self.optim.params[name]]

    def _moments(self) -> list[Tensor]:
        if self.optim is None:
            return []
        entries = self.optim.optimizer.state.values()
        return [v for entry in entries for v in entry.values() if isinstance(v, Tensor)]


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Plain tensors: a subclass that wraps others, as quantised moments do, stands for those."""
    for t in tensors:
        if is_traceable_wrapper_subclass(t):
            names, _ = t.__tensor_flatten__()
            yield from _parts(getattr(t, name) for name in names)
        else:
            yield t
