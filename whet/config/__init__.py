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
from whet.config.base import config, config_from_dict
from whet.config.data import DataConfig, SourceConfig, SupervisedDataConfig
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.config.enums import Mode, Role
from whet.config.introspection import field_docs
from whet.config.loader import diff, dump, dump_tree, help_text, load, parse_config_args, read_yaml
from whet.config.lora import LoraConfig
from whet.config.model import OptimConfig, RoleConfig
from whet.config.rollout import ConstraintConfig, RolloutConfig
from whet.config.run import SHORTHANDS, PPORunConfig, RunConfig, check_complete, load_run
from whet.config.run_supervised import (
    DPORunConfig,
    RMRunConfig,
    SFTRunConfig,
    SupervisedRunConfig,
    check_supervised,
    load_supervised,
    shorthands,
)
from whet.config.serve import ServeConfig
from whet.config.training import (
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
    "SHORTHANDS",
    "AlgorithmConfig",
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
    "ServeConfig",
    "SourceConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "SupervisedRunConfig",
    "SupervisedTrainingConfig",
    "TrainingConfig",
    "VLLMOptions",
    "check_complete",
    "check_supervised",
    "config",
    "config_from_dict",
    "diff",
    "dump",
    "dump_tree",
    "field_docs",
    "help_text",
    "load",
    "load_run",
    "load_supervised",
    "parse_config_args",
    "read_yaml",
    "shorthands",
]
