"""RLOOConfig: the table of its fields, many shared with GRPOConfig, and the class."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.compat.field import Table, differs, works
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.grpo import GRPO_FIELDS, OLD_GRPO_FIELDS
from whet.trl.config.rl import RLArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.translate import rloo_algorithm

__all__ = ["OLD_RLOO_FIELDS", "RLOO_FIELDS", "RLOOConfig"]

_OWN: Table = {
    "num_generations": works(2),
    "beta": works(0.05, "the KL is in the reward: log π_old − log π_ref, summed over a completion"),
    "epsilon": works(0.2, "clips the ratio of whole completions; the sum of log-ratios is clamped to ±20"),
    "normalize_advantages": works(False),
    "reward_clip_range": works(None, "clips the weighted sums, before the KL is subtracted", tuple[float, float]),
    "mask_truncated_completions": differs(
        False, "as in TRL, masked rows count in the mean; TRL's loss value also has their advantages, without gradient"
    ),
}
_GRPO_ONLY = (
    "cast_lm_head_to_fp32",
    "delta",
    "entropy_coef",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "entropy_target",
    "importance_sampling_level",
    "log_completions_hub_repo",
    "loss_type",
    "max_tool_calling_iterations",
    "multi_objective_aggregation",
    "off_policy_mask_threshold",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "scale_rewards",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)

RLOO_FIELDS: Table = {**{name: row for name, row in GRPO_FIELDS.items() if name not in _GRPO_ONLY}, **_OWN}
"""Field -> its default and its meaning in whet."""

OLD_RLOO_FIELDS: Table = {name: row for name, row in OLD_GRPO_FIELDS.items() if name != "compat"}
"""Field of an earlier TRL -> how it is read."""


class _RLOO(RLArguments):
    """The methods of RLOOConfig."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **RLOO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_RLOO_FIELDS}
    METHOD = "RLOO"

    def to_whet(self) -> Any:
        """Returns the algorithm as whet's own configuration."""
        return rloo_algorithm(self)


RLOOConfig: type[_RLOO] = dataclass_of(
    "RLOOConfig",
    _RLOO,
    """TRL's RLOOConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> RLOOConfig(beta=0.1).to_whet().kl_type
    'reward'
    """,
)
