"""TokenStatsRecorder: keeps the trained model's logprob and entropy of each token, for the files of completions.

They are those of the update itself, so they cost no pass. A token that a step updates several times has the values of
the last update; one that no update runs, such as those of completions without signal, has NaN.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.config import RLTrainingConfig
from whet.learners.step_metrics import TOKEN_STATS
from whet.types import LossInputs, TokenBatch

__all__ = ["TokenStatsRecorder"]

log = logging.getLogger("whet")

PLACE = "place_in_step"
"""Column: the place of each token in the batch of the step."""


class TokenStatsRecorder:
    """Records one step at a time: `start`, `record` in each pass of an update, `finish`.

    Args: config: token_stats_every_n_steps, token_stats_max_mb and run_dir are read. all_gather: of the cluster's
        ranks; each process runs a part of an update.
    """

    def __init__(self, config: RLTrainingConfig, all_gather: Callable[[Any], list[Any]]) -> None:
        self.config, self.all_gather = config, all_gather
        self._parts: list[tuple[Tensor, ...]] = []
        self._is_full = False

    def start(self, index: int, batch: TokenBatch) -> TokenBatch:
        """Returns the batch as it is, or with PLACE where the step is recorded. Args: index: the number of the step."""
        self._parts = []
        if not self._is_due(index):
            return batch
        return batch.with_token_columns(**{PLACE: torch.arange(batch.num_tokens)})

    def record(self, x: LossInputs) -> None:
        """Keeps the values of a micro-batch."""
        place = x.token_columns.get(PLACE)
        if place is not None and x.entropy is not None:
            unknown = ~x.mask
            self._parts.append(
                (place, *(v.detach().float().masked_fill(unknown, math.nan) for v in (x.logprobs, x.entropy)))
            )

    def finish(self, batch: TokenBatch) -> TokenBatch:
        """Returns the batch with TOKEN_STATS if the step was recorded. Every rank must call it."""
        if PLACE not in batch.token_columns:
            return batch
        own = [torch.cat(parts).cpu() for parts in zip(*self._parts, strict=True)]
        self._parts = []
        columns = {name: torch.full((batch.num_tokens,), math.nan) for name in TOKEN_STATS}
        for gathered in filter(None, self.all_gather(own)):
            place, *values = gathered
            for column, value in zip(columns.values(), values, strict=True):
                column[place] = value  # later updates replace earlier ones
        return batch.with_token_columns(**columns)

    def _is_due(self, index: int) -> bool:
        every, folder = self.config.token_stats_every_n_steps, self.config.run_dir
        if folder is None or not every or index % every or self._is_full:
            return False
        limit = self.config.token_stats_max_mb
        size = sum(path.stat().st_size for path in (Path(folder) / "completions").glob("*.parquet"))
        self._is_full = self.all_gather(size / 1e6 >= limit)[0]  # as rank 0 sees it
        if self._is_full:
            log.warning(
                "the completions of the run take %g MB, so values of single tokens are no longer stored; "
                "trainer.token_stats_max_mb sets the limit",
                limit,
            )
        return not self._is_full
