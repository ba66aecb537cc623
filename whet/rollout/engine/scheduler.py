"""The waiting queue, and which requests are admitted to the batch.

Requests wait in the order of their submission. Within one submission the groups with the longest completions come
first, because they would otherwise run on alone at the end. Nothing here depends on the clock. The order changes no
token, since every draw has a key (docs/exactness.md names the exception: the last bits of a logit).
In stores, memory is reserved for the longest completion that a request allows, so no admitted request is ever evicted.
In a KVPool a row has an eighth of it at first, and more as it grows: few completions are as long as they may be. Where
there is no more, rows are queued again with the tokens that they have drawn, those with the fewest first. Earlier turns
of conversations are kept in the remaining memory, and are dropped before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from whet.errors import EngineError
from whet.rollout.base import Request
from whet.rollout.engine.kv_cache import padded_length
from whet.rollout.engine.places import Places
from whet.rollout.engine.prefix_cache import CachedSequence, PrefixCache, common_prefix_length
from whet.rollout.in_flight import InFlightRequest

__all__ = ["Prefix", "Scheduler", "row_places"]

PARTS = 8
"""A row of a KVPool has 1, 2, ... or all of this many parts of the places of its longest completion."""


def row_places(longest: int, needed: int) -> int:
    """Returns the places of a row in a KVPool: a multiple of an eighth of its longest completion, or all of them.

    Args: longest: tokens that may be drawn. needed: those that the row has to hold now.

    >>> row_places(1024, 1), row_places(1024, 129), row_places(30, 29)
    (128, 256, 30)
    """
    part = -(-longest // PARTS)
    return min(longest, -(-needed // part) * part)


@dataclass(kw_only=True, eq=False)
class Prefix:
    """A distinct prompt, which is prefilled once, and where its KV lies."""

    tokens: np.ndarray
    bucket: int
    """Places of a row in its store: the store is found by this number."""
    group_prompt_length: int
    """Tokens of it that are the prompt of a group; the others were drawn by one of its requests."""
    source: CachedSequence | Prefix | None = None
    """Where the KV of its first `num_computed_tokens` is copied from; None = there is nothing to copy."""
    num_computed_tokens: int = 0
    """Tokens from the first whose KV exists, here or in the source; the others have to be run."""
    slot: int = 0
    """Row of its store."""
    place: int = 0
    """In a KVPool: the place of its first token."""
    ref_count: int = 0
    """Live rows that read it."""
    last_hidden: Tensor | None = None
    """[d]: the last hidden state of its last token; None = not prefilled."""

    @property
    def key(self) -> bytes:
        """Its tokens as a dictionary key: requests with equal prompts share it."""
        return self.tokens.tobytes()


class Scheduler:
    """The waiting queue and the account of KV memory, which counts tokens, padding of the buffers included.

    An example: room for 4 sequences and 96 tokens of KV. Two requests of a group have the same prompt of 3 tokens (a
    row of 32) and allow 10 new tokens each; a third, of another group, allows 40:

    >>> from whet.rollout.base import Sampling
    >>> def flight(i, prompt, group, new):
    ...     fields = {"tokens": np.array(prompt, np.int32), "sampling": Sampling(max_tokens=new)}
    ...     return InFlightRequest(request=Request(id=i, group=group, rng_key=(0, 0, group, i), **fields))
    >>> scheduler = Scheduler(max_batch=4, kv_cache_tokens=96)
    >>> scheduler.add([flight(0, [5, 6, 7], 0, 10), flight(1, [5, 6, 7], 0, 10), flight(2, [8, 9], 1, 40)])
    >>> [flight.request.id for flight in scheduler.queue]  # the longest completion first, groups together
    [2, 0, 1]

    Each live row gets the places of the longest, since the rows are one rectangle. The third request takes
    32 + 40 by itself. With the first it would be 32 + 32 for two prompts and 2 x 40 for two rows, which is over 96:

    >>> memory = {"conversations": PrefixCache(None), "min_free": 1}
    >>> admitted = scheduler.admit(num_live=0, longest=0, prefixes={}, **memory)
    >>> [(flight.request.id, prefix.bucket) for flight, prefix in admitted]
    [(2, 32)]

    When it has ended, the two others are admitted over one prompt: 32 + 2 x 10:

    >>> (a, p), (b, q) = scheduler.admit(num_live=0, longest=0, prefixes={}, **memory)
    >>> a.request.id, b.request.id, p is q
    (0, 1, True)
    """

    def __init__(self, *, max_batch: int, kv_cache_tokens: int | None) -> None:
        self.max_batch = max_batch
        self.kv_cache_tokens = kv_cache_tokens
        self.pool: Places | None = None
        """The places of a KVPool, which prompts and rows take when they are admitted; None = they lie in stores."""
        self.queue: deque[InFlightRequest] = deque()
        self.is_full = False
        """Rows were queued again for want of places: nothing is admitted beside others before one of them ends."""

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that does not fit into an empty cache; one that once fitted may continue."""
        new, row = request.sampling.max_tokens, padded_length(len(request.tokens))
        if request.offset:  # its earlier tokens take no more room than was reserved for them: see _row_length
            row = min(row, padded_length(len(request.tokens) - request.offset) + request.offset)
        bound = self.kv_cache_tokens if self.pool is None else self.pool.capacity
        if self.pool is not None:
            row = len(request.tokens)
        if bound is not None and row + new > bound:
            raise EngineError(
                f"request {request.id} can never fit: {len(request.tokens)} prompt tokens (a row of {row}) + {new} new "
                f"tokens = {row + new}, but the cache holds {bound}; raise rollout.kv_cache_tokens, or "
                "shorten the prompt or max_tokens"
            )

    def places(self, prompts: Mapping[int, int], rows: int, longest: int) -> int:
        """Counts the places of prompts and completions.

        Args: prompts: how many there are in each bucket. rows: of the batch. longest: tokens of a completion.
        """
        return sum(bucket * n for bucket, n in prompts.items()) + rows * longest

    def add(self, flights: Sequence[InFlightRequest]) -> None:
        """Queues requests behind those that wait. Groups stay together; those expected to grow longest come first."""
        longest: dict[int, tuple[int, int]] = {}
        for flight in flights:
            request, expected = flight.request, flight.request.expected
            length = flight.remaining if expected is None else min(flight.remaining, expected)
            longest[request.group] = max(longest.get(request.group, (0, 0)), (length, len(request.tokens)))
        order = {group: i for i, group in enumerate(longest)}

        def place(flight: InFlightRequest) -> tuple[int, int, int]:
            length, prompt = longest[flight.request.group]
            return -length, -prompt, order[flight.request.group]

        self.queue.extend(sorted(flights, key=place))

    def resume(self, flights: Sequence[InFlightRequest]) -> None:
        """Puts requests that had been admitted back to the front of the queue."""
        self.queue.extendleft(reversed(flights))

    def remove(self, ids: set[int]) -> list[InFlightRequest]:
        """Takes requests out of the queue, by id."""
        removed = [flight for flight in self.queue if flight.request.id in ids]
        self.queue = deque(flight for flight in self.queue if flight.request.id not in ids)
        return removed

    def admit(
        self,
        *,
        num_live: int,
        longest: int,
        prefixes: dict[bytes, Prefix],
        conversations: PrefixCache,
        min_free: int,
    ) -> list[tuple[InFlightRequest, Prefix]]:
        """Admits requests, first come first served, while slots and memory last.

        Waits until `min_free` slots are free at once, so that prompts are prefilled together.

        Args:
            num_live: rows in the batch.
            longest: the most tokens that one of these rows may draw.
            prefixes: prompts whose KV is held.
            conversations: earlier turns; they are dropped where memory is needed.
            min_free: free slots below which nothing is admitted, unless fewer requests wait.

        Returns: requests with their prefixes; new prefixes are not in `prefixes` yet.
        """
        free = self.max_batch - num_live
        if not self.queue or free < min(min_free, len(self.queue)) or (self.is_full and num_live):
            return []
        prompts = Counter(p.bucket for p in prefixes.values())
        prefixes_by_key, admitted = dict(prefixes), []
        group_prompts: dict[bytes, Prefix] = {}
        for p in prefixes_by_key.values():
            group_prompts.setdefault(p.tokens[: p.group_prompt_length].tobytes(), p)
        while self.queue and len(admitted) < free:
            flight = self.queue[0]
            context = flight.context
            group_prompt_length = len(flight.request.tokens) - flight.request.offset
            prefix = prefixes_by_key.get(context.tobytes()) or Prefix(
                tokens=context, bucket=self._row_length(flight), group_prompt_length=group_prompt_length
            )
            row_length = max(longest, flight.remaining)
            is_new = prefix.key not in prefixes_by_key
            held = prompts + Counter([prefix.bucket]) if is_new else prompts
            if self.pool is not None:
                if not self._take(flight, prefix, is_new, admitted, conversations):
                    break
            else:
                total = self.places(held, num_live + len(admitted) + 1, row_length)
                if not self._fits(total, flight, admitted, conversations) and (num_live or admitted):
                    break  # a request on its own is always admitted: it was checked when it came
            if prefix.key not in prefixes_by_key:
                prefixes_by_key[prefix.key] = prefix
                first = group_prompts.setdefault(context[:group_prompt_length].tobytes(), prefix)
                prefix.source = conversations.get(flight.request.conversation) or (None if first is prefix else first)
                if prefix.source is not None:  # the last token is run in any case: its hidden state is needed
                    prefix.num_computed_tokens = min(
                        common_prefix_length(prefix.source.tokens, context), len(context) - 1
                    )
            prompts, longest = held, row_length
            admitted.append((self.queue.popleft(), prefix))
        return admitted

    def _take(
        self,
        flight: InFlightRequest,
        prefix: Prefix,
        is_new: bool,
        admitted: Sequence[tuple[InFlightRequest, Prefix]],
        conversations: PrefixCache,
    ) -> bool:
        """Takes places for a request, and for its prompt if that is new. Returns: whether there were any."""
        assert self.pool is not None
        lengths, room = [len(prefix.tokens)] if is_new else [], row_places(flight.remaining, 1)
        starts = self.pool.take(*lengths, room)
        if starts is None:
            return False
        if not self._fits(self.pool.end - 1, flight, admitted, conversations):
            for start in starts:
                self.pool.free(start)
            return False
        flight.place, flight.room = starts[-1], room
        if is_new:
            prefix.place = starts[0]
        return True

    def grow(
        self, flights: Sequence[InFlightRequest], drawn: np.ndarray, steps: int, conversations: PrefixCache
    ) -> tuple[list[tuple[int, int, int, int]], bool]:
        """Gives rows of a KVPool the places for their next steps, those with the most tokens first.

        Args: flights: of the live rows. drawn: int [n], tokens of each since it was admitted. steps: how many.
            conversations: earlier turns; they are dropped where memory is needed.
        Returns: (row, first place before, now, tokens stored) of each row that has another range now, in the order in
            which they were taken; and whether all rows have their places.
        """
        assert self.pool is not None
        stored = drawn - 1  # the last token has no KV yet
        needed = np.minimum(stored + steps, [flight.remaining for flight in flights])
        short = np.flatnonzero(needed > [flight.room for flight in flights]).tolist()
        moves: list[tuple[int, int, int, int]] = []
        for row in sorted(short, key=lambda row: -len(flights[row].tokens) - drawn[row]):
            flight, room = flights[row], row_places(flights[row].remaining, int(needed[row]))
            if (place := self.pool.grow(flight.place, room)) is None:
                return moves, False
            if place != flight.place:
                moves.append((row, flight.place, place, int(stored[row])))
            flight.place, flight.room = place, room
        if short and self.kv_cache_tokens is not None:
            conversations.shrink(self.kv_cache_tokens - (self.pool.end - 1), [])
        return moves, True

    def _row_length(self, flight: InFlightRequest) -> int:
        """Places of the row for a request's context; the tokens drawn so far must not raise it over the bound."""
        length = padded_length(len(flight.request.tokens) + len(flight.tokens))
        return length if self.kv_cache_tokens is None else min(length, self.kv_cache_tokens - flight.remaining)

    def _fits(
        self,
        places: int,
        flight: InFlightRequest,
        admitted: Sequence[tuple[InFlightRequest, Prefix]],
        conversations: PrefixCache,
    ) -> bool:
        """Returns whether a request fits with this many places in use; drops earlier turns to make it fit."""
        if self.kv_cache_tokens is None:
            return True
        used = {f.request.conversation for f, p in admitted if isinstance(p.source, CachedSequence)}  # to be copied
        room = self.kv_cache_tokens - places
        if room < sum(len(cached.tokens) for cached in map(conversations.get, used) if cached is not None):
            return False
        conversations.shrink(room, [flight.request.conversation, *used])
        return True
