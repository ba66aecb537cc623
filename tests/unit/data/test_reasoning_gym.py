"""Tasks of reasoning-gym as rows, and its own scores as a reward."""

import sys

import pytest

from whet.data.sources import check_source, load_rows
from whet.errors import ConfigError, DataError
from whet.rewards.reasoning_gym import reasoning_gym, reasoning_gym_number

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=50&seed=3"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"need the package: pip install .*\[gym\]"):
        check_source("reasoning_gym:chain_sum")


def test_rows_are_those_of_the_library_and_are_scored_by_it():
    library = pytest.importorskip("reasoning_gym")
    rows = load_rows(SUMS)
    same = library.create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=50, seed=3)
    assert [(row["prompt"], row["answer"]) for row in rows] == [(e["question"], e["answer"]) for e in same]
    row, answer = rows[0], rows[0]["answer"]
    columns = {"task": [row["task"]] * 5, "index": [row["index"]] * 5}
    texts = [answer, f"so it is {answer}", f"<answer>{answer}</answer> I think", "<answer>x</answer>", ""]
    assert reasoning_gym(texts, **columns) == [1.0, len(answer) / len(texts[1]), 1.0, 0.0, 0.0]
    assert reasoning_gym_number(texts, **columns) == [1.0, 1.0, 1.0, 0.0, 0.0]
    near = [f"1{answer.lstrip('-')}", f"{answer}0"]  # other numbers with the answer's digits
    assert reasoning_gym_number(near, task=[row["task"]] * 2, index=[row["index"]] * 2) == [0.0, 0.0]


def test_the_test_split_holds_none_of_the_training_questions():
    pytest.importorskip("reasoning_gym")
    train, test = load_rows(SUMS), load_rows(SUMS, split="test", is_part=True)
    assert test == load_rows(SUMS, split=None) and 40 < len(test) <= 50  # of 10,000 sums
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    with pytest.raises(DataError, match="every question of the test split"):
        load_rows("reasoning_gym:coin_flip?min_trials=1&max_trials=1&size=100", split="test")


def test_several_kinds_are_a_mixture():
    pytest.importorskip("reasoning_gym")
    rows = load_rows([{"path": SUMS, "weight": 0.75}, {"path": "reasoning_gym:gcd?size=50", "weight": 0.25}])
    assert {row["task"].partition("?")[0] for row in rows} == {"chain_sum", "gcd"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:chain_sums", "unknown reasoning_gym task 'chain_sums'; did you mean chain_sum"),
        ("reasoning_gym:chain_sum?min_term=2", "unknown option of reasoning_gym:chain_sum 'min_term'; did you mean"),
        ("reasoning_gym:chain_sum?size=0", "size=0 must be a whole number from 1 on"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"),
    ],
)
def test_wrong_names_and_options_are_refused(source, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        load_rows(source)


def test_a_split_that_is_not_there_is_refused():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match="no split 'dev'; give train or test"):
        load_rows(SUMS, split="dev")
