"""make_forward: token ids -> logits, by the fused backbone where it fits the model, else by the Hugging Face module.

The module is the oracle: the engine is tested over both.
Dim legend: B rows, T tokens of a row, N = B T, V vocabulary, d hidden size.
Left out on purpose: any choice by timing. The same model on the same machine takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from whet.errors import EngineError
from whet.models.attention import Layout
from whet.models.fast_layers import FastLayers
from whet.models.loaded_model import LoadedModel
from whet.models.modes import eval_mode
from whet.native.build import Unavailable
from whet.native.decode import DecodeKernels
from whet.rollout.engine.fused_backbone import FusedBackbone
from whet.rollout.engine.kv_pool import PoolCase
from whet.rollout.engine.packed_linear import PackedLinear
from whet.util.device import on_device

__all__ = ["FusedForward", "ModuleForward", "make_forward"]


class ModuleForward:
    """Runs the Hugging Face module. Args: loaded: the model. reason: why the fused backbone does not run."""

    def __init__(self, loaded: LoadedModel, reason: str) -> None:
        self.loaded = loaded
        self.device = _device(loaded)
        self.backends = {"backbone": f"module ({reason})", "products": "torch", "kernels": "torch"}
        """The implementation of each part, and why."""
        self.bytes = 0
        """Memory of what is derived from the weights."""
        self.epoch = 0
        """Changes when a tensor that a step reads has moved."""
        self.kernels: DecodeKernels | None = None
        """The native kernels of a decode step; None = torch's."""
        self._as_trained = FastLayers(loaded.module).enabled if self.device.type == "cuda" else nullcontext
        self._backbone: nn.Module = loaded.module.get_decoder()  # pyright: ignore
        self._head: nn.Module = loaded.module.get_output_embeddings()  # pyright: ignore

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of all work: no gradient, eval mode, the model's device; on a GPU the layers of training."""
        with on_device(self.device), torch.no_grad(), eval_mode(self.loaded.module), self._as_trained():
            yield

    def pool_case(self) -> PoolCase | str:
        """Returns why it can't have a KVPool."""
        return f"the backbone is {self.backends['backbone']}"

    def features(self, ids: Tensor, layout: Layout) -> Tensor:
        """[N d] of ids [B T], after the last norm; logits [N V] for a model whose head is not linear."""
        call = {"input_ids": ids, "position_ids": layout.position_ids, "whet_layout": layout, "use_cache": False}
        if not self.loaded.lm_head.linear:
            return self.loaded.module(**call).logits.flatten(0, 1)
        return self._backbone(**call).last_hidden_state.flatten(0, 1)

    def logits(self, features: Tensor) -> Tensor:
        """fp32 [n V] of features [n d]."""
        head = self.loaded.lm_head
        return head.logits(self._head(features)).float() if head.linear else features.float()

    def ensure_positions(self, positions: int) -> None:
        """Nothing to do: the module computes any position."""

    def refresh(self, *, force: bool) -> None:
        """Nothing to do: the module reads its weights."""

    def drop(self) -> None:
        """Nothing to free."""


class FusedForward:
    """Runs the fused backbone and a packed head. Args: loaded: the model. backbone: of that model."""

    def __init__(self, loaded: LoadedModel, backbone: FusedBackbone) -> None:
        self.loaded = loaded
        self.device = _device(loaded)
        kernels = backbone.kernels
        self.kernels = None if isinstance(kernels, Unavailable) else kernels
        """The native kernels of a decode step; None = torch's."""
        self.backends = {
            "backbone": "fused",
            "products": "native, packed" if self.kernels else "torch",
            "kernels": f"native ({self.kernels.compiler})" if self.kernels else f"torch ({kernels})",
        }
        """The implementation of each part, and why."""
        self._backbone = backbone
        self._head = PackedLinear([loaded.module.get_output_embeddings()], kernels=self.kernels)  # pyright: ignore
        self._weights = list(loaded.module.parameters())
        self._last_state, self._built_kinds = self._state(), self._kinds()
        self._addresses, self._moves = [p for p, _ in self._last_state], 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of all work: no gradient, the model's device."""
        with on_device(self.device), torch.inference_mode():
            yield

    def features(self, ids: Tensor, layout: Layout) -> Tensor:
        """[N d] of ids [B T], after the last norm."""
        return self._backbone(ids, layout)

    def logits(self, features: Tensor) -> Tensor:
        """fp32 [n V] of features [n d]."""
        return self.loaded.lm_head.logits(self._head(features)).float()

    def ensure_positions(self, positions: int) -> None:
        """Prepares for positions below this."""
        self._backbone.ensure_positions(positions)

    def refresh(self, *, force: bool) -> None:
        """Computes again what is derived from the weights, if they have changed. Args: force: even if they have not."""
        state = self._state()
        if force or state != self._last_state:
            if self._kinds() != self._built_kinds:
                raise EngineError(
                    "the model's weights have another dtype, device or shape than when the engine was built; build "
                    "a new engine for them"
                )
            self._backbone.refresh()
            self._head.refresh()
            self._last_state = state = self._state()
        addresses = [p for p, _ in state]
        self._moves += addresses != self._addresses
        self._addresses = addresses

    def pool_case(self) -> PoolCase | str:
        """Returns the properties of its attention for a KVPool, or why it can't have one."""
        return self._backbone.pool_case()

    def join_products(self) -> None:
        """Makes weights that are multiplied together views of one buffer."""
        self._backbone.join_products()
        self._last_state = self._state()

    def drop(self) -> None:
        """Frees the copies until `refresh`."""
        for product in (*self._backbone.products(), self._head):
            product.drop()
        self._last_state = ()

    @property
    def epoch(self) -> int:
        """Changes when a tensor that a step reads has moved."""
        return self._backbone.epoch + self._moves

    @property
    def bytes(self) -> int:
        """Memory of what is derived from the weights."""
        return sum(product.bytes for product in (*self._backbone.products(), self._head))

    def _state(self) -> tuple[tuple[int, int], ...]:
        """Addresses and write counts of the weights: they show most changes without an `update_weights`."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._weights)

    def _kinds(self) -> list[tuple[object, ...]]:
        """Properties of the weights that must not change after the engine was built."""
        return [(p.dtype, p.device, p.shape, p.is_contiguous()) for p in self._weights]


def _device(loaded: LoadedModel) -> torch.device:
    """Returns the device of a model."""
    return next(loaded.module.parameters()).device


def make_forward(loaded: LoadedModel, *, fast: bool, native: bool) -> ModuleForward | FusedForward:
    """Returns the fastest exact way from ids to logits.

    Args: loaded: a packable model. fast: False = the module itself. native: False = only torch's kernels.
    Returns: the forward; its `backends` say why it was chosen.
    """
    if not fast:
        return ModuleForward(loaded, "fast=False")
    backbone = FusedBackbone.from_model(loaded, native=native)
    return ModuleForward(loaded, str(backbone)) if isinstance(backbone, Unavailable) else FusedForward(loaded, backbone)
