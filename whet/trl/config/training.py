"""transformers.TrainingArguments field by field, with TRL's defaults where TRL changes them."""

from __future__ import annotations

from whet.compat.field import Field, Table, deprecated, differs, no_effect, refused, works

__all__ = ["OLD_TRAINING_FIELDS", "OWN_FIELDS", "TRAINING_FIELDS"]

_SHARDED = "several processes share each model by FSDP2 without it (whet docs scaling); leave it out"
_DDP = "several processes share each model by FSDP2, not by DDP"
_RANK_0 = "of several processes the first logs and saves"
_ROWS = "rows are read in this process when they are needed, without workers"
_HUB = "checkpoints are not pushed; save_model() and push_to_hub() push one commit"
_ROLLOUT = "an event between two updates of a rollout waits for the end of the rollout"
_NO_COMPILE = "no model is compiled as a whole; whet chooses the kernels of its layers"

OWN_FIELDS: Table = {
    "max_tokens_per_microbatch": Field(
        None,
        "own",
        "tokens of prompts and answers in one forward and backward pass. It sets the memory of training and changes no "
        "result; lower it if memory is short. None = 16384 (2048 on a CPU), or the longest sequence",
        int,
    ),
}
"""Fields that TRL does not have."""
TRAINING_FIELDS: Table = {
    "output_dir": works(None, 'None = "trainer_output"', str),
    "per_device_train_batch_size": differs(
        8,
        "completions of each process; times gradient_accumulation_steps and the processes they are an update. "
        "max_tokens_per_microbatch decides how many run through the model at once",
    ),
    "num_train_epochs": works(3.0, "a fraction of an epoch is rounded up to whole rollouts"),
    "max_steps": differs(-1, "optimizer steps, rounded up to whole rollouts"),
    "learning_rate": works(1e-6),
    "lr_scheduler_type": works("linear"),
    "lr_scheduler_kwargs": works(None, kind=dict),
    "warmup_steps": works(0, "a value below 1 is a share of all steps", float),
    "optim": differs(
        "adamw_torch_fused",
        "adamw_torch* is whet's fused AdamW, 8-bit AdamW is adamw8bit (torchao); also adafactor, adagrad, rmsprop, sgd",
    ),
    "optim_args": refused(None, "set adam_beta1, adam_beta2 and adam_epsilon, or pass optimizers=", str),
    "weight_decay": works(0.0, "on matrices; norms and biases don't decay"),
    "adam_beta1": works(0.9),
    "adam_beta2": works(0.999),
    "adam_epsilon": works(1e-8),
    "optim_target_modules": refused(None, "GaLore and similar optimizers are not supported; use peft_config", str),
    "gradient_accumulation_steps": works(1, "an update takes whole rollouts or divides one: see the rules of batches"),
    "average_tokens_across_devices": no_effect(True, "a loss is always one mean over the rows of all processes"),
    "max_grad_norm": works(1.0, "an update with a gradient that is not finite is skipped and counted"),
    "label_smoothing_factor": no_effect(0.0, "GRPO has no labels, nor has it in TRL"),
    "bf16": differs(
        None,
        "None = bf16 if it is faster on this machine. The master weights stay fp32 and are saved. A module is "
        "converted to bf16 in place; with optimizers= it keeps its dtype",
        bool,
    ),
    "fp16": refused(False, "fp16 needs loss scaling, which is not supported; use bf16=True"),
    "bf16_full_eval": no_effect(False, "evaluation computes in the dtype of training"),
    "fp16_full_eval": refused(False, "evaluation computes in the dtype of training; leave it out"),
    "tf32": works(None, kind=bool),
    "activation_checkpointing": works(None, "None = the value of gradient_checkpointing", bool),
    "activation_checkpointing_kwargs": no_effect(None, "whet checkpoints activations itself, never reentrant", dict),
    "gradient_checkpointing": works(True),
    "gradient_checkpointing_kwargs": no_effect(None, "whet checkpoints activations itself, never reentrant", dict),
    "torch_compile": no_effect(False, _NO_COMPILE),
    "torch_compile_backend": no_effect(None, _NO_COMPILE, str),
    "torch_compile_mode": no_effect(None, _NO_COMPILE, str),
    "use_liger_kernel": no_effect(False, "whet never keeps all logits; it has norms and rotary embeddings for a GPU"),
    "liger_kernel_config": no_effect(None, "see use_liger_kernel", dict),
    "use_cache": no_effect(False, "training keeps no KV cache, rollouts always do"),
    "neftune_noise_alpha": refused(None, "noise in training only would make sampler and trainer two policies", float),
    "torch_empty_cache_steps": no_effect(None, "memory is freed after each phase", int),
    "auto_find_batch_size": refused(
        False, "max_tokens_per_microbatch sets the memory, not the batch; lower it if memory is short"
    ),
    "logging_strategy": works("steps"),
    "logging_steps": differs(10, f"optimizer steps; {_ROLLOUT}. A value below 1 is a share of all steps", float),
    "logging_first_step": works(False),
    "log_on_each_node": no_effect(True, _RANK_0),
    "logging_nan_inf_filter": no_effect(
        True, "an update with a gradient that is not finite is skipped, its loss unlogged"
    ),
    "include_num_input_tokens_seen": no_effect("no", "num_tokens is always logged"),
    "log_level": works("passive", "sets the level of whet's and transformers' loggers"),
    "log_level_replica": works("warning"),
    "disable_tqdm": works(None, kind=bool),
    "report_to": differs("none", "transformers' callbacks report; each needs its package", list[str]),
    "run_name": works(None, kind=str),
    "project": works("huggingface"),
    "trackio_space_id": works(None, kind=str),
    "trackio_bucket_id": works(None, kind=str),
    "trackio_static_space_id": works(None, kind=str),
    "eval_strategy": works("no"),
    "eval_steps": differs(None, f"optimizer steps; {_ROLLOUT}", float),
    "eval_delay": works(0, kind=float),
    "per_device_eval_batch_size": differs(8, "TRL's rule is checked; whet evaluates the whole set at once"),
    "prediction_loss_only": no_effect(False, "an evaluation logs rewards and the loss"),
    "eval_on_start": works(False),
    "eval_do_concat_batches": no_effect(True, "no predictions are gathered"),
    "eval_use_gather_object": no_effect(False, "no predictions are gathered"),
    "eval_accumulation_steps": no_effect(None, "no predictions are gathered", int),
    "include_for_metrics": no_effect([], "GRPOTrainer has no compute_metrics, nor has TRL's", list[str]),
    "batch_eval_metrics": no_effect(False, "GRPOTrainer has no compute_metrics, nor has TRL's"),
    "save_only_model": works(False),
    "save_strategy": works("steps"),
    "save_steps": differs(500, f"optimizer steps; {_ROLLOUT}", float),
    "save_on_each_node": no_effect(False, _RANK_0),
    "save_total_limit": works(None, kind=int),
    "enable_jit_checkpoint": no_effect(False, "SIGTERM always ends a run with a checkpoint"),
    "push_to_hub": differs(
        False, "the token is checked at once; save_model() and push_to_hub() push, checkpoints don't"
    ),
    "hub_token": works(None, kind=str),
    "hub_private_repo": differs(None, "private unless False", bool),
    "hub_model_id": works(None, kind=str),
    "hub_strategy": no_effect("every_save", _HUB),
    "hub_always_push": no_effect(False, _HUB),
    "hub_revision": works(None, "the branch", str),
    "load_best_model_at_end": works(False),
    "metric_for_best_model": works(None, kind=str),
    "greater_is_better": works(None, kind=bool),
    "ignore_data_skip": refused(False, "a resumed run always continues at the next row; leave it out"),
    "restore_callback_states_from_checkpoint": works(False),
    "full_determinism": works(False),
    "seed": works(42, "for all random draws; whet has its own generators, so draws differ from torch's"),
    "data_seed": works(None, kind=int),
    "use_cpu": works(False, "else models, given as modules too, are moved to the GPU if there is one"),
    "accelerator_config": no_effect(None, "accelerate is not used", dict),
    "parallelism_config": refused(None, _SHARDED, str),
    "dataloader_drop_last": no_effect(False, "as in TRL's sampler, an epoch's rows that fill no rollout are left out"),
    "dataloader_num_workers": no_effect(0, _ROWS),
    "dataloader_pin_memory": no_effect(True, _ROWS),
    "dataloader_persistent_workers": no_effect(False, _ROWS),
    "dataloader_prefetch_factor": no_effect(None, _ROWS, int),
    "dataloader_multiprocessing_context": no_effect(None, _ROWS, str),
    "dataloader_in_order": no_effect(True, _ROWS),
    "remove_unused_columns": works(False),
    "label_names": no_effect(None, "GRPO has no labels", list[str]),
    "train_sampling_strategy": refused("random", "rows are shuffled; shuffle_dataset=False keeps their order"),
    "length_column_name": no_effect("length", "only sampling by length reads it"),
    "ddp_find_unused_parameters": no_effect(None, _DDP, bool),
    "ddp_bucket_cap_mb": no_effect(None, _DDP, int),
    "ddp_broadcast_buffers": no_effect(None, _DDP, bool),
    "ddp_static_graph": no_effect(None, _DDP, bool),
    "ddp_backend": no_effect(None, "NCCL between GPUs, gloo on a CPU", str),
    "ddp_timeout": works(1800),
    "fsdp": refused(None, _SHARDED, str, harmless=("", [])),
    "fsdp_config": refused(None, _SHARDED, dict, harmless=({},)),
    "deepspeed": refused(None, _SHARDED, dict),
    "debug": refused(
        "",
        "underflow_overflow is not supported; optim/skipped counts gradients that are not finite",
        str,
        harmless=([], None),
    ),
    "skip_memory_metrics": no_effect(True, "memory is always measured"),
    "do_train": no_effect(False, "for scripts to read, as in transformers"),
    "do_eval": no_effect(False, "eval_strategy sets it, as in transformers"),
    "do_predict": no_effect(False, "for scripts to read, as in transformers"),
    "resume_from_checkpoint": no_effect(
        None, "for scripts to read, as in transformers; use train(resume_from_checkpoint=)", str
    ),
    "local_rank": no_effect(-1, "LOCAL_RANK of the environment counts, which the launcher sets"),
}
"""Field -> its default and its meaning in whet."""

OLD_TRAINING_FIELDS: Table = {
    "warmup_ratio": deprecated("warmup_steps below 1", float),
    "save_safetensors": deprecated("must be True: no other format is written", bool),
    "logging_dir": deprecated("the folder of TensorBoard's files; later releases read TENSORBOARD_LOGGING_DIR"),
    "evaluation_strategy": deprecated("eval_strategy"),
    "no_cuda": deprecated("use_cpu", bool),
    "overwrite_output_dir": deprecated(
        "no effect: existing files stay, and a run replaces checkpoints of the same steps only", bool
    ),
    "group_by_length": deprecated("must be False: sequences are packed, never padded", bool),
    "tp_size": deprecated("must be 1: the processes shard the model by FSDP", int),
    "torchdynamo": deprecated("no effect: nothing is compiled"),
}
"""Field of an earlier transformers -> how it is read."""
