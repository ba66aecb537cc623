"""The records that travel through a step, from a data set's row to the gradient.

Prompt -> Completion -> Group: read-only numpy, made by data/, rollout/ and rewards/.
TokenBatch: torch on the CPU, what learners see, identical on every rank.
LossInputs, TokenStats: what a loss receives and what a model returns.

The token axis: the completion tokens of a batch, laid end to end in batch order, are one axis of S tokens. Whatever
is per token is a 1-D column on it, never padded. Dim letters: K distinct prefixes, N sequences, J trajectories,
S tokens, s tokens of a micro-batch (whole sequences), P prompt, C completion, G group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from whet.errors import DataError

__all__ = [
    "Completion",
    "FinishReason",
    "Group",
    "LossInputs",
    "Message",
    "Prompt",
    "RolloutOutput",
    "TokenBatch",
    "TokenStats",
    "TrainExample",
]

Message = dict[str, Any]
"""One chat message: {"role": ..., "content": ...}."""
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt, encoded.

    Example: row 7 of a data set, "2+2=" with an answer column:
    Prompt(tokens=[50, 43, 50, 61], source="2+2=", columns={"answer": 4}, row=7).
    """

    tokens: np.ndarray
    """int32 [P]: the ids that the model is given."""
    source: str | list[Message]
    """The prompt as the data set had it: text, or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the reward functions."""
    row: int = 0
    """Place in the data set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One training sequence: what followed a prompt, stop token included.

    Example: the answer "4<end>" of policy version 3:
    Completion(tokens=[52, 256], logprobs=[-.1, -.01], versions=[3, 3], finish_reason="stop", generation=0).
    """

    tokens: np.ndarray
    """int32 [C]: all after the prefix, stop token and environment tokens included."""
    logprobs: np.ndarray
    """float32 [C]: the sampler's, under logprob_support; 0 where not sampled."""
    versions: np.ndarray
    """int32 [C]: policy version that made each token; -1 = not sampled, so the mask is versions >= 0."""
    finish_reason: FinishReason
    """Why generation ended."""
    generation: int
    """0..G-1; the forks of one episode repeat it: (prompt, generation) is the trajectory."""
    prefix: np.ndarray | None = None
    """int32 [P']: a fork's own prefix; None = the group's prompt."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Status, turns, tools: to the store, never to the loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The completions of one prompt, with what each reward function gave them.

    Example: Group(prompt=p, completions=(a, b), rewards={"exact": array([1., nan])}): the function had no say on b.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 [trajectories] per reward function, in the order of generation; NaN = not applicable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutOutput:
    """What `RLCluster.generate` returns, in Tunix's shape; one entry per prompt.

    Example: generate(["2+2="]) -> RolloutOutput(text=["4"], logits=None, tokens=[array([52, 256])],
    left_padded_prompt_tokens=array([[50, 43, 50, 61]]), logprobs=None).
    """

    text: list[str]
    """Completions, special tokens left out."""
    logits: list[np.ndarray] | None
    """float32 [C, V] each, on request."""
    tokens: list[np.ndarray]
    """int32 [C] each, stop token included, not padded."""
    left_padded_prompt_tokens: np.ndarray
    """int32 [B, P]."""
    logprobs: list[np.ndarray] | None
    """float32 [C] each, where RolloutConfig.return_logprobs asks for them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainExample:
    """A padded batch, the form of Tunix's verbs: [B, P] left-padded prompts and [B, C] right-padded completions.

    Example: prompt [5, 6] and completions [7, 2], [8]: prompt_ids [[5,6],[5,6]], prompt_mask all 1,
    completion_ids [[7,2],[8,0]], completion_mask [[1,1],[1,0]], advantages [1., -1.].
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    """[B] or [B, C]."""
    ref_per_token_logps: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """What learners see: each distinct prefix once, and every per-token column on the token axis. Frozen.

    Example: prompt [5, 6], completions [7, 2] and [8, 2]:
    prefixes [5, 6], prefix_ends [2], prefix_of [0, 0], tokens [7, 2, 8, 2], ends [2, 4], trajectory_of [0, 1],
    group_of [0, 0].
    """

    prefixes: Tensor
    """Long [sum P]: the K prefixes end to end."""
    prefix_ends: Tensor
    """Long [K]."""
    prefix_of: Tensor
    """Long [N]: the prefix of each sequence."""
    tokens: Tensor
    """Long [S]."""
    ends: Tensor
    """Long [N]: sequence i is tokens[ends[i-1]:ends[i]]."""
    trajectory_of: Tensor
    """Long [N]: forks of one episode share a trajectory."""
    group_of: Tensor
    """Long [J]: the group of each trajectory."""
    rewards: Tensor
    """Float64 [J]: the weighted sum of the reward functions; NaN = no function applied."""
    mask: Tensor
    """Bool [S]: True = trained."""
    sampler_logprobs: Tensor
    """Float [S]: what the engine reported."""
    versions: Tensor
    """Int [S]: policy version of each token, -1 = not sampled."""
    old_logprobs: Tensor | None = None
    """Float [S]: the policy at rollout, in the trainer's numerics."""
    ref_logprobs: Tensor | None = None
    """Float [S]."""
    values: Tensor | None = None
    """Float [S]: of the state before each token, at rollout."""
    returns: Tensor | None = None
    """Float [S]."""
    advantages: Tensor | None = None
    """Float [S]."""
    weights: Tensor | None = None
    """Float [S]: loss_agg_mode as token weights, made once per optimizer step."""

    TOKEN_COLUMNS = (
        "tokens",
        "mask",
        "sampler_logprobs",
        "versions",
        "old_logprobs",
        "ref_logprobs",
        "values",
        "returns",
        "advantages",
        "weights",
    )

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """S."""
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Long [N]: completion tokens of each sequence."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    @property
    def starts(self) -> Tensor:
        """Long [N]: the place of each sequence's first token."""
        return self.ends - self.lengths

    @property
    def num_groups(self) -> int:
        """How many groups the trajectories belong to."""
        return int(self.group_of.max()) + 1 if len(self.group_of) else 0

    @property
    def prefix_lengths(self) -> Tensor:
        """Long [K]: tokens of each distinct prefix."""
        return torch.diff(self.prefix_ends, prepend=self.prefix_ends.new_zeros(1))

    @property
    def sequence(self) -> Tensor:
        """Long [S]: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def trajectory(self) -> Tensor:
        """Long [S]: the trajectory of each token, the unit of the loss weights."""
        return self.trajectory_of.index_select(0, self.sequence)

    def prefix(self, sequence: int) -> Tensor:
        """Long [P]: the prefix tokens of one sequence."""
        k = int(self.prefix_of[sequence])
        return self.prefixes[int(self.prefix_ends[k - 1]) if k else 0 : int(self.prefix_ends[k])]

    def replace(self, **columns: Tensor | None) -> TokenBatch:
        """A copy with some columns set."""
        return dataclasses.replace(self, **columns)  # pyright: ignore[reportArgumentType]

    def select(self, sequences: Tensor) -> TokenBatch:
        """The batch of some sequences, in the order given; every column travels unchanged.

        Args: sequences: Long [M], indices into the N sequences.
        Returns: a TokenBatch of M sequences. Prefixes, trajectories and groups that nothing refers to are left out;
            those kept keep their order.
        """
        if torch.equal(sequences, torch.arange(self.num_sequences)):
            return self
        lengths = self.lengths.index_select(0, sequences)
        places = _spans(self.starts.index_select(0, sequences), lengths)
        prefixes, prefix_of = torch.unique(self.prefix_of.index_select(0, sequences), return_inverse=True)
        prefix_lengths = self.prefix_lengths.index_select(0, prefixes)
        prefix_starts = (self.prefix_ends - self.prefix_lengths).index_select(0, prefixes)
        trajectories, trajectory_of = torch.unique(self.trajectory_of.index_select(0, sequences), return_inverse=True)
        _, group_of = torch.unique(self.group_of.index_select(0, trajectories), return_inverse=True)
        columns = {}
        for name in self.TOKEN_COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else column.index_select(0, places)
        return TokenBatch(
            prefixes=self.prefixes.index_select(0, _spans(prefix_starts, prefix_lengths)),
            prefix_ends=prefix_lengths.cumsum(0),
            prefix_of=prefix_of,
            ends=lengths.cumsum(0),
            trajectory_of=trajectory_of,
            group_of=group_of,
            rewards=self.rewards.index_select(0, trajectories),
            **columns,
        )

    @classmethod
    def cat(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Batches end to end. A column that only some of them have raises DataError.

        Args: batches: at least one.
        Returns: their sequences in order; prefixes, trajectories and groups stay apart even where they are equal.
        """
        if len(batches) == 1:
            return batches[0]
        columns: dict[str, Tensor | None] = {}
        for name in cls.TOKEN_COLUMNS:
            parts = [getattr(b, name) for b in batches]
            if len({p is None for p in parts}) > 1:
                raise DataError(f"column {name} is set in some of the batches and not in others; set it in all or none")
            columns[name] = None if parts[0] is None else torch.cat(parts)

        def shifted(name: str, sizes: list[int]) -> Tensor:
            starts = np.cumsum([0, *sizes[:-1]])
            return torch.cat([getattr(b, name) + int(start) for b, start in zip(batches, starts, strict=True)])

        return cls(
            prefixes=torch.cat([b.prefixes for b in batches]),
            prefix_ends=shifted("prefix_ends", [len(b.prefixes) for b in batches]),
            prefix_of=shifted("prefix_of", [len(b.prefix_ends) for b in batches]),
            ends=shifted("ends", [b.num_tokens for b in batches]),
            trajectory_of=shifted("trajectory_of", [len(b.group_of) for b in batches]),
            group_of=shifted("group_of", [int(b.group_of.max()) + 1 for b in batches]),
            rewards=torch.cat([b.rewards for b in batches]),
            **columns,  # pyright: ignore[reportArgumentType]
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group], rewards: Sequence[float] | np.ndarray | Tensor) -> TokenBatch:
        """Lays groups end to end.

        Args: groups: rolled out. rewards: one number per trajectory, in the order of groups and generations.
        Returns: N = all completions, in order; J = distinct (group, generation).
        Raises: DataError: no completions, an empty completion, or as many rewards as there are not trajectories.
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
        total = torch.as_tensor(np.asarray(rewards, dtype=np.float64))
        if len(total) != len(group_of):
            raise DataError(f"{len(total)} rewards for {len(group_of)} trajectories; give one for each")
        versions = _joined([c.versions for c in completions], torch.int32)
        return cls(
            prefixes=_joined(prefixes, torch.long),
            prefix_ends=torch.tensor([len(p) for p in prefixes]).cumsum(0),
            prefix_of=torch.tensor(prefix_of),
            tokens=_joined([c.tokens for c in completions], torch.long),
            ends=torch.tensor([len(c.tokens) for c in completions]).cumsum(0),
            trajectory_of=torch.tensor(trajectory_of),
            group_of=torch.tensor(group_of),
            rewards=total,
            mask=versions >= 0,
            sampler_logprobs=_joined([c.logprobs for c in completions], torch.float32),
            versions=versions,
        )

    @classmethod
    def from_padded(cls, example: TrainExample, *, version: int = 0) -> TokenBatch:
        """A TokenBatch of Tunix's padded form, for update_actor and update_critic.

        Args: example: [B, P] and [B, C] tensors. A row whose prompt an earlier row has shares its prefix and group.
            version: stamped on every token.
        Returns: N = J = B; the tokens of a row are those up to its last masked-in one; mask, advantages and logprobs
            follow. Rewards are NaN: a TrainExample has none.
        Raises: DataError: a row with nothing to train, or a prompt of no tokens.
        """
        keep = example.completion_mask.bool().cpu()
        lengths = torch.where(keep, torch.arange(1, keep.shape[1] + 1), 0).amax(1)
        if (lengths == 0).any():
            row = int((lengths == 0).nonzero()[0])
            raise DataError(f"row {row}: completion_mask is all 0; leave rows with nothing to train out")
        prompts = [
            tuple(i[m.bool()].tolist())
            for i, m in zip(example.prompt_ids.cpu(), example.prompt_mask.cpu(), strict=True)
        ]
        if () in prompts:
            raise DataError(f"row {prompts.index(())}: prompt_mask is all 0; a prompt needs at least one token")
        places = {p: k for k, p in enumerate(dict.fromkeys(prompts))}
        inside = torch.arange(keep.shape[1]) < lengths[:, None]  # [B C]

        def column(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x.detach().cpu()
            return (x[:, None].expand_as(keep) if x.dim() == 1 else x)[inside].clone()

        mask = keep[inside]
        old = column(example.old_per_token_logps)
        return cls(
            prefixes=torch.tensor([t for p in places for t in p]),
            prefix_ends=torch.tensor([len(p) for p in places]).cumsum(0),
            prefix_of=torch.tensor([places[p] for p in prompts]),
            tokens=example.completion_ids.cpu()[inside].long(),
            ends=lengths.cumsum(0),
            trajectory_of=torch.arange(len(prompts)),
            group_of=torch.tensor([places[p] for p in prompts]),
            rewards=torch.full((len(prompts),), torch.nan, dtype=torch.float64),
            mask=mask,
            sampler_logprobs=torch.zeros(len(mask)) if old is None else old,
            versions=torch.where(mask, version, -1).to(torch.int32),
            old_logprobs=old,
            ref_logprobs=column(example.ref_per_token_logps),
            advantages=column(example.advantages),
            values=column(example.old_values),
            returns=column(example.returns),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """What a loss receives: whole sequences of one micro-batch, on the model's device, in fp32 or better.

    Example: two sequences of 2 and 1 tokens: sequence = [0, 0, 1], every other column of length 3.
    """

    sequence: Tensor
    """Long [s]: which sequence of this micro-batch each token belongs to, 0, 1, ... in order."""
    mask: Tensor
    """Bool [s]: True = trained."""
    logprobs: Tensor
    """[s], with gradient: the current policy's."""
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    """[s]; None where one update follows one rollout: the loss takes logprobs.detach(), a ratio of exactly 1."""
    ref_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    versions: Tensor | None = None
    entropy: Tensor | None = None
    """[s], with gradient where the loss asked for it."""
    values: Tensor | None = None
    """[s]: at rollout."""
    returns: Tensor | None = None
    new_values: Tensor | None = None
    """[s], with gradient: the critic's, now."""

    def need(self, name: str) -> Tensor:
        """A column that this loss can't do without.

        Raises: DataError: the column is missing, with its name.
        """
        column = getattr(self, name)
        if column is None:
            raise DataError(f"the loss needs {name}, which this batch does not have; compute it before the update")
        return column


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStats:
    """What a model says of each token: [s] of a micro-batch, or [S] of a whole batch."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


def _joined(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Numpy arrays end to end, as a tensor."""
    return torch.from_numpy(np.concatenate([np.asarray(a) for a in arrays])).to(dtype)


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """The places starts[i] .. starts[i] + lengths[i] - 1, end to end.

    >>> _spans(torch.tensor([5, 0]), torch.tensor([2, 1]))
    tensor([5, 6, 0])
    """
    offsets = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - offsets, lengths)
