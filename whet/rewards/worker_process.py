"""The program of a worker process: imports the reward functions, then calls them as it is told.

It starts without torch; what a function needs, it imports. Functions run on its main thread, one at a time. It ends
with the training process, however that ends. Answers are JSON, so that the trainer reads numbers and text, never an
object that a function has made. Left out on purpose: deadlines, since only from outside can a call be ended for sure.
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
from whet.rewards.checked_values import Judged, judged, raised
from whet.rewards.function_info import Named
from whet.util.streams import ignore_write_errors, open_descriptors

__all__ = ["main", "memory_bytes"]

PR_SET_PDEATHSIG = 1
LOOK_S = 1.0
"""How often a worker looks whether its trainer is there, where the system does not tell it."""


def main(number: int, trainer: int) -> None:
    """Serves until the trainer ends or closes the connection.

    Args: number: of the descriptor of the connection. trainer: the process that is served.
    """
    _end_with(trainer)
    _listen_to_nobody()
    open_descriptors()
    faulthandler.enable()
    connection = Connection(number)
    with ignore_write_errors("stdout", "stderr"):
        with suppress(EOFError, OSError):  # the trainer has gone, or wants no more
            _serve(connection)
        _flush()
        os._exit(0)  # threads and exit handlers of a function's own could keep it


def memory_bytes() -> int:
    """The memory that this process holds now; where the system does not say, the most that it held.

    >>> memory_bytes() > 2**20
    True
    """
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _serve(connection: Connection) -> None:
    functions = {}
    named: Mapping[str, Named] = pickle.loads(connection.recv_bytes())
    try:
        functions = {name: one.found() for name, one in named.items()}
    except WhetError as error:
        _send(connection, {"cannot": str(error)})
        return
    _send(connection, {"memory": memory_bytes()})
    me = os.getpid()
    while True:
        name, ids, each, constant = pickle.loads(connection.recv_bytes())
        _send(connection, {"begun": name, "memory": memory_bytes()})
        for answer in _answers(functions[name], name, ids, each, constant):
            _flush()
            if os.getpid() != me:  # a function has forked, and let the child return
                os._exit(0)
            _send(connection, answer)


def _answers(
    fn: Callable[..., Any],
    name: str,
    ids: Sequence[Sequence[str]],
    each: Mapping[str, bytes],
    words: Mapping[str, bytes],
) -> Any:
    """An answer for each call.

    Args: ids: the trajectories of each call. each: keyword -> a list for each call. words: those that all calls share.
    """
    what = f"reward function {name}"
    try:
        given = {word: _read(word, held) for word, held in each.items()}
        for word, held in words.items():
            _read(word, held)
    except Exception as error:  # unpickling is the values' own business
        for of_call in ids:
            yield _answer(Judged.failed(f"{what}: {error}", len(of_call)), 0.0)
        return
    for call, of_call in enumerate(ids):
        begun = time.perf_counter()
        try:
            shared = {word: pickle.loads(held) for word, held in words.items()}  # anew: no call sees another's changes
            value = fn(**{word: lists[call] for word, lists in given.items()}, **shared)
            if inspect.isawaitable(value):
                import asyncio

                value = asyncio.run(_awaited(value))
            found = judged(value, of_call, name=name)
        except BaseException as error:  # SystemExit too: no function ends its worker by raising
            found = Judged.failed(str(raised(what, error, __file__)), len(of_call))
        yield _answer(found, time.perf_counter() - begun)


async def _awaited(value: Any) -> Any:
    return await value


def _read(word: str, held: bytes) -> Any:
    try:
        return pickle.loads(held)
    except Exception as error:
        raise ValueError(
            f"its argument {word!r} can't be read in a worker process ({format_exception(error)}); its class has "
            "to be importable, or set trainer.reward_workers=0"
        ) from error


def _answer(found: Judged, seconds: float) -> dict[str, Any]:
    return {
        "rewards": found.rewards.tolist(),
        "wrong": found.wrong,
        "problem": found.problem,
        "seconds": seconds,
        "memory": memory_bytes(),
    }


def _send(connection: Connection, answer: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a function may have put anything in their place
            stream.flush()


def _end_with(trainer: int) -> None:
    """Has this process end when the trainer does, also where that is killed and a function never comes back."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(trainer,), daemon=True).start()
    if os.getppid() != trainer:
        os._exit(0)


def _watch(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


def _listen_to_nobody() -> None:
    """A signal that a scheduler or a terminal sends to all is the trainer's: it finishes its step, for which it needs
    the rewards. Programs and processes that a function starts hear signals as usual.
    """
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    for number in heard:
        signal.signal(number, lambda *_: None)  # a handler, since what is ignored is ignored by programs started here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)

    def usual() -> None:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=usual)
