"""From rows to Examples for reward models and preference training: pairs of answers, and answers with a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from whet.data.conversations import make_sequence
from whet.data.row_schema import read_text_or_messages
from whet.data.supervised import EQUAL, RESPONSES, Answer, RowAnswers, RowEncoder, make_answer, starts_with_prompt
from whet.errors import DataError, format_value
from whet.types import Message, TrainSequence

__all__ = ["PreferenceEncoder", "ScoredPairEncoder", "UnpairedEncoder"]


class PreferenceEncoder(RowEncoder):
    """Pairs for preference training: sequences (chosen, rejected), column chosen = (1, 0).

    chosen and rejected are texts or lists of messages, after a prompt that is a text or a conversation. Without one,
    or where they begin with it, they are whole conversations, and what they begin with alike is the prompt: whole
    messages, or for texts whole tokens. Conversations have to begin with the same question; texts need not. A margin
    column becomes the column margin.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> x = PreferenceEncoder(byte_tokenizer())({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    >>> [s.tokens.tolist() for s in x.sequences], dict(x.columns)
    ([[52, 256], [53, 256]], {'chosen': (1.0, 0.0)})
    """

    takes = "prompt (or messages) with chosen and rejected; whole conversations or texts chosen and rejected"
    scored = False
    """Whether answers are compared by a score, which reads the tokens before what is trained too."""

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        answers = self._pair(row, number)
        if answers is None:
            raise self._no_form(row, number)
        name = self.data.margin_column or "margin"
        columns: dict[str, tuple[float, ...]] = {"chosen": (1.0, 0.0)}
        if self._column(row, ("margin",), "margin_column", number) or name in row:
            columns["margin"] = (_number(row[name], name, number),) * 2
        return RowAnswers(answers, columns, EQUAL if not answers else "")

    def _pair(self, row: Mapping[str, Any], number: int) -> list[Answer] | None:
        """The chosen and the rejected answer; none where they are the same, None where the row has no such columns."""
        chosen = self._column(row, ("chosen",), "chosen_column", number)
        rejected = self._column(row, ("rejected",), "rejected_column", number)
        if chosen is None or rejected is None:
            return None
        a, b = read_text_or_messages(row, chosen, number), read_text_or_messages(row, rejected, number)
        if a == b:
            return []
        prompt = self._prompt(row, number)
        if isinstance(a, list) and isinstance(b, list):
            repeated = [prompt is not None and starts_with_prompt(x, prompt) for x in (a, b)]
            if prompt is None or all(repeated):
                first = _alike(a, b, number)
                return [Answer(None, a, first=first), Answer(None, b, first=first)]
            for column, answer, repeats in ((chosen, a, repeated[0]), (rejected, b, repeated[1])):
                if (role := answer[0]["role"]) != "assistant":
                    what = (
                        "repeats the row's prompt, and the other answer does not"
                        if repeats
                        else (
                            f"begins with a turn of {role!r}, but not with the row's prompt {format_value(prompt, 80)}"
                        )
                    )
                    raise DataError(
                        f"row {number}: {column!r} {what}; answers are what follows the prompt, or both the whole "
                        "conversation"
                    )
        elif isinstance(a, list) or isinstance(b, list):
            raise DataError(
                f"row {number}: one of {chosen!r} and {rejected!r} is a text and the other a list of messages; make "
                "them alike"
            )
        return [Answer(prompt, a), Answer(prompt, b)]

    def _sequences(self, read: RowAnswers, options: Mapping[str, Any], number: int) -> list[list[TrainSequence]]:
        per_answer = super()._sequences(read, options, number)
        texts = all(answer.prompt is None and isinstance(answer.response, str) for answer in read.answers)
        if texts:
            per_answer = [[s] for s in _split_where_they_differ(*(s for answer in per_answer for s in answer))]
            if not self.scored and np.array_equal(per_answer[0][0].tokens, per_answer[1][0].tokens):
                raise DataError(
                    f"row {number}: chosen and rejected differ in their first token alone, and nothing stands before "
                    "it from which a model could foretell it; give the row a prompt, or the tokenizer a bos token"
                )
        first = per_answer[0][0].prefix if per_answer and per_answer[0] else None
        return [[_with_prefix(s, first) for s in answer] for answer in per_answer]


class ScoredPairEncoder(PreferenceEncoder):
    """Pairs for reward models, whose score is of the whole sequence.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> len(ScoredPairEncoder(byte_tokenizer())({"chosen": "4", "rejected": "5"}).sequences)
    2
    """

    scored = True


class UnpairedEncoder(PreferenceEncoder):
    """Single answers that are good or bad, for KTO: a sequence with the column label, 1 for good.

    A pair is taken too, as a good and a bad answer.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> x = UnpairedEncoder(byte_tokenizer())({"prompt": "2+2=", "completion": "5", "label": False})
    >>> [s.tokens.tolist() for s in x.sequences], dict(x.columns)
    ([[53, 256]], {'label': (0.0,)})
    """

    takes = "prompt (or messages) with completion (or response) and label; prompt with chosen and rejected"

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        label = self._column(row, ("label",), "label_column", number)
        if label is None:
            answers = self._pair(row, number)
            if answers is None:
                raise self._no_form(row, number)
            return RowAnswers(answers, {"label": (1.0, 0.0)}, EQUAL if not answers else "")
        prompt = self._prompt(row, number)
        response = self._column(row, RESPONSES, "response_column", number)
        if prompt is None or response is None:
            raise self._no_form(row, number)
        value = row[label]
        if not isinstance(value, bool | int | float | np.bool_ | np.number) or value not in (0, 1):
            raise DataError(
                f"row {number}: column {label!r} holds {format_value(value, 40)}; a label is true or false, 1 or 0"
            )
        return RowAnswers(
            [make_answer(prompt, read_text_or_messages(row, response, number))], {"label": (float(value),)}
        )


def _alike(a: list[Message], b: list[Message], number: int) -> int:
    """How many messages two conversations begin with alike, with a turn of the assistant's after them in each.

    Raises: DataError: what differs first is no answer.
    """
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    roles = [x[same]["role"] for x in (a, b) if same < min(len(a), len(b))]
    if role := next((role for role in roles if role in ("system", "user")), None):
        raise DataError(
            f"row {number}: chosen and rejected differ first in message {same} ({role}), so that they answer different "
            "prompts; let both conversations begin alike, or give plain texts where there is no common prompt"
        )
    last = min(max((i for i, m in enumerate(x) if m["role"] == "assistant"), default=0) for x in (a, b))
    return min(same, last)


def _split_where_they_differ(a: TrainSequence, b: TrainSequence) -> list[TrainSequence]:
    """Two texts with the tokens that both begin with as their prefix; each keeps a token at least."""
    ids = [np.concatenate([s.prefix, s.tokens]) for s in (a, b)]
    most = min(map(len, ids)) - 1
    differ = np.flatnonzero(ids[0][:most] != ids[1][:most])
    same = max(1, int(differ[0]) if len(differ) else most)
    return [make_sequence([(i[:same], False), (i[same:], True)]) for i in ids]


def _with_prefix(sequence: TrainSequence, prefix: np.ndarray | None) -> TrainSequence:
    """The sequence with another's prefix where they are the same, so that memory holds it once."""
    same = prefix is not None and np.array_equal(sequence.prefix, prefix)
    return replace(sequence, prefix=prefix) if same else sequence


def _number(value: Any, column: str, row: int) -> float:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not np.isfinite(value):
        raise DataError(
            f"row {row}: column {column!r} holds {format_value(value, 40)}; expected a number, in every row or none"
        )
    return float(value)
