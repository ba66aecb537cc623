"""RLOOTrainer: TRL's, over whet's GRPOLearner with leave-one-out advantages and the KL in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from whet.trl.config.rloo import RLOOConfig
from whet.trl.rl.trainer import RLTrainer
from whet.types import TokenBatch

__all__ = ["RLOOTrainer"]


class RLOOTrainer(RLTrainer):
    """TRL's RLOOTrainer: see GRPOTrainer for the arguments.

    Raises: ConfigError: what is not there, by name; TRL's rules of batches, with the nearest settings that work.
    """

    METHOD = "RLOO"
    CONFIG = RLOOConfig

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )

    def own_metrics(self, row: Mapping[str, Any], batch: TokenBatch) -> dict[str, float]:
        """A step's metrics under TRL's names, with the KL in the reward as a mean over its tokens."""
        found = super().own_metrics(row, batch)
        if self.args.beta:
            apart = (batch.need("old_logprobs") - batch.need("ref_logprobs"))[batch.mask]
            found["kl"] = float(apart.double().mean()) if len(apart) else 0.0
        return found
