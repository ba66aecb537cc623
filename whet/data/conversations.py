"""From a conversation to what is trained of it: which tokens the assistant said, found by rendering turn by turn.

What the template writes for the messages before a turn, with the assistant's header at its end, is the turn's context;
what it then writes more is what the assistant said, with the end mark and the line feed after it, where there are some.
Where a longer conversation does not begin as the shorter one did (templates that leave out earlier thinking), it is
another sequence: each turn is trained once, in the context in which it is said.
Left out on purpose: searching the text for what the assistant said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from whet.data.template_check import RenderedText
from whet.data.templates import ChatTemplate, common_prefix
from whet.data.text_parts import encode_parts
from whet.errors import DataError, format_value
from whet.types import Message, TrainSequence

__all__ = ["Part", "Rendering", "encode_rendering", "make_sequence", "render_as_one", "render_turns"]


@dataclass(frozen=True)
class Part:
    """A stretch of a sequence's text. Example: Part("4<end>", trained=True)."""

    text: str
    trained: bool
    others: bool = False
    """Whether it holds turns of the assistant's that are not trained here."""


@dataclass(frozen=True)
class Rendering:
    """A sequence before it is encoded: the parts of its text, and the messages that they show."""

    parts: tuple[Part, ...]
    rendered: RenderedText
    changed: str = ""
    """Where a turn does not begin with the header that the template asks with: both, for a message."""

    def extend(self, *parts: Part, rendered: RenderedText, changed: str) -> Rendering:
        """The sequence with further parts."""
        return replace(self, parts=(*self.parts, *parts), rendered=rendered, changed=self.changed or changed)


def render_turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    first: int = 0,
    silent: bool = False,
    row: int = 0,
    **options: Any,
) -> list[Rendering]:
    """The sequences of a conversation: what is context, and what the assistant said.

    Args:
        template: writes the messages.
        messages: the conversation.
        first: messages before this place are context, whoever said them.
        silent: whether a turn that says nothing is trained: its end mark.
        row: for the message of an error.
        options: further arguments of the template, e.g. tools.
    Returns: a Rendering for each sequence; one, unless the template forks; none where no turn is trained.
    """
    renderings: list[Rendering] = []
    text, others = "", any(m["role"] == "assistant" for m in messages[:first])
    for place in range(first, len(messages)):
        turn = messages[place]
        if turn["role"] != "assistant":
            continue
        if not (silent or _says_something(turn)):
            others = True
            continue
        after = template.text(messages[: place + 1], row=row, **options)
        before = (
            template.header(messages[:place], after, row=row, **options)
            if place
            else template.opening(turn, row, **options)
        )
        changed = ""
        if not after.startswith(before):
            common = common_prefix(before, after)
            changed = (
                f"message {place} is asked for with {before[len(common) :]!r}, and its turn begins with "
                f"{after[len(common) :][:80]!r}"
            )
            before = common
        rendered = RenderedText(after, place + 1, options)
        turn_part = Part(after[len(before) :], trained=True)
        if renderings and before.startswith(text):
            renderings[-1] = renderings[-1].extend(
                Part(before[len(text) :], False, others), turn_part, rendered=rendered, changed=changed
            )
        else:
            others = others or bool(renderings)
            renderings.append(Rendering((Part(before, False, others), turn_part), rendered, changed))
        text, others = after, False
    return renderings


def render_as_one(
    template: ChatTemplate, messages: Sequence[Message], *, row: int = 0, **options: Any
) -> list[Rendering]:
    """A conversation as one sequence that is trained from end to end. Args and Returns as for `render_turns`."""
    text = template.text(messages, row=row, **options)
    return [Rendering((Part(text, trained=True),), RenderedText(text, len(messages), options))]


def encode_rendering(
    template: ChatTemplate, messages: Sequence[Message], rendering: Rendering, row: int = 0
) -> TrainSequence:
    """The token ids and the mask of a sequence.

    Where the template marks what the assistant says ({% generation %}), only what is marked is trained.

    Args: template, messages, row: as for `render_turns`. rendering: one of its sequences.
    Raises: DataError: the marks and the turns contradict each other.
    """
    parts = rendering.parts
    ids = encode_parts(template.tokenizer, [p.text for p in parts], row)
    masks = [np.full(len(i), p.trained) for i, p in zip(ids, parts, strict=True)]
    if template.has_marks and len(parts) > 1:
        rendered = rendering.rendered
        whole, marks = template.marked(messages[: rendered.messages], row, **rendered.options)
        if whole == [one for part in ids for one in part]:
            masks = _agreed(template, parts, ids, masks, marks, row)
    return make_sequence(list(zip(ids, masks, strict=True)))


def make_sequence(parts: Sequence[tuple[Sequence[int] | np.ndarray, Any]]) -> TrainSequence:
    """A sequence from its parts: (token ids, which are trained: one truth value, or one for each).

    The prefix goes as far as the first trained token, and has one token at least.

    >>> s = make_sequence([([5, 6], False), ([7, 2], True)])
    >>> s.prefix.tolist(), s.tokens.tolist(), s.mask.tolist()
    ([5, 6], [7, 2], [True, True])
    """
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
    mask = np.concatenate([np.broadcast_to(np.asarray(trained, dtype=bool), len(ids)) for ids, trained in parts])
    start = max(1, int(np.argmax(mask)) if mask.any() else len(ids) - 1)
    arrays = ids[:start].copy(), ids[start:].copy(), mask[start:].copy()
    for array in arrays:
        array.setflags(write=False)
    return TrainSequence(prefix=arrays[0], tokens=arrays[1], mask=arrays[2])


def _says_something(turn: Message) -> bool:
    """Whether a turn has words or calls, besides white space."""
    content = turn.get("content")
    words = content.strip() if isinstance(content, str) else content
    return bool(words or any(turn.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")))


def _agreed(
    template: ChatTemplate,
    parts: Sequence[Part],
    ids: Sequence[Sequence[int]],
    masks: Sequence[np.ndarray],
    marks: Sequence[bool],
    row: int,
) -> list[np.ndarray]:
    """What both the turns and the marks say is trained; what the header gives is given, marked or not."""
    agreed, start = [], 0
    for part, its, mask in zip(parts, ids, masks, strict=True):
        marked = np.asarray(marks[start : start + len(its)], dtype=bool)
        start += len(its)
        runs = [is_marked for is_marked, _ in groupby(marked.tolist())]
        if part.trained and not marked.any():
            where = f"nothing of the turn {format_value(part.text, 80)}"
        elif not part.trained and not part.others and True in runs[:-1]:
            there = [i for i, is_marked in zip(its, marked, strict=True) if is_marked]
            where = f"{format_value(str(template.tokenizer.decode(there)), 80)}, which no assistant says"
        else:
            agreed.append(mask & marked)
            continue
        raise DataError(
            f"row {row}: the chat template's {{% generation %}} marks {where}; repair the marks, or take them out of "
            "the template: what the assistant says is then found by its turns"
        )
    return agreed
