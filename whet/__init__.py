"""whet: reinforcement-learning post-training of language models.

This release trains in one process and runs on a CPU; its code for a GPU has not yet run on one.

The names here are imported when they are first used, so that `import whet` and the command line start at once.
"""

from typing import TYPE_CHECKING, Any

from whet._version import __version__

if TYPE_CHECKING:
    from whet.cluster import RLCluster
    from whet.config import (
        AlgorithmConfig,
        CheckpointingOptions,
        ClusterConfig,
        DAPOConfig,
        DataConfig,
        DrGRPOConfig,
        GRPOConfig,
        GrpoConfig,
        MetricsLoggerOptions,
        Mode,
        OptimConfig,
        PerfMetricsOptions,
        PPOConfig,
        PpoConfig,
        ProfilerOptions,
        RLTrainingConfig,
        Role,
        RoleConfig,
        RolloutConfig,
        RunConfig,
        SupervisedDataConfig,
        TrainingConfig,
    )
    from whet.config.algo import presets
    from whet.config.evaluate import EvalRunConfig
    from whet.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EngineError,
        RewardError,
        TrainingError,
        WhetError,
    )
    from whet.evaluation.evaluator import Evaluation, evaluate
    from whet.learners.base import RLLearner
    from whet.learners.grpo import GRPOLearner, GrpoLearner
    from whet.learners.ppo import PPOLearner, PpoLearner
    from whet.rollout.sampler import CacheConfig, Sampler, SamplerOutput
    from whet.run.observer import Control, Observer
    from whet.run.push import push_to_hub
    from whet.tunix.metrics_buffer import MetricsBuffer
    from whet.types import Completion, Group, LossInputs, Prompt, RolloutOutput, TokenBatch, TrainExample

__all__ = [
    "AlgorithmConfig",
    "CacheConfig",
    "CheckpointError",
    "CheckpointingOptions",
    "ClusterConfig",
    "Completion",
    "ConfigError",
    "Control",
    "DAPOConfig",
    "DataConfig",
    "DataError",
    "DrGRPOConfig",
    "EngineError",
    "EvalRunConfig",
    "Evaluation",
    "GRPOConfig",
    "GRPOLearner",
    "Group",
    "GrpoConfig",
    "GrpoLearner",
    "LossInputs",
    "MetricsBuffer",
    "MetricsLoggerOptions",
    "Mode",
    "Observer",
    "OptimConfig",
    "PPOConfig",
    "PPOLearner",
    "PerfMetricsOptions",
    "PpoConfig",
    "PpoLearner",
    "ProfilerOptions",
    "Prompt",
    "RLCluster",
    "RLLearner",
    "RLTrainingConfig",
    "RewardError",
    "Role",
    "RoleConfig",
    "RolloutConfig",
    "RolloutOutput",
    "RunConfig",
    "Sampler",
    "SamplerOutput",
    "SupervisedDataConfig",
    "TokenBatch",
    "TrainExample",
    "TrainingConfig",
    "TrainingError",
    "WhetError",
    "__version__",
    "evaluate",
    "presets",
    "push_to_hub",
]

_MODULES = {
    "whet.cluster": ("RLCluster",),
    "whet.config": (
        "AlgorithmConfig",
        "CheckpointingOptions",
        "ClusterConfig",
        "DAPOConfig",
        "DataConfig",
        "DrGRPOConfig",
        "GRPOConfig",
        "GrpoConfig",
        "MetricsLoggerOptions",
        "Mode",
        "OptimConfig",
        "PPOConfig",
        "PpoConfig",
        "PerfMetricsOptions",
        "ProfilerOptions",
        "RLTrainingConfig",
        "Role",
        "RoleConfig",
        "RolloutConfig",
        "RunConfig",
        "SupervisedDataConfig",
        "TrainingConfig",
    ),
    "whet.config.algo": ("presets",),
    "whet.config.evaluate": ("EvalRunConfig",),
    "whet.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "EngineError",
        "RewardError",
        "TrainingError",
        "WhetError",
    ),
    "whet.evaluation.evaluator": ("Evaluation", "evaluate"),
    "whet.learners.base": ("RLLearner",),
    "whet.learners.grpo": ("GRPOLearner", "GrpoLearner"),
    "whet.learners.ppo": ("PPOLearner", "PpoLearner"),
    "whet.tunix.metrics_buffer": ("MetricsBuffer",),
    "whet.rollout.sampler": ("CacheConfig", "Sampler", "SamplerOutput"),
    "whet.run.observer": ("Control", "Observer"),
    "whet.run.push": ("push_to_hub",),
    "whet.types": ("Completion", "Group", "LossInputs", "Prompt", "RolloutOutput", "TokenBatch", "TrainExample"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
