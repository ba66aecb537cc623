"""Why a completion ends, and where: the rule behind every engine's finish_reason.

"stop"      a stop id was drawn (Sampling.stop_ids; the id is part of the completion), the decoded text has a stop
            string (Sampling.stop), or a constraint's language has come to its end
"length"    the completion has Sampling.max_tokens tokens
"abort"     `RolloutEngine.abort` ended it
"error"     a constraint allows no next token, another package's engine failed, or an environment did

`find_end` decides the first two for tokens that were drawn. A constraint's end is `Matcher.finish_reason`, which
`Grammars.advance` reads (constrained_decoding.py). There is no ignore_eos: the end ids of model and tokenizer become
stop_ids in `make_sampling` (build.py), and a request without stop_ids continues to max_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whet.rollout.base import Sampling
from whet.rollout.text import INCOMPLETE
from whet.types import FinishReason

__all__ = ["find_end", "find_stop_string"]

SLACK = 8
"""Characters at the start of a decoded tail, and where new tokens join it, that may differ from the whole text's: a
space that is stripped, a character that began earlier, a space that a tokenizer's clean-up
removes before an apostrophe."""

Decode = Callable[[Sequence[int]], str]


def find_end(
    sampling: Sampling,
    tokens: Sequence[int] | np.ndarray,
    *,
    new: int,
    decode: Decode | None = None,
    earlier: Sequence[int] | np.ndarray = (),
) -> tuple[int, FinishReason] | None:
    """Returns where and why a completion ends: at its first stop id, its first stop string, or max_tokens.

    Args:
        sampling: of the request.
        tokens: [C], the tokens drawn for the request so far.
        new: the number of tokens since the last call; the earlier ones do not end the completion.
        decode: ids -> text, for stop strings.
        earlier: tokens of the completion that were part of the request (Request.offset); a stop string may start in
            them.
    Returns: (tokens to keep, finish_reason); None = the completion continues.

    >>> sampling = Sampling(max_tokens=4, stop_ids=(2,))
    >>> find_end(sampling, [7, 8], new=2), find_end(sampling, [7, 2, 9], new=3), find_end(sampling, [7] * 4, new=1)
    (None, (2, 'stop'), (4, 'length'))
    """
    count = len(tokens)
    end = next((i + 1 for i in range(count - new, count) if tokens[i] in sampling.stop_ids), None)
    if sampling.stop and decode is not None and new:
        tokens_to_end = tokens if end is None else tokens[:end]
        completion = (
            np.concatenate([np.asarray(earlier, np.int64), np.asarray(tokens_to_end, np.int64)])
            if len(earlier)
            else tokens_to_end
        )
        place = find_stop_string(decode, completion, sampling.stop, new=new - (count - len(tokens_to_end)))
        end = end if place is None else place - len(earlier)
    if end is not None and end <= sampling.max_tokens:
        return end, "stop"
    return (sampling.max_tokens, "length") if count >= sampling.max_tokens else None


def find_stop_string(
    decode: Decode, tokens: Sequence[int] | np.ndarray, stop: Sequence[str], *, new: int
) -> int | None:
    """Returns how many tokens of a completion to keep because one of them completes a stop string.

    Only a tail of the text is decoded, so that the cost does not grow with the completion. The tail begins at the first
    byte of a character, and far enough back that the text in which a new string can lie equals that of the whole. (A
    tokenizer that writes unknown characters as bytes may drop a long row of them because one is broken; a tail may
    begin after that one.)

    Args:
        decode: ids -> text.
        tokens: the completion so far.
        stop: the strings.
        new: the number of tokens since the last call; the earlier ones complete no string.
    Returns: the number of tokens to keep, up to the one that completes a string; None = no string is complete.

    >>> find_stop_string(lambda ids: "".join(map(chr, ids)), [97, 98, 99, 100], ["bc", "d"], new=3)
    3
    """
    count = len(tokens)
    first, start = _tail(decode, tokens, count - new, max(len(s) for s in stop))
    ids = [int(t) for t in tokens[first:]]

    def complete(kept: int) -> bool:
        text = decode(ids[: kept - first])
        return any(text.find(s, start) >= 0 for s in stop)

    if not complete(count):
        return None
    return next((kept for kept in range(count - new + 1, count) if complete(kept)), count)


def _tail(decode: Decode, tokens: Sequence[int] | np.ndarray, end: int, longest: int) -> tuple[int, int]:
    """Returns the tail to decode when looking for strings that the tokens from `end` on complete.

    Args: longest: characters of the longest string.
    Returns: the first token of the tail, and the first character of its text at which such a string may begin.
    """
    needed = longest + SLACK
    first = end - needed - SLACK
    while first > 0:
        text = decode([int(t) for t in tokens[first:end]])
        length = len(text.rstrip(INCOMPLETE))
        if length < needed + SLACK:
            first -= end - first
        elif text.startswith(INCOMPLETE):  # within a character
            first -= 1
        else:
            return first, length - needed
    return 0, 0
