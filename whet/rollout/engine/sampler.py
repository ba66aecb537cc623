"""Logits -> token and logprob, by rows that share one Sampling.

Both embedded engines (vanilla and hf) sample here, through the same operations (whet.ops.support) as the trainer, so
that both sides mean the same distribution; whet.ops.support.draw is the oracle of the draw. Every draw is one uniform
number with an address: what else is in the batch does not matter.
Dim legend: n rows, V vocabulary.
Left out on purpose: state. Positions, keys and tokens seen are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whet.errors import ConfigError, EngineError, lookup_error
from whet.ops.logprobs import selective_log_softmax
from whet.ops.support import Support, greedy, support_logits
from whet.ops.uniform import uniform
from whet.rollout.base import Request, Sampling, support_of

__all__ = ["Plan", "check_request", "completed_string", "make_plan", "sample_rows", "seen_tokens"]

BLOCK = 256
"""Tokens summed together where the vocabulary is large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A Sampling, worked out once: what to do with the logits of its rows."""

    sampling: Sampling
    support: Support
    """Drawn from."""
    reported: Support
    """Whose logprobs are reported."""


def make_plan(sampling: Sampling) -> Plan:
    """Works a Sampling out.

    Args: sampling: of a request.
    Returns: its plan.
    Raises: ConfigError: an unknown logprob_support, or a field out of its range.

    >>> make_plan(Sampling(top_k=3, logprob_support="full")).reported.plain
    True
    """
    if sampling.logprob_support not in ("sampling", "full"):
        raise lookup_error("logprob_support", sampling.logprob_support, ["sampling", "full"])
    support = replace(support_of(sampling), full=False)
    full = sampling.logprob_support == "full" and not support.plain
    return Plan(sampling=sampling, support=support, reported=replace(support, full=True) if full else support)


def sample_rows(
    logits: Tensor,
    plan: Plan,
    *,
    keys: Tensor,
    position: Tensor,
    seen: Tensor | None,
    u: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one token for each row.

    Args: logits [n, V]. plan: shared by the rows. keys: Long [n], address keys. position: Long [n], completion tokens
        before this place. seen: Bool [n, V], tokens that stand before it; needed with a repetition penalty only.
        u: float64 [n], uniform(keys, position), where the caller has it already. allowed: uint8 [n, W], the tokens that
        a constraint allows, a bit each; needed with one only.
    Returns: (Long [n] tokens, fp32 [n] logprobs under the reported support). At temperature 0 the token is the
        likeliest one and its logprob is taken at temperature 1.

    >>> sample_rows(torch.tensor([[0., 9.]]), make_plan(Sampling(temperature=0.)), keys=torch.tensor([1]),
    ...     position=torch.tensor([0]), seen=None)[0]
    tensor([1])
    """
    logits = logits.float()
    scores = support_logits(logits, plan.support, seen=seen, position=position, allowed=allowed)
    if plan.support.temperature == 0:
        tokens = greedy(scores)
    else:
        tokens, logprobs = _drawn(scores, uniform(keys, position) if u is None else u)
        if plan.reported is plan.support:
            return tokens, logprobs
    if plan.reported is not plan.support:
        scores = support_logits(logits, plan.reported, position=position)
    return tokens, selective_log_softmax(scores, tokens)


def _drawn(scores: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """What whet.ops.support.draw gives, and its logprob from the same sum: one pass of exponentials for both.

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
    p = scores.new_zeros(n, -(-size // BLOCK) * BLOCK)
    torch.sub(scores, top, out=p[:, :size]).exp_()
    p = p.unflatten(1, (-1, BLOCK))
    sums = p.sum(2, dtype=wide)
    cdf = sums.cumsum(1)
    total = cdf[:, -1:]
    wanted = u.unsqueeze(1) * total
    block = torch.searchsorted(cdf, wanted, right=True).clamp_(max=p.shape[1] - 1)
    inner = p.gather(1, block.unsqueeze(2).expand(n, 1, BLOCK)).squeeze(1).cumsum(1, dtype=wide)
    inner += cdf.gather(1, block) - sums.gather(1, block)
    place = torch.searchsorted(inner, wanted, right=True).clamp_(max=BLOCK - 1) + block * BLOCK
    place.clamp_(max=size - 1)
    chosen = scores.gather(1, place)
    impossible = (chosen - top).exp() == 0
    if scores.is_cuda or bool(impossible.any()):
        place = torch.where(impossible, scores.argmax(1, keepdim=True), place)
        chosen = scores.gather(1, place)
    return place.squeeze(1), (chosen - top - total.log()).float().squeeze(1)


def seen_tokens(contexts: list[Tensor], vocabulary: int) -> Tensor:
    """The tokens that stand in each context, as the repetition penalty counts them.

    Args: contexts: Long [T] each: prompt and completion so far. vocabulary: V.
    Returns: Bool [n, V], on the contexts' device.

    >>> seen_tokens([torch.tensor([2, 0, 2])], 4)
    tensor([[ True, False,  True, False]])
    """
    seen = torch.zeros(len(contexts), vocabulary, dtype=torch.bool, device=contexts[0].device)
    for row, context in zip(seen, contexts, strict=True):
        row[context] = True
    return seen


def completed_string(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], stop: Sequence[str], *, fresh: int
) -> int | None:
    """Where a completion is to be cut because a stop string is complete.

    Args: decode: ids -> text. tokens: the completion so far. stop: the strings. fresh: tokens that have come since the
            last look; those before hold no stop string.
    Returns: the tokens to keep, the last of which completes a string; None = none is complete.

    >>> completed_string(lambda ids: "".join(map(chr, ids)), [97, 98, 99, 100], ["bc", "d"], fresh=3)
    3
    """
    text = decode(tokens)
    if not any(s in text for s in stop):
        return None
    for kept in range(len(tokens) - fresh + 1, len(tokens)):
        text = decode(tokens[:kept])
        if any(s in text for s in stop):
            return kept
    return len(tokens)


def check_request(
    request: Request, *, vocabulary: int, positions: int | None, decodes: bool, constrains: bool = False
) -> None:
    """Refuses a request that could never be served.

    Args: request: to check. vocabulary: ids the model knows. positions: tokens its positions reach, None = no limit.
        decodes: whether the engine can turn tokens into text. constrains: whether it knows the tokens' bytes.
    Raises: EngineError: with the numbers; ConfigError: stop strings without a decode function, a constraint without
        grammars.
    """
    s, length = request.sampling, len(request.tokens)
    name = f"request {request.id}"
    if length == 0:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    if s.max_tokens < 1:
        raise EngineError(f"{name}: max_tokens {s.max_tokens} must be at least 1")
    if not 0 <= request.offset < length:
        raise EngineError(
            f"{name}: offset {request.offset} must be in 0..{length - 1}: its {length} tokens include them"
        )
    if positions is not None and length + s.max_tokens > positions:
        raise EngineError(
            f"{name} can never fit: {length} prompt + {s.max_tokens} new tokens = {length + s.max_tokens}, the model "
            f"has {positions} positions; shorten the prompt or max_tokens"
        )
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= vocabulary:
        raise EngineError(f"{name}: token {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
    if wrong := [i for i in (*s.stop_ids, *s.forbidden_ids) if not 0 <= i < vocabulary]:
        raise EngineError(f"{name}: stop or forbidden id {wrong[0]} is outside the vocabulary of {vocabulary}")
    if "" in s.stop:
        raise EngineError(f"{name}: an empty stop string would end every completion at once; leave it out")
    if s.stop and not decodes:
        raise ConfigError(f"{name} has stop strings {s.stop}, but the engine has no decode function; pass decode=")
    if s.constraint is not None and not constrains:
        raise ConfigError(
            f"{name} has the constraint {s.constraint}, but the engine has no tokenizer to spell it with; pass "
            "grammars=Grammars(tokenizer, vocabulary=...) to an engine that takes it ('vanilla', 'hf')"
        )
