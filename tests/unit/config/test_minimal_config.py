"""config.yaml of a run: what says something, which reads back as the whole; and what a resumed run keeps."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from whet.config import (
    SHORTHANDS,
    CheckpointingOptions,
    DPORunConfig,
    GRPOConfig,
    PPORunConfig,
    RMRunConfig,
    RunConfig,
    SFTRunConfig,
    dump,
    dump_tree,
)
from whet.config.algo.presets import PRESETS
from whet.config.base import config_from_dict
from whet.config.minimal_config import fields_without_effect, minimal_config
from whet.config.resume import FULL_CONFIG_FILE, load_resumable, non_default_run_values
from whet.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
OF_RECIPE = {"demo_ppo": PPORunConfig, "demo_sft": SFTRunConfig, "demo_rm": RMRunConfig, "demo_dpo": DPORunConfig}
OF_RECIPE |= {"smollm2_dpo": DPORunConfig, "smollm2_format_sft": SFTRunConfig, "smollm2_calculator_sft": SFTRunConfig}
OF_RECIPE |= {"smollm2_search_sft": SFTRunConfig}
GIVEN = [
    (RunConfig, {}),
    (RunConfig, {"critic": {}, "trainer": {"checkpointing_options": {}, "keep_best": "accuracy"}}),
    (RunConfig, {"rollout": {"vllm": {"max_num_seqs": 8}, "top_p": None, "eval": {"temperature": 0.0}}}),
    (RunConfig, {"rollout_engine": "vllm", "algo": {"beta": 0.04, "kl_type": "reward", "num_iterations": 2}}),
    (RunConfig, {"trainer": {"stop_when": {"kl": {"above": 1.0}}, "loggers": ["wandb"]}, "reward": {"a:b": 1.0}}),
    (PPORunConfig, {"critic": {"lora": {"r": 4}}, "algo": {"entropy_coef": 0.01}}),
    (DPORunConfig, {"algo": {"loss_type": "simpo", "simpo_gamma": 0.7}, "reference": {}}),
]


def read_back(kind, config):
    return config_from_dict(kind, yaml.safe_load(yaml.safe_dump(minimal_config(config))))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_is_written_of_a_recipe_reads_back_as_it_was(recipe):
    kind = OF_RECIPE.get(recipe.stem, RunConfig)
    config = load_resumable(kind, ["--config", str(recipe)], {})
    assert read_back(kind, config) == config


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_what_is_written_reads_back_as_it_was(kind, given):
    config = config_from_dict(kind, given)
    assert read_back(kind, config) == config


def test_what_is_written_of_a_preset_reads_back_as_it_was():
    for name in PRESETS:
        for kind in (RunConfig, PPORunConfig):
            try:
                config = config_from_dict(kind, {"algo": {"preset": name}})
            except ConfigError:  # of the other command
                continue
            assert read_back(kind, config) == config, name


def test_what_was_not_set_and_has_no_effect_is_left_out():
    found = minimal_config(RunConfig(actor={"model": "m"}, data={"path": "d"}, reward="exact_match"))
    assert found.keys() == {"actor", "rollout", "algo", "data", "trainer", "reward", "rollout_engine"}
    assert found["rollout"].keys() >= {"temperature", "on_long_prompt", "max_batch_size"}
    assert not found["rollout"].keys() & {"vllm", "sglang", "top_k", "kv_cache_size", "min_p", "constraint", "eval"}
    gone = {"beta", "kl_loss_mode", "sapo_temperature_pos", "sampler_is_mode", "overlong_buffer", "dppo_threshold"}
    assert not found["algo"].keys() & gone
    assert found["algo"].keys() >= {"num_generations", "epsilon", "scale_rewards", "policy_loss_fn", "num_iterations"}
    assert len(dump(found).splitlines()) < len(dump(RunConfig()).splitlines()) / 3


def test_what_was_set_or_has_an_effect_stays():
    config = RunConfig(rollout={"vllm": {"max_num_seqs": 8}}, algo={"beta": 0.04, "use_rollout_logps": False})
    found = minimal_config(config)
    assert found["rollout"]["vllm"] == {"max_num_seqs": 8}  # without effect, but set
    assert found["algo"]["kl_loss_mode"] == "low_var_kl" and found["algo"]["use_rollout_logps"] is False
    engine = minimal_config(RunConfig(rollout_engine="vllm"))["rollout"]
    assert "logprobs_mode" in engine["vllm"] and "sglang" not in engine
    own = minimal_config(GRPOConfig(policy_loss_fn="mine.py:loss"))
    assert own["sapo_temperature_pos"] == 1.0  # a function of the user's own may read it
    assert minimal_config(CheckpointingOptions(save_interval_steps=5)) == {"save_interval_steps": 5, "max_to_keep": 3}


def test_fields_that_nothing_reads_are_fields():
    for section in (
        RunConfig().algo,
        PPORunConfig().algo,
        DPORunConfig().algo,
        RunConfig().trainer,
        RunConfig().rollout,
    ):
        assert fields_without_effect(section) <= {f.name for f in dataclasses.fields(section)}


# ---- resumed ---------------------------------------------------------------------------------------------------------


def resumed(folder, *words, kind=RunConfig):
    return load_resumable(kind, [*words, f"trainer.run_dir={folder}", "trainer.resume=latest"], SHORTHANDS)


def test_a_resumed_run_keeps_what_is_not_given_and_takes_what_is(tmp_path):
    run = RunConfig(
        actor={"model": "m", "optim": {"lr": 1e-3}},
        algo={"beta": 0.1, "num_generations": 4},
        reward={"a.py:f": 1.0},
        trainer={"run_dir": "elsewhere", "allow_config_change": True, "max_steps": 9},
        critic={"dtype": "float32"},
    )
    (tmp_path / FULL_CONFIG_FILE).write_text(dump(run))
    found = resumed(tmp_path, "actor.lr=2e-3", "trainer.max_steps=20", "reward={b.py:g: 0.5}")
    trainer = dataclasses.replace(run.trainer, run_dir=str(tmp_path), resume="latest", allow_config_change=False)
    assert found.algo == run.algo and found.critic == run.critic and found.actor.model == "m"
    assert found.actor.optim.lr == 2e-3 and found.reward == {"b.py:g": 0.5}
    assert found.trainer == dataclasses.replace(trainer, max_steps=20)
    assert resumed(tmp_path, "algo.preset=dr_grpo").algo.num_generations == 8  # a preset gives all of its section
    assert resumed(tmp_path / "none").actor.model is None
    with pytest.raises(ConfigError, match="is a run of whet grpo; resume it by that, or give whet dpo another"):
        resumed(tmp_path, kind=DPORunConfig)
    for kind in (PPORunConfig, SFTRunConfig, RMRunConfig, DPORunConfig):
        (tmp_path / FULL_CONFIG_FILE).write_text(dump(kind()))
        assert isinstance(resumed(tmp_path, kind=kind), kind)


def test_a_resumed_run_goes_on_under_other_defaults_and_says_which(tmp_path):
    before = dump_tree(RunConfig(actor={"model": "m"}, trainer={"run_dir": str(tmp_path)}))
    before["rollout"]["top_k"] = 50  # a default that was another, and has been left out of config.yaml
    before["algo"]["forgotten"] = 1  # a key that there was
    (tmp_path / FULL_CONFIG_FILE).write_text(yaml.safe_dump(before))
    (tmp_path / "config.yaml").write_text(dump(minimal_config(RunConfig(actor={"model": "m"}))))
    words = ["--config", str(tmp_path / "config.yaml"), f"trainer.run_dir={tmp_path}", "trainer.resume=latest"]
    assert load_resumable(RunConfig, words, SHORTHANDS).rollout.top_k == 50
    assert non_default_run_values(RunConfig, words, SHORTHANDS) == {"rollout.top_k": (50, None)}


def test_an_edit_of_the_file_that_a_resume_does_not_read_is_refused_and_a_lost_file_is_no_loss(tmp_path):
    run = RunConfig(actor={"model": "m"}, reward={"a.py:f": 1.0}, algo={"num_generations": 4})
    (tmp_path / FULL_CONFIG_FILE).write_text(dump(run))
    (tmp_path / "config.yaml").write_text(
        dump(minimal_config(run)).replace("num_generations: 4", "num_generations: 16")
    )
    said = r"algo.num_generations is 16 in .*config.yaml, and 4 in the run: a resume takes .*allow_config_change=true"
    with pytest.raises(ConfigError, match=said):
        resumed(tmp_path, "trainer.max_steps=3")
    assert resumed(tmp_path, "algo.num_generations=16").algo.num_generations == 16  # given: compared later, as ever
    (tmp_path / "config.yaml").write_text(dump(minimal_config(run)))
    for text in ("", None):
        (tmp_path / FULL_CONFIG_FILE).unlink() if text is None else (tmp_path / FULL_CONFIG_FILE).write_text(text)
        assert resumed(tmp_path).algo == run.algo and resumed(tmp_path).reward == {"a.py:f": 1.0}
