"""AdvantageInputs, the argument of an advantage estimator; its declarations; and the call of either form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from whet.errors import DataError
from whet.ops.masked import segment_count, segment_sum

__all__ = ["AdvantageInputs", "estimate", "needs_greedy_rewards", "turn_index", "with_greedy_rewards"]

Estimator = TypeVar("Estimator", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantageInputs:
    """The argument of an estimator: the rewards and the tokens of a whole step.

    Raises: DataError: a column of another length than its kind, or a reward at a trained token that is not finite.

    Example: two completions of one prompt, of 2 and 1 tokens.

    >>> from torch import tensor
    >>> AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 1]),
    ...                 mask=tensor([True, True, True]), table={"exact": tensor([1., 0.])}).lengths
    tensor([2, 1])
    """

    rewards: Tensor
    """Float64 [J]: the outcome, the weighted sum of the reward functions; NaN = not applicable."""
    group_of: Tensor
    """Long [J]: the group (prompt) of each trajectory."""
    trajectory: Tensor
    """Long [S]: the trajectory of each token; the tokens of one trajectory stand in their order."""
    mask: Tensor
    """Bool [S]: True = trained."""
    table: Mapping[str, Tensor] = field(default_factory=dict)
    """Float64 [J] by reward function, before its weight; NaN = not applicable."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each function of the table."""
    token_rewards: Tensor | None = None
    """Float [S]: rewards of single tokens, in addition to the outcome. At tokens that are not trained, a number that is
    not finite counts as 0."""
    turn: Tensor | None = None
    """Long [S]: the turn of each token in its trajectory, from 0; a token that was not sampled belongs to the turn
    before it. None = each run of trained tokens is a turn."""
    values: Tensor | None = None
    """Float [S]: the critic's value of the state before each token, at rollout."""
    greedy_rewards: Tensor | None = None
    """Float64 [num_groups]: the outcome of each group's greedy completion, NaN = not applicable. It exists only for
    estimators that declare `with_greedy_rewards`."""

    def __post_init__(self) -> None:
        number, size = len(self.rewards), len(self.mask)
        groups = int(self.group_of.max()) + 1 if len(self.group_of) else 0
        per_trajectory = {"group_of": self.group_of, **{f"table[{n!r}]": r for n, r in self.table.items()}}
        per_token = {"trajectory": self.trajectory, "token_rewards": self.token_rewards, "values": self.values}
        per_token["turn"] = self.turn
        for columns, wanted, of in (
            (per_trajectory, number, "trajectories"),
            (per_token, size, "tokens"),
            ({"greedy_rewards": self.greedy_rewards}, groups, "groups"),
        ):
            for name, column in columns.items():
                if column is not None and column.shape != (wanted,):
                    raise DataError(f"{name} has the shape {list(column.shape)}; there are {wanted} {of}")
        if self.token_rewards is not None and (bad := self.mask & ~self.token_rewards.isfinite()).any():
            at = int(bad.nonzero()[0])
            raise DataError(f"token_rewards is {self.token_rewards[at].item()} at token {at}, which is trained")

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Long [J]: trained tokens of each trajectory."""
        return segment_count(self.mask, self.trajectory, len(self.rewards))

    @functools.cached_property
    def returns(self) -> Tensor:
        """Float64 [J]: the return of each trajectory, Rⱼ = rⱼ + Σ_t r_t: its outcome and the rewards of all its tokens,
        trained or not (an environment may give one at a token of its own). NaN where the outcome is.
        """
        if self.token_rewards is None:
            return self.rewards.double()
        return self.rewards.double() + segment_sum(self.finite_token_rewards, self.trajectory, len(self.rewards))

    @functools.cached_property
    def rewards_by_token(self) -> Tensor:
        """Float64 [S]: the same rewards at trained tokens: the outcome at the trajectory's last one, the reward of a
        token at itself or, where it is not trained, at the last trained one before, or else at the first. 0 at tokens
        that are not trained, and in trajectories whose outcome is NaN.
        """
        size, number = len(self.mask), len(self.rewards)
        place = torch.arange(size)
        order = torch.argsort(self.trajectory, stable=True)  # the tokens of a trajectory end to end
        trajectory, trained = self.trajectory[order], self.mask[order]
        before = torch.cummax(torch.where(trained, place, -1), 0).values  # the last trained place so far, of any one
        after = torch.cummin(torch.where(trained, place, size).flip(0), 0).values.flip(0)  # the next one, of any
        own = before >= torch.searchsorted(trajectory, trajectory)  # it belongs to the same trajectory
        target = torch.where(own, before, after)
        exists = (target < size) & (trajectory[target.clamp(max=max(size - 1, 0))] == trajectory) if size else own
        known = ~self.rewards.isnan()
        rewards = torch.zeros(size, dtype=torch.float64)
        kept = exists & known[trajectory]
        rewards.index_add_(0, target[kept], self.finite_token_rewards[order][kept])
        end = torch.full((number,), -1).scatter_reduce(0, trajectory[own], before[own], "amax")
        has_end = (end >= 0) & known
        rewards[end[has_end]] += self.rewards.double()[has_end]
        return torch.empty_like(rewards).index_copy_(0, order, rewards)

    @functools.cached_property
    def turn_of_token(self) -> Tensor:
        """Long [S]: the turn of each token in its trajectory."""
        return turn_index(self.mask, self.trajectory, self.trajectory) if self.turn is None else self.turn

    @property
    def finite_token_rewards(self) -> Tensor:
        """Float64 [S]: 0 where there are none, and where they are not finite, which they are at trained tokens."""
        if self.token_rewards is None:
            return torch.zeros(len(self.mask), dtype=torch.float64)
        return torch.where(self.token_rewards.isfinite(), self.token_rewards.double(), 0.0)

    def need(self, name: str) -> Tensor:
        """A column that the estimator requires. Raises DataError: it is missing, with its name."""
        known = {"token_rewards": self.token_rewards, "values": self.values, "greedy_rewards": self.greedy_rewards}
        if (column := known[name]) is None:
            raise DataError(f"the advantage estimator needs {name}, which this batch does not have")
        return column


def turn_index(sampled: Tensor, sequence: Tensor, trajectory: Tensor) -> Tensor:
    """The turn of each token in its trajectory: turns are runs of sampled tokens in a sequence.

    Args: sampled: Bool [S]. sequence, trajectory: Long [S]; those of one trajectory stand in their order.
    Returns: Long [S], from 0; a token that was not sampled has the turn before it, or 0.

    >>> from torch import tensor
    >>> sampled = tensor([True, True, False, True, False, True, True])
    >>> turn_index(sampled, tensor([0, 0, 0, 0, 1, 2, 3]), tensor([0, 0, 0, 0, 1, 1, 1])).tolist()
    [0, 0, 0, 1, 0, 0, 1]
    """
    order = torch.argsort(trajectory, stable=True)
    drawn, part, whole = sampled[order].bool(), sequence[order], trajectory[order]
    continued = torch.zeros_like(drawn)
    continued[1:] = drawn[:-1] & (part[1:] == part[:-1]) & (whole[1:] == whole[:-1])
    count = (drawn & ~continued).long().cumsum(0)
    first = torch.searchsorted(whole, whole)  # the first token of the trajectory
    before = torch.cat([count.new_zeros(1), count])[first]  # the turns of earlier trajectories
    return torch.empty_like(count).index_copy_(0, order, (count - before - 1).clamp(min=0))


def with_greedy_rewards(estimator: Estimator) -> Estimator:
    """Declares that an estimator reads x.greedy_rewards. The learner then samples one greedy completion of each prompt
    too, which is rewarded and not trained on.

    Args: estimator: fn(x: AdvantageInputs).
    Returns: itself.

    >>> @with_greedy_rewards
    ... def better_than_greedy(x):
    ...     return (x.returns > x.need("greedy_rewards")[x.group_of]).double()
    >>> needs_greedy_rewards(better_than_greedy), needs_greedy_rewards(estimate)
    (True, False)
    """
    estimator.with_greedy_rewards = True  # pyright: ignore[reportFunctionMemberAccess]
    return estimator


def needs_greedy_rewards(estimator: Callable[..., Any]) -> bool:
    """Whether an estimator, or the function of a partial, was declared by with_greedy_rewards.

    >>> needs_greedy_rewards(functools.partial(with_greedy_rewards(lambda x, *, k: x.returns), k=1))
    True
    """
    while isinstance(estimator, functools.partial):
        estimator = estimator.func
    return getattr(estimator, "with_greedy_rewards", False)


def estimate(estimator: Callable[..., Tensor], x: AdvantageInputs) -> Tensor:
    """The advantages that an estimator of either form gives, one for each token.

    Args: estimator: fn(x) -> [J] or [S], or fn(rewards, group_ids) -> [J]: it has two arguments without a default, and
            is given x.returns.
        x: a whole step.
    Returns: fp32 [S], finite.
    Raises: DataError: another shape, or a number that is not finite at a trained token; as many tokens as trajectories,
        but not one for each in order.

    >>> from torch import tensor
    >>> x = AdvantageInputs(rewards=tensor([1., 0.]), group_of=tensor([0, 0]), trajectory=tensor([0, 0, 1]),
    ...                     mask=tensor([True, True, True]))
    >>> estimate(lambda rewards, groups: rewards - 0.5, x), estimate(lambda x: x.rewards * x.lengths, x)
    (tensor([ 0.5000,  0.5000, -0.5000]), tensor([2., 2., 0.]))
    """
    number, size = len(x.rewards), len(x.mask)
    if number == size and not torch.equal(x.trajectory, torch.arange(size)):
        raise DataError(
            f"there are {size} tokens and as many trajectories, but not one token for each in order, so [J] can't be "
            "told from [S]; every completion has at least its stop token"
        )
    takes_rewards = _num_required(estimator) == 2
    advantages = torch.as_tensor(estimator(x.returns, x.group_of) if takes_rewards else estimator(x)).detach().float()
    rule = f"give one finite number for each of the {number} rewards (0 where a reward is NaN)"
    if advantages.shape == x.rewards.shape:
        advantages = advantages.index_select(0, x.trajectory)
    elif advantages.shape != x.mask.shape:
        raise DataError(
            f"the advantage estimator gave an array of shape {list(advantages.shape)}; {rule}, or for each of the "
            f"{size} tokens"
        )
    infinite = ~advantages.isfinite()
    if (infinite & x.mask).any():
        raise DataError(
            f"the advantage estimator gave numbers that are not finite for {int((infinite & x.mask).sum())} of "
            f"{size} tokens, the first at token {int((infinite & x.mask).nonzero()[0])}; {rule}, or for each token"
        )
    return advantages.masked_fill(infinite, 0.0)


def _num_required(fn: Callable[..., Any]) -> int:
    """The number of positional arguments without a default; 1 if the signature can't be read."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
