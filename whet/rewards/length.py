"""Reward functions of length, in tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["overlong"]


def overlong(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_response_length: int = 20480,
    overlong_buffer_length: int = 4096,
    overlong_buffer_penalty: float = 1.0,
) -> list[float]:
    """Soft punishment of completions that come near the limit of length.

    R(y) = −p · clip((|y| − (L − B)) / B, 0, 1), |y| the tokens of the completion, its stop token included: 0 up to
    L − B, then falling in a line to −p at L, and −p beyond it.

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
