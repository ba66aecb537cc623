"""PrefixCache: keeps the KV of finished requests for the next turn of their conversation.

A turn's prompt begins with the previous turn's prompt and completion. Their KV exists, except that of the last token,
which was never run. The engine copies it into the new prompt's row and runs the rest.
Left out on purpose: a search among all prompts. Only the conversation that a request names decides what is reused, so
other requests of the engine change no bit of it.
Dim legend: K KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import Tensor

__all__ = ["CachedSequence", "PrefixCache", "common_prefix_length"]

MAX_BYTES = 4 * 2**30
"""Default bound on the KV of earlier turns."""


def common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many first tokens two sequences have in common.

    >>> common_prefix_length(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedSequence:
    """A finished request's tokens and KV."""

    tokens: np.ndarray
    """int32 [T]."""
    layers: dict[int, tuple[Tensor, Tensor]]
    """Keys and values [K T D] of each layer."""

    @property
    def bytes(self) -> int:
        """Memory of its KV."""
        return sum(x.nbytes for pair in self.layers.values() for x in pair)


class PrefixCache:
    """The last sequence of each conversation, the oldest first.

    Args: max_conversations: held at once; the oldest is dropped first. None = as many as there is room for.
        max_bytes: of the KV that is held.
    """

    def __init__(self, max_conversations: int | None, max_bytes: int = MAX_BYTES) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._cached: dict[int, CachedSequence] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, conversation: int | None) -> CachedSequence | None:
        """Returns the cached sequence of a conversation; None = there is none."""
        return None if conversation is None else self._cached.get(conversation)

    def put(self, conversation: int, cached: CachedSequence, room: int | None) -> None:
        """Replaces the conversation's earlier sequence, if the new one fits.

        Args: room: tokens that may be held in all, older conversations are dropped for it; None = no bound.
        """
        self.drop(conversation)
        size = len(cached.tokens)
        if room is not None and size > room:
            return
        self._cached[conversation] = cached
        if room is not None:
            self.shrink(room, ())
        if self._max_conversations is not None and len(self) > self._max_conversations:
            self.drop(next(iter(self._cached)))
        held = self.bytes
        while held > self._max_bytes:
            oldest = next(iter(self._cached))
            held -= self._cached[oldest].bytes
            self.drop(oldest)

    def shrink(self, room: int, last: Collection[int | None]) -> None:
        """Drops the oldest conversations until the others fit.

        Args: room: tokens that may be held. last: conversations that are dropped last, in this order.
        """
        order = [c for c in self._cached if c not in last] + [c for c in last if c is not None and c in self._cached]
        for conversation in order:
            if self.tokens <= room:
                return
            self.drop(conversation)

    def drop(self, conversation: int | None) -> None:
        """Drops a conversation, if it is cached."""
        if conversation is not None:
            self._cached.pop(conversation, None)

    def clear(self) -> None:
        """Drops all conversations."""
        self._cached.clear()

    @property
    def tokens(self) -> int:
        """Tokens with cached KV."""
        return sum(len(c.tokens) for c in self._cached.values())

    @property
    def bytes(self) -> int:
        """Memory of the cached KV."""
        return sum(c.bytes for c in self._cached.values())
