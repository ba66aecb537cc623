"""PolicyRollouts: the engine of a policy in training, and the samples drawn from it.

The engine is built at its first use, so that training without sampling never has one. Between two rollouts it frees
memory for the update: the KV, the graphs' memory and what is derived from weights. An update drops all of it anyway, so
an engine that reads the trainer's own weights is released whenever it can sleep. An engine with its own weights is
released only on a GPU, where `sleep` makes room for the trainer; on a CPU it would only copy.
Left out on purpose: engines on a device of their own, which have no memory that an update could use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whet.observe.trace import Trace
from whet.parallel.ranks import Ranks
from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.build import describe_engine
from whet.rollout.driver import Episode, GroupKey, RolloutDriver, Turns, single_turn
from whet.rollout.length_history import LengthHistory
from whet.rollout.sync_check import SyncCheck
from whet.types import Group, Prompt
from whet.util.tensor_subclasses import gather_full_tensor

if TYPE_CHECKING:
    from whet.train.worker import ModelWorker

__all__ = ["EpisodeRunner", "PolicyRollouts"]

EpisodeRunner = Callable[[Episode, Sampling], Turns]
"""The generator function of an episode under sampling parameters."""


class PolicyRollouts:
    """A policy's engine, and the driver of its episodes.

    Args:
        build: makes the engine.
        policy: gives it weights and version.
        vocab_size: of the model; None = unknown.
        ranks: the processes that sample together, each a share of the prompts, or those of a TensorParallelEngine
            one share together; None = one.
        trace: receives the calls of tools.
        check_every: check every n-th sync of an engine with a copy of the weights; 0 = none.
    """

    def __init__(
        self,
        build: Callable[[], RolloutEngine],
        policy: ModelWorker,
        *,
        vocab_size: int | None = None,
        ranks: Ranks | None = None,
        trace: Trace | None = None,
        check_every: int = 0,
    ) -> None:
        self._trace = trace
        self._build, self._policy, self._vocab_size, self._ranks = build, policy, vocab_size, ranks or Ranks()
        self._driver: RolloutDriver | None = None
        self.sync_check = SyncCheck(check_every, self._ranks)
        self._lengths = LengthHistory()
        self._next_id = 0
        self.engine_released = False
        """Whether the engine is asleep, and has to be woken before it samples."""
        self.should_stop: Callable[[], bool] | None = None
        """See RolloutDriver."""

    @property
    def driver(self) -> RolloutDriver:
        """Runs episodes in the engine, which is built here at the first use; it may be released."""
        if self._driver is None:
            options = {"next_id": self._next_id, "vocab_size": self._vocab_size, "trace": self._trace}
            self._driver = RolloutDriver(self._build(), **options)
            if self._policy.version:
                self._update()
        self._driver.should_stop = self.should_stop
        return self._driver

    @property
    def engine(self) -> RolloutEngine:
        """The engine, built at the first use."""
        return self.driver.engine

    def sample(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_generations: int,
        rng_key: GroupKey,
        at_once: int,
        greedy: bool = False,
        run_episode: EpisodeRunner | None = None,
    ) -> list[Group]:
        """Completes prompts.

        Args:
            kind: of rollout, such as "train": lengths are remembered for each kind.
            prompts: encoded.
            sampling: of all of them.
            num_generations: completions of each.
            rng_key: (seed, step, index of the first prompt in the step) of the draws; the generation is added.
            at_once: prompts that are in the engine at once.
            greedy: also draw a completion of each prompt at temperature 0: Group.greedy.
            run_episode: the generator function of an episode of several turns; None = one completion.
        Returns: a group for each prompt, in order.
        """
        self.resume()
        self.sync_check.finish(self.driver, self._policy, self._vocab_size)
        seed, step, first = rng_key
        expected = self._lengths.expected(kind, prompts) if run_episode is None else [None] * len(prompts)
        greedy_sampling = replace(sampling, temperature=0.0)
        first_id = self.driver.next_id

        def sample_share(places: Sequence[int]) -> tuple[list[tuple[Any, ...]], int]:
            """Returns the groups of some prompts without the prompts, which all processes have; the number of
            requests.
            """
            groups: list[Group] = []
            for start in range(0, len(places), at_once):
                episodes = []
                for i in places[start : start + at_once]:
                    make = functools.partial(_episode, prompts[i], (seed, step, first + i), run_episode, expected[i])
                    episodes += [make(g, sampling) for g in range(num_generations)]
                    if greedy:  # it has its own key, so no other draw changes
                        episodes.append(make(num_generations, greedy_sampling))
                batch_groups = self.driver.run(episodes)
                groups += [_without_greedy(g, num_generations) for g in batch_groups] if greedy else batch_groups
            return [(g.completions, g.rewards, g.greedy) for g in groups], self.driver.next_id - first_id

        def sample_together(places: Sequence[int]) -> tuple[list[tuple[Any, ...]], int]:
            """The same, on the first of the processes that divide the model; on the others its engine's calls."""
            with engine.leading() as leads:
                return sample_share(places) if leads else ([], 0)

        engine: Any = self.engine
        share, together = (sample_together, engine.ranks.size) if hasattr(engine, "leading") else (sample_share, 1)
        shares = self._ranks.scatter_gather(share, range(len(prompts)), together=together)
        self.driver.next_id = first_id + sum(count for _, count in shares)
        drawn = [fields for share, _ in shares for fields in share]
        groups = [
            Group(prompt=prompt, completions=completions, rewards=rewards, greedy=greedy_one)
            for prompt, (completions, rewards, greedy_one) in zip(prompts, drawn, strict=True)
        ]
        if run_episode is None:
            self._lengths.record(kind, groups)
        return groups

    # ---- the engine's memory and weights -------------------------------------------------------------------------

    def release(self) -> bool:
        """Puts the engine to sleep, if it exists, is awake and can sleep. Returns: whether it did."""
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

        An engine with its own weights keeps them, unless its sleep drops them; one that shares the trainer's reads the
        current ones.
        """
        if not self.engine_released:
            return
        caps = self.engine.caps
        if caps.shared_weights or not caps.sleep_keeps_weights:
            self.sync()
        else:
            self.engine_released = False
            self.engine.wake_up()

    def sync(self) -> None:
        """Wakes the engine, and gives it the policy's weights and version."""
        if self._driver is None:
            return  # it will be built with these weights
        caps = self.engine.caps
        if caps.sleep and (self.engine_released or caps.shared_weights):
            self.engine.wake_up()
        self.engine_released = False
        self._update()

    def _update(self) -> None:
        policy, caps = self._policy, self.engine.caps
        if caps.shared_weights:
            self.engine.update_weights(policy.version, None)
            return
        weights = _whole(policy.trained_weights() if caps.adapters else policy.named_weights())
        try:
            self.engine.update_weights(policy.version, self.sync_check.watch(policy.version, weights))
        finally:
            for _ in weights:  # the other processes gather what this one's engine refused to read
                pass

    # ---- state and end -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the id of the next request, and the length history."""
        return {
            "next_id": self._next_id if self._driver is None else self._driver.next_id,
            "lengths": self._lengths.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, after the policy was loaded."""
        self._next_id = state["next_id"]
        self._lengths.restore(state["lengths"])
        if self._driver is not None:
            self._driver.next_id = self._next_id
        self.sync()

    def describe(self) -> dict[str, str] | None:
        """Returns the implementation of the engine's parts; None = no engine was built."""
        return None if self._driver is None else describe_engine(self.engine)

    def close(self) -> None:
        """Frees the engine."""
        if self._driver is not None:
            self._driver.close()
            self.engine.close()


def _episode(
    prompt: Prompt,
    group: GroupKey,
    run_episode: EpisodeRunner | None,
    expected: int | None,
    generation: int,
    sampling: Sampling,
) -> Episode:
    """Returns one trajectory of a group."""
    rng_key = (*group, generation)
    if run_episode is None:
        return single_turn(prompt, sampling, rng_key=rng_key, expected=expected)
    return Episode(prompt, rng_key, lambda episode: run_episode(episode, sampling))


def _without_greedy(group: Group, num_generations: int) -> Group:
    """Returns the group with its greedy trajectory (of its forks the last) in Group.greedy."""
    drawn = tuple(c for c in group.completions if c.generation < num_generations)
    rewards = {name: values[:num_generations] for name, values in group.rewards.items()}
    return replace(group, completions=drawn, rewards=rewards, greedy=group.completions[-1])


def _whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights as plain tensors, one at a time. Several processes gather each in turn, so all must take all of them."""
    for name, weight in weights:
        yield name, gather_full_tensor(weight)
