"""Text of a completion with its reward, and the best and the worst completion of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.types import Completion, Prompt
from whet.util.text_lines import escape_control_characters, shorten_middle

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = ["BestAndWorst", "format_completion", "format_text"]

MAX_CHARACTERS = 600
"""The most characters of a text; its middle is left out."""


def format_completion(name: str, reward: float, completion: Completion, text: Any) -> str:
    """Returns a line with a completion's name, reward, length, ending and text."""
    reward_text = "no reward" if math.isnan(reward) else f"reward {reward:.4g}"
    end = (
        ""
        if completion.finish_reason == "stop"
        else ", truncated"
        if completion.finish_reason == "length"
        else ", failed"
    )
    return f"  {name} ({reward_text}, {len(completion.tokens)} tokens{end}): {format_text(text)}"


def format_text(source: Any) -> str:
    """Returns a text, or messages in order: shortened, and indented after the first line."""
    if not isinstance(source, str):
        messages = list(source)
        parts = [f"{m.get('role', '')}: {m.get('content')}" for m in messages]
        source = str(messages[0].get("content")) if len(messages) == 1 else "\n".join(parts)
    return escape_control_characters(shorten_middle(source, MAX_CHARACTERS)).replace("\n", "\n    ")


@dataclass(frozen=True)
class _Example:
    """A completion with its prompt and reward."""

    reward: float
    prompt: Prompt
    completion: Completion
    text: Any


class BestAndWorst:
    """Keeps the best and the worst of the added completions; the first one of equal rewards."""

    def __init__(self) -> None:
        self.count = 0
        self.best: _Example | None = None
        self.worst: _Example | None = None

    def add(self, rewarded: RewardBatch) -> None:
        """Adds the completions of a batch."""
        totals = iter(rewarded.total.tolist())
        for group, texts in zip(rewarded.groups, rewarded.texts, strict=True):
            for place in group.last:
                completion, text, reward = group.completions[place], texts[place], next(totals)
                self.count += 1
                if math.isnan(reward):
                    continue
                if self.best is None or reward > self.best.reward:
                    self.best = _Example(reward, group.prompt, completion, text)
                if self.worst is None or reward < self.worst.reward:
                    self.worst = _Example(reward, group.prompt, completion, text)

    def lines(self) -> Sequence[str]:
        """Returns lines of both with their prompts: of one if all rewards are equal; [] without rewards."""
        if self.best is None or self.worst is None:
            return []
        if self.best.reward == self.worst.reward:
            name = "the one completion" if self.count == 1 else f"one of {self.count}, no reward better than another"
            return _with_prompt(name, self.best)
        return [*_with_prompt("best", self.best), *_with_prompt("worst", self.worst)]


def _with_prompt(name: str, example: _Example) -> list[str]:
    line = format_completion(name, example.reward, example.completion, example.text)
    return [f"row {example.prompt.row}: {format_text(example.prompt.source)}", line]
