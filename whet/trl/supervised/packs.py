"""packing: groups rows as TRL does, so that a step has the same rows as in TRL.

A pack is an Example with several sequences. The sequences don't see each other, and nothing is padded with or without
packs, so the option only changes how many rows make up a step.
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

_AT_ONCE = 1000
"""Rows that are packed among themselves: a batch of datasets.map, as there."""


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Packs by best fit, the longest first; of equal ones the first, and into the pack that was made first.

    Args: lengths: of the rows, each at most size. size: of a pack.
    Returns: the places of the rows in each pack.
    Source: agrees with TRL's packing_strategy="bfd".

    >>> best_fit([4, 2, 3, 1], 4)
    [[0], [2, 3], [1]]
    """
    packs: list[list[int]] = []
    left: dict[int, deque[int]] = defaultdict(deque)  # room -> the packs that have it, oldest first
    rooms: list[int] = []  # those that some pack has, in order
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[place])
        if at == len(rooms):
            packs.append([])
            room, pack = size, len(packs) - 1
        else:
            room = rooms[at]
            pack = left[room].popleft()
            if not left[room]:
                rooms.pop(at)
        packs[pack].append(place)
        room -= lengths[place]
        if room > 0:
            if not left[room]:
                insort(rooms, room)
            left[room].append(pack)
    return packs


def pack_best_fit(examples: Iterable[Example], size: int, *, split: bool) -> Iterator[Example]:
    """Packs of examples, made of a thousand at a time.

    Args: examples: each of one sequence or more. size: tokens of a pack. split: sequences that are longer are cut into
        parts, each of which is trained; else what is over is left out.
    """
    examples = iter(examples)
    while part := list(islice(examples, _AT_ONCE)):
        whole = [s for e in part for s in e.sequences]
        made = [p for s in whole for p in (_split(s, size) if split else [truncate_end(s, size)]) if p is not None]
        lengths = [len(s.prefix) + len(s.tokens) for s in made]
        for pack in best_fit(lengths, size):
            yield Example(sequences=tuple(made[i] for i in pack), row=part[0].row)


def pack_wrapped(examples: Iterable[Example], size: int) -> Iterator[Example]:
    """Rows end to end, cut wherever a pack is full, of a thousand at a time: in a pack they see each other, as in TRL.

    Args: examples: each of one sequence or more. size: tokens of a pack.
    Source: agrees with TRL's packing_strategy="wrapped".
    """
    examples = iter(examples)
    while part := list(islice(examples, _AT_ONCE)):
        whole = [s for e in part for s in e.sequences]
        ids = np.concatenate([x for s in whole for x in (s.prefix, s.tokens)])
        for piece in _parts(ids, np.concatenate([label_mask(s) for s in whole]), size):
            yield Example(sequences=(piece,), row=part[0].row)


def _split(s: TrainSequence, size: int) -> Iterator[TrainSequence]:
    return _parts(np.concatenate([s.prefix, s.tokens]), label_mask(s), size)


def _parts(ids: np.ndarray, mask: np.ndarray, size: int) -> Iterator[TrainSequence]:
    """Tokens in parts of a size; the first token of each is given, and a part that trains nothing is left out."""
    for start in range(0, len(ids), size):
        its, trained = ids[start : start + size], mask[start : start + size]
        given = max(1, int(np.argmax(trained)))
        if trained[given:].any():
            yield LabelledSequence(
                prefix=its[:given], tokens=its[given:], mask=trained[given:], first_trained=bool(trained[0])
            )
