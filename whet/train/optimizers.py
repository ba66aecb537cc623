"""The optimizers by name, and their state as plain tensors.

    adamw        decoupled decay, fused where torch has a kernel (CPU, CUDA, Apple, Intel); the default
    adam         the same, but decay joins the gradient
    sgd          with momentum where optim.momentum says so
    adamw8bit    adamw whose moments take a byte a number (torchao; pip install 'whet[quant]')

The 8-bit moments are quantised in blocks of 256 by a dynamic map; tensors of less than 4096 numbers, and those whose
size is no multiple of 256, keep fp32 moments. Masters stay fp32 with each of them. Left out on purpose: optimizers
whose state is paged to the host, which `offload_to_cpu` does for all of these, and schedule-free ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.config import OptimConfig
from whet.errors import CheckpointError, ConfigError, lookup_error
from whet.util.refs import resolve_ref

__all__ = ["OPTIMIZERS", "WRAPPED", "flat_state", "make_optimizer", "set_setting", "settings_of", "whole_state"]

Groups = list[dict[str, Any]]

_FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Kinds of device that torch has a fused Adam for."""


def make_optimizer(masters: Mapping[str, Tensor], config: OptimConfig | Callable[..., Any]) -> torch.optim.Optimizer:
    """The torch optimizer of a model's masters; matrices decay, vectors (norms, biases) don't.

    Args: masters: fp32 tensors by name. config: an OptimConfig, or `f(tensors) -> torch.optim.Optimizer`.
    Returns: the optimizer.
    Raises: ConfigError: an unknown name, a factory that fails or makes something else, torchao missing for adamw8bit.

    >>> type(make_optimizer({"w": torch.nn.Parameter(torch.ones(2, 2))}, OptimConfig(name="sgd"))).__name__
    'SGD'
    """
    if not isinstance(config, OptimConfig):
        return _made(config, "an optimizer factory", list(masters.values()))
    groups = [
        {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if ":" in config.name:
        return _made(resolve_ref(config.name, "optimizer"), f"optim.name={config.name!r}", groups, lr=config.lr)
    if config.name not in OPTIMIZERS:
        raise lookup_error("optim.name", config.name, [*OPTIMIZERS, "package.module:factory"])
    return OPTIMIZERS[config.name](groups, config)


def _adamw(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps, fused=_fused(groups))


def _adam(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=c.lr, betas=c.betas, eps=c.eps, fused=_fused(groups))


def _sgd(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum)


def _adamw8bit(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"optim.name='adamw8bit' needs torchao ({error}); pip install 'whet[quant]', or take adamw"
        ) from error
    return AdamW8bit(groups, lr=c.lr, betas=c.betas, eps=c.eps)


OPTIMIZERS: dict[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "sgd": _sgd,
}


def _fused(groups: Groups) -> bool:
    return all(p.device.type in _FUSED for g in groups for p in g["params"])


def _made(factory: Any, name: str, tensors: Any, **rate: float) -> torch.optim.Optimizer:
    """What a factory makes. Raises ConfigError where it is none, fails, or makes something else."""
    call = f"factory({'groups, lr=...' if rate else 'parameters'}) -> torch.optim.Optimizer"
    if not callable(factory):
        raise ConfigError(f"{name} is no function but {factory!r:.80}; give one that is called as {call}")
    try:
        made = factory(tensors, **rate)
    except Exception as error:  # a factory is the user's own code
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}; it is called as {call}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} must return a torch.optim.Optimizer, got {type(made).__name__}; it is called as {call}"
        )
    return made


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, without its parameters; a rate that is held as a tensor is a number here."""
    return [
        {n: float(v) if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


def set_setting(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets a setting of a group; one that is held as a tensor (a compiled optimizer's rate) stays one."""
    group[name] = torch.tensor(value) if isinstance(group.get(name), Tensor) else value


# ---- state -----------------------------------------------------------------------------------------------------------

WRAPPED: dict[str, str] = {"OptimState8bit": "torchao.optim.subclass_8bit"}
"""Tensor subclasses that a state may hold, and their modules: a file names a class of this list, and no other."""


def flat_state(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """An optimizer's state as what safetensors can hold, and the rest.

    Args: state: the entry "state" of an optimizer's state_dict.
    Returns: tensors "<i>.<key>", copies on the CPU; plain values under such names; and for each tensor subclass under
        its name what it is made of, its parts being tensors "<i>.<key>.<part>".
    Raises: CheckpointError: a tensor subclass that is not in WRAPPED.

    >>> flat_state({0: {"m": torch.zeros(2), "n": 3}})
    ({'0.m': tensor([0., 0.])}, {'0.n': 3}, {})
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    wrapped: dict[str, Any] = {}
    for i, entry in state.items():
        for key, value in entry.items():
            name = f"{i}.{key}"
            if not isinstance(value, Tensor):
                plain[name] = value
            elif is_traceable_wrapper_subclass(value):
                kind = type(value).__name__
                if WRAPPED.get(kind) != type(value).__module__:
                    raise CheckpointError(
                        f"{name} of the optimizer's state is a {type(value).__module__}.{kind}, which can't be saved; "
                        "save no checkpoints, or take another optim.name"
                    )
                parts, context = value.__tensor_flatten__()
                tensors |= {f"{name}.{part}": _copied(getattr(value, part)) for part in parts}
                wrapped[name] = {"kind": kind, "parts": list(parts), "context": context}
            else:
                tensors[name] = _copied(value)
    return tensors, plain, wrapped


def whole_state(
    tensors: Mapping[str, Tensor], plain: Mapping[str, Any], wrapped: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """What `flat_state` took apart.

    Raises: CheckpointError: a class that is not in WRAPPED, or one whose package is not installed.
    """
    values: dict[str, Any] = {**tensors, **plain}
    for name, made_of in wrapped.items():
        cls = _class(made_of["kind"])
        parts = {part: values.pop(f"{name}.{part}") for part in made_of["parts"]}
        values[name] = cls.__tensor_unflatten__(parts, made_of["context"], None, None)
    entries: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        i, _, key = name.partition(".")
        entries.setdefault(int(i), {})[key] = value
    return entries


def _class(kind: str) -> Any:
    if kind not in WRAPPED:
        raise CheckpointError(f"the optimizer's state holds a {kind!r}; known: {', '.join(WRAPPED)}")
    try:
        return resolve_ref(f"{WRAPPED[kind]}:{kind}", "optimizer state")
    except ConfigError as error:
        raise CheckpointError(f"the optimizer's state holds a {kind}: {error}") from error


def _copied(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()
