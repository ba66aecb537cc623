"""TRL's trainers over whet's learners: a script written for TRL runs with its import changed. TRL is not needed.

config/        every field of TRL's configurations, what it is here, and what whet's sections they make
trainer/       what every trainer has: callbacks, state, logs, files
rl/            GRPOTrainer, RLOOTrainer        agents/    tools, environments, rollout_func
supervised/    SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer
rewards.py     TRL's ready reward functions    scripts.py    what its scripts read from the command line
"""

from whet.trl.config.dpo import DPOConfig
from whet.trl.config.grpo import GRPOConfig
from whet.trl.config.kto import KTOConfig
from whet.trl.config.reward import RewardConfig
from whet.trl.config.rloo import RLOOConfig
from whet.trl.config.sft import SFTConfig
from whet.trl.rl.grpo import GRPOTrainer
from whet.trl.rl.rloo import RLOOTrainer
from whet.trl.scripts import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
    init_zero_verbose,
)
from whet.trl.supervised.dpo import DPOTrainer
from whet.trl.supervised.kto import KTOTrainer
from whet.trl.supervised.reward import RewardTrainer
from whet.trl.supervised.sft import SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "init_zero_verbose",
]
