"""AgentEpisodes: episodes in which an agent calls the model through an OpenAI-compatible base URL.

    async def agent(base_url, api_key, row):        # plain functions run in a thread
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                         # as many calls as it likes
        return reward           # a number, a list with one for each turn, or None where it does not apply

The agent owns the loop: an episode waits for its next call, samples the turn, and answers. A Session records the turns
as sequences to train on. Left out on purpose: several agents in one episode with rewards of their own.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from whet.config.rollout import RolloutConfig
from whet.envs.agent import AGENT_REWARD, load_agent
from whet.envs.failures import EpisodeFailures
from whet.envs.recorded import RecordedAnswers, Tape, run_recorded
from whet.envs.sessions import Session
from whet.errors import DataError, RewardError, format_value
from whet.rewards.call import function_name
from whet.rewards.checked_values import check_values, error_from_exception
from whet.rollout.base import Output, Request, Sampling
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallTimeoutError, ExternalCall, ExternalCalls, run_function
from whet.serve.agent_server import AgentCall, AgentEnd, AgentServer, Inbox, episode_over
from whet.serve.api_errors import ApiError
from whet.serve.chat_model import CONTEXT_CODE
from whet.serve.run_model import RunModel
from whet.types import Completion, FinishReason, Message

__all__ = ["AgentEpisodes", "split_messages"]

log = logging.getLogger("whet")


class AgentEpisodes:
    """Runs episodes with a user's agent.

    Args:
        agent: called with base_url, api_key and row: the columns of the data, and the prompt as "prompt".
        model: the policy; its `longest` bounds the tokens of a call's prompt and completion.
        timeout_s: of an agent; None = no deadline.
        failures: what follows when the agent raises, is late, returns no number, or never calls the model: the run
            ends, or the episode does, without a reward (finish_reason "error"). None = the run ends.
        answers: where the calls and rewards of agents are recorded, and found again; None = they are not.
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        model: RunModel,
        *,
        timeout_s: float | None,
        failures: EpisodeFailures | None = None,
        answers: RecordedAnswers | None = None,
    ) -> None:
        self.agent, self.model, self.timeout_s = agent, model, timeout_s
        self.failures, self.answers = failures or EpisodeFailures(), answers
        self.name = f"agent {function_name(agent)}"
        self.server = AgentServer(model)
        self._agents = ExternalCalls()
        self._number = 0
        self._finalizer = weakref.finalize(self, _close, self.server, self._agents)
        self._finalizer.atexit = False

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        longest: int | None,
        system_prompt: str | None,
        failures: EpisodeFailures,
    ) -> AgentEpisodes:
        """Returns the episodes of rollout.agent, with the server that its agents call.

        Args: longest: of a sequence, a limit of the model or of a pass; None = no limit. The others: see ChatModel.
        Raises: ConfigError: the agent can't be found or called.
        """
        prompt: int | None = config.max_prompt_length  # None in `whet eval`: no limit
        bounds = [longest, None if prompt is None else prompt + config.most_tokens]
        model = RunModel(
            tokenizer,
            eos_ids,
            name="policy",
            longest=min((bound for bound in bounds if bound is not None), default=None),
            chat_template_kwargs=config.chat_template_kwargs,
            system_prompt=system_prompt,
        )
        answers = None if config.answers_dir is None else RecordedAnswers(config.answers_dir)
        return cls(
            load_agent(config.agent), model, timeout_s=config.agent_timeout_s, failures=failures, answers=answers
        )

    def close(self) -> None:
        """Ends all agents, and the server."""
        self._finalizer()

    def run_episode(self, episode: Episode, sampling: Sampling) -> Turns:
        """Runs an episode. Args: sampling: its max_tokens is the most of one call."""
        run_once = lambda tape: self._run_once(episode, sampling, tape)
        return self.failures.run_with_retries(episode, lambda: run_recorded(self.answers, episode, run_once))

    def _run_once(self, episode: Episode, sampling: Sampling, tape: Tape | None) -> Turns:
        model = self.model.with_sampling(sampling)
        session, number = Session(model), self._number
        self._number += 1
        record = tape if tape is not None and tape.replays else None
        inbox = self.server.open_episode() if record is None else None
        seen: list[ApiError] = []
        try:
            if inbox is not None:
                self._start(number, inbox, episode)
            end = None
            while end is None:
                said = np.zeros(0, np.int32)
                if tape is not None:
                    said = np.concatenate([said, *(node.output.tokens for node in session.nodes)])
                if record is not None:
                    calls, end = _read_events(record.next(self.name, said))
                else:
                    assert inbox is not None
                    events = yield ExternalCall(function=inbox.get, name=self.name, phase="agent", only_waits=True)
                    end = next((e for e in events if isinstance(e, AgentEnd)), None)
                    calls = [e for e in events if isinstance(e, AgentCall)]
                answered = calls if end is None else []
                yield from self._answer(episode, model, session, answered)
                if tape is not None and record is None:  # after it: which calls were abandoned is known
                    tape.add(self.name, said, _events_record(answered, end))
                seen += [call.answer for call in calls if isinstance(call.answer, ApiError)]
                _refuse(calls)
        finally:
            if inbox is not None:
                self.server.close_episode(inbox)
                self._agents.cancel([number])
        return self._completions(episode, session, end, any(error.code == CONTEXT_CODE for error in seen))

    # ---- the agent -----------------------------------------------------------------------------------------------

    def _start(self, number: int, inbox: Inbox, episode: Episode) -> None:
        """Starts the agent of an episode, whose end arrives in the inbox."""
        if "prompt" in episode.prompt.columns:
            raise DataError(
                f"row {episode.prompt.row} has a column 'prompt' besides its prompt, which an agent receives under "
                "that name; rename the column"
            )
        row = copy.deepcopy({**episode.prompt.columns, "prompt": episode.prompt.source})
        function = functools.partial(self.agent, base_url=self.server.base_url, api_key=inbox.key, row=row)
        self._agents.collect(0.0)  # ends that the inboxes have had
        run = functools.partial(_run_agent, function, inbox, self.name, self.timeout_s)
        # all run at once: an agent that waited for its turn would keep its episode waiting
        self._agents.start(number, ExternalCall(function=run, name=self.name, only_waits=True))

    def _answer(
        self, episode: Episode, model: RunModel, session: Session, calls: Sequence[AgentCall]
    ) -> Generator[list[Request], list[Output], None]:
        """Samples the turns of calls, and answers them."""
        try:
            begun = [call for call in calls if call.begin(model, session) is not None]
            drawn = [(call, request) for call in begun for request in call.call.requests]
            if not drawn:
                return
            conversation = hash(episode.rng_key) if len(drawn) == 1 else None
            outputs = yield [
                episode.request(request.tokens, request.sampling, conversation=conversation) for _, request in drawn
            ]
            for call in begun:
                call.finish([output for output, (of, _) in zip(outputs, drawn, strict=True) if of is call])
        finally:
            _refuse(calls)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _completions(self, episode: Episode, session: Session, end: AgentEnd, out_of_context: bool) -> list[Completion]:
        """Returns the sequences to train on, with the reward. Raises RewardError: the agent failed, which ends
        the run.
        """
        reason: FinishReason | None = None
        info: dict[str, Any] = {"status": "finished"}
        rewards: list[float] = []
        try:
            if end.error is not None and out_of_context and not isinstance(end.error, CallTimeoutError):
                info, reason = {"status": "out of context", "failure": "model"}, "length"  # the agent gave up
            else:
                rewards = self._rewards(end, session, episode)
                episode.rewards[AGENT_REWARD] = math.fsum(rewards)
        except RewardError as error:
            info, reason = dict(self.failures.add(error, episode)), "error"
        split = functools.partial(split_messages, episode.prompt.source)
        turn_rewards = rewards if isinstance(end.value, list | tuple) else ()
        return session.completions(episode, info, reason, split, turn_rewards)

    def _rewards(self, end: AgentEnd, session: Session, episode: Episode) -> list[float]:
        """Returns the agent's reward, or those of its turns; NaN = it does not apply. Raises RewardError: it
        has none.
        """
        if isinstance(end.error, CallTimeoutError):
            raise RewardError(f"{end.error}; give its calls limits of their own, or raise rollout.agent_timeout_s")
        if end.error is not None:
            raise error_from_exception(f"the {self.name}", end.error, __file__) from end.error
        by_turn = isinstance(end.value, list | tuple)
        values = list(end.value) if by_turn else [end.value]
        if by_turn and len(values) != session.turns:
            raise RewardError(
                f"the {self.name} returned {len(values)} rewards for {session.turns} turns of the model; return one "
                "for each call in the order of their answers, or one number for all"
            )
        checked = check_values(values, [f"{episode.prompt.row}_{episode.generation}"] * len(values), name=self.name)
        if checked.wrong or (by_turn and np.isnan(checked.rewards).any()):
            raise RewardError(
                f"the {self.name} returned {format_value(end.value, 80)}; return its reward, a finite number, or None "
                "where it does not apply; or a list of finite numbers, one for each turn of the model"
            )
        if not session.sequences:
            raise RewardError(f"the {self.name} returned without a call of the model; call it at base_url")
        return [float(reward) for reward in checked.rewards]


async def _run_agent(function: Callable[[], Any], inbox: Inbox, name: str, timeout_s: float | None) -> None:
    """Runs an agent, and puts its end into the inbox."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            end = AgentEnd(value=await run_function(function))
    except BaseException as error:  # SystemExit too: it is the user's code
        late = CallTimeoutError(f"the {name} has not returned within {timeout_s} s")
        end = AgentEnd(error=late if limit.expired() else error)
    try:
        inbox.put(end)
    except ApiError:  # its episode has ended, which cancelled it
        log.debug("%s ended after its episode", name)


def _events_record(calls: Sequence[AgentCall], end: AgentEnd | None) -> dict[str, Any]:
    """Returns what an agent has done, for JSON. Args: calls: of the model. end: of the agent, if it has ended."""
    record: dict[str, Any] = {
        "calls": [{**call.as_record(), "answered": isinstance(call.answer, list)} for call in calls]
    }
    if end is not None:
        value = None
        if end.value is not None:
            with suppress(TypeError, ValueError):  # the episode fails by such a value, and is not recorded
                value = np.asarray(end.value, float).tolist()
        record["end"] = {"value": value, "raised": end.error is not None}
    return record


def _read_events(record: Mapping[str, Any]) -> tuple[list[AgentCall], AgentEnd | None]:
    """Returns calls and end of `_events_record`."""
    calls = [AgentCall.from_record(call) for call in record["calls"]]
    for call, known in zip(calls, record["calls"], strict=True):
        call.is_abandoned = not known["answered"]
    end = record.get("end")
    if end is None:
        return calls, None
    return calls, AgentEnd(value=end["value"], error=RuntimeError("recorded") if end["raised"] else None)


def _refuse(calls: Sequence[AgentCall]) -> None:
    """Answers the calls that have no answer: their episode has ended."""
    for call in calls:
        call.refuse(episode_over())


def split_messages(prompt: Any, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Returns the messages of a conversation before the agent's model spoke, and the others."""
    prompt_messages = [] if isinstance(prompt, str) else list(prompt)
    count = len(prompt_messages)
    if not count or [dict(m) for m in messages[:count]] != [dict(m) for m in prompt_messages]:
        roles = [m["role"] for m in messages]
        count = roles.index("assistant")
    return list(messages[:count]), list(messages[count:])


def _close(server: AgentServer, agents: ExternalCalls) -> None:
    """Ends agents and server."""
    agents.close()
    server.stop(timeout_s=0.1)
