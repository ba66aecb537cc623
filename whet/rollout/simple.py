"""What engines share that have a queue and no batch of their own: all of the protocol but poll.

Left out on purpose: requests in flight between two polls; an engine with those has bookkeeping of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from whet.errors import EngineError
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, aborted

__all__ = ["QueueEngine"]


class QueueEngine:
    """A queue of requests with its bookkeeping; a subclass writes `poll`, and `_check` and `_take` where it needs them.

    Args: kind: the engine's name in messages. max_batch: requests that one poll runs at most; 0 = unknown.
    """

    caps: EngineCaps = EngineCaps()

    def __init__(self, kind: str, *, max_batch: int = 0) -> None:
        self._kind, self._max_batch = kind, max_batch
        self._queue: deque[Request] = deque()
        self._asleep = self._closed = False
        self._prefilled = self._generated = 0
        self.backends: Mapping[str, str] = {}
        """Which implementation runs each part, for environment.json."""
        self.version = 0
        """The policy version stamped on what is drawn now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises EngineError: one could never be served, or its id is in flight; none is queued."""
        if self._closed:
            raise EngineError(f"the {self._kind} engine is closed; make another")
        ids = {r.id for r in self._queue}
        for r in requests:
            if r.id in ids:
                raise EngineError(f"request id {r.id} is in flight already; ids are unique until their output has come")
            ids.add(r.id)
            self._check(r)
        self._queue.extend(requests)

    def _check(self, request: Request) -> None:
        """Raises EngineError for a request that could never be served."""

    def _awake(self) -> None:
        """Raises EngineError while the engine is asleep."""
        if self._asleep:
            raise EngineError("the engine is asleep; call wake() first")

    def _count(self, requests: Sequence[Request], outputs: list[Output]) -> list[Output]:
        """Records what was done. Returns: the outputs."""
        self._prefilled += sum(len(r.tokens) for r in requests)
        self._generated += sum(len(o.tokens) for o in outputs)
        return outputs

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Takes requests out of the queue, with nothing made. Returns: an Output for each, finish_reason "abort"."""
        gone = set(ids)
        out = [r for r in self._queue if r.id in gone]
        self._queue = deque(r for r in self._queue if r.id not in gone)
        return [aborted(r) for r in out]

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """Nothing: a poll runs what it begins to its end."""
        return {}

    def stats(self) -> EngineStats:
        """What waits, and what was done since construction."""
        return EngineStats(
            waiting=len(self._queue),
            max_batch=self._max_batch,
            prefilled=self._prefilled,
            generated=self._generated,
        )

    def update(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Raises EngineError: weights were given to an engine that shares the trainer's."""
        if weights is not None:
            self._take(weights)
        self.version = version

    def _take(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes new weights."""
        raise EngineError(
            f"the {self._kind} engine reads the trainer's own parameters; call update(version) without weights (a "
            "class of your own sets caps = EngineCaps(shared_weights=True), or takes weights in _take)"
        )

    def sleep(self) -> None:
        """Refuses polls until wake; no memory is held between polls."""
        self._asleep = True

    def wake(self) -> None:
        """Undoes sleep."""
        self._asleep = False

    def close(self) -> None:
        """Forgets what waits; the engine can't be used again."""
        self._queue.clear()
        self._closed = True
