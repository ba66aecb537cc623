"""Checks of the weights that an engine with a copy of its own has got: a wrong sync shows in no loss.

    checksums      of each tensor that is sent; processes compare theirs, and an error names the tensors that differ
    probe          the engine draws a few tokens after a fixed prompt, and the trainer computes their logprobs too

Left out on purpose: engines that read the trainer's own weights, to which nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from whet.errors import EngineError
from whet.models.self_check import probe_tokens, tolerance_for
from whet.parallel.ranks import Ranks
from whet.rollout.base import Sampling, sampling_processors
from whet.rollout.driver import RolloutDriver, single_turn
from whet.types import Prompt, TokenBatch
from whet.util.tensor_sums import tensor_sums

if TYPE_CHECKING:
    from whet.train.worker import ModelWorker

__all__ = ["SyncCheck"]

TOLERANCE = {"wide": 1e-3, "half": 0.25}
"""Largest mean difference of logprobs; vLLM's were 3e-6 (fp32) and 0.03 (bf16), stale weights some 10."""
PROBE = Sampling(max_tokens=8, temperature=1.0)
"""How the probe's tokens are drawn."""
NAMES = 5
"""The most tensors that an error names."""


class SyncCheck:
    """The checks of every n-th sync.

    Args: every: n; 0 = none is checked. ranks: the processes, each with an engine of its own.
    """

    def __init__(self, every: int, ranks: Ranks) -> None:
        self.every, self.ranks = every, ranks
        self.gap: float | None = None
        """The mean difference of the logprobs of the last probe, until it is read."""
        self._sums: dict[str, bytes] | None = None
        """The checksums of the last sync's tensors; None = they were not taken, or have been compared."""

    def watch(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights as they are; takes their checksums if this sync is checked. Args: version: of the
        policy.
        """
        if not self.every or version % self.every:
            yield from weights
            return
        sums: dict[str, bytes] = {}
        for name, weight in weights:
            sums[name] = tensor_sums(weight)
            yield name, weight
        self._sums = sums

    def finish(self, driver: RolloutDriver, policy: ModelWorker, vocabulary: int | None) -> None:
        """Checks the last sync, if that is due and the engine is idle. Every rank must call it.

        Args: driver: of the engine. policy: whole on this rank. vocabulary: number of ids; None = unknown.
        Raises: EngineError: the engine's logprobs are not the policy's. WhetError: the processes sent other weights.
        """
        if self._sums is None or not driver.engine.caps.logprobs:
            return
        if not all(self.ranks.all_gather(driver.engine.stats().in_flight == 0)):
            return
        sums, self._sums = self._sums, None
        self.ranks.check_same("set of weights for its engine", {name: x.hex()[:16] for name, x in sums.items()})
        gaps = self.ranks.all_gather(_probe(driver, policy, vocabulary or policy.loaded.num_ids))
        self.gap = max(gaps)
        limit = tolerance_for(policy.dtype, TOLERANCE)
        if all(gap <= limit for gap in gaps):  # NaN is not
            return
        raise EngineError(
            f"{self.ranks.describe()}: after the weights of version {policy.version} were sent, the logprobs of "
            f"{type(driver.engine).__name__} differ from the trainer's by {self.gap:.1e} on average (rounding: below "
            f"{limit}), so it samples from another policy{_differing(driver.engine, sums)}; look for weights that it "
            "renamed, skipped or cast, or set rollout.sync_check_every_n_syncs=0 if it rounds that much"
        )


@torch.no_grad()
def _probe(driver: RolloutDriver, policy: ModelWorker, vocabulary: int) -> float:
    """Returns the mean difference of the engine's logprobs of a few tokens from the policy's."""
    next_id = driver.next_id
    prompt = Prompt(tokens=np.array(probe_tokens(vocabulary), np.int32), source="")
    groups = driver.run([single_turn(prompt, PROBE, rng_key=(0, 0, 0, 0))])
    driver.next_id = next_id  # a run with a check has the ids of one without
    batch = TokenBatch.from_groups(groups)
    own = policy.logprobs(batch, processors=sampling_processors(PROBE)).logprobs
    assert own is not None
    return float((own - batch.sampler_logprobs).abs().double().mean())


def _differing(engine: object, sums: dict[str, bytes]) -> str:
    """Returns the tensors that differ from those that were sent, of an engine whose method `named_weights` shows its
    own.
    """
    named: Callable[[], Iterable[tuple[str, Tensor]]] | None = getattr(engine, "named_weights", None)
    if named is None:
        return ""
    wrong = [name for name, weight in named() if sums.get(name, tensor_sums(weight)) != tensor_sums(weight)]
    more = f" and {len(wrong) - NAMES} more" if len(wrong) > NAMES else ""
    return f": {', '.join(wrong[:NAMES])}{more} differ from what was sent" if wrong else ", with the tensors as sent"
