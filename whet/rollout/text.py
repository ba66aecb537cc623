"""Encoding of prompts before an engine, and decoding of completions after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.prompts import PromptEncoder
from whet.errors import DataError
from whet.types import Message, Prompt

__all__ = ["TextStream", "as_batch", "encode_prompts", "pad_left"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of a character with missing bytes."""


def as_batch(inputs: Any) -> Sequence[str] | Sequence[list[Message]]:
    """Returns a batch of texts or chats, from a batch or from a single one.

    >>> as_batch("hi"), as_batch([{"role": "user", "content": "hi"}])
    (['hi'], [[{'role': 'user', 'content': 'hi'}]])
    """
    is_one = isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], Mapping))
    return [inputs] if is_one else inputs


def encode_prompts(encoder: PromptEncoder, inputs: Sequence[str] | Sequence[list[Message]]) -> list[Prompt]:
    """Prompts of texts and chats, in order.

    Args: encoder: template and limits. inputs: texts, or lists of messages.
    Raises: DataError: nothing was given, or a prompt is over the encoder's limit.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> [p.tokens.tolist() for p in encode_prompts(PromptEncoder(byte_tokenizer()), ["a", "bc"])]
    [[97], [98, 99]]
    """
    if not inputs:
        raise DataError("there are no prompts; give at least one text or list of messages")
    encoded = [p for i, text in enumerate(inputs) if (p := encoder({"prompt": text}, i)) is not None]
    if len(encoded) != len(inputs):
        raise DataError(
            f"{len(inputs) - len(encoded)} prompts are longer than max_prompt_length={encoder.max_prompt_length}; "
            "raise it, or set on_long_prompt to truncate_left"
        )
    return encoded


def pad_left(rows: Sequence[np.ndarray], pad_id: int) -> np.ndarray:
    """Returns rows of ids, padded on the left to the longest: int32 [B, P].

    >>> pad_left([np.array([5]), np.array([6, 7])], 0)
    array([[0, 5],
           [6, 7]], dtype=int32)
    """
    width = max(len(r) for r in rows)
    out = np.full((len(rows), width), pad_id, dtype=np.int32)
    for i, r in enumerate(rows):
        out[i, width - len(r) :] = r
    return out


class TextStream:
    """Decodes a stream of tokens; an incomplete character waits for its remaining tokens.

    Args: decode: ids -> text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> stream.push([72, 195]), stream.push([169]), stream.push([195], last=True)
    ('', 'Hé', '�')
    """

    def __init__(self, decode: Callable[[Any], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context_start = self._num_decoded = 0

    def push(self, ids: Iterable[int], *, last: bool = False) -> str:
        """Returns the text that the next tokens add.

        Args: ids: the next tokens. last: no more tokens follow, so nothing waits.
        """
        self._ids += [int(i) for i in ids]
        before = self._decode(self._ids[self._context_start : self._num_decoded])
        text = self._decode(self._ids[self._context_start :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._context_start, self._num_decoded = self._num_decoded, len(self._ids)
        return text[len(before) :]
