"""Recorded answers: what environments and agents have answered, in a folder, so that a run is repeated without them.

    <folder>/<seed>-<step>-<process>.jsonl      a line for each episode that has ended

A line has the key of the episode, and for each call of the environment its name, a digest of all ids before it, and
the answer. What an agent answers are its next calls of the model, or its reward. An episode is answered from its line
as long as the digests agree, so the model has said the same. Where they don't, it begins again with the environment,
and has a new line. Failed episodes are not recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.envs.tools import ToolCounts
from whet.errors import RewardError, format_value
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallGenerator
from whet.storage.files import make_writable_folder
from whet.types import Completion, Prompt

__all__ = ["DivergedError", "RecordedAnswers", "RngKey", "Tape", "run_recorded"]


RngKey = tuple[int, int, int, int]
"""(seed, step, prompt, generation): of an episode."""


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

    def ask(self, name: str, context: np.ndarray, calls: CallGenerator[Any]) -> CallGenerator[Any]:
        """Returns the recorded answer, or that of the environment, which is recorded. Args: calls: ask the
        environment.
        """
        if self.replays:
            calls.close()
            return self.next(name, context)
        answer = yield from calls
        self.add(name, context, answer)
        return answer

    def ask_now(self, name: str, context: np.ndarray, call: Callable[[], Any]) -> Any:
        """Returns what `ask` does, of a function that is called here. Args: call: without arguments."""
        if self.replays:
            return self.next(name, context)
        self.add(name, context, answer := call())
        return answer

    def keep_counts(self, counts: ToolCounts) -> None:
        """Records the counts of an episode's tool calls, or puts the recorded ones in."""
        if self.replays:
            counts.calls, counts.failures = self.counts["calls"], self.counts["failures"]
        else:
            self.counts = dataclasses.asdict(counts)


class RecordedAnswers:
    """The folder of recorded answers.

    Args: folder: created if missing. Raises: ConfigError: it can't be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = make_writable_folder(folder, "rollout.answers_dir")
        self._steps: dict[tuple[int, int], dict[str, Tape]] = {}

    def replay_or_run(self, episode: Episode, run_once: Callable[[Tape], Turns]) -> Turns:
        """Runs an episode with its recorded answers, or without them where they do not fit, and records it.

        Args: run_once: runs the episode with a tape. It raises DivergedError where the tape's answers do not fit.
        """
        if (record := self.find(episode.rng_key, episode.prompt)) is not None:
            try:
                return (yield from run_once(record))
            except DivergedError:
                episode.reset()
        tape = Tape(replays=False)
        returned = yield from run_once(tape)
        completions = [returned] if isinstance(returned, Completion) else list(returned)
        if completions[-1].finish_reason != "error":
            self.write(episode.rng_key, episode.prompt, tape)
        return completions

    def find(self, rng_key: RngKey, prompt: Prompt) -> Tape | None:
        """Returns the record of an episode, at its start; None = it has none. Args: of the episode."""
        at = rng_key[:2]
        if at not in self._steps:
            self._steps = {at: self._read(*at)}  # a run goes through its steps in order
        record = self._steps[at].get(_key(rng_key, prompt))
        return None if record is None else replace(record, place=0)

    def write(self, rng_key: RngKey, prompt: Prompt, tape: Tape) -> None:
        """Appends the record of an episode that has ended. Args: rng_key, prompt: of the episode. tape: its record."""
        line = json.dumps({"key": _key(rng_key, prompt), "counts": dict(tape.counts), "calls": tape.calls})
        seed, step = rng_key[:2]
        with (self.folder / f"{seed}-{step:06d}-{os.getpid()}.jsonl").open("a") as file:
            file.write(f"\n{line}")  # so it is whole behind a line at which a process with this number was killed

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


def run_recorded(answers: RecordedAnswers | None, episode: Episode, run_once: Callable[[Tape | None], Turns]) -> Turns:
    """Runs an episode: see `RecordedAnswers.replay_or_run`. Args: answers: None = run_once gets no tape."""
    return run_once(None) if answers is None else answers.replay_or_run(episode, run_once)


def _key(rng_key: RngKey, prompt: Prompt) -> str:
    """Returns the place of an episode in its step, with a digest of its prompt."""
    return f"{rng_key[2]}_{rng_key[3]}_{_digest(prompt.tokens)}"


def _digest(ids: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]
