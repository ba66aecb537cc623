"""AgenticEpisodes: an agent and an environment of Tunix's form as an episode of whet's loop.

The agent's conversation is the history that the model is given. A Session matches it message by message with the turns
so far, as it does for agents behind a base URL, so sampled ids are never encoded again; an agent that changes its
history forks the episode.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from whet.envs.environment import ENVIRONMENT_REWARD
from whet.envs.failures import EpisodeFailures
from whet.envs.multi_turn import run_turns
from whet.envs.sessions import Session
from whet.errors import InfrastructureError, RewardError
from whet.rewards.checked_values import check_values, error_from_exception
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallTimeoutError, ExternalCall
from whet.serve.agent_episodes import split_messages
from whet.serve.run_model import RunModel
from whet.tunix.agentic.agents import TrajectoryStatus
from whet.tunix.agentic.collect import TrajectoryCollectEngine, message_texts
from whet.types import FinishReason, Message

__all__ = ["AgenticEpisodes"]

log = logging.getLogger("whet")

RECORDS: Mapping[TrajectoryStatus, dict[str, str]] = {
    TrajectoryStatus.SUCCEEDED: {"status": "finished"},
    TrajectoryStatus.MAX_STEPS_REACHED: {"status": "out of turns", "failure": "model"},
    TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED: {"status": "out of context", "failure": "model"},
    TrajectoryStatus.TIMEOUT: {"status": "timed out"},
    TrajectoryStatus.ENV_TIMEOUT: {"status": "timed out", "failure": "environment"},
}
"""Tunix's status -> the entries of Completion.info."""


class AgenticEpisodes:
    """Runs episodes of agents and environments.

    Args:
        start: (episode) -> the engine with its agent and environment, of a new episode.
        model: the policy; its `longest` bounds the tokens of an episode.
        failures: what follows when agent or environment raise.
    """

    def __init__(
        self, start: Callable[[Episode], TrajectoryCollectEngine], model: RunModel, failures: EpisodeFailures
    ) -> None:
        self.start, self.model, self.failures = start, model, failures

    def run_episode(self, episode: Episode, sampling: Sampling) -> Turns:
        """Runs an episode. Args: sampling: its max_tokens is that of one turn."""
        return self.failures.run_with_retries(episode, lambda: self._run_once(episode, sampling))

    def _run_once(self, episode: Episode, sampling: Sampling) -> Turns:
        session, reason = Session(self.model), "stop"
        engine: TrajectoryCollectEngine | None = None
        try:
            engine = yield from _wait(lambda: self._begin(episode), "reset of the environment", "reset", None)
            assert engine is not None
            if engine.has_turn():
                transcript, status = _AgentTranscript(engine, self.model, session), "out of context"
                if transcript.room(transcript.context) > 0:
                    respond = functools.partial(_respond, engine, session, episode)
                    reason, status = yield from run_turns(
                        episode, sampling, transcript, respond, room=transcript.room, max_turns=None
                    )
                if status == "error":
                    raise InfrastructureError(f"the engine gave up a turn of the model (finish_reason {reason!r})")
                if status == "out of context":
                    engine.status = TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED
            yield from _wait(engine.finish, "final_reward_fn or close of the environment", "reward", 150.0)
            if engine.status is not TrajectoryStatus.ENV_TIMEOUT:
                episode.rewards[ENVIRONMENT_REWARD] = _checked_reward(engine, episode)
            info, reason = RECORDS[engine.status], _reason(engine, reason)
        except RewardError as error:
            info, reason = self.failures.add(error, episode), "error"
        rewards = [] if engine is None else [float(step.reward or 0.0) for step in engine.agent.trajectory.steps]
        turn_rewards = rewards if len(rewards) == session.turns and any(rewards) else ()
        split = functools.partial(split_messages, episode.prompt.source)
        return session.completions(episode, info, reason, split, turn_rewards)

    def _begin(self, episode: Episode) -> TrajectoryCollectEngine:
        engine = self.start(episode)
        engine.begin()
        return engine


class _AgentTranscript:
    """The transcript of an agent, for `run_turns`: an answer is the agent's whole history."""

    def __init__(self, engine: TrajectoryCollectEngine, model: RunModel, session: Session) -> None:
        self.engine, self.model, self.session = engine, model, session
        self.add_answer(message_texts(engine.agent.chat_completions))

    @property
    def context(self) -> np.ndarray:
        return self._turn.tokens

    def add_turn(self, output: Output) -> None:
        message = {"role": "assistant", "content": self.model.decode(output.tokens)}
        self.session.end(self._turn, output, message)
        self.engine.used += len(output.tokens)

    def add_answer(self, messages: Sequence[Message]) -> None:
        self._turn = self.session.begin(messages, (), {})

    def remove_answer(self) -> None:
        """Does nothing: the session has only turns that have ended."""

    def room(self, context: np.ndarray) -> int:
        """Returns the tokens that are left for a turn. Counts those used."""
        engine, sequences = self.engine, self.session.sequences
        engine.used = max(engine.used, len(context) - len(sequences[0].prefix) if sequences else 0)
        rooms = [self.model.room(context)]
        if engine.max_response_length is not None:
            rooms.append(engine.max_response_length - engine.used)
        return min((room for room in rooms if room is not None), default=1 << 30)


def _respond(engine: TrajectoryCollectEngine, session: Session, episode: Episode) -> Generator[Any, Any, list[Message]]:
    """Gives the last turn to the agent. Returns: the agent's history; [] = the episode ends."""
    text = session.nodes[-1].messages[-1]["content"]
    try:
        yield from _wait(lambda: engine.take_turn(text), "step of the environment", "step", engine.remaining_s)
    except _LateError as error:
        engine.status = TrajectoryStatus.ENV_TIMEOUT
        log.warning("%s: the episode of row %d has no reward", error, episode.prompt.row)
    return message_texts(engine.agent.chat_completions) if engine.has_turn() else []


class _LateError(Exception):
    """A call was late."""


def _wait(function: Callable[[], Any], name: str, phase: str, timeout_s: float | None) -> Any:
    """Yields a call of the user's code to the driver. Raises: RewardError: it raised. _LateError: it was late."""
    call = ExternalCall(function=function, name=name, timeout_s=timeout_s, phase=phase)
    try:
        return (yield call)
    except CallTimeoutError as error:
        raise _LateError(str(error)) from error
    except GeneratorExit:
        raise
    except BaseException as error:  # SystemExit too: it is the user's code
        raise error_from_exception(name, error, __file__) from error


def _checked_reward(engine: TrajectoryCollectEngine, episode: Episode) -> float:
    """Returns the reward of the trajectory. Raises RewardError: it is no finite number."""
    reward, name = engine.agent.trajectory.reward, type(engine.env).__name__
    checked = check_values([reward], [f"{episode.prompt.row}_{episode.generation}"], name=name)
    if checked.wrong or np.isnan(checked.rewards[0]):
        raise RewardError(f"the rewards of {name} add up to {reward}; return finite numbers from step")
    return float(checked.rewards[0])


def _reason(engine: TrajectoryCollectEngine, last: FinishReason) -> FinishReason:
    """Returns why an episode ended. "length" is what overlong_filter leaves out, where it is on."""
    if engine.status is TrajectoryStatus.ENV_TIMEOUT:
        return "error"
    if engine.overlong_filter:
        return "length" if engine.is_filtered else "stop"
    return "length" if engine.status is TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED else last
