"""Encodes rows of TRL's forms as Examples: texts, conversations, pairs, and rows of token ids.

docs/data.md describes how whet reads rows and which tokens it trains on; docs/from-trl.md lists differences from TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    "LabelledSequence",
    "LazyRows",
    "PairOrIdsEncoder",
    "SFTOrIdsEncoder",
    "TextPairEncoder",
    "first_row",
    "has_rows",
    "label_mask",
    "make_examples",
    "pair_columns",
    "scored_columns",
    "sft_columns",
]


@dataclass(frozen=True)
class _TokenAnswer(Answer):
    """An answer of token ids, and the mask of the trained ones."""

    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()


def _token_answer(ids: Iterable[int], *masks: Iterable[Any]) -> _TokenAnswer:
    """Returns an answer of ids, trained where all masks are true."""
    ids = tuple(ids)
    trained = tuple(all(bits) for bits in zip(*masks, strict=True)) if masks else (True,) * len(ids)
    return _TokenAnswer(None, "", ids=ids, mask=trained)


def _encode_token_answer(answer: _TokenAnswer, number: int) -> list[TrainSequence]:
    """Returns a list of the answer's sequence; an empty list if no token after the first is trained."""
    if len(answer.ids) != len(answer.mask):
        raise DataError(
            f"row {number} has {len(answer.ids)} token ids and {len(answer.mask)} labels; give one for each"
        )
    ids, mask = np.asarray(answer.ids, dtype=np.int32), np.asarray(answer.mask, dtype=bool)
    if not mask[1:].any():
        return []
    start = max(1, int(np.argmax(mask)))
    return [TrainSequence(prefix=ids[:start], tokens=ids[start:], mask=mask[start:])]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSequence(TrainSequence):
    """A sequence with the label of its first token. Nothing predicts this token, unless rows are packed end to end."""

    first_trained: bool


def label_mask(s: TrainSequence) -> np.ndarray:
    """Returns bool [P + C]: the tokens that have a label in TRL, the first one included."""
    mask = np.concatenate([np.zeros(len(s.prefix), bool), s.mask])
    mask[0] = isinstance(s, LabelledSequence) and s.first_trained
    return mask


class SFTOrIdsEncoder(SFTEncoder):
    """Encodes SFT rows, and rows of `input_ids` with `labels` (-100 = not trained), or masks."""

    def __call__(self, row: Mapping[str, Any], number: int = 0) -> Example | None:
        """Returns the row as an Example of LabelledSequences: see RowEncoder."""
        example = super().__call__(row, number)
        if example is None:
            return None
        first = self.trains_all
        (s, *_), (answer, *_) = example.sequences, self._read(row, number).answers
        if isinstance(answer, _TokenAnswer):
            at_end = self.data.on_long == "truncate_left"
            first = answer.mask[-len(s.prefix) - len(s.tokens) if at_end else 0]
        sequences = tuple(LabelledSequence(**vars(s), first_trained=first) for s in example.sequences)
        return replace(example, sequences=sequences)

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        if "input_ids" not in row:
            return super()._read(row, number)
        if row.get("labels") is not None:
            return RowAnswers([_token_answer(row["input_ids"], [label != -100 for label in row["labels"]])])
        names = ("assistant_masks",) if self.trains_all else ("completion_mask", "assistant_masks")
        masks = (row[name] for name in names if row.get(name) is not None)
        return RowAnswers([_token_answer(row["input_ids"], *masks)])

    def _render_answer(
        self, answer: Answer, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence | AnswerText]:
        if isinstance(answer, _TokenAnswer):
            return [*_encode_token_answer(answer, number)]
        return super()._render_answer(answer, options, number)


class PairOrIdsEncoder(ScoredPairEncoder):
    """Encodes pairs, and pairs of `chosen_ids` and `rejected_ids`. The reward model scores their last tokens."""

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        suffix = next((suffix for suffix in ("ids", "input_ids") if f"chosen_{suffix}" in row), None)
        if suffix is None:
            return super()._read(row, number)
        margin = {"margin": (float(row["margin"]),) * 2} if row.get("margin") is not None else {}
        answers = [_token_answer(row[f"{side}_{suffix}"]) for side in ("chosen", "rejected")]
        return RowAnswers(answers, {"chosen": (1.0, 0.0), **margin})

    def _render_answer(
        self, answer: Answer, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence | AnswerText]:
        if isinstance(answer, _TokenAnswer):
            return [*_encode_token_answer(answer, number)]
        return super()._render_answer(answer, options, number)


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two texts or lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TextPairEncoder(PreferenceEncoder):
    """Encodes pairs. If two texts have no prompt, their common beginning is the prompt, as in TRL.

    A space at the end of the common beginning belongs to the answers. Prompt and answer are encoded together.
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
        eos = str(self.tokenizer.eos_token)
        texts = [text if text.endswith(eos) else text + eos for text in texts]
        prompt_ids, *answers = (list(self.tokenizer(text, verbose=False).input_ids) for text in (prompt, *texts))
        start = min(_common_prefix(prompt_ids, answer) for answer in answers)
        if not start:
            return super()._arrange(read, per_answer, number)
        return [[make_sequence([(answer[:start], False), (answer[start:], True)])] for answer in answers]


Pack = Callable[[Iterable[Example]], Iterator[Example]]


class ExampleStream:
    """Encodes the rows of a stream as they are read. Each iteration begins at the first row."""

    def __init__(self, rows: Iterable[Any], encode: RowEncoder, pack: Pack | None) -> None:
        self._rows, self._encode, self._pack = rows, encode, pack

    def __iter__(self) -> Iterator[Example]:
        examples = (e for i, row in enumerate(self._rows) if (e := self._encode(row, i)) is not None)
        return examples if self._pack is None else self._pack(examples)


class LazyRows:
    """Applies a function to a stream at each iteration. Args: data: the stream. fn: stream -> rows."""

    def __init__(self, data: Iterable[Any], fn: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._data, self._fn = data, fn

    def __iter__(self) -> Iterator[Any]:
        return self._fn(self._data)


def has_rows(data: Any) -> bool:
    """Returns whether a data set has a length and can be indexed; a stream can't."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def first_row(data: Any) -> Mapping[str, Any]:
    """Returns the first row of a data set, which decides its form in TRL. Raises DataError: the data set is empty."""
    for row in data:
        return row
    raise DataError("train_dataset or eval_dataset has no rows; give at least one")


def make_examples(
    data: Any, encode: RowEncoder, *, pack: Pack | None, shuffle: int | None, name: str = ""
) -> list[Example] | ExampleStream:
    """Encodes a data set as a list of Examples; a stream becomes an ExampleStream.

    Args:
        data: a datasets.Dataset or IterableDataset, a list of dicts, or an iterable of dicts.
        encode: the encoder of a row.
        pack: groups the Examples; None = no packing.
        shuffle: the seed of an order that is drawn once; None = the order of the data set.
        name: the name of an evaluation set, for the message; "" = the training set.
    Raises: DataError: rows that can't be trained on.
    """
    if not has_rows(data):
        return ExampleStream(data, encode, pack)
    order = range(len(data)) if shuffle is None else epoch_order(len(data), shuffle, 0).tolist()
    with encode.all_rows():
        examples = [e for i in order if (e := encode(data[i], i)) is not None]
    examples = examples if pack is None else list(pack(examples))
    if not examples:
        subject = f"no row of {name} is left" if name else "no row is left to train on"
        raise DataError(f"{subject}: {encode.describe_counts() or 'none came'}")
    return examples


def _ids(s: TrainSequence) -> list[int]:
    return [*s.prefix.tolist(), *s.tokens.tolist()]


def sft_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Returns the columns of TRL's SFTTrainer: input_ids and labels (-100 = not trained).

    A pack is one row of its sequences end to end; seq_lengths has their lengths.
    """

    def labels(s: TrainSequence) -> list[int]:
        return np.where(label_mask(s), _ids(s), -100).tolist()

    rows: dict[str, list[Any]] = {
        "input_ids": [[i for s in e.sequences for i in _ids(s)] for e in examples],
        "labels": [[i for s in e.sequences for i in labels(s)] for e in examples],
    }
    if any(len(e.sequences) > 1 for e in examples):
        rows["seq_lengths"] = [[len(s.prefix) + len(s.tokens) for s in e.sequences] for e in examples]
    return rows


def pair_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Returns the columns of TRL's DPOTrainer: prompt_ids, chosen_ids and rejected_ids."""
    return {
        "prompt_ids": [e.sequences[0].prefix.tolist() for e in examples],
        "chosen_ids": [e.sequences[0].tokens.tolist() for e in examples],
        "rejected_ids": [e.sequences[1].tokens.tolist() for e in examples],
    }


def scored_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Returns the columns of TRL's RewardTrainer: chosen_ids and rejected_ids, prompts included, and any margin."""
    rows: dict[str, list[Any]] = {
        name: [_ids(e.sequences[i]) for e in examples] for i, name in enumerate(("chosen_ids", "rejected_ids"))
    }
    if examples and "margin" in examples[0].columns:
        rows["margin"] = [e.columns["margin"][0] for e in examples]
    return rows
