"""What trainer.show_samples shows: one prompt of a step, with its best and its worst completion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from whet.evaluation.sample import completion_line, shown_text
from whet.types import Group

if TYPE_CHECKING:
    from whet.rewards.manager import RewardBatch

__all__ = ["sample_shown"]


def sample_shown(step: int, rewarded: RewardBatch) -> str:
    """A prompt of a step with its best and its worst completion, as lines for the log.

    It is the first from the place `step` on whose completions have different rewards, so that each time it is another.
    Args: step: which it is. rewarded: its groups, texts and rewards.
    """
    bounds = np.cumsum([0, *rewarded.sizes])
    count = len(rewarded.groups)
    order = [(step + i) % count for i in range(count)]
    rewards = [rewarded.total[bounds[i] : bounds[i + 1]] for i in range(count)]
    chosen = next((i for i in order if len(set(rewards[i][~np.isnan(rewards[i])])) > 1), order[0])
    group, own = rewarded.groups[chosen], rewards[chosen]
    texts = {c.generation: (c, text) for c, text in zip(group.completions, rewarded.texts[chosen], strict=True)}
    done = list(texts.values())  # of forks of a conversation the last, which has all of it
    known = np.where(np.isnan(own), -math.inf, own)
    best, worst = int(known.argmax()), int(np.where(np.isnan(own), math.inf, own).argmin())
    lines = [f"sample of step {step}, row {group.prompt.row}: {shown_text(group.prompt.source)}"]
    if len(set(own[~np.isnan(own)])) > 1:
        lines += [completion_line("best", own[best], *done[best]), completion_line("worst", own[worst], *done[worst])]
    else:
        lines.append(completion_line(_all_alike(group), own[best], *done[best]))
    return "\n".join(lines)


def _all_alike(group: Group) -> str:
    """What a completion is called whose reward is that of all."""
    count = len({c.generation for c in group.completions})
    return "the one completion" if count == 1 else f"one of {count}, no reward better than another"
