"""Encodes rows as Examples for supervised fine-tuning; data/preference.py encodes preference data.

Rows are tokenised here, once and for all. docs/data.md lists the accepted forms of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config.data import SupervisedDataConfig
from whet.data.conversations import Rendering, make_rendered_sequence, make_sequence, render_as_one, render_turns
from whet.data.encoder import Encoder
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
from whet.data.templates import ChatTemplate, alarm_handler
from whet.data.text_parts import align_parts, leading_special_ids, tokenize_parts
from whet.data.tokenizer import encode_texts
from whet.errors import ConfigError, DataError, format_value, nearest
from whet.types import Example, Message, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "EQUAL",
    "RESPONSES",
    "Answer",
    "AnswerText",
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
EQUAL = "chosen and rejected are the same"


@dataclass(frozen=True)
class Answer:
    """A trained answer, and the prompt before it."""

    prompt: TextOrMessages | None
    """None = `response` is the full conversation or text."""
    response: TextOrMessages
    first: int | None = None
    """If `response` is the full conversation: the number of its messages that are context."""


@dataclass(frozen=True)
class RowAnswers:
    """The answers of a row, and columns with a number for each answer."""

    answers: Sequence[Answer]
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    empty: str = ""
    """The reason why there is nothing to train; "" = there is something, or the reason is not known yet."""


@dataclass(frozen=True)
class AnswerText:
    """The text of a sequence before it is tokenised: the rendering of a conversation, or plain text."""

    parts: Sequence[str]
    rendering: Rendering | None = None
    """None = plain text: (prompt, response) or (response,)."""
    messages: Sequence[Message] = ()
    """The messages of the rendering."""


class RowEncoder(Encoder[Example]):
    """Encodes rows as Examples by the settings of section data, and counts the rows by their treatment.

    `counts`: encoded rows, and of these forked (several sequences), truncated, changed (by the template, accepted) and
    repeating (the answer's text starts with the prompt's); of the rows left out, dropped (over max_length) and empty
    (nothing to train).
    """

    takes = ""
    """The accepted forms of rows, for error messages."""
    forks = False
    """Whether one answer may become several sequences, where the chat template requires it."""
    silent = True
    """Whether the end token of an empty answer is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: SupervisedDataConfig | None = None) -> None:
        """Args: tokenizer: of transformers. data: the section data; None = its defaults.

        Raises: ConfigError: apply_chat_template is true and the tokenizer has no chat template.
        """
        self.tokenizer = tokenizer
        self.data = data or SupervisedDataConfig()
        self.template = ChatTemplate(tokenizer, self.data.chat_template_kwargs)
        self.reset_counts()
        if self.data.apply_chat_template:
            self.template.require()

    def reset_counts(self) -> None:
        """Sets all counts to 0 for another data set."""
        self.lengths = LengthPolicy(self.data)
        self.counts = dict.fromkeys(("encoded", "forked", "truncated", "changed", "repeating", "dropped", "empty"), 0)
        self._warned_of_empty = False

    def encode_batch(self, rows: Sequence[Any], first: int = 0) -> list[Example | None]:
        """Encodes several rows with one call of the tokenizer; the results are those of one row after the other.

        Args: rows: mappings from column to value. first: the index of the first row in the data set.
        Returns: Examples; None = the row is left out, because it is too long or has nothing to train.
        Raises: the error of the first wrong row. DataError: an unknown form of row, a template that changes the row's
            text, a row that is too long, or one with nothing to train. ConfigError: no chat template, or no eos token.
        """
        rendered: list[tuple[int, RowAnswers, list[list[TrainSequence | AnswerText]]]] = []
        error: Exception | None = None
        with alarm_handler():
            for number, row in enumerate(rows, first):
                try:
                    rendered.append((number, *self._render_row(row, number)))
                except Exception as exception:  # raised below: an earlier row may be wrong too
                    error = exception
                    break
        texts = [x for _, _, answers in rendered for items in answers for x in items if isinstance(x, AnswerText)]
        ids = iter(tokenize_parts(self.tokenizer, [text.parts for text in texts]))
        plain = [text.parts[0] for text in texts if text.rendering is None]
        with_special = iter(encode_texts(self.tokenizer, plain))

        def make(item: TrainSequence | AnswerText, number: int) -> TrainSequence:
            if isinstance(item, TrainSequence):
                return item
            tokenized = next(ids)
            lead = leading_special_ids(next(with_special), tokenized[1]) if item.rendering is None else []
            return self._make_sequence(item, tokenized, lead, number)

        examples = [
            self._make_example(read, [[make(item, number) for item in items] for items in answers], number)
            for number, read, answers in rendered
        ]
        if error is not None:
            raise error
        return examples

    def _render_row(self, row: Any, number: int) -> tuple[RowAnswers, list[list[TrainSequence | AnswerText]]]:
        """Returns the answers of a row, and the text of each sequence of each answer."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; a row is a mapping from column to value")
        check_no_images(row, number)
        read, options = self._read(row, number), template_options(row, number)
        return read, [] if read.empty else [self._render_answer(a, options, number) for a in read.answers]

    def _make_example(self, read: RowAnswers, per_answer: list[list[TrainSequence]], number: int) -> Example | None:
        """Returns the Example of a row. Args: per_answer: the sequences of each answer."""
        per_answer = self._arrange(read, per_answer, number)
        sequences = [s for answer in per_answer for s in answer]
        if not sequences or not all(per_answer):
            return self._leave_out_empty(read, number)
        if len(read.answers) == 2 and _equal(sequences):  # after rendering
            return self._leave_out_empty(replace(read, empty=EQUAL), number)
        kept = self.lengths.fit(sequences, number)
        equal = len(read.answers) == 2 and kept is not None and None not in kept and _equal([s for s in kept if s])
        if kept is None or not any(kept) or (None in kept and not self.forks) or equal:
            self.counts["dropped"] += 1
            return None
        self.counts["encoded"] += 1
        self.counts["forked"] += len(sequences) > len(per_answer)
        self.counts["truncated"] += any(k is not s for k, s in zip(kept, sequences, strict=True))
        self.counts["repeating"] += any(_repeats_text(answer) for answer in read.answers)
        return Example(sequences=tuple(s for s in kept if s), columns=read.columns, row=number)

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Context for encoding all rows of a data set: the counts start at 0, and rows over max_length are reported
        once after the last row, as an error or in the log, with their number and their lengths.
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
        over, treatment = self.lengths.describe(), f"{c['truncated']} cut at the end, {c['dropped']} left out"
        lines = [f"{over} ({treatment})"] if over else []
        if c["empty"]:
            lines.append(f"rows with nothing to train, left out: {c['empty']}")
        if c["changed"]:
            lines.append(f"rows that the chat template changes: {c['changed']}")
        if c["repeating"]:
            lines.append(
                f"rows with an answer that repeats the prompt's text at its start: {c['repeating']} (if the answers "
                "include their prompts, leave the prompt column out)"
            )
        return "; ".join(lines)

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        raise NotImplementedError

    def _leave_out_empty(self, read: RowAnswers, number: int) -> None:
        """Counts a row that has nothing to train, or raises DataError."""
        if self.data.on_empty == "error":
            roles = {str(m["role"]) for a in read.answers if not isinstance(a.response, str) for m in a.response}
            reason = f"its turns are of {', '.join(sorted(roles))}" if roles else "its answer is empty"
            raise DataError(
                f"row {number} has nothing to train: {read.empty or reason}, and only the assistant's text is trained; "
                "leave the row out, or set data.on_empty to drop"
            )
        self.counts["empty"] += 1

    # ---- columns -------------------------------------------------------------------------------------------------

    def _column(self, row: Mapping[str, Any], names: Sequence[str], field_name: str, number: int) -> str | None:
        """Returns the column that a field of section data names, or the first of the default names; None = there is
        none.
        """
        return find_column(row, names, getattr(self.data, field_name), number, field_name)

    def _prompt(self, row: Mapping[str, Any], number: int) -> TextOrMessages | None:
        """Returns the prompt of a row with an answer: a text or a conversation; None = there is none."""
        only_messages = self.data.messages_column and not self.data.prompt_column
        if not only_messages and (column := self._column(row, PROMPTS, "prompt_column", number)):
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
            f"row {number} has the columns {', '.join(names)}{near or ';'} accepted are {self.takes}",
            fix="name the columns in data.*_column",
            key="data.*_column",
        )

    # ---- encoding ------------------------------------------------------------------------------------------------

    def _arrange(
        self, read: RowAnswers, per_answer: list[list[TrainSequence]], number: int
    ) -> list[list[TrainSequence]]:
        """Returns the sequences of each answer as they are trained; for subclasses that compare the answers of
        a row.
        """
        return per_answer

    def _render_answer(
        self, answer: Answer, options: Mapping[str, Any], number: int
    ) -> list[TrainSequence | AnswerText]:
        """Returns the text of each sequence of an answer, or the sequence itself if the row has token ids."""
        prompt, response = answer.prompt, answer.response
        if self._is_plain(answer):
            return self._plain_text(prompt, response, number)  # pyright: ignore[reportArgumentType]
        if isinstance(prompt, list) and isinstance(response, str) and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"row {number}: the prompt ends with an assistant's turn, and the answer is a text; move that turn "
                "into the answer, or make the answer a list of messages"
            )
        before, after = _messages(prompt, "user"), _messages(response, "assistant")
        first = len(before) if answer.first is None else answer.first
        messages = [*before, *after]
        if self.data.system_prompt and messages[0]["role"] != "system":
            messages, first = [{"role": "system", "content": self.data.system_prompt}, *messages], first + 1
        answered = next((i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"), 0)
        self._warn_of_empty_prompt(messages[:answered], number)
        renderings = self._renderings(messages, first, options, number)
        if not renderings:
            return []
        if len(renderings) > 1 and not self.forks:
            raise DataError(
                f"row {number}: an answer has {len(renderings)} turns, and the chat template changes the earlier ones, "
                "so they don't form one sequence; make the answer the last turn only, or use a template that keeps all "
                "turns"
            )
        if changed := self._describe_change(renderings, messages, number):
            if self.data.on_template_change == "error":
                raise DataError(
                    f"row {number}: {changed}; change the row, use another chat template (or chat_template_kwargs), or "
                    "accept the change with data.on_template_change=accept"
                )
            self.counts["changed"] += 1
        return [AnswerText([part.text for part in r.parts], r, messages) for r in renderings]

    def _warn_of_empty_prompt(self, prompt: Sequence[Message], number: int) -> None:
        """Warns of the first prompt that has messages, but no text."""
        if prompt and not self._warned_of_empty and not has_text(prompt):
            self._warned_of_empty = True
            log.warning(EMPTY_PROMPT, number)

    def _is_plain(self, answer: Answer) -> bool:
        """Returns whether an answer and its prompt are texts that are tokenised without a chat template."""
        are_texts = isinstance(answer.response, str) and (answer.prompt is None or isinstance(answer.prompt, str))
        return are_texts and not (self.data.apply_chat_template and answer.prompt is not None)

    def conversation(self, row: Mapping[str, Any], number: int) -> list[Message] | None:
        """Returns the messages of a row with its first answer, without data.system_prompt; None = the row is plain
        text.
        """
        answer = self._read(row, number).answers[0]
        return (
            None
            if self._is_plain(answer)
            else [*_messages(answer.prompt, "user"), *_messages(answer.response, "assistant")]
        )

    def _renderings(
        self, messages: list[Message], first: int, options: Mapping[str, Any], number: int
    ) -> list[Rendering]:
        return render_turns(self.template, messages, first=first, silent=self.silent, row=number, **options)

    def _describe_change(self, renderings: list[Rendering], messages: list[Message], number: int) -> str:
        """Describes the text of a row that the template changes or omits; "" = it shows everything."""
        if changed := find_changed_text(self.template, messages, [r.rendered for r in renderings], number):
            return changed
        rendered = renderings[0].rendered
        if "tools" in rendered.options:
            options = {**rendered.options, "tools": None}
            if self.template.text(messages[: rendered.messages], row=number, **options) == rendered.text:
                tools = format_value(rendered.options["tools"], 80)
                return f"the row has the tools {tools}, and the chat template shows none"
        return next((r.changed for r in renderings if r.changed), "")

    def _plain_text(self, prompt: str | None, response: str, number: int) -> list[TrainSequence | AnswerText]:
        """Returns a plain text, if it has something to train."""
        if self.data.system_prompt:
            raise ConfigError(
                f"row {number} is plain text, which has no system turn; set apply_chat_template=true for "
                "system_prompt, or put it in the text"
            )
        if not isinstance(self.tokenizer.eos_token_id, int):
            raise ConfigError("the tokenizer has no eos token, which ends plain text; set tokenizer.eos_token")
        if not response.strip() and not self.silent:
            return []
        return [AnswerText([response] if prompt is None else [prompt, response])]

    def _make_sequence(self, text: AnswerText, ids: list[list[int]], lead: list[int], number: int) -> TrainSequence:
        """Returns the sequence of a text.

        Args: ids: of `tokenize_parts`. lead: special tokens before a plain text, which also gets an eos at its end.
        """
        aligned = align_parts(self.tokenizer, text.parts, ids, number)
        if text.rendering is not None:
            return make_rendered_sequence(self.template, text.messages, text.rendering, aligned, number)
        eos, has_prompt = self.tokenizer.eos_token_id, len(text.parts) > 1
        tail = [] if aligned[-1][-1:] == [eos] else [eos]
        before = [*lead, *aligned[0]] if has_prompt else lead
        if has_prompt:
            prompt = text.parts[0]
            if not before:
                raise DataError(
                    f"row {number}: the prompt {format_value(prompt)} has no tokens; leave the row out, or fill it"
                )
            self._warn_of_empty_prompt(_messages(prompt, "user"), number)
        return make_sequence([(before, self.trains_all), ([*aligned[-1], *tail], True)])  # pyright: ignore

    @property
    def trains_all(self) -> bool:
        """Whether the tokens of prompts are trained too."""
        return False


class SFTEncoder(RowEncoder):
    """Rows of supervised fine-tuning: a conversation, prompt and response, or plain text.

    A row with several of these forms is read as the first of them. An Example has one sequence, or the forks of a
    conversation.

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
        """Whether the tokens of prompts are trained too."""
        return self.data.train_on == "all"

    def _read(self, row: Mapping[str, Any], number: int) -> RowAnswers:
        data = self.data
        names_other = data.messages_column or data.text_column  # without a prompt or response column, it decides
        if data.prompt_column or data.response_column or not names_other:
            prompt = self._column(row, PROMPTS, "prompt_column", number)
            response = self._column(row, RESPONSES, "response_column", number)
            if prompt is None and response is not None:
                prompt = self._column(row, MESSAGES, "messages_column", number)
            if prompt and response:
                question = read_text_or_messages(row, prompt, number)
                return RowAnswers([make_answer(question, read_text_or_messages(row, response, number))])
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
    """Returns the messages of a conversation; a text becomes one turn with this role."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return content or []


def _equal(sequences: Sequence[TrainSequence]) -> bool:
    """Returns whether two sequences have the same tokens."""
    a, b = (np.concatenate([s.prefix, s.tokens]) for s in sequences) if len(sequences) == 2 else ([0], [1])
    return np.array_equal(a, b)


def starts_with_prompt(conversation: list[Message], prompt: TextOrMessages) -> bool:
    """Returns whether a conversation starts with a prompt: with its messages, or with its text as the first
    user turn.
    """
    if isinstance(prompt, list):
        return conversation[: len(prompt)] == prompt
    start = conversation[0]["role"] == "system"
    return (
        len(conversation) > start and conversation[start]["role"] == "user" and conversation[start]["content"] == prompt
    )


def make_answer(prompt: TextOrMessages | None, response: TextOrMessages) -> Answer:
    """Returns an answer to a prompt; a conversation that already starts with the prompt is not given the prompt
    again.
    """
    if prompt is None or isinstance(response, str) or not starts_with_prompt(response, prompt):
        return Answer(prompt, response)
    first = len(prompt) if isinstance(prompt, list) else 1 + (response[0]["role"] == "system")
    return Answer(None, response, first=first)


def _repeats_text(answer: Answer) -> bool:
    """Returns whether the text of an answer starts with the text of its prompt."""
    prompt, response = answer.prompt, answer.response
    return (
        isinstance(prompt, str) and isinstance(response, str) and bool(prompt.strip()) and response.startswith(prompt)
    )
