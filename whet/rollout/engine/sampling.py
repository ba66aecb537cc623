"""sample_rows: logits -> token and logprob, for rows that share one Sampling.

The embedded engine and the hf engine sample here, with the same operations as the trainer (ops/logits_processors.py),
so that both sides mean the same distribution; logits_processors.draw is the oracle. A draw uses one uniform number with
a key of its own, so other rows of the batch do not matter. vLLM and SGLang draw by themselves: their adapters refuse
requests that would mean another distribution there.
Dim legend: n rows, V vocabulary.
It has no state: the caller holds positions, random numbers and seen tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.logits_processors import greedy, process_logits
from whet.ops.logprobs import selective_log_softmax
from whet.rollout.requests import SamplingPlan

__all__ = ["sample_rows", "seen_tokens"]

BLOCK = 256
"""Tokens of a block, where the vocabulary is large."""


def sample_rows(
    logits: Tensor,
    plan: SamplingPlan,
    *,
    u: Tensor,
    position: Tensor,
    seen: Tensor | None,
    allowed: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one token for each row.

    Args:
        logits: [n, V].
        plan: shared by the rows.
        u: float64 [n], the uniform numbers of their draws.
        position: Long [n], completion tokens before this place.
        seen: Bool [n, V], tokens before it; needed only with a repetition penalty.
        allowed: uint8 [n, W], the tokens that a constraint allows, one bit each; needed only with a constraint.
        scores: fp32 [n, V], drawn from in place of the logits, where transformers' processors have made them; None =
            the plan's processors are applied to the logits.

    Returns: (Long [n] tokens, fp32 [n] logprobs under the reported distribution). At temperature 0 the token is the
        likeliest one and its logprob is taken at temperature 1.

    >>> from whet.rollout.base import Sampling
    >>> from whet.rollout.requests import make_plan
    >>> sample_rows(torch.tensor([[0., 9.]]), make_plan(Sampling(temperature=0.)), u=torch.tensor([0.5]),
    ...     position=torch.tensor([0]), seen=None)[0]
    tensor([1])
    """
    logits = logits.float()
    if scores is None:
        scores = process_logits(logits, plan.processors, seen=seen, position=position, allowed=allowed)
    if plan.processors.temperature == 0:
        tokens = greedy(scores)
    else:
        tokens, logprobs = _draw(scores, u)
        if plan.reported is plan.processors:
            return tokens, logprobs
    if plan.reported is not plan.processors:
        scores = process_logits(logits, plan.reported, position=position)
    return tokens, selective_log_softmax(scores, tokens)


def _draw(scores: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the draw of logits_processors.draw, and its logprob from the same sum: one pass of exponentials for both.

    A large vocabulary is summed in blocks of 256 and searched in two steps, so that only a block is summed up in order.
    Args: scores [n, V]. u: float64 [n].
    Returns: (Long [n], fp32 [n]).
    """
    (n, size), wide = scores.shape, torch.float64
    if size <= 16 * BLOCK:
        p = scores.softmax(1)
        cdf = p.cumsum(1, dtype=wide)
        total = cdf[:, -1:]
        place = torch.searchsorted(cdf, u.unsqueeze(1) * total, right=True).clamp_(max=size - 1)
        share = p.gather(1, place)
        # Rounding at the end of a sum can lead to a token of probability 0; the likeliest is taken then, as in draw.
        if scores.is_cuda or not bool(share.all()):  # asking a GPU would wait for it
            place = torch.where(share == 0, scores.argmax(1, keepdim=True), place)
            share = p.gather(1, place)
        return place.squeeze(1), (share / total).log_().float().squeeze(1)
    top = scores.amax(1, keepdim=True)
    p = scores.new_empty(n, -(-size // BLOCK) * BLOCK)
    p[:, size:] = 0.0
    torch.sub(scores, top, out=p[:, :size]).exp_()
    p = p.unflatten(1, (-1, BLOCK))
    sums = p.sum(2, dtype=wide)
    cdf = sums.cumsum(1)
    total = cdf[:, -1:]
    target = u.unsqueeze(1) * total
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=p.shape[1] - 1)
    inner = p.gather(1, block.unsqueeze(2).expand(n, 1, BLOCK)).squeeze(1).cumsum(1, dtype=wide)
    inner += cdf.gather(1, block) - sums.gather(1, block)
    place = torch.searchsorted(inner, target, right=True).clamp_(max=BLOCK - 1) + block * BLOCK
    place.clamp_(max=size - 1)
    chosen = scores.gather(1, place)
    impossible = (chosen - top).exp() == 0
    if scores.is_cuda or bool(impossible.any()):
        place = torch.where(impossible, scores.argmax(1, keepdim=True), place)
        chosen = scores.gather(1, place)
    return place.squeeze(1), (chosen - top - total.log()).float().squeeze(1)


def seen_tokens(contexts: list[Tensor], vocabulary: int) -> Tensor:
    """Returns the tokens of each context, as the repetition penalty counts them.

    Args: contexts: Long [T] each: prompt and completion so far. vocabulary: V.
    Returns: Bool [n, V], on the contexts' device.

    >>> seen_tokens([torch.tensor([2, 0, 2])], 4)
    tensor([[ True, False,  True, False]])
    """
    seen = torch.zeros(len(contexts), vocabulary, dtype=torch.bool, device=contexts[0].device)
    for row, context in zip(seen, contexts, strict=True):
        row[context] = True
    return seen
