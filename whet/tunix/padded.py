"""Tunix's padded arrays and their way to whet's batches: left-padded prompts [B, P], right-padded completions [B, C].

Only here does whet make masks from ids: a padded prompt begins after its leading pads, a padded completion ends with
its first end id. Everywhere else in whet the lengths are known.

Dim legend: B rows, P prompt, C completion, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import DataError, format_value
from whet.rollout.text import pad_left
from whet.types import Group, TokenBatch

__all__ = [
    "RolloutOutput",
    "TrainExample",
    "batch_to_example",
    "check_example",
    "completion_mask",
    "example_to_batch",
    "pad_column",
    "padded_batch",
    "prompt_mask",
    "rollout_output",
]

MASKS = {"prompt_mask": "prompt_ids", "completion_mask": "completion_ids"}
"""The name of a mask -> the name of its ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutOutput:
    """What `generate` returns: one entry per prompt.

    Example: generate(["2+2="]) -> RolloutOutput(text=["4"], logits=None, tokens=[array([52, 256])],
    left_padded_prompt_tokens=array([[50, 43, 50, 61]]), logprobs=None).
    """

    text: list[str]
    """Completions, special tokens left out."""
    logits: list[np.ndarray] | None
    """float32 [C, V] each, on request."""
    tokens: list[np.ndarray]
    """int32 [C] each, stop token included, not padded."""
    left_padded_prompt_tokens: np.ndarray
    """int32 [B, P]."""
    logprobs: list[np.ndarray] | None
    """float32 [C] each, where RolloutConfig.return_logprobs asks for them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainExample:
    """A padded batch: [B, P] left-padded prompts and [B, C] right-padded completions.

    Example: prompt [5, 6] and completions [7, 2], [8]: prompt_ids [[5,6],[5,6]], prompt_mask all 1,
    completion_ids [[7,2],[8,0]], completion_mask [[1,1],[1,0]], advantages [1., -1.].
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    """[B] or [B, C]."""
    ref_per_token_logps: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None


# ---- masks of ids ----------------------------------------------------------------------------------------------------


def prompt_mask(ids: Tensor, pad_id: int) -> Tensor:
    """Returns True from the first id that isn't padding: Bool [B, P]. A pad id inside a prompt is part of it.

    >>> prompt_mask(torch.tensor([[0, 5, 0, 6]]), 0)
    tensor([[False,  True,  True,  True]])
    """
    return (ids != pad_id).cummax(1).values.bool()


def completion_mask(ids: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Returns True up to and including the first end id, everywhere where there is none: Bool [B, C].

    >>> completion_mask(torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]]), [0])
    tensor([[ True,  True,  True, False],
            [ True,  True,  True,  True]])
    """
    ended = torch.isin(ids, torch.as_tensor(list(eos_ids), dtype=ids.dtype))
    return ended.long().cumsum(1) - ended.long() == 0


# ---- from padded arrays to a batch -----------------------------------------------------------------------------------


def padded_batch(
    prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_ids: Sequence[int]
) -> tuple[TokenBatch, Tensor]:
    """Converts padded arrays to a TokenBatch.

    Args: prompt_tokens: [B, P], left-padded. completion_tokens: [B, C], right-padded.
    Returns: the batch, and a mask, Bool [B, C], True at its tokens.
    Raises: DataError: shapes that don't fit.
    """
    prompts, completions = torch.as_tensor(prompt_tokens).long().cpu(), torch.as_tensor(completion_tokens).long().cpu()
    if prompts.dim() != 2 or completions.dim() != 2 or len(prompts) != len(completions):
        raise DataError(
            f"prompt_tokens {tuple(prompts.shape)} and completion_tokens {tuple(completions.shape)}: "
            "give [B, P] and [B, C] of the same B"
        )
    mask = completion_mask(completions, eos_ids)
    example = TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompt_mask(prompts, pad_id),
        completion_ids=completions,
        completion_mask=mask,
        advantages=torch.zeros(len(prompts)),
    )
    return example_to_batch(example), mask


def example_to_batch(example: Any, *, version: int = 0) -> TokenBatch:
    """Converts a TrainExample to a TokenBatch.

    Args: example: [B, P] and [B, C] arrays. A row whose prompt an earlier row has shares its prefix and group.
        version: stamped on every token.
    Returns: N = J = B; the tokens of a row are those up to its last masked-in one; mask, advantages and logprobs
        follow.
    Raises: DataError: a row with nothing to train, a prompt of no tokens, or arrays that don't fit each other.
    """
    example = check_example(example)
    keep = example.completion_mask
    lengths = torch.where(keep, torch.arange(1, keep.shape[1] + 1), 0).amax(1)
    if (lengths == 0).any():
        row = int((lengths == 0).nonzero()[0])
        raise DataError(f"row {row}: completion_mask is all 0; leave rows with nothing to train out")
    prompts = [tuple(i[m].tolist()) for i, m in zip(example.prompt_ids, example.prompt_mask, strict=True)]
    if () in prompts:
        raise DataError(f"row {prompts.index(())}: prompt_mask is all 0; a prompt needs at least one token")
    places = {p: k for k, p in enumerate(dict.fromkeys(prompts))}
    inside = torch.arange(keep.shape[1]) < lengths[:, None]  # [B C]

    def column(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return (x[:, None].expand_as(keep) if x.dim() == 1 else x)[inside].clone()

    mask = keep[inside]
    old = column(example.old_per_token_logps)
    optional = {
        "old_logprobs": old,
        "ref_logprobs": column(example.ref_per_token_logps),
        "advantages": column(example.advantages),
        "values": column(example.old_values),
        "returns": column(example.returns),
    }
    return TokenBatch(
        prefixes=torch.tensor([t for p in places for t in p]),
        prefix_ends=torch.tensor([len(p) for p in places]).cumsum(0),
        prefix_of=torch.tensor([places[p] for p in prompts]),
        ends=lengths.cumsum(0),
        trajectory_of=torch.arange(len(prompts)),
        group_of=torch.tensor([places[p] for p in prompts]),
        token_columns={
            "tokens": example.completion_ids[inside],
            "mask": mask,
            "sampler_logprobs": torch.zeros(len(mask)) if old is None else old,
            "versions": torch.where(mask, version, -1).to(torch.int32),
            **{name: c for name, c in optional.items() if c is not None},
        },
    )


def check_example(example: Any) -> TrainExample:
    """Checks a TrainExample and returns it with tensors on the CPU: ids Long, masks Bool, numbers fp32 or fp64.

    Args: example: a TrainExample of tensors, numpy arrays, or whatever numpy reads (lists, jax's arrays).
    Raises: DataError: it is no TrainExample, or an array has a shape, a type or a value that it may not have.

    >>> ones = np.ones((1, 2), int)
    >>> e = TrainExample(
    ...     prompt_ids=ones, prompt_mask=ones, completion_ids=ones, completion_mask=ones, advantages=np.zeros(3)
    ... )
    >>> check_example(e)
    Traceback (most recent call last):
    whet.errors.DataError: TrainExample.advantages has shape [3]; give [B] or [B, C], here [1] or [1, 2]
    """
    if not isinstance(example, TrainExample):
        fix = "TrainExample(**it)" if isinstance(example, dict) else "TrainExample(prompt_ids=..., ...)"
        raise DataError(f"expected a TrainExample or a TokenBatch, got {type(example).__name__}; give {fix}")
    fields = {f.name: getattr(example, f.name) for f in dataclasses.fields(example)}
    tensors = {name: _tensor(name, value) for name, value in fields.items() if value is not None}
    required = [f.name for f in dataclasses.fields(example) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in tensors]:
        raise DataError(f"TrainExample.{missing[0]} is None; give an array")
    ids = {name: _whole(name, tensors[name]) for name in MASKS.values()}
    rows = len(ids["completion_ids"])
    if len(ids["prompt_ids"]) != rows:
        shapes = " and ".join(f"{name} {list(x.shape)}" for name, x in ids.items())
        raise DataError(f"TrainExample: {shapes} differ in rows; give [B, P] and [B, C] of the same B")
    if not rows:
        raise DataError("TrainExample has no rows; give at least one")
    masks = {name: _mask(name, tensors[name], of, ids[of]) for name, of in MASKS.items()}
    counted = masks["completion_mask"]
    others = {n: _numbers(n, x, counted) for n, x in tensors.items() if n not in ids and n not in masks}
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
    """Returns a mask of the shape of its ids: Bool. Where it is 1 no id is negative."""
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
    """Returns a column of numbers: Float [B, C], advantages [B] too, finite where completions are trained."""
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


# ---- from a batch to padded arrays -----------------------------------------------------------------------------------


def pad_column(column: Tensor, mask: Tensor) -> Tensor:
    """Puts a column of the token axis back at its places: [B, C], 0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=column.dtype)
    out[mask] = column
    return out


def batch_to_example(batch: TokenBatch, pad_id: int) -> TrainExample:
    """Converts a TokenBatch to a TrainExample: a row for each sequence, masks 1 at trained tokens."""
    ends, starts = batch.ends, torch.cat([batch.ends.new_zeros(1), batch.ends[:-1]])
    lengths = ends - starts
    inside = torch.arange(int(lengths.max())) < lengths[:, None]

    def column(x: Tensor | None, empty: Any = 0) -> Tensor | None:
        if x is None:
            return None
        out = torch.full(inside.shape, empty, dtype=x.dtype)
        out[inside] = x
        return out

    prefix_starts = torch.cat([batch.prefix_ends.new_zeros(1), batch.prefix_ends[:-1]])
    rows = [batch.prefixes[prefix_starts[p] : batch.prefix_ends[p]] for p in batch.prefix_of]
    width = max(len(row) for row in rows)
    prompts = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad_id) for row in rows])
    seen = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    assert batch.advantages is not None
    return TrainExample(
        prompt_ids=prompts,
        prompt_mask=seen,
        completion_ids=column(batch.tokens, pad_id),  # pyright: ignore[reportArgumentType]
        completion_mask=column(batch.mask, False),  # pyright: ignore[reportArgumentType]
        advantages=column(batch.advantages),  # pyright: ignore[reportArgumentType]
        ref_per_token_logps=column(batch.ref_logprobs),
        old_per_token_logps=column(batch.old_logprobs),
        returns=column(batch.returns),
        old_values=column(batch.values),
    )


def rollout_output(
    groups: Sequence[Group],
    decode: Callable[[Any], str],
    pad_id: int,
    *,
    logprobs: bool = True,
    logits: bool = False,
) -> RolloutOutput:
    """Converts completions to texts and arrays: prompt by prompt, the generations of a prompt one after the other.

    Args:
        groups: completed.
        decode: ids to text.
        pad_id: fills the prompts.
        logprobs, logits: whether to give them.
    """
    done = [c for g in groups for c in g.completions]
    return RolloutOutput(
        text=[decode(c.tokens) for c in done],
        logits=[c.logits for c in done] if logits else None,  # pyright: ignore[reportArgumentType]
        tokens=[c.tokens for c in done],
        left_padded_prompt_tokens=pad_left([g.prompt.tokens for g in groups for _ in g.completions], pad_id),
        logprobs=[c.logprobs for c in done] if logprobs else None,
    )
