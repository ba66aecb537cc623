"""The records before a batch: prompts, completions, groups and examples.

They are read-only numpy arrays, since many small tensors are expensive to move. Dim legend: B rows, P prompt,
C completion, G group, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = [
    "Completion",
    "Example",
    "FinishReason",
    "Group",
    "Message",
    "Prompt",
    "TrainSequence",
]

Message = dict[str, Any]
"""One chat message: {"role": ..., "content": ...}."""
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt, encoded.

    Example: row 7 of a data set, "2+2=" with an answer column:
    Prompt(tokens=[50, 43, 50, 61], source="2+2=", columns={"answer": 4}, row=7).
    """

    tokens: np.ndarray
    """int32 [P]: the ids that the model reads."""
    source: str | list[Message]
    """The prompt as the data set had it: text, or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the reward functions."""
    row: int = 0
    """Place in the data set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One training sequence: the tokens after a prompt, stop token included.

    Example: the answer "4<end>" of policy version 3:
    Completion(tokens=[52, 256], logprobs=[-.1, -.01], versions=[3, 3], finish_reason="stop", generation=0).
    """

    tokens: np.ndarray
    """int32 [C]: all tokens after the prefix, stop token and environment tokens included."""
    logprobs: np.ndarray
    """float32 [C]: the sampler's log-probabilities, under logprobs_mode; 0 at tokens that were not sampled."""
    versions: np.ndarray
    """int32 [C]: the policy version that sampled each token; -1 = not sampled, so the mask is versions >= 0."""
    finish_reason: FinishReason
    """Why generation ended."""
    generation: int
    """The number of the trajectory in its group, 0..G-1. All forks of one episode have the same number."""
    prefix: np.ndarray | None = None
    """int32 [P']: a fork's own prefix; None = the group's prompt."""
    token_rewards: np.ndarray | None = None
    """float64 [C]: rewards that the environment gave at single tokens (of a turn, at its last one). The reward of the
    episode contains them. None = none."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Status, turns, tools: stored as JSON with the completion. A loss does not see it."""
    logits: np.ndarray | None = None
    """float [C, V], on request."""
    messages: tuple[Message, ...] | None = None
    """The messages of an episode with turns, from the prompt to the end of this sequence, those of the environment
    included. None = the decoded tokens are the only message."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time that its episode waited for the engine ("engine") and for the phases of its calls ("tools")."""

    @property
    def has_failed(self) -> bool:
        """Whether its episode has failed by no doing of the model, so that it has no reward and is not trained."""
        return self.messages is not None and self.finish_reason == "error"


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The completions of one prompt.

    Example: Group(prompt=p, completions=(a, b), rewards={"world": array([1., nan])}): the environment rewards a only.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Rewards that come with the completions, such as an environment's: float64 [trajectories] by name, in the order of
    generation; NaN = not applicable. `RewardBatch.table` holds these and those of the reward functions."""
    greedy: Completion | None = None
    """The greedy completion of the prompt, if an estimator requires it. It is not in the group, and no update trains on
    it."""

    @functools.cached_property
    def last(self) -> tuple[int, ...]:
        """The place of each trajectory's last completion, which has its whole conversation; its earlier forks have
        parts.
        """
        return tuple({c.generation: place for place, c in enumerate(self.completions)}.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSequence:
    """One sequence that was not sampled, encoded.

    Example: "2+2=" answered by "4<end>": TrainSequence(prefix=[50, 43, 50, 61], tokens=[52, 256], mask=[True, True]).
    """

    prefix: np.ndarray
    """int32 [P]: the tokens before them, at least one. Sequences of one row with the same prefix share it."""
    tokens: np.ndarray
    """int32 [C]: all tokens after the prefix, at least one."""
    mask: np.ndarray
    """bool [C]: True = trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One row of supervised training, encoded: a sequence, the forks of a conversation, or a pair.

    Example: row 7, a chosen and a rejected answer: Example(sequences=(a, b), columns={"chosen": (1.0, 0.0)}, row=7).
    """

    sequences: tuple[TrainSequence, ...]
    """The sequences of the row, at least one."""
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """A number for each sequence, by name: columns per sequence of the batch."""
    row: int = 0
    """Place in the data set."""
