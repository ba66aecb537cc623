"""What is kept of completions, of a step and of an evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.types import Group

__all__ = ["make_completion_columns"]


def make_completion_columns(
    groups: Sequence[Group],
    texts: Sequence[Sequence[Any]],
    rewards: Sequence[Any],
    written: Callable[[np.ndarray], str],
) -> dict[str, list[Any]]:
    """The columns of completions as RunFolder.write_completions takes them, but for `advantage`.

    Args: groups: completed. texts: the decoded completions of each. rewards: of each completion, end to end; NaN or
        None = none. written: a prompt's ids -> their text, special tokens visible.
    """
    pairs = [(g.prompt, c) for g in groups for c in g.completions]
    given = [p.tokens if c.prefix is None else c.prefix for p, c in pairs]
    shown = {id(ids): written(ids) for ids in {id(ids): ids for ids in given}.values()}  # once for each prompt
    return {
        "row": [p.row for p, _ in pairs],
        "generation": [c.generation for _, c in pairs],
        "prompt": [p.source for p, _ in pairs],
        "prompt_text": [shown[id(ids)] for ids in given],
        "prompt_tokens": given,
        "completion": [text for of_group in texts for text in of_group],
        "tokens": [c.tokens for _, c in pairs],
        "logprobs": [c.logprobs for _, c in pairs],
        "reward": list(rewards),
        "finish_reason": [c.finish_reason for _, c in pairs],
        "version": [int(c.versions.max()) for _, c in pairs],
        "info": [c.info for _, c in pairs],
    }
