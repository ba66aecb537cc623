"""The best and the worst completion, of a step (trainer.show_samples) and of an evaluation, as lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.types import Completion, Prompt
from whet.util.text_lines import escape_control_characters, shorten_middle

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = ["BestAndWorst", "describe_sample", "format_completion", "format_text"]

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

    def prompt_line(self) -> str:
        return f"row {self.prompt.row}: {format_text(self.prompt.source)}"

    def completion_line(self, name: str) -> str:
        return format_completion(name, self.reward, self.completion, self.text)


class BestAndWorst:
    """Keeps the best and the worst of the added completions; the first one of equal rewards."""

    def __init__(self) -> None:
        self.count = 0
        self.first: _Example | None = None
        self.best: _Example | None = None
        self.worst: _Example | None = None

    def add(self, rewarded: RewardBatch) -> None:
        """Adds the completions of a batch."""
        totals = iter(rewarded.total.tolist())
        for group, texts in zip(rewarded.groups, rewarded.texts, strict=True):
            for place in group.last:
                example = _Example(next(totals), group.prompt, group.completions[place], texts[place])
                self.count += 1
                self.first = self.first or example
                if math.isnan(example.reward):
                    continue
                if self.best is None or example.reward > self.best.reward:
                    self.best = example
                if self.worst is None or example.reward < self.worst.reward:
                    self.worst = example

    def lines(self) -> list[str]:
        """Returns lines of both with their prompts: of one if all rewards are equal; [] without rewards."""
        shown = self._shown() if self.best is not None else []
        return [line for name, example in shown for line in (example.prompt_line(), example.completion_line(name))]

    def _shown(self) -> list[tuple[str, _Example]]:
        """Returns both with their names; one if all rewards are equal or missing."""
        best, worst = self.best or self.first, self.worst or self.first
        if best is None or worst is None:
            return []
        if best.reward != worst.reward and not math.isnan(best.reward):
            return [("best", best), ("worst", worst)]
        return [
            ("the one completion" if self.count == 1 else f"one of {self.count}, no reward better than another", best)
        ]


def describe_sample(step: int, rewards: RewardBatch) -> str:
    """Returns one prompt of a step with its best and its worst completion, as lines for the log.

    The search for a prompt whose completions have different rewards starts at the place `step`, so that each step shows
    another prompt.
    Args: step: its number. rewards: of the step.
    """
    count, have_spread = len(rewards.groups), rewards.have_spread
    order = [(step + i) % count for i in range(count)]
    chosen = next((i for i in order if have_spread[i]), order[0])
    group = BestAndWorst()
    group.add(rewards.select([chosen]))
    shown = group._shown()
    lines = [f"sample of step {step}, {shown[0][1].prompt_line()}"]
    return "\n".join(lines + [example.completion_line(name) for name, example in shown])
