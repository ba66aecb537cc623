"""The objective of a policy: a sum and product of functions that a configuration chooses.

    l = surrogate · Π factors + β · KL − c · H         per token; weights turn it into one number elsewhere

Every term is fn(x: LossInputs) -> [s]. A factor is a correction for a sampler that differs from the trainer, or a mask:
a constant without gradient. A surrogate, also a user's own, may return metrics too.
Dim legend: s tokens of a micro-batch, whole sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from whet.errors import DataError
from whet.ops.masked import masked_column
from whet.ops.policy_losses import LossOutput, clipped_surrogate
from whet.types import LossInputs

__all__ = ["PolicyObjective"]

Term = Callable[[LossInputs], Tensor]
"""fn(x) -> [s]."""
Surrogate = Callable[[LossInputs], Tensor | LossOutput]
"""fn(x) -> [s], or ([s], metrics)."""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The loss of a policy at each token.

    l = surrogate · Π factors + β · KL(π, π_ref) − c · H(π), each term at the token.
    Call it with LossInputs. It needs the columns of its terms, ref_logprobs if β ≠ 0 (without β they only give the
    metric), and entropy if c ≠ 0.
    Returns: (loss [s], metrics [s] each): the surrogate's own, pg_loss/corrected (surrogate · factors), pg_loss/kept (1
        where no factor is 0, with factors), kl where there is a reference. The loss is their sum, pg_loss/corrected +
        β kl − c entropy, under any weights.
    Raises: DataError: a missing column, a term of another shape than [s], or a loss without gradient.
    Source: GRPO arXiv:2402.03300; entropy bonus PPO arXiv:1707.06347. Agrees with Tunix's grpo_loss_fn, where the
        correction too is a factor of the surrogate and not of the KL.

    >>> import torch
    >>> from whet.ops.kl import reference_kl
    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                advantages=torch.tensor([2.]), ref_logprobs=torch.tensor([-1.]))
    >>> PolicyObjective(kl=reference_kl, beta=0.1)(x)[0]  # -2 * 1 + 0.1 * (exp(-1) + 1 - 1)
    tensor([-1.9632])
    """

    surrogate: Surrogate = clipped_surrogate
    """The policy's loss before corrections."""
    factors: tuple[Term, ...] = ()
    """Corrections and masks, constants that multiply the surrogate."""
    kl: Term | None = None
    """The divergence from the reference."""
    beta: float = 0.0
    """β, its weight; 0 = only a metric."""
    kl_factors: tuple[Term, ...] = ()
    """Corrections that multiply the KL in the loss too; the metric is without them."""
    entropy_coef: float = 0.0
    """c, the weight of the entropy bonus; 0 = none."""

    def has(self, *functions: Callable[..., Tensor]) -> bool:
        """Returns whether one of these functions is a factor, with or without bound keywords.

        >>> from functools import partial
        >>> PolicyObjective(factors=(partial(masked_column, mask=None),)).has(masked_column)
        True
        """
        return any(getattr(factor, "func", factor) in functions for factor in self.factors)

    def __call__(self, x: LossInputs) -> LossOutput:
        """Returns the loss and the metrics of every token."""
        try:
            result = self.surrogate(x)
        except TypeError as error:
            if x.old_logprobs is None:
                error.add_note(
                    "x.old_logprobs is None where a single update follows each rollout: take x.logprobs.detach() there"
                )
            raise
        policy, metrics = result if isinstance(result, tuple) else (result, {})
        policy = _per_token("the policy loss", policy, x)
        kept = x.mask
        for factor in self.factors:
            weight = _per_token("a factor of the loss", factor(x), x).detach().to(policy.dtype)
            policy, kept = policy * weight, kept & (weight != 0)
        loss, metrics = policy, {**metrics, "pg_loss/corrected": policy.detach()}
        if self.factors:
            metrics["pg_loss/kept"] = kept.to(policy.dtype)
        if self.kl is not None and (self.beta != 0 or x.ref_logprobs is not None):
            kl = _per_token("the KL", self.kl(x), x)
            metrics["kl"] = kl.detach()
            for factor in self.kl_factors:
                kl = kl * _per_token("a factor of the KL", factor(x), x).detach().to(kl.dtype)
            loss = loss + self.beta * kl if self.beta != 0 else loss
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * masked_column(x.need("entropy"), x.mask)
        if x.logprobs.requires_grad and not loss.requires_grad:
            raise DataError(
                "the loss has no gradient: it must be computed from x.logprobs (or x.entropy), without detach(), "
                "item() or numpy"
            )
        return loss, metrics


def _per_token(term: str, values: Tensor, x: LossInputs) -> Tensor:
    """Returns the values of a term. Raises DataError: they are not one number per token."""
    if values.shape != x.logprobs.shape:
        raise DataError(
            f"{term} has the shape {list(values.shape)}; it must have one number for each of the "
            f"{len(x.logprobs)} tokens, 0 where masked out"
        )
    return values
