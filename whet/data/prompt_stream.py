"""The order of prompts: which rows make up each step, the same again after a resume.

Three kinds of source. Rows with a length (a list, a Dataset): each epoch in an order drawn from (seed, epoch) alone.
Ready-made batches (mappings from column to a list, Tunix's form): as they come. A stream of rows: as they come, in
batches of batch_size, shuffled within a buffer where that is asked for. A stream that has state_dict and
load_state_dict, as datasets.IterableDataset and whet's own have, goes on at its place after a resume; of any other
iterable a resume reads and skips what was used.
Left out on purpose: ranks (every rank draws the same batch, and the worker splits it) and reading ahead (the state is
then exactly what was handed out).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from itertools import accumulate, chain, islice
from typing import Any, Literal

import numpy as np

from whet.data.checksums import chain_checksum, compute_checksums
from whet.data.mixture import MixedRows, permutation
from whet.data.prompts import PROMPT_COLUMNS, PromptEncoder, find_prompt_column
from whet.data.read_errors import convert_read_errors, iterate_rows
from whet.data.supervised import RowEncoder
from whet.errors import CheckpointError, ConfigError, DataError, format_exception, lookup_error

__all__ = [
    "PromptStream",
    "batch_to_rows",
    "compute_checksums",
    "encode_all",
    "epoch_order",
    "first_row",
    "has_random_access",
    "hold_out",
    "is_batch",
]

log = logging.getLogger("whet")

LOG_INTERVAL_S = 10.0
"""Seconds between two log lines on the progress of encoding prompts."""
ENCODE_BATCH = 512
"""Rows that are tokenised in one call."""
HOLD_OUT = 2**32
"""Stands for the epoch in the draw of held-out rows, so that it is not the order of an epoch."""

Encode = Callable[[Any, int], Any]
"""(row, its place in the data set) -> what batches are made of, or None to leave it out."""


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in one epoch.

    Args: rows: how many. seed: of the run, 0 or more. epoch: 0, 1, ...
    Returns: int64 [rows], each place once.

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return permutation(rows, seed, epoch)


def hold_out(rows: Any, fraction: float, seed: int) -> tuple[Any, list[Any]]:
    """Cuts a share of the rows off for evaluation: a draw from the seed alone, each part in data-set order.

    Args: rows: with a length. fraction: in (0, 1); at least one row, rounded. seed: of the draw, 0 or more.
    Returns: the rows to train on, and those held out; of a mixture the share of each of its data sets.
    Raises: ConfigError: a fraction out of range, rows without a length. DataError: nothing left to train on.

    >>> train, held = hold_out(list(range(10)), 0.2, seed=0)
    >>> len(train), len(held), sorted(train + held) == list(range(10))
    (8, 2, True)
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"a held-out share of {fraction} is out of range; give more than 0 and less than 1")
    if not has_random_access(rows):
        raise ConfigError("rows without a length can't be held out; give evaluation data of their own")
    if isinstance(rows, MixedRows):
        pairs = [hold_out(part, fraction, seed) for part in rows.parts]
        return rows.with_parts([train for train, _ in pairs]), [row for _, held in pairs for row in held]
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise DataError(
            f"holding {count} of {len(rows)} rows out leaves none to train on; give more rows, or hold out fewer"
        )
    held = set(epoch_order(len(rows), seed, HOLD_OUT)[:count].tolist())
    parts: tuple[list[Any], list[Any]] = ([], [])
    for place in range(len(rows)):
        parts[place in held].append(rows[place])
    return parts


def batch_to_rows(batch: Mapping[str, Any], prompt_column: str | None = None) -> list[dict[str, Any]]:
    """The rows of a batch; columns with more dimensions keep the inner ones.

    Args: batch: column -> one value per prompt, as a list or array. prompt_column: as for
        find_prompt_column.
    Raises: DataError: a column of another length than the prompts'.

    >>> batch_to_rows({"prompts": ["a", "b"], "answer": [1, 2]})
    [{'prompts': 'a', 'answer': 1}, {'prompts': 'b', 'answer': 2}]
    """
    size = len(batch[find_prompt_column(batch, prompt_column)])
    for name, column in batch.items():
        if isinstance(column, str | bytes) or not isinstance(column, Sized) or len(column) != size:
            length = len(column) if isinstance(column, Sized) else "no"
            raise DataError(f"column {name!r} of a batch of {size} prompts has {length} values; give one per prompt")
    return [{name: column[i] for name, column in batch.items()} for i in range(size)]


class PromptStream:
    """Batches of prompts over epochs; deterministic, and resumable between any two batches.

    A batch that an epoch has too few rows for is dropped (counted in `dropped_rows`) or kept, by last_batch.

    >>> stream = PromptStream([{"prompt": c} for c in "abcd"], batch_size=2, shuffle=False, num_epochs=1)
    >>> batches = iter(stream)
    >>> next(batches)
    [{'prompt': 'a'}, {'prompt': 'b'}]
    >>> state = stream.state()
    >>> again = PromptStream([{"prompt": c} for c in "abcd"], batch_size=2, shuffle=False, num_epochs=1)
    >>> again.restore(state)
    >>> list(again) == list(batches)
    True
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        num_epochs: int | None = 1,
        last_batch: Literal["drop", "keep"] = "drop",
        encode: Encode | None = None,
        prompt_column: str | None = None,
        shuffle_buffer: int = 0,
    ) -> None:
        """Args:
            source: rows with a length, ready-made batches, or a stream of rows.
            batch_size: prompts of a step, where rows are to be batched; ready-made batches bring their own size.
            seed: of the order.
            shuffle: None = rows with a length are shuffled, nothing else is.
            num_epochs: None = without end (an iterator that can be read once ends all the same).
            last_batch: how to treat a batch with fewer prompts than the others: "drop" or "keep".
            encode: applied to each row, e.g. a PromptEncoder; rows with a length are encoded at once, others as read.
                With a RowEncoder nothing is a ready-made batch: supervised data are rows.
            prompt_column: tells ready-made batches from rows; as for find_prompt_column.
            shuffle_buffer: rows of a stream that are held and shuffled at a time; 0 = its own order.

        Raises:
            ConfigError: a setting out of range, shuffle=True where there is no length, more epochs of an iterator.
            DataError: no rows, or fewer than a batch.
        """
        if last_batch not in ("drop", "keep"):
            raise lookup_error("last_batch", last_batch, ("drop", "keep"))
        for name, value, least in (("batch_size", batch_size, 1), ("num_epochs", num_epochs, 1), ("seed", seed, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name} {value} is out of range; give {least} or more")
        self.seed, self.num_epochs, self.last_batch = seed, num_epochs, last_batch
        self.encode, self.prompt_column = encode, prompt_column
        with convert_read_errors("the data", "fix the source of the rows"):
            self.once = iter(source) is source
        has_state = not self.once and hasattr(source, "load_state_dict")
        self._begin: dict[str, Any] | None = source.state_dict() if has_state else None  # pyright: ignore
        """What the state_dict of a stream says at the beginning of a pass; None = it has none."""
        self.first, source = _peek(source, self.once)
        """The first row, or the first ready-made batch, as it was read."""
        self.kind: Literal["rows", "batches", "stream"] = "stream"
        if not isinstance(encode, RowEncoder) and is_batch(self.first, prompt_column):
            self.kind = "batches"
        elif has_random_access(source):
            self.kind = "rows"
        self.source: Any = source
        self.what = "rows" if isinstance(encode, RowEncoder) else "prompts"
        self.batch_size = self._size(self.first, batch_size)
        self.shuffle = self.kind == "rows" if shuffle is None else shuffle
        self.shuffle_buffer = 0 if shuffle is False else shuffle_buffer
        self.epoch = self.batch = self.used = self.read_digest = 0
        self.dropped_rows = 0
        self._items: Iterator[Any] | None = None
        if self.kind != "stream":
            self._begin = None
        self._block: tuple[int, dict[str, Any]] | None = None
        """Rows used before the block of rows that is being handed out, and where the source stood then."""
        self._check()
        self.digest, self.columns_digest = compute_checksums(self.source) if self.kind == "rows" else (0, 0)
        """Of the encoded prompts in their order, and of their other columns; 0 where they are not known beforehand."""

    def _size(self, first: Any, asked: int | None) -> int:
        """Prompts of a batch."""
        if self.kind != "batches":
            if asked is None:
                raise ConfigError("data.batch_size is needed: the data are rows, not ready-made batches")
            return asked
        size = len(first[find_prompt_column(first, self.prompt_column)])
        if size == 0:
            raise DataError("the first batch has no prompts; every batch needs at least one")
        return size

    def _check(self) -> None:
        """Refuses what would train on nothing; encodes rows that have a length."""
        if self.shuffle_buffer and self.kind != "stream":
            raise ConfigError(
                f"data.shuffle_buffer={self.shuffle_buffer} is for a stream (data.streaming=true); rows with a length "
                "are shuffled whole, ready-made batches not at all"
            )
        if self.kind != "rows" and self.shuffle:
            kind = "a stream" if self.kind == "stream" else "ready-made batches"
            raise ConfigError(
                f"shuffle=True needs rows with a length, but the data are {kind}; set shuffle=False and shuffle them "
                "where they are made"
            )
        if self.once and (self.num_epochs or 1) > 1:
            raise ConfigError(
                f"trainer.num_epochs {self.num_epochs}, but the data are an iterator that can be read once; give a "
                "list or an object whose __iter__ starts again, or trainer.num_epochs=1"
            )
        if self.kind != "rows":
            return
        if self.encode is not None:
            self.source = encode_all(self.source, self.encode, self.what)
        rows = len(self.source)
        if rows == 0 or (rows < self.batch_size and self.last_batch == "drop"):
            raise DataError(
                f"{rows} {self.what} don't fill one batch of {self.batch_size}; set data.batch_size to {max(rows, 1)} "
                f"or less, trainer.last_batch='keep', or give more {self.what}"
            )

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches of one epoch; None where the data have no length."""
        if self.kind != "rows":
            return len(self.source) if self.kind == "batches" and isinstance(self.source, Sized) else None
        whole, rest = divmod(len(self.source), self.batch_size)
        return whole + (rest > 0 and self.last_batch == "keep")

    def describe(self) -> str:
        """One line for the log: how many, in what order, what is left out, what a resume does."""
        if self.kind == "stream":
            order = f"shuffled {self.shuffle_buffer} at a time" if self.shuffle_buffer else "in its own order"
            resume = "reads and skips rows" if self._begin is None else "goes on at its place"
            return f"a stream of {self.what} {order}, batches of {self.batch_size}; a resume {resume}"
        if self.kind == "batches":
            return f"ready-made batches of {self.batch_size} prompts in their own order; a resume reads and skips them"
        rest = len(self.source) % self.batch_size
        fate = "dropped" if self.last_batch == "drop" else "in a smaller batch"
        tail = f"; {rest} rows per epoch {fate}" if rest else ""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in data-set order"
        if isinstance(self.source, MixedRows):
            order += f", of {self.source.describe()}"
        batches = f"{self.batches_per_epoch} batches of {self.batch_size}"
        return f"{len(self.source)} {self.what} {order}, {batches} per epoch{tail}"

    def state(self) -> dict[str, Any]:
        """Where the stream stands: after the last batch handed out. Plain ints, but for the source's own state."""
        block, source = self._block or (0, self._begin)
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "used": self.used,
            "dropped_rows": self.dropped_rows,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "batch_size": self.batch_size,
            "rows": len(self.source) if self.kind == "rows" else -1,
            "digest": self.digest,
            "columns_digest": self.columns_digest,
            "read_digest": self.read_digest,
            "shuffle_buffer": self.shuffle_buffer,
            "mixture": self.source.checksum() if isinstance(self.source, MixedRows) else 0,
            **(
                {}
                if source is None
                else {"first_digest": chain_checksum(self.first, 0), "block": block, "source": source}
            ),
            "length": len(self.source) if self.kind != "rows" and isinstance(self.source, Sized) else -1,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch of a saved state; call it before iterating. A stream that can go on at a place
        does so; what another one had used is read again, and compared.

        Raises: CheckpointError: the state is of other data or other settings, with the first difference; or it has a
            place that no such data have.
        """
        now = self.state()
        only_at_a_place = {"first_digest", "block", "source"}  # a source that can go on at its place has these
        if missing := sorted(now.keys() - state.keys() - only_at_a_place):
            raise CheckpointError(
                f"the checkpoint's data position has no {', '.join(missing)}: another version of whet wrote it; resume "
                "with that version, or start a new run"
            )
        for name in ("rows", "batch_size", "seed", "shuffle", "length", "shuffle_buffer"):
            if state[name] != now[name]:
                raise CheckpointError(
                    f"the checkpoint's data have {name} {state[name]}, these have {now[name]}; resume with the same "
                    "data and settings, or start a new run"
                )
        if state["digest"] != now["digest"]:
            raise CheckpointError(
                "the rows are not those of the checkpoint: same number of rows, but a prompt was changed or reordered; "
                "resume with the same data, or start a new run"
            )
        if state["columns_digest"] != now["columns_digest"]:
            raise CheckpointError(
                "the rows are not those of the checkpoint: same prompts, but another column (an answer, say) was "
                "changed; resume with the same data, or start a new run"
            )
        if state["mixture"] != now["mixture"]:
            raise CheckpointError(
                "the mixture is not that of the checkpoint: a weight or the length of one of its data sets changed; "
                "resume with the same data.path, or start a new run"
            )
        self._check_place(state)
        self.epoch, self.batch, self.used = state["epoch"], state["batch"], state["used"]
        self.dropped_rows = state["dropped_rows"]
        if self.kind != "rows" and self._begin is not None and "source" in state:
            self._items = self._from_place(state)
        elif self.kind != "rows":
            self._items = self._skipped(self.used, state["read_digest"])

    def _check_place(self, state: Mapping[str, int]) -> None:
        """Raises CheckpointError for a place that no run over these data comes to."""
        batch, used = state["batch"], state["used"]
        places = {name: state[name] for name in ("epoch", "batch", "used", "dropped_rows")}
        possible = all(type(n) is int and 0 <= n < 2**63 for n in places.values())
        if possible and self.kind == "rows":
            possible = used == min(batch * self.batch_size, len(self.source))
        elif possible:  # a batch takes an item at least
            possible = batch <= used and (state["length"] < 0 or used <= state["length"])
        if not possible:
            shown = ", ".join(f"{name} {n!r:.30}" for name, n in places.items())
            raise CheckpointError(
                f"the checkpoint's data position is invalid: {shown}, which no run over these data reaches; resume "
                "from another step-* folder"
            )

    def _from_place(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """The items after those that were used, of a source that goes on at the place of its state.

        Raises: CheckpointError: its first row is another, or it takes no such state.
        """
        if state["first_digest"] != chain_checksum(self.first, 0):
            raise CheckpointError(
                "the first row is not that of the checkpoint's data; resume with the same data, or start a new run in "
                "another trainer.run_dir"
            )
        try:
            self.source.load_state_dict(state["source"])
        except Exception as error:  # of any library
            raise CheckpointError(
                f"the data can't go on at the checkpoint's place: {format_exception(error)}; resume with the same "
                "data, or start a new run in another trainer.run_dir"
            ) from error
        self.read_digest, block = state["read_digest"], state["block"]
        self._block = (block, state["source"])
        return islice(self._shuffled(iterate_rows(self.source, "the data"), block), self.used - block, None)

    def _shuffled(self, items: Iterator[Any], used: int = 0) -> Iterator[Any]:
        """The items of a stream, shuffled a block of `shuffle_buffer` at a time.

        Each block has an order of its own, drawn from (seed, epoch, block): a resume reads one block again at most.
        Args: used: items before them, whole blocks.
        """
        size = self.shuffle_buffer
        while size and (held := list(islice(items, size))):
            yield from (held[place] for place in permutation(len(held), self.seed, self.epoch, used // size).tolist())
            used += len(held)
            self._note_place(used)
        yield from items

    def _note_place(self, used: int) -> None:
        """Records the state of the source after `used` items, for a resume."""
        if self._begin is not None:
            self._block = (used, self.source.state_dict())

    def _skipped(self, used: int, expected: int) -> Iterator[Any]:
        """The items after those that were used, which are read here and compared by their digest.

        Raises: CheckpointError: they are fewer, or others.
        """
        items, last_logged = self._shuffled(iterate_rows(self.source, "the data")), time.monotonic()
        what = "batches" if self.kind == "batches" else "rows"
        self.read_digest = count = 0
        for count, item in enumerate(islice(items, used), 1):
            self.read_digest = chain_checksum(item, self.read_digest)
            if time.monotonic() - last_logged > LOG_INTERVAL_S:
                last_logged = time.monotonic()
                log.info("read %d of the %d %s that the checkpoint had used", count, used, what)
        if count < used:
            raise CheckpointError(
                f"the data end after {count} {what}, and the checkpoint had read {used} of this pass over them; resume "
                "with the same data, or start a new run in another trainer.run_dir"
            )
        if expected != self.read_digest:
            raise CheckpointError(
                f"the first {used} {what} are not those that the run had read before the checkpoint: one was changed, "
                "reordered, added or removed; resume with the same data, or start a new run in another trainer.run_dir"
            )
        return items

    def __iter__(self) -> Iterator[list[Any]]:
        """Batches from where the stream stands.

        Raises: DataError: an epoch without a single batch.
        """
        while self.num_epochs is None or self.epoch < self.num_epochs:
            if self.kind == "rows":
                yield from self._rows()
            else:
                yield from self._read()
            if self.batch == 0:
                raise DataError(
                    f"epoch {self.epoch} gave no batch of {self.batch_size} {self.what}; use a smaller "
                    "data.batch_size, trainer.last_batch='keep', or data that can be read again"
                )
            self.epoch, self.batch, self.used, self.read_digest = self.epoch + 1, 0, 0, 0
            self._block = None
            if self.kind != "rows" and isinstance(self.encode, RowEncoder) and (found := self.encode.describe_counts()):
                log.warning("%s", found)
            if self.once:
                return

    def _rows(self) -> Iterator[list[Any]]:
        """The rest of an epoch of rows with a length."""
        rows = len(self.source)
        if isinstance(self.source, MixedRows) and self.source.weights is not None:
            order = self.source.order(self.seed, self.epoch, self.shuffle)
        else:
            order = epoch_order(rows, self.seed, self.epoch) if self.shuffle else np.arange(rows)
        while self.used < rows:
            places = order[self.used : self.used + self.batch_size].tolist()
            if len(places) < self.batch_size and self.last_batch == "drop":
                self.dropped_rows += len(places)
                return
            self.batch, self.used = self.batch + 1, self.used + len(places)
            yield [self.source[place] for place in places]

    def _read(self) -> Iterator[list[Any]]:
        """The rest of an epoch of what is read in its own order; `used` counts the items read."""
        items, self._items = self._items, None
        if items is None:
            if self._begin is not None:
                self.source.load_state_dict(self._begin)
                self._block = None
            items = islice(self._shuffled(iterate_rows(self.source, "the data")), self.used, None)
        return self._read_batches(items) if self.kind == "batches" else self._read_rows(items)

    def _read_batches(self, items: Iterator[Mapping[str, Any]]) -> Iterator[list[Any]]:
        for item in items:
            rows = batch_to_rows(item, self.prompt_column)
            first = self.used * self.batch_size
            self._take(item)
            if len(rows) > self.batch_size:
                raise DataError(
                    f"batch {self.used - 1} has {len(rows)} prompts, the first had {self.batch_size}; make them equal"
                )
            if not rows or (len(rows) < self.batch_size and self.last_batch == "drop"):
                self.dropped_rows += len(rows)
                continue
            encoded = [self._encode(row, first + place) for place, row in enumerate(rows)]
            if any(row is None for row in encoded):
                raise DataError(
                    f"batch {self.used - 1}: a prompt over the limit can't be dropped from a ready-made batch; set "
                    "on_long_prompt to truncate_left, or leave such rows out where the batches are made"
                )
            self.batch += 1
            yield encoded

    def _read_rows(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        held: list[Any] = []
        for row in items:
            encoded = self._encode(row, self.used)
            self._take(row)
            if encoded is not None:
                held.append(encoded)
            if len(held) == self.batch_size:
                self.batch += 1
                full, held = held, []
                if not self.shuffle_buffer:  # else each block of the buffer records it
                    self._note_place(self.used)
                yield full
        if held and self.last_batch == "keep":
            self.batch += 1
            if not self.shuffle_buffer:
                self._note_place(self.used)
            yield held
        elif held:
            self.dropped_rows += len(held)

    def _take(self, item: Any) -> None:
        self.used, self.read_digest = self.used + 1, chain_checksum(item, self.read_digest)

    def _encode(self, row: Any, number: int) -> Any:
        return row if self.encode is None else self.encode(row, number)


def encode_all(rows: Any, encode: Encode, what: str) -> Sequence[Any]:
    """All rows, encoded, without those that were dropped; logs its progress where that takes long.

    Args: rows: with a length. encode: of each. what: they are, for the log.
    Raises: DataError: after the last row, where rows are over a limit; at once for anything else.
    """
    out, last_logged = [], time.monotonic()
    parts, ends = [out], set()
    if isinstance(rows, MixedRows):
        ends = set(accumulate(len(part) for part in rows.parts[:-1]))
    with encode.all_rows() if isinstance(encode, PromptEncoder | RowEncoder) else nullcontext():
        for place, encoded in enumerate(_encoded(rows, encode)):
            if place in ends:
                parts.append(out := [])
            if encoded is not None:
                out.append(encoded)
            if time.monotonic() - last_logged > LOG_INTERVAL_S:
                last_logged = time.monotonic()
                log.info("encoded %d of %d %s", place + 1, len(rows), what)
    return rows.with_parts(parts) if isinstance(rows, MixedRows) else out


def _encoded(rows: Any, encode: Encode) -> Iterator[Any]:
    """The encoded rows, in order; an encoder gets them in batches, so that it calls the tokenizer once per batch."""
    items = iterate_rows(rows, "the data")
    if not isinstance(encode, PromptEncoder | RowEncoder):
        yield from (encode(row, place) for place, row in enumerate(items))
        return
    place = 0
    while batch := list(islice(items, ENCODE_BATCH)):
        yield from encode.encode_batch(batch, place)
        place += len(batch)


def _peek(source: Iterable[Any], once: bool) -> tuple[Any, Iterable[Any]]:
    """The first item, and a source that still has it."""
    if isinstance(source, Mapping | str):
        raise DataError(f"data of type {type(source).__name__}; give a list of rows, a Dataset or an iterable of them")
    items = iterate_rows(source, "the data")
    try:
        first = next(items)
    except StopIteration:
        raise DataError("the data have no rows; give at least one batch of prompts") from None
    return first, chain([first], items) if once else source


def is_batch(item: Any, prompt_column: str | None = None) -> bool:
    """Whether an item is a batch: its prompt column is a list or array of prompts, not one conversation.

    >>> is_batch({"prompts": ["a", "b"]}), is_batch({"prompt": "a"}), is_batch({"prompt": [{"role": "user"}]})
    (True, False, False)
    """
    names = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    value = next((item[name] for name in names if name in item), None) if isinstance(item, Mapping) else None
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return False
    return len(value) == 0 or not isinstance(value[0], Mapping)


def first_row(rows: Any) -> Any:
    """The first row, or ready-made batch; None where it can't be looked at without taking it."""
    if has_random_access(rows):
        return rows[0] if len(rows) else None
    return None if rows is None or iter(rows) is rows else next(iter(rows), None)


def has_random_access(source: Any) -> bool:
    """Whether rows can be counted and taken by place."""
    return isinstance(source, Sequence) or (isinstance(source, Sized) and hasattr(source, "__getitem__"))
