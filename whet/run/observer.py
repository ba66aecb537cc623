"""Observers: they are notified of a run's events, and may request a checkpoint, an evaluation or the end of the run.

Observers are called in the order in which they were given. One that raises ends the run with its error, and nothing is
lost: the current step is finished, evaluated if that is due, and saved; then the error is raised with a note of the
checkpoint to resume from. The observer is not called again. An error in on_run_begin is raised at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, format_exception, nearest
from whet.train.metric_reduction import Metrics
from whet.train.role_trainer import RoleTrainer

if TYPE_CHECKING:
    from whet.run.run import Run

__all__ = ["Observer", "Observers", "TrainerControl"]

log = logging.getLogger("whet")


@dataclass(kw_only=True)
class TrainerControl:
    """Requests of observers to a run. They are met when the current step is finished, and the flags are cleared."""

    stop: bool = False
    """End the run as if the data ended here: with its last checkpoint, evaluation and final model."""
    save: bool = False
    """Write a checkpoint."""
    evaluate: bool = False
    """Evaluate."""
    log: bool = False
    """Flush the loggers (see metrics_logging_options.flush_every_n_steps)."""

    def take(self, name: str) -> bool:
        """Returns whether a flag is set; clears it."""
        requested = bool(getattr(self, name))
        setattr(self, name, False)
        return requested


class Observer:
    """Notified of a run's events. Override the methods you need, and set flags of `run.control` for requests.

    >>> class StopAtReward(Observer):
    ...     def on_step_end(self, run, step):
    ...         run.control.stop = run.rows[-1]["reward"] > 0.9
    """

    def __init_subclass__(cls) -> None:
        events = [name for name in vars(Observer) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in events:
                raise ConfigError(
                    f"{cls.__name__}.{name} is not an event, and would never be called"
                    f"{nearest(name, events) or '; events are ' + ', '.join(events)}"
                )

    def on_run_begin(self, run: Run) -> None:
        """Called when the run is open and, if asked, resumed: `run.step` steps are done. An error ends it at once."""

    def on_step_begin(self, run: Run, index: int) -> None:
        """Called before a step; steps count from 1."""

    def on_update_end(self, run: Run, trainer: RoleTrainer, metrics: Metrics) -> None:
        """Called after each optimizer step of a role."""

    def on_step_end(self, run: Run, step: Any) -> None:
        """Called after a step. Args: step: a learners.step.Step or ExampleStep. run.rows[-1] has its metrics."""

    def on_log(self, run: Run, row: Mapping[str, Any]) -> None:
        """Called after a row of metrics was written: row["mode"] is "train" for a step, "eval" for an evaluation."""

    def on_evaluate(self, run: Run, row: Mapping[str, Any]) -> None:
        """Called after an evaluation. Args: row: its logged metrics."""

    def on_save(self, run: Run, folder: Path) -> None:
        """Called after a checkpoint was written."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called when the run is over and all is written. Args: error: what ended it; None = there was none."""

    def state(self) -> dict[str, Any]:
        """Returns the observer's state, for checkpoints: plain containers and tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state` in a resumed run, before on_run_begin; not called if the checkpoint has none."""


class Observers:
    """The observers of a run as one.

    Args: observers: in the order in which they are called.
    Raises: ConfigError: one is not an Observer.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self.error: Exception | None = None
        """The first error that an observer raised."""
        for observer in self._observers:
            if not isinstance(observer, Observer):
                raise ConfigError(
                    f"observer {observer!r:.80} is not an Observer; give instances of subclasses of whet.run.observer."
                    "Observer"
                )

    def notify(self, event: str, *args: Any) -> None:
        """Calls a method of every observer. One that raises is removed, and the first error kept in `error`."""
        for observer in list(self._observers):
            try:
                getattr(observer, event)(*args)
            except Exception as error:
                self._observers.remove(observer)
                source = f"observer {type(observer).__name__}.{event}"
                log.warning("%s raised %s", source, format_exception(error))
                if self.error is None:
                    error.add_note(f"raised by {source}")
                    self.error = error

    def state(self) -> dict[str, Any]:
        """Returns the states of the observers that raised nothing, by the names of their classes."""
        return {name: state for name, observer in self._named() if (state := observer.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the states. An observer without a saved state starts as in a new run."""
        for name, observer in self._named():
            if name in state:
                observer.restore(state[name])

    def _named(self) -> list[tuple[str, Observer]]:
        """Returns the observers by the names of their classes, with a number from the second one of a class on."""
        seen: Counter[str] = Counter()
        named = []
        for observer in self._observers:
            name = type(observer).__name__
            seen[name] += 1
            named.append((name if seen[name] == 1 else f"{name}-{seen[name]}", observer))
        return named

    def check(self, note: str = "") -> None:
        """Raises the error of an observer, once, with a note."""
        if self.error is not None:
            error, self.error = self.error, None
            if note:
                error.add_note(note)
            raise error
