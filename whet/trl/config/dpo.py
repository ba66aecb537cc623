"""DPOConfig: the table of its own fields, and its class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import Tensor

from whet.config import PreferenceConfig
from whet.fronts.field import Table, inert, old, works
from whet.learners.from_config import keyword_arguments
from whet.learners.preference_from_config import make_preference_objective
from whet.ops.preference import PREFERENCE_LOSSES, PreferenceInputs, needs
from whet.ops.preference import sigmoid as SMOOTHED
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.supervised import MODEL_FIELDS, NO_DROPOUT, SUPERVISED_FIELDS, SupervisedArguments
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.util.references import resolve_name

__all__ = ["DPO_FIELDS", "OLD_DPO_FIELDS", "DPOConfig"]

log = logging.getLogger("whet")

DPO_FIELDS: Table = {
    **MODEL_FIELDS,
    "disable_dropout": NO_DROPOUT,
    "max_length": works(1024, "None = no limit", int),
    "truncation_mode": works("keep_start", "or keep_end; pairs with nothing trained left are dropped and counted"),
    "padding_free": inert(False, "nothing is padded in any case"),
    "precompute_ref_log_probs": works(False),
    "precompute_ref_batch_size": inert(None, "passes go by max_tokens_per_microbatch", int),
    "loss_type": works(["sigmoid"], "and whet's others that take pairs (whet docs preference)", list[str]),
    "loss_weights": works(None, kind=list[float]),
    "ld_alpha": works(None, kind=float),
    "f_divergence_type": works("reverse_kl"),
    "f_alpha_divergence_coef": works(0.5),
    "label_smoothing": works(0.0, "sigmoid takes no notice of it, as there; cDPO is "
                                  "loss_type='whet.ops.preference:sigmoid'"),
    "beta": works(0.1),
    "use_weighting": works(False),
    "discopop_tau": works(0.05),
    "sync_ref_model": works(False),
    "ref_model_mixup_alpha": works(0.6),
    "ref_model_sync_steps": works(512),
}  # fmt: skip
"""Field -> what it is here."""

_NO_PROMPT_LIMIT = "not read: max_length is the limit of prompt and answer, as in later releases"
OLD_DPO_FIELDS: Table = {
    "max_prompt_length": old(_NO_PROMPT_LIMIT, int),
    "max_completion_length": old(_NO_PROMPT_LIMIT, int),
}
"""Field of an earlier TRL -> how it is read."""

_SAME = ("beta", "ld_alpha", "f_divergence_type", "use_weighting", "precompute_ref_log_probs")
"""Fields with one name and meaning in both."""
_OF_ONE = ("discopop_tau", "label_smoothing")
"""Fields that some losses take."""


@needs(difference=True)
def sigmoid(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """DPO's loss without label smoothing, next to one that has it."""
    return SMOOTHED(p, beta=beta)


class _DPO(SupervisedArguments):
    """The methods of DPOConfig."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **DPO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_DPO_FIELDS}

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support."""
        super()._check()
        for name in OLD_DPO_FIELDS:
            if getattr(self, name) is not None:
                log.warning(
                    "%s=%s is not read: max_length=%s is the limit of prompt and answer, as in later releases",
                    *(name, getattr(self, name), self.max_length),
                )
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        make_preference_objective(self.to_whet())
        if self.label_smoothing and "sigmoid" in self.loss_type:
            log.warning(
                "label_smoothing=%s is not read by the sigmoid loss, as in TRL; for cDPO take "
                "loss_type='whet.ops.preference:sigmoid'",
                self.label_smoothing,
            )

    def to_whet(self) -> PreferenceConfig:
        """The objective as whet's own configuration."""
        losses = tuple(sigmoid if name == "sigmoid" and self.label_smoothing else name for name in self.loss_type)
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        taken = {n for loss in losses for n in keyword_arguments(resolve_name(loss, PREFERENCE_LOSSES, "loss_type"))}
        fields |= {name: getattr(self, name) for name in _OF_ONE if name in taken}
        if self.f_divergence_type == "alpha_divergence":
            fields["f_alpha_divergence_coef"] = self.f_alpha_divergence_coef
        if self.sync_ref_model:
            names = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
            fields |= {name: getattr(self, name) for name in names}
        weights = None if self.loss_weights is None else tuple(self.loss_weights)
        return PreferenceConfig(loss_type=losses, loss_weights=weights, log_entropy=True, **fields)


DPOConfig: type[_DPO] = dataclass_of(
    "DPOConfig",
    _DPO,
    """TRL's DPOConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> DPOConfig(loss_type="ipo").to_whet().loss_type
    ('ipo',)
    """,
)
