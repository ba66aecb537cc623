"""Task: what a learner gives its run, namely what is trained and how it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whet.config import Role
from whet.run.observer import Observer

if TYPE_CHECKING:
    from whet.run.run import Run

__all__ = ["Task"]


class Task(Observer):
    """What a learner gives its run. It is notified of each event before the observers, and its errors end the run.

    All methods but `settings`, `inputs` and `evaluate` have defaults: no evaluation, one update a step, no state.
    """

    has_evaluation = False
    """Whether there are evaluation data."""

    main_metric = "reward"
    """The metric that the progress bar shows first, with its curve."""

    eval_unit = "prompts"
    """The items of an evaluation, which it counts in its metric <eval_unit>/count."""

    required_state: tuple[str, ...] = ()
    """The entries of `state` without which a run can't be resumed."""

    def settings(self) -> dict[str, Any]:
        """Returns the whole configuration as plain containers: for loggers, and compared on a resume."""
        raise NotImplementedError

    def sections(self) -> Any:
        """Returns the configuration, or its sections by name, for config.yaml; the settings if it came from neither."""
        return self.settings()

    def extra_settings(self) -> dict[str, Any]:
        """Settings that have no key in the configuration; a resume compares them too."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """Returns what the run reads besides the checkpoint: see run.provenance.record_inputs."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called once, before anything is written: encodes the evaluation data, and raises what is wrong."""

    def rehearse(self) -> None:
        """Called before the first step, where trainer.rehearse says so: runs what takes the most memory."""

    def progress_fields(self, row: Mapping[str, float]) -> dict[str, str]:
        """Returns what the progress line shows of a step after the main metric: name -> formatted number."""
        return {}

    def expected_metrics(self) -> tuple[str, ...]:
        """Returns the metrics that evaluations will have, as far as known before the first one."""
        return ()

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """Returns the passes of a step besides its updates, with those that it skips: name -> description."""
        return {}

    def total_updates(self, role: Role, steps: int, batch_size: int) -> int:
        """Returns the number of optimizer steps of a role in `steps` steps of `batch_size` items, for its schedule."""
        return steps

    def evaluate(self, run: Run, step: int) -> dict[str, float]:
        """Evaluates on the evaluation data. Returns: the row to be logged."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Entries of run.pt, plain containers and tensors: what a resumed run needs besides the models, the data order
        and the random generators.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the entries, after the models are loaded. Args: state: all of run.pt."""
