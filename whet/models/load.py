"""Loads Hugging Face models for training, and saves them.

A model that takes a layout (`packable`) trains on packed rows with shared prefixes. Any other model trains on padded
rows with its own attention. Dim legend: D width.
Left out on purpose: reading the files (pretrained.py), and finding out what a model supports (model_capabilities.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from whet.config.lora import LoraConfig
from whet.errors import ConfigError, format_exception, lookup_error
from whet.models.adapters import Adapter
from whet.models.attention import ATTENTION, KERNELS
from whet.models.heads import Head, add_score_head, has_score_head, score_layer
from whet.models.loaded_model import LoadedModel
from whet.models.lora import (
    ADAPTER_CONFIG,
    SavedAdapter,
    add_adapter,
    check_adapter,
    check_lora,
    find_adapter,
    merged_model,
    save_adapter,
)
from whet.models.model_capabilities import find_capabilities
from whet.models.pretrained import PretrainedModule, adapter_folder, check_config, read_model, wrong_role_hint
from whet.models.prompt_tuning import PromptAdapter, is_prompt_tuned
from whet.models.quantized import quantization_config

__all__ = ["DTYPES", "check_device", "load_model", "save_model"]

logger = logging.getLogger("whet")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ROLES = ("actor", "critic", "reference", "reward", "teacher")
READ_ONLY_ROLES = ("reference", "reward", "teacher")


def load_model(
    model: str | Path | nn.Module,
    *,
    dtype: str | torch.dtype = "float32",
    device: torch.device | str = "cpu",
    role: str = "actor",
    attention: str = "auto",
    score_head: bool = False,
    lora: LoraConfig | None = None,
    quantization: str | None = None,
    merge: bool | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a causal language model, critic or reward model from a folder or the hub, or prepares a module.

    Args:
        model: a folder (of a model, of an adapter, which stands for its base with it, of a finished run, or of a
            checkpoint), a hub name, or a transformers module, which keeps its dtype.
        dtype: of the parameters: float32, bfloat16, float16, float64. The checkpoint's dtype is not the default: master
            weights read in bf16 would lose every small update.
        device: the device of the model.
        role: actor, reference or teacher (no gradient), critic (a score head, new where the model has none) or reward
            (the model's score head). A score head is that of transformers' sequence classifiers with one label.
        attention: the implementation of attention over packed rows: auto, flex or plain.
        score_head: a score head besides a LM head, new where there is none: a critic on the actor's trunk.
        lora: puts a new adapter into the model; the adapter, a score head and modules to save are trained.
        quantization: keeps the base's linear layers in 4 bits: nf4 or fp4.
        merge: merges a saved adapter into its base; None = in a role that is only read, unless the base is in 4 bits or
            in half precision, where rounding would lose the adapter's part.
        seed: of a new adapter.
        trust_remote_code: runs the Python files of the model's folder.
    Returns: the LoadedModel. Dropouts that were above 0 are logged, and so is the reason why a model trains padded.
    Raises: ConfigError: an unknown dtype, role, attention or device, nothing to read there or not all of it, flex
        without CUDA, or not a text-only causal language model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    >>> loaded = load_model(LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)))
    >>> loaded.packable, loaded.lm_head.kind
    (True, 'identity')
    """
    if is_prompt_tuned(model):
        return _load_prompt_tuned(model, device=device, role=role)
    device, dtype = check_device(device), _dtype(dtype)
    _check_choices(role, attention, device)
    saved = _find_saved_adapter(model, lora, role)
    if lora is not None and not isinstance(model, nn.Module):
        check_lora(str(model), lora, trust_remote_code)
    read = _prepare_module(model if saved is None else saved, dtype, role, quantization, device, trust_remote_code)
    facts, name = find_capabilities(read.module, read.name), read.name
    module = _add_heads(read.module, read.score_weight, role, name, score_head)
    if merge is None:
        merge = role in READ_ONLY_ROLES and quantization is None and dtype.itemsize >= 4
    module = _apply_adapter(module, saved or lora, seed, merge and saved is not None)
    _set_attention(module, facts.unpackable_reasons, attention, name)
    if role in ("reference", "teacher"):
        module.requires_grad_(False)
    return LoadedModel(
        module=module,
        packable=not facts.unpackable_reasons,
        unpackable_reasons=facts.unpackable_reasons,
        lm_head=Head("none") if has_score_head(module) else facts.head,
        name=name,
        attention=attention,
        score_head=score_layer(module),
        adapter=Adapter.from_module(module),
        saved_dtype=read.dtype,
    )


def _load_prompt_tuned(model: Any, device: torch.device | str, role: str) -> LoadedModel:
    """Loads a prompt-tuned PEFT model. Raises ConfigError: a model with a score head, or an unknown head."""
    if role not in ("actor", "reference"):
        raise ConfigError(f"a prompt is learned for a language model, not for a {role}; give peft.LoraConfig")
    loaded = load_model(model.get_base_model(), device=device, role=role)
    if loaded.lm_head.kind == "unknown":
        raise ConfigError(
            f"{loaded.name} makes its logits in a way of its own, so that a prompt can't be learned for it here; train "
            "a LoRA adapter, by peft.LoraConfig"
        )
    model.base_model = loaded.module
    base: Any = loaded.module
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    new = bool(vars(model).pop("whet_new_prompt", False))
    reasons = ("virtual tokens stand before each row",)
    logger.warning("%s trains padded, slower than packed rows: %s", loaded.name, reasons[0])
    return dataclasses.replace(
        loaded, module=model, packable=False, unpackable_reasons=reasons, adapter=PromptAdapter(model, new=new)
    )


def _apply_adapter(
    module: PreTrainedModel, given: LoraConfig | SavedAdapter | None, seed: int, merge: bool
) -> PreTrainedModel:
    """Adds and checks the adapter of a module, and merges it if `merge`."""
    if given is not None:
        add_adapter(module, given, seed=seed)
    elif Adapter.from_module(module) is not None:
        check_adapter(module)
    if not merge:
        return module
    like = next(module.parameters())
    return merged_model(module).to(device=like.device, dtype=like.dtype).train()  # pyright: ignore


def _find_saved_adapter(model: str | Path | nn.Module, lora: LoraConfig | None, role: str) -> SavedAdapter | None:
    """The adapter of a folder or hub name. Raises ConfigError: a second one would be put on top."""
    saved = None if isinstance(model, nn.Module) else find_adapter(adapter_folder(str(model)))
    if saved is not None and lora is not None:
        raise ConfigError(
            f"{saved.path!r} is an adapter already, so {role}.lora would put a second one on top; leave lora out to "
            "train that one, or merge it first (trainer.merge_adapter=true writes it merged)"
        )
    return saved


def _set_attention(module: PreTrainedModel, reasons: tuple[str, ...], attention: str, name: str) -> None:
    """Sets whet's attention in a model that takes a layout; logs why another model trains padded."""
    if vars(module.config).get("router_aux_loss_coef"):
        logger.info("%s: the router's auxiliary loss is not added to the objective", name)
    if not reasons:
        module.set_attn_implementation(ATTENTION)
        return
    logger.warning("%s trains padded with the hf engine: %s", name, "; ".join(reasons))
    if attention != "auto":
        logger.warning("attention=%s has no effect: padded rows have the model's own attention", attention)


def _prepare_module(
    model: str | Path | nn.Module | SavedAdapter,
    dtype: torch.dtype,
    role: str,
    quantization: str | None,
    device: torch.device,
    trust_remote_code: bool,
) -> PretrainedModule:
    """The module, read if it is a folder or hub name, in train mode without dropout on its device."""
    if quantization is not None and isinstance(model, nn.Module):
        raise ConfigError(f"{role}.quantization is for a model that is read; give a folder or a hub name")
    bits = None if quantization is None else quantization_config(quantization, device)
    reader = partial(read_model, dtype=dtype, role=role, bits=bits, device=device, trust_remote_code=trust_remote_code)
    read = _read_module(model, role, reader)
    module = (read.module if bits is not None else read.module.to(device)).train()  # pyright: ignore[reportArgumentType]
    if module.config._attn_implementation == ATTENTION:  # loaded before: its facts are asked without a layout
        module.set_attn_implementation("eager")
    _disable_dropout(module, read.name)
    _check_finite(module, read.name)
    return read._replace(module=module)


def _read_module(
    model: str | Path | nn.Module | SavedAdapter, role: str, reader: Callable[[str], PretrainedModule]
) -> PretrainedModule:
    """Reads a module, or checks the one passed in. Args: reader: read_model with its options."""
    if isinstance(model, SavedAdapter):
        return _read_adapter_base(model, role, reader)
    if not isinstance(model, nn.Module):
        return reader(str(model))
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model; give a PreTrainedModel, a folder or a name"
        )
    name = model.name_or_path or type(model).__name__
    check_config(model.config, name)
    return PretrainedModule(model, None, model.dtype, name)


def _read_adapter_base(saved: SavedAdapter, role: str, reader: Callable[[str], PretrainedModule]) -> PretrainedModule:
    """The base model of an adapter, with the weight of the score head that was saved with the adapter."""
    if saved.score is not None and saved.fields.get("task_type") == "SEQ_CLS" and role not in ("critic", "reward"):
        raise ConfigError(
            f"{saved.path!r} is the adapter of a critic or a reward model: it has a score head and no LM head; it "
            f"{wrong_role_hint(role)}"
        )
    try:
        read = reader(saved.base)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n(it is the base model of the adapter {saved.path!r}, by its {ADAPTER_CONFIG}; where the model "
            "has moved, correct base_model_name_or_path there)"
        ) from error
    return read._replace(score_weight=read.score_weight if saved.score is None else saved.score, name=saved.path)


def _add_heads(module: PreTrainedModel, weight: Tensor | None, role: str, name: str, both: bool) -> PreTrainedModel:
    """The module with the heads of its role. Args: weight: [1 D], a score head that was read; None = none was. both: a
    score head besides the LM head.
    """
    there, shared = has_score_head(module), "whet_shared_score_head" in vars(module.config)
    if role in ("critic", "reward"):
        if role == "reward" and not there and weight is None and score_layer(module) is None:
            raise ConfigError(
                f"{name} can't be the reward model: it has no score head; give one that was trained, saved as "
                "AutoModelForSequenceClassification with num_labels=1"
            )
        return module if there or score_layer(module) is not None else add_score_head(module, weight, shared=shared)
    if there:
        raise ConfigError(f"{name} is a critic or a reward model: it has no LM head; it {wrong_role_hint(role)}")
    if weight is None and (not both or score_layer(module) is not None):
        return module
    return add_score_head(module, weight, shared=True)


def check_device(device: torch.device | str) -> torch.device:
    """The device of a name. Raises ConfigError: the name is unknown, or this machine has no such device.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without it: AssertionError
        raise ConfigError(
            f"device {str(device)!r} can't be used here: {format_exception(error, 200)}; give cpu, cuda, cuda:1 ..."
        ) from error
    return found


def _check_choices(role: str, attention: str, device: torch.device) -> None:
    """Refuses an unknown role or attention, and flex away from CUDA."""
    for kind, word, known in (("role", role, ROLES), ("attention", attention, KERNELS)):
        if word not in known:
            raise lookup_error(kind, word, known)
    if attention == "flex" and device.type != "cuda":
        raise ConfigError(f"attention flex needs a CUDA device, got {device}; leave it at auto")


def save_model(
    loaded: LoadedModel,
    tokenizer: Any,
    folder: str | Path,
    *,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes a model in Hugging Face's format (safetensors); transformers loads it: a language model as it is,
    a critic or reward model as AutoModelForSequenceClassification (where the family has one). Of a model with an
    adapter the adapter alone, in PEFT's format.

    Args: loaded: what to save. tokenizer: saved with it; None = no tokenizer. folder: made where it is missing. merge:
        write the whole model, its adapter merged. dtype: of the weights that are written; None = as they are.
    Returns: the folder.

    Example: `save_model(loaded, tokenizer, "final")`, then `AutoModelForCausalLM.from_pretrained("final")`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # it would write over whet's own
    try:
        whole = merged_model(loaded.module) if merge and loaded.adapter is not None else loaded.module
        with _cast_for_saving(whole, dtype):
            if loaded.adapter is not None and not merge:
                save_adapter(whole, folder)
            else:
                whole.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _cast_for_saving(module: PreTrainedModel, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the context the floating-point parameters have this dtype; those that are cast are on the CPU."""
    params = [p for p in module.parameters() if dtype is not None and p.is_floating_point() and p.dtype != dtype]
    held, said = [(p, p.data) for p in params], module.config.dtype
    try:
        for p in params:
            p.data = p.data.to("cpu", dtype)
        yield
    finally:
        module.config.dtype = said  # save_pretrained writes that of the parameters, and leaves it there
        for p, data in held:
            p.data = data


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise lookup_error("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _disable_dropout(module: nn.Module, name: str) -> None:
    """Sets every dropout (and router noise) of config and modules to 0; logs those that were above 0."""
    found: dict[str, float] = {}

    def clear(owner: Any, path: str) -> None:
        for key, value in list(vars(owner).items()):
            noisy = any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter"))
            if noisy and isinstance(value, float) and value > 0:
                setattr(owner, key, 0.0)
                found[f"{path}{key}"] = value

    clear(module.config, "")
    for path, part in module.named_modules():
        if isinstance(part, nn.Dropout) and part.p:
            found[path] = part.p
            part.p = 0.0
        clear(part, f"{path}.")
    if found:
        shown = ", ".join(f"{key} {value:g}" for key, value in list(found.items())[:8])
        logger.warning("%s: %d dropouts set to 0 (%s)", name, len(found), shown)


def _check_finite(module: nn.Module, name: str) -> None:
    """Raises ConfigError where a weight is NaN or infinite.

    A norm reads a tensor once and is finite for almost all finite tensors; `isfinite` makes several copies of it.
    """
    for key, p in module.named_parameters():
        if p.is_meta or not p.is_floating_point() or torch.linalg.vector_norm(p.detach()).isfinite():
            continue
        if not p.isfinite().all():
            raise ConfigError(f"{name} has numbers that are not finite in {key}; its weights are broken")
