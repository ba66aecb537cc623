"""Encodes rows in TRL's forms to Examples: texts, conversations, pairs, and rows of token ids.

docs/data.md says how whet reads rows and which tokens it trains; docs/from-trl.md lists the differences from TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.data.conversations import make_sequence
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder
from whet.data.prompt_stream import epoch_order
from whet.data.supervised import Answer, AnswerText, RowAnswers, RowEncoder, SFTEncoder
from whet.errors import DataError
from whet.types import Example, TrainSequence

__all__ = [
    "ExampleStream",
    "FormattedRows",
    "IdentityEncoder",
    "PairOrIdsEncoder",
    "SFTOrIdsEncoder",
    "TextPairEncoder",
    "first_row",
    "has_rows",
    "make_examples",
    "pair_columns",
    "scored_columns",
    "sft_columns",
]


@dataclass(frozen=True)
class _Ids(Answer):
    """An answer given as token ids, with the mask of the trained ones."""

    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()


def _of_ids(ids: Iterable[int], *masks: Iterable[Any]) -> _Ids:
    ids = tuple(ids)
    trained = tuple(all(bits) for bits in zip(*masks, strict=True)) if masks else (True,) * len(ids)
    return _Ids(None, "", ids=ids, mask=trained)


def _sequence(answer: _Ids, number: int) -> list[TrainSequence]:
    """Its sequence; none where no token after the first is trained."""
    if len(answer.ids) != len(answer.mask):
        raise DataError(
            f"row {number} has {len(answer.ids)} token ids and {len(answer.mask)} labels; give one for each"
        )
    ids, mask = np.asarray(answer.ids, dtype=np.int32), np.asarray(answer.mask, dtype=bool)
    if not mask[1:].any():
        return []
    given = max(1, int(np.argmax(mask)))
    return [TrainSequence(prefix=ids[:given], tokens=ids[given:], mask=mask[given:])]


class SFTOrIdsEncoder(SFTEncoder):
    """Rows of SFT, or of `input_ids` with `labels` (-100 = not trained) or completion_mask and assistant_masks."""

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        if "input_ids" not in row:
            return super()._read(row, number)
        if row.get("labels") is not None:
            return RowAnswers([_of_ids(row["input_ids"], [label != -100 for label in row["labels"]])])
        names = ("assistant_masks",) if self.trains_all else ("completion_mask", "assistant_masks")
        return RowAnswers([_of_ids(row["input_ids"], *(row[name] for name in names if row.get(name) is not None))])

    def _render_answer(
        self, answer: Answer, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence | AnswerText]:
        if isinstance(answer, _Ids):
            return [*_sequence(answer, number)]
        return super()._render_answer(answer, options, number)


class PairOrIdsEncoder(ScoredPairEncoder):
    """Pairs, or pairs of `chosen_ids` and `rejected_ids`, whose last tokens are scored."""

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        end = next((end for end in ("ids", "input_ids") if f"chosen_{end}" in row), None)
        if end is None:
            return super()._read(row, number)
        margin = {"margin": (float(row["margin"]),) * 2} if row.get("margin") is not None else {}
        answers = [_of_ids(row[f"{side}_{end}"]) for side in ("chosen", "rejected")]
        return RowAnswers(answers, {"chosen": (1.0, 0.0), **margin})

    def _render_answer(
        self, answer: Answer, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence | AnswerText]:
        if isinstance(answer, _Ids):
            return [*_sequence(answer, number)]
        return super()._render_answer(answer, options, number)


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two texts or lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TextPairEncoder(PreferenceEncoder):
    """Pairs; of texts without a prompt it is what both begin with, character by character, as in TRL.

    A blank at its end is the answers'. Prompt and answer are encoded together there, and so they are here.
    """

    def _arrange(
        self, read: RowAnswers, per_answer: list[list[TrainSequence]], number: int
    ) -> list[list[TrainSequence]]:
        texts = [
            answer.response for answer in read.answers if answer.prompt is None and isinstance(answer.response, str)
        ]
        if len(texts) != 2:
            return super()._arrange(read, per_answer, number)
        prompt = texts[0][: _common_prefix(*texts)]
        prompt = prompt[:-1] if prompt.endswith(" ") else prompt
        end = str(self.tokenizer.eos_token)
        both = [text if text.endswith(end) else text + end for text in texts]
        ids = [list(self.tokenizer(text, verbose=False).input_ids) for text in (prompt, *both)]
        same = min(_common_prefix(ids[0], made) for made in ids[1:])
        if not same:
            return super()._arrange(read, per_answer, number)
        return [[make_sequence([(made[:same], False), (made[same:], True)])] for made in ids[1:]]


class IdentityEncoder:
    """The encoder of a learner whose rows are Examples already."""

    counts: Mapping[Any, int] = {}

    def __call__(self, row: Example, number: int = 0) -> Example:
        """The row as it is."""
        return row


Pack = Callable[[Iterable[Example]], Iterator[Example]]


class ExampleStream:
    """The Examples of a stream, encoded as they are read; each iteration begins at the first row."""

    def __init__(self, rows: Iterable[Any], encode: RowEncoder, pack: Pack | None) -> None:
        self._rows, self._encode, self._pack = rows, encode, pack

    def __iter__(self) -> Iterator[Example]:
        made = (e for i, row in enumerate(self._rows) if (e := self._encode(row, i)) is not None)
        return made if self._pack is None else self._pack(made)


class FormattedRows:
    """Rows, each as the text that a function makes of it.

    Args: data: rows. fn: row -> text. column: that it is in.
    """

    def __init__(self, data: Iterable[Any], fn: Callable[[Any], str], column: str) -> None:
        self._data, self._fn, self._column = data, fn, column

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({self._column: self._fn(row)} for row in self._data)


def has_rows(data: Any) -> bool:
    """Whether a data set has a length and its rows have places: it is no stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def first_row(data: Any) -> Mapping[str, Any]:
    """The first row of a data set, by which TRL tells its form. Raises DataError: there is none."""
    for row in data:
        return row
    raise DataError("the data set has no rows; give at least one")


def make_examples(
    data: Any, encode: RowEncoder, *, pack: Pack | None, shuffle: int | None, of: str = ""
) -> list[Example] | ExampleStream:
    """A data set as Examples: a list of them, or of a stream one at a time.

    Args: data: a datasets.Dataset or IterableDataset, a list of dicts, an iterable of them. encode: what makes them.
        pack: groups them. shuffle: seed of an order drawn once; None = as they come. of: what the set is called where
        it is not the one to train on.
    Raises: DataError: rows that can't be trained on.
    """
    if not has_rows(data):
        return ExampleStream(data, encode, pack)
    order = range(len(data)) if shuffle is None else epoch_order(len(data), shuffle, 0).tolist()
    with encode.all_rows():
        made = [e for i in order if (e := encode(data[i], i)) is not None]
    made = made if pack is None else list(pack(made))
    if not made:
        raise DataError(
            f"no row {f'of {of} is left' if of else 'is left to train on'}: {encode.describe_counts() or 'none came'}"
        )
    return made


def _ids(s: TrainSequence) -> list[int]:
    return [*s.prefix.tolist(), *s.tokens.tolist()]


def sft_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Rows as TRL's SFTTrainer holds them: input_ids and labels (-100 = not trained).

    Of a pack the rows stand end to end, with their lengths in seq_lengths.
    """

    def labels(s: TrainSequence) -> list[int]:
        return [-100] * len(s.prefix) + np.where(s.mask, s.tokens, -100).tolist()

    rows: dict[str, list[Any]] = {
        "input_ids": [[i for s in e.sequences for i in _ids(s)] for e in examples],
        "labels": [[i for s in e.sequences for i in labels(s)] for e in examples],
    }
    if any(len(e.sequences) > 1 for e in examples):
        rows["seq_lengths"] = [[len(s.prefix) + len(s.tokens) for s in e.sequences] for e in examples]
    return rows


def pair_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Pairs as TRL's DPOTrainer holds them: prompt_ids, chosen_ids and rejected_ids."""
    return {
        "prompt_ids": [e.sequences[0].prefix.tolist() for e in examples],
        "chosen_ids": [e.sequences[0].tokens.tolist() for e in examples],
        "rejected_ids": [e.sequences[1].tokens.tolist() for e in examples],
    }


def scored_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Pairs as TRL's RewardTrainer holds them: chosen_ids and rejected_ids, prompts included, and margin if any."""
    rows: dict[str, list[Any]] = {
        name: [_ids(e.sequences[i]) for e in examples] for i, name in enumerate(("chosen_ids", "rejected_ids"))
    }
    if examples and "margin" in examples[0].columns:
        rows["margin"] = [e.columns["margin"][0] for e in examples]
    return rows
