"""Calls reward functions as TRL does, and makes reward models callable as functions.

    fn(prompts=, completions=, completion_ids=, **columns, trainer_state=, log_extra=, log_metric=)

A function gets the keywords that it names. A result of None or NaN means that the function does not apply.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from types import FunctionType
from typing import Any

import numpy as np
from torch import nn

from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.rewards.call import RewardInputs
from whet.rewards.manager import RewardBatch, RewardManager
from whet.rewards.model import RewardModel
from whet.train.worker import ModelWorker
from whet.trl.agents.agents import Agents, own_prompts
from whet.types import Group

__all__ = ["RewardLog", "TRLRewards", "make_reward_functions"]

log = logging.getLogger("whet")


class RewardLog:
    """Collects the columns and metrics that reward functions log.

    Args: state: the trainer's, given to functions as trainer_state.
    """

    def __init__(self, state: Callable[[], Any]) -> None:
        self._state = state
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def keywords(self) -> dict[str, Any]:
        """The keywords for the functions."""
        return {"trainer_state": self._state(), "log_extra": self.log_extra, "log_metric": self.log_metric}

    def log_extra(self, column: str, values: list[Any]) -> None:
        """A column of the table of completions: a value for each."""
        self.columns.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """A number of this step; several are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def take(self) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Returns the columns and metrics since the last call, and clears them."""
        columns, metrics = self.columns, {n: sum(v) / len(v) for n, v in self.metrics.items()}
        self.columns, self.metrics = {}, {}
        return columns, metrics


class TRLRewards(RewardManager):
    """Computes the rewards of a batch with TRL's keywords; the trainer sets `log` and `agents`."""

    NAN_IS_NONE = True
    log: RewardLog
    agents: Agents

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As RewardManager; a lambda is called as it calls itself."""
        super().__init__(*args, **kwargs)
        own = {name: name.replace("lambda", "<lambda>", 1) if _is_lambda(fn) else name for name, fn in self.fns.items()}
        self.fns = {own[name]: fn for name, fn in self.fns.items()}
        self.weights = {own[name]: weight for name, weight in self.weights.items()}

    def check(self, columns: Sequence[str], *, extras: Mapping[str, Any] | None = None) -> None:
        """As RewardManager, with what the log offers; what a rollout_func will return can't be known."""
        if self.agents.rollout_func is None:
            own = {} if self.agents.environments is None else {"environments": []}
            super().check(columns, extras={**self.log.keywords(), **own, **(extras or {})})

    def inputs(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any, extras: Mapping[str, Any]
    ) -> RewardInputs:
        """As RewardManager, with prompts as environments have made them, and the columns of rollouts."""
        environments = self.agents.environments
        if environments is not None:  # among the extras, since columns are copied for each function
            extras = {**extras, "environments": environments.in_use}
        found = super().inputs(groups, texts, mode=mode, extras=extras)
        columns = {**found.columns, **self.agents.columns}
        return dataclasses.replace(found, prompts=own_prompts(groups), columns=columns)

    def __call__(
        self,
        groups: Sequence[Group],
        texts: Sequence[Sequence[Any]],
        *,
        mode: Any = "train",
        extras: Mapping[str, Any] | None = None,
    ) -> RewardBatch:
        """As RewardManager, and a warning where a completion has no reward at all."""
        found = super().__call__(groups, texts, mode=mode, extras={**self.log.keywords(), **(extras or {})})
        if len(without := np.flatnonzero(np.isnan(found.total))):
            first = int(without[0])
            given = {"prompt": found.inputs.prompts[first], "completion": found.inputs.completions[first]}
            log.warning("All reward functions returned None for the following kwargs: %s. Its advantage is 0.", given)
        return found


def _is_lambda(fn: Any) -> bool:
    return isinstance(fn, FunctionType) and fn.__name__ == "<lambda>"


def make_reward_functions(
    given: Any, tokenizers: Any, policy_tokenizer: Any, args: Any, others: Sequence[Any] = ()
) -> list[Any]:
    """The functions, with models in place of their names; then those of environments.

    Args: given: one or a list: functions, names or folders of reward models, modules. tokenizers: reward_processing_
        classes, one for each function; None = that of where the model was loaded from, else the policy's. others: of
        environments, after which none need be given.
    Raises: ConfigError: none is given; not one tokenizer for each.
    """
    fns = [given] if callable(given) or isinstance(given, str) else list(given or ())
    if not fns and not others:
        raise ConfigError(
            "No reward source provided: reward_funcs is empty; give at least one function, the name of a reward model, "
            "or an environment_factory whose environment defines a `get_reward` method"
        )
    if args.reward_weights is not None and len(args.reward_weights) != len(fns):
        raise ConfigError(
            f"Number of reward weights ({len(args.reward_weights)}) must match number of reward functions ({len(fns)})"
        )
    own = (
        list(tokenizers)
        if isinstance(tokenizers, list | tuple)
        else [tokenizers] * (len(fns) if tokenizers is None else 1)
    )
    if len(own) != len(fns):
        raise ConfigError(
            f"The number of reward processing classes ({len(own)}) must match the number of reward functions "
            f"({len(fns)})."
        )
    made = [
        _model(fn, tokenizer, policy_tokenizer, args) if isinstance(fn, str | nn.Module) else fn
        for fn, tokenizer in zip(fns, own, strict=True)
    ]
    return [*made, *others]


def _model(model: Any, tokenizer: Any, policy_tokenizer: Any, args: Any) -> RewardModel:
    """A reward model as a function, named after the last part of its name."""
    loaded = load_model(model, device=args.device, role="reward")
    folder = model if isinstance(model, str) else model.config._name_or_path
    if tokenizer is None and folder:
        tokenizer = load_tokenizer(folder)
    return RewardModel(
        ModelWorker(loaded),
        name=PurePosixPath(loaded.name.rstrip("/")).name,
        policy_tokenizer=policy_tokenizer,
        tokenizer=tokenizer,
    )
