"""Calls a user's plain function with a deadline.

On the main thread, the function runs there, so that code that needs the main thread works: alarms (math-verify's time
limits), other signals, connections that belong to a thread. A timer thread interrupts the call by a signal. Only the
main thread can handle signals: on any other thread, the call runs in a new thread, which is abandoned at the deadline.
Code that runs no Python, or holds Python's lock for ever, can't be interrupted; only a worker process can be killed
(workers.py).
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
from whet.rewards.checked_values import error_from_exception

__all__ = ["call_with_deadline", "timeout_error", "with_caller_context"]

LOG = logging.getLogger("whet")
INTERRUPT_SIGNAL = signal.SIGURG
"""The signal that interrupts a call. It is ignored by default, so a late signal does no harm."""
INTERRUPT_INTERVAL_S = 0.1
"""Seconds between two interrupts: the function's own `except:` may catch the first."""
STUCK_S = 5.0
"""Seconds after the deadline until an error is logged that nothing interrupts the call."""
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all its programs. Programs that a function starts must not end by them."""


def call_with_deadline(call: Callable[[], Any], what: str, timeout_s: float | None) -> Any:
    """Calls a user's plain function. Returns: its value, or the RewardError of its failure.

    Gradient mode, CUDA device, context variables and a running event loop are restored afterwards.

    Args: call: takes no arguments. what: the function, for messages. timeout_s: None = no deadline, on the caller's
        thread.

    >>> str(call_with_deadline(lambda: 1 / 0, "reward function f", None))[:40]
    'reward function f raised ZeroDivisionErr'
    """
    on_main = threading.current_thread() is threading.main_thread()
    if timeout_s is not None and not on_main:
        return _call_in_thread(call, what, timeout_s)
    results: list[Any] = []
    timer = None if timeout_s is None else _Timer(what, timeout_s)
    try:
        try:
            results.append(_call_and_restore(call))
        except (KeyboardInterrupt, _Timeout):  # on this thread an interrupt is the user's
            raise
        except BaseException as error:
            results.append(error_from_exception(what, error, __file__))
        finally:
            if timer is not None:
                timer.over = True
    except _Timeout:
        pass
    finally:
        if timer is not None:
            timer.close()
    if timer is None or not timer.expired:
        return results[0]
    return timeout_error(what, timeout_s, "was interrupted")


def timeout_error(what: str, timeout_s: float | None, end: str) -> RewardError:
    """Returns the error for a function that timed out. Args: what, timeout_s: see call_with_deadline. end: how it
    ended.
    """
    fix = "or raise trainer.reward_timeout_s"
    if what.startswith("reward function"):  # an environment's interact never runs in a worker process
        fix = "raise trainer.reward_timeout_s (async ones must never block), or set trainer.reward_workers=1, which "
        fix += "can kill it"
    return RewardError(f"{what} returned nothing within {timeout_s} s and {end}. Give it a limit of its own, {fix}")


def with_caller_context(run: Callable[[], None]) -> Callable[[], None]:
    """Wraps a function for another thread. There it has this thread's context variables, gradient mode, CUDA device.

    SIGINT and SIGHUP are blocked in the thread and in the programs that it starts: a terminal sends them to all
    programs, and an interrupted program's result is not a reward. The main thread receives them.
    """
    context, grad = contextvars.copy_context(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_in_context() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(grad):
            context.run(run)

    return run_in_context


def _call_in_thread(call: Callable[[], Any], what: str, timeout_s: float) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error_from_exception(what, error, __file__))

    thread = threading.Thread(target=with_caller_context(run), name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else timeout_error(what, timeout_s, "continues in a thread that can't be ended")


def _call_and_restore(call: Callable[[], Any]) -> Any:
    """Calls a function, then restores the thread's state."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if loop is not None and task is not None:
        asyncio.tasks._leave_task(loop, task)  # since Python 3.14 a thread has one current task, whatever its loop
    asyncio._set_running_loop(None)  # a notebook's running loop would forbid asyncio.run
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return contextvars.copy_context().run(call)
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None and task is not None:
            asyncio.tasks._enter_task(loop, task)
        if device is not None:
            torch.cuda.set_device(device)


class _Timeout(BaseException):
    """Interrupts a call."""


class _Timer:
    """Interrupts the main thread repeatedly after a deadline, and sets `expired`.

    Meanwhile Ctrl-C and SIGHUP are blocked on the main thread and in the programs that it starts. The timer's thread
    receives them, and wakes the main thread, where Python handles them.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self.what, self.end = what, time.monotonic() + timeout_s
        self.over = self.expired = False
        """Whether the call has ended, and whether it was interrupted."""
        self._unheard = False
        """Whether the main thread has still to run its handlers of a received signal."""
        self._main = threading.get_ident()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handler = signal.signal(INTERRUPT_SIGNAL, self._interrupt)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        self._thread = threading.Thread(target=self._run, name=f"deadline of {what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restores the main thread's signals after the call has ended."""
        with suppress(BlockingIOError):  # if the buffer is full, the thread is awake
            self._sender.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(INTERRUPT_SIGNAL, self._handler or signal.SIG_DFL)
        self._receiver.close()
        self._sender.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # last: a pending Ctrl-C is raised here

    def _interrupt(self, *_: object) -> None:
        self._unheard = False
        if not self.over and time.monotonic() >= self.end:
            self.expired = True
            raise _Timeout

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)
        stuck = self.end + STUCK_S
        while not self.over:
            rest = self.end - time.monotonic()
            again = self._unheard or rest <= 0  # a signal just before a wait in the kernel doesn't end that wait
            self._receiver.settimeout(INTERRUPT_INTERVAL_S if again else rest)
            received: bytes | None = None
            with suppress(TimeoutError):
                received = self._receiver.recv(512)
            if not self.over and (received is None or {*received} & {*TERMINAL_SIGNALS}):
                self._unheard = True
                signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
            if not self.over and time.monotonic() > stuck:
                stuck = float("inf")
                LOG.error(
                    "%s is late, and nothing interrupts it: it runs no Python, or catches every exception; end the "
                    "run (kill %d), and set trainer.reward_workers=1, which can kill such a call",
                    self.what,
                    os.getpid(),
                )
