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
    """Groups trajectories by prompt, and passes a group on with its advantages once it is full.

    `inv(tensordict)` takes finished trajectories: [T] is one, or several in a row that each end with done; [..., T] are
    several. It returns the groups that they complete, with `advantage_key` set, or None. As the transform of a TorchRL
    ReplayBuffer it writes nothing until a group is full. Import torchrl first: only then is a new MCAdvantage a
    Transform.

    Args:
        grpo_size: trajectories of a group.
        prompt_key: the key of a string or a tensor at each step that names the group; None = "query", or "text" with
            compat="0.9".
        rewards_key, done_key: the keys to read: a number at each step, and whether the trajectory ends there.
        advantage_key: the key to write: a number at each step.
        verbose: accepted without effect; get_stats() has the counters.
        compat: the version of TorchRL whose defaults to use, "0.14" or "0.9", as in GRPOLoss.
        options: of GroupGatherer: trajectory_return (None as in TorchRL, which pools the steps; "sum" compares
            trajectories, however many steps they have), keep_return_bounds, candidate_group_size,
            candidate_selection_min_size, candidate_selector, max_queued_groups, group_timeout, clock.
    Raises: ConfigError: an unknown option or a wrong value. When called: MissingKeyError: no prompt, reward or done.
        UnfinishedError: a trajectory does not end with done. GroupNameError: a prompt that is neither a string
        nor a tensor. DataError: a reward that is not finite.
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
        """Returns a Transform of TorchRL if TorchRL has been imported, else a plain object."""
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
        """Returns a counter or an option."""
        gatherer = self.__dict__.get("gatherer")
        if gatherer is not None and name in COUNTERS:
            return gatherer.stats[name]
        if gatherer is not None and name in ("grpo_size", "queues", *_OPTIONS):
            return getattr(gatherer, name)
        inherited = getattr(super(), "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return inherited(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by state: the class depends on the imports of the process that unpickles."""
        return _make_empty, (), self.__getstate__()

    # ---- what a replay buffer calls ------------------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the data of the buffer unchanged."""
        return tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Returns the groups that these trajectories complete, as one TensorDict [steps]; None if there are none."""
        return self._inv_call(tensordict.copy())

    def share_memory_(self) -> MCAdvantage:
        """Raises ConfigError: one process holds the groups."""
        raise ConfigError(
            "whet's MCAdvantage holds its groups in one process, and a replay buffer that is shared has several "
            "writers; let one process call extend(), or give a RayReplayBuffer transform_factory=MCAdvantage"
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        groups = [g for t in self._trajectories(tensordict) if (g := self.gatherer.add(t)) is not None]
        written = []
        for trajectory, advantages in (pair for group in groups for pair in group):
            trajectory.item.set(self.advantage_key, advantages)
            written.append(trajectory.item)
        return _concatenate(written) if written else None

    def _trajectories(self, tensordict: TensorDictBase) -> list[Trajectory]:
        """Returns the trajectories of a batch [T] or [..., T]."""
        if tensordict.ndim > 1:
            return [t for row in tensordict.unbind(0) for t in self._trajectories(row)]
        if tensordict.ndim == 0:
            tensordict = tensordict.unsqueeze(0)
        done = self._require(tensordict, self.done_key).reshape(len(tensordict), -1).any(-1)
        if not len(done) or not done[-1]:
            raise UnfinishedError(
                f"a trajectory of {len(done)} steps does not end with {self.done_key!r}; extend the buffer with "
                "finished trajectories"
            )
        ends = (done.nonzero().flatten() + 1).tolist()
        return [self._trajectory(tensordict[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def _trajectory(self, steps: TensorDictBase) -> Trajectory:
        steps = steps.clone()  # it may wait long, and collectors overwrite their last batch
        return Trajectory(self._group(steps[0]), self._require(steps, self.rewards_key), steps)

    def _group(self, step: TensorDictBase) -> Hashable:
        """Returns the group name of a trajectory. Raises GroupNameError: neither a string nor a tensor."""
        group = self._require(step, self.prompt_key)
        group = getattr(group, "data", group) if not isinstance(group, torch.Tensor | str) else group
        if isinstance(group, torch.Tensor):
            return group.item() if group.numel() == 1 else tuple(group.flatten().tolist())
        if not isinstance(group, str):
            raise GroupNameError(
                f"{self.prompt_key!r} is a {type(group).__name__}; group by a string or a tensor: set prompt_key"
            )
        return group

    def _require(self, tensordict: TensorDictBase, key: Any) -> Any:
        value = tensordict.get(key, None)
        if value is None:
            keys = sorted(map(str, tensordict.keys(True, True)))
            raise MissingKeyError(
                f"MCAdvantage reads {key!r}, which is not in the data; the data have {', '.join(keys)}"
            )
        return value

    # ---- the queues and counters ---------------------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether other processes hold the same groups: never."""
        return False

    @property
    def queued_groups(self) -> int:
        """The number of incomplete groups."""
        return len(self.gatherer.queues)

    @property
    def queued_trajectories(self) -> int:
        """The number of trajectories in incomplete groups."""
        return sum(len(q) for q in self.gatherer.queues.values())

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """The most trajectories of an incomplete group."""
        return max((len(q) for q in self.gatherer.queues.values()), default=0)

    def get_stats(self) -> dict[str, float]:
        """Returns all counters, and the sizes of the queues."""
        sizes = ("queued_groups", "queued_trajectories", "max_queued_trajectories_per_group")
        return {**self.gatherer.stats, **{name: getattr(self, name) for name in sizes}}

    def reset_stats(self) -> None:
        """Sets the counters to 0."""
        self.gatherer.reset()

    def clear_queues(self) -> None:
        """Removes the incomplete groups."""
        self.gatherer.queues.clear()


def _as_transform(cls: type) -> type:
    """Returns the class with TorchRL's Transform as a base, if torchrl has been imported."""
    torchrl = sys.modules.get("torchrl.envs.transforms")
    base = getattr(torchrl, "Transform", None)
    return cls if base is None or issubclass(cls, base) else _with_base(cls, base)


@functools.cache
def _with_base(cls: type, base: type) -> type:
    """Returns a class that inherits from both, with the name of the first."""
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _make_empty() -> MCAdvantage:
    """Returns an MCAdvantage without state, for unpickling."""
    return MCAdvantage.__new__(MCAdvantage)


def _concatenate(trajectories: list[TensorDictBase]) -> TensorDictBase:
    """Concatenates trajectories to one TensorDict [steps]; to a lazy one if tensor lengths differ between steps."""
    if not any(isinstance(t, LazyStackedTensorDict) for t in trajectories):
        try:
            return torch.cat(trajectories, 0)  # pyright: ignore
        except RuntimeError:  # tensors of one trajectory are longer than those of another
            pass
    return lazy_stack([step for t in trajectories for step in t.unbind(0)], 0)
