"""Parameters that the chosen functions don't read are refused; choices that are seldom meant are said aloud."""

import re

import pytest
import torch

from whet.config import GRPOConfig, PPOConfig
from whet.errors import ConfigError
from whet.learners.config_warnings import warn_about_config
from whet.learners.from_config import make_objective
from whet.ops import ADVANTAGE_ESTIMATORS


def weigh(x, *, norm_var):
    """A mask of a user's own that reads a parameter of an estimator."""
    return torch.ones_like(x.logprobs)


@pytest.mark.parametrize(
    ("cls", "fields", "said"),
    [
        (
            GRPOConfig,
            {"advantage_estimator": "rloo", "scale_rewards": "none"},
            "scale_rewards='none' has no effect without advantage_estimator=grpo or grpo_passk; set that, or leave "
            "scale_rewards at 'group'",
        ),
        (GRPOConfig, {"advantage_estimator": "drgrpo", "advantage_eps": 1e-4}, "advantage_eps=0.0001 has no effect"),
        (GRPOConfig, {"advantage_estimator": "opo", "advantage_ddof": 0}, "advantage_ddof=0 has no effect"),
        (
            GRPOConfig,
            {"gamma": 0.9},
            "gamma=0.9 has no effect without advantage_estimator=turn_rloo or reinforce_plus_plus; set that, or leave "
            "gamma at 1.0",
        ),
        (GRPOConfig, {"norm_var": True}, "norm_var=True has no effect without advantage_estimator=reinforce;"),
        (GRPOConfig, {"global_norm": True}, "global_norm=True has no effect without advantage_estimator=reinforce;"),
        (PPOConfig, {"scale_rewards": "none"}, "scale_rewards='none' has no effect without advantage_estimator=grpo"),
        (
            PPOConfig,
            {"advantage_estimator": "rloo", "num_generations": 2, "whiten_advantages": False},
            "whiten_advantages=False has no effect without advantage_estimator=gae",
        ),
    ],
)
def test_a_parameter_that_the_chosen_estimator_does_not_take_is_refused(cls, fields, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        cls(**fields)


@pytest.mark.parametrize(
    "made",
    [
        PPOConfig(advantage_estimator="rloo", num_generations=2, gamma=0.9, gae_lambda=0.5),  # of the critic's returns
        PPOConfig(value_loss_fn=weigh, norm_var=True),
        GRPOConfig(loss_masks=(weigh,), norm_var=True),
        GRPOConfig(advantage_estimator=lambda rewards, group_ids, *, norm_var: rewards, norm_var=True),
        *(GRPOConfig(advantage_estimator=name) for name in ADVANTAGE_ESTIMATORS if name != "gae"),
    ],
)
def test_what_some_function_reads_may_be_set(made):
    assert make_objective(made)


PULLS_NOT = "does not pull towards the reference"
LONGER = "longer completions count more"
KEEPS_IN = "can't leave out single tokens"
WHOLE = {"importance_sampling_level": "sequence"}
RANKED = {"loss_masks": ("top-entropy",), "top_entropy_quantile": 0.2}
REJECTED = {"loss_masks": ("sampler-rejection", weigh)}
IDLE = "no effect while beta is 0.0"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GRPOConfig(), None),
        (PPOConfig(beta=0.0), None),
        (GRPOConfig(beta=0.1, kl_loss_mode="kl"), PULLS_NOT),
        (GRPOConfig(beta=0.1, kl_loss_mode="k1", kl_clamp_value=10.0), PULLS_NOT),
        (PPOConfig(beta=0.1, kl_loss_mode="kl", kl_type="loss"), PULLS_NOT),
        (GRPOConfig(beta=0.1, kl_loss_mode="k1", use_bias_correction_kl=True), None),
        (GRPOConfig(beta=0.1, kl_loss_mode="k1", kl_type="reward"), None),
        (GRPOConfig(importance_sampling_level="sequence", loss_agg_mode="token-mean"), LONGER),
        (PPOConfig(importance_sampling_level="sequence-sum"), LONGER),
        (GRPOConfig(policy_loss_fn="gmpo", loss_agg_mode="token-mean"), LONGER),
        (GRPOConfig(importance_sampling_level="sequence"), None),
        (GRPOConfig(loss_agg_mode="token-mean"), None),
        (GRPOConfig(**WHOLE, **RANKED), "loss_masks=[top-entropy] with a ratio of whole sequences " + KEEPS_IN),
        (GRPOConfig(**WHOLE, loss_masks=("dppo-tv", "dppo-kl")), "[dppo-tv], algo.loss_masks=[dppo-kl] with"),
        (GRPOConfig(importance_sampling_level="sequence-sum", sampler_is="token"), "sampler_is='token' with a ratio"),
        (GRPOConfig(**WHOLE, **REJECTED, rejection_level="token"), "loss_masks=[sampler-rejection] with a ratio"),
        (GRPOConfig(policy_loss_fn="gmpo", **RANKED), "'sequence-token' and policy_loss_fn='grpo' gives"),
        (GRPOConfig(**WHOLE, **REJECTED), None),
        (GRPOConfig(**WHOLE, sampler_is="sequence", loss_masks=("off-policy", weigh)), None),
        (GRPOConfig(importance_sampling_level="sequence-token", sampler_is="token", **RANKED), None),
        (GRPOConfig(sampler_is="token", **RANKED), None),
        (GRPOConfig(beta=0.0, kl_loss_mode="k2"), "kl_loss_mode='k2': " + IDLE),
        (PPOConfig(beta=0.0, kl_loss_mode="kl"), "kl_loss_mode='kl': " + IDLE),
        (GRPOConfig(beta=0.0, kl_type="reward", kl_clamp_value=1.0), "kl_type='reward', kl_clamp_value=1.0: " + IDLE),
        (GRPOConfig(beta=0.0, use_bias_correction_kl=True), "use_bias_correction_kl=True: " + IDLE),
        (GRPOConfig(beta=0.0, kl_loss_mode="k2", force_compute_kl=True), None),
    ],
)
def test_choices_that_are_seldom_meant_are_said_aloud_once(made, said, caplog):
    warn_about_config(made)
    assert [said in record.message for record in caplog.records] == [] if said is None else [True]


@pytest.mark.parametrize(("longest", "said"), [(512, True), (16384, True), (16385, False), (None, False)])
def test_a_punishment_of_length_that_no_completion_reaches_is_said(longest, said, caplog):
    warn_about_config(GRPOConfig(overlong_buffer={"enable": True}), longest)
    assert ("its penalty starts after 16384 tokens" in caplog.text) is said
    warn_about_config(GRPOConfig(), longest)
    assert len(caplog.records) == said
