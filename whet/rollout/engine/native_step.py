"""A decode step's tables for the native kernels: which row asks which prompt, and where everything lies.

Dim legend: n live rows, K KV heads, D head size.
Left out on purpose: copies. The stores stay as they are; only addresses are written down, anew when one has moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.native import Kernels, LayerTable, StepTable

__all__ = ["NativeLayer", "NativeStep"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeLayer:
    """What a layer's attention is made of."""

    norm: Tensor | None
    """[H + K, D]: the weights of the norms of queries and keys, head by head; None = no norms."""
    epsilons: tuple[float, float]
    """Of both norms."""
    scale: float
    """Factor of the scores."""
    window: int | None
    """Places back that are seen; None = all."""


class NativeStep:
    """The tables of the steps to come. Args: kernels: the functions. own: KV of the rows' own tokens."""

    def __init__(self, kernels: Kernels, own: KVStore) -> None:
        self.kernels = kernels
        self.own = own
        self._step = StepTable()
        self._kept: dict[str, Any] = {}
        """Whatever a table points into."""
        self._layers: dict[int, LayerTable] = {}
        self._prompts: list[tuple[KVStore, np.ndarray]] = []
        """Stores asked, each with the slots of its groups."""
        self._epoch: tuple[int, ...] = ()

    def regroup(self, stores: dict[int, KVStore], buckets: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Works out who asks which prompt; to be called whenever the rows or the prompts' places have changed.

        Args: stores: by bucket. buckets, slots, lengths: int [n], each row's prompt: its bucket, its row there, tokens.
        """
        order = np.lexsort((slots, buckets))
        b, s = buckets[order], slots[order]
        begins = np.flatnonzero(np.r_[True, (b[1:] != b[:-1]) | (s[1:] != s[:-1])])
        first = order[begins]
        tables = {"group_ends": np.r_[begins, len(order)], "asking": order, "prompt_tokens": lengths[first]}
        for name, table in tables.items():
            self._kept[name] = table = np.ascontiguousarray(table, np.int64)
            setattr(self._step, name, table.ctypes.data)
        self._step.rows, self._step.groups = len(order), len(first)
        self._prompts = [(stores[int(x)], slots[first[buckets[first] == x]]) for x in np.unique(buckets)]
        self._epoch = ()

    def begin(self, position: Tensor, made: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> None:
        """Sets one step.

        Args: position: Long [n], of the new tokens. made: Long [n], own tokens before them. cos, sin: [positions, D],
            the first half of sin with a minus. heads: of queries, and of keys.
        """
        epoch = (self.own.epoch, *(store.epoch for store, _ in self._prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._layers.clear()
            places = [np.full(len(slots), store.length, np.int64) for store, slots in self._prompts]
            self._kept["prompt_places"] = np.concatenate(places)
        step, size = self._step, cos.shape[1]
        step.heads, step.kv, step.size, step.threads = *heads, size, torch.get_num_threads()
        self._kept["step"] = tensors = (position, made, cos, sin)
        step.position, step.made, step.cos, step.sin = (x.data_ptr() for x in tensors)
        room = self._kept.get("room")
        if room is None or room.numel() < len(position) * heads[0] * (2 * size + 2):
            self._kept["room"] = room = torch.empty(len(position) * heads[0] * (2 * size + 2))
            step.room = room.data_ptr()

    def attend(self, number: int, layer: NativeLayer, qkv: Tensor) -> Tensor:
        """Writes the new keys and values, and attends.

        Args: number: of the layer. layer: its parts. qkv: [n, (H + 2 K) D], as the product gave it.
        Returns: [n, H D].
        """
        table = self._layers.get(number)
        if table is None:
            self._layers[number] = table = self._table(number, layer, qkv)
        return self.kernels.attend(self._step, table, qkv)

    def _table(self, number: int, layer: NativeLayer, qkv: Tensor) -> LayerTable:
        """Where a layer's keys and values lie."""
        shape = qkv.new_empty(1, self._step.kv, 1, self._step.size)
        keys, values = self.own.layer(number, shape, shape)
        prompts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for store, slots in self._prompts:
            for addresses, x in zip(prompts, store.layer(number, shape, shape), strict=True):
                addresses.append(x.data_ptr() + slots * x.stride(0) * x.itemsize)
        where = [np.concatenate(x).astype(np.int64) for x in prompts]
        self._kept[f"layer {number}"] = where, layer.norm, keys, values
        return LayerTable(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            places=self.own.length,
            prompt_keys=where[0].ctypes.data,
            prompt_values=where[1].ctypes.data,
            prompt_places=self._kept["prompt_places"].ctypes.data,
            norm=None if layer.norm is None else layer.norm.data_ptr(),
            query_epsilon=layer.epsilons[0],
            key_epsilon=layer.epsilons[1],
            scale=layer.scale,
            window=layer.window or 0,
        )
