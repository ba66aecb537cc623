"""Policy losses: per token, never a mean; the weights of whet.ops.loss_aggregation turn them into one number.

Every loss is fn(x: LossInputs, **kw) -> (loss [s], {metric: [s]}). Metrics are detached, per token, and the caller
takes their mean over the mask. Masked-out tokens have loss 0 and metrics 0, whatever their values are. Old logprobs and
advantages are constants. At r = 1 and at the level of tokens a loss has the gradient of −A·log π, for n tokens in the
sequence n times that at sequence-sum. cispo-trl is an exception; distillation has another A, and gkd has none.
Corrections, masks, the KL and the entropy bonus are separate terms: see policy_objective.py.

A published method is a surrogate, a level of its ratio and an aggregation:

    method (arXiv)                policy_loss_fn   importance_sampling_level   loss_agg_mode
    GRPO, PPO                     grpo             token                       sequence-mean-token-mean; token-mean
    DAPO (2503.14476)             grpo             token                       token-mean, epsilon_high=0.28
    Dr.GRPO (2503.20783)          grpo             token                       sequence-mean-token-scale
    GSPO (2507.18071), with       grpo             sequence                    sequence-mean-token-mean
        epsilon=3e-4 and epsilon_high=4e-4
    GSPO-token (same)             gspo-token       its own                     sequence-mean-token-mean
    LUSPO (2602.05261)            grpo             sequence                    seq-mean-token-sum
    GMPO (2507.20673)             gmpo             its own; epsilon=0.4        sequence-mean-token-mean
    RLOO (2402.14740), as TRL     grpo             sequence-sum                sequence-mean-token-mean
    CISPO (2506.13585)            cispo            token                       token-mean
    SAPO (2511.20347)             sapo             token                       sequence-mean-token-mean
    VESPO (2602.10693)            vespo            its own                     token-mean
    REINFORCE                     reinforce        none                        any
    On-policy distillation        distillation     token                       token-mean
    GKD (2306.13649)              gkd              none                        token-mean

whet.ops.loss_aggregation lists the aggregations of Tunix, TRL and TorchRL with their names here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from whet.ops.policy_losses.base import (
    LossOutput,
    compares_with_teacher,
    metrics_without_advantage,
    teacher_column,
    zero_without_advantage,
)
from whet.ops.policy_losses.clipped import clipped_surrogate, gmpo
from whet.ops.policy_losses.distillation import distillation, gkd
from whet.ops.policy_losses.policy_gradient import cispo, cispo_trl, nll, reinforce, vespo
from whet.ops.policy_losses.ratios import IMPORTANCE_LEVELS
from whet.ops.policy_losses.smooth import cispo_torchrl, sapo

__all__ = [
    "IMPORTANCE_LEVELS",
    "POLICY_LOSSES",
    "cispo",
    "cispo_torchrl",
    "cispo_trl",
    "clipped_surrogate",
    "compares_with_teacher",
    "distillation",
    "gkd",
    "gmpo",
    "metrics_without_advantage",
    "nll",
    "reinforce",
    "sapo",
    "teacher_column",
    "vespo",
    "zero_without_advantage",
]

POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "cispo": cispo,
    "cispo-torchrl": cispo_torchrl,
    "cispo-trl": cispo_trl,
    "distillation": distillation,
    "gkd": gkd,
    "gmpo": gmpo,
    "grpo": clipped_surrogate,
    "gspo-token": partial(clipped_surrogate, importance_sampling_level="sequence-token"),
    "ppo": clipped_surrogate,
    "reinforce": reinforce,
    "sapo": sapo,
    "vespo": vespo,
}
"""fn(x: LossInputs, **kw) -> (loss [s], metrics), by name."""
