"""The KL penalty outside the loss: kl_type="reward" and kl_type="advantage".

The KL is that of the policy that sampled against the reference, at each sampled token.
"""

from __future__ import annotations

from torch import Tensor

from whet.config import PolicyConfig
from whet.learners.from_config import kl_estimate
from whet.ops import kl_rewards
from whet.types import TokenBatch

__all__ = ["kl_penalty_in_advantage", "kl_penalty_in_reward", "sampled_kl"]


def sampled_kl(config: PolicyConfig, batch: TokenBatch, beta: float) -> Tensor:
    """−β KL(π_old, π_ref) at each token, [S]. Raises DataError: the batch has no old or reference logprobs."""
    return kl_rewards(
        batch.need("old_logprobs"),
        batch.need("ref_logprobs"),
        mask=batch.mask,
        beta=beta,
        kl_loss_mode=kl_estimate(config),
        kl_clamp_value=config.kl_clamp_value,
    )


def kl_penalty_in_reward(config: PolicyConfig, batch: TokenBatch, beta: float) -> TokenBatch:
    """Returns a scored batch with β KL subtracted from its `token_rewards`, with kl_type="reward"."""
    if config.kl_type != "reward" or not config.beta:
        return batch
    rewards, penalty = batch.token_rewards, sampled_kl(config, batch, beta)
    return batch.replace(token_rewards=penalty if rewards is None else rewards + penalty)


def kl_penalty_in_advantage(config: PolicyConfig, batch: TokenBatch, beta: float) -> TokenBatch:
    """Returns a batch with β KL subtracted from its `advantages`, with kl_type="advantage"."""
    if config.kl_type != "advantage" or not config.beta:
        return batch
    return batch.replace(advantages=batch.need("advantages") + sampled_kl(config, batch, beta))
