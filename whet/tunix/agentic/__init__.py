"""Tunix's `tunix.rl.agentic`: agents, environments, tools, rewards, and the learner that trains on their episodes.

    from whet.tunix.agentic import AgenticGRPOConfig, AgenticGRPOLearner, ToolAgent, ToolEnvironment
    from whet.tunix.agentic import agent_types, base_agent, base_environment      # Tunix's modules, by their names

What each is here: docs/from-tunix.md. The names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.tunix.agentic.agents import (
        Action,
        ConversationAgentBase,
        LLMBaseAgent,
        ModelAgent,
        Step,
        ToolAgent,
        Trajectory,
        TrajectoryItem,
        TrajectoryStatus,
    )
    from whet.tunix.agentic.collect import ChatTemplateParser, TrajectoryCollectEngine
    from whet.tunix.agentic.config import AgenticGRPOConfig
    from whet.tunix.agentic.environments import BaseEnv, BaseTaskEnv, EnvStepResult, TaskEnvironment, ToolEnvironment
    from whet.tunix.agentic.learner import AgenticGRPOLearner
    from whet.tunix.agentic.rewards import RewardOutput
    from whet.tunix.agentic.tools import (
        BaseTool,
        CalculatorTool,
        GeminiToolParser,
        QwenToolParser,
        ToolCall,
        ToolManager,
        ToolOutput,
        ToolParser,
    )

__all__ = [
    "Action",
    "AgenticGRPOConfig",
    "AgenticGRPOLearner",
    "BaseEnv",
    "BaseTaskEnv",
    "BaseTool",
    "CalculatorTool",
    "ChatTemplateParser",
    "ConversationAgentBase",
    "EnvStepResult",
    "GeminiToolParser",
    "LLMBaseAgent",
    "ModelAgent",
    "QwenToolParser",
    "RewardOutput",
    "Step",
    "TaskEnvironment",
    "ToolAgent",
    "ToolCall",
    "ToolEnvironment",
    "ToolManager",
    "ToolOutput",
    "ToolParser",
    "Trajectory",
    "TrajectoryCollectEngine",
    "TrajectoryItem",
    "TrajectoryStatus",
]

_MODULES = {
    "agents": ("agent_types", "base_agent", "model_agent", "tool_agent"),
    "collect": ("trajectory_collect_engine", "parser"),
    "config": (),
    "environments": ("base_environment", "task_environment", "tool_environment"),
    "learner": ("agentic_grpo_learner",),
    "rewards": ("reward", "reward_types"),
    "tools": ("base_tool", "calculator_tool", "tool_manager", "tool_parser_base", "tool_parser_registry"),
}
"""Module -> Tunix's modules whose names it has."""
ABSENT = {
    "AgenticRLLearner": "AgenticGRPOLearner is the one agentic learner",
    "GroupQueueManager": "nothing is queued: the driver returns whole groups",
    "RolloutOrchestrator": "the driver of rollouts runs all episodes (whet.rollout.driver)",
    "RolloutSyncLock": "rollouts and updates take turns",
    "group_queue_manager": "nothing is queued: the driver returns whole groups",
    "rollout_orchestrator": "the driver of rollouts runs all episodes (whet.rollout.driver)",
    "utils": "sequences are not padded, and masks come with the sampled ids",
}
"""Names of tunix.rl.agentic that are not here, and why."""


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        raise ImportError(f"whet.tunix.agentic has no {name}: {ABSENT[name]}")
    for module, aliases in _MODULES.items():
        if name == module or name in aliases:
            return import_module(f"whet.tunix.agentic.{module}")
    if name in __all__:
        for module in _MODULES:
            if hasattr(found := import_module(f"whet.tunix.agentic.{module}"), name):
                value = globals()[name] = getattr(found, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
