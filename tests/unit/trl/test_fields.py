"""GRPOConfig: every field of TRL's, with its default; what is refused says why; the rules of batches."""

import dataclasses
import json

import pytest
from transformers import HfArgumentParser

from tools.docs.from_trl import PAGES
from whet.compat.field import STATES
from whet.errors import ConfigError
from whet.trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

CONFIGS = (GRPOConfig, RLOOConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig)
ROWS = {**GRPOConfig.TABLE, **GRPOConfig.OLD}
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
"""Fields that the oldest transformers has not yet."""


def lacking(theirs, table):
    """The fields of TRL's that a table lacks, has with another default, or has alone."""
    fields = {f.name: f for f in dataclasses.fields(theirs)}
    default = lambda f: f.default_factory() if f.default is dataclasses.MISSING else f.default
    others = [n for n, f in fields.items() if n in table and default(f) != table[n].default]
    return [*others, *sorted((fields.keys() ^ table.keys()) - (NEWER - fields.keys()))]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_every_field_of_the_installed_trl_is_in_the_table_with_its_default(config):
    theirs = getattr(pytest.importorskip("trl"), config.__name__)
    assert lacking(theirs, config.TABLE) == [], "give each a row in whet/trl/config/"
    one = "learning_rate"
    assert lacking(theirs, {name: row for name, row in config.TABLE.items() if name != one}) == [one]


def test_every_row_has_a_state():
    assert {row.state for table in PAGES.values() for row in table.values()} <= STATES.keys()
    rows = [(n, row) for config in CONFIGS for n, row in {**config.TABLE, **config.OLD}.items()]
    assert [n for n, row in rows if not row.note and row.state != "works"] == []


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_a_refused_field_takes_its_default_and_says_why_of_another(config):
    for name, row in config.TABLE.items():
        if row.state == "refused":
            config(**{name: row.default})
            with pytest.raises(ConfigError, match=f"^{name}='?other'? is not supported: .{{10,}}"):
                config(**{name: "other"})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"vllm_guided_decoding_regex": "a+"}, {"vllm_structured_outputs_regex": "a+"}),
        ({"vllm_max_model_len": 9}, {"vllm_max_model_length": 9}),
        ({"evaluation_strategy": "steps", "logging_steps": 3}, {"eval_strategy": "steps", "eval_steps": 3}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"wandb_log_unique_prompts": True, "use_liger_loss": True}, {"log_unique_prompts": True}),
        ({"scale_rewards": False}, {"scale_rewards": "none"}),
        ({"compat": "0.16"}, {"temperature": 0.9, "top_k": 50, "beta": 0.04, "max_completion_length": 256}),
        ({"compat": "0.16", "beta": 0.0}, {"beta": 0.0, "temperature": 0.9}),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5, "save_steps": 10},
         {"metric_for_best_model": "loss", "greater_is_better": False}),
        ({"report_to": "none"}, {"report_to": []}),
    ],
)  # fmt: skip
def test_names_and_values_of_earlier_releases_and_what_follows_from_others(given, found):
    args = GRPOConfig(**given)
    assert {name: getattr(args, name) for name in found} == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilom": 0.2}, "no field 'epsilom'; did you mean epsilon"),
        ({"loss_type": "dappo"}, "unknown loss_type 'dappo'; did you mean dapo"),
        ({"num_generations": 1}, "at least 2 generations"),
        ({"generation_batch_size": 12}, r"\(12\) must be divisible by the global batch size \(8\)"),
        ({"num_generations": 6}, r"divisible by num_generations \(6\).*Nearest that work: num_generations=8 \(1"),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "both configured.*steps_per_generation=2"),
        ({"eval_strategy": "epoch", "per_device_eval_batch_size": 6}, "eval batch size.*per_device_eval_batch_size=8"),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='server'"),
        ({"use_vllm": True, "vllm_guided_decoding_regex": "a+"}, "outputs_regex='a\\+' is not supported with"),
        ({"use_vllm": True, "compat": "0.16"}, "top_k=50 with use_vllm=True and .*=0.9: .*; set temperature=1.0"),
        ({"vllm_importance_sampling_clip_min": 4.0}, "must be less than"),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "At least one of",
        ),
        ({"load_best_model_at_end": True}, "save and eval strategy to match"),
        ({"sync_ref_model": True}, "`sync_ref_model=True` while `beta=0.0`"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs evaluations"),
        ({"tp_size": 2}, "shard the model by FSDP"),
        ({"compat": "0.15"}, "unknown compat"),
        ({"max_steps": 0}, "max_steps=0 trains nothing.*-1"),
        ({"generation_kwargs": "{top_k: 5}"}, r"generation_kwargs='{top_k: 5}' is not JSON .*double quotes"),
        ({"generation_kwargs": "[1]"}, r"generation_kwargs=.* is not a JSON object"),
    ],
)  # fmt: skip
def test_what_can_t_be_is_an_error_with_what_to_do(given, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**given)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (RLOOConfig, {"num_generations": 1}, "RLOO requires at least 2 generations"),
        (RLOOConfig, {"reward_clip_range": (1.0, 0.0)}, "low below high"),
        (RLOOConfig, {"scale_rewards": "group"}, "no field 'scale_rewards'"),
        (SFTConfig, {"loss_type": "dtf"}, "unknown SFT loss 'dtf'; did you mean dft"),
        (SFTConfig, {"packing": True, "max_length": None}, "`max_length` can't be `None`"),
        (SFTConfig, {"packing": True, "packing_strategy": "bdf"}, "unknown packing_strategy 'bdf'; did you mean bfd"),
        (SFTConfig, {"truncation_mode": "keep_middle"}, "unknown truncation_mode"),
        (SFTConfig, {"train_sampling_strategy": "group_by_length"}, "never pads"),
        (SFTConfig, {"dataset_kwargs": {"add_special_token": False}}, "'add_special_token' is not supported"),
        (SFTConfig, {"label_smoothing_factor": 0.1}, "DPO has label_smoothing"),
        (DPOConfig, {"loss_type": "sigmod"}, "did you mean sigmoid"),
        (DPOConfig, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one for each"),
        (DPOConfig, {"f_divergence_type": "js_divergence", "loss_type": ["apo_zero"]}, "a function of the difference"),
        (DPOConfig, {"sync_ref_model": True, "precompute_ref_log_probs": True}, "choose one"),
        (DPOConfig, {"loss_type": "exo_pair"}, "divides by label_smoothing"),
        (RewardConfig, {"center_rewards_coefficient": -1.0}, "must not be negative"),
    ],
)  # fmt: skip
def test_the_other_configurations_say_it_too(config, given, message):
    with pytest.raises(ConfigError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("micro", "accumulate", "steps", "passes", "group", "expected"),
    [
        (8, 4, None, 1, 8, (4, 32, 1, 1)),  # prompts, rows of an update, updates, passes
        (8, 4, None, 3, 8, (4, 32, 3, 3)),
        (8, 1, 4, 1, 8, (4, 8, 4, 1)),
        (3, 1, 2, 1, 6, (1, 3, 2, 1)),  # an update takes half a group
        (8, 4, 1, 1, 8, (4, 32, 1, 1)),  # four generations before the policy moves
        (8, 4, 2, 2, 8, (2, 16, 1, 1)),  # each completion twice in the one update
        (8, 4, 2, 4, 8, (2, 16, 2, 2)),
    ],
)
def test_what_a_step_is_made_of(micro, accumulate, steps, passes, group, expected):
    args = GRPOConfig(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate, num_generations=group,
                      steps_per_generation=steps, num_iterations=passes)  # fmt: skip
    made = args.batches
    assert (made.prompts, made.rows, made.updates, made.passes) == expected
    assert dataclasses.replace(args, learning_rate=1.0).batches == made  # both sizes are filled in by now


def test_a_command_line_and_a_subclass_read_the_fields():
    words = ["--output_dir", "o", "--beta", "0.1", "--num_generations", "4", "--reward_weights", "1", "0.5"]
    given = {"model_init_kwargs": {"dtype": "float32"}, "generation_kwargs": {"top_k": 5}, "lr_scheduler_kwargs": {},
             "chat_template_kwargs": {"enable_thinking": False}, "accelerator_config": {"split_batches": True},
             "gradient_checkpointing_kwargs": {"use_reentrant": False}}  # fmt: skip
    parser = HfArgumentParser(GRPOConfig)
    (args,) = parser.parse_args_into_dataclasses(
        words + [word for name, value in given.items() for word in (f"--{name}", json.dumps(value))]
    )
    assert (args.output_dir, args.beta, args.num_generations, args.reward_weights) == ("o", 0.1, 4, [1.0, 0.5])
    assert args.accelerator_config.split_batches  # transformers' own class, as there
    del given["accelerator_config"]
    assert {name: getattr(args, name) for name in given} == given
    with pytest.raises(ConfigError, match=r"deepspeed='x\.json' is not supported: several processes share each"):
        parser.parse_args_into_dataclasses([*words, "--deepspeed", "x.json"])

    @dataclasses.dataclass
    class Mine(GRPOConfig):
        extra: int = 3

    assert (Mine("o", beta=0.5).extra, Mine("o", beta=0.5).beta) == (3, 0.5)
    with pytest.raises(ConfigError, match="fp16=True"):
        Mine("o", fp16=True)
    assert GRPOConfig("o").to_sanitized_dict()["lr_scheduler_type"] == "linear"
