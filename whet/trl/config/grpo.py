"""GRPOConfig: the table of TRL's fields, and the class. training.py has the fields from transformers."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from whet.compat.field import Table, deprecated, differs, no_effect, refused, works
from whet.errors import ConfigError
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.rl import RLArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.translate import grpo_algorithm

__all__ = ["COMPAT", "GRPO_FIELDS", "OLD_GRPO_FIELDS", "GRPOConfig", "warn_of_differences"]

log = logging.getLogger("whet")

_SERVER = "only for vllm_mode='server', which is refused"
_CB = "whet's engine always batches continuously"

GRPO_FIELDS: Table = {
    "model_init_kwargs": differs(
        None,
        "dtype (or torch_dtype) sets the dtype of saved weights, by default float32; "
        "master weights are fp32, and bf16 sets the dtype of computation. device_map, "
        "attn_implementation, low_cpu_mem_usage and use_safetensors have no effect; "
        "others are refused",
        dict,
    ),
    "trust_remote_code": works(False, "runs the Python files in the model's folder"),
    "router_aux_loss_coef": refused(
        None, "the router's auxiliary loss is not added; leave it out", float, harmless=(0.0, 0)
    ),
    "disable_dropout": no_effect(False, "dropout is always off, so that sampler and trainer are one policy"),
    "cast_lm_head_to_fp32": no_effect(False, "log-probabilities are always computed in fp32, from bf16 products"),
    "num_generations": works(8),
    "num_generations_eval": works(None, kind=int),
    "max_completion_length": works(512),
    "ds3_gather_for_generation": no_effect(True, "the engine reads the trainer's own weights"),
    "shuffle_dataset": works(True),
    "pad_to_multiple_of": no_effect("auto", "nothing is padded", str),
    "generation_batch_size": works(None, "completions of a rollout", int),
    "steps_per_generation": works(None, kind=int),
    "temperature": works(1.0),
    "top_p": works(1.0),
    "top_k": works(0),
    "min_p": works(None, kind=float),
    "generation_kwargs": works(None, "transformers' generate does beam search, with a warning", dict),
    "chat_template_kwargs": works(None, kind=dict),
    "repetition_penalty": works(1.0),
    "cache_implementation": no_effect(None, "the KV cache is the engine's own", str),
    "use_vllm": differs(False, "vLLM in this process"),
    "vllm_mode": differs("colocate", '"server" is refused: the engine shares this process\'s weights'),
    "vllm_model_impl": works("vllm"),
    "vllm_enable_sleep_mode": differs(False, "the engine's memory, except the weights, is freed for each update"),
    "vllm_structured_outputs_regex": differs(None, "works with whet's engine; refused with use_vllm", str),
    "vllm_server_base_url": no_effect(None, _SERVER, str),
    "vllm_server_host": no_effect("0.0.0.0", _SERVER),
    "vllm_server_port": no_effect(8000, _SERVER),
    "vllm_server_timeout": no_effect(240.0, _SERVER),
    "vllm_group_port": no_effect(51216, _SERVER),
    "vllm_gpu_memory_utilization": works(0.3),
    "vllm_max_model_length": works(None, kind=int),
    "vllm_tensor_parallel_size": refused(1, "one device samples; leave it at 1"),
    "beta": works(0.0, "the reference is a copy of the model before training; its file is not read again"),
    "num_iterations": works(1),
    "epsilon": works(0.2),
    "delta": works(None, kind=float),
    "epsilon_high": works(None, kind=float),
    "sapo_temperature_neg": works(1.05),
    "sapo_temperature_pos": works(1.0),
    "vespo_k_pos": works(2.0),
    "vespo_lambda_pos": works(3.0),
    "vespo_k_neg": works(3.0),
    "vespo_lambda_neg": works(2.0),
    "importance_sampling_level": works("token"),
    "reward_weights": works(None, kind=list[float]),
    "multi_objective_aggregation": works("sum_then_normalize"),
    "scale_rewards": works("group"),
    "loss_type": differs(
        "dapo",
        "losses are divided by the rows or tokens of the update; TRL's bnpo divides by those of a micro-batch, and its "
        "dapo, cispo and vespo by a mean, if steps_per_generation is not gradient_accumulation_steps. As in TRL, "
        "cispo's cap is ε_high itself; a warning says so",
    ),
    "mask_truncated_completions": differs(False, "as in TRL, masked rows count in the means over rows"),
    "sync_ref_model": works(False),
    "ref_model_mixup_alpha": works(0.6),
    "ref_model_sync_steps": differs(512, "optimizer steps, rounded up to whole rollouts"),
    "top_entropy_quantile": differs(1.0, "the quantile is over the update; TRL's is over each micro-batch"),
    "entropy_coef": differs(0.0, "the mean entropy is over the update's tokens; TRL's is over each micro-batch's"),
    "use_adaptive_entropy": works(False),
    "entropy_coef_min": works(0.0),
    "entropy_coef_max": works(1.0),
    "entropy_coef_delta": works(0.005),
    "entropy_target": works(0.2),
    "max_tool_calling_iterations": works(None, "rounds of calls in a completion", int),
    "vllm_importance_sampling_correction": works(True, "as in TRL, it acts with use_vllm only"),
    "vllm_importance_sampling_mode": works(
        "sequence_mask", "also geometric_mask and geometric_truncate, which take a sequence's mean"
    ),
    "vllm_importance_sampling_clip_max": works(3.0, kind=float),
    "vllm_importance_sampling_clip_min": works(None, kind=float),
    "off_policy_mask_threshold": works(None, kind=float),
    "use_bias_correction_kl": works(True),
    "log_completions": works(False),
    "log_multimodal": no_effect(True, "there are no images"),
    "num_completions_to_print": works(None, kind=int),
    "log_unique_prompts": works(False),
    "log_completions_hub_repo": refused(None, "nothing is uploaded; log_completions writes parquet files", str),
    "use_transformers_continuous_batching": no_effect(False, _CB),
    "transformers_continuous_batching_config": no_effect(None, _CB, dict),
    "use_transformers_paged": no_effect(False, _CB),
    "vllm_importance_sampling_cap": differs(None, "vllm_importance_sampling_clip_max, as in TRL", float),
}
"""Field -> its default and its meaning in whet."""

OLD_GRPO_FIELDS: Table = {
    "max_prompt_length": deprecated("prompts are truncated to this many tokens on the left", int),
    "vllm_device": deprecated("no effect: the engine is on the trainer's device"),
    "vllm_dtype": deprecated("no effect: the engine shares the trainer's weights and their dtype"),
    "vllm_max_model_len": deprecated("vllm_max_model_length", int),
    "vllm_enable_prefix_caching": deprecated("vLLM's enable_prefix_caching", bool),
    "vllm_guided_decoding_regex": deprecated("vllm_structured_outputs_regex"),
    "use_liger_loss": deprecated("no effect: whet never keeps all logits", bool),
    "wandb_log_unique_prompts": deprecated("log_unique_prompts", bool),
    "compat": deprecated('"0.16" = the defaults and metric names of TRL 0.16'),
}
"""Field of an earlier TRL -> how it is read; `compat` is whet's own."""

COMPAT = {"0.16": {"temperature": 0.9, "top_k": 50, "beta": 0.04, "max_completion_length": 256,
                   "max_prompt_length": 512, "loss_type": "bnpo", "use_bias_correction_kl": False}}  # fmt: skip
"""Release -> the defaults that differed."""


class _GRPO(RLArguments):
    """The methods of GRPOConfig."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **GRPO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_GRPO_FIELDS}
    COMPAT = COMPAT

    METHOD = "GRPO"

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"}

    def _check(self) -> None:
        """Checks TRL's rules, and raises ConfigError for values that whet does not support."""
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if (self.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
            raise ConfigError("liger_kernel_config: fused_linear_cross_entropy is not for GRPO; leave it out")
        super()._check()

    def to_whet(self) -> Any:
        """Returns the algorithm as whet's own configuration."""
        return grpo_algorithm(self)


GRPOConfig: type[_GRPO] = dataclass_of(
    "GRPOConfig",
    _GRPO,
    """TRL's GRPOConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> GRPOConfig(num_generations=6, per_device_train_batch_size=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: generation_batch_size (8) must be divisible by num_generations (6). Nearest that work: ...
    """,
)


def warn_of_differences(args: Any) -> None:
    """Warns of TRL's defects that whet reproduces, and names a setting without the defect."""
    bound = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo" and bound < 1:
        log.warning(
            "loss_type='cispo': as in TRL, the cap of the weights is epsilon_high=%s itself, so every weight is %s; "
            "the paper's cap is 1 + ε_high: set e.g. epsilon_high=5.0",
            bound,
            bound,
        )
    if args.beta and args.use_bias_correction_kl:
        log.warning(
            "beta=%s: as in TRL, the KL is multiplied by the importance ratio; use_bias_correction_kl=False is k3",
            args.beta,
        )
    if args.mask_truncated_completions and args.loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
        log.warning(
            "mask_truncated_completions: as in TRL, masked completions count in the mean over rows, so many of them "
            "make the step smaller; loss_type='dapo' counts trained tokens only"
        )
    loss_type, level = args.loss_type, args.importance_sampling_level
    if loss_type == "luspo" and level != "sequence":
        log.warning("loss_type='luspo' needs importance_sampling_level='sequence', but it is %r", level)
    if loss_type == "vespo" and level != "token":
        log.warning("loss_type='vespo' computes sequence ratios itself; leave importance_sampling_level at 'token'")
    if level == "sequence" and loss_type in ("bnpo", "cispo", "dapo", "dr_grpo"):
        log.warning(
            "importance_sampling_level='sequence': loss_type=%r sums over tokens, which weights each sequence by its "
            "completion length; take loss_type='grpo', a mean over sequences",
            loss_type,
        )
