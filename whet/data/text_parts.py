"""Tokenises a text in parts, such as a prompt and its answer: no token spans two parts.

The ids are those that the model would read as a prompt and generate as an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, Any

from whet.data.tokenizer import encode_texts
from whet.errors import DataError, format_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["align_parts", "decode_ids", "leading_special_ids", "tokenize_parts"]


def tokenize_parts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Tokenises several texts in one call of the tokenizer. Args: texts: the parts of each text.

    Returns: for each text, the ids of the full text and those of each part, for `align_parts`.
    """
    ids = iter(_encode(tokenizer, [text for parts in texts for text in ("".join(parts), *parts)]))
    return [list(islice(ids, 1 + len(parts))) for parts in texts]


def align_parts(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], ids: Sequence[list[int]], row: int = 0
) -> list[list[int]]:
    """Returns the ids of each part of a text, so that no token spans two; together they are the ids of the full text.

    If a token of the full text would span two parts, the parts are tokenised separately, without the space that some
    tokenizers put before every text.

    Args: tokenizer: of transformers; it adds no special tokens. parts: the parts of one text. ids: of `tokenize_parts`.
        row: the row number for error messages.
    Raises: DataError: the ids of the parts together are another text.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> align_parts(byte_tokenizer(), ["2+2=", "4"], tokenize_parts(byte_tokenizer(), [["2+2=", "4"]])[0])
    [[50, 43, 50, 61], [52]]
    """
    full, *each = ids
    if list(chain.from_iterable(each)) == full:
        return each
    prefixes = _encode(tokenizer, list(accumulate(parts))[:-1])
    if all(full[: len(prefix)] == prefix for prefix in prefixes):
        ends = [0, *map(len, prefixes), len(full)]
        return [full[start:end] for start, end in pairwise(ends)]
    separate = [each[0], *(_encode_after_newline(tokenizer, part) for part in parts[1:])]
    text = decode_ids(tokenizer, full)
    for candidate in (each, separate):
        if decode_ids(tokenizer, chain.from_iterable(candidate)) == text:
            return candidate
    raise DataError(
        f"row {row}: the tokenizer merges the prompt and the answer at their border, and separate ids give another "
        f"text: {format_value(decode_ids(tokenizer, chain.from_iterable(separate)), 400)} instead of "
        f"{format_value(text, 400)}; start the answer with a line feed, or end the prompt without a space"
    )


def leading_special_ids(with_special: Sequence[int], plain: Sequence[int]) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text, e.g. bos.

    Args: with_special: ids of the text with special tokens. plain: ids without.

    >>> leading_special_ids([1, 7, 8, 2], [7, 8])
    [1]
    """
    for start in range(len(with_special) - len(plain) + 1):
        if list(with_special[start : start + len(plain)]) == list(plain):
            return list(with_special[:start])
    return []


def _encode_after_newline(tokenizer: PreTrainedTokenizerBase, part: str) -> list[int]:
    """Returns the ids of a part after a line feed, where tokenizers add no space."""
    before, both = _encode(tokenizer, ["\n", "\n" + part])
    return both[len(before) :] if both[: len(before)] == before else both


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return encode_texts(tokenizer, texts, add_special_tokens=False)


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """Returns the text of token ids, with special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
