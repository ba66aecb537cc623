"""Signals: one ends a run after the current step, with a checkpoint; a second Ctrl-C ends it at once.

SIGINT is Ctrl-C, SIGTERM comes from a supervisor, SIGHUP from a closed session, SIGUSR1 from a scheduler. Only a second
SIGINT counts: shells and `timeout` may send the same SIGHUP or SIGTERM more than once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SignalHandler", "Stopped"]

log = logging.getLogger("whet")

_SIGNALS = (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGUSR1, signal.SIG_DFL),
)
"""The handled signals, each with Python's default handler."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the run after a step.

    Args: step: the last finished step. checkpoint: the folder of its checkpoint; None = the run writes none.

    >>> print(Stopped(3, Path("runs/a/checkpoints/step-000003")))
    stopped after step 3; checkpoint: runs/a/checkpoints/step-000003
    to continue, run the same program with resume="latest" in its training configuration
    """

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint if step else None
        if step == 0:
            self.key = self.fix = ""
            self.message = "stopped before the end of the first step; nothing was trained"
            super().__init__(self.message)
        elif checkpoint is None:
            self.key, self.fix = "trainer.run_dir", "nothing is saved: trainer.run_dir is not set"
            self.message = f"stopped after step {step}; {self.fix}"
            super().__init__(self.message)
        else:
            self.key = "trainer.resume"
            self.fix = 'to continue, run the same program with resume="latest" in its training configuration'
            self.message = f"stopped after step {step}; checkpoint: {checkpoint}"
            super().__init__(f"{self.message}\n{self.fix}")


class SignalHandler:
    """Turns signals into a request to stop (`stop_requested`), while it is installed.

    It handles signals on the main thread only, and only those that nobody else handles or ignores (nohup ignores
    SIGHUP). Processes that a reward function forks should finish their part of the step: they ignore Ctrl-C and SIGHUP,
    which a terminal sends to all processes; SIGTERM ends them as usual.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self.effect = "stopping after this step, with a checkpoint"
        """What a signal leads to, for the log."""
        self.at_once = False
        """A signal raises Stopped where it arrives: no step has begun, so nothing is lost."""
        self._pid = 0
        self._previous: dict[int, Any] = {}
        self._forking = threading.local()
        """`mask`: the signal mask of a thread that is about to fork."""

    def install(self) -> None:
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        weak = weakref.ref(self)
        os.register_at_fork(
            before=lambda: (handler := weak()) and handler._before_fork(),
            after_in_parent=lambda: (handler := weak()) and handler._after_fork(in_child=False),
            after_in_child=lambda: (handler := weak()) and handler._after_fork(in_child=True),
        )
        caught = _caught_signals()
        for number, default in _SIGNALS:
            has_c_handler = default == signal.SIG_DFL and caught >> (number - 1) & 1
            if signal.getsignal(number) == default and not has_c_handler:
                self._previous[number] = default
                signal.signal(number, self._handle)

    def uninstall(self, *, keep_sigterm: bool = False) -> None:
        """Restores the previous handlers. Args: keep_sigterm: SIGTERM has no effect from now on."""
        for number, handler in self._previous.items():
            signal.signal(number, (lambda *_: None) if keep_sigterm and number == signal.SIGTERM else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.stop_requested = self.stop_requested, True
        if os.getpid() != self._pid:
            if number == signal.SIGTERM or (number == signal.SIGINT and again) or not _alive(self._pid):
                signal.signal(number, self._previous.get(number, signal.SIG_DFL))
                os.kill(os.getpid(), number)
        elif self.at_once or (number == signal.SIGINT and again):
            self.uninstall()
            raise Stopped(0, None) if self.at_once else KeyboardInterrupt
        elif not again:
            how = "Ctrl-C once more" if number == signal.SIGINT else "Ctrl-C (SIGINT)"
            with suppress(Exception):  # the signal may have interrupted the writing of another log line
                log.warning("%s: %s; %s stops at once", signal.Signals(number).name, self.effect, how)

    def _before_fork(self) -> None:
        """Holds SIGTERM back on the thread that forks: Python drops what a child receives before its first line."""
        if signal.SIGTERM in self._previous and "mask" not in self._forking.__dict__:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self, in_child: bool) -> None:
        """Lets SIGTERM end a forked child at once, also during a call that runs no Python."""
        if in_child and signal.SIGTERM in self._previous:
            signal.signal(signal.SIGTERM, self._previous.pop(signal.SIGTERM))
        mask = self._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _caught_signals() -> int:
    """Returns the signals that have a handler, also one in C (faulthandler.register), as bits; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
