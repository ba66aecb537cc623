"""A completion with its reward as lines for a person, and the best and the worst of an evaluation."""

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
"""Characters of a text that are shown: its beginning and its end."""


def format_completion(name: str, reward: float, completion: Completion, text: Any) -> str:
    """A completion: what it is called, its reward, its length, how it ended, what it says."""
    shown_reward = "no reward" if math.isnan(reward) else f"reward {reward:.4g}"
    end = (
        ""
        if completion.finish_reason == "stop"
        else ", truncated"
        if completion.finish_reason == "length"
        else ", failed"
    )
    return f"  {name} ({shown_reward}, {len(completion.tokens)} tokens{end}): {format_text(text)}"


def format_text(source: Any) -> str:
    """A text, or messages one after the other: shortened, its further lines indented."""
    if not isinstance(source, str):
        messages = list(source)
        parts = [f"{m.get('role', '')}: {m.get('content')}" for m in messages]
        source = str(messages[0].get("content")) if len(messages) == 1 else "\n".join(parts)
    return escape_control_characters(shorten_middle(source, MAX_CHARACTERS)).replace("\n", "\n    ")


@dataclass(frozen=True)
class _Seen:
    """A completion that was judged."""

    reward: float
    prompt: Prompt
    completion: Completion
    text: Any


class BestAndWorst:
    """The best and the worst completion of those that are added; of several alike the first."""

    def __init__(self) -> None:
        self.count = 0
        self.best: _Seen | None = None
        self.worst: _Seen | None = None

    def add(self, rewarded: RewardBatch) -> None:
        """Further completions. Args: rewarded: with their texts and rewards."""
        totals = iter(rewarded.total.tolist())
        for group, texts in zip(rewarded.groups, rewarded.texts, strict=True):
            done = {c.generation: (c, text) for c, text in zip(group.completions, texts, strict=True)}
            for completion, text in done.values():  # of forks of a conversation the last, which has all of it
                reward = next(totals)
                self.count += 1
                if math.isnan(reward):
                    continue
                if self.best is None or reward > self.best.reward:
                    self.best = _Seen(reward, group.prompt, completion, text)
                if self.worst is None or reward < self.worst.reward:
                    self.worst = _Seen(reward, group.prompt, completion, text)

    def lines(self) -> Sequence[str]:
        """Both with their prompts; one where no reward is better than another, none where there is no reward."""
        if self.best is None or self.worst is None:
            return []
        if self.best.reward == self.worst.reward:
            alike = "the one completion" if self.count == 1 else f"one of {self.count}, no reward better than another"
            return _with_prompt(alike, self.best)
        return [*_with_prompt("best", self.best), *_with_prompt("worst", self.worst)]


def _with_prompt(name: str, seen: _Seen) -> list[str]:
    line = format_completion(name, seen.reward, seen.completion, seen.text)
    return [f"row {seen.prompt.row}: {format_text(seen.prompt.source)}", line]
