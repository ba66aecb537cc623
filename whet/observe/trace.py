"""Where the time of a step went: named spans, summed per step and drawn on a timeline.

The file that `write` makes opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out on purpose: the kernels
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
    """The folder of a run's trace.json.

    Args: options: PerfMetricsOptions, or None. run_dir: where it goes unless trace_dir says otherwise.
    Returns: a folder that can be written; None = no timeline is asked for, or there is no place for it.
    Raises: ConfigError: trace_dir can't be written.

    >>> trace_folder(None, "runs/a")
    """
    if options is None or not options.enable_trace_writer:
        return None
    if options.trace_dir:
        return make_writable_folder(options.trace_dir, "trainer.perf_metrics_options.trace_dir")
    return None if run_dir is None else Path(run_dir).absolute()


class Trace:
    """Spans of one process.

    Args: keep: latest spans kept for the timeline.

    >>> trace = Trace()
    >>> with trace.span("rollout", step=3):
    ...     with trace.span("prefill"):
    ...         pass
    >>> sorted(trace.times()), trace.times()
    (['time/prefill', 'time/rollout'], {})
    """

    def __init__(self, keep: int = 100_000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=keep)
        self._spent: dict[str, float] = {}
        self._open: list[str] = []
        self._rank = int(os.environ.get("RANK", "0"))
        self.mark: Callable[[str], AbstractContextManager[Any]] | None = None
        """What each span is shown to while a profiler runs."""

    @contextmanager
    def span(self, name: str, **tags: Any) -> Iterator[None]:
        """Times what runs inside; spans nest.

        Args: name: a phase. tags: shown with the span on the timeline.
        """
        outermost = name not in self._open
        self._open.append(name)
        start = time.perf_counter_ns()
        try:
            with nullcontext() if self.mark is None else self.mark(name):
                yield
        finally:
            spent = time.perf_counter_ns() - start
            self._open.pop()
            if outermost:
                self._spent[name] = self._spent.get(name, 0.0) + spent / 1e9
            event = {"name": name, "ph": "X", "ts": start / 1e3, "dur": spent / 1e3, "pid": self._rank, "tid": 0}
            self._events.append({**event, "args": {k: str(v) for k, v in tags.items()}} if tags else event)

    def times(self) -> dict[str, float]:
        """The seconds of each name since the last call; the sums then start from 0.

        Returns: "time/<name>" -> seconds. A span inside another counts for both; one inside a span of its own name
            once.
        """
        spent, self._spent = self._spent, {}
        return {f"time/{name}": seconds for name, seconds in spent.items()}

    def write(self, path: str | Path) -> None:
        """Writes the timeline as Chrome trace JSON, whole or not at all; where that fails it warns.

        Args: path: the file; its folder is made where it is missing.
        """
        path, events = Path(path), sorted(self._events, key=lambda e: e["ts"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
        except (CheckpointError, OSError) as error:  # it only shows what was done
            cause = error.__cause__ or error
            log.warning("could not write the timeline %s: %s; nothing else is affected", path, cause)
