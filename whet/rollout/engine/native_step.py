"""NativeLayout: a decode step's tables for the native kernels: which row reads which prompt, and all addresses.

Dim legend: n live rows, H query heads, K KV heads, D head size, d hidden size.
The tables hold no copies, only addresses into the stores, and are written again when one changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.models.attention import Layout
from whet.native.decode import DecodeKernels, LayerTable, ProductTable, StepTable
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.packed_linear import PackedLinear

__all__ = ["NativeLayer", "NativeLayout"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeLayer:
    """The parts of a decoder layer."""

    norm: Tensor | None
    """[H + K, D]: the weights of the norms of queries and keys, head by head; None = no norms."""
    epsilons: tuple[float, float]
    """Epsilons of both norms."""
    scale: float
    """Factor of the scores."""
    window: int | None
    """Attention window in tokens; None = no window."""
    before: Tensor | None
    """[d]: the weight of the norm before attention; None = the next product contains it."""
    after: Tensor | None
    """[d]: the same before the MLP."""
    outer_epsilons: tuple[float, float]
    """Epsilons of these two norms."""
    products: tuple[PackedLinear, ...]
    """The projections: queries, keys and values; attention's output; gate and up; down."""


class NativeLayout(Layout):
    """One new token for each live row, for the native kernels.

    It replaces DecodeLayout: `run` does the attention together with everything else of a layer.
    Args: kernels: the functions. completion_store: KV of the rows' completions.
    """

    def __init__(self, kernels: DecodeKernels, completion_store: KVStore) -> None:
        self.kernels = kernels
        self.completion_store = completion_store
        self.step = StepTable()
        """The table of the step that `begin` has set."""
        self._buffers: dict[str, Any] = {}
        """Tensors and arrays that a table points into, except the stores."""
        self._layers: ctypes.Array[LayerTable] | None = None
        self._prompts: list[tuple[KVStore, np.ndarray]] = []
        """The stores that rows read, each with the slots of its groups."""
        self._epoch: tuple[int, ...] = ()
        self._num_refreshes = self._width = 0

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.step.rows

    def regroup(
        self,
        stores: dict[int, KVStore],
        buckets: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Records which row reads which prompt. Call it whenever rows or prompts have moved.

        Args: stores: by bucket. buckets, slots, lengths: int [n], each row's prompt: its bucket, its row there, tokens.
        """
        order = np.lexsort((slots, buckets))
        b, s = buckets[order], slots[order]
        begins = np.flatnonzero(np.r_[True, (b[1:] != b[:-1]) | (s[1:] != s[:-1])])
        first = order[begins]
        tables = {"group_ends": np.r_[begins, len(order)], "query_rows": order, "prompt_tokens": lengths[first]}
        for name, table in tables.items():
            self._buffers[name] = table = np.ascontiguousarray(table, np.int64)
            setattr(self.step, name, table.ctypes.data)
        self.step.rows, self.step.groups = len(order), len(first)
        self._prompts = [(stores[int(x)], slots[first[buckets[first] == x]]) for x in np.unique(buckets)]
        self._epoch = ()

    def begin(self, position: Tensor, drawn: Tensor, *, longest: int, furthest: int, equal: bool) -> None:
        """Sets one step.

        Args:
            position: Long [n], of the new tokens.
            drawn: Long [n], drawn tokens before them.
            longest, furthest, equal: not used: the kernels read each row's own numbers.
        """
        del longest, furthest, equal
        self.position_ids = position.unsqueeze(1)
        self._drawn = drawn
        epoch = (self.completion_store.epoch, *(store.epoch for store, _ in self._prompts))
        if epoch != self._epoch:
            self._epoch, self._layers = epoch, None
            places = [np.full(len(slots), store.length, np.int64) for store, slots in self._prompts]
            self._buffers["prompt_places"] = np.concatenate(places)

    def set_rotary(self, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> None:
        """Sets the rotary tables.

        Args: cos, sin: [positions, D], the first half of sin negated. heads: of queries, and of keys.
        """
        step, size = self.step, cos.shape[1]
        step.heads, step.kv, step.size, step.threads = *heads, size, torch.get_num_threads()
        self._buffers["step"] = tensors = (self.position_ids, self._drawn, cos, sin)
        step.position, step.num_drawn, step.cos, step.sin = (x.data_ptr() for x in tensors)
        step.workspace = self._workspace("workspace", self.rows * heads[0] * (2 * size + 2), torch.float32).data_ptr()

    def run(self, h: Tensor, num_refreshes: int, layers: Callable[[], list[NativeLayer]]) -> Tensor:
        """Takes one token of each row through all layers.

        Args:
            h: [n, d], changed in place.
            num_refreshes: how often the weights have changed.
            layers: gives the layers' parts; called only where something has moved.
        Returns: [n, d], to be added to h; overwritten by the next step.
        """
        if self._layers is None or num_refreshes != self._num_refreshes:
            parts, self._num_refreshes = layers(), num_refreshes
            self._layers = (LayerTable * len(parts))(*(self.table(i, layer, h) for i, layer in enumerate(parts)))
            widths = [(layer.products[0].width, layer.products[2].width, layer.products[3].inputs) for layer in parts]
            self._width = max(h.shape[1], *(x for width in widths for x in width))
        step = self.step
        residual = self._workspace("residual", h.numel(), h.dtype)
        step.hidden, step.residual = h.data_ptr(), residual.data_ptr()
        for name in ("wide", "narrow"):
            setattr(step, name, self._workspace(name, len(h) * self._width, h.dtype).data_ptr())
        self.kernels.run(step, self._layers, h.dtype)
        return residual[: h.numel()].view_as(h)

    def _workspace(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for `size` numbers, reused from step to step."""
        workspace = self._buffers.get(name)
        if workspace is None or workspace.numel() < size or workspace.dtype != dtype:
            self._buffers[name] = workspace = torch.empty(size, dtype=dtype)
        return workspace

    def table(self, number: int, layer: NativeLayer, like: Tensor) -> LayerTable:
        """Returns the addresses of a layer's keys, values and weights.

        Args: number: of the layer. layer: its parts. like: a tensor of the stores' dtype.
        """
        shape = like.new_empty(1, self.step.kv, 1, self.step.size)
        keys, values = self.completion_store.layer(number, shape, shape)
        prompts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for store, slots in self._prompts:
            for addresses, x in zip(prompts, store.layer(number, shape, shape), strict=True):
                addresses.append(x.data_ptr() + slots * x.stride(0) * x.itemsize)
        where = [np.concatenate(x).astype(np.int64) for x in prompts]
        self._buffers[f"layer {number}"] = where, layer  # the stores keep their own; a dropped one is to be free
        pointer = lambda x: None if x is None else x.data_ptr()
        return LayerTable(
            keys.data_ptr(), values.data_ptr(), self.completion_store.length,
            where[0].ctypes.data, where[1].ctypes.data, self._buffers["prompt_places"].ctypes.data,
            pointer(layer.norm), *layer.epsilons, layer.scale, layer.window or 0,
            pointer(layer.before), pointer(layer.after), *layer.outer_epsilons,
            *(p.table or ProductTable() for p in layer.products),
        )  # fmt: skip
