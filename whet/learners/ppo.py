"""PPOLearner: proximal policy optimisation with a critic.

    r_t = −β KL_t, plus the reward at the last token                     beta, kl_loss_mode, kl_type; the rewards
    A_t = Σ_k (γλ)^k (r_{t+k} + γ V_{t+k+1} − V_{t+k}), whitened         gamma, gae_lambda, whiten_advantages
    R_t = A_t + V_t, before whitening                                    the critic's target: value_loss_fn
    l_t = −min(ρ_t A_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) A_t) − c H_t    policy_loss_fn, per token; ρ_t = π / π_old
    + c_v (value loss)_t, where the critic is a head on the actor's backbone (critic="actor")            vf_coef

Completions without a reward teach neither actor nor critic. A critic with a model of its own leaves their tokens out of
its mean, under value_loss_agg_mode. On a shared backbone the value loss has the weights of the policy's tokens, which
count those tokens, so there it weighs less by their share. The logged means of the value loss are over tokens with a
reward in both cases.

It differs from PolicyLearner in `score` (the critic's values), `assign_advantages` (the critic's returns) and `update`
(the critic's updates, without the actor's in the first steps).

Source: PPO arXiv:1707.06347; agrees with Tunix's PPOLearner, with these differences: rewards stay fractions, evaluation
has its own sampling parameters, reward functions and a reward model may be used together, and a clip range of 0 clips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.cluster import RLCluster
from whet.config import DataConfig, PPOConfig, Role
from whet.config.base import check_instance, check_keywords
from whet.errors import ConfigError
from whet.learners.from_config import advantage_inputs, bind_fields, other_field
from whet.learners.kl_penalty import kl_penalty_in_advantage, sampled_kl
from whet.learners.policy import PolicyLearner, sequences_with_trained_tokens
from whet.learners.step import Step
from whet.learners.step_metrics import advantage_metrics, average_over_known, value_metrics
from whet.metrics import Mean
from whet.ops import LOSS_AGG_MODES, VALUE_LOSSES, advantages_and_returns, estimate, whiten_trained
from whet.rewards.reward_batch import RewardBatch
from whet.run.observer import Observer
from whet.train.metric_reduction import Metrics
from whet.types import LossInputs, TokenBatch
from whet.util.references import resolve_name

__all__ = ["PPOLearner", "add_has_reward"]

_METRICS = {
    "return": {"return_mean": "mean"},
    "vf_clipfrac": "mean",
    "vf_loss": "mean",
    "vpred": {"vpred_mean": "mean"},
}
"""How the value loss's metrics are named and reduced, under critic/: Tunix's names."""


class PPOLearner(PolicyLearner):
    """Trains the actor by PPO, and a critic with it: see RLLearner for the arguments.

    Args:
        cluster: with a critic; with a reference where beta is not 0.
        ppo_config, algo_config: the algorithm's configuration, under one of its two names.
        reward_fns: as RLLearner's; None where the cluster has a reward model.
    Raises: ConfigError: no critic, no reward, no reference where beta asks for one; what PolicyLearner refuses.

    Example: PPOLearner(cluster, PPOConfig(beta=0.0), reward_fns=[exact]).train(rows)
    """

    CONFIG = PPOConfig
    algo_config: PPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @check_keywords
    def __init__(
        self,
        cluster: RLCluster,
        ppo_config: PPOConfig | None = None,
        reward_fns: Any = None,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        algo_config: PPOConfig | None = None,
        data: DataConfig | None = None,
        settings: Any = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        configs = [c for c in (ppo_config, algo_config) if c is not None]
        if len(configs) != 1:
            raise ConfigError("PPOLearner takes ppo_config= or algo_config=, which are the same: give one of them")
        config = check_instance(configs[0], PPOConfig, "ppo_config" if algo_config is None else "algo_config")
        self.shares_backbone = Role.CRITIC not in cluster.workers
        if self.shares_backbone and cluster.actor.loaded.score_head is None:
            raise ConfigError(
                "PPO requires a critic model; pass RLCluster(critic=...), for example the actor's folder, or "
                'critic="actor" for a score head on the actor\'s backbone'
            )
        if self.shares_backbone and config.critic_warmup_steps:
            raise ConfigError(
                f"algo.critic_warmup_steps={config.critic_warmup_steps} trains only the critic, and this one shares "
                "the actor's backbone; set 0, or give the critic a model of its own"
            )
        for name, usual in (("critic_updates", 1), ("value_loss_agg_mode", "token-mean")):
            if self.shares_backbone and getattr(config, name) != usual:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r} is for a critic with a model of its own; this one shares the "
                    f"actor's updates: leave it at {usual!r}"
                )
        rollout = cluster.rollout_for()
        if not reward_fns and Role.REWARD not in cluster.workers and rollout.env_path is None and rollout.agent is None:
            raise ConfigError(
                "PPO requires one of `reward_fns` or a reward model to be set; give the learner reward_fns=[...], or "
                "pass RLCluster(reward=...)"
            )
        super().__init__(
            cluster,
            config,
            reward_fns,
            metric_fns,
            data_shuffle_seed,
            data=data,
            settings=settings,
            observers=observers,
        )
        value_loss = resolve_name(config.value_loss_fn, VALUE_LOSSES, "value loss", hint=other_field)
        self.value_loss = bind_fields(value_loss, config)
        if self.shares_backbone:
            self.skips_without_signal = False  # a sequence without an advantage has values to learn
            named = {f"critic/{name}": _under_critic(name, how) for name, how in _METRICS.items()}
            cluster.actor_trainer.set_metric_reductions({**named, **cluster.actor_trainer.reductions})
            return
        self.critic_trainer = cluster.critic_trainer
        mode = resolve_name(config.value_loss_agg_mode, LOSS_AGG_MODES, "value_loss_agg_mode", hint=other_field)
        self.critic_trainer.set_loss(self._critic_loss, loss_agg_mode=mode, loss_agg_units=config.loss_agg_units)
        self.critic_trainer.set_metric_reductions({**_METRICS, **self.critic_trainer.reductions})

    # ---- the stages ----------------------------------------------------------------------------------------------

    def score(self, step: Step) -> Step:
        """Adds the columns of PolicyLearner, and the critic's values of the states before each token.

        Reads: nothing. Writes: batch.values.
        """
        step = super().score(step)
        with self.cluster.trace.span("values"):
            values = self.cluster.critic_worker.values(step.batch)
        return step.replace(batch=step.batch.replace(values=values))

    def assign_advantages(self, step: Step) -> Step:
        """Adds the estimator's advantages, and the returns that the critic learns: generalised with every estimator.

        Reads: nothing. Writes: batch.returns, batch.has_reward.
        """
        c = self.algo_config
        x = advantage_inputs(step.batch, step.rewards, clip=c.reward_clip_range)
        advantages, returns = advantages_and_returns(x, gamma=c.gamma, gae_lambda=c.gae_lambda)
        if c.advantage_estimator == "gae":
            advantages = estimate(lambda x: whiten_trained(x, advantages) if c.whiten_advantages else advantages, x)
        else:
            advantages = estimate(self.estimator, x)
        batch = step.batch.replace(advantages=advantages, returns=returns.float())
        batch = add_has_reward(kl_penalty_in_advantage(c, batch, self.kl_controller.beta), step.rewards)
        step = step.replace(batch=batch).log(advantage_metrics(batch)).log(value_metrics(x, batch))
        if c.beta and c.kl_type == "reward":
            penalty = sampled_kl(c, batch, -self.kl_controller.beta)[batch.mask].double()
            step = step.log({"rewards/reward_kl_penalty": Mean(float(penalty.sum()), len(penalty))})
        return step

    def update(self, step: Step, mini: TokenBatch) -> Step:
        """Updates the critic on every trained token with a reward, and the actor after critic_warmup_steps.

        Reads: index, batch.values, batch.returns, batch.has_reward. Writes: nothing.
        """
        if self.shares_backbone:
            return super().update(step, mini)
        self.cluster.release_engine_memory()
        with self.cluster.trace.span("update_critic"):
            for part in _split_mini_batch(mini, self.algo_config.critic_updates):
                rewarded = part.replace(mask=part.mask & (part.need("has_reward") > 0))
                step = step.log(self.critic_trainer.update(rewarded, select=sequences_with_trained_tokens))
        return step if step.index <= self.algo_config.critic_warmup_steps else super().update(step, mini)

    def _critic_loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the value loss at each token, [s], and its metrics, if it has any."""
        result = self.value_loss(x)
        return result if isinstance(result, tuple) else (result, {})

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the policy's loss at each token, plus the value loss where the critic shares its backbone."""
        loss, metrics = super().loss(x)
        if not self.shares_backbone:
            return loss, metrics
        value_loss, value_metrics = self._critic_loss(x)
        has_reward = x.need("has_reward")
        metrics |= {f"critic/{name}": value * has_reward for name, value in value_metrics.items()}
        return loss + self.algo_config.vf_coef * value_loss * has_reward, metrics

    def _adjust_metrics(self, metrics: Metrics, mini: TokenBatch, selected: TokenBatch) -> Metrics:
        """As PolicyLearner's; the means of a shared critic's metrics are over tokens (sequences) with a reward."""
        if self.shares_backbone:
            reductions = self.cluster.actor_trainer.reductions
            metrics = average_over_known(metrics, "critic/", selected, selected.need("has_reward") > 0, reductions)
        return super()._adjust_metrics(metrics, mini, selected)

    # ---- properties ----------------------------------------------------------------------------------------------

    def total_updates(self, role: Role, steps: int, num_groups: int) -> int:
        """Optimizer steps of a role. The actor makes none in the critic's warm-up; the critic may make several for each
        of the actor's.
        """
        if role is not Role.ACTOR:
            size = self.config.mini_batch_size or num_groups
            sizes = [min(size, num_groups - start) for start in range(0, num_groups, size)]
            each = sum(len(_split_evenly(n, self.algo_config.critic_updates)) for n in sizes)
            return steps * self.num_iterations * each
        warmup = min(steps, self.algo_config.critic_warmup_steps)
        return super().total_updates(role, steps - warmup, num_groups)

    def planned_passes(self, num_groups: int) -> dict[str, str]:
        """Returns the passes of a step besides rollout and updates, and the passes that it skips, each with the
        reason.
        """
        passes = {**super().planned_passes(num_groups), "values": "runs: the critic's, for advantages and returns"}
        if self.shares_backbone:
            passes["loss"] += f" + {self.algo_config.vf_coef} * value loss"
            passes["completions with advantage 0"] = "run: their values are learned"
        if n := self.algo_config.critic_warmup_steps:
            passes["update of the actor"] = f"skipped in the first {n} steps: critic_warmup_steps"
        return passes


def _split_evenly(count: int, parts: int) -> list[range]:
    """Splits `count` items, in order, into at most `parts` ranges; all but the last have one size.

    >>> _split_evenly(5, 4)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    size = -(-count // parts)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _split_mini_batch(mini: TokenBatch, parts: int) -> Iterator[TokenBatch]:
    """Splits a mini-batch into at most `parts` parts of whole groups."""
    group_of = mini.group_of.index_select(0, mini.trajectory_of)
    for groups in _split_evenly(mini.num_groups, parts):
        yield mini.select(((group_of >= groups.start) & (group_of < groups.stop)).nonzero().flatten())


def add_has_reward(batch: TokenBatch, rewards: RewardBatch) -> TokenBatch:
    """Returns the batch with the column has_reward [S]: 1 where the trajectory has a reward to learn from, else 0."""
    known = torch.from_numpy(~np.isnan(rewards.total))
    return batch.with_token_columns(has_reward=known.index_select(0, batch.trajectory).float())


def _under_critic(name: str, how: str | Mapping[str, str]) -> dict[str, str]:
    """Returns how a metric of the value loss is named and reduced where the actor's trainer reports it."""
    labels = {name: how} if isinstance(how, str) else how
    return {f"critic/{label}": reduction for label, reduction in labels.items()}
