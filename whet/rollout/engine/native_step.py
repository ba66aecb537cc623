"""A decode step's tables for the native kernels: which row asks which prompt, and where everything lies.

Dim legend: n live rows, H query heads, K KV heads, D head size, d hidden size.
Left out on purpose: copies. The stores stay as they are; only addresses are written down, again when one has changed.
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
from whet.native.decode import Kernels, LayerTable, ProductTable, StepTable
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.packed_linear import Product

__all__ = ["NativeLayer", "NativeLayout"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeLayer:
    """What a layer is made of."""

    norm: Tensor | None
    """[H + K, D]: the weights of the norms of queries and keys, head by head; None = no norms."""
    epsilons: tuple[float, float]
    """Of both norms."""
    scale: float
    """Factor of the scores."""
    window: int | None
    """Places back that are seen; None = all."""
    before: Tensor | None
    """[d]: the weight of the norm before attention; None = the product behind it has it already."""
    after: Tensor | None
    """[d]: the same before the MLP."""
    outer_epsilons: tuple[float, float]
    """Of these norms."""
    products: tuple[Product, ...]
    """Queries, keys and values; what attention gives; gate and up; down."""


class NativeLayout(Layout):
    """One new token for each live row, as the native kernels want it told.

    It stands where DecodeLayout stands, and attends in `run` with all else that a layer does.
    Args: kernels: the functions. own: KV of the rows' own tokens.
    """

    def __init__(self, kernels: Kernels, own: KVStore) -> None:
        self.kernels = kernels
        self.own = own
        self.step = StepTable()
        """Of the step that `begin` has set."""
        self._kept: dict[str, Any] = {}
        """Whatever a table points into, except the stores."""
        self._layers: ctypes.Array[LayerTable] | None = None
        self._prompts: list[tuple[KVStore, np.ndarray]] = []
        """Stores asked, each with the slots of its groups."""
        self._epoch: tuple[int, ...] = ()
        self._renewed = self._width = 0

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.step.rows

    def regroup(
        self,
        stores: dict[int, KVStore],
        buckets: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        rows: int | None = None,
    ) -> None:
        """Works out who asks which prompt; to be called whenever the rows or the prompts' places have changed.

        Args:
            stores: by bucket.
            buckets, slots, lengths: int [n], each row's prompt: its bucket, its row there, tokens.
            rows: None: steps have no padding.
        """
        assert rows is None, f"a native step has no padding, {rows} rows were asked for"
        order = np.lexsort((slots, buckets))
        b, s = buckets[order], slots[order]
        begins = np.flatnonzero(np.r_[True, (b[1:] != b[:-1]) | (s[1:] != s[:-1])])
        first = order[begins]
        tables = {"group_ends": np.r_[begins, len(order)], "asking": order, "prompt_tokens": lengths[first]}
        for name, table in tables.items():
            self._kept[name] = table = np.ascontiguousarray(table, np.int64)
            setattr(self.step, name, table.ctypes.data)
        self.step.rows, self.step.groups = len(order), len(first)
        self._prompts = [(stores[int(x)], slots[first[buckets[first] == x]]) for x in np.unique(buckets)]
        self._epoch = ()

    def begin(self, position: Tensor, made: Tensor, *, longest: int, furthest: int, equal: bool) -> None:
        """Sets one step.

        Args:
            position: Long [n], of the new tokens.
            made: Long [n], own tokens before them.
            longest, furthest, equal: what DecodeLayout asks about all rows; the kernels look at each row's own.
        """
        del longest, furthest, equal
        self.position_ids = position.unsqueeze(1)
        self._made = made
        epoch = (self.own.epoch, *(store.epoch for store, _ in self._prompts))
        if epoch != self._epoch:
            self._epoch, self._layers = epoch, None
            places = [np.full(len(slots), store.length, np.int64) for store, slots in self._prompts]
            self._kept["prompt_places"] = np.concatenate(places)

    def turn(self, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> None:
        """Tells how queries and keys are turned.

        Args: cos, sin: [positions, D], the first half of sin with a minus. heads: of queries, and of keys.
        """
        step, size = self.step, cos.shape[1]
        step.heads, step.kv, step.size, step.threads = *heads, size, torch.get_num_threads()
        self._kept["step"] = tensors = (self.position_ids, self._made, cos, sin)
        step.position, step.made, step.cos, step.sin = (x.data_ptr() for x in tensors)
        step.room = self._room("room", self.rows * heads[0] * (2 * size + 2), torch.float32).data_ptr()

    def run(self, h: Tensor, renewed: int, layers: Callable[[], list[NativeLayer]]) -> Tensor:
        """Takes one token of each row through all layers.

        Args: h: [n, d], changed in place. renewed: how often the weights have changed. layers: what they are made of
            now, asked for only where something has moved.
        Returns: [n, d], to be added to h; overwritten by the next step.
        """
        if self._layers is None or renewed != self._renewed:
            made, self._renewed = layers(), renewed
            self._layers = (LayerTable * len(made))(*(self.table(i, layer, h) for i, layer in enumerate(made)))
            widths = [(layer.products[0].width, layer.products[2].width, layer.products[3].inputs) for layer in made]
            self._width = max(h.shape[1], *(x for width in widths for x in width))
        step = self.step
        more = self._room("more", h.numel(), h.dtype)
        step.hidden, step.more = h.data_ptr(), more.data_ptr()
        for name in ("wide", "narrow"):
            setattr(step, name, self._room(name, len(h) * self._width, h.dtype).data_ptr())
        self.kernels.run(step, self._layers, h.dtype)
        return more[: h.numel()].view_as(h)

    def _room(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers, kept from step to step."""
        room = self._kept.get(name)
        if room is None or room.numel() < size or room.dtype != dtype:
            self._kept[name] = room = torch.empty(size, dtype=dtype)
        return room

    def table(self, number: int, layer: NativeLayer, like: Tensor) -> LayerTable:
        """Where a layer's keys and values lie, and its weights.

        Args: number: of the layer. layer: its parts. like: a tensor of the stores' dtype.
        """
        shape = like.new_empty(1, self.step.kv, 1, self.step.size)
        keys, values = self.own.layer(number, shape, shape)
        prompts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for store, slots in self._prompts:
            for addresses, x in zip(prompts, store.layer(number, shape, shape), strict=True):
                addresses.append(x.data_ptr() + slots * x.stride(0) * x.itemsize)
        where = [np.concatenate(x).astype(np.int64) for x in prompts]
        self._kept[f"layer {number}"] = where, layer  # the stores keep their own; a dropped one is to be free
        pointer = lambda x: None if x is None else x.data_ptr()
        return LayerTable(
            keys.data_ptr(), values.data_ptr(), self.own.length,
            where[0].ctypes.data, where[1].ctypes.data, self._kept["prompt_places"].ctypes.data,
            pointer(layer.norm), *layer.epsilons, layer.scale, layer.window or 0,
            pointer(layer.before), pointer(layer.after), *layer.outer_epsilons,
            *(p.table or ProductTable() for p in layer.products),
        )  # fmt: skip
