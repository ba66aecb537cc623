"""A profile of whole steps: every operation on a timeline, and a table of what cost most, by phase.

    profile-step-000002.json.gz     the timeline, for Perfetto (ui.perfetto.dev) or chrome://tracing
    profile-step-000002.txt         the table

The spans of whet's Trace become ranges of the profiler, so both show the same phases. Self time is the time that an
operation spent in itself, not in those that it called; its sum is the time of the step. Left out on purpose: memory,
shapes and Python stacks, which make a profile many times larger and slower; use torch.profiler itself for those.
"""

from __future__ import annotations

import errno
import gzip
import logging
import os
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config import ProfilerOptions
from whet.errors import CheckpointError, format_exception
from whet.observe.trace import Trace
from whet.storage.files import create_file, make_writable_folder, temporary_path, write_atomic

__all__ = ["OperationCost", "StepProfiler", "cost_table", "operation_costs"]

log = logging.getLogger("whet")

_MARK = "whet: "
_STEP = f"{_MARK}step"
_PARTS = {"autograd::engine::evaluate_function": "backward", "Optimizer.step#": "optimizer"}
"""Prefixes of the names of torch's own ranges, and the part of a phase that each marks."""
_REST = "forward, loss, clipping"
"""The part of a phase outside torch's ranges, if the phase has any of them."""


class StepProfiler:
    """Profiles the steps that the options select; without options it does nothing.

    Args: options: the steps, and the folder for the files; None = off. folder: the run folder, for options without
        log_dir; None = the table is logged and nothing is written. trace: its spans become ranges of the profile.
    """

    def __init__(self, options: ProfilerOptions | None, *, folder: str | Path | None, trace: Trace) -> None:
        self.options = options if os.environ.get("RANK", "0") == "0" else None
        place = folder if options is None or options.log_dir is None else options.log_dir
        self.folder = None if place is None else Path(place).absolute()
        self.trace = trace
        self._first = 0 if options is None else options.skip_first_n_steps
        self._seen = 0
        self._profiled = 0

    def set_num_steps(self, steps: int | None) -> None:
        """Records the number of steps to come. In a run too short for the options the last step is profiled.

        Args: steps: the number; None = unknown.
        Raises: ConfigError: log_dir can't be written.
        """
        if self.options is not None and self.options.log_dir is not None:
            self.folder = make_writable_folder(self.options.log_dir, "trainer.profiler_options.log_dir")
        if self.options is not None and steps is not None and 0 < steps <= self._first:
            log.warning(
                "the run is no longer than skip_first_n_steps=%d; profiling its last step, which may include one-time "
                "setup",
                self._first,
            )
            self._first = steps - 1

    def step(self, number: int) -> AbstractContextManager[None]:
        """Returns a context for a step, which profiles it if it is due.

        Args: number: of the step, for file names. The options count from the first step of this process.
        """
        self._seen += 1
        if self.options is None:
            return nullcontext()
        due = self._first < self._seen <= self._first + self.options.profiler_steps
        return self._profile(number) if due else nullcontext()

    @contextmanager
    def _profile(self, number: int) -> Iterator[None]:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        profiler = profile(activities=activities)
        start = time.perf_counter()
        if not _try(number, profiler.start):
            yield
            return
        self.trace.annotate = lambda name: record_function(_MARK + name)
        try:
            with record_function(_STEP):
                yield
                if cuda:
                    torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        finally:
            self.trace.annotate = None
            complete = _try(number, profiler.stop)
        self._profiled += 1
        if complete:
            device = torch.cuda.get_device_name() if cuda else "CPU"
            _try(number, lambda: self._write(number, profiler, seconds, device))

    def _write(self, number: int, profiler: Any, seconds: float, device: str) -> None:
        """Logs the table, and writes table and timeline. A file that can't be written is only a warning."""
        costs = operation_costs(profiler.events())
        head = f"profile of step {number}: {seconds:.2f} s with the profiler's own cost, on {device}"
        log.info("%s\n%s", head, cost_table(costs, rows=4))
        if self.folder is None:
            log.warning("the profile of step %d was not written: neither run_dir nor log_dir is set", number)
            return
        name = f"profile-step-{number:06d}"
        half = temporary_path(self.folder / f"{name}.json.gz")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / f"{name}.txt", f"{head}\n\n{cost_table(costs)}\n".encode())
            create_file(half).close()  # a new file for torch to write to: no link is followed
            profiler.export_chrome_trace(str(half))
            _check_complete(half)
            half.replace(self.folder / f"{name}.json.gz")
        except (OSError, EOFError, RuntimeError) as error:  # RuntimeError: torch's own, and CheckpointError
            why = error.__cause__ if isinstance(error, CheckpointError) and error.__cause__ else error
            log.warning(
                "the profile of step %d could not be written to %s: %s; training continues. "
                "Make room there and in %s, or set trainer.profiler_options.log_dir, and profile again",
                number,
                self.folder,
                why,
                tempfile.gettempdir(),
            )
            with suppress(OSError):
                half.unlink(missing_ok=True)

    def close(self) -> None:
        """Warns if the run ended before the first step to be profiled."""
        if self.options is not None and self._seen and not self._profiled:
            log.warning(
                "no step was profiled: the run made %d and the first %d are skipped; lower "
                "trainer.profiler_options.skip_first_n_steps",
                self._seen,
                self.options.skip_first_n_steps,
            )


def _try(number: int, call: Callable[[], None]) -> bool:
    """Runs a part of the profiler's work. An error is only a warning, since it does not affect the step."""
    try:
        call()
    except Exception as error:
        log.warning("step %d has no profile: %s; training continues", number, format_exception(error))
        return False
    return True


def _check_complete(path: Path) -> None:
    """Raises OSError for an incomplete timeline, since torch raises no error when it writes one."""
    last = b""
    with gzip.open(path) as file:
        while part := file.read(1 << 20):
            last = part
    if not last.rstrip().endswith(b"}"):
        raise OSError(errno.EIO, f"torch has written {'half of' if last else 'nothing of'} the timeline")


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """The cost of an operation in a phase."""

    phase: str
    """A span of whet's Trace, "update: backward" and the like for parts of it, or "other" outside all spans."""
    name: str
    """The operation; "(Python, waiting)" is the time of the phase outside all operations."""
    calls: int
    cpu_s: float
    """Self time in seconds."""
    device_s: float
    """Seconds of the kernels that the operation started itself; 0 on a CPU."""


def operation_costs(events: Iterable[Any]) -> list[OperationCost]:
    """Sums the operations of a profile by phase and name: phases in order, the most expensive operation first.

    Args: events: of `torch.profiler.profile.events()`, recorded while a Trace marked its spans.
    """
    ops = [e for e in events if e.device_type.name == "CPU" and not e.is_async]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in ops if e.name.startswith(_MARK))
    outer: list[tuple[float, float, str]] = []
    for start, end, name in spans:
        if name != _STEP and (not outer or start >= outer[-1][1]):
            outer.append((start, end, name.removeprefix(_MARK)))
    starts = [start for start, _, _ in outer]
    known: dict[int, str] = {}
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0.0]))
    order = {name: i for i, name in reversed(list(enumerate(name for _, _, name in outer)))}
    for e in ops:
        i = bisect_right(starts, e.time_range.start) - 1
        phase = outer[i][2] if i >= 0 and e.time_range.start < outer[i][1] else "other"
        part = _part(e, known) if phase != "other" else ""
        name = "(Python, waiting)" if e.name.startswith(_MARK) else e.name.removeprefix("aten::")
        total = sums[f"{phase}: {part}" if part else phase][name]
        total[0] += e.count
        total[1] += e.self_cpu_time_total / 1e6
        total[2] += e.self_device_time_total / 1e6
    for phase in {name.partition(": ")[0] for name in sums if ": " in name} & sums.keys():
        sums[f"{phase}: {_REST}"] = sums.pop(phase)
    costs = [
        OperationCost(phase=phase, name=name, calls=int(calls), cpu_s=cpu_s, device_s=device_s)
        for phase, named in sums.items()
        for name, (calls, cpu_s, device_s) in named.items()
    ]
    parts_in_order = ["", _REST, *_PARTS.values()]
    place = lambda phase, _, part: (order.get(phase, len(order)), parts_in_order.index(part))
    return sorted(costs, key=lambda c: (place(*c.phase.partition(": ")), -c.device_s, -c.cpu_s, c.name))


def _part(event: Any, known: dict[int, str]) -> str:
    """Returns the part of a phase that an event is in: the innermost of torch's own ranges around it; ""
    outside them.
    """
    chain = []
    while event is not None and id(event) not in known:
        chain.append(event)
        own = next((part for start, part in _PARTS.items() if event.name.startswith(start)), None)
        if own is not None:
            known[id(event)] = own
            break
        event = event.cpu_parent
    part = known[id(event)] if event is not None else ""
    known.update((id(e), part) for e in chain)
    return part


def cost_table(costs: Iterable[OperationCost], rows: int = 10) -> str:
    """Returns a table of costs: phases in order, the most expensive operations of each.

    Args: costs: from `operation_costs`. rows: operations shown for each phase; the others are one line.

    >>> print(cost_table([OperationCost(phase="rollout", name="mm", calls=3, cpu_s=0.75, device_s=0.0),
    ...              OperationCost(phase="other", name="(Python, waiting)", calls=1, cpu_s=0.25, device_s=0.0)]))
    phase, operation                                  calls    self ms    share
    rollout                                               3      750.0   75.0 %
      mm                                                  3      750.0   75.0 %
    other                                                 1      250.0   25.0 %
      (Python, waiting)                                   1      250.0   25.0 %
    """
    costs = list(costs)
    device = any(c.device_s for c in costs)
    spent = lambda cs: (sum(c.calls for c in cs), sum(c.device_s for c in cs), sum(c.cpu_s for c in cs))
    _, device_s, cpu_s = spent(costs)
    whole = (device_s if device else cpu_s) or 1.0

    def line(name: str, cs: list[OperationCost]) -> str:
        calls, on_device, on_cpu = spent(cs)
        time_ = f"{on_device * 1e3:>11.1f}{on_cpu * 1e3:>11.1f}" if device else f"{on_cpu * 1e3:>11.1f}"
        return f"{name:<46.46}{calls:>9}{time_}{100 * (on_device if device else on_cpu) / whole:>7.1f} %"

    title = f"{'GPU ms':>11}{'CPU ms':>11}" if device else f"{'self ms':>11}"
    lines = [f"{'phase, operation':<46}{'calls':>9}{title}{'share':>9}"]
    for phase in dict.fromkeys(c.phase for c in costs):
        cs = [c for c in costs if c.phase == phase]
        lines.append(line(phase, cs))
        lines += [line(f"  {c.name}", [c]) for c in cs[:rows]]
        if cs[rows:]:
            lines.append(line(f"  {len(cs) - rows} others", cs[rows:]))
    return "\n".join(lines)
