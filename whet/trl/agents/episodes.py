"""Episodes whose turns call tools: TRL's loop, a generator for each completion.

    the model's turn -> its calls are read and answered -> the answers' ids are appended -> the next turn ...

until a turn calls nothing, max_tool_calling_iterations rounds are played, or an answer would leave no room: it is taken
back then. max_completion_length bounds the whole completion. What the model did not sample has version -1 and is not
trained. Ids are appended and never made again, so an episode is one sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, Turns, completion
from whet.trl.agents.chat import Chat
from whet.trl.agents.tools import Counts, Tools
from whet.types import Completion, Message, Prompt

__all__ = ["PROMPT", "ToolEpisodes"]

PROMPT = "prompt"
"""In Completion.info: the prompt of a completion whose own it is, which the group's is not."""


class ToolEpisodes:
    """What episodes play.

    Args:
        chat: how turns are read and answered.
        tokens: of a completion, the tools' among them. positions: of the model; None = without a bound.
        rounds: of calls; None = as many as there is room for.
    """

    def __init__(self, chat: Chat, *, tokens: int, positions: int | None = None, rounds: int | None = None) -> None:
        self.chat, self.tokens, self.positions, self.rounds = chat, tokens, positions, rounds
        self.counts = Counts()

    def play(self, begun: Callable[[Episode], tuple[Prompt, Tools]], sampling: Sampling) -> Callable[[Episode], Turns]:
        """What an Episode plays under these sampling parameters. Args: begun: its own prompt, and its tools."""

        def playing(episode: Episode) -> Turns:
            prompt, tools = begun(episode)
            most = len(prompt.tokens) + self.tokens
            most = most if self.positions is None else min(most, self.positions)
            context, own = prompt.tokens, hash(episode.address)
            parts: list[Output | np.ndarray] = []
            messages: list[Message] = []
            asked = 0
            while True:
                limited = replace(sampling, max_tokens=min(sampling.max_tokens, most - len(context)))
                output: Output = yield episode.request(context, limited, conversation=own)
                message = self.chat.read(output.tokens, context, tools.schemas)
                parts.append(output)
                messages.append(message)
                context = np.concatenate([context, output.tokens])
                calls = message.get("tool_calls")
                if not calls or asked == self.rounds or output.finish_reason in ("abort", "error"):
                    break
                answers, asked = tools.answer(calls, self.counts), asked + 1
                added = self.chat.answer(answers)
                if len(context) + len(added) >= most:
                    break
                parts.append(added)
                messages += answers
                context = np.concatenate([context, added])
            return _made(parts, messages, prompt, episode)

        return playing


def _made(
    parts: Sequence[Output | np.ndarray], messages: Sequence[Message], prompt: Prompt, episode: Episode
) -> Completion:
    """The completion of an episode."""
    made = completion(*parts, generation=episode.generation)
    own: dict[str, Any] = {}
    if not np.array_equal(prompt.tokens, episode.prompt.tokens):
        own = {"prefix": prompt.tokens, "info": {PROMPT: prompt.source}}
    return dataclasses.replace(made, messages=tuple(messages), **own)
