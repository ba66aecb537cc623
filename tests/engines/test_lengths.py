from helpers import completion, prompt

from whet.rollout import length_history as lengths
from whet.rollout.length_history import LengthHistory
from whet.types import Group


def group(row, *counts):
    return Group(prompt=prompt([1], row=row), completions=tuple(completion([7] * n) for n in counts))


def known(found, rows, kind="train"):
    return found.expected(kind, [prompt([1], row=r) for r in rows])


def test_each_kind_remembers_its_own_rows():
    found = LengthHistory()
    found.record("train", [group(0, 2, 5), group(4, 1)])
    found.record("eval", [group(0, 3)])
    found.record("train", [group(4, 6, 2)])
    assert known(found, [4, 0, 1]) == [6, 5, None]
    assert known(found, [4, 0], "eval") == [None, 3]


def test_a_checkpoint_holds_what_is_known():
    found, other = LengthHistory(), LengthHistory()
    found.record("train", [group(0, 2), group(4, 1)])
    other.record("train", [group(1, 1)])
    other.restore(found.state())
    assert known(other, [0, 4, 1]) == [2, 1, None]


def test_the_rows_seen_longest_ago_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(lengths, "MAX_ROWS", 2)
    found = LengthHistory()
    for row in (0, 1, 0, 2):
        found.record("train", [group(row, row + 1)])
    assert known(found, [0, 1, 2]) == [1, None, 3]
