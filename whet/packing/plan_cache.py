"""PlanCache: plans the micro-batches of a batch once for all passes over it.

Scoring by the actor, scoring by the reference and the update run the same sequences, most often within the same limits.
The columns that these passes add do not change the plan. The cache's key is therefore a digest of the batch's integers
and the limits. A plan is kept until another batch comes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

from whet.packing.micro_batch import MicroBatch
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.types import TokenBatch

__all__ = ["PlanCache"]


class PlanCache:
    """The plans of the last batch, one for each set of limits. All workers of a cluster share one cache.

    >>> import numpy as np
    >>> from whet.types import Example, TrainSequence
    >>> two = (TrainSequence(prefix=np.array([5, 6]), tokens=np.array([t, 2]), mask=np.ones(2, bool)) for t in (7, 8))
    >>> batch = TokenBatch.from_examples([Example(sequences=tuple(two))])
    >>> cache = PlanCache()
    >>> [micro.input_ids.tolist() for micro in cache.get(batch, max_tokens=100)]
    [[[5, 6, 7, 8]]]
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all plans."""
        self.digest = b""
        """Of the integers of the latest batch."""
        self._kept: dict[frozenset[tuple[str, Any]], list[MicroBatch]] = {}

    def get(self, batch: TokenBatch, **limits: Any) -> list[MicroBatch]:
        """Returns `plan_micro_batches(batch, **limits)`, planned once for equal sequences and equal limits.

        Args: batch: the sequences to run. limits: arguments of plan_micro_batches, except `device`.
        Returns: the micro-batches on the CPU. Each has a new layout, so masks and tables that attention caches in a
            layout are freed with the pass.
        """
        digest = _digest(batch)
        if digest != self.digest:
            self.clear()
            self.digest = digest
        key = frozenset(limits.items())
        if key not in self._kept:
            with torch.inference_mode(False):  # they outlive this pass, and the next may need gradients
                self._kept[key] = plan_micro_batches(batch, **limits)
        return [
            dataclasses.replace(micro, batch=batch, layout=micro.layout and micro.layout.to("cpu"))
            for micro in self._kept[key]
        ]


def _digest(batch: TokenBatch) -> bytes:
    """Digest of the integers that determine a plan: prefixes, completions and units."""
    digest = hashlib.blake2b(digest_size=16)
    for x in (batch.prefixes, batch.prefix_ends, batch.prefix_of, batch.tokens, batch.ends, batch.unit_of):
        digest.update(f"{x.dtype} {len(x)} ".encode())
        digest.update(x.contiguous().numpy().data)
    return digest.digest()
