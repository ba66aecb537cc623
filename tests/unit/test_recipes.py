"""Every recipe is a configuration that whet takes as it is."""

import random
import re
from pathlib import Path

import pytest

from whet.config import DPORunConfig, PPORunConfig, RMRunConfig, RunConfig, SFTRunConfig, load_run, load_supervised
from whet.data.sources import load_rows
from whet.envs.sandbox import missing_protection
from whet.util.package_files import recipe_path
from whet.util.references import resolve_module

SUPERVISED = {"sft": SFTRunConfig, "rm": RMRunConfig, "dpo": DPORunConfig}
RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))


def test_there_are_recipes_and_the_command_line_finds_them():
    assert RECIPES
    for path in RECIPES:
        assert recipe_path(path.name).samefile(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_recipe_parses_and_its_batches_divide(path):
    words = ["--config", str(path)]
    command = re.search(rf"whet (\w+) --config recipes/{path.name}", path.read_text())[1]
    if command in SUPERVISED:
        made = load_supervised(words, SUPERVISED[command])
        assert made.trained.model and made.data.path
        return
    made = load_run(words, {"ppo": PPORunConfig, "grpo": RunConfig}[command])
    made.trainer.check_batch_sizes(made.data.batch_size)
    assert made.actor.model and made.data.path
    assert made.reward_names or made.rollout.has_environment_class


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_recipe_says_its_command_cost_and_expected_number(path):
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert "whet " in head and "cost" in head.lower() and "expect" in head.lower()


def test_the_rows_of_the_smollm2_recipes_are_pairs_and_tagged_answers_that_evaluation_does_not_show():
    pytest.importorskip("reasoning_gym")
    names = ("pairs", "heldout_pairs", "tagged")
    pairs, heldout, tagged = (load_rows(f"{RECIPES[0].parent}/smollm2.py:{name}") for name in names)
    for row in (*pairs, *heldout):
        assert int(row["chosen"].strip(" .")) == eval(row["prompt"].split(":")[1].strip("= "))
        assert row["chosen"] != row["rejected"]
    assert not {row["prompt"] for row in heldout} & {row["prompt"] for row in (*pairs, *tagged)}
    assert (len(pairs), len(heldout), len(tagged)) == (2000, 128, 192)
    assert re.fullmatch(r"<answer>-?\d+</answer>", tagged[0]["response"])


@pytest.mark.skipif(missing_protection() is not None, reason="no sandbox here")
def test_the_right_operation_repairs_a_function_and_a_wrong_one_is_told_its_result():
    module = resolve_module(f"{RECIPES[0].parent}/repair_env.py", "environment")
    row = next(row for row in module.test_rows() if row["name"] == "mul")
    (prompt,), first, second = row.pop("messages"), *row["variables"].split(",")
    repair = module.Repair()
    repair.reset(prompt["content"], **row)
    assert repair.step({"content": f"{first}+{second}"}) == "mul(7,3)=10" and repair.get_reward() == 0.0
    assert repair.step({"content": "1/0"}) == "mul(7,3)=error" and not repair.done
    assert repair.step({"content": f"{first}*{second}"}) == "" and repair.get_reward() == 1.0


def test_halving_wins_every_guessing_game_and_the_starting_conversations_are_games():
    module = resolve_module(f"{RECIPES[0].parent}/guess_env.py", "environment")
    for row in load_rows(f"{RECIPES[0].parent}/guess_env.py:rows"):
        game, left, turns = module.Guess(), module.LETTERS, 0
        game.reset("", row["letter"])
        while not game.done:
            place, turns = len(left) // 2, turns + 1
            answer = game.step({"content": left[place]})
            left = left[place + 1 :] if answer == ">" else left[:place]
        assert turns <= 3 and game.get_reward() == 1.0
    said = [module._conversation(random.Random(seed)) for seed in range(20)]
    assert all([m["role"] for m in one] == ["user", "assistant"] * (len(one) // 2) for one in said)


def test_the_search_has_the_answers_of_the_questions_and_none_for_a_part_of_a_name():
    module = resolve_module(f"{RECIPES[0].parent}/people_env.py", "environment")
    for row in (*module.train_rows(), *module.test_rows()):
        words = row["messages"][0]["content"].strip("?").split()
        name = " ".join(words[2:4] if words[0] == "Where" else words[5:7])
        people = module.People()
        people.reset("", row["answer"])
        found = people.search(name)
        assert f"lives in {row['answer']} " in found or found.endswith(f"works as a {row['answer']}.")
        assert people.search(name.split()[0]) == f"Nothing about {name.split()[0]}." and people.get_reward() == 0.0
        people.step({"content": row["answer"]})
        assert people.get_reward() == 1.0
    questions = {row["messages"][0]["content"] for row in module.train_rows()}
    assert len(questions) == 500 and not questions & {row["messages"][0]["content"] for row in module.test_rows()}
    calls = [m for row in module.conversations() for m in row["messages"] if "tool_calls" in m]
    whole = [" " in m["tool_calls"][0]["function"]["arguments"]["name"] for m in calls]
    assert 170 < len(calls) < 220 and 0.4 < sum(whole) / len(calls) < 0.6


def test_the_calculator_answers_the_questions_and_the_starting_conversations_call_it():
    module = resolve_module(f"{RECIPES[0].parent}/calculator_env.py", "environment")
    signs = {"plus": "+", "minus": "-", "times": "*"}
    for row in (*module.train_rows()[:20], *module.test_rows()[:20]):
        a, word, b = row["messages"][0]["content"].removesuffix("?").split()
        calculator = module.Calculator()
        calculator.reset("", row["answer"])
        result = calculator.calculate(f"{a}{signs[word]}{b}")
        assert result == eval(f"{a}{signs[word]}{b}") and calculator.get_reward() == 0.0
        calculator.step({"content": str(result)})
        assert calculator.get_reward() == 1.0
    said = [row["messages"] for row in module.conversations()]
    called = [m["tool_calls"][0]["function"]["arguments"]["text"] for one in said for m in one if "tool_calls" in m]
    assert 100 < len(called) < 160 and all(re.fullmatch(r"\d+[-+*]\d+", text) for text in called)
    questions = {row["messages"][0]["content"] for row in module.train_rows()}
    assert not questions & {row["messages"][0]["content"] for row in module.test_rows()}
