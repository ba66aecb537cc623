"""SGLangEngine: SGLang's offline `Engine`, which decodes in its own processes with its own copy of the weights.

Each request is a coroutine, so finished requests return as they finish. `update_weights` and `sleep` abort requests in
flight inside SGLang, keep their tokens, and submit the rest again, so that its KV is recomputed under the new weights.
Stop strings are found when SGLang has finished a completion, which is truncated there (stopping.py).
Written from the source of SGLang 0.5.23, which needs a GPU. It has not been run: its logic is tested against a
stand-in. Left out on purpose: servers, several devices, LoRA, the tokens of a request in flight.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.lora_layers import merged_weights
from whet.models.modes import max_positions
from whet.models.self_check import probe_tokens
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, Sampling
from whet.rollout.external_engine import (
    ExternalEngine,
    check_agreement,
    check_engine_options,
    check_logprobs_mode,
    check_supported,
    request_seed,
    write_config,
)
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.requests import make_plan
from whet.rollout.stopping import Decode
from whet.util.experimental import warn_experimental

__all__ = ["SGLangEngine", "engine_arguments", "sampling_arguments"]

log = logging.getLogger("whet")

TESTED = "0.5.23"
BUCKET = 512 * 2**20
"""Bytes of weights sent at once."""
WAIT = 0.01
"""The shortest wait of a step for SGLang's processes, in seconds."""
KV = ["kv_cache"]
"""The memory that sleep frees; freed weights would have to be sent again."""


class SGLangEngine(ExternalEngine):
    """SGLang behind whet's protocol.

    Args:
        model: the policy; its config and current weights are copied.
        decode: ids -> text, needed for stop strings only.
        config: of the rollout; its section sglang has SGLang's own options.
        samplings: of the requests to come, checked now; () = those of the configuration.
    Raises: EngineError: SGLang is not installed, or does not compute this model as transformers does. ConfigError: a
        field that SGLang does not support.

    Example: `RLCluster(..., cluster_config=ClusterConfig(rollout_engine="sglang", ...))`.
    """

    def __init__(
        self,
        model: LoadedModel | nn.Module,
        *,
        decode: Decode | None = None,
        config: RolloutConfig | None = None,
        samplings: Sequence[Sampling] = (),
    ) -> None:
        module = model.module if isinstance(model, LoadedModel) else model
        config = config or RolloutConfig()
        package = import_package()
        self._seeded = config.sglang.enable_deterministic_sampling
        self.caps = EngineCaps(
            keyed_draws=self._seeded, abort=True, sleep=True, updates_in_flight=True, experimental=True
        )
        warn_experimental("rollout_engine 'sglang'")
        refused: dict[str, tuple[object, str]] = {}
        for name in {"model_path", "skip_tokenizer_init", "server_args"} & set(config.sglang.kwargs):
            refused["sglang.kwargs"] = (name, "whet sets it; see the section sglang")
        check_engine_options("sglang", refused)
        super().__init__(module, decode=decode, config=config, samplings=samplings)
        limits = [n for n in (max_positions(module), config.sglang.context_length) if n is not None]
        self._positions = min(limits, default=None)
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._rids: dict[int, str] = {}
        self._serial = 0
        arguments = engine_arguments(config, dtype=next(module.parameters()).dtype)
        self._stats = EngineStats(
            max_batch=int(arguments["max_running_requests"]), kv_tokens_bound=config.kv_cache_tokens
        )
        with tempfile.TemporaryDirectory(prefix="whet-sglang-") as folder:
            write_config(module, Path(folder))
            start = config.sglang.model_version or folder
            self._engine: Any = package.Engine(model_path=start, **arguments)
        self._send(merged_weights(module))
        self.backends = {"sglang": package.__version__, "logprobs apart": f"{self._probe(module):.1e}"}
        """SGLang's version, and the mean difference of its logprobs of a prompt from the module's."""

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises: EngineError: one of them could never fit, or its id is in flight; none is queued then. ConfigError: its
            Sampling has a field that SGLang does not support.
        """
        self._check_requests(requests, closed=self._engine is None)
        for r in requests:
            self._in_flight[r.id] = InFlightRequest(request=r)
            if not self._asleep:
                self._add(self._in_flight[r.id])

    def _add(self, flight: InFlightRequest) -> None:
        """Submits a request to SGLang, after the tokens that it has so far."""
        request, self._serial = flight.resumed(), self._serial + 1
        rid = f"whet-{request.id}-{self._serial}"
        call = self._engine.async_generate(
            input_ids=request.tokens.tolist(),
            sampling_params=sampling_arguments(request),
            return_logprob=True,
            logprob_start_len=-1,
            rid=rid,
        )
        self._rids[request.id] = rid
        self._tasks[self._engine.loop.create_task(call)] = request.id

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuses a Sampling that SGLang draws differently, or for which it would report other logprobs."""
        make_plan(sampling)
        check_supported(sampling, engine="sglang")
        if sampling.repetition_penalty != 1.0:
            raise ConfigError(
                f"repetition_penalty {sampling.repetition_penalty}: sglang counts only tokens of the completion, "
                "whet those of the prompt too; leave it out, or use rollout_engine 'embedded' or 'vllm'"
            )
        if sampling.temperature > 0 and sampling.top_p < 1 and (sampling.top_k or sampling.min_p):
            raise ConfigError(
                f"sglang takes top_p={sampling.top_p} of the whole distribution, whet of what top_k left "
                "and before min_p; give only top_p, or leave it out"
            )
        if self._seeded and sampling.temperature > 0 and sampling.min_p:
            raise ConfigError("sglang has no min_p with seeds; leave it out, or deterministic sampling")
        check_logprobs_mode(sampling, engine="sglang", reports="untruncated")

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Waits until something finishes, or the time is up, and returns what has finished.

        Args: timeout_s: None = no limit. SGLang's processes continue between calls.
        Returns: finished requests; [] = nothing in flight (or the time is up).
        Raises: EngineError: the engine is asleep, or SGLang failed.
        """
        if self._asleep:
            raise EngineError("the engine is asleep; call wake_up() first")
        if self._tasks and not self._done:
            limit = None if timeout_s is None else max(timeout_s, WAIT)
            waiting = asyncio.wait(list(self._tasks), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            self._collect(self._engine.loop.run_until_complete(waiting)[0], halted=False)
        done, self._done = self._done, []
        return done

    def _collect(self, tasks: Iterable[asyncio.Task[Any]], *, halted: bool) -> None:
        """Records the results of tasks. Args: halted: tasks that were aborted stay in flight."""
        for task in sorted(tasks, key=lambda t: self._tasks[t]):
            flight = self._in_flight[self._tasks.pop(task)]
            del self._rids[flight.request.id]
            if (error := task.exception()) is not None:
                raise EngineError(f"sglang failed on request {flight.request.id}: {error!r}") from error
            meta = task.result()["meta_info"]
            rows = meta.get("output_token_logprobs") or []  # a request aborted before its start has none
            if rows and not flight.tokens:
                cached = meta.get("cached_tokens", 0)
                self._stats = self._stats.plus(prefilled=len(flight.request.tokens) - cached, reused=cached)
            tokens, logprobs = [int(r[1]) for r in rows], [float(r[0]) for r in rows]
            self._stats = self._stats.plus(generated=len(tokens))
            reason = flight.add(tokens, logprobs, version=self.version, decode=self._decode)
            kind = meta["finish_reason"]["type"]
            if reason is None and kind == "abort" and halted:
                continue
            del self._in_flight[flight.request.id]
            self._done.append(flight.output(reason or ("abort" if kind == "abort" else "error")))

    def _halt(self, ids: Iterable[int]) -> None:
        """Aborts requests in SGLang and records their tokens; they stay in flight here, unless they had finished."""
        requested = set(ids)
        tasks = {t: i for t, i in self._tasks.items() if i in requested}
        if not tasks:
            return
        self._engine.loop.run_until_complete(asyncio.sleep(0))  # a coroutine that has not started can't be aborted
        for i in tasks.values():
            self._engine.tokenizer_manager.abort_request(self._rids[i])
        self._engine.loop.run_until_complete(asyncio.wait(list(tasks)))
        self._collect(tasks, halted=True)

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now; ids that are not in flight, or have just finished, are ignored.

        Returns: their tokens so far, finish_reason "abort"; submit again with an offset to resume.
        """
        aborted = [i for i in dict.fromkeys(ids) if i in self._in_flight]
        self._halt(aborted)
        return [self._in_flight.pop(i).output("abort") for i in aborted if i in self._in_flight]

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """{}: tokens come when their request ends."""
        return {}

    def stats(self) -> EngineStats:
        """Returns its state; SGLang does not tell which requests are in its batch."""
        return replace(self._stats, waiting=len(self._in_flight))

    # ---- weights and memory --------------------------------------------------------------------------------------

    def update_weights(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Requests in flight continue under it, with their KV recomputed.

        Args: version: stamped on tokens from now on. weights: (Hugging Face name, tensor), every parameter.
        Raises: EngineError: no weights were given, some are missing, or SGLang refused them and has a mixture then.
        """
        if weights is None:
            raise EngineError(
                "SGLang holds its own copy of the weights; call update_weights(version, worker.named_weights()); "
                "without them only the version number would change"
            )
        self._halt(self._in_flight)
        self._send(weights)
        self.version = version
        if not self._asleep:
            for flight in self._in_flight.values():
                self._add(flight)

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sends weights in buckets; the last bucket drops the KV of the old weights."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._names.complete(weights):
            if bucket and size + tensor.nbytes > BUCKET:
                self._load(bucket, last=False)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        self._load(bucket, last=True)

    def _load(self, bucket: list[tuple[str, Tensor]], *, last: bool) -> None:
        """Sends a bucket of weights to SGLang."""
        success, message = self._engine.update_weights_from_tensor(bucket, load_format=None, flush_cache=last)
        if not success:
            raise EngineError(f"SGLang refused the weights {bucket[0][0]} .. {bucket[-1][0]}: {message}")

    def sleep(self) -> None:
        """Frees the KV, not the weights. Requests in flight keep their tokens and continue after wake."""
        if not self._asleep:
            self._halt(self._in_flight)
            self._engine.release_memory_occupation(tags=KV)
        self._asleep = True

    def wake_up(self) -> None:
        """Undoes sleep."""
        if self._asleep:
            self._engine.resume_memory_occupation(tags=KV)
            self._asleep = False
            for flight in self._in_flight.values():
                self._add(flight)

    def close(self) -> None:
        """Frees everything; requests in flight are lost. SGLang ends every child of this process, its own or not."""
        if self._engine is not None:
            self.abort(list(self._in_flight))
            self._in_flight, self._done = {}, []
            self._engine.shutdown()
            self._engine = None

    def _probe(self, module: nn.Module) -> float:
        """Mean difference of SGLang's logprobs of a prompt from the module's. Raises EngineError: it is too large."""
        tokens = probe_tokens(self._vocabulary, self._positions)
        out = self._engine.generate(
            input_ids=tokens,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        logprobs = [float(m[0]) for m in out["meta_info"]["input_token_logprobs"][1:]]
        return check_agreement(module, tokens, logprobs, engine="sglang")


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Returns the sampling parameters of a request.

    Args: request: its Sampling, rng_key and offset.
    Returns: as Engine.generate takes them. A forbidden id gets a bias of -inf. SGLang draws by seed and position in the
        sequence, so a resumed request has the same seed. It uses seeds only where the engine was built for
        deterministic sampling.

    >>> import numpy as np
    >>> r = Request(id=0, tokens=np.array([5, 6]), sampling=Sampling(stop_ids=(2,), min_tokens=4, forbidden_ids=(7,)),
    ...     group=0, rng_key=(0, 0, 0, 0), offset=1)
    >>> arguments = sampling_arguments(r)
    >>> arguments["stop_token_ids"], arguments["min_new_tokens"], arguments["logit_bias"], arguments["top_k"]
    ([2], 3, {'7': -inf}, -1)
    """
    s = request.sampling
    arguments: dict[str, Any] = {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "max_new_tokens": s.max_tokens,
        "min_new_tokens": min(max(0, s.min_tokens - request.offset), s.max_tokens),
        "stop_token_ids": list(s.stop_ids),
        "ignore_eos": True,
        "no_stop_trim": True,
        "sampling_seed": request_seed(replace(request, offset=0)),
    }
    return (
        {**arguments, "logit_bias": {str(i): -float("inf") for i in s.forbidden_ids}} if s.forbidden_ids else arguments
    )


def engine_arguments(config: RolloutConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of Engine for a rollout configuration.

    Args: config: the rollout's. dtype: what the policy computes in.
    Returns: keyword arguments without the model, overridden by sglang.kwargs.

    >>> arguments = engine_arguments(RolloutConfig(sglang={"page_size": 16}), dtype=torch.bfloat16)
    >>> arguments["dtype"], arguments["mem_fraction_static"], arguments["page_size"], arguments["load_format"]
    ('bfloat16', 0.2, 16, 'dummy')
    """
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "context_length": config.sglang.context_length,
        "mem_fraction_static": config.sglang.mem_fraction_static,
        "disable_radix_cache": config.sglang.disable_radix_cache,
        "enable_deterministic_inference": config.sglang.enable_deterministic_sampling,
        "chunked_prefill_size": config.sglang.chunked_prefill_size,
        "page_size": config.sglang.page_size,
        "max_running_requests": config.sglang.max_running_requests or config.max_batch_size,
        "max_total_tokens": config.kv_cache_tokens,
        "log_level": config.sglang.log_level,
        "skip_tokenizer_init": True,
        "enable_memory_saver": True,
        "random_seed": 0,
    }
    return {**{n: v for n, v in arguments.items() if v is not None}, **config.sglang.kwargs}


def import_package() -> Any:
    """Returns the package sglang. Raises EngineError: it can't be imported."""
    try:
        package = importlib.import_module("sglang")
    except ImportError as error:
        raise EngineError(
            f"rollout_engine 'sglang' needs SGLang, which can't be imported ({error}); on a machine with a GPU: "
            "pip install sglang==0.5.23"
        ) from error
    if package.__version__ != TESTED:
        log.warning("SGLang %s: this adapter was written for %s", package.__version__, TESTED)
    return package
