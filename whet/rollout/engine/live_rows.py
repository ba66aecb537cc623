"""LiveRows: the host's record of rows 0..n-1 of the batch: their requests, prompts, counts, and tokens drawn so far.

The device's half of a row is in the Runner. Rows move when others leave, in both halves alike: `compact` says which.
Dim legend: n live rows, C columns: the most tokens that a row has drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from whet.rollout.engine.scheduler import Prefix
from whet.rollout.in_flight import InFlightRequest

__all__ = ["LiveRows"]

NUM_DRAWN, MAX_NEW, PROMPT, PLAN = range(4)
"""Rows of the counts: tokens drawn since the row was admitted, tokens it may draw, prompt tokens, index of its plan."""


class LiveRows:
    """Requests, the prompts that they read, counts, and tokens drawn since their admission, which move together.

    >>> from whet.rollout.base import Request, Sampling
    >>> request = Request(id=7, tokens=np.array([5, 6]), sampling=Sampling(max_tokens=3), group=0, rng_key=(0, 0, 0, 0))
    >>> rows = LiveRows()
    >>> prefix = Prefix(tokens=request.tokens, bucket=32, group_prompt_length=2)
    >>> rows.add([(InFlightRequest(request=request), prefix)])
    >>> rows.append(0, np.array([[8], [9]], np.int32), np.array([[-1.0], [-2.0]], np.float32))  # two steps
    >>> rows.tokens(0).tolist(), rows.remaining.tolist(), rows.lengths.tolist()
    ([8, 9], [1], [4])
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes all rows."""
        self._rows: list[tuple[InFlightRequest, Prefix]] = []
        self._counts = np.zeros((4, 0), np.int64)
        self._tokens, self._logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[InFlightRequest, Prefix]]:
        return iter(self._rows)

    def __getitem__(self, row: int) -> tuple[InFlightRequest, Prefix]:
        return self._rows[row]

    @property
    def all(self) -> Sequence[tuple[InFlightRequest, Prefix]]:
        """Each row's request and prompt, in order."""
        return self._rows

    @property
    def num_drawn(self) -> np.ndarray:
        """int64 [n], a view: tokens that each row has drawn since it was admitted."""
        return self._counts[NUM_DRAWN]

    @property
    def remaining(self) -> np.ndarray:
        """int64 [n]: tokens that each row may still draw."""
        return self._counts[MAX_NEW] - self._counts[NUM_DRAWN]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each row, prompt included."""
        return self._counts[PROMPT] + self._counts[NUM_DRAWN]

    @property
    def plans(self) -> np.ndarray:
        """int64 [n]: the index of each row's sampling plan."""
        return self._counts[PLAN]

    @property
    def max_new(self) -> int:
        """The most tokens that one of the rows may draw in all since it was admitted; 0 = there are no rows."""
        return int(self._counts[MAX_NEW].max(initial=0))

    def add(self, admitted: Sequence[tuple[InFlightRequest, Prefix]]) -> None:
        """Appends rows that have drawn nothing yet."""
        columns = [(0, flight.remaining, len(prefix.tokens), flight.plan) for flight, prefix in admitted]
        self._counts = np.concatenate([self._counts, np.array(columns, np.int64).T], 1)
        self._rows = [*self._rows, *admitted]

    def append(self, first: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Records what rows first.. have drawn. Args: tokens, logprobs: [steps, rows]."""
        steps, count = tokens.shape
        drawn = self._counts[NUM_DRAWN, first : first + count]
        needed, allocated = (first + count, int(drawn.max()) + steps), self._tokens.shape
        if needed[0] > allocated[0] or needed[1] > allocated[1]:
            pad = [(0, max(n - a, a, 64) if n > a else 0) for n, a in zip(needed, allocated, strict=True)]
            self._tokens, self._logprobs = np.pad(self._tokens, pad), np.pad(self._logprobs, pad)
        rows, columns = np.arange(first, first + count), drawn[:, None] + np.arange(steps)
        self._tokens[rows[:, None], columns] = tokens.T
        self._logprobs[rows[:, None], columns] = logprobs.T
        drawn += steps

    def tokens(self, row: int) -> np.ndarray:
        """int32: what a row has drawn since it was admitted."""
        return self._tokens[row, : self._counts[NUM_DRAWN, row]]

    def logprobs(self, row: int) -> np.ndarray:
        """float32: the logprobs of `tokens`."""
        return self._logprobs[row, : self._counts[NUM_DRAWN, row]]

    def compact(self, gone: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """Removes rows; the last ones move into the freed slots.

        Returns: int64 [m] each: the rows that have moved, and where to.
        """
        n = len(self._rows) - len(gone)
        target = np.array([row for row in sorted(gone) if row < n], np.int64)
        source = np.array([row for row in range(n, len(self._rows)) if row not in gone], np.int64)
        for store in (self._tokens, self._logprobs):
            store[target] = store[source]
        self._counts[:, target] = self._counts[:, source]
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            self._rows[t] = self._rows[s]
        self._rows, self._counts = self._rows[:n], self._counts[:, :n].copy()
        return source, target
