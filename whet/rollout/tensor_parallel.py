"""TensorParallelEngine: the embedded engine of processes that divide the matrices of one model.

    first process      runs the episodes (so a tool is called once), and tells the others each call of its engine
    each process       has the same requests, its part of the matrices, and the KV of its own heads; it schedules by
                       itself, since equal calls have equal effects
    a decode step      two sums a layer, of the results of attention and of the MLP; then the first process's draws
    embedding, head    whole on each process, gathered from the parts of training

Left out on purpose: whet's native kernels and CUDA graphs, in whose steps nothing is sent, and a head divided by the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from whet.errors import EngineError
from whet.parallel.ranks import Ranks
from whet.rollout.base import EngineStats, Output, Request
from whet.rollout.engine import EmbeddedEngine

__all__ = ["TensorParallelEngine"]


class TensorParallelEngine(EmbeddedEngine):
    """One of several engines that run the same requests on parts of one model. Args: as EmbeddedEngine's.

    Example: `engine.join(neighbours, share_draws)`, then `with engine.leading() as leads:` on every process.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.ranks = Ranks()
        """The processes that divide the model."""
        self._leads = False
        super().__init__(model, **{**options, "native": False})

    def join(self, ranks: Ranks, share_draws: Callable[[Tensor], None]) -> None:
        """Makes the engines of some processes one.

        Args: ranks: the processes. share_draws: gives a tensor the values that it has on the first of them, in place.
        """
        self.ranks, self._runner.share_draws = ranks, share_draws

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Returns a context in which the first process calls its engine, and the others follow; all must enter it.

        Returns: whether this is the first process. On the others the first one's calls have been repeated by then.
        """
        if self.ranks.rank > 0:
            self._follow()
            yield False
            return
        self._leads = True
        try:
            yield True
        finally:
            self._leads = False
            self.ranks.broadcast(None)

    def _follow(self) -> None:
        """Repeats the first process's calls, until it leaves the context. An error is raised then, not before: most
        errors are those of the first process too, whose further calls must be heard.
        """
        failure: Exception | None = None
        call: Any
        while (call := self.ranks.broadcast(None)) is not None:
            name, argument = call
            try:
                getattr(super(), name)(argument)
            except Exception as error:
                failure = failure or (None if name == "submit" and isinstance(error, EngineError) else error)
        if failure is not None:
            raise failure

    def _tell(self, name: str, argument: Any) -> None:
        if self._leads:
            self.ranks.broadcast((name, argument))

    def submit(self, requests: Sequence[Request]) -> None:
        """See EmbeddedEngine."""
        self._tell("submit", requests)
        super().submit(requests)

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """See EmbeddedEngine."""
        self._tell("step", timeout_s)
        return super().step(timeout_s)

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """See EmbeddedEngine."""
        ids = set(ids)
        self._tell("abort", ids)
        return super().abort(ids)

    def stats(self) -> EngineStats:
        """See EmbeddedEngine; the work of all processes is counted once, on the first."""
        return super().stats() if self.ranks.rank == 0 else EngineStats()

    def _agree(self, is_late: bool) -> bool:
        """See EmbeddedEngine: the first process's clock decides."""
        return self.ranks.broadcast(is_late)

    def _use_pool(self, **options: Any) -> None:
        """See EmbeddedEngine: no steps are captured."""
        self._runner.why_eager = "processes divide the layers"
