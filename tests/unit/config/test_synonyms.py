"""Keys of other libraries are answered with whet's own, in every command."""

import re
from pathlib import Path

import pytest

from whet import config
from whet.cli.registry import config_class
from whet.config import monitoring
from whet.config.base import config_from_dict
from whet.config.introspection import leaves
from whet.config.synonyms import NOTES, SECTIONS, SYNONYMS, find_owner, find_synonym
from whet.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMANDS = ("grpo", "ppo", "sft", "rm", "dpo", "eval", "generate", "chat")


def keys_of(command):
    """Every key, section and shorthand of a command."""
    kind, short = config_class(command)
    keys = [key for key, *_ in leaves(kind, True)]
    return {*short, *(key.rsplit(".", n)[0] for key in keys for n in range(key.count(".") + 1))}


def answer(command, word):
    """What a command says of an unknown key."""
    kind, short = config_class(command)
    tree = 1
    for part in reversed(word.split(".")):
        tree = {part: tree}
    with pytest.raises(ConfigError) as error:
        config_from_dict(kind, tree, short=short)
    return str(error.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_synonym_is_answered_with_a_key_that_the_command_has(command):
    known = keys_of(command)
    for word, targets in SYNONYMS.items():
        own = [t if t in known else t.replace("actor.", "reward_model.") for t in targets]
        found = next((key for key in own if key in known), None)
        if word not in known and found is not None:
            short = found.replace(".optim.", ".") if not found.endswith(".name") else found
            found = short if short in known else found
            assert answer(command, word) == f"unknown key {word}; did you mean {found}?"


def test_every_entry_of_the_tables_is_of_use():
    everywhere = set().union(*map(keys_of, COMMANDS))
    assert [key for targets in SYNONYMS.values() for key in targets if key not in everywhere] == []
    assert [name for names in SECTIONS.values() for name in names if name not in everywhere] == []
    classes = {section.split(".")[0] for section in (find_owner(word, ()) or "" for word in SYNONYMS) if section}
    assert classes and all(hasattr(config, name) or hasattr(monitoring, name) for name in classes)
    assert not NOTES.keys() & SYNONYMS.keys()


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("rm", "actor.lr", "did you mean reward_model.lr?"),
        ("rm", "actor.dtype", "did you mean reward_model.dtype?"),
        ("sft", "reward_model.dtype", "did you mean actor.dtype?"),
        ("ppo", "critic.learning_rate", "did you mean critic.lr?"),
        ("dpo", "trainer.learning_rate", "unknown key trainer.learning_rate; did you mean actor.lr?"),
        ("sft", "logging_steps", "unknown key logging_steps: every step is logged"),
        ("dpo", "padding_free", "unknown key padding_free: rows are always packed"),
        ("grpo", "temperature", "did you mean rollout.temperature?"),
        ("sft", "actor.optim.lrr", "unknown key actor.optim.lrr; did you mean actor.optim.lr?"),
        ("eval", "max_new_tokens", "did you mean rollout.max_tokens_to_generate?"),
        ("generate", "rollout.temperature", "unknown key rollout.temperature; did you mean temperature?"),
        ("grpo", "actor.temperature", "unknown key actor.temperature; did you mean rollout.temperature?"),
        ("sft", "max_tokens", "unknown key max_tokens; did you mean data.max_length?"),
        ("grpo", "actor_rollout_ref.model.path", "did you mean actor.model?"),
        ("grpo", "custom_reward_function.path", "did you mean reward?"),
        ("grpo", "peft_config.r", "did you mean actor.lora.r?"),
        ("grpo", "rollout.vllm.gpu_memory_utilization", "did you mean rollout.vllm.hbm_utilization?"),
        ("grpo", "rollout.vllm.max_model_len", "rollout.max_tokens_to_generate bound a sequence"),
        ("grpo", "algo.gae_lambda", "GRPO has no critic; leave it out, or train with PPO (whet ppo"),
        ("grpo", "algo.lam", "GRPO has no critic; leave it out, or train with PPO (whet ppo"),
        ("grpo", "actor.use_remove_padding", "rows are always packed, without padding"),
        ("grpo", "trainer.n_gpus_per_node", "torchrun starts several processes, and FSDP2 shards the weights"),
        ("grpo", "actor_rollout_ref.rollout.tensor_model_parallel_size", "in training and in the rollout"),
        ("grpo", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "mean trainer.max_tokens_per_micro"),
        ("grpo", "algorithm.fsdp.size", "unknown key algorithm.fsdp: torchrun starts several"),
        ("grpo", "algorithm.norm_adv_by_std_in_grpo", "did you mean algo.scale_rewards?"),
        ("grpo", "train_data.path", "unknown key train_data.path; did you mean data.path?"),
        ("grpo", "adv.estimator", "did you mean algo.advantage_estimator?"),
        ("grpo", "sync_ref_model", "did you mean algo.sync_ref_model?"),
        ("grpo", "optim", "did you mean actor.optim.name?"),
        ("grpo", "delta", "did you mean algo.delta?"),
        ("grpo", "log_completions", "did you mean trainer.show_samples?"),
        ("grpo", "reward_weights", "reward={name: weight, ...} has the weights"),
        ("sft", "truncation", "did you mean data.on_long?"),
        ("grpo", "gradient_accumulation_steps", "trainer.max_tokens_per_microbatch bounds their memory"),
        ("grpo", "rollout.tis", "did you mean algo.sampler_is?"),
        ("grpo", "vllm_importance_sampling_cap", "did you mean algo.sampler_is_threshold?"),
        ("grpo", "rollout.enable_sleep_mode", "an engine sleeps by itself"),
        ("grpo", "vllm_enable_sleep_mode", "an engine sleeps by itself"),
        ("grpo", "gpu_memory_utilization", "hbm_utilization is vLLM's share of the GPU's memory; rollout.kv_cache_tok"),
        ("grpo", "steps_per_generation", "a step makes data.batch_size / trainer.mini_batch_size updates"),
        ("grpo", "rollout.multi_turn.enable", "rollout.max_turns=4 makes episodes of several turns"),
        ("grpo", "tools", "rollout.env_path=env.py:Class"),
        ("grpo", "environment_factory", "did you mean rollout.env_path?"),
        ("sft", "reward", "unknown key reward; `whet sft --help all` lists the keys"),
        ("dpo", "algo.num_generations", "unknown key algo.num_generations; `whet dpo --help algo` lists the keys"),
        ("grpo", "n_samples_per_prompt", "num_generations?"),
    ],
)
def test_an_answer_names_the_whole_path(command, word, said):
    assert said in answer(command, word)


def test_from_python_the_answer_is_a_keyword_or_the_class_that_has_it():
    for made, said in (
        (lambda: config.OptimConfig(learning_rate=1.0), "unknown keyword OptimConfig.learning_rate; did you mean lr?"),
        (lambda: config.GRPOConfig(learning_rate=1.0), "GRPOConfig.learning_rate; did you mean OptimConfig.lr?"),
        (lambda: config.RolloutConfig(n=8), "RolloutConfig.n; did you mean GRPOConfig.num_generations?"),
        (lambda: config.RolloutConfig(max_new_tokens=1), "did you mean max_tokens_to_generate?"),
        (lambda: config.RolloutConfig(eval={"max_new_tokens": 1}), "did you mean eval.max_tokens_to_generate?"),
        (lambda: config.GRPOConfig(kl_coef=1.0), "did you mean beta?"),
        (lambda: config.GRPOConfig(temperature=1.0), "GRPOConfig.temperature; did you mean RolloutConfig.temperature?"),
        (lambda: config.RolloutConfig(max_steps=1), "did you mean RLTrainingConfig.max_steps?"),
        (lambda: config.RunConfig(model="m"), "unknown keyword RunConfig.model; did you mean RoleConfig.model?"),
        (lambda: config.RoleConfig(lora={"rank": 8}), "unknown keyword RoleConfig.lora.rank; did you mean r?"),
    ):
        with pytest.raises(ConfigError) as error:
            made()
        assert said in str(error.value)


VERL_ROW = re.compile(r"(?m)^\| `([\w.]+)`[^|]* \| `([\w.]+)` \|")


def test_the_page_from_verl_names_keys_of_whet_and_the_errors_name_the_same():
    rows = VERL_ROW.findall((ROOT / "docs" / "from-verl.md").read_text())
    known = keys_of("ppo")
    assert len(rows) > 50 and [key for _, key in rows if key not in known] == []
    for verl, key in rows:
        short = key.replace(".optim.", ".")
        assert verl in known or find_synonym(verl.split("."), known) in (key, short), verl
