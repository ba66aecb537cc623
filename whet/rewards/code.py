"""The reward of a program: the tests that it passes, run in the sandbox.

Left out on purpose: programs that are not Python, and checkers that accept several outputs; write a reward of your own
on `whet.envs.sandbox.Sandbox` for these.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.errors import DataError, format_value
from whet.rewards.text import text_of

if TYPE_CHECKING:
    from whet.envs.sandbox import Sandbox

__all__ = ["code_tests", "extract_code"]

_FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_LOCK = threading.Lock()


def code_tests(completions: list[Any], tests: list[Any], **_: Any) -> list[float]:
    r"""1.0 if the program in a completion passes all tests of its row, else 0.0.

    Programs run confined, without network and files, for at most five seconds and 512 MB a test. A test is
    {"input": text, "output": text}: what the program reads, and what it has to print, up to white space at the ends of
    lines; or a text of Python that runs behind the program, such as "assert add(1, 2) == 3".

    Args:
        completions: texts, or conversations whose last message counts; the program is the last fenced block, or the
            whole text without one.
        tests: a list of tests for each row, or the JSON of one; {"inputs": [...], "outputs": [...]} as in APPS too.
    Returns: a score per completion.
    Raises: DataError: tests of another form. ConfigError: this machine can't confine programs. RewardError: the
        sandbox failed.

    Tests of input and output can't be cheated. Assertions share a process with the program, which a policy may learn to
    exploit: prefer the former where the data have both.

    >>> code_tests(["```python\nprint(int(input()) * 2)\n```"], [[{"input": "4", "output": "8"}]])
    [1.0]
    """
    return [float(_passes(text_of(c), _read_tests(t))) for c, t in zip(completions, tests, strict=True)]


def extract_code(text: str) -> str:
    r"""Returns the program in a completion: its last fenced block of Python, or else its last block, or else all of it.

    >>> extract_code("So:\n```python\nprint(1)\n```\nThat prints 1.")
    'print(1)\n'
    """
    blocks = _FENCE.findall(text)
    python = [code for name, code in blocks if name.strip().lower() in ("python", "py", "python3")]
    return python[-1] if python else blocks[-1][1] if blocks else text


def _passes(text: str, tests: Sequence[str | tuple[str, str]]) -> bool:
    code = extract_code(text)
    return bool(code.strip()) and all(_passes_one(code, test) for test in tests)


def _passes_one(code: str, test: str | tuple[str, str]) -> bool:
    if isinstance(test, tuple):
        result = _sandbox().run(code, stdin=test[0])
        return result.status == "finished" and _lines(result.stdout) == _lines(test[1])
    end = secrets.token_hex(16)  # a program that exits before its tests does not print it
    result = _sandbox().run(f"{code}\n{test}\nprint('\\n{end}')\n")
    return result.status == "finished" and result.stdout.endswith(f"\n{end}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_tests(tests: Any) -> list[str | tuple[str, str]]:
    """Returns the tests of a row in one form: a text to run, or what is read and printed."""
    parsed = tests
    if isinstance(parsed, str) and parsed.lstrip()[:1] in ("[", "{"):
        try:
            parsed = json.loads(parsed)
        except ValueError:
            raise _error(tests) from None
    if isinstance(parsed, Mapping) and {"inputs", "outputs"} <= parsed.keys():
        inputs, outputs = parsed["inputs"], parsed["outputs"]
        if len(inputs) != len(outputs):
            raise _error(tests)
        parsed = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if isinstance(parsed, str | Mapping):
        parsed = [parsed]
    if not isinstance(parsed, Sequence) or not parsed:
        raise _error(tests)
    return [_read_test(test, tests) for test in parsed]


def _read_test(test: Any, tests: Any) -> str | tuple[str, str]:
    if isinstance(test, str):
        return test
    if isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return test["input"], test["output"]
    raise _error(tests)


def _error(tests: Any) -> DataError:
    return DataError(
        f"tests={format_value(tests, 120)}: expected a list of texts of Python, or of objects with the texts `input` "
        "and `output`"
    )


@functools.cache
def _make_sandbox(pid: int) -> Sandbox:
    from whet.envs.sandbox import Sandbox  # with torch, which the worker processes of rewards do without

    return Sandbox(workers=min(4, os.cpu_count() or 1))


def _sandbox() -> Sandbox:
    """Returns the sandbox of this process, started when it is first needed."""
    with _LOCK:
        return _make_sandbox(os.getpid())
