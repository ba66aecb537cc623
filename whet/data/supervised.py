"""From rows to Examples for supervised fine-tuning; data/preference.py encodes answers that are compared.

Rows are encoded once, here; no later step tokenises again. docs/data.md has the forms of rows that are taken.
Left out on purpose: images, and ready-made batches: supervised data are rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config.data import SupervisedDataConfig
from whet.data.conversations import Rendering, encode_rendering, make_sequence, render_as_one, render_turns
from whet.data.lengths import LengthPolicy
from whet.data.row_schema import (
    EMPTY_PROMPT,
    TextOrMessages,
    check_no_images,
    find_column,
    has_text,
    read_messages,
    read_text_or_messages,
    template_options,
)
from whet.data.template_check import find_changed_text
from whet.data.templates import ChatTemplate
from whet.data.text_parts import encode_parts, leading_special_ids
from whet.errors import ConfigError, DataError, format_value, nearest
from whet.types import Example, Message, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "EQUAL",
    "RESPONSES",
    "Answer",
    "RowAnswers",
    "RowEncoder",
    "SFTEncoder",
    "make_answer",
    "starts_with_prompt",
]

log = logging.getLogger("whet")

MESSAGES = ("messages", "conversations")
PROMPTS = ("prompt", "question")
RESPONSES = ("response", "completion")
EQUAL = "chosen and rejected say the same"


@dataclass(frozen=True)
class Answer:
    """An answer that is trained, and the prompt before it."""

    prompt: TextOrMessages | None
    """None = `response` is the whole conversation or text."""
    response: TextOrMessages
    first: int | None = None
    """How many messages of `response` are context, where it is the whole conversation."""


@dataclass(frozen=True)
class RowAnswers:
    """The answers of a row, and columns with a number for each answer."""

    answers: Sequence[Answer]
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    empty: str = ""
    """Why there is nothing to train; empty where there is something or the reason is unknown."""


class RowEncoder:
    """Turns rows into Examples by the settings of section data, and counts the rows by their treatment.

    `counts`: encoded rows; of these forked (several sequences), truncated, changed (by the template, accepted), and
    repeating (a text that begins with its prompt's); left out: dropped (over max_length) and empty (nothing to train).
    """

    takes = ""
    """The accepted forms of rows, for error messages."""
    forks = False
    """Whether one answer may become several sequences, where the chat template requires it."""
    silent = True
    """Whether the end token of an empty answer is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: SupervisedDataConfig | None = None) -> None:
        """Args: tokenizer: of transformers. data: the section data; None = the defaults.
        Raises: ConfigError: apply_chat_template is true and the tokenizer has no chat template.
        """
        self.tokenizer = tokenizer
        self.data = data or SupervisedDataConfig()
        self.template = ChatTemplate(tokenizer, self.data.chat_template_kwargs)
        self.reset_counts()
        if self.data.apply_chat_template:
            self.template.require()

    def reset_counts(self) -> None:
        """Sets all counts to 0, for another data set."""
        self.lengths = LengthPolicy(self.data)
        self.counts = dict.fromkeys(("encoded", "forked", "truncated", "changed", "repeating", "dropped", "empty"), 0)
        self._warned_of_empty = False

    def __call__(self, row: Mapping[str, Any], number: int = 0) -> Example | None:
        """Encodes one row as an Example.

        Args: row: column -> value. number: the row's place in the data set.
        Returns: None where it is left out: too long, or nothing to train.
        Raises: DataError: none of the forms, a template that changes what the row says, too long, nothing to train.
            ConfigError: no chat template, no eos token.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; a row is a mapping from column to value")
        check_no_images(row, number)
        read, options = self._read(row, number), template_options(row, number)
        per_answer = [] if read.empty else self._sequences(read, options, number)
        sequences = [s for answer in per_answer for s in answer]
        if not sequences or not all(per_answer):
            return self._empty(read, number)
        if len(read.answers) == 2 and _equal(sequences):  # as the template shows them
            return self._empty(replace(read, empty=EQUAL), number)
        kept = self.lengths.fit(sequences, number)
        cut_alike = len(read.answers) == 2 and kept is not None and None not in kept and _equal([s for s in kept if s])
        if kept is None or not any(kept) or (None in kept and not self.forks) or cut_alike:
            self.counts["dropped"] += 1
            return None
        self.counts["encoded"] += 1
        self.counts["forked"] += len(sequences) > len(per_answer)
        self.counts["truncated"] += any(k is not s for k, s in zip(kept, sequences, strict=True))
        self.counts["repeating"] += any(_repeats_text(answer) for answer in read.answers)
        return Example(sequences=tuple(s for s in kept if s), columns=read.columns, row=number)

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """While all rows of a data set are encoded, the counts are of these rows, and rows over max_length are one
        error after the last row, or one line of the log, with their number and their lengths.
        """
        self.reset_counts()
        self.lengths.deferred = True
        try:
            yield
        finally:
            self.lengths.deferred = False
        self.lengths.check_all()
        if counts := self.describe_counts():
            log.warning("%s", counts)

    def describe_counts(self) -> str:
        """Describes the rows that were changed or left out; "" where there are none."""
        c = self.counts
        over, cut = self.lengths.describe(), f"{c['truncated']} cut at the end, {c['dropped']} left out"
        found = [f"{over} ({cut})"] if over else []
        if c["empty"]:
            found.append(f"rows with nothing to train, left out: {c['empty']}")
        if c["changed"]:
            found.append(f"rows that the chat template changes: {c['changed']}")
        if c["repeating"]:
            found.append(
                f"rows with an answer that begins with its prompt's own text, which it follows: {c['repeating']} (if "
                "answers are whole texts, leave the prompt out)"
            )
        return "; ".join(found)

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        raise NotImplementedError

    def _empty(self, read: RowAnswers, number: int) -> None:
        """Counts a row that has nothing to train, or raises DataError."""
        if self.data.on_empty == "error":
            roles = {str(m["role"]) for a in read.answers if not isinstance(a.response, str) for m in a.response}
            why = f"its turns are of {', '.join(sorted(roles))}" if roles else "its answer is empty"
            raise DataError(
                f"row {number} has nothing to train: {read.empty or why}, and what is trained is what the assistant "
                "says; leave the row out, or set data.on_empty to drop"
            )
        self.counts["empty"] += 1

    # ---- columns -------------------------------------------------------------------------------------------------

    def _column(self, row: Mapping[str, Any], names: Sequence[str], field_name: str, number: int) -> str | None:
        """The column that a field of the section names, or the first of the usual ones; None = not there."""
        given: str | None = getattr(self.data, field_name)
        return find_column(row, names, given, number, field_name)

    def _prompt(self, row: Mapping[str, Any], number: int) -> TextOrMessages | None:
        """The prompt of a row with an answer: a text or a conversation; None where there is none."""
        alone = self.data.messages_column and not self.data.prompt_column  # a column named alone is the one meant
        if not alone and (column := self._column(row, PROMPTS, "prompt_column", number)):
            return read_text_or_messages(row, column, number)
        if column := self._column(row, MESSAGES, "messages_column", number):
            return read_messages(row, column, number)
        return None

    def _no_form(self, row: Mapping[str, Any], number: int) -> DataError:
        names = [str(name) for name in row]
        columns = (*RESPONSES, *PROMPTS, *MESSAGES, "chosen", "rejected", "label", "text")
        if nulls := [name for name in columns if row.get(name, 0) is None]:
            return DataError(f"row {number}: column {nulls[0]!r} is null; fill it, or leave the row out")
        known = (*MESSAGES, *PROMPTS, *RESPONSES, "text", "chosen", "rejected", "label")
        near = next((hint for name in names if name not in known and (hint := nearest(name, known))), "")
        return DataError(
            f"row {number} has the columns {', '.join(names)}{near or ';'} taken are {self.takes}",
            fix="name columns by data.*_column",
            key="data.*_column",
        )

    # ---- encoding ------------------------------------------------------------------------------------------------

    def _sequences(self, read: RowAnswers, options: Mapping[str, Any], number: int) -> list[list[TrainSequence]]:
        """The sequences of each answer."""
        return [self._encode(answer, options, number) for answer in read.answers]

    def _encode(self, answer: Answer, options: Mapping[str, Any], number: int) -> list[TrainSequence]:
        """The sequences of an answer."""
        prompt, response = answer.prompt, answer.response
        if self._is_plain(answer):
            return self._raw(prompt, response, number)  # pyright: ignore[reportArgumentType]
        if isinstance(prompt, list) and isinstance(response, str) and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"row {number}: the prompt ends in a turn of the assistant's, and the answer is a text; put the "
                "beginning into the answer, or make the answer a list of messages"
            )
        before, after = _messages(prompt, "user"), _messages(response, "assistant")
        first = len(before) if answer.first is None else answer.first
        messages = [*before, *after]
        if self.data.system_prompt and messages[0]["role"] != "system":
            messages, first = [{"role": "system", "content": self.data.system_prompt}, *messages], first + 1
        answered = next((i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"), 0)
        self._warn_of_empty_prompt(messages[:answered], number)
        return self._conversation(messages, first, options, number)

    def _warn_of_empty_prompt(self, prompt: Sequence[Message], number: int) -> None:
        """Warns of the first prompt that has messages and no text."""
        if prompt and not self._warned_of_empty and not has_text(prompt):
            self._warned_of_empty = True
            log.warning(EMPTY_PROMPT, number)

    def _is_plain(self, answer: Answer) -> bool:
        """Whether an answer and what stands before it are texts that are encoded as they are."""
        texts = isinstance(answer.response, str) and (answer.prompt is None or isinstance(answer.prompt, str))
        return texts and not (self.data.apply_chat_template and answer.prompt is not None)

    def conversation(self, row: Mapping[str, Any], number: int) -> list[Message] | None:
        """The row's messages, its first answer included and without data.system_prompt; None = it is plain text."""
        answer = self._read(row, number).answers[0]
        return (
            None
            if self._is_plain(answer)
            else [*_messages(answer.prompt, "user"), *_messages(answer.response, "assistant")]
        )

    def _conversation(
        self, messages: list[Message], first: int, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence]:
        """The sequences of a conversation: its turns of the assistant's from `first` on."""
        renderings = self._renderings(messages, first, options, number)
        if not renderings:
            return []
        if len(renderings) > 1 and not self.forks:
            raise DataError(
                f"row {number}: an answer has {len(renderings)} turns, and the chat template changes the earlier "
                "ones, so that they make no single sequence; let the answer be its last turn, or take a template that "
                "keeps all turns"
            )
        if changed := self._changed(renderings, messages, number):
            if self.data.on_template_change == "error":
                raise DataError(
                    f"row {number}: {changed}; change the row, take another chat template (or chat_template_kwargs), "
                    "or accept it by data.on_template_change=accept"
                )
            self.counts["changed"] += 1
        return [encode_rendering(self.template, messages, one, number) for one in renderings]

    def _renderings(
        self, messages: list[Message], first: int, options: Mapping[str, Any], number: int
    ) -> list[Rendering]:
        return render_turns(self.template, messages, first=first, silent=self.silent, row=number, **options)

    def _changed(self, renderings: list[Rendering], messages: list[Message], number: int) -> str:
        """Describes the text of a row that the template changes or leaves out; "" where it shows everything."""
        header = next((one.changed for one in renderings if one.changed), "")
        text = find_changed_text(self.template, messages, [one.rendered for one in renderings], number)
        tools = self._tools_left_out(renderings[0], messages, number)
        return text or tools or header

    def _tools_left_out(self, rendering: Rendering, messages: list[Message], number: int) -> str:
        options = dict(rendering.rendered.options)
        if (
            "tools" not in options
            or self.template.text(messages[: rendering.rendered.messages], row=number, **{**options, "tools": None})
            != rendering.rendered.text
        ):
            return ""
        return f"the row has the tools {format_value(options['tools'], 80)}, and the chat template shows none"

    def _raw(self, prompt: str | None, response: str, number: int) -> list[TrainSequence]:
        """A text as it is, with the tokenizer's own special tokens before it and its eos after it."""
        if self.data.system_prompt:
            raise ConfigError(
                f"row {number} is plain text, which has no system turn; set apply_chat_template=true for "
                "system_prompt, or put it in the text"
            )
        end = self.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError("the tokenizer has no eos token, which ends plain text; set tokenizer.eos_token")
        if not response.strip() and not self.silent:
            return []
        parts = [part for part in (prompt, response) if part is not None]
        ids = encode_parts(self.tokenizer, parts, number)
        lead = leading_special_ids(self.tokenizer, parts[0])
        tail = [] if ids[-1][-1:] == [end] else [end]
        before = [*lead, *ids[0]] if prompt is not None else lead
        if prompt is not None and not before:
            raise DataError(
                f"row {number}: the prompt {format_value(prompt)} has no tokens; leave the row out, or fill it"
            )
        self._warn_of_empty_prompt([] if prompt is None else _messages(prompt, "user"), number)
        everything = self.trains_all
        return [make_sequence([(before, everything), ([*ids[-1], *tail], True)])]

    @property
    def trains_all(self) -> bool:
        """Whether prompts are trained too."""
        return False


class SFTEncoder(RowEncoder):
    """Rows of supervised fine-tuning: a conversation, prompt and response, or plain text.

    A row with several of these is read as the first of them. An Example has a sequence, or the forks of a conversation.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = SFTEncoder(byte_tokenizer())
    >>> s = encode({"prompt": "2+2=", "response": "4"}, 7).sequences[0]
    >>> s.prefix.tolist(), s.tokens.tolist(), s.mask.tolist()
    ([50, 43, 50, 61], [52, 256], [True, True])
    """

    takes = "messages or conversations; prompt (or question) with response (or completion); text"
    forks = True
    silent = False

    @property
    def trains_all(self) -> bool:
        """Whether prompts are trained too."""
        return self.data.train_on == "all"

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        data = self.data
        alone = not (
            data.prompt_column or data.response_column
        )  # a column that is named alone is the one that is meant
        if not (alone and (data.messages_column or data.text_column)):
            prompt = self._column(row, PROMPTS, "prompt_column", number)
            response = self._column(row, RESPONSES, "response_column", number)
            if prompt is None and response is not None:
                prompt = self._column(row, MESSAGES, "messages_column", number)
            if prompt and response:
                return RowAnswers(
                    [
                        make_answer(
                            read_text_or_messages(row, prompt, number), read_text_or_messages(row, response, number)
                        )
                    ]
                )
        messages = self._column(row, MESSAGES, "messages_column", number)
        if messages and (data.messages_column or not data.text_column):
            return RowAnswers([Answer(None, read_messages(row, messages, number), first=0)])
        if text := self._column(row, ("text",), "text_column", number):
            return RowAnswers([Answer(None, read_text_or_messages(row, text, number), first=0)])
        raise self._no_form(row, number)

    def _renderings(
        self, messages: list[Message], first: int, options: Mapping[str, Any], number: int
    ) -> list[Rendering]:
        if self.trains_all:
            return render_as_one(self.template, messages, row=number, **options)
        if self.data.train_on == "last":
            first = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=first)
        return super()._renderings(messages, first, options, number)


def _messages(content: TextOrMessages | None, role: str) -> list[Message]:
    """The messages of a text or a conversation; a text becomes one turn of the role."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return content or []


def _equal(sequences: Sequence[TrainSequence]) -> bool:
    """Whether two answers have the same tokens."""
    a, b = (np.concatenate([s.prefix, s.tokens]) for s in sequences) if len(sequences) == 2 else ([0], [1])
    return np.array_equal(a, b)


def starts_with_prompt(conversation: list[Message], prompt: TextOrMessages) -> bool:
    """Whether a conversation begins with a prompt: its messages, or as the first turn after a system turn its text."""
    if isinstance(prompt, list):
        return conversation[: len(prompt)] == prompt
    start = conversation[0]["role"] == "system"
    return (
        len(conversation) > start and conversation[start]["role"] == "user" and conversation[start]["content"] == prompt
    )


def make_answer(prompt: TextOrMessages | None, response: TextOrMessages) -> Answer:
    """An answer to a prompt; a conversation that begins with the prompt is the whole, which does not say it twice."""
    if prompt is None or isinstance(response, str) or not starts_with_prompt(response, prompt):
        return Answer(prompt, response)
    return Answer(
        None, response, first=len(prompt) if isinstance(prompt, list) else 1 + (response[0]["role"] == "system")
    )


def _repeats_text(answer: Answer) -> bool:
    """Whether an answer repeats the text of its prompt at its beginning."""
    prompt, response = answer.prompt, answer.response
    return (
        isinstance(prompt, str) and isinstance(response, str) and bool(prompt.strip()) and response.startswith(prompt)
    )
