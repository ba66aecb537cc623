"""What TRL's scripts are made of, and its ready-made rewards."""

import dataclasses
import json
import os
import sys
import types

import pytest

import whet.trl
from whet.errors import ConfigError
from whet.trl import (
    DatasetMixtureConfig,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from whet.trl import rewards as own
from whet.trl.trainer.hub import model_card


@pytest.mark.parametrize("cls", [ModelConfig, ScriptArguments, DatasetMixtureConfig])
def test_the_fields_are_those_of_the_installed_trl(cls):
    theirs = getattr(pytest.importorskip("trl"), cls.__name__)
    assert {f.name: f.default for f in dataclasses.fields(cls)} == {
        f.name: f.default for f in dataclasses.fields(theirs)
    }


def test_a_file_under_a_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "c.yaml"
    file.write_text("env: {FOUND: 1}\nmodel_name_or_path: m\nbeta: 0.5\nlearning_rate: 1.0e-5\nepsilom: 1\n")
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    words = ["--config", str(file), "--output_dir", "o", "--beta", "0.25", "--dataset_name", "d"]
    script, args, model = parser.parse_args_and_config(words, fail_with_unknown_args=False)
    assert (script.dataset_name, args.beta, args.learning_rate, model.model_name_or_path) == ("d", 0.25, 1e-5, "m")
    assert os.environ["FOUND"] == "1"
    assert parser.parse_args_and_config(words, return_remaining_strings=True)[-1] == ["--epsilom", "1"]
    with pytest.raises(
        ConfigError, match=r"Unknown arguments from config file: \['--epsilom', '1'\]; did you mean eps"
    ):
        parser.parse_args_and_config(words)
    with pytest.raises(ConfigError, match="a field 'config'"):
        TrlParser(dataclasses.make_dataclass("Mine", ["config"]))


def test_a_mixture_is_that_of_the_installed_trl(tmp_path):
    theirs = pytest.importorskip("trl")
    for name, number in (("a", 6), ("b", 9)):
        rows = [{"prompt": f"{name}{i}", "other": i} for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = [{"path": "json", "data_files": str(tmp_path / f"{n}.jsonl"), "columns": ["prompt"]} for n in "ab"]
    for fractions, more in (((None, None), {}), ((0.5, 0.25), {}), ((1, 3), {}), ((None, None), {"streaming": True})):
        given = [{**part, "fraction": f} for part, f in zip(parts, fractions, strict=True)]
        own, other = (module.get_dataset(module.DatasetMixtureConfig([dict(g) for g in given], **more))
                      for module in (whet.trl, theirs))  # fmt: skip
        assert [*own["train"]] == [*other["train"]]
    assert {n: len(x) for n, x in get_dataset(DatasetMixtureConfig(parts[1:], test_split_size=1 / 3)).items()} == {
        "train": 6, "test": 3}  # fmt: skip
    with pytest.raises(ConfigError, match="either all datasets in the mixture or none"):
        get_dataset(DatasetMixtureConfig([{**parts[0], "fraction": 0.5}, parts[1]]))
    with pytest.raises(ConfigError, match="No datasets were loaded"):
        get_dataset(DatasetMixtureConfig())


def test_adapters_and_bits():
    assert get_peft_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig()) is None
    pytest.importorskip("peft")
    made = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"]))
    assert (made.r, made.target_modules, made.lora_dropout) == (4, "all-linear", 0.05)
    with pytest.raises(ConfigError, match="8 bit and 4 bit"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)


THOUGHTS = ("<think>\na\n</think>\nb", "<think>a", "x<think>a</think>", "<think>a<think>b</think>", "<think></think>")
CHATS = [[{"role": "assistant", "content": text}] for text in THOUGHTS]
IDS = [[1, 2, 3, 4], [5] * 5, [1, 2] * 5, [1], list(range(9)), []]


def test_the_rewards_without_formulas_are_those_of_the_installed_trl():
    theirs = pytest.importorskip("trl.rewards")
    assert own.think_format_reward(CHATS) == theirs.think_format_reward(CHATS) == [1.0, 0.0, 0.0, 0.0, 1.0]
    for name, arguments in (
        ("get_repetition_penalty_reward", (2, -0.5)),
        ("get_repetition_penalty_reward", ()),
        ("get_soft_overlong_punishment", (8, 4)),
        ("get_soft_overlong_punishment", (4, 0)),
    ):
        mine, other = getattr(own, name)(*arguments), getattr(theirs, name)(*arguments)
        assert mine(completion_ids=IDS) == pytest.approx(other(completion_ids=IDS))
        assert mine.__name__ == other.__name__
    with pytest.raises(ConfigError, match="should not be positive"):
        own.get_repetition_penalty_reward(max_penalty=1.0)


@pytest.fixture
def verify(monkeypatch):
    """A stand-in for math-verify: what is boxed, as text."""

    def parse(text, **_):
        return [] if text == "?" else [text.partition("boxed{")[2].partition("}")[0] or text]

    math_verify = types.ModuleType("math_verify")
    vars(math_verify).update(parse=parse, verify=lambda a, b, **_: a == b, LatexExtractionConfig=lambda **_: None)
    latex = types.ModuleType("latex2sympy2_extended")
    vars(latex).update(NormalizationConfig=lambda **_: None)
    monkeypatch.setitem(sys.modules, "math_verify", math_verify)
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended", latex)


def test_the_rewards_of_formulas(verify):
    said = [[{"content": text}] for text in ("boxed{3}", "boxed{4}", "boxed{3}")]
    logged = {}
    assert own.accuracy_reward(said, ["3", "3", "?"], log_extra=logged.__setitem__) == [1.0, 0.0, None]
    assert logged["gold_parsed"] == ["['3']", "['3']", "[unparseable]"]
    assert logged["answer_parsed"] == ["['3']", "['4']", "[skipped]"]
    thought = ["<think>boxed{3}</think>boxed{4}", "<think>boxed{3}"]
    assert own.reasoning_accuracy_reward(thought, ["4", "3"]) == [1.0, 0.0]
    scaled = own.get_cosine_scaled_reward(100)
    assert scaled(said, ["3", "3", "?"], [[1] * 50, [1] * 50, [1]]) == [0.75, -0.75, None]
    assert scaled(said[:2], ["3", "3"], [[1] * 500, []]) == pytest.approx([0.5, -1.0])


def test_what_needs_math_verify_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended", None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        own.accuracy_reward(["1"], ["1"])


def test_a_card_names_what_the_hub_knows_and_no_folder(tmp_path):
    text = model_card("mine", "GRPO", "org/base", "org/data", ["sums"])
    assert "base_model: org/base" in text
    assert "datasets:\n- org/data" in text
    assert "- grpo\n- sums" in text
    assert str(tmp_path) not in model_card("mine", "GRPO", str(tmp_path), None, [])
