"""When an engine gives its memory to the update: the KV, what graphs work in and what is derived from weights.

An update drops all of it anyway, so an engine that reads the trainer's own weights rests wherever it can. One that has
weights of its own rests beside a trainer on a GPU, where its `sleep` makes room; on a CPU that would be copies.
Left out on purpose: engines on a device of their own, whose memory no update could take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whet.rollout.base import RolloutEngine

__all__ = ["Rest"]


class Rest:
    """The rest of one engine between two rollouts. Args: engine: any. device: the trainer's."""

    def __init__(self, engine: RolloutEngine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.under_way = False
        """The engine sleeps and has to be woken before it samples."""

    def begin(self) -> bool:
        """Lets the engine sleep. Returns: whether it does so now: not if it rests already, or never does."""
        caps = self.engine.caps
        if self.under_way or not caps.sleep or not (caps.shared_weights or self.device.type != "cpu"):
            return False
        self.under_way = True
        self.engine.sleep()
        return True

    def pause(self, version: int) -> None:
        """Wakes a resting engine for a sample between two updates.

        It draws from the weights that it has: where they are the trainer's own, from those of now.
        Args: version: the policy's.
        """
        if self.under_way and self.engine.caps.shared_weights:
            self.end(version, lambda: iter(()))
        elif self.under_way:
            self.under_way = False
            self.engine.wake()

    def end(self, version: int, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """Wakes the engine, whoever let it sleep, and gives it new weights. Args: version: of these. weights: named."""
        caps = self.engine.caps
        if caps.sleep and (self.under_way or caps.shared_weights):
            self.engine.wake()
        self.under_way = False
        self.engine.update(version, None if caps.shared_weights else weights())
