"""RLLearner: the loop of every reinforcement learner.

    stage              what it writes
    sample             groups, versions: the prompts with their completions
    reward             rewards: of each function, and their weighted sum for each trajectory, [J]
    select_groups      groups, rewards: dynamic sampling replaces groups without signal
    batch              batch: the sequences end to end, as a TokenBatch
    score              columns of the batch, [S]: old_logprobs, ref_logprobs, and what else the loss compares with
    assign_advantages  columns of the batch, [S]: advantages, and a critic's returns
    update             metrics: one optimizer step, for each of the `minibatches`
    after_step         the row of metrics that is logged

Each stage takes a Step and returns it with more columns; the learner itself keeps nothing of a step. The docstring of a
stage ends with the columns that it reads and writes: `batch` stands for the columns that every batch has, `batch.x` for
a further one, and an override lists what it reads and writes in addition. GRPO and its relatives differ in `batch`
(which tokens are trained), `score`, `assign_advantages` and `update`; `planned_passes` lists the passes that they skip.

The order of the data, resuming, logging, evaluation and checkpoints surround a step. They are in run/run.py, and their
part for reinforcement learning is in rl_task.py.

Dim legend: J trajectories, S tokens.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from whet.cluster import RLCluster
from whet.config import AlgorithmConfig, DataConfig, Mode, Role
from whet.config.rewards import REWARD_MODEL
from whet.data.prompts import PromptEncoder
from whet.envs.agent import AGENT_REWARD
from whet.envs.environment import ENVIRONMENT_REWARD
from whet.envs.failures import EpisodeFailures
from whet.errors import ConfigError
from whet.learners.episodes import load_environments, make_agent_episodes, make_episode_runner
from whet.learners.from_config import reward_functions
from whet.learners.rl_task import RLTask
from whet.learners.step import Step
from whet.learners.step_metrics import completion_metrics, engine_metrics, total_metrics
from whet.metrics import Max, Min, flat, merge
from whet.rewards.manager import RewardManager, resolve_reward_manager
from whet.rewards.metric_fns import aggregate_metrics, call_metric_fns
from whet.rewards.resolve import as_list, with_reward_model
from whet.rewards.reward_batch import RewardBatch
from whet.rollout.generate_options import check_trainable
from whet.rollout.policy_rollouts import EpisodeRunner
from whet.run.observer import Observer
from whet.run.run import Run
from whet.types import Group, Prompt, TokenBatch

if TYPE_CHECKING:
    from whet.serve.agent_episodes import AgentEpisodes

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
        settings: the whole configuration, or its tree, for the run folder; None = the parts that the learner knows.
        observers: notified of each event of a run (run.observer.Observer).
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
        self.environments = load_environments(cluster)
        self._agents: dict[Mode, AgentEpisodes] = {}
        self._episode_runners: dict[Mode, EpisodeRunner | None] = {}
        rollout = cluster.rollout_for()
        self.failures = EpisodeFailures(
            self.config.on_reward_error,
            on_infrastructure=rollout.on_infrastructure_failure,
            max_retries=rollout.max_retries,
            max_share=rollout.max_failed_share,
        )
        """Of the environments and agents of the run."""
        self.encoders: dict[Mode, PromptEncoder] = {}
        """Each mode's encoder, made at its first use. A caller that has encoded rows already may put its own here."""
        environment = self.environments[Mode.TRAIN]
        if not reward_fns and environment is not None and Role.REWARD not in cluster.workers:
            reward_fns = environment.reward_fn
        self.set_reward_fns(reward_fns)

    def set_reward_fns(self, reward_fns: Any) -> None:
        """Replaces the reward functions.

        Args: reward_fns: as the constructor takes them.
        Raises: ConfigError: "reward_model" is among them, and the cluster has no reward model.
        """
        if Role.REWARD in self.cluster.workers:
            model = self.cluster.reward_model(
                apply_chat_template=self.data.apply_chat_template, system_prompt=self.data.system_prompt
            )
            reward_fns = with_reward_model(reward_fns, model)
        elif REWARD_MODEL in as_list(reward_fns):
            raise ConfigError(
                f"reward names {REWARD_MODEL}, but no reward model is set; set reward_model.model=, or pass "
                "RLCluster(reward=...)"
            )
        algo_config = self.algo_config
        manager = resolve_reward_manager(algo_config.reward_manager)
        reward_fns, weights = reward_functions(reward_fns, algo_config)
        self.reward_manager = manager(
            reward_fns,
            weights,
            on_error=self.config.on_reward_error,
            timeout_s=self.config.reward_timeout_s,
            **({"workers": self.config.reward_workers} if self.config.reward_workers else {}),
            **({"groups_have_rewards": True} if self.episode_reward and not reward_fns else {}),
            algo_fields={f.name: getattr(algo_config, f.name) for f in dataclasses.fields(algo_config)},
        )
        if self.episode_reward in getattr(self.reward_manager, "fns", ()):
            raise ConfigError(
                f"a reward function is named {self.episode_reward}, like the reward of rollout."
                f"{'agent' if self.episode_reward == AGENT_REWARD else 'env_path'}; rename it"
            )

    @property
    def episode_reward(self) -> str | None:
        """The name of the reward that the episodes bring: the agent's, or that of an environment's class."""
        if self.cluster.rollout_for().agent is not None:
            return AGENT_REWARD
        environment = None if (script := self.environments[Mode.TRAIN]) is None else script.environment
        return ENVIRONMENT_REWARD if environment is not None and environment.has_reward else None

    def train(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Trains until max_steps or the data's end.

        Args:
            train_ds: rows (a data set, a list of dicts, an iterable of them) or batches (dicts of lists with the key
                "prompts").
            eval_ds: the same. All of it is evaluated; a data set with several splits is evaluated on the one named
                test, validation or the like.
        Returns: the finished run, with its step, rows of metrics, evaluations and folder.
        """
        run = self.new_run(train_ds, eval_ds)
        with run:
            for index, prompts in run.steps():
                step = self.sample(Step(index=index, prompts=prompts))
                step = self.select_groups(run, self.reward(step))
                step = self.batch(step)
                step = self.assign_advantages(self.score(step))
                for mini in self.minibatches(step):
                    step = self.update(step, mini)
                self.cluster.sync_weights()
                self.after_step(run, step)
        return run

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Returns the run that `train` goes through, not yet open. Args: as those of `train`; train_ds None =
        no steps.
        """
        cls = type(self)
        if eval_ds is not None and cls.sample is not RLLearner.sample and cls.rollout is RLLearner.rollout:
            log.info("evaluation completes prompts by %s.rollout, not by its `sample`", cls.__name__)
        task = self.new_task(eval_ds)
        stream = None if train_ds is None else task.stream(train_ds)
        return Run(task, stream, self.cluster, self.config, observers=self.observers)

    def new_task(self, eval_ds: Any = None) -> RLTask:
        """Returns the task of a run. Args: eval_ds: its evaluation data."""
        return RLTask(self, eval_ds)

    def close(self) -> None:
        """Frees the engine and the optimizers, and ends the workers of rewards."""
        if isinstance(self.reward_manager, RewardManager):
            self.reward_manager.close()
        for episodes in self._agents.values():
            episodes.close()
        self.cluster.close()

    # ---- the stages ----------------------------------------------------------------------------------------------

    def sample(self, step: Step) -> Step:
        """Completes the prompts by `rollout`.

        Reads: index, prompts, first, mode. Writes: groups, versions, metrics.
        """
        before = self.cluster.engine.stats()
        with self.cluster.trace.span("rollout"):
            first = {"first": step.first} if step.first else {}
            groups = self.rollout(step.prompts, step=step.index, mode=step.mode, **first)
        versions = np.unique(np.concatenate([np.empty(0, int), *(c.versions for g in groups for c in g.completions)]))
        stats = merge(*self.cluster.ranks.all_gather(engine_metrics(self.cluster.engine.stats().since(before))))
        waits = [sum(c.seconds.values()) for g in groups for c in g.completions if c.seconds]
        soonest = {"time/rollout/first_completion": Min(min(waits))} if waits else {}
        gap = self.cluster.pop_sync_gap()
        checked = {} if gap is None else {"rollout/sync_logprob_gap": Max(gap)}
        step = step.replace(groups=groups, versions=tuple(versions[versions >= 0].tolist()))
        return step.log({**stats, **soonest, **checked})

    def rollout(self, prompts: Sequence[Prompt], *, step: int, mode: Mode, first: int = 0) -> Sequence[Group]:
        """Completes prompts, in training and in evaluation. Override it for episodes of your own.

        Args:
            prompts: encoded.
            step: the number of the step, part of the key of each random draw.
            mode: decides the sampling parameters and the number of completions, `num_generations_of(mode)`.
            first: the place of the first prompt in the step, part of the key too. It is passed only for the further
                batches of dynamic sampling.
        Returns: a group for each prompt.
        """
        return self.cluster.sample(
            prompts,
            num_generations=self.num_generations_of(mode),
            step=step,
            first=first,
            mode=mode,
            greedy=self.needs_greedy and mode is Mode.TRAIN,
            run_episode=self.episode_runner(mode),
        )

    def episode_runner(self, mode: Mode) -> EpisodeRunner | None:
        """Returns the generator function of a mode's episodes; None = one completion each."""
        if mode in self._episode_runners:
            return self._episode_runners[mode]
        if self.cluster.rollout_for(mode).agent is None:
            runner = make_episode_runner(self.cluster, mode, self.encoder(mode), self.failures)
        else:
            self._agents[mode] = make_agent_episodes(self.cluster, mode, self.encoder(mode), self.failures)
            runner = self._agents[mode].run_episode
        self._episode_runners[mode] = runner
        return runner

    def encoder(self, mode: Mode) -> PromptEncoder:
        """Returns the encoder of a mode: it turns rows into prompts, and an environment's messages into tokens."""
        if mode not in self.encoders:
            tools = None if (script := self.environments[mode]) is None else script.tools
            self.encoders[mode] = self.cluster.encoder(mode, data=self.data, tools=tools)
        return self.encoders[mode]

    def reward(self, step: Step) -> Step:
        """Calls the reward functions on the completions, and in a second call on the greedy ones, if there are any.

        Where several processes train, each rewards a part of the groups.
        Reads: groups, mode. Writes: rewards.
        Raises: RewardError: a function failed, or the infrastructure of too many episodes did.
        """
        if step.mode is Mode.TRAIN:
            self.failures.check_share(step.groups)

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

    def select_groups(self, run: Run, step: Step) -> Step:
        """Selects the groups that are trained on: here all of them. `run.next_batch()` returns further prompts.

        Reads: nothing. Writes: nothing.
        """
        return step

    def batch(self, step: Step) -> Step:
        """Lays the completions of all groups end to end.

        Reads: groups, rewards. Writes: batch, metrics.
        """
        return step.replace(batch=TokenBatch.from_groups(step.groups)).log(completion_metrics(step.rewards))

    def score(self, step: Step) -> Step:
        """Adds the columns that the loss compares with: old and reference log-probabilities, values.

        Reads: batch. Writes: nothing.
        """
        raise NotImplementedError

    def assign_advantages(self, step: Step) -> Step:
        """Turns rewards into an advantage for each token of the batch.

        Reads: batch, rewards. Writes: batch.advantages.
        """
        raise NotImplementedError

    def update(self, step: Step, mini: TokenBatch) -> Step:
        """Takes one optimizer step on a mini-batch of the step; see PolicyLearner.

        Reads: nothing. Writes: metrics.
        """
        raise NotImplementedError

    def after_step(self, run: Run, step: Step) -> None:
        """Logs the step, then evaluates and saves where they are due.

        Reads: index, mode, rewards, batch, batch.advantages, metrics. Writes: nothing.
        """
        row = {**flat({**step.metrics, **total_metrics(step.rewards)}), **self.extra_metrics(step)}
        run.end_step(step, row, num_tokens=step.batch.num_tokens)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the learner's own state between two steps (an adaptive coefficient, a count), for checkpoints.

        Returns: plain numbers, strings, tensors, and lists, tuples and dicts of them.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, before the first step of a resumed run."""

    # ---- properties and mini-batches -----------------------------------------------------------------------------

    @property
    def num_generations(self) -> int:
        """G: completions of each prompt in training."""
        return 1

    @property
    def needs_greedy(self) -> bool:
        """Whether training also draws a greedy completion of each prompt, which is rewarded and not trained on."""
        return False

    @property
    def learns_from_rewards(self) -> bool:
        """Whether only tokens with an advantage are learned from. If so, the run warns of steps that have none."""
        return True

    def num_generations_of(self, mode: Mode) -> int:
        """Returns completions of each prompt in a mode. Default of an evaluation: 1 if it is greedy, else as in
        training.
        """
        if mode is Mode.TRAIN:
            return self.num_generations
        config = self.cluster.rollout_for(mode)
        return config.num_generations_eval or (1 if config.temperature == 0 else self.num_generations)

    def num_updates(self, num_groups: int) -> int:
        """Optimizer steps in a step of `num_groups` groups: passes times mini-batches."""
        return self.num_iterations * -(-num_groups // (self.config.mini_batch_size or num_groups))

    def total_updates(self, role: Role, steps: int, num_groups: int) -> int:
        """Optimizer steps of a role in `steps` steps of `num_groups` groups: the length of its schedule."""
        return steps * self.num_updates(num_groups)

    def planned_passes(self, num_groups: int) -> dict[str, str]:
        """Returns the passes of a step besides rollout and update, and the passes that it skips: name -> "runs:
        reason".
        """
        return {}

    def minibatches(self, step: Step) -> Iterator[TokenBatch]:
        """Yields the mini-batches of a step: num_iterations passes over its groups, mini_batch_size groups each.

        Groups stay whole. Where the number of groups is not a multiple of mini_batch_size (prompts were dropped as too
        long, or the data's last batch is short), the last mini-batch is smaller and weighted by its own tokens.
        Reads: index, batch. Writes: nothing.
        """
        batch = step.batch
        num_groups = batch.num_groups
        size = self.config.mini_batch_size or num_groups
        group_of_sequence = batch.group_of.index_select(0, batch.trajectory_of)
        for iteration in range(self.num_iterations):
            order = torch.arange(num_groups)
            if self.data_shuffle_seed is not None:
                seed = (self.data_shuffle_seed * 1_000_003 + step.index) * 1_009 + iteration
                order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed % 2**63))
            for groups in order.split(size):
                yield batch.select(torch.isin(group_of_sequence, groups).nonzero().flatten())

    @property
    def num_iterations(self) -> int:
        """Passes over the samples of a step (mu)."""
        return 1

    def extra_metrics(self, step: Step) -> dict[str, float]:
        """Returns the metrics of a training step that no stage logs: those of the metric functions."""
        return aggregate_metrics(self.call_metric_fns(step)) if step.mode is Mode.TRAIN else {}

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

        Args: eval_ds: rows or batches. step: the number under which the completions are drawn and stored.
        Returns: the metrics of rewards and completions, name -> number.
        """
        return self.new_run(None, eval_ds).evaluate(step)
