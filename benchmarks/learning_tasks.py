"""The tasks of presets.py: the demo's, and the same one with answers six times as long.

order: the demo's (whet/demo/task.py), completions of 11 to 15 bytes.

steps: the same prompts, each step written out: the expression, the operations to choose from, the expression with the
chosen one in brackets, and that one carried out. 83 to 97 bytes, of which three decide as in the demo.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

from warm_start import SFTTask, warm_start

from whet import demo
from whet.demo.task import Expression, apply_operation, format_expression, parse_expression

__all__ = ["TASKS", "Task"]

VALIDATION = 64
"""Prompts that tell the warm start when to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run needs to know of a task."""

    train_rows: Callable[[], list[dict[str, Any]]]
    heldout_rows: Callable[[], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    warm_start: Callable[[str, int], str]
    """(folder, seed) -> the folder, with the model and its tokenizer in it."""
    max_prompt: int
    max_tokens: int


def bracketed(expression: Expression, i: int) -> str:
    """The expression with its i-th operation in brackets.

    >>> bracketed(((9, 2, 3), ("-", "*")), 1)
    '9-(2*3)'
    """
    numbers, operations = expression
    words = [str(n) for n in numbers]
    words[i], words[i + 1] = f"({words[i]}", f"{words[i + 1]})"
    return words[0] + "".join(o + w for o, w in zip(operations, words[1:], strict=True))


def step(expression: Expression, i: int) -> str:
    """How carrying out the i-th operation is written.

    >>> step(((9, 2, 3), ("-", "*")), 1)
    '9-2*3:9-2,2*3:9-(2*3):2*3=6'
    """
    numbers, operations = expression
    choices = [f"{a}{o}{b}" for a, o, b in zip(numbers, operations, numbers[1:], strict=False)]
    result = apply_operation(expression, i)[0][i]
    return f"{format_expression(expression)}:{','.join(choices)}:{bracketed(expression, i)}:{choices[i]}={result}"


def demonstration(prompt: str, rng: random.Random) -> str:
    """A demonstration: right steps in a random order.

    >>> demonstration("9-2*3=", random.Random(1))
    '9-2*3:9-2,2*3:(9-2)*3:9-2=7;7*3:7*3:(7*3):7*3=21'
    """
    expression, steps = parse_expression(prompt), []
    while expression[1]:
        i = rng.randrange(len(expression[1]))
        steps.append(step(expression, i))
        expression = apply_operation(expression, i)
    return ";".join(steps)


def valid_steps(prompt: str, completion: str) -> bool:
    """Whether each step is right, in whatever order.

    >>> valid_steps("7*3=", "7*3:7*3:(7*3):7*3=21"), valid_steps("7*3=", "7*3:7*3:(7*3):7*3=20")
    (True, False)
    """
    expression = parse_expression(prompt)
    for said in completion.split(";"):
        chosen = next((i for i in range(len(expression[1])) if step(expression, i) == said), None)
        if chosen is None:
            return False
        expression = apply_operation(expression, chosen)
    return not expression[1]


LONG_STEPS = SFTTask(
    demonstration=demonstration,
    valid=valid_steps,
    max_tokens=112,
    enough=0.95,
    first_check=100,
    checked=VALIDATION,
)
"""Its completions are longer than the demo's, and it learns from smaller batches."""

TASKS = {
    "order": Task(
        train_rows=demo.train_rows,
        heldout_rows=demo.heldout_rows,
        reward=demo.reward,
        warm_start=warm_start,
        max_prompt=16,
        max_tokens=26,
    ),
    "steps": Task(
        train_rows=demo.train_rows,
        heldout_rows=demo.heldout_rows,
        reward=demo.reward,
        warm_start=functools.partial(warm_start, sft_task=LONG_STEPS, steps=1500, batch_size=16),
        max_prompt=16,
        max_tokens=LONG_STEPS.max_tokens,
    ),
}
