"""The fields of dynamic sampling, which chooses the groups that a step trains on."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Count, Float
from whet.errors import ConfigError

__all__ = ["SelectionFields"]


@config
class SelectionFields(AlgorithmConfig):
    """Dynamic sampling: groups without a learning signal are replaced by groups of other prompts."""

    dynamic_sampling: Bool = False
    """Leave out groups in which all rewards are equal, and sample more prompts until the step has as many groups as a
    batch has prompts. Needs trainer.max_steps."""
    max_num_gen_batches: Count = 10
    """With dynamic_sampling: the most batches of prompts that a step samples. A step that is still not full trains on
    the groups that it has."""
    group_reward_bounds: tuple[Float, Float] | None = None
    """(low, high): with dynamic_sampling, leave out groups with a mean reward outside the open interval low to high.
    None = leave out groups in which all rewards are equal."""

    def __post_init__(self) -> None:
        """Checks the bounds."""
        super().__post_init__()
        bounds = self.group_reward_bounds
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ConfigError(f"group_reward_bounds must be (low, high) with low < high, got {bounds!r}")
