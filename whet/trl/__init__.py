"""TRL's trainers over whet's learners: a script written for TRL runs with its import changed. TRL is not needed."""

from whet.trl.grpo_config import GRPOConfig
from whet.trl.grpo_trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
