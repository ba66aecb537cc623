"""Which fields of an algorithm's configuration have no effect, and the error for one that was set all the same.

A field has no effect where the functions that read it were not chosen (fields_read.py), or where the switch that it
belongs to is off (SWITCHES).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from whet.config.algo.fields_read import CRITIC_READS
from whet.errors import ConfigError

__all__ = ["SWITCHES", "changed_fields", "check_fields_read", "unread_fields", "user_functions"]

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "dynamic_sampling": ("group_reward_bounds", "max_num_gen_batches"),
    "sampler_is": ("sampler_is_kl",),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "target_kl": ("kl_horizon",),
    "use_adaptive_entropy": ("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
}
"""Field -> the fields that have an effect only while it is set."""
_KL = ("kl_clamp_value", "kl_loss_mode", "use_bias_correction_kl")
"""Fields that have an effect only where a KL to the reference is computed."""


def changed_fields(config: Any, *names: str) -> dict[str, Any]:
    """Returns the named fields of a configuration that differ from the default of its class."""
    defaults = {f.name: f.default for f in fields(config) if f.name in names}
    return {name: getattr(config, name) for name, default in defaults.items() if getattr(config, name) != default}


def user_functions(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the (field, function or reference) pairs that are the user's own functions and not names that whet
    knows.
    """
    for name in (f.name for f in fields(config) if f.name in type(config).CHOICES):
        value = getattr(config, name)
        for function in value if isinstance(value, tuple) else (value,):
            if callable(function) or (isinstance(function, str) and ":" in function):
                yield name, function


def unread_fields(config: Any, read: Collection[str] = ()) -> dict[str, str]:
    """Returns the fields of a configuration that have no effect, each with the choice or switch that would give it one.

    Args: config: a PolicyConfig or PreferenceConfig. read: the fields that the user's own functions read.

    >>> from whet.config import GRPOConfig
    >>> unread_fields(GRPOConfig())["gamma"], unread_fields(GRPOConfig())["kl_horizon"]
    ('advantage_estimator', 'target_kl')
    """
    has_effect = {*read, *(CRITIC_READS if hasattr(config, "value_loss_fn") else ())}
    unread: dict[str, str] = {}
    for choice, readers in config.READS.items():
        chosen = _chosen(config, choice)
        unknown = any(isinstance(name, str) and ":" not in name and name not in readers for name in chosen)
        for name, names in readers.items():
            unread = {**dict.fromkeys(names, str(choice)), **unread}
            if unknown or name in chosen:  # the error about an unknown name comes later
                has_effect.update(names)
    if getattr(config, "loss_agg_mode", None) == "sequence-mean-token-sum-norm" and config.loss_agg_norm is not None:
        critic = config.READS["value_loss_agg_mode"].get(getattr(config, "value_loss_agg_mode", ""), ())
        has_effect -= {"loss_agg_units"} - {*critic, *read}
    for switch, names in SWITCHES.items():
        if getattr(config, switch, None) in (None, False):
            unread.update(dict.fromkeys(names, switch))
    if hasattr(config, "kl_type"):
        computed = config.beta or config.force_compute_kl
        unread.update({} if config.beta else {"kl_type": "beta"})
        unread.update({} if computed else dict.fromkeys(_KL, "beta"))
        has_effect.update(("importance_sampling_level",) if computed and config.use_bias_correction_kl else ())
    return {name: choice for name, choice in unread.items() if name not in has_effect and hasattr(config, name)}


def check_fields_read(config: Any, read: Collection[str] | None = None) -> None:
    """Raises ConfigError for a field that was set and has no effect.

    The fields of a KL whose weight beta is 0.0 are let through: whet.learners.config_warnings warns of them.
    Args: config: a PolicyConfig or PreferenceConfig. read: the fields that the user's own functions read; None = not
        known, so that a configuration with such a function is let through.
    """
    if read is None and any(user_functions(config)):
        return
    unread, defaults = unread_fields(config, read or ()), {f.name: f.default for f in fields(config)}
    for name, value in changed_fields(config, *unread).items():
        if (choice := unread[name]) == "beta":
            continue
        chosen = _chosen(config, choice)
        readers = [r for r, names in config.READS.get(choice, {}).items() if name in names and r not in chosen]
        readers = [r for r in readers if r != "gae" or hasattr(config, "value_loss_fn")]  # gae needs a critic
        listed = " or ".join(readers[:4]) + " or another" * (len(readers) > 4)
        needs = f"{choice}={f'[{listed}]' if choice == 'loss_masks' else listed}" if readers else choice
        raise ConfigError(
            f"{name}={value!r} has no effect without {needs}{'=True' * (getattr(config, choice) is False)}; set that, "
            f"or leave {name} at {defaults[name]!r}"
        )


def _chosen(config: Any, choice: str) -> tuple[Any, ...]:
    """Returns the values of a field that chooses functions by name."""
    value = getattr(config, choice, None)
    return value if isinstance(value, tuple) else () if value is None else (value,)
