"""Reward functions in processes that can be killed: a call that never comes back, or crashes, ends nothing else.

A call is of the whole batch, so that a function sees what it would see otherwise; functions run side by side. One that
judges each completion by itself (functions.per_completion) is called for each, by all the processes. Rewards have their
place by completion, so neither how many processes there are nor which of them is faster changes any.
Left out on purpose: a sandbox. The processes have the user's rights; and forks: a process with torch's threads can't be
forked safely, so each is a program of its own (worker_process.py).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from whet.errors import ConfigError, RewardError, RewardValueError, format_exception
from whet.rewards.checked_values import Judged
from whet.rewards.function_info import Named

__all__ = ["Call", "RewardWorkers"]

CALLS = 100_000
"""After so many calls a worker is replaced: what a library keeps of each is given back."""
GROWTH_BYTES = 2**30
"""A worker that has grown by so much since its first call is replaced."""
START_S = 600.0
"""How long a worker may take to import the functions."""
LOOK_S = 0.5
"""How often it is looked whether a worker has ended whose connection a program of a function's own holds open."""
PARTS = 4
"""Parts of a function's calls for each worker: few messages, and no worker without work while another has much left."""
TRIES = 2
"""How often calls are given to another worker where one ended before it began with them."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CODE = (
    "import json, sys; number, trainer, sys.path[:] = json.loads(sys.argv[1]); "
    "from whet.rewards.worker_process import main; main(number, trainer)"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a function is called with.

    Example: Call(words={"completions": ["4", "5"], "mode": "train"}, ids=["0_0", "0_1"], each=("completions",)).
    """

    words: Mapping[str, Any]
    """Its keywords."""
    ids: Sequence[str]
    """[N] trajectory ids."""
    each: Sequence[str] = ()
    """Keywords that are a list with an entry for each completion."""
    per_completion: bool = False
    """Whether it is called for each completion alone."""


@dataclass
class _Part:
    """Calls of one function that a worker makes one after the other."""

    name: str
    at: list[list[int]]
    """The completions of each call that is still to be made."""
    given: int = 0
    """To how many workers it was given that ended before they began."""


@dataclass(eq=False)
class _Worker:
    """A process, and what it has been given."""

    process: subprocess.Popen[bytes]
    connection: Connection
    begun: float
    part: _Part | None = None
    ready: bool = False
    begun_part: bool = False
    calls: int = 0
    memory: int = 0
    base: int | None = None

    def end(self) -> None:
        """Kills it, and the programs that it has started."""
        self.connection.close()
        with suppress(OSError):  # it has ended, and nothing is left of its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def place(self, now: _Round) -> str:
        """For which completion its call is, where it is for one."""
        if self.part is None or not now.calls[self.part.name].per_completion:
            return ""
        row, _, generation = now.calls[self.part.name].ids[self.part.at[0][0]].rpartition("_")
        return f" for row {row}, generation {generation},"

    def death(self) -> str:
        """How it ended."""
        self.connection.close()
        try:
            code = self.process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            return "its connection broke"
        if code >= 0:
            return f"exit status {code}"
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", as by a system that is out of memory" if name == "SIGKILL" else "")


@dataclass
class _Round:
    """One round of calls: what is to be done, and what has come of it."""

    calls: Mapping[str, Call]
    timeout_s: float | None
    stop: bool
    waiting: deque[_Part] = field(default_factory=deque)
    found: dict[str, Judged] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, at: Sequence[int], judged: Judged, seconds: float) -> None:
        """Keeps what a call gave. Raises: RewardError: something wrong, where that stops the round."""
        if judged.problem is not None and self.stop:
            raise RewardValueError(judged.problem)
        whole = self.found[name]
        whole.rewards[list(at)] = judged.rewards
        problem = whole.problem
        if judged.problem is not None and at[0] < self.first.get(name, len(whole.rewards)):
            problem, self.first[name] = judged.problem, at[0]
        self.found[name] = Judged(rewards=whole.rewards, wrong=whole.wrong + judged.wrong, problem=problem)
        self.seconds[name] += seconds


class RewardWorkers:
    """Processes that call reward functions.

    Args:
        functions: by name. count: of processes.
        calls, growth_bytes: after how many calls, and which growth since its first, a process is replaced.

    Example: RewardWorkers({"exact": Named(ref="whet.rewards.text:exact_match")}, 2).call({"exact": Call(words={
    "completions": ["4"], "answer": ["4"]}, ids=["0_0"])}, timeout_s=5.0) -> ({"exact": Judged(rewards=[1.0])},
    {"exact": 0.0001}).
    """

    def __init__(
        self, functions: Mapping[str, Named], count: int, *, calls: int = CALLS, growth_bytes: int = GROWTH_BYTES
    ) -> None:
        self.functions, self.count, self.most_calls, self.growth_bytes = dict(functions), count, calls, growth_bytes
        self._path, self._folder = [os.path.abspath(entry) for entry in sys.path], os.getcwd()  # noqa: PTH100, PTH109
        self._workers: list[_Worker] = []
        # where a thread ends, the system takes it for the end of the trainer: this one stays as long as the workers
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-workers")
        self._closed = weakref.finalize(self, _end_all, self._workers, os.getpid())

    def start(self) -> None:
        """Starts the processes, and waits until they have imported the functions.

        Raises: ConfigError: one can't be imported there.
        """
        self._fill(self.count)
        try:
            while starting := [worker for worker in self._workers if not worker.ready]:
                self._hear(starting, _Round(calls={}, timeout_s=None, stop=True))
        except RewardError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def close(self) -> None:
        """Ends the processes; a later call starts them again."""
        _end_all(self._workers, os.getpid())

    def call(
        self, calls: Mapping[str, Call], *, timeout_s: float | None, stop: bool = False
    ) -> tuple[dict[str, Judged], dict[str, float]]:
        """What the functions give.

        Args:
            calls: by function. timeout_s: of a call, after which its worker is killed; None = no limit.
            stop: at the first failure.

        Returns:
            By function, what it gave [N], with what failed as NaN; and the seconds that its calls took.

        Raises:
            RewardError: at a failure, if asked; or the functions can't be imported any more.
        """
        now = _Round(calls=calls, timeout_s=timeout_s, stop=stop)
        for name, one in calls.items():
            now.found[name] = Judged(rewards=np.full(len(one.ids), np.nan))
            now.seconds[name] = 0.0
            now.waiting.extend(self._parts(name, one))
        try:
            while now.waiting or any(worker.part for worker in self._workers):
                self._give(now)
                self._hear([worker for worker in self._workers if worker.part or not worker.ready], now)
        except BaseException:
            for worker in [worker for worker in self._workers if worker.part]:  # what it will say, nobody waits for
                self._drop(worker)
            raise
        return now.found, now.seconds

    # ---- pieces ------------------------------------------------------------------------------------------------------

    def _parts(self, name: str, call: Call) -> list[_Part]:
        count = len(call.ids)
        if not call.per_completion:
            return [_Part(name, [list(range(count))])]
        size = -(-count // (self.count * PARTS))
        return [_Part(name, [[i] for i in range(at, min(at + size, count))]) for at in range(0, count, size)]

    def _fill(self, wanted: int) -> None:
        """Starts workers until there are as many as wanted."""
        while len(self._workers) < min(wanted, self.count):
            self._workers.append(self._starter.submit(self._started).result())

    def _started(self) -> _Worker:
        own, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, json.dumps([theirs.fileno(), os.getpid(), self._path])],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=self._folder,
                env={"PYTHONHASHSEED": "0", **os.environ, **dict.fromkeys(ONE_THREAD, "1")},
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer, which finishes its step
            )
        worker = _Worker(process=process, connection=Connection(own.detach()), begun=time.monotonic())
        with suppress(OSError):  # it has ended already, which is seen when it is heard
            worker.connection.send_bytes(pickle.dumps(self.functions))
        return worker

    def _give(self, now: _Round) -> None:
        """Gives what waits to workers that are free."""
        for worker in [worker for worker in self._workers if not worker.part and worker.ready]:
            if (
                worker.connection.poll() or worker.process.poll() is not None
            ):  # it has ended: nobody has asked it anything
                self._drop(worker)
        busy = sum(worker.part is not None for worker in self._workers)
        self._fill(busy + len(now.waiting))
        for worker in self._workers:
            if now.waiting and worker.ready and not worker.part:
                self._send(worker, now.waiting.popleft(), now)

    def _send(self, worker: _Worker, part: _Part, now: _Round) -> None:
        call = now.calls[part.name]
        each = {word: [[call.words[word][i] for i in at] for at in part.at] for word in call.each}
        rest = {word: value for word, value in call.words.items() if word not in each}
        ids = [[call.ids[i] for i in at] for at in part.at]
        held = [{word: _pickled(part.name, word, value) for word, value in words.items()} for words in (each, rest)]
        worker.part, worker.begun_part, worker.begun = part, False, time.monotonic()
        _limit(worker.connection, now.timeout_s)
        try:
            worker.connection.send_bytes(pickle.dumps((part.name, ids, *held)))
        except BlockingIOError:
            self._late(worker, now)
        except OSError:  # it ended a moment ago
            self._dead(worker, now)

    def _hear(self, workers: Sequence[_Worker], now: _Round) -> None:
        """Takes the next answers of workers that are at work; kills those that are late."""
        heard = wait([worker.connection for worker in workers], self._patience(workers, now))
        for worker in workers:
            if worker.connection in heard:
                self._take(worker, now)
            elif worker.process.poll() is not None and not worker.connection.poll():
                self._dead(worker, now)
            elif _is_late(worker, now) and not worker.connection.poll():
                self._late(worker, now)

    def _patience(self, workers: Sequence[_Worker], now: _Round) -> float:
        ends = [worker.begun + limit for worker in workers if (limit := _limit_of(worker, now)) is not None]
        return max(0.0, min([LOOK_S, *(end - time.monotonic() for end in ends)]))

    def _take(self, worker: _Worker, now: _Round) -> None:
        try:
            answer = json.loads(worker.connection.recv_bytes())
            if "cannot" in answer:
                self._drop(worker)
                raise RewardError(answer["cannot"])
            worker.memory = answer["memory"]
            if worker.part is None:
                worker.ready = True
                return
            if "begun" in answer:
                worker.begun_part, worker.begun = True, time.monotonic()
                return
            at = worker.part.at[0]
            rewards = np.array(answer["rewards"], np.float64)
            judged = Judged(rewards=rewards.reshape(len(at)), wrong=answer["wrong"], problem=answer["problem"])
            seconds = answer["seconds"]
        except (OSError, EOFError, ValueError, KeyError, TypeError):  # a function may write to any descriptor
            self._dead(worker, now)
            return
        worker.part.at.pop(0)
        worker.calls, worker.begun = worker.calls + 1, time.monotonic()
        worker.base = worker.memory if worker.base is None else worker.base
        name = worker.part.name
        if not worker.part.at:
            worker.part = None
            if worker.calls >= self.most_calls or worker.memory - worker.base > self.growth_bytes:
                self._drop(worker)
        now.put(name, at, judged, seconds)

    def _late(self, worker: _Worker, now: _Round) -> None:
        limit = _limit_of(worker, now)
        self._drop(worker)
        if worker.part is None:
            raise RewardError(
                f"a worker of rewards has not imported the functions within {limit} s; see what they import"
            )
        self._lost(
            worker,
            worker.part,
            now,
            f"returned nothing{worker.place(now)} within {limit} s and was killed; give it a limit of its own, or "
            "raise trainer.reward_timeout_s",
        )

    def _dead(self, worker: _Worker, now: _Round) -> None:
        how = worker.death()
        self._drop(worker)
        if worker.part is None:
            raise RewardError(
                f"a worker of rewards ended as it imported the functions ({how}); import "
                f"{', '.join(one.ref for one in self.functions.values())} in a Python of its own to see why"
            )
        if not worker.begun_part and worker.part.given < TRIES:
            worker.part.given += 1
            now.waiting.appendleft(worker.part)
            return
        self._lost(worker, worker.part, now, f"ended its process{worker.place(now)} ({how}); see what it calls")

    def _lost(self, worker: _Worker, part: _Part, now: _Round, what: str) -> None:
        """Counts the call that was under way as failed; those after it are made by another worker."""
        spent = time.monotonic() - worker.begun
        at = part.at.pop(0)
        if part.at:
            now.waiting.appendleft(part)
        problem = f"reward function {part.name} {what}"
        if now.stop:
            problem += ". trainer.on_reward_error=none goes on without its reward"
        now.put(part.name, at, Judged.failed(problem, len(at)), spent)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def _limit_of(worker: _Worker, now: _Round) -> float | None:
    return now.timeout_s if worker.ready else START_S


def _is_late(worker: _Worker, now: _Round) -> bool:
    limit = _limit_of(worker, now)
    return limit is not None and time.monotonic() > worker.begun + limit


def _limit(connection: Connection, seconds: float | None) -> None:
    """How long sending may block: a stopped process reads nothing."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        whole, part = divmod(seconds or 0.0, 1.0)  # 0 = no limit
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))


def _pickled(name: str, word: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickling is the values' own business
        raise RewardError(
            f"reward function {name}: its argument {word!r} can't be sent to a worker process "
            f"({format_exception(error)}); leave it out of the function's arguments, or set trainer.reward_workers=0"
        ) from error


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer: they are not its own
        return
    while workers:
        workers.pop().end()
