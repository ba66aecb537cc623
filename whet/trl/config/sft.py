"""SFTConfig: the table of its fields, and the class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, ClassVar

from transformers import TrainingArguments

from whet.compat.field import Table, deprecated, differs, no_effect, works
from whet.config import SFTConfig as Algorithm
from whet.errors import ConfigError, lookup_error
from whet.ops import SFT_LOSSES
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.supervised import MODEL_FIELDS, SUPERVISED_FIELDS, TEMPLATE_FIELDS, SupervisedArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.util.references import resolve_name

__all__ = ["OLD_SFT_FIELDS", "SFT_FIELDS", "SFTConfig", "from_training_arguments"]

log = logging.getLogger("whet")

SFT_FIELDS: Table = {
    **MODEL_FIELDS,
    **TEMPLATE_FIELDS,
    "learning_rate": works(2e-5),
    "dataset_text_field": works("text"),
    "dataset_kwargs": differs(
        None,
        "skip_prepare_dataset, with rows of input_ids; add_special_tokens and "
        "append_concat_token are not read, as in TRL; others are refused",
        dict,
    ),
    "max_length": works(1024, "None = no limit", int),
    "truncation_mode": works("keep_start", "or keep_end; rows without trained tokens are dropped and counted"),
    "shuffle_dataset": differs(False, "the order is drawn once, from whet's generator"),
    "packing": differs(
        False,
        "whet always packs its passes, and rows don't attend to each other. With packing, a row of "
        "the batch size is a pack of max_length tokens",
    ),
    "packing_strategy": differs(
        "bfd", "bfd, bfd_split and wrapped make TRL's packs; as in TRL, rows in wrapped packs attend to each other"
    ),
    "padding_free": no_effect(False, "whet never pads"),
    "eval_packing": works(None, "None = the value of packing; the loss is always a mean over all tokens", bool),
    "completion_only_loss": works(None, "None = True if rows have prompt and completion", bool),
    "assistant_only_loss": differs(
        False, "whet finds the turns by rendering the model's template; its marks ({% generation %}) narrow them"
    ),
    "loss_type": works("nll", "nll, dft, or a reference to a function"),
}
"""Field -> its default and its meaning in whet."""

OLD_SFT_FIELDS: Table = {
    "max_seq_length": deprecated("max_length", int),
}
"""Field of an earlier TRL -> how it is read."""

_IGNORED_KWARGS = {"add_special_tokens", "append_concat_token"}
"""Keys of dataset_kwargs in scripts of 2024, which later releases of TRL ignore."""
_PACKING = ("bfd", "bfd_split", "wrapped")


class _SFT(SupervisedArguments):
    """The methods of SFTConfig."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **SFT_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_SFT_FIELDS}

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), "max_seq_length": "max_length"}

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support."""
        super()._check()
        if self.packing and self.packing_strategy not in _PACKING:
            raise lookup_error("packing_strategy", self.packing_strategy, _PACKING)
        if self.packing and self.max_length is None:
            raise ConfigError("When packing is enabled, `max_length` can't be `None`: it is the length of a pack")
        keys = set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"}
        if ignored := sorted(keys & _IGNORED_KWARGS):
            log.warning(
                "dataset_kwargs: %s is not read, as in later releases of TRL: the tokenizer adds special tokens",
                ", ".join(ignored),
            )
        if unsupported := sorted(keys - _IGNORED_KWARGS):
            raise ConfigError(
                f"dataset_kwargs: {unsupported[0]!r} is not supported; give the rows to train on unchanged, or rows of "
                "input_ids and labels"
            )
        resolve_name(self.loss_type, SFT_LOSSES, "SFT loss")

    def to_whet(self) -> Any:
        """Returns the objective as whet's own configuration."""
        return Algorithm(loss_type=self.loss_type, log_entropy=True)


SFTConfig: type[_SFT] = dataclass_of(
    "SFTConfig",
    _SFT,
    """TRL's SFTConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> SFTConfig(packing=True, max_length=None)
    Traceback (most recent call last):
    whet.errors.ConfigError: When packing is enabled, `max_length` can't be `None`: it is the length of a pack
    """,
)


def from_training_arguments(args: Any) -> Any:
    """Converts transformers' TrainingArguments, which TRL's SFTTrainer accepts too; other objects are unchanged."""
    if not isinstance(args, TrainingArguments):
        return args
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and f.name in SFTConfig.TABLE}
    if not values["fsdp"]:
        del values["fsdp_config"]  # transformers fills it with defaults
    return SFTConfig(**{name: getattr(value, "value", value) for name, value in values.items()})
