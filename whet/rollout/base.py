"""The engine protocol: requests in, finished completions out, token ids on both sides.

An engine computes only inside `step`. So it is deterministic without threads, and is paused while nobody calls it.
Left out on purpose: text. An engine decodes only to find stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from whet.errors import EngineError, lookup_error
from whet.ops.logits_processors import LogitsProcessors
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
    "check_caps",
    "sampling_processors",
]


CONSTRAINTS = ("grammar", "json_schema", "regex")
"""Kinds of constraints."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A language that the text of a completion must belong to.

    Raises: ConfigError: an unknown kind. Grammars.check finds errors inside the text.

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
    """The sampling parameters of one request.

    The processors run in the order of transformers: repetition penalty, forbidden ids, constraint and minimum length
    (stop ids are forbidden until then), temperature, top-k, top-p, min-p.
    """

    max_tokens: int = 64
    """The most tokens of a completion, stop token included."""
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
    """Each of these ends a completion, and is part of it."""
    stop: tuple[str, ...] = ()
    """Each of these in the decoded completion ends it, and is part of it. The decoded text has no special tokens: give
    their ids in stop_ids."""
    forbidden_ids: tuple[int, ...] = ()
    """Never drawn."""
    constraint: Constraint | None = None
    """The language of the completion's text; stop ids are drawn only where it may end."""
    logprobs_mode: str = "processed"
    """The distribution of the log-probabilities. "processed": the one that tokens are drawn from; "full": the whole
    distribution at the temperature, without top_p and the like."""
    generation_kwargs: tuple[tuple[str, Any], ...] = ()
    """Options of transformers' generate, (name, value) with tuples for lists: only for the hf engine."""
    return_logits: bool = False
    """Keep the raw logits of each drawn token (float32 [C, V]): for inspection, not for training."""


def sampling_processors(sampling: Sampling) -> LogitsProcessors:
    """Returns the distribution whose logprobs the sampler reports and the trainer computes.

    >>> sampling_processors(Sampling(top_k=3)).top_k, sampling_processors(Sampling(top_k=3, logprobs_mode="full")).full
    (3, True)
    """
    return LogitsProcessors(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        forbidden_ids=sampling.forbidden_ids,
        min_tokens=sampling.min_tokens,
        stop_ids=sampling.stop_ids,
        constrained=sampling.constraint is not None,
        full=sampling.logprobs_mode == "full",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion to draw.

    Example: Request(id=3, tokens=array([5, 6]), sampling=Sampling(max_tokens=8), group=1, rng_key=(0, 12, 1, 0)).
    """

    id: int
    tokens: np.ndarray
    """int32 [P]: the prompt, then the `offset` tokens of the completion that were drawn earlier."""
    sampling: Sampling
    group: int
    """Requests of one group are admitted together where they fit; equal prompts share their KV."""
    rng_key: tuple[int, int, int, int]
    """(seed, step, prompt, generation): with the number of the draw, it determines every random number."""
    offset: int = 0
    """For a resumed request: the number of completion tokens at the end of `tokens`. min_tokens counts them, a stop
    string may start in them, and a constraint has consumed them. Earlier turns and tools' answers are not included."""
    draw: int = 0
    """Number of the completion's first draw under its key: token t of the completion, those of `offset` included,
    uses u(rng_key, draw + t). A later turn starts after the draws of earlier turns; a resumed request keeps its
    number."""
    conversation: int | None = None
    """Requests of one conversation come one after the other, and each begins with the tokens of the one before it: an
    engine with caps.conversations runs only the new tokens. None = no conversation. It changes no token."""
    expected: int | None = None
    """Expected tokens of its completion, where the caller has a guess: long ones start first. None = max_tokens. It
    changes no token, except as batching does (docs/exactness.md)."""

    def resume_from(self, tokens: np.ndarray) -> Request:
        """Returns the request that resumes this one. Args: tokens: int [C], the completion tokens drawn for it.

        >>> r = Request(id=3, tokens=np.array([5]), sampling=Sampling(max_tokens=8), group=0, rng_key=(0, 0, 0, 0))
        >>> r.resume_from(np.array([7, 2])).offset, r.resume_from(np.array([7, 2])).sampling.max_tokens
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
    """Tokens of a request in flight: all so far (`peek`), or those since the last PartialOutput (`stream`)."""

    id: int
    tokens: np.ndarray
    """int32 [C]: the new tokens only."""
    logprobs: np.ndarray
    """float32 [C]."""
    versions: np.ndarray
    """int32 [C]: the policy version that drew each token."""
    finish_reason: FinishReason | None = None
    """Why it ended; None = it continues. rollout/stopping.py has the rule."""

    def skip_tokens(self, count: int) -> PartialOutput:
        """Returns the same without its first tokens."""
        return replace(self, tokens=self.tokens[count:], logprobs=self.logprobs[count:], versions=self.versions[count:])

    def to_output(self, reason: FinishReason, logits: np.ndarray | None = None) -> Output:
        """Returns the result of the request, whose tokens these are."""
        return Output(**{**vars(self), "finish_reason": reason}, logits=logits)


@dataclass(frozen=True, kw_only=True, eq=False)
class Output(PartialOutput):
    """The result of a request."""

    finish_reason: FinishReason = field()  # required
    logits: np.ndarray | None = None
    """float32 [C, V], where the request asked for them."""


@dataclass(frozen=True, kw_only=True)
class EngineCaps:
    """The capabilities of an engine."""

    logprobs: bool = True
    """Reports the sampler's logprobs."""
    shared_weights: bool = False
    """Reads the trainer's own parameters: `update_weights(version)` needs no weights."""
    adapters: bool = False
    """Its copy of a model with an adapter keeps the adapter apart: `update_weights` takes only the trained tensors."""
    keyed_draws: bool = False
    """Draws depend only on Request.rng_key, not on other requests of the batch."""
    stop_strings: bool = True
    abort: bool = False
    """`abort` ends requests early."""
    sleep: bool = False
    sleep_keeps_weights: bool = True
    """An engine with its own weights has them after a sleep; without, it needs an update."""
    logits: bool = False
    generation_kwargs: bool = False
    """Supports transformers' own options (Sampling.generation_kwargs)."""
    peek: bool = False
    """`peek` shows tokens as they are drawn."""
    updates_in_flight: bool = False
    """`update_weights` may come between two tokens of a completion; without it, only between two completions."""
    conversations: bool = False
    """Keeps the KV of a conversation, so that its next turn runs only the new tokens."""
    constraints: bool = False
    """Draws under Sampling.constraint."""
    experimental: bool = False
    """It has never been run on this kind of hardware; a warning was logged when it was built."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The state of an engine, and its counts since it was built. Numbers that an engine does not know are 0.

    >>> now = EngineStats(live=6, max_batch=8, steps=10, row_steps=70, prefilled=32)
    >>> now.occupancy, now.mean_batch_size, now.since(EngineStats(prefilled=30)).prefilled
    (0.75, 7.0, 2)
    """

    live: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Requests that wait to be admitted."""
    held: int = 0
    """Conversations whose KV is held for their next turn."""
    max_batch: int = 0
    """The most sequences of the batch."""
    kv_tokens: int = 0
    """KV memory in tokens, padding included."""
    kv_tokens_bound: int | None = None
    """The bound of kv_tokens; None = no bound."""
    kv_bytes: int = 0
    """KV memory in bytes."""
    prefilled: int = 0
    """Prompt tokens run through the model, since construction."""
    reused: int = 0
    """Prompt tokens whose KV existed already (of an equal prompt, or of an earlier turn), since construction."""
    generated: int = 0
    """Completion tokens, since construction."""
    steps: int = 0
    """Decode steps, since construction."""
    row_steps: int = 0
    """Sequences decoded, summed over the steps."""

    @property
    def in_flight(self) -> int:
        """Requests without an output yet."""
        return self.live + self.waiting

    @property
    def occupancy(self) -> float:
        """Share of the batch in use now."""
        return self.live / self.max_batch if self.max_batch else 0.0

    @property
    def mean_batch_size(self) -> float:
        """Mean number of sequences of a decode step."""
        return self.row_steps / self.steps if self.steps else 0.0

    def plus(self, **counts: int) -> EngineStats:
        """Returns the same with these counts added, such as steps=4."""
        return replace(self, **{name: vars(self)[name] + n for name, n in counts.items()})

    def since(self, earlier: EngineStats) -> EngineStats:
        """Returns the same, with counts since an earlier state in place of those since construction."""
        counts = ("prefilled", "reused", "generated", "steps", "row_steps")
        return replace(self, **{name: vars(self)[name] - vars(earlier)[name] for name in counts})


@runtime_checkable
class RolloutEngine(Protocol):
    """The methods of an engine."""

    caps: EngineCaps

    @property
    def backends(self) -> Mapping[str, str]:
        """The implementation of each part, and why, for environment.json; {} = nothing to report."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises EngineError, with the numbers, for one that could never fit; none is queued then."""
        ...

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Computes until requests finish (or the time is up) and returns their outputs; [] = nothing in flight.

        One call may run many decode steps, unlike vLLM's `LLMEngine.step`. timeout_s=0.0 computes as little as the
        engine can, so that `peek` shows tokens as they are drawn.
        """
        ...

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """Returns all tokens so far of requests in flight, without computing; {} without caps.peek."""
        ...

    def stats(self) -> EngineStats:
        """Returns its state now, and its counts since construction."""
        ...

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now. Returns: their tokens so far, with finish_reason "abort"."""
        ...

    def update_weights(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version, and new weights where it has its own; drops the KV of the old ones."""
        ...

    def sleep(self) -> None:
        """Frees KV memory (and weights, where the engine has its own)."""
        ...

    def wake_up(self) -> None:
        """Undoes sleep."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


def check_caps(engine: RolloutEngine, sampling: Sampling) -> None:
    """Refuses a Sampling with a field that an engine does not support.

    Raises: EngineError: names the field, and an engine that supports it.
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
