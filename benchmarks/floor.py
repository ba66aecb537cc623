"""The least time that a rollout could take on this machine: what its products and its memory traffic ask for.

A step costs the larger of two times: its FLOPs at the rate of the best kernel for that many rows (by
machine.decode_rates, over weights that are all distinct), and its bytes at the rate of a copy. The weights are read
once in a step, a prompt's keys and values once for all its completions, a completion's own once. For mixed lengths the
rows shrink from step to step, and the times are summed over the steps. Left out, so that it stays a floor: norms,
rotations, activations, the softmax, sampling, activations written and read again.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import machine
import tasks

GRID = (1, 4, 16, 64, 256)
"""Rows for which rates are measured; between them the time of a step is interpolated."""


def weights_of(shape: str, vocabulary: int) -> tuple[int, int]:
    """The weights that multiply each row: of all layers, and of the output matrix.

    >>> weights_of("25m", 105)
    (25165824, 53760)
    """
    s = tasks.SHAPES[shape]
    attention = s["width"] * s["head"] * (2 * s["heads"] + 2 * s["kv_heads"])
    return s["layers"] * (attention + 3 * s["width"] * s["mlp"]), s["width"] * vocabulary


def kv_bytes(shape: str, dtype: str) -> int:
    """Bytes of a token's keys and values in all layers.

    >>> kv_bytes("25m", "float32"), kv_bytes("0.6b", "bfloat16") // 1024
    (16384, 112)
    """
    s = tasks.SHAPES[shape]
    return 2 * s["layers"] * s["kv_heads"] * s["head"] * (2 if dtype == "bfloat16" else 4)


def rate_at(rates: Mapping[int, float], rows: int) -> float:
    """The rate at a number of rows: the time of a pass is linear between the two measured next to it.

    >>> rate_at({1: 1.0, 3: 1.0, 7: 7.0}, 2), rate_at({1: 1.0, 3: 1.0, 7: 7.0}, 9), rate_at({4: 5.0}, 1)
    (1.0, 7.0, 5.0)
    """
    known = sorted(rates)
    above = bisect_left(known, rows)
    if above in (0, len(known)):
        return rates[known[min(above, len(known) - 1)]]
    a, b = known[above - 1], known[above]
    share = (rows - a) / (b - a)
    return rows / ((1 - share) * a / rates[a] + share * b / rates[b])


def floor_seconds(
    shape: str,
    dtype: str,
    *,
    vocabulary: int,
    prompt: int,
    lengths: Sequence[int],
    generations: int,
    rates: Mapping[int, float],
    copy: float,
) -> float:
    """The least time of a rollout, prefill included.

    Args: shape: a name of tasks.SHAPES. prompt: tokens of every prompt. lengths: tokens of the completions, those of a
        prompt beside each other. generations: completions of a prompt. rates: rows -> GFLOP/s. copy: GB/s.
    Returns: seconds.

    >>> rates = {1: 50.331648}  # 25 million weights, twice: a millisecond for a row of the layers
    >>> one = floor_seconds("25m", "float32", vocabulary=0, prompt=1, lengths=[1], generations=1, rates=rates, copy=1e9)
    >>> round(one, 5)
    0.001
    """
    s = tasks.SHAPES[shape]
    layers, head = weights_of(shape, vocabulary)
    size, kv = (2 if dtype == "bfloat16" else 4), kv_bytes(shape, dtype)
    pair = 4 * s["layers"] * s["heads"] * s["head"]  # FLOPs for one token to look at another
    prompts = len(lengths) // generations

    def step(flops: float, rows: int, read: float) -> float:
        return max(flops / rate_at(rates, rows), read / copy) / 1e9

    looks = prompt * (prompt + 1) // 2
    flops = prompts * (2 * prompt * layers + 2 * head + pair * looks)
    total = step(flops, prompts * prompt, (layers + head) * size + prompts * prompt * kv)
    for made in range(1, max(lengths)):
        live = [i for i, n in enumerate(lengths) if n > made]
        rows, groups = len(live), len({i // generations for i in live})
        flops = rows * (2 * (layers + head) + pair * (prompt + made))
        total += step(flops, rows, (layers + head) * size + (groups * prompt + rows * made) * kv)
    return total


def measure(shape: str, dtype: str, *, device: str, rows: Sequence[int], trial_s: float = 0.1) -> dict[str, Any]:
    """This machine's rates: {"rates": {rows: GFLOP/s}, "kernels": {rows: name}, "copy": GB/s}."""
    import torch

    args = argparse.Namespace(shape=shape, device=device, trial_s=trial_s, copy_mib=256)
    with torch.inference_mode():
        found = {n: machine.decode_rates(args, dtype, n) for n in rows}
        copy = machine.copy_rate(args)
    return {
        "rates": {n: f["gflop_per_s"] for n, f in found.items()},
        "kernels": {n: f["kernel"] for n, f in found.items()},
        "copy": copy,
    }
