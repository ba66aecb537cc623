"""The environment of repair.yaml: the model repairs a function of one line, which unit tests try in the sandbox.

A function does not do what its name says, `def mul(x,y):return x+y`. The model writes what it should return. If a test
fails, the model is told what its function returns, and has a second try. The starting model, trained by SFT, writes
the wrong operation again in half of its tries, the right one in three of ten, and else any.
"""

from __future__ import annotations

import functools
import itertools
import random
from string import ascii_lowercase
from typing import Any

from whet.demo.conversations import conversation_model
from whet.envs.sandbox import Sandbox, SandboxLimits

OPERATIONS = {"add": "+", "sub": "-", "mul": "*", "div": "//", "mod": "%"}
RUN = "def {name}({variables}):return {body}\nfor numbers in open(0):print({name}(*map(int, numbers.split())))"


@functools.cache
def _sandbox() -> Sandbox:
    """Returns the sandbox of all episodes, whose processes wait for programs."""
    return Sandbox(SandboxLimits(seconds=2.0), workers=2)


@functools.lru_cache(maxsize=4096)
def _run(program: str, numbers: str) -> str:
    """Returns what a program prints; the same program prints the same. Args: numbers: it reads."""
    return _sandbox().run(program, stdin=numbers).stdout


class Repair:
    """A function to repair; the reward is 1 if all tests pass after one of the turns, else 0."""

    def reset(self, prompt: Any, name: str, variables: str, tests: list[dict[str, str]]) -> None:
        """Begins with a function. Args: name, variables: of it. tests: what it reads and prints."""
        self.name, self.variables, self.tests, self.done = name, variables, tests, False

    def step(self, message: dict[str, Any]) -> str:
        """Returns what the function gives for the first test that fails."""
        program = RUN.format(name=self.name, variables=self.variables, body=message["content"])
        results = _run(program, "\n".join(test["input"] for test in self.tests)).split()
        wanted = [test["output"] for test in self.tests]
        self.done = results == wanted
        if self.done:
            return ""
        place = next((i for i, (has, wants) in enumerate(zip(results, wanted, strict=False)) if has != wants), 0)
        numbers = self.tests[place]["input"].replace(" ", ",")
        return f"{self.name}({numbers})={results[place][:8] if results else 'error'}"

    def get_reward(self) -> float:
        """Returns whether all tests passed."""
        return float(self.done)


def _row(name: str, bug: str, x: str, y: str) -> dict[str, Any]:
    """Returns a function with its tests. Args: bug: its operation. x, y: its variables."""
    numbers = [(7, 3), (9, 2)]  # no two operations have equal results
    results = [str(eval(f"a{OPERATIONS[name]}b", {"a": a, "b": b})) for a, b in numbers]
    tests = [{"input": f"{a} {b}", "output": result} for (a, b), result in zip(numbers, results, strict=True)]
    code = f"def {name}({x},{y}):return {x}{bug}{y}"
    columns = {"name": name, "variables": f"{x},{y}", "tests": tests}
    return {"messages": [{"role": "user", "content": code}], **columns}


def _rows() -> list[dict[str, Any]]:
    """Returns functions with all names and bugs, and two variables next to each other in the alphabet."""
    variables = list(itertools.pairwise(ascii_lowercase))
    bugs = [(name, bug) for name, right in OPERATIONS.items() for bug in OPERATIONS.values() if bug != right]
    rows = [_row(name, bug, x, y) for (name, bug), (x, y) in itertools.product(bugs, variables)]
    random.Random(0).shuffle(rows)
    return rows


def train_rows() -> list[dict[str, Any]]:
    """Returns 372 functions."""
    return _rows()[128:]


def test_rows() -> list[dict[str, Any]]:
    """Returns 128 others."""
    return _rows()[:128]


def sft_model(folder: str, seed: int, *, steps: int = 300) -> str:
    """Trains the starting model. Args: folder: to write. seed: of the model and the conversations. steps: of SFT."""
    return conversation_model(folder, seed, _conversation, steps=steps, batch_size=32)


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """Returns a function, a repair with any operation, what it returns, and a second repair."""
    x, y = draw.choice(list(itertools.pairwise(ascii_lowercase)))
    name, bug = draw.choice(list(OPERATIONS)), draw.choice(list(OPERATIONS.values()))
    operation = lambda: draw.choice([bug] * 5 + [OPERATIONS[name]] * 3 + [draw.choice(list(OPERATIONS.values()))] * 2)
    first = operation()
    return [
        *_row(name, bug, x, y)["messages"],
        {"role": "assistant", "content": f"{x}{first}{y}"},
        {"role": "user", "content": f"{name}(7,3)={eval(f'7{first}3')}"},
        {"role": "assistant", "content": f"{x}{operation()}{y}"},
    ]
