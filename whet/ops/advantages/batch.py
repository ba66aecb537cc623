"""Advantages from statistics of the whole batch, or with another baseline than the group.

Dim legend: J trajectories, S tokens, g the group of i, r the outcome with the rewards of single tokens
(AdvantageInputs.returns), r_t the same at single tokens (rewards_by_token). Computed in float64, returned in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.advantages.group_statistics import GroupedRewards
from whet.ops.advantages.inputs import AdvantageInputs, with_greedy_rewards
from whet.ops.masked import masked_whiten

__all__ = [
    "gdpo_advantages",
    "reinforce_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "scalerl_advantages",
]


def scalerl_advantages(
    rewards: Tensor, group_ids: Tensor, *, advantage_eps: float = 1e-6, advantage_ddof: int = 1
) -> Tensor:
    """Advantage against the group's mean, in units of the deviation of all advantages of the batch.

    Aᵢ = aᵢ / (std(a) + ε), aᵢ = rᵢ − mean_g(r), the deviation over the a of all groups.
    Args: rewards [N], NaN = not applicable. group_ids: Long [N]. advantage_eps: ε. advantage_ddof: of the deviation.
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: ScaleRL, arXiv:2510.13786. It differs from grpo_advantages with scale_rewards="batch", which is TRL's: there
        the deviation is that of the rewards, in which groups differ by their means.

    >>> from torch import tensor
    >>> scalerl_advantages(tensor([0., 1., 3., 6.]), tensor([0, 0, 1, 1]), advantage_eps=0.0)  # a ∓1/2, ∓3/2: σ² = 5/3
    tensor([-0.3873,  0.3873, -1.1619,  1.1619])
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    centred = torch.where(g.known & g.spread, g.rewards - g.mean, 0.0)
    std = GroupedRewards(centred, g.known, torch.zeros_like(g.group), 1).std(advantage_ddof)
    return g.advantages(centred / (std + advantage_eps))


def reinforce_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    global_norm: bool = False,
    norm_var: bool = False,
    advantage_eps: float = 1e-6,
    advantage_ddof: int = 1,
) -> Tensor:
    """The reward minus the mean of the group, or of the batch.

    Aᵢ = rᵢ − b, with norm_var (rᵢ − b) / (σ + ε); b and σ, mean and deviation of the group, or of all rewards where
    global_norm asks for it and where a group has one reward.

    Args:
        rewards [N], NaN = not applicable. group_ids: Long [N].
        global_norm: the batch's mean and deviation. norm_var: divide by the deviation.
        advantage_eps: ε. advantage_ddof: of the deviation.
    Returns: [N], fp32; exactly 0 where all rewards that a mean is of are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: RL2's estimator "reinforce" (ε there 1.19e-7); its default is Dr. GRPO, its norm_var GRPO. There all groups
        are of one size.

    >>> from torch import tensor
    >>> rewards = tensor([1., 0., 5.])
    >>> reinforce_advantages(rewards, tensor([0, 0, 1])), reinforce_advantages(rewards, tensor([0, 1, 2]))
    (tensor([ 0.5000, -0.5000,  3.0000]), tensor([-1., -2.,  3.]))
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    use_batch_stats = torch.full_like(g.known, global_norm) | (g.count < 2)
    centred = g.rewards - torch.where(use_batch_stats, g.as_one_group.mean, g.mean)
    if norm_var:
        centred = centred / (
            torch.where(use_batch_stats, g.as_one_group.std(advantage_ddof), g.std(advantage_ddof)) + advantage_eps
        )
    spread = torch.where(use_batch_stats, g.as_one_group.spread, g.spread)
    return torch.where(g.known & spread, centred, 0.0).float()


def reinforce_plus_plus_advantages(x: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """The return from each token on, whitened over all tokens of the batch.

    A_t = (G_t − μ) / √(v + 1e-8), G_t = r_t + γ G_{t+1} over the trained tokens of a trajectory, μ and v their mean and
    unbiased variance over the trained tokens of the batch whose trajectories have a reward.
    Args: x: a step; the KL, where it is a penalty, is in token_rewards. gamma: γ.
    Returns: [S], fp32; 0 at tokens that are not trained, and everywhere if all G_t are equal.
    Raises: DataError: an infinite reward.
    Source: REINFORCE++, arXiv:2501.03262; agrees with verl, except that verl ends a return at a token that is not
        trained, and drops its reward; OpenRLHF takes the biased variance, at least 1e-8.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 3.]), group_of=tensor([0, 1]), trajectory=tensor([0, 0, 1, 1]),
    ...                     mask=tensor([True, True, True, True]))
    >>> reinforce_plus_plus_advantages(x, gamma=0.0)  # returns 0, 1, 0, 3: mean 1, variance 2
    tensor([-0.7071,  0.0000, -0.7071,  1.4142])
    """
    known = GroupedRewards.from_group_ids(x.rewards, x.group_of).known
    kept = x.mask & known.index_select(0, x.trajectory)
    return masked_whiten(_returns_to_go(x, gamma), kept).float()


def reinforce_plus_plus_baseline_advantages(x: AdvantageInputs) -> Tensor:
    """Advantage against the group's mean, whitened over all tokens of the batch.

    A_t = (aᵢ − μ) / √(v + 1e-8), aᵢ = rᵢ − mean_g(r) at each trained token of i; μ and v the mean and unbiased variance
    of that over the trained tokens whose trajectories have a reward. So long completions count for more in μ and v, and
    a group whose rewards are equal has a small advantage where μ is not 0.
    Args: x: a step.
    Returns: [S], fp32; 0 at tokens that are not trained, and everywhere if every group's rewards are equal.
    Raises: DataError: an infinite reward.
    Source: REINFORCE++-baseline, arXiv:2501.03262; agrees with verl, except that verl takes nothing
        from a group of one.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 3.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 0, 1]),
    ...                     mask=tensor([True, True, True, True]))
    >>> reinforce_plus_plus_baseline_advantages(x)  # -1 three times and 1: mean -1/2, variance 1
    tensor([-0.5000, -0.5000, -0.5000,  1.5000])
    """
    g = GroupedRewards.from_group_ids(x.returns, x.group_of)
    centred = torch.where(g.known & g.spread, g.rewards - g.mean, 0.0)
    kept = x.mask & g.known.index_select(0, x.trajectory)
    return masked_whiten(centred.index_select(0, x.trajectory), kept).float()


@with_greedy_rewards
def remax_advantages(x: AdvantageInputs) -> Tensor:
    """The return from each token on, minus the reward of the greedy completion of its prompt.

    A_t = G_t − b_g, G_t = Σ_{s ≥ t} r_s; with only an outcome that is r − b_g at every token.
    Args: x: needs greedy_rewards. The greedy completion's own token rewards (a KL) are not in b_g.
    Returns: [S], fp32; 0 at tokens that are not trained, without a reward, and where the greedy completion has none.
    Raises: DataError: an infinite reward, or no greedy rewards.
    Source: ReMax, arXiv:2310.10505; agrees with verl.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 1]), trajectory=tensor([0, 0, 1]),
    ...                     mask=tensor([True, True, True]), greedy_rewards=tensor([0.5, 0.5]))
    >>> remax_advantages(x)
    tensor([ 0.5000,  0.5000, -0.5000])
    """
    known = GroupedRewards.from_group_ids(x.rewards, x.group_of).known
    baseline = x.need("greedy_rewards").double().index_select(0, x.group_of)
    kept = x.mask & (known & ~baseline.isnan()).index_select(0, x.trajectory)
    advantages = _returns_to_go(x, gamma=1.0) - baseline.index_select(0, x.trajectory)
    return torch.where(kept, advantages, 0.0).float()


def gdpo_advantages(x: AdvantageInputs, *, advantage_eps: float = 1e-6, advantage_ddof: int = 1) -> Tensor:
    """Each reward function normalised in its group by itself, their weighted sum normalised over the batch.

    z_k = (r_k − mean_g(r_k)) / (std_g(r_k) + ε) for each function k; R = Σ_k w_k z_k over those that apply;
    A = (R − mean(R)) / (std(R) + ε) over all trajectories to which some function applies. So rewards that differ in
    size or rarity count alike, and combinations that have one sum stay apart. It reads the rewards of
    each function, not their sum: reward_clip_range is refused, and a reward_manager of one's own only decides which
    trajectories have no reward.
    Args: x: a step; without a table its reward is the one function, and token_rewards, if any, count as one more of
            weight 1. advantage_eps: ε. advantage_ddof: of both deviations.
    Returns: [J], fp32; exactly 0 without a reward, and everywhere if R is the same everywhere.
    Raises: DataError: an infinite reward.
    Source: GDPO, arXiv:2601.05242; agrees with TRL's multi_objective_aggregation="normalize_then_sum" (ε there 1e-4).
        verl whitens over tokens in the end, not over trajectories.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 10.]), group_of=tensor([0, 0]), trajectory=tensor([0, 1]),
    ...                     mask=tensor([True, True]), table={"a": tensor([1., 0.]), "b": tensor([0., 10.])},
    ...                     reward_weights={"a": 2.0, "b": 1.0})
    >>> gdpo_advantages(x)  # R = ±(2 - 1) / √2: both functions count
    tensor([ 0.7071, -0.7071])
    """
    columns = [(x.reward_weights.get(name, 1.0), r) for name, r in x.table.items()] or [(1.0, x.rewards)]
    if x.token_rewards is not None:
        columns.append((1.0, x.returns - x.rewards))
    total = torch.zeros(len(x.rewards), dtype=torch.float64)
    for weight, rewards in columns:
        g = GroupedRewards.from_group_ids(rewards, x.group_of)
        z = (g.rewards - g.mean) / (g.std(advantage_ddof) + advantage_eps)
        total += weight * torch.where(g.known & g.spread, z, 0.0)
    batch = GroupedRewards.from_group_ids(
        torch.where(x.rewards.isnan(), torch.nan, total), torch.zeros_like(x.group_of)
    )
    return batch.advantages((batch.rewards - batch.mean) / (batch.std(advantage_ddof) + advantage_eps))


def _returns_to_go(x: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1} over the trained tokens of each trajectory: float64 [S], 0 at the others."""
    place = torch.where(x.mask)[0]
    place = place[torch.argsort(x.trajectory[place], stable=True)]  # the trained tokens of a trajectory end to end
    lengths = x.lengths[x.lengths > 0]
    width = int(lengths.max()) if len(lengths) else 0
    starts = lengths.cumsum(0) - lengths
    rewards = x.rewards_by_token[place]
    returns, ahead = torch.zeros_like(rewards), rewards.new_zeros(len(lengths))
    for back in range(width):  # from the last token of every trajectory at once
        live = lengths > back
        at = (starts + lengths - 1 - back)[live]
        ahead[live] = rewards[at] + gamma * ahead[live]
        returns[at] = ahead[live]
    return torch.zeros(len(x.mask), dtype=torch.float64).index_copy(0, place, returns)
