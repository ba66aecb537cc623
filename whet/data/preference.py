"""Encodes rows as Examples for reward models and preference training: pairs of answers, or answers with a label."""

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

    chosen and rejected are texts or lists of messages that follow a prompt (a text or a conversation). If there is no
    prompt, or if both start with it, they are full conversations or texts, and their common start is the prompt:
    complete messages, or for texts complete tokens. Conversations must start with the same question; texts need not.
    A margin column becomes the column margin.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> x = PreferenceEncoder(byte_tokenizer())({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    >>> [s.tokens.tolist() for s in x.sequences], dict(x.columns)
    ([[52, 256], [53, 256]], {'chosen': (1.0, 0.0)})
    """

    takes = "prompt (or messages) with chosen and rejected; chosen and rejected as full conversations or texts"
    scored = False
    """Whether a reward model scores the answers; its score depends on the prompt's tokens too."""

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
        """Returns the chosen and the rejected answer; [] = they are the same; None = the row has no such columns."""
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
                first = _common_messages(a, b, number)
                return [Answer(None, a, first=first), Answer(None, b, first=first)]
            for column, answer, repeats in ((chosen, a, repeated[0]), (rejected, b, repeated[1])):
                if (role := answer[0]["role"]) != "assistant":
                    problem = (
                        "repeats the row's prompt, and the other answer does not"
                        if repeats
                        else f"starts with a turn of {role!r}, but not with the row's prompt {format_value(prompt, 80)}"
                    )
                    raise DataError(
                        f"row {number}: {column!r} {problem}; both answers must follow the prompt, or both must be the "
                        "full conversation"
                    )
        elif isinstance(a, list) or isinstance(b, list):
            raise DataError(
                f"row {number}: one of {chosen!r} and {rejected!r} is a text, and the other is a list of messages; use "
                "the same form for both"
            )
        return [Answer(prompt, a), Answer(prompt, b)]

    def _arrange(
        self, read: RowAnswers, per_answer: list[list[TrainSequence]], number: int
    ) -> list[list[TrainSequence]]:
        if per_answer and all(a.prompt is None and isinstance(a.response, str) for a in read.answers):
            per_answer = [[s] for s in _split_at_difference(*(s for answer in per_answer for s in answer))]
            if not self.scored and np.array_equal(per_answer[0][0].tokens, per_answer[1][0].tokens):
                raise DataError(
                    f"row {number}: chosen and rejected differ only in their first token, which has no tokens before "
                    "it to predict it from; add a prompt to the row, or a bos token to the tokenizer"
                )
        first = per_answer[0][0].prefix if per_answer and per_answer[0] else None
        return [[_share_prefix(s, first) for s in answer] for answer in per_answer]


class ScoredPairEncoder(PreferenceEncoder):
    """Pairs for reward models, which score full sequences.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> len(ScoredPairEncoder(byte_tokenizer())({"chosen": "4", "rejected": "5"}).sequences)
    2
    """

    scored = True


class UnpairedEncoder(PreferenceEncoder):
    """Single answers for KTO: a sequence with the column label, 1 = good and 0 = bad.

    A pair is accepted too, as a good and a bad answer.

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
                f"row {number}: column {label!r} holds {format_value(value, 40)}; a label must be true, false, 1 or 0"
            )
        return RowAnswers(
            [make_answer(prompt, read_text_or_messages(row, response, number))], {"label": (float(value),)}
        )


def _common_messages(a: list[Message], b: list[Message], number: int) -> int:
    """Returns the number of common messages at the start of two conversations; an assistant's turn follows them in
    each.

    Raises: DataError: the first different message is not an answer.
    """
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    roles = [x[same]["role"] for x in (a, b) if same < min(len(a), len(b))]
    if role := next((role for role in roles if role in ("system", "user")), None):
        raise DataError(
            f"row {number}: chosen and rejected differ first in message {same} ({role}), so they answer different "
            "prompts; start both conversations with the same messages, or use plain texts, which need no common prompt"
        )
    last = min(max((i for i, m in enumerate(x) if m["role"] == "assistant"), default=0) for x in (a, b))
    return min(same, last)


def _split_at_difference(a: TrainSequence, b: TrainSequence) -> list[TrainSequence]:
    """Returns two texts with their common tokens as the prefix; at least one token of each is trained."""
    ids = [np.concatenate([s.prefix, s.tokens]) for s in (a, b)]
    limit = min(map(len, ids)) - 1
    different = np.flatnonzero(ids[0][:limit] != ids[1][:limit])
    same = max(1, int(different[0]) if len(different) else limit)
    return [make_sequence([(i[:same], False), (i[same:], True)]) for i in ids]


def _share_prefix(sequence: TrainSequence, prefix: np.ndarray | None) -> TrainSequence:
    """Returns the sequence with the prefix array of another if they are equal, which saves memory."""
    same = prefix is not None and np.array_equal(sequence.prefix, prefix)
    return replace(sequence, prefix=prefix) if same else sequence


def _number(value: Any, column: str, row: int) -> float:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not np.isfinite(value):
        raise DataError(
            f"row {row}: column {column!r} holds {format_value(value, 40)}; expected a number, in every row or none"
        )
    return float(value)
