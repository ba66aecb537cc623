"""Advantages: from the rewards of a step to a number per trajectory [J], or per token [S].

An estimator is fn(rewards, group_ids, *, ...) -> [J], or fn(x: AdvantageInputs, *, ...) -> [J] or [S] where it needs
more. What holds for all of them:

- Computed in float64, returned in fp32. Groups may differ in size.
- A NaN reward means "not applicable": it takes no part in any statistic and gets advantage 0.
- Against the group, equal rewards give exactly 0, by comparing the largest with the smallest: a deviation of them is
  1e-16, not 0. Estimators with another baseline (reinforce with global_norm, reinforce_plus_plus, remax) give what they
  give.
- Rewards of single tokens join the outcome in one place, AdvantageInputs.returns and .rewards_by_token.

Which of them need groups is whet.config's to know, where a configuration is checked without torch:
whet.config.algo.advantage.NEED_GROUPS.
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
    best_alone,
    group_relative,
    leave_one_out,
    length_weighted,
    mean_only,
    relative_to_success,
)
from whet.ops.advantages.group_statistics import Grouped, group_spread
from whet.ops.advantages.inputs import AdvantageInputs, estimate, needs_greedy_rewards, with_greedy_rewards

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "Grouped",
    "advantages_and_returns",
    "batch_normalized",
    "best_alone",
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
    "grpo_passk": best_alone,
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
