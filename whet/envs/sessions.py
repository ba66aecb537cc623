"""Sessions: the conversations of one episode as token sequences, without encoding twice what the model wrote.

A history that begins with what a turn of the session has ended is a continuation of it: the ids before are those that
were sampled, and only what the chat template adds to the text so far is encoded. If the template would write the turn
in another way than the model did (the spaces in a tool call), that is what it writes behind its own text of the turn.

Where nothing matches, a sequence begins (a fork), whose prefix is the whole history as the template writes it: an agent
has edited its history, the tools have changed, or the chat template writes earlier turns in another way (it drops their
thinking). Every sampled token is in exactly one sequence.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whet.data.templates import ChatTemplate
from whet.envs.multi_turn import PROMPT, stand_in
from whet.rollout.base import Output, PartialOutput
from whet.rollout.driver import Episode, completion
from whet.types import Completion, FinishReason, Message

__all__ = ["ChatRenderer", "Session", "TokenSequence", "Turn", "template_key", "text_behind_turn"]

TOKENS_KEY = "tokens"
"""The key of turns whose prompt was token ids; no history of messages matches them."""


class ChatRenderer:
    """The chat template and the tokenizer of a session. Its methods may be called from several threads.

    Args:
        tokenizer: of transformers.
        template: of the tokenizer.
        end_ids: that end a turn; () = a turn that the template writes in another way forks.
        system_prompt: added before messages without a system turn; None or "" = off.
        is_plain: no template: the contents of the messages follow one another.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        end_ids: Sequence[int],
        *,
        system_prompt: str | None = None,
        is_plain: bool = False,
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.system_prompt, self.is_plain = system_prompt, is_plain
        self.end_marks: Mapping[int, str] = {} if is_plain else {i: str(tokenizer.decode([i])) for i in end_ids}
        """The ids that end a turn, with their texts."""
        self._lock = threading.Lock()  # a tokenizer must not encode on two threads

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any], *, asks: bool
    ) -> str:
        """Returns the text of a conversation.

        Args: tools, options: for the template. asks: with the header of the assistant's turn.
        Raises: ConfigError: the tokenizer has no template. DataError: the template refuses the messages.
        """
        if self.is_plain:
            return "".join(str(m["content"]) for m in messages)
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        with self._lock:
            return self.template.text(messages, asks=asks, **({"tools": list(tools)} if tools else {}), **options)

    def encode(self, text: str) -> np.ndarray:
        """int32 [P]: the ids of a rendered conversation, or of a part of it."""
        with self._lock:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return np.asarray(ids, np.int32)

    def decode(self, ids: Any, *, special: bool = False) -> str:
        """Returns the text of ids. Args: special: with special tokens, as `render` writes them."""
        tokens, without = [int(i) for i in ids], self.is_plain or not special
        return str(self.tokenizer.decode(tokens, skip_special_tokens=without, clean_up_tokenization_spaces=False))


@dataclass(eq=False)
class TokenSequence:
    """One sequence to train on: a prefix, the model's turns, and what was put between them."""

    prefix: np.ndarray
    """int32 [P]: before the first turn."""
    parts: list[Output | np.ndarray] = field(default_factory=list)
    """Turns, and the ids between them."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, the last turn included. Of a prompt of token ids there are only the turns."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the sequence for JSON: `mask` is 1 for sampled tokens, and `versions` is -1 for the others."""
        whole = completion(*self.parts, generation=0)
        columns = {"token_ids": whole.tokens, "logprobs": whole.logprobs, "versions": whole.versions}
        lists = {name: column.tolist() for name, column in columns.items()}
        mask = [int(version >= 0) for version in lists["versions"]]
        return {"prompt_token_ids": self.prefix.tolist(), **lists, "mask": mask, "messages": self.messages}


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
    text: Callable[[], str]
    """Gives the text of the prompt, with the header of the turn."""


@dataclass(eq=False)
class _Node:
    """A conversation after a turn of the model."""

    turn: Turn
    output: Output
    messages: list[Message]
    tokens: np.ndarray
    """int32: all ids, the turn included."""
    sequence: TokenSequence
    continued: bool = False
    """Whether the sequence goes on behind the turn."""


class Session:
    """The turns of one agent, or of one episode. Its methods may be called from several threads.

    Args: renderer: the model's template and tokenizer.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.sequences: list[TokenSequence] = []
        """In the order in which they began."""
        self.nodes: list[_Node] = []
        """The turns that have ended, in this order."""
        self._lock = threading.Lock()

    @property
    def turns(self) -> int:
        """Turns of the model."""
        return len(self.nodes)

    @property
    def forks(self) -> int:
        """The number of sequences besides the first."""
        return max(0, len(self.sequences) - 1)

    def begin(self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> Turn:
        """Returns the next turn: its prompt begins with the ids of the turn that it continues.

        Args: messages: the history. tools, options: for the template.
        Raises: DataError: the template refuses the messages.
        """
        messages, key = list(messages), template_key(tools, options)
        text = self.renderer.render(messages, tools, options, asks=True)
        with self._lock:
            nodes = sorted(self.nodes, key=lambda n: (-len(n.messages), n.continued))
        node = next((n for n in nodes if n.turn.key == key and _matches(n.messages, messages)), None)
        if node is not None:
            closed = lambda part: self.renderer.render(part, tools, options, asks=False)
            behind = self._text_behind(node, messages[: len(node.messages)], text, closed)
            if behind is not None:
                added = self.renderer.encode(behind)
                return Turn(np.concatenate([node.tokens, added]), node, added, messages, key, lambda: text)
        tokens = self.renderer.encode(text)
        return Turn(tokens, None, tokens, messages, key, lambda: text)

    def begin_tokens(self, tokens: np.ndarray) -> Turn:
        """Returns the next turn of an agent that sends token ids: it continues the turn whose ids the prompt begins
        with.

        Args: tokens: int32 [P], the prompt.
        """
        with self._lock:
            nodes = sorted(self.nodes, key=lambda n: (-len(n.tokens), n.continued))
        begins = lambda n: len(n.tokens) < len(tokens) and np.array_equal(n.tokens, tokens[: len(n.tokens)])
        node = next((n for n in nodes if begins(n)), None)
        if node is None:
            return Turn(tokens, None, tokens, [], TOKENS_KEY, str)
        return Turn(tokens, node, tokens[len(node.tokens) :], node.messages, TOKENS_KEY, str)

    def end(self, turn: Turn, output: PartialOutput, message: Message) -> None:
        """Records a sampled turn. Args: turn: of `begin`. output: all its tokens. message: as the agent received it."""
        assert isinstance(output, Output), "a turn is recorded when it has ended"
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
            tokens = np.concatenate([turn.tokens, output.tokens]).astype(np.int32)
            self.nodes.append(_Node(turn, output, sequence.messages, tokens, sequence))

    def completions(
        self,
        episode: Episode,
        info: Mapping[str, Any],
        reason: FinishReason | None,
        split: Callable[[list[Message]], tuple[Any, list[Message]]],
        turn_rewards: Sequence[float] = (),
    ) -> list[Completion]:
        """Returns the sequences of an episode to train on; without a turn of the model its stand-in.

        Args:
            info: how the episode ended; turns, attempts and forks are added.
            reason: why the episode ended; None = each sequence as its last turn did.
            split: (messages of a sequence) -> the prompt of a sequence that has its own, None = it is not kept; and the
                messages after it.
            turn_rewards: of each turn, at its last token; () = turns have none.
        """
        facts = {**info, "turns": self.turns}
        facts |= {"attempts": episode.attempts} if episode.attempts > 1 else {}
        facts |= {"forks": self.forks} if self.forks else {}
        if not self.sequences:
            return [stand_in(episode, facts, reason or "length")]
        of_turn = {id(n.output): reward for n, reward in zip(self.nodes, turn_rewards, strict=False)}
        made: list[Completion] = []
        for sequence in self.sequences:
            whole = completion(*sequence.parts, generation=episode.generation, info=facts)
            prompt, messages = split(sequence.messages)
            changes: dict[str, Any] = {"messages": tuple(messages), "finish_reason": reason or whole.finish_reason}
            if not np.array_equal(sequence.prefix, episode.prompt.tokens):
                changes["prefix"] = sequence.prefix
                changes |= {} if prompt is None else {"info": {**facts, PROMPT: prompt}}
            if turn_rewards:
                columns = [np.zeros(len(p if isinstance(p, np.ndarray) else p.tokens)) for p in sequence.parts]
                for column, part in zip(columns, sequence.parts, strict=True):
                    column[-1:] = of_turn.get(id(part), 0.0)
                changes["token_rewards"] = np.concatenate(columns)
            made.append(replace(whole, **changes))
        return made

    def _text_behind(
        self, node: _Node, conversation: list[Message], text: str, closed: Callable[[list[Message]], str]
    ) -> str | None:
        """Returns what follows the ids of a turn; None = a fork. Args: conversation: the messages that the turn ends.
        text: of the prompt that continues it. closed: renders messages without a header.
        """
        ids, marks = node.output.tokens, self.renderer.end_marks
        sampled = node.turn.text() + self.renderer.decode(ids, special=True)
        as_sampled = text[len(sampled) :] if text.startswith(sampled) else None
        ended = len(ids) > 0 and int(ids[-1]) in marks
        if not marks or (ended and as_sampled is not None):  # a turn without its end may begin as other text does
            return as_sampled
        rendered, before = closed(node.messages[:-1]), closed(conversation)
        behind = text_behind_turn(rendered, before, text, tuple(marks.values()), ended=ended)
        return as_sampled if behind is None else behind


def template_key(tools: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns the key of turns whose prompts the template writes with the same tools and options."""
    return json.dumps([list(tools), dict(options)], sort_keys=True, default=str)


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


def _matches(earlier: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Returns whether a history begins with the messages of a turn."""
    return len(earlier) < len(messages) and all(map(_same, earlier, messages))


def _same(a: Message, b: Message) -> bool:
    """Returns whether two messages say the same; ids of calls may differ, and agents leave out the reasoning.

    >>> _same({"role": "assistant", "content": "4"}, {"role": "assistant", "content": "4", "name": "x"})
    True
    """
    if a is b:
        return True
    calls = [[c["function"] for c in m.get("tool_calls") or ()] for m in (a, b)]
    return a["role"] == b["role"] and (a["content"] or "") == (b["content"] or "") and calls[0] == calls[1]
