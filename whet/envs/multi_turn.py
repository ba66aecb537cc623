"""run_turns: the loop of an episode with several turns, the model's and an environment's.

    the model's turn is sampled -> respond() answers it -> the answer is appended -> the model's next turn ...

The driver waits for an answer without stopping the other episodes (rollout/external_calls.py). The loop goes on
until there is no answer, the model has had all its turns, or the answer leaves no room for another turn. A Transcript
holds the token ids. Ids that the model did not sample have version -1 and are not trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from whet.envs.failures import Status
from whet.rollout.base import Output, Request, Sampling
from whet.rollout.driver import Episode
from whet.rollout.external_calls import CallGenerator, ExternalCall
from whet.types import Completion, FinishReason, Message

__all__ = ["PROMPT", "Transcript", "room_after", "run_turns", "stand_in"]

PROMPT = "prompt"
"""Key of Completion.info: the prompt of a completion that has its own, other than its group's."""


class Transcript(Protocol):
    """The token ids of an episode: what was sampled, and what was put between."""

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given for its next turn."""
        ...

    def add_turn(self, output: Output) -> None:
        """Appends a turn of the model."""
        ...

    def add_answer(self, messages: Sequence[Message]) -> None:
        """Appends what answers the turn, and the header of the model's next one."""
        ...

    def remove_answer(self) -> None:
        """Removes the last answer: the episode ends with the model's turn before it."""
        ...


def run_turns(
    episode: Episode,
    sampling: Sampling,
    transcript: Transcript,
    respond: Callable[[], CallGenerator[Sequence[Message]]],
    *,
    room: Callable[[np.ndarray], int],
    max_turns: int | None,
    answers_last: bool = False,
) -> Generator[Request | ExternalCall, Any, tuple[FinishReason, Status]]:
    """Runs an episode to its end.

    Args:
        episode: creates the requests, which are yielded.
        sampling: the sampling parameters of a turn.
        transcript: holds the prompt, and receives turns and answers.
        respond: called after a turn; a generator that yields the calls to wait for, and returns the messages that
            answer the turn, [] = the episode ends. It is not called after a turn with finish_reason "abort" or "error".
        room: (context) -> the tokens that are left for a turn: `room_after`.
        max_turns: the most turns of the model; None = no limit.
        answers_last: call `respond` after the last of max_turns turns too, and drop what it returns.
    Returns: why the episode ended: the finish_reason of the last turn, or "length" if an answer left no room for
        another turn; that answer is removed. And its status.

    Example: `reason, status = yield from run_turns(...)`, in an Episode's generator.
    """
    conversation = hash(episode.rng_key)  # its KV is its own, whatever ran before
    for turn in itertools.count(1):
        context = transcript.context
        left = room(context)
        if left < 1 and turn > 1:
            transcript.remove_answer()
            return "length", "out of context"
        limited = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        output = yield episode.request(context, limited, conversation=conversation)
        transcript.add_turn(output)
        is_last = turn == max_turns
        if output.finish_reason in ("abort", "error"):
            return output.finish_reason, "error"
        if is_last and not answers_last:
            return output.finish_reason, "out of turns"
        answer = yield from respond()
        if is_last or not answer:
            return output.finish_reason, "out of turns" if answer else "finished"
        transcript.add_answer(answer)
    raise AssertionError("the loop returns")


def room_after(prompt: np.ndarray, *, max_tokens: int, max_length: int | None) -> Callable[[np.ndarray], int]:
    """Returns the room of an episode's turns.

    Args: prompt: int32 [P]. max_tokens: the most after the prompt, answers included. max_length: the most of the
        episode, a limit of the model; None = no limit.

    >>> room_after(np.arange(3), max_tokens=10, max_length=12)(np.arange(5))
    7
    """
    longest = len(prompt) + max_tokens if max_length is None else min(len(prompt) + max_tokens, max_length)
    return lambda context: longest - len(context)


def stand_in(episode: Episode, info: Mapping[str, Any], reason: FinishReason) -> Completion:
    """Returns the completion of an episode without a turn of the model: one token that was not sampled, so none is
    trained.
    """
    return Completion(
        tokens=episode.prompt.tokens[-1:].astype(np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.full(1, -1, np.int32),
        finish_reason=reason,
        generation=episode.generation,
        info=dict(info),
        messages=({"role": "assistant", "content": ""},),
    )
