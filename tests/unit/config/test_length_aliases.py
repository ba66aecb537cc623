"""One length has several names in whet, and each of them is taken everywhere."""


import pytest

from whet import Sampler, cli, config, evaluate
from whet.cli.chat import Chat
from whet.config.generate import ChatConfig, GenerateConfig
from whet.config.length_aliases import COMPLETION
from whet.demo import small_model
from whet.errors import ConfigError

COMMANDS = {
    "grpo": "rollout.max_tokens_to_generate",
    "ppo": "rollout.max_tokens_to_generate",
    "eval": "rollout.max_tokens_to_generate",
    "generate": "max_tokens",
    "chat": "max_tokens",
}


def at(settings, key):
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize(("command", "key"), COMMANDS.items())
def test_every_command_takes_every_name_with_and_without_its_section(command, key, tmp_path):
    file = tmp_path / "run.yaml"
    for name in COMPLETION:
        for word in (name, f"rollout.{name}"):
            assert at(cli._config(command, [f"{word}=7"]), key) == 7, word
            section, dot, _ = word.partition(".")
            file.write_text(f"{section}: {{{name}: 9}}\n" if dot else f"{name}: 9\n")
            assert at(cli._config(command, [str(file)]), key) == 9, word
            assert at(cli._config(command, [str(file), f"{word}=7"]), key) == 7, word  # over the file
        assert at(cli._config(command, [str(file), f"{key}=8"]), key) == 8
    if command != "chat":
        prompt = key.replace(key.rpartition(".")[2], "max_prompt_length")
        for word in ("max_prompt_length", "rollout.max_prompt_length"):
            assert at(cli._config(command, [f"{word}=7"]), prompt) == 7


def test_a_length_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="are the same key; give it once"):
        config.load_run(["rollout={max_tokens: 1, max_tokens_to_generate: 2}"])
    with pytest.raises(ConfigError, match="max_tokens are the same length; give max_tokens_to_generate alone"):
        config.RolloutConfig(max_tokens=1, max_tokens_to_generate=2)


@pytest.mark.parametrize("name", COMPLETION)
def test_every_class_and_call_takes_every_name(name):
    given = {name: 3}
    assert config.RolloutConfig(**given).max_tokens_to_generate == 3
    assert config.RolloutConfig(eval=given).for_mode("eval").max_tokens_to_generate == 3
    assert config.RunConfig(rollout=given).rollout.max_tokens_to_generate == 3
    buffer = config.GRPOConfig(overlong_buffer={**given, "overlong_buffer_length": 2}).overlong_buffer
    assert buffer.max_response_length == 3
    assert GenerateConfig(**given).max_tokens == ChatConfig(**given).max_tokens == 3


@pytest.fixture(scope="module")
def sampler():
    return Sampler(small_model(seed=0), "byte")


def test_every_call_that_samples_takes_every_name(sampler):
    texts = {n: sampler("2+2=", **{n: 3}, temperature=1.0, seed=1).text for n in COMPLETION}
    assert len({tuple(text) for text in texts.values()}) == 1
    assert {sampler.sampling(**{n: 3}).max_tokens for n in COMPLETION} == {3}
    talk = Chat(sampler, ChatConfig())
    assert all(f"max_tokens={n}" in talk.command(f"/set {name}={n}") for n, name in enumerate(COMPLETION, 1))
    rows = [{"prompt": "1+1=", "answer": "2"}]
    found = [evaluate(sampler.loaded.module, rows, "exact_match", tokenizer="byte", **{n: 2}) for n in COMPLETION]
    assert len({run.results["tokens"].value for run in found}) == 1
