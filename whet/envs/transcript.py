"""A conversation in the making: its messages, its text, and the token ids that the model has seen, which are never made
again.

What follows a turn is what the chat template adds to the text so far: its rendering of the longer conversation begins
with that text, and only the rest is encoded. A template that writes earlier turns differently once they are earlier (it
drops their thinking, say, or strips them) forks the episode: a new sequence begins, whose prefix is the whole
conversation as the template now has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.prompts import PromptEncoder
from whet.rollout.base import Output
from whet.rollout.driver import completion
from whet.types import Completion, FinishReason, Message, Prompt

__all__ = ["Transcript"]


class Transcript:
    """One episode.

    Args: prompt: encoded by `encode`. encode: of the prompts, whose template the later turns go through too. A prompt
        of plain text has none: the contents of the messages follow one another.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> talk = Transcript(encode({"prompt": "2+2="}), encode)
    >>> four = {"tokens": np.array([52]), "logprobs": np.zeros(1), "versions": np.zeros(1, int)}
    >>> talk.say(Output(id=0, **four, finish_reason="length"))
    >>> talk.hear([{"role": "tool", "content": " right"}])
    >>> talk.messages[1:], len(talk.context)
    ([{'role': 'assistant', 'content': '4'}, {'role': 'tool', 'content': ' right'}], 11)
    """

    def __init__(self, prompt: Prompt, encode: PromptEncoder) -> None:
        self._encode, self._row, self._columns = encode, prompt.row, prompt.columns
        self._plain = encode.is_plain(prompt.source)
        self.messages: list[Message] = encode.messages(prompt.source)
        """The conversation, the prompt included."""
        self._open = not self._plain and self.messages[-1]["role"] == "assistant"
        self._said: list[Message] = []  # after the prompt
        self._text = self._written()
        self._prompt = prompt.tokens
        self._prefix: np.ndarray | None = None
        self._parts: list[Output | np.ndarray] = []
        self._ended: list[tuple[np.ndarray | None, list[Output | np.ndarray], int]] = []

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given next."""
        before = self._prompt if self._prefix is None else self._prefix
        return np.concatenate([before, *(p.tokens if isinstance(p, Output) else p for p in self._parts)])

    @property
    def forks(self) -> int:
        """Sequences besides the first."""
        return len(self._ended)

    @property
    def turns(self) -> int:
        """Turns that the model has had."""
        done = [parts for _, parts, _ in self._ended] + [self._parts]
        return sum(isinstance(p, Output) for parts in done for p in parts)

    def say(self, output: Output) -> None:
        """Adds a turn of the model."""
        self._parts.append(output)
        self._text += self._decoded(output, special=not self._plain)  # a text that ends without a mark of its end
        message = {"role": "assistant", "content": self._decoded(output, special=False)}
        self._said.append(message)
        if self._open:  # the prompt's last turn is the model's own, and goes on
            *self.messages, begun = self.messages
            message = {**begun, "content": begun["content"] + message["content"]}
            self._open = False
        self.messages.append(message)

    def hear(self, messages: Sequence[Message]) -> None:
        """Adds what the environment answers, and opens the model's next turn.

        Raises: DataError: the chat template refuses the messages.
        """
        said = len(self._said)
        self.messages += messages
        self._said += messages
        before, self._text = self._text, self._written()
        if self._text.startswith(before):
            self._parts.append(self._ids(self._text[len(before) :], special=False))
            return
        self._ended.append((self._prefix, self._parts, said))
        self._prefix, self._parts = self._ids(self._text, special=self._plain), []

    def unhear(self) -> None:
        """Takes back what was heard last: the model never saw it, and the conversation ends here."""
        while self._said[-1]["role"] != "assistant":
            self._said.pop()
        if self._parts:
            self._parts.pop()
        else:
            self._prefix, self._parts, _ = self._ended.pop()

    def completions(self, generation: int, finish_reason: FinishReason, info: Mapping[str, Any]) -> list[Completion]:
        """The sequences to train on: one, and one more for each fork.

        Args: generation: the episode's. finish_reason: of each of them: why the episode ended. info: for the store.
        """
        found = []
        for prefix, parts, count in [*self._ended, (self._prefix, self._parts, len(self._said))]:
            made = completion(*parts, generation=generation, info=info)
            said = tuple(self._said[:count])
            found.append(dataclasses.replace(made, prefix=prefix, finish_reason=finish_reason, messages=said))
        return found

    def _written(self) -> str:
        """The conversation as the template writes it, the model's turn open."""
        if self._plain:
            return "".join(str(m["content"]) for m in self.messages)
        return self._encode.rendered(self.messages, self._row, self._columns).text

    def _decoded(self, output: Output, *, special: bool) -> str:
        tokens = [int(i) for i in output.tokens]
        tokenizer = self._encode.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def _ids(self, text: str, *, special: bool) -> np.ndarray:
        """The ids of a text. Args: special: with those that the tokenizer puts around a whole text."""
        found = self._encode.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return np.asarray(found, np.int32)
