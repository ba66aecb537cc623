"""Conversation: episodes in which a user's function interact(messages), or an environment's class, answers the turns.

The loop is `run_turns` (multi_turn.py); messages and token ids are in a ChatTranscript (transcript.py).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.config.rollout import RolloutConfig
from whet.data.prompts import PromptEncoder
from whet.envs.environment import ENVIRONMENT_REWARD, EnvironmentInstance, with_observation
from whet.envs.failures import EpisodeFailures
from whet.envs.multi_turn import room_after, run_turns
from whet.envs.recorded import RecordedAnswers, Tape, run_recorded
from whet.envs.script import Script, load_script
from whet.envs.tool_calls import ToolTemplate, split_reasoning
from whet.envs.transcript import ChatTranscript
from whet.errors import DataError, InfrastructureError, RewardError, format_value
from whet.rewards.checked_values import error_from_exception
from whet.rollout.base import Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallGenerator, CallTimeoutError, ExternalCall
from whet.types import Completion, Message, Prompt

__all__ = ["Conversation"]


class Conversation:
    """Runs episodes with a user's function interact, or with instances of an environment's class.

    interact is called with a copy of all messages so far, the prompt's included, after each turn of the model but the
    last. An instance receives the message of each turn (EnvironmentInstance).

    Args:
        script: has interact, or a class.
        encode: the encoder of the prompts.
        max_turns: of the model.
        max_tokens: after the prompt, those of the environment included.
        max_length: of the model, which no episode exceeds; None = no limit.
        end_ids: ids that end a turn.
        timeout_s: of one call of interact, or of a method of the class; None = no limit.
        tool_timeout_s: of one call of a tool.
        episode_timeout_s: of an episode, from its beginning.
        failures: what follows when one of them raises, is late or returns something that is not a list of messages: the
            run ends, or the episode does, without a reward (finish_reason "error"). None = the run ends.
        answers: where answers are recorded, and found again; None = they are not.
    Raises: ConfigError: the class has tools, and the chat template has none.
    """

    def __init__(
        self,
        script: Script,
        encode: PromptEncoder,
        *,
        max_turns: int,
        max_tokens: int,
        max_length: int | None = None,
        end_ids: Sequence[int] = (),
        timeout_s: float | None = 60.0,
        tool_timeout_s: float | None = 30.0,
        episode_timeout_s: float | None = None,
        failures: EpisodeFailures | None = None,
        answers: RecordedAnswers | None = None,
    ) -> None:
        self.script, self.encode = script, encode
        self.max_turns, self.max_tokens, self.max_length = max_turns, max_tokens, max_length
        self.end_ids, self.timeout_s = end_ids, timeout_s
        self.tool_timeout_s, self.episode_timeout_s = tool_timeout_s, episode_timeout_s
        self.failures, self.answers = failures or EpisodeFailures(), answers
        kind = script.environment
        has_tools = kind is not None and bool(kind.tool_names)
        self._template = ToolTemplate(encode.tokenizer, encode.template.options, end_ids) if has_tools else None

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        encode: PromptEncoder,
        *,
        end_ids: Sequence[int],
        max_length: int | None,
        failures: EpisodeFailures,
    ) -> Conversation:
        """Returns the episodes of a configuration. Args: as in the class."""
        return cls(
            load_script(config.env_path, turns=config.max_turns),
            encode,
            end_ids=end_ids,
            max_turns=config.max_turns,
            max_tokens=config.most_tokens,
            max_length=max_length,
            timeout_s=config.turn_timeout_s,
            tool_timeout_s=config.tool_timeout_s,
            episode_timeout_s=config.episode_timeout_s,
            failures=failures,
            answers=None if config.answers_dir is None else RecordedAnswers(config.answers_dir),
        )

    def run_episode(self, episode: Episode, sampling: Sampling) -> Turns:
        """Runs an episode. Args: sampling: its max_tokens is that of one turn."""
        run_once = lambda tape: self._run_once(episode, sampling, tape)
        return self.failures.run_with_retries(episode, lambda: run_recorded(self.answers, episode, run_once))

    def _run_once(
        self, episode: Episode, sampling: Sampling, tape: Tape | None
    ) -> Generator[Any, Any, list[Completion]]:
        kind = self.script.environment
        limits = {"timeout_s": self.timeout_s, "tool_timeout_s": self.tool_timeout_s}
        instance = None if kind is None else EnvironmentInstance(kind, **limits)
        end = math.inf if self.episode_timeout_s is None else time.monotonic() + self.episode_timeout_s
        transcript = self._transcript(episode.prompt)

        def ask(name: str, calls: CallGenerator[Any]) -> CallGenerator[Any]:
            told = self._told(calls, end)
            return told if tape is None else tape.ask(name, transcript.context, told)

        try:
            if instance is not None:
                observation = yield from ask("reset", instance.reset(episode.prompt))
                prompt = with_observation(episode.prompt, observation, self.encode, f"reset of {self.script.name}")
                if prompt is not episode.prompt:
                    transcript = self._transcript(prompt)
            added = len(transcript.prompt.tokens) - len(episode.prompt.tokens)  # by reset
            self._check_room(transcript.prompt, added)
            reason, status = yield from run_turns(
                episode,
                sampling,
                transcript,
                lambda: self._respond(instance, transcript, ask),
                room=room_after(transcript.context, max_tokens=self.max_tokens - added, max_length=self.max_length),
                max_turns=self.max_turns,
                answers_last=instance is not None,
            )
            if status == "error":
                raise InfrastructureError(f"the engine gave up a turn of the model (finish_reason {reason!r})")
            if instance is not None and instance.of.has_reward:
                final = 0.0
                if instance.of.has_final_reward:
                    final = yield from ask("get_reward", instance.get_reward())
                episode.rewards[ENVIRONMENT_REWARD] = final + math.fsum(transcript.turn_rewards.values())
            if tape is not None and instance is not None:
                tape.keep_counts(instance.counts)
            info = {"status": status} if status == "finished" else {"status": status, "failure": "model"}
        except RewardError as error:
            reason, info = "error", self.failures.add(error, episode)
        finally:
            if instance is not None:
                instance.close()
        if instance is not None and instance.of.tool_names:
            info = {**info, "tool_calls": instance.counts.calls, "tool_errors": instance.counts.failures}
        return transcript.completions(episode, info, reason)

    def _check_room(self, prompt: Prompt, added: int) -> None:
        """Raises DataError: the prompt leaves no room for a turn. Args: added: the tokens of it that are reset's."""
        length, longest = len(prompt.tokens), self.max_length
        if added >= self.max_tokens or (longest is not None and length >= longest):
            raise DataError(
                f"row {prompt.row}: reset of {self.script.name} adds {added} tokens to the prompt, which has {length} "
                f"then and leaves no room for a turn: after the row's prompt there are {self.max_tokens} "
                f"(rollout.max_episode_tokens), and a sequence has at most {longest}; raise that, or say less"
            )

    def _transcript(self, prompt: Prompt) -> ChatTranscript:
        template, kind = self._template, self.script.environment
        parse = None
        if template is not None and kind is not None:
            parse = lambda tokens, context: template.parse(tokens, context, kind.tools.schemas)
        elif kind is not None and not self.encode.is_plain(prompt.source):
            tokenizer = self.encode.tokenizer
            parse = lambda tokens, context: split_reasoning(str(tokenizer.decode(tokens, skip_special_tokens=True)))
        return ChatTranscript(prompt, self.encode, end_ids=self.end_ids, parse=parse)

    def _respond(
        self,
        instance: EnvironmentInstance | None,
        transcript: ChatTranscript,
        ask: Callable[..., CallGenerator[Any]],
    ) -> CallGenerator[list[Message]]:
        """Returns the environment's messages. Raises RewardError: it raised, was late, or returned something else."""
        if instance is not None:
            name = f"step of {self.script.name}"
            answer = yield from ask("respond", instance.respond(transcript.messages[-1]))
            if instance.of.has_turn_reward:
                reward = yield from ask("get_turn_reward", instance.get_reward("get_turn_reward"))
                if not math.isnan(reward):
                    transcript.turn_rewards[transcript.session.turns - 1] = reward
        else:
            interact, name = self.script.interact, f"interact of {self.script.name}"
            copied = copy.deepcopy(list(transcript.messages))
            assert interact is not None
            call = ExternalCall(function=lambda: interact(copied), name=name, timeout_s=self.timeout_s)
            answer = yield from ask("interact", _waiting(call))
        _check_messages(answer, name, of_class=instance is not None)
        return [dict(m) for m in answer]

    def _told(self, calls: CallGenerator[Any], end: float) -> CallGenerator[Any]:
        """Yields calls of the user's code to the driver.

        Args: end: the time at which the episode has to be over.
        Raises: RewardError: one raised, or was late; the episode was late already.
        """
        result: Any = None
        while True:
            try:
                call = calls.send(result)
            except StopIteration as returned:
                return returned.value
            rest, limit = end - time.monotonic(), math.inf if call.timeout_s is None else call.timeout_s
            if rest <= 0:
                late = f"the episode has not ended within {self.episode_timeout_s} s, and its environment was not late"
                fix = "raise rollout.episode_timeout_s, or let fewer episodes run at once"
                raise InfrastructureError(late, fix=fix) from CallTimeoutError(late)
            try:
                result = yield call if limit <= rest else replace(call, timeout_s=rest)
            except CallTimeoutError as error:
                setting = "turn_timeout_s" if limit <= rest else "episode_timeout_s"
                raise RewardError(f"{error}; give it a limit of its own, or raise rollout.{setting}") from error
            except GeneratorExit:
                raise
            except BaseException as error:  # SystemExit too: it is the user's code
                raise error_from_exception(call.name, error, __file__) from error


def _waiting(call: ExternalCall) -> CallGenerator[Any]:
    return (yield call)


def _check_messages(messages: Any, name: str, *, of_class: bool) -> None:
    """Raises RewardError unless these are valid messages of an environment. Args: of_class: of a class's step."""
    if not isinstance(messages, list | tuple):
        forms = "a text or a list of messages, or None" if of_class else "a list of messages, or []"
        raise RewardError(f"{name} returned {format_value(messages, 80)}; return {forms} to end the episode")
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
