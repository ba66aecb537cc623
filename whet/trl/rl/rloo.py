"""RLOOTrainer: TRL's interface over whet's GRPOLearner, with leave-one-out advantages and the KL in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from whet.trl.config.rloo import RLOOConfig
from whet.trl.rl.trainer import RLTrainer
from whet.types import TokenBatch

__all__ = ["RLOOTrainer"]


class RLOOTrainer(RLTrainer):
    """Trains by RLOO, with the interface of TRL's RLOOTrainer; GRPOTrainer describes the arguments.

    Raises: ConfigError: an unsupported argument; a batch that breaks TRL's rules, with the nearest settings that work.
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

    def trl_metrics(self, row: Mapping[str, Any], batch: TokenBatch) -> dict[str, float]:
        """Returns a step's metrics under TRL's names, with the mean of the KL in the reward over the tokens."""
        metrics = super().trl_metrics(row, batch)
        if self.args.beta:
            kl = (batch.need("old_logprobs") - batch.need("ref_logprobs"))[batch.mask]
            metrics["kl"] = float(kl.double().mean()) if len(kl) else 0.0
        return metrics
