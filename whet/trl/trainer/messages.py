"""Errors and warnings of the layers below in TRL's words: fields of whet's sections become a script's arguments.

Whoever raises knows whet's own names alone; here is the one place where a front translates what it lets through.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from whet.errors import WhetError
from whet.run.signals import Stopped

__all__ = ["in_trl_words", "translated"]

_RESUME = "train(resume_from_checkpoint=True)"
_CUT = r" with on_long_prompt drop or truncate_left"
_PHRASES = {
    r'go on with the same program and resume="latest" in its training configuration': f"go on with {_RESUME}",
    r"nothing is saved: trainer\.run_dir is not set": "nothing is saved to resume from: see save_strategy and "
    "save_only_model",
    r"set trainer\.resume=latest to resume it": f"resume it with {_RESUME}",
    r"trainer\.resume=latest": _RESUME,
    r"(from an earlier|from another) step-\* folder": r"\1 checkpoint: train(resume_from_checkpoint=folder)",
    r" \(None = checkpoints/ in trainer\.run_dir\)": "",
    r"trainer\.checkpoint_root_directory or trainer\.run_dir": "output_dir",
    rf"set rollout\.max_prompt_length to (\d+){_CUT}, or lower max_tokens_to_generate": "lower max_completion_length, "
    r"leave longer prompts out, or set max_prompt_length=\1, which cuts them on the left",
    rf"rollout\.max_prompt_length to what is left{_CUT}": "max_prompt_length, which cuts prompts, to what is left",
    r"these rows were not there when the reference was read, and its memory has been freed since; .*": "Cannot compute "
    "reference log-probs for a dataset passed to `evaluate()` after training has started: the reference was freed when "
    "it was read; give the set as eval_dataset at the start, or leave precompute_ref_log_probs out",
    r"brings Python code of its own, (which you have to allow; read it, and) set \w+\.trust_remote_code=true "
    r"\(from Python: .*?\)\)": r"brings custom code, \1 set trust_remote_code=True",
    r" with data\.on_long=truncate or drop": "",
    r"name columns by data\.\*_column": "rename them, or in SFT name that of texts in dataset_text_field",
    r"text_column, or in prompt_column and response_column": "dataset_text_field",
    r", or set on_empty to drop": "",
    r"(resume from an earlier checkpoint) \(trainer\.resume=.*?that was saved": r"\1 with a lower learning_rate",
    r"\(data\.apply_chat_template=true\)": "(conversational prompts)",
    r"\(rollout\.eos_tokens\)": "(model.generation_config.eos_token_id)",
    r"(; )?trainer\.stop_when\.\S+ ends a run there, trainer\.warn_when\.\S+ sets the bound": "",
    r"take rollout_engine=embedded(, which samples with the trainer's own weights)": r"leave use_vllm out\1",
    r"actor\.dtype=float32": "set bf16=False",
    r"algo\.sampler_is=token": "vllm_importance_sampling_mode",
    r"algo\.policy_loss_fn and algo\.loss_agg_mode": "loss_type",
}
"""What a message says -> what it says here; the first ones first."""
_NAMES = {
    "actor.lr": "learning_rate",
    "algo.advantage_estimator": "scale_rewards",
    "algo.beta": "beta",
    "algo.entropy_coef": "entropy_coef",
    "algo.epsilon_high": "epsilon_high",
    "algo.mask_truncated_completions": "mask_truncated_completions",
    "algo.num_generations": "num_generations",
    "algo.reward_weights": "reward_weights",
    "data.batch_size": "per_device_train_batch_size",
    "data.max_length": "max_length",
    "optim.lr": "learning_rate",
    "optim.max_grad_norm": "max_grad_norm",
    "optim.schedule": "lr_scheduler_type",
    "optim.schedule_kwargs": "lr_scheduler_kwargs",
    "optim.total_steps": "max_steps",
    "optim.warmup_ratio": "warmup_steps",
    "optim.warmup_steps": "warmup_steps",
    "rollout.chat_template_kwargs": "chat_template_kwargs",
    "rollout.generation_kwargs": "generation_kwargs",
    "rollout.max_prompt_length": "max_prompt_length",
    "rollout.max_tokens_to_generate": "max_completion_length",
    "rollout.temperature": "temperature",
    "trainer.checkpoint_root_directory": "output_dir",
    "trainer.max_steps": "max_steps",
    "trainer.max_tokens_per_microbatch": "max_tokens_per_microbatch",
    "trainer.num_epochs": "num_train_epochs",
    "trainer.run_dir": "output_dir",
    "max_tokens_to_generate": "max_completion_length",
}
"""A field of whet's -> the argument that it is made of."""
_NAMED = re.compile(r"(?<![\w.])(" + "|".join(re.escape(name) for name in sorted(_NAMES, reverse=True)) + r")(?!\w)")


def translated(text: str) -> str:
    """A message of whet's in TRL's words.

    >>> translated("no room; raise rollout.max_tokens_to_generate, then resume with trainer.resume=latest")
    'no room; raise max_completion_length, then resume with train(resume_from_checkpoint=True)'
    """
    for said, instead in _PHRASES.items():
        text = re.sub(said, instead, text)
    return _NAMED.sub(lambda found: _NAMES[found[1]], text)


class _Warnings(logging.Filter):
    """Translates what is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        record.msg, record.args = translated(record.getMessage()), ()
        return True


@contextmanager
def in_trl_words() -> Iterator[None]:
    """Translates whet's errors that pass, each still of its class and with its traceback, and what is logged."""
    log, words = logging.getLogger("whet"), _Warnings()
    log.addFilter(words)
    try:
        yield
    except (WhetError, Stopped) as error:
        error.args = (translated(str(error)),)
        raise
    finally:
        log.removeFilter(words)
