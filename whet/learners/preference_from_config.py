"""Builds the objectives of preference and reward-model training from their configuration.

The rules are those of learners/from_config.py: the configuration names functions, a function receives the fields that
it has as keyword-only arguments, and a field that was set is refused where no chosen function reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.config import PreferenceConfig, RewardModelConfig
from whet.config.algo.unused_fields import check_fields_read
from whet.learners.from_config import bind_fields, check_call, fields_read, keyword_arguments, other_field
from whet.ops.preference import F_DIVERGENCES, PREFERENCE_LOSSES, REWARD_LOSSES, PreferenceObjective, declared_needs
from whet.rewards.call import function_name
from whet.train.worker import Loss
from whet.util.references import resolve_name

__all__ = ["describe_preference_objective", "fields_read_by_loss", "make_preference_objective", "make_reward_loss"]


def _losses(config: PreferenceConfig) -> dict[str, Callable[..., Any]]:
    """Returns the losses of a configuration by name, before their parameters are bound."""
    named = {function_name(loss) if callable(loss) else str(loss): loss for loss in config.loss_type}
    return {name: resolve_name(loss, PREFERENCE_LOSSES, "loss_type", hint=other_field) for name, loss in named.items()}


def fields_read_by_loss(loss: Callable[..., Any]) -> set[str]:
    """Returns the fields of a PreferenceConfig that a loss reads: its arguments, and those of the reference if it needs
    one.
    """
    return fields_read(loss) | ({*_REFERENCE} if declared_needs(loss).reference else set())


_REFERENCE = ("precompute_ref_log_probs", "reference_free", "sync_ref_model")


def make_preference_objective(config: PreferenceConfig) -> PreferenceObjective:
    """Returns the objective of a configuration.

    Raises: ConfigError: nothing has a name, a parameter that nothing takes was set, or the losses don't go together.

    >>> make_preference_objective(PreferenceConfig(loss_type="simpo")).needs.reference
    False
    """
    losses = _losses(config)
    divergence = resolve_name(config.f_divergence_type, F_DIVERGENCES, "f_divergence_type", hint=other_field)
    read = {name for loss in losses.values() for name in fields_read_by_loss(loss)} | fields_read(divergence)
    check_fields_read(config, read)
    for loss in losses.values():
        check_call(bind_fields(loss, config), "loss_type", ("p",))
    return PreferenceObjective(
        losses={name: bind_fields(loss, config) for name, loss in losses.items()},
        loss_weights=config.loss_weights,
        beta=config.beta,
        reference_free=config.reference_free,
        ld_alpha=config.ld_alpha,
        generator=None if config.f_divergence_type == "reverse_kl" else bind_fields(divergence, config),
        use_weighting=config.use_weighting,
    )


def make_reward_loss(config: RewardModelConfig) -> Loss:
    """Returns the loss of a reward model: fn(x: LossInputs) -> ([u], metrics).

    Raises: ConfigError: nothing has this name, or a parameter that it does not take was set.
    """
    loss = resolve_name(config.loss_type, REWARD_LOSSES, "loss_type", hint=other_field)
    check_fields_read(config, fields_read(loss))
    bound = bind_fields(loss, config)
    check_call(bound, "loss_type", ("x",))
    return bound


def describe_preference_objective(config: PreferenceConfig) -> str:
    """Returns the losses of a configuration with their parameters, for the log and environment.json.

    >>> describe_preference_objective(PreferenceConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.1]))
    '1.0 * sigmoid(beta=0.1, label_smoothing=0.0) + 0.1 * sft'
    """
    parts = []
    for (name, loss), weight in zip(_losses(config).items(), config.loss_weights or (None,) * len(config.loss_type)):
        arguments = ", ".join(f"{n}={v}" for n, v in config.keywords.items() if n in keyword_arguments(loss))
        parts.append(("" if weight is None else f"{weight} * ") + (f"{name}({arguments})" if arguments else name))
    divergence = config.f_divergence_type
    options = {
        "f_divergence": function_name(divergence) if callable(divergence) else divergence,
        "ld_alpha": config.ld_alpha,
        "use_weighting": config.use_weighting or None,
        "reference_free": config.reference_free or None,
    }
    changed = [f"{n}={v}" for n, v in options.items() if v not in (None, "reverse_kl")]
    return " + ".join(parts) + (f"; {', '.join(changed)}" if changed else "")
