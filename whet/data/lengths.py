"""Counts the tokens of rows; rows over the limit are refused, truncated at one end or left out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from whet.config.data import SupervisedDataConfig
from whet.errors import DataError
from whet.types import TrainSequence

__all__ = ["LengthPolicy", "LengthStats", "check_prompt_lengths"]

BARS = 10
"""The most bars of a histogram."""


class LengthStats:
    """The number of tokens of each row, with statistics.

    >>> stats = LengthStats([3, 4, 4, 9])
    >>> stats.over(4), stats.longest, stats.percentile_95, str(stats)
    (1, 9, 9, '4 rows: median 4, 95 % have 9 or fewer, longest 9 tokens')
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """Args: lengths: the first rows."""
        self._lengths = array("q", lengths)

    def add(self, length: int) -> None:
        """Adds a row."""
        self._lengths.append(length)

    def extend(self, lengths: Iterable[int]) -> None:
        """Adds several rows."""
        self._lengths.extend(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __str__(self) -> str:
        if not self._lengths:
            return "no rows"
        middle = int(np.percentile(self._array, 50, method="lower"))
        return (
            f"{len(self)} row{'s' * (len(self) != 1)}: median {middle}, 95 % have {self.percentile_95} or fewer, "
            f"longest {self.longest} tokens"
        )

    @property
    def _array(self) -> np.ndarray:
        return np.frombuffer(self._lengths, dtype=np.int64)

    @property
    def longest(self) -> int:
        """The length of the longest row; 0 = there are no rows."""
        return max(self._lengths, default=0)

    @property
    def percentile_95(self) -> int:
        """The length that 95 % of the rows do not exceed."""
        return int(np.percentile(self._array, 95, method="higher")) if self._lengths else 0

    def over(self, limit: int) -> int:
        """Returns the number of rows that are longer than a limit."""
        return int((self._array > limit).sum()) if self._lengths else 0

    def describe_over(self, limit: int, name: str) -> str:
        """Describes the rows over a limit: their number, the longest, and the 95th percentile; "" = there are none.

        >>> LengthStats([3, 9]).describe_over(4, "max_length")
        '1 of 2 rows is over max_length 4: the longest has 9 tokens, 95 % of all rows have 9 or fewer'
        """
        over = self.over(limit)
        if not over:
            return ""
        return (
            f"{over} of {len(self)} rows {'is' if over == 1 else 'are'} over {name} {limit}: the longest has "
            f"{self.longest} tokens, 95 % of all rows have {self.percentile_95} or fewer"
        )

    def histogram(self, width: int = 40) -> list[str]:
        """Returns a line for each of several equal ranges of lengths: range, number of rows, bar.

        Args: width: characters of the longest bar.

        >>> LengthStats([1, 1, 2, 3]).histogram(4)
        ['1  2 ####', '2  1 ##', '3  1 ##']
        """
        shortest, longest = min(self._lengths, default=0), self.longest
        step = -(-(longest - shortest + 1) // BARS)
        starts = range(shortest, longest + 1, step)
        counts = np.bincount((self._array - shortest) // step, minlength=len(starts)).tolist() if self._lengths else []
        labels = [str(a) if step == 1 else f"{a}-{min(a + step - 1, longest)}" for a in starts]
        label_width, digits, largest = (
            max(map(len, labels), default=0),
            len(str(max(counts, default=0))),
            max(counts, default=1),
        )
        bars = ["#" * -(-count * width // largest) for count in counts]
        return [
            f"{a:>{label_width}}  {n:>{digits}} {bar}".rstrip() for a, n, bar in zip(labels, counts, bars, strict=False)
        ]


def check_prompt_lengths(
    lengths: LengthStats,
    positions: int | None,
    max_tokens: int,
    *,
    row: int | None = None,
    best_limit: int | None = None,
) -> None:
    """Refuses prompts that leave no room for a completion.

    Args:
        lengths: tokens of each prompt.
        positions: the most tokens that the model can read; None = no limit.
        max_tokens: the most tokens of a completion.
        row: the row number of the longest prompt, for the message.
        best_limit: the max_prompt_length that the message suggests; None = positions - max_tokens.
    Raises: DataError: a prompt and its completion may have more tokens than the model has positions.

    >>> check_prompt_lengths(LengthStats([10]), 16, max_tokens=6)
    >>> check_prompt_lengths(LengthStats([9, 10]), 16, max_tokens=7, row=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.DataError: 1 of 2 prompts can't fit, 95 % have 10 tokens or fewer; the longest, row 3: 10 prompt ...
    """
    if positions is None or not (over := lengths.over(positions - max_tokens)):
        return
    longest, row_text = lengths.longest, "" if row is None else f", row {row}"
    treatment = "with rollout.on_long_prompt=drop or truncate_left"
    if best_limit is not None or max_tokens < positions:
        key, limit = "rollout.max_prompt_length", best_limit or positions - max_tokens
        lower = ", or lower rollout.max_tokens_to_generate" if max_tokens > 1 else ""
        fix = f"set rollout.max_prompt_length={limit} {treatment}{lower}"
    else:
        key, limit = "rollout.max_tokens_to_generate", positions - min(longest, positions - 1)
        fix = "max_tokens_to_generate leaves no room for a prompt; set it to "
        fix += (
            f"{positions - longest} or less for this prompt"
            if longest < positions
            else f"{positions - 1} or less, and rollout.max_prompt_length to the rest {treatment}"
        )
    raise DataError(
        f"{over} of {len(lengths)} prompts can't fit, 95 % have {lengths.percentile_95} tokens or fewer; the "
        f"longest{row_text}: {longest} prompt tokens + rollout.max_tokens_to_generate {max_tokens} = "
        f"{longest + max_tokens}, but the model has {positions} positions (max_position_embeddings)",
        fix=fix,
        key=key,
        limit=limit,
    )


class LengthPolicy:
    """Counts the tokens of rows, and applies on_long to rows over max_length."""

    def __init__(self, data: SupervisedDataConfig) -> None:
        """Args: data: the section with max_length and on_long."""
        self.data = data
        self.stats = LengthStats()
        """The length of each row's longest sequence."""
        self.deferred = False
        """Whether rows over the limit are reported only after the last row, by `check_all`."""

    def fit(self, sequences: Sequence[TrainSequence], row: int) -> list[TrainSequence | None] | None:
        """Applies the limit to the sequences of a row.

        Args: sequences: the sequences of one row. row: the row's number.
        Returns: each sequence, truncated if needed, with None for one that has no trained token left; or None, if the
            row is left out.
        Raises: DataError: the row is over the limit and on_long is "error", unless errors are deferred.
        """
        longest, limit = max(map(_length, sequences)), self.data.max_length
        self.stats.add(longest)
        if limit is None or longest <= limit:
            return list(sequences)
        if self.data.on_long in ("truncate", "truncate_left"):
            truncate = truncate_end if self.data.on_long == "truncate" else truncate_start
            return [truncate(s, limit) for s in sequences]
        if self.data.on_long == "error" and not self.deferred:
            raise DataError(
                f"row {row} has {longest} tokens, over data.max_length {limit}; {self._length_hint(longest)}"
            )
        return None

    def check_all(self) -> None:
        """Raises DataError with the number and the lengths of rows over the limit, if on_long is "error"."""
        if self.data.on_long == "error" and (over := self.describe()):
            raise DataError(f"{over}; {self._length_hint(self.stats.longest)}")

    def describe(self) -> str:
        """Describes the rows over the limit: number, longest, and 95th percentile; "" = there are none."""
        limit = self.data.max_length
        return "" if limit is None else self.stats.describe_over(limit, "data.max_length")

    def _length_hint(self, longest: int) -> str:
        return f"raise it to {longest}, or set data.on_long to truncate (cut the end off) or drop"


def truncate_end(sequence: TrainSequence, limit: int) -> TrainSequence | None:
    """Returns the first tokens of a sequence.

    Args: sequence: the sequence. limit: the number of tokens to keep, prefix included.
    Returns: the truncated sequence; None = it has no trained token.

    >>> s = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 2]), mask=np.array([True, True]))
    >>> truncate_end(s, 3).tokens.tolist(), truncate_end(s, 2)
    ([7], None)
    """
    if _length(sequence) <= limit:
        return sequence
    kept = max(0, limit - len(sequence.prefix))
    if not sequence.mask[:kept].any():
        return None
    return TrainSequence(prefix=sequence.prefix, tokens=sequence.tokens[:kept], mask=sequence.mask[:kept])


def truncate_start(sequence: TrainSequence, limit: int) -> TrainSequence | None:
    """Returns the last tokens of a sequence; the first of them becomes the prefix, even if it was trained.

    Args: sequence: the sequence. limit: the number of tokens to keep, prefix included.
    Returns: the truncated sequence; None = it has no trained token.

    >>> s = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 8, 2]), mask=np.array([True, True, True]))
    >>> short = truncate_start(s, 2)
    >>> short.prefix.tolist(), short.tokens.tolist(), truncate_start(s, 1)
    ([8], [2], None)
    """
    over = _length(sequence) - limit
    if over <= 0:
        return sequence
    tokens = np.concatenate([sequence.prefix, sequence.tokens])[over:]
    prefix_length = max(1, len(sequence.prefix) - over)
    mask = sequence.mask[prefix_length + over - len(sequence.prefix) :]
    if not mask.any():
        return None
    return TrainSequence(prefix=tokens[:prefix_length], tokens=tokens[prefix_length:], mask=mask)


def _length(sequence: TrainSequence) -> int:
    return len(sequence.prefix) + len(sequence.tokens)
