"""Tunix's names: `from whet.tunix import RLCluster, GRPOLearner, ...` is the changed line of a Tunix program.

What each is here, and what is not there: docs/from-tunix.md. The names are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.config import LoraConfig, Mode, OptimConfig, RoleConfig
    from whet.tunix import common
    from whet.tunix.agentic import AgenticGRPOConfig, AgenticGRPOLearner
    from whet.tunix.base_rollout import BaseRollout, TokenizerAdapter
    from whet.tunix.cluster import RLCluster, RLEngine
    from whet.tunix.configs import (
        AlgorithmConfig,
        CacheConfig,
        CheckpointingOptions,
        ClusterConfig,
        DAPOConfig,
        DrGRPOConfig,
        GRPOConfig,
        GrpoConfig,
        MetricsLoggerOptions,
        PerfMetricsOptions,
        PPOConfig,
        PpoConfig,
        ProfilerOptions,
        RLTrainingConfig,
        RolloutConfig,
        TrainingConfig,
    )
    from whet.tunix.learners import GRPOLearner, GrpoLearner, MetricFn, PPOLearner, PpoLearner, RewardFn
    from whet.tunix.metrics_buffer import MetricsBuffer
    from whet.tunix.padded import RolloutOutput, TrainExample
    from whet.tunix.perf import PerfMetricsConfig, PerfMetricsExport
    from whet.tunix.roles import Role
    from whet.tunix.trainer import DataHooks, Trainer, TrainingHooks
    from whet.tunix.workers import InferenceWorker, Sampler, Tokenizer, VanillaRollout

__all__ = [
    "AgenticGRPOConfig",
    "AgenticGRPOLearner",
    "AlgorithmConfig",
    "BaseRollout",
    "CacheConfig",
    "CheckpointingOptions",
    "ClusterConfig",
    "DAPOConfig",
    "DataHooks",
    "DrGRPOConfig",
    "GRPOConfig",
    "GRPOLearner",
    "GrpoConfig",
    "GrpoLearner",
    "InferenceWorker",
    "LoraConfig",
    "MetricFn",
    "MetricsBuffer",
    "MetricsLoggerOptions",
    "Mode",
    "OptimConfig",
    "PPOConfig",
    "PPOLearner",
    "PerfMetricsConfig",
    "PerfMetricsExport",
    "PerfMetricsOptions",
    "PpoConfig",
    "PpoLearner",
    "ProfilerOptions",
    "RLCluster",
    "RLEngine",
    "RLTrainingConfig",
    "RewardFn",
    "Role",
    "RoleConfig",
    "RolloutConfig",
    "RolloutOutput",
    "Sampler",
    "Tokenizer",
    "TokenizerAdapter",
    "TrainExample",
    "Trainer",
    "TrainingConfig",
    "TrainingHooks",
    "VanillaRollout",
    "common",
]

_MODULES = {
    "whet.config": ("LoraConfig", "Mode", "OptimConfig", "RoleConfig"),
    "whet.tunix.agentic": ("AgenticGRPOConfig", "AgenticGRPOLearner"),
    "whet.tunix.base_rollout": ("BaseRollout", "TokenizerAdapter"),
    "whet.tunix.cluster": ("RLCluster", "RLEngine"),
    "whet.tunix.configs": (
        "AlgorithmConfig",
        "CacheConfig",
        "CheckpointingOptions",
        "ClusterConfig",
        "DAPOConfig",
        "DrGRPOConfig",
        "GRPOConfig",
        "GrpoConfig",
        "MetricsLoggerOptions",
        "PPOConfig",
        "PerfMetricsOptions",
        "PpoConfig",
        "ProfilerOptions",
        "RLTrainingConfig",
        "RolloutConfig",
        "TrainingConfig",
    ),
    "whet.tunix.learners": ("GRPOLearner", "GrpoLearner", "MetricFn", "PPOLearner", "PpoLearner", "RewardFn"),
    "whet.tunix.metrics_buffer": ("MetricsBuffer",),
    "whet.tunix.padded": ("RolloutOutput", "TrainExample"),
    "whet.tunix.perf": ("PerfMetricsConfig", "PerfMetricsExport"),
    "whet.tunix.roles": ("Role",),
    "whet.tunix.trainer": ("DataHooks", "Trainer", "TrainingHooks"),
    "whet.tunix.workers": ("InferenceWorker", "Sampler", "Tokenizer", "VanillaRollout"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

ABSENT = {
    "CheckpointManager": "a run saves and resumes by itself: checkpoint_root_directory and checkpointing_options",
    "DPOTrainer": "preferences are trained by `whet dpo`, from Python by whet.PreferenceLearner",
    "DPOTrainingConfig": "preferences are trained by `whet dpo`, from Python by whet.PreferenceLearner",
    "DistillationTrainer": "policy_loss_fn distillation or gkd of a run with a teacher, RLCluster(teacher=...)",
    "DistillationTrainingConfig": "policy_loss_fn distillation or gkd of a run with a teacher, RLCluster(teacher=...)",
    "MetricsLogger": "a run logs by itself: metrics_logging_options, or an object in loggers",
    "ORPOTrainer": "algo.loss_type=orpo of `whet dpo`, from Python of whet.PreferenceLearner",
    "ORPOTrainingConfig": "algo.loss_type=orpo of `whet dpo`, from Python of whet.PreferenceLearner",
    "PeftTrainer": "conversations and texts are trained by `whet sft`, from Python by whet.SFTLearner; its losses are "
    "functions of a JAX model",
    "PerfSpanQuery": "time/ metrics go to every logger, and perf_metrics_options writes a timeline",
}
"""Public names of Tunix that are not here, and what does the same."""
ABSENT |= {name.replace("DPO", "Dpo").replace("ORPO", "Orpo"): why for name, why in ABSENT.items()}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ABSENT:
        raise ImportError(f"whet.tunix has no {name}: {ABSENT[name]}")
    if name == "common":
        return import_module("whet.tunix.common")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
