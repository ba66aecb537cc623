"""Calls transformers' callbacks at the events of a run, in transformers' order.

    on_train_begin, on_epoch_begin
    for each step:  for each of its updates: on_step_begin, on_pre_optimizer_step, on_optimizer_step, on_step_end
                    then the requests in `control`: log and on_log, on_evaluate, save and on_save
    on_epoch_end and its requests; on_train_end

A step of reinforcement learning is a rollout with its updates; a step of supervised training is one update. Requests
that a callback makes between two updates of a rollout wait for the last update. An update is one call here, so
on_pre_optimizer_step and on_optimizer_step come after it, and on_substep_end is never called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import CheckpointError, ConfigError
from whet.learners.rl_task import RLTask
from whet.learners.step import BaseStep
from whet.learners.supervised_task import SupervisedTask
from whet.run.task import Task
from whet.train.metric_reduction import Metrics
from whet.train.role_trainer import RoleTrainer
from whet.types import Example

if TYPE_CHECKING:
    from whet.trl.trainer.trainer import Trainer

__all__ = ["CallbackTask", "RLCallbackTask", "SupervisedCallbackTask"]

_LAST_UPDATE = ("grad_norm", "learning_rate")
"""Metrics whose value in a log row is that of the last update, as in transformers."""
_FLAGS = ("should_log", "should_evaluate", "should_save")


class CallbackTask(Task):
    """A mixin for a learner's task. It calls the trainer's callbacks.

    Args: learner: the run's learner. trainer: the object with the callbacks, the state and the control.
    """

    def __init__(self, learner: Any, trainer: Trainer) -> None:
        super().__init__(learner)  # pyright: ignore[reportCallIssue]
        self.trainer = trainer
        self._flags: set[str] = set()
        self._updates = 0
        self._last: dict[str, float] = {}
        self._restored = False

    # ---- the run -------------------------------------------------------------------------------------------------

    def on_run_begin(self, run: Any) -> None:
        """Calls on_train_begin, evaluates if eval_on_start is set, and calls on_epoch_begin."""
        trainer = self.trainer
        trainer.run = run
        trainer.begin(resumed=self._restored)
        trainer.call_event("on_train_begin")
        if trainer.args.eval_on_start and not self._restored:
            trainer.evaluate()
        trainer.call_event("on_epoch_begin")

    def on_step_begin(self, run: Any, index: int) -> None:
        """Calls on_step_begin for the first update."""
        super().on_step_begin(run, index)
        self._updates = 0
        self._flags = set()
        self.trainer.call_event("on_step_begin")

    def on_update_end(self, run: Any, trainer: RoleTrainer, metrics: Metrics) -> None:
        """Calls on_optimizer_step and on_step_end, and on_step_begin for the next update of the step."""
        self.trainer.call_event("on_pre_optimizer_step")
        self.trainer.call_event("on_optimizer_step")
        self.trainer.state.global_step += 1
        self.trainer.set_epoch()
        self.trainer.call_event("on_step_end")
        self._last = {name: metrics[name].value for name in _LAST_UPDATE if name in metrics}
        self._updates += 1
        self._flags |= {name for name in _FLAGS if getattr(self.trainer.control, name)}
        if self._updates < self.trainer.updates_per_step:
            self.trainer.call_event("on_step_begin")

    def on_step_end(self, run: Any, step: BaseStep) -> None:
        """Logs, evaluates and saves if a callback requested it, then ends the epoch or the run."""
        super().on_step_end(run, step)
        trainer, batch = self.trainer, step.batch
        trainer.state.num_input_tokens_seen += int((batch.prefix_lengths[batch.prefix_of] + batch.lengths).sum())
        trainer.losses.append(float(run.rows[-1].get("loss", 0.0)))
        trainer.record_step(run.rows[-1], step)
        trainer.window.add(self._last)
        for name in self._flags:
            setattr(trainer.control, name, True)
        self._act_on_flags(run)
        if trainer.at_epoch_end() or trainer.control.should_training_stop:
            trainer.call_event("on_epoch_end")
            self._act_on_flags(run)
            if trainer.state.global_step < trainer.state.max_steps and not trainer.control.should_training_stop:
                trainer.call_event("on_epoch_begin")
        if trainer.control.should_epoch_stop:
            raise ConfigError(
                "a callback has set control.should_epoch_stop, but whet can't end an epoch early; set "
                "should_training_stop, or train on fewer rows"
            )
        if trainer.control.should_training_stop:
            run.control.stop = True

    def _act_on_flags(self, run: Any) -> None:
        """Logs, evaluates and saves as the flags of `control` say, of several processes those of any."""
        trainer = self.trainer
        everywhere = trainer.models.ranks.all_gather([getattr(trainer.control, name) for name in _FLAGS])
        for name, values in zip(_FLAGS, zip(*everywhere, strict=True), strict=True):
            setattr(trainer.control, name, any(values))
        if trainer.control.should_log:
            trainer.log_window()
        if trainer.control.should_evaluate:
            trainer.record_best(trainer.evaluate())
        if trainer.control.should_save:
            trainer.control.should_save = False
            if trainer.args.save_only_model or run.checkpoints.root is None:
                trainer.save_weights()
            else:
                run.save()

    def on_save(self, run: Any, folder: Path | None) -> None:
        """Calls on_save if a checkpoint was written."""
        if folder is not None:
            self.trainer.after_save(folder)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of the run and of the trainer."""
        return {**super().state(), "trl": self.trainer.resume_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the run and of the trainer. Raises CheckpointError: another learner's checkpoint."""
        super().restore(state)
        if "trl" not in state:
            raise CheckpointError(
                "the checkpoint was not written by whet.trl; resume it with the learner that wrote it"
            )
        self.trainer.load_resume_state(state["trl"])
        if self.trainer.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks()
        self._restored = True

    def _restore_callbacks(self) -> None:
        """Restores the callbacks that have a state in the checkpoint."""
        saved = {n: s if isinstance(s, list) else [s] for n, s in self.trainer.state.stateful_callbacks.items()}
        for callback in self.trainer.callback_handler.callbacks:
            if states := saved.get(type(callback).__name__):
                state, *saved[type(callback).__name__] = states
                vars(callback).update({**vars(type(callback)(**state.get("args", {}))), **state.get("attributes", {})})


class RLCallbackTask(CallbackTask, RLTask):
    """The task of GRPOTrainer and RLOOTrainer."""


class SupervisedCallbackTask(CallbackTask, SupervisedTask):
    """The task of the supervised trainers."""

    @property
    def evaluated_examples(self) -> list[Example]:
        """The examples of all evaluation sets."""
        return [example for rows in self.trainer.eval_rows.values() for example in rows]
