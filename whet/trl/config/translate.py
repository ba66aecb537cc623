"""Translates TRL's configurations to whet's: optimizer, training, rollout, algorithm.

loss_type    policy_loss_fn   loss_agg_mode, over all rows
grpo         grpo             sequence-mean-token-mean
bnpo, dapo   grpo             token-mean
dr_grpo      grpo             sequence-mean-token-scale (the longest completion)
luspo        grpo             seq-mean-token-sum
cispo        cispo-trl        token-mean
sapo         sapo             sequence-mean-token-mean
vespo        vespo            token-mean
"""

from __future__ import annotations

from typing import Any

from whet.config import GRPOConfig as Algorithm
from whet.config import OptimConfig, RLTrainingConfig, RolloutConfig
from whet.config.algo.fields_read import POLICY_READS
from whet.config.algo.presets import trl_rloo
from whet.config.engines import VLLMOptions
from whet.config.rollout import ConstraintConfig
from whet.config.training import CheckpointingOptions
from whet.errors import ConfigError, lookup_error

__all__ = [
    "BY_EVALUATION",
    "LOSS_TYPES",
    "NEVER",
    "REWARD_MANAGER",
    "beam_options",
    "grpo_algorithm",
    "optimizer_config",
    "rl_training_config",
    "rloo_algorithm",
    "rollout_config",
    "template_options",
    "training_fields",
]

_OPTIMIZERS = {
    "adafactor": "whet.trl.trainer.optimizers:adafactor",
    "adagrad": "whet.trl.trainer.optimizers:adagrad",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch": "adamw",
    "adamw_torch_8bit": "adamw8bit",
    "adamw_torch_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw8bit",
    "rmsprop": "whet.trl.trainer.optimizers:rmsprop",
    "sgd": "sgd",
}
"""transformers' optim -> whet's name or factory."""
BY_EVALUATION = ("greedy", "reduce_lr_on_plateau")
"""Values of lr_scheduler_type that step on an evaluation, not on an update."""
NEVER = 10**9
"""An interval in steps that is never reached: callbacks decide when to save."""
REWARD_MANAGER = "whet.trl.rl.reward_functions:TRLRewards"
LOSS_TYPES = {
    "bnpo": ("grpo", "token-mean"),
    "cispo": ("cispo-trl", "token-mean"),
    "dapo": ("grpo", "token-mean"),
    "dr_grpo": ("grpo", "sequence-mean-token-scale"),
    "grpo": ("grpo", "sequence-mean-token-mean"),
    "luspo": ("grpo", "seq-mean-token-sum"),
    "sapo": ("sapo", "sequence-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
}
"""loss_type -> policy_loss_fn and loss_agg_mode."""
_LOSS_FIELDS = (
    "delta",
    "epsilon",
    "epsilon_high",
    "importance_sampling_level",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
)
"""Fields with the same name and meaning in whet's configuration. A loss receives those that it reads."""
CORRECTIONS = {
    "geometric_mask": ("geometric", "mask"),
    "geometric_truncate": ("geometric", "truncate"),
    "sequence_mask": ("sequence", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "token_mask": ("token", "mask"),
    "token_truncate": ("token", "truncate"),
}
"""vllm_importance_sampling_mode -> sampler_is and sampler_is_mode. As in TRL, sequence_* sums over a sequence.
geometric_* is whet's: it takes the mean, so it does not mask completions because they are long."""
_GENERATE = {
    "max_new_tokens": "max_tokens_to_generate",
    "max_tokens": "max_tokens_to_generate",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_strings": "stop",
    "suppress_tokens": "forbidden_tokens",
}
"""Options of transformers' generate and of vLLM's SamplingParams -> whet's field."""
_UNSUPPORTED_KWARGS = {
    "eos_token_id": "set model.generation_config.eos_token_id",
    "max_length": "set max_completion_length",
    "min_length": "give min_new_tokens",
    "num_return_sequences": "set num_generations",
}
"""Unsupported options -> the alternative."""
_BEAMS = {
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
}
"""Options of beam search -> the value without effect."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def optimizer_config(args: Any, total: int | None) -> OptimConfig:
    """Returns the optimizer's configuration. Args: total: the run's updates; None = unknown."""
    if args.optim not in _OPTIMIZERS:
        raise lookup_error("optim", str(args.optim), _OPTIMIZERS)
    schedule = args.lr_scheduler_type.value
    by_evaluation = schedule in BY_EVALUATION  # the trainer steps it; for the optimizer it is constant
    schedule = "constant" if by_evaluation else schedule
    return OptimConfig(
        name=_OPTIMIZERS[args.optim],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        schedule=schedule,
        schedule_kwargs={} if by_evaluation else dict(args.lr_scheduler_kwargs or {}),
        warmup_steps=0 if schedule == "constant" else args.get_warmup_steps(total or 0),  # transformers ignores it too
        total_steps=total,
        max_grad_norm=args.max_grad_norm or 0.0,
    )


def training_fields(args: Any, steps: int | None, root: str | None) -> dict[str, Any]:
    """Returns the fields of every training configuration. Callbacks decide when to save, evaluate and stop.

    Args: steps: the run's steps. root: the folder of checkpoints; None = no checkpoints.
    """
    return {
        "max_steps": steps,
        "seed": args.seed,
        "collective_timeout_s": float(args.ddp_timeout),
        "data_shuffle_seed": args.data_seed,
        "checkpoint_root_directory": root,
        "max_tokens_per_microbatch": args.max_tokens_per_microbatch,
        "checkpointing_options": CheckpointingOptions(save_interval_steps=NEVER, max_to_keep=None),
        "pbar_description": None,
        "allow_config_change": True,
    }


def rl_training_config(args: Any, steps: int | None, optim: Any, root: str | None) -> RLTrainingConfig:
    """Returns the training configuration of reinforcement learning.

    Args: steps: the run's rollouts. optim: an OptimConfig or a factory. root: the folder of checkpoints; None = no
        checkpoints.
    """
    return RLTrainingConfig(actor_optimizer=optim, reward_timeout_s=None, **training_fields(args, steps, root))


def grpo_algorithm(args: Any) -> Algorithm:
    """Translates a GRPOConfig to whet's algorithm. Raises ConfigError: an unknown value."""
    if args.loss_type not in LOSS_TYPES:
        raise lookup_error("loss_type", args.loss_type, LOSS_TYPES)
    loss, mode = LOSS_TYPES[args.loss_type]
    reads = POLICY_READS["policy_loss_fn"][loss]
    fields: dict[str, Any] = {
        **_shared_fields(args),
        "policy_loss_fn": loss,
        "loss_agg_mode": mode,
        "use_bias_correction_kl": bool(args.beta) and args.use_bias_correction_kl,
        "entropy_coef": args.entropy_coef,
        **{name: getattr(args, name) for name in _LOSS_FIELDS if name in reads},
        **_advantage(args),
        **_masks(args),
        **_correction(args),
    }
    if args.use_adaptive_entropy:
        names = ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        fields |= {name: getattr(args, name) for name in names}
    if "loss_agg_units" in POLICY_READS["loss_agg_mode"][mode]:
        fields["loss_agg_units"] = "all"
    return Algorithm(**fields)


def rloo_algorithm(args: Any) -> Algorithm:
    """Translates an RLOOConfig to whet's algorithm."""
    clip = args.reward_clip_range
    return trl_rloo(
        **_shared_fields(args),
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        normalize_advantages=args.normalize_advantages,
        reward_clip_range=None if clip is None else tuple(clip),
    )


def _shared_fields(args: Any) -> dict[str, Any]:
    """Returns the fields of GRPOConfig and RLOOConfig alike."""
    batches = args.batches
    fields: dict[str, Any] = {
        "num_generations": args.num_generations,
        "num_iterations": batches.passes,
        "advantage_eps": 1e-4,
        "mask_truncated_completions": args.mask_truncated_completions,
        "reward_weights": None if args.reward_weights is None else tuple(args.reward_weights),
        "reward_manager": REWARD_MANAGER,
        "beta": args.beta,
    }
    if args.sync_ref_model:
        fields["sync_ref_model"] = True
        fields["ref_model_mixup_alpha"] = args.ref_model_mixup_alpha
        fields["ref_model_sync_steps"] = -(-args.ref_model_sync_steps // batches.updates)
    return fields


def _advantage(args: Any) -> dict[str, Any]:
    if args.scale_rewards not in ("group", "batch", "none"):
        raise lookup_error("scale_rewards", args.scale_rewards, ("group", "batch", "none"))
    estimators = {"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"}
    if args.multi_objective_aggregation not in estimators:
        raise lookup_error("multi_objective_aggregation", args.multi_objective_aggregation, estimators)
    estimator = estimators[args.multi_objective_aggregation]
    scale = {"scale_rewards": args.scale_rewards} if estimator == "grpo" else {}
    return {"advantage_estimator": estimator, **scale}


def _masks(args: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    masks = []
    if args.off_policy_mask_threshold is not None:
        masks.append("off-policy")
        fields["off_policy_mask_threshold"] = args.off_policy_mask_threshold
    if args.top_entropy_quantile < 1:
        masks.append("top-entropy")
        fields["top_entropy_quantile"] = args.top_entropy_quantile
    return {**fields, "loss_masks": tuple(masks)}


def _correction(args: Any) -> dict[str, Any]:
    """Returns the fields of importance sampling, for vLLM only: whet's engine shares the trainer's weights."""
    mode = args.vllm_importance_sampling_mode
    if mode not in CORRECTIONS:
        raise lookup_error("vllm_importance_sampling_mode", mode, CORRECTIONS)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min ({low}) must be less than vllm_importance_sampling_clip_max ({high})."
        )
    if mode.endswith("truncate") and low is None and high is None:
        raise ConfigError(
            "At least one of `vllm_importance_sampling_clip_min` or `vllm_importance_sampling_clip_max` must be set "
            "when `vllm_importance_sampling_mode` is a `*_truncate` mode."
        )
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return {}
    level, mode = CORRECTIONS[mode]
    return {"sampler_is": level, "sampler_is_mode": mode, "sampler_is_threshold": high, "sampler_is_lower": low}


def rollout_config(args: Any, longest_prompt: int) -> RolloutConfig:
    """Returns the rollout's configuration. Args: longest_prompt: the tokens of the longest prompt."""
    kwargs = dict(args.generation_kwargs or {})
    if kwargs.pop("do_sample", True) is False:
        raise ConfigError("generation_kwargs: do_sample=False makes all completions of a group equal; leave it out")
    fields: dict[str, Any] = {
        "max_tokens_to_generate": args.max_completion_length,
        **{name: getattr(args, name) for name in _SAMPLING},
    }
    for name in [*_SAMPLING, *_GENERATE]:
        if name in kwargs:
            value = kwargs.pop(name)
            fields[_GENERATE.get(name, name)] = tuple(value) if isinstance(value, list) else value
    if unsupported := sorted(kwargs.keys() & _UNSUPPORTED_KWARGS.keys()):
        name = unsupported[0]
        raise ConfigError(f"generation_kwargs: {name} is not supported; {_UNSUPPORTED_KWARGS[name]}")
    fields |= {"top_k": fields["top_k"] or None, "min_p": fields["min_p"] or 0.0}
    beams = {**_BEAMS, **beam_options(args)}
    kwargs = {name: value for name, value in kwargs.items() if (name, value) not in beams.items()}
    regex = args.vllm_structured_outputs_regex
    return RolloutConfig(
        **fields,
        max_prompt_length=args.max_prompt_length or longest_prompt,
        on_long_prompt="truncate_left" if args.max_prompt_length else "error",
        logprobs_mode="full",
        generation_kwargs=kwargs,
        num_generations_eval=args.num_generations_eval or args.num_generations,
        chat_template_kwargs=template_options(args),
        constraint=None if regex is None else ConstraintConfig(regex=regex),
        vllm=_vllm(args) if args.use_vllm else VLLMOptions(),
    )


def beam_options(args: Any) -> dict[str, Any]:
    """Returns the options of generation_kwargs for beam search; empty = no beam search."""
    kwargs = args.generation_kwargs or {}
    options = {name: kwargs[name] for name in _BEAMS if name in kwargs}
    return options if options.get("num_beams", 1) > 1 and not args.use_vllm else {}


def template_options(args: Any) -> dict[str, Any]:
    """Returns the arguments of the chat template. As in TRL, thinking is on unless chat_template_kwargs turns
    it off.
    """
    return {"enable_thinking": True, **(args.chat_template_kwargs or {})}


def _vllm(args: Any) -> VLLMOptions:
    kwargs: dict[str, Any] = {"model_impl": args.vllm_model_impl} if args.vllm_model_impl != "vllm" else {}
    if args.vllm_max_model_length is not None:
        kwargs["max_model_len"] = args.vllm_max_model_length
    if args.vllm_enable_prefix_caching is not None:
        kwargs["enable_prefix_caching"] = args.vllm_enable_prefix_caching
    mode = "raw_logprobs" if args.temperature == 1 else "processed_logprobs"
    return VLLMOptions(hbm_utilization=args.vllm_gpu_memory_utilization, logprobs_mode=mode, kwargs=kwargs)
