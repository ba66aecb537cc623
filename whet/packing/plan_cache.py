"""Plans: the micro-batches of a batch, planned once for the passes that go over it.

Scoring by the actor, by the reference and the update run the same sequences, most often within the same limits; the
columns that they add change no plan. So a plan is known by what it is made from: the integers of the batch, and the
limits. It is kept until another batch comes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

from whet.packing.micro_batch import MicroBatch
from whet.packing.planner import plan_micro_batches
from whet.types import TokenBatch

__all__ = ["Plans"]


class Plans:
    """The plans of the last batch, one for each set of limits that it was run within. Workers of a cluster share one.

    >>> from whet.packing.padded import padded_batch
    >>> batch, _ = padded_batch([[5, 6], [5, 6]], [[7, 2], [8, 2]], 0, [2])
    >>> plans = Plans()
    >>> [micro.input_ids.tolist() for micro in plans.of(batch, max_tokens=100)]
    [[[5, 6, 7, 8]]]
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forgets all: the next batch is another."""
        self._digest = b""
        self._kept: dict[frozenset[tuple[str, Any]], list[MicroBatch]] = {}

    def of(self, batch: TokenBatch, **limits: Any) -> list[MicroBatch]:
        """What `plan_micro_batches(batch, **limits)` gives, made once for equal sequences under equal limits.

        Args: batch: what to run. limits: as plan_micro_batches has them; all but `device`.
        Returns: the micro-batches, on the CPU, of this batch and with layouts of their own: what attention makes of a
            layout (masks, tables) is freed with the pass.
        """
        digest = _digest(batch)
        if digest != self._digest:
            self.drop()
            self._digest = digest
        key = frozenset(limits.items())
        if key not in self._kept:
            with torch.inference_mode(False):  # they outlive this pass, and the next one may need a gradient
                self._kept[key] = plan_micro_batches(batch, **limits)
        return [
            dataclasses.replace(micro, batch=batch, layout=micro.layout and micro.layout.to("cpu"))
            for micro in self._kept[key]
        ]


def _digest(batch: TokenBatch) -> bytes:
    """Of all that a plan is made from: which tokens follow which prefix, and what stays together."""
    digest = hashlib.blake2b(digest_size=16)
    for x in (batch.prefixes, batch.prefix_ends, batch.prefix_of, batch.tokens, batch.ends, batch.unit_of):
        digest.update(f"{x.dtype} {len(x)} ".encode())
        digest.update(x.contiguous().numpy().data)
    return digest.digest()
