"""What a TrainExample holds, as tensors on the CPU whose shapes fit: it is made by hand, of torch, numpy or lists.

Dim letters: B rows, P prompt, C completion.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import DataError, format_value
from whet.types.records import TrainExample

__all__ = ["checked_example"]

MASKS = {"prompt_mask": "prompt_ids", "completion_mask": "completion_ids"}
"""Mask -> the ids that it is of."""


def checked_example(example: Any) -> TrainExample:
    """The same with tensors on the CPU: ids Long, masks Bool, numbers fp32 or, where given so, fp64.

    Args: example: a TrainExample of tensors, numpy arrays, or whatever numpy reads (lists, jax's arrays).
    Raises: DataError: it is no TrainExample, or an array has a shape, a type or a value that it may not have.

    >>> ones = np.ones((1, 2), int)
    >>> e = TrainExample(
    ...     prompt_ids=ones, prompt_mask=ones, completion_ids=ones, completion_mask=ones, advantages=np.zeros(3)
    ... )
    >>> checked_example(e)
    Traceback (most recent call last):
    whet.errors.DataError: TrainExample.advantages has shape [3]; give [B] or [B, C], here [1] or [1, 2]
    """
    if not isinstance(example, TrainExample):
        fix = "TrainExample(**it)" if isinstance(example, dict) else "TrainExample(prompt_ids=..., ...)"
        raise DataError(f"expected a TrainExample or a TokenBatch, got {type(example).__name__}; give {fix}")
    given = {f.name: getattr(example, f.name) for f in dataclasses.fields(example)}
    made = {name: _tensor(name, value) for name, value in given.items() if value is not None}
    required = [f.name for f in dataclasses.fields(example) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in made]:
        raise DataError(f"TrainExample.{missing[0]} is None; give an array")
    ids = {name: _whole(name, made[name]) for name in MASKS.values()}
    rows = len(ids["completion_ids"])
    if len(ids["prompt_ids"]) != rows:
        shapes = " and ".join(f"{name} {list(x.shape)}" for name, x in ids.items())
        raise DataError(f"TrainExample: {shapes} differ in rows; give [B, P] and [B, C] of the same B")
    if not rows:
        raise DataError("TrainExample has no rows; give at least one")
    masks = {name: _mask(name, made[name], of, ids[of]) for name, of in MASKS.items()}
    counted = masks["completion_mask"]
    others = {n: _numbers(n, x, counted) for n, x in made.items() if n not in ids and n not in masks}
    return TrainExample(**ids, **masks, **others)


def _tensor(name: str, value: Any) -> Tensor:
    """Any array as a tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
        return torch.from_numpy(np.array(array, np.float32) if array.dtype.name == "bfloat16" else array.copy())
    except (TypeError, ValueError):  # rows of several lengths, texts
        raise DataError(
            f"TrainExample.{name} is no array of numbers: {format_value(value, 80)}; give a tensor or a numpy array, "
            "its rows padded to one length"
        ) from None


def _whole(name: str, x: Tensor) -> Tensor:
    """Ids: Long [B, .]."""
    if x.dim() != 2 or not x.shape[1]:
        dims = "[B, P]" if name == "prompt_ids" else "[B, C]"
        raise DataError(f"TrainExample.{name} has shape {list(x.shape)}; give {dims}, a row of ids for each completion")
    if x.is_floating_point() or x.dtype == torch.bool:
        kind = str(x.dtype).removeprefix("torch.")
        raise DataError(f"TrainExample.{name} is {kind}; token ids are integers: give {name}.astype('int64')")
    return x.long()


def _mask(name: str, x: Tensor, of: str, ids: Tensor) -> Tensor:
    """A mask of the shape of its ids: Bool. Where it is 1 no id is negative."""
    if x.shape != ids.shape:
        raise DataError(f"TrainExample.{name} has shape {list(x.shape)}; it must be that of {of}, {list(ids.shape)}")
    if not bool(((x == 0) | (x == 1)).all()):
        wrong = x[(x != 0) & (x != 1)][0].item()
        raise DataError(f"TrainExample.{name} holds {wrong:g}; it is 1 at tokens that count and 0 elsewhere")
    mask = x.bool()
    read = mask if of == "prompt_ids" else mask.flip(1).cummax(1).values.flip(1)  # a hole is read, and not trained
    if bool((wrong := read & (ids < 0)).any()):
        row, place = wrong.nonzero()[0].tolist()
        raise DataError(
            f"TrainExample.{of}[{row}, {place}] is {int(ids[row, place])}; ids are 0 or more up to the last 1 of {name}"
        )
    return mask


def _numbers(name: str, x: Tensor, counted: Tensor) -> Tensor:
    """A column of numbers: Float [B, C], advantages [B] too, finite where completions are trained."""
    rows, whole = [len(counted)], list(counted.shape)
    shape, rule, here = list(x.shape), "[B, C]", f"{whole}"
    if name == "advantages":
        rule, here = "[B] or [B, C]", f"{rows} or {whole}"
    if shape != whole and not (name == "advantages" and shape == rows):
        raise DataError(f"TrainExample.{name} has shape {shape}; give {rule}, here {here}")
    if x.is_complex():
        raise DataError(f"TrainExample.{name} is complex; give real numbers")
    x = x if x.dtype == torch.float64 else x.float()
    wrong = ~x.isfinite() & (counted if shape == whole else counted.any(1))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise DataError(f"TrainExample.{name} is not finite in row {row}; leave the row out, or fix the number")
    return x
