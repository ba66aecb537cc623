"""Cuts a TokenBatch into micro-batches that a model can run: packed rows with shared prefixes, or padded rows.

Dim legend: B rows, T tokens of a row, s completion tokens of a micro-batch, n its sequences.
- A sequence is never split, and neither is a unit (`TokenBatch.unit_of`).
- The sequences of a group share one copy of their prefix. Where it saves enough, every common beginning of sequences is
  run once (prefix_tree.py). What exceeds the token budget is split, and each part repeats the prefix that it needs.
- The last token of a completion predicts nothing. It is run only where its hidden state is asked for.
- There are as few micro-batches as fit, then they are made similar in cost (bin_packing.py); the largest comes first.
- Where n processes divide them, their number is rounded up to a multiple of n: no process waits for the others then.
- The plan depends only on the batch, not on measured times.
A micro-batch has no columns such as advantages; `MicroBatch.token_index` says where a token's columns are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.models.attention import SegmentLayout
from whet.packing.bin_packing import NO_CAP, PackItem, PassCost, Split, first_fit, pack_balanced, pack_padded_rows
from whet.packing.micro_batch import MicroBatch
from whet.packing.prefix_tree import PrefixTree, build_tree, prefix_trees
from whet.types import TokenBatch

__all__ = ["plan_micro_batches"]

TOKEN_COST = PassCost()
"""A cost that counts only tokens."""
MAX_REPEATED_SHARE = 0.01
"""How much more work repeated prefixes may cause before a larger token budget is taken, as a share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """A batch with the limits of its micro-batches."""

    batch: TokenBatch
    max_tokens: int
    max_sequences: int
    cost: PassCost
    at_end: bool
    shared_prefix: bool
    num_ranks: int
    prefix_lengths: np.ndarray
    """[N]."""
    starts: np.ndarray
    """[N]: start of each completion on the token axis."""
    lengths: np.ndarray
    """[N]: completion tokens that are run: all, or all but the last."""

    def run(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of sequence i that are run: its prefix, and its completion."""
        start = int(self.starts[i])
        return self.batch.prefix(i).numpy(), self.batch.tokens.numpy()[start : start + int(self.lengths[i])]


def plan_micro_batches(
    batch: TokenBatch,
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    packable: bool = True,
    shared_prefix: bool = True,
    at_end: bool = False,
    cost: PassCost = TOKEN_COST,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    saturating_tokens: int | None = None,
    multiple: int = 1,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """Cuts a batch into micro-batches within a token budget; every completion token is a target of exactly one.

    Args:
        batch: the sequences to run.
        max_tokens: the token budget: the most places of input_ids in a micro-batch.
        max_sequences: the most sequences of a micro-batch; None = no limit.
        packable: whether the model takes layouts; False makes right-padded rows of similar length.
        shared_prefix: whether common beginnings are run once; False runs them once per sequence.
        at_end: run completions to their last token; its hidden state is at `MicroBatch.last_index`.
        cost: the cost by which micro-batches are balanced.
        device: of the tensors.
        attention: the kernel of the layouts, one of models.attention.KERNELS.
        saturating_tokens: the size above which a larger micro-batch is no faster; None = unknown, as few as fit.
        multiple: the size of a layout's buckets is a multiple of it (SegmentLayout).
        num_ranks: the processes that divide the micro-batches, each of which runs every num_ranks-th one.
    Returns: the micro-batches, the one with most tokens first, so that the memory of one fits those after it.
    Raises: ConfigError: a budget below 1. DataError: a sequence or unit over max_tokens, a unit over max_sequences, or
        an empty prefix: nothing predicts a first token.

    >>> from whet.types import Example, TrainSequence
    >>> two = (TrainSequence(prefix=np.array([5, 6]), tokens=np.array([t, 2]), mask=np.ones(2, bool)) for t in (7, 8))
    >>> batch = TokenBatch.from_examples([Example(sequences=tuple(two))])
    >>> [micro.input_ids.tolist() for micro in plan_micro_batches(batch, max_tokens=100)]
    [[[5, 6, 7, 8]]]
    >>> [micro.input_ids.tolist() for micro in plan_micro_batches(batch, max_tokens=3)]  # each part has the prefix
    [[[5, 6, 7]], [[5, 6, 8]]]
    """
    for name, limit in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if limit is not None and limit < 1:
            raise ConfigError(f"{name} {limit} must be at least 1")
    work = _Work(
        batch=batch,
        max_tokens=min(max_tokens, NO_CAP),
        max_sequences=min(max_sequences or batch.num_sequences, batch.num_sequences),
        cost=cost,
        at_end=at_end,
        shared_prefix=shared_prefix,
        num_ranks=num_ranks,
        prefix_lengths=batch.prefix_lengths.numpy()[batch.prefix_of.numpy()],
        starts=batch.starts.numpy(),
        lengths=batch.lengths.numpy() - (not at_end),
    )
    _check_lengths(work, max_tokens)
    if packable:
        cut = _unit_bins if batch.num_units < batch.num_sequences else _sequence_bins
        micros = [_packed(work, items, multiple, attention) for items in cut(work, saturating_tokens)]
    else:
        rows = pack_padded_rows(_padded_rows(work), work.max_tokens, work.max_sequences, num_ranks)
        micros = [_padded(work, items) for items in rows]
    return [micro.to(device) for micro in sorted(micros, key=lambda micro: -micro.num_tokens)]


# ---- which sequences share a micro-batch -----------------------------------------------------------------------------


def _sequence_bins(work: _Work, saturating_tokens: int | None) -> list[list[PackItem]]:
    """Packs groups, or parts of them, into few micro-batches of similar cost, where every unit is one sequence."""
    ids, trees = _shared_prefix_groups(work, range(len(work.lengths)))
    groups = [_group(work, group) for group in ids]

    @functools.cache
    def items(split: Split, token_budget: int) -> list[PackItem]:
        packed = [item for tree in trees for item in tree.items(split, token_budget, work.max_sequences, work.cost)]
        return packed + [item for group in groups for item in group.items(split, token_budget, work.max_sequences)]

    unsplit = max([*(group.tokens for group in groups), *(int(tree.lengths.sum()) for tree in trees)], default=1)
    longest = int((work.prefix_lengths + work.lengths).max(initial=1))
    budgets = _budgets(longest, unsplit, saturating_tokens, work.max_tokens)
    budget = _smallest_budget(budgets, lambda n: sum(item.cost for item in items(first_fit, n)))
    ways = [
        items(first_fit, budget),
        items(pack_balanced, budget),
    ]  # full parts leave a small one for a gap; like parts none
    plans = [_pack(work, way, budget) for way in ways[: 1 if ways[0] == ways[1] else 2]]
    best = min(plans, key=lambda bins: (len(bins), max(map(_cost, bins), default=0)))
    return _for_ranks(work, best, budget, longest, functools.partial(items, pack_balanced))


def _cost(items: Sequence[PackItem]) -> int:
    return sum(u.cost for u in items)


def _pack(work: _Work, items: Sequence[PackItem], budget: int) -> list[list[PackItem]]:
    return pack_balanced(items, budget, work.max_sequences, work.num_ranks)


def _for_ranks(
    work: _Work, bins: list[list[PackItem]], budget: int, longest: int, items: Callable[[int], list[PackItem]]
) -> list[list[PackItem]]:
    """Splits large items further where a process would wait for the others, if repeated prefixes cost less than that.

    Args: bins: of the token budget. longest: tokens of what can't be split. items: those of a smaller token budget.
    Returns: the bins whose slowest ones, of the processes' simultaneous ones, cost least together.
    """
    n = work.num_ranks
    slowest = lambda bins: sum(_cost(b) for b in bins[::n])  # the most expensive bin comes first
    plans, rounds = [bins], -(-len(bins) // n)
    if n > 1 and slowest(bins) * n > sum(map(_cost, bins)) * (1 + MAX_REPEATED_SHARE):
        share = -(-sum(u.tokens for b in bins for u in b) // (rounds * n)) + int(work.prefix_lengths.max())
        smaller = {max(longest, tokens) for tokens in (share, share // 2) if tokens < budget}
        plans += [_pack(work, items(tokens), budget) for tokens in sorted(smaller)]
    return min((plan for plan in plans if len(plan) <= rounds * n), key=slowest)


def _unit_bins(work: _Work, saturating_tokens: int | None) -> list[list[PackItem]]:
    """Packs whole units into micro-batches. Units that share a prefix are one item where that fits, else halves."""
    groups, trees = _shared_prefix_groups(work, range(len(work.lengths)))
    families = _units_with_shared_prefixes(
        [*groups, *(tree.sequences.tolist() for tree in trees)], work.batch.unit_of.tolist()
    )
    units = [unit for family in families for unit in family]
    ends = np.cumsum([len(family) for family in families]).tolist()
    spans = list(zip([0, *ends], ends))

    @functools.cache
    def laid(a: int, b: int) -> PackItem:
        return _as_one_item(work, sorted(i for unit in units[a:b] for i in unit))

    def items(token_budget: int) -> list[PackItem]:
        found, open_ = [], list(reversed(spans))
        while open_:
            a, b = open_.pop()
            item, middle = laid(a, b), (a + b) // 2
            if item.tokens <= token_budget and len(item.sequences) <= work.max_sequences:
                found.append(item)
            else:
                open_ += [(middle, b), (a, middle)]
        return found

    singles = [laid(k, k + 1) for k in range(len(units))]
    for item in singles:
        _check_unit(work, item, item.tokens)
    unsplit, longest = max(laid(*span).tokens for span in spans), max(item.tokens for item in singles)
    budgets = _budgets(longest, unsplit, saturating_tokens, work.max_tokens)
    budget = _smallest_budget(budgets, lambda n: sum(item.cost for item in items(n)))
    return _for_ranks(work, _pack(work, items(budget), budget), budget, longest, items)


def _units_with_shared_prefixes(blocks: Sequence[Sequence[int]], unit_of: Sequence[int]) -> list[list[list[int]]]:
    """Collects the units that are connected by shared prefixes, directly or through other units.

    Args: blocks: sequences that share a prefix, by block. unit_of: the unit of each sequence.
    Returns: families of units, each unit a list of its sequences.

    >>> _units_with_shared_prefixes([[0, 1], [2], [3]], [0, 1, 1, 2])  # 0 and 1 share a prefix, 1 and 2 a unit
    [[[0], [1, 2]], [[3]]]
    """
    block_of = {i: b for b, ids in enumerate(blocks) for i in ids}
    home = list(range(len(blocks)))

    def find(b: int) -> int:
        while home[b] != b:
            b = home[b]
        return b

    units: dict[int, list[int]] = {}
    for i, u in enumerate(unit_of):
        units.setdefault(u, []).append(i)
        home[find(block_of[i])] = find(block_of[units[u][0]])
    units_of_prefix: dict[int, list[list[int]]] = {}
    for ids in units.values():
        units_of_prefix.setdefault(find(block_of[ids[0]]), []).append(ids)
    return list(units_of_prefix.values())


def _as_one_item(work: _Work, ids: Sequence[int]) -> PackItem:
    """Makes one item of sequences, without a limit: each group and each tree whole, end to end."""
    groups, trees = _shared_prefix_groups(work, ids)
    parts = [item for tree in trees for item in tree.items(first_fit, NO_CAP, NO_CAP, work.cost)]
    parts += [item for group in groups for item in _group(work, group).items(first_fit, NO_CAP, NO_CAP)]
    members = tuple(i for item in parts for i in item.sequences)
    return PackItem(members, sum(u.tokens for u in parts), sum(u.cost for u in parts), parts=tuple(parts))


def _padded_rows(work: _Work) -> list[PackItem]:
    """Makes an item of padded rows of each unit."""
    units: dict[int, list[int]] = {}
    for i, u in enumerate(work.batch.unit_of.tolist()):
        units.setdefault(u, []).append(i)
    rows = []
    for ids in units.values():
        width = int((work.prefix_lengths[ids] + work.lengths[ids]).max())
        cost = work.cost.estimate(width, targets=int(work.lengths[ids].max()) + 1)
        rows.append(PackItem(tuple(ids), width, cost))
        _check_unit(work, rows[-1], width * len(ids))
    return rows


def _budgets(longest: int, unsplit: int, saturating_tokens: int | None, max_tokens: int) -> list[int]:
    """Candidate token budgets, from `saturating_tokens` to `max_tokens` in steps of an eighth of the former.

    Args:
        longest: tokens of the longest sequence or unit; no candidate is smaller.
        unsplit: tokens at which no group and no tree is split. Candidates end at the first that reaches it, so a
            large max_tokens costs no time.
        saturating_tokens: as in plan_micro_batches.
        max_tokens: the largest candidate.
    """
    if saturating_tokens is None or saturating_tokens >= max_tokens:
        return [max_tokens]
    step = max(1, saturating_tokens // 8)
    end = min(max_tokens, max(unsplit, longest, saturating_tokens) + step)
    return [n for n in range(saturating_tokens, end, step) if n >= longest] + [max_tokens] * (end == max_tokens)


def _smallest_budget(budgets: Sequence[int], cost: Callable[[int], int]) -> int:
    """Returns the smallest token budget whose cost is at most MAX_REPEATED_SHARE above that of the cheapest budget."""
    if len(budgets) == 1:
        return budgets[0]
    costs = [cost(budget) for budget in budgets]
    return next(budget for budget, c in zip(budgets, costs) if c <= min(costs) * (1 + MAX_REPEATED_SHARE))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """Sequences of one prefix, before they are split to a budget."""

    prefix: int
    """Tokens."""
    prefix_cost: int
    own: list[PackItem]
    """The tokens and cost that each sequence adds to the prefix."""
    tokens: int
    """Tokens of all sequences, with the prefix counted once."""

    def items(self, split: Split, token_budget: int, max_sequences: int) -> list[PackItem]:
        """Makes one item of the sequences, or several that each repeat the prefix."""
        whole = self.tokens <= token_budget and len(self.own) <= max_sequences  # then any split makes one part
        items = []
        for part in [self.own] if whole else split(self.own, token_budget - self.prefix, max_sequences):
            members = tuple(sorted(u.sequences[0] for u in part))
            tokens, cost = sum(u.tokens for u in part), sum(u.cost for u in part)
            items.append(PackItem(members, self.prefix + tokens, self.prefix_cost + cost))
        return items


def _group(work: _Work, ids: Sequence[int]) -> _Group:
    """Makes a group of the sequences `ids`, which share a prefix."""
    cost, prefix = work.cost, int(work.prefix_lengths[ids[0]])
    lengths = work.lengths[ids].tolist()
    own = [PackItem((i,), n, cost.estimate(n, above=prefix, targets=n + 1)) for i, n in zip(ids, lengths)]
    return _Group(prefix=prefix, prefix_cost=cost.estimate(prefix), own=own, tokens=prefix + sum(lengths))


def _check_lengths(work: _Work, max_tokens: int) -> None:
    """Raises DataError where a prefix is empty or a sequence is over the budget; it names the longest."""
    if not work.prefix_lengths.all():
        raise DataError(
            f"sequence {int(np.argmin(work.prefix_lengths))} has an empty prefix; a prompt needs at least one token"
        )
    whole = work.prefix_lengths + work.lengths
    if not len(whole) or whole.max() <= max_tokens:
        return
    i = int(whole.argmax())
    prefix, completion = int(work.prefix_lengths[i]), int(work.batch.lengths[i])
    raise DataError(
        f"sequence {i} has {prefix} + {completion} = {prefix + completion} tokens of prompt and completion, over the "
        f"token budget trainer.max_tokens_per_microbatch={max_tokens}; set trainer.max_tokens_per_microbatch="
        f"{prefix + completion} or more"
    )


def _check_unit(work: _Work, item: PackItem, tokens: int) -> None:
    """Raises DataError where a unit does not fit into one micro-batch."""
    if tokens <= work.max_tokens and len(item.sequences) <= work.max_sequences:
        return
    unit, members = int(work.batch.unit_of[item.sequences[0]]), sorted(item.sequences)
    raise DataError(
        f"unit {unit} has {len(members)} sequences ({', '.join(map(str, members[:8]))}{', ...' * (len(members) > 8)}) "
        f"that take {tokens} tokens together and stay in one micro-batch, over its limit of {work.max_tokens} tokens "
        f"and {work.max_sequences} sequences; set trainer.max_tokens_per_microbatch={tokens} or more, let a "
        "micro-batch hold more sequences, or make the unit smaller"
    )


def _shared_prefix_groups(work: _Work, ids: Sequence[int]) -> tuple[list[list[int]], list[PrefixTree]]:
    """Splits sequences into groups of one prefix and trees; without shared prefixes each is a group of its own."""
    if not work.shared_prefix:
        return [[i] for i in ids], []
    at = np.asarray(ids, dtype=np.int64)
    prefix_of = work.batch.prefix_of.numpy()[at]
    of_positions = prefix_trees([np.concatenate(work.run(i)) for i in ids], prefix_of, work.prefix_lengths[at])
    trees = [dataclasses.replace(tree, sequences=at[tree.sequences]) for tree in of_positions]
    inside = {i for tree in trees for i in tree.sequences.tolist()}
    groups: dict[int, list[int]] = {}
    for i, k in zip(ids, prefix_of.tolist()):
        if i not in inside:
            groups.setdefault(k, []).append(i)
    return list(groups.values()), trees


# ---- how they lie in it ----------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One item of a row: token ids, segments, and the places of each sequence's states (see `_make_micro_batch`)."""

    ids: np.ndarray
    lengths: list[int]
    parents: list[int]
    states: list[np.ndarray]


def _packed(work: _Work, items: Sequence[PackItem], multiple: int, attention: str) -> MicroBatch:
    """Makes a micro-batch of one row: the items end to end."""
    items = [part for whole in items for part in whole.parts or (whole,)]
    lengths: list[int] = []
    parents: list[int] = []
    states: list[np.ndarray] = []
    ids, place = [], 0
    for item in items:
        part = (_tree_part if item.tree else _group_part)([work.run(i) for i in item.sequences])
        parents += [p if p < 0 else len(lengths) + p for p in part.parents]
        lengths += part.lengths
        states += [place + s for s in part.states]
        ids.append(part.ids)
        place += len(part.ids)
    layout = SegmentLayout(lengths, parents, attention=attention, multiple=multiple)
    sequences = [i for item in items for i in item.sequences]
    return _make_micro_batch(work, np.concatenate(ids)[None], sequences, states, layout=layout)


def _tree_part(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> _Part:
    """Lays sequences out as a tree."""
    tree = build_tree([np.concatenate(run) for run in runs])
    states = [places[len(prefix) - 1 :] for places, (prefix, _) in zip(tree.places, runs)]
    return _Part(tree.ids, tree.lengths, tree.parents, states)


def _group_part(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> _Part:
    """Lays out a prefix followed by its completions; a single sequence is one segment."""
    prefix, completions = runs[0][0], [c for _, c in runs]
    ids = np.concatenate([prefix, *completions])
    states, place = [], len(prefix)
    for c in completions:
        states.append(np.concatenate([[len(prefix) - 1], np.arange(place, place + len(c))]))
        place += len(c)
    if len(runs) == 1:
        return _Part(ids, [len(ids)], [-1], states)
    own = [len(c) for c in completions if len(c)]
    return _Part(ids, [len(prefix), *own], [-1, *[0] * len(own)], states)


def _padded(work: _Work, items: Sequence[PackItem]) -> MicroBatch:
    """Makes a micro-batch of right-padded rows of prompt and completion."""
    sequences = [i for item in items for i in item.sequences]
    runs = [work.run(i) for i in sequences]
    width = max(len(p) + len(c) for p, c in runs)
    ids = np.zeros((len(runs), width), dtype=np.int64)
    mask, states = np.zeros_like(ids), []
    for b, (p, c) in enumerate(runs):
        ids[b, : len(p) + len(c)] = np.concatenate([p, c])
        mask[b, : len(p) + len(c)] = 1
        states.append(np.arange(len(p) - 1, len(p) + len(c)) + b * width)
    return _make_micro_batch(work, ids, sequences, states, mask=torch.from_numpy(mask))


def _make_micro_batch(
    work: _Work,
    ids: np.ndarray,
    sequences: Sequence[int],
    states: Sequence[np.ndarray],
    *,
    layout: SegmentLayout | None = None,
    mask: Tensor | None = None,
) -> MicroBatch:
    """Makes a MicroBatch of sequences that have their places in it.

    Args: states: for each sequence the places of its hidden states: of the prefix's last token, then of the completion
        tokens that are run. Each predicts the token after it.
    """
    batch, at = work.batch, np.asarray(sequences)
    lengths = batch.lengths.numpy()[at]
    sequence = np.repeat(np.arange(len(at)), lengths)
    position = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    index = work.starts[at][sequence] + position
    units, first, unit_of = np.unique(batch.unit_of.numpy()[at], return_index=True, return_inverse=True)
    order = first.argsort()
    tensor = lambda x: torch.from_numpy(np.ascontiguousarray(x))
    return MicroBatch(
        input_ids=tensor(ids),
        layout=layout,
        attention_mask=mask,
        hidden_index=tensor(np.concatenate([s[:n] for s, n in zip(states, lengths)])),
        targets=tensor(batch.tokens.numpy()[index]),
        token_index=tensor(index),
        sequence=tensor(sequence),
        position=tensor(position),
        sequences=tensor(at),
        units=tensor(units[order]),
        unit_of=tensor(order.argsort()[unit_of]),
        last_index=tensor(np.array([s[-1] for s in states])) if work.at_end else None,
        batch=batch,
    )
