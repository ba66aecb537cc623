"""The engine protocol: requests in, finished completions out, token ids on both sides.

An engine is pull-driven: it computes only inside `poll`, so it is deterministic without threads, and pausing it is
not polling it. Left out on purpose: text. An engine decodes only to look for stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from whet.ops.support import Support
from whet.types import FinishReason

__all__ = ["EngineCaps", "Output", "Request", "RolloutEngine", "Sampling", "aborted", "support_of"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the tokens of one request; ids and numbers only.

    The order is that of transformers: repetition penalty, forbidden ids and minimum length (stop ids forbidden until
    then), temperature, top-k, top-p, min-p.
    """

    max_tokens: int = 64
    """Longest completion, stop token included."""
    min_tokens: int = 0
    """Stop ids can't be drawn before this many tokens."""
    temperature: float = 1.0
    """0.0 = greedy."""
    top_p: float = 1.0
    """1.0 = off."""
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """0.0 = off."""
    repetition_penalty: float = 1.0
    """1.0 = off."""
    stop_ids: tuple[int, ...] = ()
    """Any of these ends a completion, and is part of it."""
    stop: tuple[str, ...] = ()
    """Any of these in the decoded completion ends it; the text up to it, and the stop string, stay."""
    forbidden_ids: tuple[int, ...] = ()
    """Never drawn."""
    logprob_support: str = "sampling"
    """"sampling": of the exact distribution drawn from; "full": temperature alone."""
    return_logits: bool = False
    """Keep the raw logits of each drawn token (float32 [C, V]): for a close look, not for training."""


def support_of(sampling: Sampling) -> Support:
    """The distribution whose logprobs the sampler reports and the trainer computes.

    >>> support_of(Sampling(top_k=3)).top_k, support_of(Sampling(top_k=3, logprob_support="full")).full
    (3, True)
    """
    return Support(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        forbidden_ids=sampling.forbidden_ids,
        min_tokens=sampling.min_tokens,
        stop_ids=sampling.stop_ids,
        full=sampling.logprob_support == "full",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion to make.

    Example: Request(id=3, tokens=array([5, 6]), sampling=Sampling(max_tokens=8), group=1, address=(0, 12, 1, 0)).
    """

    id: int
    tokens: np.ndarray
    """int32 [P]: the prompt, then `offset` completion tokens made earlier."""
    sampling: Sampling
    group: int
    """Requests of one group with equal prompts share their prefill and its KV."""
    address: tuple[int, int, int, int]
    """(seed, step, prompt, generation): with the position, the address of every random draw."""
    offset: int = 0
    """Completion tokens already in `tokens`: draw t uses u(address, offset + t)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """What came of a request: the new tokens only."""

    id: int
    tokens: np.ndarray
    """int32 [C]."""
    logprobs: np.ndarray
    """float32 [C]."""
    versions: np.ndarray
    """int32 [C]: the policy version that made each token."""
    finish_reason: FinishReason
    logits: np.ndarray | None = None
    """float32 [C, V], where the request asked for them."""


def aborted(request: Request) -> Output:
    """The output of a request that was aborted before it made a token.

    >>> r = Request(id=3, tokens=np.array([5]), sampling=Sampling(), group=0, address=(0, 0, 0, 0))
    >>> aborted(r).id, aborted(r).finish_reason, len(aborted(r).tokens)
    (3, 'abort', 0)
    """
    none = np.zeros(0, np.int32)
    return Output(id=request.id, tokens=none, logprobs=none.astype(np.float32), versions=none, finish_reason="abort")


@dataclass(frozen=True, kw_only=True)
class EngineCaps:
    """What an engine can do; asked, never guessed with hasattr."""

    logprobs: bool = True
    """Reports the sampler's logprobs."""
    shared_weights: bool = False
    """Reads the trainer's own parameters: `update(version)` needs no weights."""
    addressed: bool = False
    """Draws follow Request.address, whatever else is in the batch."""
    stop_strings: bool = True
    abort: bool = False
    sleep: bool = False
    logits: bool = False


@runtime_checkable
class RolloutEngine(Protocol):
    """What the cluster asks of an engine."""

    caps: EngineCaps

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises EngineError, with the numbers, for one that could never fit; none is queued then."""
        ...

    def poll(self, timeout_s: float | None = None) -> list[Output]:
        """Computes until something finishes (or the time is up) and returns it; [] = nothing in flight."""
        ...

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now; what they had made comes back with finish_reason "abort"."""
        ...

    def update(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version; weights=None = shared parameters. Drops caches, refreshes derived weights."""
        ...

    def sleep(self) -> None:
        """Frees KV memory (and weights, where the engine holds its own)."""
        ...

    def wake(self) -> None:
        """Undoes sleep."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...
