"""Conversation: episodes of several turns, the model's and an environment's.

    the model's turn is sampled -> interact(messages) -> its messages are appended -> the model's next turn ...

until interact gives no message, the model has had all its turns, or there is no room for another. What the model did
not sample has version -1 and is not trained. Token ids go in and come out; see transcript.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.envs.script import Script
from whet.envs.transcript import Transcript
from whet.errors import RewardError, format_value
from whet.rewards.call import OnError
from whet.rewards.deadline import call_in_time
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, Turns
from whet.types import FinishReason, Message

__all__ = ["Conversation"]

log = logging.getLogger("whet")


class Conversation:
    """Plays episodes with a user's function interact.

    It is called with a copy of all messages so far, the prompt's included, after each turn of the model but the last.

    Args:
        script: what answers.
        encode: the encoder of the prompts.
        turns: of the model, at most. tokens: after the prompt, at most, those of the environment included.
        positions: of the model, which no episode is longer than; None = without a bound.
        timeout_s: of one call of interact; None = no deadline.
        on_error: "raise": an interact that raises, is late or gives something else ends the run; "none": it ends its
            episode, which then has no reward (finish_reason "error"), with a warning.
    """

    def __init__(
        self,
        script: Script,
        encode: PromptEncoder,
        *,
        turns: int,
        tokens: int,
        positions: int | None = None,
        timeout_s: float | None = 60.0,
        on_error: OnError = "raise",
    ) -> None:
        self.script, self.encode = script, encode
        self.turns, self.tokens, self.positions = turns, tokens, positions
        self.timeout_s, self.on_error = timeout_s, on_error

    def play(self, sampling: Sampling) -> Callable[[Episode], Turns]:
        """What an Episode plays under these sampling parameters, max_tokens being those of a turn."""

        def playing(episode: Episode) -> Turns:
            talk, most = Transcript(episode.prompt, self.encode), self._most(episode)
            own, info, reason = hash(episode.address), {}, "stop"  # its KV is its own, whatever ran before
            for turn in range(self.turns):
                left = min(sampling.max_tokens, most - len(talk.context))
                if left < 1:  # what was heard leaves no room to answer
                    talk.unhear()
                    reason = "length"
                    break
                limited = replace(sampling, max_tokens=left)
                output: Output = yield episode.request(talk.context, limited, conversation=own)
                talk.say(output)
                reason = output.finish_reason
                if turn + 1 == self.turns or reason in ("abort", "error"):
                    break
                heard = self._answer(talk.messages, episode)
                if isinstance(heard, RewardError):
                    info, reason = {"error": str(heard)}, "error"
                    break
                if not heard:
                    break
                talk.hear(heard)
            return self._made(talk, episode, reason, info)

        return playing

    def _most(self, episode: Episode) -> int:
        """Tokens that an episode may have, the prompt's included."""
        most = len(episode.prompt.tokens) + self.tokens
        return most if self.positions is None else min(most, self.positions)

    def _made(self, talk: Transcript, episode: Episode, reason: FinishReason, info: Mapping[str, Any]) -> Any:
        """What an episode has come to."""
        info = {"turns": talk.turns, **({"forks": talk.forks} if talk.forks else {}), **info}
        return talk.completions(episode.generation, reason, info)

    def _answer(self, messages: Sequence[Message], episode: Episode) -> list[Message] | RewardError:
        """The environment's messages; with on_error "none" the error in their place."""
        what, given = f"interact of {self.script.name}", copy.deepcopy(list(messages))
        assert self.script.interact is not None
        call = self.script.interact
        found = call_in_time(lambda: call(given), what, self.timeout_s)
        if not isinstance(found, RewardError):
            found = _checked(found, what)
        if not isinstance(found, RewardError):
            return found
        if self.on_error == "raise":
            raise found
        log.warning("%s; row %d, generation %d has no reward", found, episode.prompt.row, episode.generation)
        return found


def _checked(found: Any, what: str) -> list[Message] | RewardError:
    """Messages as they are, or the error that says what is wrong with them."""
    if not isinstance(found, list | tuple):
        return RewardError(
            f"{what} returned {format_value(found, 80)}; return a list of messages, [] where nothing follows"
        )
    for place, message in enumerate(found):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return RewardError(
                f"{what}, message {place}: {format_value(message, 80)}; a message has a role and a content"
            )
        if message["role"] not in ("user", "tool", "system"):
            role = format_value(message["role"], 40)
            return RewardError(
                f"{what}, message {place} has the role {role}; give user, tool or system, the model's turn is its own"
            )
        content = message["content"]
        if not isinstance(content, str):
            return RewardError(f"{what}, message {place}: the content is {format_value(content, 80)}; give a text")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            return RewardError(
                f"{what}, message {place}: {format_value(content, 80)} is not valid text ({error.reason}); decode with "
                'errors="replace" what it reads'
            )
    return [dict(m) for m in found]
