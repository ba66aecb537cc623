"""The optimizers by name.

    adamw        decoupled decay, fused where torch has a kernel (CPU, CUDA, Apple, Intel); the default
    adam         the same, but decay joins the gradient
    sgd          with momentum where optim.momentum is above 0
    adamw8bit    adamw with 8-bit moments (torchao; the extra `quant`)
    muon         torch's Muon for the matrices of the layers, adamw for embeddings, heads and vectors

The 8-bit moments are quantized in blocks of 256 with a dynamic map. A tensor with fewer than 4096 elements, or with a
size that is not divisible by 256, keeps fp32 moments. Masters are always fp32. Not supported: optimizers that page
their state to the host (`offload_to_cpu` does that for all of these), and schedule-free optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from whet.config import CheckpointingOptions, OptimConfig
from whet.errors import ConfigError, format_exception
from whet.util.install import install_hint
from whet.util.references import resolve_callable, resolve_name

__all__ = ["OPTIMIZERS", "check_optimizer", "group_settings", "make_optimizer", "set_setting"]

Groups = list[dict[str, Any]]

_FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Device types for which torch has a fused Adam."""
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|lm_head|score|classifier)([._]|$)")
"""Names of the matrices that Muon does not train: each row belongs to a token or to a class."""


def make_optimizer(masters: Mapping[str, Tensor], config: OptimConfig | Callable[..., Any]) -> torch.optim.Optimizer:
    """Makes the torch optimizer of a model's masters. Matrices decay, vectors (norms, biases) don't.

    Args: masters: fp32 tensors by name. config: an OptimConfig, or `f(tensors) -> torch.optim.Optimizer`.
    Returns: the optimizer.
    Raises: ConfigError: the name is unknown, the factory fails or returns something else, or adamw8bit lacks torchao.

    >>> type(make_optimizer({"w": torch.nn.Parameter(torch.ones(2, 2))}, OptimConfig(name="sgd"))).__name__
    'SGD'
    """
    if not isinstance(config, OptimConfig):
        return _call_factory(config, "an optimizer factory", list(masters.values()))
    if config.name == "muon":
        return _muon(masters, config)
    groups = [
        {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    check_optimizer(config)
    if ":" in config.name:
        return _call_factory(
            resolve_callable(config.name, "optim.name"), f"optim.name={config.name!r}", groups, lr=config.rate
        )
    return OPTIMIZERS[config.name](groups, config)


def check_optimizer(config: Any, checkpoints: CheckpointingOptions | None = None) -> None:
    """Raises ConfigError for an unknown optimizer name, or for one with moments that the checkpoints can't hold.

    Args: config: an OptimConfig or a name. A factory is not checked until it is called. checkpoints: of the run.
    """
    name = config.name if isinstance(config, OptimConfig) else config
    if not isinstance(name, str):
        return
    resolve_name(name, {**OPTIMIZERS, "muon": _muon}, "optim.name")
    if name == "adamw8bit":
        if checkpoints is not None and (checkpoints.sharded or checkpoints.enable_async_checkpointing):
            raise ConfigError(
                "the moments of optim.name='adamw8bit' can't be sharded; leave out sharded and "
                "enable_async_checkpointing of trainer.checkpointing_options, or set optim.name=adamw"
            )
        _adamw8bit_class()


def _adamw8bit_class() -> Any:
    """Returns the class of torchao. Raises ConfigError if torchao is not installed."""
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"optim.name='adamw8bit' needs torchao ({error}); {install_hint('quant')}, or set optim.name=adamw"
        ) from error
    return AdamW8bit


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for some groups of parameters and AdamW for the others, as one optimizer.

    Muon's steps are scaled to the size of AdamW's (adjust_lr_fn="match_rms_adamw", Liu et al. 2025, arXiv 2502.16982,
    equation 4), so both use the same learning rate.

    Args: muon, adamw: the two optimizers.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None) -> None:
        self._parts = [muon] if adamw is None else [muon, adamw]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps both optimizers. They share this optimizer's state and groups."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]
            part.step()


def _muon(masters: Mapping[str, Tensor], c: OptimConfig) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers. Raises: ConfigError: the model trains none."""
    decays: dict[str, Any] = {"weight_decay": c.weight_decay}
    matrices = [m for name, m in masters.items() if m.dim() == 2 and not _EMBEDDING.search(name)]
    if not matrices:
        raise ConfigError("optim.name='muon' is for matrices of layers, and none is trained here; set optim.name=adamw")
    chosen = {id(m) for m in matrices}
    others = [m for m in masters.values() if id(m) not in chosen]
    groups: Groups = [
        {"params": [m for m in others if m.dim() >= 2], **decays},
        {"params": [m for m in others if m.dim() < 2], "weight_decay": 0.0},
    ]
    momentum = 0.95 if c.momentum is None else c.momentum
    muon = torch.optim.Muon(matrices, lr=c.rate, momentum=momentum, adjust_lr_fn="match_rms_adamw", **decays)
    groups = [g for g in groups if g["params"]]
    return Muon(muon, torch.optim.AdamW(groups, lr=c.rate, betas=c.betas, eps=c.eps) if groups else None)


OPTIMIZERS: dict[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "adam": lambda groups, c: torch.optim.Adam(groups, lr=c.rate, betas=c.betas, eps=c.eps, fused=_fused(groups)),
    "adamw": lambda groups, c: torch.optim.AdamW(groups, lr=c.rate, betas=c.betas, eps=c.eps, fused=_fused(groups)),
    "adamw8bit": lambda groups, c: _adamw8bit_class()(groups, lr=c.rate, betas=c.betas, eps=c.eps),
    "sgd": lambda groups, c: torch.optim.SGD(groups, lr=c.rate, momentum=c.momentum or 0.0),
}


def _fused(groups: Groups) -> bool:
    return all(p.device.type in _FUSED for g in groups for p in g["params"])


def _call_factory(factory: Any, name: str, tensors: Any, **rate: float) -> torch.optim.Optimizer:
    """Calls a factory. Raises ConfigError if it is not callable, fails, or does not return an optimizer."""
    call = f"factory({'groups, lr=...' if rate else 'parameters'}) -> torch.optim.Optimizer"
    try:
        optimizer = factory(tensors, **rate)
    except Exception as error:  # a factory is the user's own code
        raise ConfigError(f"{name} raised {format_exception(error)}; it is called as {call}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}; it is called as {call}"
        )
    return optimizer


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of each group, without its parameters; a rate that is a tensor becomes a number."""
    return [
        {n: float(v) if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


def set_setting(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets a setting of a group. A setting that is a tensor (the rate of a compiled optimizer) stays a tensor."""
    group[name] = torch.tensor(value) if isinstance(group.get(name), Tensor) else value
