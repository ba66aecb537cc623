"""PolicyLearner: trains the actor on advantages from a configured estimator. PPOLearner adds a critic.

    l_t = surrogate_t · Π factors_t + β KL_t − c H_t     policy_loss_fn, sampler_is and loss_masks, kl_loss_mode
    L   = Σ_t w_t l_t                                    loss_agg_mode, as weights w made once per mini-batch

Old log-probabilities are those of the start of the step, also where trainer and engine share weights. Sequences without
signal are not run. Tunix's GRPOLearner differs in both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from whet.cluster import RLCluster
from whet.config import DataConfig, PolicyConfig, Role
from whet.config.base import check_instance, check_keywords
from whet.errors import ConfigError, EngineError, raise_all
from whet.learners.base import RLLearner
from whet.learners.config_warnings import warn_about_config
from whet.learners.dynamic_sampling import check_dynamic_sampling, refill_groups
from whet.learners.from_config import (
    advantage_inputs,
    describe_objective,
    make_estimator,
    make_objective,
    objective_checks,
    resolve_name,
)
from whet.learners.kl_controller import MEASURED_ENTROPY, KLController
from whet.learners.kl_penalty import kl_penalty_in_advantage, kl_penalty_in_reward
from whet.learners.sampler_mismatch import add_ess, compare_sampler
from whet.learners.step import Step
from whet.learners.step_metrics import (
    advantage_metrics,
    average_over_known,
    average_over_mini_batch,
    skipped_metrics,
)
from whet.learners.teacher import check_teacher, divergence_from, with_teacher
from whet.learners.token_stats import TokenStatsRecorder
from whet.ops import (
    LOSS_AGG_MODES,
    entropy_rank,
    estimate,
    high_entropy_mask,
    masked_column,
    metrics_without_advantage,
    needs_greedy_rewards,
    off_policy_mask,
    sampler_kl_mask,
    sampler_rejection,
    sampling_metrics,
    segment_sum,
    teacher_column,
)
from whet.run.observer import Observer
from whet.run.run import Run
from whet.train.metric_reduction import Metrics, metric_labels
from whet.types import LossInputs, TokenBatch

__all__ = ["PolicyLearner", "sequences_with_signal", "sequences_with_trained_tokens"]

log = logging.getLogger("whet")

_METRICS = {
    "clip_ratio/high": {"clip_ratio/high_mean": "mean", "clip_ratio/high_max": "sequence_max"},
    "clip_ratio/low": {"clip_ratio/low_mean": "mean", "clip_ratio/low_min": "sequence_min"},
    "clip_ratio/region": {"clip_ratio/region_mean": "mean"},
    "entropy": {"entropy": "weighted", MEASURED_ENTROPY: "mean"},
    "is_ratio": ("mean", "max", "min"),
    "kl": {"kl": "mean", "kl_loss": "weighted"},
    "log_ratio_abs": {"log_ratio/abs_mean": "mean"},
    "pg_clipfrac_lower": "weighted",
    "pg_loss": {"pg_loss/surrogate_mean": "mean"},
    "pg_loss/clipped": {"pg_loss/clipped_mean": "mean"},
    "pg_loss/corrected": {"unreduced_pg_loss": "weighted", "reduced_pg_loss": "weighted"},
    "pg_loss/unclipped": {"pg_loss/unclipped_mean": "mean"},
    "sampling/sampling_logp_difference": ("mean", "max"),
    "sequence_cispo_clip_ratio": {"cispo_clip_ratio": "sequence_mean"},
    "sequence_clip_ratio/high": {"clip_ratio/high_mean": "sequence_mean", "clip_ratio/high_max": "sequence_max"},
    "sequence_clip_ratio/low": {"clip_ratio/low_mean": "sequence_mean", "clip_ratio/low_min": "sequence_min"},
    "sequence_clip_ratio/region": {"clip_ratio/region_mean": "sequence_mean"},
    "vespo/phi_seq_mean": "sequence_mean",
}
"""How the loss's metrics are named and reduced: Tunix's names with Tunix's meaning, else TRL's with TRL's."""
_ON_POLICY = ("sampling/sampling_logp_difference",)
"""Metrics of only the first update after a rollout. Later the difference contains the change of the weights too."""


class PolicyLearner(RLLearner):
    """Trains the actor on advantages: see RLLearner for the arguments.

    Raises: ConfigError: beta is not 0 and the cluster has no reference; an unknown loss, estimator or aggregation.
    """

    CONFIG: ClassVar[type[PolicyConfig]] = PolicyConfig
    """The class of algo_config, or a base of it."""

    algo_config: PolicyConfig

    @check_keywords
    def __init__(
        self,
        cluster: RLCluster,
        algo_config: PolicyConfig,
        reward_fns: Any,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        data: DataConfig | None = None,
        settings: Any = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        check_instance(algo_config, self.CONFIG, "algo_config")
        raise_all(objective_checks(algo_config))
        super().__init__(
            cluster,
            algo_config,
            reward_fns,
            metric_fns,
            data_shuffle_seed,
            data=data,
            settings=settings,
            observers=observers,
        )
        c = algo_config
        self.estimator = make_estimator(c)
        self.objective = make_objective(c)
        self.kl_controller = KLController(c)
        self.teacher_column = teacher_column(self.objective.surrogate)
        self.token_stats = TokenStatsRecorder(self.config, cluster.ranks.all_gather)
        self.check(cluster)
        self.zero_metrics = metrics_without_advantage(self.objective.surrogate)
        self.skips_without_signal = not (
            self.zero_metrics is None or self.needs_reference or self.kl_controller.has_entropy_bonus
        )
        mode = resolve_name(c.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
        norm = c.loss_agg_norm
        if norm is None and c.loss_agg_mode == "sequence-mean-token-scale":
            norm = float(cluster.rollout_for().most_tokens)
        trainer = cluster.actor_trainer
        trainer.set_loss(
            self.loss,
            loss_agg_mode=mode,
            loss_agg_norm=norm,
            loss_agg_units=c.loss_agg_units,
            entropy=True,
            divergence=divergence_from(cluster, c.gkd_beta) if self.teacher_column == "divergence" else None,
        )
        trainer.set_metric_reductions({**_METRICS, **trainer.reductions}, on_policy=_ON_POLICY)
        for worker in cluster.workers.values():
            worker.set_max_sequences(
                training=self._num_sequences(self.config.train_micro_batch_size),
                reading=self._num_sequences(self.config.compute_logps_micro_batch_size),
            )

    @property
    def records_sampler(self) -> bool:
        """Whether batch.sampler_logprobs are of the policy that sampled."""
        return self.cluster.engine.caps.logprobs

    def check(self, cluster: RLCluster) -> None:
        """Raises ConfigError where cluster and configuration don't fit; warns of settings that rarely make sense."""
        c = self.algo_config
        check_dynamic_sampling(self, c, self.config.max_steps)
        if self.needs_reference and Role.REFERENCE not in cluster.workers:
            raise ConfigError(
                f"algo.beta={c.beta}, algo.force_compute_kl={c.force_compute_kl}: the KL needs a reference model; pass "
                "RLCluster(reference=...), or set algo.beta=0.0 and algo.force_compute_kl=False"
            )
        if self.needs_greedy and self.episode_reward is not None:
            source = "rollout.agent" if cluster.rollout_for().agent is not None else "rollout.env_path"
            raise ConfigError(
                f"algo.advantage_estimator={c.advantage_estimator} compares with the reward of a greedy completion, to "
                f"which {source} gives none; choose another advantage_estimator"
            )
        if c.sync_ref_model and cluster.worker(Role.REFERENCE).loaded.is_view:
            raise ConfigError(
                "algo.sync_ref_model=True moves the reference, which here is a view of the actor (its adapter switched "
                "off); give RLCluster(reference=...) a model of its own, or set algo.sync_ref_model=False"
            )
        if self.needs_teacher:
            check_teacher(cluster, self.teacher_column or "", c.policy_loss_fn)
        compares = c.sampler_is is not None or self.objective.has(off_policy_mask, sampler_kl_mask, sampler_rejection)
        if compares and not cluster.engine.caps.logprobs:
            raise ConfigError(
                f"algo.sampler_is={c.sampler_is!r}, algo.loss_masks={list(c.loss_masks)}: the engine reports no "
                "logprobs to compare with; set algo.sampler_is=None and leave out off-policy, sampler-kl and "
                "sampler-rejection"
            )
        warn_about_config(c, cluster.rollout_for().max_tokens_to_generate)
        if c.policy_loss_fn == "reinforce" and c.sampler_is is None and not cluster.engine.caps.shared_weights:
            log.warning(
                "the engine computes other logprobs than the trainer, and policy_loss_fn='reinforce' has no ratio that "
                "corrects for it; set algo.sampler_is='token'"
            )

    def _num_sequences(self, prompts: int | None) -> int | None:
        """Returns the sequences of a micro-batch of `prompts` prompts."""
        return None if prompts is None else prompts * self.algo_config.num_generations

    # ---- the stages ----------------------------------------------------------------------------------------------

    def select_groups(self, run: Run, step: Step) -> Step:
        """Replaces groups by groups of further prompts: those without signal where dynamic_sampling is set, and those
        with an episode that failed where on_infrastructure_failure is "refill".

        Reads: index, prompts, groups, rewards, versions, metrics. Writes: prompts, groups, rewards, versions, metrics.
        """
        if not self.algo_config.dynamic_sampling and self.failures.on_infrastructure != "refill":
            return step
        return refill_groups(self, self.algo_config, step, run.next_batch)

    def batch(self, step: Step) -> Step:
        """Lays the completions end to end, and masks those of failed episodes, and truncated ones where
        mask_truncated_completions is set.

        Reads: groups, batch. Writes: batch.
        """
        step = super().batch(step)
        completions = [c for g in step.groups for c in g.completions]
        trained = torch.tensor([not c.has_failed for c in completions])
        if self.algo_config.mask_truncated_completions:
            trained &= torch.tensor([c.finish_reason != "length" for c in completions])
        if trained.all():
            return step
        batch = step.batch
        return step.replace(batch=batch.replace(mask=batch.mask & trained.index_select(0, batch.sequence)))

    def score(self, step: Step) -> Step:
        """Adds log-probabilities: the old ones (see `old_logprobs_from`), the reference's where beta is not 0, and a
        teacher's. With kl_type="reward" it subtracts the KL from `token_rewards`.

        Reads: index, batch, batch.token_rewards. Writes: batch.old_logprobs, batch.ref_logprobs,
        batch.teacher_logprobs, batch.sampler_is_mean, batch.token_rewards, metrics.
        """
        cluster, batch = self.cluster, self.token_stats.start(step.index, step.batch)
        cluster.release_engine_memory()
        source = self.old_logprobs_from(batch.num_groups, cluster.actor_trainer.stale_versions(batch))
        if source == "trainer":
            with cluster.trace.span("old_logprobs"):
                batch = batch.replace(old_logprobs=cluster.actor.logprobs(batch).logprobs)
            if cluster.engine.caps.logprobs:
                batch, metrics = compare_sampler(batch, self.algo_config)
                step = step.log(metrics)
        elif source == "sampler":
            batch = batch.replace(old_logprobs=batch.sampler_logprobs)
        if self.needs_reference:
            with cluster.trace.span("ref_logprobs"):
                batch = batch.replace(ref_logprobs=cluster.worker(Role.REFERENCE).logprobs(batch).logprobs)
        if self.needs_teacher:
            batch = with_teacher(cluster, batch, self.teacher_column or "")
        return step.replace(batch=kl_penalty_in_reward(self.algo_config, batch, self.kl_controller.beta))

    def old_logprobs_from(self, num_groups: int, stale: Sequence[int] = ()) -> Literal["trainer", "sampler", "nowhere"]:
        """Returns where old log-probabilities come from; "nowhere": none are needed, since the ratio is exactly 1.

        They are needed where several updates follow one rollout, where a trained token was drawn from an earlier policy
        version, and where the KL is that of the policy that sampled.
        Args: num_groups: of the step. stale: the policy versions of trained tokens that are not the actor's own now.
        Raises: EngineError: they are needed, and the engine reports no logprobs.
        """
        c, caps = self.algo_config, self.cluster.engine.caps
        if c.sampler_is is not None or self.objective.has(sampler_rejection) or not c.use_rollout_logps:
            return "trainer"
        updates, sampled_kl = self.num_updates(num_groups), self.kl_controller.needs_sampled_kl
        if caps.logprobs and (stale or updates > 1 or sampled_kl or not caps.shared_weights):
            return "sampler"
        if stale:
            raise EngineError(
                f"the rollout has tokens from the policy versions {', '.join(map(str, stale))}, the actor is at "
                f"{self.cluster.actor.version}, and the engine reports no logprobs; the engine must record the version "
                "passed to update(), or set algo.use_rollout_logps=False to recompute the logprobs"
            )
        if updates > 1:
            raise EngineError(
                "old_logprobs are not available for off-policy RL: the engine reports no logprobs and "
                f"{updates} updates follow each rollout; set algo.use_rollout_logps=False to recompute them"
            )
        if sampled_kl:
            raise EngineError(
                f"algo.kl_type={c.kl_type!r} and algo.target_kl={c.target_kl!r} take the KL of the policy that "
                "sampled, and the engine reports no logprobs; set algo.use_rollout_logps=False to recompute them"
            )
        return "nowhere"

    def planned_passes(self, num_groups: int) -> dict[str, str]:
        """Returns the passes of a step besides rollout and update, and the passes that it skips, each with the
        reason.
        """
        old = {
            "trainer": "runs: sampler_is, sampler-rejection or use_rollout_logps=false asks for the trainer's own",
            "sampler": "skipped: the sampler's are used",
            "nowhere": "skipped: one update follows each rollout, so the ratio is 1 (unless a token is stale)",
        }
        passes = {
            **describe_objective(self.algo_config),
            "old_logprobs": old[self.old_logprobs_from(num_groups)],
            "ref_logprobs": "runs: beta or force_compute_kl asks for it"
            if self.needs_reference
            else "skipped: beta is 0",
            "completions with advantage 0": (
                "skipped: they have no gradient; skipped/tokens counts their tokens"
                if self.skips_without_signal
                else "run: the KL, or a loss of your own, may have a gradient there"
            ),
        }
        if self.needs_teacher:
            how_often = "with each update" if self.teacher_column == "divergence" else "once"
            passes["teacher"] = f"runs {how_often}: policy_loss_fn learns from it"
        if self.objective.has(high_entropy_mask):
            passes["entropy"] = "runs: loss_masks=[top-entropy] asks for it, before each update"
        if self.needs_greedy:
            passes["a greedy completion of each prompt"] = "runs: advantage_estimator compares with its reward"
        if self.algo_config.mask_truncated_completions:
            reason = "skipped: masked out, so they weigh 0 in any loss; skipped/tokens counts their tokens"
            passes["truncated completions"] = reason
        return passes

    def assign_advantages(self, step: Step) -> Step:
        """Adds the advantages of the estimator, less the KL with kl_type="advantage".

        Reads: batch.token_rewards, batch.episode_rewards, batch.values, batch.old_logprobs, batch.ref_logprobs.
        Writes: metrics.
        """
        batch = step.batch
        x = advantage_inputs(batch, step.rewards, clip=self.algo_config.reward_clip_range)
        batch = batch.replace(advantages=estimate(self.estimator, x))
        batch = kl_penalty_in_advantage(self.algo_config, batch, self.kl_controller.beta)
        return step.replace(batch=batch).log(advantage_metrics(batch))

    def update(self, step: Step, mini: TokenBatch) -> Step:
        """Updates the actor. Sequences without a gradient are counted in the loss weights and not run.

        Reads: batch.advantages, batch.old_logprobs, batch.ref_logprobs, batch.sampler_is_mean, batch.teacher_logprobs,
        batch.weights. Writes: metrics.
        """
        self.cluster.release_engine_memory()
        mini = self.with_update_columns(mini)
        with self.cluster.trace.span("update"):
            select = sequences_with_signal if self.skips_without_signal else sequences_with_trained_tokens
            metrics = self.cluster.actor_trainer.update(mini, select=select, adjust_metrics=self._adjust_metrics)
            return step.log({**metrics, **self.kl_controller.after_update(metrics)})

    def with_update_columns(self, mini: TokenBatch) -> TokenBatch:
        """Returns a mini-batch with the columns that are made just before its update: entropy_rank, where a mask needs
        it.
        """
        if not self.objective.has(high_entropy_mask):
            return mini
        with self.cluster.trace.span("entropy"):
            entropy = self.cluster.actor.logprobs(mini, entropy=True).entropy
        assert entropy is not None
        return mini.with_token_columns(entropy_rank=entropy_rank(entropy, mini.mask))

    def _adjust_metrics(self, metrics: Metrics, mini: TokenBatch, selected: TokenBatch) -> Metrics:
        """Returns an update's metrics as those of the whole mini-batch. Args: selected: the part of it that was run."""
        reductions = self.cluster.actor_trainer.reductions
        if selected.sampler_logprobs is not None and self.records_sampler:
            metrics = average_over_known(metrics, "sampling/", selected, ~selected.sampler_logprobs.isnan(), reductions)
        zero = {k: how for name in self.zero_metrics or () for k, how in metric_labels(name, reductions).items()}
        metrics = average_over_mini_batch(add_ess(metrics), mini, selected, zero=zero)
        return {**skipped_metrics(mini, selected), **metrics}

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the objective of the configuration at each token, [s], and its metrics."""
        controller = self.kl_controller
        objective = replace(self.objective, beta=controller.loss_beta, entropy_coef=controller.loss_entropy_coef)
        loss, metrics = objective(x)
        if x.sampler_logprobs is not None and self.records_sampler:
            known = ~x.sampler_logprobs.isnan()
            metrics |= {name: torch.where(known, value, 0.0) for name, value in sampling_metrics(x).items()}
        else:
            metrics |= sampling_metrics(x, recorded=False)
        if x.entropy is not None:
            metrics["entropy"] = x.entropy.detach()
        self.token_stats.record(x)
        return loss, metrics

    def after_step(self, run: Run, step: Step) -> None:
        """Moves the coefficient of the KL and the reference, then logs, evaluates and saves.

        Reads: batch.old_logprobs, batch.ref_logprobs. Writes: nothing.
        """
        step = step.replace(batch=self.token_stats.finish(step.batch))
        step = step.log(self.kl_controller.after_step(step.batch))
        self.sync_ref_model(step.index)
        super().after_step(run, step)

    def sync_ref_model(self, step: int) -> None:
        """Moves the reference towards the policy at the end of a step, with sync_ref_model.

        π_ref ← α π + (1 − α) π_ref, on the weights, every ref_model_sync_steps steps. A step is one rollout, however
        many updates follow it.
        Args: step: counted from 1.
        Source: TR-DPO, arXiv:2404.09656; TRL's sync_ref_model, which counts optimizer steps. A step here has
            num_iterations times the mini-batches of a rollout of those.
        """
        c = self.algo_config
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            self.cluster.worker(Role.REFERENCE).load_weights(
                self.cluster.actor.named_weights(), mixup_alpha=c.ref_model_mixup_alpha
            )

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Returns the run, as RLLearner's. Raises ConfigError: a coefficient can't move, or checkpoints would not hold
        it.
        """
        labels = metric_labels("entropy", self.cluster.actor_trainer.reductions)
        if self.algo_config.use_adaptive_entropy and labels.get(MEASURED_ENTROPY) != "mean":
            raise ConfigError(
                f"algo.use_adaptive_entropy needs the metric {MEASURED_ENTROPY}, which set_metric_reductions has "
                f'replaced by {dict(labels)}; add "{MEASURED_ENTROPY}": "mean" to the labels of entropy'
            )
        if self.kl_controller.is_adaptive and "kl_controller" not in self.state():
            raise ConfigError(
                f"{type(self).__name__}.state() leaves out the coefficients that move (algo.target_kl, "
                "algo.use_adaptive_entropy); return {**super().state(), ...}, and call super().restore(state)"
            )
        return super().new_run(train_ds, eval_ds)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the coefficients, where one moves. A subclass adds its own: {**super().state(), ...}."""
        return {"kl_controller": self.kl_controller.state()} if self.kl_controller.is_adaptive else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`. Coefficients that did not move when it was saved are those of the configuration."""
        if "kl_controller" in state:
            self.kl_controller.restore(state["kl_controller"])

    # ---- properties ----------------------------------------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is read: for the loss, or as a metric."""
        return bool(self.algo_config.beta) or self.algo_config.force_compute_kl

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss learns from the cluster's teacher. A subclass that makes the column itself returns False."""
        return self.teacher_column is not None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether nothing is learned where no token has an advantage."""
        return self.teacher_column is None

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage estimator compares with a greedy completion."""
        return needs_greedy_rewards(self.estimator)

    @property
    def num_generations(self) -> int:
        """G: completions of each prompt in training."""
        return self.algo_config.num_generations

    @property
    def num_iterations(self) -> int:
        """Passes over the samples of a step (mu)."""
        return self.algo_config.num_iterations


def sequences_with_signal(batch: TokenBatch) -> Tensor:
    """Returns the sequences with a trained token whose advantage is not 0: Long [M]."""
    assert batch.advantages is not None
    size = segment_sum(masked_column(batch.advantages, batch.mask).abs(), batch.sequence, batch.num_sequences)
    return (size > 0).nonzero().flatten()


def sequences_with_trained_tokens(batch: TokenBatch) -> Tensor:
    """Returns the sequences with a trained token: Long [M]. All tokens of the others weigh 0 in any loss."""
    return batch.sequence[batch.mask].unique()
