import dataclasses
import pickle
import re

import numpy as np
import pytest

import whet.config
from whet.config import (
    ClusterConfig,
    DataConfig,
    GRPOConfig,
    Mode,
    OptimConfig,
    PPOConfig,
    RLTrainingConfig,
    Role,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
    config,
    field_docs,
)
from whet.config.rollout import ConstraintConfig
from whet.errors import ConfigError

CLASSES = [value for value in vars(whet.config).values() if dataclasses.is_dataclass(value)]


def refused(message, cls, **given):
    with pytest.raises(ConfigError) as error:
        cls(**given)
    assert message in str(error.value), str(error.value)


# ---- the decorator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_field_has_a_docstring_line(cls):
    docs = field_docs(cls)
    assert [f.name for f in dataclasses.fields(cls) if not docs.get(f.name)] == []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_field_has_an_effect(cls):
    idle = re.compile(r"^must be|no effect(?! without one| on )", re.I)
    assert [name for name, text in field_docs(cls).items() if idle.search(text)] == []


def test_docs_of_inherited_fields_are_found_in_the_base():
    assert field_docs(RLTrainingConfig)["max_steps"] == field_docs(TrainingConfig)["max_steps"]


def test_a_config_is_frozen_keyword_only_and_survives_pickle_and_replace():
    made = GRPOConfig(beta=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.beta = 1.0  # pyright: ignore
    with pytest.raises(ConfigError, match="keywords only"):
        GRPOConfig(0.1)  # pyright: ignore
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, num_generations=4) == GRPOConfig(beta=0.0, num_generations=4)
    with pytest.raises(ConfigError, match="greater than 1"):
        dataclasses.replace(made, num_generations=1)


def test_a_wrong_keyword_names_the_nearest():
    refused("unknown keyword GRPOConfig.epsilom; did you mean epsilon", GRPOConfig, epsilom=0.1)
    refused("RLTrainingConfig.actor_optimizer.lrr; did you mean lr", RLTrainingConfig, actor_optimizer={"lrr": 1})


def test_a_wrong_type_names_the_path_and_the_value():
    refused("OptimConfig.lr: expected a number, got 'fast'", OptimConfig, lr="fast")
    refused("RolloutConfig.stop.1: expected text, got 3", RolloutConfig, stop=["a", 3])
    refused("expected OptimConfig | str | callable | None, got 4.5", RLTrainingConfig, actor_optimizer=4.5)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as error:
        RolloutConfig(temprature=1.0, max_prompt_length="long", top_p=[1])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("value", [True, 2.0, "2", None, np.float64(2), np.bool_(True)])
def test_an_integer_is_an_integer(value):
    refused("num_generations", GRPOConfig, num_generations=value)


def test_numpy_numbers_become_plain_ones():
    made = GRPOConfig(num_generations=np.int64(4), beta=np.float32(0.5), use_rollout_logps=np.bool_(False))
    assert made == GRPOConfig(num_generations=4, beta=0.5, use_rollout_logps=False)
    assert [type(v) for v in (made.num_generations, made.beta, made.use_rollout_logps)] == [int, float, bool]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "abc", [1.0]])
def test_a_float_is_a_finite_number(value):
    refused("OptimConfig.lr", OptimConfig, lr=value)


@pytest.mark.parametrize("value", [1, 0, "true", "yes", None])
def test_a_bool_is_a_bool(value):
    refused("use_rollout_logps: expected true or false", GRPOConfig, use_rollout_logps=value)


def test_a_users_own_class_is_checked_too_and_calls_its_bases():
    @config
    class Mine(GRPOConfig):
        """Own."""

        gain: float = 1.0
        """Own."""

    assert Mine(gain=2.0, beta=0.0).gain == 2.0
    refused("unknown keyword Mine.gian; did you mean gain", Mine, gian=2.0)
    refused("greater than 1", Mine, num_generations=1)
    refused("greater than 1", PPOConfig, advantage_estimator="rloo")  # which gae, its own, takes


def test_grpo_refuses_the_estimator_that_needs_a_critic():
    message = "advantage_estimator='gae' needs the values of a critic, and GRPO has none; train with PPO"
    refused(message, GRPOConfig, advantage_estimator="gae")
    assert PPOConfig().advantage_estimator == "gae"
    own = {f.name for f in dataclasses.fields(PPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
    assert set(GRPOConfig.REFUSED) == own - {"epsilon_low"}  # which GRPO has as epsilon


# ---- enums -----------------------------------------------------------------------------------------------------------


def test_modes_and_roles_are_their_strings():
    assert Mode.TRAIN == "train" and Mode("eval") is Mode.EVAL and str(Mode.TRAIN) == "Mode.TRAIN"
    assert [r.value for r in Role] == ["actor", "critic", "reference", "reward", "teacher"]


# ---- ranges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generations": 1}, "num_generations must be greater than 1"),
        ({"epsilon_c": 1.0}, "epsilon_c must be greater than 1"),
        ({"beta": -0.1}, "beta must not be negative"),
        ({"sampler_is": "sequences"}, "did you mean sequence"),
        ({"sampler_is": "token", "sampler_is_lower": 3.0}, "must be positive and below sampler_is_threshold"),
        ({"top_entropy_quantile": 0.2}, "has no effect without loss_masks=[top-entropy]"),
        ({"loss_masks": ("sampler-kl",)}, "needs kl_mask_threshold"),
        ({"target_kl": 0.1, "beta": 0.0}, "target_kl=0.1 adapts beta"),
        ({"use_bias_correction_kl": True, "kl_type": "reward"}, "corrects the KL in the loss"),
        ({"sync_ref_model": True, "beta": 0.0}, "moves a reference that nothing reads"),
        ({"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha must be above 0"),
        ({"entropy_coef_min": 2.0}, "entropy_coef_min=2.0 must be at most"),
        ({"entropy_target": 0.3}, "entropy_target=0.3 has no effect without use_adaptive_entropy=True"),
        ({"kl_horizon": 10.0}, "kl_horizon=10.0 has no effect without target_kl"),
        ({"ref_model_sync_steps": 10}, "ref_model_sync_steps=10 has no effect without sync_ref_model=True"),
        ({"sampler_is_mode": "mask"}, "sampler_is_mode='mask' has no effect without sampler_is"),
        ({"loss_agg_norm": 0.0}, "Invalid 'norm' value"),
        ({"kl_clamp_value": 0.0}, "kl_clamp_value must be positive"),
    ],
)
def test_grpo_ranges(given, message):
    refused(message, GRPOConfig, **given)


def test_epsilon_high_follows_epsilon_unless_set_and_zero_counts_as_set():
    assert GRPOConfig(epsilon=0.3).clip_range == (0.3, 0.3)
    assert GRPOConfig(epsilon_high=0.0).clip_range == (0.2, 0.0)


def test_functions_are_taken_where_names_are():
    assert GRPOConfig(policy_loss_fn=max, advantage_estimator=min).policy_loss_fn is max


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mini_batch_size": 8, "train_micro_batch_size": 3}, "must be a multiple of train_micro_batch_size=3; use"),
        ({"mini_batch_size": -8}, "mini_batch_size must be a positive integer. Got: -8"),
        ({"mini_batch_size": 8.0}, "mini_batch_size must be a positive integer. Got: 8.0"),
        ({"rollout_micro_batch_size": True}, "rollout_micro_batch_size must be a positive integer. Got: True"),
        (
            {"train_micro_batch_size": 4},
            "For RL training, `mini_batch_size` must be set when `train_micro_batch_size` is set.",
        ),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: an update covers all of its rows"),
        ({"profiler_options": {"profile_steps": 3}}, "profiler_options.profile_steps; did you mean profiler_steps"),
        ({"resume": "latest"}, "resume='latest' needs run_dir"),
        ({"max_tokens_per_microbatch": 0}, "must be a positive integer. Got: 0"),
        ({"collective_timeout_s": 0.001}, "collective_timeout_s must be at least 1 second, got 0.001"),
        ({"checkpointing_options": {"max_keep": 3}}, "did you mean max_to_keep"),
    ],
)
def test_training_ranges(given, message):
    refused(message, RLTrainingConfig, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"mini_batch_size": 12},
        {"mini_batch_size": 8, "train_micro_batch_size": 4, "rollout_micro_batch_size": 3},
        {"mini_batch_size": 8, "train_micro_batch_size": 4, "compute_logps_micro_batch_size": 3},
    ],
)
def test_sizes_that_do_not_divide_the_step_are_refused(given):
    RLTrainingConfig(mini_batch_size=8, train_micro_batch_size=4, rollout_micro_batch_size=16).check_batch_sizes(32)
    with pytest.raises(ConfigError, match="batch_size=32 must be a multiple of"):
        RLTrainingConfig(**given).check_batch_sizes(32)


def test_the_token_budget_has_a_default():
    assert [RLTrainingConfig().token_budget(d) for d in ("cpu", "cuda")] == [2048, 16384]


@pytest.mark.parametrize(
    ("prompt", "new", "cpu", "cuda"),
    [(64, 64, 2048, 16384), (1024, 1024, 2048, 16384), (1024, 1025, 2176, 16384), (16000, 500, 16512, 16512)],
)
def test_the_default_token_budget_grows_to_the_longest_sequence(prompt, new, cpu, cuda):
    rollout = RolloutConfig(
        max_prompt_length=prompt, max_tokens_to_generate=new, eval={"max_tokens_to_generate": 10**6}
    )
    made = ClusterConfig(rollout_config=rollout)  # evaluation has rewards alone: no model is run over it
    assert [made.token_budget(d) for d in ("cpu", "cuda")] == [cpu, cuda]


@pytest.mark.parametrize(("positions", "budget"), [(128, 2048), (4000, 4096), (10**6, 16512), (None, 16512)])
def test_the_default_token_budget_grows_no_further_than_the_models_positions(positions, budget):
    made = ClusterConfig(rollout_config=RolloutConfig(max_prompt_length=16000, max_tokens_to_generate=500))
    assert made.token_budget("cpu", positions) == budget


def test_a_token_budget_below_the_longest_sequence_is_refused_with_both_numbers():
    rollout = RolloutConfig(max_prompt_length=30, max_tokens_to_generate=20)
    made = ClusterConfig(rollout_config=rollout, training_config=RLTrainingConfig(max_tokens_per_microbatch=50))
    assert made.token_budget("cpu") == made.token_budget("cuda") == 50
    with pytest.raises(ConfigError, match=r"max_tokens_per_microbatch=49 .* 50 tokens.* set it to 50 or more"):
        ClusterConfig(rollout_config=rollout, training_config=RLTrainingConfig(max_tokens_per_microbatch=49))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p must lie in (0, 1]"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_tokens": 65}, "max_tokens_to_generate=64"),
        ({"stop": [""]}, "empty string"),
        ({"eval": {"temp": 1.0}}, "eval.temp: unknown key"),
        ({"eval": {"top_p": 0.0}}, "eval.top_p must lie"),
        ({"tensor_parallel_size": 2}, "set trainer.tensor_parallel_size"),
    ],
)
def test_rollout_ranges(given, message):
    refused(message, RolloutConfig, **given)


def test_evaluation_overrides_touch_nothing_else():
    base = RolloutConfig(top_k=5, stop="x", eval={"temperature": 0.0})
    evaluation = base.for_mode("eval")
    assert evaluation == RolloutConfig(top_k=5, stop=("x",), temperature=0.0)
    assert base.for_mode(Mode.TRAIN) is base and evaluation.for_mode("eval") is evaluation


def test_a_dict_of_rollout_configs_needs_training_and_lends_it_to_evaluation():
    train, evaluation = RolloutConfig(), RolloutConfig(temperature=0.0)
    both = ClusterConfig(rollout_config={Mode.TRAIN: train, "eval": evaluation})
    assert (both.rollout_for("train"), both.rollout_for(Mode.EVAL)) == (train, evaluation)
    assert ClusterConfig(rollout_config={"train": train}).rollout_for("eval") == train
    refused("without Mode.TRAIN", ClusterConfig, rollout_config={Mode.EVAL: evaluation})
    refused("evall: input should be 'train' or 'eval'", ClusterConfig, rollout_config={"evall": evaluation})


def test_a_cluster_config_takes_an_engine_by_name_class_or_partial():
    for engine in ("embedded", dict, lambda: None):
        assert ClusterConfig(rollout_engine=engine).rollout_engine is engine
    refused("expected str | callable, got 3", ClusterConfig, rollout_engine=3)


def test_reward_weights_are_given_once_and_for_each_function():
    assert RunConfig(reward={"a": 1, "b": 0.5}).reward_weights == (1.0, 0.5)
    assert RunConfig(reward=["a", "b"]).reward_names == ("a", "b")
    refused("keep one of them", RunConfig, reward={"a": 1.0}, algo={"reward_weights": [1.0]})
    refused("2 values for 1 reward functions", RunConfig, reward="a", algo={"reward_weights": [1, 2]})


def test_what_is_not_there_says_so():
    refused("RoleConfig.dropout: a model's own dropout is off in training", RoleConfig, dropout=True)
    refused("eval_fraction", DataConfig, eval_fraction=0.1, eval_path="x")


# ---- schemas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "word", "meant"),
    [
        ({"typ": "integer"}, "typ", "type"),
        ('{"tyep": "integer"}', "tyep", "type"),
        ({"type": "object", "propertis": {}}, "propertis", "properties"),
        ({"properties": {"a": {"typ": "integer"}}}, "typ", "type"),
        ({"anyOf": [{"type": "string"}, {"maxLenght": 3}]}, "maxLenght", "maxLength"),
        ({"items": {"enums": [1]}}, "enums", "enum"),
    ],
)
def test_a_misspelt_keyword_of_a_schema_would_mean_nothing_and_is_refused(schema, word, meant):
    with pytest.raises(ConfigError, match=f"json_schema: unknown keyword '{word}'; did you mean {meant}"):
        ConstraintConfig(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"typ": {"type": "integer"}, "item": True}, "required": ["typ"]},
        {"$defs": {"typ": {"const": {"typ": 1}}}, "$ref": "#/$defs/typ", "default": {"typ": 1}, "x-typ": 1},
        {"enum": [{"typ": 1}], "discriminator": {"propertyName": "typ"}},
        "not JSON: whoever compiles it says so",
        "true",
    ],
)
def test_names_of_properties_and_data_are_no_keywords(schema):
    assert ConstraintConfig(json_schema=schema).json_schema == schema


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_tokens", 4096), ("max_batch_size", 4), ("sglang", {}), ("vllm", {})]
)
def test_what_evaluation_shares_with_training_is_not_overridden_for_it(name, value):
    with pytest.raises(ConfigError, match=rf"eval\.{name} belongs to the engine, .*; set rollout\.{name}"):
        RolloutConfig(eval={name: value})
