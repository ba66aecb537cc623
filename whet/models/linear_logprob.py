"""Log-probabilities and entropies of a linear head, without storing [s, V] logits.

It is one autograd function. It computes the logits chunk by chunk, and again in the backward pass. Logits of a single
chunk are kept for the backward pass, which saves a quarter of the head's products and takes no more memory at the peak.
Of a head that is divided over processes each one computes the logits of its token ids (models/vocabulary.py).
Dim legend: s rows (hidden states with a target), D width, V vocabulary.
Left out on purpose: computing the gradient in the forward pass (a loss may need whole sequences first), and chunks over
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.models.matmul import row_chunks
from whet.models.projection import CHUNK_BYTES, HeadGrads, Projection, chunk_rows
from whet.models.vocabulary import VocabularyPart, local_rows
from whet.ops import is_argmax, log_sum_sq_probs
from whet.ops.masked import fp32_or_wider
from whet.types import TokenStats

__all__ = ["linear_logprob", "linear_stats"]

_CONSTANTS = ("correct", "log_sum_sq_probs", "mean_logits")
"""The names of types.loss.CONSTANTS, in the order of the results of _LinearLogprob."""


@dataclass(frozen=True)
class _LogprobOptions:
    """The arguments of a call besides its tensors."""

    projection: Projection
    entropy: bool
    constants: frozenset[str]
    rows: int
    """Rows per chunk."""
    keep_logits: bool
    part: VocabularyPart | None
    """Of V; None = all of it."""


def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    constants: Collection[str] = (),
    chunk_bytes: int = CHUNK_BYTES,
    max_kept_bytes: int = CHUNK_BYTES,
) -> TokenStats:
    """Returns the log-probability of each target under the softmax of a linear head, and statistics of that
    distribution.

    zᵢ = cap(scale · (W hᵢ + b)) / τ, where cap(x) = c tanh(x / c) with a softcap c, and cap(x) = x without;
    log π(yᵢ) = zᵢ[yᵢ] − ls(zᵢ) and H = ls(zᵢ) − Σⱼ pⱼ zᵢ[j], ls the log-sum-exp, p = softmax(zᵢ), y the targets.
    ∂log π/∂z = onehot(y) − p, ∂H/∂z[j] = −pⱼ (log pⱼ + H).

    Args:
        hidden: [s D].
        weight: [V D]; a DTensor if processes divide V, and then `hidden` is what VocabularyPart.read returns.
        targets: Long [s].
        bias: [V].
        temperature: τ > 0.
        scale, softcap: of the head.
        entropy: compute the entropies too.
        constants: compute these of types.loss.CONSTANTS too; they have no gradient.
        chunk_bytes: see chunk_rows.
        max_kept_bytes: logits up to this size are one chunk, and are kept for the backward pass.

    Returns: TokenStats of [s], in nats; fp32, or float64 for float64 input. The gradients of weight and bias are summed
        in this precision, and then cast to their dtypes.
    Source: agrees with F.linear, float(), log_softmax, gather. The memory is that of Liger Kernel's fused linear losses
        (arXiv:2410.10989); they differentiate in the forward pass, this function recomputes in the backward pass.

    >>> linear_stats(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([3]), constants=("correct",)).correct
    tensor([False])
    """
    dtype = fp32_or_wider(hidden.dtype)
    part = VocabularyPart.of(weight)
    ids = slice(0, len(weight)) if part is None else part.ids
    size = (len(weight) if part is None else part.most) * dtype.itemsize
    keep_logits = hidden.shape[0] * size <= max_kept_bytes
    rows = chunk_rows(hidden.shape[0], size, hidden.device, chunk_bytes=chunk_bytes)
    rows = max(1, hidden.shape[0]) if keep_logits else rows
    projection = Projection(temperature, scale, softcap)
    options = _LogprobOptions(projection, entropy, frozenset(constants), rows, keep_logits, part)
    weight, bias = local_rows(weight, ids, is_own=True), None if bias is None else local_rows(bias, ids, is_own=True)
    logprobs, entropies, *values = _LinearLogprob.apply(hidden, weight, bias, targets, options)  # pyright: ignore
    return TokenStats(
        logprobs=logprobs, entropy=entropies if entropy else None, **dict(zip(_CONSTANTS, values, strict=True))
    )


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probabilities of linear_stats, and its entropies with entropy=True.

    Args: see linear_stats.
    Returns: ([s], [s] or None).

    >>> linear_logprob(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([3]), entropy=True)[0]     # log 1/4
    tensor([-1.3863])
    """
    stats = linear_stats(hidden, weight, targets, **options)
    assert stats.logprobs is not None
    return stats.logprobs, stats.entropy


class _LinearLogprob(torch.autograd.Function):
    """See linear_stats."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _LogprobOptions
    ) -> tuple[Tensor | None, ...]:
        dtype = fp32_or_wider(hidden.dtype)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        entropies = torch.zeros_like(logprobs)
        correct = torch.zeros_like(targets, dtype=torch.bool) if "correct" in options.constants else None
        log_sum = torch.zeros_like(logprobs) if "log_sum_sq_probs" in options.constants else None
        mean = torch.zeros_like(logprobs) if "mean_logits" in options.constants else None
        part = options.part
        rows, own = (targets, None) if part is None else part.find(targets)
        totals = None if part is None else torch.zeros_like(logprobs)
        best = None if totals is None or correct is None else torch.zeros_like(logprobs)
        z = logp = None
        for s in row_chunks(len(hidden), options.rows):
            z = logp = None  # before the next ones are made
            z = options.projection.logits(hidden[s], weight, bias)
            logp = z.log_softmax(1)
            logprobs[s] = logp.gather(1, rows[s, None]).squeeze(1)
            if options.entropy:
                entropies[s] = -_finite(logp, bias).mul_(z.softmax(1)).sum(1)
            logp = None
            if correct is not None:
                correct[s] = is_argmax(z, rows[s])
            if log_sum is not None:
                log_sum[s] = log_sum_sq_probs(z)
            if mean is not None:
                mean[s] = z.mean(1)
            if totals is not None:
                totals[s] = z.logsumexp(1)
            if best is not None:
                best[s] = z.amax(1)
        if part is not None and own is not None and totals is not None:
            found = (logprobs, entropies, correct, log_sum, mean)
            totals, (logprobs, entropies, correct, log_sum, mean) = _combined(part, own, totals, best, *found)
        kept = z if options.keep_logits and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, rows, own, totals, entropies, kept)
        ctx.options = options
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in backward
        constants = [x for x in (None if options.entropy else entropies, correct, log_sum, mean) if x is not None]
        ctx.mark_non_differentiable(*constants)
        return logprobs, entropies, correct, log_sum, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, rows, own, totals, entropies, kept = ctx.saved_tensors
        options: _LogprobOptions = ctx.options
        grad = torch.zeros_like(entropies) if grad is None else grad
        grads = HeadGrads(hidden, weight, bias, ctx.needs_input_grad[:3], entropies.dtype)
        z = d = logp = slope = None
        for s in row_chunks(len(hidden), options.rows):
            z = d = logp = slope = None  # before the next ones are made
            z = options.projection.logits(hidden[s], weight, bias) if kept is None else kept
            # softmax, not exp: it is several times faster on CPUs without AVX-512
            d = z.softmax(1) if totals is None else (z - totals[s, None]).exp_()
            if grad_entropy is not None:
                logp = z.log_softmax(1) if totals is None else z - totals[s, None]
                slope = _finite(logp, bias).add_(entropies[s, None]).mul_(grad_entropy[s, None])
                d *= slope.add_(grad[s, None]).neg_()
            else:
                d *= -grad[s, None]
            chosen = grad[s] if own is None else grad[s] * own[s]
            d.scatter_add_(1, rows[s, None], chosen[:, None])
            d = options.projection.backward_(d, z)
            z = logp = slope = None
            grads.add(s, d)
        return (*grads.sums(), None, None)


def _combined(
    part: VocabularyPart, own: Tensor, totals: Tensor, best: Tensor | None, *found: Tensor | None
) -> tuple[Tensor, tuple[Any, ...]]:
    """Returns the log-sum-exp of all logits, and the statistics of their softmax, from those of each part's softmax.

    Args: own: Bool [s], which targets lie in this process's part. totals: the log-sum-exp of its part. best: its
        largest logit, for `correct`. found: logprobs, entropies, correct, log_sum_sq_probs and mean_logits; None = not
        needed.
    """
    logprobs, entropies, correct, log_sum, mean = (totals if x is None else x.to(totals.dtype) for x in found)
    logprobs, mean = logprobs.masked_fill(~own, -torch.inf), mean * ((part.ids.stop - part.ids.start) / part.size)
    columns = part.gather([totals, totals if best is None else best, logprobs, entropies, correct * own, log_sum, mean])
    totals, best, logprobs, entropies, correct, log_sum, mean = columns  # each [t s]
    total = totals.logsumexp(0)
    shares = totals - total  # the log-probability of each part
    empty = shares == -torch.inf  # all of its tokens are forbidden
    combined = (
        (logprobs + shares).masked_fill(empty, -torch.inf).amax(0),
        (shares.exp() * (entropies - shares)).masked_fill(empty, 0.0).sum(0),
        correct.gather(0, best.argmax(0)[None])[0].bool(),
        (log_sum + 2 * shares).masked_fill(empty, -torch.inf).logsumexp(0),
        mean.sum(0),
    )
    return total, tuple(None if own is None else x for own, x in zip(found, combined, strict=True))


def _finite(logp: Tensor, bias: Tensor | None) -> Tensor:
    """Logprobs [rows V] with 0 in place of -inf: p log p of a token that the bias forbids is 0, and not 0 * -inf."""
    return logp if bias is None else logp.masked_fill_(logp == -torch.inf, 0.0)
