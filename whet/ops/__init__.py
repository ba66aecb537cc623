"""Pure maths of reinforcement learning on token sequences: torch in, torch out.

Nothing here knows of models, data sets, devices or configurations; only torch, whet.types and whet.errors are imported.
LossInputs, which every loss receives, is whet.types'.
"""

from whet.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    estimate,
    gae_advantages,
    group_relative,
    group_spread,
    leave_one_out,
    mean_only,
)
from whet.ops.corrections import (
    CORRECTIONS,
    effective_sample_size,
    mismatch_metrics,
    sampler_importance,
    sampler_log_ratio,
    sampler_rejection,
    sampling_metrics,
    weight_metrics,
)
from whet.ops.gae import generalized_advantages
from whet.ops.kl import KL_MODES, adapted_beta, kl_divergence, kl_rewards, reference_kl, sequence_mean_kl
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
from whet.ops.objective import Objective
from whet.ops.policy_losses import (
    POLICY_LOSSES,
    clipped_surrogate,
    metrics_without_advantage,
    nll,
    zero_without_advantage,
)
from whet.ops.support import Support, allowed_tokens, draw, greedy, support_logits
from whet.ops.token_masks import (
    TOKEN_MASKS,
    binary_kl_mask,
    entropy_rank,
    high_entropy_mask,
    off_policy_mask,
    sampler_kl_mask,
    total_variation_mask,
)
from whet.ops.uniform import address_key, uniform
from whet.ops.value_losses import VALUE_LOSSES, clipped_value
from whet.ops.weighting import LOSS_AGG_MODES, aggregate, token_weights, unit_weights
from whet.types import LossInputs

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "CORRECTIONS",
    "KL_MODES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "TOKEN_MASKS",
    "VALUE_LOSSES",
    "AdvantageInputs",
    "LossInputs",
    "Objective",
    "Support",
    "adapted_beta",
    "address_key",
    "aggregate",
    "allowed_tokens",
    "binary_kl_mask",
    "clipped_surrogate",
    "clipped_value",
    "draw",
    "effective_sample_size",
    "entropy",
    "entropy_rank",
    "estimate",
    "fp32_or_wider",
    "gae_advantages",
    "generalized_advantages",
    "greedy",
    "group_relative",
    "group_spread",
    "high_entropy_mask",
    "kl_divergence",
    "kl_rewards",
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
    "sampler_importance",
    "sampler_kl_mask",
    "sampler_log_ratio",
    "sampler_rejection",
    "sampling_metrics",
    "segment_count",
    "segment_mean",
    "segment_sum",
    "selective_log_softmax",
    "sequence_mean_kl",
    "support_logits",
    "to_fp32",
    "token_weights",
    "total_variation_mask",
    "uniform",
    "unit_weights",
    "weight_metrics",
    "zero_without_advantage",
]
