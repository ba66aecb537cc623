"""The checks of a request that all engines share, and SamplingPlan: the distributions of a request."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import numpy as np

from whet.errors import ConfigError, EngineError, lookup_error
from whet.ops.logits_processors import LogitsProcessors
from whet.rollout.base import Request, Sampling, sampling_processors

__all__ = ["SamplingPlan", "check_request", "check_request_ids", "make_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingPlan:
    """A Sampling with its distributions."""

    sampling: Sampling
    processors: LogitsProcessors
    """The distribution to draw from."""
    reported: LogitsProcessors
    """The distribution of the reported logprobs."""


def make_plan(sampling: Sampling) -> SamplingPlan:
    """Returns the plan of a Sampling.

    Args: sampling: of a request.
    Returns: its plan.
    Raises: ConfigError: an unknown logprobs_mode, or a field out of its range.

    >>> make_plan(Sampling(top_k=3, logprobs_mode="full")).reported.plain
    True
    """
    if sampling.logprobs_mode not in ("processed", "full"):
        raise lookup_error("logprobs_mode", sampling.logprobs_mode, ["processed", "full"])
    processors = replace(sampling_processors(sampling), full=False)
    full = sampling.logprobs_mode == "full" and bool(sampling.generation_kwargs or not processors.plain)
    reported = replace(processors, full=True) if full else processors
    return SamplingPlan(sampling=sampling, processors=processors, reported=reported)


def check_request_ids(requests: Iterable[Request], in_flight: Container[int]) -> None:
    """Raises EngineError if the id of a request is already in flight, or occurs twice."""
    ids: set[int] = set()
    for r in requests:
        if r.id in in_flight or r.id in ids:
            raise EngineError(
                f"request id {r.id} is in flight already; an id must be unique until its output is returned"
            )
        ids.add(r.id)


def check_request(
    request: Request,
    *,
    vocabulary: int,
    positions: int | None,
    decodes: bool,
    constrains: bool = False,
    closed: bool = False,
) -> None:
    """Refuses a request that could never be served.

    Args:
        request: to check.
        vocabulary: the number of the model's ids.
        positions: the most tokens of a sequence; None = no limit.
        decodes: whether the engine can turn tokens into text.
        constrains: whether the engine has grammars, for constraints.
        closed: whether the engine was closed.
    Raises: EngineError: with the numbers; ConfigError: stop strings without a decode function, a constraint without
        grammars.
    """
    s, name = request.sampling, f"request {request.id}"
    if closed:
        raise EngineError(f"{name} was sent to a closed engine; make another")
    tokens = request.tokens
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise EngineError(f"{name}: tokens must be an array of integer ids [P], got {got}; np.array(ids, np.int32)")
    rng_key = tuple(request.rng_key)
    if len(rng_key) != 4 or not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in rng_key):
        raise EngineError(
            f"{name}: rng_key must be four integers, (seed, step, prompt, generation), got {request.rng_key!r}"
        )
    length = len(tokens)
    if length == 0:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    if s.max_tokens < 1:
        raise EngineError(f"{name}: max_tokens {s.max_tokens} must be at least 1")
    if not 0 <= request.offset < length:
        raise EngineError(
            f"{name}: offset {request.offset} must be in 0..{length - 1}: its {length} tokens include them"
        )
    if request.draw < 0:
        raise EngineError(f"{name}: draw {request.draw} must be 0 or more: draws are counted from the rng_key's first")
    if positions is not None and length + s.max_tokens > positions:
        raise EngineError(
            f"{name} can never fit: {length} prompt + {s.max_tokens} new tokens = {length + s.max_tokens}, but the "
            f"model has {positions} positions; shorten the prompt or max_tokens"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise EngineError(f"{name}: token {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
    if wrong := [i for i in (*s.stop_ids, *s.forbidden_ids) if not 0 <= i < vocabulary]:
        raise EngineError(f"{name}: stop or forbidden id {wrong[0]} is outside the vocabulary of {vocabulary}")
    barred = s.forbidden_ids + (s.stop_ids if s.min_tokens > request.offset else ())
    if len(barred) >= vocabulary and len(set(barred)) == vocabulary:
        early = f", stop ids until token {s.min_tokens}" if len(set(s.forbidden_ids)) < vocabulary else ""
        raise EngineError(f"{name}: all {vocabulary} ids are forbidden{early}; leave one to draw")
    if "" in s.stop:
        raise EngineError(f"{name}: an empty stop string would end every completion at once; leave it out")
    if s.stop and not decodes:
        raise ConfigError(
            f"{name} has stop strings {s.stop}, but the engine was built without a decode function; pass decode="
        )
    if s.constraint is not None and not constrains:
        raise ConfigError(
            f"{name} has the constraint {s.constraint}, but the engine was built without grammars=, which constraints "
            "need; pass grammars=Grammars(tokenizer, vocabulary=...) to an engine that takes it ('embedded', 'hf')"
        )
