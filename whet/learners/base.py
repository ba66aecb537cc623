"""RLLearner: the loop of every reinforcement learner.

    sample -> reward -> fill -> batch -> score -> assign_advantages -> minibatches -> update -> sync_weights
    -> after_step

Each stage takes a Step and returns it with what it has found; nothing of a step lies on the learner. GRPO and its
relatives differ in `batch` (which tokens are trained), `score`, `assign_advantages` and `update`; `planned_passes` says
what they leave out. What surrounds a step (the order of the data, resuming, logging, evaluation, checkpoints) is in
run/run.py, and what reinforcement learning adds to that in rl_task.py. Read `train`, then the method that you came for.

Dim letters: N sequences, J trajectories, S tokens.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.cluster import RLCluster
from whet.config import AlgorithmConfig, DataConfig, Mode, Role
from whet.config.rewards import REWARD_MODEL
from whet.data.prompts import PromptEncoder
from whet.errors import ConfigError
from whet.learners.episodes import environment_of, turns_of
from whet.learners.objective import reward_functions
from whet.learners.rl_task import RLTask
from whet.learners.step import Step
from whet.learners.step_metrics import completion_metrics, engine_metrics, total_metrics
from whet.metrics import flat
from whet.rewards.manager import RewardManager, resolve_reward_manager
from whet.rewards.metric_fns import call_metric_fns, reduce_metrics
from whet.rewards.resolve import listed, with_reward_model
from whet.rewards.reward_batch import RewardBatch
from whet.rollout.generate_options import check_trainable
from whet.run.observer import Observer
from whet.run.run import Run
from whet.types import Group, Prompt, TokenBatch

__all__ = ["RLLearner"]

log = logging.getLogger("whet")


class RLLearner:
    """Trains the actor of a cluster on rewards.

    Args:
        cluster: the models, the engine and the configuration.
        algo_config: the algorithm's.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or of one conversation
            `fn(messages, answer) -> float`, names, or "file.py:function"; None = the reward_fn of rollout.env_path.
            The cluster's reward model, if any, is one more: where the word "reward_model" stands, else the last.
        metric_fns: functions `fn(prompts, completions, advantages, rewards, **columns) -> {name: (value,
            aggregation)}`.
        data_shuffle_seed: shuffles the mini-batches of each pass over a step's samples; None = in order.
        data: how rows become batches.
        settings: the whole configuration, or its tree, for the run folder; None = what the learner knows of it.
        observers: told of each event of a run (run.observer.Observer).
    """

    def __init__(
        self,
        cluster: RLCluster,
        algo_config: AlgorithmConfig,
        reward_fns: Any,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        data: DataConfig | None = None,
        settings: Any = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.cluster = cluster
        check_trainable(cluster.sampling())
        cluster.build_engine()
        self.algo_config = algo_config
        self.config = cluster.training_config
        self.metric_fns = list(metric_fns or ())
        self.data_shuffle_seed = data_shuffle_seed
        self.data = data or DataConfig()
        for name in DataConfig.READ_BY:
            if getattr(self.data, name) != getattr(DataConfig(), name):
                raise ConfigError(f"data.{name} is for `whet grpo`; from Python give train() the rows themselves")
        self.settings = settings
        self.observers = list(observers)
        self.environment = environment_of(cluster)
        self.encoders: dict[Mode, PromptEncoder] = {}
        """The encoder of each mode, once it is made; one that encoded the rows before may be put here."""
        if not reward_fns and self.environment is not None and Role.REWARD not in cluster.workers:
            reward_fns = self.environment.reward_fn
        self.take_rewards(reward_fns)

    def take_rewards(self, reward_fns: Any) -> None:
        """Takes the reward functions, in place of those before. Args: reward_fns: as the constructor takes them."""
        algo_config = self.algo_config
        manager = resolve_reward_manager(algo_config.reward_manager)
        reward_fns, weights = reward_functions(self._with_reward_model(reward_fns), algo_config)
        self.reward_manager = manager(
            reward_fns,
            weights,
            on_error=self.config.on_reward_error,
            timeout_s=self.config.reward_timeout_s,
            **({"workers": self.config.reward_workers} if self.config.reward_workers else {}),
            algo_fields={f.name: getattr(algo_config, f.name) for f in dataclasses.fields(algo_config)},
        )

    def _with_reward_model(self, reward_fns: Any) -> Any:
        """The reward functions, and the cluster's reward model: where "reward_model" stands, else as the last.

        Raises: ConfigError: it is named, and the cluster has none.
        """
        if Role.REWARD not in self.cluster.workers:
            if REWARD_MODEL in listed(reward_fns):
                raise ConfigError(f"{REWARD_MODEL} is among the rewards, and there is none; pass RLCluster(reward=...)")
            return reward_fns
        model = self.cluster.reward_model(
            apply_chat_template=self.data.apply_chat_template, system_prompt=self.data.system_prompt
        )
        return with_reward_model(reward_fns, model)

    def train(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Trains until max_steps or the data's end.

        Args:
            train_ds: rows (a data set, a list of dicts, an iterable of them) or batches (dicts of lists with the key
                "prompts").
            eval_ds: the same; evaluated whole, of several splits the one named test, validation or alike.
        Returns: the finished run: its step, its metrics (rows, of evaluations too), its evaluations, its folder.
        """
        run = self.new_run(train_ds, eval_ds)
        with run:
            for index, prompts in run.steps():
                step = self.sample(Step(index=index, prompts=prompts))
                step = self.fill(run, self.reward(step))
                step = self.batch(step)
                step = self.assign_advantages(self.score(step))
                for mini in self.minibatches(step):
                    step = self.update(step, mini)
                self.cluster.sync_weights()
                self.after_step(run, step)
        return run

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """The run that `train` goes through, not yet open: see there for the arguments. train_ds: None = no steps."""
        own = type(self)
        if eval_ds is not None and own.sample is not RLLearner.sample and own.rollout is RLLearner.rollout:
            log.info("evaluation completes prompts by %s.rollout, not by its `sample`", own.__name__)
        task = self.new_task(eval_ds)
        stream = None if train_ds is None else task.stream(train_ds)
        return Run(task, stream, self.cluster, self.config, observers=self.observers)

    def new_task(self, eval_ds: Any = None) -> RLTask:
        """The task of a run. Args: eval_ds: its evaluation data."""
        return RLTask(self, eval_ds)

    def close(self) -> None:
        """Frees the engine and the optimizers, and ends the workers of rewards."""
        if isinstance(self.reward_manager, RewardManager):
            self.reward_manager.close()
        self.cluster.close()

    # ---- the stages ----------------------------------------------------------------------------------------------

    def sample(self, step: Step) -> Step:
        """Makes the groups of a step, its prompts completed by `rollout`: `groups`, `versions`."""
        before = self.cluster.rollout.stats()
        with self.cluster.trace.span("rollout"):
            place = {"first": step.first} if step.first else {}
            groups = self.rollout(step.prompts, step=step.index, mode=step.mode, **place)
        versions = np.unique(np.concatenate([np.empty(0, int), *(c.versions for g in groups for c in g.completions)]))
        done = self.cluster.rollout.stats().since(before)
        return step.replace(groups=groups, versions=tuple(versions[versions >= 0].tolist())).log(engine_metrics(done))

    def rollout(self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int = 0) -> Sequence[Group]:
        """Completes prompts, in training and in evaluation alike: the place for episodes of your own.

        Args:
            prompts: encoded.
            step: under which the draws are addressed.
            mode: whose sampling parameters, and whose number of completions: `num_generations_of(mode)`.
            first: place of the first prompt in the step, part of the address; given for further batches alone.
        Returns: a group for each prompt.
        """
        return self.cluster.sample(
            prompts,
            num_generations=self.num_generations_of(mode),
            step=step,
            first=first,
            mode=mode,
            greedy=self.needs_greedy and mode is Mode.TRAIN,
            play=turns_of(self.cluster, mode, self.encoder(mode)),
        )

    def encoder(self, mode: Mode) -> PromptEncoder:
        """The encoder of a mode: it turns rows into prompts, and an environment's messages into tokens."""
        if mode not in self.encoders:
            tools = None if self.environment is None else self.environment.tools
            self.encoders[mode] = self.cluster.encoder(mode, data=self.data, tools=tools)
        return self.encoders[mode]

    def reward(self, step: Step) -> Step:
        """Calls the reward functions: `rewarded` has each group's rewards, the weighted sums [J], metrics.

        They are called once for each completion, and a second time for greedy ones, if there are any: where several
        processes train, each judges a part of the groups.
        """

        def compute_rewards(groups: Sequence[Group]) -> RewardBatch:
            texts = [
                [list(c.messages) if c.messages else self.cluster.decode(c.tokens) for c in g.completions]
                for g in groups
            ]
            return self.reward_manager(groups, texts, mode=step.mode)

        def compute_all(groups: Sequence[Group]) -> RewardBatch:
            greedy = [Group(prompt=g.prompt, completions=(g.greedy,)) for g in groups if g.greedy is not None]
            rewards = compute_rewards(groups)
            return rewards.with_greedy(compute_rewards(greedy)) if greedy else rewards

        with self.cluster.trace.span("rewards"), self.cluster.reward_weights():
            return step.replace(rewards=RewardBatch.cat(self.cluster.ranks.scatter_gather(compute_all, step.groups)))

    def fill(self, run: Run, step: Step) -> Step:
        """Selects the groups that are trained on: here all of them. `run.next_batch()` gives more prompts."""
        return step

    def batch(self, step: Step) -> Step:
        """Lays rewarded groups end to end: `batch`."""
        return step.replace(batch=TokenBatch.from_groups(step.groups)).log(completion_metrics(step.rewards))

    def score(self, step: Step) -> Step:
        """Adds to the batch what the loss compares with: reference and old log-probabilities, values."""
        raise NotImplementedError

    def assign_advantages(self, step: Step) -> Step:
        """Turns rewards into an advantage for each token of the batch."""
        raise NotImplementedError

    def update(self, step: Step, mini: TokenBatch) -> Step:
        """One optimizer step on a mini-batch of the step. Returns: the step with its metrics."""
        raise NotImplementedError

    def after_step(self, run: Run, step: Step) -> None:
        """Logs the step, evaluates and saves where they are due."""
        metrics = {**step.metrics, **total_metrics(step.rewards)}
        row = {**flat(metrics), **self.extra_metrics(step)}
        run.end_step(step, row, num_tokens=step.batch.num_tokens)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the learner keeps from step to step (an adaptive coefficient, a count), for checkpoints.

        Returns: plain numbers, strings, tensors, and lists, tuples and dicts of them.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, before the first step of a resumed run."""

    # ---- shared pieces -------------------------------------------------------------------------------------------

    @property
    def num_generations(self) -> int:
        """G: completions of each prompt in training."""
        return 1

    @property
    def needs_greedy(self) -> bool:
        """Whether training takes a greedy completion of each prompt as well, which is rewarded and not trained on."""
        return False

    @property
    def learns_from_rewards(self) -> bool:
        """Whether nothing is learned where no token has an advantage, so that the run warns of it."""
        return True

    def num_generations_of(self, mode: Mode) -> int:
        """Completions of each prompt in a mode: an evaluation's own number, or 1 where it is greedy, or training's."""
        if mode is Mode.TRAIN:
            return self.num_generations
        config = self.cluster.rollout_for(mode)
        return config.num_generations_eval or (1 if config.temperature == 0 else self.num_generations)

    def num_updates(self, num_groups: int) -> int:
        """Optimizer steps that a step of so many groups makes: passes times mini-batches."""
        return self.num_iterations * -(-num_groups // (self.config.mini_batch_size or num_groups))

    def total_updates(self, role: Role, steps: int, num_groups: int) -> int:
        """Optimizer steps of a role in the first steps of a run, each of so many groups: what its schedule spans."""
        return steps * self.num_updates(num_groups)

    def planned_passes(self, num_groups: int) -> dict[str, str]:
        """What a step of so many groups runs besides rollout and update, and what it leaves out, with the reason."""
        return {}

    def minibatches(self, step: Step) -> Iterator[TokenBatch]:
        """The mini-batches of a step: num_iterations passes over its groups, mini_batch_size groups each.

        Groups stay whole. A step whose prompts are not a multiple of mini_batch_size (some were dropped as too long, or
        the data's last batch is short) has a smaller last mini-batch, weighted by its own tokens.
        """
        batch = step.batch
        num_groups = batch.num_groups
        size = self.config.mini_batch_size or num_groups
        group_of_sequence = batch.group_of.index_select(0, batch.trajectory_of)
        for iteration in range(self.num_iterations):
            for chosen in self._order(num_groups, step.index, iteration).split(size):
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

    def extra_metrics(self, step: Step) -> dict[str, float]:
        """The metrics of a row that no stage logs: of a step of training, those of the metric functions."""
        return reduce_metrics(self.call_metric_fns(step)) if step.mode is Mode.TRAIN else {}

    def call_metric_fns(self, step: Step) -> dict[str, tuple[Any, Callable[..., Any] | None]]:
        """Calls the metric functions on a step: name -> (value, aggregation)."""
        if not self.metric_fns:
            return {}
        return call_metric_fns(
            self.metric_fns,
            step.rewards.inputs,
            advantages=step.batch.trajectory_advantages.tolist(),
            rewards=step.rewards.total.tolist(),
        )

    def evaluate(self, eval_ds: Iterable[Any], step: int = 0) -> dict[str, float]:
        """Rewards over a whole data set with the evaluation's rollout configuration.

        Args: eval_ds: rows or batches. step: under which the draws are addressed and the completions stored.
        Returns: the metrics of rewards and completions, name -> number.
        """
        return self.new_run(None, eval_ds).evaluate(step)
