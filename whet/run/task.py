"""What a run does not know itself: what is trained, and how it is measured. A learner gives it as a Task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from whet.config import Role
from whet.observe.trace import Trace
from whet.run.observer import Observed, Observer
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer

__all__ = ["Roles", "Stream", "Task"]


class Roles(Protocol):
    """The models of a run. An RLCluster is one."""

    tokenizer: Any
    trace: Trace
    checkpoints: Checkpoints

    @property
    def trainers(self) -> Mapping[Role, RoleTrainer]:
        """The roles that are trained, the one whose model the run makes first."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was chosen for this machine, for environment.json."""
        ...


class Stream(Protocol):
    """The data of a run in their order: batches, each step's. A data.order.PromptStream is one."""

    batch_size: int
    batch: int
    epoch: int
    num_epochs: int | None

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches of one pass; None where the data have no length."""
        ...

    def state(self) -> dict[str, int]:
        """The place after the last batch handed out."""
        ...

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues from a place."""
        ...

    def __iter__(self) -> Iterator[list[Any]]: ...


class Task(Observer):
    """What a learner gives its run. It is the first to be told of each event, and an error of its own is the run's.

    All but `settings` has a default: no evaluation, one update a step, no state.
    """

    has_evaluation = False
    """Whether `evaluate` has data."""

    headline = "reward"
    """The metric that the progress bar shows first, with its curve."""

    evaluated = "prompts"
    """What an evaluation counts, in its metric evaluated/count."""

    needs: tuple[str, ...] = ()
    """Entries of run.pt, of those that `state` gives, without which the run can't be resumed."""

    def settings(self) -> dict[str, Any]:
        """The whole configuration as plain containers: written to the run folder, compared on a resume."""
        raise NotImplementedError

    def sections(self) -> Any:
        """The same as a configuration, or as the sections of one by their names, where it comes from one."""
        return self.settings()

    def compared(self) -> dict[str, Any]:
        """What a resume compares besides the settings."""
        return {}

    def reads(self) -> dict[str, Any]:
        """What is read besides the checkpoint: see run.provenance.record_inputs."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Once, before anything is written: encodes the evaluation data, and refuses what could not work."""

    def shown(self, row: Mapping[str, float]) -> dict[str, str]:
        """What the progress line shows of a step besides the headline: name -> number, as it is to be read."""
        return {}

    def expected_metrics(self) -> tuple[str, ...]:
        """Metrics that an evaluation will have, as far as that is known before the first."""
        return ()

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """What a step runs besides its updates and what it leaves out, each with the reason."""
        return {}

    def num_updates(self, batch_size: int) -> int:
        """Optimizer steps of a step of so many items."""
        return 1

    def total_updates(self, role: Role, steps: int, batch_size: int) -> int:
        """Optimizer steps of a role in the first steps of a run, each of so many items: what a schedule spans."""
        return steps * self.num_updates(batch_size)

    def evaluate(self, run: Observed, step: int) -> dict[str, float]:
        """Measures on the evaluation data. Returns: the row to be logged."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides models, data order and generators: entries of run.pt, plain containers and
        tensors.
        """
        return {}

    def restore(  # pyright: ignore[reportIncompatibleMethodOverride]  (an observer's takes no step)
        self, state: Mapping[str, Any], step: int
    ) -> None:
        """Restores them, after the models were loaded. Args: state: the whole of run.pt. step: that is done."""
