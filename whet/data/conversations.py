"""Finds the trained tokens of a conversation: those of the assistant, by rendering the conversation turn by turn.

The context of a turn is the template's output for the messages before it, with the assistant's header at the end. The
rest of the output with the turn is trained: the assistant's text, with the end token and the line feed after it.
If the output with a later turn does not start with the earlier output (some templates remove earlier thinking), the
later turn becomes another sequence. So each turn is trained once, in its own context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from whet.data.template_check import RenderedText
from whet.data.templates import ChatTemplate, common_prefix
from whet.errors import DataError, format_value
from whet.types import Message, TrainSequence

__all__ = ["Rendering", "TextPart", "make_rendered_sequence", "make_sequence", "render_as_one", "render_turns"]


@dataclass(frozen=True)
class TextPart:
    """A part of a sequence's text. Example: TextPart("4<end>", trained=True)."""

    text: str
    trained: bool
    has_untrained_turns: bool = False
    """The part contains turns of the assistant that are not trained in this sequence."""


@dataclass(frozen=True)
class Rendering:
    """A sequence before it is tokenised: the parts of its text, and the messages that they contain."""

    parts: tuple[TextPart, ...]
    rendered: RenderedText
    changed: str = ""
    """Describes a turn that does not start with the template's generation header; "" = every turn does."""

    def extend(self, *parts: TextPart, rendered: RenderedText, changed: str) -> Rendering:
        """Returns the sequence with more parts."""
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
    """Returns the sequences of a conversation, split into context and the assistant's text.

    Args:
        template: renders the messages.
        messages: the conversation.
        first: messages before this index are context, whatever their role.
        silent: train the end token of an empty turn.
        row: the row number for error messages.
        options: more arguments of the template, e.g. tools.
    Returns: a Rendering for each sequence: usually one, several if the template forks, none if no turn is trained.
    """
    renderings: list[Rendering] = []
    text, has_untrained = "", any(m["role"] == "assistant" for m in messages[:first])
    for place in range(first, len(messages)):
        turn = messages[place]
        if turn["role"] != "assistant":
            continue
        if not (silent or _has_content(turn)):
            has_untrained = True
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
                f"the generation header of message {place} is {before[len(common) :]!r}, and the turn starts with "
                f"{after[len(common) :][:80]!r}"
            )
            before = common
        rendered = RenderedText(after, place + 1, options)
        turn_part = TextPart(after[len(before) :], trained=True)
        if renderings and before.startswith(text):
            renderings[-1] = renderings[-1].extend(
                TextPart(before[len(text) :], False, has_untrained), turn_part, rendered=rendered, changed=changed
            )
        else:
            has_untrained = has_untrained or bool(renderings)
            renderings.append(Rendering((TextPart(before, False, has_untrained), turn_part), rendered, changed))
        text, has_untrained = after, False
    return renderings


def render_as_one(
    template: ChatTemplate, messages: Sequence[Message], *, row: int = 0, **options: Any
) -> list[Rendering]:
    """Returns a conversation as one sequence in which every token is trained. Args, Returns: see `render_turns`."""
    text = template.text(messages, row=row, **options)
    return [Rendering((TextPart(text, trained=True),), RenderedText(text, len(messages), options))]


def make_rendered_sequence(
    template: ChatTemplate,
    messages: Sequence[Message],
    rendering: Rendering,
    ids: Sequence[Sequence[int]],
    row: int = 0,
) -> TrainSequence:
    """Returns the token ids and the mask of a sequence.

    If the template marks the assistant's text ({% generation %}), only the marked text is trained.

    Args: template, messages, row: see `render_turns`. rendering: one of its sequences. ids: the ids of each part.
    Raises: DataError: the marks and the turns contradict each other.
    """
    parts = rendering.parts
    masks = [np.full(len(i), p.trained) for i, p in zip(ids, parts, strict=True)]
    if template.has_marks and len(parts) > 1:
        rendered = rendering.rendered
        marked_ids, marks = template.marked(messages[: rendered.messages], row, **rendered.options)
        if marked_ids == [token for part in ids for token in part]:
            masks = _intersect_marks(template, parts, ids, masks, marks, row)
    return make_sequence(list(zip(ids, masks, strict=True)))


def make_sequence(parts: Sequence[tuple[Sequence[int] | np.ndarray, Any]]) -> TrainSequence:
    """Returns a sequence from its parts: (token ids, whether they are trained: one bool, or one for each id).

    The prefix ends before the first trained token, and has at least one token.

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


def _has_content(turn: Message) -> bool:
    """Returns whether a turn has text other than white space, or tool calls."""
    content = turn.get("content")
    text = content.strip() if isinstance(content, str) else content
    return bool(text or any(turn.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")))


def _intersect_marks(
    template: ChatTemplate,
    parts: Sequence[TextPart],
    ids: Sequence[Sequence[int]],
    masks: Sequence[np.ndarray],
    marks: Sequence[bool],
    row: int,
) -> list[np.ndarray]:
    """Returns the masks of the tokens that are both in a trained turn and marked; a marked header is accepted, but not
    trained.

    Raises: DataError: a trained turn has no marked token, or text outside the assistant's turns is marked.
    """
    trained, start = [], 0
    for part, part_ids, mask in zip(parts, ids, masks, strict=True):
        marked = np.asarray(marks[start : start + len(part_ids)], dtype=bool)
        start += len(part_ids)
        runs = [is_marked for is_marked, _ in groupby(marked.tolist())]
        if part.trained and not marked.any():
            problem = f"nothing of the turn {format_value(part.text, 80)}"
        elif not part.trained and not part.has_untrained_turns and True in runs[:-1]:
            wrong = [i for i, is_marked in zip(part_ids, marked, strict=True) if is_marked]
            problem = f"{format_value(str(template.tokenizer.decode(wrong)), 80)}, which is not in an assistant's turn"
        else:
            trained.append(mask & marked)
            continue
        raise DataError(
            f"row {row}: the chat template's {{% generation %}} marks {problem}; repair the marks, or remove them from "
            "the template, and the assistant's text is found by its turns"
        )
    return trained
