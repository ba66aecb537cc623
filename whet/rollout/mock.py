"""MockEngine: random tokens without a model, for tests and load tests.

Tokens and lengths depend only on the request's rng_key. Logprobs are those of the uniform distribution that the tokens
are drawn from. Left out on purpose: what changes a distribution (top-p, penalties), and stop strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import ConfigError, EngineError, lookup_error
from whet.models.loaded_model import LoadedModel
from whet.models.modes import num_ids
from whet.ops.counter_rng import hash_rng_key, uniform
from whet.rollout.base import EngineCaps, Output, Request
from whet.rollout.queue_engine import QueueEngine
from whet.rollout.requests import check_request

__all__ = ["MockEngine"]

DISTRIBUTIONS = ("fixed", "normal", "skewed", "uniform")
LENGTH, SPREAD = -1, -2
"""Draw numbers of a request's length; tokens use 0, 1, ..."""


class MockEngine(QueueEngine):
    """Random completions of random lengths, a few finished at each step.

    Args:
        model: gives the vocabulary where `vocabulary` is None; nothing else of it is used.
        decode: not used; other engines need it.
        vocabulary: V, 256 without a model; tokens are drawn from 0..V-1, stop ids left out until the end.
        length_distribution: of the completions: "fixed" (max_tokens), "uniform" (1..max_tokens), "normal" (mean half of
            it, deviation an eighth), "skewed" (log-normal, a few very long).
        per_step: the most outputs of one step.
    Raises: ConfigError: an unknown distribution, or a size below 1.

    >>> from whet.rollout.base import Sampling
    >>> engine = MockEngine(vocabulary=8)
    >>> three = Sampling(max_tokens=3)
    >>> engine.submit([Request(id=0, tokens=np.array([1]), sampling=three, group=0, rng_key=(0, 0, 0, 0))])
    >>> [len(o.tokens) for o in engine.step()], engine.step()
    ([3], [])
    """

    caps = EngineCaps(shared_weights=True, keyed_draws=True, stop_strings=False, abort=True, sleep=True)

    def __init__(
        self,
        model: LoadedModel | nn.Module | None = None,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        vocabulary: int | None = None,
        length_distribution: Literal["fixed", "uniform", "normal", "skewed"] = "fixed",
        per_step: int = 8,
    ) -> None:
        if length_distribution not in DISTRIBUTIONS:
            raise lookup_error("length_distribution", length_distribution, DISTRIBUTIONS)
        if vocabulary is None:
            module = model.module if isinstance(model, LoadedModel) else model
            vocabulary = 256 if module is None else num_ids(module)
        if vocabulary < 1 or per_step < 1:
            raise ConfigError(f"vocabulary {vocabulary} and per_step {per_step} must be at least 1")
        super().__init__("mock", max_batch=per_step)
        self._vocabulary, self._lengths, self._per_step = vocabulary, length_distribution, per_step

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that could never be served."""
        check_request(request, vocabulary=self._vocabulary, positions=None, decodes=False)
        if len(set(request.sampling.stop_ids) | set(request.sampling.forbidden_ids)) >= self._vocabulary:
            raise EngineError(f"request {request.id}: all {self._vocabulary} tokens are stop or forbidden ids")

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Returns the next few completions; [] = nothing in flight. Raises EngineError: the engine is asleep."""
        self.check_awake()
        taken = [self.queue.popleft() for _ in range(min(self._per_step, len(self.queue)))]
        return self.finish(taken, [self._output(r) for r in taken])

    def _output(self, request: Request) -> Output:
        """Returns one completion, from start to end."""
        s, key = request.sampling, hash_rng_key(*request.rng_key)
        turn = hash_rng_key(key % 2**64, request.draw, 0, 0) if request.draw else key  # each has a length of its own
        length = max(s.min_tokens, self._length(turn, s.max_tokens + request.offset))
        count = max(1, min(s.max_tokens, length - request.offset))
        excluded = set(s.stop_ids) | set(s.forbidden_ids)
        allowed = np.array([i for i in range(self._vocabulary) if i not in excluded], np.int32)
        draws = torch.arange(count) + request.draw + request.offset
        u = uniform(torch.full((count,), key), draws).numpy()
        tokens = allowed[(u * len(allowed)).astype(np.int64)]
        stopped = bool(s.stop_ids) and count < s.max_tokens
        if stopped:
            tokens[-1] = s.stop_ids[0]
        logprobs = np.full(count, -math.log(len(allowed)), np.float32)
        return Output(
            id=request.id,
            tokens=tokens,
            logprobs=logprobs,
            versions=np.full(count, self.version, np.int32),
            finish_reason="stop" if stopped else "length",
        )

    def _length(self, key: int, longest: int) -> int:
        """Returns tokens of a completion. Args: key: of its draws. longest: the most tokens it may have."""
        if self._lengths == "fixed":
            return longest
        u, w = uniform(torch.tensor([key, key]), torch.tensor([LENGTH, SPREAD])).tolist()
        if self._lengths == "uniform":
            return 1 + int(u * longest)
        z = math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * w)
        mean = longest / 2 + z * longest / 8 if self._lengths == "normal" else longest / 8 * math.exp(z)
        return max(1, min(longest, round(mean)))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Weights are read and dropped."""
        for _ in weights:
            pass
