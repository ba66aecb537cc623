"""Advantages: from the rewards of a step to a number per trajectory [J] or per token [S].

An estimator is fn(rewards, group_ids, *, ...) -> [J]. One that needs more is fn(x: AdvantageInputs, *, ...) -> [J] or
[S]. All estimators have this in common:

- Computed in float64, returned in fp32. Groups may differ in size.
- A NaN reward means "not applicable": it takes no part in any statistic and gets advantage 0.
- Estimators that compare within a group give exactly 0 for equal rewards. They compare the largest with the smallest
  reward, because the standard deviation of equal rewards is 1e-16 and not 0. Estimators with another baseline
  (reinforce with global_norm, reinforce_plus_plus, remax) need not give 0.
- AdvantageInputs.returns and .rewards_by_token add the rewards of single tokens to the outcome.

whet.config.algo.advantage.NEED_GROUPS lists the estimators that need groups, because whet.config works without torch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from whet.ops.advantages.batch import (
    batch_normalized,
    minus_greedy,
    minus_mean,
    reward_decoupled,
    whitened_relative,
    whitened_returns,
)
from whet.ops.advantages.critic import advantages_and_returns, gae_advantages
from whet.ops.advantages.group import (
    best_of_group,
    group_relative,
    leave_one_out,
    length_weighted,
    mean_only,
    relative_to_success,
)
from whet.ops.advantages.group_statistics import GroupedRewards, group_spread
from whet.ops.advantages.inputs import AdvantageInputs, estimate, needs_greedy_rewards, with_greedy_rewards

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "GroupedRewards",
    "advantages_and_returns",
    "batch_normalized",
    "best_of_group",
    "estimate",
    "gae_advantages",
    "group_relative",
    "group_spread",
    "leave_one_out",
    "length_weighted",
    "mean_only",
    "minus_greedy",
    "minus_mean",
    "needs_greedy_rewards",
    "relative_to_success",
    "reward_decoupled",
    "whitened_relative",
    "whitened_returns",
    "with_greedy_rewards",
]

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "drgrpo": mean_only,
    "gae": gae_advantages,
    "gdpo": reward_decoupled,
    "grpo": group_relative,
    "grpo_passk": best_of_group,
    "maxrl": relative_to_success,
    "opo": length_weighted,
    "reinforce": minus_mean,
    "reinforce_plus_plus": whitened_returns,
    "reinforce_plus_plus_baseline": whitened_relative,
    "remax": minus_greedy,
    "rloo": leave_one_out,
    "scalerl": batch_normalized,
}
"""fn(rewards [J], group_ids [J], **kw) -> [J], or fn(x: AdvantageInputs, **kw) -> [J] or [S], by name."""
