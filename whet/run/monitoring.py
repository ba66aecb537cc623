"""The observers of every run: trainer.keep_best and trainer.stop_when watch its metrics, and its model card is written.

The first two set a checkpoint aside, which max_to_keep then does not remove: `best`, and `before_stop`, the last one
that was written while every watched metric lay within its band. checkpoints/best and checkpoints/before_stop are text
files with the names of their folders, as checkpoints/latest is. What they know is part of a checkpoint, so that a
resumed run keeps and stops as the uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config import Mode, TrainingConfig
from whet.config.monitoring import BEFORE_STOP, BEST, Band, KeepBestOptions
from whet.errors import ConfigError, nearest
from whet.hub.model_card import write_model_card
from whet.run.observer import Observed, Observer

__all__ = ["KeepBest", "StopWhen", "WriteCard", "watchers"]

log = logging.getLogger("whet")

EVAL = "eval/"
"""What the name of a metric of evaluations begins with in stop_when, as for loggers."""
PATIENCE = 3
"""Rows of steps that learned something in which a metric may be missing; some come only with their cause."""
_NO_METRIC = ("step", "mode", "version")


def watchers(config: TrainingConfig) -> list[Observer]:
    """The observers that every run has, and those that its configuration asks for."""
    best = [] if config.keep_best is None else [KeepBest(config.keep_best)]
    stop = [StopWhen(config.stop_when)] if config.stop_when else []
    return [*best, *stop, WriteCard()]


class WriteCard(Observer):
    """Writes the model card of a finished run into its folder: model_card.md."""

    def on_run_end(self, run: Observed, error: BaseException | None) -> None:
        """The model is trained and saved: what is wrong with its card is logged, and fails no run."""
        if error is not None or run.folder is None:
            return
        try:
            write_model_card(run.folder.path)
        except Exception as wrong:
            log.warning("the model card could not be written: %s: %s", type(wrong).__name__, wrong)


class KeepBest(Observer):
    """Keeps the checkpoint of the evaluation with the best value: saves it, and sets it aside.

    The evaluation before the first step counts: where none after it is better there is no best checkpoint. Of equal
    values the first is the best; NaN never is.

    Args: options: which metric, and whether the greatest or the least value is the best.
    """

    def __init__(self, options: KeepBestOptions) -> None:
        self.options = options
        self.step: int | None = None
        """Of the best evaluation so far; 0 = before the first step; None = there was none."""
        self.value = math.nan

    def on_run_begin(self, run: Observed) -> None:
        """Checks that there is something to compare and a place for it; a resumed run has its best set aside."""
        where = f"trainer.keep_best.metric={self.options.metric}"
        if not run.task.has_evaluation:
            raise ConfigError(
                f"{where} compares evaluations, and there is no evaluation data; give train() eval_ds, or set "
                "data.eval_path, data.eval_split or data.eval_fraction"
            )
        if run.checkpoints.root is None:
            raise ConfigError(f"{where} needs a folder for checkpoints; set trainer.run_dir")
        known = run.task.expected_metrics()
        if self.options.metric not in known and (near := nearest(self.options.metric, known)):
            log.warning("%s is none of the metrics that are known before the first evaluation%s", where, near)
        if not run.checkpoints.set_aside(BEST, self.step or None) and self.step:
            log.warning("the best checkpoint so far, of step %d, is not in %s", self.step, run.checkpoints.root)

    def on_evaluate(self, run: Observed, row: Mapping[str, Any]) -> None:
        """Compares. Raises ConfigError where evaluations have no such metric."""
        name = self.options.metric
        if name not in row:
            raise ConfigError(f"trainer.keep_best.metric={name!r} is no metric of an evaluation{_known(name, row)}")
        value = float(row[name])
        sign = 1 if self.options.mode == "max" else -1
        if math.isnan(value) or (self.step is not None and sign * value <= sign * self.value):
            return
        self.step, self.value = int(row["step"]), value
        if self.step:
            log.info("best %s so far: %.4g at step %d", name, value, self.step)
            run.checkpoints.set_aside(BEST, self.step)
            run.control.save = True

    def on_run_end(self, run: Observed, error: BaseException | None) -> None:
        """Says which is the best."""
        if self.step is not None:
            of = f"step {self.step}" if self.step else "the model that it began with, so no checkpoint is kept as best"
            log.info("best %s: %.4g, of %s", self.options.metric, self.value, of)

    def state(self) -> dict[str, Any]:
        """The best so far."""
        return {"metric": self.options.metric, "mode": self.options.mode, "step": self.step, "value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores it, where it is of the same metric."""
        if (state["metric"], state["mode"]) != (self.options.metric, self.options.mode):
            log.warning("trainer.keep_best has changed to %s: evaluations before are not compared", self.options)
            return
        self.step, self.value = state["step"], state["value"]


class StopWhen(Observer):
    """Stops the run once a metric has been outside its band for so many rows in a row.

    A row without the metric, or with NaN, counts neither as inside nor as outside.

    Args: bands: metric -> band; eval/<metric> is of evaluations, others of steps.
    """

    def __init__(self, bands: Mapping[str, Band]) -> None:
        self.bands = dict(bands)
        self.outside = dict.fromkeys(bands, 0)
        """Rows in a row that each has been outside for."""
        self.missed = dict.fromkeys(bands, 0)
        """Rows that each has been missing from since the start; -1 = it has been seen."""
        self.inside: int | None = None
        """The step of the last checkpoint at which all were inside; None = there is none."""
        self.reason: str | None = None
        """Why the run was stopped; None = it was not."""

    def on_run_begin(self, run: Observed) -> None:
        """Checks that the metrics can come; a resumed run has its checkpoint set aside."""
        of_evaluations = [name for name in self.bands if name.startswith(EVAL)]
        if of_evaluations and not run.task.has_evaluation:
            raise ConfigError(
                f"trainer.stop_when.{of_evaluations[0]} is of evaluations, and there is no evaluation data; give "
                "train() eval_ds, or set data.eval_path, data.eval_split or data.eval_fraction"
            )
        if run.step and not any(self.outside.values()):
            self.inside = run.step  # the checkpoint that it was resumed from
        run.checkpoints.set_aside(BEFORE_STOP, self.inside)
        if run.folder is not None:
            (run.folder.path / "stopped.json").unlink(missing_ok=True)

    def on_log(self, run: Observed, row: Mapping[str, Any]) -> None:
        """Looks at a row. Raises ConfigError for a metric that does not come."""
        evaluated = row["mode"] == Mode.EVAL.value
        for name, band in self.bands.items():
            if name.startswith(EVAL) == evaluated:
                self._look(run, name, band, row)

    def _look(self, run: Observed, name: str, band: Band, row: Mapping[str, Any]) -> None:
        own = name.removeprefix(EVAL)
        if own not in row:
            if name.startswith(EVAL) or _learned(row):
                self._miss(name, band, row)
            return
        self.missed[name], value = -1, float(row[own])
        if math.isnan(value):
            return
        bound = _crossed(band, value)
        self.outside[name] = self.outside[name] + 1 if bound else 0
        if bound and self.outside[name] >= band.steps and self.reason is None:
            self.reason = f"{name} was {value:.4g}, {bound}, after {self.outside[name]} in a row outside its band"
            kept = (
                "no checkpoint was written before"
                if self.inside is None
                else f"checkpoint before it: {self._path(run)}"
            )
            log.warning("stopped by trainer.stop_when at step %d: %s; %s", row["step"], self.reason, kept)
            run.control.stop = True
            if run.folder is not None:
                found = {"step": row["step"], "metric": name, "value": value, "why": self.reason, "before": self.inside}
                run.folder.write_json("stopped.json", found)

    def _miss(self, name: str, band: Band, row: Mapping[str, Any]) -> None:
        """Counts a row that should have had a metric. Raises ConfigError where none has had it for too long."""
        self.missed[name] += self.missed[name] >= 0
        if (count := self.missed[name]) >= max(PATIENCE, band.steps):
            found = _known(name.removeprefix(EVAL), row)
            raise ConfigError(f"trainer.stop_when.{name}: {count} rows, and none had that metric{found}")

    def _path(self, run: Observed) -> Path:
        return (run.checkpoints.root or Path()) / f"step-{self.inside:06d}"

    def on_save(self, run: Observed, folder: Path) -> None:
        """Sets a checkpoint aside at which all is well."""
        if not any(self.outside.values()):
            self.inside = run.step
            run.checkpoints.set_aside(BEFORE_STOP, run.step)

    def on_run_end(self, run: Observed, error: BaseException | None) -> None:
        """Says which metrics have never come, in a run that was too short to be ended for it."""
        for name, missed in self.missed.items():
            if missed > 0 and error is None:
                row = run.rows[-1] if run.rows else {}
                log.warning(
                    "trainer.stop_when.%s: no row had that metric%s", name, _known(name.removeprefix(EVAL), row)
                )

    def state(self) -> dict[str, Any]:
        """How long each has been outside, and the checkpoint before."""
        return {"outside": dict(self.outside), "missed": dict(self.missed), "inside": self.inside}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores it; a metric that was not watched before starts anew."""
        self.inside = state["inside"]
        for name in self.bands:
            self.outside[name] = state["outside"].get(name, 0)
            self.missed[name] = state["missed"].get(name, 0)


def _crossed(band: Band, value: float) -> str:
    """The bound that a value lies beyond; "" inside the band.

    >>> _crossed(Band(below=0.1), 0.05), _crossed(Band(below=0.1), 0.1)
    ('below 0.1', '')
    """
    if band.below is not None and value < band.below:
        return f"below {band.below:g}"
    return f"above {band.above:g}" if band.above is not None and value > band.above else ""


def _learned(row: Mapping[str, Any]) -> bool:
    """Whether a step's policy was updated on something, so that what an update measures (entropy, kl) is in its row.

    >>> _learned({"reward": 0.0}), _learned({"grad_norm": 0.0, "advantage/nonzero_frac": 0.0})
    (False, False)
    """
    return "grad_norm" in row and row.get("advantage/nonzero_frac") != 0


def _known(name: str, row: Mapping[str, Any]) -> str:
    """The end of a message: the nearest metrics of a row, and all of them."""
    names = [n for n in row if n not in _NO_METRIC]
    return f"{nearest(name, names) or ';'} there are {', '.join(sorted(names))}"
