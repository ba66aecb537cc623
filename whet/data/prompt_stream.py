"""The batches of a run: which rows make up each step, with an exact resume.

Three kinds of source. Rows with a length (a list, a Dataset): each epoch in an order drawn from (seed, epoch).
Ready-made batches (mappings from column to a list, Tunix's form): in their own order. A stream of rows: in its own
order, in batches of batch_size, optionally shuffled within a buffer. A stream with state_dict and load_state_dict, such
as datasets.IterableDataset and whet's own, continues at its position after a resume. For any other iterable, a resume
reads and skips the used rows.
Left out on purpose: ranks (every rank draws the same batch, and the worker splits it), and prefetching (so the state is
exactly that of the last batch).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate, chain, islice
from typing import Any, Literal

import numpy as np

from whet.data.checksums import chain_checksum, compute_checksums
from whet.data.encoder import Encoder, FunctionEncoder
from whet.data.mixture import MixedRows, permutation
from whet.data.prompts import PROMPT_COLUMNS, find_prompt_column
from whet.data.read_errors import convert_read_errors, iterate_rows
from whet.errors import CheckpointError, ConfigError, DataError, format_exception, lookup_error

__all__ = [
    "PromptStream",
    "batch_to_rows",
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
"""Takes the place of the epoch number when held-out rows are drawn, so that the draw differs from every epoch."""


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the rows in one epoch.

    Args: rows: the number of rows. seed: of the run, 0 or more. epoch: 0, 1, ...
    Returns: int64 [rows], each index once.

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return permutation(rows, seed, epoch)


def hold_out(rows: Any, fraction: float, seed: int) -> tuple[Any, list[Any]]:
    """Holds out a share of the rows for evaluation, drawn by the seed; both parts keep the order of the data set.

    Args: rows: must have a length. fraction: in (0, 1), rounded to at least one row. seed: of the draw, 0 or more.
    Returns: the training rows and the held-out rows; for a mixture, the share of each data set.
    Raises: ConfigError: a fraction out of range, or rows without a length. DataError: no training rows remain.

    >>> train, held = hold_out(list(range(10)), 0.2, seed=0)
    >>> len(train), len(held), sorted(train + held) == list(range(10))
    (8, 2, True)
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"data.eval_fraction={fraction} must be between 0 and 1")
    if not has_random_access(rows):
        raise ConfigError(
            "data.eval_fraction can't hold out rows of a stream, whose number is not known; set data.eval_path, or "
            "data.streaming=false"
        )
    if isinstance(rows, MixedRows):
        pairs = [hold_out(part, fraction, seed) for part in rows.parts]
        return rows.with_parts([train for train, _ in pairs]), [row for _, held_out in pairs for row in held_out]
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise DataError(
            f"holding {count} of {len(rows)} rows out leaves no training rows; use more rows, or hold out fewer"
        )
    held_out = set(epoch_order(len(rows), seed, HOLD_OUT)[:count].tolist())
    parts: tuple[list[Any], list[Any]] = ([], [])
    for place in range(len(rows)):
        parts[place in held_out].append(rows[place])
    return parts


def batch_to_rows(batch: Mapping[str, Any], prompt_column: str | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a batch; columns with more dimensions keep the inner ones.

    Args: batch: column -> one value per prompt, as a list or array. prompt_column: see find_prompt_column.
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
    """Batches of prompts over epochs; deterministic, and resumable after every batch.

    An incomplete last batch of an epoch is dropped (and counted in `dropped_rows`) or kept, as last_batch says.

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
        encode: Encoder[Any] | Callable[[Any, int], Any] | None = None,
        prompt_column: str | None = None,
        shuffle_buffer: int = 0,
    ) -> None:
        """Args:
            source: rows with a length, ready-made batches, or a stream of rows.
            batch_size: the prompts of a step; ready-made batches have their own size.
            seed: of the order.
            shuffle: None = shuffle only rows with a length.
            num_epochs: None = no limit (but an iterator ends after one pass).
            last_batch: "drop" or "keep" a batch with fewer prompts than the others.
            encode: an Encoder, or a function of a row and its index; None = the rows stay as they are. Rows with a
                length are encoded before the first batch, others when they are read.
            prompt_column: distinguishes ready-made batches from rows; see find_prompt_column.
            shuffle_buffer: the number of rows of a stream that are shuffled at a time; 0 = keep its order.

        Raises:
            ConfigError: a setting out of range, shuffle=True without a length, or several epochs of an iterator.
            DataError: no rows, or fewer than one batch.
        """
        if last_batch not in ("drop", "keep"):
            raise lookup_error("last_batch", last_batch, ("drop", "keep"))
        for name, value, least in (("batch_size", batch_size, 1), ("num_epochs", num_epochs, 1), ("seed", seed, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name} {value} is out of range; give {least} or more")
        self.seed, self.num_epochs, self.last_batch = seed, num_epochs, last_batch
        self.encode: Encoder[Any] = encode if isinstance(encode, Encoder) else FunctionEncoder(encode)
        self.prompt_column = prompt_column
        with convert_read_errors("the data", "fix the source of the rows"):
            self.once = iter(source) is source
        has_state = not self.once and hasattr(source, "load_state_dict")
        self._begin: dict[str, Any] | None = source.state_dict() if has_state else None  # pyright: ignore
        """The state_dict of a stream at the start of a pass; None = the source has none."""
        self.first, source = _peek(source, self.once)
        """The first row, or the first ready-made batch, before encoding."""
        self.kind: Literal["rows", "batches", "stream"] = "stream"
        if self.encode.takes_batches and is_batch(self.first, prompt_column):
            self.kind = "batches"
        elif has_random_access(source):
            self.kind = "rows"
        self.source: Any = source
        self.batch_size = self._resolve_batch_size(self.first, batch_size)
        self.shuffle = self.kind == "rows" if shuffle is None else shuffle
        self.shuffle_buffer = 0 if shuffle is False else shuffle_buffer
        self.epoch = self.batch = self.used = self.read_digest = 0
        self.dropped_rows = 0
        self._items: Iterator[Any] | None = None
        if self.kind != "stream":
            self._begin = None
        self._block: tuple[int, dict[str, Any]] | None = None
        """(rows used before the current block, state of the source at that time)."""
        self._check()
        self.digest, self.columns_digest = compute_checksums(self.source) if self.kind == "rows" else (0, 0)
        """Checksums of the encoded prompts in order, and of their other columns; 0 = they are not known beforehand."""

    def _resolve_batch_size(self, first: Any, batch_size: int | None) -> int:
        """Returns the number of prompts per batch."""
        if self.kind != "batches":
            if batch_size is None:
                raise ConfigError("data.batch_size is needed: the data are rows, not ready-made batches")
            return batch_size
        size = len(first[find_prompt_column(first, self.prompt_column)])
        if size == 0:
            raise DataError("the first batch has no prompts; every batch needs at least one")
        return size

    def _check(self) -> None:
        """Checks the settings against the data, and encodes rows that have a length."""
        if self.shuffle_buffer and self.kind != "stream":
            raise ConfigError(
                f"data.shuffle_buffer={self.shuffle_buffer} is for a stream (data.streaming=true); rows with a length "
                "are shuffled whole, ready-made batches not at all"
            )
        if self.kind != "rows" and self.shuffle:
            kind = "a stream" if self.kind == "stream" else "ready-made batches"
            raise ConfigError(
                f"shuffle=True needs rows with a length, but the data are {kind}; set shuffle=False and shuffle them "
                "at their source"
            )
        if self.once and (self.num_epochs or 1) > 1:
            raise ConfigError(
                f"trainer.num_epochs={self.num_epochs} needs data that can be read again, and an iterator can be read "
                "once; give a list or an object whose __iter__ starts again, or trainer.num_epochs=1"
            )
        if self.kind != "rows":
            return
        self.source, unit = encode_all(self.source, self.encode), self.encode.unit
        rows = len(self.source)
        if rows == 0 or (rows < self.batch_size and self.last_batch == "drop"):
            raise DataError(
                f"{rows} {unit} don't fill one batch of {self.batch_size}; set data.batch_size to {max(rows, 1)} "
                f"or less, trainer.last_batch='keep', or give more {unit}"
            )

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of batches per epoch; None = the data have no length."""
        if self.kind != "rows":
            return len(self.source) if self.kind == "batches" and isinstance(self.source, Sized) else None
        full, rest = divmod(len(self.source), self.batch_size)
        return full + (rest > 0 and self.last_batch == "keep")

    def describe(self) -> str:
        """Returns one line for the log: the number of rows, their order, the rows left out, and the behaviour of a
        resume.
        """
        if self.kind == "stream":
            order = f"shuffled {self.shuffle_buffer} at a time" if self.shuffle_buffer else "in its own order"
            resume = "reads and skips rows" if self._begin is None else "goes on at its place"
            return f"a stream of {self.encode.unit} {order}, batches of {self.batch_size}; a resume {resume}"
        if self.kind == "batches":
            return f"ready-made batches of {self.batch_size} prompts in their own order; a resume reads and skips them"
        rest = len(self.source) % self.batch_size
        treatment = "dropped" if self.last_batch == "drop" else "in a smaller batch"
        tail = f"; {rest} rows per epoch {treatment}" if rest else ""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in data-set order"
        if isinstance(self.source, MixedRows):
            order += f", of {self.source.describe()}"
        batches = "batch" if self.batches_per_epoch == 1 else "batches"
        batches = f"{self.batches_per_epoch} {batches} of {self.batch_size} per epoch"
        return f"{len(self.source)} {self.encode.unit} {order}, {batches}{tail}"

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch, for a checkpoint: plain ints, and the source's own state."""
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
        self._check_position(state)
        self.epoch, self.batch, self.used = state["epoch"], state["batch"], state["used"]
        self.dropped_rows = state["dropped_rows"]
        if self.kind != "rows" and self._begin is not None and "source" in state:
            self._items = self._resume_at(state)
        elif self.kind != "rows":
            self._items = self._skip_used(self.used, state["read_digest"])

    def _check_position(self, state: Mapping[str, int]) -> None:
        """Raises CheckpointError for a position that no run over these data can reach."""
        batch, used = state["batch"], state["used"]
        places = {name: state[name] for name in ("epoch", "batch", "used", "dropped_rows")}
        possible = all(type(n) is int and 0 <= n < 2**63 for n in places.values())
        if possible and self.kind == "rows":
            possible = used == min(batch * self.batch_size, len(self.source))
        elif possible:  # a batch needs at least one item
            possible = batch <= used and (state["length"] < 0 or used <= state["length"])
        if not possible:
            shown = ", ".join(f"{name} {n!r:.30}" for name, n in places.items())
            raise CheckpointError(
                f"the checkpoint's data position is invalid: {shown}, which no run over these data reaches; resume "
                "from another step-* folder"
            )

    def _resume_at(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Returns the unused items of a source that continues from its saved state.

        Raises: CheckpointError: its first row has changed, or it refuses the state.
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
                f"the data can't continue at the checkpoint's position: {format_exception(error)}; resume with the "
                "same data, or start a new run in another trainer.run_dir"
            ) from error
        self.read_digest, block = state["read_digest"], state["block"]
        self._block = (block, state["source"])
        return islice(self._shuffled(iterate_rows(self.source, "the data"), block), self.used - block, None)

    def _shuffled(self, items: Iterator[Any], used: int = 0) -> Iterator[Any]:
        """Yields the items of a stream, shuffled a block of `shuffle_buffer` at a time.

        The order of each block is drawn from (seed, epoch, block), so a resume reads at most one block again.
        Args: used: the number of earlier items, a multiple of the block size.
        """
        size = self.shuffle_buffer
        while size and (block := list(islice(items, size))):
            yield from (block[i] for i in permutation(len(block), self.seed, self.epoch, used // size).tolist())
            used += len(block)
            self._record_position(used)
        yield from items

    def _record_position(self, used: int) -> None:
        """Records the state of the source after `used` items, for a resume."""
        if self._begin is not None:
            self._block = (used, self.source.state_dict())

    def _skip_used(self, used: int, expected: int) -> Iterator[Any]:
        """Reads the used items, compares their digest, and returns the items after them.

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
        """Yields the batches from the current position on. Raises DataError: an epoch has no batch."""
        while self.num_epochs is None or self.epoch < self.num_epochs:
            if self.kind == "rows":
                yield from self._iterate_rows()
            else:
                yield from self._iterate_stream()
            if self.batch == 0:
                raise DataError(
                    f"epoch {self.epoch} gave no batch of {self.batch_size} {self.encode.unit}; use a smaller "
                    "data.batch_size, trainer.last_batch='keep', or data that can be read again"
                )
            self.epoch, self.batch, self.used, self.read_digest = self.epoch + 1, 0, 0, 0
            self._block = None
            if self.kind != "rows" and self.encode.unit == "rows" and (counts := self.encode.describe_counts()):
                log.warning("%s", counts)
            if self.once:
                return

    def _iterate_rows(self) -> Iterator[list[Any]]:
        """Yields the remaining batches of an epoch of rows with a length."""
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

    def _iterate_stream(self) -> Iterator[list[Any]]:
        """Returns the remaining batches of an epoch of a stream or of ready-made batches; `used` counts the items."""
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
                    f"batch {self.used - 1} has {len(rows)} prompts, and the first had {self.batch_size}; "
                    "make all batches equally large"
                )
            if not rows or (len(rows) < self.batch_size and self.last_batch == "drop"):
                self.dropped_rows += len(rows)
                continue
            encoded = [self._encode(row, first + place) for place, row in enumerate(rows)]
            if any(row is None for row in encoded):
                raise DataError(
                    f"batch {self.used - 1}: a prompt over the limit can't be dropped from a ready-made batch; set "
                    "on_long_prompt to truncate_left, or leave such rows out of the batches"
                )
            self.batch += 1
            yield encoded

    def _read_rows(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for row in items:
            encoded = self._encode(row, self.used)
            self._take(row)
            if encoded is not None:
                batch.append(encoded)
            if len(batch) == self.batch_size:
                self.batch += 1
                full, batch = batch, []
                if not self.shuffle_buffer:  # otherwise each block of the buffer records it
                    self._record_position(self.used)
                yield full
        if batch and self.last_batch == "keep":
            self.batch += 1
            if not self.shuffle_buffer:
                self._record_position(self.used)
            yield batch
        elif batch:
            self.dropped_rows += len(batch)

    def _take(self, item: Any) -> None:
        self.used, self.read_digest = self.used + 1, chain_checksum(item, self.read_digest)

    def _encode(self, row: Any, number: int) -> Any:
        return self.encode(row, number)


def encode_all(rows: Any, encode: Encoder[Any], source: str = "the data") -> Sequence[Any]:
    """Encodes all rows, leaves out the dropped ones, and logs its progress.

    Args:
        rows: with a length, or a stream.
        encode: the encoder of a row.
        source: of the rows, for errors of reading them.
    Raises: DataError: rows over a limit, after the last row; any other wrong row at once.
    """
    out, last_logged = [], time.monotonic()
    parts, ends = [out], set()
    if isinstance(rows, MixedRows):
        ends = set(accumulate(len(part) for part in rows.parts[:-1]))
    with encode.all_rows():
        for place, encoded in enumerate(_encoded(rows, encode, source)):
            if place in ends:
                parts.append(out := [])
            if encoded is not None:
                out.append(encoded)
            if time.monotonic() - last_logged > LOG_INTERVAL_S:
                last_logged = time.monotonic()
                of_all = f" of {len(rows)}" if has_random_access(rows) else ""
                log.info("encoded %d%s %s", place + 1, of_all, encode.unit)
    return rows.with_parts(parts) if isinstance(rows, MixedRows) else out


def _encoded(rows: Any, encode: Encoder[Any], source: str) -> Iterator[Any]:
    """Yields the encoded rows, in order; the encoder gets them in batches, so that it calls the tokenizer once per
    batch.
    """
    items, place = iterate_rows(rows, source), 0
    while batch := list(islice(items, ENCODE_BATCH)):
        yield from encode.encode_batch(batch, place)
        place += len(batch)


def _peek(source: Iterable[Any], once: bool) -> tuple[Any, Iterable[Any]]:
    """Returns the first item, and a source that still contains it."""
    if isinstance(source, Mapping | str):
        raise DataError(f"data of type {type(source).__name__}; give a list of rows, a Dataset or an iterable of them")
    items = iterate_rows(source, "the data")
    try:
        first = next(items)
    except StopIteration:
        raise DataError("the data have no rows; give at least one batch of prompts") from None
    return first, chain([first], items) if once else source


def is_batch(item: Any, prompt_column: str | None = None) -> bool:
    """Returns whether an item is a batch: its prompt column is a list or array of prompts, not one conversation.

    >>> is_batch({"prompts": ["a", "b"]}), is_batch({"prompt": "a"}), is_batch({"prompt": [{"role": "user"}]})
    (True, False, False)
    >>> is_batch({"prompt": []})  # a conversation without messages, which the row's check names
    False
    """
    names = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    value = next((item[name] for name in names if name in item), None) if isinstance(item, Mapping) else None
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return False
    return len(value) > 0 and not isinstance(value[0], Mapping)


def first_row(rows: Any) -> Any:
    """Returns the first row or ready-made batch; None = it can't be read without consuming it."""
    if has_random_access(rows):
        return rows[0] if len(rows) else None
    return None if rows is None or iter(rows) is rows else next(iter(rows), None)


def has_random_access(source: Any) -> bool:
    """Returns whether a source has a length and can be indexed."""
    return isinstance(source, Sequence) or (isinstance(source, Sized) and hasattr(source, "__getitem__"))
