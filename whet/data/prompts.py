"""Encodes rows as prompts: finds the column, renders the chat template, tokenises, and checks the length.

Rows are tokenised here, once and for all. Left out on purpose: images (they are refused).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from whet.data.encoder import Encoder
from whet.data.lengths import LengthStats
from whet.data.row_schema import (
    EMPTY_PROMPT,
    check_no_images,
    check_text,
    has_text,
    message_text,
    normalize_messages,
    template_options,
)
from whet.data.template_check import RenderedText, find_changed_text
from whet.data.templates import ChatTemplate
from whet.data.tokenizer import encode_texts
from whet.errors import ConfigError, DataError, format_value, lookup_error, nearest
from whet.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config import DataConfig, RolloutConfig

__all__ = ["DATA_FIELDS", "Answered", "LongPrompt", "PromptEncoder", "find_prompt_column"]

log = logging.getLogger("whet")

LongPrompt = Literal["error", "truncate_left", "drop"]
"""How to treat a prompt over the limit."""
Answered = Literal["error", "take_off", "continue"]
"""How to treat a conversation whose last turn is the assistant's."""
DATA_FIELDS = ("prompt_column", "apply_chat_template", "system_prompt", "on_template_change", "on_answered")
"""Fields of the section data that an encoder takes."""
ANSWER = "answer"
"""The column of an answer that on_answered=take_off removes from a conversation."""
PROMPT_COLUMNS = ("prompt", "prompts", "messages", "question", "conversations")
"""Names of the prompt column, in the order of preference."""
RESERVED_COLUMNS = (
    "advantages",
    "completion_ids",
    "completions",
    "mode",
    "prompt_ids",
    "prompts",
    "rewards",
    "trajectory_ids",
)
"""Keyword arguments of reward and metric functions; a column may not have one of these names."""


def find_prompt_column(columns: Iterable[str], prompt_column: str | None = None, row: int | None = None) -> str:
    """Returns the column that holds the prompts.

    Args: columns: the columns of a row. prompt_column: the configured name; None = the first of prompt, prompts,
        messages, question and conversations that exists. row: the row number, for the message.
    Raises: DataError: there is no such column; the message lists the columns and the nearest name.

    >>> find_prompt_column(["answer", "messages"])
    'messages'
    """
    columns = list(columns)
    candidates = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    for name in candidates:
        if name in columns:
            return name
    columns = [str(name) for name in columns]
    hint = next((near for word in candidates if (near := nearest(word, columns))), "")
    fix = (
        "give this row one, or leave it out" if row else "name it in data.prompt_column"
    )  # earlier rows had the column
    raise DataError(
        f"{'' if row is None else f'row {row}: '}no prompt column ({' or '.join(candidates)}) among the columns "
        f"{', '.join(columns)}{hint}{'' if hint.endswith('?') else ';'} {fix}"
    )


class _PromptRow(NamedTuple):
    """The prompt of a row before it is rendered. Example: _PromptRow(7, "2+2=", {"answer": 4}, {})."""

    number: int
    source: str | list[Message]
    columns: dict[str, Any]
    """The other columns."""
    options: dict[str, Any]
    """Arguments of the chat template."""


class PromptEncoder(Encoder[Prompt]):
    """Encodes rows as Prompts, and counts the dropped and truncated ones.

    A text is tokenised as it is, with the tokenizer's own special tokens (e.g. bos). A list of messages is rendered by
    the chat template, with the header of the assistant's turn at the end. The columns tools and chat_template_kwargs of
    a row are more arguments of the template.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> p = encode({"prompt": "2+2=", "answer": 4}, 7)
    >>> p.tokens.tolist(), p.source, p.columns, p.row
    ([50, 43, 50, 61], '2+2=', {'answer': 4}, 7)
    """

    unit, takes_batches = "prompts", True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_column: str | None = None,
        apply_chat_template: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        system_prompt: str | None = None,
        max_prompt_length: int | None = None,
        on_long_prompt: LongPrompt = "error",
        on_template_change: Literal["error", "accept"] = "error",
        on_answered: Answered = "error",
        sections: bool = False,
    ) -> None:
        """Args:
            tokenizer: of transformers.
            prompt_column: None = the first of prompt, prompts, messages, question and conversations that exists.
            apply_chat_template: render a text as a user turn too; messages are always rendered.
            chat_template_kwargs: more arguments of the template. enable_thinking is False by default. Templates ignore
                unknown arguments. A chat_template replaces that of the tokenizer.
            tools: descriptions of tools, for the template; None = none.
            system_prompt: added before messages without a system turn. None or "" = off.
            max_prompt_length: the most tokens, template included; None = no limit.
            on_long_prompt: "error"; "truncate_left" (keep the last max_prompt_length tokens); or "drop".
            on_template_change: "error" or "accept", if the template changes or omits text of a prompt.
            on_answered: for a conversation that ends with an assistant's turn: "error"; "take_off" (its text becomes
                the column answer, unless the row has one); or "continue" (the turn stays open).
            sections: error messages name arguments as keys of the sections data and rollout.

        Raises:
            ConfigError: an unknown value of on_long_prompt, on_template_change or on_answered, a limit below 1, or a
                chat template is needed and missing.
        """
        for name, value, known in (
            ("on_long_prompt", on_long_prompt, ("error", "truncate_left", "drop")),
            ("on_template_change", on_template_change, ("error", "accept")),
            ("on_answered", on_answered, ("error", "take_off", "continue")),
        ):
            if value not in known:
                raise lookup_error(name, value, known)
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length {max_prompt_length} allows no prompt; give at least 1, or None")
        self.tokenizer = tokenizer
        self.prompt_column = prompt_column
        self.apply_chat_template = apply_chat_template
        tools_option = {"tools": list(tools)} if tools else {}
        self.template = ChatTemplate(tokenizer, {**(chat_template_kwargs or {}), **tools_option})
        self.system_prompt = system_prompt or None
        self.max_prompt_length = max_prompt_length
        self._data, self._rollout = ("data.", "rollout.") if sections else ("", "")
        self.on_long_prompt = on_long_prompt
        self.on_template_change = on_template_change
        self.on_answered = on_answered
        self.empty_ids: Sequence[int] = ()
        """The ids of an empty prompt, in place of an error: for agents that write the whole conversation."""
        self.reset_counts()
        self._defer_errors = False
        if apply_chat_template:
            self.template.require()

    @classmethod
    def from_config(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        data: DataConfig | None = None,
        **options: Any,
    ) -> PromptEncoder:
        """Returns the encoder of a configuration.

        Args: tokenizer: of transformers. rollout: the rollout section of a mode. data: the section data; None = only
            options. options: more arguments.
        """
        data_options = {} if data is None else {name: getattr(data, name) for name in DATA_FIELDS}
        return cls(
            tokenizer,
            chat_template_kwargs=rollout.chat_template_kwargs,
            max_prompt_length=rollout.max_prompt_length,
            on_long_prompt=rollout.on_long_prompt,
            **{"sections": True, **data_options, **options},
        )

    def reset_counts(self) -> None:
        """Sets all counts to 0 for another data set."""
        self.counts = {"encoded": 0, "dropped": 0, "truncated": 0, "changed": 0}
        self.stats = LengthStats()
        """The length of each prompt, before it is truncated or dropped."""
        self._warned_of_empty = False

    def encode_batch(self, rows: Sequence[Any], first: int = 0) -> list[Prompt | None]:
        """Encodes several rows with one call of the tokenizer; the results are those of one row after the other.

        Args:
            rows: mappings from column to value; or encoded Prompts, and then only their length is checked again.
            first: the index of the first row in the data set.
        Returns: Prompts; None = the row is too long, and on_long_prompt is "drop".
        Raises: the error of the first wrong row. DataError: no prompt column, no text, images, too long, no tokens, a
            template that changes the text or omits tools, or an answer where a prompt is expected. ConfigError: no
            chat template.
        """
        read: list[_PromptRow] = []
        texts: list[str] = []
        error = None
        try:
            for number, row in enumerate(rows, first):
                if not isinstance(row, Prompt):
                    read.append(self._read_row(row, number))
        except Exception as exception:  # raised below: an earlier row may be wrong too
            error = exception
        rendered = self._render_together(read)
        try:
            for one in read:
                texts.append(self._make_text(one, rendered.get(one.number)))
        except Exception as exception:
            error = exception
        encoded = {
            one.number: self._make_prompt(one, ids)
            for one, ids in zip(read, self._tokenize(read[: len(texts)], texts), strict=False)
        }
        if error is not None:
            raise error
        return [
            self._apply_limit(row) if isinstance(row, Prompt) else encoded[number]
            for number, row in enumerate(rows, first)
        ]

    def _read_row(self, row: Any, number: int) -> _PromptRow:
        """Returns the prompt of a row."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; a row is a mapping from column to value")
        name = find_prompt_column(row, self.prompt_column, number)
        check_no_images(row, number)
        if reserved := [column for column in RESERVED_COLUMNS if column in row and column != name]:
            raise DataError(
                f"column {reserved[0]!r} has the name of an argument of reward and metric functions; rename the column"
            )
        source = _read_prompt(row[name], name, number)
        columns = {column: value for column, value in row.items() if column != name}
        if not isinstance(source, str) and source[-1]["role"] == "assistant":
            source, columns = self._treat_answered(source, columns, number)
        return _PromptRow(number, source, columns, template_options(row, number))

    def _render_together(self, rows: Sequence[_PromptRow]) -> dict[int, RenderedText]:
        """Returns the rendered conversations by the rows' numbers; none if one of them fails, and then each is
        rendered by itself, so that the error names its row.
        """
        several = [row for row in rows if not self.is_plain(row.source)]
        conversations = [self.messages(row.source) for row in several]
        options = [_turn_options(messages, row.options) for row, messages in zip(several, conversations, strict=True)]
        try:
            texts = self.template.texts(conversations, options) if len(several) > 1 else ()
        except Exception:
            return {}
        parts = zip(several, texts, conversations, options, strict=False)
        return {row.number: RenderedText(text, len(m), o) for row, text, m, o in parts}

    def _tokenize(self, rows: Sequence[_PromptRow], texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text. A chat template writes the special tokens itself."""
        ids_by_row: dict[int, list[int]] = {}
        for plain in (True, False):
            group = [(row.number, t) for row, t in zip(rows, texts, strict=True) if self.is_plain(row.source) is plain]
            options: dict[str, Any] = {} if plain else {"add_special_tokens": False}
            ids = encode_texts(self.tokenizer, [text for _, text in group], **options)
            ids_by_row |= {number: one for (number, _), one in zip(group, ids, strict=True)}
        return [ids_by_row[row.number] for row in rows]

    def _make_prompt(self, row: _PromptRow, tokens: list[int]) -> Prompt | None:
        """Returns the Prompt of a row; None = it is dropped."""
        number, source, tokens = row.number, row.source, tokens or list(self.empty_ids)
        if not tokens:
            raise DataError(
                f"row {number}: the prompt {format_value(source)} has no tokens; leave the row out, or fill it"
            )
        if not (self._warned_of_empty or self.empty_ids or has_text(self.messages(source))):
            self._warned_of_empty = True
            log.warning(EMPTY_PROMPT, number)
        ids = np.asarray(tokens, dtype=np.int32)
        ids.setflags(write=False)
        prompt = self._apply_limit(Prompt(tokens=ids, source=source, columns=row.columns, row=number))
        self.counts["encoded"] += prompt is not None
        return prompt

    def _apply_limit(self, prompt: Prompt) -> Prompt | None:
        """Applies on_long_prompt: the prompt, truncated if needed; None = it is dropped."""
        length, limit = len(prompt.tokens), self.max_prompt_length
        self.stats.add(length)
        if limit is None or length <= limit:
            return prompt
        if self.on_long_prompt == "error" and not self._defer_errors:
            raise DataError(
                f"row {prompt.row}: the prompt has {length} tokens, over {self._rollout}max_prompt_length {limit}; "
                f"{self._length_hint(length)}"
            )
        if self.on_long_prompt == "truncate_left":
            self.counts["truncated"] += 1
            return replace(prompt, tokens=prompt.tokens[-limit:])
        self.counts["dropped"] += 1
        return None

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Context for encoding all rows of a data set: the counts start at 0, and prompts over the limit are one error
        after the last row, with their number and their lengths.
        """
        self.reset_counts()
        self._defer_errors = True
        try:
            yield
        finally:
            self._defer_errors = False
        if self.on_long_prompt == "error" and (over := self.describe_over_limit()):
            raise DataError(f"{over}; {self._length_hint(self.stats.longest)}")

    def describe_over_limit(self) -> str:
        """Describes the prompts over the limit: number, longest, 95th percentile; "" = there are none."""
        limit = self.max_prompt_length
        return "" if limit is None else self.stats.describe_over(limit, f"{self._rollout}max_prompt_length")

    def describe_counts(self) -> str:
        """Describes the prompts that were over the limit or changed by the chat template; "" = there are none."""
        over, counts = self.describe_over_limit(), self.counts
        parts = [f"{over} ({counts['truncated']} cut on the left, {counts['dropped']} left out)"] if over else []
        if counts["changed"]:
            parts.append(f"the chat template changes the text of {counts['changed']} prompts")
        return "; ".join(parts)

    def _length_hint(self, length: int) -> str:
        return f"raise it to {length}, or set {self._rollout}on_long_prompt to truncate_left or drop"

    def is_plain(self, source: str | list[Message]) -> bool:
        """Returns whether a prompt is tokenised as plain text, without a chat template."""
        return isinstance(source, str) and not self.apply_chat_template

    def messages(self, source: str | list[Message]) -> list[Message]:
        """Returns the messages that the template renders, with the system prompt; a text is one user turn."""
        messages = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def render(self, messages: list[Message], row: int, columns: Mapping[str, Any] | None = None) -> RenderedText:
        """Renders a conversation with an open assistant's turn; if the last turn is the assistant's, it stays open.

        Args: messages: at least one. row: the row number for error messages. columns: the row's columns, which may
            include tools and chat_template_kwargs.
        Raises: DataError: the template refuses the conversation.
        """
        return self._render(messages, {} if columns is None else template_options(columns, row), row)

    def _render(self, messages: list[Message], row_options: Mapping[str, Any], row: int) -> RenderedText:
        options = _turn_options(messages, row_options)
        return RenderedText(self.template.text(messages, row=row, **options), len(messages), options)

    def _treat_answered(
        self, source: list[Message], columns: dict[str, Any], number: int
    ) -> tuple[list[Message], dict[str, Any]]:
        """Applies on_answered to a conversation that ends with an assistant's turn."""
        *before, last = source
        if self.on_answered == "continue":
            return [*before, {**last, "content": message_text(last)}], columns
        if self.on_answered == "error":
            raise DataError(
                f"row {number} ends with the assistant's turn {format_value(last.get('content'), 60)}: an answer, "
                f"where a prompt is expected; data.on_answered=take_off makes it the column {ANSWER}, "
                "data.on_answered=continue lets the model continue it"
            )
        if not before:
            raise DataError(f"row {number} has only an assistant's turn; leave the row out, or add a user's turn")
        return before, {ANSWER: message_text(last), **columns}

    def _make_text(self, prompt: _PromptRow, rendered: RenderedText | None) -> str:
        """Returns the text to tokenise. Args: rendered: the conversation; None = it is to be rendered here."""
        number, source, _, row_options = prompt
        if self.is_plain(source):
            if self.system_prompt is not None:
                raise ConfigError(
                    f"row {number} is plain text, which has no system turn; set {self._data}apply_chat_template=True "
                    f"for {self._data}system_prompt, or put it in the text"
                )
            if "tools" in self.template.options or "tools" in row_options:
                fix = "leave the column out" if "tools" in row_options else "leave TOOL out of the environment"
                raise ConfigError(
                    f"row {number} is plain text, and only a chat template can describe tools; set "
                    f"{self._data}apply_chat_template=True, or {fix}"
                )
            return str(source)
        messages = self.messages(source)
        rendered = rendered or self._render(messages, row_options, number)
        changed = find_changed_text(self.template, messages, [rendered], number)
        tools = rendered.options.get("tools")
        if not changed and tools:
            without_tools = self.template.text(messages, row=number, **{**rendered.options, "tools": None})
            if without_tools == rendered.text:
                changed = f"it has the tools {format_value(tools, 80)}, and the chat template shows none"
        if changed:
            if self.on_template_change == "error":
                raise DataError(
                    f"row {number}: {changed}; change the row, use another chat template (or "
                    f"{self._rollout}chat_template_kwargs), or accept the change with "
                    f"{self._data}on_template_change=accept"
                )
            self.counts["changed"] += 1
        return rendered.text


def _turn_options(messages: Sequence[Message], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template's arguments for an open assistant's turn at the end. Args: options: of the row."""
    open_turn = messages[-1]["role"] == "assistant"
    return {**options, "add_generation_prompt": not open_turn, "continue_final_message": open_turn}


def _read_prompt(value: Any, name: str, number: int) -> str | list[Message]:
    """Checks the prompt of a row, and returns it: a text or a list of messages."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return check_text(str(value), f"row {number}, column {name!r}")
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise DataError(
            f"row {number}: column {name!r} holds {type(value).__name__} {format_value(value)}; a prompt is a text or "
            "a list of messages"
        )
    return normalize_messages(value, number)
