"""Reads a module of transformers from a folder or a hub name, and refuses incomplete models.

Transformers raises no error in three cases that are refused here: a missing weight would be random, a weight that the
config has no place for would be dropped, and an adapter next to the weights would be ignored.
Left out on purpose: vision, audio and encoder-decoder models; weights that were saved quantised; and adapters, which
lora.py reads (this module reads their base).
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
from safetensors import safe_open
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
from whet.util.model_paths import check_hub, folders_here, model_folder, resolved_path_message

__all__ = ["PretrainedModule", "check_config", "meta_model", "read_model", "wrong_role_hint"]

logger = logging.getLogger("whet")

MAX_CONFIG_BYTES = 1 << 24
"""Bytes of a config at most; real ones have thousands."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Whole numbers above 0 wherever a config has them, or one for each layer."""
MAX_LAYERS = 10_000
"""More than any model has: transformers would fill the memory with lists of them before it looks at the weights."""
CONSTANTS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|cos_cached|sin_cached|masked_bias|causal_mask"
    r"|(attn|attention|attn\.attention)\.bias)$"
)
"""Tables that older versions of transformers saved and newer ones compute: no weights."""
MAX_NAMES_SHOWN = 3
"""Names in a message."""


def adapter_folder(path: str) -> str:
    """The folder or hub name in which an adapter would lie. Raises: ConfigError: see model_folder and check_hub."""
    folder = model_folder(path)
    check_hub(folder)
    return folder


class PretrainedModule(NamedTuple):
    """A module that was read from a folder or a hub name."""

    module: PreTrainedModel
    """On the CPU, if it is not held in bits."""
    score_weight: Tensor | None
    """[1 D], the score head that the module's class has no place for; None = there is none."""
    dtype: torch.dtype
    """The dtype of its saved weights in its config; float32 where the config has none."""
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
) -> PretrainedModule:
    """The module of a folder or hub name, and the score head where one was saved outside of its class.

    Args: path: of a model, a run or a checkpoint, or a hub name. dtype: of the parameters. role: actor, critic,
        reference or reward. bits: transformers' configuration of weights held in 4 bits; None = they are not. device:
        where these are read to. trust_remote_code: run the Python files that lie beside the weights.
    Raises: ConfigError: nothing to read there, or not all of it, or more than a model of that config has.
    """
    given, path = path, model_folder(path)
    if Path(path) != Path(given).expanduser():
        logger.info("%s", resolved_path_message(given, path))
    check_hub(path)
    _check_files(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family's config checks itself, and raises what it likes
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"the model at {path!r} brings Python code of its own, which you have to allow",
                fix=f"read it, and set {role}.trust_remote_code=true (from Python: "
                "RoleConfig(model=..., trust_remote_code=True))",
                key="actor.trust_remote_code",
            ) from error
        raise ConfigError(
            f"can't read a model at {path!r}: {format_exception(error)}; give a folder with a whole config.json, or a "
            "hub name" + nearest(path, [name for name in folders_here() if name != path])
        ) from error
    check_config(config, path)
    _check_held(path, config)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    old = "whet_value_head" in vars(config)  # a critic of an earlier release, or of a family without a classifier
    scores = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if (old or scores) and role not in ("critic", "reward"):
        raise ConfigError(
            f"{path!r} is a critic or a reward model: it has a score head and no LM head; it {wrong_role_hint(role)}"
        )
    if old:
        del config.whet_value_head  # pyright: ignore[reportAttributeAccessIssue]
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if bits is not None:
        extra |= {"quantization_config": bits, "device_map": {"": device}}
    module, info = _weights(path, config, dtype, kind, extra)
    shared = not scores and "whet_shared_score_head" in vars(config)
    head = None
    if old:
        head = _head_name(module)
    elif shared:
        head = "score.weight"
    _check_weights(module, info, path, head)
    embeddings: Any = module.get_input_embeddings()
    return PretrainedModule(
        module, None if head is None else _score_weight(path, head, embeddings.weight.shape[1]), own, given
    )


def meta_model(path: str, trust_remote_code: bool = False) -> nn.Module | None:
    """The layers of a model without their weights, by its config alone.

    Args: as for positions.read_positions.
    Returns: a language model on the meta device; None where the config can't be read, or makes no model.
    """

    def make(config: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)

    return read_config(path, trust_remote_code, make)


def wrong_role_hint(role: str) -> str:
    """The part of a message that says which role a model with a score head and no LM head can have."""
    also = " and can't complete prompts" if role == "reference" else ""  # a Sampler reads its model as one
    return f"can't be the {role}{also}; what gives scores to completions is reward_model.model"


def check_config(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError unless this is the config of a text-only causal language model, with sizes above 0."""
    extra = sorted(set(vars(config)) & {"vision_config", "audio_config", "image_token_id", "audio_token_id"})
    if extra or config.get_text_config() is not config:
        raise ConfigError(
            f"{name!r} ({config.model_type}) is not a text-only model: its config has "
            f"{', '.join(extra) or 'sub-models'}; give the causal language model alone"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"{name!r} ({config.model_type}) is an encoder-decoder; give a causal language model")
    for size in SIZES:
        key = config.attribute_map.get(size, size)
        value = vars(config).get(key)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not (whole or value is None or isinstance(value, list | tuple | dict)):
            raise ConfigError(
                f"{name!r} ({config.model_type}) has {key} {value!r} in its config; it must be a whole number above 0: "
                "copy config.json again from where the weights come from"
            )


def _check_files(path: str) -> None:
    """Refuses an adapter, and invalid JSON files of a folder: transformers ignores some of them."""
    found = cached_file(path, "adapter_config.json", **MISSING_IS_NONE)
    if found is not None:
        raise ConfigError(
            f"{path!r} holds an adapter (adapter_config.json), and is named as the base model of another one: merge it "
            "into its own base first with PEFT, PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            ".save_pretrained(folder), and give that folder; where the weights are merged already, remove "
            "adapter_config.json"
        )
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        file = Path(path) / name
        if not file.is_file():
            continue
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES and "index" not in name:
            raise ConfigError(
                f"{file} has {size} bytes, and no config has more than {MAX_CONFIG_BYTES}; is it another file?"
            )
        try:
            found = json.loads(file.read_bytes())
            why = None if isinstance(found, dict) else "holds no object"
        except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
            found, why = {}, format_exception(error)
        if why is not None:
            raise ConfigError(
                f"can't read a model at {path!r}: {name} is not the JSON it must be ({why}); copy it again from where "
                "the weights come from"
            )
        for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
            if isinstance(layers := found.get(key), int) and layers > MAX_LAYERS:
                raise ConfigError(f"{file} says {key} {layers}, and no model has more than {MAX_LAYERS}; copy it again")


def _check_held(path: str, config: PretrainedConfig) -> None:
    """Refuses weights in 8 bits or fewer without a quantization_config: they would be read without their scale."""
    if getattr(config, "quantization_config", None) is not None:
        return
    file = "model.safetensors"
    index = cached_file(path, f"{file}.index.json", **MISSING_IS_NONE)
    try:
        names = {file} if index is None else set(json.loads(Path(index).read_bytes())["weight_map"].values())
        for found in filter(None, (cached_file(path, name, **MISSING_IS_NONE) for name in sorted(names))):
            with safe_open(found, "pt") as f:
                held = {key: f.get_slice(key).get_dtype() for key in f.keys()}  # noqa: SIM118
            for key, kind in held.items():
                if kind.startswith(("I8", "U8", "F8", "F4")) and not CONSTANTS.search(key):
                    raise ConfigError(
                        f"{path!r} holds {key} as {kind}, and its config.json has no quantization_config to say what "
                        "those numbers stand for; give the model as it was before it was quantised (bf16 or fp32): "
                        "actor.quantization=nf4 then holds it in 4 bits"
                    )
    except ConfigError:
        raise
    except Exception as error:  # a broken file or index, of which loading says more
        logger.debug("the header of the weights of %s can't be read: %s", path, format_exception(error))


def _weights(
    path: str, config: PretrainedConfig, dtype: torch.dtype, kind: Any, extra: Mapping[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Iterable[Any]]]:
    """The module with the weights of a folder or hub name, and what transformers reports of their names."""
    try:
        return kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            weights_only=True,
            ignore_mismatched_sizes=True,  # _check_weights says which, and a critic's head is put in later
            output_loading_info=True,
            **extra,
        )
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"the weights of {path!r} are not plain tensors: a pickle of more than these could run code and is not "
            "opened; where you trust it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=False), "
            "'model.safetensors', metadata={'format': 'pt'}), with a state_dict of tensors, and remove the .bin file"
        ) from error
    except Exception as error:  # transformers, safetensors and each family's code raise what they like
        raise ConfigError(
            f"can't load {path!r} as a causal language model: {format_exception(error)}; its weights must be whole and "
            "of the shapes that its config.json says, in model.safetensors or in torch's pytorch_model.bin"
        ) from error


def _check_weights(module: PreTrainedModel, info: Mapping[str, Iterable[Any]], path: str, head: str | None) -> None:
    """Refuses weights that would be random, and weights that would be dropped.

    Args: info: what transformers says. head: a critic's head, which is put in later; None = no critic.
    """
    wanted = dict(module.named_parameters()).keys() | {  # a tied head is neither
        name for name, buffer in module.named_buffers() if buffer.is_floating_point() and not CONSTANTS.search(name)
    }
    missing = sorted((set(info["missing_keys"]) & wanted) - {head})
    dropped = sorted(name for name in info["unexpected_keys"] if not CONSTANTS.search(name) and name != head)
    other = [f"{n} is {list(a)} there and {list(b)} here" for n, a, b in info["mismatched_keys"] if n != head]
    if other:
        raise ConfigError(
            f"can't load {path!r} as a causal language model: {_named(sorted(other))}; its weights must be whole and "
            "of the shapes that its config.json says"
        )
    if (missing or dropped) and not has_score_head(module):
        check_causal(module, path)  # of an encoder it says more than the names of its other heads
    if missing:
        raise ConfigError(
            f"{path!r} has no weights for {len(missing)} parameters, which would be random: {_named(missing)}; copy "
            "its weights again, or give the folder of the whole model"
        )
    if dropped:
        raise ConfigError(
            f"{path!r} has weights that its config.json has no place for, and that would be dropped ({len(dropped)}): "
            f"{_named(dropped)}; copy config.json again from where the weights come from, or remove these "
            "from the files"
        )


def _named(names: list[str]) -> str:
    """The first few."""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (" ..." if len(names) > MAX_NAMES_SHOWN else "")


def _head_name(module: PreTrainedModel) -> str:
    """The name of the output layer's weight."""
    head: nn.Module | None = module.get_output_embeddings()
    return next(f"{name}.weight" for name, part in module.named_modules() if part is head)


def _score_weight(path: str, name: str, width: int) -> Tensor:
    """The [1 D] score head of a saved critic. Args: name: of it. width: D."""
    file = "model.safetensors"
    index = cached_file(path, f"{file}.index.json", _raise_exceptions_for_missing_entries=False)
    named: dict[str, Tensor] = {}
    try:
        files = {file} if index is None else set(json.loads(Path(index).read_bytes())["weight_map"].values())
        for file in sorted(files):
            with safe_open(cached_file(path, file), "pt") as f:
                keys = [key for key in f.keys() if f.get_slice(key).get_shape() == [1, width]]  # noqa: SIM118
                named |= {key: f.get_tensor(key) for key in keys}
    except Exception as error:  # safetensors' own class, OSError, what json and a wrong index raise
        raise ConfigError(
            f"can't read the score head of {path!r}: {format_exception(error)}; save the critic again"
        ) from error
    if name not in named and len(named) != 1:  # transformers saves some heads under an older name
        raise ConfigError(f"{path!r} has no score head {name} of shape [1, {width}]; save the critic again")
    return named[name] if name in named else next(iter(named.values()))
