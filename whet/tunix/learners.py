"""Tunix's learners: they call an external logger with the metrics, and continue from the newest checkpoint.

Dim legend: B rows (completions), P prompt, C completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from whet.config import DataConfig, Mode
from whet.config.base import check_instance
from whet.errors import ConfigError, DataError
from whet.learners import grpo, ppo
from whet.learners.base import RLLearner
from whet.learners.step import Step
from whet.rewards.reward_batch import RewardBatch
from whet.run.observer import Observer
from whet.run.run import Run
from whet.tunix.cluster import RLCluster
from whet.tunix.configs import core_config
from whet.tunix.padded import TrainExample, batch_to_example, example_to_batch
from whet.tunix.trainer import Trainer
from whet.types import Completion, Group, Prompt

__all__ = ["GRPOLearner", "GrpoLearner", "MetricFn", "PPOLearner", "PpoLearner", "RewardFn", "TunixLearner"]

RewardFn = Callable[..., Any]
"""fn(prompts, completions, **columns) -> a number or None for each."""
MetricFn = Callable[..., Any]
"""fn(prompts, completions, advantages, rewards, **columns) -> {name: (value, aggregation)}."""

_REFUSED = {
    "prepare_dataset": "there is no queue that examples are put into",
    "_prepare_data": "there is no queue that examples are put into",
    "_process_accumulated_batches": "a step's prompts are completed together",
    "_run_global_step": "the loop is `train`, of the stages sample, reward, select_groups, batch, score ...",
    "_compute_trajectory_ids": "a trajectory's id is its row and its generation",
}
"""Methods of Tunix's learners that a subclass may not replace, and why."""


class TunixLearner(RLLearner):
    """The methods that GRPOLearner and PPOLearner add to whet's learners.

    Args: rl_cluster: or rl_engine. algo_config: or grpo_config, ppo_config. The others: see whet.RLLearner.

    A subclass may replace `_generate_and_compute_advantage(training_input, mode)`, which turns the rows of a step into
    the TrainExample of its updates. If checkpoint_root_directory holds checkpoints, `train` continues from the newest.
    Like Tunix, a run reads the data once, in their order, unless `data=DataConfig(shuffle=True)` or num_epochs is set.
    """

    cluster: RLCluster

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises ConfigError for a subclass that replaces a method that is never called."""
        for name, reason in _REFUSED.items():
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: {reason}; replace "
                    "_generate_and_compute_advantage or a stage of whet's (docs/extending.md)"
                )
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        rl_cluster: Any = None,
        algo_config: Any = None,
        reward_fns: Any = None,
        metric_fns: Sequence[MetricFn] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        rl_engine: Any = None,
        grpo_config: Any = None,
        ppo_config: Any = None,
        **options: Any,
    ) -> None:
        self._generated: int | None = None
        """The number of the step for which `_generate_and_compute_advantage` made the batch."""
        self._default_step: Step | None = None
        self._input: tuple[Step, list[str]] | None = None
        self._rewards: RewardBatch | None = None
        config = _only_one(algo_config=algo_config, grpo_config=grpo_config, ppo_config=ppo_config)
        cluster = check_instance(_only_one(rl_cluster=rl_cluster, rl_engine=rl_engine), RLCluster, "rl_cluster")
        options.setdefault("data", DataConfig(shuffle=False))
        super().__init__(cluster, core_config(config), reward_fns, metric_fns, data_shuffle_seed, **options)
        self.observers.insert(0, _RunEvents())

    def set_reward_fns(self, reward_fns: Any) -> None:
        """Takes the reward functions. Raises ConfigError: one has the name of a metric over all functions."""
        super().set_reward_fns(reward_fns)
        names = getattr(self.reward_manager, "fns", ())
        if taken := [name for name in ("max", "mean", "min", "score", "sum") if name in names]:
            raise ConfigError(
                f"a reward function is named {taken[0]!r}, but in whet.tunix the metric rewards/{taken[0]} is over all "
                "functions; rename it"
            )

    @property
    def rl_cluster(self) -> RLCluster:
        """The cluster, by Tunix's name."""
        return self.cluster

    rl_engine = rl_cluster

    # ---- the run -------------------------------------------------------------------------------------------------

    def train(self, train_ds: Any, eval_ds: Any = None, skip_jit: bool = False) -> Run:
        """Trains until max_steps or the data's end: see RLLearner.train. Args: skip_jit: no effect."""
        return super().train(train_ds, eval_ds)

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Returns a run as RLLearner's, which continues from the newest checkpoint of checkpoint_root_directory, if
        any.

        Raises: ConfigError: a trainer has data hooks.
        """
        for role, trainer in self.cluster.trainers.items():
            if isinstance(trainer, Trainer) and trainer.data_hooks is not None:
                raise ConfigError(
                    f"the {role.value}'s trainer has data hooks, and a learner makes its batches from rollouts; "
                    "replace _generate_and_compute_advantage, or give the hooks' batches to trainer.train()"
                )
        if self.config.num_epochs is None:  # Tunix's training ends with the data
            self.config = dataclasses.replace(self.config, num_epochs=1)
        if eval_ds is None and self.config.eval_every_n_steps:  # Tunix requires the field in every configuration
            self.config = dataclasses.replace(self.config, eval_every_n_steps=0)
        if train_ds is not None and self.config.resume is None and self.cluster.restored_step:
            self.config = dataclasses.replace(self.config, resume="latest")
        return super().new_run(train_ds, eval_ds)

    def extra_metrics(self, step: Step) -> dict[str, float]:
        """Buffers the metrics of a step or an evaluation, and returns all metrics that were buffered for it."""
        metrics = self.call_metric_fns(step) if step.mode is Mode.TRAIN else {}
        if self.cluster.has_external_logger:
            metrics = {**_external_metrics(step), **metrics}
        self.cluster.buffer_metrics_async(metrics, step.mode, step.index)
        return {**self.cluster.take_metrics(step.index, step.mode), **_reward_metrics(step.rewards)}

    # ---- the stages ----------------------------------------------------------------------------------------------

    def sample(self, step: Step) -> Step:
        """Samples the completions of a step, or calls a subclass's `_generate_and_compute_advantage`."""
        replaced = type(self)._generate_and_compute_advantage is not TunixLearner._generate_and_compute_advantage
        if not replaced:
            return super().sample(step)
        if getattr(self.algo_config, "dynamic_sampling", False):
            raise ConfigError(
                "dynamic_sampling completes further prompts after the rewards, and a replaced "
                "_generate_and_compute_advantage returns one batch; set dynamic_sampling=False"
            )
        training_input = self._training_input(step)
        self._input, self._default_step, self._rewards = (step, list(training_input["prompts"])), None, None
        example = self._generate_and_compute_advantage(training_input, Mode.TRAIN)
        step, self._generated = self._from_example(step, example), step.index
        self._input = self._default_step = self._rewards = None
        return step

    def _is_generated(self, step: Step) -> bool:
        return step.mode is Mode.TRAIN and self._generated == step.index

    def reward(self, step: Step) -> Step:
        """Calls the reward functions, and in an evaluation the actor's evaluation hooks."""
        if self._is_generated(step):
            return step
        step = super().reward(step)
        if step.mode is Mode.EVAL:
            self._call_eval_hooks(step)
        return step

    def select_groups(self, run: Run, step: Step) -> Step:
        """Samples further groups as the learner does; a generated batch stays as it is."""
        return step if self._is_generated(step) else super().select_groups(run, step)

    def batch(self, step: Step) -> Step:
        """Makes the batch as the learner does; a generated batch stays as it is."""
        return step if self._is_generated(step) else super().batch(step)

    def score(self, step: Step) -> Step:
        """Scores the batch as the learner does; a generated batch stays as it is."""
        return step if self._is_generated(step) else super().score(step)

    def assign_advantages(self, step: Step) -> Step:
        """Computes the advantages as the learner does; a generated batch stays as it is."""
        return step if self._is_generated(step) else super().assign_advantages(step)

    def _call_eval_hooks(self, step: Step) -> None:
        """Calls the actor's evaluation hooks with the loss of the evaluation's samples."""
        trainer = self.cluster.actor_trainer
        if not isinstance(trainer, Trainer) or trainer.training_hooks is None:
            return
        scored = self.assign_advantages(self.score(self.batch(step)))
        trainer.evaluate_batch(scored.batch)

    # ---- a user's own rollout ------------------------------------------------------------------------------------

    def _training_input(self, step: Step) -> dict[str, Any]:
        """Returns the rows of a step, one for each completion: prompts, the data's columns, trajectory_ids."""
        each = [(p, g) for p in step.prompts for g in range(self.num_generations)]
        names = dict.fromkeys(name for p in step.prompts for name in p.columns)
        columns = {name: [p.columns.get(name) for p, _ in each] for name in names}
        return {
            "prompts": [p.source for p, _ in each],
            **columns,
            "trajectory_ids": [f"{p.row}_{g}" for p, g in each],
        }

    def _generate_and_compute_advantage(
        self, training_input: Mapping[str, Any], mode: Mode = Mode.TRAIN
    ) -> TrainExample:
        """Returns the training batch of a step: samples completions, and computes their rewards, scores and advantages.

        Args: training_input: "prompts", each num_generations times in a row, and columns of the same length.
        Returns: [B, P] and [B, C] arrays, with advantages [B, C] and the old and reference log-probabilities.
        """
        step = self._step_of(training_input, Mode(mode))
        step = super().sample(step)
        step = super().batch(super().reward(step))
        step = super().assign_advantages(super().score(step))
        self._default_step = step
        return batch_to_example(step.batch, self.cluster.pad_id)

    def _compute_rewards(
        self, prompts: Sequence[Any], completions: Sequence[str], mode: Any = Mode.TRAIN, step: int | None = None,
        **columns: Any,
    ) -> np.ndarray:  # fmt: skip
        """Returns the sum of the reward functions for each completion: float64 [B]. Args: columns: a value for each of
        them.
        """
        groups = [
            Group(prompt=self._prompt(text, {n: v[i] for n, v in columns.items() if n != "trajectory_ids"}, i),
                  completions=(self._completion(self.cluster.tokenizer.encode(answer) or [self.cluster.pad_id], 0),))
            for i, (text, answer) in enumerate(zip(prompts, completions, strict=True))
        ]  # fmt: skip
        self._rewards = self.reward_manager(groups, [[text] for text in completions], mode=Mode(mode))
        return np.nan_to_num(self._rewards.total)

    def _step_of(self, training_input: Mapping[str, Any], mode: Mode) -> Step:
        """Returns the step of a training_input: the loop's current step if the prompts are unchanged, else a
        new one.
        """
        prompts, size = list(training_input["prompts"]), self.num_generations
        columns = {n: v for n, v in training_input.items() if n not in ("prompts", "trajectory_ids")}
        if self._input is not None and prompts == self._input[1]:
            return self._input[0].replace(mode=mode)
        rows = [
            self._prompt(prompts[i], {n: v[i] for n, v in columns.items()}, i) for i in range(0, len(prompts), size)
        ]
        index = self.cluster.global_steps if self._input is None else self._input[0].index
        return Step(index=index, prompts=rows, mode=mode)

    def _prompt(self, source: Any, columns: Mapping[str, Any], row: int) -> Prompt:
        prompt = self.encoder(Mode.TRAIN)({"prompt": source, **columns}, row)
        if prompt is None:
            raise DataError(f"row {row}: the prompt is longer than max_prompt_length")
        return prompt

    def _completion(self, ids: Sequence[int], generation: int) -> Completion:
        """Returns the completion of ids."""
        tokens = np.asarray(ids, dtype=np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.full(len(tokens), self.cluster.actor.version, np.int32),
            finish_reason="stop" if tokens[-1] in self.cluster.eos_ids else "length",
            generation=generation,
        )

    def _from_example(self, step: Step, example: TrainExample) -> Step:
        """Returns the step with the batch that `_generate_and_compute_advantage` returned."""
        batch = example_to_batch(example, version=self.cluster.actor.version)
        default_step = self._default_step
        if default_step is not None and torch.equal(default_step.batch.ends, batch.ends):
            names = ("mask", "advantages", "old_logprobs", "ref_logprobs", "values", "returns")
            columns = {name: getattr(batch, name) for name in names}
            return default_step.replace(batch=default_step.batch.replace(**columns))
        if example.old_per_token_logps is None:  # the current policy's, before the step's first update
            old = self.cluster.actor.logprobs(batch).logprobs
            batch = batch.replace(sampler_logprobs=old, old_logprobs=old)
        groups = self._groups(step, example)
        rewards = self._reward_batch(groups)
        if isinstance(self, ppo.PPOLearner):
            batch = ppo.add_has_reward(batch, rewards)
        return (default_step or step).replace(groups=groups, rewards=rewards, batch=batch)

    def _groups(self, step: Step, example: TrainExample) -> list[Group]:
        """Returns the completions of an example, a row each, under the prompts of the step."""
        size, ids, mask = self.num_generations, torch.as_tensor(example.completion_ids), example.completion_mask
        if len(ids) != size * len(step.prompts):
            raise DataError(
                f"_generate_and_compute_advantage returned {len(ids)} rows for {len(step.prompts)} prompts of {size} "
                "generations; give a row for each completion, in the order of the prompts"
            )
        last = [int(torch.as_tensor(m).nonzero().max()) + 1 for m in torch.as_tensor(mask)]
        return [
            Group(prompt=prompt, completions=tuple(
                self._completion(ids[i * size + g, : last[i * size + g]].tolist(), g) for g in range(size)))
            for i, prompt in enumerate(step.prompts)
        ]  # fmt: skip

    def _reward_batch(self, groups: Sequence[Group]) -> RewardBatch:
        """Returns the rewards that `_compute_rewards` computed for groups; NaN if it was not called."""
        texts = [[self.cluster.decode(c.tokens) for c in g.completions] for g in groups]
        count = sum(map(len, texts))
        rewards, inputs = self._rewards, self.reward_manager.inputs(groups, texts, mode=Mode.TRAIN, extras={})
        if rewards is None or len(rewards.total) != count:
            return RewardBatch(groups=list(groups), table={}, texts=texts, inputs=inputs)
        return dataclasses.replace(rewards, groups=list(groups), texts=texts, inputs=inputs)


class _RunEvents(Observer):
    """Tells the cluster the number of each step, and calls the training hooks at the start and the end of a run."""

    def on_run_begin(self, run: Run) -> None:
        _call_hooks(run, "on_train_start")

    def on_step_begin(self, run: Run, index: int) -> None:
        run.roles.global_steps = index  # pyright: ignore[reportAttributeAccessIssue]

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            _call_hooks(run, "on_train_end")


def _call_hooks(run: Run, name: str) -> None:
    for trainer in run.roles.trainers.values():
        if isinstance(trainer, Trainer):
            trainer.call_hook(name)


class GRPOLearner(TunixLearner, grpo.GRPOLearner):
    """Trains the actor by GRPO: see TunixLearner for the arguments."""


class PPOLearner(TunixLearner, ppo.PPOLearner):
    """Trains the actor and a critic by PPO: see TunixLearner for the arguments."""


GrpoLearner, PpoLearner = GRPOLearner, PPOLearner


def _reward_metrics(rewards: RewardBatch) -> dict[str, float]:
    """Tunix's metrics of the rewards that whet does not have. NaN (not applicable) is left out everywhere.

    rewards/score/{mean,max,min}: of the totals. rewards/{sum,mean,min,max}: of a completion over its functions,
    unweighted, then the mean (of sum and mean), the least and the greatest over completions.
    Source: Tunix rl/reward_manager.py, which logs NaN for min and max where one is NaN.

    >>> from types import SimpleNamespace
    >>> table = {"a": np.array([1.0, 2.0, np.nan]), "b": np.array([0.0, np.nan, np.nan])}
    >>> found = _reward_metrics(SimpleNamespace(table=table, total=np.array([1.0, 2.0, np.nan])))
    >>> [found[f"rewards/{name}"] for name in ("sum", "mean", "min", "max", "score/mean")]
    [1.5, 1.25, 0.0, 2.0, 1.5]
    """
    total = rewards.total[~np.isnan(rewards.total)]
    metrics: dict[str, float] = {}
    if len(total):
        metrics |= {f"rewards/score/{how}": float(getattr(total, how)()) for how in ("mean", "max", "min")}
    table = np.stack([*rewards.table.values()], 1) if rewards.table else np.empty((0, 1))  # [J f]
    table = table[~np.isnan(table).all(1)]
    if len(table):
        metrics["rewards/sum"], metrics["rewards/mean"] = (
            float(np.nansum(table, 1).mean()),
            float(np.nanmean(table, 1).mean()),
        )
        metrics["rewards/min"], metrics["rewards/max"] = float(np.nanmin(table)), float(np.nanmax(table))
    return metrics


def _external_metrics(step: Step) -> dict[str, tuple[Any, Any]]:
    """Returns the rewards and completions of a step for an external logger: name -> (value, aggregation)."""
    rewards = step.rewards
    total = np.nan_to_num(rewards.total)
    table = {name: np.nan_to_num(values) for name, values in rewards.table.items()}
    lengths = np.array([len(c.tokens) for g in rewards.groups for c in g.completions])
    metrics: dict[str, tuple[Any, Any]] = {
        "trajectory_ids": (list(rewards.inputs.trajectory_ids), None),
        "prompts": (list(rewards.inputs.prompts), None),
        "completions": (list(rewards.inputs.completions), None),
    }
    metrics |= {f"rewards/{name}": (values, np.mean) for name, values in table.items()}
    if table:
        each = np.stack(list(table.values()))
        spread = {"sum": each.sum(0), "mean": each.mean(0), "min": each.min(0), "max": each.max(0)}
        metrics |= {f"rewards/{name}": (values, np.mean) for name, values in spread.items()}
    for name, reduce in (("mean", np.mean), ("max", np.max), ("min", np.min)):
        metrics[f"rewards/score/{name}"] = (reduce(total), reduce)
        metrics[f"completions/{name}_length"] = (reduce(lengths), reduce)
    return metrics


def _only_one(**values: Any) -> Any:
    """Returns the value that was passed under one of several names. Raises ConfigError: two of them have a value."""
    passed = {name: value for name, value in values.items() if value is not None}
    if len(passed) > 1:
        raise ConfigError(f"{' and '.join(passed)} name the same thing; give one of them")
    return next(iter(passed.values()), None)
