"""Configuration: frozen keyword-only dataclasses, checked from Python as from YAML. Imports no torch."""

from whet.config.algo import (
    AlgorithmConfig,
    GRPOConfig,
    OverlongBuffer,
    PolicyConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
)
from whet.config.algo.sft import SFTConfig, SupervisedConfig
from whet.config.base import check, config, field_docs
from whet.config.data import DataConfig, SourceConfig, SupervisedDataConfig
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.config.enums import Mode, Role
from whet.config.loader import diff, dump, dump_tree, load, read_yaml, show, tree
from whet.config.lora import LoraConfig, lora_short
from whet.config.model import OptimConfig, RoleConfig
from whet.config.rollout import ConstraintConfig, RolloutConfig
from whet.config.run import SHORT, PPORunConfig, RunConfig, check_complete, load_run
from whet.config.run_supervised import (
    DPORunConfig,
    RMRunConfig,
    SFTRunConfig,
    SupervisedRunConfig,
    check_supervised,
    load_supervised,
    shorthands,
)
from whet.config.training import (
    BatchSizes,
    CheckpointingOptions,
    ClusterConfig,
    MetricsLoggerOptions,
    PerfMetricsOptions,
    ProfilerOptions,
    RLTrainingConfig,
    SupervisedTrainingConfig,
    TrainingConfig,
)

__all__ = [
    "SHORT",
    "AlgorithmConfig",
    "BatchSizes",
    "CheckpointingOptions",
    "ClusterConfig",
    "ConstraintConfig",
    "DPORunConfig",
    "DataConfig",
    "GRPOConfig",
    "LoraConfig",
    "MetricsLoggerOptions",
    "Mode",
    "OptimConfig",
    "OverlongBuffer",
    "PPOConfig",
    "PPORunConfig",
    "PerfMetricsOptions",
    "PolicyConfig",
    "PreferenceConfig",
    "ProfilerOptions",
    "RLTrainingConfig",
    "RMRunConfig",
    "RewardModelConfig",
    "Role",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTRunConfig",
    "SGLangOptions",
    "SourceConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "SupervisedRunConfig",
    "SupervisedTrainingConfig",
    "TrainingConfig",
    "VLLMOptions",
    "check",
    "check_complete",
    "check_supervised",
    "config",
    "diff",
    "dump",
    "dump_tree",
    "field_docs",
    "load",
    "load_run",
    "load_supervised",
    "lora_short",
    "read_yaml",
    "shorthands",
    "show",
    "tree",
]
