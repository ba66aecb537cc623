"""Base classes of engines: QueueEngine has the whole protocol except `step`, SimpleEngine all except the sampling.

Left out on purpose: requests that stay in flight between two steps; an engine with those keeps its own records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.modes import eval_mode, max_positions, num_ids, transformers_attention
from whet.ops.counter_rng import hash_rng_key, uniform
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, Sampling
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.requests import check_request, check_request_ids
from whet.rollout.stopping import Decode, find_end

__all__ = ["QueueEngine", "SimpleEngine"]


class QueueEngine:
    """An engine with a queue of requests, which a subclass runs in `step`.

    A subclass may also write `check`, which refuses requests, and `load_weights`, where it has weights of its own. Its
    `step` calls `check_awake`, takes requests from `self.queue`, and returns what `finish` returns.

    Args: kind: the engine's name in messages. max_batch: the most requests that one step runs; 0 = unknown.
    """

    caps: EngineCaps = EngineCaps()

    def __init__(self, kind: str, *, max_batch: int = 0) -> None:
        self._kind, self._max_batch = kind, max_batch
        self.queue: deque[Request] = deque()
        """Requests that wait, the oldest first."""
        self._asleep = self._closed = False
        self._prefilled = self._generated = 0
        self.backends: Mapping[str, str] = {}
        """The implementation of each part, for environment.json."""
        self.version = 0
        """The policy version stamped on what is drawn now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises EngineError: one could never be served, or its id is in flight; none is queued."""
        if self._closed:
            raise EngineError(f"the {self._kind} engine is closed; make another")
        check_request_ids(requests, {r.id for r in self.queue})
        for r in requests:
            self.check(r)
        self.queue.extend(requests)

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that could never be served."""

    def check_awake(self) -> None:
        """Raises EngineError while the engine is asleep."""
        if self._asleep:
            raise EngineError("the engine is asleep; call wake_up() first")

    def finish(self, requests: Sequence[Request], outputs: list[Output]) -> list[Output]:
        """Counts the tokens of finished requests. Returns: the outputs."""
        self._prefilled += sum(len(r.tokens) for r in requests)
        self._generated += sum(len(o.tokens) for o in outputs)
        return outputs

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Takes requests out of the queue. Returns: an Output without tokens for each, finish_reason "abort"."""
        aborted = set(ids)
        out = [r for r in self.queue if r.id in aborted]
        self.queue = deque(r for r in self.queue if r.id not in aborted)
        return [InFlightRequest(request=r).output("abort") for r in out]

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """{}: a step runs each request to its end."""
        return {}

    def stats(self) -> EngineStats:
        """Returns the number of waiting requests, and the tokens since construction."""
        return EngineStats(
            waiting=len(self.queue),
            max_batch=self._max_batch,
            prefilled=self._prefilled,
            generated=self._generated,
        )

    def update_weights(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Raises EngineError: weights were given to an engine that shares the trainer's."""
        if weights is not None:
            self.load_weights(weights)
        self.version = version

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes new weights. Args: weights: (name, tensor), each parameter once."""
        raise EngineError(
            f"the {self._kind} engine reads the trainer's own parameters; call update_weights(version) without weights "
            "(a class of your own sets caps = EngineCaps(shared_weights=True), or takes weights in load_weights)"
        )

    def sleep(self) -> None:
        """Refuses to step until wake; no memory is held between steps."""
        self._asleep = True

    def wake_up(self) -> None:
        """Undoes sleep."""
        self._asleep = False

    def close(self) -> None:
        """Drops the requests that wait; the engine can't be used again."""
        self.queue.clear()
        self._closed = True


class SimpleEngine(QueueEngine):
    """An engine whose subclass writes only the sampling: `complete`, from a request's prompt to its end.

    It reads the policy's own module, `self.module`. While `complete` runs, the module is as it was loaded: without
    whet's attention, gradients and dropout. Requests run one after the other; to run several at once, write `step`.

    Args: model: the policy. decode: not used; other engines need it.

    >>> class Ends(SimpleEngine):
    ...     def complete(self, request):
    ...         return [request.sampling.stop_ids[0]], [-1.0]
    >>> from whet.demo import small_model
    >>> engine, sampling = Ends(small_model(seed=0)), Sampling(stop_ids=(2,))
    >>> engine.submit([Request(id=0, tokens=np.array([5]), sampling=sampling, group=0, rng_key=(0, 0, 0, 0))])
    >>> [(o.tokens.tolist(), o.finish_reason) for o in engine.step()]
    [([2], 'stop')]
    """

    caps = EngineCaps(shared_weights=True, keyed_draws=True, stop_strings=False, abort=True, sleep=True)
    samples: ClassVar[tuple[str, ...]] = ("temperature",)
    """The fields of Sampling that `complete` follows, besides max_tokens and stop_ids. A request that sets another one
    is refused, since the trainer would compute logprobs of another distribution than the one drawn from."""

    def __init__(self, model: LoadedModel | nn.Module, *, decode: Decode | None = None) -> None:
        super().__init__(type(self).__name__, max_batch=1)
        self.module = model.module if isinstance(model, LoadedModel) else model
        self._vocabulary = num_ids(self.module)
        self._positions = max_positions(self.module)

    def complete(self, request: Request) -> tuple[Sequence[int], Sequence[float]]:
        """Returns a completion's tokens and their logprobs, up to its first stop id (which is part of it) or
        max_tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must write complete(self, request)")

    def draws(self, request: Request) -> Tensor:
        """Uniform numbers in [0, 1) for a request's tokens, float64 [max_tokens]: the same in any order and run."""
        count = request.sampling.max_tokens
        return uniform(
            torch.full((count,), hash_rng_key(*request.rng_key)), torch.arange(count) + request.draw + request.offset
        )

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that could never be served, or that needs more than `complete` does."""
        check_request(request, vocabulary=self._vocabulary, positions=self._positions, decodes=False)
        followed = {"max_tokens", "stop_ids", "logprobs_mode", *self.samples}
        for name, value in vars(request.sampling).items():
            if name not in followed and value != vars(Sampling())[name]:
                raise EngineError(
                    f"request {request.id}: {name}={value!r}, and {self._kind} samples by {', '.join(self.samples)}; "
                    f"leave it out, or let complete() follow it and add {name!r} to {self._kind}.samples"
                )

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Returns the next request, completed; [] = nothing in flight. Raises EngineError: `complete` broke a rule."""
        self.check_awake()
        if not self.queue:
            return []
        request = self.queue.popleft()
        with torch.no_grad(), transformers_attention(self.module), eval_mode(self.module):
            completed = self.complete(request)
        return self.finish([request], [self._output(request, completed)])

    def _output(self, request: Request, completed: Any) -> Output:
        """Returns the Output of a request. Args: completed: what complete() returned. Raises EngineError: it broke a
        rule.
        """
        sampling, name = request.sampling, f"{self._kind}.complete() of request {request.id}"
        if not isinstance(completed, tuple | list) or len(completed) != 2:
            raise EngineError(f"{name} must return (tokens, logprobs), got {completed!r:.60}")
        ids, logprobs = (_numbers(column, name) for column in completed)
        if ids.size and not (ids == ids.round()).all():
            raise EngineError(f"{name} gave the token {ids[ids != ids.round()][0]}; tokens are whole numbers")
        ids = ids.astype(np.int32)
        if ids.ndim != 1 or ids.shape != logprobs.shape:
            raise EngineError(
                f"{name}: tokens {list(ids.shape)} and logprobs {list(logprobs.shape)}; give one for each"
            )
        if not 1 <= len(ids) <= sampling.max_tokens:
            raise EngineError(f"{name} returned {len(ids)} tokens; return 1 to max_tokens={sampling.max_tokens}")
        possible = (logprobs <= 0) & np.isfinite(logprobs)  # NaN is neither
        if not possible.all():
            raise EngineError(
                f"{name} gave the logprob {logprobs[~possible][0]}; it is the log of the probability of the token: "
                "finite and at most 0"
            )
        end = find_end(sampling, ids, new=len(ids))
        if end is None:
            raise EngineError(f"{name} ended after {len(ids)} of {sampling.max_tokens} tokens without a stop id")
        if end[0] < len(ids):
            raise EngineError(f"{name} continues after the stop id {ids[end[0] - 1]}; end with it")
        return Output(
            id=request.id,
            tokens=ids,
            logprobs=logprobs.astype(np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            finish_reason=end[1],
        )


def _numbers(values: Any, name: str) -> np.ndarray:
    """Returns a list of numbers as an array. Raises EngineError: it is something else."""
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise EngineError(f"{name} must return two lists of numbers, got {values!r:.60}: {error}") from error
