"""Which fields of a configuration each function that is chosen by name reads.

Written by `python -m tools.write_fields_read` from the signatures of the functions, which need torch; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CRITIC_READS", "POLICY_READS", "PREFERENCE_READS", "REWARD_MODEL_READS", "Readers"]

Readers = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Field that chooses functions -> name -> the fields that this function reads."""

POLICY_READS: Readers = {
    "advantage_estimator": {
        "grpo": ("advantage_ddof", "advantage_eps", "scale_rewards"),
        "drgrpo": (),
        "rloo": ("advantage_ddof", "advantage_eps", "normalize_advantages"),
        "turn_rloo": ("gamma",),
        "opo": (),
        "scalerl": ("advantage_ddof", "advantage_eps"),
        "gdpo": ("advantage_ddof", "advantage_eps"),
        "grpo_passk": ("advantage_ddof", "advantage_eps", "scale_rewards"),
        "maxrl": ("advantage_eps",),
        "reinforce": ("advantage_ddof", "advantage_eps", "global_norm", "norm_var"),
        "reinforce_plus_plus": ("gamma",),
        "reinforce_plus_plus_baseline": (),
        "remax": (),
        "gae": ("gae_lambda", "gamma", "whiten_advantages"),
    },
    "policy_loss_fn": {
        "grpo": ("delta", "epsilon", "epsilon_c", "epsilon_high", "importance_sampling_level"),
        "ppo": ("delta", "epsilon", "epsilon_c", "epsilon_high", "importance_sampling_level"),
        "gspo-token": ("delta", "epsilon", "epsilon_c", "epsilon_high"),
        "gmpo": ("epsilon", "epsilon_high"),
        "cispo": ("cispo_epsilon_low", "epsilon", "epsilon_high", "importance_sampling_level"),
        "cispo-trl": ("epsilon", "epsilon_high", "importance_sampling_level"),
        "cispo-torchrl": ("epsilon", "epsilon_high", "importance_sampling_level"),
        "sapo": ("importance_sampling_level", "sapo_temperature_neg", "sapo_temperature_pos"),
        "vespo": ("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
        "reinforce": (),
        "distillation": ("importance_sampling_level", "teacher_coef"),
        "gkd": ("gkd_beta",),
    },
    "loss_agg_mode": {
        "sequence-mean-token-mean": ("loss_agg_units",),
        "token-mean": (),
        "sequence-mean-token-scale": ("loss_agg_norm", "loss_agg_units"),
        "seq-mean-token-sum": ("loss_agg_units",),
        "sequence-mean-token-sum-norm": ("loss_agg_norm", "loss_agg_units"),
        "prompt-mean-token-mean": ("loss_agg_units",),
    },
    "loss_masks": {
        "off-policy": ("off_policy_mask_threshold",),
        "top-entropy": ("top_entropy_quantile",),
        "dppo-tv": ("dppo_threshold", "dppo_threshold_high"),
        "dppo-kl": ("dppo_threshold", "dppo_threshold_high"),
        "sampler-kl": ("kl_mask_threshold",),
        "sampler-rejection": ("rejection_level", "rejection_lower", "rejection_threshold"),
    },
    "sampler_is": {
        "token": (
            "sampler_is_current",
            "sampler_is_lower",
            "sampler_is_mode",
            "sampler_is_normalize",
            "sampler_is_threshold",
        ),
        "sequence": (
            "sampler_is_current",
            "sampler_is_lower",
            "sampler_is_mode",
            "sampler_is_normalize",
            "sampler_is_threshold",
        ),
        "geometric": (
            "sampler_is_current",
            "sampler_is_lower",
            "sampler_is_mode",
            "sampler_is_normalize",
            "sampler_is_threshold",
        ),
    },
    "value_loss_fn": {"ppo": ("clip_range_value",), "ppo-rl2": ("clip_range_value",)},
    "value_loss_agg_mode": {
        "sequence-mean-token-mean": ("loss_agg_units",),
        "token-mean": (),
        "sequence-mean-token-scale": ("loss_agg_units",),
        "seq-mean-token-sum": ("loss_agg_units",),
        "sequence-mean-token-sum-norm": ("loss_agg_units",),
        "prompt-mean-token-mean": ("loss_agg_units",),
    },
}
CRITIC_READS: tuple[str, ...] = ("gae_lambda", "gamma")
PREFERENCE_READS: Readers = {
    "loss_type": {
        "sigmoid": ("beta", "label_smoothing", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "sigmoid_norm": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "hinge": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "ipo": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "robust": ("beta", "label_smoothing", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "exo_pair": ("beta", "label_smoothing", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "nca_pair": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "bco_pair": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "bco": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "sppo_hard": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "aot": ("beta", "label_smoothing", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "aot_unpaired": ("beta", "label_smoothing", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "apo_zero": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "apo_down": ("beta", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "discopop": ("beta", "discopop_tau", "precompute_ref_log_probs", "reference_free", "sync_ref_model"),
        "sft": (),
        "cpo": ("alpha", "beta", "cpo_alpha", "label_smoothing"),
        "cpo_hinge": ("alpha", "beta", "cpo_alpha"),
        "cpo_ipo": ("alpha", "beta", "cpo_alpha"),
        "simpo": ("alpha", "beta", "cpo_alpha", "label_smoothing", "simpo_gamma"),
        "alphapo": ("alpha", "beta", "label_smoothing", "simpo_gamma"),
        "orpo": ("beta",),
        "kto": (
            "beta",
            "desirable_weight",
            "precompute_ref_log_probs",
            "reference_free",
            "sync_ref_model",
            "undesirable_weight",
        ),
        "apo_zero_unpaired": (
            "beta",
            "desirable_weight",
            "precompute_ref_log_probs",
            "reference_free",
            "sync_ref_model",
            "undesirable_weight",
        ),
    },
    "f_divergence_type": {
        "reverse_kl": (),
        "forward_kl": (),
        "js_divergence": (),
        "alpha_divergence": ("f_alpha_divergence_coef",),
    },
}
REWARD_MODEL_READS: Readers = {"loss_type": {"bradley_terry": ("center_rewards_coefficient",)}}
