"""Tunix's configuration classes: its fields, names and defaults, and what becomes of them in whet's classes."""

import dataclasses

import pytest

import whet
from tools.docs.from_tunix import TUNIX_FIELDS
from whet import presets
from whet.config import field_docs
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.errors import ConfigError
from whet.tunix import (
    CheckpointingOptions,
    ClusterConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GrpoConfig,
    MetricsLoggerOptions,
    PPOConfig,
    ProfilerOptions,
    RLTrainingConfig,
    RolloutConfig,
)
from whet.tunix.configs import FLAT_NAMES, core_config


def refused(message, cls, **given):
    with pytest.raises(ConfigError) as error:
        cls(**given)
    assert message in str(error.value), str(error.value)


# ---- every field -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TUNIX_FIELDS, ids=lambda c: c.__name__)
def test_every_tunix_field_is_there_or_refused_with_a_reason(cls):
    ours = {f.name for f in dataclasses.fields(cls)} | (set(FLAT_NAMES) if cls is RolloutConfig else set())
    for name, field in TUNIX_FIELDS[cls].items():
        if field.state == "refused" and name not in ours:
            refused(f"{name}: ", cls, **{name: field.default})
        elif name == "max_seq_token_per_tpu":
            assert cls(max_seq_token_per_tpu=7).max_seq_token_per_tpu == 7
        elif field.state in ("works", "no effect"):
            assert getattr(cls(), name) == field.default, name
        else:
            assert name in ours and field.note, name


@pytest.mark.parametrize("cls", TUNIX_FIELDS, ids=lambda c: c.__name__)
def test_fields_without_effect_say_so_and_do_not_reach_whet(cls):
    docs, core = field_docs(cls), {f.name for f in dataclasses.fields(type(core_config(cls())))}
    assert [f.name for f in dataclasses.fields(cls) if not docs.get(f.name)] == []
    for name, field in TUNIX_FIELDS[cls].items():
        if field.state == "no effect":
            assert "No effect" in docs[name] and name not in core, name


def test_second_names_of_a_field_are_read_into_it():
    grpo = GRPOConfig(loss_algo="gspo-token", policy_loss_fn="grpo")
    assert grpo.policy_loss_fn == grpo.loss_algo == core_config(grpo).policy_loss_fn == "gspo-token"
    assert GRPOConfig(loss_algo="grpo", policy_loss_fn="ppo").policy_loss_fn == "ppo"
    assert dataclasses.replace(grpo, beta=0.1).policy_loss_fn == "gspo-token"
    ppo = PPOConfig(kl_method="kl")
    assert ppo.kl_loss_mode == ppo.kl_method == core_config(ppo).kl_loss_mode == "kl"


def test_a_configuration_of_whet_is_made_of_the_fields_that_have_an_effect():
    saving = CheckpointingOptions(save_interval_steps=3, timeout_secs=1)
    training = RLTrainingConfig(max_seq_token_per_tpu=512, checkpointing_options=saving, max_inflight_computations=9)
    rollouts = {"train": RolloutConfig(kv_cache_size=8), "eval": RolloutConfig(top_k=3, eval={"kv_cache_size": 9})}
    made = core_config(ClusterConfig(rollout_engine="sglang_jax", training_config=training, rollout_config=rollouts))
    assert made == whet.ClusterConfig(
        rollout_engine="sglang",
        training_config=whet.RLTrainingConfig(
            max_tokens_per_microbatch=512, checkpointing_options=whet.CheckpointingOptions(save_interval_steps=3)
        ),
        rollout_config={"train": whet.RolloutConfig(), "eval": whet.RolloutConfig(top_k=3)},
    )
    assert core_config(GRPOConfig()) == whet.GRPOConfig(kl_loss_mode="kl")

    class Mine(GRPOConfig):
        """A user's own class stays what it is."""

    assert type(core_config(Mine())) is Mine


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (MetricsLoggerOptions, {"enable_opentelemetry": True}, "there is no exporter"),
        (RLTrainingConfig, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps should be None"),
        (RLTrainingConfig, {"max_seq_token_per_tpu": 0}, "must be a positive integer. Got: 0"),
        (RLTrainingConfig, {"max_seq_token_per_tpu": 5, "max_tokens_per_microbatch": 5}, "give it once"),
        (RLTrainingConfig, {"max_inflight_computations": "two"}, "max_inflight_computations must be a positive"),
        (RLTrainingConfig, {"profiler_options": {"host_level": 3}}, "unknown keyword"),
        (ProfilerOptions, {"host_tracer_level": -1}, "host_tracer_level"),
        (RolloutConfig, {"data_type": "bfloat16"}, "RoleConfig.dtype"),
        (RolloutConfig, {"rollout_mapping_config": {}}, "Hugging Face"),
        (RolloutConfig, {"rollout_vllm_swap_space_size_gb": 4.0}, "leave it out"),
        (RolloutConfig, {"rollout_vllm_tpu_backend_type": "jax"}, "there is no TPU back end"),
        (RolloutConfig, {"vllm": {"max_num_seqs": 8}, "rollout_vllm_max_num_seqs": 8}, "give it once, as vllm."),
        (RolloutConfig, {"rollout_vllm_max_num_seq": 8}, "rollout_vllm_max_num_seq"),
        (RolloutConfig, {"rollout_vllm_max_num_seqs": "many"}, "vllm.max_num_seqs"),
        (ClusterConfig, {"role_to_logical_axis_rule": {"actor": ()}}, "parameters are sharded by mesh axis"),
        (PPOConfig, {"mini_batch_size": 4}, "RLTrainingConfig"),
        (PPOConfig, {"kl_method": "kl", "kl_loss_mode": "mse_kl"}, "are the same key; give it once"),
        (GRPOConfig, {"loss_algo": "gspo-token", "policy_loss_fn": "ppo"}, "are the same key; give it once"),
        (GRPOConfig, {"loss_algo": "ppo"}, "loss_algo should be either grpo or gspo-token"),
    ],
)
def test_what_must_be_one_value_is_refused_otherwise(cls, given, message):
    refused(message, cls, **given)


@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        ("vllm", {"tensor_parallel_size": 2}, "tensor_parallel_size=2 can't be done with rollout_engine"),
        ("vllm", {"rollout_vllm_lora_config": {"rank": 4}}, "whole weights"),
        ("vllm", {"rollout_vllm_enable_dp_attention": True}, "on one device"),
        ("sglang_jax", {"data_parallel_size": 2}, "on one device"),
        ("sglang_jax", {"rollout_sglang_jax_enable_static_lora": True}, "whole weights"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_that_engine_alone(engine, given, message):
    refused(message, ClusterConfig, rollout_engine=engine, rollout_config=RolloutConfig(**given))
    refused(message, ClusterConfig, rollout_engine=engine, rollout_config={"train": RolloutConfig(**given)})
    assert ClusterConfig(rollout_engine="vanilla", rollout_config=RolloutConfig(**given)).rollout_engine == "embedded"


def test_the_fields_of_engines_have_long_names_and_sections():
    assert len(FLAT_NAMES) == len(dataclasses.fields(VLLMOptions)) + len(dataclasses.fields(SGLangOptions))
    flat = RolloutConfig(rollout_vllm_max_num_seqs=8, rollout_sglang_jax_page_size=16, temperature=0.5)
    own = RolloutConfig(vllm=VLLMOptions(max_num_seqs=8), sglang=SGLangOptions(page_size=16), temperature=0.5)
    assert flat == own and flat.rollout_vllm_max_num_seqs == 8 and flat.rollout_sglang_jax_page_size == 16
    assert flat.rollout_vllm_server_mode is False
    with pytest.raises(AttributeError, match="did you mean temperature"):
        _ = flat.temprature


# ---- algorithms ------------------------------------------------------------------------------------------------------


def test_dapo_and_dr_grpo_are_the_presets_with_tunix_s_defaults():
    made = DAPOConfig(beta=None, epsilon=0.1)  # pyright: ignore
    assert made.beta == 0.0 and made.clip_range == (0.1, 0.28) and made.overlong_buffer.enable
    own = ("num_generations", "beta", "kl_loss_mode")
    for theirs, ours in ((DAPOConfig(), presets.dapo()), (DrGRPOConfig(), presets.dr_grpo())):
        for field in dataclasses.fields(ours):
            assert field.name in own or getattr(theirs, field.name) == getattr(ours, field.name), field.name
    assert GrpoConfig is GRPOConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 0.1}, "DAPO does not support KL penalty, so beta must be None."),
        ({"epsilon": 0.3}, "epsilon_high must be greater than or equal to epsilon."),
        ({"overlong_buffer": {"overlong_buffer_penalty": -1.0}}, "overlong_buffer_penalty must be non-negative"),
        ({"num_generations": 1}, "num_generations must be greater than 1"),
    ],
)
def test_dapo_refuses_what_tunix_refuses(given, message):
    with pytest.raises(ConfigError, match=message):
        DAPOConfig(**given)
