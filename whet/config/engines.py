"""How vLLM and SGLang are built, beyond the rollout's own fields: the sections rollout.vllm and rollout.sglang."""

from __future__ import annotations

from dataclasses import field

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Int, Name, Size, Text, Tree

__all__ = ["SGLangOptions", "VLLMOptions"]


@config
class VLLMOptions:
    """How vLLM is built; read by rollout_engine "vllm" alone.

    >>> VLLMOptions(max_num_seqs=64).hbm_utilization
    0.2
    """

    model_version: Text = ""
    """Folder or name whose config it takes; "" = the actor's. The weights are the actor's either way."""
    hbm_utilization: Float = 0.2
    """Share of the GPU's memory it may take; on a CPU, share of the host's that its KV may take."""
    async_scheduling: Bool = False
    """Schedule the next step while one runs."""
    logprobs_mode: Name = "processed_logprobs"
    """Its logprobs: processed_logprobs, or raw_logprobs, those before temperature and truncation, for
    logprob_support "full"."""
    hf_config_path: Name | None = None
    """Folder of another Hugging Face configuration."""
    additional_config: Tree | None = None
    """Its additional_config."""
    max_num_batched_tokens: Count | None = None
    """Tokens of one step."""
    max_num_seqs: Size | None = None
    """Completions decoded together; None = max_batch_size."""
    kwargs: Tree = field(default_factory=dict)
    """Further arguments of its LLM; they override those that whet gives."""
    sampling_kwargs: Tree = field(default_factory=dict)
    """Further SamplingParams; those that change the distribution are refused."""


@config
class SGLangOptions:
    """How SGLang is built; read by rollout_engine "sglang" alone.

    >>> SGLangOptions(page_size=16).mem_fraction_static
    0.2
    """

    model_version: Text = ""
    """Folder or name whose config it takes; "" = the actor's. The weights are the actor's either way."""
    context_length: Count | None = None
    """Longest prompt and completion together."""
    mem_fraction_static: Float = 0.2
    """Share of the device's memory it may take."""
    disable_radix_cache: Bool = True
    """Keep no prefixes from one call to the next."""
    enable_deterministic_sampling: Bool = False
    """Draw by the request's seed, so that a run can be repeated."""
    chunked_prefill_size: Int | None = -1
    """Tokens prefilled at a time; -1 = all."""
    page_size: Count = 128
    """Tokens of a KV page."""
    max_running_requests: Size | None = None
    """Completions decoded together; None = max_batch_size."""
    log_level: Name | None = "info"
    """Level of its log."""
    kwargs: Tree = field(default_factory=dict)
    """Further arguments of its Engine; they override those that whet gives."""
