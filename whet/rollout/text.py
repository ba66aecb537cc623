"""Encoding of prompts before an engine, and decoding of completions after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.errors import DataError
from whet.packing.padded import left_padded
from whet.types import Group, Message, Prompt, RolloutOutput

__all__ = ["TextStream", "encode_texts", "one_or_many", "rollout_output"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of a character with missing bytes."""


def one_or_many(inputs: Any) -> Sequence[str] | Sequence[list[Message]]:
    """A batch of texts or chats, from a batch or from a single one.

    >>> one_or_many("hi"), one_or_many([{"role": "user", "content": "hi"}])
    (['hi'], [[{'role': 'user', 'content': 'hi'}]])
    """
    is_one = isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], Mapping))
    return [inputs] if is_one else inputs


def encode_texts(encoder: PromptEncoder, inputs: Sequence[str] | Sequence[list[Message]]) -> list[Prompt]:
    """Prompts of texts and chats, in order.

    Args: encoder: template and limits. inputs: texts, or lists of messages.
    Raises: DataError: nothing was given, or a prompt is over the encoder's limit.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> [p.tokens.tolist() for p in encode_texts(PromptEncoder(byte_tokenizer()), ["a", "bc"])]
    [[97], [98, 99]]
    """
    if not inputs:
        raise DataError("no prompts were given; give at least one text or list of messages")
    encoded = [p for i, text in enumerate(inputs) if (p := encoder({"prompt": text}, i)) is not None]
    if len(encoded) != len(inputs):
        raise DataError(
            f"{len(inputs) - len(encoded)} prompts are longer than max_prompt_length={encoder.max_prompt_length}; "
            "raise it, or set on_long_prompt to truncate_left"
        )
    return encoded


def rollout_output(
    groups: Sequence[Group],
    decode: Callable[[Any], str],
    pad_id: int,
    *,
    logprobs: bool = True,
    logits: bool = False,
) -> RolloutOutput:
    """Completions as texts and arrays, prompt by prompt, generations of a prompt one after the other.

    Args:
        groups: completed.
        decode: ids -> text.
        pad_id: fills the prompts.
        logprobs, logits: whether to give them.
    """
    done = [c for g in groups for c in g.completions]
    return RolloutOutput(
        text=[decode(c.tokens) for c in done],
        logits=[c.logits for c in done] if logits else None,  # pyright: ignore[reportArgumentType]
        tokens=[c.tokens for c in done],
        left_padded_prompt_tokens=left_padded([g.prompt.tokens for g in groups for _ in g.completions], pad_id),
        logprobs=[c.logprobs for c in done] if logprobs else None,
    )


class TextStream:
    """Text of tokens that come in pieces; a character that is not whole yet waits for its rest.

    Args: decode: ids -> text.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    >>> stream.push([72, 195]), stream.push([169]), stream.push([195], last=True)
    ('', 'Hé', '�')
    """

    def __init__(self, decode: Callable[[Any], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._from = self._shown = 0

    def push(self, ids: Iterable[int], *, last: bool = False) -> str:
        """The text that the next tokens add.

        Args: ids: the next tokens. last: no more tokens follow, so that nothing waits.
        """
        self._ids += [int(i) for i in ids]
        before = self._decode(self._ids[self._from : self._shown])
        text = self._decode(self._ids[self._from :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return text[len(before) :]
