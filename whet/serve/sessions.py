"""Sessions: the calls of one agent as token sequences, without encoding twice what the model wrote.

An agent sends its whole history with each call. The history is matched message by message with the turns of the
session: behind the turn that it continues, only the text of its new messages is encoded, and the ids before are those
that were sampled. Where nothing matches, a sequence begins (a fork): the agent has edited its history, the tools have
changed, or the chat template rewrites earlier turns. Every sampled token is in exactly one sequence.

"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from whet.envs.transcript import text_behind_turn
from whet.rollout.base import PartialOutput
from whet.types import Message

__all__ = ["Renderer", "Session", "TokenSequence", "Turn"]

TOKENS_KEY = "tokens"
"""The key of turns whose prompt was token ids; no history of messages matches them."""


class Renderer(Protocol):
    """The chat template and the tokenizer of a session."""

    end_marks: Mapping[int, str]
    """The ids that end a turn, with their texts."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any], *, asks: bool
    ) -> str:
        """Returns the text of a conversation. Args: asks: with the header of the assistant's turn."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [C]: the ids of a rendered text, without further special tokens."""
        ...


@dataclass(eq=False)
class TokenSequence:
    """One sequence to train on: a prefix, the model's turns, and what was put between them."""

    prefix: np.ndarray
    """int32 [P]: before the first turn."""
    parts: list[PartialOutput | np.ndarray] = field(default_factory=list)
    """Turns, and the ids between them."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, the last turn included. Of a prompt of token ids there are only the turns."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the sequence for JSON: `mask` is 1 for sampled tokens, and `versions` is -1 for the others."""
        columns: dict[str, list[Any]] = {"token_ids": [], "logprobs": [], "mask": [], "versions": []}
        for part in self.parts:
            sampled = isinstance(part, PartialOutput)
            ids = (part.tokens if sampled else part).tolist()
            columns["token_ids"] += ids
            columns["mask"] += [int(sampled)] * len(ids)
            columns["logprobs"] += part.logprobs.tolist() if sampled else [0.0] * len(ids)
            columns["versions"] += part.versions.tolist() if sampled else [-1] * len(ids)
        return {"prompt_token_ids": self.prefix.tolist(), **columns, "messages": self.messages}


@dataclass(eq=False)
class _Node:
    """A conversation after a turn of the model."""

    messages: list[Message]
    key: str
    """The tools and the options of the template."""
    rendered: str
    """The text of the messages before the turn, as the template wrote them."""
    tokens: np.ndarray
    """int32: all ids, the turn included."""
    ended: bool
    """Whether the turn ends with a mark."""
    sequence: TokenSequence
    output: PartialOutput
    """The turn's tokens."""
    continued: bool = False
    """Whether the sequence goes on behind the turn."""


@dataclass(eq=False)
class Turn:
    """A turn of the model that is being sampled."""

    tokens: np.ndarray
    """int32 [P]: the prompt."""
    node: _Node | None
    """The turn that it continues; None = a new sequence."""
    added: np.ndarray
    """int32: the end of the prompt, behind that turn."""
    messages: list[Message]
    key: str
    rendered: str


class Session:
    """The turns of one agent. Its methods may be called from several threads.

    Args: renderer: the model's template and tokenizer.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.sequences: list[TokenSequence] = []
        """In the order in which they began."""
        self._nodes: list[_Node] = []
        self._lock = threading.Lock()

    @property
    def turns(self) -> int:
        """Turns of the model."""
        return len(self._nodes)

    @property
    def outputs(self) -> list[PartialOutput]:
        """The tokens of each turn, in the order in which they ended."""
        return [node.output for node in self._nodes]

    @property
    def forks(self) -> int:
        """The number of sequences besides the first."""
        return max(0, len(self.sequences) - 1)

    def begin(self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> Turn:
        """Returns the next turn: its prompt begins with the ids of the turn that it continues.

        Args: messages: the agent's history, of `read_messages`. tools, options: for the template.
        Raises: DataError: the template refuses the messages.
        """
        messages = list(messages)
        key = json.dumps([list(tools), dict(options)], sort_keys=True, default=str)
        render = lambda part, asks: self.renderer.render(part, tools, options, asks=asks)
        text, rendered = render(messages, True), render(messages, False)
        with self._lock:
            nodes = sorted(self._nodes, key=lambda n: (-len(n.messages), n.continued))
        node = next((n for n in nodes if n.key == key and _matches(n.messages, messages)), None)
        if node is not None:
            before, marks = render(messages[: len(node.messages)], False), tuple(self.renderer.end_marks.values())
            behind = text_behind_turn(node.rendered, before, text, marks, ended=node.ended)
            if behind is not None:
                added = self.renderer.encode(behind)
                return Turn(np.concatenate([node.tokens, added]), node, added, messages, key, rendered)
        tokens = self.renderer.encode(text)
        return Turn(tokens, None, tokens, messages, key, rendered)

    def begin_tokens(self, tokens: np.ndarray) -> Turn:
        """Returns the next turn of an agent that sends token ids: it continues the turn whose ids the prompt begins
        with.

        Args: tokens: int32 [P], the prompt.
        """
        with self._lock:
            nodes = sorted(self._nodes, key=lambda n: (-len(n.tokens), n.continued))
        begins = lambda n: len(n.tokens) < len(tokens) and np.array_equal(n.tokens, tokens[: len(n.tokens)])
        node = next((n for n in nodes if begins(n)), None)
        if node is None:
            return Turn(tokens, None, tokens, [], TOKENS_KEY, "")
        return Turn(tokens, node, tokens[len(node.tokens) :], node.messages, TOKENS_KEY, "")

    def end(self, turn: Turn, output: PartialOutput, message: Message) -> None:
        """Records a sampled turn. Args: turn: of `begin`. output: its tokens. message: as the agent received it."""
        with self._lock:
            node = turn.node
            if node is None or node.continued:
                sequence = TokenSequence(turn.tokens)
                self.sequences.append(sequence)
            else:
                node.continued, sequence = True, node.sequence
                sequence.parts.append(turn.added)
            sequence.parts.append(output)
            sequence.messages = [*turn.messages, message]
            self._nodes.append(
                _Node(
                    messages=sequence.messages,
                    key=turn.key,
                    rendered=turn.rendered,
                    tokens=np.concatenate([turn.tokens, output.tokens]).astype(np.int32),
                    ended=len(output.tokens) > 0 and int(output.tokens[-1]) in self.renderer.end_marks,
                    sequence=sequence,
                    output=output,
                )
            )


def _matches(earlier: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Returns whether a history begins with the messages of a turn."""
    return len(earlier) < len(messages) and all(map(_same, earlier, messages))


def _same(a: Message, b: Message) -> bool:
    """Returns whether two messages say the same; ids of calls may differ, and agents leave out the reasoning.

    >>> _same({"role": "assistant", "content": "4"}, {"role": "assistant", "content": "4", "name": "x"})
    True
    """
    calls = [[c["function"] for c in m.get("tool_calls") or ()] for m in (a, b)]
    return a["role"] == b["role"] and (a["content"] or "") == (b["content"] or "") and calls[0] == calls[1]
