"""Named time spans, summed per step and drawn on a timeline.

The file that `write` writes opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out on purpose: the kernels
inside a span, which observe/profiler.py shows.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from whet.errors import CheckpointError
from whet.storage.files import make_writable_folder, write_atomic

__all__ = ["Trace", "trace_folder"]

log = logging.getLogger("whet")


def trace_folder(options: Any, run_dir: str | Path | None) -> Path | None:
    """The folder for a run's trace.json.

    Args: options: PerfMetricsOptions, or None. run_dir: used if the options have no trace_dir.
    Returns: a folder that can be written; None = no timeline is wanted, or there is no folder for it.
    Raises: ConfigError: trace_dir can't be written.

    >>> trace_folder(None, "runs/a")
    """
    if options is None or not options.enable_trace_writer:
        return None
    if options.trace_dir:
        return make_writable_folder(options.trace_dir, "trainer.perf_metrics_options.trace_dir")
    return None if run_dir is None else Path(run_dir).absolute()


class Trace:
    """The time spans of one process.

    Args: keep: the number of latest spans kept for the timeline.

    >>> trace = Trace()
    >>> with trace.span("rollout", step=3):
    ...     with trace.span("prefill"):
    ...         pass
    >>> sorted(trace.pop_times()), trace.pop_times()
    (['time/prefill', 'time/rollout'], {})
    """

    def __init__(self, keep: int = 100_000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=keep)
        self._spent: dict[str, float] = {}
        self._open: list[str] = []
        self._rank = int(os.environ.get("RANK", "0"))
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        """Marks each span for a profiler while one runs."""
        self._failed = ""

    @contextmanager
    def span(self, name: str, **tags: Any) -> Iterator[None]:
        """Measures the time spent inside the context; spans nest.

        Args: name: of the phase. tags: shown with the span on the timeline.
        """
        outermost = name not in self._open
        self._open.append(name)
        start = time.perf_counter_ns()
        try:
            with nullcontext() if self.annotate is None else self.annotate(name):
                yield
        except BaseException:
            self._failed = self._failed or name
            raise
        finally:
            spent = time.perf_counter_ns() - start
            self._open.pop()
            if outermost:
                self._spent[name] = self._spent.get(name, 0.0) + spent / 1e9
            event = {"name": name, "ph": "X", "ts": start / 1e3, "dur": spent / 1e3, "pid": self._rank, "tid": 0}
            self._events.append({**event, "args": {k: str(v) for k, v in tags.items()}} if tags else event)

    @property
    def phase(self) -> str:
        """The innermost span that is open, or that an error has ended since the last `pop_times`; "" = none."""
        return self._failed or (self._open[-1] if self._open else "")

    def pop_times(self) -> dict[str, float]:
        """The seconds of each name since the last call; resets the sums.

        Returns: "time/<name>" -> seconds. A span inside another counts for both; inside a span of the same name it
            counts once.
        """
        spent, self._spent, self._failed = self._spent, {}, ""
        return {f"time/{name}": seconds for name, seconds in spent.items()}

    def write(self, path: str | Path) -> None:
        """Writes the timeline as Chrome trace JSON, whole or not at all. A failure is only logged.

        Args: path: the file; its folder is made if missing.
        """
        path, events = Path(path), sorted(self._events, key=lambda e: e["ts"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
        except (CheckpointError, OSError) as error:  # the timeline is not needed for training
            cause = error.__cause__ or error
            log.warning("could not write the timeline %s: %s; nothing else is affected", path, cause)
