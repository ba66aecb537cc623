"""KTOConfig: the table of its fields, and the class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

from typing import ClassVar

from whet.compat.field import Table, differs, no_effect, works
from whet.config import PreferenceConfig
from whet.errors import ConfigError, lookup_error
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.dpo import OLD_DPO_FIELDS
from whet.trl.config.supervised import MODEL_FIELDS, NO_DROPOUT, SUPERVISED_FIELDS, SupervisedArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS

__all__ = ["KTO_FIELDS", "KTOConfig"]

KTO_FIELDS: Table = {
    **{name: row for name, row in MODEL_FIELDS.items() if name != "pad_token"},
    "disable_dropout": NO_DROPOUT,
    "max_length": differs(
        1024,
        "rows with a prompt of this length are left out and counted; a mismatched answer is "
        "truncated as in its own row, while TRL truncates it anew",
        int,
    ),
    "precompute_ref_log_probs": differs(
        False, "refused with loss_type='kto', which needs the reference on each update's mismatched rows"
    ),
    "precompute_ref_batch_size": no_effect(None, "max_tokens_per_microbatch sets the size of a pass", int),
    "train_sampling_strategy": works("sequential", "as in TRL, loss_type='kto' allows nothing else"),
    "loss_type": works("kto", "or apo_zero_unpaired"),
    "beta": works(0.1),
    "desirable_weight": works(1.0),
    "undesirable_weight": works(1.0),
    "sync_ref_model": works(False),
    "ref_model_mixup_alpha": works(0.6),
    "ref_model_sync_steps": works(512),
}
"""Field -> its default and its meaning in whet."""

_LOSSES = ("kto", "apo_zero_unpaired")
_SAME = ("beta", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs")
"""Fields with the same name and meaning in whet's PreferenceConfig."""


class _KTO(SupervisedArguments):
    """The checks of KTOConfig and its translation."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **KTO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_DPO_FIELDS}

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support."""
        super()._check()
        if self.loss_type not in _LOSSES:
            raise lookup_error("loss_type", self.loss_type, _LOSSES)
        if self.loss_type != "kto":
            return
        if self.train_sampling_strategy != "sequential":
            raise ConfigError(
                f"loss_type='kto' requires `train_sampling_strategy='sequential'`, got "
                f"{self.train_sampling_strategy!r}: TRL pairs mismatched rows in a fixed order; shuffle the data set "
                "itself"
            )
        if self.per_device_train_batch_size < 2:
            raise ConfigError(
                f"per_device_train_batch_size={self.per_device_train_batch_size}: the actual batch size must be > 1, "
                "because KTO measures the KL on each prompt with another row's answer; give 2 or more"
            )
        if self.precompute_ref_log_probs:
            raise ConfigError(
                "precompute_ref_log_probs=True is not supported with loss_type='kto', which needs the reference on "
                "each update's mismatched rows; leave it out, or set loss_type='apo_zero_unpaired'"
            )

    def to_whet(self) -> PreferenceConfig:
        """Returns the objective as whet's own configuration."""
        fields = {name: getattr(self, name) for name in _SAME}
        if self.sync_ref_model:
            names = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
            fields |= {name: getattr(self, name) for name in names}
        return PreferenceConfig(loss_type=(self.loss_type,), log_entropy=True, **fields)


KTOConfig: type[_KTO] = dataclass_of(
    "KTOConfig",
    _KTO,
    """TRL's KTOConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> KTOConfig(desirable_weight=2.0).to_whet().desirable_weight
    2.0
    """,
)
