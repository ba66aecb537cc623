"""Implements `packing`: groups rows as TRL does, so that a step trains on the same rows as in TRL.

A pack is an Example with several sequences. The sequences don't attend to each other. Whet never pads, so packing only
changes how many rows make up a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from whet.data.lengths import truncate_end
from whet.trl.supervised.examples import LabelledSequence, label_mask
from whet.types import Example, TrainSequence

__all__ = ["best_fit", "pack_best_fit", "pack_wrapped"]

_BATCH = 1000
"""Rows that are packed together; TRL packs each batch of datasets.map."""


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Assigns rows to packs: the longest row first, each to the pack with the least room that holds it.

    Rows of equal length keep their order. Of packs with equal room, the oldest takes the row.

    Args: lengths: the rows' lengths, each at most size. size: the tokens of a pack.
    Returns: the indices of each pack's rows.
    Source: agrees with TRL's packing_strategy="bfd".

    >>> best_fit([4, 2, 3, 1], 4)
    [[0], [2, 3], [1]]
    """
    packs: list[list[int]] = []
    packs_by_room: dict[int, deque[int]] = defaultdict(deque)  # room -> the packs with this room, oldest first
    rooms: list[int] = []  # the keys of packs_by_room, sorted
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[row])
        if at == len(rooms):
            packs.append([])
            room, pack = size, len(packs) - 1
        else:
            room = rooms[at]
            pack = packs_by_room[room].popleft()
            if not packs_by_room[room]:
                rooms.pop(at)
        packs[pack].append(row)
        room -= lengths[row]
        if room > 0:
            if not packs_by_room[room]:
                insort(rooms, room)
            packs_by_room[room].append(pack)
    return packs


def pack_best_fit(examples: Iterable[Example], size: int, *, split: bool) -> Iterator[Example]:
    """Packs examples by best fit, a thousand rows at a time.

    Args: examples: the rows. size: tokens of a pack. split: whether longer sequences are split into parts; otherwise
        they are truncated.
    """
    examples = iter(examples)
    while batch := list(islice(examples, _BATCH)):
        sequences = [
            fitting
            for e in batch
            for s in e.sequences
            for fitting in (
                _split_tokens(np.concatenate([s.prefix, s.tokens]), label_mask(s), size)
                if split
                else [truncate_end(s, size)]
            )
            if fitting is not None
        ]
        for pack in best_fit([len(s.prefix) + len(s.tokens) for s in sequences], size):
            yield Example(sequences=tuple(sequences[i] for i in pack), row=batch[0].row)


def pack_wrapped(examples: Iterable[Example], size: int) -> Iterator[Example]:
    """Concatenates a thousand rows at a time and splits them wherever a pack is full; in a pack they see each other.

    Args: examples: the rows. size: tokens of a pack.
    Source: agrees with TRL's packing_strategy="wrapped".
    """
    examples = iter(examples)
    while batch := list(islice(examples, _BATCH)):
        sequences = [s for e in batch for s in e.sequences]
        ids = np.concatenate([x for s in sequences for x in (s.prefix, s.tokens)])
        for part in _split_tokens(ids, np.concatenate([label_mask(s) for s in sequences]), size):
            yield Example(sequences=(part,), row=batch[0].row)


def _split_tokens(ids: np.ndarray, mask: np.ndarray, size: int) -> Iterator[TrainSequence]:
    """Splits tokens into parts. The first token of a part is not trained; parts without trained tokens are left out."""
    for start in range(0, len(ids), size):
        part, trained = ids[start : start + size], mask[start : start + size]
        prefix = max(1, int(np.argmax(trained)))
        if trained[prefix:].any():
            yield LabelledSequence(
                prefix=part[:prefix], tokens=part[prefix:], mask=trained[prefix:], first_trained=bool(trained[0])
            )
