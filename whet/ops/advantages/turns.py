"""Advantages of turns, from rewards that an environment gives in its turns.

Dim legend: J trajectories, S tokens, K the most turns. A turn is a run of sampled tokens; what is not sampled, an
environment's answer, belongs to the turn before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.advantages.group_statistics import GroupedRewards
from whet.ops.advantages.inputs import AdvantageInputs
from whet.ops.masked import segment_sum

__all__ = ["turn_rloo_advantages"]


def turn_rloo_advantages(x: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """The return from each turn on, less the mean of what the others of the group had at that turn.

    Aᵢ = Gᵢₖ − mean_{j ≠ i}(Gⱼ,min(k, Kⱼ)), Gₖ = rₖ + γ Gₖ₊₁, at each token of turn k; rₖ the rewards of the tokens of
    turn k, to which the outcome is added in the last turn, Kⱼ. Another one that ended before turn k counts with its
    last turn. So the baseline depends on the others alone, and not on when i stopped: the gradient is unbiased. A mean
    over the trajectories that have a turn k, i itself included, or a deviation, would give turns that fewer reach
    another weight. With the outcome alone and γ = 1 it equals rloo.

    Args: x: a step. gamma: γ, the discount of a turn.
    Returns: [S], fp32; 0 at tokens that are not trained, in groups of one, and where all of a group have one return.
    Raises: DataError: an infinite reward.
    Source: RLOO, arXiv:2402.14740, at each turn.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 0, 1]),
    ...                     mask=tensor([True, False, True, True]), token_rewards=tensor([2., 0., 0., 0.5]))
    >>> turn_rloo_advantages(x)  # returns 3 and 1 of the first, 0.5 of the second
    tensor([ 2.5000,  0.0000,  0.5000, -2.5000])
    """
    g = GroupedRewards.from_group_ids(x.returns, x.group_of)
    returns = torch.where(g.known[:, None], _returns_of_turns(x, gamma), 0.0)
    total = torch.zeros(g.num_groups, returns.shape[1], dtype=torch.float64).index_add_(0, g.group, returns)
    others = total.index_select(0, g.group) - returns
    advantages = returns - others / (g.count - 1).clamp(min=1)[:, None]
    turns = torch.unbind(returns, 1)
    differs = torch.stack([GroupedRewards(r, g.known, g.group, g.num_groups).spread for r in turns], 1)
    compared = (g.known & (g.count > 1))[:, None] & differs
    each = torch.where(compared, advantages, 0.0)[x.trajectory, x.turn_of_token]
    return torch.where(x.mask, each, 0.0).float()


def _returns_of_turns(x: AdvantageInputs, gamma: float) -> Tensor:
    """Float64 [J, K]: the return from each turn on; behind the last turn, that of the last."""
    number, turn = len(x.rewards), x.turn_of_token
    count = int(turn.max()) + 1 if len(turn) else 1
    last = torch.zeros(number, dtype=torch.long).scatter_reduce(0, x.trajectory, turn, "amax")
    rewards = segment_sum(x.finite_token_rewards, x.trajectory * count + turn, number * count).view(number, count)
    rewards = rewards.scatter_add(1, last[:, None], torch.nan_to_num(x.rewards.double())[:, None])
    returns = torch.zeros(number, count + 1, dtype=torch.float64)
    for k in reversed(range(count)):
        returns[:, k] = rewards[:, k] + gamma * returns[:, k + 1]
    return returns.gather(1, torch.minimum(torch.arange(count), last[:, None]))
