"""Calls compute_metrics with the logits or scores of an evaluation set.

Whet's learners keep no logits, so this is a second pass: the model's own forward on padded batches of
per_device_eval_batch_size rows. As in TRL, all logits are in memory at once; preprocess_logits_for_metrics can reduce
them.
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

_IGNORE = -100
"""The label of untrained tokens and of padding, as in transformers."""
Predicted = tuple[Tensor, Any]
"""Logits or scores, and labels."""


def compute_user_metrics(trainer: Any, examples: Sequence[Example]) -> dict[str, float]:
    """Computes a user's metrics of an evaluation set.

    Args: trainer: has compute_metrics and preprocess_logits_for_metrics. examples: the rows.
    """
    size, compute = trainer.args.per_device_eval_batch_size, trainer.compute_metrics
    batches = [examples[i : i + size] for i in range(0, len(examples), size)]
    predict = {"SFT": _predict_texts, "DPO": _predict_pairs, "Reward": _predict_scores}[trainer.METHOD]
    metrics: dict[str, float] = {}
    predictions: list[tuple[np.ndarray, Any]] = []
    for i, batch in enumerate(batches):
        logits, labels = predict(trainer, batch)
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        arrays = logits.float().cpu().numpy(), labels.numpy() if isinstance(labels, Tensor) else labels
        if trainer.args.batch_eval_metrics:
            metrics = compute(EvalPrediction(*arrays), compute_result=i == len(batches) - 1)
        else:
            predictions.append(arrays)
    if trainer.args.batch_eval_metrics:
        return metrics
    logits, labels = zip(*predictions, strict=True)
    joined: Any = _concatenate(labels) if isinstance(labels[0], np.ndarray) else ()
    return compute(EvalPrediction(_concatenate(logits), joined))


def _predict_texts(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """Returns logits [B T V] and labels [B T]."""
    sequences = [s for e in examples for s in e.sequences]
    ids, logits = _forward(trainer, sequences)
    labels = torch.full_like(ids, _IGNORE)
    for row, s in zip(labels, sequences, strict=True):
        trained = torch.from_numpy(np.where(s.mask, s.tokens, _IGNORE)).to(row)
        row[len(s.prefix) : len(s.prefix) + len(s.tokens)] = trained
    return logits, labels


def _predict_pairs(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """Returns logits [2B T V] and ids [2B T]: the chosen answers, then the rejected ones."""
    ids, logits = _forward(trainer, [e.sequences[side] for side in (0, 1) for e in examples])
    return logits, ids


def _predict_scores(trainer: Any, examples: Sequence[Example]) -> Predicted:
    """Scores [2B 1]: the chosen answers, then the rejected ones; no labels."""
    batch = TokenBatch.from_examples([Example(sequences=e.sequences, row=e.row) for e in examples])
    return trainer.worker.scores(batch).view(-1, 2).T.reshape(-1, 1), ()


@torch.no_grad()
def _forward(trainer: Any, sequences: Sequence[TrainSequence]) -> tuple[Tensor, Tensor]:
    """Ids [B T], padded on the right, and their logits [B T V], on the CPU."""
    rows = [np.concatenate([s.prefix, s.tokens]) for s in sequences]
    width, tokenizer = max(map(len, rows)), trainer.processing_class
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row.astype(np.int64)), 1
    device, module = trainer.worker.device, trainer.worker.module
    with trainer.attention.native(), eval_mode(module):
        logits = module(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    return ids, logits.cpu()


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates batches; narrower ones are padded with -100 to the width of the widest."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    width = max(a.shape[1] for a in arrays)
    padded = [np.pad(a, [(0, 0), (0, width - a.shape[1]), *[(0, 0)] * (a.ndim - 2)], constant_values=_IGNORE)
              for a in arrays]  # fmt: skip
    return np.concatenate(padded)
