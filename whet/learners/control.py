"""What steers a policy's objective from step to step: the coefficient of the KL, and the KL outside the loss.

Nothing of a step lies here: a Control is a few numbers that move after each step, saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whet.config import PolicyConfig
from whet.learners.objective import kl_estimate
from whet.metrics import Last, Mean, Metric
from whet.ops import adapted_beta, kl_rewards, sequence_mean_kl
from whet.types import TokenBatch

__all__ = ["Control"]


class Control:
    """The coefficients of an objective, which may move.

    Args: config: the algorithm's.

    >>> Control(PolicyConfig(beta=0.1, kl_type="reward")).loss_beta  # the reward has it
    0.0
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.beta = config.beta
        """β of this step."""

    @property
    def loss_beta(self) -> float:
        """β of the KL in the loss: 0 where the KL acts elsewhere."""
        return self.beta if self.config.kl_type == "loss" else 0.0

    @property
    def needs_sampled_kl(self) -> bool:
        """Whether the KL of the policy that sampled is asked for, which needs its logprobs."""
        c = self.config
        return bool(c.beta) and (c.kl_type != "loss" or c.target_kl is not None)

    def sampled_kl(self, batch: TokenBatch, beta: float) -> Tensor:
        """-β KL(π_old, π_ref) at each token [S]. Raises DataError: the batch is not scored."""
        return kl_rewards(
            batch.need("old_logprobs"),
            batch.need("ref_logprobs"),
            mask=batch.mask,
            beta=beta,
            kl_loss_mode=kl_estimate(self.config),
            kl_clamp_value=self.config.kl_clamp_value,
        )

    def in_reward(self, batch: TokenBatch) -> TokenBatch:
        """A scored batch with the KL in its `token_rewards`, where kl_type="reward" asks for it."""
        if self.config.kl_type != "reward" or not self.config.beta:
            return batch
        own, paid = batch.token_rewards, self.sampled_kl(batch, self.beta)
        return batch.replace(token_rewards=paid if own is None else own + paid)

    def in_advantage(self, batch: TokenBatch) -> TokenBatch:
        """A batch with the KL in its `advantages`, where kl_type="advantage" asks for it."""
        if self.config.kl_type != "advantage" or not self.config.beta:
            return batch
        return batch.replace(advantages=batch.need("advantages") + self.sampled_kl(batch, self.beta))

    def after_step(self, batch: TokenBatch) -> dict[str, Metric]:
        """Moves β by the KL of a step's samples. Returns: that KL and the β that the step had."""
        c, used, number = self.config, self.beta, batch.num_sequences
        if not self.needs_sampled_kl:
            return {}
        each = self.sampled_kl(batch, -1.0)
        kl = sequence_mean_kl(each, mask=batch.mask, sequence=batch.sequence, num_sequences=number)
        if c.target_kl is not None:
            self.beta = adapted_beta(used, kl, target_kl=c.target_kl, num_sequences=number, kl_horizon=c.kl_horizon)
        return {"rewards/reward_kl_penalty": Mean(kl), "kl_coef": Last(used)}

    def state(self) -> dict[str, float]:
        """The numbers that move, for checkpoints."""
        return {"beta": self.beta}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; what is not there stays."""
        self.beta = state.get("beta", self.beta)
