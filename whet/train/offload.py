"""Weights and optimizer state that lie on the host while nothing needs them.

    a model that is only read     its weights     on the device while it scores
    a model that is trained       its masters     on the device from the first backward pass of an update to its end
                                  its moments     on the device during the optimizer's step

What a trained model computes with stays where it is: the engine reads it, and gradients are made from it. A bf16 actor
with AdamW and a bf16 reference thus take 2 of their 16 bytes a parameter during the rollout.
The copies are exact. Left out on purpose: moving layer by layer, or while something else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whet.parallel.placement import Phase, Placement, Trained
from whet.util.experimental import warn_experimental
from whet.util.tensor_subclasses import is_wrapper

__all__ = ["Offload", "OffloadPlacement"]

Copy = Callable[[Tensor, torch.device], Tensor]


def copy_to_device(tensor: Tensor, place: torch.device) -> Tensor:
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

    def __init__(self, device: torch.device, host: torch.device | str = "cpu", *, copy: Copy = copy_to_device) -> None:
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
        """Holds nothing from now on; what lies on the host stays there as long as others hold it."""
        self._held.clear()


class OffloadPlacement(Placement):
    """Keeps on the device what is needed at the moment: see the head of this module.

    Args: offload: what moves the tensors; None = between the model's device and the host.
    """

    def __init__(self, offload: Offload | None = None) -> None:
        super().__init__()
        self._offload = offload

    @property
    def offload(self) -> Offload:
        """What moves the tensors."""
        assert self._offload is not None, "a placement holds a model once its worker is made"
        return self._offload

    @property
    def device(self) -> torch.device:
        """See Placement; also while the weights lie on the host."""
        return self.offload.device

    def hold(self, module: nn.Module, trained: Trained | None) -> None:
        """See Placement; what nothing needs leaves at once."""
        super().hold(module, trained)
        self._offload = self._offload or Offload(next(module.parameters()).device)
        self._rest()

    def release(self) -> None:
        """See Placement; what lay on the host goes with the rest."""
        super().release()
        self.offload.forget()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """See Placement. Masters that came for a backward pass stay until the step, to which gradients add up."""
        needed = self._needed(phase)
        self.offload.back(needed)
        try:
            yield
        finally:
            if (needed or phase == "step") and phase != "backward":
                self._rest()

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """See Placement; those of a model that is only read come for it."""
        with self.during("read"):
            yield self.module

    # ---- what moves ----------------------------------------------------------------------------------------------

    def _needed(self, phase: Phase) -> list[Tensor]:
        if phase == "save":  # files are written from where tensors lie
            return []
        if phase == "read":
            return self._weights()
        if phase == "backward":
            return self._masters()
        if phase == "step":
            return [*self._masters(), *self._moments()]
        if phase == "load":  # an optimizer puts the state that it is given on the device
            return [*self._weights(), *self._masters(), *self._moments()]
        return [*self._weights(), *self._masters()]

    def _rest(self) -> None:
        self.offload.out([*self._weights(), *self._masters(), *self._moments()])

    def _weights(self) -> list[Tensor]:
        """Those of a model that is only read."""
        return list(self.module.parameters()) if self._trained is None else []

    def _masters(self) -> list[Tensor]:
        """The master weights, apart from the model's own; where it computes in fp32 they are its own, and stay."""
        if self._trained is None:
            return []
        return [m for name, m in self._trained.masters.items() if m is not self._trained.params[name]]

    def _moments(self) -> list[Tensor]:
        if self._trained is None:
            return []
        entries = self._trained.optimizer.state.values()
        return [v for entry in entries for v in entry.values() if isinstance(v, Tensor)]


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Plain tensors: a subclass that wraps others, as quantised moments do, stands for those."""
    for t in tensors:
        if is_wrapper(t):
            names, _ = t.__tensor_flatten__()
            yield from _parts(getattr(t, name) for name in names)
        else:
            yield t
