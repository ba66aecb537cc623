"""PreferenceLearner, DPO and its relatives, and RewardModelLearner, on the loop of supervised training.

    batch -> score -> update        score: the reference's log-probabilities, and what a loss reads of the whole step

What a loss needs follows from what it declares (ops.preference.Needs): pairs or rows with a label, a reference, a pass
of the policy before the update, mismatched rows, numbers that it keeps.
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
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder, UnpairedEncoder
from whet.errors import ConfigError, DataError
from whet.learners.preference_objective import (
    describe_preference_objective,
    make_preference_objective,
    make_reward_loss,
)
from whet.learners.step import ExampleStep
from whet.learners.supervised import ROWS_AT_ONCE, SupervisedLearner
from whet.learners.supervised_task import Encoder, SupervisedTask
from whet.metrics import Last, Mean, Metric
from whet.ops.preference import REWARD_REDUCTIONS, StepPasses, mismatched_rows
from whet.run.run import Run
from whet.train.supervised_models import SupervisedModels
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
        models.trainer.with_loss_fn(make_reward_loss(c), loss_per="unit", scores=True)
        models.trainer.with_rl_metrics_to_log(REWARD_REDUCTIONS)
        models.trainer.with_tqdm_metrics_to_display(["accuracy"])

    @property
    def chance(self) -> float | None:
        """The ln 2 of a coin, where the loss is the usual one."""
        return math.log(2) if self.algo_config.loss_type == "bradley_terry" else None

    def encoder(self) -> Encoder:
        """Pairs, with their margins where the rows have them."""
        return ScoredPairEncoder(self.models.tokenizer, self.data)


class PreferenceLearner(SupervisedLearner[PreferenceConfig]):
    """Trains a policy on preferences: pairs of a better and a worse answer, or answers with a label.

    Args: models, data, settings, observers: as of SupervisedLearner; of an actor, and of a reference where the loss
        reads one. algo_config: None = DPO with its defaults.
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
        self._ahead: tuple[Run, SupervisedTask] | None = None
        self._kept: dict[bytes, list[Tensor]] | None = None
        models.trainer.with_loss_fn(
            self.objective, loss_per="unit", constants=self.objective.constants, entropy=c.log_entropy
        )
        models.trainer.with_tqdm_metrics_to_display(["rewards/accuracies"])

    def _check_reference(self) -> None:
        c, there = self.algo_config, Role.REFERENCE in self.models.workers
        if self.models.role is not Role.ACTOR:
            raise ConfigError("preference training trains a policy; give SupervisedModels(actor=...)")
        if self.needs.reference and not there:
            raise ConfigError(
                f"algo.loss_type={', '.join(self.objective.losses)} compares with a reference, and there is none; give "
                "SupervisedModels(reference=...), usually the actor's own model, or set algo.reference_free=true"
            )
        if there and not self.needs.reference:
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
    def chance(self) -> float | None:
        """The ln 2 of a coin, where the loss is the sigmoid of a margin alone."""
        c = self.algo_config
        return math.log(2) if c.loss_type == ("sigmoid",) and c.loss_weights is None else None

    def encoder(self) -> Encoder:
        """Pairs, or answers with a label."""
        kind = PreferenceEncoder if self.paired else UnpairedEncoder
        return kind(self.models.tokenizer, self.data)

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """The run that `train` goes through. Raises ConfigError: nothing can be read ahead of a stream."""
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
            self._ahead = run, run.task
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
        """Lays the examples end to end, with what the losses count over the whole batch."""
        step = super().batch(step)
        return step.replace(batch=self.objective.with_counts(step.batch))

    def score(self, step: ExampleStep) -> ExampleStep:
        """Adds the reference's log-probabilities, and what the losses read of the whole batch before its update."""
        batch = step.batch
        if self.needs.reference:
            with self.models.trace.span("score"):
                batch = batch.with_token_columns(ref_logprobs=self._ref_logprobs(step.examples, batch))
        if self.needs.policy_pass or self.needs.mismatched_pass:
            with self.models.trace.span("policy_pass"):
                learning = step.mode is Mode.TRAIN
                passes = self._passes(batch)
                batch, self._running = self.objective.with_passes(
                    batch, passes, running=self._running, learning=learning
                )
        return step.replace(batch=batch)

    def update(self, step: ExampleStep) -> ExampleStep:
        """One optimizer step on the whole batch."""
        step = super().update(step)
        return step.replace(metrics=self._finished(step.metrics))

    def measure(self, step: ExampleStep) -> ExampleStep:
        """The loss and its metrics, without an update; what looks across a batch looks at its parts of 256 rows."""
        step = super().measure(step)
        return step.replace(metrics=self._finished(step.metrics))

    def after_step(self, run: Run, step: ExampleStep) -> None:
        """Moves the reference where it is due; logs the step, evaluates and saves."""
        c = self.algo_config
        if c.sync_ref_model and step.index % c.ref_model_sync_steps == 0:
            weights = self.models.trained.named_weights()
            self.models.worker(Role.REFERENCE).load_weights(weights, mixup_alpha=c.ref_model_mixup_alpha)
        super().after_step(run, step)

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _ref_logprobs(self, examples: Sequence[Example], batch: TokenBatch) -> Tensor:
        """[S]: the reference's, read now or ahead of the run."""
        reference = self.models.worker(Role.REFERENCE)
        if not self.algo_config.precompute_ref_log_probs or self._ahead is None:  # before a run nothing is kept
            return _needed(reference.logprobs(batch).logprobs)
        if self._kept is None:
            self._kept = self._read_ahead()
        found = [self._kept.get(_digest(example)) for example in examples]
        if None not in found:
            return torch.cat([x for each in found if each is not None for x in each])
        if reference.loaded.is_view:  # the base of an adapter, which stays in memory
            return _needed(reference.logprobs(batch).logprobs)
        raise ConfigError(
            "these rows were not there when the reference was read, and its memory has been freed since",
            fix="give them to train() as eval_ds, or leave algo.precompute_ref_log_probs out",
            key="algo.precompute_ref_log_probs",
        )

    def _read_ahead(self) -> dict[bytes, list[Tensor]]:
        """The reference's log-probabilities of all rows of the run; its weights leave memory."""
        assert self._ahead is not None, "new_run has noted the run"
        run, task = self._ahead
        source = [] if run.stream is None else run.stream.source  # pyright: ignore[reportAttributeAccessIssue]
        examples, found = [*source, *task.evaluated_examples], {}
        log.info("reading the reference over %d rows", len(examples))
        for start in range(0, len(examples), ROWS_AT_ONCE):
            part = examples[start : start + ROWS_AT_ONCE]
            batch = TokenBatch.from_examples([dataclasses.replace(e, columns={}) for e in part])
            logprobs = _needed(self.models.worker(Role.REFERENCE).logprobs(batch).logprobs)
            each = iter(logprobs.split(batch.lengths.tolist()))
            found |= {_digest(e): [next(each).clone() for _ in e.sequences] for e in part}
        self.models.unload(Role.REFERENCE)
        return found

    def _passes(self, batch: TokenBatch) -> StepPasses:
        """What the losses read of policy and reference before the update."""
        policy = self.models.trained
        logprobs = _needed(policy.logprobs(batch).logprobs) if self.needs.policy_pass else None
        if not self.needs.mismatched_pass or batch.num_groups < 2:
            return StepPasses(logprobs=logprobs)
        limits = [n for n in (policy.max_tokens, self.models.positions, self.data.max_length) if n is not None]
        rows = mismatched_rows(batch, max_length=min(limits))
        own = _needed(policy.logprobs(rows).logprobs)
        if self.needs.reference:
            rows = rows.with_token_columns(
                ref_logprobs=_needed(self.models.worker(Role.REFERENCE).logprobs(rows).logprobs)
            )
        return StepPasses(logprobs=logprobs, mismatched=rows, mismatched_logprobs=own)

    def _finished(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """What was summed per unit, divided by what there is of it."""
        found = dict(metrics)
        for name, by in self.objective.ratios.items():
            total, count = found.get(name), metrics.get(by)
            if isinstance(total, Mean) and isinstance(count, Mean):
                found[name] = Mean(total.sum, count.sum)
                if not count.sum:
                    del found[name]
        for name in ("tokens/chosen", "tokens/rejected", "tokens/both"):
            found.pop(name, None)
        pair = [found.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if "rewards/margins" not in found and None not in pair:
            found["rewards/margins"] = Last(pair[0].value - pair[1].value)  # pyright: ignore[reportOptionalMemberAccess]
        return found

    # ---- state ---------------------------------------------------------------------------------------------------

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """What a step of so many rows runs besides its update."""
        c, check_instance = self.algo_config, self.needs
        found = {
            "loss": describe_preference_objective(c),
            "ref_logprobs": "skipped: the loss compares with no reference",
        }
        if check_instance.reference:
            ahead = c.precompute_ref_log_probs
            found["ref_logprobs"] = "read once, before the first step" if ahead else "runs: the loss compares with them"
        if check_instance.policy_pass:
            found["policy before the update"] = "runs: the loss looks across the whole batch"
        if check_instance.mismatched_pass:
            found["mismatched rows"] = "run: the loss compares with the KL that is measured on them"
        return found

    def state(self) -> dict[str, Any]:
        """What the losses keep from step to step."""
        return {"running": dict(self._running)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        self._running = dict(state["running"])


def _needed(logprobs: Tensor | None) -> Tensor:
    assert logprobs is not None
    return logprobs


def _digest(example: Example) -> bytes:
    """What tells an example from others: its tokens."""
    made = hashlib.blake2b(digest_size=16)
    for s in example.sequences:
        for part in (s.prefix, s.tokens):
            made.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return made.digest()
