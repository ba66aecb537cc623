"""Modules whose weights stay in their safetensors files until each process reads its own rows.

    stored_tensors(path)     what the headers say of each tensor: file, shape, dtype
    leave_in_files(...)      the module of transformers with memory, but without values
    in_file(p)               the tensor of such a parameter, which parallel/loading.py reads
    without_weights(...)     a copy of a module on the meta device

transformers itself makes the module, from uninitialised tensors in place of the stored ones: names, ties, buffers and
its report are those of a model that was read, and memory that nothing writes is not taken. A parameter that is one of
these tensors has the values of the file. One that transformers has cast, merged or transposed is another tensor; then
the model can't stay in its files. Left out on purpose: pytorch_model.bin, quantised weights, and experts that
transformers merges.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from whet.errors import ConfigError, format_exception
from whet.models.config_sizes import MISSING_IS_NONE

__all__ = [
    "InFile",
    "StoredTensor",
    "WeightsNeeded",
    "check_finite",
    "in_file",
    "leave_in_files",
    "read_tensor",
    "stored_tensors",
    "without_weights",
]

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights, by safetensors' names."""

Holder = TypeVar("Holder")


class WeightsNeeded(Exception):
    """The weights of a model can't stay in their files; the text says why."""


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """By safetensors' name: F32, BF16 ..."""


class InFile(NamedTuple):
    """Where the values of a parameter are."""

    file: str
    key: str
    """The tensor's name in the file."""
    dtype: torch.dtype
    """In which the model is read: values are cast to it first, whatever the parameter's dtype is by then."""


def in_file(p: nn.Parameter) -> InFile | None:
    """Returns where the values of a parameter are; None = it has them.

    >>> in_file(nn.Linear(2, 2).weight) is None
    True
    """
    return getattr(p, "whet_in_file", None)


def without_weights(holder: Holder, module: nn.Module, *, in_files_only: bool = False) -> Holder:
    """Returns a copy of a module, or of an object that holds it, whose parameters are on the meta device.

    Args: in_files_only: only those whose values are in files; the others are copied.

    >>> without_weights(layer := nn.Linear(2, 2), layer).weight.device
    device(type='meta')
    """
    empty: dict[int, Any] = {}
    for p in module.parameters():
        if (stored := in_file(p)) or not in_files_only:
            empty[id(p)] = made = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            made.whet_in_file = stored  # pyright: ignore[reportAttributeAccessIssue]
    return copy.deepcopy(holder, empty)


def check_finite(values: Tensor, name: str, key: str) -> None:
    """Raises ConfigError if there is NaN or an infinite number. Args: values: weights. name: of the model. key: theirs.

    A norm reads a tensor once and is finite for almost all finite tensors; `isfinite` makes several copies of it.
    """
    if not torch.linalg.vector_norm(values).isfinite() and not values.isfinite().all():
        raise ConfigError(f"{name} has NaN or infinite numbers in {key}; copy or download its weights again")


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """Reads the headers of a model's safetensors files, as transformers finds them.

    Args: path: a folder or a hub name.
    Returns: name -> tensor; empty where there are no such files.
    Raises: OSError, ValueError or an error of safetensors: a broken index or file.
    """
    single = cached_file(path, "model.safetensors", **MISSING_IS_NONE)
    index = None if single else cached_file(path, "model.safetensors.index.json", **MISSING_IS_NONE)
    names = sorted(set(json.loads(Path(index).read_bytes())["weight_map"].values())) if index else []
    found: dict[str, StoredTensor] = {}
    for file in [single] if single else [cached_file(path, name) for name in names]:
        assert file is not None
        with safe_open(file, "pt") as f:
            for key in f.keys():  # noqa: SIM118
                tensor = f.get_slice(key)
                found[key] = StoredTensor(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def leave_in_files(
    path: str,
    stored: Mapping[str, StoredTensor],
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    scores: bool,
) -> tuple[PreTrainedModel, Mapping[str, Iterable[Any]]]:
    """Makes the module of a folder or a hub name without reading its weights.

    Args:
        path: the folder or name. stored: its tensors. config: its config.
        dtype: dtype of the parameters.
        scores: it is a sequence classifier, and otherwise a causal language model.

    Returns:
        the module on the CPU, and transformers' report on names. Parameters that are not in the files have the values
        that transformers gave them; `in_file` tells the others, whose memory is uninitialised.
    Raises: WeightsNeeded: transformers must read the weights.
    """
    if not stored:
        raise WeightsNeeded("they are not in safetensors files that can be read")
    for field in ("quantization_config", "transformers_weights"):
        if getattr(config, field, None) is not None:
            raise WeightsNeeded(f"its config has {field}")
    kinds = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if scores else MODEL_FOR_CAUSAL_LM_MAPPING
    cls: Any = kinds.get(type(config), None)
    if not isinstance(cls, type):
        raise WeightsNeeded(f"transformers has not one class for {config.model_type}")
    try:
        empties = {
            key: torch.empty(x.shape, dtype=dtype) if x.dtype in FLOATS else read_tensor(key, stored)
            for key, x in stored.items()
        }
        module, info = cls.from_pretrained(
            None, config=config, dtype=dtype, state_dict=empties, ignore_mismatched_sizes=True, output_loading_info=True
        )
        _name(module, path)
    except Exception as error:  # transformers reads the weights then, or raises an error about them
        raise WeightsNeeded(format_exception(error, 200)) from error
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    used: set[str] = set()
    origins = {x.untyped_storage().data_ptr(): key for key, x in empties.items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = origins.get(tensor.untyped_storage().data_ptr())
        if key is None or not _is_whole(tensor, empties[key]):
            if name in new:
                continue
            raise WeightsNeeded(f"transformers converts {name} as it reads it")
        used.add(key)
        if isinstance(tensor, nn.Parameter):
            tensor.whet_in_file = InFile(stored[key].file, key, dtype)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            tensor.copy_(read_tensor(key, stored))
    rest = {x.shape for key, x in stored.items() if key not in used.union(info["unexpected_keys"])}
    for pair in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        target, source = map(module.get_parameter, pair)
        if target is not source or target.shape in rest:  # transformers ties them where their values are equal
            raise WeightsNeeded(f"its config ties {pair[0]} to {pair[1]}, and the files seem to hold both")
    return module, info


def read_tensor(key: str, stored: Mapping[str, StoredTensor]) -> Tensor:
    """Reads a tensor. Args: key: its name. stored: all tensors of a model."""
    with safe_open(stored[key].file, "pt") as f:
        return f.get_tensor(key)


def _is_whole(tensor: Tensor, empty: Tensor) -> bool:
    """Returns whether a tensor is the same view of its memory as another."""
    facts = ((x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (tensor, empty))
    return next(facts) == next(facts)


def _name(module: Any, path: str) -> None:
    """Sets what transformers reads from a model's folder besides weights."""
    module.config.name_or_path = module.name_or_path = path
    if module.can_generate():
        try:
            module.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # there is no generation_config.json
            module.generation_config = GenerationConfig.from_pretrained(
                path, config_file_name="config.json", _from_model_config=True
            )
