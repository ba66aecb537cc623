"""TrajectoryCollectEngine: runs an agent in an environment, with a model of any kind.

    engine = TrajectoryCollectEngine(agent, env, model_call=call)
    trajectory = await engine.collect("Trajectory")

AgenticGRPOLearner runs its episodes by the same three steps (`begin`, `take_turn`, `finish`), with the policy as the
model (episodes.py).

Dim legend: P prompt, C completion.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import lookup_error
from whet.rollout.external_calls import run_function
from whet.tunix.agentic.agents import ConversationAgentBase, Step, TrajectoryStatus

__all__ = [
    "ChatTemplateParser",
    "DefaultChatTemplateParser",
    "Gemma4ChatTemplateParser",
    "GemmaChatTemplateParser",
    "LlamaChatTemplateParser",
    "QwenChatTemplateParser",
    "TrajectoryCollectEngine",
    "message_texts",
]

log = logging.getLogger("whet")

MODES = ("Trajectory", "Token", "Steps", "Conversation")
OVERLONG = frozenset(
    {
        TrajectoryStatus.MAX_STEPS_REACHED,
        TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED,
        TrajectoryStatus.TIMEOUT,
        TrajectoryStatus.ENV_TIMEOUT,
    }
)
"""The statuses that overlong_filter leaves out, unless filter_statuses names others."""


class ChatTemplateParser:
    """Tunix's chat parser by the tokenizer's own chat template, which serves every family of models.

    Args: tokenizer: of transformers, or around one. enable_thinking: for templates that have it.

    Tunix's names of it by family (QwenChatTemplateParser and others) are the same class.
    """

    def __init__(self, tokenizer: Any, enable_thinking: bool = True) -> None:
        self.tokenizer, self.enable_thinking = getattr(tokenizer, "tokenizer", tokenizer), enable_thinking

    def parse(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, is_first_msg: bool = False
    ) -> str:
        """Returns the text of messages. Args: is_first_msg: no effect."""
        return self.tokenizer.apply_chat_template(
            message_texts(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=self.enable_thinking,
        )


DefaultChatTemplateParser = ChatTemplateParser
"""Tunix's parser of each family: the tokenizer's own template writes what they write by hand."""
QwenChatTemplateParser = LlamaChatTemplateParser = DefaultChatTemplateParser
GemmaChatTemplateParser = Gemma4ChatTemplateParser = DefaultChatTemplateParser


def message_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are texts: None is "", and an array of one text is that text.

    >>> message_texts([{"role": "user", "content": np.array(["2+3="])}])
    [{'role': 'user', 'content': '2+3='}]
    """
    text = lambda content: "" if content is None else str(content.item() if hasattr(content, "item") else content)
    return [{**message, "content": text(message.get("content"))} for message in messages]


class TrajectoryCollectEngine:
    """Runs one episode.

    Args:
        agent, env: of the episode.
        model_call: (messages, env, max_generation_steps=..., **model_call_kwargs) -> a RolloutOutput; plain or async.
        gamma: discount of a step's mc_return.
        max_response_length: tokens after the prompt; None = no limit. It needs a tokenizer and a chat_parser, unless
            model_call alone counts.
        timeout: of the episode in seconds.
        tokenizer, chat_parser: turn the environment's messages into ids; None = steps have no ids of it.
        filter_statuses: the statuses that overlong_filter leaves out; None = all that are too long or too late.
        overlong_filter: mask the tokens of such episodes, and leave out their final reward.
        perf_v2: no effect.
    """

    def __init__(
        self,
        agent: ConversationAgentBase,
        env: Any,
        *,
        model_call: Callable[..., Any] | None = None,
        model_call_kwargs: Mapping[str, Any] | None = None,
        gamma: float = 1.0,
        max_response_length: int | None = None,
        timeout: float = 600.0,
        tokenizer: Any = None,
        chat_parser: Any = None,
        filter_statuses: Collection[TrajectoryStatus] | None = None,
        overlong_filter: bool = False,
        perf_v2: Any = None,
    ) -> None:
        self.agent, self.env, self.model_call = agent, env, model_call
        self.model_call_kwargs = dict(model_call_kwargs or {})
        self.gamma, self.max_response_length, self.timeout = gamma, max_response_length, timeout
        self.tokenizer, self.chat_parser = tokenizer, chat_parser
        self.filter_statuses = OVERLONG if filter_statuses is None else filter_statuses
        self.overlong_filter = overlong_filter
        self.max_steps = getattr(env, "max_steps", 1)
        self.env_time: dict[str, Any] = {"reset_latency": 0.0, "step_latency": [], "close_latency": 0.0}
        self.reward_time = {"reward_latency": 0.0}
        self.used = 0
        """Tokens after the prompt."""
        self._end = 0.0

    # ---- the three steps of an episode, which may run on any thread ----------------------------------------------

    @property
    def status(self) -> TrajectoryStatus:
        """Of the trajectory."""
        return self.agent.trajectory.status

    @status.setter
    def status(self, status: TrajectoryStatus) -> None:
        self.agent.trajectory.status = status

    @property
    def remaining_s(self) -> float:
        """Seconds that are left of `timeout`."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_filtered(self) -> bool:
        """Whether overlong_filter leaves the episode out."""
        return self.overlong_filter and self.status in self.filter_statuses

    def begin(self) -> None:
        """Resets environment and agent."""
        started = time.monotonic()
        observation, info = self.env.reset()
        self.env_time["reset_latency"] += time.monotonic() - started
        self._end = time.monotonic() + self.timeout
        self.agent.reset()
        self.agent.update_from_env(observation=observation, reward=0.0, done=False, info=self._with_counts(info))
        self.status = TrajectoryStatus.RUNNING

    def has_turn(self) -> bool:
        """Returns whether the model has another turn; otherwise the status says why not."""
        if self.status is not TrajectoryStatus.RUNNING:
            return False
        if len(self.agent.trajectory.steps) >= self.max_steps:
            self.status = TrajectoryStatus.MAX_STEPS_REACHED
        elif self.max_response_length is not None and self.used >= self.max_response_length:
            self.status = TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED
        return self.status is TrajectoryStatus.RUNNING

    def take_turn(self, text: str) -> None:
        """Gives the agent a turn of the model, and its action to the environment. Without room left it ends there."""
        action = self.agent.update_from_model(text).action
        step = self.agent.get_current_step()
        if self.max_response_length is not None and self.used >= self.max_response_length:
            self.status = TrajectoryStatus.MAX_CONTEXT_LIMIT_REACHED
            return
        started = time.monotonic()
        observation, reward, done, info = self.env.step([] if action is None else action)
        self.env_time["step_latency"].append(time.monotonic() - started)
        reward = getattr(reward, "reward", reward)
        self.agent.update_from_env(observation, reward, done, self._with_counts(info))
        if self.remaining_s <= 0:
            self.status = TrajectoryStatus.TIMEOUT
        elif done:
            self.status = TrajectoryStatus.SUCCEEDED
        if step is not None and self.status is TrajectoryStatus.TIMEOUT:
            step.done = True

    def finish(self) -> None:
        """Adds the final reward of the environment, computes the returns, and closes the environment."""
        trajectory, final = self.agent.trajectory, getattr(self.env, "final_reward_fn", None)
        try:
            if callable(final) and trajectory.steps and not self.is_filtered:
                started = time.monotonic()
                reward: Any = final()
                self.reward_time["reward_latency"] += time.monotonic() - started
                trajectory.steps[-1].reward += getattr(reward, "reward", reward)
            self.compute_mc_reward()
            self.compute_trajectory_reward()
            trajectory.env_time, trajectory.reward_time = self.env_time, self.reward_time
        finally:
            started = time.monotonic()
            self.env.close()
            self.env_time["close_latency"] += time.monotonic() - started

    def compute_mc_reward(self) -> None:
        """Sets mc_return of each step: G_t = r_t + γ G_{t+1}."""
        value = 0.0
        for step in reversed(self.agent.trajectory.steps):
            value = step.mc_return = step.reward + self.gamma * value

    def compute_trajectory_reward(self) -> Any:
        """Sets the reward of the trajectory: the sum of its steps' rewards. Returns: the trajectory."""
        self.agent.trajectory.reward = float(sum(step.reward for step in self.agent.trajectory.steps))
        return self.agent.trajectory

    def _with_counts(self, info: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(info or {}), "max_steps": self.max_steps, "cur_tokens": self.used}

    # ---- with a model of any kind --------------------------------------------------------------------------------

    async def collect(self, mode: str = "Conversation") -> Any:
        """Runs the episode.

        Args: mode: what is returned: "Trajectory", "Token" (ids, masks and logprobs as one sequence), "Steps" (those of
            each step) or "Conversation" (the messages).
        Raises: ConfigError: another mode, or no model_call.
        """
        if mode not in MODES:
            raise lookup_error("mode", mode, MODES)
        await run_function(self.begin)
        self.agent.trajectory.prompt_tokens = self._ids(self.agent.chat_completions, first=True)
        try:
            while self.has_turn():
                await self._turn()
        finally:
            await run_function(self.finish)
        return self._result(mode)

    async def _turn(self) -> None:
        assert self.model_call is not None, "collect needs model_call"
        room = None if self.max_response_length is None else self.max_response_length - self.used
        said = len(self.agent.chat_completions)
        arguments = {"max_generation_steps": room, **self.model_call_kwargs}
        call = functools.partial(self.model_call, self.agent.chat_completions, self.env, **arguments)
        output = await run_function(call)
        prompts = getattr(output, "left_padded_prompt_tokens", None)
        if not self.agent.trajectory.steps and prompts is not None and len(prompts):
            self.agent.trajectory.prompt_tokens = np.asarray(prompts[0])
        tokens = np.asarray(output.tokens[0] if output.tokens else [], np.int32)
        self.used += len(tokens)
        try:
            await asyncio.wait_for(run_function(functools.partial(self.take_turn, output.text[0])), self.remaining_s)
        except TimeoutError:
            self.status = TrajectoryStatus.ENV_TIMEOUT
            log.warning("the environment did not answer within %g s, and its episode has ended", self.timeout)
        step = self.agent.get_current_step()
        if step is None:
            return
        step.done = step.done or self.status is not TrajectoryStatus.RUNNING
        step.assistant_tokens, step.assistant_masks = tokens, np.ones(len(tokens), np.int32)
        if output.logprobs is not None:
            step.logprobs = np.asarray(output.logprobs[0], np.float32)
        if self.status is TrajectoryStatus.RUNNING:
            answer = [m for m in self.agent.chat_completions[said:] if m["role"] in ("user", "tool")]
            if answer and self.tokenizer is not None and self.chat_parser is not None:
                step.env_tokens = np.asarray(self._ids(answer, first=False), np.int32)
                step.env_masks = np.zeros(len(step.env_tokens), np.int32)
                self.used += len(step.env_tokens)

    def _ids(self, messages: Sequence[Mapping[str, Any]], *, first: bool) -> list[int]:
        """Returns the ids of messages and the header of the next turn; [] without a tokenizer and a parser."""
        if self.tokenizer is None or self.chat_parser is None:
            return []
        text = self.chat_parser.parse(messages=message_texts(messages), add_generation_prompt=True, is_first_msg=first)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _result(self, mode: str) -> Any:
        trajectory = self.agent.trajectory
        if mode == "Trajectory":
            return trajectory
        if mode == "Conversation":
            return self.agent.chat_completions
        times = {"env_time": self.env_time, "reward_time": self.reward_time}
        if mode == "Steps":
            return [{**_step_columns(step), **times} for step in trajectory.steps]
        tokens, masks, logprobs = _joined(trajectory.steps)
        task, extra = getattr(self.env, "task", None), getattr(self.env, "extra_kwargs", {})
        return {
            "conversation_text": self.agent.chat_completions,
            "prompt_tokens": trajectory.prompt_tokens,
            "conversation_tokens": tokens,
            "conversation_masks": np.zeros_like(masks) if self.is_filtered else masks,
            "status": trajectory.status.name,
            "trajectory_reward": trajectory.reward,
            **times,
            "old_logprobs": logprobs if len(tokens) else None,
            "policy_version": task.get("policy_version") if isinstance(task, Mapping) else None,
            "original_input": trajectory.task,
            "group_id": extra.get("group_id"),
        }

    @staticmethod
    async def collect_multiple(
        pairs: Sequence[tuple[ConversationAgentBase, Any]], *, mode: str = "Trajectory", **options: Any
    ) -> AsyncIterator[tuple[int, Any]]:
        """Runs episodes at the same time. Args: options: of the class. Yields: (pair, result) as they end."""

        async def run(index: int, agent: ConversationAgentBase, env: Any) -> tuple[int, Any]:
            return index, await TrajectoryCollectEngine(agent, env, **options).collect(mode)

        for result in asyncio.as_completed([run(i, agent, env) for i, (agent, env) in enumerate(pairs)]):
            yield await result


def _step_columns(step: Step) -> dict[str, Any]:
    names = ("done", "assistant_tokens", "assistant_masks", "env_tokens", "env_masks", "reward", "mc_return")
    texts = {"assistant_text": step.model_response, "env_text": step.observation}
    return {**texts, **{name: getattr(step, name) for name in names}}


def _joined(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids, masks and logprobs of all steps, [C] each, 0 where the model did not sample."""
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for step in steps:
        if step.assistant_tokens is not None and step.assistant_masks is not None:
            known = step.logprobs if step.logprobs is not None else np.zeros(len(step.assistant_tokens), np.float32)
            columns.append((step.assistant_tokens, step.assistant_masks, known))
        if step.env_tokens is not None and step.env_masks is not None:
            columns.append((step.env_tokens, step.env_masks, np.zeros(len(step.env_tokens), np.float32)))
    empty = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
    tokens, masks, logprobs = (np.concatenate(parts) for parts in zip(empty, *columns, strict=True))
    return tokens, masks, logprobs
