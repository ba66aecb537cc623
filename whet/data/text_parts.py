"""The token ids of a text in parts, so that each part has ids of its own.

A part is encoded as the model would be given it and would say it: a token never spans two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from whet.errors import DataError, format_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["decode_ids", "encode_parts", "leading_special_ids"]


def encode_parts(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], row: int = 0) -> list[list[int]]:
    """The ids of each part; together they are the whole text's.

    Where a token of the whole text would span two parts, each is encoded alone. Tokenizers that put a blank before
    every text are held off it.

    Args: tokenizer: of transformers; it adds no special tokens. parts: of one text. row: for the message of an error.
    Raises: DataError: the parts' ids together are another text.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode_parts(byte_tokenizer(), ["2+2=", "4"])
    [[50, 43, 50, 61], [52]]
    """
    whole, *each = _encode(tokenizer, ["".join(parts), *parts])
    if list(chain.from_iterable(each)) == whole:
        return each
    begins = _encode(tokenizer, list(accumulate(parts))[:-1])
    if all(whole[: len(begin)] == begin for begin in begins):
        ends = [0, *map(len, begins), len(whole)]
        return [whole[start:end] for start, end in pairwise(ends)]
    alone = [each[0], *(_without_blank(tokenizer, part) for part in parts[1:])]
    text = decode_ids(tokenizer, whole)
    for ids in (each, alone):
        if decode_ids(tokenizer, chain.from_iterable(ids)) == text:
            return ids
    raise DataError(
        f"row {row}: the tokenizer joins what stands before an answer with the answer, and gives another text where "
        f"they are apart: {format_value(decode_ids(tokenizer, chain.from_iterable(alone)), 400)} instead of "
        f"{format_value(text, 400)}; begin the answer with a line feed or end the prompt without a blank"
    )


def leading_special_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The special tokens that the tokenizer puts before a text, e.g. its bos."""
    ids = list(tokenizer(text, verbose=False).input_ids)
    (plain,) = _encode(tokenizer, [text])
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []


def _without_blank(tokenizer: PreTrainedTokenizerBase, part: str) -> list[int]:
    """The ids of a part as they are after a line feed."""
    before, both = _encode(tokenizer, ["\n", "\n" + part])
    return both[len(before) :] if both[: len(before)] == before else both


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    batch: Any = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts else []
    return [list(ids) for ids in batch]


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """The text of ids, special tokens visible."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
