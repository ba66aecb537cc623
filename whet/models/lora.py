"""Low-rank adapters in PEFT's format: adds them to a model, reads, saves and merges them.

    adapter_config.json          PEFT's: rank, targets, and the base model's folder or name
    adapter_model.safetensors    A and B of each layer, and the modules that are trained whole, a score head among them

PEFT wraps the linear layers (`inject_adapter_in_model`), and the model keeps its class. Modules to save are trained in
place, not in PEFT's second copy of them, so code that reads the head's or the embedding's weight reads the trained one.
Left out on purpose: adapters on the head, several at once, other kinds than plain LoRA, and pickled files.
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
from whet.models.adapters import BASE_LAYER, Adapter, SeededDropout, is_adapter_layer, merged_weight
from whet.models.heads import has_score_head, score_layer
from whet.models.pretrained import meta_model
from whet.models.prompt_tuning import is_prompt_tuned, save_prompt
from whet.models.quantized import cast_parameters, dequantize, is_quantized_layer
from whet.util.install import install_hint
from whet.util.tensor_subclasses import copy_whole

if TYPE_CHECKING:
    import peft

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "SavedAdapter",
    "adapter_tensors",
    "add_adapter",
    "check_adapter",
    "check_lora",
    "find_adapter",
    "load_adapter_weights",
    "merged_model",
    "save_adapter",
]

logger = logging.getLogger("whet")

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix of every name in PEFT's files; it stands for PEFT's wrapper of the model, which is not made here."""
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
"""Fields of PEFT's LoraConfig that make an adapter more than W + s B A; they are refused where they are set."""


MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights with which PEFT changes the base's own weights, again at each reading."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter as it lies in a folder. Example: `find_adapter("runs/lora/final")`."""

    path: str
    """Folder or hub name."""
    base: str
    """Folder or hub name of the model that it is for."""
    fields: dict[str, Any]
    """Of adapter_config.json."""
    tensors: dict[str, Tensor]
    """Under the names of the model's own parameters, PEFT's prefix taken off."""

    @property
    def score(self) -> Tensor | None:
        """[1 D], a score head that was saved with it."""
        return self.tensors.get(f"{SCORE}.weight")


# ---- reading ---------------------------------------------------------------------------------------------------------


def find_adapter(path: str) -> SavedAdapter | None:
    """The adapter in a folder or under a hub name; None = there is none.

    Raises: ConfigError: its files can't be read, it is of another kind than plain LoRA, weights of a whole model lie
        next to it, or it does not say what it is for.
    """
    found = _file(path, ADAPTER_CONFIG)
    if found is None:
        return None
    if whole := [n for n in ("model.safetensors", "model.safetensors.index.json") if _file(path, n) is not None]:
        raise ConfigError(
            f"{path!r} holds an adapter ({ADAPTER_CONFIG}) next to the weights of a whole model ({whole[0]}), so what "
            f"is meant is unclear; where the weights are merged already remove {ADAPTER_CONFIG}, else give each a "
            "folder of its own"
        )
    try:
        fields = json.loads(Path(found).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read {ADAPTER_CONFIG} of {path!r} ({error}); copy it again") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise ConfigError(f"the adapter {path!r} is of kind {kind!r:.40}; whet reads LORA: {_merge_it('it')}")
    odd = [name for name in REFUSED if fields.get(name)] + (["bias"] if fields.get("bias", "none") != "none" else [])
    odd += ["init_lora_weights"] if str(fields.get("init_lora_weights", "")).startswith(MOVES_BASE) else []
    if odd:
        raise ConfigError(
            f"the adapter {path!r} has {odd[0]}={fields[odd[0]]!r}, which whet does not run: {_merge_it('it')}"
        )
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(
            f"{ADAPTER_CONFIG} of {path!r} does not name its base model; write its folder or hub name into it as "
            "base_model_name_or_path"
        )
    return SavedAdapter(path, base, fields, _tensors(path))


def _file(path: str, name: str) -> str | None:
    """A file of a folder or hub name, if it is there."""
    return cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _merge_it(what: str) -> str:
    return (
        f"merge {what} into its base with PEFT, PeftModel.from_pretrained(base, adapter).merge_and_unload()"
        ".save_pretrained(folder), and give that folder"
    )


def _tensors(path: str) -> dict[str, Tensor]:
    """What adapter_model.safetensors holds, without PEFT's prefix."""
    found = _file(path, ADAPTER_WEIGHTS)
    if found is None:
        old = _file(path, "adapter_model.bin") is not None
        raise ConfigError(
            f"the adapter {path!r} has no {ADAPTER_WEIGHTS}"
            + (
                "; its adapter_model.bin is a pickle, which is not opened: load it with PEFT, which saves safetensors"
                * old
            )
            + ("; copy its files again" * (not old))
        )
    try:
        read = load_file(found)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"can't read {ADAPTER_WEIGHTS} of {path!r} ({error}); copy it again") from error
    return {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}


# ---- making ----------------------------------------------------------------------------------------------------------


def add_adapter(module: PreTrainedModel, given: LoraConfig | SavedAdapter | peft.LoraConfig, *, seed: int = 0) -> None:
    """Adds an adapter to a model; afterwards only the adapter and the modules saved with it are trained.

    Args: module: changed in place; its heads are there already. given: a new adapter, or one that was read; of PEFT's
        own configuration, which may be more than W + s B A, a score head is trained only where PEFT trains it.
        seed: of a new one's A.
    Raises: ConfigError: PEFT is missing, the model has an adapter, a name fits no layer, or a saved one does not fit.
    """
    package = _peft()
    name = module.name_or_path or type(module).__name__
    if Adapter.from_module(module) is not None:
        raise ConfigError(f"{name} has an adapter already; leave out the section lora to train that one")
    score = score_layer(module)
    made = _peft_config(package, module, given, score)
    if isinstance(given, LoraConfig):
        _tell_narrow(given.r, _check_targets(module, given))
    before = dict(module.named_modules())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            package.inject_adapter_in_model(made, module)
        except ValueError as error:  # names that fit nothing, layers that it knows no adapter for
            raise ConfigError(f"can't put an adapter into {name}: {str(error)[:300]}") from error
    read = given.fields if isinstance(given, SavedAdapter) else vars(given)
    kept = list(read.get("modules_to_save") or ())
    wholes = _modules_to_save(module, before, kept)
    config: peft.LoraConfig = module.peft_config["default"]  # pyright: ignore
    config.modules_to_save = sorted(wholes) or None
    frozen = isinstance(given, package.LoraConfig) and read["task_type"] != "SEQ_CLS" and SCORE not in kept
    if score is not None and not frozen:
        score.requires_grad_(True)
        if has_score_head(module):  # next to a LM head it is no part of the model that PEFT loads
            config.modules_to_save = sorted({*wholes, SCORE})
    _set_dropout(module, read.get("lora_dropout", 0.0))
    check_adapter(module)
    if isinstance(given, SavedAdapter):
        load_adapter_weights(module, given.tensors, given.path)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"a low-rank adapter needs PEFT ({error}); {install_hint('lora')}") from error
    return peft


def _peft_config(
    package: Any,
    module: PreTrainedModel,
    given: LoraConfig | SavedAdapter | peft.LoraConfig,
    score: nn.Linear | None,
) -> Any:
    """PEFT's configuration of an adapter: dropout and modules to save are whet's own doing."""
    task = "SEQ_CLS" if has_score_head(module) else "CAUSAL_LM"
    if isinstance(given, SavedAdapter):
        known = package.LoraConfig.__dataclass_fields__
        fields = {k: v for k, v in given.fields.items() if k in known and k not in ("peft_type", "auto_mapping")}
        own = {"modules_to_save": None, "lora_dropout": 0.0, "inference_mode": False, "task_type": task}
        return package.LoraConfig(**{**fields, **own, "init_lora_weights": True})
    if isinstance(given, package.LoraConfig):
        made: Any = copy.deepcopy(given)
        made.modules_to_save, made.inference_mode, made.task_type = None, False, task
        made.lora_dropout = made.lora_dropout if made.target_parameters else 0.0  # PEFT refuses both
        made.base_model_name_or_path = module.name_or_path or None
        return made
    return package.LoraConfig(
        r=given.r,
        lora_alpha=given.lora_alpha,
        target_modules=given.target_modules,
        exclude_modules=None if score is None or given.target_modules != "all-linear" else [SCORE],
        use_rslora=given.use_rslora,
        init_lora_weights=True if given.init_lora_weights == "default" else given.init_lora_weights,
        base_model_name_or_path=module.name_or_path or None,
        task_type=task,
    )


def _tell_narrow(rank: int, narrow: Sequence[int]) -> None:
    """Warns of layers that use less than the rank. Args: narrow: their widths."""
    if narrow:
        logger.warning(
            "lora.r=%d (the rank) is beyond what comes out of %d layers, %d in the narrowest: these use no more",
            rank,
            len(narrow),
            min(narrow),
        )


def _check_targets(module: nn.Module, given: LoraConfig) -> list[int]:
    """Raises ConfigError for a name that fits no linear layer (PEFT overlooks one among others that fit), and for a
    rank beyond what goes into a layer.

    Args: module: may be on the meta device.
    Returns: the widths of layers out of which less comes, as of few key heads: they use no more of the rank.
    """
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    ends, wanted = sorted({n.rpartition(".")[2] for n in layers}), given.target_modules
    if isinstance(wanted, str):
        heads = {id(module.get_output_embeddings()), id(score_layer(module))}  # pyright: ignore
        every = wanted == "all-linear"
        chosen = {n for n, x in layers.items() if (id(x) not in heads if every else re.fullmatch(wanted, n))}
        if not chosen and not every:
            raise ConfigError(
                f"can't put an adapter into the model: lora.target_modules={wanted!r} is a regular expression of whole "
                f"names, as {next(iter(layers), 'q_proj')}, and fits no linear layer; choose from {', '.join(ends)}"
            )
    else:
        fits = {name: {n for n in layers if n == name or n.endswith(f".{name}")} for name in wanted}
        if unknown := [name for name, found in fits.items() if not found]:
            raise lookup_error("lora.target_modules", unknown[0], ends)
        chosen = set().union(*fits.values())
    narrow = []
    for name in sorted(chosen):
        width = layers[name].in_features
        if given.r > width:
            raise ConfigError(
                f"lora.r={given.r} (the rank) is beyond the width of {name}, which is {width}: no more of it can be "
                f"used; set {width} or less"
            )
        narrow += [layers[name].out_features] if given.r > layers[name].out_features else []
    return narrow


def check_lora(path: str, given: LoraConfig, trust_remote_code: bool = False) -> None:
    """Looks at a new adapter by the model's config alone, before its weights are read.

    Args: path: of the model. given: the adapter. trust_remote_code: see read_model.
    Raises: ConfigError: see _check_targets. What the config can't tell is found where the weights are loaded.
    """
    module = meta_model(path, trust_remote_code)
    if module is not None and SCORE not in given.target_modules:  # a head that is added later
        _check_targets(module, given)


def _modules_to_save(module: PreTrainedModel, before: Mapping[str, nn.Module], names: Sequence[str]) -> set[str]:
    """Makes modules train whole. Returns: the names of all modules that hold their parameters, tied ones included."""
    ids: set[int] = set()
    adapter = Adapter.from_module(module)
    taken = {id(layer.get_base_layer()) for layer in (adapter.layers.values() if adapter else ())}
    for name in names:
        found = [part for n, part in before.items() if n and (n == name or n.endswith(f".{name}"))]
        if not found and name != SCORE:
            raise lookup_error("lora.modules_to_save", name, sorted({n.rpartition(".")[2] for n in before} - {""}))
        for part in found:
            if any(id(inside) in taken or is_quantized_layer(inside) for inside in part.modules()):
                raise ConfigError(
                    f"lora.modules_to_save={name}: it has an adapter or is held in 4 bits, so it can't be trained "
                    "whole; name it in one place, or leave its layers out of target_modules"
                )
            ids |= {id(p.requires_grad_(True)) for p in part.parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name.rpartition(".")[0] for name, p in every if id(p) in ids}


def _set_dropout(module: PreTrainedModel, p: float) -> None:
    if not p:
        return
    adapter = Adapter.from_module(module)
    assert adapter is not None
    for number, layer in enumerate(adapter.layers.values()):
        layer.lora_dropout["default"] = SeededDropout(p, number)
    module.peft_config["default"].lora_dropout = p  # pyright: ignore


def check_adapter(module: PreTrainedModel) -> None:
    """Raises ConfigError for an adapter where whet reads a weight without it: on a head, or PEFT's copy of a module."""
    for what, layer in (("lm_head", module.get_output_embeddings()), ("embed_tokens", module.get_input_embeddings())):
        if layer is not None and is_adapter_layer(layer):
            raise ConfigError(
                f"an adapter on the {what} of {type(module).__name__} is not supported: its weight is read by itself, "
                "logits are made from it a chunk at a time; leave it out of target_modules, or train it whole: "
                f"lora.modules_to_save=[{what}]"
            )
    if wrapped := [n for n, part in module.named_modules() if type(part).__name__ == "ModulesToSaveWrapper"]:
        raise ConfigError(
            f"{wrapped[0]} is PEFT's copy of a module to save; give the model without it, and name it in "
            "RoleConfig(lora=LoraConfig(modules_to_save=...))"
        )


# ---- names, saving, loading ------------------------------------------------------------------------------------------


def adapter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors of an adapter's file: A and B of each layer, and every other parameter that is trained.

    Args: module: with an adapter. Returns: PEFT's name, without its prefix -> the parameter; a shared one under each of
        its names.
    Raises: TrainingError: it has none any more.
    """
    if is_prompt_tuned(module):
        return {n: p for n, p in module.named_parameters() if p.requires_grad}
    adapter = Adapter.from_module(module)
    if adapter is None:
        raise TrainingError(
            "the model's adapter is gone: it was merged into the weights or unloaded after training; save it by "
            "model.save_pretrained, and to train on, give the merged model to a new trainer"
        )
    name, own = adapter.name, {id(p) for p in adapter.parameters()}
    found: dict[str, nn.Parameter] = {}
    for path, p in module.named_parameters(remove_duplicate=False):
        if id(p) in own:
            path = path.replace(f".{name}.", ".") if f".{name}." in path else path.removesuffix(f".{name}")
            found[path.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")] = p  # as PEFT has it
        elif p.requires_grad:  # PEFT's name of a bias that is trained with an adapter is that of the wrapped layer
            found[path if path.endswith(".bias") else BASE_LAYER.sub("", path)] = p
    return found


@torch.no_grad()
def load_adapter_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], source: str, masters: Mapping[str, Tensor] | None = None
) -> None:
    """Copies an adapter's tensors into the parameters of a model with the same adapter, and into their masters.

    Args: module: with an adapter. tensors: as `adapter_tensors` names them. source: of them, for the message. masters:
        fp32 tensors by the name of the parameter.
    Raises: ConfigError: a name is on one side only, or another shape; nothing is changed then.
    """
    own = adapter_tensors(module)
    if odd := sorted(own.keys() ^ tensors.keys()):
        side = "there and not here" if odd[0] in tensors else "here and not there"
        raise ConfigError(
            f"{source} holds another adapter: {odd[0]} is {side} ({len(odd)} such names); give the same lora settings"
        )
    for name, p in own.items():
        if p.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)} there and {list(p.shape)} here"
            raise ConfigError(f"{source}: {name} is {shapes}; give the same base and lora settings, or start a new run")
    by_id = _masters_by_id(module, masters)
    for name, p in own.items():
        if id(p) in by_id:
            copy_whole(by_id[id(p)], tensors[name])
        copy_whole(p, tensors[name])


def _masters_by_id(module: nn.Module, masters: Mapping[str, Tensor] | None) -> dict[int, Tensor]:
    return {id(p): masters[n] for n, p in module.named_parameters() if masters and n in masters}


def save_adapter(module: PreTrainedModel, folder: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Writes an adapter in PEFT's format; PeftModel.from_pretrained(base, folder) loads it.

    Args: module: with an adapter. folder: exists. masters: fp32 tensors in place of parameters, by their names.
    """
    if is_prompt_tuned(module):
        save_prompt(module, folder, masters)
        return
    by_id = _masters_by_id(module, masters)
    named = {f"{PREFIX}{n}": by_id.get(id(p), p).detach() for n, p in adapter_tensors(module).items()}
    made = {name: t.cpu().contiguous().clone() for name, t in named.items()}
    save_file(made, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    adapter = Adapter.from_module(module)
    assert adapter is not None
    config = copy.deepcopy(module.peft_config[adapter.name])  # pyright: ignore
    config.inference_mode = True
    config.exclude_modules = None  # pyright: ignore
    for field in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(value := getattr(config, field), set | list):
            setattr(config, field, sorted(value))  # a set has another order in each process
    base = config.base_model_name_or_path
    if base and Path(base).expanduser().is_dir():
        config.base_model_name_or_path = str(Path(base).expanduser().absolute())
    config.save_pretrained(str(folder))


@torch.no_grad()
def merged_model(module: PreTrainedModel, masters: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """A copy of a model on the CPU without its adapter, whose weights are W + s B A, in fp32: a plain model.

    Args: module: with an adapter; it stays as it is. masters: fp32 tensors in place of parameters, by their names.
    Returns: a model of the same class, which save_pretrained writes as any.
    Raises: ConfigError: an adapter that is more than a product of two matrices.

    Example: `merged_model(loaded.module).save_pretrained("merged")`.
    """
    plain = copy.deepcopy(module)
    for name, p in plain.named_parameters():
        if masters and name in masters:
            p.data = masters[name].detach().clone()
    cast_parameters(plain, torch.float32)
    for name, layer in [(n, x) for n, x in plain.named_modules() if is_adapter_layer(x)]:
        base: Any = layer.get_base_layer()  # pyright: ignore
        _exchange(plain, name, _plain_linear(base, merged_weight(layer, dequantize(base.weight).float(), name)))
    for name, layer in [(n, x) for n, x in plain.named_modules() if is_quantized_layer(x)]:
        _exchange(plain, name, _plain_linear(layer, dequantize(layer.weight).float()))  # pyright: ignore
    for name in ("peft_config", "hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit"):
        vars(plain).pop(name, None)
    if "quantization_config" in vars(plain.config):
        del plain.config.quantization_config  # pyright: ignore
    plain.config.dtype = torch.float32
    return plain.cpu()


def _plain_linear(layer: Any, weight: Tensor) -> nn.Linear:
    """A linear layer of this weight, with the bias of another."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach())
    made.bias = layer.bias
    return made


def _exchange(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, layer)
