"""From rows to prompts: which column, which template, how long.

Rows are encoded once, here; no later step tokenises again. Left out on purpose: images (refused).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

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
from whet.errors import ConfigError, DataError, format_value, lookup_error, nearest
from whet.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config import DataConfig, RolloutConfig

__all__ = ["Answered", "LongPrompt", "PromptEncoder", "find_prompt_column"]

log = logging.getLogger("whet")

LongPrompt = Literal["error", "truncate_left", "drop"]
"""How to treat a prompt over the limit."""
Answered = Literal["error", "take_off", "continue"]
"""How to treat a conversation whose last turn is the assistant's."""
DATA_FIELDS = ("prompt_column", "apply_chat_template", "system_prompt", "on_template_change", "on_answered")
"""Fields of the section data that an encoder takes."""
ANSWER = "answer"
"""The column that an answer becomes which is taken off a conversation."""
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
"""Keywords that reward and metric functions are given besides the columns: no column may have such a name."""


def find_prompt_column(columns: Iterable[str], prompt_column: str | None = None, row: int | None = None) -> str:
    """The column that holds the prompts.

    Args: columns: what a row has. prompt_column: the one to take; None = prompt, prompts, messages,
        question or conversations, whichever is there, in this order. row: whose columns they are, for the message.
    Raises: DataError: it is not there; the message lists the columns and the nearest.

    >>> find_prompt_column(["answer", "messages"])
    'messages'
    """
    columns = list(columns)
    wanted = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    for name in wanted:
        if name in columns:
            return name
    columns = [str(name) for name in columns]
    hint = next((near for word in wanted if (near := nearest(word, columns))), "")
    way = "give this row one, or leave it out" if row else "name it in data.prompt_column"  # those before it had one
    raise DataError(
        f"{'' if row is None else f'row {row}: '}no prompt column ({' or '.join(wanted)}) among the columns "
        f"{', '.join(columns)}{hint}{'' if hint.endswith('?') else ';'} {way}"
    )


class _Read(NamedTuple):
    """A row that was read. Example: _Read(7, "2+2=", {"answer": 4}, "2+2=")."""

    number: int
    source: str | list[Message]
    columns: dict[str, Any]
    """The other ones."""
    text: str
    """What its tokens are made of."""


class PromptEncoder:
    """Turns rows into Prompts, and counts what it dropped and truncated.

    Text is encoded as it is (the tokenizer adds its own special tokens, e.g. bos); a list of messages goes through the
    chat template, with the header of the assistant's turn at the end. A row's own columns tools and
    chat_template_kwargs are further arguments of the template.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> p = encode({"prompt": "2+2=", "answer": 4}, 7)
    >>> p.tokens.tolist(), p.source, p.columns, p.row
    ([50, 43, 50, 61], '2+2=', {'answer': 4}, 7)
    """

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
            prompt_column: None = prompt, prompts, messages, question or conversations, the first that is there.
            apply_chat_template: texts become a user turn; messages always go through it.
            chat_template_kwargs: further arguments of the template, e.g. {"enable_thinking": False}, which is the
                default; templates ignore what they don't know. A chat_template among them is taken for the tokenizer's.
            tools: descriptions of tools, for the template; None = none.
            system_prompt: put before messages that have no system turn. None or "" = off.
            max_prompt_length: tokens, template included; None = no limit.
            on_long_prompt: "error"; "truncate_left": the last max_prompt_length tokens stay; "drop".
            on_template_change: where the template changes or leaves out what a prompt says: "error", or "accept" it.
            on_answered: what to do with a conversation whose last turn is the assistant's: "error"; "take_off": that
                turn's text is the column answer, unless the row has one; "continue": the turn stays open.
            sections: messages name its arguments as keys of the sections data and rollout.

        Raises:
            ConfigError: an unknown on_long_prompt, on_template_change or on_answered, a limit below 1, a template asked
                for where there is none.
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
        self.reset_counts()
        self._all = False
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
        """The encoder of sections of a configuration.

        Args: tokenizer: of transformers. rollout: of the mode. data: None = what options say. options: further ones.
        """
        of_data = {} if data is None else {name: getattr(data, name) for name in DATA_FIELDS}
        return cls(
            tokenizer,
            chat_template_kwargs=rollout.chat_template_kwargs,
            max_prompt_length=rollout.max_prompt_length,
            on_long_prompt=rollout.on_long_prompt,
            **{"sections": True, **of_data, **options},
        )

    def reset_counts(self) -> None:
        """Starts to count anew, for another data set."""
        self.counts = {"encoded": 0, "dropped": 0, "truncated": 0, "changed": 0}
        self.stats = LengthStats()
        """Tokens of each prompt, before any is cut or left out."""
        self._warned_of_empty = False

    def __call__(self, row: Mapping[str, Any] | Prompt, number: int = 0) -> Prompt | None:
        """One row as a Prompt.

        Args:
            row: column -> value; or a Prompt that was encoded before, of which only the length is checked again.
            number: the row's place in the data set.
        Returns: the Prompt; None where it is too long and on_long_prompt is "drop".
        Raises: DataError: no prompt column, no text, images, too long, no tokens, a template that changes what is said
            or leaves tools out, an answer where a prompt is expected. ConfigError: no chat template.
        """
        if isinstance(row, Prompt):
            return self._fit(row)
        read = self._read(row, number)
        return self._prompt(read, self._ids([read])[0])

    def encode_batch(self, rows: Sequence[Any], first: int = 0) -> list[Prompt | None]:
        """Several rows as Prompts, as one after the other makes them; the tokenizer is called once for all of them.

        Args: rows: see `__call__`. first: the place of the first in the data set.
        Raises: as `__call__`, of the first row that is wrong.
        """
        read: list[_Read] = []
        wrong = None
        for number, row in enumerate(rows, first):
            if isinstance(row, Prompt):
                continue
            try:
                read.append(self._read(row, number))
            except Exception as error:  # once the rows before it are looked at
                wrong = error
                break
        encoded = {one.number: self._prompt(one, ids) for one, ids in zip(read, self._ids(read), strict=True)}
        if wrong is not None:
            raise wrong
        return [
            self._fit(row) if isinstance(row, Prompt) else encoded[number] for number, row in enumerate(rows, first)
        ]

    def _read(self, row: Any, number: int) -> _Read:
        """What a row says, and the text that its tokens are made of."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; a row is a mapping from column to value")
        name = find_prompt_column(row, self.prompt_column, number)
        self._refuse(row, name, number)
        source = _source(row[name], name, number)
        columns = {column: value for column, value in row.items() if column != name}
        if not isinstance(source, str) and source[-1]["role"] == "assistant":
            source, columns = self._unanswered(source, columns, number)
        return _Read(number, source, columns, self._text(source, template_options(row, number), number))

    def _ids(self, read: Sequence[_Read]) -> list[list[int]]:
        """The ids that the model is given, of each; a template writes the special tokens itself."""
        found: dict[int, list[int]] = {}
        for plain in (True, False):
            of_kind = [one for one in read if self.is_plain(one.source) is plain]
            if of_kind:
                options: dict[str, Any] = {} if plain else {"add_special_tokens": False}
                ids = self.tokenizer([one.text for one in of_kind], verbose=False, **options).input_ids
                found |= {one.number: list(row) for one, row in zip(of_kind, ids, strict=True)}
        return [found[one.number] for one in read]

    def _prompt(self, read: _Read, tokens: list[int]) -> Prompt | None:
        """The prompt of a row; None where it is left out."""
        number, source = read.number, read.source
        if not tokens:
            raise DataError(
                f"row {number}: the prompt {format_value(source)} has no tokens; leave the row out, or fill it"
            )
        if not self._warned_of_empty and not has_text(self.messages(source)):
            self._warned_of_empty = True
            log.warning(EMPTY_PROMPT, number)
        ids = np.asarray(tokens, dtype=np.int32)
        ids.setflags(write=False)
        prompt = self._fit(Prompt(tokens=ids, source=source, columns=read.columns, row=number))
        self.counts["encoded"] += prompt is not None
        return prompt

    def _fit(self, prompt: Prompt) -> Prompt | None:
        """The prompt if it is within the limit; else it is cut, left out (None), or an error."""
        length, limit = len(prompt.tokens), self.max_prompt_length
        self.stats.add(length)
        if limit is None or length <= limit:
            return prompt
        if self.on_long_prompt == "error" and not self._all:
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
        """While all rows of a data set are encoded, the counts are of these rows, and prompts over the limit are one
        error after the last row, with their number and their lengths.
        """
        self.reset_counts()
        self._all = True
        try:
            yield
        finally:
            self._all = False
        if self.on_long_prompt == "error" and (over := self.describe_over_limit()):
            raise DataError(f"{over}; {self._length_hint(self.stats.longest)}")

    def describe_over_limit(self) -> str:
        """How many prompts were over the limit, the longest, and what 95 % of all have; "" where none was."""
        limit = self.max_prompt_length
        return "" if limit is None else self.stats.describe_over(limit, f"{self._rollout}max_prompt_length")

    def describe_fate(self) -> str:
        """What was done with prompts over the limit."""
        return f"{self.counts['truncated']} cut on the left, {self.counts['dropped']} left out"

    def describe_limit(self) -> str:
        """The limit as the configuration has it, e.g. "rollout.max_prompt_length=64"."""
        return f"{self._rollout}max_prompt_length={self.max_prompt_length}"

    def describe_counts(self) -> str:
        """How many prompts were over the limit or are changed by the chat template, for the log; "" if none was."""
        over, changed = self.describe_over_limit(), self.counts["changed"]
        found = [f"{over} ({self.describe_fate()})"] if over else []
        return "; ".join([*found, *([f"the chat template changes what {changed} of them say"] if changed else [])])

    def _length_hint(self, length: int) -> str:
        return f"raise it to {length}, or set {self._rollout}on_long_prompt to truncate_left or drop"

    def is_plain(self, source: str | list[Message]) -> bool:
        """Whether a prompt is encoded as the text that it is, without a chat template."""
        return isinstance(source, str) and not self.apply_chat_template

    def messages(self, source: str | list[Message]) -> list[Message]:
        """A prompt as the conversation that the template is given: a text is one user turn."""
        found = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
        if self.system_prompt is not None and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": self.system_prompt})
        return found

    def render(self, messages: list[Message], row: int, columns: Mapping[str, Any] | None = None) -> RenderedText:
        """A conversation as the chat template writes it, the assistant's turn open; a last one of its own is continued.

        Args: messages: at least one. row: for the message of an error. columns: of the row, which may have tools and
            chat_template_kwargs.
        Raises: DataError: the template refuses it.
        """
        return self._render(messages, {} if columns is None else template_options(columns, row), row)

    def _render(self, messages: list[Message], own: Mapping[str, Any], row: int) -> RenderedText:
        open_turn = messages[-1]["role"] == "assistant"
        options = {**own, "add_generation_prompt": not open_turn, "continue_final_message": open_turn}
        return RenderedText(self.template.text(messages, row=row, **options), len(messages), options)

    def _unanswered(
        self, source: list[Message], columns: dict[str, Any], number: int
    ) -> tuple[list[Message], dict[str, Any]]:
        """A conversation to be continued, as a text; or without its last turn, the row's answer unless it has one."""
        *before, last = source
        if self.on_answered == "continue":
            return [*before, {**last, "content": message_text(last)}], columns
        if self.on_answered == "error":
            raise DataError(
                f"row {number} ends with the assistant's turn {format_value(last.get('content'), 60)}: an answer, "
                f"where a prompt is expected; data.on_answered=take_off makes it the column {ANSWER}, "
                "data.on_answered=continue lets the model go on with it"
            )
        if not before:
            raise DataError(f"row {number} has no turn but the assistant's; leave it out, or give it a user's turn")
        return before, {ANSWER: message_text(last), **columns}

    def _text(self, source: str | list[Message], own: Mapping[str, Any], number: int) -> str:
        """The text that the tokens are made of. Args: own: the row's arguments of the template."""
        if self.is_plain(source):
            if self.system_prompt is not None:
                raise ConfigError(
                    f"row {number} is plain text, which has no system turn; set {self._data}apply_chat_template=True "
                    f"for {self._data}system_prompt, or put it in the text"
                )
            if "tools" in self.template.options or "tools" in own:
                where = "leave the column out" if "tools" in own else "leave TOOL out of the environment"
                raise ConfigError(
                    f"row {number} is plain text, and tools are told of by a chat template; set "
                    f"{self._data}apply_chat_template=True, or {where}"
                )
            return str(source)
        messages = self.messages(source)
        written = self._render(messages, own, number)
        changed = find_changed_text(self.template, messages, [written], number)
        if changed := changed or self._tools_left_out(messages, written, number):
            if self.on_template_change == "error":
                raise DataError(
                    f"row {number}: {changed}; change the row, use another chat template (or "
                    f"{self._rollout}chat_template_kwargs), or accept the change with "
                    f"{self._data}on_template_change=accept"
                )
            self.counts["changed"] += 1
        return written.text

    def _tools_left_out(self, messages: list[Message], written: RenderedText, number: int) -> str:
        """What is wrong where a row has tools that the template does not show; "" where it has none or shows them."""
        tools = written.options.get("tools")
        if not tools or self.template.text(messages, row=number, **{**written.options, "tools": None}) != written.text:
            return ""
        return f"it has the tools {format_value(tools, 80)}, and the chat template shows none"

    def _refuse(self, row: Mapping[str, Any], name: str, number: int) -> None:
        """Raises DataError for columns that can't travel."""
        check_no_images(row, number)
        taken = [column for column in RESERVED_COLUMNS if column in row and column != name]
        if taken:
            raise DataError(
                f"column {taken[0]!r} has the name of an argument that reward or metric functions are given; rename it"
            )


def _source(value: Any, name: str, number: int) -> str | list[Message]:
    """A prompt in the form that the data set has it, checked: a text, or a list of messages."""
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
