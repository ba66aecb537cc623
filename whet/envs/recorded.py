"""Recorded answers: what environments have answered, kept in a folder, so that a run can be repeated without them.

    <folder>/<seed>-<step>-<process>.jsonl      a line for each episode that has ended

A line has the key of the episode, and for each call of the environment its name, a digest of all ids before it, and
the answer. An episode is answered from its line as long as the digests agree, so the model has said the same. Where
they don't, it begins again with the environment, and has a new line. Failed episodes are not recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import RewardError, format_value
from whet.rollout.driver import Episode
from whet.storage.files import make_writable_folder

__all__ = ["DivergedError", "RecordedAnswers", "Tape"]


class DivergedError(Exception):
    """An episode has gone another way than its record."""


@dataclass(eq=False)
class Tape:
    """The answers of one episode.

    >>> tape = Tape()
    >>> tape.add("step", np.array([5, 6]), "higher")
    >>> Tape(tape.calls).next("step", np.array([5, 6]))
    'higher'
    >>> Tape(tape.calls).next("step", np.array([5, 7]))
    Traceback (most recent call last):
    whet.envs.recorded.DivergedError: step
    """

    calls: list[list[Any]] = field(default_factory=list)
    """[name, digest, answer] of each call."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of tool calls."""
    replays: bool = True
    """Whether `calls` are a record, and not to be written."""
    place: int = 0
    """The next call of a record."""

    def next(self, name: str, context: np.ndarray) -> Any:
        """Returns the recorded answer. Args: name: of the call. context: int [P], all ids before it.

        Raises: DivergedError: the record has another call there.
        """
        call = self.calls[self.place] if self.place < len(self.calls) else ["", "", None]
        if call[:2] != [name, _digest(context)]:
            raise DivergedError(name)
        self.place += 1
        return call[2]

    def add(self, name: str, context: np.ndarray, answer: Any) -> None:
        """Records an answer. Args: name, context: as in `next`. Raises: RewardError: it can't be written as JSON."""
        try:
            answer = json.loads(json.dumps(answer))
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{name} answered {format_value(answer, 80)}, which JSON can't hold ({error}); answer with texts, "
                "numbers and messages of them, or leave out rollout.answers_dir"
            ) from error
        self.calls.append([name, _digest(context), answer])

    def ask(self, name: str, context: np.ndarray, calls: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Returns the recorded answer, or that of the environment, which is recorded. Args: calls: ask the
        environment.
        """
        if self.replays:
            calls.close()
            return self.next(name, context)
        answer = yield from calls
        self.add(name, context, answer)
        return answer


class RecordedAnswers:
    """The folder of recorded answers.

    Args: folder: created if missing. Raises: ConfigError: it can't be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = make_writable_folder(folder, "rollout.answers_dir")
        self._steps: dict[tuple[int, int], dict[str, Tape]] = {}

    def find(self, episode: Episode) -> Tape | None:
        """Returns the record of an episode; None = it has none."""
        at = episode.rng_key[:2]
        if at not in self._steps:
            self._steps = {at: self._read(*at)}  # a run goes through its steps in order
        return self._steps[at].get(_key(episode))

    def write(self, episode: Episode, tape: Tape) -> None:
        """Appends the record of an episode that has ended."""
        line = json.dumps({"key": _key(episode), "counts": dict(tape.counts), "calls": tape.calls})
        seed, step = episode.rng_key[:2]
        with (self.folder / f"{seed}-{step:06d}-{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{line}\n")

    def _read(self, seed: int, step: int) -> dict[str, Tape]:
        """Returns the records of a step by key; of several the newest."""
        paths = sorted(self.folder.glob(f"{seed}-{step:06d}-*.jsonl"), key=lambda path: path.stat().st_mtime)
        tapes: dict[str, Tape] = {}
        for line in (line for path in paths for line in path.read_text().splitlines()):
            try:
                record = json.loads(line)
            except ValueError:  # the process ended while it wrote
                continue
            tapes[record["key"]] = Tape(record["calls"], record["counts"])
        return tapes


def _key(episode: Episode) -> str:
    """Returns the place of an episode in its step, with a digest of its prompt."""
    return f"{episode.rng_key[2]}_{episode.generation}_{_digest(episode.prompt.tokens)}"


def _digest(ids: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]
