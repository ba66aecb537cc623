"""The numbers of a step that come from its samples: lengths, endings, advantages. Names are Tunix's, else TRL's.

Dim letters: N sequences, J trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from whet.metrics import Max, Mean, Metric, Min, Sum
from whet.types import Group

__all__ = ["advantage_metrics", "rollout_metrics", "spread"]


def spread(name: str, values: np.ndarray, *, prefix: bool = False) -> dict[str, Metric]:
    """Mean, max and min of some values, as name/mean or, with `prefix`, as TRL writes it: mean_name.

    >>> sorted(spread("rewards/score", np.array([0.0, 1.0])))
    ['rewards/score/max', 'rewards/score/mean', 'rewards/score/min']
    """
    if len(values) == 0:
        return {}
    head, _, tail = name.rpartition("/")

    def label(how: str) -> str:
        return f"{head}/{how}_{tail}" if prefix else f"{name}/{how}"

    return {
        label("mean"): Mean(float(values.sum()), len(values)),
        label("max"): Max(float(values.max())),
        label("min"): Min(float(values.min())),
    }


def rollout_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Lengths and endings of completions, and what the sampler thought of its tokens."""
    done = [c for g in groups for c in g.completions]
    lengths = np.array([len(c.tokens) for c in done])
    stopped = np.array([c.finish_reason == "stop" for c in done])
    return {
        **spread("completions/length", lengths, prefix=True),
        **spread("completions/terminated_length", lengths[stopped], prefix=True),
        "completions/clipped_ratio": Mean(float((~stopped).sum()), len(done)),
        "completions/tokens": Sum(float(lengths.sum())),
        "prompts/mean_length": Mean(float(sum(len(g.prompt.tokens) for g in groups)), len(groups)),
    }


def advantage_metrics(advantages: Tensor) -> dict[str, Metric]:
    """Advantages of trajectories [J]: their spread, and the share that carries a gradient."""
    values = advantages.double().numpy()
    found = spread("rewards/advantage", values)
    return {
        **found,
        "rewards/advantage/std": Mean(float(values.std(ddof=1)) if len(values) > 1 else 0.0),
        "advantage/abs_mean": Mean(float(np.abs(values).sum()), len(values)),
        "advantage/nonzero_frac": Mean(float((np.abs(values) > 1e-8).sum()), len(values)),
    }
