"""What one step has come to so far: Step of reinforcement learning, ExampleStep of supervised training.

The stages of a learner take one and return one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from whet.config import Mode
from whet.errors import DataError
from whet.metrics import Metric, merge
from whet.rewards.manager import RewardBatch
from whet.types import Example, Group, Prompt, TokenBatch

__all__ = ["BaseStep", "ExampleStep", "Step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseStep:
    """What every step has; frozen, changed by `replace` and `log`."""

    index: int
    """Which step of the run it is, from 1; of an evaluation, the step after which it is."""
    batch: TokenBatch | None = None
    """The sequences end to end: by `batch`; further columns by the stages after it."""
    metrics: Mapping[str, Metric] = field(default_factory=lambda: MappingProxyType({}))
    """By name; those of several updates and stages are merged."""
    mode: Mode = Mode.TRAIN
    """Training, or an evaluation."""

    def replace(self, **changes: Any) -> Self:
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    def log(self, metrics: Mapping[str, Metric]) -> Self:
        """The same with more metrics, merged by name into those that are there."""
        return self.replace(metrics=merge(self.metrics, metrics))

    def need_batch(self) -> TokenBatch:
        """The batch. Raises DataError: there is none yet."""
        if self.batch is None:
            raise DataError(f"step {self.index} has no batch yet; it is made by the stage `batch`")
        return self.batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleStep(BaseStep):
    """One step of supervised training."""

    examples: Sequence[Example] = ()
    """What the data order gave."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(BaseStep):
    """One step of reinforcement learning, filled stage by stage.

    >>> from whet.metrics import Mean
    >>> step = Step(index=1).log({"reward": Mean(1.0, 2)}).log({"reward": Mean(2.0, 2)})
    >>> step.metrics["reward"].value
    0.75
    """

    prompts: Sequence[Prompt] = ()
    """What the data order gave."""
    first: int = 0
    """Place of the first of them in the step, where they are not its first ones."""
    groups: Sequence[Group] = ()
    """The prompts with their completions: by `sample`."""
    rewarded: RewardBatch | None = None
    """The reward functions' results: by `reward`."""
    versions: tuple[int, ...] = ()
    """The policy versions that the completions were drawn from, in order."""

    def need_rewarded(self) -> RewardBatch:
        """The reward functions' results. Raises DataError: they were not called yet."""
        if self.rewarded is None:
            raise DataError(f"step {self.index} has no rewards yet; the stages are sample, reward, batch, score, ...")
        return self.rewarded
