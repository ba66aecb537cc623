"""The record of one training step, written stage by stage: Step for reinforcement learning, ExampleStep for supervised.

Each stage of a learner takes a step and returns it with more columns. The docstring of a stage says which columns it
reads and which it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, overload

from whet.config import Mode
from whet.errors import DataError
from whet.metrics import Metric, merge
from whet.rewards.reward_batch import RewardBatch
from whet.types import Example, Group, Prompt, TokenBatch

__all__ = ["BaseStep", "ExampleStep", "Step", "StepColumn"]

T = TypeVar("T")


class StepColumn(Generic[T]):
    """A field of a step that a stage writes. Reading it earlier raises a DataError that names the stage.

    Args: stage: the method of the learner that writes it.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, step: None, owner: type) -> StepColumn[T]: ...

    @overload
    def __get__(self, step: BaseStep, owner: type) -> T: ...

    def __get__(self, step: BaseStep | None, owner: type) -> StepColumn[T] | T:
        if step is None:
            return self
        if not step.has(self.name):
            raise DataError(f"step {step.index} has no {self.name} yet; the stage `{self.stage}` writes it")
        return vars(step)[self.name]

    def __set__(self, step: BaseStep, value: T) -> None:
        vars(step)[self.name] = None if value is self else value  # the column itself is the default of the field


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BaseStep:
    """The fields of every step. A step is frozen: `replace` and `log` return changed copies."""

    index: int
    """The number of the step in its run, from 1. An evaluation has the number of the step before it."""
    batch: StepColumn[TokenBatch] = StepColumn("batch")
    """The sequences end to end. Later stages add columns to it."""
    metrics: Mapping[str, Metric] = field(default_factory=lambda: MappingProxyType({}))
    """By name, merged over stages and updates."""
    mode: Mode = Mode.TRAIN
    """Training or evaluation."""

    def has(self, column: str) -> bool:
        """Returns whether a stage has written a column: "groups", "rewards", "batch"."""
        return vars(self)[column] is not None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other fields."""
        return type(self)(**{**vars(self), **changes})

    def log(self, metrics: Mapping[str, Metric]) -> Self:
        """Returns a copy with more metrics. A metric that is there already is merged with the new one."""
        return self.replace(metrics=merge(vars(self)["metrics"], metrics))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExampleStep(BaseStep):
    """One step of supervised training."""

    examples: Sequence[Example] = ()
    """The rows of the step, encoded."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Step(BaseStep):
    """One step of reinforcement learning.

    >>> from whet.metrics import Mean
    >>> step = Step(index=1).log({"reward": Mean(1.0, 2)}).log({"reward": Mean(2.0, 2)})
    >>> step.metrics["reward"].value
    0.75
    >>> step.rewards
    Traceback (most recent call last):
    whet.errors.DataError: step 1 has no rewards yet; the stage `reward` writes it
    """

    prompts: Sequence[Prompt] = ()
    """The prompts of the step, encoded."""
    first: int = 0
    """The place of the first prompt in the step. It is above 0 in the further batches of dynamic sampling."""
    groups: StepColumn[Sequence[Group]] = StepColumn("sample")
    """The prompts with their completions."""
    rewards: StepColumn[RewardBatch] = StepColumn("reward")
    """The rewards of the completions. All later stages read them here."""
    versions: tuple[int, ...] = ()
    """The policy versions that drew the completions, in order."""
