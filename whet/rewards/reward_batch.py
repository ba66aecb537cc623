"""RewardBatch: the rewards of a step in one place, from the reward functions to the advantage estimator.

Dim legend: J trajectories, in the order of groups and generations. The forks of one episode are one trajectory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from whet.errors import DataError
from whet.metrics import Mean, Metric, Sum, merge
from whet.ops import group_spread
from whet.rewards.call import RewardInputs
from whet.types import Group

__all__ = ["RewardBatch", "reward_metrics", "sample_std"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RewardBatch:
    """Groups of completions with their rewards.

    Example: one group of two, exact_match of weight 1: table = {"exact_match": [1., 0.]}, total = [1., 0.],
    metrics["rewards/exact_match"] = Mean(1.0, 2).
    """

    groups: Sequence[Group]
    """The groups, as the engine completed them."""
    table: Mapping[str, np.ndarray]
    """float64 [J] by function, before its weight; NaN = the function does not apply."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The weight of each function in the total; 1 by default."""
    total: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    """float64 [J]: the outcome that is trained on, logged and stored; NaN = no function applies. By default the
    weighted sum of the functions that apply. A `batch` stage may replace it: see `with_total`.
    """
    texts: Sequence[Sequence[Any]]
    """The decoded completions of each group."""
    inputs: RewardInputs
    """The arguments of the functions: prompts, completions and columns, J of each."""
    greedy: np.ndarray | None = None
    """float64 [groups]: the total of each group's greedy completion; None = there are none."""
    call_metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    """Metrics of the calls: their errors, seconds and greedy completions."""

    def __post_init__(self) -> None:
        count = sum(self.sizes)
        if wrong := [name for name, values in self.table.items() if values.shape != (count,)]:
            shape = list(self.table[wrong[0]].shape)
            raise DataError(f"rewards {wrong[0]!r} have shape {shape} for {count} trajectories; give one for each")
        if self.total is None:
            object.__setattr__(self, "total", _weighted_sum(self.table, self.weights, count))
        if self.total.shape != (count,):
            raise DataError(
                f"the total has shape {list(self.total.shape)} for {count} trajectories; give one number for each"
            )

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the functions and of their calls, by name; none of the total."""
        return {**reward_metrics(self.table), **self.call_metrics}

    @property
    def sizes(self) -> list[int]:
        """The number of trajectories of each group."""
        return [len(group.last) for group in self.groups]

    @property
    def group_of(self) -> np.ndarray:
        """Int [J]: the group of each trajectory."""
        return np.repeat(np.arange(len(self.groups)), self.sizes)

    @property
    def trajectory_of(self) -> np.ndarray:
        """Int [N]: the trajectory of each completion, groups end to end."""
        places: dict[tuple[int, int], int] = {}
        keys = [(g, c.generation) for g, group in enumerate(self.groups) for c in group.completions]
        return np.array([places.setdefault(key, len(places)) for key in keys], int)

    @property
    def totals_by_group(self) -> list[np.ndarray]:
        """The total of each group's trajectories: float64."""
        return np.split(self.total, np.cumsum(self.sizes)[:-1])

    @property
    def have_spread(self) -> np.ndarray:
        """Bool [groups]: whether two totals of a group differ by more than rounding. NaN differs from nothing."""
        return group_spread(torch.from_numpy(self.total), torch.from_numpy(self.group_of)).numpy()

    def with_total(self, total: np.ndarray) -> RewardBatch:
        """Returns a copy with another total, for a `batch` stage that shapes rewards. Args: total: [J]."""
        return dataclasses.replace(self, total=np.asarray(total, np.float64))

    def with_greedy(self, greedy: RewardBatch) -> RewardBatch:
        """Returns a copy with the rewards of greedy completions, and metrics of them.

        Args: greedy: the greedy completions, each as a group of one.
        Raises: DataError: not one for each group.
        """
        if len(greedy.total) != len(self.groups):
            raise DataError(
                f"{len(greedy.total)} greedy completions for {len(self.groups)} groups; give each group one"
            )
        known = greedy.total[~np.isnan(greedy.total)]
        metrics = {
            "greedy/reward": Mean(float(known.sum()), len(known)),
            "greedy/tokens": Sum(float(sum(len(c.tokens) for g in greedy.groups for c in g.completions))),
        }
        return dataclasses.replace(self, greedy=greedy.total, call_metrics={**self.call_metrics, **metrics})

    @classmethod
    def cat(cls, parts: Sequence[RewardBatch]) -> RewardBatch:
        """Joins the parts of one batch. The result is that of one call for all groups.

        Args: parts: in the order of their groups. A function that a part lacks is NaN there.
        """
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.table)
        greedy = [part.greedy for part in parts if part.greedy is not None]
        return cls(
            groups=[group for part in parts for group in part.groups],
            table={
                name: np.concatenate([part.table.get(name, np.full(len(part.total), math.nan)) for part in parts])
                for name in names
            },
            weights={name: weight for part in parts for name, weight in part.weights.items()},
            total=np.concatenate([part.total for part in parts]),
            texts=[texts for part in parts for texts in part.texts],
            inputs=RewardInputs.cat([part.inputs for part in parts]),
            greedy=np.concatenate(greedy) if len(greedy) == len(parts) else None,
            call_metrics=merge(*(part.call_metrics for part in parts)),
        )

    def select(self, indices: Sequence[int] | np.ndarray) -> RewardBatch:
        """Returns some of the groups, in the order given."""
        bounds = np.cumsum([0, *self.sizes])
        rows = np.concatenate([np.empty(0, int), *(np.arange(bounds[i], bounds[i + 1]) for i in indices)])
        return dataclasses.replace(
            self,
            groups=[self.groups[i] for i in indices],
            table={name: values[rows] for name, values in self.table.items()},
            total=self.total[rows],
            texts=[self.texts[i] for i in indices],
            inputs=self.inputs.select(rows),
            greedy=None if self.greedy is None else self.greedy[np.asarray(indices, int)],
        )


def _weighted_sum(table: Mapping[str, np.ndarray], weights: Mapping[str, float], count: int) -> np.ndarray:
    """float64 [J]: Σ_f w_f r_fj over the functions f that apply to j; NaN where none applies."""
    if not table:
        return np.full(count, math.nan)
    rewards = np.stack(list(table.values()))  # [f J]
    weighted = np.nansum(rewards * np.array([weights.get(name, 1.0) for name in table])[:, None], 0)
    return np.where(np.isnan(rewards).all(0), math.nan, weighted)


def reward_metrics(rewards: Mapping[str, np.ndarray]) -> dict[str, Metric]:
    """Returns the metrics of the functions' rewards. NaN (not applicable) is left out everywhere.

    rewards/<f>, the mean of one function, has the name of `whet eval`; rewards/<f>/{mean,std} are TRL's names. Standard
    deviations merge across batches as means.

    Args: rewards: float64 [J] per function.
    Returns: name -> metric.
    Source: TRL GRPOTrainer.

    >>> m = reward_metrics({"f": np.array([1.0, 0.0, 1.0, 1.0])})
    >>> m["rewards/f"].value, m["rewards/f/std"].value
    (0.75, 0.5)
    """
    metrics: dict[str, Metric] = {}
    for name, values in rewards.items():
        known = values[~np.isnan(values)]
        metrics[f"rewards/{name}"] = metrics[f"rewards/{name}/mean"] = Mean(float(known.sum()), len(known))
        metrics[f"rewards/{name}/std"] = Mean(sample_std(known), 1) if len(known) else Mean(0.0, 0)
    return metrics


def sample_std(values: np.ndarray) -> float:
    """Returns the sample standard deviation (n - 1); 0 for one value, and exactly 0 for equal ones.

    >>> sample_std(np.array([0.0, 1.0, 1.0, 0.0, 0.5])), sample_std(np.full(3, 0.1))
    (0.5, 0.0)
    """
    return 0.0 if len(values) < 2 or (values == values[0]).all() else float(values.std(ddof=1))
