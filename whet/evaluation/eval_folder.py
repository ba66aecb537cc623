"""The folder of an evaluation: what was drawn is kept as it is made, so that nothing finished is made twice.

    config.yaml  environment.json  evaluation.json  completions/eval-000064.parquet  results.json  .lock

A file of completions is of the prompts that were completed together, named after the place of the first. It is written
when they are drawn, and again when they are judged. evaluation.json says what was drawn and who has judged it: an
evaluation that is resumed must draw the same, and takes the judgments over where they are by the same functions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.config import diff, dump
from whet.errors import CheckpointError, ConfigError
from whet.observe.environment import collect_environment
from whet.storage.completions import read_completions, write_completions
from whet.storage.files import make_writable_folder, read_json, to_json, write_atomic
from whet.storage.folder_lock import FolderLock
from whet.types import Completion, Group, Prompt

__all__ = ["EvalBatch", "EvalFolder", "make_dated_folder"]

FORMAT = 1
"""Of evaluation.json and results.json."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalBatch:
    """Prompts that were completed together."""

    first: int
    """Place of the first prompt."""
    groups: list[Group]
    """Their completions."""
    has_rewards: bool
    """Whether the groups have their rewards."""


class EvalFolder:
    """The folder of one evaluation, locked while it is open.

    Args: path: made if absent. resume: whether an evaluation that lies there is continued.
    Raises: ConfigError: an evaluation lies there and is not to be continued, other files do, another process has it
        open, or it can't be written.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = make_writable_folder(path, "out")
        there = (self.path / "evaluation.json").is_file()
        if there and not resume:
            raise ConfigError(f"out={path} holds an evaluation; set resume=true to continue it, or another folder")
        if not there and (others := sorted(p.name for p in self.path.iterdir() if p.name != ".lock")):
            raise ConfigError(f"out={path} holds {others[0]}, and no evaluation; give a folder that is empty or new")
        self.completions = self.path / "completions"
        self._lock = FolderLock(self.path, "out")

    def close(self) -> None:
        """Lets others open the folder."""
        self._lock.release()

    def begin(
        self, config: Any, draws: Mapping[str, Any], judged_by: str, prompts: Sequence[Prompt]
    ) -> list[EvalBatch]:
        """Writes what the evaluation is; gives what is there of it.

        Args: draws: all that the completions depend on, plain. judged_by: a digest of the functions that judge them.
            prompts: in their order.
        Returns: the parts in order, without their rewards where those were by other functions.
        Raises: ConfigError: other completions were drawn there. CheckpointError: what lies there can't be read.
        """
        noted, about = self.path / "evaluation.json", {"format": FORMAT, "draws": dict(draws), "judged_by": judged_by}
        parts: list[EvalBatch] = []
        if noted.is_file():
            try:
                before = read_json(noted)
                old, same = before["draws"], before["judged_by"] == judged_by
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{noted} can't be read: {error}; give another folder as out") from error
            if changed := diff(old, draws):
                lines = "\n  ".join(changed)
                raise ConfigError(
                    f"out={self.path} holds other completions:\n  {lines}\nput these back, or give another out"
                )
            parts = self._parts(prompts, draws["num_generations"], keep=same)
        self.completions.mkdir(exist_ok=True)
        write_atomic(noted, (to_json(about, indent=1) + "\n").encode())
        write_atomic(self.path / "config.yaml", dump(config).encode())
        write_atomic(self.path / "environment.json", (to_json(collect_environment(), indent=2) + "\n").encode())
        return parts

    def write(self, first: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
        """Keeps a part. Args: first: its place. columns, rewards: as of a run's completions; none = not judged yet."""
        write_completions(self.completions / f"eval-{first:06d}.parquet", step=0, columns=columns, rewards=rewards)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json."""
        write_atomic(self.path / "results.json", (to_json({"format": FORMAT, **results}, indent=1) + "\n").encode())

    def _parts(self, prompts: Sequence[Prompt], generations: int, *, keep: bool) -> list[EvalBatch]:
        """What is there, from the first prompt on without a gap. Args: keep: with the rewards."""
        found: list[EvalBatch] = []
        place = 0
        while place < len(prompts) and (path := self.completions / f"eval-{place:06d}.parquet").is_file():
            columns, rewards = read_completions(path)
            count, left = divmod(len(columns["row"]), generations)
            mine = prompts[place : place + count]
            if left or columns["row"] != [p.row for p in mine for _ in range(generations)]:
                raise CheckpointError(
                    f"{path} holds other rows than the data; remove it, and what follows is drawn again"
                )
            if rewards and not keep:
                self.write(place, columns, {})
            groups = [
                _group(prompt, columns, rewards if keep else {}, slice(i * generations, (i + 1) * generations))
                for i, prompt in enumerate(mine)
            ]
            found.append(EvalBatch(first=place, groups=groups, has_rewards=keep and bool(rewards)))
            place += count
        return found


def _group(prompt: Prompt, columns: Mapping[str, list[Any]], rewards: Mapping[str, list[float]], at: slice) -> Group:
    """A prompt's completions as they were written."""
    names = ("tokens", "logprobs", "version", "finish_reason", "generation")
    done = tuple(
        Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(tokens), version, np.int32),
            finish_reason=finish_reason,
            generation=generation,
        )
        for tokens, logprobs, version, finish_reason, generation in zip(*(columns[n][at] for n in names), strict=True)
    )
    return Group(prompt=prompt, completions=done, rewards={n: np.array(v[at], np.float64) for n, v in rewards.items()})


def make_dated_folder(parent: str | Path) -> Path:
    """Makes <parent>/<date>-<time>, this process's alone; -2 and so on where that is taken.

    Raises: ConfigError: it can't be made.
    """
    wanted = Path(parent) / time.strftime("%Y%m%d-%H%M%S")
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for n in itertools.count(1):
            folder = wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(f"{wanted} can't be made: {error}; give another folder as out") from error
    raise AssertionError
