"""TorchRL's Monte-Carlo advantage: collects the trajectories of each prompt until a group is full.

Dim legend: T steps of a trajectory, G trajectories of a group.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_tensor_collection, lazy_stack
from torch import Tensor

from whet.errors import ConfigError, DataError, lookup_error
from whet.ops import GroupedRewards
from whet.torchrl.selection import MCAdvantageSelector, mean_is_within

__all__ = ["COUNTERS", "GroupGatherer", "Trajectory", "mc_advantage"]

RETURNS: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.amax, "mean": torch.mean, "sum": torch.sum}
"""Name -> the return of a trajectory, from its rewards [T]."""
MIN_STD = 1e-6
"""The lower bound of a group's deviation, as in TorchRL."""
COUNTERS = (
    "completed_trajectories",
    "completed_decisions",
    "trajectory_return_sum",
    "trajectory_return_max",
    "successful_trajectories",
    "completed_groups",
    "written_groups",
    "dropped_groups",
    "rescued_groups",
    "selected_trajectories",
    "unselected_trajectories",
    "evicted_groups",
    "expired_groups",
    "discarded_trajectories",
)
"""The counters: TorchRL's, and those of groups that were discarded because there were too many or they waited too long,
with their trajectories. A trajectory is successful if its rewards sum to more than 0. If trajectory_return=None pools
the steps, neither returns nor successful trajectories are counted."""


class Trajectory(NamedTuple):
    """A finished trajectory: its group, the reward of each of its steps, and an object of the caller."""

    group: Hashable
    """The prompt's text or a number; trajectories with equal ones form a group."""
    rewards: Tensor
    """[T ...], a number for each step."""
    item: Any = None
    """Returned with the advantages."""


class _Queue(list[Trajectory]):
    """The trajectories of a group that is not full, and the time when the last of them arrived, in seconds."""

    last_arrival: float = 0.0


class GroupGatherer:
    """Collects trajectories by group, and returns a group with its advantages once it is full.

    Aᵢ = (Rᵢ − mean(R)) / max(σ(R), 1e-6), R the returns of the group's trajectories, σ with n − 1; all steps of a
    trajectory have its advantage. With trajectory_return=None each step has its own: R are the rewards of all steps of
    all trajectories.

    Args:
        grpo_size: G.
        trajectory_return: how the rewards of the steps become a return: sum, max or mean; None = steps are pooled.
        keep_return_bounds: (low, high), exclusive: a group with a mean return outside is dropped (DAPO's dynamic
            sampling); None = all groups are kept.
        candidate_group_size: the most trajectories to collect until G of them have a mean return inside the bounds;
            None = G.
        candidate_selection_min_size: trajectories to collect before the first choice; None = G.
        candidate_selector: chooses the G trajectories; None = MCAdvantageSelector().
        max_queued_groups: the most incomplete groups. With one more, the group that has waited longest is discarded.
            None = no limit.
        group_timeout: an incomplete group is discarded this many seconds after its last trajectory; None = never.
        clock: gives the time in seconds.
    Raises: ConfigError: a value out of its range, or options that exclude each other.
    Source: agrees with TorchRL's MCAdvantage if two rewards differ; if all are equal, whet returns exactly 0. TorchRL's
        default of trajectory_return is None, as in whet.torchrl's MCAdvantage, and its number of groups is unlimited.
    """

    def __init__(
        self,
        grpo_size: int,
        *,
        trajectory_return: str | None = "sum",
        keep_return_bounds: tuple[float, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: Any = None,
        max_queued_groups: int | None = None,
        group_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grpo_size = grpo_size
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = _check_bounds(keep_return_bounds)
        self.candidate_group_size = grpo_size if candidate_group_size is None else candidate_group_size
        least = grpo_size if candidate_selection_min_size is None else candidate_selection_min_size
        self.candidate_selection_min_size = least
        self.candidate_selector = MCAdvantageSelector() if candidate_selector is None else candidate_selector
        self.max_queued_groups = max_queued_groups
        self.group_timeout = group_timeout
        self.clock = clock
        self._check()
        self.queues: OrderedDict[Hashable, _Queue] = OrderedDict()  # in the order of their last trajectory
        self.stats: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Sets all counters to 0."""
        self.stats = {**dict.fromkeys(COUNTERS, 0), "trajectory_return_sum": 0.0, "trajectory_return_max": -torch.inf}

    def _check(self) -> None:
        """Raises ConfigError: see the class."""
        most, least = self.candidate_group_size, self.candidate_selection_min_size
        if self.trajectory_return is not None and self.trajectory_return not in RETURNS:
            raise lookup_error("trajectory_return", self.trajectory_return, [*RETURNS, "None"])
        smallest = 1 if self.trajectory_return is None else 2
        rules = (
            (self.grpo_size >= smallest, f"grpo_size {self.grpo_size!r} must be at least {smallest}: a trajectory is "
             "compared with the others of its group (trajectory_return=None compares steps)"),
            (most >= self.grpo_size, f"candidate_group_size {most!r} must be at least grpo_size {self.grpo_size}"),
            (self.grpo_size <= least <= most, f"candidate_selection_min_size {least!r} must lie between grpo_size "
             f"{self.grpo_size} and candidate_group_size {most}"),
            (self.max_queued_groups is None or self.max_queued_groups >= 1, f"max_queued_groups "
             f"{self.max_queued_groups!r} must be at least 1; None = no bound"),
            (self.group_timeout is None or self.group_timeout > 0, f"group_timeout {self.group_timeout!r} must be a "
             "positive number of seconds; None = never"),
            (self.trajectory_return is not None or (most == self.grpo_size and self.keep_return_bounds is None),
             "keep_return_bounds and candidate_group_size choose by the returns of trajectories; set "
             'trajectory_return to "sum", "max" or "mean"'),
        )  # fmt: skip
        for is_valid, message in rules:
            if not is_valid:
                raise ConfigError(message)

    def add(self, trajectory: Trajectory) -> list[tuple[Trajectory, Tensor]] | None:
        """Adds a trajectory, and returns its group if it is full now.

        Returns: the (chosen) trajectories of the group in order of arrival, each with its advantages in the shape of
            its rewards; None if the group is not full yet or is dropped.
        Raises: DataError: no rewards, or a reward that is not finite.
        """
        if not trajectory.rewards.numel() or not trajectory.rewards.isfinite().all():
            raise DataError(
                f"the rewards of a trajectory of group {trajectory.group!r} are {trajectory.rewards.tolist()}; each "
                "step needs one that is finite (leave a trajectory that was not scored out of the group)"
            )
        self.expire()
        self._count(trajectory)
        waiting = self.queues.setdefault(trajectory.group, _Queue())
        waiting.append(trajectory)
        waiting.last_arrival = self.clock()
        self.queues.move_to_end(trajectory.group)
        if len(waiting) < self.candidate_selection_min_size:
            self._evict_oldest()
            return None
        group = self._compute_advantages(waiting)
        if group is None and len(waiting) < self.candidate_group_size:
            self._evict_oldest()
            return None
        del self.queues[trajectory.group]
        self.stats["completed_groups"] += 1
        self.stats["dropped_groups" if group is None else "written_groups"] += 1
        return group

    def expire(self) -> int:
        """Discards the groups that have waited too long. Returns: their number."""
        if self.group_timeout is None:
            return 0
        now, before = self.clock(), self.stats["expired_groups"]
        while self.queues and now - next(iter(self.queues.values())).last_arrival > self.group_timeout:
            self._discard_oldest("expired_groups")
        return int(self.stats["expired_groups"] - before)

    def _evict_oldest(self) -> None:
        """Discards the group that has waited longest, if there are too many."""
        if self.max_queued_groups is not None and len(self.queues) > self.max_queued_groups:
            self._discard_oldest("evicted_groups")

    def _discard_oldest(self, counter: str) -> None:
        _, waiting = self.queues.popitem(last=False)
        self.stats[counter] += 1
        self.stats["discarded_trajectories"] += len(waiting)

    def _count(self, trajectory: Trajectory) -> None:
        self.stats["completed_trajectories"] += 1
        self.stats["completed_decisions"] += len(trajectory.rewards) if trajectory.rewards.dim() else 1
        if self.trajectory_return is None:  # as TorchRL, which counts no returns if steps are compared
            return
        total = float(trajectory.rewards.sum())
        self.stats["trajectory_return_sum"] += total
        self.stats["trajectory_return_max"] = max(self.stats["trajectory_return_max"], total)
        self.stats["successful_trajectories"] += int(total > 0)

    def _compute_advantages(self, group: list[Trajectory]) -> list[tuple[Trajectory, Tensor]] | None:
        """Returns the chosen trajectories and their advantages; None = no choice has a mean inside the bounds."""
        if self.trajectory_return is None:
            steps = _normalize(torch.cat([t.rewards.flatten() for t in group]))
            each = steps.split([t.rewards.numel() for t in group])
            return [(t, a.reshape(t.rewards.shape).to(t.rewards)) for t, a in zip(group, each, strict=True)]
        reduce = RETURNS[self.trajectory_return]
        returns = torch.stack([reduce(t.rewards.detach().double()) for t in group])
        chosen = self._select(group, returns)
        if chosen is None:
            return None
        advantages = _normalize(returns[chosen])
        return [
            (group[i], a.to(group[i].rewards).expand(group[i].rewards.shape).clone())
            for i, a in zip(chosen, advantages, strict=True)
        ]

    def _select(self, group: list[Trajectory], returns: Tensor) -> list[int] | None:
        """Returns the indices of the trajectories to train on; None = no choice yet."""
        selector, bounds = self.candidate_selector, self.keep_return_bounds
        candidates = TensorDict({"return": returns}, [len(group)])
        if "trajectories" in selector.in_keys and all(is_tensor_collection(t.item) for t in group):
            candidates["trajectories"] = lazy_stack([t.item for t in group], 0)
        chosen = selector.select(candidates, group_size=self.grpo_size, keep_return_bounds=bounds)
        if chosen is None or not mean_is_within(returns[chosen].tolist(), bounds):
            return None
        rescued = len(group) > self.grpo_size and not mean_is_within(returns[: self.grpo_size].tolist(), bounds)
        self.stats["rescued_groups"] += int(rescued)
        self.stats["selected_trajectories"] += len(chosen)
        self.stats["unselected_trajectories"] += len(group) - len(chosen)
        return chosen


class Groups(Iterator[list[tuple[Trajectory, Tensor]]]):
    """An iterator over the groups of a stream, as they fill up. Args: gatherer: of groups. trajectories: the stream."""

    def __init__(self, gatherer: GroupGatherer, trajectories: Iterable[Trajectory]) -> None:
        self._gatherer = gatherer
        self._full = (group for t in trajectories if (group := gatherer.add(t)) is not None)

    def __next__(self) -> list[tuple[Trajectory, Tensor]]:
        """Returns the next full group: each trajectory with the advantages of its steps."""
        return next(self._full)

    def get_stats(self) -> dict[str, float]:
        """Returns the counters (COUNTERS), and the number of incomplete groups."""
        return {**self._gatherer.stats, "queued_groups": len(self._gatherer.queues)}


def mc_advantage(trajectories: Iterable[Trajectory], grpo_size: int, **options: Any) -> Groups:
    """Returns the groups of a stream of trajectories, as they fill up: each trajectory with the advantage of its steps.

    Args: trajectories: in any order, finished. grpo_size, options: see GroupGatherer.
    Returns: an iterator over groups: [(trajectory, advantages in the shape of its rewards), ...]. Groups that never
        fill up are left out; its get_stats() counts them.
    Raises: ConfigError: an unknown option. DataError: a reward that is not finite.

    >>> stream = [Trajectory("a", torch.tensor([0., 1.])), Trajectory("b", torch.tensor([1.])),
    ...           Trajectory("a", torch.tensor([0., 0., 0.]))]
    >>> [[advantages for _, advantages in group] for group in mc_advantage(stream, 2)]
    [[tensor([0.7071, 0.7071]), tensor([-0.7071, -0.7071, -0.7071])]]
    """
    known = [n for n in GroupGatherer.__init__.__annotations__ if n not in ("return", "grpo_size")]
    if wrong := [name for name in options if name not in known]:
        raise lookup_error("option of mc_advantage", wrong[0], known)
    return Groups(GroupGatherer(grpo_size, **options), trajectories)


def _normalize(rewards: Tensor) -> Tensor:
    """(r − mean) / max(σ, 1e-6) of one group: [n], fp32, exactly 0 if all are equal."""
    g = GroupedRewards.from_group_ids(rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device))
    return g.advantages((g.rewards - g.mean) / g.std(1).clamp(min=MIN_STD))


def _check_bounds(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Returns the bounds as numbers. Raises ConfigError: not an increasing pair."""
    if bounds is None:
        return None
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ConfigError(f"keep_return_bounds {bounds!r} must be an increasing pair (low, high)")
    return float(bounds[0]), float(bounds[1])
