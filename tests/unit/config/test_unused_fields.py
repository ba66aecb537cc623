"""Configurations that would do nothing, or end after the first rollout, are refused when they are made."""

import pytest

from whet.config import GRPOConfig, PPOConfig
from whet.errors import ConfigError


def own(x):
    """A function of a user's own, which may be given any field."""


CORRECTED = {"beta": 0.1, "use_bias_correction_kl": True}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_min": 0.05, "entropy_coef_max": 0.2}
MASKED = {"sampler_is": "token", "sampler_is_mode": "mask"}
NO_EFFECT = [
    ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1 .* without loss_masks=.off-policy"),
    ({"sampler_is_threshold": 3.0}, "sampler_is_threshold=3.0 has no effect without sampler_is"),
    ({"sampler_is_threshold": None}, "sampler_is_threshold=None has no effect without sampler_is"),
    ({"sampler_is_normalize": True}, "sampler_is_normalize=True has no effect without sampler_is"),
    ({"max_num_gen_batches": 3}, "max_num_gen_batches=3 has no effect without dynamic_sampling=True"),
    ({"loss_agg_mode": "token-mean", "loss_agg_norm": 9.0}, "loss_agg_norm=9.0 .* without loss_agg_mode=.*-sum-norm"),
    ({"loss_agg_norm": 9.0}, "loss_agg_norm=9.0 has no effect without loss_agg_mode=sequence-mean-token-scale or"),
    (
        {"loss_agg_mode": "token-mean", "loss_agg_units": "all"},
        "loss_agg_units='all' has no effect without loss_agg_mode=sequence-mean-token-mean or",
    ),
    (
        {"loss_agg_mode": "sequence-mean-token-sum-norm", "loss_agg_norm": 9.0, "loss_agg_units": "all"},
        "loss_agg_units='all' has no effect without loss_agg_mode=sequence-mean-token-mean or sequence-mean",
    ),
]


@pytest.mark.parametrize(("fields", "said"), NO_EFFECT)
def test_a_field_without_effect_is_refused_unless_a_function_of_the_users_own_may_read_it(fields, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(**fields)
    for reader in ({"policy_loss_fn": own}, {"loss_masks": ("mine:mask",)}, {"advantage_estimator": "mine.py:fn"}):
        GRPOConfig(**fields, **reader)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss_masks": ("top-entropy",)}, "keeps all tokens at top_entropy_quantile=1.0"),
        ({"loss_masks": (own, "top-entropy")}, "keeps all tokens at top_entropy_quantile=1.0"),
        ({"loss_masks": (own, "sampler-kl")}, "needs kl_mask_threshold"),
        (
            {"loss_masks": ("sampler-rejection",), "rejection_lower": None, "rejection_threshold": None},
            "needs rejection_lower or rejection_threshold",
        ),
        ({"loss_masks": ("dppo-tv",), "dppo_threshold": 0.0}, "dppo_threshold must be positive, got 0.0"),
        ({"loss_masks": ("dppo-kl",), "dppo_threshold_high": -1.0}, "dppo_threshold_high must be positive, got -1.0"),
        ({"loss_masks": ("sampler-kl",), "kl_mask_threshold": 0.0}, "kl_mask_threshold must be positive, got 0.0"),
        ({**MASKED, "sampler_is_threshold": 0.9}, "sampler_is_threshold=0.9 masks out tokens on which"),
        ({**MASKED, "sampler_is_lower": 1.1}, "sampler_is_lower=1.1 .*masks out tokens on which"),
        ({"delta": 0.9}, "delta must be at least 1, got 0.9"),
        ({**ADAPTIVE, "entropy_target": -0.1}, "entropy_target must not be negative, got -0.1"),
        ({**ADAPTIVE, "entropy_coef": 0.3}, "entropy_coef=0.3, .* between entropy_coef_min=0.05 and entropy_coef_max"),
        ({**ADAPTIVE, "entropy_coef": 0.0}, "entropy_coef=0.0, .* between entropy_coef_min=0.05 and entropy_coef_max"),
        ({"advantage_estimator": "maxrl", "kl_type": "reward"}, "maxrl.* kl_type='reward'"),
        (
            {"advantage_estimator": "gdpo", "reward_clip_range": (0.0, 1.0)},
            "range=.* no effect .*bound the values in the",
        ),
        ({"advantage_estimator": "maxrl", "overlong_buffer": {"enable": True}}, "maxrl.* overlong_buffer.enable"),
        *(
            ({**CORRECTED, "kl_loss_mode": mode}, f"kl_loss_mode='{mode}'.*only k1 and k3".replace("+", r"\+"))
            for mode in ("low_var_kl+", "k3+", "kl+", "k1+", "abs+", "abs", "k2", "mse_kl")
        ),
    ],
)
def test_what_does_nothing_or_ends_after_a_rollout_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(**fields)


def test_the_kl_s_correction_goes_by_ppos_estimate_too():
    with pytest.raises(ConfigError, match=r"kl_loss_mode='mse_kl'.*only k1 and k3"):
        PPOConfig(**CORRECTED, kl_type="loss", kl_loss_mode="mse_kl")


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (PPOConfig, {"beta": 0.0}),
        (PPOConfig, {"beta": 0.0, "advantage_estimator": "maxrl", "num_generations": 2}),
        (PPOConfig, {"loss_agg_mode": "sequence-mean-token-mean", "loss_agg_units": "all"}),
        (GRPOConfig, {"beta": 0.0, "kl_type": "reward", "advantage_estimator": "maxrl"}),
        (GRPOConfig, {"loss_agg_mode": "sequence-mean-token-sum-norm", "loss_agg_units": "all"}),
        (GRPOConfig, {"loss_agg_mode": own, "loss_agg_units": "all", "loss_agg_norm": 2.0}),
        (GRPOConfig, {"sampler_is": "token", "sampler_is_threshold": 0.9}),
        (GRPOConfig, {"delta": 1.0}),
        (GRPOConfig, ADAPTIVE),
        *((GRPOConfig, {**CORRECTED, "kl_loss_mode": mode}) for mode in ("kl", "k1", "low_var_kl", "k3", own, "m:f")),
    ],
)
def test_what_has_an_effect_is_made(cls, fields):
    made = cls(**fields)
    assert all(getattr(made, name) == value for name, value in fields.items())
