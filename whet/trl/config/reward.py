"""RewardConfig: TRL's, with every field; fields_supervised.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import ClassVar

from whet.config import RewardModelConfig
from whet.trl.config.arguments import Arguments, dataclass_of
from whet.trl.config.field import Table
from whet.trl.config.supervised import REWARD_FIELDS, SUPERVISED_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.translate_all import check_rows

__all__ = ["RewardConfig"]


class _Reward(Arguments):
    """What RewardConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **REWARD_FIELDS}
    OLD: ClassVar[Table] = OLD_TRAINING_FIELDS

    def _check(self) -> None:
        """What of its values is not there."""
        super()._check()
        check_rows(self)
        self.to_whet()

    def to_whet(self) -> RewardModelConfig:
        """The objective as whet's own configuration."""
        return RewardModelConfig(center_rewards_coefficient=self.center_rewards_coefficient)


RewardConfig: type[_Reward] = dataclass_of(
    "RewardConfig",
    _Reward,
    """TRL's RewardConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> RewardConfig(center_rewards_coefficient=0.01).to_whet().center_rewards_coefficient
    0.01
    """,
)
