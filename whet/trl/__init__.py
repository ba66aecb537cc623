"""TRL's trainers over whet's learners: a script written for TRL runs with its import changed. TRL is not needed."""

from whet.trl.grpo_config import GRPOConfig
from whet.trl.grpo_trainer import GRPOTrainer
from whet.trl.rloo_config import RLOOConfig
from whet.trl.rloo_trainer import RLOOTrainer
from whet.trl.scripts import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_peft_config",
    "get_quantization_config",
]
