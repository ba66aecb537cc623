"""Prefix trees: which sequences with common prefixes run as one tree, and how it is split and laid out in a row.

A run is the part of a sequence that the model sees: its prefix, and its completion without the last token. Among sorted
runs a run shares most with its neighbours. So run i adds lengths[i] - shared[i] tokens to a tree, where shared[i] is
the number of tokens that it has in common with the run before it. Turns of a conversation, forks of a turn, prompts
under one system prompt and completions with a common beginning are all the same case.
Dim legend: n runs, T tokens of a row.

Left out on purpose: equal spans that do not begin their sequences, since their tokens attend to different tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.packing.bin_packing import PackItem, PassCost, Split

__all__ = ["PrefixTree", "TreeRow", "build_tree", "prefix_trees"]

MIN_SHARED = 32
"""Tokens that prefixes must share to be joined, and that a tree must save."""
MIN_SAVED_SHARE = 0.05
"""Share of its tokens that a tree must save, beyond those that a shared prefix saves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeRow:
    """Runs in one row, with each common prefix stored once."""

    ids: np.ndarray
    """Integer [T]."""
    lengths: list[int]
    """Lengths of the segments, in row order."""
    parents: list[int]
    """The parent of each segment: -1 = root, else the index of an earlier segment."""
    places: list[np.ndarray]
    """For each run, int64 [length of the run]: the places of its tokens."""


def build_tree(runs: Sequence[np.ndarray]) -> TreeRow:
    """Lays runs out in a row; a new segment begins only where runs diverge.

    Args: runs: token ids, at least one run, none of them empty.
    Returns: the TreeRow; its places are in the order of `runs`.

    >>> tree = build_tree([np.array([5, 6, 7, 8]), np.array([5, 6]), np.array([5, 6, 9])])
    >>> tree.ids.tolist(), tree.lengths, tree.parents
    ([5, 6, 7, 8, 9], [2, 2, 1], [-1, 0, 0])
    >>> [places.tolist() for places in tree.places]
    [[0, 1, 2, 3], [0, 1], [0, 1, 4]]
    """
    order, shared = _sorted(runs)
    places, end = [np.arange(0)] * len(runs), 0
    above = []  # of each token, the place of the one before it
    last = places[0]
    for i, s in zip(order, shared.tolist()):
        own = np.arange(end, end + len(runs[i]) - s)
        last = places[i] = np.concatenate([last[:s], own])
        above.append(np.concatenate([last[s - 1 : s] if s else [-1], own[:-1]])[: len(own)])
        end += len(own)
    before = np.concatenate(above).astype(np.int64)
    followers = np.bincount(before[before >= 0], minlength=end)
    begins = (before < 0) | (followers[before] > 1)
    segment = begins.cumsum() - 1
    return TreeRow(
        ids=np.concatenate([runs[i][s:] for i, s in zip(order, shared.tolist())]),
        lengths=np.bincount(segment).tolist(),
        parents=np.where(before < 0, -1, segment[before])[begins].tolist(),
        places=places,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """Sequences that are run as one tree, or as several where one would exceed the budget.

    Example: the runs [5, 6, 7, 8], [5, 6, 7, 9, 9] and [5, 6, 4] are, as a tree,

        5 6 +-- 4                 sorted: [5 6 4], [5 6 7 8], [5 6 7 9 9]
            +-- 7 +-- 8           shared: 0, 2, 3, 0, each with the one before it
                  +-- 9 9

    Leaves are visited in sorted order. 4 is a leaf at depth 2, where it diverges from the next run; 8 and 9 9 are
    leaves at depth 3. After 9 9 nothing more can come below depth 3, so 8 and 9 9 are split to the budget minus the 3
    tokens above them, and each part gets its own 7. The same is done at depth 2 and, with 5 6, at depth 0. All take 7
    tokens. Under a budget of 6 the part (7 8 | 9 9) takes 4 tokens in addition to 5 6 and fills the budget. So [5 6 4]
    becomes an item of its own, with its own copy of 5 6:

    >>> from whet.packing.bin_packing import first_fit
    >>> tree = PrefixTree(sequences=np.array([2, 0, 1]), lengths=np.array([3, 4, 5]), shared=np.array([0, 2, 3, 0]),
    ...                   targets=np.array([1, 1, 1]))
    >>> fit = lambda budget: tree.items(first_fit, budget, max_sequences=9, cost=PassCost())
    >>> [(item.sequences, item.tokens) for item in fit(7)]
    [((0, 1, 2), 7)]
    >>> [(item.sequences, item.tokens) for item in fit(6)]
    [((0, 1), 6), ((2,), 3)]
    """

    sequences: np.ndarray
    """[n]: indices of the sequences, in the sorted order of their runs."""
    lengths: np.ndarray
    """[n]: lengths of their runs."""
    shared: np.ndarray
    """[n + 1]: tokens that each run shares with the run before it; 0 at both ends."""
    targets: np.ndarray
    """[n]."""

    def items(self, split: Split, token_budget: int, max_sequences: int, cost: PassCost) -> list[PackItem]:
        """Makes one item where the tree fits; else several, each with the prefixes that its sequences need.

        From the leaves upwards, the items that meet at a fork are joined as far as they fit beneath the tokens above.

        Args:
            split: bin_packing.first_fit or bin_packing.pack_balanced.
            token_budget: tokens of an item at most.
            max_sequences: sequences of an item at most.
            cost: as in PassCost.
        """
        forks: list[tuple[int, list[PackItem]]] = [(0, [])]  # open forks: depth in tokens, and the items below
        edges = zip(self.shared[:-1].tolist(), self.shared[1:].tolist())
        leaves = zip(self.sequences.tolist(), self.lengths.tolist(), self.targets.tolist())
        for (i, n, targets), (left, right) in zip(leaves, edges):
            depth = max(left, right)
            if forks[-1][0] < depth:
                forks.append((depth, []))
            forks[-1][1].append(
                PackItem((i,), n - depth, cost.estimate(n - depth, above=depth, targets=targets), tree=True)
            )
            while forks[-1][0] > right:
                depth, below = forks.pop()
                if forks[-1][0] < right:
                    forks.append((right, []))
                top, items = forks[-1]
                stem, price = depth - top, cost.estimate(depth - top, above=top)
                for part in split(below, token_budget - depth, max_sequences):
                    members = tuple(sorted(s for u in part for s in u.sequences))
                    tokens, work = sum(u.tokens for u in part), sum(u.cost for u in part)
                    items.append(PackItem(members, stem + tokens, price + work, tree=True))
        return forks[0][1]


def prefix_trees(runs: Sequence[np.ndarray], prefix_of: np.ndarray, prefix_lengths: np.ndarray) -> list[PrefixTree]:
    """Finds the sequences that are worth running as a tree; the others share their group's prefix at most.

    Sequences of different prefixes are joined where they begin with the same MIN_SHARED tokens or more. A tree is worth
    it where it saves at least MIN_SHARED tokens, and at least MIN_SAVED_SHARE of the tokens that run when each group
    has its prefix once. Of nested trees the largest that is worth it is taken.

    Args: runs: of the n sequences. prefix_of: [n], the prefix of each. prefix_lengths: [n], its tokens.
    Returns: trees; no sequence is in two of them.
    """
    order, shared = _sorted(runs)
    n, never = len(order), np.iinfo(np.int64).max
    lengths = np.array([len(runs[i]) for i in order], dtype=np.int64)
    own, prefixes = lengths - prefix_lengths[order], prefix_of[order]
    first = np.unique(prefixes, return_index=True)[1]
    last = n - 1 - np.unique(prefixes[::-1], return_index=True)[1]
    separate = own.copy()  # tokens that each adds where its group has the prefix once
    separate[first] += prefix_lengths[order][first]
    inside = np.bincount(first + 1, minlength=n + 2) - np.bincount(last + 1, minlength=n + 2)
    forks = np.where(inside.cumsum()[: n + 1] > 0, never, shared)  # a group stays in one tree
    trees, todo = [], [(0, n)] if n else []
    while todo:
        a, b = todo.pop()
        inner = forks[a + 1 : b]
        least = int(inner.min(initial=never))
        before = int(separate[a:b].sum())
        saved = before - int(lengths[a:b].sum() - shared[a + 1 : b].sum())
        if least >= MIN_SHARED and saved >= max(MIN_SHARED, MIN_SAVED_SHARE * before):
            edges = np.concatenate([[0], shared[a + 1 : b], [0]])
            trees.append(PrefixTree(sequences=order[a:b], lengths=lengths[a:b], shared=edges, targets=own[a:b] + 1))
        elif least < never:
            cuts = (a + 1 + np.flatnonzero(inner <= max(least, MIN_SHARED - 1))).tolist()
            todo += itertools.pairwise([a, *cuts, b])
    return trees


def _sorted(runs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[n]: the runs in lexicographic order; [n + 1]: tokens that neighbours share, 0 at both ends."""
    keys = [run.astype(">u4").tobytes() for run in runs]  # bytes compare as their ids do, the shorter one first
    order = sorted(range(len(runs)), key=keys.__getitem__)
    shared = np.zeros(len(runs) + 1, dtype=np.int64)
    for k, (i, j) in enumerate(itertools.pairwise(order)):
        a, b = runs[i], runs[j]
        most = min(len(a), len(b))
        differ = a[:most] != b[:most]
        shared[k + 1] = differ.argmax() if differ.any() else most
    return np.array(order, dtype=np.int64), shared
