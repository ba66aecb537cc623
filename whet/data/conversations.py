"""From a conversation to what is trained of it: which tokens the assistant said, found by rendering turn by turn.

What the template writes for the messages before a turn, with the assistant's header at its end, is the turn's context;
what it then writes more is what the assistant said, with the end mark and the line feed after it, where there are some.
Where a longer conversation does not begin as the shorter one did (templates that leave out earlier thinking), it is
another sequence: each turn is trained once, in the context in which it is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.data.templates import ChatTemplate
from whet.errors import DataError
from whet.types import Message, TrainSequence

__all__ = ["Part", "conversation_parts", "sequence_of"]


@dataclass(frozen=True)
class Part:
    """A stretch of a sequence's text. Example: Part("4<end>", trained=True)."""

    text: str
    trained: bool


def conversation_parts(
    template: ChatTemplate, messages: Sequence[Message], *, first: int = 0, row: int = 0, **options: Any
) -> list[list[Part]]:
    """The sequences of a conversation, each as the parts of its text.

    Args:
        template: writes the messages.
        messages: the conversation.
        first: messages before this place are context, whoever said them.
        row: for the message of an error.
        options: further arguments of the template, e.g. tools.
    Returns: a list for each sequence: context, what the assistant said, context, ...; one, unless the template forks.
    """
    sequences: list[list[Part]] = []
    text = ""
    for place in range(first, len(messages)):
        if messages[place]["role"] != "assistant":
            continue
        before = template.text(messages[:place], asks=True, row=row, **options)
        after = template.text(messages[: place + 1], row=row, **options)
        if not after.startswith(before):
            raise DataError(f"row {row}: the template's turn does not begin with the header that it asks with")
        if not sequences or not before.startswith(text):
            sequences.append([])
            text = ""
        sequences[-1] += [Part(before[len(text) :], False), Part(after[len(before) :], True)]
        text = after
    return sequences


def sequence_of(parts: Sequence[tuple[Sequence[int], bool]]) -> TrainSequence:
    """A sequence from its parts: (token ids, whether they are trained).

    >>> s = sequence_of([([5, 6], False), ([7, 2], True)])
    >>> s.prefix.tolist(), s.tokens.tolist(), s.mask.tolist()
    ([5, 6], [7, 2], [True, True])
    """
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), trained) for ids, trained in parts])
    start = max(1, int(np.argmax(mask)) if mask.any() else len(ids) - 1)
    made = ids[:start], ids[start:], mask[start:]
    for array in made:
        array.setflags(write=False)
    return TrainSequence(prefix=made[0], tokens=made[1], mask=made[2])
