"""Advantages from a critic's values. Dim legend: J trajectories, S tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.advantages.inputs import AdvantageInputs
from whet.ops.gae import generalized_advantages
from whet.ops.masked import masked_whiten

__all__ = ["advantages_and_returns", "gae_advantages"]


def advantages_and_returns(
    x: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """The generalised advantage of each token, as it is, and the return that a critic learns: A and A + V.

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


def gae_advantages(
    x: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95, whiten_advantages: bool = True
) -> Tensor:
    """Generalised advantages from a critic's values, one for each token.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t, over the trained tokens of a trajectory; whitened over the
    whole step: (A − μ) / √(v + 1e-8), μ and v the mean and the unbiased variance over all trained tokens. What a critic
    learns, A + V before whitening, is the second result of advantages_and_returns.

    Args: x: needs values; r_t is x.rewards_by_token. gamma: γ. gae_lambda: λ.
        whiten_advantages: off, A is given as it is.
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
    found, _ = advantages_and_returns(x, gamma=gamma, gae_lambda=gae_lambda)
    if not whiten_advantages:
        return found
    return masked_whiten(found, x.mask & ~x.rewards.isnan().index_select(0, x.trajectory))
