"""Builds the functions of an algorithm from its configuration: estimator, objective, rewards.

The configuration names a function by its key in a dict (POLICY_LOSSES and the like) or as "package.module:function", or
it contains the function itself. A function receives the fields of the configuration that it has as keyword-only
arguments. So a new loss needs fields for its parameters, and no change here.
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
    PolicyObjective,
    reference_kl,
    segment_sum,
    teacher_column,
    turn_index,
)
from whet.rewards.call import function_name
from whet.rewards.length import overlong
from whet.rewards.resolve import as_list
from whet.rewards.reward_batch import RewardBatch
from whet.rewards.text import no_rewards
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
"""Field -> the names that it takes, for the message about a name that belongs to another field."""


def other_field(value: str) -> str:
    """Returns the hint of a message about an unknown name: the field that takes this name; "" if none does.

    >>> other_field("dapo"), other_field("token-mean"), other_field("gpro")
    ('. dapo is a whole method: algo.preset=dapo', '. token-mean is a loss_agg_mode', '')
    """
    if value in presets.PRESETS:
        return f". {value} is a whole method: algo.preset={value}"
    field = next((field for field, names in _NAMES_OF_FIELDS.items() if value in names), None)
    return f". {value} is {'an' if field[0] in 'aeiou' else 'a'} {field}" if field else ""


_resolve = functools.partial(resolve_name, hint=other_field)


def _bound_function(value: Any, known: Mapping[str, Any], kind: str, config: AlgorithmConfig) -> Callable[..., Any]:
    """Returns a term of the objective, fn(x), with the configuration's fields bound."""
    fn = bind_fields(_resolve(value, known, kind), config)
    check_call(fn, kind, ("x",))
    return fn


def check_call(fn: Callable[..., Any], kind: str, *forms: Sequence[str]) -> None:
    """Raises ConfigError if a function can be called in none of the forms, each the names of positional arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin has no signature
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
    """Binds the keyword-only arguments of a function that the configuration has as fields.

    Arguments that a functools.partial has bound already, and arguments that are not keyword-only, stay as they are.

    >>> def loss(x, *, epsilon=0.5, other=1):
    ...     return epsilon, other
    >>> bind_fields(loss, PolicyConfig(epsilon=0.1))(None)
    (0.1, 1)
    """
    names = keyword_arguments(fn)
    bound = {name: value for name, value in config.keywords.items() if name in names}
    return functools.partial(fn, **bound) if bound else fn


def keyword_arguments(fn: Callable[..., Any]) -> set[str]:
    """Returns the keyword-only arguments of a function, without those that a partial has bound."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return set()
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in bound}


def fields_read(fn: Callable[..., Any]) -> set[str]:
    """Returns the fields of a configuration that a function reads: its keyword-only arguments, by the names of the
    fields.

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
"""Argument -> the field that it stands for, where their names differ."""


def check_all_read(config: PolicyConfig) -> None:
    """Raises ConfigError for a field that was set, where neither whet's chosen functions nor the user's own read it."""
    user_fns = [_resolve(fn, {}, name) for name, fn in user_functions(config)]
    check_fields_read(config, {name for fn in user_fns for name in fields_read(fn)})


def check_token_level(config: PolicyConfig) -> None:
    """Raises ConfigError where sampler_is gives weights of sequences to a loss that multiplies those of tokens."""
    if isinstance(config.sampler_is, str) and config.sampler_is in CORRECTIONS and config.sampler_is != "token":
        raise ConfigError(
            f"algo.sampler_is={config.sampler_is!r} gives each token the weight of its sequence, and policy loss "
            f"{config.policy_loss_fn!r} multiplies the weights of all its tokens: take algo.sampler_is='token'"
        )


def describe_objective(config: PolicyConfig) -> dict[str, str]:
    """Returns the functions of a configuration with their parameters, for the log and environment.json.

    >>> lines = describe_objective(PolicyConfig(beta=0.1, loss_masks=("off-policy",), policy_loss_fn="reinforce"))
    >>> lines["loss"]
    'reinforce * off-policy(off_policy_mask_threshold=0.5) + 0.1 * low_var_kl'
    >>> lines["aggregation"]
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
    """Returns the name of a function, with the fields that it reads, without those that are None."""
    names = keyword_arguments(_resolve(value, known, "function"))
    read = {f.name: getattr(config, f.name) for f in fields(config) if f.name in names}
    arguments = ", ".join(f"{name}={_display_name(field)}" for name, field in read.items() if field is not None)
    return f"{_display_name(value)}({arguments})" if arguments else _display_name(value)


def _display_name(value: Any) -> str:
    """Returns a value, or the name of a function."""
    return function_name(value) if callable(value) else str(value)


def reward_functions(reward_fns: Any, config: AlgorithmConfig) -> tuple[list[Any], tuple[float, ...] | None]:
    """Returns the reward functions of a run and their weights: the user's, and the penalty of overlong_buffer.

    With a teacher there may be no functions of the user. No completion has a reward then, and all advantages are 0.
    Args: reward_fns: one or several. config: reward_weights are those of the user's; the penalty's weight is 1.
    """
    fns = as_list(reward_fns)
    if not fns and isinstance(config, PolicyConfig) and teacher_column(policy_loss(config)) is not None:
        fns = [no_rewards]
    buffer, weights = config.overlong_buffer, config.reward_weights
    if not buffer.enable:
        return fns, weights
    arguments = {f.name: getattr(buffer, f.name) for f in fields(buffer) if f.name != "enable"}
    return [*fns, functools.partial(overlong, **arguments)], None if weights is None else (*weights, 1.0)


def make_estimator(config: AlgorithmConfig) -> Callable[..., Tensor]:
    """Returns the advantage estimator of a configuration."""
    kind = "advantage estimator"
    fn = bind_fields(_resolve(config.advantage_estimator, ADVANTAGE_ESTIMATORS, kind), config)
    check_call(fn, kind, ("x",), ("rewards", "group_ids"))
    return fn


def advantage_inputs(
    batch: TokenBatch, rewards: RewardBatch, *, clip: tuple[float, float] | None = None
) -> AdvantageInputs:
    """Returns the argument of an estimator. Args: batch: scored. rewards: of the step. clip: bounds of the total.

    What the environment gave at single tokens is taken from the total, which has it, and is in token_rewards.
    """
    total = torch.from_numpy(rewards.total)
    total = total if clip is None else total.clamp(*clip)
    trajectory, token_rewards = batch.trajectory, batch.token_rewards
    if (given := batch.episode_rewards) is not None:
        total = total - segment_sum(given.double(), trajectory, len(total))
        token_rewards = given if token_rewards is None else token_rewards + given
    return AdvantageInputs(
        rewards=total,
        group_of=batch.group_of,
        trajectory=trajectory,
        mask=batch.mask,
        turn=turn_index(batch.versions >= 0, batch.sequence, trajectory),
        table={name: torch.from_numpy(values) for name, values in rewards.table.items()},
        reward_weights=rewards.weights,
        token_rewards=token_rewards,
        values=batch.values,
        greedy_rewards=None if rewards.greedy is None else torch.from_numpy(rewards.greedy),
    )


def policy_loss(config: PolicyConfig) -> Callable[..., Any]:
    """Returns the policy loss of a configuration. Raises ConfigError: an unknown name."""
    return _resolve(config.policy_loss_fn, POLICY_LOSSES, "policy loss")


def kl_estimate(config: PolicyConfig) -> Callable[[Tensor], Tensor]:
    """Returns the KL estimate of a configuration, a function of d. Raises ConfigError: an unknown name."""
    return _resolve(config.keywords["kl_loss_mode"], KL_MODES, "KL mode")


def objective_checks(config: AlgorithmConfig) -> list[Callable[[], Any]]:
    """Returns the checks of an algorithm's configuration that need no model; each raises ConfigError.

    Each name is a check of its own, so that all unknown names are reported together. The whole objective comes last.
    """
    checks: list[Callable[[], Any]] = [functools.partial(make_estimator, config)]
    if not isinstance(config, PolicyConfig):
        return checks
    named = [(config.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")]
    named += [] if config.sampler_is is None else [(config.sampler_is, CORRECTIONS, "sampler_is")]
    named += [(name, TOKEN_MASKS, "loss mask") for name in config.loss_masks]
    resolved = [functools.partial(_resolve, *words) for words in named]
    return [*checks, *resolved, *(functools.partial(fn, config) for fn in (policy_loss, kl_estimate, make_objective))]


def make_objective(config: PolicyConfig) -> PolicyObjective:
    """Returns the objective of a configuration: surrogate, corrections and masks, KL, entropy bonus."""
    check_all_read(config)
    names = [] if config.sampler_is is None else [config.sampler_is]
    corrections = [_bound_function(name, CORRECTIONS, "sampler_is", config) for name in names]
    kl_factors = tuple(corrections) if config.sampler_is_kl else ()
    surrogate = _bound_function(config.policy_loss_fn, POLICY_LOSSES, "policy loss", config)
    if corrections and "correction" in keyword_arguments(surrogate):  # the surrogate applies it in its own weight
        check_token_level(config)
        surrogate, corrections = functools.partial(surrogate, correction=corrections[0]), []
    masks = [_bound_function(name, TOKEN_MASKS, "loss mask", config) for name in config.loss_masks]
    return PolicyObjective(
        surrogate=surrogate,
        factors=(*corrections, *masks),
        kl=bind_fields(functools.partial(reference_kl, kl_loss_mode=kl_estimate(config)), config),
        beta=config.beta,
        kl_factors=kl_factors,
        entropy_coef=config.entropy_coef,
    )
