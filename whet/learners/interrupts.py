"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

log = logging.getLogger("whet")


class Interrupts:
    """Turns the first SIGINT or SIGTERM into a wish (`asked`), while it listens.

    Signals can be taken on the main thread alone, and only where nobody else handles them: elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Takes both signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is usual or signal.getsignal(number) == usual:
                self._before[number] = usual
                signal.signal(number, self._take)

    def release(self) -> None:
        """Gives them back."""
        for number, usual in self._before.items():
            signal.signal(number, usual)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.release()
            raise KeyboardInterrupt
        self.asked = True
        log.warning("stopping after this step, with a checkpoint; once more stops at once")
