"""The choice of the groups that a step trains on."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Count, Float
from whet.errors import ConfigError

__all__ = ["SelectionFields"]


@config
class SelectionFields(AlgorithmConfig):
    """Dynamic sampling: groups that teach nothing are replaced by groups of further prompts."""

    dynamic_sampling: Bool = False
    """Leave out groups whose rewards are all equal, and sample further batches of prompts until the step has as many
    groups as a batch has prompts. Needs trainer.max_steps."""
    max_num_gen_batches: Count = 10
    """Batches of prompts that such a step samples at most; a step that is not full by then trains on what it has."""
    group_reward_bounds: tuple[Float, Float] | None = None
    """(low, high): leave out groups whose mean reward does not lie between, bounds excluded, instead of those whose
    rewards are all equal; None = those."""

    def __post_init__(self) -> None:
        """Checks the bounds."""
        super().__post_init__()
        bounds = self.group_reward_bounds
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ConfigError(f"group_reward_bounds must be (low, high) with low < high, got {bounds!r}")
