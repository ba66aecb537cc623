"""Advantages of completions against their own group: one number for each trajectory, 0 where a group agrees.

Dim legend: N or J trajectories, g the group of i, n_g its rewards, r the outcome with the rewards of single tokens
(AdvantageInputs.returns). Computed in float64, returned in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import DataError
from whet.ops.advantages.group_statistics import GroupedRewards
from whet.ops.advantages.inputs import AdvantageInputs

__all__ = [
    "drgrpo_advantages",
    "grpo_advantages",
    "maxrl_advantages",
    "opo_advantages",
    "pass_at_k_advantages",
    "rloo_advantages",
]


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale_rewards: str = "group",
    advantage_eps: float = 1e-6,
    advantage_ddof: int = 1,
) -> Tensor:
    """Advantage of each completion against its own group.

    Aᵢ = (rᵢ − mean_g(r)) / (σ + ε), σ = √(Σ(r − mean)² / (n − ddof)) over the group (scale_rewards="group") or over all
    rewards ("batch"); "none" drops the denominator (Dr. GRPO).

    Args:
        rewards [N]: one score per completion, any unit; NaN = not applicable.
        group_ids: Long [N], completions of one prompt share an id; any ids in any order.
        scale_rewards: group, batch or none.
        advantage_eps: ε. advantage_ddof: 1 = the sample's deviation, 0 = the population's.
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ. ConfigError: an unknown scale_rewards.
    Source: arXiv:2402.03300 (outcome supervision); Dr. GRPO arXiv:2503.20783. (ε, ddof) is (1e-6, 1) in Tunix and verl,
        (1e-4, 1) in TRL, (1e-8, 0) in TRL's AsyncGRPO, (1.19e-7, 1) in RL2. TorchRL takes max(σ, 1e-6), which is ε = 0
        wherever σ is above 1e-6. They leave rounding noise where rewards are equal. verl gives a group of one its
        reward itself.

    >>> from torch import tensor
    >>> grpo_advantages(tensor([1., 0., 5.]), tensor([0, 0, 1]), scale_rewards="none")  # group 0 has mean 0.5
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    scale = g.scale(scale_rewards, advantage_ddof)
    centred = g.rewards - g.mean
    return g.advantages(centred if scale is None else centred / (scale + advantage_eps))


def drgrpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantage of each completion against the mean of its group, not scaled.

    Aᵢ = rᵢ − mean_g(r).
    Args: rewards [N], NaN = not applicable. group_ids: Long [N].
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: Dr. GRPO, arXiv:2503.20783; agrees with Tunix.

    >>> from torch import tensor
    >>> drgrpo_advantages(tensor([1., 0.]), tensor([0, 0]))
    tensor([ 0.5000, -0.5000])
    """
    return grpo_advantages(rewards, group_ids, scale_rewards="none")


def rloo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_advantages: bool = False,
    advantage_eps: float = 1e-6,
    advantage_ddof: int = 1,
) -> Tensor:
    """Advantage of each completion against the mean of the others in its group.

    Aᵢ = rᵢ − (Σ_g r − rᵢ) / (n_g − 1); with normalize_advantages (Aᵢ − mean(A)) / (std(A) + ε), over the batch.
    Args: rewards [N], NaN = not applicable. group_ids: Long [N]. normalize_advantages: by mean and deviation of the
        advantages of all groups of two and more. advantage_eps: ε. advantage_ddof: of the deviation.
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: RLOO, arXiv:2402.14740; agrees with Tunix, verl and TRL.

    >>> from torch import tensor
    >>> rloo_advantages(tensor([1., 2., 3.]), tensor([0, 0, 0]))  # 1 - 5/2, 2 - 4/2, 3 - 3/2
    tensor([-1.5000,  0.0000,  1.5000])
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    advantages = g.rewards - (g.total - g.rewards) / (g.count - 1).clamp(min=1)
    if not normalize_advantages:
        return g.advantages(advantages)
    compared = g.known & (g.count > 1)
    whole = GroupedRewards(torch.where(compared, advantages, 0.0), compared, torch.zeros_like(g.group), 1)
    return g.advantages((advantages - whole.mean) / (whole.std(advantage_ddof) + advantage_eps))


def opo_advantages(x: AdvantageInputs) -> Tensor:
    """Advantage of each completion against the mean of its group by length.

    Aᵢ = rᵢ − Σ_g l r / Σ_g l, l the trained tokens of a completion: the baseline of least variance where the squared
    norm of a completion's gradient grows as its length.
    Args: x: a step.
    Returns: [J], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward.
    Source: OPO, arXiv:2505.23585; agrees with verl, except that verl gives a group of one its reward itself.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 0, 1]),
    ...                     mask=tensor([True, True, True, True]))
    >>> opo_advantages(x)  # baseline (3·1 + 1·0) / 4
    tensor([ 0.2500, -0.7500])
    """
    g = GroupedRewards.from_group_ids(x.returns, x.group_of)
    lengths = torch.where(g.known, x.lengths, 0).double()
    return g.advantages(g.rewards - g.sum(lengths * g.rewards) / g.sum(lengths).clamp(min=1))


def pass_at_k_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale_rewards: str = "group",
    advantage_eps: float = 1e-6,
    advantage_ddof: int = 1,
) -> Tensor:
    """The best reward of a group minus the second-best, for the best completion only: a gradient of pass@k.

    A = (r₁ − r₂) / (σ + ε) for the best, 0 for the others, r₁ and r₂ the two largest rewards of the group; 0 where
    several are best. σ, ε as in grpo_advantages.
    Args: rewards [N], NaN = not applicable. group_ids: Long [N]. The others: as in grpo_advantages.
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ. ConfigError: an unknown scale_rewards.
    Source: arXiv:2503.19595; agrees with verl's grpo_passk, which refuses a group of one.

    >>> from torch import tensor
    >>> pass_at_k_advantages(tensor([1., 4., 2.]), tensor([0, 0, 0]), scale_rewards="none")
    tensor([0., 2., 0.])
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    is_best = g.known & (g.rewards == g.extreme("amax")[g.group])
    is_single_best = is_best & (g.sum(is_best.long()) == 1)
    second = g.extreme("amax", among=~is_best)[g.group]
    gain = torch.where(is_single_best & g.spread, g.rewards - second, 0.0)
    scale = g.scale(scale_rewards, advantage_ddof)
    return g.advantages(gain if scale is None else gain / (scale + advantage_eps))


def maxrl_advantages(rewards: Tensor, group_ids: Tensor, *, advantage_eps: float = 1e-6) -> Tensor:
    """Advantage of each completion as a share of its group's success: prompts that are seldom solved weigh more.

    Aᵢ = (rᵢ − mean_g(r)) / (mean_g(r) + ε): with rewards of 0 and 1, the gradient of the log of the probability of
    success, to the order that n_g completions allow.
    Args: rewards [N], at least 0; NaN = not applicable. group_ids: Long [N]. advantage_eps: ε.
    Returns: [N], fp32; exactly 0 in groups of one, without success, and where all rewards of a group are equal.
    Raises: DataError: a negative or an infinite reward, or shapes that differ.
    Source: MaxRL, arXiv:2602.02710, with rewards of 0 and 1; ε as in TRL's example of it.

    >>> from torch import tensor
    >>> maxrl_advantages(tensor([1., 0., 0., 0.]), tensor([0, 0, 0, 0]), advantage_eps=0.0)  # (1 - 1/4) / (1/4)
    tensor([ 3., -1., -1., -1.])
    """
    g = GroupedRewards.from_group_ids(rewards, group_ids)
    if (g.rewards < 0).any():
        at = int((g.rewards < 0).nonzero()[0])
        raise DataError(
            f"reward {at} is {g.rewards[at].item()}; maxrl divides by the mean of a group, so rewards must be at least "
            "0 (best 0 and 1); shift them, or take another advantage_estimator"
        )
    return g.advantages((g.rewards - g.mean) / (g.mean + advantage_eps))
