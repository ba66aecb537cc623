"""Tasksets of verifiers as rows, and their own scores as a reward."""

import asyncio
import sys

import pytest

from whet.data.sources import check_source, load_rows
from whet.errors import ConfigError
from whet.rewards.verifiers import verifiers

TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    split: str = "train"
    rows: int = 3
    system: str | None = None


class SumTask(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task, trace):
        return float(len(trace.last_reply) < 4 and task.answer.isdigit() and trace.num_turns == 1)


class ToolTask(SumTask):
    @vf.reward
    async def ran(self, runtime):
        return 1.0


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        first = 0 if self.config.split == "train" else 100
        kind = ToolTask if self.config.split == "tools" else SumTask
        for i in range(first, first + self.config.rows):
            yield kind(Data(prompt=f"{i} + 1?", answer=str(i + 1), system_prompt=self.config.system))


__all__ = ["Sums"]
"""


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """An installed taskset of sums, with the splits train, test and one that needs a runtime."""
    pytest.importorskip("verifiers")
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    yield "verifiers:sums-taskset"
    sys.modules.pop("sums_taskset", None)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.raises(ConfigError, match=r"need the package: pip install .*\[verifiers\]"):
        check_source("verifiers:gsm8k")


def test_rows_are_the_tasks_and_are_scored_by_them(sums):
    rows = load_rows(f"{sums}?rows=2&system=Add.")
    system = {"role": "system", "content": "Add."}
    assert [row["prompt"] for row in rows] == [[system, {"role": "user", "content": f"{i} + 1?"}] for i in (0, 1)]
    texts = ["2", "it is 2", "3", "1"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"task": [rows[1]["task"]] * 4, "index": [rows[1]["index"]] * 4}
    assert asyncio.run(verifiers([rows[1]["prompt"]] * 4, completions, **columns)) == [1.5, 0.0, 0.5, 0.5]


def test_a_split_and_a_size_are_the_tasksets(sums):
    rows = load_rows(f"{sums}?size=2", split="test")
    assert [row["prompt"][0]["content"] for row in rows] == ["100 + 1?", "101 + 1?"]
    assert len(load_rows(sums)) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("verifiers:no_such_taskset", "verifiers has no taskset 'no_such_taskset'.*install the package"),
        ("verifiers:sums-taskset?row=2", "unknown option of verifiers:sums-taskset 'row'; did you mean rows"),
        ("verifiers:sums-taskset?size=0", "size=0 must be a whole number from 1 on"),
        ("verifiers:sums-taskset?rows=many", "can't load 'sums-taskset.rows=many.*valid integer"),
        ("verifiers:sums-taskset?split=tools", r"ToolTask scores with a runtime \(ran\).*rollout.env_path"),
    ],
)
def test_wrong_names_options_and_tasks_are_refused(sums, source, message):
    with pytest.raises(ConfigError, match=message):
        load_rows(source)
