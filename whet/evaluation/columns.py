"""What is kept of completions, of a step and of an evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.types import Group

__all__ = ["columns_of"]


def columns_of(groups: Sequence[Group], texts: Sequence[Sequence[Any]], rewards: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns of completions as RunFolder.write_completions takes them, but for `advantage`.

    Args: groups: completed. texts: the decoded completions of each. rewards: of each completion, end to end; NaN or
        None = none.
    """
    pairs = [(g.prompt, c) for g in groups for c in g.completions]
    return {
        "row": [p.row for p, _ in pairs],
        "generation": [c.generation for _, c in pairs],
        "prompt": [p.source for p, _ in pairs],
        "completion": [text for of_group in texts for text in of_group],
        "tokens": [c.tokens for _, c in pairs],
        "logprobs": [c.logprobs for _, c in pairs],
        "reward": list(rewards),
        "finish_reason": [c.finish_reason for _, c in pairs],
        "version": [int(c.versions.max()) for _, c in pairs],
        "info": [c.info for _, c in pairs],
    }
