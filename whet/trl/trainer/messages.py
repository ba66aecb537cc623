"""Translates whet's errors and warnings: the names of whet's fields become the names of a script's arguments."""

from __future__ import annotations

from whet.compat.messages import Vocabulary
from whet.config import Role
from whet.train.role_trainer import lower_lr_advice

__all__ = ["VOCABULARY"]

_RESUME = "train(resume_from_checkpoint=True)"
_FOLDER = "train(resume_from_checkpoint=folder)"
_NAMES = {
    **{lower_lr_advice(role): "resume from an earlier checkpoint with a lower learning_rate" for role in Role},
    "actor.dtype=float32": "bf16=False",
    "actor.lr": "learning_rate",
    "algo.advantage_estimator": "scale_rewards",
    "algo.beta": "beta",
    "algo.entropy_coef": "entropy_coef",
    "algo.epsilon_high": "epsilon_high",
    "algo.mask_truncated_completions": "mask_truncated_completions",
    "algo.num_generations": "num_generations",
    "algo.policy_loss_fn and algo.loss_agg_mode": "loss_type",
    "algo.reward_weights": "reward_weights",
    "algo.sampler_is=token": "vllm_importance_sampling_mode",
    "data.apply_chat_template=true": "conversational prompts",
    "data.batch_size": "per_device_train_batch_size",
    "data.max_length": "max_length",
    "another step-* folder": f"another checkpoint: {_FOLDER}",
    "earlier step-* folder": f"earlier checkpoint: {_FOLDER}",
    "max_tokens_to_generate": "max_completion_length",
    "optim.lr": "learning_rate",
    "optim.max_grad_norm": "max_grad_norm",
    "optim.schedule": "lr_scheduler_type",
    "optim.schedule_kwargs": "lr_scheduler_kwargs",
    "optim.total_steps": "max_steps",
    "optim.warmup_ratio": "warmup_steps",
    "optim.warmup_steps": "warmup_steps",
    "tokenizer.chat_template": "processing_class.chat_template",
    "tokenizer.response_template": "processing_class.response_template",
    "rollout.chat_template_kwargs": "chat_template_kwargs",
    "rollout.eos_tokens": "model.generation_config.eos_token_id",
    "rollout.generation_kwargs": "generation_kwargs",
    "rollout.max_prompt_length": "max_prompt_length",
    "rollout.max_tokens_to_generate": "max_completion_length",
    "rollout.temperature": "temperature",
    "rollout_engine=embedded": "use_vllm=False",
    "trainer.checkpoint_root_directory": "output_dir",
    "trainer.max_steps": "max_steps",
    "trainer.max_tokens_per_microbatch": "max_tokens_per_microbatch",
    "trainer.num_epochs": "num_train_epochs",
    "trainer.resume=latest": _RESUME,
    "trainer.run_dir": "output_dir",
}
_FIXES = {
    "actor.trust_remote_code": "read it, and set trust_remote_code=True",
    "algo.precompute_ref_log_probs": "Cannot compute reference log-probs for a dataset passed to `evaluate()` "
    "after training has started: give the set as eval_dataset at the start, or leave precompute_ref_log_probs out",
    "data.*_column": "rename them, or in SFT name the column of texts in dataset_text_field",
    "data.max_length": "set max_length={limit}",
    "data.text_column": "name a column of plain text in dataset_text_field",
    "rollout.max_prompt_length": "lower max_completion_length, leave longer prompts out, or set "
    "max_prompt_length={limit}, which cuts them on the left",
    "rollout.max_tokens_to_generate": "max_completion_length leaves no room for a prompt; set it to {limit} or less",
    "trainer.allow_config_change": "resume from an earlier checkpoint with a lower learning_rate (or {engine} reports "
    "wrong logprobs)",
    "trainer.resume": f"go on with {_RESUME}",
    "trainer.run_dir": "nothing is saved to resume from: see save_strategy and save_only_model",
    "trainer.warn_when": "",
}
VOCABULARY = Vocabulary(_NAMES, _FIXES)
"""TRL's names and fixes. `@VOCABULARY.translating()` decorates every trainer method that can raise whet's errors."""
