"""Advantages of completions from the rewards of their group.

Dim legend: N completions, J trajectories, S tokens. Computed in float64, returned in fp32. A NaN reward means "not
applicable": it is left out of its group's statistics and gets advantage 0. Equal rewards give exactly 0: that is tested
by comparing the largest with the smallest, since seven rewards of 0.9 have a standard deviation of 1e-16, not of 0.
An estimator is fn(rewards, group_ids, **kw) -> [J], or fn(x: AdvantageInputs, **kw) -> [J] or [S] where it needs more.
Left out on purpose, so far: per-function normalisation (GDPO).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whet.errors import DataError, lookup_error
from whet.ops.gae import generalized_advantages
from whet.ops.masked import masked_var, masked_whiten, segment_count, segment_mean, segment_sum

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "estimate",
    "gae_advantages",
    "group_relative",
    "group_spread",
    "leave_one_out",
    "mean_only",
]

_SCALES = ("std", "none", "batch")


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantageInputs:
    """What an estimator is given: a whole step's rewards, and the tokens that they were given for.

    Example: two completions of one prompt, of 2 and 1 tokens.

    >>> from torch import tensor
    >>> AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 1]),
    ...                 mask=tensor([True, True, True]), table={"exact": tensor([1., 0.])}).lengths
    tensor([2, 1])
    """

    rewards: Tensor
    """Float64 [J]: the weighted sum of the reward functions; NaN = not applicable."""
    group_of: Tensor
    """Long [J]: the group (prompt) of each trajectory."""
    trajectory: Tensor
    """Long [S]: the trajectory of each token, in order."""
    mask: Tensor
    """Bool [S]: True = trained."""
    table: Mapping[str, Tensor] = field(default_factory=dict)
    """Float64 [J] by reward function, before its weight; NaN = not applicable."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each function of the table."""
    token_rewards: Tensor | None = None
    """Float [S]: rewards given at single tokens."""
    values: Tensor | None = None
    """Float [S]: of the state before each token, at rollout."""

    @property
    def lengths(self) -> Tensor:
        """Long [J]: trained tokens of each trajectory."""
        return segment_count(self.mask, self.trajectory, len(self.rewards))

    @property
    def total_rewards(self) -> Tensor:
        """Float64 [J]: the rewards of whole trajectories, with those given at their trained tokens."""
        if self.token_rewards is None:
            return self.rewards
        own = torch.where(self.mask, self.token_rewards.double(), 0.0)
        return self.rewards + segment_sum(own, self.trajectory, len(self.rewards))

    def need(self, name: str) -> Tensor:
        """A column that this estimator can't do without. Raises DataError: it is missing, with its name."""
        column = {"token_rewards": self.token_rewards, "values": self.values}[name]
        if column is None:
            raise DataError(f"the advantage estimator needs {name}, which this batch does not have")
        return column


def estimate(estimator: Callable[..., Tensor], x: AdvantageInputs) -> Tensor:
    """The advantages that an estimator of either form gives, one for each token.

    Args: estimator: fn(x) -> [J] or [S], or fn(rewards, group_ids) -> [J]: it has two arguments without a default, and
        is given x.total_rewards.
        x: a whole step.
    Returns: fp32 [S], finite.
    Raises: DataError: another shape, or a number that is not finite at a trained token.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 1]),
    ...                     mask=tensor([True, True, True]))
    >>> estimate(mean_only, x), estimate(lambda x: x.rewards * x.lengths, x)
    (tensor([ 0.5000,  0.5000, -0.5000]), tensor([2., 2., 0.]))
    """
    plain = _num_required(estimator) == 2
    found = torch.as_tensor(estimator(x.total_rewards, x.group_of) if plain else estimator(x)).detach().float()
    wanted = f"give one finite number for each of the {len(x.rewards)} rewards (0 where a reward is NaN)"
    if found.shape == x.rewards.shape:
        found = found.index_select(0, x.trajectory)
    elif found.shape != x.mask.shape:
        raise DataError(
            f"the advantage estimator gave an array of shape {list(found.shape)}; {wanted}, or for each of the "
            f"{len(x.mask)} tokens"
        )
    bad = ~found.isfinite()
    if (bad & x.mask).any():
        raise DataError(
            f"the advantage estimator gave numbers that are not finite for {int((bad & x.mask).sum())} of "
            f"{len(x.mask)} tokens, the first at token {int((bad & x.mask).nonzero()[0])}; {wanted}, or for each token"
        )
    return found.masked_fill(bad, 0.0)


def _num_required(fn: Callable[..., Any]) -> int:
    """Positional arguments without a default. One whose signature can't be read is taken for fn(x)."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def group_relative(rewards: Tensor, group_ids: Tensor, *, scale: str = "std", eps: float = 1e-6) -> Tensor:
    """Advantage of each completion against its own group.

    Aᵢ = (rᵢ − mean_g(r)) / (σ + ε), g the group of i; σ = std_g(r) for scale="std", the standard deviation of all
    rewards for "batch"; "none" drops the denominator (Dr. GRPO).

    Args:
        rewards [N]: one score per completion, any unit; NaN = not applicable.
        group_ids: Long [N], completions of one prompt share an id; any ids in any order.
        scale: std, none or batch.
        eps: added to σ.
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ. ConfigError: an unknown scale.
    Source: arXiv:2402.03300 (outcome supervision); Dr. GRPO arXiv:2503.20783. Sample std (ddof=1) as Tunix and TRL. ε
        differs in the wild: TRL 1e-4, Tunix 1e-6. TRL leaves rounding noise where rewards are equal.

    >>> from torch import tensor
    >>> group_relative(tensor([1., 0., 5.]), tensor([0, 0, 1]), scale="none")  # group 0 has mean 0.5
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    if scale not in _SCALES:
        raise lookup_error("advantage scale", scale, _SCALES)
    r, given, groups, num = _grouped(rewards, group_ids)
    centred = r - segment_mean(r, given, groups, num).index_select(0, groups)
    if scale == "std":
        squares = segment_sum(torch.where(given, centred, 0.0).square(), groups, num)
        std = (squares / (segment_count(given, groups, num) - 1).clamp(min=1)).sqrt()
        centred = centred / (std.index_select(0, groups) + eps)
    elif scale == "batch":
        centred = centred / (masked_var(r, given).sqrt() + eps)
    return _where_signal(centred, r, given, groups, num)


def mean_only(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantage of each completion against the mean of its group, not scaled.

    Aᵢ = rᵢ − mean_g(r), g the group of i.
    Args: rewards [N], NaN = not applicable. group_ids: Long [N].
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: Dr. GRPO, arXiv:2503.20783.

    >>> from torch import tensor
    >>> mean_only(tensor([1., 0.]), tensor([0, 0]))
    tensor([ 0.5000, -0.5000])
    """
    return group_relative(rewards, group_ids, scale="none")


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantage of each completion against the mean of the others in its group.

    Aᵢ = rᵢ − (Σ_g r − rᵢ) / (n_g − 1), g the group of i, n_g its rewards.
    Args: rewards [N], NaN = not applicable. group_ids: Long [N].
    Returns: [N], fp32; exactly 0 in groups of one and where all rewards of a group are equal.
    Raises: DataError: an infinite reward, or shapes that differ.
    Source: RLOO, arXiv:2402.14740; agrees with Tunix and TRL.

    >>> from torch import tensor
    >>> leave_one_out(tensor([1., 2., 3.]), tensor([0, 0, 0]))  # 1 - 5/2, 2 - 4/2, 3 - 3/2
    tensor([-1.5000,  0.0000,  1.5000])
    """
    r, given, groups, num = _grouped(rewards, group_ids)
    kept = torch.where(given, r, 0.0)
    total = segment_sum(kept, groups, num).index_select(0, groups)
    others = (segment_count(given, groups, num) - 1).clamp(min=1).index_select(0, groups)
    return _where_signal(r - (total - kept) / others, r, given, groups, num)


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
    _check_shapes(rewards, group_ids)
    r = rewards.detach().double()
    num = int(group_ids.max()) + 1 if len(group_ids) else 0
    return _spread(r, ~r.isnan(), group_ids, num)


def gae_advantages(
    x: AdvantageInputs, *, gamma: float = 1.0, gae_lambda: float = 0.95, whiten_advantages: bool = True
) -> Tensor:
    """Generalised advantages from a critic's values, one for each token.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t, over the trained tokens of a trajectory; whitened over the
    whole step: (A − μ) / √(v + 1e-8), μ and v the mean and the unbiased variance over all trained tokens. What a critic
    learns, A + V before whitening, is the second result of generalized_advantages.

    Args: x: needs values; token_rewards are added where there are any. gamma: γ. gae_lambda: λ.
        whiten_advantages: off, A is given as it is.
    Returns: [S] in float64; 0 where masked out, where the reward is NaN, and, whitened, everywhere if all are equal.
    Raises: DataError: no values. What generalized_advantages raises.
    Source: arXiv:1506.02438; PPO arXiv:1707.06347. Agrees with Tunix's compute_gae_advantages, verl's and RL2's; RL2
        divides by the standard deviation without 1e-8.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 1]), trajectory=tensor([0, 0, 1]),
    ...                     mask=tensor([True, True, True]), values=tensor([0.5, 0.5, 0.5]))
    >>> gae_advantages(x, gae_lambda=0.5, whiten_advantages=False).tolist()  # δ = 0.5 - 0.5, 1 - 0.5; 0 - 0.5
    [0.25, 0.5, -0.5]
    """
    found, _ = generalized_advantages(
        x.rewards,
        x.need("values"),
        x.mask,
        x.trajectory,
        token_rewards=x.token_rewards,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    if not whiten_advantages:
        return found
    return masked_whiten(found, x.mask & ~x.rewards.isnan().index_select(0, x.trajectory))


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "drgrpo": mean_only,
    "gae": gae_advantages,
    "grpo": group_relative,
    "rloo": leave_one_out,
}
"""fn(rewards [N], group_ids [N], **kw) -> [N], or fn(x: AdvantageInputs, **kw) -> [J] or [S], by name."""


def _grouped(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rewards in float64, which are not NaN, dense group ids and how many there are."""
    _check_shapes(rewards, group_ids)
    r = rewards.detach().double()
    if r.isinf().any():
        at = int(r.isinf().nonzero()[0])
        raise DataError(f"reward {at} is {r[at].item()}; rewards must be finite, or NaN for not applicable")
    ids, groups = torch.unique(group_ids, return_inverse=True)
    return r, ~r.isnan(), groups, len(ids)


def _check_shapes(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        shapes = f"{list(rewards.shape)} and {list(group_ids.shape)}"
        raise DataError(f"rewards and group_ids have shapes {shapes}; give one of each per completion: [N] and [N]")


def _spread(r: Tensor, given: Tensor, groups: Tensor, num: int) -> Tensor:
    """Bool [num]: the largest reward of a group differs from the smallest."""
    high = r.new_full((num,), -torch.inf).scatter_reduce(0, groups, torch.where(given, r, -torch.inf), "amax")
    low = r.new_full((num,), torch.inf).scatter_reduce(0, groups, torch.where(given, r, torch.inf), "amin")
    return high > low


def _where_signal(advantages: Tensor, r: Tensor, given: Tensor, groups: Tensor, num: int) -> Tensor:
    """Advantages in fp32, exactly 0 without a reward and in groups without spread."""
    signal = _spread(r, given, groups, num).index_select(0, groups)
    return torch.where(given & signal, advantages, 0.0).float()
