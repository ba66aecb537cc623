"""PreferenceLearner, DPO and its relatives, and RewardModelLearner, on the loop of supervised training.

`score` adds the reference's log-probabilities, and the statistics of the whole step that a loss reads. A loss declares
its needs (ops.preference.Needs): pairs or rows with a label, a reference, a pass of the policy before the update,
mismatched rows, and numbers that it keeps between two steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.config import Mode, PreferenceConfig, RewardModelConfig, Role
from whet.config.base import check_instance
from whet.config.model import REWARD_LR
from whet.data.encoder import Encoder
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder, UnpairedEncoder
from whet.errors import ConfigError, DataError
from whet.learners.preference_from_config import (
    describe_preference_objective,
    make_preference_objective,
    make_reward_loss,
)
from whet.learners.step import ExampleStep
from whet.learners.supervised import ROWS_AT_ONCE, SupervisedLearner
from whet.learners.supervised_task import SupervisedTask
from whet.metrics import Last, Mean, Metric
from whet.ops.preference import REWARD_REDUCTIONS, StepPasses, mismatched_rows
from whet.run.run import Run
from whet.train.supervised_models import SupervisedModels
from whet.train.worker import ModelWorker
from whet.types import Example, TokenBatch

__all__ = ["PreferenceLearner", "RewardModelLearner"]

log = logging.getLogger("whet")


class RewardModelLearner(SupervisedLearner[RewardModelConfig]):
    """Trains a model to give the better answer of a pair the higher score.

    Args: models: of a reward_model. data, settings, observers: as of SupervisedLearner. algo_config: None = defaults.
    Raises: ConfigError: an unknown loss, or no reward model.

    Example: RewardModelLearner(SupervisedModels(reward_model=folder, tokenizer=folder)).train(
        [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]).
    """

    paired = True
    usual_lr = REWARD_LR

    def __init__(self, models: SupervisedModels, algo_config: RewardModelConfig | None = None, **options: Any) -> None:
        c = check_instance(algo_config or RewardModelConfig(), RewardModelConfig, "algo_config")
        super().__init__(models, c, **options)
        if models.role is not Role.REWARD:
            raise ConfigError("training a reward model needs one; give SupervisedModels(reward_model=...), not actor=")
        models.trainer.set_loss(make_reward_loss(c), loss_per="unit", scores=True)
        models.trainer.set_metric_reductions(REWARD_REDUCTIONS)
        models.trainer.displayed = ("accuracy",)

    @property
    def chance_loss(self) -> float | None:
        """Ln 2, the loss of a coin, where the loss is bradley_terry."""
        return math.log(2) if self.algo_config.loss_type == "bradley_terry" else None

    def encoder(self) -> Encoder[Example]:
        """Pairs, with their margins where the rows have them."""
        return ScoredPairEncoder(self.models.tokenizer, self.data)


class PreferenceLearner(SupervisedLearner[PreferenceConfig]):
    """Trains a policy on preferences: pairs of a better and a worse answer, or answers with a label.

    Args:
        models: an actor, and a reference where the loss reads one.
        algo_config: None = DPO with its defaults.
        options: data, settings and observers, as of SupervisedLearner.
    Raises: ConfigError: an unknown loss, losses that don't go together, a parameter that none of them takes, a missing
        reference or one that nothing reads.

    Example: PreferenceLearner(SupervisedModels(actor=folder, reference=folder, tokenizer=folder)).train(
        [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]).
    """

    def __init__(self, models: SupervisedModels, algo_config: PreferenceConfig | None = None, **options: Any) -> None:
        c = check_instance(algo_config or PreferenceConfig(), PreferenceConfig, "algo_config")
        super().__init__(models, c, **options)
        self.objective = make_preference_objective(c)
        self.needs = self.objective.needs
        self.paired = self.needs.rows == "pairs"
        self._check_reference()
        if self.needs.mismatched_pass and self.data.batch_size < 2:
            raise ConfigError(
                f"data.batch_size=1: algo.loss_type={', '.join(self.objective.losses)} measures a KL on each prompt "
                "with another row's answer, so a step needs two rows at least; raise it, or take apo_zero_unpaired"
            )
        self._running: dict[str, float] = {}
        """Numbers that losses keep between two steps, by name."""
        self._run_ahead: tuple[Run, SupervisedTask] | None = None
        """The run of `train` and its task, where the reference is computed ahead of the steps."""
        self._precomputed: dict[bytes, list[Tensor]] | None = None
        """The reference's log-probabilities of each sequence of an example, by the example's digest."""
        models.trainer.set_loss(
            self.objective, loss_per="unit", constants=self.objective.constants, entropy=c.log_entropy
        )
        models.trainer.displayed = ("rewards/accuracies",)

    def _check_reference(self) -> None:
        c, has_reference = self.algo_config, Role.REFERENCE in self.models.workers
        if self.models.role is not Role.ACTOR:
            raise ConfigError("preference training trains a policy; give SupervisedModels(actor=...)")
        if self.needs.reference and not has_reference:
            raise ConfigError(
                f"algo.loss_type={', '.join(self.objective.losses)} compares with a reference, and there is none; give "
                "SupervisedModels(reference=...), usually the actor's own model, or set algo.reference_free=true"
            )
        if has_reference and not self.needs.reference:
            raise ConfigError(
                f"the reference would be loaded and never read: algo.loss_type={', '.join(self.objective.losses)} "
                "compares with none; leave it out"
            )
        if c.precompute_ref_log_probs and self.needs.mismatched_pass:
            raise ConfigError(
                "algo.precompute_ref_log_probs can't know the mismatched rows of each step, which "
                f"algo.loss_type={', '.join(self.objective.losses)} reads the reference on; leave it out"
            )
        if c.sync_ref_model and self.models.worker(Role.REFERENCE).loaded.is_view:
            raise ConfigError(
                "algo.sync_ref_model moves a reference of its own, and this one is the base of an adapter; name its "
                "model in a section reference (reference.model=...), or leave algo.sync_ref_model out"
            )

    @property
    def chance_loss(self) -> float | None:
        """Ln 2, the loss of a coin toss, if sigmoid is the only loss; else None."""
        c = self.algo_config
        return math.log(2) if c.loss_type == ("sigmoid",) and c.loss_weights is None else None

    def encoder(self) -> Encoder[Example]:
        """Pairs, or answers with a label."""
        kind = PreferenceEncoder if self.paired else UnpairedEncoder
        return kind(self.models.tokenizer, self.data)

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Returns the run that `train` goes through. Raises ConfigError: precompute_ref_log_probs with a stream."""
        run = super().new_run(train_ds, eval_ds)
        if self.needs.rows == "labels" and run.stream is not None and run.stream.kind == "rows":  # pyright: ignore[reportAttributeAccessIssue]
            self._check_labels(run.stream.source)  # pyright: ignore[reportAttributeAccessIssue]
        if self.algo_config.precompute_ref_log_probs:
            if run.stream is not None and run.stream.kind != "rows":  # pyright: ignore[reportAttributeAccessIssue]
                raise ConfigError(
                    "algo.precompute_ref_log_probs reads all rows before the first step, and a stream has no end that "
                    "is known; set data.streaming=false, or leave it out"
                )
            assert isinstance(run.task, SupervisedTask)
            self._run_ahead = run, run.task
        return run

    def _check_labels(self, examples: Sequence[Example]) -> None:
        """Refuses one row where a KL is measured between rows; warns where all labels are alike."""
        names = ", ".join(self.objective.losses)
        if self.needs.mismatched_pass and len(examples) < 2:
            raise DataError(
                f"there is 1 row to train on, and algo.loss_type={names} measures a KL on each prompt with another "
                "row's answer; give it two rows at least, or take apo_zero_unpaired"
            )
        labels = [label for example in examples for label in example.columns["label"]]
        if len(set(labels)) == 1:
            log.warning(
                "all %d answers are labelled %s: algo.loss_type=%s learns from good answers against bad ones, and "
                "raises or lowers all of them here; give it both, or train good answers with whet sft",
                len(labels),
                bool(labels[0]),
                names,
            )

    # ---- the stages ----------------------------------------------------------------------------------------------

    def batch(self, step: ExampleStep) -> ExampleStep:
        """Lays the examples end to end, with the counts over the whole batch that the losses need.

        Reads: batch. Writes: nothing.
        """
        step = super().batch(step)
        return step.replace(batch=self.objective.with_counts(step.batch))

    def score(self, step: ExampleStep) -> ExampleStep:
        """Adds the reference's log-probabilities, and the statistics of the batch before its update that losses read.

        Reads: batch, batch.*, examples, mode. Writes: batch.ref_logprobs, batch.*.
        """
        batch = step.batch
        if self.needs.reference:
            with self.models.trace.span("score"):
                batch = batch.with_token_columns(ref_logprobs=self._ref_logprobs(step.examples, batch))
        if self.needs.policy_pass or self.needs.mismatched_pass:
            with self.models.trace.span("policy_pass"):
                learning = step.mode is Mode.TRAIN
                batch, self._running = self.objective.with_passes(
                    batch, self._passes(batch), running=self._running, learning=learning
                )
        return step.replace(batch=batch)

    def update(self, step: ExampleStep) -> ExampleStep:
        """Takes one optimizer step on the whole batch, and makes means of the metrics that are summed per unit.

        Reads: metrics. Writes: nothing.
        """
        step = super().update(step)
        return step.replace(metrics=self._divide_by_counts(step.metrics))

    def measure(self, step: ExampleStep) -> ExampleStep:
        """Computes the loss and its metrics without an update. Statistics of a batch are those of each 256 rows.

        Reads: metrics. Writes: nothing.
        """
        step = super().measure(step)
        return step.replace(metrics=self._divide_by_counts(step.metrics))

    def after_step(self, run: Run, step: ExampleStep) -> None:
        """Moves the reference where that is due, then logs, evaluates and saves.

        Reads: index. Writes: nothing.
        """
        c = self.algo_config
        if c.sync_ref_model and step.index % c.ref_model_sync_steps == 0:
            weights = self.models.trained.named_weights()
            self.models.worker(Role.REFERENCE).load_weights(weights, mixup_alpha=c.ref_model_mixup_alpha)
        super().after_step(run, step)

    # ---- parts of the stages -------------------------------------------------------------------------------------

    def _ref_logprobs(self, examples: Sequence[Example], batch: TokenBatch) -> Tensor:
        """Returns the reference's log-probabilities, [S]: computed now, or looked up where they were computed ahead."""
        reference = self.models.worker(Role.REFERENCE)
        if not self.algo_config.precompute_ref_log_probs or self._run_ahead is None:
            return _logprobs(reference, batch)
        if self._precomputed is None:
            self._precomputed = self._precompute()
        known = [self._precomputed.get(_digest(example)) for example in examples]
        if None not in known:
            return torch.cat([x for each in known if each is not None for x in each])
        if reference.loaded.is_view:  # the base of an adapter, which stays in memory
            return _logprobs(reference, batch)
        raise ConfigError(
            "these rows were not there when the reference was read, and its memory has been freed since",
            fix="give them to train() as eval_ds, or leave algo.precompute_ref_log_probs out",
            key="algo.precompute_ref_log_probs",
        )

    def _precompute(self) -> dict[bytes, list[Tensor]]:
        """Computes the reference's log-probabilities of all rows of the run, then frees the memory of its weights."""
        assert self._run_ahead is not None, "new_run sets it"
        run, task = self._run_ahead
        source = [] if run.stream is None else run.stream.source  # pyright: ignore[reportAttributeAccessIssue]
        examples, logprobs_of = [*source, *task.evaluated_examples], {}
        log.info("computing the reference's log-probabilities of %d rows", len(examples))
        for start in range(0, len(examples), ROWS_AT_ONCE):
            part = examples[start : start + ROWS_AT_ONCE]
            batch = TokenBatch.from_examples([dataclasses.replace(e, columns={}) for e in part])
            each = iter(_logprobs(self.models.worker(Role.REFERENCE), batch).split(batch.lengths.tolist()))
            logprobs_of |= {_digest(e): [next(each).clone() for _ in e.sequences] for e in part}
        self.models.unload(Role.REFERENCE)
        return logprobs_of

    def _passes(self, batch: TokenBatch) -> StepPasses:
        """Returns the passes of policy and reference before the update that the losses need."""
        policy = self.models.trained
        logprobs = _logprobs(policy, batch) if self.needs.policy_pass else None
        if not self.needs.mismatched_pass or batch.num_groups < 2:
            return StepPasses(logprobs=logprobs)
        limits = [n for n in (policy.max_tokens, self.models.positions, self.data.max_length) if n is not None]
        rows = mismatched_rows(batch, max_length=min(limits))
        mismatched_logprobs = _logprobs(policy, rows)
        if self.needs.reference:
            rows = rows.with_token_columns(ref_logprobs=_logprobs(self.models.worker(Role.REFERENCE), rows))
        return StepPasses(logprobs=logprobs, mismatched=rows, mismatched_logprobs=mismatched_logprobs)

    def _divide_by_counts(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Returns the metrics, with those that are sums per unit divided by their counts (objective.ratios)."""
        divided = dict(metrics)
        for name, by in self.objective.ratios.items():
            total, count = divided.get(name), metrics.get(by)
            if isinstance(total, Mean) and isinstance(count, Mean):
                divided[name] = Mean(total.sum, count.sum)
                if not count.sum:
                    del divided[name]
        for name in ("tokens/chosen", "tokens/rejected", "tokens/both"):
            divided.pop(name, None)
        chosen, rejected = (divided.get(f"rewards/{side}") for side in ("chosen", "rejected"))
        if "rewards/margins" not in divided and chosen is not None and rejected is not None:
            divided["rewards/margins"] = Last(chosen.value - rejected.value)
        return divided

    # ---- state ---------------------------------------------------------------------------------------------------

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """Returns the passes of a step besides its update, each with the reason."""
        passes = {
            "loss": describe_preference_objective(self.algo_config),
            "ref_logprobs": "skipped: the loss compares with no reference",
        }
        if self.needs.reference:
            ahead = self.algo_config.precompute_ref_log_probs
            passes["ref_logprobs"] = (
                "computed once, before the first step" if ahead else "runs: the loss compares with them"
            )
        if self.needs.policy_pass:
            passes["policy before the update"] = "runs: the loss looks across the whole batch"
        if self.needs.mismatched_pass:
            passes["mismatched rows"] = "run: the loss compares with the KL that is measured on them"
        return passes

    def state(self) -> dict[str, Any]:
        """Returns the numbers that losses keep between two steps."""
        return {"running": dict(self._running)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self._running = dict(state["running"])


def _logprobs(worker: ModelWorker, batch: TokenBatch) -> Tensor:
    """Returns a model's log-probabilities of a batch's tokens: [S]."""
    logprobs = worker.logprobs(batch).logprobs
    assert logprobs is not None
    return logprobs


def _digest(example: Example) -> bytes:
    """Identifies an example by its tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for s in example.sequences:
        for part in (s.prefix, s.tokens):
            digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return digest.digest()
