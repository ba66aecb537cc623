"""ToolEpisodes: episodes in which the model calls tools, and the tools' answers follow its turns.

The loop is `run_turns` (multi_turn.py), with max_tool_calling_iterations rounds of calls. A ToolTranscript appends the
ids of an answer and never encodes earlier ids again, so an episode is one sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.envs.multi_turn import PROMPT, room_after, run_turns
from whet.envs.recorded import Tape
from whet.envs.tool_calls import ToolTemplate
from whet.envs.tools import ToolCounts, Tools
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, Turns, completion
from whet.rollout.external_calls import CallGenerator, ExternalCall
from whet.types import Completion, Message, Prompt

__all__ = ["ToolEpisodes", "ToolTranscript"]


class ToolTranscript:
    """The transcript of one episode with tools, for `run_turns`.

    Args: prompt: of the episode. template: reads the calls of a turn and encodes answers. tools: what may be called.
    """

    def __init__(self, prompt: Prompt, template: ToolTemplate, tools: Tools) -> None:
        self.prompt, self.template, self.tools = prompt, template, tools
        self.messages: list[Message] = []
        """After the prompt."""
        self._parts: list[Output | np.ndarray] = []

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given for its next turn."""
        return np.concatenate([self.prompt.tokens, *(p.tokens if isinstance(p, Output) else p for p in self._parts)])

    def add_turn(self, output: Output) -> None:
        """Appends a turn of the model, and reads its calls."""
        self.messages.append(self.template.parse(output.tokens, self.context, self.tools.schemas))
        self._parts.append(output)

    def add_answer(self, messages: Sequence[Message]) -> None:
        """Appends the tools' messages, and the header of the model's next turn."""
        self._parts.append(self.template.encode_answer(messages))
        self.messages += messages

    def remove_answer(self) -> None:
        """Removes the last answer: the episode ends with the call that it answers."""
        self._parts.pop()
        while self.messages[-1]["role"] == "tool":
            self.messages.pop()

    def completion(self, episode: Episode) -> Completion:
        """Returns the sequence to train on, ended as its last turn did."""
        sequence = completion(*self._parts, generation=episode.generation)
        changes: dict[str, Any] = {}
        if not np.array_equal(self.prompt.tokens, episode.prompt.tokens):
            changes = {"prefix": self.prompt.tokens, "info": {PROMPT: self.prompt.source}}
        return dataclasses.replace(sequence, messages=tuple(self.messages), **changes)


class ToolEpisodes:
    """Runs episodes whose turns may call tools.

    Args:
        template: reads the calls of a turn and encodes answers.
        max_tokens: of a completion, the tools' answers included.
        max_length: of the model, which no episode exceeds; None = no limit.
        max_rounds: of calls; None = as many as there is room for.
    """

    def __init__(
        self,
        template: ToolTemplate,
        *,
        max_tokens: int,
        max_length: int | None = None,
        max_rounds: int | None = None,
    ) -> None:
        self.template = template
        self.max_tokens, self.max_length, self.max_rounds = max_tokens, max_length, max_rounds
        self.counts = ToolCounts()

    def run_episode(
        self, episode: Episode, sampling: Sampling, *, start: Callable[[Episode], tuple[Prompt, Tools, Tape | None]]
    ) -> Turns:
        """Runs an episode.

        Args: sampling: of one turn. start: gives the episode's prompt, tools and recorded answers; None = no record.
        Raises: DivergedError: the episode has gone another way than its record.
        """
        prompt, tools, tape = start(episode)
        transcript, counts = ToolTranscript(prompt, self.template, tools), ToolCounts()

        def run(calls: Any) -> CallGenerator[Sequence[Message]]:
            return (yield ExternalCall(function=lambda: tools.run(calls, counts), name="the tools"))

        def respond() -> CallGenerator[Sequence[Message]]:
            calls = transcript.messages[-1].get("tool_calls")
            if not calls:
                return []
            return (yield from run(calls) if tape is None else tape.ask("the tools", transcript.context, run(calls)))

        yield from run_turns(
            episode,
            sampling,
            transcript,
            respond,
            room=room_after(prompt.tokens, max_tokens=self.max_tokens, max_length=self.max_length),
            max_turns=None if self.max_rounds is None else self.max_rounds + 1,
        )
        if tape is not None:
            tape.ask_now("end", transcript.context, lambda: None)  # what the model said last is compared too
            tape.keep_counts(counts)
        self.counts.add(counts)
        return transcript.completion(episode)
