"""The lines of trainer.show_samples: one prompt of a step, with its best and its worst completion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from whet.evaluation.sample import format_completion, format_text

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = ["describe_sample"]


def describe_sample(step: int, rewards: RewardBatch) -> str:
    """Returns one prompt of a step with its best and its worst completion, as lines for the log.

    The search for a prompt whose completions have different rewards starts at the place `step`, so that each step shows
    another prompt.
    Args: step: its number. rewards: of the step.
    """
    totals, spread, count = rewards.totals_by_group, rewards.have_spread, len(rewards.groups)
    order = [(step + i) % count for i in range(count)]
    chosen = next((i for i in order if spread[i]), order[0])
    group, own = rewards.groups[chosen], totals[chosen]
    done = [(group.completions[place], rewards.texts[chosen][place]) for place in group.last]
    known = np.where(np.isnan(own), -math.inf, own)
    best, worst = int(known.argmax()), int(np.where(np.isnan(own), math.inf, own).argmin())
    lines = [f"sample of step {step}, row {group.prompt.row}: {format_text(group.prompt.source)}"]
    if len(set(own[~np.isnan(own)])) > 1:
        lines += [
            format_completion("best", own[best], *done[best]),
            format_completion("worst", own[worst], *done[worst]),
        ]
    else:
        title = "the one completion" if len(done) == 1 else f"one of {len(done)}, no reward better than another"
        lines.append(format_completion(title, own[best], *done[best]))
    return "\n".join(lines)
