"""ChatTranscript: messages and token ids of an episode, a Session of one conversation (sessions.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.data.prompts import PromptEncoder
from whet.data.row_schema import template_options
from whet.envs.sessions import ChatRenderer, Session, Turn, template_key
from whet.rollout.base import Output
from whet.rollout.driver import Episode
from whet.types import Completion, FinishReason, Message, Prompt

__all__ = ["REPLACES", "ChatTranscript", "with_source"]

REPLACES = "replaces"
"""Key of an answer's only message where it replaces the conversation: another sequence begins with it."""


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
        self.prompt, self._parse = prompt, parse
        self.turn_rewards: dict[int, float] = {}
        """Turn, from 0 -> the reward that the environment gave for it."""
        self._encode, is_plain = encode, encode.is_plain(prompt.source)
        self.session = Session(ChatRenderer(encode.tokenizer, encode.template, end_ids, is_plain=is_plain))
        self._options = {**template_options(prompt.columns, prompt.row), "row": prompt.row}
        self._first: Message = {}
        self._replaced: list[tuple[list[Message], Any]] = []
        """The messages that have replaced the conversation, and their source."""
        self._turn: Turn | None = self._begin(prompt)
        self._open = self.messages[-1] if len(self._turn.messages) < len(self.messages) else None
        self._num_before = len(self._turn.messages)

    def _begin(self, prompt: Prompt) -> Turn:
        """Returns the first turn of a sequence behind a prompt."""
        encode, is_plain = self._encode, self._encode.is_plain(prompt.source)
        self.messages: list[Message] = encode.messages(prompt.source)
        """The conversation, the prompt included."""
        asked, before = list(self.messages), list(self.messages)
        if not is_plain and before[-1]["role"] == "assistant":
            before.pop()
        text = lambda: str(prompt.source) if is_plain else encode.render(asked, prompt.row, prompt.columns).text
        return Turn(prompt.tokens, None, prompt.tokens, before, template_key((), self._options), text)

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given for its next turn."""
        return self.session.nodes[-1].tokens if self._turn is None else self._turn.tokens

    def add_turn(self, output: Output) -> None:
        """Appends a turn of the model."""
        assert self._turn is not None, "a turn follows the prompt or an answer"
        if self._parse is None:
            message = {"role": "assistant", "content": self.session.renderer.decode(output.tokens)}
        else:
            message = self._parse(output.tokens, self.context)
        if not self.session.turns:
            self._first = message
            if self._open is not None:  # the prompt ends with a turn of the model, which goes on
                message = {**self._open, "content": self._open["content"] + message["content"]}
        self.session.end(self._turn, output, message)
        self._turn, self.messages = None, list(self.session.nodes[-1].messages)

    def add_answer(self, messages: Sequence[Message]) -> None:
        """Appends the environment's messages, and the header of the model's next turn.

        Args: messages: one with REPLACES is the prompt of another sequence.
        Raises: DataError: the chat template refuses the messages.
        """
        if messages[0].get(REPLACES):
            text, is_text = messages[0]["content"], isinstance(self.prompt.source, str)
            prompt = with_source(self.prompt, text if is_text else [{"role": "user", "content": text}], self._encode)
            self._turn = self._begin(prompt)
            self._replaced.append((self.messages, prompt.source))
            return
        self.messages += messages
        self._turn = self.session.begin(self.messages, (), self._options)

    def remove_answer(self) -> None:
        """Removes the last answer, which the model never saw: the conversation ends before it."""
        self._turn, self.messages = None, list(self.session.nodes[-1].messages)

    def completions(self, episode: Episode, info: Mapping[str, Any], reason: FinishReason) -> list[Completion]:
        """Returns the sequences to train on: see `Session.completions`."""
        has_own_prompt = not np.array_equal(self.prompt.tokens, episode.prompt.tokens)
        own_prompt = self.prompt.source if has_own_prompt else None

        def split(messages: list[Message]) -> tuple[Any, list[Message]]:
            for head, source in self._replaced:
                if head[0] is messages[0]:
                    return source, messages[len(head) :]
            return own_prompt, [self._first, *messages[self._num_before + 1 :]]

        rewards = [self.turn_rewards.get(i, 0.0) for i in range(self.session.turns)] if self.turn_rewards else []
        return self.session.completions(episode, info, reason, split, rewards)


def with_source(prompt: Prompt, source: str | list[Message], encode: PromptEncoder) -> Prompt:
    """Returns a prompt with another text or messages. They count for the episode, not for rollout.max_prompt_length."""
    encode = copy.copy(encode)
    encode.max_prompt_length = None
    encoded = encode({encode.prompt_column or "prompt": source, **prompt.columns}, prompt.row)
    assert encoded is not None, "without a longest length none is too long"
    return replace(encoded, columns=prompt.columns)
