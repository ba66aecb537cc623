"""Losses that learn from a teacher: by the sampled tokens, as part of their advantage, or by whole distributions."""

from __future__ import annotations

from whet.ops.divergence import check_beta
from whet.ops.masked import masked_column
from whet.ops.policy_losses.base import LossOutput, compares_with_teacher, output
from whet.ops.policy_losses.ratios import detached_advantages, get_old_logprobs, log_ratios, ratio_metrics
from whet.types import LossInputs

__all__ = ["distillation", "gkd"]


@compares_with_teacher("teacher_logprobs")
def distillation(x: LossInputs, *, teacher_coef: float = 1.0, importance_sampling_level: str = "token") -> LossOutput:
    """On-policy distillation on the sampled tokens: the reverse KL to a teacher is part of the advantage.

    l = −r·(A − c·(log π_old − log π_teacher)); r, the importance ratio at a level of IMPORTANCE_LEVELS, has the
    gradient. Where all rewards are equal, A is 0 and only the teacher has an effect.

    Args:
        x: needs advantages, and teacher_logprobs [s]: the teacher's logprobs of the same tokens; old_logprobs None =
            logprobs.detach(). All three are constants.
        teacher_coef: c.
        importance_sampling_level: a name of IMPORTANCE_LEVELS.
    Returns: loss [s], 0 where masked out, divided by nothing; teacher_kl, log π_old − log π_teacher; is_ratio,
        log_ratio_abs, ppo_kl.
    Raises: ConfigError: an unknown level. DataError: a missing column.
    Source: Thinking Machines, "On-policy distillation" (2025); agrees with tinker's importance_sampling loss under its
        KL penalty with a discount of 0.

    >>> import torch
    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.]),
    ...                advantages=torch.tensor([0.]), token_columns={"teacher_logprobs": torch.tensor([-3.])})
    >>> distillation(x)[0]  # the teacher finds the token less likely: the loss pushes it down
    tensor([2.])
    """
    gap = get_old_logprobs(x) - masked_column(x.need("teacher_logprobs"), x.mask).detach()
    log_ratio, used = log_ratios(x, importance_sampling_level)
    loss = -used.exp() * (detached_advantages(x) - teacher_coef * gap)
    return output(loss, {"teacher_kl": gap, **ratio_metrics(log_ratio, used, x.mask)})


@compares_with_teacher("divergence")
def gkd(x: LossInputs, *, gkd_beta: float = 0.5) -> LossOutput:
    """On-policy distillation by whole distributions: the divergence from the teacher's, before each token sampled.

    l = D_β(π_teacher, π), whet.ops.generalized_jsd with β = gkd_beta, over the whole vocabulary, at the rollout's
    temperature. No gradient goes through the sampling, and none comes from advantages: rewards are only logged.

    Args:
        x: needs divergence [s], with gradient to the policy; the teacher is a constant.
        gkd_beta: β, with which the divergence was made: from 0 (forward KL) to 1 (reverse KL).
    Returns: loss [s], 0 where masked out, divided by nothing; divergence, the loss itself.
    Raises: ConfigError: β is not in [0, 1]. DataError: no divergence.
    Source: GKD, arXiv:2306.13649, on the student's own completions (λ = 1); agrees with TRL's GKDTrainer under
        loss_agg_mode=token-mean.

    >>> import torch
    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, False]), logprobs=torch.zeros(2),
    ...                divergence=torch.tensor([0.5, 9.]))
    >>> gkd(x)[0]
    tensor([0.5000, 0.0000])
    """
    check_beta(gkd_beta)
    divergence = masked_column(x.need("divergence"), x.mask)
    return output(divergence, {"divergence": divergence})
