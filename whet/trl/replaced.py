"""A `generate` that was put in the model's own place on the instance: rollouts are its, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.types import Completion, Group, Prompt

__all__ = ["generated", "is_replaced"]


def is_replaced(module: nn.Module) -> bool:
    """Whether the instance has a `generate` of its own."""
    return "generate" in vars(module)


def generated(
    module: nn.Module,
    prompts: Sequence[Prompt],
    number: int,
    *,
    end_ids: Sequence[int],
    pad_id: int,
    options: dict[str, Any],
    version: int,
) -> list[Group]:
    """Groups whose completions `module.generate` made, called as TRL calls it: left-padded copies of each prompt.

    Args: number: completions of each. end_ids: that end a completion, and are part of it. options: of the generation
        configuration. version: of the weights.
    """
    from transformers import GenerationConfig

    copies = [p for p in prompts for _ in range(number)]
    width = max(len(p.tokens) for p in copies)
    device = next(module.parameters()).device
    ids = torch.full((len(copies), width), pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(copies):
        own = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)
        ids[row, width - len(own) :], mask[row, width - len(own) :] = own, 1
    config = GenerationConfig(eos_token_id=list(end_ids), pad_token_id=pad_id, do_sample=True, **options)
    with torch.no_grad():
        found: Any = module.generate(input_ids=ids, attention_mask=mask, generation_config=config, disable_compile=True)  # pyright: ignore
    rows = (found if isinstance(found, torch.Tensor) else found.sequences)[:, width:].cpu().numpy()
    done = [_completion(row, place % number, end_ids, pad_id, version) for place, row in enumerate(rows)]
    return [Group(prompt=p, completions=tuple(done[i * number : (i + 1) * number])) for i, p in enumerate(prompts)]


def _completion(row: np.ndarray, generation: int, end_ids: Sequence[int], pad_id: int, version: int) -> Completion:
    """A row of ids up to its first end token; a row that has none ends with its last id, padding left out."""
    ends = np.flatnonzero(np.isin(row, list(end_ids)))
    tokens = row[: ends[0] + 1] if len(ends) else row
    while len(tokens) > 1 and not len(ends) and tokens[-1] == pad_id:
        tokens = tokens[:-1]
    return Completion(
        tokens=tokens.astype(np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason="stop" if len(ends) else "length",
        generation=generation,
    )
