"""Places: ranges of a KVPool's places, given to prompts and rows."""

from __future__ import annotations

import bisect

__all__ = ["Places"]


class Places:
    """Ranges of places 1, 2, ..., each given out from the lowest gap that holds it. Place 0 is for padding rows.

    A gap that is too small stays until its neighbours are free. Rows of one length leave gaps that fit the next ones.

    Args: capacity: places in all, without place 0.

    >>> places = Places(10)
    >>> places.take(4, 3), places.take(4)  # both or none: 3 places are left
    ([1, 5], None)
    >>> places.free(1)
    >>> places.take(2), places.used, places.end
    ([1], 5, 8)
    >>> places.grow(5, 5), places.grow(1, 5), places.grow(1, 4)  # the first where it is; the second has no other gap
    (5, None, 1)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Frees all ranges."""
        self._ranges: list[tuple[int, int]] = []  # first place, and the place after the last; in order
        self.used = 0
        """Places in use."""

    @property
    def end(self) -> int:
        """The place after the last one in use."""
        return self._ranges[-1][1] if self._ranges else 1

    def take(self, *lengths: int) -> list[int] | None:
        """Returns the first place of a range of each length; None = they don't fit, and none is taken."""
        starts: list[int] = []
        for length in lengths:
            before, taken = 1, False
            for start, end in [*self._ranges, (self.capacity + 1, 0)]:
                if taken := start - before >= length:
                    break
                before = end
            if not taken:
                for start in starts:
                    self.free(start)
                return None
            bisect.insort(self._ranges, (before, before + length))
            starts.append(before)
            self.used += length
        return starts

    def grow(self, start: int, length: int) -> int | None:
        """Makes a range longer where it is, or else gives it another one and frees it.

        Args: start: its first place. length: its new places.
        Returns: its first place from now on; None = there is no gap, and it stays as it is.
        """
        i = bisect.bisect_left(self._ranges, (start, 0))
        end, following = self._ranges[i][1], [*self._ranges[i + 1 : i + 2], (self.capacity + 1, 0)][0][0]
        if following - start >= length:
            self._ranges[i] = start, start + length
            self.used += start + length - end
            return start
        if (taken := self.take(length)) is None:
            return None
        self.free(start)
        return taken[0]

    def free(self, start: int) -> None:
        """Frees the range that begins at a place."""
        _, end = self._ranges.pop(bisect.bisect_left(self._ranges, (start, 0)))
        self.used -= end - start
