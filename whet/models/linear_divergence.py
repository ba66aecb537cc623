"""The divergence of a policy from a teacher over the whole vocabulary, without storing [s, V] logits.

It is one autograd function. It computes the logits of both heads chunk by chunk, and again in the backward pass. Of
heads that are divided over processes each one computes the logits of its token ids.
Dim legend: s rows (hidden states with a target), D width (each model has its own), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.models.matmul import row_chunks
from whet.models.projection import CHUNK_BYTES, HeadGrads, Projection, chunk_rows
from whet.models.vocabulary import VocabularyPart, local_rows
from whet.ops import generalized_jsd, log_mixture
from whet.ops.masked import fp32_or_wider
from whet.util.collectives import summed

__all__ = ["HeadStates", "linear_divergence"]


@dataclass(frozen=True)
class HeadStates:
    """The inputs from which a linear head computes its logits."""

    hidden: Tensor
    """[s D]."""
    weight: Tensor
    """[V D]; a DTensor if processes divide V."""
    bias: Tensor | None = None
    """[V]."""
    projection: Projection = field(default_factory=Projection)

    def take(self, ids: slice, is_own: bool) -> HeadStates:
        """Returns the same head over some token ids. Args: see local_rows."""
        bias = None if self.bias is None else local_rows(self.bias, ids, is_own)
        return HeadStates(self.hidden, local_rows(self.weight, ids, is_own), bias, self.projection)

    def logprobs(self, rows: slice, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
        """Returns the logits and the log-softmax of some rows: [rows V] each, or those of a part of V."""
        z = self.projection.logits(self.hidden[rows], self.weight, self.bias)
        return z, z.log_softmax(1) if part is None else z - part.log_sum(z)[:, None]


def linear_divergence(
    policy: HeadStates, teacher: HeadStates, *, gkd_beta: float = 0.5, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Returns the generalised Jensen-Shannon divergence of each row's distribution from a teacher's.

    Dᵢ = generalized_jsd(log p, log q, β), where p and q are the softmax of each head's logits z. If one vocabulary is
    padded further than the other, the ids that only one model has are left out.
    ∂D/∂z[j] = pⱼ (gⱼ − Σ_v p_v g_v), g = (1 − β) (log p − log m); at β = 1 g = log p − log q; at β = 0 it is pⱼ − qⱼ.

    Args:
        policy: the trained head; it gets a gradient.
        teacher: the teacher's head for the same rows; it gets none.
        gkd_beta: β. 0 is the forward KL, 1 the reverse KL.
        chunk_bytes: size of the logits of one model in one chunk; the memory in use is a few times this.
    Returns: [s], in nats; fp32, or float64 for float64 input. The gradients of weight and bias are summed in this
        precision, and then cast to their dtypes.
    Raises: ConfigError: β is not in [0, 1].
    Source: agrees with TRL's GKDTrainer.generalized_jsd_loss, summed over the vocabulary; memory as linear_logprob.

    >>> flat, sure = (HeadStates(torch.ones(1, 1), torch.tensor([[0.], [x]])) for x in (0., 20.))
    >>> linear_divergence(flat, sure, gkd_beta=0.0)  # log 1 - log 1/2
    tensor([0.6931])
    """
    part, same = VocabularyPart.of(policy.weight), len(policy.weight) == len(teacher.weight)
    size = min(len(policy.weight), len(teacher.weight))
    ids = slice(0, size) if part is None else slice(part.ids.start, min(part.ids.stop, size))
    policy, teacher = policy.take(ids, is_own=True), teacher.take(ids, is_own=same and part is not None)
    row_bytes = (size if part is None else part.most) * fp32_or_wider(policy.hidden.dtype).itemsize
    rows = chunk_rows(len(policy.hidden), row_bytes, policy.hidden.device, chunk_bytes=chunk_bytes)
    constants = (teacher.hidden.detach(), teacher.weight.detach(), teacher.bias)
    options = (policy.projection, teacher.projection, gkd_beta, rows, part)
    return _LinearDivergence.apply(policy.hidden, policy.weight, policy.bias, *constants, options)  # pyright: ignore


class _LinearDivergence(torch.autograd.Function):
    """See linear_divergence."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, options = args
        policy, teacher, beta, size, part = _unpack(tensors, options)
        divergence = policy.hidden.new_empty(len(policy.hidden), dtype=fp32_or_wider(policy.hidden.dtype))
        for rows in row_chunks(len(divergence), size):
            logp = policy.logprobs(rows, part)[1]
            divergence[rows] = generalized_jsd(logp, teacher.logprobs(rows, part)[1].to(logp.dtype), gkd_beta=beta)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return divergence if part is None else summed(divergence, part.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        policy, teacher, beta, size, part = _unpack(ctx.saved_tensors, ctx.options)
        grads = HeadGrads(policy.hidden, policy.weight, policy.bias, ctx.needs_input_grad[:3], grad.dtype)
        for rows in row_chunks(len(grad), size):
            z, logp = policy.logprobs(rows, part)
            d = _logit_grads(logp, teacher.logprobs(rows, part)[1].to(logp.dtype), beta, part).mul_(grad[rows, None])
            del logp  # [rows V]: the memory is needed
            grads.add(rows, policy.projection.backward_(d, z))
        return (*grads.sums(), None, None, None, None)


def _unpack(tensors: Any, options: Any) -> tuple[HeadStates, HeadStates, float, int, VocabularyPart | None]:
    """Returns the policy, the teacher, β, the rows of a chunk, and the part of V."""
    policy_projection, teacher_projection, beta, size, part = options
    policy = HeadStates(*tensors[:3], policy_projection)  # pyright: ignore
    return policy, HeadStates(*tensors[3:], teacher_projection), beta, size, part  # pyright: ignore


def _logit_grads(policy: Tensor, teacher: Tensor, beta: float, part: VocabularyPart | None) -> Tensor:
    """∂D/∂z [rows V] of a chunk, from the log-probabilities of both. Args: part: of V, that they are of."""
    p = policy.exp()
    if beta == 0:
        return p.sub_(teacher.exp())
    impossible = policy == -torch.inf  # 0 · inf would be NaN
    g = (policy - log_mixture(policy, teacher, beta).masked_fill(impossible, 0.0)).masked_fill_(impossible, 0.0)
    mean = (p * g).sum(1, keepdim=True)
    g -= mean if part is None else summed(mean, part.group)
    return g.mul_(p).mul_(1.0 if beta == 1 else 1 - beta)
