"""Inputs of policy losses, random and small, that several test files build on."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from whet.ops import IMPORTANCE_LEVELS, POLICY_LOSSES, teacher_column
from whet.types import LossInputs

COLUMNS = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "teacher_logprobs")
_OF_LOGPROBS = {name: fn for name, fn in POLICY_LOSSES.items() if teacher_column(fn) != "divergence"}
DISTINCT = sorted({fn: name for name, fn in sorted(_OF_LOGPROBS.items(), reverse=True)}.values())
"""A name of each policy loss, where some have two; without those of whole distributions: see test_divergence.py."""


def cases() -> list[tuple[str, str | None]]:
    """(name, level) of every loss at every level of its ratio; None where it leaves no choice."""
    found = []
    for name in DISTINCT:
        loss = POLICY_LOSSES[name]
        free = name != "gspo-token" and "importance_sampling_level" in inspect.signature(loss).parameters
        found += [(name, level) for level in (sorted(IMPORTANCE_LEVELS) if free else [None])]
    return found


def inputs(logprobs, sequence=None, mask=None, *, dtype=torch.float32, **columns) -> LossInputs:
    """LossInputs of lists; teacher_logprobs is not a well-known column."""
    as_tensor = lambda values: torch.as_tensor(values, dtype=dtype)
    n = len(logprobs)
    return LossInputs(
        sequence=torch.tensor([0] * n if sequence is None else sequence),
        mask=torch.tensor([True] * n if mask is None else mask),
        logprobs=as_tensor(logprobs),
        token_columns={k: as_tensor(v) for k, v in columns.items()},
    )


def random_inputs(seed, lengths=(3, 1, 5, 2), *, spread=0.5, masked=True, dtype=torch.float64) -> LossInputs:
    """Sequences of these lengths, an advantage each; a fifth of the tokens and all of the last sequence masked out."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    draw = lambda: torch.randn(n, generator=g, dtype=torch.float64)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64).index_select(0, sequence)
    logprobs = -1 - draw().abs()
    mask = torch.ones(n, dtype=torch.bool)
    if masked:
        mask = (torch.rand(n, generator=g) < 0.8) & (sequence < len(lengths) - 1)
    return inputs(
        logprobs,
        sequence.tolist(),
        mask.tolist(),
        dtype=dtype,
        old_logprobs=logprobs + spread * draw(),
        ref_logprobs=logprobs + draw(),
        sampler_logprobs=logprobs + spread * draw(),
        advantages=advantages,
        teacher_logprobs=logprobs + draw(),
    )


def changed(x: LossInputs, **columns) -> LossInputs:
    """The same with other fields or columns; a column that is None is left out."""
    fields = {k: v for k, v in columns.items() if k in vars(x)}
    token_columns = {**x.token_columns, **{k: v for k, v in columns.items() if k not in fields}}
    token_columns = {k: v for k, v in token_columns.items() if v is not None}
    return LossInputs(**{**vars(x), **fields, "token_columns": token_columns})


def gradient(loss, x: LossInputs, weights: Tensor | float = 1.0):
    """(loss [s], metrics, d(Σ w·loss)/d logprobs [s])."""
    logprobs = x.logprobs.detach().clone().requires_grad_()
    found, metrics = loss(changed(x, logprobs=logprobs))
    (found * weights).sum().backward()
    assert logprobs.grad is not None
    return found.detach(), metrics, logprobs.grad
