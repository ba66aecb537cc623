"""The stored columns of completions, for a training step and for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.types import Group

__all__ = ["make_completion_columns", "turn_spans"]


def make_completion_columns(
    groups: Sequence[Group],
    texts: Sequence[Sequence[Any]],
    rewards: Sequence[Any],
    decode: Callable[[np.ndarray], str],
) -> dict[str, list[Any]]:
    """Returns the columns of completions as RunFolder.write_completions takes them, without `advantage`.

    Args:
        groups: prompts with their completions.
        texts: the decoded completions of each group.
        rewards: one for each completion, over all groups in order; NaN or None = no reward.
        decode: a prompt's ids -> their text, special tokens included.
    """
    pairs = [(g.prompt, c) for g in groups for c in g.completions]
    prompt_ids = [p.tokens if c.prefix is None else c.prefix for p, c in pairs]
    turns = [turn_spans(c.versions) for _, c in pairs]
    prompt_texts = {id(ids): decode(ids) for ids in {id(ids): ids for ids in prompt_ids}.values()}  # once per prompt
    return {
        "row": [p.row for p, _ in pairs],
        "generation": [c.generation for _, c in pairs],
        "prompt": [p.source for p, _ in pairs],
        "prompt_text": [prompt_texts[id(ids)] for ids in prompt_ids],
        "prompt_tokens": prompt_ids,
        "completion": [text for group_texts in texts for text in group_texts],
        "tokens": [c.tokens for _, c in pairs],
        "logprobs": [c.logprobs for _, c in pairs],
        "reward": list(rewards),
        "finish_reason": [c.finish_reason for _, c in pairs],
        "version": [int(c.versions.max()) for _, c in pairs],
        "versions": [c.versions for _, c in pairs],
        "turn_starts": [starts for starts, _ in turns],
        "turn_ends": [ends for _, ends in turns],
        "info": [c.info for _, c in pairs],
        "seconds": [{name: round(spent, 3) for name, spent in c.seconds.items()} for _, c in pairs],
    }


def turn_spans(versions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the turns of the model in a sequence: turn i is the tokens starts[i] to ends[i], without the latter.

    Args: versions: int [C], -1 = not sampled. Two turns with no token between them are one.

    >>> starts, ends = turn_spans(np.array([3, 3, -1, -1, 3]))
    >>> starts.tolist(), ends.tolist()
    ([0, 4], [2, 5])
    """
    changes = np.diff((versions >= 0).astype(np.int8), prepend=0, append=0)
    return (changes == 1).nonzero()[0], (changes == -1).nonzero()[0]
