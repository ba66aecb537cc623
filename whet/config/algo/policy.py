"""PolicyConfig: all choices of a policy objective in one class."""

from __future__ import annotations

from whet.config.algo.advantage import NEED_GROUPS, AdvantageFields
from whet.config.algo.correction import CorrectionFields
from whet.config.algo.entropy import EntropyFields
from whet.config.algo.kl import KLFields
from whet.config.algo.selection import SelectionFields
from whet.config.algo.surrogate import SurrogateFields
from whet.config.algo.unused_fields import check_fields_read
from whet.config.base import config
from whet.config.fields import Size
from whet.errors import ConfigError

__all__ = ["PolicyConfig"]


@config
class PolicyConfig(SelectionFields, CorrectionFields, EntropyFields, KLFields, SurrogateFields, AdvantageFields):
    """An algorithm that trains a policy: advantage, surrogate, KL, entropy bonus and corrections are chosen separately.

    >>> PolicyConfig(epsilon=0.2, epsilon_high=0.28).clip_range
    (0.2, 0.28)
    """

    num_generations: Size = 1
    """G, the completions of each prompt."""

    def __post_init__(self) -> None:
        """Checks rules that concern several choices, and that every field that was set has an effect."""
        super().__post_init__()
        check_fields_read(self)
        penalties = {
            f"kl_type='reward' with beta={self.beta}": bool(self.beta) and self.kl_type == "reward",
            "overlong_buffer.enable=True": self.overlong_buffer.enable,
        }
        for name, on in penalties.items():
            if on and self.advantage_estimator == "maxrl":
                raise ConfigError(
                    f"advantage_estimator='maxrl' is for rewards that are not negative, and {name} takes from them; "
                    "leave that out, or choose another estimator"
                )

    def check_groups(self) -> None:
        """Raises ConfigError if each prompt has one completion and something compares it with its group."""
        if self.num_generations <= 1 and self.advantage_estimator in NEED_GROUPS:
            raise ConfigError(
                f"num_generations must be greater than 1, got {self.num_generations}: "
                "a completion is compared with its group"
            )
        if self.num_generations <= 1 and self.dynamic_sampling and self.group_reward_bounds is None:
            raise ConfigError(
                "dynamic_sampling with num_generations=1 would leave out every group, since one reward is equal to "
                "itself; set group_reward_bounds, or dynamic_sampling=false"
            )
