"""GAE: generalised advantages from a critic's values, and the returns that the critic learns.

Only trained tokens are steps. Tokens of a tool or an environment between them (masked out) take no time: the successor
of a trained token is the next trained token. Everything is computed in float64.
Dim legend: J trajectories, S tokens, M trained tokens of rewarded trajectories.
Left out on purpose: a value after the last token. A truncated completion counts as ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.ops.advantages.inputs import AdvantageInputs
from whet.ops.masked import masked_whiten
from whet.ops.shapes import check_shapes

__all__ = ["advantages_and_returns", "gae_advantages", "generalized_advantages", "whiten_trained"]


def gae_advantages(
    x: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95, whiten_advantages: bool = True
) -> Tensor:
    """Generalised advantages from a critic's values, one for each token.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t, over the trained tokens of a trajectory; whitened over the
    whole step: (A − μ) / √(v + 1e-8), μ and v the mean and the unbiased variance over all trained tokens. What a critic
    learns, A + V before whitening, is the second result of advantages_and_returns.

    Args: x: needs values; r_t is x.rewards_by_token. gamma: γ. gae_lambda: λ.
        whiten_advantages: off, A is returned as it is.
    Returns: [S] in float64; 0 where masked out, where the reward is NaN, and, whitened, everywhere if all are equal.
    Raises: DataError: no values. What generalized_advantages raises.
    Source: arXiv:1506.02438; PPO arXiv:1707.06347. Agrees with Tunix's compute_gae_advantages, verl's and RL2's; RL2
        divides by the standard deviation + 1.2e-7.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 1]), trajectory=tensor([0, 0, 1]),
    ...                     mask=tensor([True, True, True]), values=tensor([0.5, 0.5, 0.5]))
    >>> gae_advantages(x, gae_lambda=0.5, whiten_advantages=False).tolist()  # δ = 0.5 - 0.5, 1 - 0.5; 0 - 0.5
    [0.25, 0.5, -0.5]
    """
    advantages, _ = advantages_and_returns(x, gamma=gamma, gae_lambda=gae_lambda)
    return whiten_trained(x, advantages) if whiten_advantages else advantages


def advantages_and_returns(
    x: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """The generalised advantage of each token, not whitened, and the return that a critic learns: A and A + V.

    The equations are those of generalized_advantages, with r_t = x.rewards_by_token.
    Args: x: needs values. gamma: γ. gae_lambda: λ.
    Returns: (advantages, returns), [S] in float64; 0 where masked out. Where the reward is NaN the advantage is 0 and
        the return is the value.
    Raises: DataError: no values, or an infinite reward. ConfigError: gamma or gae_lambda outside 0 to 1.
    Source: as generalized_advantages. Tunix and verl drop the reward of a token that is not trained (an environment's);
        here it is that of the trained token before it, as x.rewards_by_token has it.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1.]), group_of=tensor([0]), trajectory=tensor([0, 0]),
    ...                     mask=tensor([True, True]), values=tensor([0.5, 0.25]))
    >>> advantages_and_returns(x, gae_lambda=1.0)[1].tolist()  # γ = λ = 1: what is still to be earned
    [1.0, 1.0]
    """
    return generalized_advantages(
        torch.where(x.rewards.isfinite(), 0.0, x.rewards),  # the outcome is among the rewards of tokens
        x.need("values"),
        x.mask,
        x.trajectory,
        token_rewards=x.rewards_by_token,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


def whiten_trained(x: AdvantageInputs, advantages: Tensor) -> Tensor:
    """Advantages [S] whitened over the trained tokens of trajectories with a reward; 0 at the others.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 3.]), group_of=tensor([0, 1]), trajectory=tensor([0, 1]),
    ...                     mask=tensor([True, True]))
    >>> whiten_trained(x, tensor([1., 3.]))  # mean 2, variance 2
    tensor([-0.7071,  0.7071])
    """
    return masked_whiten(advantages, x.mask & ~x.rewards.isnan().index_select(0, x.trajectory))


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    trajectory: Tensor,
    *,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """The generalised advantage of each token, and its return, from tensors.

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  R_t = A_t + V_t;  t, t + 1, ... the trained tokens of one
    trajectory in order, V_t the value of the state before token t; V and A after the last one are 0. r_t is the token's
    own reward, plus the trajectory's reward at the last trained token.

    Args:
        rewards: [J], of whole trajectories; NaN = not applicable.
        values: [S].
        mask: Bool [S], True = trained. Numbers at other tokens have no effect, NaN included.
        trajectory: Long [S], the trajectory of each token; those of one trajectory are in order, wherever they lie.
        token_rewards: [S], rewards of single tokens (a KL penalty, an environment's); None = none.
        gamma: γ, 0 to 1. gae_lambda: λ, 0 to 1; 1 = the whole return, 0 = one step.
    Returns: (advantages, returns), [S] in float64, without gradient; 0 where masked out. Where the reward is NaN the
        advantage is 0 and the return is the value, so that nothing is learned there.
    Raises: ConfigError: gamma or gae_lambda outside 0 to 1. DataError: an infinite reward, or lengths that differ.
    Source: Schulman et al., arXiv:1506.02438, equations 11 and 16; equal to Tunix's and verl's
        compute_gae_advantage_return before whitening, which leave numbers at masked-out places. They scan padded rows,
        whet only the trained tokens. RL2's is equal too if λ and γ are the same.

    >>> a, r = generalized_advantages(torch.tensor([1.0]), torch.tensor([0.5, 9.0, 0.25]),
    ...                               torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.long),
    ...                               gamma=1.0, gae_lambda=0.5)
    >>> a.tolist(), r.tolist()  # δ = 0 + 0.25 - 0.5 and 1 - 0.25
    ([0.125, 0.0, 0.75], [0.625, 0.0, 1.0])
    """
    for name, number in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= number <= 1:
            raise ConfigError(f"{name} must be between 0 and 1, got {number!r}")
    check_shapes("[S]", values=values, mask=mask, trajectory=trajectory, token_rewards=token_rewards)
    if rewards.isinf().any():
        at = int(rewards.isinf().nonzero()[0])
        raise DataError(f"reward {at} is {rewards[at].item()}; rewards must be finite, or NaN for not applicable")
    outcome, v = rewards.detach().double(), values.detach().double()
    rewarded = mask.bool() & ~outcome.isnan().index_select(0, trajectory)
    at, sizes = _from_the_end(rewarded, trajectory, len(outcome))
    advantages, returns = v.new_zeros(len(v)), torch.where(mask.bool(), v, 0.0)
    value = v.index_select(0, at)
    reward = torch.zeros_like(value) if token_rewards is None else token_rewards.detach().double().index_select(0, at)
    if sizes:
        reward[: sizes[0]] += outcome.index_select(0, trajectory.index_select(0, at[: sizes[0]]))
    by_distance: list[Tensor] = []
    next_advantage = next_value = value.new_zeros(sizes[0] if sizes else 0)
    for r, v_t in zip(reward.split(sizes), value.split(sizes), strict=True):
        next_advantage, next_value = next_advantage[: len(v_t)], next_value[: len(v_t)]
        next_advantage = r + gamma * next_value - v_t + gamma * gae_lambda * next_advantage
        next_value = v_t
        by_distance.append(next_advantage)
    if by_distance:
        advantages[at] = torch.cat(by_distance)
        returns[at] = advantages[at] + value
    return advantages, returns


def _from_the_end(rewarded: Tensor, trajectory: Tensor, num: int) -> tuple[Tensor, list[int]]:
    """The rewarded tokens, sorted by the number of tokens that follow in their trajectory, then by its length.

    Tokens at one distance from the end lie together, and the successor of each has the same place among those of the
    distance before. So nothing is padded, whatever the lengths.
    Returns: Long [M], places on the token axis; the number of tokens at each distance, 0, 1, ..., falling.

    >>> _from_the_end(torch.tensor([True] * 3), torch.tensor([0, 1, 1]), 2)  # 2 ends trajectory 1, the longer one
    (tensor([2, 0, 1]), [2, 1])
    """
    at = rewarded.nonzero().flatten()
    own = trajectory.index_select(0, at)
    order = own.argsort(stable=True)
    at, own = at.index_select(0, order), own.index_select(0, order)
    counts = own.bincount(minlength=num)
    distance = counts.cumsum(0).index_select(0, own) - 1 - torch.arange(len(own), device=own.device)
    rank = counts.argsort(descending=True, stable=True).argsort()
    return at.index_select(0, (distance * num + rank.index_select(0, own)).argsort()), distance.bincount().tolist()
