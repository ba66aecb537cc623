"""The folder of an evaluation. Completions are written as they are sampled, so a resumed evaluation repeats none.

    config.yaml  environment.json  evaluation.json  completions/eval-000064.parquet  results.json  .lock

A file of completions has the prompts of one batch; its name has the index of the first prompt. It is written when the
batch is sampled, and again with its rewards. evaluation.json has the settings of the sampling and a hash of the reward
functions. A resumed evaluation must have the same settings, and reuses the rewards if the functions are the same.
"""

from __future__ import annotations

import itertools
import json
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
"""The format of evaluation.json and results.json."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalBatch:
    """A batch of prompts with their completions."""

    first: int
    """Index of the first prompt."""
    groups: list[Group]
    """Prompts with completions."""
    has_rewards: bool
    """Whether the groups have their rewards."""


class EvalFolder:
    """The folder of one evaluation, locked while it is open.

    Args: path: created if missing. resume: whether an evaluation in the folder is continued.
    Raises: ConfigError: the folder has an evaluation that may not be continued, or other files; another process has it
        open; it can't be written.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = make_writable_folder(path, "out")
        has_evaluation = (self.path / "evaluation.json").is_file()
        if has_evaluation and not resume:
            raise ConfigError(f"out={path} holds an evaluation; set resume=true to continue it, or another folder")
        if not has_evaluation and (others := sorted(p.name for p in self.path.iterdir() if p.name != ".lock")):
            raise ConfigError(f"out={path} holds {others[0]} and no evaluation; give an empty or a new folder")
        self.completions = self.path / "completions"
        self._lock = FolderLock(self.path, "out")

    def close(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def begin(
        self,
        config: Any,
        draws: Mapping[str, Any],
        judged_by: str,
        prompts: Sequence[Prompt],
        names: Sequence[str],
        *,
        own: Sequence[str] = (),
    ) -> list[EvalBatch]:
        """Writes the evaluation's settings, and reads the batches of an earlier attempt.

        Args:
            draws: all settings on which the completions depend, as plain values.
            judged_by: the hash of the reward functions.
            prompts: in order.
            names: of the rewards.
            own: those that episodes bring, which stay when other functions judge.
        Returns: the batches in order; without rewards if other reward functions computed them.
        Raises: ConfigError: the folder has completions of other settings. CheckpointError: a file can't be read.
        """
        settings_path, settings = (
            self.path / "evaluation.json",
            {"format": FORMAT, "draws": dict(draws), "judged_by": judged_by},
        )
        batches: list[EvalBatch] = []
        if settings_path.is_file():
            try:
                before = read_json(settings_path)
                old, same = before["draws"], before["judged_by"] == judged_by
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{settings_path} can't be read: {error}; give another folder as out") from error
            if changed := diff(old, draws):
                lines = "\n  ".join(changed)
                raise ConfigError(
                    f"out={self.path} holds other completions:\n  {lines}\nput these back, or give another out"
                )
            kept = names if same else own
            batches = self._read_batches(prompts, draws["num_generations"], names, kept)
        self.completions.mkdir(exist_ok=True)
        write_atomic(settings_path, (to_json(settings, indent=1) + "\n").encode())
        write_atomic(self.path / "config.yaml", dump(config).encode())
        write_atomic(self.path / "environment.json", (to_json(collect_environment(), indent=2) + "\n").encode())
        return batches

    def write(self, first: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
        """Writes a batch. Args: first: index of its first prompt. columns, rewards: as in a run; {} = no rewards."""
        write_completions(self.completions / f"eval-{first:06d}.parquet", step=0, columns=columns, rewards=rewards)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json."""
        write_atomic(self.path / "results.json", (to_json({"format": FORMAT, **results}, indent=1) + "\n").encode())

    def _read_batches(
        self, prompts: Sequence[Prompt], generations: int, names: Sequence[str], kept: Sequence[str]
    ) -> list[EvalBatch]:
        """Returns the batches of the folder, from the first prompt up to the first gap. Args: names, kept: of
        rewards.
        """
        batches: list[EvalBatch] = []
        place = 0
        while place < len(prompts) and (path := self.completions / f"eval-{place:06d}.parquet").is_file():
            columns, rewards = read_completions(path)
            for name in ("info", "seconds"):
                columns[name] = [json.loads(value) if value else {} for value in columns[name]]
            episodes = list(dict.fromkeys(zip(columns["row"], columns["generation"], strict=True)))  # without forks
            batch_prompts = prompts[place : place + len(episodes) // generations]
            if episodes != [(p.row, g) for p in batch_prompts for g in range(generations)]:
                raise CheckpointError(
                    f"{path} has other rows than the data; remove it: it and the later files are sampled again"
                )
            old, rewards = rewards, {name: rewards[name] for name in kept if name in rewards}
            if old.keys() - rewards.keys():
                self.write(place, columns, rewards)
            rows = np.array(columns["row"])
            groups = [_group(p, columns, rewards, np.flatnonzero(rows == p.row)) for p in batch_prompts]
            batches.append(EvalBatch(first=place, groups=groups, has_rewards=rewards.keys() >= set(names)))
            place += len(batch_prompts)
        return batches


def _group(
    prompt: Prompt, columns: Mapping[str, list[Any]], rewards: Mapping[str, list[float]], places: np.ndarray
) -> Group:
    """Returns a prompt with its stored completions. Args: places: of them in the columns."""
    completions = tuple(_completion(prompt, {name: columns[name][i] for name in columns}) for i in places)
    ends = {columns["generation"][i]: i for i in places}.values()
    return Group(
        prompt=prompt,
        completions=completions,
        rewards={name: np.array([values[i] for i in ends], np.float64) for name, values in rewards.items()},
    )


def _completion(prompt: Prompt, stored: Mapping[str, Any]) -> Completion:
    """Returns a stored completion. Args: stored: its columns."""
    prefix = np.array(stored["prompt_tokens"], np.int32)
    return Completion(
        tokens=np.array(stored["tokens"], np.int32),
        logprobs=np.array(stored["logprobs"], np.float32),
        versions=np.array(stored["versions"], np.int32),
        finish_reason=stored["finish_reason"],
        generation=stored["generation"],
        info=stored["info"],
        seconds=stored["seconds"],
        prefix=None if np.array_equal(prefix, prompt.tokens) else prefix,
        messages=tuple(json.loads(stored["completion"])) if "turns" in stored["info"] else None,
    )


def make_dated_folder(parent: str | Path) -> Path:
    """Makes a new folder <parent>/<date>-<time>, followed by -2 and so on if that exists.

    Raises: ConfigError: it can't be made.
    """
    first = Path(parent) / time.strftime("%Y%m%d-%H%M%S")
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        for n in itertools.count(1):
            folder = first if n == 1 else first.with_name(f"{first.name}-{n}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(f"{first} can't be made: {error}; give another folder as out") from error
    raise AssertionError
