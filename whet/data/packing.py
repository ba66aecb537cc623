"""From a TokenBatch to micro-batches that a model can run: shared prefixes, packed rows, or padded ones.

Dim legend: B rows, T tokens of a row, s completion tokens of a micro-batch, n its sequences.
A sequence stays whole. A group's sequences share one copy of their prefix, and where it pays all that sequences begin
with alike is run once (see tree.py); what is over the token budget is split, and each part repeats what it needs. A
completion's last token predicts nothing, so it is not run.
Micro-batches are few, then of like cost (see balance.py). The plan depends on the batch alone, never on the clock.
Left out on purpose: columns such as advantages; `MicroBatch.index` says where a token's columns are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whet.data.balance import NO_CAP, PassCost, Split, Unit, first_fit, pack, pad
from whet.data.tree import Family, families, grow
from whet.errors import ConfigError, DataError
from whet.models.attention import SegmentLayout
from whet.types import TokenBatch

__all__ = ["MicroBatch", "plan_micro_batches"]

TOKENS = PassCost()
"""Every token costs the same."""
REPEATS = 0.01
"""Share of the work by which repeated prefixes may exceed that of a larger token budget."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass: what goes in, and where each target is. Integers only; places count over input_ids flattened.

    Example: prompt [5, 6], completions [7, 2] and [8, 2], packed: input_ids [[5, 6, 7, 8]],
    rows [1, 2, 1, 3], targets [7, 2, 8, 2], index [0, 1, 2, 3], sequence [0, 0, 1, 1], position [0, 1, 0, 1].
    """

    input_ids: Tensor
    """Long [B T]."""
    layout: SegmentLayout | None
    """Who sees whom, where the model takes it (then B = 1)."""
    attention_mask: Tensor | None
    """Long [B T], 1 = token, for a model with its own attention."""
    rows: Tensor
    """Long [s]: the place of the hidden state that predicts each target; one that sequences share once for each."""
    targets: Tensor
    """Long [s]."""
    index: Tensor
    """Long [s]: place on the token axis of the TokenBatch."""
    sequence: Tensor
    """Long [s]: 0, 1, ... in order, the sequence of each target in this micro-batch."""
    position: Tensor
    """Long [s]: completion tokens before the target."""
    sequences: Tensor
    """Long [n]: which sequences of the TokenBatch these are."""
    spans: Tensor
    """Long [n 4]: place and length of each sequence's prefix, then of its completion but for the last token.

    In a tree these need not lie in one piece: the places are -1 there, and `places` has them.
    """
    places: Tensor | None = None
    """Long [sum of prefixes and completions]: where the tokens of each sequence lie; None = where the spans say."""

    @property
    def num_tokens(self) -> int:
        """Places of input_ids, padding included: what the forward pass costs."""
        return self.input_ids.numel()

    def runs(self) -> list[Tensor]:
        """The tokens of each sequence, prefix first, the completion's last one left out: n of Long [its length]."""
        flat = self.input_ids.flatten()
        if self.places is not None:
            return list(flat.index_select(0, self.places).split((self.spans[:, 1] + self.spans[:, 3]).tolist()))
        return [torch.cat([flat[a : a + p], flat[b : b + c]]) for a, p, b, c in self.spans.tolist()]


def plan_micro_batches(
    batch: TokenBatch,
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    packable: bool = True,
    shared_prefix: bool = True,
    cost: PassCost = TOKENS,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    enough: int | None = None,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Cuts a batch into micro-batches within a token budget; every completion token is a target of exactly one.

    Args: batch: what to run. max_tokens: places of input_ids in a micro-batch. max_sequences: most sequences of a
        micro-batch; None = no limit. packable: the model takes layouts; False = right-padded rows of like length.
        shared_prefix: common beginnings are run once; False = once per sequence. cost: by which micro-batches are made
        alike. device: of the tensors. attention: what serves the layouts there, one of models.attention.KERNELS.
        enough: tokens from which on a larger micro-batch is no faster; None = unknown, so they are as few as fit.
        multiple: of the layouts' buckets, see SegmentLayout.
    Returns: the micro-batches, dearest first.
    Raises: ConfigError: a budget below 1. DataError: a sequence over max_tokens, or an empty prefix, which leaves a
        first token that nothing predicts.

    >>> from whet.types import TrainExample
    >>> two = torch.ones(2, 2, dtype=torch.bool)
    >>> batch = TokenBatch.from_padded(TrainExample(
    ...     prompt_ids=torch.tensor([[5, 6], [5, 6]]), prompt_mask=two,
    ...     completion_ids=torch.tensor([[7, 2], [8, 2]]), completion_mask=two, advantages=torch.ones(2)))
    >>> [micro.input_ids.tolist() for micro in plan_micro_batches(batch, max_tokens=100)]
    [[[5, 6, 7, 8]]]
    >>> [micro.input_ids.tolist() for micro in plan_micro_batches(batch, max_tokens=3)]  # each part has the prefix
    [[[5, 6, 7]], [[5, 6, 8]]]
    """
    for name, value in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    prefix_lengths = batch.prefix_lengths.numpy()[batch.prefix_of.numpy()]  # [N]
    lengths = batch.lengths.numpy() - 1  # without the last token
    _check_lengths(prefix_lengths, lengths, max_tokens)
    max_tokens = min(max_tokens, NO_CAP)  # limits may be as large as one likes
    most = min(max_sequences or len(lengths), len(lengths))
    if not packable:
        whole = (prefix_lengths + lengths).tolist()
        rows = [Unit((i,), n, cost.of(n, targets=c + 1)) for i, (n, c) in enumerate(zip(whole, lengths.tolist()))]
        bins = pad(rows, max_tokens, most)
        return [_on(_padded(batch, [u.sequences[0] for u in b]), device) for b in bins]
    groups, trees = _groups(batch, prefix_lengths, shared_prefix)

    def parts(split: Split, room: int) -> list[Unit]:
        units = [unit for tree in trees for unit in tree.units(split, room, most, cost)]
        for ids in groups:
            units += _parts(ids, int(prefix_lengths[ids[0]]), lengths[ids].tolist(), room, most, cost, split)
        return units

    unsplit = _unsplit(groups, trees, prefix_lengths, lengths)
    rooms = _rooms(int((prefix_lengths + lengths).max(initial=1)), unsplit, enough, max_tokens)
    bins = _bins(parts, _least(rooms, lambda room: sum(u.cost for u in parts(first_fit, room))), most)
    return [_on(_packed(batch, units, multiple, attention), device) for units in bins]


def _bins(parts: Callable[..., list[Unit]], room: int, most: int) -> list[list[Unit]]:
    """Groups, or parts of them, as micro-batches: few, then of like cost."""
    ways = [parts(first_fit, room), parts(pack, room)]  # full parts leave a small one for a gap; like parts leave none
    plans = [pack(units, room, most) for units in ways[: 1 if ways[0] == ways[1] else 2]]
    return min(plans, key=lambda bins: (len(bins), max((sum(u.cost for u in b) for b in bins), default=0)))


def _unsplit(
    groups: Sequence[Sequence[int]], trees: Sequence[Family], prefix_lengths: np.ndarray, lengths: np.ndarray
) -> int:
    """A token budget from which on no group and no tree is split for its tokens: larger ones give the same parts."""
    whole = [int(prefix_lengths[ids[0]] + lengths[ids].sum()) for ids in groups]
    return max([*whole, *(int(tree.lengths.sum()) for tree in trees)], default=1)


def _rooms(longest: int, unsplit: int, enough: int | None, max_tokens: int) -> list[int]:
    """Token budgets that come into question: max_tokens, and from `enough` on those below it by eighths of `enough`.

    Args: longest: tokens of the longest sequence; none below it. unsplit: none beyond the first that reaches it, so
        that a limit which the batch is far from costs nothing.
    """
    if enough is None or enough >= max_tokens:
        return [max_tokens]
    step = max(1, enough // 8)
    end = min(max_tokens, max(unsplit, longest, enough) + step)
    return [n for n in range(enough, end, step) if n >= longest] + [max_tokens] * (end == max_tokens)


def _least(rooms: Sequence[int], cost: Callable[[int], int]) -> int:
    """The smallest token budget at which the prefixes that split groups repeat are not worth a larger one."""
    if len(rooms) == 1:
        return rooms[0]
    costs = [cost(room) for room in rooms]
    return next(room for room, c in zip(rooms, costs) if c <= min(costs) * (1 + REPEATS))


def _parts(
    ids: Sequence[int],
    prefix: int,
    lengths: Sequence[int],
    max_tokens: int,
    max_sequences: int,
    cost: PassCost,
    split: Split,
) -> list[Unit]:
    """The sequences of one prefix as one unit, or as several that each repeat the prefix."""
    own = [Unit((i,), c, cost.of(c, above=prefix, targets=c + 1)) for i, c in zip(ids, lengths)]
    units = []
    for part in split(own, max_tokens - prefix, max_sequences):
        members = tuple(sorted(u.sequences[0] for u in part))
        units.append(Unit(members, prefix + sum(u.tokens for u in part), cost.of(prefix) + sum(u.cost for u in part)))
    return units


def _check_lengths(prefix_lengths: np.ndarray, lengths: np.ndarray, max_tokens: int) -> None:
    """Raises DataError where a prefix is empty or, naming the longest, a sequence is over the budget."""
    if not prefix_lengths.all():
        raise DataError(
            f"sequence {int(np.argmin(prefix_lengths))} has an empty prefix; a prompt needs at least one token"
        )
    whole = prefix_lengths + lengths
    if not len(whole) or whole.max() <= max_tokens:
        return
    i = int(whole.argmax())
    prefix, completion = int(prefix_lengths[i]), int(lengths[i]) + 1
    raise DataError(
        f"sequence {i} has {prefix} + {completion} = {prefix + completion} tokens of prompt and completion, over the "
        f"token budget max_tokens_per_microbatch={max_tokens}; set trainer.max_tokens_per_microbatch="
        f"{prefix + completion} or more"
    )


def _groups(batch: TokenBatch, prefix_lengths: np.ndarray, shared: bool) -> tuple[list[list[int]], list[Family]]:
    """Sequences of one prefix together, but for those that are run as trees; or each on its own."""
    prefix_of = batch.prefix_of.numpy()
    if not shared:
        return [[i] for i in range(len(prefix_of))], []
    trees = families(_runs(batch, range(len(prefix_of))), prefix_of, prefix_lengths)
    grown = {i for tree in trees for i in tree.sequences.tolist()}
    groups: dict[int, list[int]] = {}
    for i, k in enumerate(prefix_of.tolist()):
        if i not in grown:
            groups.setdefault(k, []).append(i)
    return list(groups.values()), trees


def _runs(batch: TokenBatch, sequences: Iterable[int]) -> list[np.ndarray]:
    """Prefix and completion of each, but for the last token."""
    tokens, ends, lengths = batch.tokens.numpy(), batch.ends.tolist(), batch.lengths.tolist()
    return [np.concatenate([batch.prefix(i).numpy(), tokens[ends[i] - lengths[i] : ends[i] - 1]]) for i in sequences]


def _packed(batch: TokenBatch, units: Sequence[Unit], multiple: int, attention: str) -> MicroBatch:
    """One row: each unit a prefix followed by its completions, or a tree; a lone sequence is a single segment."""
    ids, lengths, parents, spans, sequences = [], [], [], [], []
    tokens, ends = batch.tokens.numpy(), batch.ends.tolist()
    starts = [0, *ends[:-1]]
    walks: dict[int, np.ndarray] = {}
    place = 0
    for unit in units:
        prefix = batch.prefix(unit.sequences[0]).numpy()
        completions = [tokens[starts[i] : ends[i] - 1] for i in unit.sequences]
        root, at = len(lengths), place + len(prefix)
        sequences += unit.sequences
        if unit.tree:
            tree = grow(_runs(batch, unit.sequences))
            walks |= {len(spans) + k: place + x for k, x in enumerate(tree.places)}
            spans += [(-1, len(x) - len(c), -1, len(c)) for x, c in zip(tree.places, completions)]
            lengths += tree.lengths
            parents += [p if p < 0 else root + p for p in tree.parents]
            ids.append(tree.ids)
            place += len(tree.ids)
            continue
        lengths.append(len(prefix))
        parents.append(-1)
        for c in completions:
            spans.append((place, len(prefix), at, len(c)))
            at += len(c)
            if len(c):
                lengths.append(len(c))
                parents.append(root)
        if len(completions) == 1:
            lengths[root:], parents[root:] = [len(prefix) + len(completions[0])], [-1]
        ids += [prefix, *completions]
        place = at
    layout = SegmentLayout(lengths, parents, attention=attention, multiple=multiple)
    places = None
    if walks:
        straight = lambda a, p, b, c: np.concatenate([np.arange(a, a + p), np.arange(b, b + c)])
        places = [walks[k] if k in walks else straight(*span) for k, span in enumerate(spans)]
    return _micro(batch, np.concatenate(ids)[None], sequences, spans, layout=layout, places=places)


def _padded(batch: TokenBatch, sequences: list[int]) -> MicroBatch:
    """Right-padded rows of prompt and completion."""
    tokens, ends = batch.tokens.numpy(), batch.ends.tolist()
    starts = [0, *ends[:-1]]
    parts = [(batch.prefix(i).numpy(), tokens[starts[i] : ends[i] - 1]) for i in sequences]
    width = max(len(p) + len(c) for p, c in parts)
    ids = np.zeros((len(parts), width), dtype=np.int64)
    mask, spans = np.zeros_like(ids), []
    for b, (p, c) in enumerate(parts):
        ids[b, : len(p) + len(c)] = np.concatenate([p, c])
        mask[b, : len(p) + len(c)] = 1
        spans.append((b * width, len(p), b * width + len(p), len(c)))
    return _micro(batch, ids, sequences, spans, mask=torch.from_numpy(mask))


def _micro(
    batch: TokenBatch,
    ids: np.ndarray,
    sequences: Sequence[int],
    spans: Sequence[tuple[int, int, int, int]],
    *,
    layout: SegmentLayout | None = None,
    mask: Tensor | None = None,
    places: Sequence[np.ndarray] | None = None,
) -> MicroBatch:
    """The targets of these sequences: the first is predicted by the prefix's last token, others by the one before."""
    table = np.array(spans, dtype=np.int64)  # [n 4]
    lengths = table[:, 3] + 1
    sequence = np.repeat(np.arange(len(table)), lengths)
    position = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    if places is None:
        rows = np.where(position == 0, table[sequence, 0] + table[sequence, 1], table[sequence, 2] + position) - 1
    else:
        rows = np.concatenate([walk[prefix - 1 :] for walk, prefix in zip(places, table[:, 1])])
    index = (batch.ends - batch.lengths).numpy()[np.asarray(sequences)][sequence] + position
    tensor = lambda x: torch.from_numpy(np.ascontiguousarray(x))
    return MicroBatch(
        input_ids=tensor(ids),
        layout=layout,
        attention_mask=mask,
        rows=tensor(rows),
        targets=tensor(batch.tokens.numpy()[index]),
        index=tensor(index),
        sequence=tensor(sequence),
        position=tensor(position),
        sequences=torch.tensor(sequences),
        spans=tensor(table),
        places=None if places is None else tensor(np.concatenate(places)),
    )


def _on(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    """The same on a device."""
    if torch.device(device).type == "cpu":
        return micro
    columns = {f.name: vars(micro)[f.name] for f in dataclasses.fields(micro)}
    moved = {name: x.to(device) for name, x in columns.items() if isinstance(x, Tensor)}
    return dataclasses.replace(micro, layout=micro.layout and micro.layout.to(device), **moved)
