"""Options of vLLM and SGLang that RolloutConfig has no field for: the sections rollout.vllm and rollout.sglang."""

from __future__ import annotations

from dataclasses import field

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Int, Name, Size, Text, Tree

__all__ = ["SGLangOptions", "VLLMOptions"]


@config
class VLLMOptions:
    """Options of vLLM; only rollout_engine "vllm" reads them.

    >>> VLLMOptions(max_num_seqs=64).logprobs_mode
    'processed_logprobs'
    """

    model_version: Text = ""
    """Folder or hub name of the model configuration; "" = the actor's. The weights always come from the actor."""
    hbm_utilization: Float | None = None
    """Share of the GPU's memory for the engine; None = half of what is free, or what kv_cache_tokens needs. On a CPU,
    share of the host's memory for its KV cache; None = 0.2."""
    async_scheduling: Bool = False
    """Schedule the next step while the current one runs."""
    logprobs_mode: Name = "processed_logprobs"
    """Its logprobs: processed_logprobs, or raw_logprobs, those before temperature and truncation, for
    logprobs_mode "full"."""
    hf_config_path: Name | None = None
    """Folder of another Hugging Face configuration."""
    additional_config: Tree | None = None
    """vLLM's additional_config."""
    max_num_batched_tokens: Count | None = None
    """Maximum number of tokens of one step of vLLM's scheduler."""
    max_num_seqs: Size | None = None
    """Maximum number of completions that are decoded at the same time; None = max_batch_size."""
    share_weights: Bool = False
    """With LoRA, one copy of the frozen weights for vLLM and the trainer: vLLM computes with the adapter beside them.
    Else it has a copy of its own, with the adapter merged."""
    kwargs: Tree = field(default_factory=dict)
    """More arguments of vLLM's LLM; they override whet's."""
    sampling_kwargs: Tree = field(default_factory=dict)
    """More SamplingParams; those that change the distribution are refused."""


@config
class SGLangOptions:
    """Options of SGLang; only rollout_engine "sglang" reads them.

    >>> SGLangOptions(page_size=16).mem_fraction_static
    0.2
    """

    model_version: Text = ""
    """Folder or hub name of the model configuration; "" = the actor's. The weights always come from the actor."""
    context_length: Count | None = None
    """Maximum number of tokens of prompt and completion together."""
    mem_fraction_static: Float = 0.2
    """Share of the device's memory for the engine."""
    disable_radix_cache: Bool = True
    """Do not keep prefixes from one call to the next."""
    enable_deterministic_sampling: Bool = False
    """Sample with the request's seed, so that a run can be repeated."""
    chunked_prefill_size: Int | None = -1
    """Maximum number of tokens prefilled at a time; -1 = all."""
    page_size: Count = 128
    """Tokens of a KV cache page."""
    max_running_requests: Size | None = None
    """Maximum number of completions that are decoded at the same time; None = max_batch_size."""
    log_level: Name | None = "info"
    """Level of SGLang's log."""
    kwargs: Tree = field(default_factory=dict)
    """More arguments of SGLang's Engine; they override whet's."""
