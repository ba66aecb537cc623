"""The records that travel through a step, from a data set's row to the gradient.

Prompt -> Completion -> Group: read-only numpy, made by data/, rollout/ and rewards/.
Example: a row of supervised training, its sequences, made by data/.
TokenBatch: torch on the CPU, what learners see, identical on every rank.
LossInputs, TokenStats: what a loss receives and what a model returns.

The token axis: the completion tokens of a batch, laid end to end in batch order, are one axis of S tokens. A quantity
per token is a column on it, without padding. A quantity per sequence is a column of N numbers (see columns.py).
Dim legend: K distinct prefixes, N sequences, J trajectories, U units (sequences that stay together), S tokens; s, n
and u are those of a micro-batch (whole sequences, whole units), P prompt, C completion, G group.

A loss returns one number per token, [s], or one per unit, [u]. A batch has weights for one of the two, computed once
per optimizer step: `weights` [S] or `unit_weights` [U]. Metrics have the shape of the loss. Their means are over
trained tokens, or over units with a trained token.
"""

from __future__ import annotations

from whet.types.batch import TokenBatch
from whet.types.loss import LossInputs, TokenStats
from whet.types.records import (
    Completion,
    Example,
    FinishReason,
    Group,
    Message,
    Prompt,
    TrainSequence,
)

__all__ = [
    "Completion",
    "Example",
    "FinishReason",
    "Group",
    "LossInputs",
    "Message",
    "Prompt",
    "TokenBatch",
    "TokenStats",
    "TrainSequence",
]
