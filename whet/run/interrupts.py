"""A signal ends a run between two steps, with a checkpoint; a second Ctrl-C ends it at once.

SIGINT is Ctrl-C, SIGTERM what a supervisor sends, SIGHUP a session that was closed, SIGUSR1 a scheduler's warning. Only
a person asks twice: shells and `timeout` send a SIGHUP or SIGTERM more than once and mean one.
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

_USUAL = (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGUSR1, signal.SIG_DFL),
)
"""What is listened to, and how Python handles it by default."""


class Stopped(KeyboardInterrupt):
    """A run that was asked to stop, and did so after a step.

    Args: step: the last one. checkpoint: its folder; None = the run writes none.

    >>> print(Stopped(3, Path("runs/a/checkpoints/step-000003")))
    stopped after step 3; checkpoint: runs/a/checkpoints/step-000003
    go on with the same program and resume="latest" in its training configuration
    """

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        if checkpoint is None:
            self.key, self.fix = "trainer.run_dir", "nothing is saved: trainer.run_dir is not set"
            self.what = f"stopped after step {step}; {self.fix}"
            super().__init__(self.what)
        else:
            self.key = "trainer.resume"
            self.fix = 'go on with the same program and resume="latest" in its training configuration'
            self.what = f"stopped after step {step}; checkpoint: {checkpoint}"
            super().__init__(f"{self.what}\n{self.fix}")


class SignalHandler:
    """Turns signals into a request to stop (`asked`), while it listens.

    Signals can be taken on the main thread alone, and only where no one else handles or ignores them (nohup ignores
    SIGHUP): elsewhere it does nothing. Processes that a reward function forks are meant to finish their part of the
    step: Ctrl-C and SIGHUP, which a terminal sends to all, are ignored there, SIGTERM ends them as usual.
    """

    def __init__(self) -> None:
        self.asked = False
        self.then = "stopping after this step, with a checkpoint"
        """What a signal leads to, as it is said."""
        self._pid = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Takes the signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        child = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (forked := child()) and forked())
        caught = _caught()
        for number, usual in _USUAL:
            foreign = usual == signal.SIG_DFL and caught >> (number - 1) & 1
            if signal.getsignal(number) == usual and not foreign:
                self._before[number] = usual
                signal.signal(number, self._take)

    def release(self) -> None:
        """Gives them back."""
        for number, usual in self._before.items():
            signal.signal(number, usual)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if os.getpid() != self._pid:
            if number == signal.SIGTERM or (number == signal.SIGINT and again) or not _alive(self._pid):
                signal.signal(number, self._before.get(number, signal.SIG_DFL))
                os.kill(os.getpid(), number)
        elif number == signal.SIGINT and again:
            self.release()
            raise KeyboardInterrupt
        elif not again:
            how = "Ctrl-C once more" if number == signal.SIGINT else "Ctrl-C (SIGINT)"
            with suppress(Exception):  # what was interrupted may be the writing of another line
                name = signal.Signals(number).name
                log.warning("%s: %s; %s stops at once", name, self.then, how)

    def _forked(self) -> None:
        """In a forked child SIGTERM ends it at once, also in the midst of a call that runs no Python."""
        if signal.SIGTERM in self._before:
            signal.signal(signal.SIGTERM, self._before.pop(signal.SIGTERM))


def _caught() -> int:
    """The signals that have a handler, one of C's included (faulthandler.register), as bits; 0 where that's unknown."""
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
