"""RLLearner: the loop of every reinforcement learner.

    sample -> reward -> batch -> score -> assign_advantages -> minibatches -> update -> sync_weights -> after_step

GRPO and its relatives differ in `batch` (which tokens are trained), `score`, `assign_advantages` and `update`; `passes`
says what they leave out. What surrounds a step (the order of the data, resuming, logging, evaluation, checkpoints) is
in learners/run.py. Read `train`, then the method that you came for.

Dim letters: N sequences, J trajectories, S tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.cluster import RLCluster
from whet.config import AlgorithmConfig, DataConfig, Mode
from whet.errors import ConfigError
from whet.learners.report import engine_metrics, rewarded_metrics, trajectory_advantages
from whet.learners.run import Run
from whet.metrics import Metric, merge
from whet.rewards.manager import Rewarded, resolve_reward_manager
from whet.rewards.metric_fns import call_metric_fns
from whet.rollout.options import check_trainable
from whet.types import Group, Prompt, TokenBatch

__all__ = ["RLLearner"]


class RLLearner:
    """Trains the actor of a cluster on rewards.

    Args: rl_cluster: models, engine, configuration. algo_config: the algorithm's. reward_fns: functions
        `fn(prompts, completions, **columns) -> list[float | None]`, names, or "file.py:function". metric_fns: functions
        `fn(prompts, completions, advantages, rewards, **columns) -> {name: (value, aggregation)}`. data_shuffle_seed:
        shuffles the mini-batches of each pass over a step's samples; None = in order. data: how rows become batches.
        settings: the whole configuration as a tree, for the run folder; None = what the learner knows of it.
    """

    def __init__(
        self,
        rl_cluster: RLCluster,
        algo_config: AlgorithmConfig,
        reward_fns: Any,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        data: DataConfig | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.rl_cluster = self.cluster = rl_cluster
        check_trainable(rl_cluster.sampling())
        rl_cluster.build_engine()
        self.algo_config = algo_config
        self.config = rl_cluster.training_config
        self.metric_fns = list(metric_fns or ())
        self.data_shuffle_seed = data_shuffle_seed
        self.data = data or DataConfig()
        for name in ("path", "eval_path", "eval_split", "eval_fraction", "subset", "streaming", "limit"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                raise ConfigError(f"data.{name} is for `whet grpo`; from Python give train() the rows themselves")
        self.settings = settings
        manager = resolve_reward_manager(algo_config.reward_manager)
        self.reward_manager = manager(
            reward_fns,
            algo_config.reward_weights,
            on_error=self.config.on_reward_error,
            timeout_s=self.config.reward_timeout_s,
            algo_fields={f.name: getattr(algo_config, f.name) for f in dataclasses.fields(algo_config)},
        )
        self.metrics: dict[str, Metric] = {}

    def train(self, train_ds: Any, eval_ds: Any = None, skip_jit: bool = False) -> Run:
        """Trains until max_steps or the data's end.

        Args: train_ds: rows (a data set, a list of dicts, an iterable of them) or batches (dicts of lists with the key
            "prompts"). eval_ds: the same; evaluated whole, of several splits the one named test, validation or alike.
            skip_jit: nothing is compiled in this release.
        Returns: the finished run: its step, its metrics by step, its folder.
        """
        run = Run(self, train_ds, eval_ds)
        with run:
            for step, prompts in run.steps():
                groups = self.sample(prompts, step)
                rewarded = self.reward(groups)
                batch = self.score(self.batch(rewarded))
                batch = self.assign_advantages(batch)
                for mini in self.minibatches(batch, step):
                    self.update(mini)
                self.cluster.sync_weights()
                self.after_step(run, step, rewarded, batch)
        return run

    # ---- the stages ----------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Completes the prompts of a step, num_generations times each."""
        before = self.cluster.rollout.stats()
        with self.cluster.trace.span("rollout"):
            groups = self.cluster.sample(prompts, num_generations=self.num_generations, step=step)
        self.metrics = merge(self.metrics, engine_metrics(self.cluster.rollout.stats().since(before)))
        return groups

    def reward(self, groups: list[Group], mode: Mode = Mode.TRAIN) -> Rewarded:
        """Calls the reward functions.

        Returns: the groups with what each function said, the weighted sums [J], and the metrics of both.
        """
        with self.cluster.trace.span("rewards"):
            texts = [[self.cluster.decode(c.tokens) for c in g.completions] for g in groups]
            return self.reward_manager(groups, texts, mode=mode)

    def batch(self, rewarded: Rewarded) -> TokenBatch:
        """Lays rewarded groups end to end, and notes their metrics."""
        self.metrics = merge(self.metrics, rewarded_metrics(rewarded))
        return TokenBatch.from_groups(rewarded.groups, rewarded.total)

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Adds what the loss compares with: reference and old log-probabilities, values."""
        raise NotImplementedError

    def assign_advantages(self, batch: TokenBatch) -> TokenBatch:
        """Turns rewards into an advantage for each token."""
        raise NotImplementedError

    def update(self, mini: TokenBatch) -> None:
        """One optimizer step."""
        raise NotImplementedError

    def after_step(self, run: Run, step: int, rewarded: Rewarded, batch: TokenBatch) -> None:
        """Logs the step, evaluates and saves where they are due."""
        if self.metric_fns:
            self._call_metric_fns(rewarded, batch)
        metrics, self.metrics = self.metrics, {}
        run.after_step(step, batch, metrics, rewarded)

    # ---- shared pieces -------------------------------------------------------------------------------------------

    @property
    def num_generations(self) -> int:
        """G: completions of each prompt in training."""
        return 1

    def updates_of(self, num_groups: int) -> int:
        """Optimizer steps that a step of so many groups makes: passes times mini-batches."""
        return self.num_iterations * -(-num_groups // (self.config.mini_batch_size or num_groups))

    def passes(self, num_groups: int) -> dict[str, str]:
        """What a step of so many groups runs beside rollout and update, and what it leaves out, with the reason."""
        return {}

    def minibatches(self, batch: TokenBatch, step: int) -> Iterator[TokenBatch]:
        """The mini-batches of a step: num_iterations passes over its groups, mini_batch_size groups each.

        Groups stay whole. A step whose prompts are no multiple of mini_batch_size (some were dropped as too long, or
        the data's last batch is short) has a smaller last mini-batch, weighted by its own tokens.
        """
        num_groups = batch.num_groups
        size = self.config.mini_batch_size or num_groups
        group_of_sequence = batch.group_of.index_select(0, batch.trajectory_of)
        for iteration in range(self.num_iterations):
            for chosen in self._order(num_groups, step, iteration).split(size):
                yield batch.select(torch.isin(group_of_sequence, chosen).nonzero().flatten())

    def _order(self, num_groups: int, step: int, iteration: int) -> Tensor:
        if self.data_shuffle_seed is None:
            return torch.arange(num_groups)
        seed = (self.data_shuffle_seed * 1_000_003 + step) * 1_009 + iteration
        return torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed % 2**63))

    @property
    def num_iterations(self) -> int:
        """Passes over the samples of a step (mu)."""
        return 1

    def _call_metric_fns(self, rewarded: Rewarded, batch: TokenBatch) -> None:
        inputs = rewarded.inputs
        found = call_metric_fns(
            self.metric_fns,
            inputs.prompts,
            inputs.completions,
            advantages=trajectory_advantages(batch).tolist(),
            rewards=batch.rewards.tolist(),
            completion_ids=inputs.completion_ids,
            trajectory_ids=inputs.trajectory_ids,
            mode=inputs.mode,
            **inputs.columns,
        )
        self.cluster.buffer_metrics(found, Mode.TRAIN)

    def evaluate(self, eval_ds: Iterable[Any], step: int = 0) -> dict[str, float]:
        """Rewards over a whole data set with the evaluation's rollout configuration.

        Args: eval_ds: rows or batches. step: under which the draws are addressed and the completions stored.
        Returns: the metrics of rewards and completions, name -> number.
        """
        return Run(self, None, eval_ds).evaluate(step)
