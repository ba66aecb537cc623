"""KLController: the coefficients of a policy's objective that change between steps.

    β   after each step, by the KL of its samples          target_kl
    c   after each update, by the entropy of its tokens    use_adaptive_entropy

It holds three numbers, which checkpoints save. kl_penalty.py applies β outside the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from whet.config import PolicyConfig
from whet.learners.kl_penalty import sampled_kl
from whet.metrics import Last, Mean, Metric
from whet.ops import adapted_beta, sequence_mean_kl
from whet.types import TokenBatch

__all__ = ["MEASURED_ENTROPY", "KLController"]

MEASURED_ENTROPY = "entropy/token_mean"
"""The metric of an update that controls an adaptive entropy bonus."""


class KLController:
    """The coefficients β (KL) and c (entropy bonus) of an objective, which may be adaptive.

    Args: config: the algorithm's.

    >>> KLController(PolicyConfig(beta=0.1, kl_type="reward")).loss_beta  # β acts in the reward
    0.0
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.beta = config.beta
        """β of this step."""
        self.entropy_coef = config.entropy_coef
        """c of the next update."""
        self.entropy = math.inf
        """The mean entropy of the trained tokens of the last update; infinite (so no bonus) before the first."""

    @property
    def loss_beta(self) -> float:
        """β of the KL in the loss: 0 where the KL acts elsewhere."""
        return self.beta if self.config.kl_type == "loss" else 0.0

    @property
    def needs_sampled_kl(self) -> bool:
        """Whether the KL of the policy that sampled is needed, and so its logprobs."""
        c = self.config
        return bool(c.beta) and (c.kl_type != "loss" or c.target_kl is not None)

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether some update may have an entropy bonus."""
        return self.config.use_adaptive_entropy or self.config.entropy_coef != 0

    @property
    def loss_entropy_coef(self) -> float:
        """The c of the loss: an adaptive one is 0 while the entropy is above its target."""
        c = self.config
        return self.entropy_coef if not c.use_adaptive_entropy or self.entropy <= c.entropy_target else 0.0

    def after_update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Adapts c to the entropy of an update's trained tokens. Returns: the c of the next update, as a metric.

        c ← min(c + δ, c_max) where H ≤ H_target, else max(c − δ, c_min): TRL's use_adaptive_entropy.
        Args: metrics: the update's.
        """
        c = self.config
        measured = metrics.get(MEASURED_ENTROPY)
        if c.use_adaptive_entropy and measured is not None and math.isfinite(measured.value):
            self.entropy = measured.value
            low = self.entropy <= c.entropy_target
            moved = self.entropy_coef + (c.entropy_coef_delta if low else -c.entropy_coef_delta)
            self.entropy_coef = min(moved, c.entropy_coef_max) if low else max(moved, c.entropy_coef_min)
        return {"entropy_coef": Last(self.entropy_coef)} if self.has_entropy_bonus else {}

    def after_step(self, batch: TokenBatch) -> dict[str, Metric]:
        """Adapts β to the KL of a step's samples.

        Returns: metrics: that KL, as a mean over sequences and over tokens, and the β of this step.
        """
        c, used, number = self.config, self.beta, batch.num_sequences
        if not self.needs_sampled_kl:
            return {}
        each = sampled_kl(c, batch, -1.0)
        kl = sequence_mean_kl(each, mask=batch.mask, sequence=batch.sequence, num_sequences=number)
        if c.target_kl is not None and not math.isnan(kl):
            self.beta = adapted_beta(used, kl, target_kl=c.target_kl, num_sequences=number, kl_horizon=c.kl_horizon)
        tokens = Mean(float(each[batch.mask].double().sum()), int(batch.mask.sum()))
        return {"kl_sampled": Mean(kl), "kl_sampled/token_mean": tokens, "kl_coef": Last(used)}

    @property
    def is_adaptive(self) -> bool:
        """Whether a coefficient is adaptive, so that checkpoints must hold it."""
        return self.config.target_kl is not None or self.config.use_adaptive_entropy

    def state(self) -> dict[str, float]:
        """Returns the adaptive numbers, for checkpoints."""
        return {"beta": self.beta, "entropy_coef": self.entropy_coef, "entropy": self.entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self.beta, self.entropy_coef, self.entropy = state["beta"], state["entropy_coef"], state["entropy"]
