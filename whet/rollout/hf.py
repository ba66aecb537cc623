"""HFEngine: the model's own forward and cache, one batch of equal prompt lengths at a time.

It runs any causal language model of transformers, also those that whet's attention does not fit, and all other engines
are tested against it. Only requests of equal lengths and one Sampling run together, so a stateful model meets no
padding. Options of transformers' generate without a field of whet (Sampling.generation_kwargs) work only here.
A learned prompt of PEFT is read once, before the first token; the cache holds it afterwards.
Left out on purpose: continuous batching, shared prompts.
Dim legend: n rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.modes import eval_mode, max_positions, num_ids, transformers_attention
from whet.models.prompt_tuning import is_prompt_tuned
from whet.ops.counter_rng import hash_rng_key, uniform
from whet.rollout.base import EngineCaps, Output, Request
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.engine.sampling import sample_rows, seen_tokens
from whet.rollout.generate_options import beam_search, check_generate_options, logits_processors, num_beams
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.queue_engine import QueueEngine
from whet.rollout.requests import SamplingPlan, check_request, make_plan
from whet.rollout.stopping import Decode
from whet.types import FinishReason

__all__ = ["HFEngine"]

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in models' outputs and arguments: from transformers 5.24 on, and before it most models' and those
of Mamba's relatives. The new name comes first, since its outputs still answer to the old ones, which Mamba's forward
then ignores. RWKV's `state` is left out: with it transformers 5.23 mixes up the rows of a batch."""


class HFEngine(QueueEngine):
    """transformers' forward in a loop.

    Args:
        model: a causal language model, or a LoadedModel.
        decode: ids -> text, needed for stop strings only.
        batch_size: the most requests run together; their lengths and Sampling are equal.
        grammars: of the tokenizer, needed for constraints only.
    Raises: ConfigError: batch_size below 1.

    Example: `engine.submit([Request(...)]); outputs = engine.step()`, until step gives [].
    """

    caps = EngineCaps(
        shared_weights=True,
        keyed_draws=True,
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
        decode: Decode | None = None,
        batch_size: int = 64,
        grammars: Grammars | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size {batch_size} must be at least 1")
        super().__init__("hf", max_batch=batch_size)
        self._module = model.module if isinstance(model, LoadedModel) else model
        self._vocabulary = num_ids(self._module)
        self._positions = max_positions(self._module)
        self._decode, self._batch_size, self._grammars = decode, batch_size, grammars
        self._base: Any = self._module
        if is_prompt_tuned(self._base):
            self._base = self._base.get_base_model()
        parameters = inspect.signature(self._base.forward).parameters
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})
        """Options of a forward pass. Logits of all tokens of a prompt would be the largest tensor in memory."""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: LoadedModel, *, decode: Decode, grammars: Grammars | None = None, **_: Any
    ) -> Self:
        """Returns the engine of a rollout configuration. Args: as make_engine's."""
        return cls(model, decode=decode, batch_size=config.max_batch_size, grammars=grammars)

    def check(self, request: Request) -> None:
        """Raises EngineError or ConfigError for a request that could never be served."""
        check_request(
            request,
            vocabulary=self._vocabulary,
            positions=self._positions,
            decodes=self._decode is not None,
            constrains=self._grammars is not None,
        )
        make_plan(request.sampling)
        check_generate_options(request, vocabulary=self._vocabulary)
        if self._grammars is not None:
            self._grammars.start(request)

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Runs one batch to its end and returns it; [] = nothing in flight. Raises EngineError: the engine sleeps.

        Args: timeout_s: not used, since a batch runs to its end.
        """
        self.check_awake()
        if not self.queue:
            return []
        first = self.queue[0]
        beams = num_beams(first.sampling)
        same_kind = [r for r in self.queue if len(r.tokens) == len(first.tokens) and r.sampling == first.sampling]
        if first.sampling.generation_kwargs:  # some of them count the completion's tokens
            same_kind = [r for r in same_kind if r.offset == first.offset]
        batch = same_kind[: max(1, self._batch_size // beams)]
        batch_ids = {r.id for r in batch}
        self.queue = deque(r for r in self.queue if r.id not in batch_ids)
        with torch.no_grad(), transformers_attention(self._module), eval_mode(self._module):
            if beams > 1:
                return self.finish(batch, beam_search(self._module, batch, decode=self._decode, version=self.version))
            return self.finish(batch, self._generate(batch, make_plan(first.sampling)))

    def _generate(self, batch: list[Request], plan: SamplingPlan) -> list[Output]:
        """Completes requests of equal lengths, token by token."""
        device = next(self._module.parameters()).device
        ids = torch.from_numpy(np.stack([r.tokens for r in batch]).astype(np.int64)).to(device)
        keys = torch.tensor([hash_rng_key(*r.rng_key) for r in batch], device=device)
        place = torch.tensor([r.offset for r in batch], device=device)
        draws = torch.tensor([r.draw + r.offset for r in batch], device=device)
        seen = seen_tokens(list(ids), self._vocabulary) if plan.processors.penalises else None
        process = logits_processors(self._base, ids, batch[0]) if plan.sampling.generation_kwargs else None
        flights = [InFlightRequest(request=r, matcher=self._grammars and self._grammars.start(r)) for r in batch]
        finished: dict[int, FinishReason] = {}
        cache: dict[str, Any] = {}
        fresh = ids
        for step in range(plan.sampling.max_tokens):
            logits, cache = self._forward(fresh if cache else ids, cache)
            scores = None if process is None else process(ids, logits.float())
            if scores is not None and not bool((scores > -torch.inf).any(1).all()):
                raise EngineError("generation_kwargs leave no token to draw; loosen bad_words_ids and the like")
            where: dict[str, Any] = {"u": uniform(keys, draws + step), "position": place + step, "seen": seen}
            matchers = [None if row in finished else f.matcher for row, f in enumerate(flights)]
            allowed = self._grammars.rows(matchers).to(device) if self._grammars and any(matchers) else None
            token, logprob = sample_rows(logits, plan, **where, allowed=allowed, scores=scores)
            if seen is not None:
                seen.scatter_(1, token.unsqueeze(1), True)
            fresh = token.unsqueeze(1)
            ids = torch.cat([ids, fresh], 1)
            drawn, logprobs = token.cpu().numpy(), logprob.tolist()
            raw = logits.float().cpu().numpy()[:, None] if plan.sampling.return_logits else None
            finished |= self._record(flights, finished, drawn, logprobs, raw)
            if len(finished) == len(batch):
                break
        return [f.output(finished[row]) for row, f in enumerate(flights)]

    def _record(
        self,
        flights: list[InFlightRequest],
        finished: Mapping[int, FinishReason],
        drawn: np.ndarray,
        logprobs: list[float],
        logits: np.ndarray | None,
    ) -> dict[int, FinishReason]:
        """Adds what one step drew to the requests that continue. Returns: those that it ends, with the reason."""
        ended: dict[int, FinishReason] = {}
        live = {row: f for row, f in enumerate(flights) if row not in finished}
        for row, flight in live.items():
            if logits is not None:
                flight.logits.append(logits[row])
            token = [int(drawn[row])]
            if reason := flight.add(token, [logprobs[row]], version=self.version, decode=self._decode):
                ended[row] = reason
        if self._grammars is not None:
            matchers = {row: f.matcher for row, f in live.items() if f.matcher and ended.get(row) != "stop"}
            ended |= self._grammars.advance(matchers, drawn)
        return ended

    def _forward(self, ids: Tensor, cache: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns logits [n V] after the last token, and the model's cache under its name; {} where it has none.

        Args: ids: Long [n T], tokens that the cache does not hold.
        """
        module = self._base if cache else self._module
        out = module(input_ids=ids, **self._options, **cache)
        name = next((name for name in CACHES if name in out), None)
        return out.logits[:, -1], {} if name is None else {name: out[name]}
