"""Pure maths of reinforcement learning on token sequences: torch in, torch out.

Nothing here knows of models, data sets, devices or configurations; only torch, whet.types and whet.errors are imported.
LossInputs, which every loss receives, is whet.types'.
"""

from whet.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    estimate,
    group_relative,
    group_spread,
    leave_one_out,
    mean_only,
)
from whet.ops.corrections import mismatch_metrics, truncated_weights
from whet.ops.kl import KL_MODES, kl_divergence
from whet.ops.logprobs import entropy, selective_log_softmax
from whet.ops.masked import (
    fp32_or_wider,
    masked_column,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    segment_count,
    segment_mean,
    segment_sum,
    to_fp32,
)
from whet.ops.objective import (
    CORRECTIONS,
    TOKEN_MASKS,
    Objective,
    off_policy_mask,
    reference_kl,
    truncated_importance,
)
from whet.ops.policy_losses import (
    IMPORTANCE_LEVELS,
    POLICY_LOSSES,
    cispo,
    cispo_trl,
    clipped_ratio,
    clipped_surrogate,
    distillation,
    geometric_mean,
    metrics_without_advantage,
    nll,
    reinforce,
    soft_gate,
    vespo,
    zero_without_advantage,
)
from whet.ops.support import Support, allowed_tokens, draw, greedy, support_logits
from whet.ops.uniform import address_key, uniform
from whet.ops.value_losses import VALUE_LOSSES, clipped_value
from whet.ops.weighting import LOSS_AGG_MODES, aggregate, token_weights, unit_weights
from whet.types import LossInputs

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "CORRECTIONS",
    "IMPORTANCE_LEVELS",
    "KL_MODES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "TOKEN_MASKS",
    "VALUE_LOSSES",
    "AdvantageInputs",
    "LossInputs",
    "Objective",
    "Support",
    "address_key",
    "aggregate",
    "allowed_tokens",
    "cispo",
    "cispo_trl",
    "clipped_ratio",
    "clipped_surrogate",
    "clipped_value",
    "distillation",
    "draw",
    "entropy",
    "estimate",
    "fp32_or_wider",
    "geometric_mean",
    "greedy",
    "group_relative",
    "group_spread",
    "kl_divergence",
    "leave_one_out",
    "masked_column",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "mean_only",
    "metrics_without_advantage",
    "mismatch_metrics",
    "nll",
    "off_policy_mask",
    "reference_kl",
    "reinforce",
    "segment_count",
    "segment_mean",
    "segment_sum",
    "selective_log_softmax",
    "soft_gate",
    "support_logits",
    "to_fp32",
    "token_weights",
    "truncated_importance",
    "truncated_weights",
    "uniform",
    "unit_weights",
    "vespo",
    "zero_without_advantage",
]
