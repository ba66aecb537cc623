"""Observers: who is told of a run's events, and what they may ask of it.

Observers are told in the order in which they were given. One that raises ends the run as an error, with nothing lost:
the current step is finished, evaluated where that is due and saved, and then the error is raised with a note of where
to resume. Meanwhile the observer is told nothing more. An error in on_run_begin is raised at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whet.config import Mode, TrainingConfig
from whet.errors import ConfigError, format_exception, nearest
from whet.storage.run_folder import RunFolder
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import Metrics

__all__ = ["Observed", "Observer", "Observers", "TrainerControl"]

log = logging.getLogger("whet")


@dataclass(kw_only=True)
class TrainerControl:
    """What observers ask of a run: done when the current step is finished, each flag then cleared."""

    stop: bool = False
    """End the run as if the data ended here: with its last checkpoint, evaluation and final model."""
    save: bool = False
    """Write a checkpoint."""
    evaluate: bool = False
    """Evaluate."""
    log: bool = False
    """Have the loggers write out what they hold back (see metrics_logging_options.flush_every_n_steps)."""

    def take(self, name: str) -> bool:
        """Whether a flag is set; it is cleared."""
        asked = bool(getattr(self, name))
        setattr(self, name, False)
        return asked


class Measured(Protocol):
    """What an observer sees of a run's task."""

    has_evaluation: bool
    """Whether there is data to evaluate on."""

    def expected_metrics(self) -> tuple[str, ...]:
        """Metrics that an evaluation will have, as far as that is known before the first."""
        ...


class Observed(Protocol):
    """What an observer sees of a run, a run.run.Run."""

    checkpoints: Checkpoints
    config: TrainingConfig
    control: TrainerControl
    folder: RunFolder | None
    rows: list[dict[str, Any]]
    step: int
    tokens: int

    def keep_completions(self, step: int, mode: Mode, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
        """Writes completions to the run folder, and gives them to the loggers that show some."""
        ...

    @property
    def task(self) -> Measured:
        """What is trained."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where the data don't tell."""
        ...

    @property
    def trainer(self) -> RoleTrainer:
        """The role whose model the run makes."""
        ...


class Observer:
    """Told of a run's events; override what you need, and set flags of `run.control` for what you want of it.

    >>> class Enough(Observer):
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

    def on_run_begin(self, run: Observed) -> None:
        """The run is open and, where it was asked to, resumed: `run.step` steps are done. An error here ends it."""

    def on_step_begin(self, run: Observed, index: int) -> None:
        """Before a step; steps count from 1."""

    def on_update_end(self, run: Observed, trainer: RoleTrainer, metrics: Metrics) -> None:
        """After each optimizer step of a role."""

    def on_step_end(self, run: Observed, step: Any) -> None:
        """After a step. Args: step: its record (of reinforcement learning a learners.step.Step); its row of numbers is
        run.rows[-1].
        """

    def on_log(self, run: Observed, row: Mapping[str, Any]) -> None:
        """A row of numbers was written: of a step or an evaluation, by its "mode"."""

    def on_evaluate(self, run: Observed, row: Mapping[str, Any]) -> None:
        """After an evaluation; `row` is what was logged."""

    def on_save(self, run: Observed, folder: Path) -> None:
        """A checkpoint was written."""

    def on_run_end(self, run: Observed, error: BaseException | None) -> None:
        """The run is over, all is written; `error`: what ended it, None where it ended by itself."""

    def state(self) -> dict[str, Any]:
        """What it keeps from step to step, for checkpoints: plain containers and tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores it where a run is resumed whose checkpoint has it, before on_run_begin."""


class Observers:
    """The observers of a run as one.

    Args: given: in the order in which they are told.
    Raises: ConfigError: one is not an Observer.
    """

    def __init__(self, given: Iterable[Observer]) -> None:
        self._told = list(given)
        self.error: Exception | None = None
        """What the first of them raised."""
        for one in self._told:
            if not isinstance(one, Observer):
                raise ConfigError(
                    f"observer {one!r:.80} is not an Observer; give instances of subclasses of whet.run.observer."
                    "Observer"
                )

    def tell(self, event: str, *args: Any) -> None:
        """Tells all of an event. One that raises is dropped, and its error kept: the first as `error`."""
        for one in list(self._told):
            try:
                getattr(one, event)(*args)
            except Exception as error:
                self._told.remove(one)
                who = f"observer {type(one).__name__}.{event}"
                log.warning("%s raised %s", who, format_exception(error))
                if self.error is None:
                    error.add_note(f"raised by {who}")
                    self.error = error

    def state(self) -> dict[str, Any]:
        """What the observers keep, by the names of their classes; of those that raised nothing."""
        return {name: kept for name, one in self._named() if (kept := one.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what each has kept; one that was not there starts as in a new run."""
        for name, one in self._named():
            if name in state:
                one.restore(state[name])

    def _named(self) -> list[tuple[str, Observer]]:
        """The observers with a name each: their class's, with a number from the second of a class on."""
        seen: Counter[str] = Counter()
        named = []
        for one in self._told:
            kind = type(one).__name__
            seen[kind] += 1
            named.append((kind if seen[kind] == 1 else f"{kind}-{seen[kind]}", one))
        return named

    def check(self, note: str = "") -> None:
        """Raises what an observer has raised, once, with a note."""
        if self.error is not None:
            error, self.error = self.error, None
            if note:
                error.add_note(note)
            raise error
