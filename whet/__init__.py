"""whet: reinforcement-learning post-training of language models.

It trains on a CPU, in one process or, under torchrun, in several. It has not yet run on a GPU.

The names here are imported when they are first used, so that `import whet` and the command line start at once.
"""

import logging
from typing import TYPE_CHECKING, Any

from whet._version import __version__
from whet.util.log_lines import DefaultHandler

if TYPE_CHECKING:
    from whet.cluster import RLCluster
    from whet.config import (
        AlgorithmConfig,
        CheckpointingOptions,
        ClusterConfig,
        DataConfig,
        DPORunConfig,
        GRPOConfig,
        LoraConfig,
        MetricsLoggerOptions,
        Mode,
        OptimConfig,
        PerfMetricsOptions,
        PPOConfig,
        PreferenceConfig,
        ProfilerOptions,
        RewardModelConfig,
        RLTrainingConfig,
        RMRunConfig,
        Role,
        RoleConfig,
        RolloutConfig,
        RunConfig,
        SFTConfig,
        SFTRunConfig,
        SupervisedDataConfig,
        SupervisedTrainingConfig,
        TrainingConfig,
    )
    from whet.config.algo import presets
    from whet.config.evaluate import EvalRunConfig
    from whet.errors import CheckpointError, ConfigError, DataError, EngineError, RewardError, TrainingError, WhetError
    from whet.evaluation.evaluator import Evaluation, evaluate
    from whet.hub.push import push_to_hub
    from whet.learners.base import RLLearner
    from whet.learners.grpo import GRPOLearner
    from whet.learners.ppo import PPOLearner
    from whet.learners.preference import PreferenceLearner, RewardModelLearner
    from whet.learners.sft import SFTLearner
    from whet.learners.supervised import SupervisedLearner
    from whet.rollout.sampler import Sampler, SamplerOutput
    from whet.run.observer import Observer, TrainerControl
    from whet.train.supervised_models import SupervisedModels
    from whet.types import (
        Completion,
        Example,
        Group,
        LossInputs,
        Prompt,
        TokenBatch,
        TrainSequence,
    )

__all__ = [
    "AlgorithmConfig",
    "CheckpointError",
    "CheckpointingOptions",
    "ClusterConfig",
    "Completion",
    "ConfigError",
    "DPORunConfig",
    "DataConfig",
    "DataError",
    "EngineError",
    "EvalRunConfig",
    "Evaluation",
    "Example",
    "GRPOConfig",
    "GRPOLearner",
    "Group",
    "LoraConfig",
    "LossInputs",
    "MetricsLoggerOptions",
    "Mode",
    "Observer",
    "OptimConfig",
    "PPOConfig",
    "PPOLearner",
    "PerfMetricsOptions",
    "PreferenceConfig",
    "PreferenceLearner",
    "ProfilerOptions",
    "Prompt",
    "RLCluster",
    "RLLearner",
    "RLTrainingConfig",
    "RMRunConfig",
    "RewardError",
    "RewardModelConfig",
    "RewardModelLearner",
    "Role",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTLearner",
    "SFTRunConfig",
    "Sampler",
    "SamplerOutput",
    "SupervisedDataConfig",
    "SupervisedLearner",
    "SupervisedModels",
    "SupervisedTrainingConfig",
    "TokenBatch",
    "TrainSequence",
    "TrainerControl",
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
        "DPORunConfig",
        "DataConfig",
        "GRPOConfig",
        "LoraConfig",
        "MetricsLoggerOptions",
        "Mode",
        "OptimConfig",
        "PPOConfig",
        "PerfMetricsOptions",
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
        "SupervisedDataConfig",
        "SupervisedTrainingConfig",
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
    "whet.evaluation.evaluator": (
        "Evaluation",
        "evaluate",
    ),
    "whet.learners.base": ("RLLearner",),
    "whet.learners.grpo": ("GRPOLearner",),
    "whet.learners.ppo": ("PPOLearner",),
    "whet.rollout.sampler": (
        "Sampler",
        "SamplerOutput",
    ),
    "whet.run.observer": (
        "TrainerControl",
        "Observer",
    ),
    "whet.hub.push": ("push_to_hub",),
    "whet.types": (
        "Completion",
        "Example",
        "Group",
        "LossInputs",
        "Prompt",
        "TokenBatch",
        "TrainSequence",
    ),
    "whet.learners.preference": (
        "PreferenceLearner",
        "RewardModelLearner",
    ),
    "whet.learners.sft": ("SFTLearner",),
    "whet.learners.supervised": ("SupervisedLearner",),
    "whet.train.supervised_models": ("SupervisedModels",),
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


def _warn_of_the_other() -> None:
    """Says that the index's distribution `whet`, which is a stranger's, is installed beside this one."""
    from whet.util.install import DISTRIBUTION, foreign_whet

    if version := foreign_whet():
        import warnings

        warnings.warn(
            f"the distribution whet {version} is installed too: a stranger's, whose files may lie over those of "
            f"{DISTRIBUTION}; pip uninstall whet {DISTRIBUTION}, then install {DISTRIBUTION} again",
            stacklevel=3,
        )


_warn_of_the_other()
logging.getLogger("whet").addHandler(DefaultHandler())
