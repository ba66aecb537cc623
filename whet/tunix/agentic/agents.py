"""Tunix's agents: they turn observations into messages for the model, and its turns into actions.

An agent of one's own derives from ConversationAgentBase, and writes `update_from_model` and perhaps
`_observation_to_messages`.
"""

from __future__ import annotations

import abc
import copy
import json
import logging
import uuid
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from whet.tunix.agentic.tools import BaseTool, ToolManager, get_tool_parser

__all__ = [
    "Action",
    "ConversationAgentBase",
    "LLMBaseAgent",
    "ModelAgent",
    "Step",
    "ToolAgent",
    "Trajectory",
    "TrajectoryItem",
    "TrajectoryStatus",
]

log = logging.getLogger("whet")


@dataclass(kw_only=True)
class Action:
    """What the environment is asked to do."""

    action: Any = None
    """In the form that the environment reads: a text, or a list of tool calls."""


@dataclass(kw_only=True)
class Step:
    """A turn of the model, and the environment's answer to it."""

    chat_completions: list[dict[str, Any]] = field(default_factory=list)
    """The conversation, the turn included."""
    thought: str = ""
    action: Action | None = None
    observation: Any = None
    model_response: str = ""
    """The text of the turn."""
    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    mc_return: float = 0.0
    """The discounted sum of the rewards from this step on."""
    assistant_tokens: np.ndarray | None = None
    assistant_masks: np.ndarray | None = None
    env_tokens: np.ndarray | None = None
    env_masks: np.ndarray | None = None
    logprobs: np.ndarray | None = None


class TrajectoryStatus(Enum):
    """How an episode has ended."""

    SUCCEEDED = auto()
    """The environment has ended it."""
    RUNNING = auto()
    MAX_STEPS_REACHED = auto()
    MAX_CONTEXT_LIMIT_REACHED = auto()
    """max_response_length left no room for a turn."""
    TIMEOUT = auto()
    """episode_timeout has passed."""
    ENV_TIMEOUT = auto()
    """The environment did not answer before episode_timeout."""
    FAILED = auto()


@dataclass(kw_only=True)
class Trajectory:
    """An episode."""

    task: Any = None
    """The first observation."""
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0
    """The sum of the steps' rewards."""
    status: TrajectoryStatus = TrajectoryStatus.RUNNING
    env_time: dict[str, Any] = field(default_factory=dict)
    """Seconds: reset_latency, step_latency of each step, close_latency."""
    reward_time: dict[str, float] = field(default_factory=dict)
    prompt_tokens: Any = field(default_factory=list)
    """The ids before the first turn, if there was a tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the trajectory in plain values."""
        return {
            "task": self.task,
            "steps": [asdict(step) for step in self.steps],
            "reward": float(self.reward),
            "status": self.status.name,
            "env_time": self.env_time,
            "reward_time": self.reward_time,
        }


@dataclass(kw_only=True)
class TrajectoryItem:
    """A trajectory and its place in its group."""

    pair_index: int
    group_id: Hashable
    start_step: int
    traj: Trajectory | dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)


class LLMBaseAgent(abc.ABC):
    """What every agent has."""

    @property
    @abc.abstractmethod
    def chat_completions(self) -> list[dict[str, Any]]:
        """The messages that the model is given for its next turn."""

    @property
    @abc.abstractmethod
    def trajectory(self) -> Trajectory:
        """The episode so far."""

    @abc.abstractmethod
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Receives an answer of the environment."""

    @abc.abstractmethod
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Receives a turn of the model. Returns: the action for the environment."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Begins an episode."""

    def get_current_step(self) -> Step | None:
        """Returns the last step."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None


class ConversationAgentBase(LLMBaseAgent):
    """An agent with a conversation and a trajectory. Args: system_prompt: the first message.

    >>> agent = ModelAgent("Add.")
    >>> agent.update_from_env({"prompts": "2+3="}, 0.0, False)
    >>> [message["content"] for message in agent.chat_completions]
    ['Add.', '2+3=']
    """

    def __init__(self, system_prompt: str) -> None:
        self.system_prompt = system_prompt
        self._trajectory = Trajectory()
        self._messages: list[dict[str, Any]] = []
        self._init_messages(system_prompt)
        self.step = 0

    def _init_messages(self, system_prompt: str) -> None:
        """Begins the conversation."""
        self._messages = [{"role": "system", "content": system_prompt or ""}]

    def _observation_to_messages(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        """Adds an observation to the conversation: a text, or the entry "prompts" or "question" of a mapping."""
        if isinstance(observation, Mapping):
            observation = next((observation[key] for key in ("prompts", "question") if key in observation), None)
        if isinstance(observation, list):
            self._messages += copy.deepcopy(observation)
        elif observation is not None:
            self._messages.append({"role": "user", "content": observation})

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        """The messages that the model is given for its next turn."""
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        """The episode so far."""
        return self._trajectory

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Writes an answer of the environment into the last step and the conversation; the first one is the task."""
        if self._trajectory.task is None:
            is_text = isinstance(observation, str)
            self._trajectory.task = {"prompts": [observation]} if is_text else copy.deepcopy(observation)
        if (step := self.get_current_step()) is not None:
            step.observation, step.reward, step.done, step.info = observation, reward, done, info or {}
        if observation is not None:
            self._observation_to_messages(observation, reward, done, info or {})

    def reset(self) -> None:
        """Begins an episode."""
        self._trajectory = Trajectory()
        self._init_messages(self.system_prompt)
        self.step = 0

    def add_turn(self, response: str, action: Any) -> Action:
        """Writes a turn of the model into the conversation and the trajectory. Returns: its action."""
        self._messages.append({"role": "assistant", "content": response})
        said = copy.deepcopy(self._messages)
        self.trajectory.steps.append(Step(chat_completions=said, action=Action(action=action), model_response=response))
        return Action(action=action)


class ModelAgent(ConversationAgentBase):
    """An agent whose action is the text of the turn."""

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Receives a turn of the model. Returns: its text."""
        return self.add_turn(response, response)


class ToolAgent(ConversationAgentBase):
    """An agent whose turns call tools, which the system prompt describes.

    A turn without calls is the call `finish(response=...)`, which ends a ToolEnvironment.
    Args: tool_parser_name: the form of calls. tool_map: name -> class of a tool.
    """

    def __init__(
        self, system_prompt: str, tool_parser_name: str = "qwen", tool_map: Mapping[str, type[BaseTool]] | None = None
    ) -> None:
        self.tool_manager = ToolManager(tool_map or {})
        self.tool_parser = get_tool_parser(tool_parser_name)()
        self.tools_prompt = self.tool_parser.get_tool_prompt(self.tool_manager.get_tools())
        super().__init__(system_prompt)

    def _init_messages(self, system_prompt: str) -> None:
        super()._init_messages((system_prompt or "") + (self.tools_prompt or ""))

    def _observation_to_messages(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        """Adds an observation to the conversation: the answers of tools, or a text as in the base."""
        if isinstance(observation, Mapping) and "tool_outputs" in observation:
            for call_id, output in observation["tool_outputs"].items():
                content = f"Tool returned result: {output or ''}"
                self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            super()._observation_to_messages(observation, reward, done, info)

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Receives a turn of the model. Returns: its calls in OpenAI's form, `arguments` as JSON."""
        try:
            calls = self.tool_parser.parse(response)
        except Exception as error:  # a parser of the user's
            log.warning("%s could not read a turn: %s", type(self.tool_parser).__name__, error)
            calls = []
        functions: list[dict[str, Any]] = [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls]
        functions = functions or [{"name": "finish", "arguments": {"response": response}}]
        action = [{"id": str(uuid.uuid4()), "type": "function", "function": function} for function in functions]
        return self.add_turn(response, action)
