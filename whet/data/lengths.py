"""How long rows are, and those over the limit: refused, cut at one end or left out, and counted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from whet.config.data import SupervisedDataConfig
from whet.errors import DataError
from whet.types import TrainSequence

__all__ = ["LengthPolicy", "LengthStats", "check_prompt_lengths"]

BARS = 10
"""Of a histogram, at most."""


class LengthStats:
    """Numbers of tokens, one for each row.

    >>> spread = LengthStats([3, 4, 4, 9])
    >>> spread.over(4), spread.longest, spread.percentile_95, str(spread)
    (1, 9, 9, '4 rows: median 4, 95 % have 9 or fewer, longest 9 tokens')
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """Args: lengths: to begin with."""
        self._lengths = array("q", lengths)

    def add(self, length: int) -> None:
        """One row more."""
        self._lengths.append(length)

    def extend(self, lengths: Iterable[int]) -> None:
        """Several rows more."""
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
        """The longest; 0 where there is none."""
        return max(self._lengths, default=0)

    @property
    def percentile_95(self) -> int:
        """What 95 % of the rows have, or fewer."""
        return int(np.percentile(self._array, 95, method="higher")) if self._lengths else 0

    def over(self, limit: int) -> int:
        """How many are longer."""
        return int((self._array > limit).sum()) if self._lengths else 0

    def describe_over(self, limit: int, name: str) -> str:
        """How many rows are over a limit of that name, the longest, and what 95 % have; "" where none is.

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
        """A line for each range of lengths, of equal width from the shortest to the longest: range, rows, bar.

        Args: width: characters of the longest bar.

        >>> LengthStats([1, 1, 2, 3]).histogram(4)
        ['1  2 ####', '2  1 ##', '3  1 ##']
        """
        low, high = min(self._lengths, default=0), self.longest
        step = -(-(high - low + 1) // BARS)
        starts = range(low, high + 1, step)
        counts = np.bincount((self._array - low) // step, minlength=len(starts)).tolist() if self._lengths else []
        labels = [str(a) if step == 1 else f"{a}-{min(a + step - 1, high)}" for a in starts]
        wide, digits, most = max(map(len, labels), default=0), len(str(max(counts, default=0))), max(counts, default=1)
        bars = ["#" * -(-count * width // most) for count in counts]
        return [f"{a:>{wide}}  {n:>{digits}} {bar}".rstrip() for a, n, bar in zip(labels, counts, bars, strict=False)]


def check_prompt_lengths(
    lengths: LengthStats,
    positions: int | None,
    max_tokens: int,
    *,
    row: int | None = None,
    best_limit: int | None = None,
) -> None:
    """Refuses prompts that the model could never complete.

    Args:
        lengths: tokens of each prompt.
        positions: tokens that the model reads at most; None = no limit.
        max_tokens: new tokens that may be asked for.
        row: the number of the longest prompt, for the message.
        best_limit: the max_prompt_length that the message proposes; None = what max_tokens leaves.
    Raises: DataError: a prompt and its completion have more tokens than the model has positions.

    >>> check_prompt_lengths(LengthStats([10]), 16, max_tokens=6)
    >>> check_prompt_lengths(LengthStats([9, 10]), 16, max_tokens=7, row=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.DataError: 1 of 2 prompts can't fit, 95 % have 10 tokens or fewer; the longest, row 3: 10 prompt ...
    """
    if positions is None or not (over := lengths.over(positions - max_tokens)):
        return
    longest, which = lengths.longest, "" if row is None else f", row {row}"
    cut = "with rollout.on_long_prompt=drop or truncate_left"
    if best_limit is not None or max_tokens < positions:
        key, limit = "rollout.max_prompt_length", best_limit or positions - max_tokens
        lower = ", or lower rollout.max_tokens_to_generate" if max_tokens > 1 else ""
        fix = f"set rollout.max_prompt_length={limit} {cut}{lower}"
    else:
        key, limit = "rollout.max_tokens_to_generate", positions - min(longest, positions - 1)
        fix = "max_tokens_to_generate alone leaves no room for a prompt; set it to "
        fix += (
            f"{positions - longest} or less, as this one needs"
            if longest < positions
            else f"{positions - 1} or less, and rollout.max_prompt_length to what is left {cut}"
        )
    raise DataError(
        f"{over} of {len(lengths)} prompts can't fit, 95 % have {lengths.percentile_95} tokens or fewer; the "
        f"longest{which}: {longest} prompt tokens + rollout.max_tokens_to_generate {max_tokens} = "
        f"{longest + max_tokens}, but the model has {positions} positions (max_position_embeddings)",
        fix=fix,
        key=key,
        limit=limit,
    )


class LengthPolicy:
    """The lengths of rows, and what is done with those over max_length."""

    def __init__(self, data: SupervisedDataConfig) -> None:
        """Args: data: its max_length and on_long."""
        self.data = data
        self.spread = LengthStats()
        """Tokens of each row's longest sequence."""
        self.deferred = False
        """Whether an over-long row is an error only after the last row: `check_all`."""

    def fit(self, sequences: Sequence[TrainSequence], row: int) -> list[TrainSequence | None] | None:
        """The sequences under the policy.

        Args: sequences: of a row. row: its number.
        Returns: each as it is or cut, None for one of which nothing trained is left; None where the row is left out.
        Raises: DataError: the row is over the limit and on_long is "error", unless that is deferred.
        """
        longest, limit = max(map(_length, sequences)), self.data.max_length
        self.spread.add(longest)
        if limit is None or longest <= limit:
            return list(sequences)
        if self.data.on_long in ("truncate", "truncate_left"):
            cut = truncate_end if self.data.on_long == "truncate" else truncate_start
            return [cut(s, limit) for s in sequences]
        if self.data.on_long == "error" and not self.deferred:
            raise DataError(f"row {row} has {longest} tokens, over data.max_length {limit}; {self._way_on(longest)}")
        return None

    def check_all(self) -> None:
        """Raises DataError where rows were over the limit and on_long is "error": how many, and how long they are."""
        if self.data.on_long == "error" and (over := self.describe()):
            raise DataError(f"{over}; {self._way_on(self.spread.longest)}")

    def describe(self) -> str:
        """How many rows were over the limit, the longest, and the 95th percentile of all; "" where none was."""
        limit = self.data.max_length
        return "" if limit is None else self.spread.describe_over(limit, "data.max_length")

    def _way_on(self, longest: int) -> str:
        return f"raise it to {longest}, or set data.on_long to truncate (cut the end off) or drop"


def truncate_end(sequence: TrainSequence, limit: int) -> TrainSequence | None:
    """A sequence's first tokens.

    Args: sequence: any. limit: tokens that stay, prefix included.
    Returns: None where no trained token is among them.

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
    """A sequence's last tokens; the first of them is given, whatever it was.

    Args: sequence: any. limit: tokens that stay, prefix included.
    Returns: None where no trained token is among those that follow the first.

    >>> s = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 8, 2]), mask=np.array([True, True, True]))
    >>> cut = truncate_start(s, 2)
    >>> cut.prefix.tolist(), cut.tokens.tolist(), truncate_start(s, 1)
    ([8], [2], None)
    """
    over = _length(sequence) - limit
    if over <= 0:
        return sequence
    given = np.concatenate([sequence.prefix, sequence.tokens])[over:]
    size = max(1, len(sequence.prefix) - over)  # of the prefix
    mask = sequence.mask[size + over - len(sequence.prefix) :]
    if not mask.any():
        return None
    return TrainSequence(prefix=given[:size], tokens=given[size:], mask=mask)


def _length(sequence: TrainSequence) -> int:
    return len(sequence.prefix) + len(sequence.tokens)
