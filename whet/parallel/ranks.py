"""The processes that train together, and what they do in step: one decides, all share the work, one writes.

    agree(value)         rank 0's value on every rank: whatever ranks could decide differently (a clock, a signal, a
                         timing) goes through it, or they wait for one another for ever
    shared(fn, items)    the work of a function, a part of the items on each rank, all results on every rank
    is_writer            whether this process writes files and logs

One process does all of that without communication: `Ranks` itself. Every rank must make the same calls in the same
order. Left out on purpose: tensors, which a placement moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from whet.errors import WhetError, format_exception

__all__ = ["ProcessRanks", "Ranks"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ranks:
    """One process.

    >>> Ranks().agree(3), Ranks().shared(len, ["a", "b"]), Ranks().is_writer
    (3, [2], True)
    """

    rank: int = 0
    """This process's place among them."""
    size: int = 1
    """How many there are."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and logs: one of them does."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order, on every rank. Args: value: what pickle takes."""
        return [value]

    def agree(self, value: Result) -> Result:
        """Rank 0's value, on every rank. Args: value: what this rank would take; only rank 0's is looked at."""
        return self.gather(value)[0]

    def shared(self, fn: Callable[[Sequence[Item]], Result], items: Sequence[Item]) -> list[Result]:
        """Runs a function once over all items, a run of consecutive ones on each rank.

        Args:
            fn: of some of the items, in order; it is called at most once on each rank.
            items: the same on every rank. They stay whole: what must be judged together is one item.

        Returns:
            what `fn` returned, in the order of the items, the same on every rank; one result where one process works.

        Raises:
            WhetError: it failed on a rank; on that rank, its own error. All ranks raise, so none waits for another.

        >>> Ranks().shared(sum, [1, 2, 3])
        [6]
        """
        own = [items[i] for i in self._own(len(items))]
        failure: Exception | None = None
        found: list[Result] = []
        try:
            found = [fn(own)] if own or (self.rank == 0 and not items) else []
        except Exception as error:  # whatever it is, the others have to hear of it
            failure = error
        said = self.gather((found, None if failure is None else format_exception(failure)))
        if failure is not None:
            raise failure
        for rank, (_, error) in enumerate(said):
            if error is not None:
                raise WhetError(f"rank {rank} of {self.size} failed: {error}")
        return [result for results, _ in said for result in results]

    def _own(self, count: int) -> range:
        """Which of so many items are this rank's: runs of like length, in the order of the ranks.

        >>> ranks = Ranks()
        >>> ranks._own(5)
        range(0, 5)
        """
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


class ProcessRanks(Ranks):
    """The processes of a torch.distributed group.

    Args: group: whose ranks take part; None = all. The process group has to stand before this is made.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """See Ranks; the values travel as pickles."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found
