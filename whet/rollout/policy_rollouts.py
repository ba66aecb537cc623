"""PolicyRollouts: the engine of a policy that is trained, and what is sampled from it.

The engine is built when it is first asked for, so that training without sampling never has one. Between two
rollouts it gives its memory to the update: the KV, what graphs work in and what is derived from weights. An update
drops all of it anyway, so an engine that reads the trainer's own weights is released wherever it can be. One that has
weights of its own is released next to a trainer on a GPU, where its `sleep` makes room; on a CPU that would be copies.
Left out on purpose: engines on a device of their own, whose memory no update could take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.build import describe_engine
from whet.rollout.driver import Episode, GroupKey, Rollouts, Turns, single_turn
from whet.rollout.length_history import LengthHistory
from whet.types import Group, Prompt

__all__ = ["Play", "Policy", "PolicyRollouts"]


class Policy(Protocol):
    """What the engine has to know of the model: a ModelWorker."""

    version: int

    @property
    def device(self) -> torch.device:
        """Where it is trained."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), one at a time."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what training changes."""
        ...


Play = Callable[[Sampling], Callable[[Episode], Turns]]
"""What an episode plays, from its sampling parameters."""


class PolicyRollouts:
    """A policy's engine, and the driver of its episodes.

    Args: build: makes the engine. policy: whose weights and version it has. vocab_size: of its ids; None = unknown.
    """

    def __init__(self, build: Callable[[], RolloutEngine], policy: Policy, *, vocab_size: int | None = None) -> None:
        self._build, self._policy, self._vocab_size = build, policy, vocab_size
        self._driver: Rollouts | None = None
        self._lengths = LengthHistory()
        self._next_id = 0
        self.engine_released = False
        """The engine is asleep and has to be woken before it samples."""

    @property
    def driver(self) -> Rollouts:
        """What plays episodes in the engine, which is built here if it was not yet; it may be released."""
        if self._driver is None:
            self._driver = Rollouts(self._build(), next_id=self._next_id, vocab_size=self._vocab_size)
            if self._policy.version:
                self._update()
        return self._driver

    @property
    def engine(self) -> RolloutEngine:
        """The engine, built if it was not yet."""
        return self.driver.engine

    def sample(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        address: GroupKey,
        at_once: int,
        greedy: bool = False,
        play: Play | None = None,
    ) -> list[Group]:
        """Completes prompts.

        Args:
            kind: of rollout, under which lengths are remembered.
            prompts: encoded.
            sampling: of all of them.
            num_generations: completions of each.
            address: (seed, step, place of the first prompt in the step) of the draws; the generation is added.
            at_once: prompts given to the engine at once.
            greedy: one completion of each prompt more, at temperature 0: Group.greedy.
            play: what an episode plays under its sampling parameters; None = one completion.
        Returns: a group for each prompt, in order.
        """
        self.resume()
        seed, step, first = address
        expected = self._lengths.of(kind, prompts) if play is None else [None] * len(prompts)
        likeliest = replace(sampling, temperature=0.0)
        groups: list[Group] = []
        for start in range(0, len(prompts), at_once):
            episodes = []
            for place, prompt in enumerate(prompts[start : start + at_once], start):
                make = functools.partial(_episode, prompt, (seed, step, first + place), play, expected[place])
                episodes += [make(g, sampling) for g in range(num_generations)]
                if greedy:  # an address of its own, so no other draw changes
                    episodes.append(make(num_generations, likeliest))
            found = self.driver.run(episodes)
            groups += [_without_greedy(g, num_generations) for g in found] if greedy else found
        if play is None:
            self._lengths.note(kind, groups)
        return groups

    # ---- the engine's memory and weights -------------------------------------------------------------------------

    def release(self) -> bool:
        """Puts the engine to sleep. Returns: whether it did: not if there is none, or it is asleep, or never sleeps."""
        if self._driver is None or self.engine_released:
            return False
        caps = self.engine.caps
        if not caps.sleep or not (caps.shared_weights or self._policy.device.type != "cpu"):
            return False
        self.engine_released = True
        self.engine.sleep()
        return True

    def resume(self) -> None:
        """Wakes a released engine for a rollout between two updates.

        It draws from the weights that it has: where they are the trainer's own, from those of now.
        """
        if self.engine_released and self.engine.caps.shared_weights:
            self.sync()
        elif self.engine_released:
            self.engine_released = False
            self.engine.wake()

    def sync(self) -> None:
        """Wakes the engine, whatever put it to sleep, and gives it the policy's weights and version."""
        if self._driver is None:
            return  # it will be built with them
        caps = self.engine.caps
        if caps.sleep and (self.engine_released or caps.shared_weights):
            self.engine.wake()
        self.engine_released = False
        self._update()

    def _update(self) -> None:
        policy, caps = self._policy, self.engine.caps
        own = policy.trained_weights if caps.adapters else policy.named_weights
        self.engine.update(policy.version, None if caps.shared_weights else own())

    # ---- state and end -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the number of the next request, and the lengths that prompts had."""
        return {
            "next_id": self._next_id if self._driver is None else self._driver.next_id,
            "lengths": self._lengths.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, after the policy was loaded."""
        self._next_id = state["next_id"]
        self._lengths.restore(state.get("lengths", {}))  # those of earlier versions have none
        if self._driver is not None:
            self._driver.next_id = self._next_id
        self.sync()

    def describe(self) -> dict[str, str] | None:
        """What runs the rollout; None = nothing was asked of it yet."""
        return None if self._driver is None else describe_engine(self.engine)

    def close(self) -> None:
        """Frees the engine."""
        if self._driver is not None:
            self.engine.close()


def _episode(
    prompt: Prompt, group: GroupKey, play: Play | None, expected: int | None, generation: int, sampling: Sampling
) -> Episode:
    """One trajectory of a group."""
    address = (*group, generation)
    if play is None:
        return single_turn(prompt, sampling, address=address, expected=expected)
    return Episode(prompt, address, play(sampling))


def _without_greedy(group: Group, num_generations: int) -> Group:
    """The group with its last trajectory, the greedy one, beside it; of its forks the last."""
    drawn = tuple(c for c in group.completions if c.generation < num_generations)
    return replace(group, completions=drawn, greedy=group.completions[-1])
