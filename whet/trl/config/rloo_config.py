"""RLOOConfig: TRL's, with every field; fields_rloo.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.trl.config.arguments import dataclass_of
from whet.trl.config.field import Table
from whet.trl.config.rloo import OLD_RLOO_FIELDS, RLOO_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.rl import RLArguments
from whet.trl.config.translate import rloo

__all__ = ["RLOOConfig"]


class _RLOO(RLArguments):
    """What RLOOConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **RLOO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_RLOO_FIELDS}
    METHOD = "RLOO"

    def to_whet(self) -> Any:
        """The algorithm as whet's own configuration."""
        return rloo(self)


RLOOConfig: type[_RLOO] = dataclass_of(
    "RLOOConfig",
    _RLOO,
    """TRL's RLOOConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> RLOOConfig(beta=0.1).to_whet().kl_type
    'reward'
    """,
)
