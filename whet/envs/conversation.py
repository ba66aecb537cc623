"""Conversation: episodes in which a user's function interact(messages) answers the model's turns.

The loop is `play_turns` (multi_turn.py); the token ids are in a ChatTranscript (transcript.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.envs.multi_turn import play_turns
from whet.envs.script import Script
from whet.envs.transcript import ChatTranscript
from whet.errors import RewardError, format_value
from whet.rewards.checked_values import EpisodeFailures, error_from_exception
from whet.rollout.base import Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallTimeoutError, ExternalCall
from whet.types import Message

__all__ = ["Conversation"]


class Conversation:
    """Plays episodes with a user's function interact.

    It is called with a copy of all messages so far, the prompt's included, after each turn of the model but the last.

    Args:
        script: has interact.
        encode: the encoder of the prompts.
        max_turns: of the model.
        max_tokens: after the prompt, those of the environment included.
        max_length: of the model, which no episode exceeds; None = no limit.
        timeout_s: of one call of interact; None = no deadline.
        failures: what follows when interact raises, is late or returns something that is not a list of messages: the
            run ends, or the episode does, without a reward (finish_reason "error"). None = the run ends.
    """

    def __init__(
        self,
        script: Script,
        encode: PromptEncoder,
        *,
        max_turns: int,
        max_tokens: int,
        max_length: int | None = None,
        timeout_s: float | None = 60.0,
        failures: EpisodeFailures | None = None,
    ) -> None:
        self.script, self.encode = script, encode
        self.max_turns, self.max_tokens, self.max_length = max_turns, max_tokens, max_length
        self.timeout_s = timeout_s
        self.failures = failures or EpisodeFailures()

    def play(self, sampling: Sampling) -> Callable[[Episode], Turns]:
        """The generator function of an Episode. Args: sampling: its max_tokens is that of one turn."""

        def playing(episode: Episode) -> Turns:
            transcript = ChatTranscript(episode.prompt, self.encode)
            info: dict[str, Any] = {}
            try:
                reason = yield from play_turns(
                    episode,
                    sampling,
                    transcript,
                    lambda: self._respond(transcript.messages),
                    max_turns=self.max_turns,
                    max_tokens=self.max_tokens,
                    max_length=self.max_length,
                )
            except RewardError as error:
                info = self.failures.add(error, episode.prompt.row, episode.generation)
                reason = "error"
            forks = {"forks": transcript.forks} if transcript.forks else {}
            return transcript.completions(episode.generation, reason, {"turns": transcript.turns, **forks, **info})

        return playing

    def _respond(self, messages: Sequence[Message]) -> Generator[ExternalCall, Any, list[Message]]:
        """The environment's messages. Raises RewardError: interact raised, was late, or returned something else."""
        interact, name, copied = self.script.interact, f"interact of {self.script.name}", copy.deepcopy(list(messages))
        assert interact is not None
        try:
            answer = yield ExternalCall(function=lambda: interact(copied), name=name, timeout_s=self.timeout_s)
        except CallTimeoutError as error:
            raise RewardError(f"{error}; give it a limit of its own, or raise trainer.reward_timeout_s") from error
        except GeneratorExit:
            raise
        except BaseException as error:  # SystemExit too: it is the user's code
            raise error_from_exception(name, error, __file__) from error
        _check_messages(answer, name)
        return [dict(m) for m in answer]


def _check_messages(messages: Any, name: str) -> None:
    """Raises RewardError unless these are valid messages of an environment."""
    if not isinstance(messages, list | tuple):
        raise RewardError(
            f"{name} returned {format_value(messages, 80)}; return a list of messages, or [] to end the episode"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RewardError(
                f"{name}, message {place}: {format_value(message, 80)}; a message has a role and a content"
            )
        if message["role"] not in ("user", "tool", "system"):
            role = format_value(message["role"], 40)
            raise RewardError(
                f"{name}, message {place} has the role {role}; use user, tool or system: only the model writes "
                "assistant turns"
            )
        content = message["content"]
        if not isinstance(content, str):
            raise RewardError(f"{name}, message {place}: the content is {format_value(content, 80)}; give a text")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise RewardError(
                f"{name}, message {place}: {format_value(content, 80)} is not valid text ({error.reason}); decode with "
                'errors="replace" what it reads'
            ) from None
