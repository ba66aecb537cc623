"""AgenticEpisodes: an agent and an environment of Tunix's form as an episode of whet's loop.

The agent's conversation is the history that the model is given. A Session matches it message by message with the turns
so far, as it does for agents behind a base URL, so sampled ids are never encoded again; an agent that changes its
history forks the episode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from whet.envs.environment import ENVIRONMENT_REWARD
from whet.envs.failures import EpisodeFailures
from whet.envs.multi_turn import stand_in
from whet.errors import InfrastructureError, RewardError
from whet.rewards.checked_values import check_values, error_from_exception
from whet.rollout.base import Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallTimeoutError, ExternalCall
from whet.serve.agent_episodes import sequence_completion
from whet.serve.run_model import RunModel
from whet.serve.sessions import Session
from whet.tunix.agentic.agents import TrajectoryStatus
from whet.tunix.agentic.collect import TrajectoryCollectEngine, message_texts
from whet.types import Completion, FinishReason

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
        session, last = Session(self.model), "stop"
        engine: TrajectoryCollectEngine | None = None
        try:
            engine = yield from _wait(lambda: self._begin(episode), "reset of the environment", "reset", None)
            assert engine is not None
            while engine.has_turn():
                turn = session.begin(message_texts(engine.agent.chat_completions), (), {})
                room = self._room(engine, session, turn.tokens)
                if room < 1:
                    engine.status = TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED
                    break
                limited = replace(sampling, max_tokens=min(sampling.max_tokens, room))
                output = yield episode.request(turn.tokens, limited, conversation=hash(episode.rng_key))
                last = output.finish_reason
                if last in ("abort", "error"):
                    raise InfrastructureError(f"the engine gave up a turn of the model (finish_reason {last!r})")
                text = self.model.decode(output.tokens)
                session.end(turn, output, {"role": "assistant", "content": text})
                engine.used += len(output.tokens)
                try:
                    take = lambda engine=engine, text=text: engine.take_turn(text)
                    yield from _wait(take, "step of the environment", "step", engine.remaining_s)
                except _LateError as error:
                    engine.status = TrajectoryStatus.ENV_TIMEOUT
                    log.warning("%s: the episode of row %d has no reward", error, episode.prompt.row)
            yield from _wait(engine.finish, "final_reward_fn or close of the environment", "reward", 150.0)
            if engine.status is not TrajectoryStatus.ENV_TIMEOUT:
                episode.rewards[ENVIRONMENT_REWARD] = _checked_reward(engine, episode)
            info, reason = dict(RECORDS[engine.status]), _reason(engine, last)
        except RewardError as error:
            info, reason = dict(self.failures.add(error, episode)), "error"
        return self._completions(episode, session, engine, info, reason)

    def _begin(self, episode: Episode) -> TrajectoryCollectEngine:
        engine = self.start(episode)
        engine.begin()
        return engine

    def _room(self, engine: TrajectoryCollectEngine, session: Session, context: np.ndarray) -> int:
        """Returns the tokens that are left for a turn. Counts those used. Args: context: of the turn."""
        used = len(context) - len(session.sequences[0].prefix) if session.sequences else 0
        engine.used = max(engine.used, used)
        rooms = [self.model.room(context)]
        if engine.max_response_length is not None:
            rooms.append(engine.max_response_length - engine.used)
        return min((room for room in rooms if room is not None), default=1 << 30)

    def _completions(
        self,
        episode: Episode,
        session: Session,
        engine: TrajectoryCollectEngine | None,
        info: dict[str, Any],
        reason: FinishReason,
    ) -> list[Completion]:
        """Returns the sequences to train on. Args: info, reason: how the episode ended."""
        info["turns"] = session.turns
        if episode.attempts > 1:
            info["attempts"] = episode.attempts
        if session.forks:
            info["forks"] = session.forks
        if not session.sequences:
            return [stand_in(episode, info, reason)]
        of_turn = {}
        steps = [] if engine is None else engine.agent.trajectory.steps
        if len(steps) == session.turns and any(step.reward for step in steps):
            of_turn = {id(o): float(step.reward) for o, step in zip(session.outputs, steps, strict=True)}
        return [sequence_completion(sequence, episode, info, reason, of_turn) for sequence in session.sequences]


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
