"""Run: what surrounds the steps of a training: the data's order, resuming, logs, evaluation, checkpoints, the end.

    with Run(learner, train_ds, eval_ds) as run:
        for step, prompts in run.steps():
            ...
            run.after_step(step, batch, metrics, rewarded)

A step is one rollout. Step s is finished when its row of metrics is written; a checkpoint of step s holds all that
step s + 1 needs, and a resumed run cuts off what was written after it. What depends on the clock stands under time/
and perf/ alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import CheckpointingOptions, Mode, dump_tree
from whet.data.order import PromptStream
from whet.data.prompts import PromptEncoder
from whet.data.sources import load_rows
from whet.errors import CheckpointError, ConfigError, DataError
from whet.learners.generators import random_state, set_random_state
from whet.learners.health import Health
from whet.learners.interrupts import Interrupts
from whet.learners.provenance import check_reads, plain, reads
from whet.learners.report import completion_columns, rewarded_metrics, spread
from whet.metrics import Mean, Metric, flat, merge
from whet.observe.environment import environment, noted_environment
from whet.observe.loggers import Loggers
from whet.observe.profile import StepProfiler
from whet.observe.progress import Progress
from whet.observe.store import RunFolder, changed_settings, holds_steps
from whet.observe.trace import timeline_folder
from whet.rewards.manager import RewardManager
from whet.rollout.requests import check_prompt_lengths
from whet.types import Prompt, TokenBatch
from whet.util.device import memory_metrics

if TYPE_CHECKING:
    from whet.learners.base import RLLearner
    from whet.rewards.manager import Rewarded

__all__ = ["Run"]

log = logging.getLogger("whet")


class Run:
    """One training run of a learner.

    Args: learner: whose run it is. train_ds: rows, batches or a reference to them; None = evaluation only. eval_ds:
        evaluated whole, every eval_every_n_steps steps.
    """

    def __init__(self, learner: RLLearner, train_ds: Any, eval_ds: Any = None) -> None:
        self.learner, self.cluster, self.config = learner, learner.cluster, learner.config
        self.checkpoints = self.cluster.checkpoints
        self.step = 0
        self.rows: list[dict[str, float]] = []
        self.stream = None if train_ds is None else self._stream(train_ds)
        self.eval_ds = eval_ds
        self.folder: RunFolder | None = None
        self.loggers: Loggers | None = None
        self.progress: Progress | None = None
        self.profiler = StepProfiler(self.config.profiling, folder=self.config.run_dir, trace=self.cluster.trace)
        self.tokens = 0
        self.reads: dict[str, Any] | None = None
        self._eval_prompts: list[Prompt] | None = None
        self.health = Health(self.cluster)
        self._stop = Interrupts()

    # ---- opening -------------------------------------------------------------------------------------------------

    def _stream(self, train_ds: Any) -> PromptStream:
        c, learner = self.config, self.learner
        rows = load_rows(train_ds, split=learner.data.split)
        shuffle = learner.data.shuffle if learner.data.shuffle is False else None
        epochs = c.num_epochs if c.num_epochs is not None else (None if c.max_steps else 1)
        stream = PromptStream(
            rows,
            batch_size=learner.data.batch_size,
            seed=c.seed if c.data_shuffle_seed is None else c.data_shuffle_seed,
            shuffle=shuffle,
            num_epochs=epochs,
            last_batch=c.last_batch,
            encode=(encode := self._encoder(Mode.TRAIN)),
            prompt_column=learner.data.prompt_column,
        )
        log.info("data: %s%s", stream.describe(), _counted(encode))
        if stream.kind == "rows":
            self._check_fit(stream.source, Mode.TRAIN)
            if isinstance(learner.reward_manager, RewardManager):
                learner.reward_manager.check(list(stream.source[0].columns))
        c.resolve_batch_sizes(stream.batch_size)
        return stream

    def _check_fit(self, prompts: Sequence[Prompt], mode: Mode) -> None:
        config = self.cluster.get_rollout_config(mode)
        check_prompt_lengths(prompts, self.cluster.actor.module, config.max_tokens_to_generate)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where the data don't tell."""
        assert self.stream is not None
        known = self.stream.batches_per_epoch
        by_data = None if known is None or self.stream.num_epochs is None else known * self.stream.num_epochs
        limits = [n for n in (self.config.max_steps, by_data) if n is not None]
        return min(limits) if limits else None

    def __enter__(self) -> Run:
        """Opens the run folder, resumes where asked, starts the loggers and the progress bar."""
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        c = self.config
        self.settings = self._settings()
        if self.eval_ds is not None:
            self._eval_prompts = self._encode_eval()
        elif c.eval_every_n_steps:
            log.warning(
                "eval_every_n_steps=%d has no effect: there is no evaluation data; give train() eval_ds, or set "
                "data.eval_path, data.eval_split or data.eval_fraction",
                c.eval_every_n_steps,
            )
        if self.checkpoints.root is not None or c.resume is not None:
            self.reads = reads(self.learner, self._eval_prompts)  # before the first update: what is given, not made
        if c.run_dir is not None:
            self.folder = RunFolder(c.run_dir, resume_step=None if c.resume is None else self._resume)
        elif c.resume is not None:
            self._resume()
        if c.resume is None:
            self._refuse_old_checkpoints()
        if self.folder is not None:
            self.folder.write_config(self.settings)
            self._note_environment(resumed=self.step > 0)
            self.rows = self.folder.rows()
        assert self.stream is not None
        total, updates = self.total_steps, self.learner.updates_of(self.stream.batch_size)
        self.timeline = timeline_folder(self.cluster.perf_config, c.run_dir)
        self.profiler.expect(None if total is None else total - self.step)
        for trainer in self.cluster.trainers.values():
            trainer.worker.plan(None if total is None else total * updates)
            trainer.hooks.on_train_start(trainer)
        options = c.metrics_logging_options
        self.loggers = Loggers(
            c.loggers, options=options, folder=c.run_dir, config=self.settings, prefix=c.metrics_prefix
        )
        if self.eval_ds is not None and self.step == 0:
            self.evaluate(0)
        self._stop.listen()
        self.progress = Progress(total, description=c.pbar_description, start=self.step)
        self.progress.__enter__()
        self.saved_at = time.monotonic()

    def _note_environment(self, resumed: bool) -> None:
        """Writes environment.json; a resumed run says what is other than it was, since that may move the last bits."""
        assert self.folder is not None
        assert self.stream is not None
        now = {**environment(), **self.cluster.describe(), "passes": self.learner.passes(self.stream.batch_size)}
        before = noted_environment(self.folder.path)
        parts = ("versions", "cpu", "threads", "devices", "compute_dtype", "training", "rollout")
        changed = [k for k in parts if resumed and before.get(k) != now.get(k)]
        if changed:
            old, new = ({k: e.get(k) for k in changed} for e in (before, now))
            log.warning("resumed elsewhere, results may differ in the last bits: %s, now %s", old, new)
        for name, what in now["passes"].items():
            log.info("%s: %s", name, what)
        self.folder.write_json("environment.json", now)

    def _settings(self) -> dict[str, Any]:
        """The whole configuration as plain containers; from Python without models that were given as modules."""
        learner, cluster = self.learner, self.cluster
        if learner.settings is not None:
            return learner.settings
        roles = {role.value: worker.given for role, worker in cluster.workers.items()}
        return {
            **{name: dump_tree(given) for name, given in roles.items() if given is not None},
            "algo": dump_tree(learner.algo_config),
            "data": dump_tree(learner.data),
            "rollout": dump_tree(cluster.get_rollout_config(Mode.TRAIN)),
            "rollout_engine": dump_tree(cluster.cluster_config.rollout_engine),
            "trainer": dump_tree(self.config),
        }

    def _compared(self) -> dict[str, Any]:
        """What a resume compares: the settings, and what from Python stands beside them and has no key there."""
        rollout, evaluation = self.cluster.cluster_config.rollout_config, {}
        if isinstance(rollout, dict):  # else the section's own `eval` says how evaluation differs
            usual, own = (dump_tree(self.cluster.get_rollout_config(mode)) for mode in (Mode.TRAIN, Mode.EVAL))
            evaluation = {name: value for name, value in own.items() if value != usual[name]}
        beside = {"data_shuffle_seed": self.learner.data_shuffle_seed, "rollout_config[Mode.EVAL]": evaluation}
        return plain({**self.settings, "from Python": beside})

    # ---- the steps -----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Prompt]]]:
        """(step, prompts) from where the run stands to its end; steps count from 1."""
        assert self.stream is not None
        last = self.config.max_steps
        if last is not None and self.step >= last:
            return
        for prompts in self.stream:
            self.cluster.global_steps = self.step + 1
            self.step_started = time.monotonic()
            self.cluster.trace.times()
            with self.profiler.step(self.step + 1):
                yield self.step + 1, prompts
            if self._stop.asked:
                self.save()
                where = (
                    f"checkpoint: {self.checkpoints.root}/step-{self.step:06d}"
                    if self.checkpoints.root
                    else "no run_dir"
                )
                raise KeyboardInterrupt(f"stopped after step {self.step} ({where}); go on with trainer.resume=latest")
            if self.config.max_steps is not None and self.step >= self.config.max_steps:
                return

    def after_step(self, step: int, batch: TokenBatch, metrics: Mapping[str, Metric], rewarded: Rewarded) -> None:
        """Writes the step's row and completions; evaluates and saves where due."""
        self.step = step
        self.tokens += batch.num_tokens
        seconds = time.monotonic() - self.step_started
        row = {
            **flat(metrics),
            **self.cluster.take_metrics(step, Mode.TRAIN),
            "num_tokens": float(self.tokens),
            "epoch": self._epoch(),
            "optim/updates": float(self.cluster.actor_trainer.train_steps),
            **self.cluster.trace.times(),
            **memory_metrics(self.cluster.actor.device),
            "time/step": seconds,
            "perf/global_step_time": seconds,
            "perf/tokens_per_second": batch.num_tokens / max(seconds, 1e-9),
        }
        self._log(step, Mode.TRAIN, row)
        self._store(step, Mode.TRAIN, rewarded, batch)
        self.health.watch(step, row, rewarded, batch)
        shown = {n: row[n] for n in self.cluster.actor_trainer.displayed if n in row}
        speed = row["perf/tokens_per_second"]
        assert self.progress is not None
        self.progress.update(step, reward=row.get("reward", float("nan")), tokens_per_s=speed, shown=shown)
        if self.eval_ds is not None and self.config.eval_every_n_steps and step % self.config.eval_every_n_steps == 0:
            self.evaluate(step)
        if self._save_due(step):
            self.save()

    def _epoch(self) -> float:
        """Passes over the data so far; NaN where it has no length."""
        assert self.stream is not None
        each = self.stream.batches_per_epoch
        return self.stream.epoch + (self.stream.batch / each if each else float("nan"))

    def _log(self, step: int, mode: Mode, row: Mapping[str, float]) -> None:
        full = {"step": step, "mode": mode.value, "version": self.cluster.actor.version, **row}
        self.rows.append(full)
        if self.folder is not None:
            self.folder.log(step=step, mode=mode.value, version=self.cluster.actor.version, values=row)
        if self.loggers is not None:
            self.loggers.log(step, row, mode.value)

    def _store(self, step: int, mode: Mode, rewarded: Rewarded, batch: TokenBatch) -> None:
        """Writes the completions of a step."""
        if self.folder is not None:
            columns, rewards = completion_columns(rewarded, batch)
            self.folder.write_completions(step=step, mode=mode.value, columns=columns, rewards=rewards)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        """Rolls out the whole evaluation set and rewards it.

        Returns: the row that is logged: rewards/score/{mean,max,min}, each function's, lengths.
        """
        learner, cluster = self.learner, self.cluster
        if self._eval_prompts is None:
            self._eval_prompts = self._encode_eval()
        config = cluster.get_rollout_config(Mode.EVAL)
        generations = config.num_generations_eval or (1 if config.temperature == 0 else learner.num_generations)
        started = time.monotonic()
        with cluster.trace.span("eval"):
            groups = cluster.sample(self._eval_prompts, num_generations=generations, step=step, mode=Mode.EVAL)
            rewarded = learner.reward(groups, Mode.EVAL)
        batch = TokenBatch.from_groups(rewarded.groups, rewarded.total)
        metrics = rewarded_metrics(rewarded)
        each = np.split(rewarded.total, range(generations, len(rewarded.total), generations))
        known = [g[~np.isnan(g)] for g in each]
        best = np.array([g.max() for g in known if len(g)])
        metrics = merge(metrics, spread(f"rewards/best_of_{generations}", best) if generations > 1 else {})
        if np.isin(rewarded.total, (0.0, 1.0)).all():
            metrics = merge(metrics, {"accuracy": Mean(float(rewarded.total.sum()), len(rewarded.total))})
        row = {**flat(metrics), **cluster.take_metrics(step, Mode.EVAL), "time/eval": time.monotonic() - started}
        self._store(step, Mode.EVAL, rewarded, batch)
        self._log(step, Mode.EVAL, row)
        log.info("eval, step %d: reward %.4g  (%d prompts, %.1f s)", step, row["reward"], len(groups), row["time/eval"])
        return row

    def _encode_eval(self) -> list[Prompt]:
        rows = load_rows(self.eval_ds, split=None)
        encode, column = self._encoder(Mode.EVAL), self.learner.data.prompt_column
        stream = PromptStream(rows, batch_size=1, shuffle=False, last_batch="keep", encode=encode, prompt_column=column)
        prompts = [p for batch in stream for p in batch]
        self._check_fit(prompts, Mode.EVAL)
        log.info("evaluation data: %d prompts%s", len(prompts), _counted(encode))
        return prompts

    def _encoder(self, mode: Mode) -> PromptEncoder:
        data = self.learner.data
        return self.cluster.encoder(
            mode,
            prompt_column=data.prompt_column,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt or None,
        )

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_due(self, step: int) -> bool:
        options = self.config.checkpointing_options or CheckpointingOptions()
        if options.save_interval_steps is not None:
            return step % options.save_interval_steps == 0
        return time.monotonic() - self.saved_at >= options.save_interval_s

    def save(self) -> None:
        """Writes a checkpoint of the step just finished."""
        if self.checkpoints.root is None:
            return
        assert self.stream is not None
        options = self.config.checkpointing_options or CheckpointingOptions()
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "stream": self.stream.state(),
            "cluster": self.cluster.state(),
            "health": self.health.state(),
            "settings": self._compared(),
            "reads": self.reads,
            "random": random_state(),
        }
        with self.cluster.trace.span("checkpoint"):
            tokenizer = self.cluster.tokenizer
            self.checkpoints.save(self.step, state, tokenizer=tokenizer, keep=options.max_to_keep)
        self.saved_at = time.monotonic()

    def _refuse_old_checkpoints(self) -> None:
        """Raises ConfigError where a new run would take another's checkpoints for its own."""
        root = self.checkpoints.root
        self.checkpoints.open()
        if self.checkpoints.exist():
            raise ConfigError(
                f"{root} holds the checkpoints of a run; set trainer.resume=latest to go on with it, or another folder"
            )

    def _resume(self) -> int:
        """Takes up the checkpoint that `resume` names. Returns: its step; -1 where there is none yet."""
        assert self.config.resume is not None
        self.checkpoints.open()
        checkpoint = self.checkpoints.find(self.config.resume)
        if checkpoint is None:
            log.info("resume=latest: no checkpoint in %s yet; starting from the beginning", self.checkpoints.root)
            return -1
        own, root = self.config.run_dir, self.checkpoints.root
        if own is not None and root is not None and checkpoint.resolve().parent != root.resolve() and holds_steps(own):
            raise CheckpointError(
                f"{checkpoint} is another run's, and {own} holds steps of its own; give another trainer.run_dir, or "
                "trainer.resume=latest to go on with what lies there"
            )
        self._restore(checkpoint)
        return self.step

    def _restore(self, checkpoint: Path) -> None:
        self.checkpoints.verify(checkpoint)
        state = self.checkpoints.state(checkpoint)
        self._check_settings(state)
        assert self.stream is not None
        assert self.reads is not None
        check_reads(state.get("reads"), self.reads, allow=self.config.allow_config_change)
        self.stream.restore(state["stream"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.checkpoints.load(checkpoint)
        self.cluster.restore(state["cluster"], self.step)
        self.health.restore(state.get("health", {}))  # those of earlier versions have none
        set_random_state(state["random"])
        self.checkpoints.discard(after=self.step)
        log.info("resumed from %s: step %d is done", checkpoint, self.step)

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the configuration is another, listing the differences."""
        changed = changed_settings(state["settings"], self._compared())
        if not changed:
            return
        if not self.config.allow_config_change:
            raise CheckpointError(
                "the configuration differs from the checkpoint's:\n  "
                + "\n  ".join(changed)
                + "\nresume with the same one, or set trainer.allow_config_change=true to go on with these changes"
            )
        log.warning("resuming with a changed configuration:\n  %s", "\n  ".join(changed))

    # ---- the end -------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Saves the last step and the model where training ended by itself; closes everything in any case."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()

    def _close(self) -> None:
        self._stop.release()
        if self.progress is not None:
            self.progress.__exit__()
        if self.loggers is not None:
            self.loggers.close()
        self.checkpoints.close()
        if self.folder is not None:
            self.folder.close()

    def _finish(self) -> None:
        self.profiler.close()
        for trainer in self.cluster.trainers.values():
            trainer.hooks.on_train_end(trainer)
        if self.step == 0:
            raise DataError("the run ended without a single step: every prompt was dropped; raise max_prompt_length")
        self.save()  # before an evaluation that a longer run never makes: its draws and lengths are not the next step's
        if self.eval_ds is not None and not any(r["mode"] == "eval" and r["step"] == self.step for r in self.rows):
            self.evaluate(self.step)
        if self.folder is not None:
            self.checkpoints.export(self.folder.path / "final", self.step, self.cluster.actor, self.cluster.tokenizer)
        if self.timeline is not None:
            self.cluster.trace.write(self.timeline / "trace.json")


def _counted(encode: PromptEncoder) -> str:
    """What became of prompts over the limit, for the log; "" where there were none."""
    found = [f"{encode.counts[how]} {how}" for how in ("dropped", "truncated") if encode.counts[how]]
    return f"; over max_prompt_length={encode.max_prompt_length}: {', '.join(found)}" if found else ""
