"""Adds low-rank adapters to a model, and reads, saves and merges them in PEFT's format.

    adapter_config.json          PEFT's configuration: rank, target modules, and the folder or name of the base model
    adapter_model.safetensors    A and B of each layer, and the fully trained modules, such as a score head

PEFT wraps the linear layers (`inject_adapter_in_model`), and the model keeps its class. The modules of modules_to_save
are trained in place. PEFT would train a copy, and code that reads the weight of the LM head would not see it.
Left out on purpose: adapters on the LM head, several adapters at once, other kinds than plain LoRA, and pickled files.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from whet.config.lora import LoraConfig
from whet.errors import ConfigError, TrainingError, lookup_error
from whet.models.config_sizes import MISSING_IS_NONE
from whet.models.heads import has_score_head, score_layer
from whet.models.lora_layers import BASE_LAYER, Adapter, SeededDropout, is_adapter_layer, merged_weight
from whet.models.pretrained import meta_model
from whet.models.prompt_tuning import is_prompt_tuned, save_prompt
from whet.models.quantized import cast_parameters, dequantize, is_quantized_layer
from whet.storage.model_paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from whet.util.install import install_hint
from whet.util.tensor_subclasses import copy_full_tensor

if TYPE_CHECKING:
    import peft

__all__ = [
    "SavedAdapter",
    "adapter_tensors",
    "add_adapter",
    "check_adapter",
    "check_lora",
    "find_adapter",
    "load_adapter_weights",
    "merged_model",
    "save_adapter",
    "save_adapter_config",
]

logger = logging.getLogger("whet")

SCORE = "score"
"""The name of a score head."""
REFUSED = (
    "use_dora",
    "alora_invocation_tokens",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "arrow_config",
)
"""Fields of PEFT's LoraConfig that make an adapter more than W + s B A; a saved adapter with one is refused."""
MERGE_HINT = (
    "merge it into its base with PEFT, PeftModel.from_pretrained(base, adapter).merge_and_unload()"
    ".save_pretrained(folder), and load that folder"
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights with which PEFT changes the weights of the base, each time it loads the adapter."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that was read from a folder. Example: `find_adapter("runs/lora/final")`."""

    path: str
    """Folder or hub name."""
    base: str
    """Folder or hub name of its base model."""
    fields: dict[str, Any]
    """The content of adapter_config.json."""
    tensors: dict[str, Tensor]
    """The tensors by the names of the model's parameters, without PEFT's prefix."""

    @property
    def score(self) -> Tensor | None:
        """The score head [1 D] that was saved with it; None = there is none."""
        return self.tensors.get(f"{SCORE}.weight")


# ---- reading ---------------------------------------------------------------------------------------------------------


def find_adapter(path: str) -> SavedAdapter | None:
    """Returns the adapter in a folder or under a hub name; None = there is none.

    Raises: ConfigError: its files can't be read, it is not plain LoRA, the folder also holds the weights of a model, or
        the adapter does not name its base model.
    """
    config_file = _cached_file(path, ADAPTER_CONFIG)
    if config_file is None:
        return None
    weight_files = ("model.safetensors", "model.safetensors.index.json")
    if full_model := [name for name in weight_files if _cached_file(path, name) is not None]:
        raise ConfigError(
            f"{path!r} holds an adapter ({ADAPTER_CONFIG}) and the weights of a model ({full_model[0]}), so it is not "
            f"clear which of the two to load; if the weights are merged already, remove {ADAPTER_CONFIG}, otherwise "
            "move one of the two to another folder"
        )
    try:
        fields = json.loads(Path(config_file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read {ADAPTER_CONFIG} of {path!r} ({error}); copy it again") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise ConfigError(f"the adapter {path!r} is of kind {kind!r:.40}; whet reads LORA: {MERGE_HINT}")
    unsupported = [name for name in REFUSED if fields.get(name)]
    unsupported += ["bias"] if fields.get("bias", "none") != "none" else []
    unsupported += ["init_lora_weights"] if str(fields.get("init_lora_weights", "")).startswith(CHANGES_BASE) else []
    if unsupported:
        name = unsupported[0]
        raise ConfigError(f"the adapter {path!r} has {name}={fields[name]!r}, which whet does not run: {MERGE_HINT}")
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(
            f"{ADAPTER_CONFIG} of {path!r} does not name its base model; write its folder or hub name into it as "
            "base_model_name_or_path"
        )
    weights = _cached_file(path, ADAPTER_WEIGHTS)
    if weights is None:
        pickled = _cached_file(path, "adapter_model.bin") is not None
        fix = (
            "its adapter_model.bin is a pickle, which is not opened: load it with PEFT, which saves safetensors"
            if pickled
            else "copy its files again"
        )
        raise ConfigError(f"the adapter {path!r} has no {ADAPTER_WEIGHTS}; {fix}")
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"can't read {ADAPTER_WEIGHTS} of {path!r} ({error}); copy it again") from error
    return SavedAdapter(
        path, base, fields, {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    )


def _cached_file(path: str, name: str) -> str | None:
    """Returns the path of a file in a folder or under a hub name; None = there is no such file."""
    return cached_file(path, name, **MISSING_IS_NONE)


# ---- adding ----------------------------------------------------------------------------------------------------------


def add_adapter(module: PreTrainedModel, source: LoraConfig | SavedAdapter | peft.LoraConfig, *, seed: int = 0) -> None:
    """Adds an adapter to a model; afterwards only the adapter and its modules_to_save are trained.

    Args:
        module: changed in place; it already has its heads.
        source: the configuration of a new adapter, or a saved adapter. PEFT's own configuration may be more than
            W + s B A, and a score head is trained only if PEFT would train it.
        seed: of the random A of a new adapter.
    Raises: ConfigError: PEFT is missing, the model has an adapter, a name fits no layer, or a saved adapter does not
        fit the model.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"a low-rank adapter needs PEFT ({error}); {install_hint('lora')}") from error
    name = module.name_or_path or type(module).__name__
    if Adapter.from_module(module) is not None:
        raise ConfigError(f"{name} has an adapter already; leave out the section lora to train that one")
    score = score_layer(module)
    peft_config = _peft_config(module, source, score)
    if isinstance(source, LoraConfig) and (narrow := _check_targets(module, source)):
        logger.warning(
            "lora.r=%d (the rank) exceeds the output width of %d layers (the narrowest has %d): these use a lower rank",
            source.r,
            len(narrow),
            min(narrow),
        )
    modules = dict(module.named_modules())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(peft_config, module)
        except ValueError as error:  # names that fit nothing, or layers for which PEFT has no adapter
            raise ConfigError(f"can't put an adapter into {name}: {str(error)[:300]}") from error
    fields = source.fields if isinstance(source, SavedAdapter) else vars(source)
    names = list(fields.get("modules_to_save") or ())
    full = _unfreeze_modules(module, modules, names)
    config: peft.LoraConfig = module.peft_config["default"]  # pyright: ignore
    config.modules_to_save = sorted(full) or None
    frozen = isinstance(source, peft.LoraConfig) and fields["task_type"] != "SEQ_CLS" and SCORE not in names
    if score is not None and not frozen:
        score.requires_grad_(True)
        if has_score_head(module):  # next to a LM head, the score head is not in the model that PEFT loads
            config.modules_to_save = sorted({*full, SCORE})
    if dropout := fields.get("lora_dropout", 0.0):
        adapter = Adapter.from_module(module)
        assert adapter is not None
        for number, layer in enumerate(adapter.layers.values()):
            layer.lora_dropout["default"] = SeededDropout(dropout, number)
        config.lora_dropout = dropout
    check_adapter(module)
    if isinstance(source, SavedAdapter):
        load_adapter_weights(module, source.tensors, source.path)


def _peft_config(
    module: PreTrainedModel, source: LoraConfig | SavedAdapter | peft.LoraConfig, score: nn.Linear | None
) -> Any:
    """PEFT's configuration of an adapter, without dropout and modules_to_save, which add_adapter applies itself."""
    from peft import LoraConfig as PeftConfig

    task = "SEQ_CLS" if has_score_head(module) else "CAUSAL_LM"
    if isinstance(source, SavedAdapter):
        known = PeftConfig.__dataclass_fields__
        fields = {k: v for k, v in source.fields.items() if k in known and k not in ("peft_type", "auto_mapping")}
        overrides = {"modules_to_save": None, "lora_dropout": 0.0, "inference_mode": False, "task_type": task}
        return PeftConfig(**{**fields, **overrides, "init_lora_weights": True})
    if isinstance(source, PeftConfig):
        config: Any = copy.deepcopy(source)
        config.modules_to_save, config.inference_mode, config.task_type = None, False, task
        config.lora_dropout = config.lora_dropout if config.target_parameters else 0.0  # PEFT refuses both
        config.base_model_name_or_path = module.name_or_path or None
        return config
    initial: Any = True if source.init_lora_weights == "default" else source.init_lora_weights
    return PeftConfig(
        r=source.r,
        lora_alpha=source.lora_alpha,
        target_modules=source.target_modules,
        exclude_modules=None if score is None or source.target_modules != "all-linear" else [SCORE],
        use_rslora=source.use_rslora,
        init_lora_weights=initial,
        base_model_name_or_path=module.name_or_path or None,
        task_type=task,
    )


def _check_targets(module: nn.Module, lora: LoraConfig) -> list[int]:
    """Checks target_modules and the rank of a new adapter against the linear layers of a model.

    Args: module: the model; it may be on the meta device.
    Returns: the output widths that are below the rank (those of key heads, often), for a warning.
    Raises: ConfigError: a name that fits no linear layer (PEFT accepts it if another name fits), or a rank above the
        input width of a layer.
    """
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    short_names, targets = sorted({n.rpartition(".")[2] for n in layers}), lora.target_modules
    if isinstance(targets, str):
        heads = {id(module.get_output_embeddings()), id(score_layer(module))}  # pyright: ignore
        all_linear = targets == "all-linear"
        chosen = {n for n, x in layers.items() if (id(x) not in heads if all_linear else re.fullmatch(targets, n))}
        if not chosen and not all_linear:
            raise ConfigError(
                f"can't put an adapter into the model: lora.target_modules={targets!r} is a regular expression for "
                f"full names such as {next(iter(layers), 'q_proj')}, and fits no linear layer; choose from "
                f"{', '.join(short_names)}"
            )
    else:
        matches = {name: {n for n in layers if n == name or n.endswith(f".{name}")} for name in targets}
        if unknown := [name for name, layer_names in matches.items() if not layer_names]:
            raise lookup_error("lora.target_modules", unknown[0], short_names)
        chosen = set().union(*matches.values())
    narrow = []
    for name in sorted(chosen):
        width = layers[name].in_features
        if lora.r > width:
            raise ConfigError(
                f"lora.r={lora.r} (the rank) is above the width of {name}, which is {width}: a higher rank adds "
                f"nothing; set {width} or less"
            )
        narrow += [layers[name].out_features] if lora.r > layers[name].out_features else []
    return narrow


def check_lora(path: str, lora: LoraConfig, trust_remote_code: bool = False) -> None:
    """Checks a new adapter against the config of a model, before the weights are read.

    Args: path: the model's folder or hub name. lora: the adapter. trust_remote_code: see read_model.
    Raises: ConfigError: see _check_targets. `add_adapter` finds errors that the config does not show.
    """
    module = meta_model(path, trust_remote_code)
    if module is not None and SCORE not in lora.target_modules:  # the score head is added later
        _check_targets(module, lora)


def _unfreeze_modules(module: PreTrainedModel, modules: Mapping[str, nn.Module], names: Sequence[str]) -> set[str]:
    """Makes the modules of modules_to_save trainable.

    Args: modules: the model's modules before PEFT wrapped some. names: modules_to_save.
    Returns: the names of all modules that hold their parameters, tied modules included.
    """
    ids: set[int] = set()
    adapter = Adapter.from_module(module)
    adapted = {id(layer.get_base_layer()) for layer in (adapter.layers.values() if adapter else ())}
    for name in names:
        matches = [part for n, part in modules.items() if n and (n == name or n.endswith(f".{name}"))]
        if not matches and name != SCORE:
            raise lookup_error("lora.modules_to_save", name, sorted({n.rpartition(".")[2] for n in modules} - {""}))
        for match in matches:
            if any(id(part) in adapted or is_quantized_layer(part) for part in match.modules()):
                raise ConfigError(
                    f"lora.modules_to_save={name}: a module with an adapter or with 4-bit weights can't be trained in "
                    "full; remove it from modules_to_save, or leave its layers out of target_modules"
                )
            ids |= {id(p.requires_grad_(True)) for p in match.parameters()}
    parameters = module.named_parameters(remove_duplicate=False)
    return {name.rpartition(".")[0] for name, p in parameters if id(p) in ids}


def check_adapter(module: PreTrainedModel) -> None:
    """Raises ConfigError for an adapter on a head or an embedding, and for PEFT's copy of a module to save.

    whet reads the weights of these modules directly, and would miss the adapter or the copy.
    """
    heads = (("lm_head", module.get_output_embeddings()), ("embed_tokens", module.get_input_embeddings()))
    for name, layer in heads:
        if layer is not None and is_adapter_layer(layer):
            raise ConfigError(
                f"an adapter on the {name} of {type(module).__name__} is not supported, because whet reads its weight "
                "directly to compute logits in chunks; leave it out of target_modules, or train it in full: "
                f"lora.modules_to_save=[{name}]"
            )
    if wrapped := [n for n, part in module.named_modules() if type(part).__name__ == "ModulesToSaveWrapper"]:
        raise ConfigError(
            f"{wrapped[0]} is PEFT's copy of a module to save; pass the model without its adapter, and name the module "
            "in RoleConfig(lora=LoraConfig(modules_to_save=...))"
        )


# ---- names, saving, loading ------------------------------------------------------------------------------------------


def adapter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the tensors of an adapter's file: A and B of each layer, and every other trained parameter.

    Args: module: a model with an adapter.
    Returns: PEFT's name without its prefix -> the parameter. A shared parameter is listed under each of its names.
    Raises: TrainingError: the model has no adapter any more.
    """
    if is_prompt_tuned(module):
        return {n: p for n, p in module.named_parameters() if p.requires_grad}
    adapter = Adapter.from_module(module)
    if adapter is None:
        raise TrainingError(
            "the model's adapter is gone: it was merged into the weights or unloaded after training; save it by "
            "model.save_pretrained, and to train on, give the merged model to a new trainer"
        )
    name, adapter_ids = adapter.name, {id(p) for p in adapter.parameters()}
    tensors: dict[str, nn.Parameter] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        if id(p) in adapter_ids:
            path = path.replace(f".{name}.", ".") if f".{name}." in path else path.removesuffix(f".{name}")
            tensors[path.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")] = p  # as PEFT has it
        elif p.requires_grad:  # PEFT keeps the wrapped layer's name for a trained bias
            tensors[path if path.endswith(".bias") else BASE_LAYER.sub("", path)] = p
    return tensors


@torch.no_grad()
def load_adapter_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], source: str, masters: Mapping[str, Tensor] | None = None
) -> None:
    """Copies an adapter's tensors into the parameters of a model with the same adapter, and into their masters.

    Args: module: a model with an adapter. tensors: under the names of `adapter_tensors`. source: where the tensors come
        from, for messages. masters: fp32 tensors by the names of the parameters.
    Raises: ConfigError: the names or the shapes differ; then nothing is changed.
    """
    parameters = adapter_tensors(module)
    if different := sorted(parameters.keys() ^ tensors.keys()):
        side = "there and not here" if different[0] in tensors else "here and not there"
        raise ConfigError(
            f"{source} holds another adapter: {different[0]} is {side} ({len(different)} such names); use the lora "
            "settings that it was trained with"
        )
    for name, p in parameters.items():
        if p.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)} there and {list(p.shape)} here"
            raise ConfigError(f"{source}: {name} is {shapes}; use the same base and lora settings, or start a new run")
    by_id = _masters_by_id(module, masters)
    for name, p in parameters.items():
        if id(p) in by_id:
            copy_full_tensor(by_id[id(p)], tensors[name])
        copy_full_tensor(p, tensors[name])


def _masters_by_id(module: nn.Module, masters: Mapping[str, Tensor] | None) -> dict[int, Tensor]:
    return {id(p): masters[n] for n, p in module.named_parameters() if masters and n in masters}


def save_adapter(module: PreTrainedModel, folder: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Writes an adapter in PEFT's format; PeftModel.from_pretrained(base, folder) loads it.

    Args: module: a model with an adapter. folder: an existing folder. masters: fp32 tensors that replace parameters, by
        the parameters' names.
    """
    if is_prompt_tuned(module):
        save_prompt(module, folder, masters)
        return
    by_id = _masters_by_id(module, masters)
    parameters = {f"{PEFT_PREFIX}{n}": by_id.get(id(p), p).detach() for n, p in adapter_tensors(module).items()}
    tensors = {name: t.cpu().contiguous().clone() for name, t in parameters.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    save_adapter_config(module, folder)


def save_adapter_config(module: PreTrainedModel, folder: Path) -> None:
    """Writes an adapter's settings in PEFT's format. Args: module: a model with an adapter. folder: an existing one."""
    adapter = Adapter.from_module(module)
    assert adapter is not None
    config = copy.deepcopy(module.peft_config[adapter.name])  # pyright: ignore
    config.inference_mode = True
    config.exclude_modules = None  # pyright: ignore
    for field in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(value := getattr(config, field), set | list):
            setattr(config, field, sorted(value))  # the order of a set changes from process to process
    base = config.base_model_name_or_path
    if base and Path(base).expanduser().is_dir():
        config.base_model_name_or_path = str(Path(base).expanduser().absolute())
    config.save_pretrained(str(folder))


@torch.no_grad()
def merged_model(module: PreTrainedModel, masters: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Returns a copy of a model with its adapter merged: a plain model on the CPU, with the weights W + s B A in fp32.

    Args: module: a model with an adapter; it does not change. masters: fp32 tensors that replace parameters, by the
        parameters' names.
    Returns: a model of the same class; save_pretrained saves it.
    Raises: ConfigError: the adapter is more than a product of two matrices.

    Example: `merged_model(loaded.module).save_pretrained("merged")`.
    """
    plain = copy.deepcopy(module)
    for name, p in plain.named_parameters():
        if masters and name in masters:
            p.data = masters[name].detach().clone()
    cast_parameters(plain, torch.float32)
    for name, layer in [(n, x) for n, x in plain.named_modules() if is_adapter_layer(x)]:
        base: Any = layer.get_base_layer()  # pyright: ignore
        _replace_layer(plain, name, base, merged_weight(layer, dequantize(base.weight).float(), name))
    for name, layer in [(n, x) for n, x in plain.named_modules() if is_quantized_layer(x)]:
        _replace_layer(plain, name, layer, dequantize(layer.weight).float())  # pyright: ignore
    for name in ("peft_config", "hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit"):
        vars(plain).pop(name, None)
    if "quantization_config" in vars(plain.config):
        del plain.config.quantization_config  # pyright: ignore
    plain.config.dtype = torch.float32
    return plain.cpu()


def _replace_layer(module: nn.Module, name: str, layer: Any, weight: Tensor) -> None:
    """Replaces a layer of a model by a plain linear layer with this weight and the old layer's bias."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    linear.bias = layer.bias
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, linear)
