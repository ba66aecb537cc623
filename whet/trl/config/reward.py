"""RewardConfig: the table of its fields, and the class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

from typing import ClassVar

from whet.compat.field import Table, works
from whet.config import RewardModelConfig
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.supervised import MODEL_FIELDS, NO_DROPOUT, SUPERVISED_FIELDS, TEMPLATE_FIELDS, SupervisedArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS

__all__ = ["REWARD_FIELDS", "RewardConfig"]

REWARD_FIELDS: Table = {
    **{name: row for name, row in MODEL_FIELDS.items() if name != "router_aux_loss_coef"},
    **TEMPLATE_FIELDS,
    "learning_rate": works(1e-4),
    "disable_dropout": NO_DROPOUT,
    "max_length": works(1024, "longer pairs are left out, as in TRL", int),
    "center_rewards_coefficient": works(None, kind=float),
}
"""Field -> its default and its meaning in whet."""


class _Reward(SupervisedArguments):
    """The methods of RewardConfig."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **REWARD_FIELDS}
    OLD: ClassVar[Table] = OLD_TRAINING_FIELDS

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support."""
        super()._check()
        self.to_whet()

    def to_whet(self) -> RewardModelConfig:
        """Returns the objective as whet's own configuration."""
        return RewardModelConfig(center_rewards_coefficient=self.center_rewards_coefficient)


RewardConfig: type[_Reward] = dataclass_of(
    "RewardConfig",
    _Reward,
    """TRL's RewardConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> RewardConfig(center_rewards_coefficient=0.01).to_whet().center_rewards_coefficient
    0.01
    """,
)
