"""compute_metrics: the logits or scores of an evaluation set, computed by the model's own forward on padded rows.

whet's learners hold no logits, so this is a second pass, over batches of per_device_eval_batch_size rows. As in TRL,
all logits are held at once; preprocess_logits_for_metrics reduces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from whet.models.modes import eval_mode
from whet.types import Example, TokenBatch, TrainSequence

__all__ = ["compute_user_metrics"]

_NONE = -100
"""What fills rows up, and labels what is not trained, as in transformers."""
Predicted = tuple[Tensor, Any]
"""Logits or scores, and labels."""


def compute_user_metrics(trainer: Any, examples: Sequence[Example]) -> dict[str, float]:
    """What a user's compute_metrics makes of an evaluation set.

    Args: trainer: the trainer, with compute_metrics and preprocess_logits_for_metrics. examples: the rows.
    """
    size, compute = trainer.args.per_device_eval_batch_size, trainer.compute_metrics
    parts = [examples[i : i + size] for i in range(0, len(examples), size)]
    kind = {"SFT": _of_texts, "DPO": _of_pairs, "Reward": _of_scores}[trainer.METHOD]
    found: dict[str, float] = {}
    made: list[tuple[np.ndarray, Any]] = []
    for i, part in enumerate(parts):
        logits, labels = kind(trainer, part)
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        arrays = logits.float().cpu().numpy(), labels.numpy() if isinstance(labels, Tensor) else labels
        if trainer.args.batch_eval_metrics:
            found = compute(EvalPrediction(*arrays), compute_result=i == len(parts) - 1)
        else:
            made.append(arrays)
    if trainer.args.batch_eval_metrics:
        return found
    labels = _joined([labels for _, labels in made]) if isinstance(made[0][1], np.ndarray) else ()
    return compute(EvalPrediction(_joined([logits for logits, _ in made]), labels))  # pyright: ignore[reportArgumentType]


def _of_texts(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """[B T V] and [B T], -100 where nothing is trained."""
    sequences = [s for e in examples for s in e.sequences]
    ids, logits = _forward(trainer, sequences)
    labels = torch.full_like(ids, _NONE)
    for row, s in zip(labels, sequences, strict=True):
        trained = torch.from_numpy(np.where(s.mask, s.tokens, _NONE)).to(row)
        row[len(s.prefix) : len(s.prefix) + len(s.tokens)] = trained
    return logits, labels


def _of_pairs(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """[2B T V] and the ids [2B T]: the chosen answers, then the rejected ones."""
    ids, logits = _forward(trainer, [e.sequences[side] for side in (0, 1) for e in examples])
    return logits, ids


def _of_scores(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """[2B 1]: the scores of the chosen answers, then of the rejected ones; there are no labels."""
    batch = TokenBatch.from_examples([Example(sequences=e.sequences, row=e.row) for e in examples])
    return trainer.worker.scores(batch).view(-1, 2).T.reshape(-1, 1), ()


@torch.no_grad()
def _forward(trainer: Any, sequences: Sequence[TrainSequence]) -> tuple[Tensor, Tensor]:
    """The ids [B T], filled up on the right, and their logits [B T V], on the CPU."""
    rows = [np.concatenate([s.prefix, s.tokens]) for s in sequences]
    width, tokenizer = max(map(len, rows)), trainer.processing_class
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row.astype(np.int64)), 1
    device, module = trainer.worker.device, trainer.worker.module
    with trainer.attention.native(), eval_mode(module):
        logits = module(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    return ids, logits.cpu()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Batches one after the other, those that are narrower filled up with -100."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    width = max(a.shape[1] for a in arrays)
    filled = [np.pad(a, [(0, 0), (0, width - a.shape[1]), *[(0, 0)] * (a.ndim - 2)], constant_values=_NONE)
              for a in arrays]  # fmt: skip
    return np.concatenate(filled)
