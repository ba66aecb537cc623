"""The processes that train together: one decides, all share the work, one writes.

    broadcast(value)             rank 0's value on every rank. Whatever ranks could decide differently (by a clock, a
                                 signal or a timing) must go through it; otherwise they wait for one another for ever
    scatter_gather(fn, items)    runs a function on a part of the items on each rank; all results on every rank
    call_on_writer(fn)           runs a function on rank 0; its result, or its error, on every rank
    is_writer                    whether this process writes files and logs

`Ranks` itself is one process and needs no communication. Every rank must make the same calls in the same order. Left
out on purpose: tensors, which a placement moves.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from whet.errors import ConfigError, OtherRankError, RolloutStopped, WhetError, format_exception

__all__ = ["ProcessRanks", "Ranks"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def _no_phase() -> str:
    """No phase is known."""
    return ""


def _missing_ranks(error: str, waited: bool) -> str:
    """Returns what an error of gloo's barrier means. Args: waited: the time for the others has passed.

    >>> _missing_ranks("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms", waited=False)
    'rank 1 has ended; its output says why, or its exit code where a signal has ended it'
    """
    found = re.search(r"Ranks ([\d, ]*\d) failed to pass|from rank (\d+)", error)
    if not waited and (found is not None or "by peer" in error):
        who = f"rank {found[1] or found[2]}" if found else "another rank"
        return f"{who} has ended; its output says why, or its exit code where a signal has ended it"
    reason, fix = error.splitlines()[0][:300].rstrip(". "), ", or raise trainer.collective_timeout_s" if waited else ""
    return f"the other ranks did not all arrive here: {reason}; the output of the missing ranks says why{fix}"


class Ranks:
    """One process.

    >>> Ranks().broadcast(3), Ranks().scatter_gather(len, ["a", "b"]), Ranks().is_writer
    (3, [2], True)
    """

    rank: int = 0
    """The number of this process."""
    size: int = 1
    """The number of processes."""
    step: int = 0
    """The step that runs now, for messages; 0 = none."""
    phase: Callable[[], str] = staticmethod(_no_phase)
    """Returns the phase of the step that runs now, for messages; "" = unknown."""

    def describe(self) -> str:
        """This process and what it does.

        >>> Ranks().describe()
        'rank 0 of 1'
        """
        parts = (f"rank {self.rank} of {self.size}", f"step {self.step}" if self.step else "", self.phase())
        return ", ".join(filter(None, parts))

    def _failed(self, rank: int, error: BaseException) -> str:
        """Returns what the other ranks say, in one short line; a rank that was stopped says nothing itself."""
        stopped = isinstance(error, RolloutStopped)
        text = format_exception(error) if stopped else f"{type(error).__name__}; its own output says why"
        return f"rank {rank} of {self.size} failed: {text}"

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and logs: rank 0 does."""
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of the ranks, on every rank. Args: value: what pickle takes."""
        return [value]

    def neighbours(self, size: int) -> Ranks:
        """Returns this rank's group of neighbouring ranks. Every rank must call it. Args: size: of each group."""
        return Ranks()

    def in_thread(self) -> Ranks:
        """Returns the same processes, for what a second thread of each of them agrees on meanwhile. Every rank must
        call it.
        """
        return Ranks()

    def broadcast(self, value: Result) -> Result:
        """Rank 0's value, on every rank. Args: value: of this rank; used on rank 0 only."""
        return self.all_gather(value)[0]

    def call_on_writer(self, fn: Callable[[], Result]) -> Result:
        """Calls a function on rank 0, such as one that makes or checks files.

        Returns: its result, on every rank.
        Raises: its own error on rank 0; on the others a ConfigError with the same text, or OtherRankError.

        >>> Ranks().call_on_writer(lambda: 3)
        3
        """
        result, failure = None, None
        if self.is_writer:
            try:
                result = fn()
            except Exception as error:  # the other ranks must learn of any error
                failure = error
        is_config = isinstance(failure, ConfigError)
        text = str(failure) if is_config else failure and self._failed(0, failure)
        result, text, is_config = self.broadcast((result, text, is_config))
        if failure is not None:
            raise failure
        if text is not None:
            raise (ConfigError if is_config else OtherRankError)(text)
        return result  # pyright: ignore[reportReturnType]

    def check_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Compares facts of all ranks, before they work on something together that would hang or be wrong otherwise.

        Raises: WhetError: they differ, on every rank.

        >>> Ranks().check_same("batch", {"tokens": 7})
        """
        gathered = self.all_gather(dict(facts))
        for rank, other in enumerate(gathered):
            if differing := [name for name, value in other.items() if gathered[0].get(name) != value]:
                pairs = ", ".join(f"{name} {gathered[0].get(name)} and {other[name]}" for name in differing)
                raise WhetError(
                    f"{self.describe()}: rank {rank} has another {what} than rank 0: {pairs}; all ranks must have the "
                    "same data, configuration and code"
                )

    def scatter_gather(
        self, fn: Callable[[Sequence[Item]], Result], items: Sequence[Item], *, together: int = 1
    ) -> list[Result]:
        """Runs a function over all items, on consecutive items on each rank.

        Args:
            fn: takes some of the items, in order; it is called at most once on each rank.
            items: the same on every rank. An item is not split: what must be judged together is one item.
            together: the number of neighbouring ranks that work on the same items; the first one's results are taken.

        Returns:
            what `fn` returned, in the order of the items, the same on every rank; one result where one process works.

        Raises:
            OtherRankError: it failed on another rank. On the rank where it failed, its own error. All ranks raise, so
                none waits for another. RolloutStopped: it was given up on one rank.

        >>> Ranks().scatter_gather(sum, [1, 2, 3])
        [6]
        """
        count, groups, group = len(items), self.size // together, self.rank // together
        own = [items[i] for i in range(count * group // groups, count * (group + 1) // groups)]
        failure: BaseException | None = None
        results: list[Result] = []
        try:
            results = [fn(own)] if own or (group == 0 and not items) else []
        except (Exception, RolloutStopped) as error:  # the other ranks must learn of any error
            failure = error
        is_stopped = isinstance(failure, RolloutStopped)
        gathered = self.all_gather((results, failure and self._failed(self.rank, failure), is_stopped))
        if failure is not None:
            raise failure
        for _, text, stopped in gathered:
            if text is not None:
                raise (RolloutStopped if stopped else OtherRankError)(text)
        gathered[self.rank] = (results, None, False)  # its own objects, not copies of them
        return [result for results, *_ in gathered[::together] for result in results]


class ProcessRanks(Ranks):
    """The processes of a torch.distributed group.

    Args: group: the processes; its backend is gloo. timeout: how long a process waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def neighbours(self, size: int) -> ProcessRanks:
        """See Ranks."""
        every = dist.get_process_group_ranks(self.group)
        made = [dist.new_group(every[i : i + size], self.timeout, "gloo") for i in range(0, self.size, size)]
        group = made[self.rank // size]
        assert isinstance(group, dist.ProcessGroup)
        return ProcessRanks(group, self.timeout)

    def in_thread(self) -> ProcessRanks:
        """See Ranks."""
        return self.neighbours(self.size)

    def all_gather(self, value: Any) -> list[Any]:
        """See Ranks; the values travel as pickles. Raises OtherRankError: one is missing, with its number on rank 0."""
        values: list[Any] = [None] * self.size
        start = time.monotonic()
        try:
            dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)  # names the missing ranks
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            waited = time.monotonic() - start >= self.timeout.total_seconds()
            where = f"{self.describe()}{'' if self.phase() or not self.step else ', between phases'}"
            raise OtherRankError(f"{where}: {_missing_ranks(str(error), waited)}") from error
        return values
