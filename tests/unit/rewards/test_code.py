"""The reward of a program: what passes, and what does not although it would like to."""

import json

import pytest

from whet.envs.sandbox_server import missing_protection
from whet.errors import DataError
from whet.rewards.code import code_tests, extract_code

MISSING = missing_protection()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
DOUBLE = "```python\nprint(int(input()) * 2)\n```"
ADD = "def add(a, b):\n    return a + b\n"


def score(text, tests):
    (found,) = code_tests([text], tests=[tests])
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (DOUBLE, 1.0),
        (f"First:\n```\nprint(1)\n```\nbetter:\n{DOUBLE}\nThat doubles it.", 1.0),
        ("```Python\nprint(int(input()) * 2)", 1.0),
        ("print(int(input()) * 2)", 1.0),
        ("```python\nprint(8)\n```", 0.0),
        ("```python\nprint(int(input()) * 2); 1 / 0\n```", 0.0),
        ("", 0.0),
        ("I can't do that.", 0.0),
        ("```python\nimport os; os._exit(0)\n```", 0.0),
    ],
)
def test_a_program_passes_what_it_prints(text, wanted):
    tests = [{"input": "4", "output": "8"}, {"input": "5\n", "output": "10  \n\n"}]
    assert score(text, tests) == wanted
    assert score([{"role": "assistant", "content": text}], json.dumps(tests)) == wanted
    assert score(text, {"inputs": ["4", "5"], "outputs": ["8", "10"]}) == wanted


def test_a_program_that_does_not_end_fails():
    assert score("```python\nwhile True: pass\n```", [{"input": "4", "output": "8"}]) == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ADD, 1.0),
        (ADD.replace("+", "-"), 0.0),
        (ADD + "import os\nos._exit(0)", 0.0),
        (ADD + "import sys\nsys.exit()", 0.0),
        (ADD + "raise SystemExit(0)", 0.0),
        ("def add(a, b):", 0.0),
    ],
)
def test_a_program_passes_assertions(text, wanted):
    assert score(text, ["assert add(1, 2) == 3", "assert add(0, 5) == 5"]) == wanted


def test_the_program_of_a_completion():
    assert extract_code("```js\n1\n```\n```py\n2\n```\n```\n3\n```") == "2\n"
    assert extract_code("```js\n1\n```\n```\n3\n```") == "3\n"


@pytest.mark.parametrize("tests", [[], None, 7, [{"input": "1"}], [3], "[1", {"inputs": ["1"], "outputs": []}])
def test_other_tests_are_refused(tests):
    with pytest.raises(DataError, match="expected a list of texts of Python"):
        code_tests(["print(1)"], tests=[tests])
