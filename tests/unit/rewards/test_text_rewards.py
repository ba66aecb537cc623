from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.errors import DataError
from whet.rewards.manager import RewardManager
from whet.rewards.numbers import number_match
from whet.rewards.text import boxed, exact_match, last_number

REWARDS = {fn.__name__: fn for fn in (boxed, exact_match, last_number)}
GOLD = {"boxed": r"so \boxed{%s}", "exact_match": "%s", "last_number": "so it is %s."}


def one(fn, completion, answer):
    return fn(completions=[completion], answer=[answer])[0]


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("answer", [4, "4", "-12", 2.5, "1000", ["5", "4"]])
def test_gold_scores_one_and_empty_zero_in_both_forms(name, answer):
    fn = REWARDS[name]
    gold = GOLD[name] % (answer[-1] if isinstance(answer, list) else answer)
    for form in (lambda t: t, lambda t: [{"role": "assistant", "content": t}]):
        assert one(fn, form(gold), answer) == 1.0
        assert one(fn, form(""), answer) == 0.0
        assert one(fn, form(gold + " 77"), answer) == (1.0 if name == "boxed" else 0.0)
    assert one(fn, [], answer) == 0.0
    assert one(fn, [{"role": "assistant", "content": None}], answer) == 0.0
    assert one(fn, [{"role": "assistant", "content": [{"type": "text", "text": gold}]}], answer) == 1.0


@pytest.mark.parametrize("name", REWARDS)
@given(text=st.text() | st.text(alphabet="\\boxed{}fracleft0123456789.,-+eE$ ", max_size=60))
def test_garbage_never_raises(name, text):
    assert one(REWARDS[name], text, "4") in (0.0, 1.0)


@pytest.mark.parametrize("name", REWARDS)
def test_long_garbage_takes_no_time(name):
    for text in ("1,111" * 20000, "{" * 100000, r"\boxed{" * 20000, "9" * 100000, "1e999 " * 9999, "-" * 100000):
        assert one(REWARDS[name], text, "4") == 0.0


@pytest.mark.parametrize("name", REWARDS)
def test_no_answer_is_not_applicable(name):
    assert REWARDS[name](["4", "", "4"], [None, "", []]) == [None, None, None]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("1,000", 1000, 1),
        ("3.50", "3.5", 1),
        ("$18.", "steps ... #### 18", 1),
        ("x = -3", -3, 1),
        ("x = −3", -3, 1),
        ("5-3", 3, 1),  # a minus between numbers is no sign
        ("(2)-3", 3, 1),
        ("1e3", 1000, 1),
        (".5", "0.5", 1),
        ("1,2,3", 3, 1),
        ("12345", 12345, 1),
        ("7 of 9", 7, 0),
        ("ninety", 90, 0),
        ("1" + "0" * 30, "1" + "0" * 29 + "1", 0),  # equal as floats
    ],
)
def test_last_number(text, answer, score):
    assert one(last_number, text, answer) == score


def test_an_answer_that_cannot_be_read_is_none_and_refused_before_a_run(caplog):
    assert one(last_number, "4", "four") is None
    assert one(last_number, "3/2", "1/2") is None  # 3/2 would be right
    assert one(boxed, r"\boxed{4}", r"\boxed{4") is None
    answers = ["4", "four", None, "1/2", ["four", 4], r"\boxed{4"]
    rows = [(row, {"answer": answer}) for row, answer in enumerate(answers, 3)]
    about = partial(number_match, tolerance=0.1)
    with pytest.raises(DataError) as error:
        RewardManager([last_number, about, "boxed", "exact_match", lambda answer: [1.0]]).check_answers(rows)
    assert [line.split(", which")[0] for line in str(error.value).split("\n")] == [
        "last_number can't read the answer of 2 of 6 rows (row 4: 'four', row 6: '1/2')",
        "number_match can't read the answer of 1 of 6 rows (row 4: 'four')",
        r"boxed can't read the answer of 1 of 6 rows (row 8: '\\boxed{4')",
    ]
    RewardManager(last_number, on_error="none").check_answers(rows)
    assert "last_number can't read the answer of 2 of 6 rows" in caplog.text


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", 0),
        (r"\boxed{\dfrac{1}{2}}", r"$\frac{1}{2}$", 1),
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"\boxed{1} no, \boxed{2}", 2, 1),
        (r"\boxed{\sqrt{a_{1}} + 1}", r"\boxed{\sqrt{a_{1}}+1}", 1),
        (r"\boxed{\left( 1,\, 2 \right)}", "(1,2)", 1),
        (r"\boxed{\text{(C)}}", "(C)", 1),
        (r"\boxed{10\%}", "10", 1),
        (r"\boxed{0}", 0, 1),
        (r"\boxed{1,234.0}", 1234, 1),
        (r"\boxed{\leftarrow}", "arrow", 0),
        (r"\boxed{4", 4, 0),
        (r"\boxed{}", 4, 0),
        ("4", 4, 0),
    ],
)
def test_boxed(text, answer, score):
    assert one(boxed, text, answer) == score


def test_exact_match_strips_white_space_alone():
    assert exact_match([" a b\n", "a  b", "A b"], ["a b"] * 3) == [1.0, 0.0, 0.0]
