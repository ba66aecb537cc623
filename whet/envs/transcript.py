"""ChatTranscript: messages, text and token ids of a conversation. Ids that the model has seen are never encoded again.

What follows a turn is what the chat template adds to the text so far: its rendering of the longer conversation begins
with that text, and only the rest is encoded. If the template would write the turn in another way than the model did
(the spaces in a tool call), it is what the template writes behind its own text of the turn. Some templates write a turn
differently once it is an earlier one (they drop its thinking). Such a template forks the episode: a new sequence
begins, and its prefix is the whole conversation as the template now writes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.prompts import PromptEncoder
from whet.data.row_schema import template_options
from whet.rollout.base import Output
from whet.rollout.driver import completion
from whet.types import Completion, FinishReason, Message, Prompt

__all__ = ["ChatTranscript", "text_behind_turn"]


class ChatTranscript:
    """The transcript of one episode, for `run_turns`.

    Args:
        prompt: encoded by `encode`.
        encode: the encoder of the prompts; later turns go through its chat template too. A prompt of plain text has no
            template: the contents of the messages follow one another.
        end_ids: that end a turn; () = a turn that the template writes in another way forks.
        parse: (tokens of a turn, ids before it) -> its message, with tool calls; None = its text is the message.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> transcript = ChatTranscript(encode({"prompt": "2+2="}), encode)
    >>> four = {"tokens": np.array([52]), "logprobs": np.zeros(1), "versions": np.zeros(1, int)}
    >>> transcript.add_turn(Output(id=0, **four, finish_reason="length"))
    >>> transcript.add_answer([{"role": "tool", "content": " right"}])
    >>> transcript.messages[1:], len(transcript.context)
    ([{'role': 'assistant', 'content': '4'}, {'role': 'tool', 'content': ' right'}], 11)
    """

    def __init__(
        self,
        prompt: Prompt,
        encode: PromptEncoder,
        *,
        end_ids: Sequence[int] = (),
        parse: Callable[[np.ndarray, np.ndarray], Message] | None = None,
    ) -> None:
        self._end_marks = {i: str(encode.tokenizer.decode([i])) for i in end_ids}
        self._parse = parse
        self.prompt = prompt
        self.turn_rewards: dict[int, float] = {}
        """Turn, from 0 -> the reward that the environment gave for it."""
        self._encode, self._row, self._columns = encode, prompt.row, prompt.columns
        self._is_plain = encode.is_plain(prompt.source)
        self.messages: list[Message] = encode.messages(prompt.source)
        """The conversation, the prompt included."""
        self._continues = not self._is_plain and self.messages[-1]["role"] == "assistant"
        self._new_messages: list[Message] = []  # after the prompt
        self._text = self._text_before = self._render()  # with and without the last answer
        self._prompt = prompt.tokens
        self._prefix: np.ndarray | None = None
        self._parts: list[Output | np.ndarray] = []
        self._forked: list[tuple[np.ndarray | None, list[Output | np.ndarray], int]] = []

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given for its next turn."""
        before = self._prompt if self._prefix is None else self._prefix
        return np.concatenate([before, *(p.tokens if isinstance(p, Output) else p for p in self._parts)])

    @property
    def forks(self) -> int:
        """Sequences besides the first."""
        return len(self._forked)

    @property
    def turns(self) -> int:
        """Turns that the model has had."""
        sequences = [parts for _, parts, _ in self._forked] + [self._parts]
        return sum(isinstance(p, Output) for parts in sequences for p in parts)

    def add_turn(self, output: Output) -> None:
        """Appends a turn of the model."""
        message = {"role": "assistant", "content": self._decode(output, special=False)}
        if self._parse is not None:
            message = self._parse(output.tokens, self.context)
        self._parts.append(output)
        self._text += self._decode(output, special=not self._is_plain)  # the end mark too, so that the text is a prefix
        self._new_messages.append(message)
        if self._continues:  # the prompt ends with a turn of the model, which goes on
            *self.messages, last = self.messages
            message = {**last, "content": last["content"] + message["content"]}
            self._continues = False
        self.messages.append(message)

    def add_answer(self, messages: Sequence[Message]) -> None:
        """Appends the environment's messages, and the header of the model's next turn.

        Raises: DataError: the chat template refuses the messages.
        """
        count = len(self._new_messages)
        conversation = list(self.messages)
        self.messages += messages
        self._new_messages += messages
        before = self._text_before = self._text
        self._text = self._render()
        as_sampled = self._text[len(before) :] if self._text.startswith(before) else None
        # a parsed turn is no text: its calls are what the template writes, however the model has written them
        added = self._behind_turn(conversation) if as_sampled is None or self._parse is not None else None
        added = as_sampled if added is None else added
        if added is not None:
            self._parts.append(self._ids(added, special=False))
            return
        self._forked.append((self._prefix, self._parts, count))
        self._prefix, self._parts = self._ids(self._text, special=self._is_plain), []

    def remove_answer(self) -> None:
        """Removes the last answer, which the model never saw: the conversation ends before it."""
        while self._new_messages[-1]["role"] != "assistant":
            self._new_messages.pop()
            self.messages.pop()
        self._text = self._text_before
        if self._parts:
            self._parts.pop()
        else:
            self._prefix, self._parts, _ = self._forked.pop()

    def completions(self, generation: int, finish_reason: FinishReason, info: Mapping[str, Any]) -> list[Completion]:
        """Returns the sequences to train on: one, and one more for each fork.

        Args: generation: of the episode. finish_reason: why the episode ended, for each sequence. info: for the store.
        """
        sequences, first = [], 0
        for prefix, parts, count in [*self._forked, (self._prefix, self._parts, len(self._new_messages))]:
            sequence = completion(*parts, generation=generation, info=info)
            messages = tuple(self._new_messages[:count])
            rewards = self._token_rewards(parts, first) if self.turn_rewards else None
            first += sum(isinstance(p, Output) for p in parts)
            changes = {"finish_reason": finish_reason, "messages": messages, "token_rewards": rewards}
            sequences.append(dataclasses.replace(sequence, prefix=prefix, **changes))
        return sequences

    def _token_rewards(self, parts: Sequence[Output | np.ndarray], turn: int) -> np.ndarray:
        """float64 [C]: the rewards of turns at their last tokens. Args: parts: of a sequence. turn: its first one."""
        rewards: list[np.ndarray] = []
        for part in parts:
            column = np.zeros(len(part.tokens if isinstance(part, Output) else part))
            if isinstance(part, Output):
                column[-1:] = self.turn_rewards.get(turn, 0.0)
                turn += 1
            rewards.append(column)
        return np.concatenate(rewards)

    def _behind_turn(self, conversation: Sequence[Message]) -> str | None:
        """Returns what the template writes behind the last turn. Args: conversation: the messages that the turn
        ends.
        """
        if self._is_plain or not self._end_marks:
            return None
        options = {**template_options(self._columns, self._row), "add_generation_prompt": False}
        closed = lambda messages: self._encode.template.text(messages, row=self._row, **options)
        turn = next(p for p in reversed(self._parts) if isinstance(p, Output))
        ended = len(turn.tokens) > 0 and int(turn.tokens[-1]) in self._end_marks
        marks = tuple(self._end_marks.values())
        return text_behind_turn(closed(conversation[:-1]), closed(conversation), self._text, marks, ended=ended)

    def _render(self) -> str:
        """Returns the conversation as the template writes it, with the header of the model's turn."""
        if self._is_plain:
            return "".join(str(m["content"]) for m in self.messages)
        return self._encode.render(self.messages, self._row, self._columns).text

    def _decode(self, output: Output, *, special: bool) -> str:
        tokens = [int(i) for i in output.tokens]
        tokenizer = self._encode.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def _ids(self, text: str, *, special: bool) -> np.ndarray:
        """Returns the ids of a text. Args: special: add the special tokens that the tokenizer puts around a text."""
        ids = self._encode.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return np.asarray(ids, np.int32)


def text_behind_turn(rendered: str, before: str, text: str, end_marks: Sequence[str], *, ended: bool) -> str | None:
    """Returns what a template writes behind a turn whose ids are known.

    Args: rendered, before, text: the conversation without the turn, with it, and with what follows it, as the template
        writes them. end_marks: of a turn. ended: the turn has its mark.
    Returns: None = the template does not only append: it writes earlier turns differently in a longer conversation.

    >>> text_behind_turn("<u>2+2", "<u>2+2<a>4.<end>", "<u>2+2<a>4.<end><u>Sure?<a>", ["<end>"], ended=True)
    '<u>Sure?<a>'
    >>> text_behind_turn("<u>2+2", "<u>2+2<a>4.<end>", "<u>2+2<a>4.<end><u>Sure?<a>", ["<end>"], ended=False)
    '<end><u>Sure?<a>'
    """
    if not before.startswith(rendered) or not text.startswith(before):
        return None
    place, mark = max(((before.rfind(mark, len(rendered)), mark) for mark in end_marks), default=(-1, ""))
    if place < 0:
        return text[len(before) :]
    return text[place + len(mark) :] if ended else text[place:]
