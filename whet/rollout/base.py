"""The engine protocol: requests in, finished completions out, token ids on both sides.

An engine is pull-driven: it computes only inside `step`, so it is deterministic without threads, and pausing it is
not calling it. Left out on purpose: text. An engine decodes only to look for stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from whet.errors import EngineError, lookup_error
from whet.ops.support import Support
from whet.types import FinishReason

__all__ = [
    "Constraint",
    "EngineCaps",
    "EngineStats",
    "Output",
    "PartialOutput",
    "Request",
    "RolloutEngine",
    "Sampling",
    "aborted",
    "check_caps",
    "support_of",
]


CONSTRAINTS = ("grammar", "json_schema", "regex")
"""Kinds of languages."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The language that a completion's text lies in.

    Raises: ConfigError: an unknown kind. Errors inside the text are found by Grammars.check.

    >>> Constraint(kind="regex", text="[0-9]+")
    Constraint(kind='regex', text='[0-9]+')
    """

    kind: str
    """"regex": the whole text matches it; "json_schema": a JSON text that the schema allows; "grammar": Lark."""
    text: str
    """The expression, the schema (as JSON) or the grammar (its first rule is `start`)."""

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINTS:
            raise lookup_error("constraint", self.kind, CONSTRAINTS)

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{self.kind} {text!r}"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the tokens of one request; ids and numbers only.

    The order is that of transformers: repetition penalty, forbidden ids, constraint and minimum length (stop ids
    forbidden until then), temperature, top-k, top-p, min-p.
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
    """Any of these in the decoded completion ends it; the text up to it, and the stop string, stay. Special tokens are
    not in that text: give their ids in stop_ids."""
    forbidden_ids: tuple[int, ...] = ()
    """Never drawn."""
    constraint: Constraint | None = None
    """The language that the completion's text lies in; stop ids are drawn only where it may end."""
    logprob_support: str = "sampling"
    """"sampling": of the exact distribution drawn from; "full": temperature alone."""
    generation_kwargs: tuple[tuple[str, Any], ...] = ()
    """Options of transformers' generate, (name, value) with tuples for lists: for the hf engine alone."""
    return_logits: bool = False
    """Keep the raw logits of each drawn token (float32 [C, V]): for inspection, not for training."""



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
        constrained=sampling.constraint is not None,
        full=sampling.logprob_support == "full",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion to make.

    Example: Request(id=3, tokens=array([5, 6]), sampling=Sampling(max_tokens=8), group=1, address=(0, 12, 1, 0)).
    """

    id: int
    tokens: np.ndarray
    """int32 [P]: what stands before the completion, then `offset` tokens of it that were made earlier."""
    sampling: Sampling
    group: int
    """Requests of one group are admitted together where they can be; those with equal prompts share its KV."""
    address: tuple[int, int, int, int]
    """(seed, step, prompt, generation): with the position, the address of every random draw."""
    offset: int = 0
    """Completion tokens already in `tokens`, of a resumed request: min_tokens counts them, a stop string may begin
    in them, a constraint has consumed them. Earlier turns, and what a tool has answered, are not among them."""
    draw: int = 0
    """Number of the completion's first draw under its address: token t of the completion, those of `offset` counted,
    uses u(address, draw + t). A later turn begins after the draws of those before it; a resumed request keeps
    its number."""
    conversation: int | None = None
    """Requests of one conversation come one after the other, each beginning with what the one before it held: an engine
    with caps.conversations encodes only what is new. None = on its own. It changes no token."""
    expected: int | None = None
    """Tokens that its completion is expected to have, where the caller has a guess: long ones start first. None =
    max_tokens. It changes no token, except as batching does (docs/exactness.md)."""

    def after(self, tokens: np.ndarray) -> Request:
        """The request that resumes from here. Args: tokens: int [C], the completion tokens made since.

        >>> r = Request(id=3, tokens=np.array([5]), sampling=Sampling(max_tokens=8), group=0, address=(0, 0, 0, 0))
        >>> r.after(np.array([7, 2])).offset, r.after(np.array([7, 2])).sampling.max_tokens
        (2, 6)
        """
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]).astype(np.int32),
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(tokens)),
            offset=self.offset + len(tokens),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialOutput:
    """Tokens of a request in flight: all so far (`peek`), or those since the last look (`stream`)."""

    id: int
    tokens: np.ndarray
    """int32 [C]: the new tokens only."""
    logprobs: np.ndarray
    """float32 [C]."""
    versions: np.ndarray
    """int32 [C]: the policy version that made each token."""
    finish_reason: FinishReason | None = None
    """None = more is to come."""

    def after(self, count: int) -> PartialOutput:
        """The same without its first tokens."""
        return replace(self, tokens=self.tokens[count:], logprobs=self.logprobs[count:], versions=self.versions[count:])

    def finished(self, reason: FinishReason, logits: np.ndarray | None = None) -> Output:
        """The result of the request, if these are all of its tokens."""
        return Output(**{**vars(self), "finish_reason": reason}, logits=logits)


@dataclass(frozen=True, kw_only=True, eq=False)
class Output(PartialOutput):
    """The result of a request."""

    finish_reason: FinishReason = field()  # required
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
    adapters: bool = False
    """Its copy of an adapted model has the adapter apart: `update` takes the tensors that are trained and no others."""
    addressed: bool = False
    """Draws follow Request.address, whatever else is in the batch."""
    stop_strings: bool = True
    abort: bool = False
    """Requests can be ended before their time."""
    sleep: bool = False
    logits: bool = False
    generation_kwargs: bool = False
    """Supports transformers' own options (Sampling.generation_kwargs)."""
    peek: bool = False
    """Tokens can be seen as they are made."""
    updates_in_flight: bool = False
    """New weights are taken between two tokens of a completion; without it, between two completions."""
    conversations: bool = False
    """Keeps the KV of a conversation, so that its next turn encodes only what is new."""
    constraints: bool = False
    """Draws under Sampling.constraint."""
    experimental: bool = False
    """Has never run on the hardware where it is now; a warning was logged when it was built."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Where an engine stands, and what it has done since it was built. An engine leaves at 0 what it can't tell.

    >>> now = EngineStats(live=6, max_batch=8, steps=10, row_steps=70, prefilled=32)
    >>> now.occupancy, now.mean_rows, now.since(EngineStats(prefilled=30)).prefilled
    (0.75, 7.0, 2)
    """

    live: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Requests that wait to be admitted."""
    held: int = 0
    """Finished sequences whose KV is held for the next turn of their conversation."""
    max_batch: int = 0
    """Sequences that the batch can have."""
    kv_tokens: int = 0
    """KV memory in tokens, padding included."""
    kv_tokens_bound: int | None = None
    """Most of them; None = no bound."""
    kv_bytes: int = 0
    """KV memory in bytes."""
    prefilled: int = 0
    """Prompt tokens that were run through the model, since construction."""
    reused: int = 0
    """Prompt tokens whose KV was there already: shared by requests with equal prompts, or held, since construction."""
    generated: int = 0
    """Completion tokens, since construction."""
    steps: int = 0
    """Decode steps, since construction."""
    row_steps: int = 0
    """Sequences decoded, summed over the steps."""

    @property
    def in_flight(self) -> int:
        """Requests whose output has not come."""
        return self.live + self.waiting

    @property
    def occupancy(self) -> float:
        """Share of the batch that is live now."""
        return self.live / self.max_batch if self.max_batch else 0.0

    @property
    def kv_occupancy(self) -> float:
        """Share of the KV bound that is held now; 0 without a bound."""
        return self.kv_tokens / self.kv_tokens_bound if self.kv_tokens_bound else 0.0

    @property
    def kv_bytes_bound(self) -> int | None:
        """The KV bound in bytes; None without one, or before the first KV shows what a token takes."""
        if self.kv_tokens_bound is None or not self.kv_bytes:
            return None
        return self.kv_bytes // self.kv_tokens * self.kv_tokens_bound

    @property
    def mean_rows(self) -> float:
        """Sequences of a decode step, on average."""
        return self.row_steps / self.steps if self.steps else 0.0

    def since(self, earlier: EngineStats) -> EngineStats:
        """The same with what was done since an earlier look instead of since construction."""
        done = ("prefilled", "reused", "generated", "steps", "row_steps")
        return replace(self, **{name: vars(self)[name] - vars(earlier)[name] for name in done})


@runtime_checkable
class RolloutEngine(Protocol):
    """What the cluster asks of an engine."""

    caps: EngineCaps

    @property
    def backends(self) -> Mapping[str, str]:
        """Which implementation runs each part, and why, for environment.json; {} = nothing to report."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises EngineError, with the numbers, for one that could never fit; none is queued then."""
        ...

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Computes until something finishes (or the time is up) and returns it; [] = nothing in flight.

        timeout_s=0.0 computes as little as the engine can: to look at tokens as they are made.
        """
        ...

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """All tokens made so far of requests that are in flight, without computing; {} without caps.peek."""
        ...

    def stats(self) -> EngineStats:
        """Where it stands, and what it has done since it was built."""
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


def check_caps(engine: RolloutEngine, sampling: Sampling) -> None:
    """Refuses a Sampling that asks for what an engine does not support.

    Raises: EngineError: with the field and the engine that does.
    """
    name, caps = f"the engine {type(engine).__name__}", engine.caps
    if sampling.stop and not caps.stop_strings:
        raise EngineError(f"{name} does not support stop strings; use stop ids (rollout.eos_tokens)")
    if sampling.return_logits and not caps.logits:
        raise EngineError(f"{name} does not return logits; use rollout_engine 'embedded'")
    if sampling.generation_kwargs and not caps.generation_kwargs:
        names = ", ".join(option for option, _ in sampling.generation_kwargs)
        raise EngineError(f"{name} does not support {names}; use rollout_engine 'hf'")
    if sampling.constraint is not None and not caps.constraints:
        raise EngineError(
            f"{name} does not support constraints; use rollout_engine 'embedded' or 'hf', or leave rollout.constraint "
            f"out ({sampling.constraint})"
        )
