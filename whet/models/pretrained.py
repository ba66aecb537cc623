"""Reads a module of transformers from a folder or a hub name, and refuses incomplete models.

Transformers raises no error in three cases that this module refuses: a missing weight would be random, a weight without
a place in the model would be dropped, and an adapter next to the weights would be ignored.
Left out on purpose: vision, audio and encoder-decoder models; weights that were saved quantised; and adapters, which
lora.py reads.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from whet.errors import ConfigError, format_exception, nearest
from whet.models.causality_check import check_causal
from whet.models.config_sizes import MISSING_IS_NONE, read_config
from whet.models.heads import has_score_head
from whet.models.weight_files import (
    StoredTensor,
    WeightsNeeded,
    in_file,
    leave_in_files,
    read_tensor,
    stored_tensors,
)
from whet.storage.model_paths import check_hub, list_folders, model_folder, resolved_path_message

__all__ = ["PretrainedModule", "check_config", "log_whole", "meta_model", "read_model", "wrong_role_hint"]

logger = logging.getLogger("whet")

MAX_CONFIG_BYTES = 1 << 24
"""The largest config file that is read, in bytes; real ones have thousands."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Fields of a config that must be integers above 0, or a list with one for each layer."""
MAX_LAYERS = 10_000
"""More layers than any model has. transformers would fill the memory with lists of them before it reads the weights."""
CONSTANTS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|cos_cached|sin_cached|masked_bias|causal_mask"
    r"|(attn|attention|attn\.attention)\.bias)$"
)
"""Tables, not weights, that older versions of transformers saved and newer versions compute."""
MAX_NAMES_SHOWN = 3
"""The most names in a message."""


def adapter_folder(path: str) -> str:
    """Returns the folder or hub name where an adapter would be. Raises: ConfigError: see model_folder and check_hub."""
    folder = model_folder(path)
    check_hub(folder)
    return folder


class PretrainedModule(NamedTuple):
    """A module that was read from a folder or a hub name."""

    module: PreTrainedModel
    """On the CPU, unless its weights are in 4 bits. Parameters may have no values yet; see in_file."""
    score_weight: Tensor | None
    """[1 D], a saved score head for which the module's class has no place; None = there is none."""
    dtype: torch.dtype
    """The dtype of the saved weights, from the config; float32 if the config does not name it."""
    name: str
    """Its name in messages."""


def read_model(
    path: str,
    dtype: torch.dtype,
    role: str,
    *,
    bits: Any = None,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    in_files: bool = False,
) -> PretrainedModule:
    """Reads the module of a folder or hub name, and a score head that its class has no place for.

    Args:
        path: the folder of a model, a run or a checkpoint, or a hub name.
        dtype: dtype of the parameters.
        role: actor, critic, reference, teacher or reward.
        bits: transformers' configuration of 4-bit weights; None = the weights are not quantised.
        device: the device of 4-bit weights.
        trust_remote_code: run the Python files in the model's folder.
        in_files: leave the weights in their files if possible (weight_files.py), and log it otherwise.
    Raises: ConfigError: there is no model, a weight is missing, or a weight has no place in the model.
    """
    name, path = path, model_folder(path)
    if Path(path) != Path(name).expanduser():
        logger.info("%s", resolved_path_message(name, path))
    check_hub(path)
    _check_files(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the config of each family has checks of its own
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"the model at {path!r} contains Python code, which runs only with your permission",
                fix=f"read the code, and set {role}.trust_remote_code=true (from Python: "
                "RoleConfig(model=..., trust_remote_code=True))",
                key="actor.trust_remote_code",
            ) from error
        raise ConfigError(
            f"can't read a model at {path!r}: {format_exception(error)}; give a folder with a complete config.json or "
            "a hub name" + nearest(path, [name for name in list_folders() if name != path])
        ) from error
    check_config(config, path)
    stored = _read_headers(path)
    _check_stored_dtypes(path, config, stored)
    saved_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    replaced = "whet_value_head" in vars(config)  # a critic of a family without a classifier
    scores = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if (replaced or scores) and role not in ("critic", "reward"):
        raise ConfigError(
            f"{path!r} is a critic or a reward model: it has a score head and no LM head; it {wrong_role_hint(role)}"
        )
    if replaced:
        del config.whet_value_head  # pyright: ignore[reportAttributeAccessIssue]
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if bits is not None:
        extra |= {"quantization_config": bits, "device_map": {"": device}}
    read = None
    if in_files:
        try:
            read = leave_in_files(path, stored, config, dtype, scores=scores)
        except WeightsNeeded as reason:
            log_whole(name, reason)
    module, info = read or _load_weights(path, config, dtype, scores, extra)
    shared = not scores and "whet_shared_score_head" in vars(config)
    head = None
    if replaced:
        lm_head: Any = module.get_output_embeddings()
        head = next(f"{name}.weight" for name, part in module.named_modules() if part is lm_head)
    elif shared:
        head = "score.weight"
    _check_weights(module, info, path, head)
    embeddings: Any = module.get_input_embeddings()
    score_weight = None if head is None else _read_score_head(path, head, embeddings.weight.shape[1], stored)
    return PretrainedModule(module, score_weight, saved_dtype, name)


def meta_model(path: str, trust_remote_code: bool = False) -> nn.Module | None:
    """Builds the layers of a model from its config, without weights.

    Args: see config_sizes.read_positions.
    Returns: a language model on the meta device; None if the config can't be read, or has no language model.
    """

    def make_module(config: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)

    return read_config(path, trust_remote_code, make_module)


def wrong_role_hint(role: str) -> str:
    """Part of an error message: the role of a model with a score head and no LM head."""
    also = " and can't complete prompts" if role == "reference" else ""  # a Sampler loads its model as a reference
    return f"can't be the {role}{also}; set it as reward_model.model, which scores completions"


def check_config(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError unless this is the config of a text-only causal language model, with sizes above 0."""
    extra = sorted(set(vars(config)) & {"vision_config", "audio_config", "image_token_id", "audio_token_id"})
    if extra or config.get_text_config() is not config:
        raise ConfigError(
            f"{name!r} ({config.model_type}) is not a text-only model: its config has "
            f"{', '.join(extra) or 'sub-models'}; give only the causal language model"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"{name!r} ({config.model_type}) is an encoder-decoder; give a causal language model")
    for size in SIZES:
        key = config.attribute_map.get(size, size)
        value = vars(config).get(key)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not (is_size or value is None or isinstance(value, list | tuple | dict)):
            raise ConfigError(
                f"{name!r} ({config.model_type}) has {key} {value!r} in its config; it must be an integer above 0: "
                "copy config.json again from the model's source"
            )


def _check_files(path: str) -> None:
    """Refuses an adapter in place of a model, and invalid JSON files, some of which transformers ignores."""
    if cached_file(path, "adapter_config.json", **MISSING_IS_NONE) is not None:
        raise ConfigError(
            f"{path!r} holds an adapter (adapter_config.json), and another adapter names it as its base model: merge "
            "it into its own base first with PEFT, PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            ".save_pretrained(folder), and use that folder; if the weights are merged already, remove "
            "adapter_config.json"
        )
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        file = Path(path) / name
        if not file.is_file():
            continue
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES and "index" not in name:
            raise ConfigError(
                f"{file} has {size} bytes, and a config has at most {MAX_CONFIG_BYTES}; put the model's config there"
            )
        try:
            content = json.loads(file.read_bytes())
            problem = None if isinstance(content, dict) else "it is not an object"
        except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
            content, problem = {}, format_exception(error)
        if problem is not None:
            raise ConfigError(
                f"can't read a model at {path!r}: {name} is not a valid JSON file ({problem}); copy it again from the "
                "model's source"
            )
        for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
            if isinstance(layers := content.get(key), int) and layers > MAX_LAYERS:
                raise ConfigError(f"{file} has {key} {layers}, and a model has at most {MAX_LAYERS}; copy it again")


def _read_headers(path: str) -> dict[str, StoredTensor]:
    """Returns what is stored in safetensors files; empty = nothing, or a file or the index is broken."""
    try:
        return stored_tensors(path)
    except Exception as error:  # loading reports it
        logger.debug("the header of the weights of %s can't be read: %s", path, format_exception(error))
        return {}


def log_whole(name: str, reason: object) -> None:
    """Logs why several processes load a model by rank 0. Args: name: of the model. reason: about its weights."""
    logger.info("rank 0 reads all weights of %s, and sends them: %s", name, reason)


def _check_stored_dtypes(path: str, config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Refuses weights in 8 bits or fewer without a quantization_config: they would be read without their scales."""
    if getattr(config, "quantization_config", None) is not None:
        return
    for key, tensor in stored.items():
        if tensor.dtype.startswith(("I8", "U8", "F8", "F4")) and not CONSTANTS.search(key):
            raise ConfigError(
                f"{path!r} stores {key} as {tensor.dtype}, and its config.json has no quantization_config, so the "
                "scales are unknown; use the model from before it was quantised (bf16 or fp32): "
                "actor.quantization=nf4 then keeps it in 4 bits"
            )


def _load_weights(
    path: str, config: PretrainedConfig, dtype: torch.dtype, scores: bool, extra: Mapping[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Iterable[Any]]]:
    """Returns the module with its weights, and transformers' report on their names."""
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    try:
        return kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            weights_only=True,
            ignore_mismatched_sizes=True,  # _check_weights reports them; a critic's head is added later
            output_loading_info=True,
            **extra,
        )
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"the weights of {path!r} are not only tensors: such a pickle could run code, so it is not opened; if you "
            "trust it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=False), "
            "'model.safetensors', metadata={'format': 'pt'}), with a state_dict of tensors, and remove the .bin file"
        ) from error
    except Exception as error:  # transformers, safetensors and the code of each family have many exception classes
        raise ConfigError(
            f"can't load {path!r} as a causal language model: {format_exception(error)}; its weights must be complete "
            "and have the shapes of its config.json, in model.safetensors or in torch's pytorch_model.bin"
        ) from error


def _check_weights(module: PreTrainedModel, info: Mapping[str, Iterable[Any]], path: str, head: str | None) -> None:
    """Refuses a model with weights that would be random, and weights that would be dropped.

    Args: info: transformers' report. head: name of a critic's head, which is added later; None = it is no critic.
    """
    expected = dict(module.named_parameters()).keys() | {
        name for name, buffer in module.named_buffers() if buffer.is_floating_point() and not CONSTANTS.search(name)
    }
    missing = sorted((set(info["missing_keys"]) & expected) - {head})
    dropped = sorted(name for name in info["unexpected_keys"] if not CONSTANTS.search(name) and name != head)
    mismatched = [f"{n} is {list(a)} there and {list(b)} here" for n, a, b in info["mismatched_keys"] if n != head]
    if mismatched:
        raise ConfigError(
            f"can't load {path!r} as a causal language model: {_join_names(sorted(mismatched))}; its weights must be "
            "complete and have the shapes of its config.json"
        )
    if (missing or dropped) and not has_score_head(module) and not any(map(in_file, module.parameters())):
        check_causal(module, path)  # for an encoder, this error is clearer than the names of missing heads
    if missing:
        raise ConfigError(
            f"{path!r} has no weights for {len(missing)} parameters, which would be random: {_join_names(missing)}; "
            "copy its weights again, or give the folder of the complete model"
        )
    if dropped:
        raise ConfigError(
            f"{path!r} has weights without a place in the model of its config.json, which would be dropped "
            f"({len(dropped)}): {_join_names(dropped)}; copy config.json again from the model's source, or remove "
            "these weights from the files"
        )


def _join_names(names: list[str]) -> str:
    """Returns the first few names, for a message."""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (" ..." if len(names) > MAX_NAMES_SHOWN else "")


def _read_score_head(path: str, name: str, width: int, stored: Mapping[str, StoredTensor]) -> Tensor:
    """Returns the [1 D] score head of a saved critic. Args: name: its tensor's name. width: D."""
    keys = [key for key, tensor in stored.items() if tensor.shape == (1, width)]
    if name not in keys and len(keys) != 1:  # transformers saves some heads under an older name
        raise ConfigError(f"{path!r} has no score head {name} of shape [1, {width}]; save the critic again")
    return read_tensor(name if name in keys else keys[0], stored)
