"""Combines several data sets: one after the other, or mixed by weights.

Left out on purpose: filtering rows and renaming columns; a "file.py:function" that returns rows can do both.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from whet.errors import DataError

__all__ = ["MixedRows", "MixedStream", "normalize_weights", "permutation"]


def normalize_weights(weights: Sequence[float]) -> np.ndarray:
    """Returns the weights divided by their sum.

    >>> normalize_weights([3.0, 1.0]).tolist()
    [0.75, 0.25]
    """
    array = np.asarray(weights, dtype=np.float64)
    return array / array.sum()


class MixedRows(Sequence[Any]):
    """The rows of several data sets, one after the other; weights set their shares of an epoch.

    An epoch of a mixture has as many rows (N) as all its data sets together. A data set with the share s gives about
    s N of them, from shuffled passes over its own rows. So, over several epochs, each of its rows is used equally
    often, however small or large the share is.

    >>> rows = MixedRows([["a", "b", "c"], ["x"]], weights=[1.0, 1.0])
    >>> len(rows), [rows[place] for place in rows.order(seed=0, epoch=0, shuffle=False)]
    (4, ['a', 'x', 'b', 'x'])
    """

    def __init__(self, parts: Sequence[Sequence[Any]], weights: Sequence[float] | None = None) -> None:
        """Args: parts: the rows of each data set. weights: one per data set; None = every row once per epoch."""
        for number, part in enumerate(parts):
            if len(part) == 0:
                raise DataError(f"data set {number + 1} of {len(parts)} has no rows; leave it out of the list")
        self.parts, self.weights = tuple(parts), None if weights is None else tuple(weights)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[n] for n in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        number = int(np.searchsorted(self._ends, place, side="right"))
        return self.parts[number][place - (int(self._ends[number - 1]) if number else 0)]

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part

    def with_parts(self, parts: Sequence[Sequence[Any]]) -> MixedRows:
        """Returns the same mixture with other rows, e.g. encoded ones. Args: parts: the rows of each data set."""
        return MixedRows(parts, self.weights)

    def describe(self) -> str:
        """Returns the number of data sets, and their shares if they have weights.

        >>> MixedRows([["a"], ["x", "y"]], weights=[3, 1]).describe()
        '2 data sets: 75 % of 1 row(s), 25 % of 2 row(s)'
        """
        if self.weights is None:
            return f"{len(self.parts)} data sets"
        parts = zip(normalize_weights(self.weights), self.parts, strict=True)
        shares = ", ".join(f"{100 * share:.3g} % of {len(part)} row(s)" for share, part in parts)
        return f"{len(self.parts)} data sets: {shares}"

    def checksum(self) -> int:
        """Returns a checksum of the lengths and weights; a resumed run compares it."""
        return zlib.crc32(repr((self._ends.tolist(), self.weights)).encode())

    @cached_property
    def _interleaving(self) -> np.ndarray:
        """int64 [N]: the data set of each row of an epoch, before shuffling; the same in every epoch."""
        assert self.weights is not None
        share = normalize_weights(self.weights)
        taken, datasets = np.zeros(len(share), dtype=np.int64), np.empty(len(self), dtype=np.int64)
        for place in range(len(self)):
            datasets[place] = number = _next_dataset(share, taken)
            taken[number] += 1
        return datasets

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Returns the indices of the rows of one epoch of a mixture with weights.

        Args: seed: the run's seed. epoch: 0, 1, ... shuffle: False = each data set in its own order.
        Returns: int64 [N].
        """
        assert self.weights is not None
        make_order = permutation if shuffle else lambda rows, *_: np.arange(rows)
        total = len(self)
        dataset_of_row = self._interleaving
        counts = np.bincount(dataset_of_row, minlength=len(self.parts))
        places = np.empty(total, dtype=np.int64)
        for number, (part, count) in enumerate(zip(self.parts, counts.tolist(), strict=True)):
            draws = epoch * count + np.arange(count)  # counted from the first epoch of the run
            passes = range(draws[0] // len(part), draws[-1] // len(part) + 1) if count else ()
            orders = {n: make_order(len(part), seed, n, number + 1) for n in passes}
            start = int(self._ends[number]) - len(part)
            places[dataset_of_row == number] = [start + orders[k // len(part)][k % len(part)] for k in draws.tolist()]
        return places[make_order(total, seed, epoch)]


class MixedStream:
    """The rows of several streams, interleaved so that the share of each is always right to within one row.

    The pass ends with the first stream that ends, so the shares stay right. It has `state_dict` and
    `load_state_dict` if every stream has them.
    """

    def __init__(self, streams: Sequence[Iterable[Any]], weights: Sequence[float]) -> None:
        """Args: streams: iterables that can be read repeatedly. weights: one per stream."""
        self.streams, self.shares = tuple(streams), normalize_weights(weights)
        self.taken = np.zeros(len(streams), dtype=np.int64)
        self._start: Mapping[str, Any] | None = None
        if all(hasattr(stream, "state_dict") for stream in streams):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def _state_dict(self) -> dict[str, Any]:
        """Returns the number of rows taken from each stream, and the state of each stream."""
        return {"taken": self.taken.tolist(), "streams": [s.state_dict() for s in self.streams]}  # pyright: ignore

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next iterator continue from a saved state."""
        self._start = state_dict
        for stream, state in zip(self.streams, state_dict["streams"], strict=True):
            stream.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> Iterator[Any]:
        self.taken = np.array(self._start["taken"] if self._start else [0] * len(self.streams), dtype=np.int64)
        self._start = None
        iterators = [iter(stream) for stream in self.streams]
        while True:
            number = _next_dataset(self.shares, self.taken)
            try:
                row = next(iterators[number])
            except StopIteration:
                return
            self.taken[number] += 1
            yield row


def _next_dataset(share: np.ndarray, taken: np.ndarray) -> int:
    """Returns the data set that is furthest behind its share; the first one in a tie."""
    return int(np.argmax(share * (taken.sum() + 1) - taken))


def permutation(rows: int, *key: int) -> np.ndarray:
    """Returns a random order of rows: the ranks of raw Philox draws, seeded with a key.

    numpy guarantees that raw draws never change, but not that its own permutation doesn't.

    Args: rows: the number of rows. key: integers from 0, e.g. a seed and an epoch.
    Returns: int64 [rows], each index once.
    """
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(rows)
    return np.argsort(draws, kind="stable")
