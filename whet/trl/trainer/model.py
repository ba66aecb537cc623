"""PEFT's and transformers' configurations of adapters and quantised weights, as whet's."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from whet.config import LoraConfig, RoleConfig
from whet.errors import ConfigError
from whet.models.lora import with_adapter
from whet.models.recompute import checkpoint_activations
from whet.trl.config.translate_all import recompute, role

__all__ = ["adapted", "inner_model", "lora_of", "name_of", "quantization_of"]

log = logging.getLogger("whet")

_PLAIN = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
    "use_dora": (False,),
}
"""Fields of PEFT's LoraConfig that may only be so: what is trained is W + s·B·A."""


def lora_of(given: Any, model: str | nn.Module, *, dropout: bool = False) -> LoraConfig:
    """Whet's configuration of an adapter.

    Args: given: PEFT's LoraConfig. model: that gets it; without target_modules they are PEFT's own for its kind.
        dropout: lora_dropout is kept: nothing samples from the model.
    Raises: ConfigError: another kind of adapter, or one that is more than W + s·B·A.
    """
    if type(given).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(given).__name__}; adapters here are LoRA: give peft.LoraConfig")
    for name, taken in _PLAIN.items():
        value = getattr(given, name, taken[0])
        if value not in taken:
            raise ConfigError(f"peft_config.{name}={value!r} is not taken: adapters here are W + s·B·A; leave it out")
    if given.lora_dropout and not dropout:
        log.warning(
            "peft_config.lora_dropout=%s is taken as 0.0: the sampler draws without dropout, and would draw from "
            "another policy than the one that is trained",
            given.lora_dropout,
        )
    targets = given.target_modules or _usual_targets(model)
    return LoraConfig(
        r=given.r,
        lora_alpha=given.lora_alpha,
        lora_dropout=given.lora_dropout if dropout else 0.0,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=given.use_rslora,
        modules_to_save=tuple(given.modules_to_save or ()),
        init_lora_weights="gaussian" if given.init_lora_weights == "gaussian" else "default",
    )


def _usual_targets(model: str | nn.Module) -> list[str]:
    """The layers that PEFT adapts where none are named, by the kind of the model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    if config.model_type not in USUAL:
        raise ConfigError(
            f"peft_config names no target_modules, and PEFT knows none for {config.model_type}; set "
            'target_modules="all-linear"'
        )
    return list(USUAL[config.model_type])


def quantization_of(given: Any) -> str:
    """Whet's word for transformers' BitsAndBytesConfig. Raises ConfigError: 8 bits, or another library's."""
    if not getattr(given, "load_in_4bit", False):
        raise ConfigError(
            f"quantization_config is {type(given).__name__} without load_in_4bit; give BitsAndBytesConfig(load_in_4bit="
            "True), with peft_config"
        )
    return str(given.bnb_4bit_quant_type)


def inner_model(model: Any) -> Any:
    """The model in PEFT's wrapper, its adapter in it; any other as it is."""
    wrapped = hasattr(model, "get_base_model") and hasattr(model, "peft_config")
    return model.get_base_model() if wrapped else model


def name_of(model: Any) -> str:
    """The hub name or folder of a model, or its class where it has neither."""
    return str(model if isinstance(model, str) else model.name_or_path or type(model).__name__)


def adapted(
    model: str | nn.Module, args: Any, peft_config: Any, quantization_config: Any, *, dropout: bool = False
) -> RoleConfig | nn.Module:
    """The model as a cluster takes it, with its adapter.

    Args: model: a name, a folder or a module. args: the configuration. peft_config: PEFT's; None = no adapter.
        quantization_config: BitsAndBytesConfig, for a model given by its name; None = none. dropout: as of lora_of.
    """
    lora = None if peft_config is None else lora_of(peft_config, model, dropout=dropout)
    if isinstance(model, str):
        bits = None if quantization_config is None else quantization_of(quantization_config)
        return dataclasses.replace(role(args, model), lora=lora, quantization=bits)
    if quantization_config is not None:
        raise ConfigError("quantization_config is for a model given by its name; this one is loaded already")
    if lora is not None:
        with_adapter(model, lora, seed=args.seed)  # pyright: ignore[reportArgumentType]
    if args.gradient_checkpointing:
        checkpoint_activations(model, recompute(args))  # pyright: ignore[reportArgumentType]
    return model
