"""MCAdvantage: the transform of a replay buffer that passes on complete groups of trajectories."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack

from whet.errors import ConfigError, lookup_error
from whet.torchrl.errors import GroupNameError, MissingKeyError, UnfinishedError
from whet.torchrl.groups import COUNTERS, GroupGatherer, Trajectory
from whet.torchrl.versions import check_compat

__all__ = ["MCAdvantage"]

_OPTIONS = tuple(n for n in GroupGatherer.__init__.__annotations__ if n not in ("return", "grpo_size"))


class MCAdvantage:
    """Groups trajectories by prompt, and gives a group on with its advantages once it is full.

    `inv(tensordict)` takes finished trajectories: one ([T], or several end to end, each ended by done), or several
    ([..., T]), and returns the groups that they complete, with `advantage_key` set, or None. As the transform of a
    TorchRL ReplayBuffer nothing is written until a group is full: import torchrl before you make it, which is when it
    becomes a Transform.

    Args:
        grpo_size: trajectories of a group.
        prompt_key: a string or a tensor at each step, by which trajectories are grouped; None = "query", "text" with
            compat="0.9".
        rewards_key, advantage_key, done_key: a number at each step, read and written, and whether the trajectory ends.
        verbose: accepted; get_stats() says what is held and what became of it.
        compat: the TorchRL whose defaults are meant: "0.14" or "0.9", as of GRPOLoss.
        options: of GroupGatherer: trajectory_return (None as in TorchRL, which pools the steps; "sum" compares
            trajectories, however many steps they have), keep_return_bounds, candidate_group_size,
            candidate_selection_min_size, candidate_selector, max_queued_groups, group_timeout, clock.
    Raises: ConfigError: an unknown option or a wrong value. When called: MissingKeyError: no prompt, reward or done.
        UnfinishedError: a trajectory does not end with done. GroupNameError: a prompt that is neither string nor
        tensor. DataError: a reward that is not finite.
    Source: agrees with TorchRL's MCAdvantage; see GroupGatherer.

    >>> from tensordict import TensorDict
    >>> def trajectory(reward):
    ...     return TensorDict({"query": torch.tensor([7]), "next": {"reward": torch.tensor([[reward]]),
    ...                                                            "done": torch.tensor([[True]])}}, [1])
    >>> groups = MCAdvantage(2)
    >>> groups.inv(trajectory(0.)), groups.inv(trajectory(1.))["advantage"].flatten()
    (None, tensor([-0.7071,  0.7071]))
    >>> groups.get_stats()["written_groups"], groups.queued_groups
    (1, 0)
    """

    requires_shared_write_state = True

    def __new__(cls, *args: Any, **options: Any) -> MCAdvantage:
        """A Transform of TorchRL's where that has been imported; without it a plain object."""
        return object.__new__(_as_transform(cls))

    def __init__(
        self,
        grpo_size: int,
        prompt_key: Any = None,
        rewards_key: Any = ("next", "reward"),
        advantage_key: Any = "advantage",
        done_key: Any = ("next", "done"),
        verbose: bool = False,
        *,
        compat: str = "0.14",
        **options: Any,
    ) -> None:
        super().__init__()
        check_compat(compat)
        if wrong := [name for name in options if name not in _OPTIONS]:
            raise lookup_error("option of MCAdvantage", wrong[0], _OPTIONS)
        options = {"trajectory_return": None, **options}
        self.prompt_key = prompt_key or ("text" if compat == "0.9" else "query")
        self.rewards_key, self.advantage_key, self.done_key = rewards_key, advantage_key, done_key
        self.in_keys, self.out_keys = [self.prompt_key, rewards_key, done_key], [advantage_key]
        self.verbose = verbose
        self.gatherer = GroupGatherer(grpo_size, **options)

    def __getattr__(self, name: str) -> Any:
        """A counter, or an option as it was given."""
        gatherer = self.__dict__.get("gatherer")
        if gatherer is not None and name in COUNTERS:
            return gatherer.stats[name]
        if gatherer is not None and name in ("grpo_size", "queues", *_OPTIONS):
            return getattr(gatherer, name)
        above = getattr(super(), "__getattr__", None)
        if above is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return above(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by state: the class depends on the imports of the process that unpickles."""
        return _empty, (), self.__getstate__()

    # ---- what a replay buffer calls ------------------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the data of the buffer unchanged."""
        return tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """The groups that these trajectories complete, end to end: [steps]; None where there are none."""
        return self._inv_call(tensordict.copy())

    def share_memory_(self) -> MCAdvantage:
        """Raises ConfigError: the groups are held by one process."""
        raise ConfigError(
            "whet's MCAdvantage holds its groups in one process, and a replay buffer that is shared has several "
            "writers; let one process call extend(), or give a RayReplayBuffer transform_factory=MCAdvantage"
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        found = [g for t in self._trajectories(tensordict) if (g := self.gatherer.add(t)) is not None]
        written = []
        for trajectory, advantages in (pair for group in found for pair in group):
            trajectory.item.set(self.advantage_key, advantages)
            written.append(trajectory.item)
        return _end_to_end(written) if written else None

    def _trajectories(self, tensordict: TensorDictBase) -> list[Trajectory]:
        """The trajectories of a batch [T] or [..., T]."""
        if tensordict.ndim > 1:
            return [t for row in tensordict.unbind(0) for t in self._trajectories(row)]
        if tensordict.ndim == 0:
            tensordict = tensordict.unsqueeze(0)
        done = self._need(tensordict, self.done_key).reshape(len(tensordict), -1).any(-1)
        if not len(done) or not done[-1]:
            raise UnfinishedError(
                f"a trajectory of {len(done)} steps does not end with {self.done_key!r}; extend the buffer with "
                "finished trajectories"
            )
        ends = (done.nonzero().flatten() + 1).tolist()
        return [self._trajectory(tensordict[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def _trajectory(self, steps: TensorDictBase) -> Trajectory:
        steps = steps.clone()  # it may wait long, and collectors write their next batch over the last
        return Trajectory(self._group(steps[0]), self._need(steps, self.rewards_key), steps)

    def _group(self, step: TensorDictBase) -> Hashable:
        """The group name of a trajectory. Raises GroupNameError: neither a string nor a tensor."""
        group = self._need(step, self.prompt_key)
        group = getattr(group, "data", group) if not isinstance(group, torch.Tensor | str) else group
        if isinstance(group, torch.Tensor):
            return group.item() if group.numel() == 1 else tuple(group.flatten().tolist())
        if not isinstance(group, str):
            raise GroupNameError(
                f"{self.prompt_key!r} is a {type(group).__name__}; group by a string or a tensor: set prompt_key"
            )
        return group

    def _need(self, tensordict: TensorDictBase, key: Any) -> Any:
        found = tensordict.get(key, None)
        if found is None:
            keys = sorted(map(str, tensordict.keys(True, True)))
            raise MissingKeyError(f"MCAdvantage reads {key!r}, which is not in the data; there are {', '.join(keys)}")
        return found

    # ---- what is held, and what became of it ---------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether other processes hold the same groups: never."""
        return False

    @property
    def queued_groups(self) -> int:
        """Incomplete groups that are held."""
        return len(self.gatherer.queues)

    @property
    def queued_trajectories(self) -> int:
        """Trajectories of incomplete groups."""
        return sum(len(q) for q in self.gatherer.queues.values())

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """The most that one incomplete group has."""
        return max((len(q) for q in self.gatherer.queues.values()), default=0)

    def get_stats(self) -> dict[str, float]:
        """All counters, and what is held."""
        held = ("queued_groups", "queued_trajectories", "max_queued_trajectories_per_group")
        return {**self.gatherer.stats, **{name: getattr(self, name) for name in held}}

    def reset_stats(self) -> None:
        """Sets the counters to 0."""
        self.gatherer.reset()

    def clear_queues(self) -> None:
        """Forgets the incomplete groups."""
        self.gatherer.queues.clear()


def _as_transform(cls: type) -> type:
    """The class with TorchRL's Transform as a base, where torchrl has been imported."""
    peer = sys.modules.get("torchrl.envs.transforms")
    base = getattr(peer, "Transform", None)
    return cls if base is None or issubclass(cls, base) else _joined(cls, base)


@functools.cache
def _joined(cls: type, base: type) -> type:
    """A class that is both, under the name of the first."""
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _empty() -> MCAdvantage:
    """An MCAdvantage that is about to be given its state."""
    return MCAdvantage.__new__(MCAdvantage)


def _end_to_end(trajectories: list[TensorDictBase]) -> TensorDictBase:
    """One TensorDict [steps]; a lazy one where the lengths of its tensors differ from step to step."""
    if not any(isinstance(t, LazyStackedTensorDict) for t in trajectories):
        try:
            return torch.cat(trajectories, 0)  # pyright: ignore
        except RuntimeError:  # tensors of one trajectory are longer than those of another
            pass
    return lazy_stack([step for t in trajectories for step in t.unbind(0)], 0)
