"""SFTConfig: TRL's, with every field; fields_supervised.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.config import SFTConfig as Algorithm
from whet.errors import ConfigError, lookup_error
from whet.learners.objective import resolve_name
from whet.ops import SFT_LOSSES
from whet.trl.config.arguments import Arguments, dataclass_of
from whet.trl.config.field import Table
from whet.trl.config.supervised import OLD_SFT_FIELDS, SFT_FIELDS, SUPERVISED_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.translate_all import check_rows

__all__ = ["SFTConfig"]

_PACKING = ("bfd", "bfd_split")


class _SFT(Arguments):
    """What SFTConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **SFT_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_SFT_FIELDS}

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), "max_seq_length": "max_length"}

    def _check(self) -> None:
        """What of its values is not there."""
        super()._check()
        check_rows(self)
        if self.packing and self.packing_strategy not in _PACKING:
            if self.packing_strategy == "wrapped":
                raise ConfigError(
                    "packing_strategy='wrapped' is not taken: it cuts rows where a pack is full, and they see each "
                    "other; take 'bfd', or 'bfd_split', which cuts those that are longer than max_length"
                )
            raise lookup_error("packing_strategy", self.packing_strategy, _PACKING)
        if self.packing and self.max_length is None:
            raise ConfigError("When packing is enabled, `max_length` can't be `None`: it is the length of a pack")
        given = set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"}
        if given:
            raise ConfigError(
                f"dataset_kwargs: {sorted(given)[0]!r} is not taken; give rows as they are to be trained on, or rows "
                "of input_ids and labels"
            )
        resolve_name(self.loss_type, SFT_LOSSES, "SFT loss")

    def to_whet(self) -> Any:
        """The objective as whet's own configuration."""
        return Algorithm(loss_type=self.loss_type, log_entropy=True)


SFTConfig: type[_SFT] = dataclass_of(
    "SFTConfig",
    _SFT,
    """TRL's SFTConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> SFTConfig(packing=True, max_length=None)
    Traceback (most recent call last):
    whet.errors.ConfigError: When packing is enabled, `max_length` can't be `None`: it is the length of a pack
    """,
)
