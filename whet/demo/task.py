"""The demo's task: a model that can calculate learns by GRPO which operation comes first.

A prompt is four numbers and three operations, "2*2+4*3="; a completion carries out one operation per step until one
number remains, "4+4*3=4+12=16". Before training it calculates each step correctly, but picks *any* operation next
(model.py). The reward checks only the last number, and from it the policy learns the order of operations. The prompts
are those for which a random order is right at most one time in three; some are held out from all training.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from typing import Any

__all__ = [
    "demonstration",
    "demonstration_rows",
    "heldout_demonstrations",
    "heldout_preferences",
    "heldout_rows",
    "preference_rows",
    "reward",
    "train_rows",
    "valid_steps",
    "validation_rows",
]

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
LARGEST_FACTOR, LARGEST_NUMBER = 6, 80
HELD_OUT, VALIDATION = 256, 128
Expression = tuple[tuple[int, ...], tuple[str, ...]]


def apply_operation(expression: Expression, i: int) -> Expression:
    """Returns the expression after its i-th operation.

    >>> apply_operation(((2, 3, 4), ("+", "*")), 1)
    ((2, 12), ('+',))
    """
    numbers, operations = expression
    result = OPERATIONS[operations[i]](numbers[i], numbers[i + 1])
    return (*numbers[:i], result, *numbers[i + 2 :]), operations[:i] + operations[i + 1 :]


def format_expression(expression: Expression) -> str:
    """Returns the expression as text."""
    numbers, operations = expression
    return str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operations, numbers[1:], strict=True))


def parse_expression(text: str) -> Expression:
    """Returns the expression of a text.

    >>> parse_expression("2*2+4*3=")
    ((2, 2, 4, 3), ('*', '+', '*'))
    """
    return tuple(map(int, re.findall(r"\d+", text))), tuple(re.findall(r"[-+*]", text))


def value(expression: Expression) -> int:
    """Returns the value of the expression: products first, then from the left."""
    while expression[1]:
        products = [i for i, o in enumerate(expression[1]) if o == "*"]
        expression = apply_operation(expression, products[0] if products else 0)
    return expression[0][0]


@functools.cache
def _results(expression: Expression) -> tuple[int, ...] | None:
    """Returns the results of all orders; None if one of them leaves 0..LARGEST_NUMBER."""
    numbers, operations = expression
    if min(numbers) < 0 or max(numbers) > LARGEST_NUMBER:
        return None
    if not operations:
        return numbers
    parts = [_results(apply_operation(expression, i)) for i in range(len(operations))]
    return None if None in parts else tuple(itertools.chain.from_iterable(p for p in parts if p))


@functools.cache
def _rows() -> list[dict[str, Any]]:
    """Returns every prompt of the task with its answer, in one shuffled order."""
    rows = []
    for operations in itertools.product("+-*", repeat=3):
        for numbers in itertools.product(range(1, 10), repeat=4):
            pairs = zip(operations, numbers, numbers[1:], strict=False)
            if any(o == "*" and max(a, b) > LARGEST_FACTOR for o, a, b in pairs):
                continue
            results = _results((numbers, operations))
            if results is None:
                continue
            answer = value((numbers, operations))
            if 3 * results.count(answer) <= len(results):
                rows.append({"prompt": format_expression((numbers, operations)) + "=", "answer": answer})
    _results.cache_clear()
    random.Random(0).shuffle(rows)
    return rows


def heldout_rows() -> list[dict[str, Any]]:
    """Returns the prompts that no training uses, not even that of the starting model."""
    return _rows()[:HELD_OUT]


def validation_rows() -> list[dict[str, Any]]:
    """Prompts for choosing when to stop; neither for training nor for the final evaluation."""
    return _rows()[HELD_OUT : HELD_OUT + VALIDATION]


def train_rows() -> list[dict[str, Any]]:
    """Returns the prompts of the demonstrations and of GRPO."""
    return _rows()[HELD_OUT + VALIDATION :]


def demonstration(prompt: str, rng: random.Random) -> str:
    """Returns a demonstration for the starting model: right steps in a random order.

    >>> demonstration("1+2+3+4=", random.Random(0))
    '1+5+4=1+9=10'
    """
    expression, steps = parse_expression(prompt), []
    while expression[1]:
        expression = apply_operation(expression, rng.randrange(len(expression[1])))
        steps.append(format_expression(expression))
    return "=".join(steps)


def reward(prompts: list[str], completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 where the last number is the answer, else 0; the steps don't count.

    >>> reward(["2+2="], ["4"], [4]), reward(["2+2="], ["²"], [4])
    ([1.0], [0.0])
    """
    last = [c.split("=")[-1] for c in completions]
    return [float(bool(re.fullmatch(r"[0-9]{1,4}", n)) and int(n) == a) for n, a in zip(last, answer, strict=True)]


def valid_steps(prompt: str, completion: str) -> bool:
    """Returns whether each step is right arithmetic, in any order."""
    expression = parse_expression(prompt)
    for step in completion.split("="):
        following = [apply_operation(expression, i) for i in range(len(expression[1]))]
        match = next((f for f in following if format_expression(f) == step), None)
        if match is None:
            return False
        expression = match
    return not expression[1]


def right_steps(prompt: str) -> str:
    """Returns the completion to be learned: products first, then from the left.

    >>> right_steps("2*2+4*3=")
    '4+4*3=4+12=16'
    """
    expression, steps = parse_expression(prompt), []
    while expression[1]:
        products = [i for i, o in enumerate(expression[1]) if o == "*"]
        expression = apply_operation(expression, products[0] if products else 0)
        steps.append(format_expression(expression))
    return "=".join(steps)


def demonstration_rows(number: int = 100_000) -> list[dict[str, Any]]:
    """Demonstrations on training prompts, for SFT: prompt and response."""
    rng, rows = random.Random(0), train_rows()
    prompts = [rng.choice(rows)["prompt"] for _ in range(number)]
    return [{"prompt": prompt, "response": demonstration(prompt, rng)} for prompt in prompts]


def heldout_demonstrations() -> list[dict[str, Any]]:
    """Demonstrations on held-out prompts."""
    rng = random.Random(1)
    return [{"prompt": row["prompt"], "response": demonstration(row["prompt"], rng)} for row in heldout_rows()]


def preference_rows() -> list[dict[str, Any]]:
    """Pairs on training prompts, for reward models and DPO: prompt, chosen, rejected."""
    return [pair for row in train_rows() if (pair := _pair(row)) is not None]


def heldout_preferences() -> list[dict[str, Any]]:
    """Pairs on held-out prompts."""
    return [pair for row in heldout_rows() if (pair := _pair(row)) is not None]


def _pair(row: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the right completion and a demonstration with another result; None if ten tries found none."""
    rng, chosen = random.Random(row["prompt"]), right_steps(row["prompt"])
    for _ in range(10):
        rejected = demonstration(row["prompt"], rng)
        if rejected.split("=")[-1] != str(row["answer"]):
            return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
    return None
