"""EngineLoop: one thread steps an engine for the requests of all clients.

    generation = loop.submit(requests)      from any thread
    for index, partial in generation: ...   there, as tokens are drawn
    loop.run()                              in the engine's own thread, until stop()

Requests join the engine's batch between two steps, and leave it as soon as they end or are cancelled. Left out on
purpose: HTTP and text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from whet.errors import ConfigError, EngineError, WhetError
from whet.rollout.base import Output, PartialOutput, Request, RolloutEngine, check_caps
from whet.rollout.output_check import check_output

__all__ = ["ClosedError", "EngineLoop", "Generation"]

log = logging.getLogger("whet")

STEP_S = 0.02
"""The time after which a step returns to take new requests, while no client streams."""


class ClosedError(EngineError):
    """The loop has ended, and takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request again later")


class Generation:
    """The tokens of one call's requests. The thread that submitted them reads it.

    Args: requests: without ids. streams: deliver tokens as they are drawn; false = whole outputs only.
    """

    def __init__(self, requests: Sequence[Request], *, streams: bool) -> None:
        self.requests, self.streams = list(requests), streams
        self.remaining = len(self.requests)
        """Requests that have not ended."""
        self.events: SimpleQueue[tuple[int, PartialOutput] | Exception] = SimpleQueue()

    def next(self, timeout_s: float | None = None) -> tuple[int, PartialOutput] | None:
        """Returns the index of a request and its new tokens; None = the time is up.

        Raises: EngineError: the engine failed, or the loop has ended. ConfigError: the engine refuses the requests.
        """
        try:
            event = self.events.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(event, Exception):
            self.remaining = 0
            raise event
        self.remaining -= event[1].finish_reason is not None
        return event

    def __iter__(self) -> Iterator[tuple[int, PartialOutput]]:
        """Yields all events until the last request has ended."""
        while self.remaining:
            event = self.next()
            assert event is not None
            yield event


@dataclass(eq=False)
class _InFlight:
    """A request in the engine."""

    generation: Generation
    index: int
    request: Request
    delivered: int = 0
    """Tokens that its generation has received."""


class EngineLoop:
    """Steps an engine for many callers.

    Args: engine: no other code calls its submit and step while `run` runs.

    >>> import numpy as np
    >>> from whet.rollout.base import Sampling
    >>> from whet.rollout.mock import MockEngine
    >>> loop = EngineLoop(MockEngine())
    >>> threading.Thread(target=loop.run, daemon=True).start()
    >>> prompt, sampling = np.array([5], np.int32), Sampling(max_tokens=4)
    >>> generation = loop.submit([Request(id=-1, tokens=prompt, sampling=sampling, group=-1, rng_key=(0, 0, 0, 0))])
    >>> [(i, len(p.tokens), p.finish_reason) for i, p in generation]
    [(0, 4, 'length')]
    >>> loop.stop()
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[tuple[str, Generation | None]] = SimpleQueue()
        self._in_flight: dict[int, _InFlight] = {}
        self._next_id = 0
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False

    # ---- from any thread -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], *, streams: bool = False) -> Generation:
        """Queues the requests of a call; equal prompts share their prefill. Raises ClosedError: the loop has ended."""
        generation = Generation(requests, streams=streams)
        with self._lock:
            if self._closed:
                raise ClosedError
            self._inbox.put(("submit", generation))
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends the requests of a call, whose client has gone."""
        self._inbox.put(("cancel", generation))

    def stop(self) -> None:
        """Lets `run` return after its current step."""
        self._stopping = True
        self._inbox.put(("stop", None))

    # ---- in the engine's thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Steps the engine until `stop`. At its end, also by Ctrl-C, every waiting caller receives a ClosedError."""
        try:
            while not self._stopping:
                self._read_inbox(wait=not self._in_flight)
                if self._in_flight:
                    self._step()
        finally:
            with self._lock:
                self._closed = True
            error = ClosedError()
            self._fail_all(error)
            while not self._inbox.empty():
                kind, generation = self._inbox.get()
                if kind == "submit" and generation is not None:
                    generation.events.put(error)

    def _read_inbox(self, *, wait: bool) -> None:
        """Submits new requests and cancels others. Args: wait: until there is something to do."""
        while wait or not self._inbox.empty():
            kind, generation = self._inbox.get()
            wait = False
            if generation is not None:
                (self._submit if kind == "submit" else self._cancel)(generation)

    def _submit(self, generation: Generation) -> None:
        groups: dict[bytes, int] = {}
        numbered = []
        for request in generation.requests:
            group = groups.setdefault(request.tokens.tobytes(), self._next_id)
            numbered.append(replace(request, id=self._next_id, group=group))
            self._next_id += 1
        try:
            for sampling in {id(r.sampling): r.sampling for r in numbered}.values():
                check_caps(self.engine, sampling)
            self.engine.submit(numbered)
        except WhetError as error:  # of this call alone
            generation.events.put(ConfigError(str(error)))
            return
        self._in_flight |= {r.id: _InFlight(generation, i, r) for i, r in enumerate(numbered)}

    def _cancel(self, generation: Generation) -> None:
        ids = [i for i, flight in self._in_flight.items() if flight.generation is generation]
        for i in ids:
            del self._in_flight[i]
        if ids:
            self.engine.abort(ids)

    def _step(self) -> None:
        streamed = [i for i, flight in self._in_flight.items() if flight.generation.streams]
        try:
            for output in self.engine.step(timeout_s=0.0 if streamed else STEP_S):
                self._finish(output)
            for i, partial in self.engine.peek(i for i in streamed if i in self._in_flight).items():
                flight = self._in_flight[i]
                if len(partial.tokens) > flight.delivered:
                    flight.generation.events.put((flight.index, partial.skip_tokens(flight.delivered)))
                    flight.delivered = len(partial.tokens)
            if self._in_flight and not self.engine.stats().in_flight:
                raise EngineError(f"the engine is idle, but {len(self._in_flight)} requests never finished")
        except Exception as error:
            log.exception("the engine failed; %d requests end with an error", len(self._in_flight))
            self._fail_all(error)

    def _finish(self, output: Output) -> None:
        flight = self._in_flight.pop(output.id, None)
        if flight is None:
            return  # it was cancelled, in an engine that can't abort
        try:
            check_output(output, flight.request, self.engine)
        except EngineError as error:
            flight.generation.events.put(error)
            self._cancel(flight.generation)
            return
        flight.generation.events.put((flight.index, output.skip_tokens(flight.delivered)))

    def _fail_all(self, error: Exception) -> None:
        """Ends all requests in flight with an error."""
        ids, self._in_flight, flights = list(self._in_flight), {}, list(self._in_flight.values())
        for generation in {id(f.generation): f.generation for f in flights}.values():
            generation.events.put(error)
        self.engine.abort(ids)
