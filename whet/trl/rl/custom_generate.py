"""Rollouts by a `generate` that the user replaced, on the model or in its class, or by beam search, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.rollout.base import Output, Request
from whet.rollout.driver import Episode
from whet.types import Completion, Group

__all__ = ["find_custom_generate", "generate_groups"]


def find_custom_generate(*modules: nn.Module) -> nn.Module | None:
    """The first of a model's forms (PEFT's, its own) with a `generate` that is not transformers'; None = none has."""
    return next((module for module in modules if "generate" in vars(module) or _of_its_class(module)), None)


def _of_its_class(module: nn.Module) -> bool:
    """Whether the class of a model has a `generate` of the user's."""
    own = getattr(type(module), "generate", None)
    return own is not None and getattr(own, "__module__", "").partition(".")[0] not in ("peft", "transformers")


def generate_groups(
    module: nn.Module,
    episodes: Sequence[Episode],
    number: int,
    *,
    end_ids: Sequence[int],
    pad_id: int,
    options: dict[str, Any],
    version: int,
) -> list[Group]:
    """Groups whose turns `module.generate` made, called as TRL calls it: with all episodes that wait for a turn.

    Args: episodes: of each prompt so many as `number` says, one after the other. end_ids: that end a turn, and are part
        of it. options: of the generation configuration. version: of the weights.
    """
    made: dict[int, Any] = {}
    playing = [(place, episode.play(episode)) for place, episode in enumerate(episodes)]
    waiting: list[tuple[int, Any, Request]] = [(place, turns, next(turns)) for place, turns in playing]
    while waiting:
        rows = _rows(module, [request.tokens for *_, request in waiting], end_ids, pad_id, options)
        asked, waiting = waiting, []
        for (place, turns, request), row in zip(asked, rows, strict=True):
            try:
                waiting.append((place, turns, turns.send(_output(row, request, end_ids, pad_id, version))))
            except StopIteration as end:
                made[place] = end.value
    return [
        Group(prompt=episodes[i].prompt, completions=tuple(_one(made[i + g]) for g in range(number)))
        for i in range(0, len(episodes), number)
    ]


def _one(found: Any) -> Completion:
    """An episode here is one sequence."""
    return found if isinstance(found, Completion) else found[0]


def _rows(
    module: nn.Module, contexts: Sequence[np.ndarray], end_ids: Sequence[int], pad_id: int, options: dict[str, Any]
) -> np.ndarray:
    """Int [rows, C]: what `generate` puts after left-padded contexts."""
    from transformers import GenerationConfig

    width = max(map(len, contexts))
    device = next(module.parameters()).device
    ids = torch.full((len(contexts), width), pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        own = torch.from_numpy(context.astype(np.int64)).to(device)
        ids[row, width - len(own) :], mask[row, width - len(own) :] = own, 1
    config = GenerationConfig(
        eos_token_id=list(end_ids), pad_token_id=pad_id, do_sample=True, disable_compile=True, **options
    )
    with torch.no_grad():
        found: Any = module.generate(input_ids=ids, attention_mask=mask, generation_config=config)  # pyright: ignore
    return (found if isinstance(found, torch.Tensor) else found.sequences)[:, width:].cpu().numpy()


def _output(row: np.ndarray, request: Request, end_ids: Sequence[int], pad_id: int, version: int) -> Output:
    """A row of ids up to its first end token; a row that has none ends with its last id, padding left out.

    A turn after the first is cut where the completion is full, since `generate` is not told of it.
    """
    ends = np.flatnonzero(np.isin(row, list(end_ids)))
    tokens = row[: ends[0] + 1] if len(ends) else row
    while len(tokens) > 1 and not len(ends) and tokens[-1] == pad_id:
        tokens = tokens[:-1]
    cut = request.draw > 0 and len(tokens) > request.sampling.max_tokens
    tokens = tokens[: request.sampling.max_tokens] if cut else tokens
    return Output(
        id=request.id,
        tokens=tokens.astype(np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason="stop" if len(ends) and not cut else "length",
    )
