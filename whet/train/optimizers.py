"""The optimizers by name.

    adamw        decoupled decay, fused where torch has a kernel (CPU, CUDA, Apple, Intel); the default
    adam         the same, but decay joins the gradient
    sgd          with momentum where optim.momentum is above 0
    adamw8bit    adamw whose moments take a byte a number (torchao; pip install 'whet[quant]')

The 8-bit moments are quantised in blocks of 256 by a dynamic map; tensors of less than 4096 numbers, and those whose
size is not a multiple of 256, keep fp32 moments. Masters stay fp32 with each of them. Left out on purpose: optimizers
whose state is paged to the host, which `offload_to_cpu` does for all of these, and schedule-free ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from whet.config import OptimConfig
from whet.errors import ConfigError, lookup_error
from whet.util.refs import resolve_ref

__all__ = ["OPTIMIZERS", "check_optimizer", "make_optimizer", "set_setting", "settings_of"]

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
    check_optimizer(config)
    if ":" in config.name:
        return _made(resolve_ref(config.name, "optimizer"), f"optim.name={config.name!r}", groups, lr=config.rate)
    return OPTIMIZERS[config.name](groups, config)


def check_optimizer(config: Any) -> None:
    """Raises ConfigError for the name of an optimizer that there is not. Args: config: an OptimConfig, a name; others
    are known when they are called.
    """
    name = config.name if isinstance(config, OptimConfig) else config
    if not isinstance(name, str):
        return
    if ":" in name:
        resolve_ref(name, "optimizer")
    elif name not in OPTIMIZERS:
        raise lookup_error("optim.name", name, [*OPTIMIZERS, "package.module:factory"])
    elif name == "adamw8bit":
        _adamw8bit_class()


def _adamw(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=c.rate, betas=c.betas, eps=c.eps, fused=_fused(groups))


def _adam(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=c.rate, betas=c.betas, eps=c.eps, fused=_fused(groups))


def _sgd(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=c.rate, momentum=c.momentum)


def _adamw8bit(groups: Groups, c: OptimConfig) -> torch.optim.Optimizer:
    return _adamw8bit_class()(groups, lr=c.rate, betas=c.betas, eps=c.eps)


def _adamw8bit_class() -> Any:
    """The class. Raises ConfigError where its package is not installed."""
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"optim.name='adamw8bit' needs torchao ({error}); pip install 'whet[quant]', or take adamw"
        ) from error
    return AdamW8bit


OPTIMIZERS: dict[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "sgd": _sgd,
}


def _fused(groups: Groups) -> bool:
    return all(p.device.type in _FUSED for g in groups for p in g["params"])


def _made(factory: Any, name: str, tensors: Any, **rate: float) -> torch.optim.Optimizer:
    """What a factory makes. Raises ConfigError where it is not callable, fails, or makes something else."""
    call = f"factory({'groups, lr=...' if rate else 'parameters'}) -> torch.optim.Optimizer"
    if not callable(factory):
        raise ConfigError(f"{name} is not a function but {factory!r:.80}; give one that is called as {call}")
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
