"""Between the token axis and Tunix's padded arrays: left-padded prompts [B, P], right-padded completions [B, C].

The one place where masks come from ids: a padded prompt is what follows its leading pads, a padded completion what
stands up to its first end id. Everywhere else lengths say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import DataError
from whet.types import TokenBatch, TrainExample

__all__ = ["check_ids", "completion_mask", "left_padded", "padded_batch", "prompt_mask", "unpacked"]


def left_padded(rows: Sequence[np.ndarray], pad_id: int) -> np.ndarray:
    """Rows of ids, padded on the left to the longest: int32 [B, P].

    >>> left_padded([np.array([5]), np.array([6, 7])], 0)
    array([[0, 5],
           [6, 7]], dtype=int32)
    """
    width = max(len(r) for r in rows)
    out = np.full((len(rows), width), pad_id, dtype=np.int32)
    for i, r in enumerate(rows):
        out[i, width - len(r) :] = r
    return out


def prompt_mask(ids: Tensor, pad_id: int) -> Tensor:
    """True from the first id that isn't padding: Bool [B, P]. A pad id inside a prompt is part of it.

    >>> prompt_mask(torch.tensor([[0, 5, 0, 6]]), 0)
    tensor([[False,  True,  True,  True]])
    """
    return (ids != pad_id).cummax(1).values.bool()


def completion_mask(ids: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """True up to and including the first end id, everywhere where there is none: Bool [B, C].

    >>> completion_mask(torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]]), [0])
    tensor([[ True,  True,  True, False],
            [ True,  True,  True,  True]])
    """
    ended = torch.isin(ids, torch.as_tensor(list(eos_ids), dtype=ids.dtype))
    return ended.long().cumsum(1) - ended.long() == 0


def padded_batch(
    prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_ids: Sequence[int]
) -> tuple[TokenBatch, Tensor]:
    """A TokenBatch of padded arrays, and where its tokens stood.

    Args: prompt_tokens: [B, P], left-padded. completion_tokens: [B, C], right-padded.
    Returns: the batch, and Bool [B, C], True where a token of it stands.
    Raises: DataError: shapes that don't fit.
    """
    prompts, completions = torch.as_tensor(prompt_tokens).long().cpu(), torch.as_tensor(completion_tokens).long().cpu()
    if prompts.dim() != 2 or completions.dim() != 2 or len(prompts) != len(completions):
        raise DataError(
            f"prompt_tokens {tuple(prompts.shape)} and completion_tokens {tuple(completions.shape)}: "
            "give [B, P] and [B, C] of the same B"
        )
    mask = completion_mask(completions, eos_ids)
    example = TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompt_mask(prompts, pad_id),
        completion_ids=completions,
        completion_mask=mask,
        advantages=torch.zeros(len(prompts)),
    )
    return TokenBatch.from_padded(example), mask


def check_ids(batch: TokenBatch, num_ids: int, name: str) -> TokenBatch:
    """The batch. Raises DataError: an id that its model does not know. Args: num_ids: it knows. name: the model's."""
    highest = max(int(x.max()) for x in (batch.prefixes, batch.tokens))
    if highest >= num_ids:
        raise DataError(f"token id {highest} is outside the {num_ids} ids that {name} knows; take its own tokenizer")
    return batch


def unpacked(column: Tensor, mask: Tensor) -> Tensor:
    """A column of the token axis back at its places: [B, C], 0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=column.dtype)
    out[mask] = column
    return out
