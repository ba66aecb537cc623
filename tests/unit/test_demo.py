import random
import re

import pytest
from helpers import same, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet import Sampler, demo
from whet.cli import commands


def by_python(prompt):
    return eval(prompt.removesuffix("="))


# ---- the task ------------------------------------------------------------------------------------------------------


def test_the_three_sets_of_prompts_have_none_in_common():
    sets = [{r["prompt"] for r in part()} for part in (demo.heldout_rows, demo.validation_rows, demo.train_rows)]
    assert [len(s) for s in sets[:2]] == [256, 128] and len(sets[2]) > 1000
    assert sum(map(len, sets)) == len(set().union(*sets))


def test_answers_are_those_of_python_and_prompts_are_four_numbers():
    rows = random.Random(1).sample(demo.train_rows(), 300) + demo.heldout_rows()
    for row in rows:
        assert re.fullmatch(r"\d(?:[-+*]\d){3}=", row["prompt"])
        assert row["answer"] == by_python(row["prompt"])


def test_a_random_order_is_right_at_most_one_time_in_three():
    rng = random.Random(0)
    rows = rng.sample(demo.train_rows(), 60)
    right = total = 0
    for row in rows:
        for _ in range(30):
            said = demo.demonstration(row["prompt"], rng)
            right += demo.reward([row["prompt"]], [said], [row["answer"]])[0]
            total += 1
    assert 0.05 < right / total < 0.4


def test_every_step_of_a_demonstration_is_right_whatever_its_order():
    rng = random.Random(0)
    seen = set()
    for row in rng.sample(demo.train_rows(), 100):
        said = demo.demonstration(row["prompt"], rng)
        assert demo.valid_steps(row["prompt"], said)
        assert len(said.split("=")) == 3
        seen.add(said)
    assert len(seen) > 90
    orders = {demo.demonstration("2*2+4*3=", rng) for _ in range(50)}
    assert orders >= {"4+4*3=4+12=16", "2*2+12=4+12=16", "2*6*3=12*3=36"}


@pytest.mark.parametrize(
    ("said", "valid"),
    [
        ("4+4*3=4+12=16", True),
        ("4+4*3=8*3=24", True),  # the wrong order, but each step is right
        ("4+4*3=4+13=17", False),
        ("4+4*3=16", False),  # a step too few
        ("4+4*3=4+12", False),
        ("4+4*3=4+12=16=16", False),
        ("", False),
        ("garbage", False),
    ],
)
def test_steps_are_valid_where_each_is_one_right_operation(said, valid):
    assert demo.valid_steps("2*2+4*3=", said) is valid


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("4+4*3=4+12=16", 1.0),
        ("16", 1.0),  # the steps don't count
        ("4+4*3=4+12=016", 1.0),
        ("4+4*3=4+12=16=", 0.0),
        ("4+4*3=4+12=17", 0.0),
        ("", 0.0),
        ("16 ", 0.0),
        ("-16", 0.0),
        ("1" * 5000, 0.0),  # int() would refuse so many digits
        ("²", 0.0),  # a digit to str.isdigit
        ("١٦", 0.0),
    ],
)
def test_the_reward_is_1_for_the_right_last_number_and_never_raises(said, reward):
    assert demo.reward(prompts=["2*2+4*3="], completions=[said], answer=[16], mode="train") == [reward]


# ---- the starting model --------------------------------------------------------------------------------------------


def test_the_starting_model_calculates_correctly_in_a_random_order(tmp_path):
    folder, other = (demo.sft_model(str(tmp_path / name), seed) for name, seed in (("one", 0), ("two", 7)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1+2=").input_ids == list(b"1+2=")
    assert same(*(weights_of(AutoModelForCausalLM.from_pretrained(f)) for f in (folder, other)))
    rows = demo.heldout_rows()[:64]
    said = Sampler(folder)([r["prompt"] for r in rows], 32, temperature=1.0, seed=0).text
    right = demo.reward([r["prompt"] for r in rows], said, [r["answer"] for r in rows])
    assert sum(demo.valid_steps(r["prompt"], s) for r, s in zip(rows, said, strict=True)) >= 60
    assert 0.1 < sum(right) / len(right) < 0.5


@pytest.mark.parametrize("drawn", [True, False])
def test_the_demo_names_the_files_that_the_run_folder_has(drawn, tmp_path, monkeypatch, capsys):
    if drawn:
        (tmp_path / "curves.png").touch()
    accuracies = {"accuracy_before": 0.3, "accuracy_after": 0.9, "eval_prompts": 256}
    monkeypatch.setattr(commands, "grpo", lambda config: {"run_dir": str(tmp_path), "train_seconds": 1.0, **accuracies})
    commands.demo()
    assert ("curves.png" in capsys.readouterr().out) == drawn
