"""The keys of a configuration that were set or have an effect: config.yaml of a run folder.

A key is left out if it has its class's default and that default has no effect: it is off (None, false, empty, or a
value that its docstring calls off), or nothing that was chosen reads it. So the file reads back as the same
configuration, and it contains every key that has an effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from whet.config.algo.base import OverlongBuffer
from whet.config.algo.policy import PolicyConfig
from whet.config.algo.preference import PreferenceConfig
from whet.config.algo.unused_fields import unread_fields, user_functions
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.config.loader import dump_tree
from whet.config.model import OptimConfig
from whet.config.training import CheckpointingOptions

__all__ = ["fields_without_effect", "minimal_config"]

_OFF = {
    "beta": 0.0,
    "entropy_coef": 0.0,
    "eval_every_n_steps": 0,
    "eval_fraction": 0.0,
    "gradient_checkpointing": "auto",
    "max_turns": 1,
    "metrics_prefix": "",
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "reward_workers": 0,
    "show_samples": 0,
    "top_entropy_quantile": 1.0,
    "top_p": 1.0,
    "warmup_ratio": 0.0,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}
"""Field -> the value that turns it off."""
_STAYS = ("apply_chat_template", "seed")
"""Fields that are always written, because other programs read them in the file."""


def minimal_config(config: Any) -> Any:
    """Returns a configuration as plain containers, with the keys that were set or have an effect.

    Args: config: a configuration, or sections of one by their names.

    >>> from whet.config import OptimConfig
    >>> minimal_config(OptimConfig(lr=1e-5))
    {'name': 'adamw', 'lr': 1e-05, 'betas': [0.9, 0.999], 'eps': 1e-08, 'schedule': 'constant', 'max_grad_norm': 1.0}
    """
    return _minimal(config, _engine(config))


def _engine(config: Any) -> Any:
    """Returns the name of a run's engine; None for other configurations."""
    return config.get("rollout_engine") if isinstance(config, Mapping) else getattr(config, "rollout_engine", None)


def _minimal(value: Any, engine: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _minimal(part, engine) for name, part in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return dump_tree(value)
    idle = fields_without_effect(value, engine)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            if inner := _minimal(part, engine):
                fields[field.name] = inner
        elif field.name in _STAYS or part != default or not (_off(field.name, part) or field.name in idle):
            fields[field.name] = _minimal(part, engine)
    return fields


def _off(name: str, value: Any) -> bool:
    """Returns whether a value turns its field off."""
    return value is None or value is False or value in ((), [], {}, "") or (name in _OFF and value == _OFF[name])


def fields_without_effect(config: Any, engine: Any = None) -> set[str]:
    """Returns the fields of a configuration that have no effect with its other fields.

    Args: config: a configuration. engine: of the run; None = neither vLLM nor SGLang.

    >>> sorted(fields_without_effect(OverlongBuffer()))
    ['max_response_length', 'overlong_buffer_length', 'overlong_buffer_penalty']
    """
    unused: set[str] = set()
    if isinstance(config, VLLMOptions | SGLangOptions):
        own = "vllm" if isinstance(config, VLLMOptions) else "sglang"
        return set() if engine == own or ":" in str(engine) else {f.name for f in dataclasses.fields(config)}
    if isinstance(config, OverlongBuffer) and not config.enable:
        unused |= {"overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"}
    if isinstance(config, CheckpointingOptions) and config.save_interval_steps is not None:
        unused.add("save_interval_s")
    if isinstance(config, OptimConfig) and config.name == "sgd":
        unused |= {"betas", "eps"}
    if isinstance(config, PolicyConfig | PreferenceConfig) and not any(user_functions(config)):
        unused |= unread_fields(config).keys()
    return unused
