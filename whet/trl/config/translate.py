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
"""transformers' optim -> whet's."""
BY_EVALUATION = ("greedy", "reduce_lr_on_plateau")
"""lr_scheduler_type that an evaluation moves, not an update."""
NEVER = 10**9
"""Steps between what callbacks ask for and no interval does."""
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
_OF_LOSSES = (
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
"""Fields with one name and meaning in both; a loss is given those that it takes."""
CORRECTIONS = {
    "geometric_mask": ("geometric", "mask"),
    "geometric_truncate": ("geometric", "truncate"),
    "sequence_mask": ("sequence", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "token_mask": ("token", "mask"),
    "token_truncate": ("token", "truncate"),
}
"""vllm_importance_sampling_mode -> sampler_is and its mode. sequence_* sums over a sequence, as in TRL; geometric_*,
whet's own, takes the mean, which does not mask long completions for being long."""
_GENERATE = {
    "max_new_tokens": "max_tokens_to_generate",
    "max_tokens": "max_tokens_to_generate",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_strings": "stop",
    "suppress_tokens": "forbidden_tokens",
}
"""Options of transformers' generate and of vLLM's SamplingParams -> the field that stands for one."""
_ELSEWHERE = {
    "eos_token_id": "set model.generation_config.eos_token_id",
    "max_length": "set max_completion_length",
    "min_length": "give min_new_tokens",
    "num_return_sequences": "set num_generations",
}
"""Those that are not taken -> what to do instead."""
_BEAMS = ("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups", "num_beams")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def optimizer_config(args: Any, total: int | None) -> OptimConfig:
    """The optimizer's section. Args: total: updates of the run; None = not known."""
    if args.optim not in _OPTIMIZERS:
        raise lookup_error("optim", str(args.optim), _OPTIMIZERS)
    schedule = args.lr_scheduler_type.value
    moved = schedule in BY_EVALUATION  # by the front; to the optimizer it is constant
    schedule = "constant" if moved else schedule
    return OptimConfig(
        name=_OPTIMIZERS[args.optim],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        schedule=schedule,
        schedule_kwargs={} if moved else dict(args.lr_scheduler_kwargs or {}),
        warmup_steps=0 if schedule == "constant" else args.get_warmup_steps(total or 0),  # there it takes no notice
        total_steps=total,
        max_grad_norm=args.max_grad_norm or 0.0,
    )


def training_fields(args: Any, steps: int | None, root: str | None) -> dict[str, Any]:
    """What every loop's section has; when to save, evaluate and stop is the callbacks' to say.

    Args: steps: of the run. root: of the checkpoints; None = none.
    """
    return {
        "max_steps": steps,
        "seed": args.seed,
        "data_shuffle_seed": args.data_seed,
        "checkpoint_root_directory": root,
        "max_tokens_per_microbatch": args.max_tokens_per_microbatch,
        "checkpointing_options": CheckpointingOptions(save_interval_steps=NEVER, max_to_keep=None),
        "pbar_description": None,
        "allow_config_change": True,
    }


def rl_training_config(args: Any, steps: int | None, optim: Any, root: str | None) -> RLTrainingConfig:
    """The loop's section; when to save, evaluate and stop is the callbacks' to say.

    Args: steps: rollouts of the run. optim: an OptimConfig or a factory. root: of the checkpoints; None = none.
    """
    return RLTrainingConfig(actor_optimizer=optim, reward_timeout_s=None, **training_fields(args, steps, root))


def grpo_algorithm(args: Any) -> Algorithm:
    """The algorithm of a GRPOConfig of TRL's. Raises: ConfigError: an unknown word."""
    if args.loss_type not in LOSS_TYPES:
        raise lookup_error("loss_type", args.loss_type, LOSS_TYPES)
    loss, mode = LOSS_TYPES[args.loss_type]
    taken = POLICY_READS["policy_loss_fn"][loss]
    fields: dict[str, Any] = {
        **_common(args),
        "policy_loss_fn": loss,
        "loss_agg_mode": mode,
        "use_bias_correction_kl": bool(args.beta) and args.use_bias_correction_kl,
        **{name: getattr(args, name) for name in _OF_LOSSES if name in taken},
        **_advantage(args),
        **_masks(args),
        **_entropy(args),
        **_correction(args),
    }
    if "loss_agg_units" in POLICY_READS["loss_agg_mode"][mode]:
        fields["loss_agg_units"] = "all"
    return Algorithm(**fields)


def rloo_algorithm(args: Any) -> Algorithm:
    """The algorithm of an RLOOConfig of TRL's."""
    clip = args.reward_clip_range
    return trl_rloo(
        **_common(args),
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        normalize_advantages=args.normalize_advantages,
        reward_clip_range=None if clip is None else tuple(clip),
    )


def _common(args: Any) -> dict[str, Any]:
    """What both have."""
    made = args.batches
    fields: dict[str, Any] = {
        "num_generations": args.num_generations,
        "num_iterations": made.passes,
        "advantage_eps": 1e-4,
        "mask_truncated_completions": args.mask_truncated_completions,
        "reward_weights": None if args.reward_weights is None else tuple(args.reward_weights),
        "reward_manager": REWARD_MANAGER,
        "beta": args.beta,
    }
    if args.sync_ref_model:
        fields["sync_ref_model"] = True
        fields["ref_model_mixup_alpha"] = args.ref_model_mixup_alpha
        fields["ref_model_sync_steps"] = -(-args.ref_model_sync_steps // made.updates)
    return fields


def _advantage(args: Any) -> dict[str, Any]:
    if args.scale_rewards not in ("group", "batch", "none"):
        raise lookup_error("scale_rewards", args.scale_rewards, ("group", "batch", "none"))
    ways = {"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"}
    if args.multi_objective_aggregation not in ways:
        raise lookup_error("multi_objective_aggregation", args.multi_objective_aggregation, ways)
    estimator = ways[args.multi_objective_aggregation]
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


def _entropy(args: Any) -> dict[str, Any]:
    fields = {"entropy_coef": args.entropy_coef}
    if args.use_adaptive_entropy:
        names = ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        fields |= {name: getattr(args, name) for name in names}
    return fields


def _correction(args: Any) -> dict[str, Any]:
    """The importance sampling for vLLM; nothing for an engine that reads the trainer's weights."""
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
    level, how = CORRECTIONS[mode]
    bounds = {"sampler_is_threshold": high, "sampler_is_lower": low}
    return {"sampler_is": level, "sampler_is_mode": how, **bounds}


def rollout_config(args: Any, longest_prompt: int) -> RolloutConfig:
    """The rollout's section. Args: longest_prompt: tokens of the longest prompt there is."""
    given = dict(args.generation_kwargs or {})
    if given.pop("do_sample", True) is False:
        raise ConfigError("generation_kwargs: do_sample=False makes all completions of a group equal; leave it out")
    fields: dict[str, Any] = {
        "max_tokens_to_generate": args.max_completion_length,
        **{name: getattr(args, name) for name in _SAMPLING},
    }
    for name in [*_SAMPLING, *_GENERATE]:
        if name in given:
            value = given.pop(name)
            fields[_GENERATE.get(name, name)] = tuple(value) if isinstance(value, list) else value
    if taken := sorted(given.keys() & _ELSEWHERE.keys()):
        raise ConfigError(f"generation_kwargs: {taken[0]} is not supported; {_ELSEWHERE[taken[0]]}")
    fields |= {"top_k": fields["top_k"] or None, "min_p": fields["min_p"] or 0.0}
    given = {name: value for name, value in given.items() if name not in beam_options(args)}
    regex = args.vllm_structured_outputs_regex
    return RolloutConfig(
        **fields,
        max_prompt_length=args.max_prompt_length or longest_prompt,
        on_long_prompt="truncate_left" if args.max_prompt_length else "error",
        logprob_support="full",
        generation_kwargs=given,
        num_generations_eval=args.num_generations_eval or args.num_generations,
        chat_template_kwargs=template_options(args),
        constraint=None if regex is None else ConstraintConfig(regex=regex),
        vllm=_vllm(args) if args.use_vllm else VLLMOptions(),
    )


def beam_options(args: Any) -> dict[str, Any]:
    """Options of generation_kwargs that search by beams; empty = nothing is searched."""
    given = args.generation_kwargs or {}
    found = {name: given[name] for name in _BEAMS if name in given}
    return found if found.get("num_beams", 1) > 1 and not args.use_vllm else {}


def template_options(args: Any) -> dict[str, Any]:
    """Arguments of the chat template; thinking is the template's own default, as there."""
    return {"enable_thinking": True, **(args.chat_template_kwargs or {})}


def _vllm(args: Any) -> VLLMOptions:
    kwargs: dict[str, Any] = {"model_impl": args.vllm_model_impl} if args.vllm_model_impl != "vllm" else {}
    if args.vllm_max_model_length is not None:
        kwargs["max_model_len"] = args.vllm_max_model_length
    if args.vllm_enable_prefix_caching is not None:
        kwargs["enable_prefix_caching"] = args.vllm_enable_prefix_caching
    mode = "raw_logprobs" if args.temperature == 1 else "processed_logprobs"
    return VLLMOptions(hbm_utilization=args.vllm_gpu_memory_utilization, logprobs_mode=mode, kwargs=kwargs)
