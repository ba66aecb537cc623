"""TokenBatch: the batch that learners train on, identical on every rank. Dim legend as in whet.types."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from whet.errors import DataError, nearest
from whet.types.columns import Columns, RequiredColumn
from whet.types.loss import LossInputs
from whet.types.records import Example, Group

__all__ = ["TokenBatch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch(Columns):
    """The batch that learners train on: each distinct prefix once, and one token axis with all columns per token.

    It is frozen: its methods return new batches.

    Example: prompt [5, 6], completions [7, 2] and [8, 2]:
    prefixes [5, 6], prefix_ends [2], prefix_of [0, 0], tokens [7, 2, 8, 2], ends [2, 4], trajectory_of [0, 1],
    group_of [0, 0], unit_of [0, 1]. If the two are a pair, for which a loss returns one number, unit_of is [0, 0].
    """

    prefixes: Tensor
    """Long [sum P]: the K prefixes end to end."""
    prefix_ends: Tensor
    """Long [K]: the end of each prefix in `prefixes`."""
    prefix_of: Tensor
    """Long [N]: the prefix of each sequence."""
    ends: Tensor
    """Long [N]: sequence i is tokens[ends[i-1]:ends[i]]."""
    trajectory_of: Tensor
    """Long [N]: forks of one episode share a trajectory."""
    group_of: Tensor
    """Long [J]: the group of each trajectory."""
    token_columns: Mapping[str, Tensor]
    """[S ...] each: the columns per token, by name. whet.types.columns declares the well-known ones."""
    sequence_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[N ...] each: the columns per sequence, by name."""
    unit_of: Tensor = None  # pyright: ignore[reportAssignmentType]
    """Long [N], from 0: the unit of each sequence. Sequences of a unit stay in one micro-batch. By default each
    sequence is a unit of its own."""
    unit_weights: Tensor | None = None
    """Float [U]: the weights of a loss that returns one number per unit. A step has these or `weights`."""

    tokens = RequiredColumn()
    """Long [S]: the completion tokens."""
    mask = RequiredColumn()
    """Bool [S]: True = trained."""
    sampler_logprobs = RequiredColumn()
    """Float [S]: the log-probabilities that the engine reported."""
    versions = RequiredColumn()
    """Int [S]: the policy version that sampled each token; -1 = the token was not sampled."""

    def __post_init__(self) -> None:
        if self.unit_of is None:
            object.__setattr__(self, "unit_of", torch.arange(len(self.ends)))
        columns = {name: c for name, c in self.token_columns.items() if c is not None}
        object.__setattr__(self, "token_columns", columns)
        object.__setattr__(self, "sequence_columns", dict(self.sequence_columns))
        for name in ("tokens", "mask", "sampler_logprobs", "versions"):
            if name not in columns:
                raise DataError(f"the batch has no {name}; every batch has tokens, mask, sampler_logprobs and versions")
        size, number = len(columns["tokens"]), len(self.ends)
        for name, column in columns.items():
            _check(name, column, size, f"tokens, {size}")
        for name, column in {**self.sequence_columns, "unit_of": self.unit_of}.items():
            _check(name, column, number, f"sequences, {number}")
        if number and self.unit_of.min() < 0:
            raise DataError(f"unit_of has {int(self.unit_of.min())}; units are counted from 0")
        if self.unit_weights is not None:
            _check("unit_weights", self.unit_weights, self.num_units, f"units, {self.num_units}")

    @property
    def num_sequences(self) -> int:
        """The number of sequences, N."""
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """The number of completion tokens, S."""
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Long [N]: the number of completion tokens of each sequence."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    @property
    def starts(self) -> Tensor:
        """Long [N]: the index of each sequence's first token."""
        return self.ends - self.lengths

    @property
    def num_groups(self) -> int:
        """The number of groups that the trajectories belong to."""
        return int(self.group_of.max()) + 1 if len(self.group_of) else 0

    @property
    def prefix_lengths(self) -> Tensor:
        """Long [K]: the number of tokens of each distinct prefix."""
        return torch.diff(self.prefix_ends, prepend=self.prefix_ends.new_zeros(1))

    @property
    def sequence(self) -> Tensor:
        """Long [S]: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def trajectory(self) -> Tensor:
        """Long [S]: the trajectory of each token, the unit of the loss weights."""
        return self.trajectory_of.index_select(0, self.sequence)

    @property
    def num_units(self) -> int:
        """The number of units, U."""
        return int(self.unit_of.max()) + 1 if len(self.unit_of) else 0

    @property
    def unit(self) -> Tensor:
        """Long [S]: the unit of each token."""
        return self.unit_of.index_select(0, self.sequence)

    @functools.cached_property
    def trajectory_advantages(self) -> Tensor:
        """Float64 [J]: the advantage of each trajectory, the mean over its trained tokens; NaN where it has none.

        Raises: DataError: the batch has no advantages yet.
        """
        trajectory = self.trajectory[self.mask]
        sums = torch.zeros(len(self.group_of), dtype=torch.float64)
        sums.index_add_(0, trajectory, self.need("advantages")[self.mask].double())
        return sums / trajectory.bincount(minlength=len(sums))

    def prefix(self, sequence: int) -> Tensor:
        """Long [P]: the prefix tokens of one sequence."""
        k = int(self.prefix_of[sequence])
        return self.prefixes[int(self.prefix_ends[k - 1]) if k else 0 : int(self.prefix_ends[k])]

    def replace(self, **changes: Tensor | Mapping[str, Tensor] | None) -> TokenBatch:
        """Returns a copy with some fields or columns set; None removes a column.

        Args: changes: fields, well-known columns, and columns that the batch has.
        Raises: DataError: another name (a column of your own is set by with_token_columns or with_sequence_columns), or
            a column of another length than the batch.
        """
        fields = {n: c for n, c in changes.items() if n in self._fields()}
        copy = {"token_columns": dict(self.token_columns), "sequence_columns": dict(self.sequence_columns), **fields}
        for name in changes.keys() - fields.keys():
            if name not in (known := self._names()):
                raise DataError(
                    f"unknown column {name!r}{nearest(name, [*known, *self._fields()]) or '.'} A column of your own is "
                    f"set by batch.with_token_columns({name}=...) or batch.with_sequence_columns({name}=...)"
                )
            columns = copy["sequence_columns" if name in self.sequence_columns else "token_columns"]
            columns.pop(name, None)
            if changes[name] is not None:
                columns[name] = changes[name]
        return dataclasses.replace(self, **copy)  # pyright: ignore[reportArgumentType]

    def with_token_columns(self, **columns: Tensor) -> TokenBatch:
        """Returns a copy with columns per token under names of your own. x.need(name) reads them in a loss.

        Args: columns: [S ...] each, on the CPU, in the order of `tokens`.
        Raises: DataError: another length, or a name that means something else.
        """
        return self._with("token_columns", columns)

    def with_sequence_columns(self, **columns: Tensor) -> TokenBatch:
        """Returns a copy with columns per sequence under names of your own. x.need(name) reads them in a loss, [n ...].

        Args: columns: [N ...] each, on the CPU, in the order of `ends`.
        Raises: DataError: another length, or a name that means something else.
        """
        return self._with("sequence_columns", columns)

    def _with(self, kind: str, columns: Mapping[str, Tensor]) -> TokenBatch:
        known = self.well_known()
        loss_fields = {f.name for f in dataclasses.fields(LossInputs)}
        reserved = {*dir(type(self)), *self._fields(), *dir(LossInputs), *loss_fields}
        reserved = reserved - set(known) if kind == "token_columns" else reserved
        for name in columns:
            other = self.sequence_columns if kind == "token_columns" else self.token_columns
            if name in reserved or name in other or not name.isidentifier():
                raise DataError(f"a column can't be named {name!r}: it means something else here; choose another name")
        return dataclasses.replace(self, **{kind: {**getattr(self, kind), **columns}})

    @classmethod
    def _fields(cls) -> list[str]:
        return [f.name for f in dataclasses.fields(cls)]

    def select(self, sequences: Tensor) -> TokenBatch:
        """Returns the batch of some sequences, in the given order, with all their columns unchanged.

        Args: sequences: Long [M], indices into the N sequences.
        Returns: a TokenBatch of M sequences. It leaves out prefixes, trajectories, groups and units that no sequence
            refers to; the others keep their order.
        """
        if torch.equal(sequences, torch.arange(self.num_sequences)):
            return self
        lengths = self.lengths.index_select(0, sequences)
        indices = _spans(self.starts.index_select(0, sequences), lengths)
        prefixes, prefix_of = torch.unique(self.prefix_of.index_select(0, sequences), return_inverse=True)
        prefix_lengths = self.prefix_lengths.index_select(0, prefixes)
        prefix_starts = (self.prefix_ends - self.prefix_lengths).index_select(0, prefixes)
        trajectories, trajectory_of = torch.unique(self.trajectory_of.index_select(0, sequences), return_inverse=True)
        _, group_of = torch.unique(self.group_of.index_select(0, trajectories), return_inverse=True)
        units, unit_of = torch.unique(self.unit_of.index_select(0, sequences), return_inverse=True)
        return TokenBatch(
            prefixes=self.prefixes.index_select(0, _spans(prefix_starts, prefix_lengths)),
            prefix_ends=prefix_lengths.cumsum(0),
            prefix_of=prefix_of,
            ends=lengths.cumsum(0),
            trajectory_of=trajectory_of,
            group_of=group_of,
            token_columns={name: c.index_select(0, indices) for name, c in self.token_columns.items()},
            sequence_columns={name: c.index_select(0, sequences) for name, c in self.sequence_columns.items()},
            unit_of=unit_of,
            unit_weights=None if self.unit_weights is None else self.unit_weights.index_select(0, units),
        )

    @classmethod
    def cat(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Joins batches end to end.

        Args: batches: at least one.
        Returns: their sequences in order. Prefixes, trajectories, groups and units of different batches stay apart,
            even equal ones.
        Raises: DataError: only some of the batches have a column.
        """
        if len(batches) == 1:
            return batches[0]

        def shifted(name: str, sizes: list[int]) -> Tensor:
            starts = np.cumsum([0, *sizes[:-1]])
            return torch.cat([getattr(b, name) + int(start) for b, start in zip(batches, starts, strict=True)])

        weights = [{} if b.unit_weights is None else {"unit_weights": b.unit_weights} for b in batches]
        return cls(
            prefixes=torch.cat([b.prefixes for b in batches]),
            prefix_ends=shifted("prefix_ends", [len(b.prefixes) for b in batches]),
            prefix_of=shifted("prefix_of", [len(b.prefix_ends) for b in batches]),
            ends=shifted("ends", [b.num_tokens for b in batches]),
            trajectory_of=shifted("trajectory_of", [len(b.group_of) for b in batches]),
            group_of=shifted("group_of", [b.num_groups for b in batches]),
            token_columns=_cat_columns([b.token_columns for b in batches]),
            sequence_columns=_cat_columns([b.sequence_columns for b in batches]),
            unit_of=shifted("unit_of", [b.num_units for b in batches]),
            unit_weights=_cat_columns(weights).get("unit_weights"),
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> TokenBatch:
        """Makes a batch of the completions of groups.

        Args: groups: completed prompts.
        Returns: N = all completions, in order; J = distinct (group, generation), in order.
        Raises: DataError: no completions, or an empty completion.
        """
        prefixes: list[np.ndarray] = []
        prefix_of, trajectory_of, group_of, completions = [], [], [], []
        for g, group in enumerate(groups):
            shared: int | None = None
            trajectories: dict[int, int] = {}
            for c in group.completions:
                if c.prefix is not None or shared is None:
                    prefixes.append(group.prompt.tokens if c.prefix is None else c.prefix)
                    place = len(prefixes) - 1
                    shared = place if c.prefix is None else shared
                else:
                    place = shared
                prefix_of.append(place)
                if c.generation not in trajectories:
                    trajectories[c.generation] = len(group_of)
                    group_of.append(g)
                trajectory_of.append(trajectories[c.generation])
                completions.append(c)
        if not completions:
            raise DataError("a batch needs at least one completion, got none")
        if empty := [i for i, c in enumerate(completions) if len(c.tokens) == 0]:
            raise DataError(f"completion {empty[0]} has no tokens; every completion has at least its stop token")
        versions = _joined([c.versions for c in completions], torch.int32)
        rewards = {}
        if any(c.token_rewards is not None for c in completions):
            each = [np.zeros(len(c.tokens)) if c.token_rewards is None else c.token_rewards for c in completions]
            rewards["episode_rewards"] = _joined(each, torch.float64)
        return cls(
            prefixes=_joined(prefixes, torch.long),
            prefix_ends=torch.tensor([len(p) for p in prefixes]).cumsum(0),
            prefix_of=torch.tensor(prefix_of),
            ends=torch.tensor([len(c.tokens) for c in completions]).cumsum(0),
            trajectory_of=torch.tensor(trajectory_of),
            group_of=torch.tensor(group_of),
            token_columns={
                "tokens": _joined([c.tokens for c in completions], torch.long),
                "mask": versions >= 0,
                "sampler_logprobs": _joined([c.logprobs for c in completions], torch.float32),
                "versions": versions,
                **rewards,
            },
        )

    @classmethod
    def from_examples(cls, examples: Sequence[Example], *, paired: bool = False, version: int = 0) -> TokenBatch:
        """Makes a batch of the sequences of supervised training.

        Args:
            examples: encoded rows.
            paired: True: the sequences of a row are one unit, and each is a trajectory of its own. False: each sequence
                is a unit of its own, and the sequences of a row are one trajectory.
            version: the policy version of the trained tokens.
        Returns: a batch with a group for each example. sampler_logprobs are 0, since nothing was sampled.
        Raises: DataError: no examples, a sequence without tokens or without a prefix, or a column that only some have.

        >>> from whet.types import TrainSequence
        >>> chosen = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 2]), mask=np.array([True, True]))
        >>> other = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([8]), mask=np.array([True]))
        >>> batch = TokenBatch.from_examples([Example(sequences=(chosen, other))], paired=True)
        >>> batch.prefixes.tolist(), batch.prefix_of.tolist(), batch.unit_of.tolist()
        ([5, 6], [0, 0], [0, 0])
        """
        sequences = [s for e in examples for s in e.sequences]
        if not sequences:
            raise DataError("a batch needs at least one example, got none")
        if empty := [i for i, s in enumerate(sequences) if len(s.tokens) == 0 or len(s.prefix) == 0]:
            raise DataError(
                f"sequence {empty[0]} has no tokens or no prefix; every sequence needs at least one token of each"
            )
        places = {(e, s.prefix.tobytes()): s.prefix for e, x in enumerate(examples) for s in x.sequences}
        keys = {key: k for k, key in enumerate(places)}
        row_of = torch.tensor([e for e, x in enumerate(examples) for _ in x.sequences])
        mask = _joined([s.mask for s in sequences], torch.bool)
        each = [{n: torch.tensor(c, dtype=torch.float32) for n, c in x.columns.items()} for x in examples]
        return cls(
            prefixes=_joined(list(places.values()), torch.long),
            prefix_ends=torch.tensor([len(p) for p in places.values()]).cumsum(0),
            prefix_of=torch.tensor([keys[e, s.prefix.tobytes()] for e, x in enumerate(examples) for s in x.sequences]),
            ends=torch.tensor([len(s.tokens) for s in sequences]).cumsum(0),
            trajectory_of=torch.arange(len(sequences)) if paired else row_of,
            group_of=row_of if paired else torch.arange(len(examples)),
            token_columns={
                "tokens": _joined([s.tokens for s in sequences], torch.long),
                "mask": mask,
                "sampler_logprobs": torch.zeros(len(mask)),
                "versions": torch.where(mask, version, -1).to(torch.int32),
            },
            sequence_columns=_cat_columns(each),
            unit_of=row_of if paired else torch.arange(len(sequences)),
        )


def _check(name: str, column: object, size: int, what: str) -> None:
    """Raises DataError unless a column is a tensor on the CPU with `size` rows."""
    if not isinstance(column, Tensor):
        raise DataError(f"column {name} is a {type(column).__name__}; give a tensor")
    if column.dim() == 0 or len(column) != size:
        raise DataError(f"column {name} has shape {list(column.shape)}; its first dim must be that of the {what}")
    if column.device.type != "cpu":
        raise DataError(f"column {name} is on {column.device}; a batch is on the CPU: give {name}.cpu()")


def _cat_columns(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins columns end to end. Raises DataError for a column that only some of the parts have."""
    for name in {name for columns in parts for name in columns}:
        if not all(name in columns for columns in parts):
            raise DataError(f"column {name} is set in some of the batches and not in others; set it in all or none")
    return {name: torch.cat([columns[name] for columns in parts]) for name in parts[0]}


def _joined(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Joins numpy arrays end to end and returns a tensor."""
    return torch.from_numpy(np.concatenate([np.asarray(a) for a in arrays])).to(dtype)


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns the indices starts[i] .. starts[i] + lengths[i] - 1 of every i, end to end.

    >>> _spans(torch.tensor([5, 0]), torch.tensor([2, 1]))
    tensor([5, 6, 0])
    """
    offsets = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - offsets, lengths)
