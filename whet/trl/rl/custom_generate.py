"""Rollouts by the model's own `generate`: a user has replaced it, or asks for beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from whet.rollout.base import Output, Request
from whet.rollout.driver import Episode
from whet.rollout.external_calls import ExternalCall, ExternalCalls
from whet.types import Completion, Group

__all__ = ["find_custom_generate", "generate_groups"]


def find_custom_generate(*modules: nn.Module) -> nn.Module | None:
    """Returns the first module with a `generate` that is not from transformers or PEFT; None if there is none.

    Args: modules: the model, with and without PEFT's wrapper.
    """

    def is_custom(module: nn.Module) -> bool:
        method = getattr(type(module), "generate", None)
        package = getattr(method, "__module__", "").partition(".")[0]
        return "generate" in vars(module) or (method is not None and package not in ("peft", "transformers"))

    return next(filter(is_custom, modules), None)


def generate_groups(
    module: nn.Module,
    episodes: Sequence[Episode],
    num_generations: int,
    *,
    end_ids: Sequence[int],
    pad_id: int,
    options: dict[str, Any],
    version: int,
) -> list[Group]:
    """Runs episodes by `module.generate`. As in TRL, each call generates the next turn of all unfinished episodes.

    The tools of a turn run together.

    Args:
        module: the model.
        episodes: num_generations episodes of each prompt in turn.
        end_ids: tokens that end a turn and belong to it.
        pad_id: the padding token.
        options: fields of the generation configuration.
        version: the version of the weights.
    Returns: a group for each prompt.
    """
    completions: dict[int, Completion] = {}
    turns = [episode.run(episode) for episode in episodes]
    waiting: list[tuple[int, Request]] = []
    calls = ExternalCalls()

    def resume(i: int, advance: Callable[[Any], Any], argument: Any) -> None:
        try:
            yielded = advance(argument)
        except StopIteration as end:  # an episode here has one sequence
            completions[i] = end.value if isinstance(end.value, Completion) else end.value[0]
            return
        if isinstance(yielded, ExternalCall):
            calls.start(i, yielded)
        else:
            waiting.append((i, yielded))

    try:
        for i, generator in enumerate(turns):
            resume(i, generator.send, None)
        while waiting or calls:
            requested, waiting = waiting, []
            if requested:
                rows = _generate(module, [request.tokens for _, request in requested], end_ids, pad_id, options)
                for (i, request), row in zip(requested, rows, strict=True):
                    resume(i, turns[i].send, _output(row, request, end_ids, pad_id, version))
            while calls:
                for result in calls.collect():
                    failed = result.error is not None
                    generator = turns[result.key]
                    resume(result.key, generator.throw if failed else generator.send, result.error or result.value)
    finally:
        calls.close()
    return [
        Group(prompt=episodes[i].prompt, completions=tuple(completions[i + g] for g in range(num_generations)))
        for i in range(0, len(episodes), num_generations)
    ]


def _generate(
    module: nn.Module, contexts: Sequence[np.ndarray], end_ids: Sequence[int], pad_id: int, options: dict[str, Any]
) -> np.ndarray:
    """Int [rows, C]: the tokens that `generate` appends to left-padded contexts."""
    from transformers import GenerationConfig

    width = max(map(len, contexts))
    device = next(module.parameters()).device
    ids = torch.full((len(contexts), width), pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        start = width - len(context)
        ids[row, start:], mask[row, start:] = torch.from_numpy(context.astype(np.int64)).to(device), 1
    config = GenerationConfig(
        eos_token_id=list(end_ids), pad_token_id=pad_id, do_sample=True, disable_compile=True, **options
    )
    with torch.no_grad():
        output: Any = module.generate(input_ids=ids, attention_mask=mask, generation_config=config)  # pyright: ignore
    return (output if isinstance(output, torch.Tensor) else output.sequences)[:, width:].cpu().numpy()


def _output(row: np.ndarray, request: Request, end_ids: Sequence[int], pad_id: int, version: int) -> Output:
    """Returns the output of a row: the ids up to the first end token; without an end token, all ids before the padding.

    A turn after the first is truncated to the completion's remaining tokens: `generate` does not know this limit.
    """
    ends = np.flatnonzero(np.isin(row, list(end_ids)))
    tokens = row[: ends[0] + 1] if len(ends) else row
    while len(tokens) > 1 and not len(ends) and tokens[-1] == pad_id:
        tokens = tokens[:-1]
    truncated = request.draw > 0 and len(tokens) > request.sampling.max_tokens
    tokens = tokens[: request.sampling.max_tokens] if truncated else tokens
    return Output(
        id=request.id,
        tokens=tokens.astype(np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason="stop" if len(ends) and not truncated else "length",
    )
