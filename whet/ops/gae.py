"""Generalised advantages of tokens, and the returns that a critic learns.

Only trained tokens are steps. Tokens of a tool or an environment between them (masked out) take no time: the successor
of a trained token is the next trained token. Computed in float64, returned in float64: the caller whitens first.
Dim legend: J trajectories, S tokens, M trained tokens of rewarded trajectories.
Left out on purpose: a value after the last token. A truncated completion counts as ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.ops.shapes import check_shapes

__all__ = ["generalized_advantages"]


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
    """The generalised advantage of each token, and its return.

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  R_t = A_t + V_t;  t, t + 1, ... the trained tokens of one
    trajectory in order, V_t the value of the state before token t; V and A after the last one are 0. r_t is the token's
    own reward, and at the last trained token the trajectory's besides.

    Args:
        rewards: [J], of whole trajectories; NaN = not applicable.
        values: [S].
        mask: Bool [S], True = trained. What stands at other tokens doesn't matter, NaN included.
        trajectory: Long [S], the trajectory of each token; those of one trajectory are in order, wherever they lie.
        token_rewards: [S], rewards of single tokens (a KL penalty, an environment's); None = none.
        gamma: γ, 0 to 1. gae_lambda: λ, 0 to 1; 1 = the whole return, 0 = one step.
    Returns: (advantages, returns), [S] in float64, without gradient; 0 where masked out. Where the reward is NaN the
        advantage is 0 and the return is the value, so that nothing is learned there.
    Raises: ConfigError: gamma or gae_lambda outside 0 to 1. DataError: an infinite reward, or lengths that differ.
    Source: Schulman et al., arXiv:1506.02438, equations 11 and 16; equal to Tunix's and verl's
        compute_gae_advantage_return before whitening, which leave numbers at masked-out places. They scan padded rows,
        whet the trained tokens alone. RL2's too, where λ and γ are the same.

    >>> a, r = generalized_advantages(torch.tensor([1.0]), torch.tensor([0.5, 9.0, 0.25]),
    ...                               torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.long),
    ...                               gamma=1.0, gae_lambda=0.5)
    >>> a.tolist(), r.tolist()  # δ = 0 + 0.25 - 0.5 and 1 - 0.25
    ([0.125, 0.0, 0.75], [0.625, 0.0, 1.0])
    """
    for name, share in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} must be between 0 and 1, got {share!r}")
    _check(rewards, values, mask, trajectory, token_rewards)
    outcome, v = rewards.detach().double(), values.detach().double()
    known = mask.bool() & ~outcome.isnan().index_select(0, trajectory)
    at, sizes = _from_the_end(known, trajectory, len(outcome))
    advantages, returns = v.new_zeros(len(v)), torch.where(mask.bool(), v, 0.0)
    value = v.index_select(0, at)
    earned = torch.zeros_like(value) if token_rewards is None else token_rewards.detach().double().index_select(0, at)
    if sizes:
        earned[: sizes[0]] += outcome.index_select(0, trajectory.index_select(0, at[: sizes[0]]))
    found: list[Tensor] = []
    after = next_value = value.new_zeros(sizes[0] if sizes else 0)
    for r, own in zip(earned.split(sizes), value.split(sizes), strict=True):
        after, next_value = after[: len(own)], next_value[: len(own)]
        after = r + gamma * next_value - own + gamma * gae_lambda * after
        next_value = own
        found.append(after)
    if found:
        advantages[at] = torch.cat(found)
        returns[at] = advantages[at] + value
    return advantages, returns


def _from_the_end(known: Tensor, trajectory: Tensor, num: int) -> tuple[Tensor, list[int]]:
    """The tokens that count, sorted by the number of tokens that follow in their trajectory, then by its length.

    So those of one distance lie together, and each one's successor has the same place among those of the distance
    before: no padding, whatever the lengths.
    Returns: Long [M], places on the token axis; how many there are at each distance, 0, 1, ..., falling.

    >>> _from_the_end(torch.tensor([True] * 3), torch.tensor([0, 1, 1]), 2)  # 2 ends trajectory 1, the longer one
    (tensor([2, 0, 1]), [2, 1])
    """
    at = known.nonzero().flatten()
    own = trajectory.index_select(0, at)
    order = own.argsort(stable=True)
    at, own = at.index_select(0, order), own.index_select(0, order)
    counts = own.bincount(minlength=num)
    distance = counts.cumsum(0).index_select(0, own) - 1 - torch.arange(len(own), device=own.device)
    rank = counts.argsort(descending=True, stable=True).argsort()
    return at.index_select(0, (distance * num + rank.index_select(0, own)).argsort()), distance.bincount().tolist()


def _check(rewards: Tensor, values: Tensor, mask: Tensor, trajectory: Tensor, token_rewards: Tensor | None) -> None:
    """Raises DataError for columns of other lengths, and for an infinite reward."""
    check_shapes("[S]", values=values, mask=mask, trajectory=trajectory, token_rewards=token_rewards)
    if rewards.isinf().any():
        at = int(rewards.isinf().nonzero()[0])
        raise DataError(f"reward {at} is {rewards[at].item()}; rewards must be finite, or NaN for not applicable")
