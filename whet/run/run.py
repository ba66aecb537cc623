"""Run: everything around the training steps: data order, resume, logs, evaluation, checkpoints and the end of the run.

    with Run(task, stream, roles, config) as run:
        for index, items in run.steps():
            ...
            run.end_step(step, metrics, num_tokens=...)

Reinforcement learning and supervised training share it: the Task says what is trained and how it is evaluated, the
RoleWorkers hold the models. A step is one batch of the stream. Step s is finished when its row of metrics is written. A
checkpoint of step s holds all that step s + 1 needs, and a resumed run removes what was written after it. Only metrics
under time/ and perf/ depend on the clock. Where several processes train, a signal, an observer's request or a due
checkpoint in one of them holds for all.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from whet.config import CheckpointingOptions, Mode, TrainingConfig
from whet.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OtherRankError,
    RolloutStopped,
    WhetError,
    lost_process,
)
from whet.hub.push import PushResult, push_to_hub
from whet.observe.environment import read_environment
from whet.observe.live_view import make_progress
from whet.observe.loggers import Loggers
from whet.observe.notebook import run_html
from whet.observe.profiler import StepProfiler
from whet.observe.progress import Progress
from whet.observe.trace import TIMELINE_SPANS, trace_folder
from whet.run.builtin_observers import builtin_observers
from whet.run.observer import Observer, Observers, TrainerControl
from whet.run.provenance import check_same_inputs, check_same_settings, check_settings, to_loadable
from whet.run.random_state import random_state, set_derived_random_state, set_random_state
from whet.run.signals import SignalHandler, Stopped
from whet.run.start_messages import log_data_end, log_run_length, steps_in_data, write_environment
from whet.run.task import Task
from whet.storage.checkpoint import read_run_id
from whet.storage.run_folder import RunFolder, has_steps
from whet.storage.run_state import check_storable
from whet.train.metric_reduction import Metrics
from whet.train.role_trainer import RoleTrainer
from whet.train.role_workers import RoleWorkers
from whet.util.device import PhaseMemory, memory_metrics, peak_flops
from whet.util.memory import peak_memory

if TYPE_CHECKING:
    from whet.data.prompt_stream import PromptStream
    from whet.learners.step import BaseStep

__all__ = ["Run"]

log = logging.getLogger("whet")


class Run:
    """One training run.

    Args:
        task: what is trained and how it is evaluated; the learner makes it.
        stream: the data in their order; None = evaluation only.
        roles: the models. The run produces the model of the first trained role.
        config: the run folder and loggers, when to evaluate and save, when to end.
        observers: notified of each event, after the task.

    Raises: ConfigError: an observer is not an Observer.
    """

    def __init__(
        self,
        task: Task,
        stream: PromptStream | None,
        roles: RoleWorkers,
        config: TrainingConfig,
        *,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.task, self.roles, self.config = task, roles, config
        self.checkpoints = roles.checkpoints
        self.control = TrainerControl()
        self.step = 0
        """The number of finished steps."""
        self.rows: list[dict[str, Any]] = []
        """The logged rows of steps and evaluations. A resumed run has the earlier rows too."""
        self.stream = stream
        self._batches: Iterator[list[Any]] | None = None
        self.folder: RunFolder | None = None
        self.loggers: Loggers | None = None
        self.progress: Progress | None = None
        self.profiler = StepProfiler(config.profiling, folder=config.run_dir, trace=roles.trace)
        self.tokens = 0
        self.inputs: dict[str, Any] | None = None
        self.ranks = roles.ranks
        """The processes that train together."""
        own = Observers([*builtin_observers(config), *observers])
        self.observers = own if self.ranks.is_writer else Observers([])
        self._signals = SignalHandler()
        if self.checkpoints.root is None:
            self._signals.effect = "stopping after this step; nothing is saved, since trainer.run_dir is not set"
        if self.ranks.size > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
            self._signals.effect += (
                f" (torchrun ends the processes after {seconds} s; if the step takes longer, all since the last "
                "checkpoint is lost)"
            )
        self._begun = False
        self.timeline: Path | None = None
        """The folder for trace.json until it is written; None = this process writes none."""
        self._begun_at = self._saved_step = 0
        self._data_wait = 0.0
        """Seconds for which the running step waited for its batch."""
        self._finished: tuple[tuple[int, ...], dict[str, Any]] | None = None
        """The updates made and the state after the last finished step, for a checkpoint of it; None = it is saved."""

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> RoleTrainer:
        """The first trained role, which has the model that the run produces."""
        return next(iter(self.roles.trainers.values()))

    @property
    def stop_requested(self) -> bool:
        """Whether a signal asked for the end of the run."""
        return self._signals.stop_requested

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of all evaluations so far, the one before the first step included: {"step": 0, "reward": ...}.

        Example: `run = learner.train(rows, eval_ds); run.evaluations[-1]["reward"]`.
        """
        return [row for row in self.rows if row["mode"] == Mode.EVAL.value]

    @property
    def train_rows(self) -> list[dict[str, Any]]:
        """The rows of the steps so far, without those of evaluations.

        Example: `run.train_rows[-1]["loss"]`; `run.rows[-1]` may be an evaluation.
        """
        return [row for row in self.rows if row["mode"] == Mode.TRAIN.value]

    def __repr__(self) -> str:
        where = "" if self.folder is None else f", folder {str(self.folder.path)!r}"
        return f"<{type(self).__name__}: {self.step} steps{where}>"

    def _repr_html_(self) -> str:
        """For notebooks: the steps, the last numbers, and the curves if matplotlib is installed."""
        return run_html(f"{self.step} steps", self.train_rows, self.evaluations)

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run; None if the data have no known length."""
        assert self.stream is not None
        limits = [n for n in (self.config.max_steps, steps_in_data(self.stream)) if n is not None]
        return min(limits) if limits else None

    def push_to_hub(self, repo: str | None = None, **options: Any) -> PushResult:
        """Sends the run's model, tokenizer and card to the hub: see whet.hub.push.push_to_hub for the options.

        Raises: ConfigError: the run has no folder, or something is wrong; nothing is sent then.
        """
        if self.folder is None:
            raise ConfigError("a run without a folder has written no model; set trainer.run_dir")
        return push_to_hub(self.folder.path, repo, **options)

    # ---- opening -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        """Opens the run folder, resumes if asked, starts the loggers and the progress bar."""
        try:
            self._open()
        except BaseException as error:
            if self._begun:
                self._add_place(error)
                self._notify("on_run_end", self, error)
            self._close(error)
            raise
        return self

    def _open(self) -> None:
        c = self.config
        assert self.stream is not None
        self.settings = self.task.settings()
        check_same_settings(self.ranks, self._compared_settings())
        rows = {"prompts": self.stream.digest, "other columns": self.stream.columns_digest}
        self.ranks.check_same("data set", rows)  # a batch is compared too, without the columns that only rewards read
        self.task.prepare()
        if not self.task.has_evaluation and c.eval_every_n_steps:
            log.warning(
                "trainer.eval_every_n_steps=%d has no effect: there is no evaluation data; give train() eval_ds, or "
                "set data.eval_path, data.eval_split or data.eval_fraction",
                c.eval_every_n_steps,
            )
        if self.checkpoints.root is not None or c.resume is not None:
            self.inputs = self.task.inputs()  # before the first update changes a weight
            check_storable(self.task.state(), "the state of the run")
        if c.run_dir is not None and self.ranks.is_writer:
            self.folder = RunFolder(c.run_dir, resume_step=None if c.resume is None else self._resume)
        elif c.resume is not None:
            self._resume()
        if c.resume is None:
            self.checkpoints.open(new=True)
        options = c.metrics_logging_options
        self.loggers = Loggers(
            c.chosen_loggers if self.ranks.is_writer else (),
            options=options,
            folder=c.run_dir,
            config=self.settings,
            prefix=c.metrics_prefix,
        )
        if self.folder is not None:
            self.folder.write_config(self.task.sections())
            passes = self.task.planned_passes(self.stream.batch_size)
            write_environment(self.folder, self.roles, passes, resumed=self.step > 0)
        if c.run_dir is not None:
            self.rows = self.ranks.broadcast([] if self.folder is None else self.folder.rows())
        log_run_length(c, self.stream, self.step)
        device = self.trainer.worker.device
        if c.rehearse or (c.rehearse is None and device.type == "cuda"):
            self.task.rehearse()
        if device.type == "cuda":
            self.roles.trace.memory = PhaseMemory(device)
        self._begun_at, total, size = self.step, self.total_steps, self.stream.batch_size
        has_timeline = c.perf_metrics_options is not None and c.perf_metrics_options.enable_trace_writer
        self.roles.trace.keep(TIMELINE_SPANS if has_timeline else 0)
        self.timeline = trace_folder(c.perf_metrics_options, c.run_dir) if self.ranks.is_writer else None
        self.profiler.set_num_steps(None if total is None else total - self.step)
        for role, trainer in self.roles.trainers.items():
            trainer.worker.plan(None if total is None else self.task.total_updates(role, total, size))
            trainer.listeners.append(self._on_update)
        self._begun = True
        self._notify("on_run_begin", self)
        self._check_observers()
        self._signals.at_once = self.ranks.size == 1  # of several processes none may stop alone
        self._signals.install()
        description = c.pbar_description if self.ranks.is_writer else None
        options = {"description": description, "start": self.step, "metric": self.task.main_metric}
        self.progress = make_progress(c.view, total, phase=lambda: self.roles.trace.status, **options)
        self.progress.__enter__()
        if self.task.has_evaluation and self.step == 0:
            self.evaluate(0)
            self._check_observers()
            if self._on_any_rank(self.stop_requested):
                raise Stopped(0, None)
            self.progress.start_clock()
        self._signals.at_once = False
        self.saved_at = time.monotonic()

    # ---- the steps -----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Any]]]:
        """Yields (step, batch) up to the end of the run; steps count from 1.

        Raises: KeyboardInterrupt: a signal asked for the end; the finished steps are saved. Also the error of an
            observer.
        """
        assert self.stream is not None
        if self._is_done():
            return
        self._batches = iter(self.stream)
        for items in iter(self._wait_for_batch, None):
            index = self.step + 1
            self._notify("on_step_begin", self, index)
            self.step_started, self.ranks.step = time.monotonic() - self._data_wait, index
            self.roles.trace.pop_times()
            with self.profiler.step(index):
                yield index, items
            if self._on_any_rank(self.observers.error is not None or self.stop_requested):
                self.save()
                stopped = Stopped(self.step, self.checkpoints.of_step(self.step))
                self.observers.check(str(stopped))
                raise stopped
            if self._take_request("stop") or self._is_done():
                return
        if self.total_steps is None or self.step < self.total_steps:
            log_data_end(self.config, self.step, self._begun_at)

    def next_batch(self) -> list[Any] | None:
        """Takes one more batch of the data into the running step; None = the data have ended, in all processes."""
        if self._batches is None:
            raise ConfigError("next_batch() gives a running step more data; call it within `for ... in run.steps()`")
        with self.roles.trace.span("data"):
            batch = next(self._batches, None)
            rows = "none, since the data have ended there" if batch is None else len(batch)
            self.ranks.check_same("batch", {"rows": rows})  # or one process would end the run without the others
        return batch

    def _wait_for_batch(self) -> list[Any] | None:
        """Returns the next batch, and the time that it took."""
        started = time.monotonic()
        batch = self.next_batch()
        self._data_wait = time.monotonic() - started
        return batch

    def _on_any_rank(self, condition: bool) -> bool:
        """Returns whether a condition holds in any process. Every process must call it."""
        return any(self.ranks.all_gather(condition))

    def _take_request(self, name: str) -> bool:
        """Returns whether an observer in any process has set a flag of `control`; the flag is cleared."""
        return self._on_any_rank(self.control.take(name))

    def _check_observers(self) -> None:
        """Raises the error of an observer; in the other processes, an error that says so."""
        failed = self._on_any_rank(self.observers.error is not None)
        self.observers.check()
        if failed:
            raise OtherRankError("an observer has failed in another process, where its error is raised")

    def _is_done(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def end_step(self, step: BaseStep, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """Writes the step's row, notifies the observers, and evaluates and saves if that is due or requested.

        Args: step: for the observers. metrics: of the row. num_tokens: the number of tokens that it trained on.
        """
        self.step = step.index
        self.tokens += num_tokens
        seconds = time.monotonic() - self.step_started
        row = {
            **metrics,
            "num_tokens": float(self.tokens),
            "epoch": self._epoch(),
            "optim/updates": float(self.trainer.train_steps),
            **self._times(seconds),
            **memory_metrics(self.trainer.worker.device),
            **({} if self.roles.trace.memory is None else self.roles.trace.memory.pop_metrics()),
            "time/step": seconds,
            "perf/global_step_time": seconds,
            "perf/tokens_per_second": num_tokens / max(seconds, 1e-9),
            "perf/peak_memory": float(peak_memory()),
        }
        self._log(self.step, Mode.TRAIN, row)
        self._show_progress(row)
        self._notify("on_step_end", self, step)
        self._evaluate_and_save()
        unsaved = self.checkpoints.root is not None and self._saved_step != self.step
        self._finished = (self._updates(), copy.deepcopy(self._state())) if unsaved else None

    def _times(self, seconds: float) -> dict[str, float]:
        """Returns the time of a step by phase, and what follows from it. Args: seconds: of the step."""
        trace = self.roles.trace
        outside = max(0.0, seconds - self._data_wait - trace.covered_s)
        times = trace.pop_times()
        times["time/data"] = times.get("time/data", 0.0) + self._data_wait
        idle = outside + times["time/data"] + times.get("time/rollout/tool_wait", 0.0)
        performance = {**times, "perf/idle_share": idle / max(seconds, 1e-9)}
        worker = self.trainer.worker
        flops, imbalance = worker.pop_flops(), worker.pop_imbalance()
        if self.ranks.size > 1 and not math.isnan(imbalance):
            performance["perf/rank_imbalance"] = imbalance
        if spent := times.get("time/update"):
            performance["perf/update_tflops"] = flops / spent / 1e12
            if peak := peak_flops(worker.device):
                performance["perf/mfu"] = flops / spent / peak
        return performance

    def _show_progress(self, row: Mapping[str, float]) -> None:
        fields = dict(self.task.progress_fields(row))
        fields |= {name: f"{row[name]:.3g}" for name in self.trainer.displayed if name in row}
        speed, value = row["perf/tokens_per_second"], row.get(self.task.main_metric, float("nan"))
        assert self.progress is not None
        self.progress.update(self.step, value=value, tokens_per_s=speed, fields=fields, row=row)

    def _evaluate_and_save(self) -> None:
        """Evaluates and saves if the configuration says so or an observer requests it."""
        every, requested = self.config.eval_every_n_steps, self._take_request("evaluate")
        if self.task.has_evaluation and (requested or (every and self.step % every == 0)):
            self.evaluate(self.step)
        elif requested:
            log.warning("an observer requests an evaluation, and there is no evaluation data; give train() eval_ds")
        requested = self._take_request("save")
        if requested and self.checkpoints.root is None:
            log.warning("an observer requests a checkpoint, and there is no folder for it; set trainer.run_dir")
        if self._is_save_due(self.step) or requested:
            self.save()
        if self._take_request("log") and self.loggers is not None:
            self.loggers.flush()

    def _epoch(self) -> float:
        """Passes over the data so far; NaN if the data have no length."""
        assert self.stream is not None
        each = self.stream.batches_per_epoch
        return self.stream.epoch + (self.stream.batch / each if each else float("nan"))

    def _log(self, step: int, mode: Mode, row: Mapping[str, float]) -> None:
        version = self.trainer.worker.version
        full = {"step": step, "mode": mode.value, "version": version, **{sys.intern(k): v for k, v in row.items()}}
        self.rows.append(full)
        if self.folder is not None:
            self.folder.log(step=step, mode=mode.value, version=version, values=row)
        if self.loggers is not None:
            self.loggers.log(step, row, mode.value)
        self._notify("on_log", self, full)

    def log_completions(self, step: int, mode: Mode, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
        """Writes completions to the run folder, and passes them to the loggers that take completions.

        Args: columns, rewards: as in `RunFolder.write_completions`.
        """
        if self.folder is not None:
            self.folder.write_completions(step=step, mode=mode.value, columns=columns, rewards=rewards)
        if self.loggers is not None:
            self.loggers.log_completions(step, columns, rewards, mode.value)

    def _on_update(self, trainer: RoleTrainer, metrics: Metrics) -> None:
        self._notify("on_update_end", self, trainer, metrics)

    def _notify(self, event: str, *args: Any) -> None:
        """Notifies the task and, in an open run, the observers. An error of the task is an error of the run."""
        getattr(self.task, event)(*args)
        if self._begun:
            self.observers.notify(event, *args)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates on the evaluation data. Args: step: the last finished step. Returns: the row that is logged."""
        try:
            row = self.task.evaluate(self, step)
        except RolloutStopped:
            if step and self._saved_step != step:  # the step itself is finished
                self.save()
            raise
        self._log(step, Mode.EVAL, row)
        self._notify("on_evaluate", self, self.rows[-1])
        return row

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _is_save_due(self, step: int) -> bool:
        options = self.config.checkpointing_options or CheckpointingOptions()
        if options.save_interval_steps is not None:
            return step % options.save_interval_steps == 0
        return self.ranks.broadcast(time.monotonic() - self.saved_at >= options.save_interval_s)

    def save(self) -> None:
        """Writes a checkpoint of the step just finished."""
        if self.checkpoints.root is None:
            return
        folder = self._write_checkpoint(self._state())
        self.saved_at, self._finished = time.monotonic(), None
        if self._saved_step != self.step:  # else the checkpoint was there already
            self._saved_step = self.step
            self._notify("on_save", self, folder)

    def _state(self) -> dict[str, Any]:
        """Returns the state after the step just finished, for run.pt; `_write_checkpoint` adds settings and inputs."""
        assert self.stream is not None
        own = {**self.task.state(), "observers": self.observers.state()}
        check_storable(own, "the state of the run")
        return {
            **own,
            "step": self.step,
            "tokens": self.tokens,
            "stream": self.stream.state(),
            "random": random_state(),
        }

    def _write_checkpoint(self, state: Mapping[str, Any]) -> Path | None:
        options = self.config.checkpointing_options or CheckpointingOptions()
        whole = {**state, "settings": self._compared_settings(), "inputs": self.inputs}
        if self.ranks.size > 1:
            whole["random_of_other_ranks"] = self.ranks.all_gather(state["random"])[1:]
        with self.roles.trace.span("checkpoint"):
            return self.checkpoints.save(state["step"], whole, tokenizer=self.roles.tokenizer, keep=options.max_to_keep)

    def _updates(self) -> tuple[int, ...]:
        """Returns the number of updates of each role. While it is the same, so are weights and optimizers."""
        return tuple(trainer.train_steps for trainer in self.roles.trainers.values())

    def _save_finished(self, error: BaseException) -> None:
        """Saves the steps before the failed one, if that has updated nothing yet. The run still ends with its error."""
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, RolloutStopped):
            if self._finished is not None:
                log.warning("stopped at once: there is no checkpoint of step %d", self.step)
            return
        if self._finished is None or self._finished[0] != self._updates():
            return
        if self.ranks.size > 1 and not isinstance(error, RolloutStopped):  # which all have; others may not have failed
            log.warning(
                "step %d is not saved: one of %d processes can't save without the others", self.step, self.ranks.size
            )
            return
        state = self._finished[1]
        try:
            folder = self._write_checkpoint(state)
        except WhetError as second:
            log.warning("the %d steps before the error could not be saved: %s", state["step"], second)
        else:
            if not isinstance(error, RolloutStopped):
                log.warning("the %d steps before the error are saved: %s", state["step"], folder)

    def _compared_settings(self) -> dict[str, Any]:
        """Returns the settings that a resume compares, with those that were given from Python and have no key."""
        return to_loadable({**self.settings, **self.task.extra_settings()})

    def _resume(self) -> int:
        """Restores the checkpoint that `resume` names. Returns: its step; -1 if there is none yet."""
        assert self.config.resume is not None
        self.checkpoints.open()
        self.checkpoints.restore_token_budgets()
        checkpoint = self.ranks.call_on_writer(self._find_checkpoint)
        if checkpoint is None:
            log.info("resume=latest: no checkpoint in %s yet; starting from the beginning", self.checkpoints.root)
            return -1
        self._restore(checkpoint)
        return self.step

    def _find_checkpoint(self) -> Path | None:
        """Returns the checkpoint that `resume` names, verified; None if there is none yet. Called on rank 0 only."""
        assert self.config.resume is not None
        checkpoint = self.checkpoints.find(self.config.resume)
        if checkpoint is None:
            return None
        own, root = self.config.run_dir, self.checkpoints.root
        if own is not None and root is not None and has_steps(own):
            written_by, here = read_run_id(checkpoint), read_environment(own).get("run")
            if checkpoint.resolve().parent != root.resolve() or (None not in (written_by, here) and written_by != here):
                raise CheckpointError(
                    f"{checkpoint} belongs to another run, and {own} holds steps of its own; give another "
                    "trainer.run_dir, or resume from the checkpoints that lie there"
                )
        self.checkpoints.verify(checkpoint)
        return checkpoint

    def _restore(self, checkpoint: Path) -> None:
        state = self.checkpoints.state(checkpoint, self.task.required_state)
        check_settings(state["settings"], self._compared_settings(), allow=self.config.allow_config_change)
        assert self.stream is not None
        assert self.inputs is not None
        check_same_inputs(state["inputs"], self.inputs, allow=self.config.allow_config_change)
        self.stream.restore(state["stream"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.checkpoints.load(checkpoint)
        self.task.restore(state)
        self.observers.restore(state["observers"])
        self._restore_random_state([state["random"], *state.get("random_of_other_ranks", ())])
        self.checkpoints.discard(after=self.step)
        log.info("resumed from %s: step %d is done", checkpoint, self.step)

    def _restore_random_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the global random generators of this rank. Args: states: of the checkpoint's ranks, in order."""
        rank, size = self.ranks.rank, self.ranks.size
        if len(states) != size:
            log.warning(
                "the checkpoint has the random generators of %d process(es), and this run has %d: rank 0 continues its "
                "own, other ranks start new ones; a reward function that draws random numbers gets other numbers",
                len(states),
                size,
            )
        if rank == 0 or len(states) == size:
            set_random_state(states[rank])
        else:
            set_derived_random_state(states[0], rank)

    # ---- the end -------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Saves the last step and the model if training ended without an error; closes everything in any case."""
        instead: BaseException | None = None
        try:
            if kind is None:
                try:
                    self._finish()
                except Exception as own:
                    self._add_place(own)
                    raise
            elif error is not None:
                self.checkpoints.write_token_budgets()
                where = self.ranks.describe()
                if self.ranks.size > 1 and (lost := lost_process(error)):
                    instead = OtherRankError(
                        f"{where}: {lost}; trainer.resume=latest continues from the last checkpoint"
                    )
                else:
                    self._add_place(error)
                self._save_finished(error)
                if isinstance(error, RolloutStopped):
                    log.warning("%s", error)
                    instead = Stopped(self.step, self.checkpoints.of_step(self.step))
            if self._begun:
                self._notify("on_run_end", self, error)
        finally:
            self._close(error)
        if instead is not None:
            raise instead from error
        if error is None:
            self._check_observers()

    def _add_place(self, error: BaseException) -> None:
        """Adds to an error which of several processes raised it, in which step and phase."""
        where = self.ranks.describe()
        if self.ranks.size > 1 and not isinstance(error, KeyboardInterrupt) and where not in str(error):
            error.add_note(where)

    def _close(self, error: BaseException | None = None) -> None:
        # torchrun ends the others as soon as one process has, which would end this one before it says why it fails
        self._signals.uninstall(keep_sigterm=self.ranks.size > 1 and isinstance(error, Exception))
        for trainer in self.roles.trainers.values():
            trainer.listeners = [fn for fn in trainer.listeners if fn != self._on_update]
        if self.timeline is not None:  # after an error, when the other processes may not answer: this one's spans
            self.roles.trace.write(self.timeline / "trace.json")
        if self.progress is not None:
            self.progress.__exit__()
        if self.loggers is not None:
            self.loggers.close()
        self.checkpoints.close()
        if self.folder is not None:
            self.folder.close()

    def _finish(self) -> None:
        self._signals.effect = "all steps are done, and the run ends once final/ and the last evaluation are written"
        self.profiler.close()
        if self.step == 0:
            raise DataError(
                "the run ended without a single step: every row was dropped; raise rollout.max_prompt_length, in "
                "supervised training data.max_length"
            )
        self.save()  # before the last evaluation, which a longer run doesn't make: its draws must not be saved
        self.checkpoints.wait()
        if self.config.run_dir is not None:  # before it too: whoever sent a signal may not wait for an evaluation
            merge, dtype, worker = self.config.merge_adapter, self.config.final_dtype, self.trainer.worker
            if self.folder is not None:
                final, tokenizer = self.folder.path / "final", self.roles.tokenizer
                self.checkpoints.export(final, self.step, worker, tokenizer, merge=merge, dtype=dtype)
            else:  # another rank writes it
                worker.export(None)
            self.ranks.all_gather(None)  # final/ is there when the run ends in any process
        evaluated = any(r["mode"] == "eval" and r["step"] == self.step for r in self.rows)
        if self.task.has_evaluation and not evaluated:
            self.evaluate(self.step)
        self._write_timeline()

    def _write_timeline(self) -> None:
        """Writes the spans of all processes. Every rank must call it."""
        options = self.config.perf_metrics_options
        if options is None or not options.enable_trace_writer:
            return
        _, *others = self.ranks.all_gather(self.roles.trace.events() if self.ranks.rank else [])
        if self.timeline is not None:
            self.roles.trace.write(self.timeline / "trace.json", others=itertools.chain(*others))
            self.timeline = None
