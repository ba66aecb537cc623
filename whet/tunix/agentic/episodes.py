"""AgenticEpisodes: an agent and an environment of Tunix's form as an episode of whet's loop.

The agent's conversation is the history that the model is given. A Session matches it message by message with the turns
so far, as it does for agents behind a base URL, so sampled ids are never encoded again; an agent that changes its
history forks the episode. What agent and environment answer to a turn, the history and the status, may be recorded: a
recorded episode has no agent and no environment.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.envs.environment import ENVIRONMENT_REWARD, close_in_thread
from whet.envs.failures import EpisodeFailures
from whet.envs.multi_turn import run_turns
from whet.envs.recorded import RecordedAnswers, Tape, run_recorded
from whet.envs.sessions import Session, Turn
from whet.errors import InfrastructureError, RewardError
from whet.rewards.checked_values import check_values, error_from_exception
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallGenerator, CallTimeoutError, ExternalCall
from whet.serve.agent_episodes import split_messages
from whet.serve.run_model import RunModel
from whet.tunix.agentic.agents import TrajectoryStatus
from whet.tunix.agentic.collect import TrajectoryCollectEngine, message_texts
from whet.types import FinishReason, Message

__all__ = ["AgenticEpisodes"]

log = logging.getLogger("whet")

FINISH_S = 150.0
"""Time limit of final_reward_fn and close."""
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
        start: (episode) -> the agent and the environment of a new episode.
        model: the policy; its `longest` bounds the tokens of an episode.
        failures: what follows when agent or environment raise.
        answers: where the answers of agents and environments are recorded, and found again; None = they are not.
        options: of TrajectoryCollectEngine.
    """

    def __init__(
        self,
        start: Callable[[Episode], tuple[Any, Any]],
        model: RunModel,
        failures: EpisodeFailures,
        *,
        answers: RecordedAnswers | None = None,
        **options: Any,
    ) -> None:
        self.start, self.model, self.failures, self.answers = start, model, failures, answers
        self.options = options

    def run_episode(self, episode: Episode, sampling: Sampling) -> Turns:
        """Runs an episode. Args: sampling: its max_tokens is that of one turn."""
        run_once = lambda tape: self._run_once(episode, sampling, tape)
        return self.failures.run_with_retries(episode, lambda: run_recorded(self.answers, episode, run_once))

    def _run_once(self, episode: Episode, sampling: Sampling, tape: Tape | None) -> Turns:
        played = _Played(self, episode, tape)
        session, reason, end = played.session, "stop", _End()
        try:
            yield from played.begin()
            if played.status is TrajectoryStatus.RUNNING:
                status = "out of context"
                if played.room(played.context) > 0:
                    reason, status = yield from run_turns(
                        episode, sampling, played, played.respond, room=played.room, max_turns=None
                    )
                if status == "error":
                    raise InfrastructureError(f"the engine gave up a turn of the model (finish_reason {reason!r})")
                if status == "out of context":
                    played.status = TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED
            end = yield from played.finish()
            if played.status is not TrajectoryStatus.ENV_TIMEOUT:
                episode.rewards[ENVIRONMENT_REWARD] = end.reward
            info, reason = RECORDS[played.status], self._reason(played.status, end, reason)
        except RewardError as error:
            info, reason = self.failures.add(error, episode), "error"
        finally:
            played.close()
        turn_rewards = end.of_steps if len(end.of_steps) == session.turns and any(end.of_steps) else ()
        split = functools.partial(split_messages, episode.prompt.source)
        return session.completions(episode, info, reason, split, turn_rewards)

    def _reason(self, status: TrajectoryStatus, end: _End, last: FinishReason) -> FinishReason:
        """Returns why an episode ended. "length" is what overlong_filter leaves out, where it is on."""
        if status is TrajectoryStatus.ENV_TIMEOUT:
            return "error"
        if self.options.get("overlong_filter"):
            return "length" if end.is_filtered else "stop"
        return "length" if status is TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED else last


class _End(NamedTuple):
    """The rewards of an episode that has ended."""

    reward: float = 0.0
    of_steps: Sequence[float] = ()
    is_filtered: bool = False
    """Whether overlong_filter leaves the episode out."""


class _Played:
    """One episode: the agent's history and its status, and the Transcript for `run_turns`, whose answers are histories.

    Args: of: the episodes. tape: the record of this one, which answers in place of agent and environment, or is made.
    """

    def __init__(self, of: AgenticEpisodes, episode: Episode, tape: Tape | None) -> None:
        self._of, self._episode, self._tape = of, episode, tape
        self.session = Session(of.model)
        self.status = TrajectoryStatus.RUNNING
        self._engine: TrajectoryCollectEngine | None = None
        self._is_open = False
        self._history: list[Message] = []
        """The agent's messages, after a turn with that turn."""
        self._turn: Turn | None = None
        self._used = 0
        """Tokens after the prompt."""
        self._most: int | None = of.options.get("max_response_length")

    # ---- the three steps -----------------------------------------------------------------------------------------

    def begin(self) -> CallGenerator[None]:
        """Creates agent and environment, and resets them."""

        def create() -> dict[str, Any]:
            agent, env = self._of.start(self._episode)
            self._engine, self._is_open = TrajectoryCollectEngine(agent, env, **self._of.options), True
            self._engine.begin()
            return self._state(self._engine)

        filters = sorted(status.name for status in self._of.options.get("filter_statuses") or ())
        settings = f"reset, {self._most} {self._of.options.get('overlong_filter')} {filters}"  # a record has the same
        call = self._wait(create, "reset of the environment", "reset", self._of.options.get("timeout"))
        state = yield from self._ask(settings, call)
        if messages := self._read_state(state):
            self.add_answer(messages)

    def respond(self) -> CallGenerator[list[Message]]:
        """Gives the last turn to the agent. Returns: the agent's history; [] = the episode ends."""
        engine, text = self._engine, self.session.nodes[-1].messages[-1]["content"]
        self._history = self.session.nodes[-1].messages

        def take_turn() -> dict[str, Any]:
            assert engine is not None
            engine.used = self._used
            engine.take_turn(text)
            return self._state(engine)

        limit = None if engine is None else engine.remaining_s
        call = self._wait(take_turn, "step of the environment", "step", limit)
        try:
            return self._read_state((yield from self._ask("step", call)))
        except _LateError as error:
            self.status = TrajectoryStatus.ENV_TIMEOUT
            log.warning("%s: the episode of row %d has no reward", error, self._episode.prompt.row)
            return []

    def finish(self) -> CallGenerator[_End]:
        """Adds the final reward, and closes the environment. Returns: the rewards."""

        def finish() -> dict[str, Any]:
            engine = self._engine
            assert engine is not None
            engine.status, self._is_open = self.status, False
            engine.finish()
            steps = [float(step.reward or 0.0) for step in engine.agent.trajectory.steps]
            is_late = engine.status is TrajectoryStatus.ENV_TIMEOUT
            reward = 0.0 if is_late else _checked_reward(engine, self._episode)
            return {"reward": reward, "of_steps": steps, "is_filtered": engine.is_filtered}

        name = "final_reward_fn or close of the environment"
        return _End(**(yield from self._ask("finish", self._wait(finish, name, "reward", FINISH_S))))

    def close(self) -> None:
        """Closes the environment of an episode that has failed or was cancelled, in a thread that nobody waits for."""
        if self._engine is not None and self._is_open:
            close_in_thread(self._engine.env.close, f"close of {type(self._engine.env).__name__}")

    def _ask(self, name: str, call: CallGenerator[Any]) -> CallGenerator[Any]:
        """Returns the answer of a call, or the recorded one."""
        ids = self._episode.prompt.tokens if not self.session.nodes else self.session.nodes[-1].tokens
        return call if self._tape is None else self._tape.ask(name, ids, call)

    def _wait(self, function: Callable[[], Any], name: str, phase: str, timeout_s: float | None) -> CallGenerator[Any]:
        """Yields a call of the user's code to the driver. Raises: RewardError: it raised. _LateError: it was late."""
        try:
            return (yield ExternalCall(function=function, name=name, timeout_s=timeout_s, phase=phase))
        except CallTimeoutError as error:
            raise _LateError(str(error)) from error
        except (GeneratorExit, RewardError):
            raise
        except BaseException as error:  # SystemExit too: it is the user's code
            raise error_from_exception(name, error, __file__) from error

    def _state(self, engine: TrajectoryCollectEngine) -> dict[str, Any]:
        """Returns what a record has of agent and environment: the status, and how the history differs from the last."""
        if not engine.has_turn():
            return {"status": engine.status.name}
        messages = message_texts(engine.agent.chat_completions)
        if not messages:
            raise RewardError(
                f"chat_completions of {type(engine.agent).__name__} is empty, and the model has another turn; leave at "
                "least one message in it, or let the environment end the episode (done=True)"
            )
        same = (a == b for a, b in zip(self._history, messages, strict=False))
        kept = 0 if self._tape is None else sum(itertools.takewhile(bool, same))
        return {"status": engine.status.name, "kept": kept, "added": messages[kept:]}

    def _read_state(self, state: Mapping[str, Any]) -> list[Message]:
        """Takes the status and returns the history of a state; [] = the episode ends."""
        self.status = TrajectoryStatus[state["status"]]
        if self.status is not TrajectoryStatus.RUNNING:
            return []
        return [*self._history[: state["kept"]], *state["added"]]

    # ---- the transcript ------------------------------------------------------------------------------------------

    @property
    def context(self) -> np.ndarray:
        """int32 [P]: what the model is given for its next turn."""
        assert self._turn is not None, "a turn follows the agent's history"
        return self._turn.tokens

    def add_turn(self, output: Output) -> None:
        """Appends a turn of the model."""
        assert self._turn is not None, "a turn follows the agent's history"
        self.session.end(self._turn, output, {"role": "assistant", "content": self._of.model.decode(output.tokens)})
        self._used += len(output.tokens)

    def add_answer(self, messages: Sequence[Message]) -> None:
        """Begins the next turn. Args: messages: the agent's history."""
        self._turn = self.session.begin(messages, (), {})

    def remove_answer(self) -> None:
        """Does nothing: the session has only turns that have ended."""

    def room(self, context: np.ndarray) -> int:
        """Returns the tokens that are left for a turn. Counts those used."""
        sequences = self.session.sequences
        self._used = max(self._used, len(context) - len(sequences[0].prefix) if sequences else 0)
        rooms = [self._of.model.room(context), None if self._most is None else self._most - self._used]
        return min((room for room in rooms if room is not None), default=1 << 30)


class _LateError(RewardError):
    """A call was late."""


def _checked_reward(engine: TrajectoryCollectEngine, episode: Episode) -> float:
    """Returns the reward of the trajectory. Raises RewardError: it is no finite number."""
    reward, name = engine.agent.trajectory.reward, type(engine.env).__name__
    checked = check_values([reward], [f"{episode.prompt.row}_{episode.generation}"], name=name)
    if checked.wrong or np.isnan(checked.rewards[0]):
        raise RewardError(f"the rewards of {name} add up to {reward}; return finite numbers from step")
    return float(checked.rewards[0])
