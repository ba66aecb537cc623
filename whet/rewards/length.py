"""Reward functions of the length of a completion, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.errors import ConfigError
from whet.rewards.text import text_of

__all__ = ["overlong", "within_length"]


def overlong(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_response_length: int = 20480,
    overlong_buffer_length: int = 4096,
    overlong_buffer_penalty: float = 1.0,
) -> list[float]:
    """Returns a soft penalty for completions near the length limit.

    R(y) = −p · clip((|y| − (L − B)) / B, 0, 1), |y| the tokens of the completion, its stop token included: 0 up to
    L − B, then linear to −p at L, and −p beyond.

    Args:
        completion_ids [N]: the tokens of each completion.
        max_response_length: L. overlong_buffer_length: B. overlong_buffer_penalty: p.
    Returns: [N], between −p and 0.
    Source: DAPO, arXiv:2503.14476, equation 13, times p; agrees with TRL's get_soft_overlong_punishment. Tunix counts
        characters, and goes below −p beyond L.

    >>> lengths = [[0] * n for n in (80, 90, 100, 110)]
    >>> overlong(lengths, max_response_length=100, overlong_buffer_length=20, overlong_buffer_penalty=10.0)
    [0.0, -5.0, -10.0, -10.0]
    """
    free = max_response_length - overlong_buffer_length
    over = [min(max(len(ids) - free, 0), overlong_buffer_length) for ids in completion_ids]
    return [0.0 - overlong_buffer_penalty * n / overlong_buffer_length for n in over]


def within_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    min_tokens: int = 1,
    max_tokens: int = 512,
    falloff_tokens: int = 256,
) -> list[float]:
    """1 for a completion with a length within bounds; outside it falls linearly to 0.

    r(y) = clip(1 − max(l − |y|, |y| − h, 0) / (f + 1), 0, 1), |y| the tokens of the completion, its stop token
    included; 0 for an empty completion.

    Args:
        completions [N]: texts or messages. completion_ids [N]: their tokens.
        min_tokens: l. max_tokens: h. falloff_tokens: f, the number of tokens outside the bounds with a reward above 0.
    Returns: [N], between 0 and 1.
    Raises: ConfigError: no length is within the bounds.

    >>> lengths = [[0] * n for n in (80, 100, 105, 110, 80)]
    >>> within_length(["a", "a", "a", "a", ""], lengths, max_tokens=100, falloff_tokens=9)
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    integers = all(isinstance(bound, int) for bound in (min_tokens, max_tokens, falloff_tokens))
    if not (integers and 0 <= min_tokens <= max_tokens and falloff_tokens >= 0):
        raise ConfigError(
            f"min_tokens={min_tokens}, max_tokens={max_tokens}, falloff_tokens={falloff_tokens}: no length is within; "
            "give whole numbers, 0 <= min_tokens <= max_tokens, and falloff_tokens of at least 0"
        )
    off = [max(min_tokens - len(ids), len(ids) - max_tokens, 0) for ids in completion_ids]
    has_text = [bool(text_of(completion).strip()) for completion in completions]
    return [max(0.0, 1.0 - n / (falloff_tokens + 1)) if some else 0.0 for n, some in zip(off, has_text, strict=True)]
