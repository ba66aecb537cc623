"""Named time spans, summed per step and drawn on a timeline.

The file that `write` writes opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Left out on purpose: the kernels
inside a span, which observe/profiler.py shows.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import CheckpointError
from whet.storage.files import make_writable_folder, write_atomic

if TYPE_CHECKING:  # it imports torch, which commands that train nothing do without
    from whet.util.device import PhaseMemory

__all__ = ["TIMELINE_SPANS", "Trace", "trace_folder"]

log = logging.getLogger("whet")

TIMELINE_SPANS = 100_000
"""The latest spans of a timeline that are kept."""


def trace_folder(options: Any, run_dir: str | Path | None) -> Path | None:
    """Returns the folder for a run's trace.json.

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

    The metrics are of the thread that made the Trace; spans of other threads are on the timeline only.

    Args: keep: the number of latest spans kept for the timeline.

    >>> trace = Trace()
    >>> with trace.span("rollout", step=3):
    ...     with trace.span("prefill"):
    ...         pass
    >>> sorted(trace.pop_times()), trace.pop_times()
    (['time/prefill', 'time/rollout'], {})
    """

    def __init__(self, keep: int = TIMELINE_SPANS) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=keep)
        self._spent: dict[str, float] = {}
        self._main = threading.get_ident()
        self._open: dict[int, list[str]] = {self._main: []}
        self._names = {self._main: "main"}
        self._num_added = 0
        self._rank = int(os.environ.get("RANK", "0"))
        self._epoch = time.time_ns() - time.perf_counter_ns()
        """The start of the clock of spans: processes of other machines have another one."""
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        """Marks each span for a profiler while one runs."""
        self.memory: PhaseMemory | None = None
        """Notes the peak of a GPU's memory in each span of the main thread; None = there is no GPU."""
        self.covered_s = 0.0
        """Seconds inside any span since the last `pop_times`."""
        self._failed = ""
        self._counted = ("", "")
        """A phase, and how far it is."""

    @contextmanager
    def span(self, name: str, **tags: Any) -> Iterator[None]:
        """Measures the time spent inside the context; spans nest.

        Args: name: of the phase. tags: shown with the span on the timeline.
        """
        thread = threading.get_ident()
        opened = self._open.setdefault(thread, [])
        outermost = name not in opened
        memory = self.memory if thread == self._main else None
        if memory is not None:
            memory.change(opened)
        opened.append(name)
        start = time.perf_counter_ns()
        try:
            with nullcontext() if self.annotate is None else self.annotate(name):
                yield
        except BaseException:
            self._failed = self._failed or name
            raise
        finally:
            spent = time.perf_counter_ns() - start
            if memory is not None:
                memory.change(opened)
            opened.pop()
            if thread == self._main:
                self._spent[name] = self._spent.get(name, 0.0) + (spent / 1e9 if outermost else 0.0)
                self.covered_s += 0.0 if opened else spent / 1e9
            self._record("X", name, start, thread, tags, dur=spent / 1e3)

    def add(self, name: str, seconds: float, **tags: Any) -> None:
        """Adds a span that has just ended, beside others of its name, such as the call of a tool; for the timeline."""
        end, self._num_added = time.perf_counter_ns(), self._num_added + 1
        number = {"cat": name, "id": f"{self._rank}.{self._num_added}"}
        self._record("b", name, end - int(seconds * 1e9), self._main, tags, **number)
        self._record("e", name, end, self._main, {}, **number)

    def keep(self, number: int) -> None:
        """Changes how many of the latest spans are kept; 0 = none, since nobody writes the timeline."""
        self._events = deque(self._events, maxlen=number)

    def _record(self, kind: str, name: str, at: int, thread: int, tags: dict[str, Any], **more: Any) -> None:
        if not self._events.maxlen:
            return
        if thread not in self._names:
            self._names[thread] = threading.current_thread().name
        event = {"name": name, "ph": kind, "ts": (self._epoch + at) / 1e3, "pid": self._rank, "tid": thread, **more}
        self._events.append({**event, "args": {k: str(v) for k, v in tags.items()}} if tags else event)

    @property
    def phase(self) -> str:
        """The innermost span that is open, or that an error has ended since the last `pop_times`; "" = none."""
        opened = self._open[self._main]
        return self._failed or (opened[-1] if opened else "")

    def count(self, done: int, total: int, name: str) -> None:
        """Notes how far the open phase is, for whoever waits for it. Args: name: of what is counted, in the plural.

        >>> trace = Trace()
        >>> with trace.span("rollout"):
        ...     trace.count(12, 32, "completions")
        ...     print(trace.status)
        rollout, 12 of 32 completions
        """
        self._counted = (self.phase, f", {done} of {total} {name}")

    @property
    def status(self) -> str:
        """The phase, and how far it is if that is known."""
        phase, (counted, text) = self.phase, self._counted
        return phase + (text if phase and phase.split("/")[0] == counted else "")

    def pop_times(self) -> dict[str, float]:
        """Returns the seconds of each name since the last call; resets the sums.

        Returns: "time/<name>" -> seconds. A span inside another counts for both; inside a span of the same name it
            counts once.
        """
        spent, self._spent, self._failed, self.covered_s = self._spent, {}, "", 0.0
        return {f"time/{name}": seconds for name, seconds in spent.items()}

    def events(self) -> list[dict[str, Any]]:
        """Returns the events of the timeline, in Chrome's trace format: spans by time, and the names of process and
        threads.
        """
        threads = {thread: number for number, thread in enumerate(self._names)}
        name = lambda what, thread, text: {
            "name": what, "ph": "M", "pid": self._rank, "tid": threads[thread], "args": {"name": text}
        }  # fmt: skip
        names = [name("process_name", self._main, f"rank {self._rank}")]
        names += [name("thread_name", thread, text) for thread, text in self._names.items()]
        spans = sorted(self._events, key=lambda e: e["ts"])
        return [*names, *({**event, "tid": threads[event["tid"]]} for event in spans)]

    def write(self, path: str | Path, others: Iterable[dict[str, Any]] = ()) -> None:
        """Writes the timeline as Chrome trace JSON, whole or not at all. A failure is only logged.

        Args: path: the file; its folder is made if missing. others: the events of other processes.
        """
        path, events = Path(path), [*self.events(), *others]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
        except (CheckpointError, OSError) as error:  # the timeline is not needed for training
            cause = error.__cause__ or error
            log.warning("could not write the timeline %s: %s; nothing else is affected", path, cause)
