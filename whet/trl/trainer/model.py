"""Prepares the given model for whet: a name or a module, its adapter, quantised weights, dtype."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from whet.config import LoraConfig, RoleConfig
from whet.errors import ConfigError
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.adapters import Adapter
from whet.models.heads import add_score_head, score_layer
from whet.models.load import load_model
from whet.models.lora import add_adapter
from whet.models.prompt_tuning import is_prompt_tuned
from whet.trl.config.arguments import WrongArgument
from whet.util.model_paths import model_folder

__all__ = ["model_name", "module_dtype", "prepare_model", "trusts_remote_code", "unwrap_peft", "with_revision"]

log = logging.getLogger("whet")

_OF_PEFT = {
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
"""Field of PEFT's LoraConfig -> its values for W + s·B·A in every layer; with others PEFT's own layers run."""
_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
"""Layers that are one tensor of all experts in a mixture of experts."""
_HALF = ("float16", "torch.float16", "half", "fp16")
"""Values of dtype in model_init_kwargs that mean float16."""
_FROZEN_HEAD = "modules_to_save"
"""The field that a reward model's adapter needs to train its head."""


_PROMPT = "is_prompt_learning"
"""The attribute of a configuration of a learned prompt."""


def _lora_of(given: Any, model: str | nn.Module, *, trust: bool, dropout: bool = False) -> LoraConfig:
    """Whet's configuration of an adapter.

    Args: given: PEFT's LoraConfig. model: that gets it; without target_modules they are PEFT's own for its kind.
        trust: its code may run.
        dropout: lora_dropout is kept: nothing samples from the model.
    Raises: ConfigError: another kind of adapter, or one that is more than W + s·B·A.
    """
    _check_lora(given)
    if given.lora_dropout and not dropout:
        log.warning(
            "peft_config.lora_dropout=%s is taken as 0.0: the sampler draws without dropout, and would draw from "
            "another policy than the one that is trained",
            given.lora_dropout,
        )
    targets = given.target_modules or _usual_targets(model, trust)
    return LoraConfig(
        r=given.r,
        lora_alpha=given.lora_alpha,
        lora_dropout=given.lora_dropout if dropout else 0.0,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=given.use_rslora,
        modules_to_save=tuple(given.modules_to_save or ()),
        init_lora_weights="gaussian" if given.init_lora_weights == "gaussian" else "default",
    )


def _check_lora(given: Any) -> None:
    """Raises ConfigError: no LoraConfig, or a field with which it is more than W + s·B·A."""
    if type(given).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(given).__name__}; adapters here are LoRA: give peft.LoraConfig")
    for name, taken in _OF_PEFT.items():
        value = getattr(given, name, taken[0])
        if value not in taken:
            raise ConfigError(f"peft_config.{name}={value!r} is not taken: adapters here are W + s·B·A; leave it out")


def _config_of(model: str, trust: bool) -> Any:
    """The configuration of a model by its name. Args: trust: the code in its folder may run."""
    return AutoConfig.from_pretrained(model_folder(model), trust_remote_code=trust)


def _by_peft(model: Any, given: Any, scored: bool, trust: bool) -> str:
    """Why PEFT's own layers are to run: what whet's LoraConfig can't say; "" where it says all.

    Args: model: that gets the adapter. given: PEFT's LoraConfig. scored: it is a reward model. trust: its code may run.
    """
    if getattr(given, "is_prompt_learning", False):
        return _PROMPT
    if type(given).__name__ != "LoraConfig":
        return ""
    for name, taken in _OF_PEFT.items():
        if getattr(given, name, taken[0]) not in taken:
            return name
    if scored and given.task_type != "SEQ_CLS" and "score" not in (given.modules_to_save or ()):
        return _FROZEN_HEAD
    if isinstance(given.target_modules, set | list):
        if isinstance(model, str):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(_config_of(model, trust), trust_remote_code=trust)
        linear = {"score"} | {n.rpartition(".")[2] for n, x in model.named_modules() if isinstance(x, nn.Linear)}
        names = {name.rpartition(".")[2] for name in given.target_modules}
        if (names - linear) & _EXPERTS:
            return "target_modules"
    return ""


def _with_peft(model: Any, given: Any, args: Any, why: str, scored: bool) -> nn.Module:
    """A model with an adapter of PEFT's own configuration. Args: why: as `_by_peft` says it."""
    if why == _PROMPT:
        return _with_prompt(model, given, args)
    if why == _FROZEN_HEAD:
        log.warning(
            "peft_config trains no score head, as in TRL, so that scores come from one that was drawn at random where "
            "the model had none; set modules_to_save=['score'] to train it"
        )
    else:
        log.warning("peft_config.%s: PEFT's own layers run, which are slower than whet's for plain LoRA", why)
    if scored and score_layer(model) is None:
        model = add_score_head(model)
    head: Any = score_layer(model) if scored else None
    if head is not None and not head.weight.any():  # a new one, which whet begins at 0: frozen it would teach nothing
        nn.init.normal_(head.weight, std=model.config.get_text_config().initializer_range)
    add_adapter(model, given, seed=args.seed)
    return model


def _with_prompt(model: Any, given: Any, args: Any) -> nn.Module:
    """PEFT's model around one, with virtual tokens to learn. Raises ConfigError: recomputed layers can't read them."""
    import peft

    if given.peft_type.value == "PREFIX_TUNING" and args.gradient_checkpointing:
        raise ConfigError(
            "PREFIX_TUNING does not work with gradient checkpointing: a layer that runs again would read its own keys; "
            "set gradient_checkpointing=False"
        )
    given = copy.deepcopy(given)
    given.task_type = given.task_type or "CAUSAL_LM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        made = peft.get_peft_model(model, given)
    vars(made)["whet_new_prompt"] = True
    return made


def _usual_targets(model: str | nn.Module, trust: bool) -> list[str]:
    """The layers that PEFT adapts where none are named, by the kind of the model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    config: Any = _config_of(model, trust) if isinstance(model, str) else model.config
    if config.model_type not in USUAL:
        raise ConfigError(
            f"peft_config names no target_modules, and PEFT knows none for {config.model_type}; set "
            'target_modules="all-linear"'
        )
    return list(USUAL[config.model_type])


def _quantization_of(given: Any) -> str:
    """Whet's word for transformers' BitsAndBytesConfig. Raises ConfigError: 8 bits, or another library's."""
    if not getattr(given, "load_in_4bit", False):
        raise ConfigError(
            f"quantization_config is {type(given).__name__} without load_in_4bit; give BitsAndBytesConfig(load_in_4bit="
            "True), with peft_config"
        )
    return str(given.bnb_4bit_quant_type)


def unwrap_peft(model: Any) -> Any:
    """The model in PEFT's wrapper, its adapter in it; any other as it is, one whose prompt is learned among them."""
    if is_prompt_tuned(model):
        return model
    wrapped = hasattr(model, "get_base_model") and hasattr(model, "peft_config")
    return model.get_base_model() if wrapped else model


def model_name(model: Any) -> str:
    """The hub name or folder of a model, or its class where it has neither."""
    return str(model if isinstance(model, str) else model.name_or_path or type(model).__name__)


def _check_peft(model: Any, peft_config: Any) -> None:
    """Raises ConfigError: a second adapter. WrongArgument: no configuration of PEFT's."""
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
    """The model as a cluster takes it, with its adapter.

    Args: model: a name, a folder or a module. args: the configuration. peft_config: PEFT's; None = no adapter.
        quantization_config: BitsAndBytesConfig, for a model given by its name; None = that of model_init_kwargs.
        supervised: nothing samples from the model, so that its adapter may have dropout, and may be any LoRA of PEFT's.
        scored: it is a reward model.
    """
    _check_peft(model, peft_config)
    asked, model, trust = args.model_init_kwargs or {}, with_revision(model, args), trusts_remote_code(args)
    bits = bool(quantization_config or asked.get("quantization_config"))  # whet reads these
    why = _by_peft(model, peft_config, scored, trust) if supervised and peft_config is not None and not bits else ""
    lora = None if peft_config is None or why else _lora_of(peft_config, model, trust=trust, dropout=supervised)
    half = supervised and not bits and str(asked.get("dtype", asked.get("torch_dtype"))) in _HALF
    by_name = isinstance(model, str)
    if by_name and (half or why):
        _role(args, model)  # which refuses what is not read of model_init_kwargs
        role, dtype = "critic" if scored else "actor", "float16" if half else "float32"
        more = {"dtype": dtype, "role": role, "trust_remote_code": trust}
        model = load_model(model, device=args.device, **more).module
    if why:
        model = _with_peft(model, peft_config, args, why, scored)
    if isinstance(model, str):
        own = asked.get("quantization_config")
        if own is not None and quantization_config is not None:
            raise ConfigError("quantization_config is in model_init_kwargs too; give it to the trainer alone")
        given = quantization_config if own is None else own
        quantization = None if given is None else _quantization_of(given)
        return dataclasses.replace(_role(args, model), lora=lora, quantization=quantization)
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(f"{model_name(model)} is on the meta device and has no weights; load it by from_pretrained")
    for name, value in (
        ("model_init_kwargs", None if by_name else args.model_init_kwargs),
        ("quantization_config", quantization_config),
    ):
        if value is not None:
            log.warning("%s is not read: the model is loaded already", name)
    if lora is not None:
        add_adapter(model, lora, seed=args.seed)  # pyright: ignore[reportArgumentType]
    if args.gradient_checkpointing:
        base: Any = model
        checkpoint_activations(base.get_base_model() if is_prompt_tuned(model) else base, _recompute(args))
    return model


def with_revision(model: Any, args: Any) -> Any:
    """A hub name with the revision of model_init_kwargs behind it; any other model as it is."""
    revision = (args.model_init_kwargs or {}).get("revision")
    if revision in (None, "main") or not isinstance(model, str) or Path(model).expanduser().exists() or "@" in model:
        return model
    return f"{model}@{revision}"


def trusts_remote_code(args: Any) -> bool:
    """Whether the Python files in a model's folder may run."""
    return bool((args.model_init_kwargs or {}).get("trust_remote_code", args.trust_remote_code))


def _role(args: Any, model: str) -> RoleConfig:
    """The section of a model that is given by name or folder."""
    taken = {"dtype", "torch_dtype", "device_map", "attn_implementation", "use_cache", "quantization_config"}
    taken |= {"trust_remote_code", "revision"}
    if others := sorted(set(args.model_init_kwargs or {}) - taken):
        raise ConfigError(
            f"model_init_kwargs: {others[0]!r} is not taken; load the model by from_pretrained with it, and give the "
            "trainer the module"
        )
    dtype: Any = {None: "auto", True: "bfloat16", False: "float32"}[args.bf16]
    return RoleConfig(
        model=model, dtype=dtype, trust_remote_code=trusts_remote_code(args), gradient_checkpointing=_recompute(args)
    )


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


def _recompute(args: Any) -> Literal["none", "full"]:
    """Which activations are recomputed."""
    return "full" if args.gradient_checkpointing else "none"
