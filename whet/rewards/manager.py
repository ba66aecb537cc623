"""From completions to rewards: calls the functions, weighs them, counts.

J trajectories of a batch, in the order of groups and generations (the forks of one episode are one trajectory, judged
by its last fork). Left out on purpose: advantages, which are the estimator's business.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from whet.config.rewards import check_workers
from whet.errors import ConfigError, DataError, lookup_error
from whet.metrics import Max, Mean, Metric, Min, Sum, merge
from whet.rewards.call import Called, OnError, RewardInputs, call_rewards
from whet.rewards.columns import check_answers, check_columns
from whet.rewards.function_info import named
from whet.rewards.library import REWARDS
from whet.rewards.maths import math_match
from whet.rewards.model import RewardModel
from whet.rewards.resolve import RESERVED, by_name, listed
from whet.rewards.workers import RewardWorkers
from whet.types import Group
from whet.util.references import resolve_name

__all__ = [
    "REWARD_MANAGERS",
    "RewardBatch",
    "RewardManager",
    "resolve_reward_manager",
    "reward_metrics",
    "sample_std",
]

LOG = logging.getLogger("whet")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RewardBatch:
    """What a reward manager returns.

    Example: one group of two, exact_match of weight 1: total = [1., 0.], metrics["rewards/sum"] = Mean(1.0, 2).
    """

    groups: list[Group]
    """The groups, with `rewards` filled."""
    total: np.ndarray
    """float64 [J]: the weighted sum of what applied; NaN = no function applied. A batch is made of it, and from then on
    TokenBatch.rewards counts, which the batch stage may have shaped.
    """
    metrics: dict[str, Metric]
    """By name: of each function, not of the total."""
    names: tuple[str, ...] = ()
    """The functions, in order."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of each function in the total."""
    texts: Sequence[Sequence[Any]]
    """The decoded completions, of each group."""
    inputs: RewardInputs
    """What the functions saw: prompts, completions and columns, J of each."""

    table: Mapping[str, np.ndarray] = None  # pyright: ignore[reportAssignmentType]
    """Float64 [J] by function, before its weight; NaN where it had no say or a group came without it. By default the
    rewards of the groups end to end."""
    greedy: np.ndarray | None = None
    """Float64 [groups]: the total of each group's greedy completion; None = there are none."""

    def __post_init__(self) -> None:
        if self.table is None:
            object.__setattr__(self, "table", _table(self.groups, self.names))

    def with_greedy(self, alone: RewardBatch) -> RewardBatch:
        """The same with the totals of greedy completions, and metrics of them.

        Args: alone: the greedy completions, each judged as a group of one.
        Raises: DataError: not one for each group.
        """
        if len(alone.total) != len(self.groups):
            raise DataError(f"{len(alone.total)} greedy completions for {len(self.groups)} groups; give each group one")
        known = alone.total[~np.isnan(alone.total)]
        metrics = {
            "greedy/reward": Mean(float(known.sum()), len(known)),
            "greedy/tokens": Sum(float(sum(len(c.tokens) for g in alone.groups for c in g.completions))),
        }
        return dataclasses.replace(self, greedy=alone.total, metrics={**self.metrics, **metrics})

    @property
    def sizes(self) -> list[int]:
        """The trajectories of each group."""
        return _sizes(self.groups)

    @classmethod
    def cat(cls, parts: Sequence[RewardBatch]) -> RewardBatch:
        """Parts of one batch that were judged apart, as if they had been judged together.

        Args: parts: in the order of their groups. What isn't a sum (a deviation) is made from the whole of them.
        """
        if len(parts) == 1:
            return parts[0]
        groups = [group for part in parts for group in part.groups]
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        table = _table(groups, names)
        greedy = [part.greedy for part in parts if part.greedy is not None]
        return cls(
            groups=groups,
            total=np.concatenate([part.total for part in parts]),
            metrics={**merge(*(part.metrics for part in parts)), **reward_metrics(table)},
            table=table,
            names=names,
            weights={name: weight for part in parts for name, weight in part.weights.items()},
            texts=[texts for part in parts for texts in part.texts],
            inputs=RewardInputs.cat([part.inputs for part in parts]),
            greedy=np.concatenate(greedy) if len(greedy) == len(parts) else None,
        )

    def select(self, chosen: Sequence[int] | np.ndarray) -> RewardBatch:
        """Some of the groups, in the order given. Deviations and means of the functions are made from them alone."""
        bounds = np.cumsum([0, *self.sizes])
        at = np.concatenate([np.empty(0, int), *(np.arange(bounds[i], bounds[i + 1]) for i in chosen)])
        table = {name: values[at] for name, values in self.table.items()}
        return dataclasses.replace(
            self,
            groups=[self.groups[i] for i in chosen],
            total=self.total[at],
            metrics={**self.metrics, **reward_metrics(table)},
            table=table,
            texts=[self.texts[i] for i in chosen],
            inputs=self.inputs.select(at),
            greedy=None if self.greedy is None else self.greedy[np.asarray(chosen, int)],
        )


class RewardManager:
    """One number per trajectory: totalⱼ = Σ_f w_f r_fj over the functions f that apply to j.

    Rewards that a group brings (an environment's) count with weight 1, besides the functions.

    >>> from whet.types import Completion, Prompt
    >>> p = Prompt(tokens=np.array([50, 43, 50, 61]), source="2+2=", columns={"answer": "4"}, row=7)
    >>> c = [Completion(tokens=np.array([52 + i, 256]), logprobs=np.zeros(2), versions=np.zeros(2, int),
    ...      finish_reason="stop", generation=i) for i in range(2)]
    >>> out = RewardManager("exact_match", weights=[2.0])([Group(prompt=p, completions=tuple(c))], [["4", "5"]])
    >>> out.total, out.groups[0].rewards, out.metrics["rewards/exact_match"].value
    (array([2., 0.]), {'exact_match': array([1., 0.])}, 0.5)
    """

    NAN_IS_NONE: ClassVar[bool] = False
    """Whether NaN says that a function does not apply, as None does; else it is an error."""

    def __init__(
        self,
        reward_fns: Any,
        weights: Sequence[float] | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = 60.0,
        workers: int = 0,
        algo_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
            reward_fns: one or a list: callables, names of whet's own, "package.module:name" or "file.py:name".
            weights: one number each; None = 1.
            on_error: "raise", or "none": a failure counts as "not applicable".
            timeout_s: of each call; None = no deadline.
            workers: processes that call them, reward models aside; 0 = they are called in this one.
            algo_fields: fields of the algorithm's configuration, for functions that name them.

        Raises:
            ConfigError: no functions, an unknown name, a function named mean, sum, min or max, weights that don't
                fit, an unknown on_error, a timeout of 0, with workers a function that another process can't import.
        """
        given = listed(reward_fns)
        if not given:
            raise ConfigError(
                f"reward_fns is empty; give at least one function, or a name among {', '.join(sorted(REWARDS))}"
            )
        if on_error not in ("raise", "none"):
            raise lookup_error("on_error", on_error, ("raise", "none"))
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {timeout_s}; None = no deadline")
        self.fns = by_name(given)
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
        pairs = zip(given, self.fns.items(), strict=True)
        away = {name: (one, fn) for one, (name, fn) in pairs if not isinstance(fn, RewardModel)} if workers else {}
        there = {name: named(one, fn, name) for name, (one, fn) in away.items()}
        self.workers = RewardWorkers(there, workers) if there else None

    def close(self) -> None:
        """Ends the worker processes; a later call starts them again."""
        if self.workers is not None:
            self.workers.close()

    def check(self, columns: Sequence[str], *, extras: Mapping[str, Any] | None = None) -> None:
        """Checks before the first rollout that every function gets what it needs, and starts the workers.

        Args: columns: of the data set, without the prompt. extras: further keywords that are offered.
        Raises: ConfigError: a function needs an argument that is neither a column nor offered, or a worker can't
            import one.
        """
        check_columns(self.fns, columns, self.algo_fields, extras)
        if self.workers is not None:
            self.workers.start()

    def check_answers(self, rows: Iterable[tuple[int, Mapping[str, Any]]], what: str = "rows") -> None:
        """Looks over the answers of a data set: one that a function can't read is None there, and teaches nothing.

        Args: rows: the number and the columns of each. what: they are, for the message.
        Raises: DataError: some can't be read; a warning where on_error is "none".
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
        """The rewards of a batch.

        Args:
            groups: rolled out.
            texts: the decoded completion of each completion of each group, or a list of messages for a transcript.
            mode: "train" or "eval", for the functions.
            extras: further keywords for them.

        Returns:
            The rewards. An episode with turns that failed (finish_reason "error") has none, and no function sees it.

        Raises:
            RewardError, ConfigError: as call_rewards does. DataError: no completions, or texts that don't match.
        """
        inputs = self.inputs(groups, texts, mode=mode, extras=extras or {})
        made, errors, seconds = self._called(inputs, _whole(groups))
        table = {**made, **{name: r for name, r in _table(groups).items() if name not in made}}  # what groups came with
        cut = {name: np.split(values, np.cumsum(_sizes(groups))[:-1]) for name, values in made.items()}
        filled = [
            dataclasses.replace(group, rewards={**group.rewards, **{name: parts[i] for name, parts in cut.items()}})
            for i, group in enumerate(groups)
        ]
        weights = {name: self.weights.get(name, 1.0) for name in table}
        metrics = reward_metrics(table)
        metrics |= {f"rewards/{name}/errors": Sum(float(count)) for name, count in errors.items() if count}
        metrics |= {f"time/rewards/{name}": Sum(spent) for name, spent in seconds.items()}
        return RewardBatch(
            groups=filled,
            total=_weighted(table, weights),
            metrics=metrics,
            table=table,
            names=tuple(table),
            weights=weights,
            texts=texts,
            inputs=inputs,
        )

    def inputs(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any, extras: Mapping[str, Any]
    ) -> RewardInputs:
        """What the functions are offered. Args: as in the call. Raises: DataError: as the call does."""
        return _inputs(groups, texts, mode, self.algo_fields, extras)

    def taken_over(
        self, groups: Sequence[Group], texts: Sequence[Sequence[Any]], *, mode: Any = "train"
    ) -> RewardBatch:
        """What a call would give for groups that have their rewards already, under the weights of now.

        Args: groups: as in `RewardBatch.groups`. texts, mode: as in the call.
        Raises: DataError: no completions, or texts that don't match.
        """
        table = _table(groups, tuple(self.fns))
        weights = {name: self.weights.get(name, 1.0) for name in table}
        return RewardBatch(
            groups=list(groups),
            total=_weighted(table, weights),
            metrics=reward_metrics(table),
            table=table,
            names=tuple(table),
            weights=weights,
            texts=texts,
            inputs=_inputs(groups, texts, mode, self.algo_fields, {}),
        )

    def _called(self, inputs: RewardInputs, whole: np.ndarray) -> Called:
        """What the functions give, as call_rewards has it; NaN for trajectories that are not whole.

        Args: whole: Bool [J], which of the trajectories the functions see.
        """
        if not whole.any():
            return Called({name: np.full(len(whole), math.nan) for name in self.fns}, {}, {})
        seen = inputs if whole.all() else inputs.select(np.flatnonzero(whole))
        found = call_rewards(
            self.fns,
            seen,
            timeout_s=self.timeout_s,
            on_error=self.on_error,
            workers=self.workers,
            nan_is_none=self.NAN_IS_NONE,
        )
        made = {name: np.full(len(whole), math.nan) for name in found.rewards}
        for name, values in found.rewards.items():
            made[name][whole] = values
        return found._replace(rewards=made)


def reward_metrics(rewards: Mapping[str, np.ndarray]) -> dict[str, Metric]:
    """What is logged of the functions' rewards; NaN (not applicable) is left out everywhere.

    Tunix's: rewards/<f>, the mean of one function; rewards/{sum,mean,min,max}: of a trajectory over its functions,
    unweighted; then the mean (sum, mean), least and greatest of the batch. TRL's: rewards/<f>/{mean,std}. Standard
    deviations merge across batches as means.

    Args: rewards: float64 [J] per function.
    Returns: name -> metric.
    Source: Tunix rl/reward_manager.py, TRL GRPOTrainer; Tunix logs NaN for min and max where one is NaN, whet doesn't.

    >>> m = reward_metrics({"f": np.array([1.0, 0.0, 1.0, 1.0])})
    >>> m["rewards/f"].value, m["rewards/f/std"].value
    (0.75, 0.5)
    """
    metrics: dict[str, Metric] = {}
    for name, values in rewards.items():
        known = values[~np.isnan(values)]
        metrics[f"rewards/{name}"] = metrics[f"rewards/{name}/mean"] = Mean(float(known.sum()), len(known))
        metrics[f"rewards/{name}/std"] = Mean(sample_std(known), 1) if len(known) else Mean(0.0, 0)
    table = np.stack(list(rewards.values()), 1)  # [J f]
    table = table[~np.isnan(table).all(1)]
    if len(table):
        sums, means = np.nansum(table, 1), np.nanmean(table, 1)
        metrics["rewards/sum"] = Mean(float(sums.sum()), len(sums))
        metrics["rewards/mean"] = Mean(float(means.sum()), len(means))
        metrics["rewards/min"] = Min(float(np.nanmin(table)))
        metrics["rewards/max"] = Max(float(np.nanmax(table)))
    return metrics


REWARD_MANAGERS: dict[str, Callable[..., RewardManager]] = {"sequence-level": RewardManager}
"""Reward managers by name: what is called with (reward_fns, weights, **options) and gives a callable like it."""


def resolve_reward_manager(ref: Any) -> Callable[..., RewardManager]:
    """A reward manager's class (or factory), by name, by reference or as it is.

    >>> resolve_reward_manager("sequence-level").__name__
    'RewardManager'
    """
    return resolve_name(ref, REWARD_MANAGERS, "reward manager")


def _weights(weights: Sequence[float] | None, names: Sequence[str]) -> dict[str, float]:
    """The weight of each function."""
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


def _weighted(rewards: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """float64 [J]: the weighted sum over the functions that apply; NaN where none does."""
    table = np.stack(list(rewards.values()))  # [f J]
    weighted = np.nansum(table * np.array([weights[name] for name in rewards])[:, None], 0)
    return np.where(np.isnan(table).all(0), math.nan, weighted)


def _inputs(
    groups: Sequence[Group],
    texts: Sequence[Sequence[Any]],
    mode: Any,
    algo_fields: Mapping[str, Any],
    extras: Mapping[str, Any],
) -> RewardInputs:
    """What the functions are offered."""
    if len(texts) != len(groups) or any(len(t) != len(g.completions) for t, g in zip(texts, groups, strict=True)):
        raise DataError("texts don't match the groups; give one text for every completion of every group")
    prompts, completions, before, ids, names, sources = [], [], [], [], [], []
    for group, of_group in zip(groups, texts, strict=True):
        last = {c.generation: place for place, c in enumerate(group.completions)}  # first seen first, last fork wins
        for generation, place in last.items():
            text = of_group[place]
            chat = not isinstance(group.prompt.source, str)
            prompts.append(list(group.prompt.source) if chat else group.prompt.source)
            completions.append([{"role": "assistant", "content": text}] if chat and isinstance(text, str) else text)
            done = group.completions[place]
            before.append(np.asarray(group.prompt.tokens if done.prefix is None else done.prefix).tolist())
            ids.append(np.asarray(done.tokens).tolist())
            names.append(f"{group.prompt.row}_{generation}")
            sources.append(group.prompt.columns)
    if not prompts:
        raise DataError("no completions to reward; sample at least one per prompt")
    known = dict.fromkeys(name for columns in sources for name in columns)
    return RewardInputs(
        prompts=prompts,
        completions=completions,
        prompt_ids=before,
        completion_ids=ids,
        trajectory_ids=names,
        mode=mode,
        columns={name: [columns.get(name) for columns in sources] for name in known},  # ragged rows: None where absent
        algo_fields=algo_fields,
        extras=extras,
    )


def _whole(groups: Sequence[Group]) -> np.ndarray:
    """Bool [J]: not an episode with turns that failed."""
    last = {(i, c.generation): c for i, group in enumerate(groups) for c in group.completions}
    return np.array([c.messages is None or c.finish_reason != "error" for c in last.values()], bool)


def _sizes(groups: Sequence[Group]) -> list[int]:
    """The trajectories of each group."""
    return [len({c.generation for c in group.completions}) for group in groups]


def _table(groups: Sequence[Group], names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Float64 [J] by name: those of `names`, then whatever else a group has."""
    every = dict.fromkeys([*names, *(name for group in groups for name in group.rewards)])
    if taken := sorted(every.keys() & RESERVED):
        raise DataError(
            f"a group brings a reward named {taken[0]!r}, but the metric rewards/{taken[0]} is over all functions; "
            "rename it"
        )
    pairs = list(zip(groups, _sizes(groups), strict=True))
    return {name: np.concatenate([_brought(group, name, size) for group, size in pairs]) for name in every}


def _brought(group: Group, name: str, size: int) -> np.ndarray:
    """float64 [size]: a reward that a group came with; NaN where it has none of that name."""
    values = np.asarray(group.rewards[name], dtype=np.float64) if name in group.rewards else np.full(size, math.nan)
    if values.shape != (size,):
        raise DataError(
            f"row {group.prompt.row} has rewards {name!r} of shape {list(values.shape)} for {size} trajectories; give "
            "one number for each"
        )
    return values


def sample_std(values: np.ndarray) -> float:
    """The sample standard deviation (n - 1); 0 for one value, and exactly 0 for equal ones.

    >>> sample_std(np.array([0.0, 1.0, 1.0, 0.0, 0.5])), sample_std(np.full(3, 0.1))
    (0.5, 0.0)
    """
    return 0.0 if len(values) < 2 or (values == values[0]).all() else float(values.std(ddof=1))
