"""Prepares the user's model for whet: a name or a module, its adapter, its quantization, its dtype."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from whet.config import LoraConfig, RoleConfig
from whet.errors import ConfigError, format_value
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.heads import add_score_head, score_layer
from whet.models.load import load_model
from whet.models.lora import add_adapter
from whet.models.lora_layers import Adapter
from whet.models.prompt_tuning import is_prompt_tuned
from whet.storage.model_paths import model_folder
from whet.trl.config.arguments import WrongArgument

__all__ = [
    "model_name",
    "module_dtype",
    "named_dtype",
    "place_module",
    "prepare_model",
    "trusts_remote_code",
    "unwrap_peft",
    "with_revision",
]

log = logging.getLogger("whet")

_PLAIN_LORA = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "trainable_token_indices": (None, {}, []),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
    "use_dora": (False,),
}
"""Field of PEFT's LoraConfig -> the values that mean W + s·B·A in every layer. Other values need PEFT's own layers."""
_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
"""Layers that hold all experts in one tensor in a mixture of experts."""
_HALF = ("float16", "torch.float16", "half", "fp16")
"""Values of dtype in model_init_kwargs that mean float16."""
_FROZEN_HEAD = "modules_to_save"
"""The reason for PEFT's layers: a reward model's adapter that does not train the score head."""
_PROMPT = "is_prompt_learning"
"""The reason for PEFT's layers: a learned prompt."""


def _without_dropout(peft_config: Any) -> Any:
    """Returns the configuration with dropouts of 0; logs a warning if there is dropout."""
    for field in ("lora_dropout", "encoder_dropout"):
        if not getattr(peft_config, field, 0.0):
            continue
        log.warning(
            "peft_config.%s=%s is taken as 0.0: the sampler has no dropout, so it would sample from another policy "
            "than the one in training",
            field,
            getattr(peft_config, field),
        )
        peft_config = copy.deepcopy(peft_config)
        setattr(peft_config, field, 0.0)
    return peft_config


def _to_whet_lora(peft_config: Any, model: str | nn.Module, *, trust: bool) -> LoraConfig:
    """Translates PEFT's LoraConfig to whet's.

    Args: model: the model to adapt; target_modules default to PEFT's for its type. trust: whether its code may run.
    Raises: ConfigError: another kind of adapter, or one that is more than W + s·B·A.
    """
    if type(peft_config).__name__ != "LoraConfig":
        kind = type(peft_config).__name__
        raise ConfigError(
            f"peft_config is of the class {kind}: whet saves, resumes and switches off PEFT's LoRA, and its prompt "
            "tuning on a base that is not quantized; give peft.LoraConfig"
        )
    if field := _unsupported_field(peft_config):
        raise ConfigError(
            f"peft_config.{field}={getattr(peft_config, field)!r} is not supported: adapters here are W + s·B·A; leave "
            "it out"
        )
    targets = peft_config.target_modules or _default_targets(model, trust)
    return LoraConfig(
        r=peft_config.r,
        lora_alpha=peft_config.lora_alpha,
        lora_dropout=peft_config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=peft_config.use_rslora,
        modules_to_save=tuple(peft_config.modules_to_save or ()),
        init_lora_weights="gaussian" if peft_config.init_lora_weights == "gaussian" else "default",
    )


def _unsupported_field(peft_config: Any) -> str:
    """Returns the first field of a LoraConfig that whet's adapters don't support; "" = none."""
    fields = _PLAIN_LORA.items()
    return next((name for name, plain in fields if getattr(peft_config, name, plain[0]) not in plain), "")


def _load_config(model: str, trust: bool) -> Any:
    """Loads the configuration of a model. Args: trust: whether the code in its folder may run."""
    return AutoConfig.from_pretrained(model_folder(model), trust_remote_code=trust)


def _reason_for_peft(model: Any, peft_config: Any, scored: bool, trust: bool) -> str:
    """Returns the reason why PEFT's own layers must run: a field that whet's LoraConfig can't express; "" = no reason.

    Args: model: the model to adapt. scored: whether it is a reward model. trust: whether its code may run.
    """
    if getattr(peft_config, _PROMPT, False):
        return _PROMPT
    if type(peft_config).__name__ != "LoraConfig":
        return ""
    if field := _unsupported_field(peft_config):
        return field
    if scored and peft_config.task_type != "SEQ_CLS" and "score" not in (peft_config.modules_to_save or ()):
        return _FROZEN_HEAD
    if isinstance(peft_config.target_modules, set | list):
        if isinstance(model, str):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(_load_config(model, trust), trust_remote_code=trust)
        linear = {"score"} | {n.rpartition(".")[2] for n, x in model.named_modules() if isinstance(x, nn.Linear)}
        names = {name.rpartition(".")[2] for name in peft_config.target_modules}
        if (names - linear) & _EXPERTS:
            return "target_modules"
    return ""


def _add_peft_layers(model: Any, peft_config: Any, args: Any, reason: str, scored: bool) -> nn.Module:
    """Adds PEFT's own layers to a model. Args: reason: the result of `_reason_for_peft`."""
    if reason == _PROMPT:
        return _add_learned_prompt(model, peft_config, args)
    if reason == _FROZEN_HEAD:
        log.warning(
            "as in TRL, peft_config does not train the score head; if the model had no head, a random one computes the "
            "scores. Set modules_to_save=['score'] to train it"
        )
    else:
        log.warning("peft_config.%s: PEFT's own layers run, which are slower than whet's for plain LoRA", reason)
    if scored and score_layer(model) is None:
        model = add_score_head(model)
    head: Any = score_layer(model) if scored else None
    if head is not None and not head.weight.any():  # whet's new heads are 0, which would stay 0 when frozen
        nn.init.normal_(head.weight, std=model.config.get_text_config().initializer_range)
    add_adapter(model, peft_config, seed=args.seed)
    return model


def _add_learned_prompt(model: Any, peft_config: Any, args: Any) -> nn.Module:
    """Wraps a model in PEFT's, with virtual tokens to learn. Raises ConfigError: prefixes, gradient checkpointing."""
    import peft

    if peft_config.peft_type.value == "PREFIX_TUNING" and args.gradient_checkpointing:
        raise ConfigError(
            "PREFIX_TUNING does not work with gradient checkpointing: a recomputed layer would read its own keys; set "
            "gradient_checkpointing=False"
        )
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = peft_config.task_type or "CAUSAL_LM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        wrapper = peft.get_peft_model(model, peft_config)
    vars(wrapper)["whet_new_prompt"] = True
    return wrapper


def _default_targets(model: str | nn.Module, trust: bool) -> list[str]:
    """PEFT's default target_modules for the model's type."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    config: Any = _load_config(model, trust) if isinstance(model, str) else model.config
    if config.model_type not in DEFAULTS:
        raise ConfigError(
            f"peft_config names no target_modules, and PEFT knows none for {config.model_type}; set "
            'target_modules="all-linear"'
        )
    return list(DEFAULTS[config.model_type])


def unwrap_peft(model: Any) -> Any:
    """Returns the model inside PEFT's wrapper, with its adapter layers. Other models, and learned prompts, are
    unchanged.
    """
    if is_prompt_tuned(model):
        return model
    is_wrapper = hasattr(model, "get_base_model") and hasattr(model, "peft_config")
    return model.get_base_model() if is_wrapper else model


def model_name(model: Any) -> str:
    """Returns the hub name or folder of a model, or its class if it has neither. Raises ConfigError: it is no model."""
    if not isinstance(model, str | nn.Module):
        raise ConfigError(f"model must be a module, or a folder or hub name as str, got {format_value(model, 80)}")
    return str(model if isinstance(model, str) else model.name_or_path or type(model).__name__)


def _check_peft_config(model: Any, peft_config: Any) -> None:
    """Raises ConfigError: a second adapter. WrongArgument: not a PEFT configuration."""
    if peft_config is None:
        return
    if not hasattr(peft_config, "peft_type"):
        raise WrongArgument(
            f"`peft_config` must be a `peft.PeftConfig` instance (e.g. `peft.LoraConfig`), got "
            f"{type(peft_config).__name__}."
        )
    if is_prompt_tuned(model) or (isinstance(model, nn.Module) and Adapter.from_module(model) is not None):
        raise ConfigError(
            "You passed a `PeftModel` instance together with a `peft_config` to the trainer: leave `peft_config` out "
            "to train the adapter that is there, or merge it first by model.merge_and_unload()"
        )


def prepare_model(
    model: str | nn.Module,
    args: Any,
    peft_config: Any,
    quantization_config: Any,
    *,
    supervised: bool = False,
    scored: bool = False,
) -> RoleConfig | nn.Module:
    """Returns the model with its adapter, in a form that a cluster takes.

    Args:
        model: a name, a folder or a module.
        args: the trainer's arguments.
        peft_config: PEFT's configuration; None = no adapter.
        quantization_config: BitsAndBytesConfig, for a model given by name; None = that of model_init_kwargs.
        supervised: whether nothing samples from the model; then its adapter may have dropout.
        scored: whether it is a reward model.
    """
    _check_peft_config(model, peft_config)
    peft_config = peft_config if supervised else _without_dropout(peft_config)
    init_kwargs, model, trust = args.model_init_kwargs or {}, with_revision(model, args), trusts_remote_code(args)
    is_quantized = bool(quantization_config or init_kwargs.get("quantization_config"))
    reason, lora = "", None
    if peft_config is not None and not is_quantized:
        reason = _reason_for_peft(model, peft_config, scored, trust)
    if peft_config is not None and not reason:
        lora = _to_whet_lora(peft_config, model, trust=trust)
    is_half = supervised and not is_quantized and str(init_kwargs.get("dtype", init_kwargs.get("torch_dtype"))) in _HALF
    by_name = isinstance(model, str)
    if by_name and (is_half or reason):
        _make_role(args, model)  # checks model_init_kwargs
        role, dtype = "critic" if scored else "actor", "float16" if is_half else "float32"
        model = load_model(model, device=args.device, dtype=dtype, role=role, trust_remote_code=trust).module
    if reason:
        model = _add_peft_layers(model, peft_config, args, reason, scored)
    if isinstance(model, str):
        quantization = init_kwargs.get("quantization_config")
        if quantization is not None and quantization_config is not None:
            raise ConfigError("quantization_config is in model_init_kwargs too; give it only to the trainer")
        quantization = quantization_config if quantization is None else quantization
        if quantization is not None and not getattr(quantization, "load_in_4bit", False):
            raise ConfigError(
                f"quantization_config is {type(quantization).__name__} without load_in_4bit; give "
                "BitsAndBytesConfig(load_in_4bit=True), with peft_config"
            )
        quant_type = None if quantization is None else str(quantization.bnb_4bit_quant_type)
        return dataclasses.replace(_make_role(args, model), lora=lora, quantization=quant_type)
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(f"{model_name(model)} is on the meta device and has no weights; load it by from_pretrained")
    model = place_module(model, args)
    if args.model_init_kwargs is not None and not by_name:
        log.warning("model_init_kwargs is not read: the model is loaded already")
    if quantization_config is not None:
        log.warning("quantization_config is not read: the model is loaded already")
    if lora is not None:
        add_adapter(model, lora, seed=args.seed)  # pyright: ignore[reportArgumentType]
    if args.gradient_checkpointing:
        base: Any = model
        checkpoint_activations(base.get_base_model() if is_prompt_tuned(model) else base, "full")
    return model


def place_module(model: nn.Module, args: Any) -> nn.Module:
    """Returns a module on the kind of device that the arguments name, as transformers' trainer moves it. Several
    processes move it as they shard it.
    """
    kind = next(model.parameters()).device.type
    return model if args.world_size > 1 or kind == args.device.type else model.to(args.device)


def with_revision(model: Any, args: Any) -> Any:
    """Appends the revision of model_init_kwargs to a hub name; other models are unchanged."""
    revision = (args.model_init_kwargs or {}).get("revision")
    if revision in (None, "main") or not isinstance(model, str) or Path(model).expanduser().exists() or "@" in model:
        return model
    return f"{model}@{revision}"


def trusts_remote_code(args: Any) -> bool:
    """Returns whether the Python files in a model's folder may run."""
    return bool((args.model_init_kwargs or {}).get("trust_remote_code", args.trust_remote_code))


_INIT_KWARGS = {
    "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "quantization_config", "revision", "torch_dtype",
    "trust_remote_code", "use_cache", "use_safetensors",
}  # fmt: skip
"""Supported keys of model_init_kwargs."""


def _make_role(args: Any, model: str) -> RoleConfig:
    """Returns the configuration of a model that is given by name or folder. Raises ConfigError: another
    model_init_kwargs.
    """
    if unsupported := sorted(set(args.model_init_kwargs or {}) - _INIT_KWARGS):
        raise ConfigError(
            f"model_init_kwargs: {unsupported[0]!r} is not supported; load the model by from_pretrained with it, and "
            "give the trainer the module"
        )
    dtype: Any = {None: "auto", True: "bfloat16", False: "float32"}[args.bf16]
    return RoleConfig(
        model=model,
        dtype=dtype,
        trust_remote_code=trusts_remote_code(args),
        gradient_checkpointing="full" if args.gradient_checkpointing else "none",
    )


def named_dtype(args: Any, own: torch.dtype) -> torch.dtype:
    """Returns the dtype in which TRL holds and saves a model that is given by name: float32, or that of
    model_init_kwargs.

    Args: own: the dtype of the model's files, for "auto".
    """
    init_kwargs = args.model_init_kwargs or {}
    name = str(init_kwargs.get("dtype", init_kwargs.get("torch_dtype")) or "float32").removeprefix("torch.")
    return own if name == "auto" else getattr(torch, name)


def module_dtype(args: Any, model: Any, optimizers: tuple[Any, Any]) -> str | None:
    """Returns the dtype in which a module computes; None = its parameters' dtype.

    Args: optimizers: the user's. An optimizer over the module's own parameters keeps their dtype.
    """
    if not isinstance(model, nn.Module) or args.bf16 is False:
        return None
    if optimizers[0] is not None:
        if args.bf16:
            log.warning("bf16=True: the model computes in fp32, because the optimizer in `optimizers` has its weights")
        return None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return None if dtypes != {torch.float32} else "bfloat16" if args.bf16 else "auto"
