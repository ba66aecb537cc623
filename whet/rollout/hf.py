"""The naive engine: the model's own forward and cache, one batch of equal lengths at a time.

It takes any causal language model of transformers, also those that whet's attention does not fit, and it is what
every other engine is tested against. Only requests of equal lengths and one Sampling run together, so there is no
padding that a stateful model could take in.
Options of transformers' generate that whet has no field for (Sampling.generation_kwargs) work here, and here alone.
Left out on purpose: continuous batching, shared prompts.
Dim legend: n rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.modes import evaluating, max_positions, native_attention
from whet.ops.counter_rng import address_key, uniform
from whet.rollout.base import EngineCaps, Output, Request
from whet.rollout.constrained_decoding import Grammars, Matcher
from whet.rollout.engine.sampler import sample_rows, seen_tokens
from whet.rollout.generate_options import beam_search, check_options, num_beams, processors
from whet.rollout.queue_engine import QueueEngine
from whet.rollout.requests import SamplingPlan, check_request, completed_string, make_plan

__all__ = ["HFEngine"]

CACHES = ("past_key_values", "cache_params")
"""What models call their cache, in their outputs and as an argument: most of them, and Mamba's relatives. RWKV's
`state` is left out: with it transformers 5.23 mixes up the rows of a batch."""


class HFEngine(QueueEngine):
    """transformers' forward in a loop.

    Args: model: a causal language model, or a LoadedModel. decode: ids -> text, needed for stop strings only.
        batch_size: requests run together where their lengths and Sampling are equal. grammars: the tokenizer's, needed
        for constraints only.
    Raises: ConfigError: batch_size below 1.

    Example: `engine.submit([Request(...)]); outputs = engine.step()`, until step gives [].
    """

    caps = EngineCaps(
        shared_weights=True,
        addressed=True,
        abort=True,
        sleep=True,
        logits=True,
        generation_kwargs=True,
        constraints=True,
    )

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        batch_size: int = 64,
        grammars: Grammars | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size {batch_size} must be at least 1")
        super().__init__("hf", max_batch=batch_size)
        self._module = model.module if isinstance(model, LoadedModel) else model
        self._vocabulary = int(self._module.get_input_embeddings().weight.shape[0])  # pyright: ignore
        self._positions = max_positions(self._module)
        self._decode, self._batch_size, self._grammars = decode, batch_size, grammars
        takes = inspect.signature(self._module.forward).parameters
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in takes else {})
        """Of a forward pass; the logits of all tokens of a prompt would be the largest thing in memory."""

    def _check(self, request: Request) -> None:
        """Raises EngineError or ConfigError for a request that could never be served."""
        check_request(
            request,
            vocabulary=self._vocabulary,
            positions=self._positions,
            decodes=self._decode is not None,
            constrains=self._grammars is not None,
        )
        make_plan(request.sampling)
        check_options(request, vocabulary=self._vocabulary)
        if self._grammars is not None:
            self._grammars.start(request)

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Runs one batch to its end and returns it; [] = nothing in flight. Raises EngineError: the engine sleeps.

        Args: timeout_s: not looked at inside a batch.
        """
        self._awake()
        if not self._queue:
            return []
        first = self._queue[0]
        beams = num_beams(first.sampling)
        alike = [r for r in self._queue if len(r.tokens) == len(first.tokens) and r.sampling == first.sampling]
        if first.sampling.generation_kwargs:  # some of them count the completion's tokens
            alike = [r for r in alike if r.offset == first.offset]
        batch = alike[: max(1, self._batch_size // beams)]
        taken = {r.id for r in batch}
        self._queue = deque(r for r in self._queue if r.id not in taken)
        with torch.no_grad(), native_attention(self._module), evaluating(self._module):
            if beams > 1:
                return self._count(batch, beam_search(self._module, batch, decode=self._decode, version=self.version))
            return self._count(batch, self._generate(batch, make_plan(first.sampling)))

    def _generate(self, batch: list[Request], plan: SamplingPlan) -> list[Output]:
        """All tokens of requests of equal lengths."""
        device = next(self._module.parameters()).device
        ids = torch.from_numpy(np.stack([r.tokens for r in batch]).astype(np.int64)).to(device)
        keys = torch.tensor([address_key(*r.address) for r in batch], device=device)
        place = torch.tensor([r.offset for r in batch], device=device)
        draws = torch.tensor([r.draw + r.offset for r in batch], device=device)
        seen = seen_tokens(list(ids), self._vocabulary) if plan.support.penalises else None
        process = processors(self._module, ids, batch[0]) if plan.sampling.generation_kwargs else None
        matchers = [self._grammars.start(r) if self._grammars else None for r in batch]
        tokens, logprobs = np.zeros((0, len(batch)), np.int64), np.zeros((0, len(batch)), np.float32)
        raw: list[np.ndarray] = []
        ended: dict[int, tuple[int, str]] = {}
        cache: dict[str, Any] = {}
        fresh = ids
        for step in range(plan.sampling.max_tokens):
            logits, cache = self._forward(fresh if cache else ids, cache)
            scores = None if process is None else process(ids, logits.float())
            if scores is not None and not bool((scores > -torch.inf).any(1).all()):
                raise EngineError("generation_kwargs leave no token to draw; loosen bad_words_ids and the like")
            where: dict[str, Any] = {"u": uniform(keys, draws + step), "position": place + step, "seen": seen}
            allowed = self._grammars.rows(matchers).to(device) if self._grammars and any(matchers) else None
            token, logprob = sample_rows(logits, plan, **where, allowed=allowed, scores=scores)
            if seen is not None:
                seen.scatter_(1, token.unsqueeze(1), True)
            fresh = token.unsqueeze(1)
            ids = torch.cat([ids, fresh], 1)
            tokens = np.concatenate([tokens, token.cpu().numpy()[None]])
            logprobs = np.concatenate([logprobs, logprob.cpu().numpy()[None]])
            if plan.sampling.return_logits:
                raw.append(logits.float().cpu().numpy())
            self._look(batch, tokens, ended)
            self._follow(matchers, tokens[step], step + 1, ended)
            if len(ended) == len(batch):
                break
        whole = (len(tokens), "length")
        return [self._output(r, i, ended.get(i, whole), tokens, logprobs, raw) for i, r in enumerate(batch)]

    def _forward(self, ids: Tensor, cache: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Logits [n V] behind the last token, and the model's cache by its name; {} where it keeps none.

        Args: ids: Long [n T], what the cache does not hold.
        """
        out = self._module(input_ids=ids, **self._options, **cache)
        name = next((name for name in CACHES if name in out), None)
        return out.logits[:, -1], {} if name is None else {name: out[name]}

    def _look(self, batch: list[Request], tokens: np.ndarray, ended: dict[int, tuple[int, str]]) -> None:
        """Notes the rows that the last token has ended."""
        for i, r in enumerate(batch):
            if i in ended:
                continue
            stop = int(tokens[-1, i]) in r.sampling.stop_ids
            if r.sampling.stop and not stop and self._decode is not None:
                whole = np.concatenate([r.tokens[len(r.tokens) - r.offset :], tokens[:, i]])
                stop = completed_string(self._decode, whole, r.sampling.stop, fresh=1) is not None
            if stop:
                ended[i] = len(tokens), "stop"

    def _follow(
        self, matchers: list[Matcher | None], drawn: np.ndarray, made: int, ended: dict[int, tuple[int, str]]
    ) -> None:
        """Takes constrained rows one token on in their languages, and ends those where no token may come."""
        matchers[:] = [None if row in ended else m for row, m in enumerate(matchers)]
        live = {row: m for row, m in enumerate(matchers) if m is not None}
        for row, matcher in live.items():
            matcher.advance(int(drawn[row]))
        if self._grammars is not None and live:
            self._grammars.refresh(list(live.values()))
        for row, matcher in live.items():
            if matcher.ended:
                ended[row], matchers[row] = (made, matcher.ended), None

    def _output(
        self,
        request: Request,
        row: int,
        end: tuple[int, str],
        tokens: np.ndarray,
        logprobs: np.ndarray,
        raw: list[np.ndarray],
    ) -> Output:
        """One row, cut where it ended."""
        length, reason = end
        return Output(
            id=request.id,
            tokens=tokens[:length, row].astype(np.int32),
            logprobs=logprobs[:length, row].astype(np.float32),
            versions=np.full(length, self.version, np.int32),
            finish_reason=reason,  # pyright: ignore[reportArgumentType]
            logits=np.stack([x[row] for x in raw[:length]]) if raw else None,
        )
