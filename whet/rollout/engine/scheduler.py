"""What waits, and what is admitted.

Requests wait in the order of their submission; inside one submission whole groups are sorted so that the longest come
first: they would otherwise run on alone at the end. Nothing here depends on the clock, and the order changes no token,
since every draw has an address (but for what "alone and in a crowd" changes: docs/exactness.md).
Memory is reserved for the longest a completion may become, so what was admitted never has to leave. Earlier turns of a
conversation are held in what is left over, and leave first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from whet.errors import EngineError
from whet.rollout.base import Output, PartialOutput, Request
from whet.rollout.constrained_decoding import Matcher
from whet.rollout.engine.conversation_cache import CachedSequence, ConversationCache, common_length
from whet.rollout.engine.kv_cache import padded_length
from whet.types import FinishReason

__all__ = ["Prefix", "Scheduler", "SequenceState", "VersionSpan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class VersionSpan:
    """Tokens that a sequence drew between its admission and its leaving the batch, under one policy version."""

    tokens: np.ndarray
    logprobs: np.ndarray
    version: int
    logits: np.ndarray | None = None


@dataclass(kw_only=True, eq=False)
class SequenceState:
    """A request that waits or is decoded, and what it has drawn so far."""

    request: Request
    plan: int
    """Index of its Sampling among the engine's plans."""
    matcher: Matcher | None = None
    """Its place in the language that constrains it."""
    spans: list[VersionSpan] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    """float32 [steps, V] blocks since its admission, where the request asked for them."""

    @property
    def made(self) -> int:
        """Tokens of its spans: drawn before it was last admitted."""
        return sum(len(p.tokens) for p in self.spans)

    @property
    def left(self) -> int:
        """Tokens that it may still draw when it is admitted."""
        return self.request.sampling.max_tokens - self.made

    @property
    def context(self) -> np.ndarray:
        """int32: all tokens to prefill: the request's, then those of its spans."""
        return np.concatenate([self.request.tokens, *(p.tokens for p in self.spans)]).astype(np.int32)

    def piece(self, *current: VersionSpan) -> PartialOutput:
        """What it has drawn so far. Args: current: the span that is not yet one of its own."""
        parts = [*self.spans, *current]
        versions = (np.full(len(p.tokens), p.version, np.int32) for p in parts)
        return PartialOutput(
            id=self.request.id,
            tokens=np.concatenate([np.zeros(0, np.int32), *(p.tokens for p in parts)]).astype(np.int32),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(p.logprobs for p in parts)]).astype(np.float32),
            versions=np.concatenate([np.zeros(0, np.int32), *versions]),
        )

    def output(self, reason: FinishReason) -> Output:
        """What the protocol returns."""
        logits = [span.logits for span in self.spans if span.logits is not None]
        return self.piece().finished(reason, np.concatenate(logits) if logits else None)


@dataclass(kw_only=True, eq=False)
class Prefix:
    """A distinct prompt that is prefilled once, and where its KV lies."""

    tokens: np.ndarray
    bucket: int
    """Places of a row of its store."""
    group_prompt_length: int
    """Tokens of it that are the prompt of a group; the others were made by one of its sequences."""
    source: CachedSequence | Prefix | None = None
    """Where its first `filled` tokens are copied from, until they are."""
    filled: int = 0
    """Tokens from the first whose KV is there, or comes from the source; the others are to be run."""
    slot: int = 0
    """Row of its bucket's store."""
    live: int = 0
    """Sequences that read it."""
    hidden: Tensor | None = None
    """[d]: the last hidden state of its last token; None = not prefilled."""

    @property
    def key(self) -> bytes:
        """What it is found by: requests with equal prompts share it."""
        return self.tokens.tobytes()


class Scheduler:
    """The queue and the memory account. KV is counted in tokens, padding of the buffers included.

    An example: room for 4 sequences and 96 tokens of KV. Two requests of a group have the same prompt of 3 tokens (a
    row of 32) and may make 10 tokens each; a third, of another group, may make 40:

    >>> from whet.rollout.base import Sampling
    >>> def seq(i, prompt, group, new):
    ...     what = {"tokens": np.array(prompt, np.int32), "sampling": Sampling(max_tokens=new)}
    ...     return SequenceState(request=Request(id=i, group=group, address=(0, 0, group, i), **what), plan=0)
    >>> scheduler = Scheduler(max_batch=4, kv_cache_tokens=96)
    >>> scheduler.add([seq(0, [5, 6, 7], 0, 10), seq(1, [5, 6, 7], 0, 10), seq(2, [8, 9], 1, 40)])
    >>> [seq.request.id for seq in scheduler.queue]  # the longest completion first, groups together
    [2, 0, 1]

    Each live row is given the places of the longest, since the rows are one rectangle. The third alone takes 32 + 40;
    with the first that would be 32 + 32 for two prompts and 2 x 40 for two rows, which is over 96:

    >>> free = {"conversations": ConversationCache(None), "idle": 1}
    >>> first = scheduler.admit(live=0, longest=0, prefixes={}, **free)
    >>> [(seq.request.id, p.bucket) for seq, p in first]
    [(2, 32)]

    When it has ended the two others go in, over one prompt: 32 + 2 x 10:

    >>> (a, p), (b, q) = scheduler.admit(live=0, longest=0, prefixes={}, **free)
    >>> a.request.id, b.request.id, p is q
    (0, 1, True)
    """

    def __init__(self, *, max_batch: int, kv_cache_tokens: int | None) -> None:
        self.max_batch = max_batch
        self.kv_cache_tokens = kv_cache_tokens
        self.queue: deque[SequenceState] = deque()

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that would not fit in an empty cache; one that fitted may go on."""
        new, row = request.sampling.max_tokens, padded_length(len(request.tokens))
        if request.offset:  # what it has made takes no more room than it was given when it began: see _row
            row = min(row, padded_length(len(request.tokens) - request.offset) + request.offset)
        if self.kv_cache_tokens is not None and row + new > self.kv_cache_tokens:
            raise EngineError(
                f"request {request.id} can never fit: {len(request.tokens)} prompt tokens (a row of {row}) + {new} new "
                f"tokens = {row + new}, the cache holds {self.kv_cache_tokens}; raise rollout.kv_cache_tokens, or "
                "shorten the prompt or max_tokens"
            )

    def add(self, seqs: Sequence[SequenceState]) -> None:
        """Queues sequences behind those that wait; groups stay together, those expected to grow longest first."""
        longest: dict[int, tuple[int, int]] = {}
        for seq in seqs:
            guess = seq.request.expected
            size = (seq.left if guess is None else min(seq.left, guess), len(seq.request.tokens))
            longest[seq.request.group] = max(longest.get(seq.request.group, (0, 0)), size)
        first = {g: i for i, g in enumerate(longest)}
        self.queue.extend(
            sorted(seqs, key=lambda seq: (*(-x for x in longest[seq.request.group]), first[seq.request.group]))
        )

    def resume(self, seqs: Sequence[SequenceState]) -> None:
        """Puts sequences that had been admitted back to the front."""
        self.queue.extendleft(reversed(seqs))

    def remove(self, ids: set[int]) -> list[SequenceState]:
        """Takes sequences out of the queue, by request id."""
        out = [seq for seq in self.queue if seq.request.id in ids]
        self.queue = deque(seq for seq in self.queue if seq.request.id not in ids)
        return out

    def admit(
        self, *, live: int, longest: int, prefixes: dict[bytes, Prefix], conversations: ConversationCache, idle: int
    ) -> list[tuple[SequenceState, Prefix]]:
        """Admits sequences, first come first served, while slots and memory last.

        Waits until `idle` slots are free at once, so that prompts are prefilled together.

        Args:
            live: sequences in the batch.
            longest: the most tokens that one of them may draw.
            prefixes: those whose KV is held.
            conversations: earlier turns; they leave where memory is wanted.
            idle: free slots below which none is admitted, unless nothing else waits or runs.

        Returns: sequences with their prefixes; new prefixes are not in `prefixes` yet.
        """
        free = self.max_batch - live
        if not self.queue or free < min(idle, len(self.queue)):
            return []
        places = sum(p.bucket for p in prefixes.values())
        known, out = dict(prefixes), []
        group_prompts: dict[bytes, Prefix] = {}
        for p in known.values():
            group_prompts.setdefault(p.tokens[: p.group_prompt_length].tobytes(), p)
        while self.queue and len(out) < free:
            seq = self.queue[0]
            context = seq.context
            group_prompt_length = len(seq.request.tokens) - seq.request.offset
            prefix = known.get(context.tobytes()) or Prefix(
                tokens=context, bucket=self._row(seq), group_prompt_length=group_prompt_length
            )
            needed = max(longest, seq.left)
            asked = places + (0 if prefix.key in known else prefix.bucket)
            if not self._fits(asked + (live + len(out) + 1) * needed, seq, out, conversations) and (live or out):
                break  # a lone sequence always goes on: it was checked when it came
            if prefix.key not in known:
                known[prefix.key] = prefix
                first = group_prompts.setdefault(context[:group_prompt_length].tobytes(), prefix)
                prefix.source = conversations.get(seq.request.conversation) or (None if first is prefix else first)
                if prefix.source is not None:  # the last token is run in any case: its hidden state is wanted
                    prefix.filled = min(common_length(prefix.source.tokens, context), len(context) - 1)
            places, longest = asked, needed
            out.append((self.queue.popleft(), prefix))
        return out

    def _row(self, seq: SequenceState) -> int:
        """Places of the row of a sequence's context; what a sequence has made must not lift it over the bound."""
        length = len(seq.request.tokens) + seq.made
        if self.kv_cache_tokens is None:
            return padded_length(length)
        return min(padded_length(length), self.kv_cache_tokens - seq.left)

    def _fits(
        self,
        places: int,
        seq: SequenceState,
        admitted: Sequence[tuple[SequenceState, Prefix]],
        conversations: ConversationCache,
    ) -> bool:
        """Whether a sequence fits with so many places in use, once earlier turns have left for it."""
        if self.kv_cache_tokens is None:
            return True
        used = {s.request.conversation for s, p in admitted if isinstance(p.source, CachedSequence)}  # to be copied
        room = self.kv_cache_tokens - places
        if room < sum(len(h.tokens) for h in map(conversations.get, used) if h is not None):
            return False
        conversations.shrink(room, [seq.request.conversation, *used])
        return True
