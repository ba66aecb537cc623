"""Calls reward functions with TRL's keywords, and wraps reward models as functions.

    fn(prompts=, completions=, completion_ids=, **columns, trainer_state=, log_extra=, log_metric=)

A function receives the keywords of its signature. It returns None or NaN for a completion that it does not score.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from types import FunctionType
from typing import Any

import numpy as np
from torch import nn

from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, format_value
from whet.models.load import load_model
from whet.parallel.ranks import Ranks
from whet.rewards.call import CallResults, RewardInputs
from whet.rewards.manager import RewardManager
from whet.rewards.model import RewardModel
from whet.rewards.reward_batch import RewardBatch
from whet.train.worker import ModelWorker
from whet.trl.agents.agents import Agents, completion_prompts
from whet.types import Group

__all__ = ["RewardLog", "TRLRewards", "make_reward_functions"]

log = logging.getLogger("whet")


class RewardLog:
    """Collects the columns and metrics that reward functions log.

    Args: state: returns the trainer's current state, the keyword trainer_state. ranks: returns the processes; of
        several, each calls the functions for its own groups.
    """

    def __init__(self, state: Callable[[], Any], ranks: Callable[[], Ranks] = Ranks) -> None:
        self._state, self._ranks = state, ranks
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def keywords(self) -> dict[str, Any]:
        """Returns the keywords for the functions."""
        return {"trainer_state": self._state(), "log_extra": self.log_extra, "log_metric": self.log_metric}

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Adds a column to the table of completions. Args: values: one for each completion."""
        self.columns.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Logs a metric of this step; several values are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def take(self) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Returns the columns and metrics of all processes since the last call, and clears them."""
        everywhere = self._ranks().all_gather((self.columns, self.metrics))
        self.columns, self.metrics = {}, {}
        columns, metrics = (_joined(part) for part in zip(*everywhere, strict=True))
        return columns, {n: sum(v) / len(v) for n, v in metrics.items()}


def _joined(parts: Iterable[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Returns the lists of several dicts, joined by name."""
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items():
            joined.setdefault(name, []).extend(values)
    return joined


class TRLRewards(RewardManager):
    """Computes a batch's rewards with TRL's keywords. The trainer sets `log` and `agents`."""

    NAN_IS_NONE = True
    log: RewardLog
    agents: Agents

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Names a lambda `<lambda>`, as TRL does."""
        super().__init__(*args, **kwargs)

        def trl_name(name: str, fn: Any) -> str:
            is_lambda = isinstance(fn, FunctionType) and fn.__name__ == "<lambda>"
            return name.replace("lambda", "<lambda>", 1) if is_lambda else name

        self.weights = {trl_name(name, self.fns[name]): weight for name, weight in self.weights.items()}
        self.fns = {trl_name(name, fn): fn for name, fn in self.fns.items()}

    def check(self, columns: Sequence[str], *, extras: Mapping[str, Any] | None = None) -> None:
        """Checks the functions' keywords, TRL's included. A rollout_func can add any columns, so nothing is checked."""
        if self.agents.rollout_func is None:
            environments = {} if self.agents.environments is None else {"environments": []}
            super().check(columns, extras={**self.log.keywords(), **environments, **(extras or {})})

    def inputs(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any, extras: Mapping[str, Any]
    ) -> RewardInputs:
        """Adds the environments, their prompts, and the columns of rollout_func."""
        environments = self.agents.environments
        if environments is not None:  # an extra, since columns are copied for each function
            extras = {**extras, "environments": environments.in_use}
        inputs = super().inputs(groups, texts, mode=mode, extras=extras)
        columns = {**inputs.columns, **self.agents.columns}
        return dataclasses.replace(inputs, prompts=completion_prompts(groups), columns=columns)

    def _call_functions(
        self, inputs: RewardInputs, seen: np.ndarray, names: Sequence[str] | None = None
    ) -> CallResults:
        """Calls the functions, but for what the recorded answers have."""
        call = functools.partial(super()._call_functions, inputs, seen)
        return self.agents.record_rewards(self.fns, call)

    def __call__(
        self,
        groups: Sequence[Group],
        texts: Sequence[Sequence[Any]],
        *,
        mode: Any = "train",
        extras: Mapping[str, Any] | None = None,
    ) -> RewardBatch:
        """Computes the rewards. Warns if all functions returned None for a completion."""
        rewards = super().__call__(groups, texts, mode=mode, extras={**self.log.keywords(), **(extras or {})})
        if len(unscored := np.flatnonzero(np.isnan(rewards.total))):
            first = int(unscored[0])
            kwargs = {"prompt": rewards.inputs.prompts[first], "completion": rewards.inputs.completions[first]}
            log.warning("All reward functions returned None for the following kwargs: %s. Its advantage is 0.", kwargs)
        # other processes get the rewards, and methods of this one's trainer are nothing for them
        return dataclasses.replace(rewards, inputs=dataclasses.replace(rewards.inputs, extras={}))


def make_reward_functions(
    reward_funcs: Any, tokenizers: Any, policy_tokenizer: Any, args: Any, environment_rewards: Sequence[Any] = ()
) -> list[Any]:
    """Returns the reward functions, with models loaded and wrapped as functions; those of environments come last.

    Args:
        reward_funcs: one or a list of functions, of names or folders of reward models, of modules.
        tokenizers: reward_processing_classes, one for each function; None = the tokenizer of the reward model's folder,
            else the policy's.
        policy_tokenizer: the policy's tokenizer.
        args: the trainer's arguments.
        environment_rewards: reward functions of environments; if there are any, reward_funcs may be empty.
    Raises: ConfigError: no function; a wrong number of weights or tokenizers.
    """
    if callable(reward_funcs) or isinstance(reward_funcs, str):
        reward_funcs = [reward_funcs]
    if not isinstance(reward_funcs, Iterable | None):
        raise ConfigError(
            "reward_funcs must be a function, the name of a reward model, or a list of them, got "
            f"{format_value(reward_funcs, 80)}"
        )
    fns = list(reward_funcs or ())
    if not fns and not environment_rewards:
        raise ConfigError(
            "No reward source provided: reward_funcs is empty; give at least one function, the name of a reward model, "
            "or an environment_factory whose environment defines a `get_reward` method"
        )
    if args.reward_weights is not None and len(args.reward_weights) != len(fns):
        raise ConfigError(
            f"Number of reward weights ({len(args.reward_weights)}) must match number of reward functions ({len(fns)})"
        )
    if not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers] * (len(fns) if tokenizers is None else 1)
    if len(tokenizers) != len(fns):
        raise ConfigError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(fns)})."
        )
    functions = [
        _load_reward_model(fn, tokenizer, policy_tokenizer, args) if isinstance(fn, str | nn.Module) else fn
        for fn, tokenizer in zip(fns, tokenizers, strict=True)
    ]
    return [*functions, *environment_rewards]


def _load_reward_model(model: Any, tokenizer: Any, policy_tokenizer: Any, args: Any) -> RewardModel:
    """Returns a reward model as a function, named after the last part of the model's name."""
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
