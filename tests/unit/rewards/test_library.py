"""Every reward that whet has: full marks for the gold answer, none for an empty one, and nothing raises."""

import functools
import importlib.util
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whet.rewards
from tests.helpers import examples
from whet.errors import ConfigError
from whet.rewards.library import ANSWERS, READ_BY, REWARDS
from whet.rewards.manager import RewardManager
from whet.rewards.numbers import number_match, read_value
from whet.rewards.resolve import resolve_reward
from whet.rewards.text import format_match, fuzzy_match, similarity, text_of

math_verify = importlib.util.find_spec("math_verify")
with_math = pytest.mark.skipif(math_verify is None, reason="math-verify is not installed")
GOLD = {
    "boxed": (r"so \boxed{1/2}", "1/2"),
    "exact_match": (" The Nile\n", "The Nile"),
    "format_match": ("<think>2+2</think>\n<answer>4</answer>", "4"),
    "fuzzy_match": ("the  nile", "The Nile"),
    "last_number": ("3 + 4 = 7.0.", "7"),
    "math_match": (r"so \boxed{\frac{2}{4}}.", "1/2"),
    "number_match": (r"it is \frac{3}{4} km^2.", "0.75"),
    "within_length": ("four", "4"),
}
NAMES = [pytest.param(name, marks=with_math) if name == "math_match" else name for name in GOLD]
HOSTILE = (
    "None", "nan", "١٢٣", "½", "２²", "5^2", "1/0", r"\frac{1}{0}", r"\boxed{\boxed{}}", "{" * 3000, r"\boxed{" * 2000,
    "9" * 6000, "1e999", r"\boxed{" + "9" * 6000 + "}", "\x00\ud800", "<think><answer></think></answer>", "-" * 9000,
)  # fmt: skip
NO_TEXT = (
    None,
    [],
    [None],
    [{}],
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": None}, 3]}],
    [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
)


def one(name, completion, answer):
    """The reward of one completion, the function given what it names."""
    offered = {"completions": [completion], "answer": [answer], "completion_ids": [[1] * 5]}
    code = REWARDS[name].__code__
    return REWARDS[name](**{word: offered[word] for word in code.co_varnames[: code.co_argcount]})[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_gold_answer_has_full_marks_an_empty_one_none_and_nothing_raises(name):
    text, answer = GOLD[name]
    for form in (lambda t: t, lambda t: [{"role": "user", "content": "x"}, {"role": "assistant", "content": t}]):
        assert one(name, form(text), answer) == 1.0
        assert one(name, form(""), answer) == one(name, form(" \n"), answer) == 0.0
    parts = [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
    assert one(name, parts, answer) == 1.0
    assert [one(name, nothing, answer) for nothing in NO_TEXT] == [0.0] * len(NO_TEXT)
    for text in HOSTILE:
        assert 0.0 <= one(name, text, answer) <= 1.0
    if name not in ("format_match", "within_length"):  # they look at no answer
        assert one(name, text, None) is one(name, text, "") is one(name, text, []) is None
        assert one(name, GOLD[name][0], ["0", answer]) == 1.0


@pytest.mark.parametrize("name", [n for n in GOLD if n != "math_match"])  # which takes milliseconds for each
@settings(max_examples=examples(10), deadline=None)
@given(text=st.text() | st.text(alphabet="\\boxed{}fracleft0123456789.,-+eE$/^ <think>ⅣⅠ²½", max_size=60))
def test_no_text_raises(name, text):
    assert 0.0 <= one(name, text, GOLD[name][1]) <= 1.0


def test_every_reward_is_proved_and_found_by_name_and_in_the_package():
    # their tests: tests/unit/rewards/test_code.py, tests/unit/data/test_{reasoning_gym,verifiers}.py
    others = {"code_tests", "reasoning_gym", "reasoning_gym_number", "verifiers"}
    assert set(GOLD) | others == set(REWARDS) and set(READ_BY) <= set(REWARDS.values())
    for name, fn in REWARDS.items():
        assert fn.__name__ == name and getattr(whet.rewards, name) is fn
        if name != "math_match" or math_verify:
            assert resolve_reward(f"whet.rewards:{name}") is resolve_reward(name) is fn
    assert ANSWERS["number_match"]("it is 1/2") == Fraction(1, 2)
    tagged = functools.partial(format_match, pattern="[0-9]+")
    assert list(RewardManager([tagged]).fns) == ["format_match"] and tagged(["12", "a"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", "1234.5"),
        ("x = −3/4", "-3/4"),
        ("1 1/2 cups", "3/2"),
        (r"1\frac{1}{2}", "3/2"),
        (r"-\dfrac12", "-1/2"),
        ("1½", "3/2"),
        ("5 m²", "5"),
        (r"$12{,}000\ \text{cm}^{2}$", "12000"),
        ("H2O", None),
        ("5^2", None),
        ("6.02 × 10^{3}", "6020"),
        ("2 x 10⁻¹", "1/5"),
        ("1e3", "1000"),
        ("5e9999", None),
        ("答案是５", "5"),
        ("٣٤", "34"),
        ("5-3", "3"),
        (r"\boxed{7} of 8", "7"),
        (r"\boxed{x} of 8", None),
        ("1/0", None),
        ("50%", "50"),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert read_value(text) == (None if value is None else Fraction(value))


def test_numbers_may_be_about_equal_if_asked():
    assert number_match(["3.14", "3.2"], ["3.14159"] * 2, tolerance=0.001) == [1.0, 0.0]
    assert number_match(["0.1"], [Fraction(1, 10)]) == [1.0]  # exactly, not as floats
    assert number_match(["4", "4"], ["four", ["four", 4]]) == [None, 1.0]  # what can be read of an answer counts


@settings(max_examples=examples(50), deadline=None)
@given(a=st.text("abcd", max_size=12), b=st.text("abcd", max_size=12))
def test_similarity_is_that_of_the_table(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert similarity(a, b) == (2 * table[-1][-1] / (len(a) + len(b)) if a or b else 1.0)


def test_fuzzy_match_takes_the_nearest_answer_and_long_texts():
    assert fuzzy_match(["colour"], [["color", "red"]]) == [10 / 11]
    assert fuzzy_match(["ab" * 10000], ["ba" * 10000])[0] > 0.99


@with_math
@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"$(x+1)^2$", "x^2+2x+1", 1.0),
        ("it is 0.5", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        (r"\boxed{18}", "9 + 9 #### 18", 1.0),
        ("18", "#### ", None),
    ],
)
def test_formulas_count_by_their_meaning(text, answer, score):
    assert one("math_match", text, answer) == score


@with_math
def test_formulas_without_a_process_that_can_be_killed_are_warned_of(caplog):
    RewardManager("math_match")
    assert "stops training, and nothing can end its call; set reward_workers=1" in caplog.text
    caplog.clear()
    assert RewardManager("math_match", workers=1).workers.functions and not caplog.text


def test_what_is_missing_or_wrong_is_said_at_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math-verify .*pip install .*\[math\]'"):
        resolve_reward("math_match")
    with pytest.raises(ConfigError, match="is not a regular expression"):
        format_match(["a"], pattern="(")
    with pytest.raises(ConfigError, match="no length is within"):
        whet.rewards.within_length(["a"], [[1]], min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("name", "bound", "said"),
    [
        ("format_match", {"pattern": "("}, "is not a regular expression"),
        ("format_match", {"pattern": 3}, "pattern 3 is not a regular expression"),
        ("number_match", {"tolerance": -1}, "tolerance must be a number of at least 0, got -1"),
        ("number_match", {"tolerance": float("nan")}, "got nan"),
        ("number_match", {"tolerance": "0.1"}, "got '0.1'"),
        ("number_match", {"tol": 0.1}, "number_match has no argument 'tol'. Arguments that can be bound: tolerance"),
        ("within_length", {"max_tokens": 0.5}, "give whole numbers"),
    ],
)
def test_what_is_bound_to_a_reward_is_looked_at_before_anything_is_judged(name, bound, said):
    with pytest.raises(ConfigError, match=said):
        resolve_reward(functools.partial(REWARDS[name], **bound))


def test_what_is_bound_and_right_is_left_as_it_is():
    for name, bound in (("format_match", {"pattern": "a+"}), ("number_match", {"tolerance": 0}), ("exact_match", {})):
        given = functools.partial(REWARDS[name], **bound)
        assert resolve_reward(given) is given


def test_a_completion_without_text_is_an_empty_one():
    assert [text_of(nothing) for nothing in NO_TEXT] == [""] * len(NO_TEXT)
