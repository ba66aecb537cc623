"""An optimizer's state in a checkpoint: plain tensors, named after their parameters.

    optimizer.safetensors   "model.norm.weight.exp_avg": [D] ...     "<parameter>.<key>", any order
    state.pt, "optim"       groups: [{"params": [names], "lr": ...}], values that are not tensors, the schedule's state

A tensor's name does not depend on the optimizer's groups, so parts of the state can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from whet.errors import CheckpointError, ConfigError
from whet.storage.checkpoint import CHECKPOINT_FORMAT, check_format
from whet.util.references import resolve_ref
from whet.util.tensor_subclasses import gather_full_tensor, is_wrapper_subclass

__all__ = ["FORMAT_KEY", "WRAPPED", "check_moment_shapes", "flatten_state", "load_optimizer_state", "unflatten_state"]

FORMAT_KEY = "whet_format"
"""The key of the format number in the metadata of optimizer.safetensors."""
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Entries of torch's optimizers that have the shape of their parameter."""
WRAPPED: dict[str, str] = {"OptimState8bit": "torchao.optim.subclass_8bit"}
"""Tensor subclasses that a state may hold, and their modules. A file can't name another class."""


def flatten_state(
    state: Mapping[Any, Mapping[str, Any]], *, sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Splits an optimizer's state into tensors for safetensors and plain values.

    Args: state: parameter name -> the optimizer's entries for it. sharded: the tensors stay as they are, each rank's
        shards among them; single numbers are then plain values.
    Returns: tensors by "<name>.<key>", copies on the CPU unless `sharded`; plain values by such names; and a
        description of each tensor subclass by its name, with its inner tensors among the tensors as
        "<name>.<key>.<part>".
    Raises: CheckpointError: a tensor subclass is not in WRAPPED.

    >>> import torch
    >>> flatten_state({"norm.weight": {"m": torch.zeros(2), "n": 3}})
    ({'norm.weight.m': tensor([0., 0.])}, {'norm.weight.n': 3}, {})
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    wrapped: dict[str, Any] = {}
    for parameter, entry in state.items():
        for key, value in entry.items():
            name = f"{parameter}.{key}"
            if isinstance(value, Tensor) and not sharded:
                value = gather_full_tensor(value)
            if not isinstance(value, Tensor) or (sharded and value.dim() == 0):
                plain[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            elif sharded:
                if type(getattr(value, "_local_tensor", value)) is not Tensor:
                    raise CheckpointError(
                        f"{name} of the optimizer's state is quantised, which sharded checkpoints can't hold; leave "
                        "out sharded and enable_async_checkpointing of trainer.checkpointing_options, or take another "
                        "optim.name"
                    )
                tensors[name] = value.detach()
            elif is_wrapper_subclass(value):
                kind = type(value).__name__
                if WRAPPED.get(kind) != type(value).__module__:
                    raise CheckpointError(
                        f"{name} of the optimizer's state is a {type(value).__module__}.{kind}, which can't be saved; "
                        "save no checkpoints, or take another optim.name"
                    )
                parts, context = value.__tensor_flatten__()
                tensors |= {f"{name}.{part}": _copy_to_cpu(getattr(value, part)) for part in parts}
                wrapped[name] = {"kind": kind, "parts": list(parts), "context": context}
            else:
                tensors[name] = _copy_to_cpu(value)
    return tensors, plain, wrapped


def unflatten_state(
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    wrapped: Mapping[str, Any],
    parameters: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Puts together what `flatten_state` returned.

    Args:
        tensors, plain, wrapped: the results of `flatten_state`.
        parameters: the valid parameter names.
    Returns: parameter name -> its entries.
    Raises: CheckpointError: a tensor subclass is not in WRAPPED or its package is not installed, or a name belongs to
        no parameter.

    >>> import torch
    >>> unflatten_state({"norm.weight.m": torch.zeros(2)}, {"norm.weight.n": 3}, {}, ["norm.weight"])
    {'norm.weight': {'m': tensor([0., 0.]), 'n': 3}}
    """
    values: dict[str, Any] = {**tensors, **plain}
    for name, description in wrapped.items():
        kind = description["kind"]
        if kind not in WRAPPED:
            raise CheckpointError(f"the optimizer's state holds a {kind!r}; known: {', '.join(WRAPPED)}")
        try:
            cls: Any = resolve_ref(f"{WRAPPED[kind]}:{kind}", "optimizer state")
        except ConfigError as error:
            raise CheckpointError(f"the optimizer's state holds a {kind}: {error}") from error
        parts = {part: values.pop(f"{name}.{part}") for part in description["parts"]}
        values[name] = cls.__tensor_unflatten__(parts, description["context"], None, None)
    known = frozenset(parameters)
    entries: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, key = _split(name, known)
        entries.setdefault(parameter, {})[key] = value
    return entries


def _split(name: str, parameters: Collection[str]) -> tuple[str, str]:
    """Splits a name into parameter and key. Both may have dots; no parameter's name is a prefix of another's."""
    parameter, _, key = name.rpartition(".")
    while parameter and parameter not in parameters:
        parameter, _, more = parameter.rpartition(".")
        key = f"{more}.{key}"
    if not parameter:
        raise CheckpointError(
            f"the optimizer's state holds {name!r}, which belongs to no parameter that is trained here; resume with "
            "the model and the frozen layers that it was saved with, or start a new run from its weights"
        )
    return parameter, key


def _copy_to_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()


# ---- a saved optimizer -----------------------------------------------------------------------------------------------


def load_optimizer_state(
    path: Path,
    rest: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    tensors: Mapping[str, Tensor] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Reads a saved optimizer's state, with the groups in the order of the current optimizer.

    Args:
        path: optimizer.safetensors.
        rest: the entry "optim" of the state.pt next to it.
        groups: the parameter names of each group of the current optimizer.
        tensors: what the file would hold, which is not read then.

    Returns:
        the settings of each group; the settings that each group began with; parameter name -> its entries.

    Raises:
        CheckpointError: the file can't be read, has an unknown format, or has other parameters or groups.
    """
    tensors = _read_tensors(path) if tensors is None else tensors
    saved = rest["groups"]
    entries = unflatten_state(tensors, rest["plain"], rest["wrapped"], [name for names in groups for name in names])
    order = [_group_of(path, names, saved) for names in groups]
    if len(saved) != len(groups):
        raise CheckpointError(f"{path} holds {len(saved)} groups of parameters, the optimizer here has {len(groups)}")
    return [saved[i] for i in order], [rest["initial_settings"][i] for i in order], entries


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            number = (file.metadata() or {}).get(FORMAT_KEY)
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} can't be read ({e}); resume from an earlier step-* folder") from e
    check_format(path, CHECKPOINT_FORMAT if number == str(CHECKPOINT_FORMAT) else number, weights=path.parent)
    return tensors


def _group_of(path: Path, names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> int:
    """Returns the index of the saved group with exactly these parameters."""
    for i, group in enumerate(saved):
        if set(group["params"]) == set(names):
            return i
    near = max(saved, key=lambda group: len(set(group["params"]) & set(names)), default={"params": []})
    unmatched = sorted(set(near["params"]) ^ set(names))
    raise CheckpointError(
        f"{path} does not fit this optimizer: {unmatched[0]!r} is in a group on one side only (of {len(unmatched)}); "
        "resume with the model and the frozen layers that it was saved with, or start a new run from its weights"
    )


def check_moment_shapes(path: Path, entries: Mapping[str, Mapping[str, Any]], masters: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if a moment has another shape than its parameter."""
    for name, entry in entries.items():
        for key in MOMENTS:
            value = entry.get(key)
            if isinstance(value, Tensor) and value.shape != masters[name].shape:
                raise CheckpointError(
                    f"{path}: {key} of {name} is {tuple(value.shape)} there, and the parameter is "
                    f"{tuple(masters[name].shape)} here; start a new run from its weights"
                )
