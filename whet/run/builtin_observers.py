"""The observers that a run makes itself.

    KeepBest         trainer.keep_best     keeps the checkpoint of the best evaluation
    StopWhen         trainer.stop_when     stops the run when a metric leaves its band
    WriteModelCard   every run             writes model_card.md at the end
    PushToHub        trainer.hub_model_id  sends the model to the Hugging Face hub

KeepBest and StopWhen protect a checkpoint, which max_to_keep then does not remove: `best`, and `before_stop`, the last
one that was written while every watched metric lay within its band. checkpoints/best and checkpoints/before_stop are
text files with the names of the folders, like checkpoints/latest. The state of both is saved in checkpoints, so a
resumed run keeps and stops as an uninterrupted one does.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config import Mode, TrainingConfig
from whet.config.monitoring import BEFORE_STOP, BEST, Band, KeepBestOptions
from whet.errors import ConfigError, format_exception, nearest
from whet.hub.model_card import write_model_card
from whet.hub.push import FINAL, check_hub_token, push_to_hub
from whet.run.observer import Observer

if TYPE_CHECKING:
    from whet.run.run import Run

__all__ = ["KeepBest", "PushToHub", "StopWhen", "WriteModelCard", "builtin_observers", "check_push_to_hub"]

log = logging.getLogger("whet")

EVAL = "eval/"
"""The prefix of evaluation metrics in stop_when, as for loggers."""
PATIENCE = 3
"""A metric may be missing from this many rows of steps that updated the policy. Some metrics come only later."""
_NO_METRIC = ("step", "mode", "version")


def builtin_observers(config: TrainingConfig) -> list[Observer]:
    """Returns the observers that every run has, and those that its configuration asks for."""
    observers: list[Observer] = []
    if config.keep_best is not None:
        observers.append(KeepBest(config.keep_best))
    if config.stop_when:
        observers.append(StopWhen(config.stop_when))
    observers.append(WriteModelCard())  # before PushToHub, which sends it
    if config.hub_model_id is not None:
        observers.append(PushToHub(config))
    return observers


class KeepBest(Observer):
    """Saves and protects the checkpoint of the evaluation with the best value.

    The evaluation before the first step counts: if no later one is better, there is no best checkpoint. Of equal values
    the first is the best. NaN is never the best.

    Args: options: the metric, and whether its largest or its smallest value is the best.
    """

    def __init__(self, options: KeepBestOptions) -> None:
        self.options = options
        self.step: int | None = None
        """The step of the best evaluation so far; 0 = before the first step; None = there was no evaluation."""
        self.value = math.nan

    def on_run_begin(self, run: Run) -> None:
        """Checks that there are evaluations and a folder for checkpoints; protects a resumed run's best checkpoint."""
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
            log.warning("%s is not among the metrics that are known before the first evaluation%s", where, near)
        if not run.checkpoints.protect(BEST, self.step or None) and self.step:
            log.warning("the best checkpoint so far, of step %d, is not in %s", self.step, run.checkpoints.root)

    def on_evaluate(self, run: Run, row: Mapping[str, Any]) -> None:
        """Compares an evaluation with the best. Raises ConfigError if evaluations have no such metric."""
        name = self.options.metric
        if name not in row:
            raise ConfigError(f"trainer.keep_best.metric={name!r} is not a metric of the evaluation{_known(name, row)}")
        value = float(row[name])
        sign = 1 if self.options.mode == "max" else -1
        if math.isnan(value) or (self.step is not None and sign * value <= sign * self.value):
            return
        self.step, self.value = int(row["step"]), value
        if self.step:
            log.info("best %s so far: %.4g at step %d", name, value, self.step)
            run.checkpoints.protect(BEST, self.step)
            run.control.save = True

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Logs the best value."""
        if self.step is not None:
            at = f"at step {self.step}" if self.step else "before the first step, so no checkpoint is kept as best"
            log.info("best %s: %.4g, %s", self.options.metric, self.value, at)

    def state(self) -> dict[str, Any]:
        """Returns the best evaluation so far."""
        return {"metric": self.options.metric, "mode": self.options.mode, "step": self.step, "value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, unless it is of another metric."""
        if (state["metric"], state["mode"]) != (self.options.metric, self.options.mode):
            log.warning("trainer.keep_best has changed to %s: earlier evaluations are not compared", self.options)
            return
        self.step, self.value = state["step"], state["value"]


class StopWhen(Observer):
    """Stops the run when a metric has been outside its band for `steps` consecutive rows.

    A row without the metric, or with NaN, counts neither as inside nor as outside.

    Args: bands: metric -> band; eval/<metric> is a metric of evaluations, other names are metrics of steps.
    """

    def __init__(self, bands: Mapping[str, Band]) -> None:
        self.bands = dict(bands)
        self.outside = dict.fromkeys(bands, 0)
        """Consecutive rows in which each metric was outside its band."""
        self.missed = dict.fromkeys(bands, 0)
        """Rows without each metric since the start; -1 = the metric has been seen."""
        self.inside: int | None = None
        """The step of the last checkpoint at which all metrics were inside; None = there is none."""
        self.reason: str | None = None
        """Why the run was stopped; None = it was not stopped."""

    def on_run_begin(self, run: Run) -> None:
        """Checks that evaluation metrics can come; protects a resumed run's checkpoint."""
        eval_metrics = [name for name in self.bands if name.startswith(EVAL)]
        if eval_metrics and not run.task.has_evaluation:
            raise ConfigError(
                f"trainer.stop_when.{eval_metrics[0]} needs evaluations, and there is no evaluation data; give "
                "train() eval_ds, or set data.eval_path, data.eval_split or data.eval_fraction"
            )
        if run.step and not any(self.outside.values()):
            self.inside = run.step  # the checkpoint that it was resumed from
        run.checkpoints.protect(BEFORE_STOP, self.inside)
        if run.folder is not None:
            (run.folder.path / "stopped.json").unlink(missing_ok=True)

    def on_log(self, run: Run, row: Mapping[str, Any]) -> None:
        """Compares a row with the bands. Raises ConfigError for a metric that no row has."""
        is_eval = row["mode"] == Mode.EVAL.value
        for name, band in self.bands.items():
            if name.startswith(EVAL) == is_eval:
                self._check_band(run, name, band, row)

    def _check_band(self, run: Run, name: str, band: Band, row: Mapping[str, Any]) -> None:
        own = name.removeprefix(EVAL)
        if own not in row:
            if name.startswith(EVAL) or _learned(row):
                self.missed[name] += self.missed[name] >= 0
                if (count := self.missed[name]) >= max(PATIENCE, band.steps):
                    raise ConfigError(
                        f"trainer.stop_when.{name}: {count} rows, and none had that metric{_known(own, row)}"
                    )
            return
        self.missed[name], value = -1, float(row[own])
        if math.isnan(value):
            return
        bound = _crossed_bound(band, value)
        self.outside[name] = self.outside[name] + 1 if bound else 0
        if bound and self.outside[name] >= band.steps and self.reason is None:
            self.reason = f"{name} was {value:.4g}, {bound}, for {self.outside[name]} consecutive rows"
            kept = "no checkpoint was written before"
            if self.inside is not None:
                kept = f"checkpoint before it: {(run.checkpoints.root or Path()) / f'step-{self.inside:06d}'}"
            log.warning("stopped by trainer.stop_when at step %d: %s; %s", row["step"], self.reason, kept)
            run.control.stop = True
            if run.folder is not None:
                stopped = {"step": row["step"], "metric": name, "value": value, "why": self.reason}
                run.folder.write_json("stopped.json", {**stopped, "before": self.inside})

    def on_save(self, run: Run, folder: Path) -> None:
        """Protects a checkpoint at which every metric was inside its band."""
        if not any(self.outside.values()):
            self.inside = run.step
            run.checkpoints.protect(BEFORE_STOP, run.step)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Warns of metrics that no row had, in a run that was too short for an error."""
        for name, missed in self.missed.items():
            if missed > 0 and error is None:
                row = run.rows[-1] if run.rows else {}
                log.warning(
                    "trainer.stop_when.%s: no row had that metric%s", name, _known(name.removeprefix(EVAL), row)
                )

    def state(self) -> dict[str, Any]:
        """Returns how long each has been outside, and the checkpoint before."""
        return {"outside": dict(self.outside), "missed": dict(self.missed), "inside": self.inside}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores it; a metric that was not watched before starts anew."""
        self.inside = state["inside"]
        for name in self.bands:
            self.outside[name] = state["outside"].get(name, 0)
            self.missed[name] = state["missed"].get(name, 0)


def _crossed_bound(band: Band, value: float) -> str:
    """Returns the bound that a value has crossed; "" inside the band.

    >>> _crossed_bound(Band(below=0.1), 0.05), _crossed_bound(Band(below=0.1), 0.1)
    ('below 0.1', '')
    """
    if band.below is not None and value < band.below:
        return f"below {band.below:g}"
    return f"above {band.above:g}" if band.above is not None and value > band.above else ""


def _learned(row: Mapping[str, Any]) -> bool:
    """Returns whether the policy was updated in a step, so that the row has the metrics of an update (entropy, kl).

    >>> _learned({"reward": 0.0}), _learned({"grad_norm": 0.0, "advantage/nonzero_frac": 0.0})
    (False, False)
    """
    return "grad_norm" in row and row.get("advantage/nonzero_frac") != 0


def _known(name: str, row: Mapping[str, Any]) -> str:
    """Returns the end of a message: the nearest metrics of a row, and all of them."""
    names = [n for n in row if n not in _NO_METRIC]
    return f"{nearest(name, names) or ';'} there are {', '.join(sorted(names))}"


class WriteModelCard(Observer):
    """Writes the model card of a finished run into its folder: model_card.md."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Writes the card. The model is already saved, so an error is only logged."""
        if error is not None or run.folder is None:
            return
        try:
            write_model_card(run.folder.path)
        except Exception as wrong:
            log.warning("the model card could not be written: %s", format_exception(wrong))


def check_push_to_hub(config: TrainingConfig) -> None:
    """Checks that a run can push its model: it has a folder, and the hub accepts the token.

    Raises: ConfigError: it can't.
    """
    if config.hub_model_id is None:
        return
    if config.run_dir is None:
        raise ConfigError("trainer.hub_model_id sends the model in the run folder; set trainer.run_dir")
    check_hub_token()


class PushToHub(Observer):
    """Sends the final model, and with hub_strategy=every_save each checkpoint's model, in a thread beside the training.

    A checkpoint is skipped if the one before is still being sent. A failed push ends no run: it is logged, with the
    command that sends the model later.

    Args: config: with hub_model_id, hub_strategy and hub_private_repo.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self._thread: threading.Thread | None = None

    def on_run_begin(self, run: Run) -> None:
        """Checks that the model can be sent, before anything is trained."""
        check_push_to_hub(self.config)

    def on_save(self, run: Run, folder: Path) -> None:
        """Begins to send a checkpoint."""
        if self.config.hub_strategy != "every_save" or run.folder is None:
            return
        if self._thread is not None and self._thread.is_alive():
            log.info("%s is not sent: the checkpoint before is still being sent", folder.name)
            return
        self._thread = threading.Thread(target=self._push, args=(run.folder.path, folder.name), daemon=True)
        self._thread.start()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Waits for the checkpoint that is being sent, and sends the final model of a finished run."""
        if self._thread is not None:
            self._thread.join()
        if error is None and run.folder is not None:
            self._push(run.folder.path, FINAL)

    def _push(self, run_dir: Path, which: str) -> None:
        config = self.config
        try:
            result = push_to_hub(run_dir, config.hub_model_id, which=which, private=config.hub_private_repo)
        except Exception as error:  # an error of whet, the hub's client or the network
            retry = f"whet push {run_dir} repo={config.hub_model_id}" + (f" which={which}" if which != FINAL else "")
            log.warning("%s was not sent: %s; later: %s", which, format_exception(error), retry)
        else:
            log.info("%s is sent: %s", which, result.url)
