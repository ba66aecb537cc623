"""What is made before a batch is: prompts, completions, groups and examples.

Read-only numpy, since many small tensors are expensive to move. Dim legend: B rows, P prompt, C completion, G group,
V vocabulary.
"""

from __future__ import annotations

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
    """int32 [P]: the ids that the model is given."""
    source: str | list[Message]
    """The prompt as the data set had it: text, or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the reward functions."""
    row: int = 0
    """Place in the data set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One training sequence: what followed a prompt, stop token included.

    Example: the answer "4<end>" of policy version 3:
    Completion(tokens=[52, 256], logprobs=[-.1, -.01], versions=[3, 3], finish_reason="stop", generation=0).
    """

    tokens: np.ndarray
    """int32 [C]: all after the prefix, stop token and environment tokens included."""
    logprobs: np.ndarray
    """float32 [C]: the sampler's, under logprob_support; 0 where not sampled."""
    versions: np.ndarray
    """int32 [C]: policy version that made each token; -1 = not sampled, so the mask is versions >= 0."""
    finish_reason: FinishReason
    """Why generation ended."""
    generation: int
    """0..G-1; the forks of one episode repeat it: (prompt, generation) is the trajectory."""
    prefix: np.ndarray | None = None
    """int32 [P']: a fork's own prefix; None = the group's prompt."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Status, turns, tools: to the store, as JSON, never to the loss."""
    logits: np.ndarray | None = None
    """float [C, V], where they were asked for."""
    messages: tuple[Message, ...] | None = None
    """Of an episode with turns: what was said after the prompt up to the end of this sequence, the environment's
    messages included; None = the decoded tokens say it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time that its episode waited for the engine ("engine") and for the phases of its calls ("tools")."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The completions of one prompt.

    Example: Group(prompt=p, completions=(a, b), rewards={"world": array([1., nan])}): the environment rewards a only.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Rewards that come with the completions, as from an environment: float64 [trajectories] by name, in the order of
    generation; NaN = not applicable. They join those of the reward functions in `RewardBatch.table`, which has all."""
    greedy: Completion | None = None
    """The greedy completion of the prompt, which is no part of the group and is not trained on; only where an estimator
    asks for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSequence:
    """One sequence that was not sampled, encoded.

    Example: "2+2=" answered by "4<end>": TrainSequence(prefix=[50, 43, 50, 61], tokens=[52, 256], mask=[True, True]).
    """

    prefix: np.ndarray
    """int32 [P]: what stands before the tokens; at least one. Sequences of one row that begin alike share it."""
    tokens: np.ndarray
    """int32 [C]: all after the prefix; at least one."""
    mask: np.ndarray
    """bool [C]: True = trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One row of supervised training, encoded: a sequence, the forks of a conversation, or a pair.

    Example: row 7, a chosen and a rejected answer: Example(sequences=(a, b), columns={"chosen": (1.0, 0.0)}, row=7).
    """

    sequences: tuple[TrainSequence, ...]
    """At least one."""
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """A number for each sequence, by name: columns per sequence of the batch."""
    row: int = 0
    """Place in the data set."""
