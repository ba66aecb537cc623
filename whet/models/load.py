"""Loads Hugging Face models for training, and saves them.

A model that supports layouts (`packable`) trains on packed rows with shared prefixes. Any other model trains on padded
rows with its own attention. Dim legend: D width.
pretrained.py reads the files, and model_capabilities.py tests what a model supports.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from whet.config.lora import LoraConfig
from whet.errors import ConfigError, format_exception, lookup_error
from whet.models.attention import ATTENTION, KERNELS
from whet.models.heads import Head, add_score_head, has_score_head, score_layer
from whet.models.loaded_model import LoadedModel
from whet.models.lora import (
    SavedAdapter,
    add_adapter,
    check_adapter,
    check_lora,
    find_adapter,
    merged_model,
    save_adapter,
)
from whet.models.lora_layers import Adapter
from whet.models.model_capabilities import ModelCapabilities, find_capabilities
from whet.models.pretrained import (
    PretrainedModule,
    adapter_folder,
    check_config,
    log_whole,
    read_model,
    wrong_role_hint,
)
from whet.models.prompt_tuning import PromptAdapter, is_prompt_tuned
from whet.models.quantized import quantization_config
from whet.models.weight_files import check_finite, in_file, without_weights
from whet.storage.model_paths import ADAPTER_CONFIG
from whet.util.device import sum_in_fp32

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
    on_cpu: bool = False,
    in_files: bool = False,
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
        model: the folder of a model, an adapter (it is loaded with its base), a finished run or a checkpoint; a hub
            name; or a transformers module, which keeps its dtype.
        dtype: dtype of the parameters: float32, bfloat16, float16, float64. The default is not the checkpoint's dtype,
            because master weights in bf16 would lose every small update.
        device: the device of the model.
        on_cpu: leave the weights on the CPU; a placement moves them to the device.
        in_files: leave them in their files if possible, for processes that each read a part (weight_files.py).
        role: actor; reference or teacher (no gradient); critic (its score head is new if the model has none); reward
            (the model must have a score head). A score head is that of a sequence classifier with one label.
        attention: the implementation of attention over packed rows: auto, flex or plain.
        score_head: add a score head next to the LM head, if there is none: a critic that shares the actor's backbone.
        lora: add a new adapter. Only the adapter, a score head and the modules_to_save are trained.
        quantization: keep the linear layers of the base in 4 bits: nf4 or fp4.
        merge: merge a saved adapter into its base. None = merge it in the roles without a gradient, unless the base is
            in 4 bits or in half precision, where rounding would lose the adapter.
        seed: of a new adapter.
        trust_remote_code: run the Python files of the model's folder.
    Returns: the LoadedModel. It logs dropouts that were above 0, and the reason why a model trains padded.
    Raises: ConfigError: an unknown dtype, role, attention or device; missing or incomplete files; flex without CUDA; or
        a model that is not a text-only causal language model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    >>> loaded = load_model(LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)))
    >>> loaded.packable, loaded.lm_head.kind
    (True, 'identity')
    """
    if is_prompt_tuned(model):
        return _load_prompt_tuned(model, device=device, role=role)
    for key, value, choices in (("role", role, ROLES), ("attention", attention, KERNELS)):
        if value not in choices:
            raise lookup_error(key, value, choices)
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise lookup_error("dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    device = check_device(device)
    sum_in_fp32(device)
    if attention == "flex" and device.type != "cuda":
        raise ConfigError(f"attention=flex needs a CUDA device, got {device}; set attention=auto")
    saved = _find_saved_adapter(model, lora, role)
    if lora is not None and not isinstance(model, nn.Module):
        check_lora(str(model), lora, trust_remote_code)
    place = torch.device("cpu") if on_cpu else device
    if merge is None:
        merge = role in READ_ONLY_ROLES and quantization is None and dtype.itemsize >= 4
    merge = merge and saved is not None
    read_module = partial(
        _prepare_module, model if saved is None else saved, dtype, role, quantization, place, trust_remote_code
    )
    if in_files and merge:
        log_whole(str(model), "its adapter is merged into them")
    read = read_module(in_files=in_files and not merge)
    capabilities, name = _find_capabilities(read), read.name
    if capabilities is None:
        log_whole(name, "they tell how it trains, since a small model of its class can't")
        read = read_module(in_files=False)
        capabilities = find_capabilities(read.module, name)
    module = _add_heads(read.module, read.score_weight, role, name, score_head)
    module = _apply_adapter(module, saved or lora, seed, merge)
    _set_attention(module, capabilities.unpackable_reasons, attention, name)
    if role in ("reference", "teacher"):
        module.requires_grad_(False)
    return LoadedModel(
        module=module,
        packable=not capabilities.unpackable_reasons,
        unpackable_reasons=capabilities.unpackable_reasons,
        lm_head=Head("none") if has_score_head(module) else capabilities.head,
        name=name,
        attention=attention,
        score_head=score_layer(module),
        adapter=Adapter.from_module(module),
        saved_dtype=read.dtype,
    )


def _find_capabilities(read: PretrainedModule) -> ModelCapabilities | None:
    """Returns the capabilities of a module; None = only its weights tell them, and they are in files."""
    if not any(map(in_file, read.module.parameters())):
        return find_capabilities(read.module, read.name)
    with suppress(Exception):  # a small model of its class may not run, and then this one does
        found = find_capabilities(without_weights(read.module, read.module), read.name)
        return None if found.unpackable_reasons else found
    return None


def _load_prompt_tuned(model: Any, device: torch.device | str, role: str) -> LoadedModel:
    """Loads a prompt-tuned PEFT model. Raises ConfigError: a model with a score head, or an unknown head."""
    if role not in ("actor", "reference"):
        raise ConfigError(
            "peft_config tunes a prompt, which only a language model reads; here the model has a score head "
            "(a reward model or a critic): give peft.LoraConfig"
        )
    loaded = load_model(model.get_base_model(), device=device, role=role)
    if loaded.lm_head.kind == "unknown":
        raise ConfigError(
            f"{loaded.name} has an LM head that whet does not know, so its prompt can't be tuned; train a LoRA adapter "
            "with peft.LoraConfig"
        )
    model.base_model = loaded.module
    base: Any = loaded.module
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    new = bool(vars(model).pop("whet_new_prompt", False))
    reasons = ("each row starts with virtual tokens",)
    logger.warning("%s trains padded, slower than packed rows: %s", loaded.name, reasons[0])
    return dataclasses.replace(
        loaded, module=model, packable=False, unpackable_reasons=reasons, adapter=PromptAdapter(model, new=new)
    )


def _apply_adapter(
    module: PreTrainedModel, source: LoraConfig | SavedAdapter | None, seed: int, merge: bool
) -> PreTrainedModel:
    """Adds and checks the adapter of a module, and merges it if `merge`."""
    if source is not None:
        add_adapter(module, source, seed=seed)
    elif Adapter.from_module(module) is not None:
        check_adapter(module)
    if not merge:
        return module
    first = next(module.parameters())
    return merged_model(module).to(device=first.device, dtype=first.dtype).train()  # pyright: ignore


def _find_saved_adapter(model: str | Path | nn.Module, lora: LoraConfig | None, role: str) -> SavedAdapter | None:
    """Returns the adapter in a folder or under a hub name. Raises ConfigError: `lora` would add a second adapter."""
    saved = None if isinstance(model, nn.Module) else find_adapter(adapter_folder(str(model)))
    if saved is not None and lora is not None:
        raise ConfigError(
            f"{saved.path!r} is an adapter already, so {role}.lora would add a second one; leave lora out to train the "
            "saved one, or merge it first (trainer.merge_adapter=true writes it merged)"
        )
    return saved


def _set_attention(module: PreTrainedModel, reasons: tuple[str, ...], attention: str, name: str) -> None:
    """Sets whet's attention in a packable model; logs why another model trains padded."""
    if vars(module.config).get("router_aux_loss_coef"):
        logger.info("%s: the router's auxiliary loss is not added to the objective", name)
    if not reasons:
        module.set_attn_implementation(ATTENTION)
        return
    logger.warning("%s trains padded with the hf engine: %s", name, "; ".join(reasons))
    if attention != "auto":
        logger.warning("attention=%s has no effect: padded rows use the model's own attention", attention)


def _prepare_module(
    model: str | Path | nn.Module | SavedAdapter,
    dtype: torch.dtype,
    role: str,
    quantization: str | None,
    device: torch.device,
    trust_remote_code: bool,
    *,
    in_files: bool,
) -> PretrainedModule:
    """Returns the module, in train mode, without dropout and on its device; a folder or hub name is read first."""
    if quantization is not None and isinstance(model, nn.Module):
        raise ConfigError(f"{role}.quantization can't be applied to a module in memory; give a folder or a hub name")
    bits = None if quantization is None else quantization_config(quantization, device)
    reader = partial(
        read_model,
        dtype=dtype,
        role=role,
        bits=bits,
        device=device,
        trust_remote_code=trust_remote_code,
        in_files=in_files,
    )
    if isinstance(model, SavedAdapter):
        read = _read_adapter_base(model, role, reader)
    elif not isinstance(model, nn.Module):
        read = reader(str(model))
    elif isinstance(model, PreTrainedModel):
        name = model.name_or_path or type(model).__name__
        check_config(model.config, name)
        read = PretrainedModule(model, None, model.dtype, name)
    else:
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model; give a PreTrainedModel, a folder or a name"
        )
    module = (read.module if bits is not None else read.module.to(device)).train()  # pyright: ignore[reportArgumentType]
    if module.config._attn_implementation == ATTENTION:  # a module that was loaded before
        module.set_attn_implementation("eager")
    _disable_dropout(module, read.name)
    _check_finite(module, read.name)
    return read._replace(module=module)


def _read_adapter_base(saved: SavedAdapter, role: str, reader: Callable[[str], PretrainedModule]) -> PretrainedModule:
    """Returns the base model of an adapter, with the weight of the score head that was saved with the adapter."""
    if saved.score is not None and saved.fields.get("task_type") == "SEQ_CLS" and role not in ("critic", "reward"):
        raise ConfigError(
            f"{saved.path!r} is the adapter of a critic or a reward model: it has a score head and no LM head; it "
            f"{wrong_role_hint(role)}"
        )
    try:
        read = reader(saved.base)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n({ADAPTER_CONFIG} of the adapter {saved.path!r} names this base model; if the model has moved, "
            "correct base_model_name_or_path there)"
        ) from error
    return read._replace(score_weight=read.score_weight if saved.score is None else saved.score, name=saved.path)


def _add_heads(module: PreTrainedModel, weight: Tensor | None, role: str, name: str, both: bool) -> PreTrainedModel:
    """Returns the module with the heads of its role.

    Args: weight: [1 D], a saved score head; None = there is none. both: add a score head next to the LM head.
    """
    is_scorer, shared = has_score_head(module), "whet_shared_score_head" in vars(module.config)
    if role in ("critic", "reward"):
        if role == "reward" and not is_scorer and weight is None and score_layer(module) is None:
            raise ConfigError(
                f"{name} can't be the reward model: it has no score head; give a trained model, saved as "
                "AutoModelForSequenceClassification with num_labels=1"
            )
        return module if is_scorer or score_layer(module) is not None else add_score_head(module, weight, shared=shared)
    if is_scorer:
        raise ConfigError(f"{name} is a critic or a reward model: it has no LM head; it {wrong_role_hint(role)}")
    if weight is None and (not both or score_layer(module) is not None):
        return module
    return add_score_head(module, weight, shared=True)


def check_device(device: torch.device | str) -> torch.device:
    """Returns the torch device with this name. Raises ConfigError: the name is unknown, or the machine has no such
    device.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch was built without it
        raise ConfigError(
            f"device {str(device)!r} can't be used here: {format_exception(error, 200)}; give cpu, cuda, cuda:1 ..."
        ) from error
    return torch_device


def save_model(
    loaded: LoadedModel,
    tokenizer: Any,
    folder: str | Path,
    *,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Saves a model in Hugging Face's format (safetensors), or only the adapter in PEFT's format if the model has one.

    transformers loads a critic or a reward model as AutoModelForSequenceClassification, if the family has that class.

    Args:
        loaded: the model.
        tokenizer: saved with it; None = no tokenizer.
        folder: created if it does not exist.
        merge: merge the adapter, and write the full model.
        dtype: dtype of the saved weights; None = that of the parameters.
    Returns: the folder.

    Example: `save_model(loaded, tokenizer, "final")`, then `AutoModelForCausalLM.from_pretrained("final")`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    had_progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # it would overwrite the progress line of whet
    try:
        module = merged_model(loaded.module) if merge and loaded.adapter is not None else loaded.module
        with _cast_for_saving(module, dtype):
            if loaded.adapter is not None and not merge:
                save_adapter(module, folder)
            else:
                module.save_pretrained(folder)
    finally:
        if had_progress_bar:
            transformers_logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _cast_for_saving(module: PreTrainedModel, dtype: torch.dtype | None) -> Iterator[None]:
    """Gives the floating-point parameters this dtype inside the context; parameters that are cast move to the CPU."""
    params = [p for p in module.parameters() if dtype is not None and p.is_floating_point() and p.dtype != dtype]
    originals, config_dtype = [(p, p.data) for p in params], module.config.dtype
    try:
        for p in params:
            p.data = p.data.to("cpu", dtype)
        yield
    finally:
        module.config.dtype = config_dtype  # save_pretrained changes it to the dtype of the parameters
        for p, data in originals:
            p.data = data


def _disable_dropout(module: nn.Module, name: str) -> None:
    """Sets all dropout (and router noise) of the config and the modules to 0, and logs what was above 0."""
    dropouts: dict[str, float] = {}

    def clear(owner: Any, path: str) -> None:
        for key, value in list(vars(owner).items()):
            is_dropout = any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter"))
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(owner, key, 0.0)
                dropouts[f"{path}{key}"] = value

    clear(module.config, "")
    for path, submodule in module.named_modules():
        if isinstance(submodule, nn.Dropout) and submodule.p:
            dropouts[path] = submodule.p
            submodule.p = 0.0
        clear(submodule, f"{path}.")
    if dropouts:
        names = ", ".join(f"{key} {value:g}" for key, value in list(dropouts.items())[:8])
        logger.warning("%s: %d dropouts set to 0 (%s)", name, len(dropouts), names)


def _check_finite(module: nn.Module, name: str) -> None:
    """Raises ConfigError if a weight is NaN or infinite."""
    for key, p in module.named_parameters():
        if not p.is_meta and not in_file(p) and p.is_floating_point():
            check_finite(p.detach(), name, key)
