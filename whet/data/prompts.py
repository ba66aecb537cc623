"""From rows to prompts: which column, which template, how long.

Token ids are made once, here; nothing re-tokenises later. Left out on purpose: images (refused).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from whet.data.forms import message_of, refuse_images, text_of
from whet.data.said import Shown, changed_words
from whet.data.templates import ChatTemplate
from whet.errors import ConfigError, DataError, lookup_error, nearest, shown
from whet.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LongPrompt", "PromptEncoder", "find_prompt_column"]

LongPrompt = Literal["error", "truncate_left", "drop"]
"""How to treat a prompt over the limit."""
PROMPT_COLUMNS = ("prompt", "prompts", "messages", "question")
"""Names of the prompt column, in the order of preference."""
GIVEN = ("advantages", "completion_ids", "completions", "mode", "prompt_ids", "prompts", "rewards", "trajectory_ids")
"""Keywords that reward and metric functions are given besides the columns: no column may have such a name."""


def find_prompt_column(columns: Iterable[str], prompt_column: str | None = None, row: int | None = None) -> str:
    """The column that holds the prompts.

    Args: columns: what a row has. prompt_column: the one to take; None = prompt, prompts, messages or
        question, whichever is there, in this order. row: whose columns they are, for the message.
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
    way = "name it in prompt_column" if not row else "give this row one, or leave it out"  # those before it had one
    raise DataError(
        f"{'' if row is None else f'row {row}: '}no prompt column ({' or '.join(wanted)}) among the columns "
        f"{', '.join(columns)}{hint}{'' if hint.endswith('?') else ';'} {way}"
    )


class PromptEncoder:
    """Turns rows into Prompts, and counts what it dropped and truncated.

    Text is encoded as it is (the tokenizer adds its own special tokens, e.g. bos); a list of messages goes through the
    chat template, with the header of the assistant's turn at the end. A list that ends in an assistant turn is
    continued: that turn stays open.

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
    ) -> None:
        """Args:
            tokenizer: of transformers.
            prompt_column: None = prompt, prompts, messages or question, the first that is there.
            apply_chat_template: texts become one user turn; messages always go through the template.
            chat_template_kwargs: further arguments of the template, e.g. {"enable_thinking": False}, which is the
                default; templates ignore what they don't know. A chat_template among them is taken for the tokenizer's.
            tools: descriptions of tools, for the template; None = none.
            system_prompt: put before messages that have no system turn; texts need apply_chat_template for it. None or
                "" = off.
            max_prompt_length: tokens, template included; None = no limit.
            on_long_prompt: "error"; "truncate_left": the last max_prompt_length tokens stay; "drop".
            on_template_change: what to do where the template changes or leaves out what a prompt says, e.g. blanks at
                its end: "error", or "accept" it, which is counted.

        Raises:
            ConfigError: an unknown on_long_prompt or on_template_change, a limit below 1, a template asked for where
                there is none.
        """
        if on_long_prompt not in ("error", "truncate_left", "drop"):
            raise lookup_error("on_long_prompt", on_long_prompt, ("error", "truncate_left", "drop"))
        if on_template_change not in ("error", "accept"):
            raise lookup_error("on_template_change", on_template_change, ("error", "accept"))
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length {max_prompt_length} allows no prompt; give at least 1, or None")
        self.tokenizer = tokenizer
        self.prompt_column = prompt_column
        self.apply_chat_template = apply_chat_template
        told = {"tools": list(tools)} if tools else {}
        self.template = ChatTemplate(tokenizer, {**(chat_template_kwargs or {}), **told})
        self.system_prompt = system_prompt or None
        self.max_prompt_length = max_prompt_length
        self.on_long_prompt = on_long_prompt
        self.on_template_change = on_template_change
        self.counts = {"encoded": 0, "dropped": 0, "truncated": 0, "changed": 0}
        if apply_chat_template:
            self.template.need()

    def __call__(self, row: Mapping[str, Any], number: int = 0) -> Prompt | None:
        """One row as a Prompt.

        Args: row: column -> value. number: the row's place in the data set.
        Returns: the Prompt; None where it is too long and on_long_prompt is "drop".
        Raises: DataError: no prompt column, no text, images, too long, no tokens, a template that changes what is said.
            ConfigError: no chat template.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; a row is a mapping from column to value")
        name = find_prompt_column(row, self.prompt_column, number)
        self._refuse(row, name, number)
        source = _source(row[name], name, number)
        tokens = self._tokens(source, number)
        if not tokens:
            raise DataError(f"row {number}: the prompt {shown(source)} has no tokens; leave the row out, or fill it")
        limit = self.max_prompt_length
        if limit is not None and len(tokens) > limit:
            if self.on_long_prompt == "drop":
                self.counts["dropped"] += 1
                return None
            if self.on_long_prompt == "error":
                raise DataError(
                    f"row {number}: the prompt has {len(tokens)} tokens, over max_prompt_length {limit}; raise it to "
                    f"{len(tokens)}, or set on_long_prompt to truncate_left or drop"
                )
            self.counts["truncated"] += 1
            tokens = tokens[-limit:]
        self.counts["encoded"] += 1
        ids = np.asarray(tokens, dtype=np.int32)
        ids.setflags(write=False)
        columns = {column: value for column, value in row.items() if column != name}
        return Prompt(tokens=ids, source=source, columns=columns, row=number)

    def is_plain(self, source: str | list[Message]) -> bool:
        """Whether a prompt is encoded as the text that it is, without a chat template."""
        return isinstance(source, str) and not self.apply_chat_template

    def messages(self, source: str | list[Message]) -> list[Message]:
        """A prompt as the conversation that the template is given: a text is one user turn."""
        found = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
        if self.system_prompt is not None and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": self.system_prompt})
        return found

    def rendered(self, messages: list[Message], row: int) -> Shown:
        """A conversation as the chat template writes it, the assistant's turn open; a last one of its own is continued.

        Raises: DataError: the template refuses it.
        """
        open_turn = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not open_turn, "continue_final_message": open_turn}
        return Shown(self.template.text(messages, row=row, **options), len(messages), options)

    def _tokens(self, source: str | list[Message], number: int) -> list[int]:
        """The ids that the model is given."""
        if self.is_plain(source):
            if self.system_prompt is not None:
                raise ConfigError(
                    f"row {number} is plain text, which has no system turn; set apply_chat_template=True for "
                    "system_prompt, or put it in the text"
                )
            if "tools" in self.template.options:
                raise ConfigError(
                    f"row {number} is plain text, and tools are told of by a chat template; set "
                    "apply_chat_template=True, or leave TOOL out of the environment"
                )
            return list(self.tokenizer(source, verbose=False).input_ids)
        messages = self.messages(source)
        written = self.rendered(messages, number)
        if changed := changed_words(self.template, messages, [written], number):
            if self.on_template_change == "error":
                raise DataError(
                    f"row {number}: {changed}; change the row, take another chat template (or chat_template_kwargs), "
                    "or accept it by on_template_change=accept"
                )
            self.counts["changed"] += 1
        return list(self.tokenizer(written.text, add_special_tokens=False, verbose=False).input_ids)

    def _refuse(self, row: Mapping[str, Any], name: str, number: int) -> None:
        """Raises DataError for columns that can't travel."""
        refuse_images(row, number)
        taken = [column for column in GIVEN if column in row and column != name]
        if taken:
            raise DataError(
                f"column {taken[0]!r} has the name of an argument that reward or metric functions are given; rename it"
            )


def _source(value: Any, name: str, number: int) -> str | list[Message]:
    """A prompt in the form that the data set has it, checked: a text, or a list of messages."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return text_of(str(value), f"row {number}, column {name!r}")
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise DataError(
            f"row {number}: column {name!r} holds {type(value).__name__} {shown(value)}; a prompt is a text or a list "
            "of messages"
        )
    return [message_of(message, place, number) for place, message in enumerate(value)]
