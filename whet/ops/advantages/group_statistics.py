"""Statistics of rewards in groups, for the estimators."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.errors import DataError, lookup_error
from whet.ops.masked import segment_count, segment_sum
from whet.ops.shapes import check_shapes

__all__ = ["GroupedRewards", "group_spread"]

_SCALES = ("group", "batch", "none")


@dataclass(frozen=True, eq=False)
class GroupedRewards:
    """Rewards in groups of any size. Each statistic is repeated for every completion of its group; NaN is ignored.

    >>> from torch import tensor
    >>> g = GroupedRewards.from_group_ids(tensor([1., 0., 5., torch.nan]), tensor([7, 7, 9, 9]))
    >>> g.mean.tolist(), g.count.tolist(), g.spread.tolist()
    ([0.5, 0.5, 5.0, 5.0], [2, 2, 1, 1], [True, True, False, False])
    >>> g.advantages(g.rewards - g.mean)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """

    rewards: Tensor
    """Float64 [N], 0 where there is none."""
    known: Tensor
    """Bool [N]: there is a reward."""
    group: Tensor
    """Long [N]: the group of each reward, 0..num_groups-1."""
    num_groups: int
    """The number of groups."""

    @classmethod
    def from_group_ids(cls, rewards: Tensor, group_ids: Tensor) -> GroupedRewards:
        """Rewards by group.

        Args: rewards [N], NaN = not applicable. group_ids: Long [N], any ids in any order.
        Raises: DataError: an infinite reward, or shapes that differ.
        """
        check_shapes("[N]", rewards=rewards, group_ids=group_ids)
        r = rewards.detach().double()
        if r.isinf().any():
            at = int(r.isinf().nonzero()[0])
            raise DataError(f"reward {at} is {r[at].item()}; rewards must be finite, or NaN for not applicable")
        ids, group = torch.unique(group_ids, return_inverse=True)
        known = ~r.isnan()
        return cls(torch.where(known, r, 0.0), known, group, len(ids))

    @functools.cached_property
    def as_one_group(self) -> GroupedRewards:
        """The same rewards as one group."""
        return GroupedRewards(self.rewards, self.known, torch.zeros_like(self.group), 1)

    @functools.cached_property
    def count(self) -> Tensor:
        """Long [N]: rewards in the group."""
        return segment_count(self.known, self.group, self.num_groups).index_select(0, self.group)

    @functools.cached_property
    def total(self) -> Tensor:
        """Float64 [N]: the sum of the group's rewards."""
        return self.sum(self.rewards)

    @functools.cached_property
    def mean(self) -> Tensor:
        """Float64 [N]: the mean of the group's rewards; 0 where it has none."""
        return self.total / self.count.clamp(min=1)

    def std(self, ddof: int) -> Tensor:
        """Float64 [N]: the standard deviation of the group's rewards, √(Σ(r − mean)² / (n − ddof)).

        0 where n is ddof or less.
        """
        squares = self.sum(torch.where(self.known, self.rewards - self.mean, 0.0).square())
        return torch.where(self.count > ddof, squares / (self.count - ddof).clamp(min=1), 0.0).sqrt()

    def scale(self, scale_rewards: str, ddof: int) -> Tensor | None:
        """Float64 [N]: σ of the group, or of all rewards ("batch"); None for "none", which does not divide.

        Raises: ConfigError: an unknown scale_rewards.
        """
        if scale_rewards not in _SCALES:
            raise lookup_error("scale_rewards", scale_rewards, _SCALES)
        if scale_rewards == "none":
            return None
        return (self if scale_rewards == "group" else self.as_one_group).std(ddof)

    @functools.cached_property
    def differs(self) -> Tensor:
        """Bool [num_groups]: the largest reward differs from the smallest by more than rounding (1e-12 of it).

        The standard deviation would not tell: that of seven rewards of 0.9 is 1e-16 and not 0.
        """
        high, low = self.extreme("amax"), self.extreme("amin")
        return (high > low) & ~torch.isclose(high, low, rtol=1e-12, atol=0.0)

    @functools.cached_property
    def spread(self) -> Tensor:
        """Bool [N]: whether the rewards of its group differ."""
        return self.differs.index_select(0, self.group)

    def extreme(self, which: str, among: Tensor | None = None) -> Tensor:
        """Float64 [num_groups]: the largest ("amax") or smallest ("amin") reward; infinite where a group has none.

        Args: among: Bool [N], the rewards that count; None = all.
        """
        none = -torch.inf if which == "amax" else torch.inf
        rewards = torch.where(self.known if among is None else self.known & among, self.rewards, none)
        return self.rewards.new_full((self.num_groups,), none).scatter_reduce(0, self.group, rewards, which)

    def sum(self, x: Tensor) -> Tensor:
        """[N]: the sum of any numbers [N] over the group of each."""
        return segment_sum(x, self.group, self.num_groups).index_select(0, self.group)

    def advantages(self, x: Tensor) -> Tensor:
        """Numbers [N] as advantages, fp32: exactly 0 without a reward, and where all rewards of a group are equal."""
        return torch.where(self.known & self.spread, x, 0.0).float()


def group_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Which groups have signal: two rewards that differ, so that some advantage is not 0.

    Args: rewards [N], NaN = not applicable; infinite ones may be compared. group_ids: Long [N], 0..num_groups-1.
    Returns: Bool [num_groups], num_groups = the largest id + 1.
    Raises: DataError: shapes that differ.
    Source: the filter of DAPO's dynamic sampling, arXiv:2503.14476.

    >>> from torch import tensor
    >>> group_spread(tensor([1., 0., 5., 5.]), tensor([0, 0, 1, 1]))
    tensor([ True, False])
    """
    check_shapes("[N]", rewards=rewards, group_ids=group_ids)
    r = rewards.detach().double()
    num = int(group_ids.max()) + 1 if len(group_ids) else 0
    g = GroupedRewards(r, ~r.isnan(), group_ids, num)
    return g.differs
