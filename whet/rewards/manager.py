"""RewardManager: calls the reward functions on the completions of a batch, and sums their weighted rewards.

A batch has J trajectories, in the order of groups and generations. The forks of one episode are one trajectory, and its
last fork is rewarded. An advantage estimator reads the rewards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from whet.config.rewards import check_workers
from whet.errors import ConfigError, DataError, lookup_error
from whet.metrics import Metric, Sum
from whet.rewards.call import CallResults, RewardInputs, call_rewards
from whet.rewards.checked_values import OnError
from whet.rewards.columns import check_answers, check_columns
from whet.rewards.function_info import make_function_ref
from whet.rewards.library import REWARDS
from whet.rewards.maths import math_match
from whet.rewards.model import RewardModel
from whet.rewards.resolve import as_list, resolve_rewards
from whet.rewards.reward_batch import RewardBatch
from whet.rewards.workers import RewardWorkers
from whet.types import Group
from whet.util.references import resolve_name

__all__ = ["REWARD_MANAGERS", "RewardManager", "resolve_reward_manager"]

LOG = logging.getLogger("whet")


class RewardManager:
    """One number per trajectory: totalⱼ = Σ_f w_f r_fj over the functions f that apply to j.

    A group's own rewards (from an environment) have weight 1.

    >>> from whet.types import Completion, Prompt
    >>> p = Prompt(tokens=np.array([50, 43, 50, 61]), source="2+2=", columns={"answer": "4"}, row=7)
    >>> c = [Completion(tokens=np.array([52 + i, 256]), logprobs=np.zeros(2), versions=np.zeros(2, int),
    ...      finish_reason="stop", generation=i) for i in range(2)]
    >>> out = RewardManager("exact_match", weights=[2.0])([Group(prompt=p, completions=tuple(c))], [["4", "5"]])
    >>> out.total, dict(out.table), out.metrics["rewards/exact_match"].value
    (array([2., 0.]), {'exact_match': array([1., 0.])}, 0.5)
    """

    NAN_IS_NONE: ClassVar[bool] = False
    """Whether NaN means "not applicable", like None; otherwise NaN is an error."""

    def __init__(
        self,
        reward_fns: Any,
        weights: Sequence[float] | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = 60.0,
        workers: int = 0,
        algo_fields: Mapping[str, Any] | None = None,
        groups_have_rewards: bool = False,
    ) -> None:
        """Args:
            reward_fns: one or a list: callables, names of whet's own, "package.module:name" or "file.py:name".
            weights: one number each; None = 1.
            on_error: "raise", or "none": a failure counts as "not applicable".
            timeout_s: of each call; None = no deadline.
            workers: processes that call the functions except reward models; 0 = this process calls them.
            algo_fields: fields of the algorithm's configuration, for functions that name them.
            groups_have_rewards: the groups bring rewards (Group.rewards), so there may be no functions.

        Raises:
            ConfigError: no functions, an unknown name, a function named mean, sum, min or max, weights that don't
                fit, an unknown on_error, a timeout of 0, or, with workers, a function that another process can't
                import.
        """
        refs = as_list(reward_fns)
        if not refs and not groups_have_rewards:
            raise ConfigError(
                "no reward: reward_fns (reward= of a command) is empty, and no environment has get_reward(); give a "
                f"function, file.py:function, or one of {', '.join(sorted(REWARDS))}"
            )
        if on_error not in ("raise", "none"):
            raise lookup_error("on_error", on_error, ("raise", "none"))
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {timeout_s}; None = no deadline")
        self.fns = resolve_rewards(refs)
        self.weights = _weights(weights, list(self.fns))
        self.on_error: OnError = on_error
        self.timeout_s = timeout_s
        self.algo_fields = dict(algo_fields or {})
        check_workers(workers)
        if not workers and math_match in self.fns.values():
            LOG.warning(
                "math_match without reward_workers: a formula such as 9^{9^{9^9}} stops training, and nothing can end "
                "its call; set reward_workers=1 or more"
            )
        pairs = zip(refs, self.fns.items(), strict=True) if workers else ()
        for_workers = {
            name: make_function_ref(ref, fn, name) for ref, (name, fn) in pairs if not isinstance(fn, RewardModel)
        }
        self.workers = RewardWorkers(for_workers, workers) if for_workers else None

    def close(self) -> None:
        """Ends the worker processes; a later call starts them again."""
        if self.workers is not None:
            self.workers.close()

    def check(self, columns: Sequence[str], *, extras: Mapping[str, Any] | None = None) -> None:
        """Checks before the first rollout that every function gets its arguments, and starts the workers.

        Args: columns: of the data set, without the prompt. extras: further keywords that are offered.
        Raises: ConfigError: a function needs an argument that is neither a column nor offered, or a worker can't
            import a function.
        """
        check_columns(self.fns, columns, self.algo_fields, extras)
        if self.workers is not None:
            self.workers.start()

    def check_answers(self, rows: Iterable[tuple[int, Mapping[str, Any]]], what: str = "rows") -> None:
        """Checks the answers of a data set. A row with an answer that a function can't read would teach nothing.

        Args: rows: (number, columns) of each row. what: the name of the rows in the message.
        Raises: DataError: some can't be read. If on_error is "none", it is only a warning.
        """
        try:
            check_answers(self.fns, rows, what)
        except DataError as error:
            if self.on_error == "raise":
                raise
            LOG.warning("%s", error)

    def __call__(
        self,
        groups: Sequence[Group],
        texts: Sequence[Sequence[Any]],
        *,
        mode: Any = "train",
        extras: Mapping[str, Any] | None = None,
    ) -> RewardBatch:
        """Rewards a batch.

        Args:
            groups: completed prompts.
            texts: the decoded completion of each completion of each group, or a list of messages for a transcript.
            mode: "train" or "eval", for the functions.
            extras: further keywords for them.

        Returns:
            The rewards. An episode with turns that failed (finish_reason "error") has none, and no function sees it.

        Raises:
            RewardError, ConfigError: as call_rewards does. DataError: no completions, or texts that don't match.
        """
        inputs = self.inputs(groups, texts, mode=mode, extras=extras or {})
        rewards, errors, seconds = self._call_functions(inputs, _has_not_failed(groups))
        group_rewards = {name: values for name, values in _collect_rewards(groups).items() if name not in rewards}
        call_metrics: dict[str, Metric] = {
            f"rewards/{name}/errors": Sum(float(count)) for name, count in errors.items() if count
        }
        call_metrics |= {f"time/rewards/{name}": Sum(spent) for name, spent in seconds.items()}
        return self._reward_batch(groups, texts, {**rewards, **group_rewards}, inputs, call_metrics)

    def from_groups(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any = "train"
    ) -> RewardBatch:
        """Returns a RewardBatch from the rewards that the groups already have, as an evaluation's folder has them.

        Args: groups, texts, mode: as in `__call__`. A function without a reward in a group is NaN there.
        Raises: DataError: no completions, or texts that don't match.
        """
        inputs = self.inputs(groups, texts, mode=mode, extras={})
        return self._reward_batch(groups, texts, _collect_rewards(groups, tuple(self.fns)), inputs, {})

    def _reward_batch(
        self,
        groups: Sequence[Group],
        texts: Sequence[Sequence[Any]],
        table: Mapping[str, np.ndarray],
        inputs: RewardInputs,
        call_metrics: Mapping[str, Metric],
    ) -> RewardBatch:
        weights = {name: self.weights.get(name, 1.0) for name in table}
        return RewardBatch(
            groups=groups, table=table, weights=weights, texts=texts, inputs=inputs, call_metrics=call_metrics
        )

    def inputs(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any, extras: Mapping[str, Any]
    ) -> RewardInputs:
        """Returns the arguments that the functions are offered. Args: as in the call. Raises: DataError: as the call
        does.
        """
        if len(texts) != len(groups) or any(len(t) != len(g.completions) for t, g in zip(texts, groups, strict=True)):
            raise DataError("texts don't match the groups; give one text for every completion of every group")
        prompts, completions, prompt_ids, completion_ids, names, sources = [], [], [], [], [], []
        for group, group_texts in zip(groups, texts, strict=True):
            for place in group.last:
                text, fork = group_texts[place], group.completions[place]
                chat = not isinstance(group.prompt.source, str)
                prompts.append(list(group.prompt.source) if chat else group.prompt.source)
                completions.append([{"role": "assistant", "content": text}] if chat and isinstance(text, str) else text)
                prompt_ids.append(np.asarray(group.prompt.tokens if fork.prefix is None else fork.prefix).tolist())
                completion_ids.append(np.asarray(fork.tokens).tolist())
                names.append(f"{group.prompt.row}_{fork.generation}")
                sources.append(group.prompt.columns)
        if not prompts:
            raise DataError("no completions to reward; sample at least one per prompt")
        known = dict.fromkeys(name for columns in sources for name in columns)
        return RewardInputs(
            prompts=prompts,
            completions=completions,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            trajectory_ids=names,
            mode=mode,
            columns={name: [columns.get(name) for columns in sources] for name in known},  # rows may lack a column
            algo_fields=self.algo_fields,
            extras=extras,
        )

    def _call_functions(
        self, inputs: RewardInputs, seen: np.ndarray, names: Sequence[str] | None = None
    ) -> CallResults:
        """Calls the functions on some trajectories; the rewards of the others are NaN.

        Args: seen: Bool [J]. names: of the functions; None = all.
        """
        fns = self.fns if names is None else {name: self.fns[name] for name in names}
        if not seen.any():
            return CallResults({name: np.full(len(seen), math.nan) for name in fns}, {}, {})
        results = call_rewards(
            fns,
            inputs if seen.all() else inputs.select(np.flatnonzero(seen)),
            timeout_s=self.timeout_s,
            on_error=self.on_error,
            workers=self.workers,
            nan_is_none=self.NAN_IS_NONE,
        )
        rewards = {name: np.full(len(seen), math.nan) for name in results.rewards}
        for name, values in results.rewards.items():
            rewards[name][seen] = values
        return results._replace(rewards=rewards)


REWARD_MANAGERS: dict[str, Callable[..., RewardManager]] = {"sequence-level": RewardManager}
"""Reward managers by name: what is called with (reward_fns, weights, **options) and gives a callable like it."""


def resolve_reward_manager(ref: Any) -> Callable[..., RewardManager]:
    """Returns a reward manager's class (or factory), by name, by reference or as it is.

    >>> resolve_reward_manager("sequence-level").__name__
    'RewardManager'
    """
    return resolve_name(ref, REWARD_MANAGERS, "reward manager")


def _weights(weights: Sequence[float] | None, names: Sequence[str]) -> dict[str, float]:
    """Returns the weight of each function."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if len(weights) != len(names):
        raise ConfigError(
            f"{len(weights)} reward weights for {len(names)} reward functions ({', '.join(names)}); give one each"
        )
    bad = [weight for weight in weights if not math.isfinite(weight)]
    if bad:
        raise ConfigError(f"reward weight {bad[0]} is not finite; give numbers, 0.0 to log a function without using it")
    return dict(zip(names, map(float, weights), strict=True))


def _has_not_failed(groups: Sequence[Group]) -> np.ndarray:
    """Bool [J]: False for an episode with a failed turn."""
    return np.array([not group.completions[place].has_failed for group in groups for place in group.last], bool)


def _collect_rewards(groups: Sequence[Group], names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """float64 [J] by name: the rewards that the groups have, those of `names` first; NaN where a group has none."""
    all_names = dict.fromkeys([*names, *(name for group in groups for name in group.rewards)])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in all_names}
    for group in groups:
        size = len(group.last)
        for name in all_names:
            values = np.asarray(group.rewards.get(name, np.full(size, math.nan)), dtype=np.float64)
            if values.shape != (size,):
                raise DataError(
                    f"row {group.prompt.row} has rewards {name!r} of shape {list(values.shape)} for {size} "
                    "trajectories; give one number for each"
                )
            parts[name].append(values)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
