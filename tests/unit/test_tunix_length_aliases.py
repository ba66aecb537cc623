"""The length limit of a completion: one name in whet, and each of Tunix's names in whet.tunix."""

import pytest
from helpers import tunix_cluster

from whet import Sampler, config, evaluate, tunix
from whet.cli import registry
from whet.cli.chat import Chat
from whet.config.generate import ChatConfig, GenerateConfig
from whet.demo import small_model
from whet.errors import ConfigError
from whet.tunix.length_aliases import COMPLETION


def at(settings, key):
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize("command", ["grpo", "ppo", "eval"])
def test_a_run_has_a_short_key_for_the_lengths_in_words_and_in_a_file(command, tmp_path):
    file, key = tmp_path / "run.yaml", "rollout.max_tokens_to_generate"
    for word in ("max_tokens", "max_tokens_to_generate", key):
        assert at(registry.load_command_config(command, [f"{word}=7"]), key) == 7, word
        section, dot, name = word.partition(".")
        file.write_text(f"{section}: {{{name}: 9}}\n" if dot else f"{word}: 9\n")
        assert at(registry.load_command_config(command, [str(file)]), key) == 9, word
        assert at(registry.load_command_config(command, [str(file), f"{word}=7"]), key) == 7, word  # over the file
    assert at(registry.load_command_config("generate", ["max_tokens_to_generate=7"]), "max_tokens") == 7
    assert at(registry.load_command_config(command, ["max_prompt_length=7"]), "rollout.max_prompt_length") == 7


@pytest.mark.parametrize(
    ("command", "word", "key"),
    [
        ("grpo", "rollout.max_generation_steps", "rollout.max_tokens_to_generate"),
        ("grpo", "max_response_length", "rollout.max_tokens_to_generate"),
        ("grpo", "rollout.max_tokens", "rollout.max_tokens_to_generate"),
        ("generate", "max_completion_length", "max_tokens"),
        ("chat", "max_new_tokens", "max_tokens"),
    ],
)
def test_another_name_is_refused_with_the_key(command, word, key):
    with pytest.raises(ConfigError, match=f"unknown key {word}.*{key}"):
        registry.load_command_config(command, [f"{word}=7"])


def test_other_names_of_classes_and_calls_are_refused():
    for make in (
        lambda: config.RolloutConfig(max_generation_steps=3),
        lambda: config.RolloutConfig(eval={"max_tokens": 3}),
        lambda: GenerateConfig(max_tokens_to_generate=3),
    ):
        with pytest.raises(ConfigError, match="did you mean"):
            make()


@pytest.fixture(scope="module")
def sampler():
    return Sampler(small_model(seed=0), "byte")


def test_calls_that_sample_take_max_tokens(sampler):
    assert len(sampler("2+2=", max_tokens=3, temperature=1.0, seed=1).tokens[0]) <= 3
    assert sampler.sampling(max_tokens=3).max_tokens == 3
    with pytest.raises(ConfigError, match="did you mean max_tokens"):
        sampler.sampling(max_generation_steps=3)
    assert "max_tokens=4" in Chat(sampler, ChatConfig()).command("/set max_tokens=4")
    rows = [{"prompt": "1+1=", "answer": "2"}]
    found = evaluate(sampler.loaded.module, rows, "exact_match", tokenizer="byte", max_tokens=2)
    assert found.results["tokens"].value <= 2


# ---- whet.tunix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLETION)
def test_tunix_s_classes_and_calls_take_every_name(name):
    given = {name: 3}
    assert tunix.RolloutConfig(**given).max_tokens_to_generate == 3
    assert tunix.RolloutConfig(eval=given).for_mode("eval").max_tokens_to_generate == 3
    sampler = tunix.Sampler(small_model(seed=0), "byte")
    assert sampler.sampling(**given).max_tokens == 3
    want = sampler("2+2=", 3, temperature=1.0, seed=1).text
    assert sampler("2+2=", **given, temperature=1.0, seed=1).text == want
    c = tunix_cluster()
    assert c.generate(["2+2="], **given, seed=1).text == c.generate(["2+2="], max_generation_steps=3, seed=1).text


def test_a_length_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="max_tokens are the same length; give only max_tokens_to_generate"):
        tunix.RolloutConfig(max_tokens=1, max_tokens_to_generate=2)
