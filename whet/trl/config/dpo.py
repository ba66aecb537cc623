"""DPOConfig: the table of its fields, and the class. supervised.py and training.py have the shared fields."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import Tensor

from whet.compat.field import Table, deprecated, no_effect, works
from whet.config import PreferenceConfig
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
    "truncation_mode": works("keep_start", "or keep_end; pairs without trained tokens are dropped and counted"),
    "padding_free": no_effect(False, "whet never pads"),
    "precompute_ref_log_probs": works(False),
    "precompute_ref_batch_size": no_effect(None, "max_tokens_per_microbatch sets the size of a pass", int),
    "loss_type": works(["sigmoid"], "also whet's other losses of pairs (whet docs preference)", list[str]),
    "loss_weights": works(None, kind=list[float]),
    "ld_alpha": works(None, kind=float),
    "f_divergence_type": works("reverse_kl"),
    "f_alpha_divergence_coef": works(0.5),
    "label_smoothing": works(0.0, "as in TRL, sigmoid ignores it; cDPO is loss_type='whet.ops.preference:sigmoid'"),
    "beta": works(0.1),
    "use_weighting": works(False),
    "discopop_tau": works(0.05),
    "sync_ref_model": works(False),
    "ref_model_mixup_alpha": works(0.6),
    "ref_model_sync_steps": works(512),
}
"""Field -> its default and its meaning in whet."""

_NO_PROMPT_LIMIT = "no effect: as in later releases, max_length limits prompt and answer together"
OLD_DPO_FIELDS: Table = {
    "max_prompt_length": deprecated(_NO_PROMPT_LIMIT, int),
    "max_completion_length": deprecated(_NO_PROMPT_LIMIT, int),
}
"""Field of an earlier TRL -> how it is read."""

_SAME = ("beta", "ld_alpha", "f_divergence_type", "use_weighting", "precompute_ref_log_probs")
"""Fields with the same name and meaning in whet's PreferenceConfig."""
_LOSS_FIELDS = ("discopop_tau", "label_smoothing")
"""Fields that only some losses read."""


@needs(difference=True)
def sigmoid(p: PreferenceInputs, *, beta: float = 0.1) -> Tensor:
    """DPO's loss without label smoothing, for use together with a loss that reads it."""
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
                    "%s=%s is not read: as in later releases, max_length=%s limits prompt and answer together",
                    *(name, getattr(self, name), self.max_length),
                )
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        make_preference_objective(self.to_whet())
        if self.label_smoothing and "sigmoid" in self.loss_type:
            log.warning(
                "label_smoothing=%s has no effect on the sigmoid loss, as in TRL; for cDPO set "
                "loss_type='whet.ops.preference:sigmoid'",
                self.label_smoothing,
            )

    def to_whet(self) -> PreferenceConfig:
        """Returns the objective as whet's own configuration."""
        losses = tuple(sigmoid if name == "sigmoid" and self.label_smoothing else name for name in self.loss_type)
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        keywords = {n for loss in losses for n in keyword_arguments(resolve_name(loss, PREFERENCE_LOSSES, "loss_type"))}
        fields |= {name: getattr(self, name) for name in _LOSS_FIELDS if name in keywords}
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
    """TRL's DPOConfig, with all its fields and defaults; docs/from-trl.md describes each field.

    >>> DPOConfig(loss_type="ipo").to_whet().loss_type
    ('ipo',)
    """,
)
