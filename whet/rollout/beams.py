"""Beam search, by transformers' own generate.

A beam is found, not drawn: there is no sampler's logprob. What is reported is the log-probability of each token of the
chosen beam under the model itself, at temperature 1, without penalties or processors.
Left out on purpose: beams that are sampled or diverse, and beams in the embedded engine.
Dim legend: n prompts, k completions of each, C completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from whet.errors import ConfigError
from whet.rollout.base import Output, Request, Sampling
from whet.rollout.options import thawed_options
from whet.rollout.requests import completed_string
from whet.types import FinishReason

__all__ = ["beam_search"]

Decode = Callable[[Sequence[int]], str]
Beam = tuple[np.ndarray, np.ndarray, Tensor, FinishReason]
"""Tokens and logprobs [C], logits [C, V], why it ended."""


def beam_search(module: nn.Module, batch: Sequence[Request], *, decode: Decode | None, version: int) -> list[Output]:
    """The best completions of prompts of equal lengths.

    Args: module: a model of transformers, in eval mode, under its own attention. batch: requests of equal lengths and
        one Sampling; generation g of a prompt is its g-th best beam. decode: ids to text, for stop strings. version:
        stamped on the tokens.
    Returns: an output for each request, in order.
    Raises: ConfigError: transformers refuses an option's value.
    """
    sampling = batch[0].sampling
    prompts = list(dict.fromkeys(r.tokens.tobytes() for r in batch))
    ids = torch.from_numpy(np.stack([np.frombuffer(p, batch[0].tokens.dtype) for p in prompts]).astype(np.int64))
    ids = ids.to(next(module.parameters()).device)
    each = max(r.address[3] for r in batch) + 1
    config = _config(sampling, each)
    stops = StoppingCriteriaList(
        [_StopStrings(decode, sampling.stop, ids.shape[1])] if sampling.stop and decode else []
    )
    with _plain_defaults(module):
        found: Tensor = module.generate(  # pyright: ignore[reportCallIssue]
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=stops
        )
    rows: dict[tuple[bytes, int], Beam] = {}
    for i, prompt in enumerate(prompts):
        for g in {r.address[3] for r in batch if r.tokens.tobytes() == prompt}:
            rows[prompt, g] = _row(module, found[i * each + g], ids.shape[1], sampling, decode)
    return [_output(r, rows[r.tokens.tobytes(), r.address[3]], version) for r in batch]


def _config(sampling: Sampling, each: int) -> GenerationConfig:
    """What is asked of generate: whet's fields under transformers' names, and the options."""
    fields: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens or None,
        "repetition_penalty": sampling.repetition_penalty,
        "suppress_tokens": list(sampling.forbidden_ids) or None,
        "eos_token_id": list(sampling.stop_ids) or None,
        "pad_token_id": sampling.stop_ids[0] if sampling.stop_ids else 0,
        "num_return_sequences": each,
    }
    try:
        config = GenerationConfig(**fields, **thawed_options(sampling))
        config.validate(strict=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generation_kwargs: {' '.join(str(error).split())}") from error
    return config


@contextmanager
def _plain_defaults(module: Any) -> Iterator[None]:
    """Keeps a model's own generation config, which generate would mix in, out of it for a while."""
    before = module.generation_config
    module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = before


def _row(module: nn.Module, row: Tensor, prompt: int, sampling: Sampling, decode: Decode | None) -> Beam:
    """One beam, cut where it ended."""
    made = row[prompt:].tolist()
    stop = next((i + 1 for i, t in enumerate(made) if t in sampling.stop_ids), None)
    length = stop or len(made)
    if sampling.stop and decode is not None:
        kept = completed_string(decode, made[:length], sampling.stop, fresh=length)
        stop = kept or stop
        length = kept or length
    ids = row[None, : prompt + length]
    logits = module(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, prompt:, None]).squeeze(1)
    return np.array(made[:length], np.int32), logprobs.cpu().numpy(), logits, "length" if stop is None else "stop"


def _output(request: Request, beam: Beam, version: int) -> Output:
    """What a request is given."""
    tokens, logprobs, logits, reason = beam
    return Output(
        id=request.id,
        tokens=tokens,
        logprobs=logprobs.astype(np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason=reason,
        logits=logits.cpu().numpy() if request.sampling.return_logits else None,
    )


class _StopStrings(StoppingCriteria):
    """Ends the beams in which a stop string is complete; asked after each token, it decodes the last few."""

    def __init__(self, decode: Decode, stop: Sequence[str], prompt: int) -> None:
        self._decode, self._stop, self._prompt = decode, stop, prompt
        self._ended: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        rows = [tuple(row) for row in input_ids[:, self._prompt :].tolist()]
        self._ended = {row for row in rows if row[:-1] in self._ended or self._completes(row)}
        return torch.tensor([row in self._ended for row in rows], device=input_ids.device)

    def _completes(self, row: tuple[int, ...]) -> bool:
        """Whether its last token completes a stop string."""
        return completed_string(self._decode, row, self._stop, fresh=1) is not None
