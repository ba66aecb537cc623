"""TRL's trainers over whet's learners: a script written for TRL runs with its import changed. TRL is not needed."""

from whet.trl.dpo_config import DPOConfig
from whet.trl.dpo_trainer import DPOTrainer
from whet.trl.grpo_config import GRPOConfig
from whet.trl.grpo_trainer import GRPOTrainer
from whet.trl.reward_config import RewardConfig
from whet.trl.reward_trainer import RewardTrainer
from whet.trl.rloo_config import RLOOConfig
from whet.trl.rloo_trainer import RLOOTrainer
from whet.trl.scripts import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from whet.trl.sft_config import SFTConfig
from whet.trl.sft_trainer import SFTTrainer

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
