"""Tunix's `tunix.rl.agentic`: agents, environments, tools, rewards, and the learner that trains on their episodes.

    from whet.tunix.agentic import AgenticGRPOConfig, AgenticGRPOLearner, ToolAgent, ToolEnvironment
    from whet.tunix.agentic import agent_types, base_agent, base_environment      # Tunix's modules, by their names

What each is here: docs/from-tunix.md. The names are in __init__.pyi, and are imported when they are first used.
"""

from whet.util.lazy_names import lazy_names

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

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, ABSENT)
