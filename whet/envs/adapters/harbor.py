"""HarborTask: a task folder of Harbor as an environment: the model writes files, and the task's tests judge them.

    instruction.md          the prompt
    task.toml               its metadata; [verifier] timeout_sec
    environment/            the files that the model finds; a Dockerfile that installs nothing is left out
    tests/test_*.py         functions test_...(), which pass if they raise nothing

Harbor runs a task in its container. Here programs run in the sandbox, with this interpreter and its packages, so tasks
whose Dockerfile runs commands and tasks that are judged by tests/test.sh alone are refused. Left out on purpose:
containers, network, and other languages.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from whet.envs.sandbox import Sandbox, SandboxLimits
from whet.errors import ConfigError, DataError

__all__ = ["HarborTask", "harbor_rows"]

TEST = """
import importlib.util, json, sys, traceback
results, request = {}, json.loads(sys.stdin.read())
for name in request["names"]:
    spec = importlib.util.spec_from_file_location(name[:-3], name)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        tests = {f"{name}::{k}": f for k, f in vars(module).items() if k.startswith("test") and callable(f)}
    except BaseException as error:
        results[name] = repr(error)
        continue
    for key, test in tests.items():
        try:
            test()
            results[key] = None
        except BaseException as error:
            results[key] = repr(error)
print("\\n" + request["mark"] + json.dumps(results))
"""
"""Runs the functions of test files, and prints the error of each, or None, behind a mark that others do not know."""


@functools.lru_cache(maxsize=4)
def _sandbox(seconds: float) -> Sandbox:
    """Returns the sandbox of all tasks with a time limit."""
    return Sandbox(SandboxLimits(seconds=seconds, cpu_seconds=seconds), workers=2)


def harbor_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Returns a row for each task folder in a folder: the instruction as its prompt, and the folder.

    Raises: DataError: there is none. ConfigError: a task needs what HarborTask lacks.
    """
    tasks = sorted(path.parent for path in Path(folder).glob("*/instruction.md"))
    if not tasks:
        raise DataError(f"{folder} has no task folder, which has an instruction.md; name the folder of the tasks")
    for task in tasks:
        _check_task(task)
    return [{"prompt": (task / "instruction.md").read_text(), "task": str(task)} for task in tasks]


def _check_task(task: Path) -> None:
    """Raises ConfigError: a task needs a container."""
    if not list((task / "tests").glob("test_*.py")):
        raise ConfigError(
            f"{task} has no tests/test_*.py: what a script judges needs its container; leave the task out"
        )
    dockerfile = task / "environment" / "Dockerfile"
    text = dockerfile.read_text() if dockerfile.is_file() else ""
    if run := re.search(r"^\s*RUN\s+(.*)$", text, re.MULTILINE):
        raise ConfigError(
            f"{dockerfile} runs {run[1]!r}, and there is no container here; install that in this environment, and "
            "remove the line, or leave the task out"
        )


class HarborTask:
    """A task folder, which the row names as `task` (`harbor_rows`). The reward is 1 if all its tests pass, else 0."""

    def reset(self, prompt: Any, task: str, **row: Any) -> None:
        """Begins a task with the files of its environment. Args: task: its folder."""
        folder, settings = Path(task), Path(task) / "task.toml"
        config = tomllib.loads(settings.read_text()) if settings.is_file() else {}
        self.seconds = float(config.get("verifier", {}).get("timeout_sec", 60.0))
        self.tests = {path.name: path.read_text() for path in sorted((folder / "tests").glob("test_*.py"))}
        found = sorted((folder / "environment").rglob("*"))
        self.files = {
            str(path.relative_to(folder / "environment")): path.read_text(errors="replace")
            for path in found
            if path.is_file() and path.name != "Dockerfile"
        }

    def list_files(self) -> str:
        """Lists the files."""
        return "\n".join(self.files) or "There are no files."

    def read_file(self, path: str) -> str:
        """Reads a file.

        Args:
            path: of the file.
        """
        return self.files[path]

    def write_file(self, path: str, content: str) -> str:
        """Writes a file.

        Args:
            path: of the file.
            content: of the file.
        """
        name = PurePosixPath(path)
        above = {str(parent) for parent in name.parents}
        if name.is_absolute() or ".." in name.parts or not name.parts or path.startswith(".stdin"):
            raise ValueError(f"{path!r} is not in the folder of the task; name a file inside it")
        if above & self.files.keys() or any(name in PurePosixPath(file).parents for file in self.files):
            raise ValueError(f"{path!r}: a folder above it is a file, or it is a folder itself")
        self.files[str(name)] = content
        return f"{path} has {len(content)} characters."

    def run_python(self, code: str) -> str:
        """Runs a program next to the files, and tells what it prints; files that it writes are not kept.

        Args:
            code: of the program.
        """
        result = _sandbox(self.seconds).run(code, files=self.files)
        return f"{result.stdout}{result.stderr}" if result.status == "finished" else f"{result.status}\n{result.stderr}"

    def get_reward(self) -> float:
        """Returns whether all tests pass."""
        mark, files = secrets.token_hex(8), {**self.files, **self.tests}
        request = json.dumps({"names": list(self.tests), "mark": mark})
        printed = _sandbox(self.seconds).run(TEST, stdin=request, files=files).stdout
        line = next((line for line in printed.splitlines() if line.startswith(mark)), None)
        if line is None:  # a file of the model's has ended the program
            return 0.0
        results = json.loads(line.removeprefix(mark))
        return float(bool(results) and all(error is None for error in results.values()))
