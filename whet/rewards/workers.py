"""Calls reward functions in worker processes, which can be killed: a call that hangs or crashes ends nothing else.

A call has the whole batch, as without workers, and functions run in parallel. A function that scores each completion
independently (per_completion) is called for each completion, by all processes. Rewards are stored by completion, so the
number and speed of the processes change no reward. The workers are no sandbox: they have the user's rights. They are
started as programs (worker_process.py), because a process with torch's threads can't be forked safely.
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
from whet.rewards.checked_values import CheckedRewards
from whet.rewards.function_info import FunctionRef

__all__ = ["RewardCall", "RewardWorkers"]

CALLS = 100_000
"""The number of calls after which a worker is replaced, to free memory that libraries keep."""
GROWTH_BYTES = 2**30
"""The growth in memory since its first call after which a worker is replaced."""
START_S = 600.0
"""The time limit for a worker to import the functions."""
POLL_S = 0.5
"""Seconds between two checks for an ended worker whose connection a child process holds open."""
PARTS = 4
"""The parts of a function's calls for each worker: few messages, yet an even load."""
TRIES = 2
"""How often calls are sent again if a worker ended before it began them."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CODE = (
    "import json, sys; number, trainer, sys.path[:] = json.loads(sys.argv[1]); "
    "from whet.rewards.worker_process import main; main(number, trainer)"
)


@dataclass(frozen=True, kw_only=True)
class RewardCall:
    """A function's arguments.

    Example: RewardCall(kwargs={"completions": ["4", "5"], "mode": "train"}, ids=["0_0", "0_1"], each=("completions",)).
    """

    kwargs: Mapping[str, Any]
    """The keyword arguments."""
    ids: Sequence[str]
    """[N] trajectory ids."""
    each: Sequence[str] = ()
    """Keywords with a list of one entry per completion."""
    per_completion: bool = False
    """Whether the function is called for each completion separately."""


@dataclass
class _Part:
    """Calls of one function that a worker makes one after the other."""

    name: str
    at: list[list[int]]
    """The completions of each pending call."""
    tries: int = 0
    """The number of workers that ended before they began these calls."""


@dataclass(eq=False)
class _Worker:
    """A process and its calls."""

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
        """Kills the process and the programs that it has started."""
        self.connection.close()
        with suppress(OSError):  # the process and its group have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def describe_completion(self, batch: _Batch) -> str:
        """Returns the completion of the current call, for messages; "" for a call of the whole batch."""
        if self.part is None or not batch.calls[self.part.name].per_completion:
            return ""
        row, _, generation = batch.calls[self.part.name].ids[self.part.at[0][0]].rpartition("_")
        return f" for row {row}, generation {generation},"

    def describe_end(self) -> str:
        """Returns how the process ended, for messages."""
        self.connection.close()
        try:
            code = self.process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return "its connection broke"
        if code >= 0:
            return f"exit status {code}"
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", as by a system that is out of memory" if name == "SIGKILL" else "")


@dataclass
class _Batch:
    """The calls for a batch: pending parts and results."""

    calls: Mapping[str, RewardCall]
    timeout_s: float | None
    stop: bool
    waiting: deque[_Part] = field(default_factory=deque)
    results: dict[str, CheckedRewards] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_problem: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, at: Sequence[int], checked: CheckedRewards, seconds: float) -> None:
        """Adds the result of a call. Raises: RewardError: invalid rewards, if `stop` is set."""
        if checked.problem is not None and self.stop:
            raise RewardValueError(checked.problem)
        total = self.results[name]
        total.rewards[list(at)] = checked.rewards
        problem = total.problem
        if checked.problem is not None and at[0] < self.first_problem.get(name, len(total.rewards)):
            problem, self.first_problem[name] = checked.problem, at[0]
        self.results[name] = CheckedRewards(rewards=total.rewards, wrong=total.wrong + checked.wrong, problem=problem)
        self.seconds[name] += seconds


class RewardWorkers:
    """Processes that call reward functions.

    Args:
        functions: the functions by name.
        count: the number of processes.
        calls, growth_bytes: a process is replaced after so many calls, or this growth in memory since its first call.

    Example: RewardWorkers({"exact": FunctionRef(ref="whet.rewards.text:exact_match")}, 2).call({"exact":
    RewardCall(kwargs={"completions": ["4"], "answer": ["4"]}, ids=["0_0"])}, timeout_s=5.0) -> ({"exact":
    CheckedRewards(rewards=[1.0])}, {"exact": 0.0001}).
    """

    def __init__(
        self, functions: Mapping[str, FunctionRef], count: int, *, calls: int = CALLS, growth_bytes: int = GROWTH_BYTES
    ) -> None:
        self.functions, self.count, self.most_calls, self.growth_bytes = dict(functions), count, calls, growth_bytes
        self._path, self._folder = [os.path.abspath(entry) for entry in sys.path], os.getcwd()  # noqa: PTH100, PTH109
        self._workers: list[_Worker] = []
        # the parent-death signal comes when the starting thread ends, so this thread lives as long as the workers
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-workers")
        self._closed = weakref.finalize(self, _end_all, self._workers, os.getpid())

    def start(self) -> None:
        """Starts the processes, and waits until they have imported the functions.

        Raises: ConfigError: a function that can't be imported.
        """
        self._start_workers(self.count)
        try:
            while starting := [worker for worker in self._workers if not worker.ready]:
                self._receive(starting, _Batch(calls={}, timeout_s=None, stop=True))
        except RewardError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def close(self) -> None:
        """Ends the processes; a later call starts them again."""
        _end_all(self._workers, os.getpid())

    def call(
        self, calls: Mapping[str, RewardCall], *, timeout_s: float | None, stop: bool = False
    ) -> tuple[dict[str, CheckedRewards], dict[str, float]]:
        """Calls the functions.

        Args:
            calls: the arguments by function.
            timeout_s: the time limit of a call, after which its worker is killed; None = no limit.
            stop: whether to raise at the first failure.

        Returns:
            Each function's rewards [N], where failures are NaN; and the seconds of its calls.

        Raises:
            RewardError: a failure, if `stop` is set; or a worker can't import the functions any more.
        """
        batch = _Batch(calls=calls, timeout_s=timeout_s, stop=stop)
        for name, call in calls.items():
            batch.results[name] = CheckedRewards(rewards=np.full(len(call.ids), np.nan))
            batch.seconds[name] = 0.0
            batch.waiting.extend(self._parts(name, call))
        try:
            while batch.waiting or any(worker.part for worker in self._workers):
                self._assign(batch)
                self._receive([worker for worker in self._workers if worker.part or not worker.ready], batch)
        except BaseException:
            for worker in [worker for worker in self._workers if worker.part]:  # nobody waits for their results
                self._drop(worker)
            raise
        return batch.results, batch.seconds

    # ---- workers and messages ----------------------------------------------------------------------------------------

    def _parts(self, name: str, call: RewardCall) -> list[_Part]:
        count = len(call.ids)
        if not call.per_completion:
            return [_Part(name, [list(range(count))])]
        size = -(-count // (self.count * PARTS))
        return [_Part(name, [[i] for i in range(at, min(at + size, count))]) for at in range(0, count, size)]

    def _start_workers(self, wanted: int) -> None:
        """Starts workers until there are as many as wanted."""
        while len(self._workers) < min(wanted, self.count):
            self._workers.append(self._starter.submit(self._start_worker).result())

    def _start_worker(self) -> _Worker:
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
        with suppress(OSError):  # it has ended already, which _receive will find
            worker.connection.send_bytes(pickle.dumps(self.functions))
        return worker

    def _assign(self, batch: _Batch) -> None:
        """Sends pending parts to idle workers."""
        for worker in [worker for worker in self._workers if not worker.part and worker.ready]:
            if worker.connection.poll() or worker.process.poll() is not None:  # an idle worker sends only when it ends
                self._drop(worker)
        busy = sum(worker.part is not None for worker in self._workers)
        self._start_workers(busy + len(batch.waiting))
        for worker in self._workers:
            if batch.waiting and worker.ready and not worker.part:
                self._send(worker, batch.waiting.popleft(), batch)

    def _send(self, worker: _Worker, part: _Part, batch: _Batch) -> None:
        call = batch.calls[part.name]
        each = {word: [[call.kwargs[word][i] for i in at] for at in part.at] for word in call.each}
        rest = {word: value for word, value in call.kwargs.items() if word not in each}
        ids = [[call.ids[i] for i in at] for at in part.at]
        pickled = [{word: _pickle(part.name, word, value) for word, value in kwargs.items()} for kwargs in (each, rest)]
        worker.part, worker.begun_part, worker.begun = part, False, time.monotonic()
        _set_send_timeout(worker.connection, batch.timeout_s)
        try:
            worker.connection.send_bytes(pickle.dumps((part.name, ids, *pickled)))
        except BlockingIOError:
            self._handle_timeout(worker, batch)
        except OSError:  # it has just ended
            self._handle_end(worker, batch)

    def _receive(self, workers: Sequence[_Worker], batch: _Batch) -> None:
        """Receives the next answers of busy workers, and kills those over the time limit."""
        ends = [worker.begun + limit for worker in workers if (limit := _time_limit(worker, batch)) is not None]
        timeout = max(0.0, min([POLL_S, *(end - time.monotonic() for end in ends)]))
        readable = wait([worker.connection for worker in workers], timeout)
        for worker in workers:
            if worker.connection in readable:
                self._read_answer(worker, batch)
            elif worker.process.poll() is not None and not worker.connection.poll():
                self._handle_end(worker, batch)
            elif _is_late(worker, batch) and not worker.connection.poll():
                self._handle_timeout(worker, batch)

    def _read_answer(self, worker: _Worker, batch: _Batch) -> None:
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
            checked = CheckedRewards(rewards=rewards.reshape(len(at)), wrong=answer["wrong"], problem=answer["problem"])
            seconds = answer["seconds"]
        except (OSError, EOFError, ValueError, KeyError, TypeError):  # a function may write to any descriptor
            self._handle_end(worker, batch)
            return
        worker.part.at.pop(0)
        worker.calls, worker.begun = worker.calls + 1, time.monotonic()
        worker.base = worker.memory if worker.base is None else worker.base
        name = worker.part.name
        if not worker.part.at:
            worker.part = None
            if worker.calls >= self.most_calls or worker.memory - worker.base > self.growth_bytes:
                self._drop(worker)
        batch.add(name, at, checked, seconds)

    def _handle_timeout(self, worker: _Worker, batch: _Batch) -> None:
        limit = _time_limit(worker, batch)
        self._drop(worker)
        if worker.part is None:
            raise RewardError(
                f"a reward worker has not imported the functions within {limit} s; see what their modules import"
            )
        self._fail_call(
            worker,
            worker.part,
            batch,
            f"returned nothing{worker.describe_completion(batch)} within {limit} s and was killed; give it a limit of "
            "its own, or raise trainer.reward_timeout_s",
        )

    def _handle_end(self, worker: _Worker, batch: _Batch) -> None:
        end = worker.describe_end()
        self._drop(worker)
        if worker.part is None:
            raise RewardError(
                f"a reward worker ended while it imported the functions ({end}); import "
                f"{', '.join(ref.ref for ref in self.functions.values())} in a new Python process to see why"
            )
        if not worker.begun_part and worker.part.tries < TRIES:
            worker.part.tries += 1
            batch.waiting.appendleft(worker.part)
            return
        where = worker.describe_completion(batch)
        self._fail_call(worker, worker.part, batch, f"ended its process{where} ({end}); see what it calls")

    def _fail_call(self, worker: _Worker, part: _Part, batch: _Batch, what: str) -> None:
        """Records the current call as failed; another worker makes the part's other calls."""
        spent = time.monotonic() - worker.begun
        at = part.at.pop(0)
        if part.at:
            batch.waiting.appendleft(part)
        problem = f"reward function {part.name} {what}"
        if batch.stop:
            problem += ". trainer.on_reward_error=none goes on without its reward"
        batch.add(part.name, at, CheckedRewards.failed(problem, len(at)), spent)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def _time_limit(worker: _Worker, batch: _Batch) -> float | None:
    return batch.timeout_s if worker.ready else START_S


def _is_late(worker: _Worker, batch: _Batch) -> bool:
    limit = _time_limit(worker, batch)
    return limit is not None and time.monotonic() > worker.begun + limit


def _set_send_timeout(connection: Connection, seconds: float | None) -> None:
    """Limits how long sending may block: a stopped process does not read."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        full, fraction = divmod(seconds or 0.0, 1.0)  # 0 = no limit
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(full), int(fraction * 1e6)))


def _pickle(name: str, word: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickling may raise anything
        raise RewardError(
            f"reward function {name}: its argument {word!r} can't be sent to a worker process "
            f"({format_exception(error)}); leave it out of the function's arguments, or set trainer.reward_workers=0"
        ) from error


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the trainer, which does not own the workers
        return
    while workers:
        workers.pop().end()
