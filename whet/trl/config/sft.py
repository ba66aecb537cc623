"""SFTConfig: the table of its own fields, and its class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, ClassVar

from transformers import TrainingArguments

from whet.config import SFTConfig as Algorithm
from whet.errors import ConfigError, lookup_error
from whet.fronts.field import Table, inert, old, other, works
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
    "dataset_kwargs": other(None, "skip_prepare_dataset, with rows of input_ids; add_special_tokens and "
                                  "append_concat_token are not read, as in TRL; others are refused", dict),
    "max_length": works(1024, "None = no limit", int),
    "truncation_mode": works("keep_start", "or keep_end; rows with nothing trained left are dropped and counted"),
    "shuffle_dataset": other(False, "an order drawn once, from whet's own generator"),
    "packing": other(False, "passes are packed in any case, and no row sees another: the option decides how many rows "
                            "make up a step, which are those of so many packs of max_length tokens"),
    "packing_strategy": other("bfd", "bfd, bfd_split and wrapped make TRL's packs; in wrapped ones rows see each "
                                      "other, as in TRL"),
    "padding_free": inert(False, "nothing is padded in any case"),
    "eval_packing": works(None, "None = as packing; the evaluation is weighed over all its tokens in any case", bool),
    "completion_only_loss": works(None, "None = where rows have prompt and completion", bool),
    "assistant_only_loss": other(False, "turns are found by rendering, in the model's own template; marks "
                                        "({% generation %}) within them have the last word"),
    "loss_type": works("nll", "nll, dft, or a function of whet's"),
}  # fmt: skip
"""Field -> what it is here."""

OLD_SFT_FIELDS: Table = {
    "max_seq_length": old("max_length", int),
}
"""Field of an earlier TRL -> how it is read."""

_NOT_READ = {"add_special_tokens", "append_concat_token"}
"""Of dataset_kwargs, in scripts of 2024."""
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
        given = set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"}
        if given & _NOT_READ:
            log.warning(
                "dataset_kwargs: %s is not read, as in later releases of TRL: special tokens are the tokenizer's",
                ", ".join(sorted(given & _NOT_READ)),
            )
        if given := given - _NOT_READ:
            raise ConfigError(
                f"dataset_kwargs: {sorted(given)[0]!r} is not supported; give the rows to train on unchanged, or rows "
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


def from_training_arguments(args: Any) -> Any:
    """An SFTConfig of plain TrainingArguments, which TRL's SFTTrainer takes too; anything else as it is."""
    if not isinstance(args, TrainingArguments):
        return args
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and f.name in SFTConfig.TABLE}
    if not given["fsdp"]:
        del given["fsdp_config"]  # transformers makes a dict of defaults from it
    return SFTConfig(**{name: getattr(value, "value", value) for name, value in given.items()})
