"""Bin packing: the cost of a forward pass, and packing of sequences into few passes of similar cost.

Packed and padded micro-batches are both made in two rounds. The first uses as few micro-batches as the token budget
allows. The second repeats this under the smallest cost cap that needs no more of them (MULTIFIT: Coffman, Garey,
Johnson 1978). A cap that is too low changes nothing. So the result never has more micro-batches than first fit has, and
its most expensive one never costs more.
All numbers are integers that depend only on lengths, so a batch is split in the same way on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from whet.models.heads import score_layer

__all__ = [
    "NO_CAP",
    "PackItem",
    "PassCost",
    "Split",
    "balance_bins",
    "first_fit",
    "model_cost",
    "pack_balanced",
    "pack_padded_rows",
]

BISECTION_STEPS = 12
"""Bisection steps in the search for the smallest cap."""
NO_CAP = int(np.iinfo(np.int64).max)
"""No limit: larger than every count in a batch."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Multiply-adds of a forward pass: token · tokens + pair · query-key pairs + target · targets.

    >>> PassCost(token=10, pair=1, target=0).estimate(4, above=3)         # 40, and 3·4 + (1 + 2 + 3 + 4) pairs
    62
    """

    token: int = 1
    """Multiply-adds of all layers' linear maps for one token."""
    pair: int = 0
    """Multiply-adds of all layers' attention for one query and one key."""
    target: int = 0
    """Multiply-adds of the head for one target."""

    def estimate(self, tokens: int, *, above: int = 0, targets: int = 0) -> int:
        """Returns the cost of a causal segment.

        Args: tokens: of the segment. above: earlier tokens that it attends to and that are counted elsewhere.
            targets: of the segment.
        """
        pairs = tokens * above + tokens * (tokens + 1) // 2
        return self.token * tokens + self.pair * pairs + self.target * targets


@dataclass(frozen=True)
class PackItem:
    """Sequences that stay together, with their places in input_ids and their cost (PassCost).

    In a packed row they are one prefix with its completions, or a tree, or several of these (`parts`). In padded rows
    `tokens` and `cost` are those of the widest row.
    """

    sequences: tuple[int, ...]
    tokens: int
    cost: int
    tree: bool = False
    """Whether the sequences share every common beginning, not only their prompt."""
    parts: tuple[PackItem, ...] = ()
    """Items that lie end to end; () = the item itself."""


Split = Callable[[Sequence[PackItem], int, int], list[list[PackItem]]]
"""(items, max_tokens, max_sequences) -> bins: first_fit or pack_balanced."""


def model_cost(module: PreTrainedModel) -> PassCost:
    """Returns the cost of a model's forward pass: its matrices' entries per token, 2 · layers · heads · head size per
    pair.

    Args: module: a causal language model or critic. Of its experts, only as many count as a token is routed to.
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
    """First fit decreasing: puts each item, largest first, into the first bin that has room.

    Args:
        items: each within the limits.
        max_tokens, max_sequences: limits of a bin.
        cap: the highest cost of a bin. With a cap the items are sorted by cost, and an item over it has its own bin.
    Returns: the bins, in the order in which they were opened.
    """
    size = (lambda u: (-u.tokens, u.sequences)) if cap == NO_CAP else _by_cost
    return _first_fit_in_order(sorted(items, key=size), max_tokens, max_sequences, cap)


def _by_cost(item: PackItem) -> tuple[int, tuple[int, ...]]:
    """Sort key: the most expensive item first."""
    return -item.cost, item.sequences


def _first_fit_in_order(
    items: Sequence[PackItem], max_tokens: int, max_sequences: int, cap: int
) -> list[list[PackItem]]:
    """First fit, in the order of `items`."""
    needs = np.array([(u.tokens, len(u.sequences), u.cost) for u in items], dtype=np.int64)
    left = np.tile(np.array([[max_tokens], [max_sequences], [cap]], dtype=np.int64), len(items))
    bins: list[list[PackItem]] = []
    for item, need in zip(items, needs):
        fits = np.logical_and.reduce(left[:, : len(bins) + 1] >= need[:, None])  # the last of them is still empty
        b = int(fits.argmax())
        b = b if fits[b] else len(bins)
        if b == len(bins):
            bins.append([])
        bins[b].append(item)
        left[:, b] -= need
    return bins


def pack_balanced(
    items: Sequence[PackItem], max_tokens: int, max_sequences: int, num_ranks: int = 1
) -> list[list[PackItem]]:
    """Packs items into as few bins as first fit makes, of similar cost; the most expensive bin comes first.

    Args: items: each within the limits. max_tokens, max_sequences: limits of a bin. num_ranks: the number of bins is
        rounded up to a multiple of it, where there are enough items.

    >>> items = [PackItem((i,), n, n) for i, n in enumerate((5, 4, 3, 2, 2))]
    >>> bins = pack_balanced(items, 10, 9)                 # first fit makes 5 + 4, 3 + 2 + 2
    >>> [[u.tokens for u in b] for b in bins]
    [[5, 3], [4, 2, 2]]
    """
    if not items:
        return []
    cost = lambda b: sum(u.cost for u in b)
    whole, ordered = first_fit(items, max_tokens, max_sequences), sorted(items, key=_by_cost)
    return balance_bins(
        lambda cap: whole if cap == NO_CAP else _first_fit_in_order(ordered, max_tokens, max_sequences, cap),
        cost,
        num_ranks,
    )


def pack_padded_rows(
    items: Sequence[PackItem], max_tokens: int, max_sequences: int, num_ranks: int = 1
) -> list[list[PackItem]]:
    """Packs padded rows of similar length into few bins of similar cost; the most expensive bin comes first.

    A bin takes its number of rows times its longest row.

    Args: items: each within the limits, with one row for each of its sequences. `tokens` and `cost` are those of the
        item's widest row, before it is padded to its neighbours. The others: see pack_balanced.
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

    return balance_bins(fit, lambda b: rows(b) * b[0].cost, num_ranks) if items else []


def balance_bins(
    fit: Callable[[int], list[list[T]]], cost: Callable[[list[T]], int], num_ranks: int = 1
) -> list[list[T]]:
    """Finds the smallest cost cap under which no more bins are needed than without one, or than its number rounded up.

    Args: fit: cap -> bins, at least one. cost: of a bin. num_ranks: see pack_balanced.
    Returns: the bins under that cap, the most expensive first.
    """
    best = fit(NO_CAP)
    most = -(-len(best) // num_ranks) * num_ranks
    low, high = 0, max(cost(b) for b in best)
    for _ in range(BISECTION_STEPS if most > 1 else 0):
        middle = (low + high) // 2
        bins = fit(middle)
        highest = max(cost(b) for b in bins)
        if len(bins) <= most and highest < high:
            best, high = bins, highest
        else:
            low = middle + 1
    return sorted(best, key=cost, reverse=True)
