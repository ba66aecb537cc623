"""From TRL's configurations to whet's: what every trainer has, its model, optimizer and loop. Nothing is computed."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import nn

from whet.config import OptimConfig, RoleConfig
from whet.config.training import CheckpointingOptions
from whet.errors import ConfigError, lookup_error

__all__ = ["NEVER", "ON_LONG", "check_rows", "loop_fields", "module_dtype", "optimizer", "recompute", "role"]

log = logging.getLogger("whet")

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
ON_LONG = {"keep_start": "truncate", "keep_end": "truncate_left"}
"""truncation_mode -> what becomes of rows over max_length."""
NEVER = 10**9
"""Steps between what callbacks ask for and no interval does."""


def optimizer(args: Any, total: int | None) -> OptimConfig:
    """The optimizer's section. Args: total: updates of the run; None = not known."""
    if args.optim not in _OPTIMIZERS:
        raise lookup_error("optim", str(args.optim), _OPTIMIZERS)
    schedule = args.lr_scheduler_type.value
    return OptimConfig(
        name=_OPTIMIZERS[args.optim],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        schedule=schedule,
        schedule_kwargs=dict(args.lr_scheduler_kwargs or {}),
        warmup_steps=args.get_warmup_steps(total or 0),
        total_steps=total,
        max_grad_norm=args.max_grad_norm or 0.0,
    )


def check_rows(args: Any) -> None:
    """Raises ConfigError: a way to cut or order rows that is not there. Args: args: of supervised training."""
    if "truncation_mode" in args.TABLE and args.truncation_mode not in ON_LONG:
        raise lookup_error("truncation_mode", args.truncation_mode, ON_LONG)
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} is not taken: passes are packed, and nothing is "
            "padded, so rows need not be of like length; take 'random' or 'sequential'"
        )


def role(args: Any, model: str) -> RoleConfig:
    """The section of a model that is given by name or folder."""
    taken = {"dtype", "torch_dtype", "device_map", "attn_implementation", "use_cache"}
    if (args.model_init_kwargs or {}).get("revision") in (None, "main"):
        taken.add("revision")
    if others := sorted(set(args.model_init_kwargs or {}) - taken):
        raise ConfigError(
            f"model_init_kwargs: {others[0]!r} is not taken; load the model by from_pretrained with it, and give the "
            "trainer the module"
        )
    dtype: Any = {None: "auto", True: "bfloat16", False: "float32"}[args.bf16]
    return RoleConfig(model=model, dtype=dtype, gradient_checkpointing=recompute(args))


def module_dtype(args: Any, model: Any, optimizers: tuple[Any, Any]) -> str | None:
    """What a model that is given as a module computes in; None = in the dtype that it has, and so does one of bf16.

    Args: optimizers: that were given. One over the module's own parameters leaves them as they are.
    """
    if not isinstance(model, nn.Module) or args.bf16 is False:
        return None
    if optimizers[0] is not None:
        if args.bf16:
            log.warning("bf16=True: the model computes in fp32, since the optimizer that was given holds its weights")
        return None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return None if dtypes != {torch.float32} else "bfloat16" if args.bf16 else "auto"


def recompute(args: Any) -> Literal["none", "full"]:
    """What of the activations is recomputed."""
    return "full" if args.gradient_checkpointing else "none"


def loop_fields(args: Any, steps: int | None, root: str | None) -> dict[str, Any]:
    """What every loop's section has; when to save, evaluate and stop is the callbacks' to say.

    Args: steps: of the run. root: of the checkpoints; None = none.
    """
    return {
        "max_steps": steps,
        "seed": args.seed,
        "data_shuffle_seed": args.data_seed,
        "checkpoint_root_directory": root,
        "checkpointing_options": CheckpointingOptions(save_interval_steps=NEVER, max_to_keep=None),
        "pbar_description": None,
        "allow_config_change": True,
    }
