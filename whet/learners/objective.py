"""Builds the functions of an algorithm from its configuration: estimator, objective, rewards.

The configuration names a function by its key in a dict, as "package.module:function", or contains the function itself.
A function receives the fields of the configuration that it has as keyword-only arguments. So a new loss needs only
fields for its parameters, and no change here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from whet.config import AlgorithmConfig, PolicyConfig, SupervisedConfig
from whet.config.algo import presets
from whet.config.algo.unused_fields import check_fields_read, user_functions
from whet.errors import ConfigError
from whet.ops import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_MODES,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    TOKEN_MASKS,
    AdvantageInputs,
    Objective,
    reference_kl,
    teacher_column,
)
from whet.rewards.call import function_name
from whet.rewards.length import overlong
from whet.rewards.manager import RewardBatch
from whet.rewards.text import unrewarded
from whet.types import TokenBatch
from whet.util.references import resolve_name

__all__ = [
    "advantage_inputs",
    "bind_fields",
    "check_all_read",
    "check_call",
    "check_token_level",
    "describe_objective",
    "fields_read",
    "keyword_arguments",
    "kl_estimate",
    "make_estimator",
    "make_objective",
    "objective_checks",
    "other_field",
    "policy_loss",
    "reward_functions",
]

_NAMES_OF_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "advantage_estimator": ADVANTAGE_ESTIMATORS,
    "policy_loss_fn": POLICY_LOSSES,
    "loss_agg_mode": LOSS_AGG_MODES,
    "kl_loss_mode": KL_MODES,
    "sampler_is": CORRECTIONS,
    "loss_masks": TOKEN_MASKS,
}
"""Field -> its names, to find the field of a name that was given to another one."""


def other_field(value: str) -> str:
    """The end of a message about an unknown name: the field that has this name; "" if none has.

    >>> other_field("dapo"), other_field("token-mean"), other_field("gpro")
    ('. dapo is a whole method: algo.preset=dapo', '. token-mean is a loss_agg_mode', '')
    """
    if value in presets.PRESETS:
        return f". {value} is a whole method: algo.preset={value}"
    field = next((field for field, names in _NAMES_OF_FIELDS.items() if value in names), None)
    return f". {value} is {'an' if field[0] in 'aeiou' else 'a'} {field}" if field else ""


_resolve = functools.partial(resolve_name, hint=other_field)


def _bound_function(value: Any, known: Mapping[str, Any], kind: str, config: AlgorithmConfig) -> Callable[..., Any]:
    """A piece of the objective, fn(x), with the configuration's fields bound."""
    fn = bind_fields(_resolve(value, known, kind), config)
    check_call(fn, kind, ("x",))
    return fn


def check_call(fn: Callable[..., Any], kind: str, *forms: Sequence[str]) -> None:
    """Raises ConfigError if a function can be called in none of the forms; a form is the names of the arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin: calling it will tell
        return
    for form in forms:
        try:
            signature.bind(*form)
        except TypeError:
            continue
        return
    ways = " or ".join(f"fn({', '.join(form)})" for form in forms)
    raise ConfigError(
        f"{kind} {function_name(fn)}{signature} can't be called as {ways}; further arguments need a default, or must "
        "be keyword-only and have the name of a field of the configuration"
    )


def bind_fields(fn: Callable[..., Any], config: AlgorithmConfig | SupervisedConfig) -> Callable[..., Any]:
    """A function with the keyword-only arguments bound that the configuration has as fields.

    What a functools.partial has bound already stays, and so does what a function does not ask for by keyword.

    >>> def loss(x, *, epsilon=0.5, other=1):
    ...     return epsilon, other
    >>> bind_fields(loss, PolicyConfig(epsilon=0.1))(None)
    (0.1, 1)
    """
    asked = keyword_arguments(fn)
    bound = {name: value for name, value in config.keywords.items() if name in asked}
    return functools.partial(fn, **bound) if bound else fn


def keyword_arguments(fn: Callable[..., Any]) -> set[str]:
    """The keyword-only arguments of a function, without those that a partial has bound."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin: it has no keywords to give
        return set()
    given = fn.keywords if isinstance(fn, functools.partial) else {}
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in given}


def fields_read(fn: Callable[..., Any]) -> set[str]:
    """The fields of a configuration that a function reads: its keyword-only arguments, by the names of the fields.

    >>> from whet.ops import LOSS_AGG_MODES
    >>> sorted(fields_read(LOSS_AGG_MODES["sequence-mean-token-scale"]))
    ['loss_agg_norm', 'loss_agg_units']
    """
    try:
        arguments = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        arguments = {}
    names = keyword_arguments(fn) | (arguments.keys() & _FIELD_OF_ARGUMENT.keys())
    return {_FIELD_OF_ARGUMENT.get(name, name) for name in names}


_FIELD_OF_ARGUMENT = {"norm": "loss_agg_norm", "num_units": "loss_agg_units"}
"""Arguments that a field of another name stands for."""


def check_all_read(config: PolicyConfig) -> None:
    """Raises ConfigError for a field that was set and that neither whet's chosen functions nor the user's own read."""
    own = [_resolve(fn, {}, name) for name, fn in user_functions(config)]
    check_fields_read(config, {name for fn in own for name in fields_read(fn)})


def check_token_level(config: PolicyConfig) -> None:
    """Raises ConfigError: sampler_is weighs whole sequences, for a loss that multiplies the weights of their tokens."""
    if isinstance(config.sampler_is, str) and config.sampler_is in CORRECTIONS and config.sampler_is != "token":
        raise ConfigError(
            f"algo.sampler_is={config.sampler_is!r} gives each token the weight of its sequence, and policy loss "
            f"{config.policy_loss_fn!r} multiplies the weights of all its tokens: take algo.sampler_is='token'"
        )


def describe_objective(config: PolicyConfig) -> dict[str, str]:
    """The functions of a configuration with their parameters, for the log and environment.json.

    >>> made = describe_objective(PolicyConfig(beta=0.1, loss_masks=("off-policy",), policy_loss_fn="reinforce"))
    >>> made["loss"]
    'reinforce * off-policy(off_policy_mask_threshold=0.5) + 0.1 * low_var_kl'
    >>> made["aggregation"]
    'sequence-mean-token-mean over trained sequences'
    """
    factors = [] if config.sampler_is is None else [_with_parameters(config, config.sampler_is, CORRECTIONS)]
    factors += [_with_parameters(config, name, TOKEN_MASKS) for name in config.loss_masks]
    loss = " * ".join([_with_parameters(config, config.policy_loss_fn, POLICY_LOSSES), *factors])
    kl = f"{config.beta} * {_display_name(config.kl_loss_mode)}"
    if config.beta and config.kl_type == "loss":
        loss += f" + {kl}" + (f" * {factors[0]}" if config.sampler_is_kl else "")
    if config.entropy_coef or config.use_adaptive_entropy:
        loss += f" - {config.entropy_coef} * entropy"
    advantages = _with_parameters(config, config.advantage_estimator, ADVANTAGE_ESTIMATORS)
    if config.beta and config.kl_type != "loss":
        advantages += f" - {kl} (in the {config.kl_type})"
    aggregation = f"{_display_name(config.loss_agg_mode)} over {config.loss_agg_units} sequences"
    return {"advantages": advantages, "loss": loss, "aggregation": aggregation}


def _with_parameters(config: PolicyConfig, value: Any, known: Mapping[str, Any]) -> str:
    """The name of a function, with the fields that it reads and that are set."""
    fn = _resolve(value, known, "piece")
    taken = {f.name: getattr(config, f.name) for f in fields(config) if f.name in keyword_arguments(fn)}
    words = ", ".join(f"{name}={_display_name(value)}" for name, value in taken.items() if value is not None)
    return f"{_display_name(value)}({words})" if words else _display_name(value)


def _display_name(value: Any) -> str:
    """A value, or the name of a function."""
    return function_name(value) if callable(value) else str(value)


def reward_functions(given: Any, config: AlgorithmConfig) -> tuple[list[Any], tuple[float, ...] | None]:
    """The reward functions of a configuration and their weights: those given, and what overlong_buffer adds.

    Without any, a policy that a teacher teaches is trained on no rewards: all its advantages are 0.
    Args: given: one or several. config: with reward_weights, which are of those given; the other's weight is 1.
    """
    fns = [given] if isinstance(given, str) or callable(given) else list(given or ())
    if not fns and isinstance(config, PolicyConfig) and teacher_column(policy_loss(config)) is not None:
        fns = [unrewarded]
    buffer, weights = config.overlong_buffer, config.reward_weights
    if not buffer.enable:
        return fns, weights
    words = {f.name: getattr(buffer, f.name) for f in fields(buffer) if f.name != "enable"}
    return [*fns, functools.partial(overlong, **words)], None if weights is None else (*weights, 1.0)


def make_estimator(config: AlgorithmConfig) -> Callable[..., Tensor]:
    """The advantage estimator of a configuration."""
    kind = "advantage estimator"
    fn = bind_fields(_resolve(config.advantage_estimator, ADVANTAGE_ESTIMATORS, kind), config)
    check_call(fn, kind, ("x",), ("rewards", "group_ids"))
    return fn


def advantage_inputs(
    batch: TokenBatch, rewarded: RewardBatch | None = None, *, clip: tuple[float, float] | None = None
) -> AdvantageInputs:
    """The argument of an estimator, from a step.

    Args: batch: scored. rewarded: each reward function's values and weight, and the rewards of greedy completions;
            None = the total only. clip: bounds of the total.
    """
    table = {} if rewarded is None else {name: torch.from_numpy(r) for name, r in rewarded.table.items()}
    return AdvantageInputs(
        rewards=batch.rewards if clip is None else batch.rewards.clamp(*clip),
        group_of=batch.group_of,
        trajectory=batch.trajectory,
        mask=batch.mask,
        table=table,
        reward_weights={} if rewarded is None else rewarded.weights,
        token_rewards=batch.token_rewards,
        values=batch.values,
        greedy_rewards=None if rewarded is None or rewarded.greedy is None else torch.from_numpy(rewarded.greedy),
    )


def policy_loss(config: PolicyConfig) -> Callable[..., Any]:
    """The policy loss of a configuration. Raises ConfigError: nothing has this name."""
    return _resolve(config.policy_loss_fn, POLICY_LOSSES, "policy loss")


def kl_estimate(config: PolicyConfig) -> Callable[[Tensor], Tensor]:
    """The KL estimate of a configuration, a function of d. Raises ConfigError: nothing has this name."""
    return _resolve(config.keywords["kl_loss_mode"], KL_MODES, "KL mode")


def objective_checks(config: AlgorithmConfig) -> list[Callable[[], Any]]:
    """What is asked of an algorithm's configuration before anything is loaded: every name of it by itself, so that each
    unknown one is found, then the whole. Each call raises ConfigError where something is wrong.
    """
    checks: list[Callable[[], Any]] = [functools.partial(make_estimator, config)]
    if not isinstance(config, PolicyConfig):
        return checks
    named = [(config.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")]
    named += [] if config.sampler_is is None else [(config.sampler_is, CORRECTIONS, "sampler_is")]
    named += [(name, TOKEN_MASKS, "loss mask") for name in config.loss_masks]
    resolved = [functools.partial(_resolve, *words) for words in named]
    return [*checks, *resolved, *(functools.partial(fn, config) for fn in (policy_loss, kl_estimate, make_objective))]


def make_objective(config: PolicyConfig) -> Objective:
    """The objective of a configuration: surrogate, corrections and masks, KL, entropy bonus."""
    check_all_read(config)
    names = [] if config.sampler_is is None else [config.sampler_is]
    corrections = [_bound_function(name, CORRECTIONS, "sampler_is", config) for name in names]
    kl_factors = tuple(corrections) if config.sampler_is_kl else ()
    surrogate = _bound_function(config.policy_loss_fn, POLICY_LOSSES, "policy loss", config)
    if corrections and "correction" in keyword_arguments(surrogate):  # it has the correction in its own weight
        check_token_level(config)
        surrogate, corrections = functools.partial(surrogate, correction=corrections[0]), []
    masks = [_bound_function(name, TOKEN_MASKS, "loss mask", config) for name in config.loss_masks]
    return Objective(
        surrogate=surrogate,
        factors=(*corrections, *masks),
        kl=bind_fields(functools.partial(reference_kl, kl_loss_mode=kl_estimate(config)), config),
        beta=config.beta,
        kl_factors=kl_factors,
        entropy_coef=config.entropy_coef,
    )
