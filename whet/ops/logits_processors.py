"""The distribution that tokens are sampled from. The engine's sampler and the trainer both use it.

Order of work as in transformers: repetition penalty, forbidden tokens, constraint and minimum length, temperature,
top-k, top-p, min-p. Dim legend: n rows (tokens to draw or to score), V vocabulary, W bytes of a packed mask.
Left out on purpose: beam search, typical and eta sampling, and the tokens that a constraint allows: the
caller passes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.masked import to_fp32
from whet.ops.shapes import check_shapes

__all__ = ["LogitsProcessors", "allowed_tokens", "draw", "greedy", "process_logits"]


@dataclass(frozen=True, kw_only=True)
class LogitsProcessors:
    """The sampling distribution: the transformations of the logits before the softmax.

    Raises: ConfigError: a field out of its range.
    Source: the fields of transformers' GenerationConfig, with `forbidden_ids` for suppress_tokens and `min_tokens` for
        min_new_tokens.

    >>> LogitsProcessors(temperature=0.7).plain, LogitsProcessors(top_k=5).plain
    (True, False)
    >>> LogitsProcessors(top_k=5, full=True).plain
    True
    """

    temperature: float = 1.0
    """Logits are divided by it. 0 = greedy: draws are argmax, logprobs are taken at 1 and nothing is truncated."""
    top_k: int = 0
    """Keep the k likeliest tokens and those tied with the last of them; 0 = off."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to and including the one that brings their mass to p; 1 = off."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest; 0 = off."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen before are divided by it where positive, multiplied where negative; 1 = off."""
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    min_tokens: int = 0
    """Completion tokens before a stop token may be drawn."""
    stop_ids: tuple[int, ...] = ()
    """The stop tokens that min_tokens holds back."""
    constrained: bool = False
    """Each row has its own allowed tokens: process_logits needs `allowed`."""
    full: bool = False
    """True = only the temperature, whatever the other fields are (logprobs_mode="full")."""

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature >= 0, "at least 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1] (0 = off)"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive (1 = off)"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
        )
        for name, is_valid, rule in rules:
            if not is_valid:
                raise ConfigError(f"{name} {vars(self)[name]!r} must be {rule}")

    @property
    def penalises(self) -> bool:
        """Whether the repetition penalty is on, so that process_logits needs `seen`."""
        return not self.full and self.repetition_penalty != 1.0

    @property
    def forbids(self) -> bool:
        """Whether tokens are forbidden: always, before min_tokens, or by a constraint."""
        return not self.full and bool(self.forbidden_ids or (self.min_tokens and self.stop_ids) or self.constrained)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p is on."""
        return not self.full and self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def plain(self) -> bool:
        """Whether only the temperature changes the logits."""
        return not (self.penalises or self.forbids or self.truncates)


def process_logits(
    logits: Tensor,
    processors: LogitsProcessors,
    *,
    seen: Tensor | None = None,
    position: Tensor,
    keep: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Returns the logits of the sampling distribution.

    z' = penalise(z) / T where a token may be drawn, -inf elsewhere; softmax(z') is the sampling distribution.

    Args:
        logits: [n, V].
        processors: the transformations.
        seen: Bool [n, V], tokens that stand before this place, in prompt or completion; needed with a repetition
            penalty only.
        position: Long [n], completion tokens before this place.
        keep: Long [n], the sampled tokens: they stay inside whatever is truncated, so that no logprob is -inf after an
            update.
        allowed: uint8 [n, W], the tokens that a constraint allows, a bit each; needed with one only.

    Returns: [n, V], fp32 or wider. What is outside is decided on detached values; inside it is differentiable.
    Raises: ConfigError: a repetition penalty without `seen`, or a constraint without `allowed`.
    Source: transformers' LogitsProcessors, in their order. Ties: top-k keeps all that equal the k-th, as transformers;
        top-p drops the lower id first (a stable sort).

    >>> process_logits(torch.tensor([[1., 3., 2.]]), LogitsProcessors(top_k=2), position=torch.tensor([0]))
    tensor([[-inf, 3., 2.]])
    """
    check_shapes("[n]", position=position, keep=keep, rows_of_logits=logits.shape[:1])
    logits = to_fp32(logits)
    if processors.penalises:
        if seen is None:
            raise ConfigError(
                f"repetition_penalty {processors.repetition_penalty} needs `seen` [n, V], the tokens seen"
            )
        penalty = processors.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if processors.temperature not in (0.0, 1.0):
        logits = logits / processors.temperature
    if not (processors.forbids or processors.truncates):
        return logits
    outside = _outside(logits.detach(), processors, position, allowed)
    if keep is not None:
        outside = outside.scatter(1, keep.unsqueeze(1), False)
    return logits.masked_fill(outside, -torch.inf)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Returns one token per row by the inverse of its cumulative distribution, in the order of ids.

    a = min {j : Σᵢ≤ⱼ pᵢ > u}, p = softmax(z), z the logits.
    Args: logits [n, V], already through process_logits. u: float64 [n] in [0, 1), one uniform number per row.
    Returns: Long [n]. Never a token of probability 0.

    >>> draw(torch.tensor([[0., -torch.inf, 0.]] * 3), torch.tensor([0., 0.49, 0.51], dtype=torch.float64))
    tensor([0, 0, 2])
    """
    check_shapes("[n]", u=u, rows_of_logits=logits.shape[:1])
    top, likeliest = logits.max(1, keepdim=True)
    p = (logits - top).exp()
    cdf = p.cumsum(1, dtype=torch.float64)
    place = torch.searchsorted(cdf, u.double().unsqueeze(1) * cdf[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
    # A parallel cumulative sum need not be monotone to the last bit, so a place of probability 0 is possible there.
    return torch.where(p.gather(1, place) > 0, place, likeliest).squeeze(1)


def greedy(logits: Tensor) -> Tensor:
    """Returns the likeliest token of each row; of equal ones the lowest id.

    Args: logits [n, V], already through process_logits.
    Returns: Long [n].

    >>> greedy(torch.tensor([[1., 3., 3.]]))
    tensor([1])
    """
    return logits.argmax(1)


def allowed_tokens(bits: Tensor, vocabulary: int) -> Tensor:
    """Returns a packed mask, unpacked: token i is bit i mod 8, counted from the lowest, of byte i div 8.

    Args: bits: uint8 [n, W]. vocabulary: V.
    Returns: Bool [n, V]; tokens past the end of the mask are not allowed; bits past V are ignored.

    >>> allowed_tokens(torch.tensor([[5]], dtype=torch.uint8), 4)
    tensor([[ True, False,  True, False]])
    """
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flags = (bits.unsqueeze(2) >> places & 1).bool().flatten(1)[:, :vocabulary]
    return torch.nn.functional.pad(flags, (0, vocabulary - flags.shape[1]))


def _index(ids: Sequence[int], device: torch.device) -> Tensor:
    """Token ids as an index on a device. On a GPU it is copied there once: a host list would be copied at each use."""
    return torch.tensor(ids) if device.type == "cpu" else _index_on_device(tuple(ids), device)


@functools.lru_cache(maxsize=64)
def _index_on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        pinned = torch.empty(len(ids), dtype=torch.long, pin_memory=device.type == "cuda")
        return pinned.copy_(torch.tensor(ids)).to(device, non_blocking=True)


def _outside(logits: Tensor, processors: LogitsProcessors, position: Tensor, allowed: Tensor | None) -> Tensor:
    """Bool [n, V]: the tokens that are not drawn, from detached logits already divided by the temperature."""
    outside = torch.zeros_like(logits, dtype=torch.bool)
    if processors.constrained:
        if allowed is None:
            raise ConfigError("a constrained distribution needs `allowed` [n, W], the tokens that may come")
        outside = ~allowed_tokens(allowed, logits.shape[1])
    if processors.forbidden_ids:
        outside[:, _index(processors.forbidden_ids, outside.device)] = True
    if processors.min_tokens and processors.stop_ids:
        early = (position < processors.min_tokens).unsqueeze(1)
        stops = torch.zeros_like(outside[0])
        stops[_index(processors.stop_ids, outside.device)] = True
        outside = outside | (early & stops)
    if not processors.truncates:
        return outside
    if processors.top_k:
        logits = logits.masked_fill(outside, -torch.inf)
        last = logits.topk(min(processors.top_k, logits.shape[1]), 1).values[:, -1:]
        outside = outside | (logits < last)
    if processors.top_p < 1:
        values, ids = logits.masked_fill(outside, -torch.inf).sort(dim=1, stable=True)  # ascending
        dropped = values.softmax(1).cumsum(1) <= 1 - processors.top_p
        dropped[:, -1] = False
        outside = outside | torch.zeros_like(outside).scatter(1, ids, dropped)
    if processors.min_p:
        logits = logits.masked_fill(outside, -torch.inf)
        p = logits.softmax(1)
        outside = outside | (p < processors.min_p * p.amax(1, keepdim=True))
    return outside
