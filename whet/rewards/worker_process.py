"""The program of a worker process: it imports the reward functions, then calls them on request.

It starts without torch; a function imports what it needs. Functions run on the main thread, one at a time. The process
ends when the training process ends, in any way. Results are JSON, so the trainer reads numbers and text and never
unpickles a function's objects. The trainer enforces deadlines, because only another process can end any call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whet.errors import WhetError, format_exception
from whet.rewards.checked_values import CheckedRewards, check_values, error_from_exception
from whet.rewards.function_info import FunctionRef
from whet.util.streams import ignore_write_errors, open_descriptors

__all__ = ["main", "memory_bytes"]

PR_SET_PDEATHSIG = 1
POLL_S = 1.0
"""Seconds between two checks that the trainer is alive, on systems without a parent-death signal."""


def main(number: int, trainer: int) -> None:
    """Serves until the trainer ends or closes the connection.

    Args: number: the connection's file descriptor. trainer: the trainer's process id.
    """
    _end_with_trainer(trainer)
    _ignore_signals()
    open_descriptors()
    faulthandler.enable()
    connection = Connection(number)
    with ignore_write_errors("stdout", "stderr"):
        with suppress(EOFError, OSError):  # the trainer has ended or closed the connection
            _serve(connection)
        _flush()
        os._exit(0)  # a function's threads and exit handlers could keep the process alive


def memory_bytes() -> int:
    """Returns the memory of this process; on systems without /proc, its peak.

    >>> memory_bytes() > 2**20
    True
    """
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _serve(connection: Connection) -> None:
    functions = {}
    refs: Mapping[str, FunctionRef] = pickle.loads(connection.recv_bytes())
    try:
        functions = {name: ref.load() for name, ref in refs.items()}
    except WhetError as error:
        _send(connection, {"cannot": str(error)})
        return
    _send(connection, {"memory": memory_bytes()})
    process_id = os.getpid()
    while True:
        name, ids, each, constant = pickle.loads(connection.recv_bytes())
        _send(connection, {"begun": name, "memory": memory_bytes()})
        for answer in _answers(functions[name], name, ids, each, constant):
            _flush()
            if os.getpid() != process_id:  # a function has forked, and the child has returned
                os._exit(0)
            _send(connection, answer)


def _answers(
    fn: Callable[..., Any],
    name: str,
    ids: Sequence[Sequence[str]],
    each: Mapping[str, bytes],
    kwargs: Mapping[str, bytes],
) -> Any:
    """Yields the answer of each call.

    Args: ids: the trajectories of each call. each: keyword -> the pickled lists of all calls. kwargs: keyword -> the
        pickled value that all calls share.
    """
    what = f"reward function {name}"
    try:
        lists = {word: _unpickle(word, data) for word, data in each.items()}
        for word, data in kwargs.items():
            _unpickle(word, data)
    except Exception as error:  # unpickling may raise anything
        for call_ids in ids:
            yield _answer(CheckedRewards.failed(f"{what}: {error}", len(call_ids)), 0.0)
        return
    for call, call_ids in enumerate(ids):
        begun = time.perf_counter()
        try:
            shared = {word: pickle.loads(data) for word, data in kwargs.items()}  # for each call, which may change them
            value = fn(**{word: values[call] for word, values in lists.items()}, **shared)
            if inspect.isawaitable(value):
                import asyncio

                value = asyncio.run(_await(value))
            rewards = check_values(value, call_ids, name=name)
        except BaseException as error:  # SystemExit too: a function can't end its worker by raising
            rewards = CheckedRewards.failed(str(error_from_exception(what, error, __file__)), len(call_ids))
        yield _answer(rewards, time.perf_counter() - begun)


async def _await(value: Any) -> Any:
    return await value


def _unpickle(word: str, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ValueError(
            f"its argument {word!r} can't be read in a worker process ({format_exception(error)}); its class has "
            "to be importable, or set trainer.reward_workers=0"
        ) from error


def _answer(checked: CheckedRewards, seconds: float) -> dict[str, Any]:
    return {
        "rewards": checked.rewards.tolist(),
        "wrong": checked.wrong,
        "problem": checked.problem,
        "seconds": seconds,
        "memory": memory_bytes(),
    }


def _send(connection: Connection, answer: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a function may have replaced the streams
            stream.flush()


def _end_with_trainer(trainer: int) -> None:
    """Ends this process when the trainer ends, even if the trainer is killed or a function hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_trainer, args=(trainer,), daemon=True).start()
    if os.getppid() != trainer:
        os._exit(0)


def _watch_trainer(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)


def _ignore_signals() -> None:
    """Ignores signals that a scheduler or a terminal sends to all processes: the trainer handles them.

    The trainer finishes its step first and needs the rewards. Processes that a function starts handle signals as usual.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    for number in signals:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which started programs would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def restore_defaults() -> None:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore_defaults)
