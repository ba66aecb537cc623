"""Pairs and labelled rows, random and small, as whet lays them, that several test files build on."""

from __future__ import annotations

import numpy as np
import torch

from whet.config import PreferenceConfig
from whet.learners.from_config import keyword_arguments
from whet.learners.preference_from_config import make_preference_objective
from whet.ops.preference import PREFERENCE_LOSSES, StepPasses, declared_needs, mismatched_rows
from whet.types import Example, LossInputs, TokenBatch, TrainSequence

NEEDED = {"exo_pair": {"label_smoothing": 0.05}, "simpo": {"beta": 2.0}, "alphapo": {"alpha": 0.3}}
"""What a loss can't do without, or is not itself without."""
PAIRS = sorted(name for name, fn in PREFERENCE_LOSSES.items() if declared_needs(fn).rows == "pairs")
LABELS = sorted(set(PREFERENCE_LOSSES) - set(PAIRS))
ALL_PARAMETERS = set().union(*map(keyword_arguments, PREFERENCE_LOSSES.values()))
"""Fields that some loss takes."""


def config(name, **fields):
    """The configuration of one loss."""
    return PreferenceConfig(loss_type=name, **{**NEEDED.get(name, {}), **fields})


def objective(name, **fields):
    """The objective of one loss."""
    return make_preference_objective(config(name, **fields))


def batch_of(sides, *, paired=True, seed=0, masked=False, columns=None, vocabulary=200):
    """A batch of rows, each the lengths of its sequences; under one prompt of its own.

    Args: sides: a list of tuples of lengths. masked: a fifth of the tokens, no sequence's first, is not trained.
    """
    rng = np.random.default_rng(seed)
    examples = []
    for i, lengths in enumerate(sides):
        prefix = rng.integers(0, vocabulary, rng.integers(1, 5))
        sequences = []
        for n in lengths:
            mask = rng.random(n) > 0.2 if masked else np.ones(n, bool)
            mask[0] = True
            sequences.append(TrainSequence(prefix=prefix, tokens=rng.integers(0, vocabulary, n), mask=mask))
        named = columns(i) if columns else {"chosen": tuple(float(k == 0) for k in range(len(lengths)))}
        examples.append(Example(sequences=tuple(sequences), columns=named, row=i))
    return TokenBatch.from_examples(examples, paired=paired)


def random_batch(name, *, rows=6, seed=0, masked=True, dtype=torch.float64):
    """(batch with ref_logprobs, the policy's logprobs [S]) of the rows that a loss needs."""
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)
    if declared_needs(PREFERENCE_LOSSES[name]).rows == "pairs":
        batch = batch_of(rng.integers(1, 7, (rows, 2)).tolist(), seed=seed, masked=masked)
    else:
        labels = lambda i: {"label": (float(i % 3 > 0),)}
        batch = batch_of(rng.integers(1, 7, (rows, 1)).tolist(), seed=seed, masked=masked, columns=labels)
    logprobs = -torch.rand(batch.num_tokens, generator=g, dtype=torch.float64) * 2 - 0.05
    ref = logprobs + 0.5 * torch.randn(batch.num_tokens, generator=g, dtype=torch.float64)
    return batch.with_token_columns(ref_logprobs=ref.to(dtype)), logprobs.to(dtype)


def other_rows(batch, logprobs, max_length=None):
    """The mismatched rows of a batch with made-up logprobs: (policy's, with the reference's as a column)."""
    rows = mismatched_rows(batch, max_length)
    g = torch.Generator().manual_seed(5)
    own = -torch.rand(rows.num_tokens, generator=g, dtype=torch.float64).to(logprobs.dtype)
    ref = own - 0.3 * torch.rand(rows.num_tokens, generator=g, dtype=torch.float64).to(logprobs.dtype)
    return own, rows.with_token_columns(ref_logprobs=ref)


def prepared(made, batch, logprobs, running=None):
    """The batch with the columns that an objective makes of the whole step."""
    own, rows = other_rows(batch, logprobs) if made.needs.mismatched_pass else (None, None)
    passes = StepPasses(logprobs=logprobs.detach(), mismatched=rows, mismatched_logprobs=own)
    return made.with_passes(made.with_counts(batch), passes, running=running)[0]


def inputs(batch, logprobs, sequences=None, **constants):
    """LossInputs of some sequences (whole units) of a batch, in the order given."""
    n = torch.arange(batch.num_sequences) if sequences is None else torch.as_tensor(sequences)
    index = torch.arange(batch.num_tokens)
    tokens = torch.cat([index[int(batch.starts[i]) : int(batch.ends[i])] for i in n.tolist()])
    units = list(dict.fromkeys(batch.unit_of[n].tolist()))
    mask = batch.mask[tokens]
    kept = {k: c for k, c in batch.token_columns.items() if k not in ("mask", "tokens")}
    return LossInputs(
        sequence=torch.arange(len(n)).repeat_interleave(batch.lengths[n]),
        mask=mask,
        logprobs=logprobs[tokens],
        unit_of=torch.tensor([units.index(u) for u in batch.unit_of[n].tolist()]),
        num_sequences=len(n),
        num_units=len(units),
        token_columns={k: c[tokens] for k, c in kept.items()},
        sequence_columns={k: c[n] for k, c in batch.sequence_columns.items()},
        **{k: c[tokens] for k, c in constants.items()},
    )
