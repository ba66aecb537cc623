"""A run's events as transformers' callbacks are told of them, in transformers' order.

    on_train_begin, on_epoch_begin
    for each step:  for each of its updates: on_step_begin, on_pre_optimizer_step, on_optimizer_step, on_step_end
                    then what was asked for: log and on_log, on_evaluate, save and on_save
    on_epoch_end, and what it asks for; on_train_end

A step of reinforcement learning is a rollout with its updates, one of supervised training is one update. What a
callback asks for between two updates of one rollout is done when the rollout is over. An update is one call here, so
on_pre_optimizer_step and on_optimizer_step come after it, and on_substep_end never.
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
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Metrics
from whet.types import Example

if TYPE_CHECKING:
    from whet.trl.trainer.trainer import Trainer

__all__ = ["TellingRLTask", "TellingSupervisedTask", "TellsCallbacks"]

_OF_THE_LAST = ("grad_norm", "learning_rate")
"""Metrics of which transformers logs the last update's."""
_ASKED = ("should_log", "should_evaluate", "should_save")


class TellsCallbacks(Task):
    """A mixin of a learner's task, which tells the front's callbacks.

    Args: learner: whose run it is. front: the trainer with callbacks, state and control.
    """

    def __init__(self, learner: Any, front: Trainer) -> None:
        super().__init__(learner)  # pyright: ignore[reportCallIssue]
        self.front = front
        self._asked: set[str] = set()
        self._updates = 0
        self._last: dict[str, float] = {}
        self._restored = False

    # ---- the run -------------------------------------------------------------------------------------------------

    def on_run_begin(self, run: Any) -> None:
        """on_train_begin, the evaluation before the first step, on_epoch_begin."""
        front = self.front
        front.run = run
        front.begin(resumed=self._restored)
        front.tell("on_train_begin")
        if front.args.eval_on_start and not self._restored:
            front.evaluate()
        front.tell("on_epoch_begin")

    def on_step_begin(self, run: Any, index: int) -> None:
        """on_step_begin, of the first update."""
        super().on_step_begin(run, index)
        self._updates = 0
        self._asked = set()
        self.front.tell("on_step_begin")

    def on_update_end(self, run: Any, trainer: RoleTrainer, metrics: Metrics) -> None:
        """on_optimizer_step and on_step_end; on_step_begin of the next update, if there is one."""
        front = self.front
        front.tell("on_pre_optimizer_step")
        front.tell("on_optimizer_step")
        front.state.global_step += 1
        front.set_epoch()
        front.tell("on_step_end")
        self._last = {name: metrics[name].value for name in _OF_THE_LAST if name in metrics}
        self._updates += 1
        self._asked |= {name for name in _ASKED if getattr(front.control, name)}
        if self._updates < front.updates_per_step:
            front.tell("on_step_begin")

    def on_step_end(self, run: Any, step: BaseStep) -> None:
        """Logs, evaluates and saves where it was asked for, then ends the epoch or the run."""
        super().on_step_end(run, step)
        front, batch = self.front, step.batch
        front.state.num_input_tokens_seen += int((batch.prefix_lengths[batch.prefix_of] + batch.lengths).sum())
        front.losses.append(float(run.rows[-1].get("loss", 0.0)))
        front.note_step(run.rows[-1], step)
        front.window.add(self._last)
        for name in self._asked:
            setattr(front.control, name, True)
        self._do(run)
        if front.at_epoch_end() or front.control.should_training_stop:
            front.tell("on_epoch_end")
            self._do(run)
            if front.state.global_step < front.state.max_steps and not front.control.should_training_stop:
                front.tell("on_epoch_begin")
        if front.control.should_epoch_stop:
            raise ConfigError(
                "a callback has set control.should_epoch_stop, and an epoch can't be left early here; set "
                "should_training_stop, or train on fewer rows"
            )
        if front.control.should_training_stop:
            run.control.stop = True

    def _do(self, run: Any) -> None:
        """What the control's flags ask for."""
        front = self.front
        if front.control.should_log:
            front.log_window()
        if front.control.should_evaluate:
            front.note_best(front.evaluate())
        if front.control.should_save:
            front.control.should_save = False
            if front.args.save_only_model or run.checkpoints.root is None:
                front.save_weights()
            else:
                run.save()

    def on_save(self, run: Any, folder: Path | None) -> None:
        """Tells of a checkpoint."""
        if folder is not None:
            self.front.saved(folder)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The run's, and the trainer's state."""
        return {**super().state(), "trl": self.front.held()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restores them. Raises CheckpointError: the checkpoint is not one of this front's."""
        super().restore(state, step)
        if "trl" not in state:
            raise CheckpointError(
                "the checkpoint was not written by whet.trl; resume it with the learner that wrote it"
            )
        self.front.take(state["trl"])
        if self.front.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks()
        self._restored = True

    def _restore_callbacks(self) -> None:
        """Makes callbacks whose state a checkpoint has what they were then."""
        held = {n: s if isinstance(s, list) else [s] for n, s in self.front.state.stateful_callbacks.items()}
        for callback in self.front.callback_handler.callbacks:
            if states := held.get(type(callback).__name__):
                state, *held[type(callback).__name__] = states
                vars(callback).update({**vars(type(callback)(**state.get("args", {}))), **state.get("attributes", {})})


class TellingRLTask(TellsCallbacks, RLTask):
    """That of reinforcement learning."""


class TellingSupervisedTask(TellsCallbacks, SupervisedTask):
    """That of supervised training."""

    @property
    def evaluated_examples(self) -> list[Example]:
        """All evaluation sets of the front."""
        return [example for rows in self.front.eval_rows.values() for example in rows]
