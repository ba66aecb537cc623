"""Tunix's environments: one turn (TaskEnvironment), turns with tools (ToolEnvironment), or a class of one's own.

An environment of one's own derives from BaseTaskEnv, and writes `_initial_observation` and `_step_impl`.
"""

from __future__ import annotations

import abc
import functools
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from whet.rollout.external_calls import run_function
from whet.tunix.agentic.agents import Action
from whet.tunix.agentic.tools import BaseTool, ToolCall, ToolManager

__all__ = ["BaseEnv", "BaseTaskEnv", "EnvStepResult", "TaskEnvironment", "ToolEnvironment"]


@dataclass
class EnvStepResult:
    """The environment's answer to an action."""

    observation: Any
    reward: float
    done: bool
    """Whether the episode has ended."""
    info: dict[str, Any]


class BaseEnv(abc.ABC):
    """What every environment has."""

    def __init__(self) -> None:
        self.idx: Any = None
        """The place of the environment among others."""

    @abc.abstractmethod
    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begins an episode. Returns: the first observation, and further information."""

    @abc.abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Answers an action. Returns: observation, reward, whether the episode has ended, further information."""

    async def step_async(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Answers an action, in a thread."""
        return await run_function(functools.partial(self.step, action))

    def close(self) -> None:  # noqa: B027
        """Frees what the environment holds."""

    @classmethod
    def from_dict(cls, env_args: dict[str, Any]) -> Self:
        """Returns the environment of keyword arguments."""
        return cls(**env_args)


class BaseTaskEnv(BaseEnv):
    """An environment with a task, which ends after max_steps turns at the latest.

    Args:
        task: the columns of a row; the prompt is "prompts".
        reward_fn: called with task and action by the environments that have a reward of an answer.
        max_steps: turns of the model.
        kwargs: kept as extra_kwargs; group_id and pair_index say which episode it is.
    """

    def __init__(
        self,
        task: dict[str, Any] | None = None,
        *,
        reward_fn: Callable[..., Any] | None = None,
        max_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.task = task or {}
        self.reward_fn, self.max_steps = reward_fn, max_steps
        self.step_count = 0
        self.extra_kwargs = kwargs

    def _initial_observation(self) -> Any:
        """Returns the first observation."""
        raise NotImplementedError(f"write {type(self).__name__}._initial_observation")

    def _step_impl(self, action: Any) -> EnvStepResult:
        """Answers an action; turns are counted by `step`."""
        raise NotImplementedError(f"write {type(self).__name__}._step_impl")

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begins an episode. Returns: the first observation, and {}."""
        self.step_count = 0
        return self._initial_observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Answers an action, the last one with done=True. Returns: observation, reward, done, info."""
        self.step_count += 1
        result = self._step_impl(action)
        return result.observation, result.reward, result.done or self.step_count >= self.max_steps, result.info

    def _answer_reward(self, answer: Any) -> float:
        """Returns the reward of an answer by reward_fn, which may return a RewardOutput; without one 0."""
        if self.reward_fn is None:
            return 0.0
        reward = self.reward_fn(task=self.task, action=answer)
        return getattr(reward, "reward", reward)


class TaskEnvironment(BaseTaskEnv):
    """One turn: the observation is the task, and reward_fn judges the answer.

    >>> environment = TaskEnvironment({"prompts": "2+3="}, reward_fn=lambda task, action: float(action == "5"))
    >>> environment.step("5")[1:3]
    (1.0, True)
    """

    def __init__(
        self, single_example: dict[str, Any], *, reward_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(single_example, reward_fn=reward_fn, **{**kwargs, "max_steps": 1})

    def _initial_observation(self) -> Any:
        return self.task

    def _step_impl(self, action: Any) -> EnvStepResult:
        answer = action.action if isinstance(action, Action) else action
        return EnvStepResult({}, self._answer_reward(answer), True, {"response": answer})

    @classmethod
    def from_dict(cls, env_args: dict[str, Any]) -> Self:
        """Returns the environment of a mapping with the task's entries, reward_fn and group_id."""
        task = dict(env_args)
        options = {name: task.pop(name, None) for name in ("reward_fn", "group_id")}
        return cls(task, **options)


class ToolEnvironment(BaseTaskEnv):
    """Turns with tools. A text, the call `finish(response=...)` or the last turn ends the episode.

    Args: tool_map: name -> class of a tool. The others: see BaseTaskEnv.
    """

    def __init__(
        self,
        task: dict[str, Any] | None = None,
        *,
        tool_map: Mapping[str, type[BaseTool]],
        reward_fn: Callable[..., Any] | None = None,
        max_steps: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(task, reward_fn=reward_fn, max_steps=max_steps, **kwargs)
        self.tool_manager = ToolManager(tool_map)

    def _initial_observation(self) -> Any:
        return self.task

    def _step_impl(self, action: Any) -> EnvStepResult:
        action = action.action if isinstance(action, Action) else action
        calls = [action] if isinstance(action, dict) else [] if action is None else action
        is_text = isinstance(calls, str)
        finish = None if is_text else next((c for c in calls if c["function"].get("name") == "finish"), None)
        if is_text or finish is not None:
            answer = calls if finish is None else _arguments(finish).get("response", "")
            return EnvStepResult({}, self._answer_reward(answer), True, {"response": calls})
        outputs = self._execute_tool_calls(calls)
        return EnvStepResult({"tool_outputs": outputs}, 0.0, False, {"response": calls})

    def _execute_tool_calls(self, tool_calls: list[dict[str, Any]]) -> dict[str, str]:
        """Makes calls in OpenAI's form, at the same time. Returns: id -> answer."""
        calls = [ToolCall(call["function"]["name"], _arguments(call)) for call in tool_calls]
        for call, source in zip(calls, tool_calls, strict=True):
            vars(call)["id"] = source.get("id") or str(uuid.uuid4())
        return self.tool_manager.execute_calls(calls, parallel=True)

    @classmethod
    def from_dict(cls, env_args: dict[str, Any]) -> Self:
        """Returns the environment of a mapping with tool_map, reward_fn, max_steps and the task's entries."""
        task = dict(env_args)
        reward_fn, max_steps = task.pop("reward_fn", None), task.pop("max_steps", 10)
        return cls(tool_map=task.pop("tool_map"), task=task, reward_fn=reward_fn, max_steps=max_steps)


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, which may be JSON."""
    arguments = call["function"].get("arguments", {})
    return json.loads(arguments) if isinstance(arguments, str) else arguments
