"""TRL's trainers over whet's learners: a script written for TRL runs with its import changed. TRL is not needed."""

from whet.trl.config.dpo import DPOConfig
from whet.trl.supervised.dpo import DPOTrainer
from whet.trl.config.grpo_config import GRPOConfig
from whet.trl.rl.grpo import GRPOTrainer
from whet.trl.config.reward import RewardConfig
from whet.trl.supervised.reward import RewardTrainer
from whet.trl.config.rloo_config import RLOOConfig
from whet.trl.rl.rloo import RLOOTrainer
from whet.trl.scripts import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from whet.trl.config.sft import SFTConfig
from whet.trl.supervised.sft import SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_peft_config",
    "get_quantization_config",
]
