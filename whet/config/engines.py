"""Options of vLLM and SGLang beyond the rollout's own fields: rollout.vllm and rollout.sglang.

The names are Tunix's without their prefix; `nested` reads Tunix's own, rollout_vllm_... and rollout_sglang_jax_....
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Int, Name, Number, Seconds, Size, Text, Tree
from whet.errors import ConfigError

__all__ = ["FLAT", "SGLangOptions", "VLLMOptions", "nested"]


@config
class VLLMOptions:
    """How vLLM is built; no effect with another engine.

    >>> VLLMOptions(max_num_seqs=64).hbm_utilization
    0.2
    """

    server_mode: Bool = False
    """No effect: requests are taken while it decodes in any case."""
    server_mode_submission_threshold: Number = 0
    """Server: requests to gather before decoding starts. No effect: a step's requests come together."""
    server_mode_submission_timeout_s: Seconds = 0.0
    """Server: longest wait for that many, in seconds. No effect."""
    model_version: Text = ""
    """Folder or name whose config it takes; "" = the actor's. The weights are the actor's either way."""
    lora_config: Tree | None = None
    """Must be None, whole weights are sent."""
    hbm_utilization: Float = 0.2
    """Share of the GPU's memory it may take; on a CPU, share of the host's that its KV may take."""
    init_with_random_weights: Bool = True
    """No effect: it starts without weights and takes the actor's at once."""
    tpu_backend_type: Name | None = None
    """On TPU: must be None, there is no TPU back end."""
    async_scheduling: Bool = False
    """Schedule the next step while one runs."""
    logprobs_mode: Name = "processed_logprobs"
    """Its logprobs: processed_logprobs, or raw_logprobs, those before temperature and truncation, for
    logprob_support "full"."""
    hf_config_path: Name | None = None
    """Folder of another Hugging Face configuration."""
    additional_config: Tree | None = None
    """Its additional_config."""
    enable_dp_attention: Bool = False
    """Must be False, it runs on one device."""
    delete_dst_buffers: Bool = True
    """No effect: weights are written in place."""
    max_num_batched_tokens: Count | None = None
    """Tokens of one step."""
    max_num_seqs: Size | None = None
    """Completions decoded together; None = max_batch_size."""
    reshard_chunk_size: Count | None = None
    """No effect: parameters are handed over one at a time, by reference."""
    kwargs: Tree = field(default_factory=dict)
    """Further arguments of its LLM; they override those that whet gives."""
    sampling_kwargs: Tree = field(default_factory=dict)
    """Further SamplingParams; those that change the distribution are refused."""

    def __post_init__(self) -> None:
        """Refuses what is not there."""
        if self.tpu_backend_type is not None:
            raise ConfigError(f"tpu_backend_type must be None, got {self.tpu_backend_type!r}: there is no TPU back end")


@config
class SGLangOptions:
    """How SGLang is built; no effect with another engine.

    >>> SGLangOptions(page_size=16).mem_fraction_static
    0.2
    """

    model_version: Text = ""
    """Folder or name whose config it takes; "" = the actor's. The weights are the actor's either way."""
    context_length: Count | None = None
    """Longest prompt and completion together."""
    mem_fraction_static: Float = 0.2
    """Share of the device's memory it may take."""
    init_with_random_weights: Bool = True
    """No effect: it starts without weights and takes the actor's at once."""
    disable_radix_cache: Bool = True
    """Keep no prefixes from one call to the next."""
    enable_deterministic_sampling: Bool = False
    """Draw by the request's seed, so that a run can be repeated."""
    use_sort_for_toppk_minp: Bool = True
    """On JAX: sort in top-k, top-p and min-p. No effect."""
    enable_static_lora: Bool = False
    """Must be False, whole weights are sent."""
    enable_single_process: Bool = True
    """On JAX: one controlling process. No effect."""
    lora_target_modules: list[Name] | None = None
    """Modules with LoRA. No effect."""
    max_lora_rank: Count | None = None
    """LoRA rank. No effect."""
    lora_scaling: Float | None = None
    """LoRA scaling. No effect."""
    precompile_bs_paddings: list[Int] | None = None
    """On JAX: batch sizes to compile for. No effect."""
    precompile_token_paddings: list[Int] | None = None
    """On JAX: prefill lengths to compile for. No effect."""
    chunked_prefill_size: Int | None = -1
    """Tokens prefilled at a time; -1 = all."""
    page_size: Count = 128
    """Tokens of a KV page."""
    load_format: Name = "auto"
    """Format of the weights. No effect: none are read."""
    max_running_requests: Size | None = None
    """Completions decoded together; None = max_batch_size."""
    log_level: Name | None = "info"
    """Level of its log."""
    kwargs: Tree = field(default_factory=dict)
    """Further arguments of its Engine; they override those that whet gives."""


FLAT = {
    **{f"rollout_vllm_{f.name}": ("vllm", f.name) for f in fields(VLLMOptions)},  # pyright: ignore[reportArgumentType]
    **{f"rollout_sglang_jax_{f.name}": ("sglang", f.name) for f in fields(SGLangOptions)},  # pyright: ignore[reportArgumentType]
}
"""Tunix's name of a field -> its section under rollout and its name there."""


def nested(words: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the section rollout, those with Tunix's names of engines' fields moved into vllm and sglang.

    Args: words: keys of the section; others stay as they are.
    Raises: ConfigError: a field is given under both of its names.

    >>> nested({"temperature": 1.0, "rollout_vllm_max_num_seqs": 8})
    {'temperature': 1.0, 'vllm': {'max_num_seqs': 8}}
    """
    out = {name: value for name, value in words.items() if name not in FLAT}
    for flat, value in words.items():
        if flat not in FLAT:
            continue
        section, name = FLAT[flat]
        own = out.get(section, {})
        if not isinstance(own, Mapping) or name in own:
            raise ConfigError(f"{flat} and {section}.{name} are the same key; give it once, as {section}.{name}")
        out[section] = {**own, name: value}
    return out
