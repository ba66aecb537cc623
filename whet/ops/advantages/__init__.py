"""Advantages: from the rewards of a step to a number per trajectory [J] or per token [S].

An estimator is fn(rewards, group_ids, *, ...) -> [J]. One that needs more is fn(x: AdvantageInputs, *, ...) -> [J] or
[S]. All estimators have this in common:

- Computed in float64, returned in fp32. Groups may differ in size.
- A NaN reward means "not applicable": it takes no part in any statistic and gets advantage 0.
- Estimators that compare within a group give exactly 0 for equal rewards. They compare the largest with the smallest
  reward, because the standard deviation of equal rewards is 1e-16 and not 0. Estimators with another baseline
  (reinforce with global_norm, reinforce_plus_plus, remax) need not give 0.
- AdvantageInputs.returns and .rewards_by_token add the rewards of single tokens to the outcome.

whet.config.algo.policy.NEED_GROUPS lists the estimators that need groups, because whet.config works without torch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from whet.ops.advantages.batch import (
    gdpo_advantages,
    reinforce_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    scalerl_advantages,
)
from whet.ops.advantages.gae import (
    advantages_and_returns,
    gae_advantages,
    generalized_advantages,
    whiten_trained,
)
from whet.ops.advantages.group import (
    drgrpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from whet.ops.advantages.group_statistics import GroupedRewards, group_spread
from whet.ops.advantages.inputs import (
    AdvantageInputs,
    estimate,
    needs_greedy_rewards,
    turn_index,
    with_greedy_rewards,
)
from whet.ops.advantages.turns import turn_rloo_advantages

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageInputs",
    "GroupedRewards",
    "advantages_and_returns",
    "drgrpo_advantages",
    "estimate",
    "gae_advantages",
    "gdpo_advantages",
    "generalized_advantages",
    "group_spread",
    "grpo_advantages",
    "maxrl_advantages",
    "needs_greedy_rewards",
    "opo_advantages",
    "pass_at_k_advantages",
    "reinforce_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
    "scalerl_advantages",
    "turn_index",
    "turn_rloo_advantages",
    "whiten_trained",
    "with_greedy_rewards",
]

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "drgrpo": drgrpo_advantages,
    "gae": gae_advantages,
    "gdpo": gdpo_advantages,
    "grpo": grpo_advantages,
    "grpo_passk": pass_at_k_advantages,
    "maxrl": maxrl_advantages,
    "opo": opo_advantages,
    "reinforce": reinforce_advantages,
    "reinforce_plus_plus": reinforce_plus_plus_advantages,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages,
    "remax": remax_advantages,
    "rloo": rloo_advantages,
    "scalerl": scalerl_advantages,
    "turn_rloo": turn_rloo_advantages,
}
"""fn(rewards [J], group_ids [J], **kw) -> [J], or fn(x: AdvantageInputs, **kw) -> [J] or [S], by name."""
