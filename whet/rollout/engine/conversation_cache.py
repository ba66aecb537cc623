"""The KV of finished sequences, held for the next turn of their conversation.

A turn's prompt begins with what the turn before it held: prompt and completion, except the last token, whose KV was
never made. The engine copies that part into the new prompt's row and encodes the rest.
Left out on purpose: a search among all prompts. What is reused follows from the conversation a request names, so what
else has gone through the engine changes no bit of it.
Dim legend: K KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import Tensor

__all__ = ["CachedSequence", "ConversationCache", "common_length"]


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with in common.

    >>> common_length(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedSequence:
    """A finished sequence."""

    tokens: np.ndarray
    """int32 [T]."""
    layers: dict[int, tuple[Tensor, Tensor]]
    """By layer: keys and values [K T D]."""

    @property
    def bytes(self) -> int:
        """Memory of its KV."""
        return sum(x.nbytes for pair in self.layers.values() for x in pair)


class ConversationCache:
    """What is held, by conversation, the oldest first; one sequence for each.

    Args: most: conversations held at once, the oldest goes first; None = as many as there is room for.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._held: dict[int, CachedSequence] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, conversation: int | None) -> CachedSequence | None:
        """What is held of a conversation."""
        return None if conversation is None else self._held.get(conversation)

    def put(self, conversation: int, held: CachedSequence, room: int | None) -> None:
        """Holds a sequence instead of the conversation's earlier one, if it fits.

        Args: room: tokens that may be held in all, older ones leave for it; None = no bound.
        """
        self.drop(conversation)
        size = len(held.tokens)
        if room is not None and size > room:
            return
        self._held[conversation] = held
        if room is not None:
            self.shrink(room, ())
        if self._most is not None and len(self) > self._most:
            self.drop(next(iter(self._held)))

    def shrink(self, room: int, last: Collection[int | None]) -> None:
        """Drops what is oldest until no more tokens are held than fit.

        Args: room: tokens that may be held. last: conversations that go only when nothing else is left, in this order.
        """
        order = [c for c in self._held if c not in last] + [c for c in last if c is not None and c in self._held]
        for conversation in order:
            if self.tokens <= room:
                return
            self.drop(conversation)

    def drop(self, conversation: int | None) -> None:
        """Forgets a conversation, if it is held."""
        if conversation is not None:
            self._held.pop(conversation, None)

    def clear(self) -> None:
        """Forgets all."""
        self._held.clear()

    @property
    def tokens(self) -> int:
        """Tokens whose KV is held."""
        return sum(len(h.tokens) for h in self._held.values())

    @property
    def bytes(self) -> int:
        """Memory of what is held."""
        return sum(h.bytes for h in self._held.values())
