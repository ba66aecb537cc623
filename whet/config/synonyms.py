"""Names of TRL, transformers, verl, RL2, Tunix and engines, with whet's keys for them, for messages on unknown keys.

Left out on purpose: accepting these names. A key has one name, so that everybody can read a configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["NOTES", "SECTIONS", "SYNONYMS", "find_owner", "find_synonym", "leaf_paths"]

_GENERATED = ("rollout.max_tokens_to_generate", "max_tokens", "data.max_length")
_COMPLETIONS = ("algo.num_generations", "num_generations")
_MICRO = ("trainer.max_tokens_per_microbatch",)
_EPOCHS, _STEPS, _ROWS = ("trainer.num_epochs",), ("trainer.max_steps",), ("data.batch_size", "batch_size")
_SAVE, _EVALUATE, _FOLDER = (
    ("trainer.checkpointing_options.save_interval_steps",),
    ("trainer.eval_every_n_steps",),
    ("trainer.run_dir", "out"),
)
_ALL: dict[tuple[str, ...], str] = {
    ("actor.optim.lr",): "learning_rate lr",
    ("actor.optim.name",): "optim optimizer",
    ("actor.optim.betas",): "adam_beta1 adam_beta2",
    ("actor.optim.eps",): "adam_epsilon",
    ("actor.optim.schedule",): "lr_scheduler_type lr_scheduler scheduler lr_decay_style warmup_style",
    ("actor.optim.schedule_kwargs",): "lr_scheduler_kwargs",
    ("actor.optim.warmup_ratio",): "lr_warmup_steps_ratio",
    ("actor.optim.warmup_steps",): "lr_warmup_steps num_warmup_steps",
    ("actor.optim.max_grad_norm",): "grad_clip clip_grad max_norm",
    ("actor.gradient_checkpointing",): "enable_gradient_checkpointing activation_checkpointing",
    ("actor.dtype", "dtype"): "bf16 fp16 torch_dtype model_dtype",
    ("actor.attention",): "attn_implementation",
    ("actor.quantization",): "load_in_4bit use_qlora",
    ("actor.lora",): "use_peft use_lora peft_config",
    ("actor.lora.r",): "lora_r lora_rank rank",
    ("actor.lora.lora_alpha",): "lora_alpha alpha",
    ("actor.lora.lora_dropout",): "lora_dropout dropout",
    ("actor.lora.target_modules",): "lora_target_modules",
    ("model", "actor.model"): "model_name_or_path model_name model_path model_id pretrained",
    ("reference.model",): "ref_model ref_model_path reference_model",
    ("reward_model.model",): "reward_model_path reward_model_name_or_path",
    ("tokenizer",): "tokenizer_name tokenizer_path processing_class",
    ("data.path", "prompts"): "dataset dataset_name dataset_path data_path train_files train_file train_data_path",
    ("data.eval_path",): "eval_dataset eval_file val_files validation_file test_data_path",
    ("data.subset",): "dataset_config dataset_config_name",
    ("data.split",): "dataset_split dataset_train_split",
    ("data.eval_split",): "dataset_test_split",
    ("data.eval_fraction",): "test_ratio val_size",
    ("data.shuffle",): "shuffle_dataset",
    ("data.text_column",): "dataset_text_field",
    ("data.prompt_column", "prompt_column"): "prompt_key",
    ("data.response_column",): "response_key",
    ("data.messages_column",): "messages_key",
    ("data.chosen_column",): "chosen_key",
    ("data.rejected_column",): "rejected_key",
    ("data.train_on",): "assistant_only_loss completion_only_loss train_on_responses_only",
    ("data.max_length", *_GENERATED[:2]): "max_seq_length max_seq_len max_length",
    _ROWS: "per_device_train_batch_size train_batch_size global_batch_size prompts_per_rollout rollout_batch_size",
    _MICRO: "micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
    "micro_train_batch_size micro_rollout_batch_size "
    "ppo_max_token_len_per_gpu max_length_per_device max_token_len_per_gpu",
    ("trainer.context_parallel_size",): "ulysses_sequence_parallel_size sequence_parallel_size sp_size cp_size",
    ("trainer.tensor_parallel_size",): "tp_size tensor_parallel",
    ("trainer.data_parallel_replicate_size",): "fsdp_size ddp_size dp_replicate_size",
    ("trainer.mini_batch_size",): "ppo_mini_batch_size update_per_rollout",
    ("trainer.show_samples",): "log_completions num_completions_to_print",
    _EPOCHS: "num_train_epochs n_epochs total_epochs epochs",
    _STEPS: "steps total_steps total_training_steps num_train_steps train_steps",
    _FOLDER: "output_dir output save_dir default_local_dir checkpoint_dir run_dir",
    _SAVE: "save_steps save_strategy save_freq save_interval",
    ("trainer.checkpointing_options.max_to_keep",): "save_total_limit max_actor_ckpt_to_keep",
    _EVALUATE: "eval_steps test_freq eval_interval",
    ("trainer.keep_best.metric",): "load_best_model_at_end metric_for_best_model",
    ("trainer.keep_best.mode",): "greater_is_better",
    ("trainer.loggers",): "report_to logger use_wandb wandb",
    ("trainer.metrics_logging_options.log_dir",): "logging_dir",
    ("trainer.metrics_logging_options.project_name",): "project wandb_project project_name",
    ("trainer.metrics_logging_options.run_name",): "experiment_name wandb_run_name",
    ("trainer.resume",): "resume_from_checkpoint load_ckpt_from resume_mode",
    ("trainer.data_shuffle_seed",): "data_seed",
    ("rollout.max_prompt_length", "max_prompt_length", "data.max_length"): "prompt_length max_prompt_len "
    "max_prompt_length",
    _GENERATED: "max_tokens max_new_tokens max_completion_length max_response_length response_length max_gen_len "
    "total_generation_steps max_tokens_to_generate max_generation_steps",
    _COMPLETIONS: "num_generations n rollout_n n_samples n_samples_per_prompt num_samples group_size "
    "responses_per_prompt num_return_sequences",
    ("rollout.eos_tokens", "eos_tokens"): "stop_token_ids eos_token_id",
    ("rollout.stop", "stop"): "stop_strings stop_sequences",
    ("rollout.constraint.regex", "constraint.regex"): "guided_regex vllm_structured_outputs_regex",
    ("rollout.max_batch_size",): "max_num_seqs max_running_requests",
    ("rollout.sglang.mem_fraction_static",): "mem_fraction_static",
    ("rollout.vllm.max_num_batched_tokens",): "max_num_batched_tokens",
    ("rollout.vllm.hbm_utilization",): "vllm_gpu_memory_utilization",
    ("rollout_engine",): "use_vllm vllm_mode",
    ("rollout.chat_template_kwargs", "data.chat_template_kwargs", "chat_template_kwargs"): "enable_thinking thinking",
    ("rollout.on_long_prompt", "data.on_long"): "truncation filter_overlong_prompts",
    ("rollout.max_turns",): "max_assistant_turns max_tool_calling_iterations",
    ("rollout.env_path",): "env environment environment_factory",
    ("reward",): "reward_funcs reward_fn reward_fns reward_function custom_reward_function",
    ("algo.beta",): "kl_coef kl_loss_coef init_kl_coef kl_penalty_coef kl_beta",
    ("algo.kl_loss_mode",): "kl_loss_type kl_estimator kl_penalty kl_method",
    ("algo.kl_type",): "use_kl_in_reward",
    ("algo.scale_rewards",): "norm_adv_by_std_in_grpo",
    ("algo.loss_agg_mode",): "avg_level",
    ("algo.epsilon",): "clip clip_eps eps_clip clip_range cliprange clip_ratio clip_ratio_low epsilon_low",
    ("algo.epsilon_high",): "clip_ratio_high clip_higher eps_clip_low_high",
    ("algo.epsilon_c",): "clip_ratio_c",
    ("algo.clip_range_value",): "cliprange_value",
    ("algo.entropy_coef",): "entropy_coeff ent_coef",
    ("algo.num_iterations",): "ppo_epochs num_ppo_epochs",
    ("algo.advantage_estimator",): "adv_estimator",
    ("algo.gae_lambda",): "lam lamda lambd gae_lam",
    ("algo.dynamic_sampling",): "dynamic_filtering filter_groups group_filtering",
    ("algo.critic_warmup_steps",): "critic_warmup freeze_steps",
    ("algo.loss_type", "algo.policy_loss_fn"): "loss_type loss_fn loss_mode loss_algo",
    ("algo.kl_horizon",): "horizon",
    ("algo.sampler_is",): "rollout_is rollout_is_level tis use_tis truncated_importance_sampling "
    "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    ("algo.sampler_is_threshold",): "rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_cap",
    ("algo.loss_masks",): "rollout_rs rollout_token_veto_threshold",
    ("offload_to_cpu",): "param_offload optimizer_offload",
    ("algo.label_smoothing",): "label_smoothing_factor",
}


def _places(section: str, word: str) -> tuple[str, ...]:
    """Returns the keys for a name. whet generate has the keys of rollout and data without their section."""
    return (f"{section}.{word}", word) if section in ("rollout", "data") else (f"{section}.{word}",)


_OWN = {
    "actor": "model gradient_checkpointing",
    "actor.optim": "betas weight_decay warmup_ratio warmup_steps max_grad_norm",
    "algo": "beta delta epsilon epsilon_high kl_loss_mode loss_agg_mode max_num_gen_batches num_iterations "
    "overlong_buffer sampler_is scale_rewards sync_ref_model target_kl",
    "data": "system_prompt prompt_column apply_chat_template",
    "rollout": "temperature top_p top_k min_p repetition_penalty min_tokens eos_tokens chat_template_kwargs",
    "trainer": "max_steps num_epochs seed run_dir loggers eval_every_n_steps mini_batch_size",
}
"""whet's keys that users often give outside of their section, or to another class."""
SYNONYMS: dict[str, tuple[str, ...]] = {
    **{word: _places(section, word) for section, words in _OWN.items() for word in words.split()},
    **{word: keys for keys, words in _ALL.items() for word in words.split()},
}
"""A name -> whet's keys for it. The message names the first key that the command has. actor means the section of the
trained model, also where it has another name."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "actor": ("reward_model",),
    "critic": ("reward_model",),
    "reward_model": ("actor",),
    "policy": ("actor", "reward_model"),
    "ref": ("reference",),
    "ref_actor": ("reference",),
    "algorithm": ("algo",),
    "sampling_params": ("rollout",),
    "training_args": ("trainer",),
}
"""A section's name elsewhere, or in another command -> its names here."""
_TORCHRUN = "torchrun starts several processes, and FSDP2 shards the weights over them (whet docs scaling)"
_TENSOR_PARALLEL = "trainer.tensor_parallel_size divides matrices in training and in the rollout"
_GRADIENT = (
    "a step has one gradient however it is split into passes; trainer.max_tokens_per_microbatch bounds their memory"
)
_SLEEPS = "an engine sleeps by itself during an update; rollout.vllm.kwargs.enable_sleep_mode=false prevents it"
_VLLM = "vLLM's own options are keys of rollout.vllm.kwargs"
_LOGPROBS = "the sampler's log-probabilities are always kept"
_TOOLS = "a class names or defines the tools: rollout.env_path=env.py:Class rollout.max_turns=4 (whet docs tools)"
_NO_DEEPSPEED = f"DeepSpeed is not supported; {_TORCHRUN}"
NOTES: dict[str, str] = {
    "calculate_log_probs": _LOGPROBS,
    "deepspeed": _NO_DEEPSPEED,
    "device": "a GPU is taken where there is one; CUDA_VISIBLE_DEVICES chooses which, and '' the CPU",
    "disable_dropout": "the model's own dropout is always off; an adapter's is actor.lora.lora_dropout",
    "enable_chunked_prefill": _VLLM,
    "enable_prefix_caching": _VLLM,
    "enable_sleep_mode": _SLEEPS,
    "enforce_eager": _VLLM,
    "eval_strategy": "data.eval_path has the rows of evaluations, trainer.eval_every_n_steps says how often",
    "free_cache_engine": _SLEEPS,
    "fsdp": _TORCHRUN,
    "gpu_memory_utilization": "rollout.vllm.hbm_utilization is vLLM's share of the GPU's memory; "
    "rollout.kv_cache_tokens bounds the KV cache of any engine, in tokens",
    "gpus": _TORCHRUN,
    "grad_accumulation": _GRADIENT,
    "gradient_accumulation_steps": _GRADIENT,
    "logprobs": _LOGPROBS,
    "multi_turn": "rollout.env_path=env.py:Class rollout.max_turns=4 makes episodes of several turns "
    "(whet docs environments)",
    "n_gpus_per_node": _TORCHRUN,
    "nnodes": _TORCHRUN,
    "push_to_hub": "trainer.hub_model_id=NAME sends the model when it is trained, whet push RUN repo=NAME later",
    "sleep_mode": _SLEEPS,
    "steps_per_generation": "a step makes data.batch_size / trainer.mini_batch_size updates, both in prompts",
    "tensor_model_parallel_size": _TENSOR_PARALLEL,
    "tensor_parallel_size": _TENSOR_PARALLEL,
    "tools": _TOOLS,
    "use_dynamic_bsz": "passes are always filled up to trainer.max_tokens_per_microbatch",
    "use_kl_loss": "a KL is in the loss where algo.beta is above 0",
    "logging_steps": "every step is logged",
    "max_model_len": "rollout.max_prompt_length and rollout.max_tokens_to_generate bound a sequence",
    "packing": "rows are always packed, without padding",
    "padding_free": "rows are always packed, without padding",
    "reward_weights": "reward={name: weight, ...} has the weights beside the functions",
    "role_to_mesh": "all roles share the devices of a run; leave it out",
    "use_remove_padding": "rows are always packed, without padding",
    "vllm_enable_sleep_mode": _SLEEPS,
    "zero_stage": _NO_DEEPSPEED,
    "val_before_train": "an evaluation before the first step is always made, where there are rows for it",
    "remove_unused_columns": "columns that nothing reads stay where they are; reward functions are given them by name",
}
"""Names without a key in whet, with the reason."""
_WHOLE: dict[str, tuple[str, ...]] = {
    "actor.kl.coef": ("algo.beta",),
    "actor.kl.type": ("algo.kl_type",),
    "actor_rollout_ref.model.path": ("actor.model", "reward_model.model"),
    "actor_rollout_ref.rollout.name": ("rollout_engine",),
    "actor_rollout_ref.rollout.val_kwargs": ("rollout.eval",),
    "actor_rollout_ref.rollout.val_kwargs.n": ("rollout.num_generations_eval",),
    "algorithm.filter_groups.enable": ("algo.dynamic_sampling",),
    "critic.model.path": ("critic.model",),
    "adv.estimator": ("algo.advantage_estimator",),
    "adv.norm_var": ("algo.norm_var",),
    "data.tokenizer": ("tokenizer",),
    "custom_reward_function.name": ("reward",),
    "custom_reward_function.path": ("reward",),
    "peft_config.r": ("actor.lora.r",),
    "reward_model.enable": ("reward_model.model",),
    "reward_model.model.path": ("reward_model.model",),
    "rollout.vllm.gpu_memory_utilization": ("rollout.vllm.hbm_utilization",),
    "test_data.path": ("data.eval_path",),
    "train_data.path": ("data.path",),
}
"""Keys that are known by their whole path."""
_CLASSES = {
    "actor": "RoleConfig",
    "actor.lora": "LoraConfig",
    "actor.optim": "OptimConfig",
    "algo": "GRPOConfig",
    "data": "DataConfig",
    "rollout": "RolloutConfig",
    "rollout.constraint": "ConstraintConfig",
    "trainer": "RLTrainingConfig",
    "trainer.checkpointing_options": "CheckpointingOptions",
    "trainer.keep_best": "KeepBestOptions",
    "trainer.metrics_logging_options": "MetricsLoggerOptions",
}
"""A section -> its class in Python."""


def find_synonym(path: Sequence[str], known: Collection[str]) -> str | None:
    """Returns the key of whet for an unknown key; None if no table has it, or if the command does not have the key.

    Args: path: the parts of the unknown key. known: the keys, sections and shorthands of the command.

    >>> find_synonym(("critic", "learning_rate"), {"actor.optim.lr", "critic.optim.lr"})
    'critic.optim.lr'
    >>> find_synonym(("actor", "optim", "lr"), {"reward_model.optim.lr", "reward_model.lr"})
    'reward_model.lr'
    """
    if synonym := next((key for key in _WHOLE.get(".".join(path), ()) if key in known), None):
        return synonym
    first, *rest = path
    roles = (first, *SECTIONS.get(first, ()), "actor", "reward_model")
    for target in SYNONYMS.get(path[-1], ()):
        section, dot, inner = target.partition(".")
        places = [f"{role}.{inner}" for role in roles] if section == "actor" and dot else [target]
        if place := next((place for place in places if place in known), None):
            shorter = place.replace(".optim.", ".")
            return shorter if shorter in known and inner != "optim.name" else place  # actor.name would not say of what
    renamed = (".".join([section, *rest]) for section in SECTIONS.get(first, ()))
    return next((key for key in renamed if key in known), None)


def find_owner(word: str, fields: Collection[str]) -> str | None:
    """Returns the name of a keyword in Python: a field of the class itself, or Class.field; None if no table has it.

    >>> find_owner("learning_rate", {"lr"}), find_owner("learning_rate", {"beta"})
    ('lr', 'OptimConfig.lr')
    """
    targets = [target.rpartition(".") for target in SYNONYMS.get(word, ())]
    own = next((name for _, _, name in targets if name in fields), None)
    return own or next((f"{_CLASSES[section]}.{name}" for section, _, name in targets if section in _CLASSES), None)


def leaf_paths(path: Sequence[str], value: object) -> list[tuple[str, ...]]:
    """Returns the paths of the keys below a path. A name of NOTES counts as one key.

    >>> leaf_paths(("actor",), {"lr": 1, "lora": {"r": 2}})
    [('actor', 'lr'), ('actor', 'lora', 'r')]
    """
    if path[-1] in NOTES or not isinstance(value, Mapping) or not value:
        return [tuple(path)]
    return [leaf for key, inner in value.items() for leaf in leaf_paths((*path, str(key)), inner)]
