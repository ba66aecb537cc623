"""CPU offload: weights and optimizer state lie on the host while no phase needs them.

    a model that is only read     its weights     on the device while it scores
    a model that is trained       its masters     on the device from the first backward pass of an update to its end
                                  its moments     on the device during the optimizer's step

The weights that a trained model computes with stay on the device: the engine reads them, and gradients are computed
from them. So a bf16 actor with AdamW and a bf16 reference take 2 of their 16 bytes a parameter during the rollout.
The copies are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from whet.parallel.placement import Phase, Placement
from whet.train.optimizer import Optim
from whet.util.experimental import warn_experimental
from whet.util.tensor_subclasses import is_wrapper_subclass

__all__ = ["Offload", "OffloadPlacement"]

Copy = Callable[[Tensor, torch.device], Tensor]


def copy_to_device(tensor: Tensor, place: torch.device) -> Tensor:
    """Returns a copy of a tensor on a device, for which the host does not wait where it need not."""
    return tensor.to(place, non_blocking=True, copy=True)


class PinnedBuffers:
    """Places in pinned memory for the data of tensors: one buffer per dtype for all that are first seen together.

    A place is kept as long as its tensor lives, so memory is pinned once in a run. The allocator of pinned memory
    rounds sizes up to powers of two; in one buffer that happens once, not for each tensor.

    Args: pinned: False = ordinary memory, where there is no GPU.
    """

    def __init__(self, *, pinned: bool = True) -> None:
        self.pinned = pinned
        self._places = WeakTensorKeyDictionary()

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Makes places for those of the tensors that have none."""
        new: dict[torch.dtype, list[Tensor]] = {}
        for t in tensors:
            place = self._places.get(t)
            if place is None or place.dtype != t.dtype or place.shape != t.shape or place.stride() != t.stride():
                new.setdefault(t.dtype, []).append(t)
        for dtype, group in new.items():
            sizes = [_extent(t) for t in group]
            buffer = torch.empty(sum(sizes), dtype=dtype, pin_memory=self.pinned)
            for t, part in zip(group, buffer.split(sizes), strict=True):
                self._places[t] = part.as_strided(t.shape, t.stride())

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns the data of a tensor on the device, in its place; for the copy the host does not wait."""
        return self._places[tensor].copy_(tensor.data, non_blocking=True)

    def clear(self) -> None:
        """Frees all places that nothing else refers to."""
        self._places = WeakTensorKeyDictionary()


def _extent(tensor: Tensor) -> int:
    """Returns the elements from the first to the last one of a tensor in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


class Offload:
    """Moves the data of tensors between the device that computes and the host; the tensor objects stay the same.

    Args: device: where tensors are used. host: where they lie otherwise. copy: copies a tensor's data to a device; it
        must be exact.

    >>> weight, offload = torch.ones(2), Offload(torch.device("cpu"), "cpu:0")
    >>> offload.to_host([weight]), offload.held_bytes
    (None, 8)
    >>> offload.to_device([weight]), offload.held_bytes, weight
    (None, 0, tensor([1., 1.]))
    """

    def __init__(self, device: torch.device, host: torch.device | str = "cpu", *, copy: Copy = copy_to_device) -> None:
        self.device, self.host, self.copy = device, torch.device(host), copy
        self._held: dict[int, Tensor] = {}
        self._pinned = PinnedBuffers() if copy is copy_to_device and device.type == "cuda" else None

    @property
    def held_bytes(self) -> int:
        """The number of bytes on the host now."""
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Moves tensors from the device to the host; others (an optimizer's counts, tensors on the host) stay."""
        leaving = {
            id(t): t
            for t in _parts(tensors)
            if id(t) not in self._held and t.device == self.device and self.device != self.host
        }
        places = self._reserve_pinned(list(leaving.values()))
        for t in leaving.values():
            t.data = self.copy(t.data, self.host) if places is None else places.copy(t)
        self._held.update(leaving)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # code on the host does not wait for a stream

    def _reserve_pinned(self, tensors: list[Tensor]) -> PinnedBuffers | None:
        """Returns pinned host buffers for tensors that leave a GPU; None = they go to pageable memory."""
        if self._pinned is None or not tensors:
            return None
        warn_experimental("offload_to_cpu through pinned memory")
        self._pinned.reserve(tensors)
        return self._pinned

    def to_device(self, tensors: Iterable[Tensor]) -> None:
        """Moves the tensors that `to_host` moved back to the device."""
        for t in _parts(tensors):
            if self._held.pop(id(t), None) is not None:
                t.data = self.copy(t.data, self.device)

    def clear(self) -> None:
        """Drops its references to tensors on the host."""
        self._held.clear()
        if self._pinned is not None:
            self._pinned.clear()


class OffloadPlacement(Placement):
    """Keeps on the device only what the current phase needs; see the docstring of this module.

    Args: offload: moves the tensors; None = between the model's device and the host.
    """

    offloads = True

    def __init__(self, offload: Offload | None = None) -> None:
        super().__init__()
        self._offload = offload

    @property
    def offload(self) -> Offload:
        """The object that moves the tensors."""
        assert self._offload is not None, "a placement holds a model once its worker is made"
        return self._offload

    @property
    def device(self) -> torch.device:
        """See Placement; also while the weights lie on the host."""
        return self.offload.device

    def attach(self, module: nn.Module, optim: Optim | None) -> None:
        """See Placement; offloads all that is not needed at once."""
        super().attach(module, optim)
        self._offload = self._offload or Offload(next(module.parameters()).device)
        self._offload_all()

    def release(self) -> None:
        """See Placement; the tensors on the host are freed too."""
        super().release()
        self.offload.clear()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """See Placement. Masters that were moved for a backward pass stay until the step, which needs them."""
        needed = self._needed(phase)
        self.offload.to_device(needed)
        try:
            yield
        finally:
            if (needed or phase == "step") and phase != "backward":
                self._offload_all()

    @contextmanager
    def weights(self, *, parts: bool = False) -> Iterator[nn.Module]:
        """See Placement; the weights of a model that is only read are moved to the device."""
        with self.during("read"):
            yield self.module

    # ---- what moves ----------------------------------------------------------------------------------------------

    def _needed(self, phase: Phase) -> list[Tensor]:
        if phase == "save":  # files are written from tensors on the host too
            return []
        if phase == "read":
            return self._weights()
        if phase == "backward":
            return self._masters()
        if phase == "step":
            return [*self._masters(), *self._moments()]
        if phase == "load":  # an optimizer puts a loaded state on the device
            return [*self._weights(), *self._masters(), *self._moments()]
        return [*self._weights(), *self._masters()]

    def _offload_all(self) -> None:
        self.offload.to_host([*self._weights(), *self._masters(), *self._moments()])

    def _weights(self) -> list[Tensor]:
        """Returns the weights of a model that is only read."""
        return list(self.module.parameters()) if self._optim is None else []

    def _masters(self) -> list[Tensor]:
        """Returns the master weights that are not the model's own parameters. In fp32 the parameters are the
        masters.
        """
        if self._optim is None:
            return []
        return [m for name, m in self._optim.masters.items() if m is not self._optim.params[name]]

    def _moments(self) -> list[Tensor]:
        if self._optim is None:
            return []
        entries = self._optim.optimizer.state.values()
        return [v for entry in entries for v in entry.values() if isinstance(v, Tensor)]


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the plain tensors. A subclass that wraps tensors, such as quantised moments, is replaced by the tensors in
    it.
    """
    for t in tensors:
        if is_wrapper_subclass(t):
            names, _ = t.__tensor_flatten__()
            yield from _parts(getattr(t, name) for name in names)
        else:
            yield t
