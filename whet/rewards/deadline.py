"""A plain function of the user's, called with a deadline.

It is called on the caller's thread where that is the main one, so that what needs a main thread works as it is written:
alarms (math-verify's time limits), other signals, connections that belong to the thread that made them. A thread beside
it watches the clock and interrupts the call by a signal. No other thread can handle signals: there the call gets a
thread of its own, which is left behind where it is late. Left out on purpose: ending what runs no Python and hears no
signal, or holds Python's lock for ever; only a process of its own can be ended then (workers.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from whet.errors import RewardError
from whet.rewards.checked_values import raised

__all__ = ["call_in_time", "late", "like_here"]

LOG = logging.getLogger("whet")
NUDGE = signal.SIGURG
"""Interrupts a call: by default it is ignored, so that one that comes too late does nothing."""
NUDGE_S = 0.1
"""How often a call that is late is interrupted, since its own `except:` may catch the first."""
STUCK_S = 5.0
"""How long after its deadline it is said of a call that nothing interrupts it."""
PERSONS = (signal.SIGINT, signal.SIGHUP)
"""What a terminal sends to all programs: those that a function starts are to finish, since the step needs them."""


def call_in_time(call: Callable[[], Any], what: str, timeout_s: float | None) -> Any:
    """What a plain function of the user's returned, or the RewardError that stands for its failure.

    Gradient mode, CUDA device, context variables and a running event loop are afterwards as they were.

    Args: call: without arguments. what: it is, for messages. timeout_s: None = no deadline, on the caller's thread.

    >>> str(call_in_time(lambda: 1 / 0, "reward function f", None))[:40]
    'reward function f raised ZeroDivisionErr'
    """
    on_main = threading.current_thread() is threading.main_thread()
    if timeout_s is not None and not on_main:
        return _in_a_thread(call, what, timeout_s)
    box: list[Any] = []
    watch = None if timeout_s is None else _Watch(what, timeout_s)
    try:
        try:
            box.append(_as_before(call))
        except (KeyboardInterrupt, _Late):  # on this thread an interrupt is the user's
            raise
        except BaseException as error:
            box.append(raised(what, error, __file__))
        finally:
            if watch is not None:
                watch.over = True
    except _Late:
        pass
    finally:
        if watch is not None:
            watch.close()
    if watch is None or not watch.late:
        return box[0]
    return late(what, timeout_s, "was interrupted")


def late(what: str, timeout_s: float | None, end: str) -> RewardError:
    """The error for a function that is late. Args: what, timeout_s: see call_in_time. end: what became of it."""
    ways = "or raise trainer.reward_timeout_s"
    if what.startswith("reward function"):  # an environment's interact runs in no worker process
        ways = "raise trainer.reward_timeout_s (async ones must never block), or set trainer.reward_workers=1, which "
        ways += "can kill it"
    return RewardError(f"{what} returned nothing within {timeout_s} s and {end}. Give it a limit of its own, {ways}")


def like_here(run: Callable[[], None]) -> Callable[[], None]:
    """The same to be run in another thread, with this thread's context variables, gradient mode and CUDA device.

    SIGINT and SIGHUP are blocked there, and so in the programs that it starts: a terminal sends them to all, and the
    result of an interrupted program is no reward. This process hears them on its main thread.
    """
    context, grad = contextvars.copy_context(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def there() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PERSONS)
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(grad):
            context.run(run)

    return there


def _in_a_thread(call: Callable[[], Any], what: str, timeout_s: float) -> Any:
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:
            box.append(raised(what, error, __file__))

    thread = threading.Thread(target=like_here(run), name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return box[0] if box else late(what, timeout_s, "continues in a thread that can't be ended")


def _as_before(call: Callable[[], Any]) -> Any:
    """What a call gives, after which the thread is as it was before."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)  # a notebook's, which would forbid asyncio.run
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return contextvars.copy_context().run(call)
    finally:
        asyncio._set_running_loop(loop)
        if device is not None:
            torch.cuda.set_device(device)


class _Late(BaseException):
    """Interrupts a call."""


class _Watch:
    """Interrupts the main thread, again and again, once a time is over; `late` says that it did.

    Ctrl-C and SIGHUP are blocked on the main thread meanwhile, and so in the programs that are started from there. The
    watching thread hears them, and wakes the main one, on which Python handles them.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self.what, self.end = what, time.monotonic() + timeout_s
        self.over = self.late = False
        """Whether the call has ended, and whether it was interrupted."""
        self._main = threading.get_ident()
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._handler = signal.signal(NUDGE, self._nudged)
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, PERSONS)
        self._thread = threading.Thread(target=self._run, name=f"the clock of {what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leaves the main thread's signals as they were. The call has ended."""
        with suppress(BlockingIOError):  # full: the thread is awake
            self._mouth.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(NUDGE, self._handler or signal.SIG_DFL)
        self._ear.close()
        self._mouth.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # last: a Ctrl-C that waited is raised here

    def _nudged(self, *_: object) -> None:
        if not self.over and time.monotonic() >= self.end:
            self.late = True
            raise _Late

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PERSONS)
        stuck = self.end + STUCK_S
        while not self.over:
            left = self.end - time.monotonic()
            self._ear.settimeout(left if left > 0 else NUDGE_S)
            heard: bytes | None = None
            with suppress(TimeoutError):
                heard = self._ear.recv(512)
            if not self.over and (heard is None or {*heard} & {*PERSONS}):
                signal.pthread_kill(self._main, NUDGE)
            if not self.over and time.monotonic() > stuck:
                stuck = float("inf")
                LOG.error(
                    "%s is late, and nothing interrupts it: it runs no Python, or catches every exception; end the "
                    "run (kill %d), and set trainer.reward_workers=1, which can kill such a call",
                    self.what,
                    os.getpid(),
                )
