"""PolicyLearner: what every learner does that trains the actor on advantages. Its subclasses say where those come from.

    l_t = surrogate_t · Π factors_t + β KL_t − c H_t     policy_loss_fn, sampler_is and loss_masks, kl_loss_mode
    L   = Σ_t w_t l_t                                    loss_agg_mode, as weights w made once per mini-batch

Old log-probabilities are those of the start of the step also where trainer and engine share weights, and sequences
without signal are not run.
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
from whet.config.base import check_instance
from whet.errors import ConfigError, EngineError, raise_all
from whet.learners.base import RLLearner
from whet.learners.config_warnings import warn_about_config
from whet.learners.dynamic_sampling import check_dynamic_sampling, refill_groups
from whet.learners.kl_controller import MEASURED_ENTROPY, KLController, move_reference
from whet.learners.objective import (
    advantage_inputs,
    describe_objective,
    make_estimator,
    make_objective,
    objective_checks,
    resolve_name,
)
from whet.learners.sampler_mismatch import compare_sampler, with_ess
from whet.learners.step import Step
from whet.learners.step_metrics import advantage_metrics, of_known, of_whole_batch, skipped_metrics
from whet.learners.teacher import check_teacher, divergence_from, with_teacher
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

__all__ = ["PolicyLearner", "trained", "with_signal"]

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
"""How far trainer and sampler are apart: once the weights have moved, how far those have moved is in it."""


class PolicyLearner(RLLearner):
    """Trains the actor on advantages: see RLLearner for the arguments.

    Raises: ConfigError: beta is not 0 and the cluster has no reference; an unknown loss, estimator or aggregation.
    """

    CONFIG: ClassVar[type[PolicyConfig]] = PolicyConfig
    """What algo_config is, or a class derived from it."""

    algo_config: PolicyConfig

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
        self.check(cluster)
        self.zero_metrics = metrics_without_advantage(self.objective.surrogate)
        self.skips = not (self.zero_metrics is None or self.needs_reference or self.kl_controller.has_entropy_bonus)
        mode = resolve_name(c.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
        norm = c.loss_agg_norm
        if norm is None and c.loss_agg_mode == "sequence-mean-token-scale":
            norm = float(cluster.rollout_for().most_tokens)
        trainer = cluster.actor_trainer
        trainer.with_loss_fn(
            self.loss,
            loss_agg_mode=mode,
            loss_agg_norm=norm,
            loss_agg_units=c.loss_agg_units,
            entropy=True,
            divergence=divergence_from(cluster, c.gkd_beta) if self.teacher_column == "divergence" else None,
        )
        trainer.with_rl_metrics_to_log({**_METRICS, **trainer.reductions}, on_policy=_ON_POLICY)
        for worker in cluster.workers.values():
            worker.set_max_sequences(
                training=self._sequences(self.config.train_micro_batch_size),
                reading=self._sequences(self.config.compute_logps_micro_batch_size),
            )

    def check(self, cluster: RLCluster) -> None:
        """Raises ConfigError where cluster and configuration don't fit; warns where nothing would be learned."""
        c = self.algo_config
        check_dynamic_sampling(self, c, self.config.max_steps)
        if self.needs_reference and Role.REFERENCE not in cluster.workers:
            raise ConfigError(
                f"algo.beta={c.beta}, algo.force_compute_kl={c.force_compute_kl}: the KL needs a reference model; pass "
                "RLCluster(reference=...), or set algo.beta=0.0 and algo.force_compute_kl=False"
            )
        if c.sync_ref_model and cluster.worker(Role.REFERENCE).loaded.is_view:
            raise ConfigError(
                "algo.sync_ref_model=True moves the reference, which here is a view of the actor (its adapter switched "
                "off); give RLCluster(reference=...) a model of its own, or set algo.sync_ref_model=False"
            )
        if self.needs_teacher:
            check_teacher(cluster, self.teacher_column or "", c.policy_loss_fn)
        compares = c.sampler_is is not None or self.objective.has(off_policy_mask, sampler_kl_mask, sampler_rejection)
        if compares and not cluster.rollout.caps.logprobs:
            raise ConfigError(
                f"algo.sampler_is={c.sampler_is!r}, algo.loss_masks={list(c.loss_masks)}: the engine reports no "
                "logprobs to compare with; set algo.sampler_is=None and leave out off-policy, sampler-kl and "
                "sampler-rejection"
            )
        warn_about_config(c, cluster.rollout_for().max_tokens_to_generate)

    def _sequences(self, prompts: int | None) -> int | None:
        """Sequences of a micro-batch of so many prompts."""
        return None if prompts is None else prompts * self.algo_config.num_generations

    # ---- the stages ----------------------------------------------------------------------------------------------

    def fill(self, run: Run, step: Step) -> Step:
        """Where dynamic_sampling is set, replaces groups that teach nothing by groups of further prompts."""
        if not self.algo_config.dynamic_sampling:
            return step
        return refill_groups(self, self.algo_config, step, run.next_batch)

    def batch(self, step: Step) -> Step:
        """The groups end to end, truncated completions masked where mask_truncated_completions is set."""
        step = super().batch(step)
        if not self.algo_config.mask_truncated_completions:
            return step
        batch = step.batch
        whole = torch.tensor([c.finish_reason != "length" for g in step.groups for c in g.completions])
        return step.replace(batch=batch.replace(mask=batch.mask & whole.index_select(0, batch.sequence)))

    def score(self, step: Step) -> Step:
        """Old log-probabilities where several updates follow one rollout, a token that is trained was drawn from an
        earlier policy, or the KL is of the policy that sampled; the reference's where beta is not 0; the KL in
        `token_rewards` where kl_type says so.
        """
        cluster, batch = self.cluster, step.batch
        source = self.old_logprobs_from(batch.num_groups, cluster.actor_trainer.stale_versions(batch))
        if source == "trainer":
            with cluster.trace.span("old_logprobs"):
                batch = batch.replace(old_logprobs=cluster.actor.logprobs(batch).logprobs)
            if cluster.rollout.caps.logprobs:
                batch, found = compare_sampler(batch, self.algo_config)
                step = step.log(found)
        elif source == "sampler":
            batch = batch.replace(old_logprobs=batch.sampler_logprobs)
        if self.needs_reference:
            with cluster.trace.span("ref_logprobs"):
                batch = batch.replace(ref_logprobs=cluster.worker(Role.REFERENCE).logprobs(batch).logprobs)
        if self.needs_teacher:
            batch = with_teacher(cluster, batch, self.teacher_column or "")
        return step.replace(batch=self.kl_controller.in_reward(batch))

    def old_logprobs_from(self, num_groups: int, stale: Sequence[int] = ()) -> Literal["trainer", "sampler", "nowhere"]:
        """Where old log-probabilities come from; "nowhere": none are needed, the ratio is exactly 1.

        Args: num_groups: of the step. stale: the policy versions of trained tokens, other than the actor's own now.
        Raises: EngineError: several updates follow a rollout of an engine that reports no logprobs, or tokens are
            stale.
        """
        c, caps = self.algo_config, self.cluster.rollout.caps
        if c.sampler_is is not None or self.objective.has(sampler_rejection) or not c.use_rollout_logps:
            return "trainer"
        updates, sampled_kl = self.num_updates(num_groups), self.kl_controller.needs_sampled_kl
        if caps.logprobs and (stale or updates > 1 or sampled_kl or not caps.shared_weights):
            return "sampler"
        if stale:
            raise EngineError(
                f"the rollout has tokens from policy version(s) {', '.join(map(str, stale))}, the actor is at "
                f"{self.cluster.actor.version}, and the engine reports no logprobs; the engine must record the version "
                "passed to update(), or set algo.use_rollout_logps=False to recompute the logprobs"
            )
        if updates > 1:
            raise EngineError(
                "old_per_token_logps is not available for off-policy RL: the engine reports no logprobs and "
                f"{updates} updates follow each rollout; set algo.use_rollout_logps=False to recompute them"
            )
        if sampled_kl:
            raise EngineError(
                f"algo.kl_type={c.kl_type!r} and algo.target_kl={c.target_kl!r} take the KL of the policy that "
                "sampled, and the engine reports no logprobs; set algo.use_rollout_logps=False to recompute them"
            )
        return "nowhere"

    def planned_passes(self, num_groups: int) -> dict[str, str]:
        """What a step runs besides rollout and update, and what it leaves out, each with the reason."""
        old = {
            "trainer": "runs: sampler_is, sampler-rejection or use_rollout_logps=false asks for the trainer's own",
            "sampler": "skipped: the sampler's serve",
            "nowhere": "skipped: one update follows each rollout, so the ratio is 1 (unless a token is stale)",
        }
        found = {
            **describe_objective(self.algo_config),
            "old_logprobs": old[self.old_logprobs_from(num_groups)],
            "ref_logprobs": "runs: beta or force_compute_kl asks for it"
            if self.needs_reference
            else "skipped: beta is 0",
            "completions with advantage 0": (
                "skipped: they have no gradient; skipped/tokens counts theirs"
                if self.skips
                else "run: the KL, or a loss of your own, may have a gradient there"
            ),
        }
        if self.needs_teacher:
            each = "with each update" if self.teacher_column == "divergence" else "once"
            found["teacher"] = f"runs {each}: policy_loss_fn learns from it"
        if self.objective.has(high_entropy_mask):
            found["entropy"] = "runs: loss_masks=[top-entropy] asks for it, before each update"
        if self.needs_greedy:
            found["a greedy completion of each prompt"] = "runs: advantage_estimator compares with its reward"
        if self.algo_config.mask_truncated_completions:
            why = "skipped: masked out, so they weigh 0 in any loss; skipped/tokens counts theirs"
            found["truncated completions"] = why
        return found

    def assign_advantages(self, step: Step) -> Step:
        """An advantage for each token: the estimator's, of whole trajectories or of tokens."""
        batch = step.batch
        x = advantage_inputs(batch, step.rewards, clip=self.algo_config.reward_clip_range)
        batch = batch.replace(advantages=estimate(self.estimator, x))
        batch = self.kl_controller.in_advantage(batch)
        return step.replace(batch=batch).log(advantage_metrics(batch))

    def update(self, step: Step, mini: TokenBatch) -> Step:
        """Updates the actor; sequences that have no gradient are weighed and not run."""
        self.cluster.release_engine_memory()
        mini = self._ranked(mini)
        with self.cluster.trace.span("update"):
            select = with_signal if self.skips else trained
            found = self.cluster.actor_trainer.update(mini, select=select, adjust_metrics=self._of_whole)
            return step.log({**found, **self.kl_controller.after_update(found)})

    def _ranked(self, mini: TokenBatch) -> TokenBatch:
        """The mini-batch with the column entropy_rank, of the policy as it is, where a mask asks for it."""
        if not self.objective.has(high_entropy_mask):
            return mini
        with self.cluster.trace.span("entropy"):
            entropy = self.cluster.actor.logprobs(mini, entropy=True).entropy
        assert entropy is not None
        return mini.with_token_columns(entropy_rank=entropy_rank(entropy, mini.mask))

    def _of_whole(self, found: Metrics, whole: TokenBatch, run: TokenBatch) -> Metrics:
        reductions = self.cluster.actor_trainer.reductions
        if run.sampler_logprobs is not None and self.cluster.rollout.caps.logprobs:
            found = of_known(found, "sampling/", run, ~run.sampler_logprobs.isnan(), reductions)
        zero = {k: how for name in self.zero_metrics or () for k, how in metric_labels(name, reductions).items()}
        return {**skipped_metrics(whole, run), **of_whole_batch(with_ess(found), whole, run, zero=zero)}

    def loss(self, x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective at each token, as the configuration composes it: [s], and its metrics."""
        controller = self.kl_controller
        objective = replace(self.objective, beta=controller.loss_beta, entropy_coef=controller.loss_entropy_coef)
        loss, metrics = objective(x)
        if x.sampler_logprobs is not None and self.cluster.rollout.caps.logprobs:
            known = ~x.sampler_logprobs.isnan()
            metrics |= {name: torch.where(known, value, 0.0) for name, value in sampling_metrics(x).items()}
        else:
            metrics |= sampling_metrics(x, recorded=False)
        if x.entropy is not None:
            metrics["entropy"] = x.entropy.detach()
        return loss, metrics

    def after_step(self, run: Run, step: Step) -> None:
        """Moves the coefficient of the KL and the reference, then logs, evaluates and saves."""
        step = step.log(self.kl_controller.after_step(step.batch))
        move_reference(self.cluster, self.algo_config, step.index)
        super().after_step(run, step)

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """As RLLearner.new_run. Raises ConfigError: a coefficient would not move, or checkpoints would not hold it."""
        labels = metric_labels("entropy", self.cluster.actor_trainer.reductions)
        if self.algo_config.use_adaptive_entropy and labels.get(MEASURED_ENTROPY) != "mean":
            raise ConfigError(
                f"algo.use_adaptive_entropy goes by the metric {MEASURED_ENTROPY}, which with_rl_metrics_to_log has "
                "taken "
                f'away: {dict(labels)}; add "{MEASURED_ENTROPY}": "mean" to what entropy is logged as'
            )
        if self.kl_controller.moves and "kl_controller" not in self.state():
            raise ConfigError(
                f"{type(self).__name__}.state() leaves out the coefficients that move (algo.target_kl, "
                "algo.use_adaptive_entropy); return {**super().state(), ...}, and call super().restore(state)"
            )
        return super().new_run(train_ds, eval_ds)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The coefficients, where one moves; a learner of your own adds to them: {**super().state(), ...}."""
        return {"kl_controller": self.kl_controller.state()} if self.kl_controller.moves else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`. Coefficients that did not move when it was saved are those of the configuration."""
        if "kl_controller" in state:
            self.kl_controller.restore(state["kl_controller"])

    # ---- what the configuration implies --------------------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is read: for the loss, or as a metric."""
        return bool(self.algo_config.beta) or self.algo_config.force_compute_kl

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss learns from the cluster's teacher; a learner that brings the column itself says False."""
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


def with_signal(batch: TokenBatch) -> Tensor:
    """The sequences with a trained token whose advantage is not 0: Long [M]."""
    assert batch.advantages is not None
    size = segment_sum(masked_column(batch.advantages, batch.mask).abs(), batch.sequence, batch.num_sequences)
    return (size > 0).nonzero().flatten()


def trained(batch: TokenBatch) -> Tensor:
    """The sequences with a token that is trained: Long [M]. All tokens of the others weigh 0, whatever the loss."""
    return batch.sequence[batch.mask].unique()
