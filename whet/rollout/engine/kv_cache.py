"""KVStore: memory of keys and values, in rows that grow by a quarter and are compacted by moving rows.

A store serves the prompts (one row per distinct prompt) or the completions (one row per live sequence). The rows in
use are always 0..n-1, so attention reads views and never gathers. A layer's shape is known from its first write: layers
may differ in heads and head sizes, and keys from values.
Left out on purpose: pages. Prompts of very different lengths lie in different stores (`padded_length`), and rows are
as long as the longest live completion needs.
Dim legend: R rows, K KV heads, L places of a row, D head size, n rows in use.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["KVStore", "padded_length"]

MIN_PLACES = 32
"""Places of the smallest row."""


def padded_length(length: int) -> int:
    """Places of the row that holds this many tokens: a power of two, at least 32.

    Args: length: tokens.
    Returns: places.

    >>> padded_length(5), padded_length(33)
    (32, 64)
    """
    return max(MIN_PLACES, 1 << (length - 1).bit_length())


def _with_slack(length: int) -> int:
    """Places for a row that grows: up to a quarter more than asked for, a multiple of 32."""
    step = max(MIN_PLACES, length // 4 // MIN_PLACES * MIN_PLACES)
    return -(-length // step) * step


def _resized(old: Tensor, rows: int, length: int) -> Tensor:
    """[rows K length D] with the content of the old buffer."""
    new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
    r, n = min(rows, old.shape[0]), min(length, old.shape[2])
    new[:r, :, :n] = old[:r, :, :n]
    return new


class KVStore:
    """The KV cache of R rows of L positions: keys and values of each layer that has written."""

    def __init__(self, *, rows: int = 0, length: int = 0) -> None:
        self.rows = rows
        """Rows allocated."""
        self.length = length
        """Places allocated in each row."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.epoch = 0
        """Counts the times that the buffers moved."""

    def reserve(self, rows: int, length: int, *, longest: int | None = None) -> None:
        """Grows to these rows and places, with a quarter more places than needed; the content is kept.

        Args: rows, length: needed. longest: places that no row will ever exceed.
        """
        if rows <= self.rows and length <= self.length:
            return
        places = self.length if length <= self.length else _with_slack(length)
        if longest is not None:
            places = max(length, self.length, min(places, longest))
        self._resize(max(self.rows, rows), places)

    def shrink(self, rows: int, length: int) -> None:
        """Frees what lies beyond these rows and places."""
        if rows < self.rows or length < self.length:
            self._resize(min(self.rows, rows), min(self.length, length))

    def _resize(self, rows: int, length: int) -> None:
        """Makes new buffers, with the old ones' content where they overlap."""
        for layer, pair in self._layers.items():
            self._layers[layer] = tuple(_resized(x, rows, length) for x in pair)  # pyright: ignore[reportArgumentType]
        self.rows, self.length = rows, length
        self.epoch += 1

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the buffers [R K L D] of a layer, made to the shape of its first keys and values.

        Args: layer: its index. k, v: [*, K, *, D], read only for heads, head size, dtype and device.
        Returns: (keys, values).
        """
        pair = self._layers.get(layer)
        if pair is None:
            # Zeros: a masked place must not hold NaN, since 0 * NaN is NaN.
            pair = tuple(x.new_zeros(self.rows, x.shape[1], self.length, x.shape[3]) for x in (k, v))
            self._layers[layer] = pair  # pyright: ignore[reportArgumentType]
        return pair  # pyright: ignore[reportReturnType]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies rows over other rows, to fill holes.

        Args: source, target: Long [m], without common rows. length: places in use.
        """
        for pair in self._layers.values():
            for x in pair:
                part = x[:, :, :length]
                part.index_copy_(0, target, part.index_select(0, source))

    def read(self, row: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Views [K length D] of a row's keys and values, by layer."""
        return {i: (k[row, :, :length], v[row, :, :length]) for i, (k, v) in self._layers.items()}

    def write(self, row: int, length: int, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Writes keys and values at the start of a row.

        Args: row: to write. length: tokens to take. layers: by layer, [K T D] with T >= length.
        """
        for layer, pair in layers.items():
            for buffer, x in zip(self.layer(layer, *(y.unsqueeze(0) for y in pair)), pair, strict=True):
                buffer[row, :, :length] = x[:, :length]

    def drop(self) -> None:
        """Frees all memory."""
        self._layers.clear()
        self.epoch += 1
        self.rows = self.length = 0

    @property
    def tokens(self) -> int:
        """Places allocated: rows times length."""
        return self.rows * self.length

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(x.nbytes for pair in self._layers.values() for x in pair)
