"""Shared code of the adapters of other packages' engines (vLLM, SGLang): requests, seeds, checks, names of weights.

Such an engine has its own copy of the weights and its own random numbers. So a request gets a seed derived from its
rng_key, and its tokens are stamped with the policy version by the adapter. When the engine is built, its logprobs of a
prompt are compared with those of the trainer's module, which shows a weight that was not updated or a name that was
skipped.
Left out on purpose: servers in other processes, and several devices.
Dim legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.lora_layers import base_parameters
from whet.models.modes import eval_mode, num_ids, transformers_attention
from whet.models.quantized import dequantize
from whet.models.self_check import tolerance_for
from whet.ops.counter_rng import hash_rng_key
from whet.ops.logprobs import selective_log_softmax
from whet.rollout.base import Output, Request, Sampling, sampling_processors
from whet.rollout.build import make_sampling
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.requests import check_request, check_request_ids
from whet.rollout.stopping import Decode
from whet.rollout.sync_check import TOLERANCE

__all__ = [
    "ExternalEngine",
    "WeightNames",
    "check_agreement",
    "check_engine_options",
    "check_logprobs_mode",
    "check_supported",
    "request_seed",
    "write_config",
]

SUPPORTED_FIELDS = (
    "forbidden_ids",
    "logprobs_mode",
    "max_tokens",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop",
    "stop_ids",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of Sampling that vLLM and SGLang support."""


class ExternalEngine:
    """The requests in flight, the weights' names and the policy version of an adapter; subclasses run the engine.

    Args: as the subclasses'. A subclass sets what its `_check_sampling` reads before it calls this.
    """

    _positions: int | None
    """The most tokens of a sequence; None = no limit."""

    def __init__(
        self,
        model: LoadedModel | nn.Module,
        *,
        decode: Decode | None = None,
        config: RolloutConfig | None = None,
        samplings: Sequence[Sampling] = (),
    ) -> None:
        config = config or RolloutConfig()
        for sampling in samplings or [make_sampling(config.for_mode(mode), ()) for mode in ("train", "eval")]:
            self._check_sampling(sampling)
        module = model.module if isinstance(model, LoadedModel) else model
        self._decode = decode
        self._vocabulary = num_ids(module)
        self._names = WeightNames(module)
        self._in_flight: dict[int, InFlightRequest] = {}
        self._done: list[Output] = []
        self._asleep = False
        self.version = 0
        """The policy version stamped on what is drawn now."""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: LoadedModel, *, decode: Decode, samplings: Sequence[Sampling] = (), **_: Any
    ) -> Self:
        """Returns the engine of a rollout configuration. Args: as make_engine's."""
        return cls(model, decode=decode, config=config, samplings=samplings)

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuses a Sampling that the engine draws differently, or for which it would report other logprobs."""
        raise NotImplementedError

    def _check_requests(self, requests: Sequence[Request], *, closed: bool) -> None:
        """Raises EngineError for a request that could never fit, or with an id that is in flight."""
        check_request_ids(requests, self._in_flight)
        for r in requests:
            check_request(
                r,
                vocabulary=self._vocabulary,
                positions=self._positions,
                decodes=self._decode is not None,
                closed=closed,
            )
            self._check_sampling(r.sampling)


def request_seed(request: Request, bits: int = 63) -> int:
    """Returns the seed of a request's draws, from its rng_key and where it resumes.

    Args: request: its rng_key, draw and offset. bits: the seed is below 2**bits.
    Returns: equal for equal keys. A later turn has another seed, and so has a resumed request: neither must
        repeat the first draws.

    >>> import numpy as np
    >>> r = Request(id=0, tokens=np.array([5, 6]), sampling=Sampling(), group=0, rng_key=(0, 0, 0, 0))
    >>> request_seed(r) == request_seed(replace(r, id=4)), request_seed(r) == request_seed(replace(r, offset=1))
    (True, False)
    """
    key = hash_rng_key(*request.rng_key)
    if request.draw:
        key = hash_rng_key(key % 2**64, request.draw, 1, 0)
    if request.offset:
        key = hash_rng_key(key % 2**64, request.offset, 0, 0)
    return key % 2**bits


def check_supported(sampling: Sampling, *, engine: str) -> None:
    """Refuses a Sampling with a field that only whet's own engines support.

    Args: sampling: of a request. engine: its name.
    Raises: ConfigError: names the field, which is not at its default.

    >>> check_supported(Sampling(return_logits=True), engine="vllm")
    Traceback (most recent call last):
    whet.errors.ConfigError: return_logits=True is not supported by vllm; leave it out, or use another rollout_engine
    """
    for f in fields(sampling):
        value = vars(sampling)[f.name]
        if f.name not in SUPPORTED_FIELDS and value != f.default:
            raise ConfigError(
                f"{f.name}={value!r} is not supported by {engine}; leave it out, or use another rollout_engine"
            )


def check_logprobs_mode(sampling: Sampling, *, engine: str, reports: Literal["drawn", "untruncated", "raw"]) -> None:
    """Refuses a Sampling for which an engine would report other logprobs than the trainer computes.

    Args:
        sampling: of a request.
        engine: its name.
        reports: the distribution of the logprobs: "drawn", the one that is drawn from; "untruncated", the same without
            top-k, top-p and min-p; "raw", the softmax of the logits.
    Raises: ConfigError: that is not the distribution which logprobs_mode names.

    >>> check_logprobs_mode(Sampling(top_k=5), engine="vllm", reports="drawn")
    >>> check_logprobs_mode(Sampling(top_k=5), engine="sglang", reports="untruncated")
    Traceback (most recent call last):
    whet.errors.ConfigError: sglang reports logprobs before top_k, top_p and min_p, and logprobs_mode is 'processed'; \
set it to 'full', or leave them out
    """
    drawn = replace(sampling_processors(sampling), full=False)
    is_changed = drawn.penalises or drawn.forbids
    if reports == "raw" and drawn.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"{engine} would report logprobs of the raw logits, not at temperature {drawn.temperature}; set the "
            "temperature to 1.0, or let it report processed logprobs"
        )
    if sampling.logprobs_mode == "full":
        if (is_changed and reports != "raw") or (drawn.truncates and reports == "drawn"):
            truncations = "top_k, top_p, min_p, " if reports == "drawn" else ""
            raise ConfigError(
                f"{engine} reports logprobs after penalties and truncation, and logprobs_mode 'full' asks for "
                f"only temperature; set it to 'processed', or leave out {truncations}min_tokens, repetition_penalty "
                "and forbidden_tokens"
            )
    elif drawn.truncates and reports != "drawn":
        raise ConfigError(
            f"{engine} reports logprobs before top_k, top_p and min_p, and logprobs_mode is 'processed'; set it to "
            "'full', or leave them out"
        )
    elif is_changed and reports == "raw":
        raise ConfigError(
            f"{engine} would report logprobs of the raw logits, without penalties and forbidden tokens; set "
            "logprobs_mode to 'full', or let it report processed logprobs"
        )


def check_engine_options(engine: str, refused: Mapping[str, tuple[object, str]]) -> None:
    """Refuses fields of the rollout configuration that an engine does not support.

    Args: engine: its name. refused: field -> (its value, the reason).
    Raises: ConfigError: names the first field.

    >>> check_engine_options("vllm", {"vllm.kwargs": ("model", "whet sets it")})
    Traceback (most recent call last):
    whet.errors.ConfigError: rollout.vllm.kwargs 'model' can't be done with rollout_engine 'vllm': whet sets it
    """
    for name, (value, why) in refused.items():
        raise ConfigError(f"rollout.{name} {value!r} can't be done with rollout_engine {engine!r}: {why}")


class WeightNames:
    """The names of a policy's weights, as the engine's loader expects them.

    Args: module: the policy.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = {n: p for n, (p, _) in base_parameters(module).items()}
        first: dict[int, str] = {}
        for name, p in parameters.items():
            first.setdefault(id(p), name)
        self.expected = frozenset(parameters)
        self.tied = {n: first[id(p)] for n, p in parameters.items() if first[id(p)] != n}
        """Further names of shared tensors -> their first names: a tied head -> the embedding."""
        shapes = {n: torch.empty_like(dequantize(parameters[n]), device="meta") for n in first.values()}
        stored = revert_weight_conversion(module, shapes)  # pyright: ignore
        is_same = shapes.keys() == stored.keys() and all(stored[n].shape == x.shape for n, x in shapes.items())
        self._fused = None if is_same else module

    def complete(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights as a checkpoint has them, each shared tensor under each of its names.

        A tied head is sent explicitly: on a CPU vLLM has a packed copy of it, which no other name updates. Parameters
        that transformers fuses when it loads (the experts of a layer) are split again, one at a time.

        Args: weights: (name, tensor) of the module, each once.
        Raises: EngineError: at the end, if a parameter is missing; the engine would keep the old one.
        """
        received: set[str] = set()
        shared: dict[str, Tensor] = {}
        for name, tensor in weights:
            received.add(name)
            if name in self.tied.values():
                shared[name] = tensor
            yield from self._stored(name, tensor)
        for name, source in self.tied.items():
            if name not in received and source in shared:
                received.add(name)
                yield from self._stored(name, shared[source])
        if missing := sorted(self.expected - received):
            raise EngineError(
                f"the weights leave out {len(missing)} of {len(self.expected)} parameters ({', '.join(missing[:3])}); "
                "the engine would keep its old ones: send all, as ModelWorker.named_weights does"
            )

    def _stored(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Returns a parameter under the names of a checkpoint."""
        if self._fused is None:
            return [(name, tensor)]
        return revert_weight_conversion(self._fused, {name: tensor.detach()}).items()  # pyright: ignore


def write_config(module: nn.Module, folder: Path) -> None:
    """Writes a model's config.json, for an engine that gets the weights separately.

    Args: module: a model of transformers. folder: exists.
    """
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]  # pyright: ignore
    config.save_pretrained(folder)  # pyright: ignore


@torch.no_grad()
def check_agreement(module: nn.Module, tokens: Sequence[int], reported: Sequence[float], *, engine: str) -> float:
    """Compares an engine's log-probabilities of a prompt with the module's own.

    Args:
        module: the policy.
        tokens: T of the prompt.
        reported: T - 1 logprobs, of tokens 1..T-1, at temperature 1.
        engine: its name.
    Returns: the mean difference.
    Raises: EngineError: the difference is too large for rounding.
    """
    device = next(module.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    with transformers_attention(module), eval_mode(module):
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logprobs = selective_log_softmax(logits, ids[0, 1:]).cpu()
    difference = float((logprobs - torch.tensor(list(reported))).abs().mean())
    if not difference <= (limit := tolerance_for(next(module.parameters()).dtype, TOLERANCE)):
        raise EngineError(
            f"{engine} does not compute this model as transformers does: logprobs of a prompt of {len(tokens)} differ "
            f"by {difference:.1e} on average (rounding: below {limit}); use rollout_engine 'embedded' or 'hf'"
        )
    return difference
