"""What a pass costs, and how items of work are put into few passes of like cost.

Both ways of packing cut twice: into as few micro-batches as the token budget allows, then again under the smallest cap
on cost that needs no more of them (MULTIFIT: Coffman, Garey, Johnson 1978). A cap that is too low changes nothing, so
the result never has more micro-batches than first fit, and of equally many never a more expensive one.
All numbers are integers made of lengths: the same batch gives the same cut on any machine.
Left out on purpose: sliding windows, which see fewer pairs; any look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from whet.models.heads import score_layer

__all__ = ["NO_CAP", "PackItem", "PassCost", "Split", "first_fit", "level", "model_cost", "pack", "pad"]

ROUNDS = 12
"""Halvings of the range in which the smallest cap lies."""
NO_CAP = int(np.iinfo(np.int64).max)
"""Above every count in a batch."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Multiply-adds of a forward pass: token · tokens + pair · query-key pairs + target · targets.

    >>> PassCost(token=10, pair=1, target=0).of(4, above=3)         # 40, and 3·4 + (1 + 2 + 3 + 4) pairs
    62
    """

    token: int = 1
    """Of all layers' linear maps, for one token."""
    pair: int = 0
    """Of all layers' attention, for one query and one key."""
    target: int = 0
    """Of the head, for one target."""

    def of(self, tokens: int, *, above: int = 0, targets: int = 0) -> int:
        """Cost of a causal segment.

        Args: tokens: its own. above: tokens before it that it sees, counted elsewhere. targets: its targets.
        """
        pairs = tokens * above + tokens * (tokens + 1) // 2
        return self.token * tokens + self.pair * pairs + self.target * targets


@dataclass(frozen=True)
class PackItem:
    """Sequences that stay together, with what they take: places of input_ids, and cost as PassCost counts it.

    In a packed row they are one prefix with its completions, or a tree, or several of these (`parts`). As padded rows
    `tokens` and `cost` are those of one row, the widest.
    """

    sequences: tuple[int, ...]
    tokens: int
    cost: int
    tree: bool = False
    """They share whatever they begin with alike, not a prefix alone."""
    parts: tuple[PackItem, ...] = ()
    """What lies end to end; () = the item itself."""


Split = Callable[[Sequence[PackItem], int, int], list[list[PackItem]]]
"""Units, tokens and sequences of a bin at most -> bins: first_fit or pack."""


def model_cost(module: PreTrainedModel) -> PassCost:
    """What a pass of a model costs: its matrices' entries per token, 2 · layers · heads · head size per pair.

    Args: module: a causal language model or critic. Of experts, those that a token meets count.
    Returns: the PassCost; pair is 0 where the config names no attention heads.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16)
    >>> model_cost(LlamaForCausalLM(LlamaConfig(vocab_size=10, num_hidden_layers=1, **sizes)))
    PassCost(token=576, pair=16, target=80)
    """
    config, head = module.config, module.get_output_embeddings() or score_layer(module)
    met = vars(config).get("num_experts_per_tok")
    token = 0
    for part in module.modules():
        if part is head or isinstance(part, nn.Embedding):
            continue
        for p in part.parameters(recurse=False):
            if p.dim() == 3 and met:
                token += p.numel() * met // p.shape[0]
            elif p.dim() > 1:
                token += p.numel()
    pair = 0
    if hasattr(config, "num_attention_heads"):
        heads = config.num_attention_heads
        size = vars(config).get("head_dim") or config.hidden_size // heads
        pair = 2 * config.num_hidden_layers * heads * size
    target = 0 if head is None else sum(p.numel() for p in head.parameters() if p.dim() > 1)
    return PassCost(token=token, pair=pair, target=target)


def first_fit(
    items: Sequence[PackItem], max_tokens: int, max_sequences: int, cap: int = NO_CAP
) -> list[list[PackItem]]:
    """First fit decreasing: each item, largest first, into the first bin with room.

    Args:
        items: each within the limits.
        max_tokens, max_sequences: of a bin.
        cap: most cost of a bin; with one the most expensive item comes first, and an item over it has a bin of its own.
    Returns: the bins in the order in which they were begun.
    """
    size = (lambda u: (-u.tokens, u.sequences)) if cap == NO_CAP else _by_cost
    return _filled(sorted(items, key=size), max_tokens, max_sequences, cap)


def _by_cost(item: PackItem) -> tuple[int, tuple[int, ...]]:
    """Sorts the most expensive item first."""
    return -item.cost, item.sequences


def _filled(items: Sequence[PackItem], max_tokens: int, max_sequences: int, cap: int) -> list[list[PackItem]]:
    """First fit in the order given."""
    needs = np.array([(u.tokens, len(u.sequences), u.cost) for u in items], dtype=np.int64)
    left = np.tile(np.array([[max_tokens], [max_sequences], [cap]], dtype=np.int64), len(items))
    bins: list[list[PackItem]] = []
    for item, need in zip(items, needs):
        fits = np.logical_and.reduce(left[:, : len(bins) + 1] >= need[:, None])  # the last one is still empty
        b = int(fits.argmax())
        b = b if fits[b] else len(bins)
        if b == len(bins):
            bins.append([])
        bins[b].append(item)
        left[:, b] -= need
    return bins


def pack(items: Sequence[PackItem], max_tokens: int, max_sequences: int) -> list[list[PackItem]]:
    """Bins of items, as few as first fit makes, of like cost; most expensive bin first.

    >>> bins = pack([PackItem((i,), n, n) for i, n in enumerate((5, 4, 3, 2, 2))], 10, 9)     # first fit: 5+4, 3+2+2
    >>> [[u.tokens for u in b] for b in bins]
    [[5, 3], [4, 2, 2]]
    """
    if not items:
        return []
    cost = lambda b: sum(u.cost for u in b)
    whole, ordered = first_fit(items, max_tokens, max_sequences), sorted(items, key=_by_cost)
    return level(lambda cap: whole if cap == NO_CAP else _filled(ordered, max_tokens, max_sequences, cap), cost)


def pad(items: Sequence[PackItem], max_tokens: int, max_sequences: int) -> list[list[PackItem]]:
    """Bins of rows of like length, as few as rows times the longest allow, of like cost; most expensive bin first.

    Args: items: each within the limits; a row for each of its sequences. `tokens` and `cost` are those of its widest
        row, without its neighbours' padding.
    """
    ordered = sorted(items, key=lambda u: (-u.tokens, u.sequences))
    rows = lambda b: sum(len(u.sequences) for u in b)

    def fit(cap: int) -> list[list[PackItem]]:
        bins: list[list[PackItem]] = []
        for u in ordered:
            n, first = (rows(bins[-1]) + len(u.sequences), bins[-1][0]) if bins else (1, u)
            if bins and n <= max_sequences and n * first.tokens <= max_tokens and n * first.cost <= cap:
                bins[-1].append(u)
            else:
                bins.append([u])
        return bins

    return level(fit, lambda b: rows(b) * b[0].cost) if items else []


def level(fit: Callable[[int], list[list[T]]], cost: Callable[[list[T]], int]) -> list[list[T]]:
    """The cut under the smallest cap that needs no more bins than no cap does; most expensive bin first.

    Args: fit: cap -> bins, at least one. cost: of a bin.
    """
    best = fit(NO_CAP)
    low, high = 0, max(cost(b) for b in best)
    for _ in range(ROUNDS if len(best) > 1 else 0):
        middle = (low + high) // 2
        found = fit(middle)
        highest = max(cost(b) for b in found)
        if len(found) <= len(best) and highest < high:
            best, high = found, highest
        else:
            low = middle + 1
    return sorted(best, key=cost, reverse=True)
