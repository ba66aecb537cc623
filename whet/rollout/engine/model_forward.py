"""From token ids to logits: by the Hugging Face module, or by the fused trunk where that fits, packed where it can be.

The module is the oracle: it runs wherever the fused trunk steps aside, and everything is tested over both.
Dim legend: B rows, T tokens of a row, N = B T, V vocabulary, d hidden size.
Left out on purpose: any choice by the clock: the same model on the same machine takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whet.errors import EngineError
from whet.models.attention import Layout
from whet.models.loaded_model import LoadedModel
from whet.models.modes import evaluating
from whet.native.build import Unavailable
from whet.native.decode import Kernels
from whet.rollout.engine.fused_trunk import FusedTrunk
from whet.rollout.engine.packed_linear import Product
from whet.util.device import on_device

__all__ = ["FusedForward", "ModuleForward", "make_forward"]


class ModuleForward:
    """The module itself. Args: loaded: the model. reason: why it is not the fused trunk."""

    def __init__(self, loaded: LoadedModel, reason: str) -> None:
        self.loaded = loaded
        self.device = _device(loaded)
        self.backends = {"trunk": f"module ({reason})", "products": "torch", "kernels": "torch"}
        """Which implementation runs each part, and why."""
        self.bytes = 0
        """Memory of what is derived from the weights."""
        self.epoch = 0
        """Rises when something that a step reads has moved."""
        self.kernels: Kernels | None = None
        """Those of a decode step; None = torch's."""
        self._trunk: nn.Module = loaded.module.get_decoder()  # pyright: ignore
        self._head: nn.Module = loaded.module.get_output_embeddings()  # pyright: ignore

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all work: no gradient, eval mode, the model's device."""
        with on_device(self.device), torch.no_grad(), evaluating(self.loaded.module):
            yield

    def features(self, ids: Tensor, layout: Layout) -> Tensor:
        """[N d] of ids [B T], after the last norm; logits [N V] where only the model itself can make them."""
        call = {"input_ids": ids, "position_ids": layout.position_ids, "whet_layout": layout, "use_cache": False}
        if not self.loaded.lm_head.linear:
            return self.loaded.module(**call).logits.flatten(0, 1)
        return self._trunk(**call).last_hidden_state.flatten(0, 1)

    def logits(self, features: Tensor) -> Tensor:
        """fp32 [n V] of features [n d]."""
        head = self.loaded.lm_head
        return head.logits(self._head(features)).float() if head.linear else features.float()

    def reach(self, positions: int) -> None:
        """Positions must be below this. Nothing to do here."""

    def refresh(self, *, force: bool) -> None:
        """Is told of new weights. Nothing to do here."""

    def drop(self) -> None:
        """Frees what is derived from the weights. Nothing to do here."""


class FusedForward:
    """The fused trunk and a head of the same kind of product. Args: loaded: the model. trunk: its own."""

    def __init__(self, loaded: LoadedModel, trunk: FusedTrunk) -> None:
        self.loaded = loaded
        self.device = _device(loaded)
        found = trunk.kernels
        self.kernels = None if isinstance(found, Unavailable) else found
        """Those of a decode step; None = torch's."""
        self.backends = {
            "trunk": "fused",
            "products": "native, packed" if self.kernels else "torch",
            "kernels": f"native ({self.kernels.compiler})" if self.kernels else f"torch ({found})",
        }
        """Which implementation runs each part, and why."""
        self._trunk = trunk
        self._head = Product([loaded.module.get_output_embeddings()], kernels=self.kernels)  # pyright: ignore
        self._weights = list(loaded.module.parameters())
        self._seen, self._kinds = self._state(), self._kind()
        self._moved = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all work: no gradient, the model's device."""
        with on_device(self.device), torch.inference_mode():
            yield

    def features(self, ids: Tensor, layout: Layout) -> Tensor:
        """[N d] of ids [B T], after the last norm."""
        return self._trunk(ids, layout)

    def logits(self, features: Tensor) -> Tensor:
        """fp32 [n V] of features [n d]."""
        return self.loaded.lm_head.logits(self._head(features)).float()

    def reach(self, positions: int) -> None:
        """Positions must be below this."""
        self._trunk.reach(positions)

    def refresh(self, *, force: bool) -> None:
        """Renews what is derived from the weights, where they have changed since. Args: force: whether or not."""
        state = self._state()
        self._moved += [p for p, _ in state] != [p for p, _ in self._seen]
        if force or state != self._seen:
            if self._kind() != self._kinds:
                raise EngineError(
                    "the model's weights have another dtype, device or shape than when the engine was built; build "
                    "a new engine for them"
                )
            self._trunk.refresh()
            self._head.refresh()
            self._seen = state

    def drop(self) -> None:
        """Frees the copies until `refresh`."""
        for product in (*self._trunk.products(), self._head):
            product.drop()
        self._seen = ()

    @property
    def epoch(self) -> int:
        """Rises when something that a step reads has moved."""
        return self._trunk.epoch + self._moved

    @property
    def bytes(self) -> int:
        """Memory of what is derived from the weights."""
        return sum(product.bytes for product in (*self._trunk.products(), self._head))

    def _state(self) -> tuple[tuple[int, int], ...]:
        """Where the weights lie and how often they were written: shows most changes that were not announced."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._weights)

    def _kind(self) -> list[tuple[object, ...]]:
        """What must stay as it was when the engine was built."""
        return [(p.dtype, p.device, p.shape, p.is_contiguous()) for p in self._weights]


def _device(loaded: LoadedModel) -> torch.device:
    """Where a model computes."""
    return next(loaded.module.parameters()).device


def make_forward(loaded: LoadedModel, *, fast: bool, native: bool) -> ModuleForward | FusedForward:
    """The fastest right way from ids to logits.

    Args: loaded: a packable model. fast: False = the module itself. native: False = torch's kernels alone.
    Returns: what runs; its `backends` say why.
    """
    if not fast:
        return ModuleForward(loaded, "fast=False")
    trunk = FusedTrunk.of(loaded, native=native)
    return ModuleForward(loaded, str(trunk)) if isinstance(trunk, Unavailable) else FusedForward(loaded, trunk)
