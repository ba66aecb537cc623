"""DPOConfig: TRL's, with every field; fields_supervised.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.config import PreferenceConfig
from whet.learners.preference_objective import make_preference_objective
from whet.trl.config.arguments import Arguments, dataclass_of
from whet.trl.config.field import Table
from whet.trl.config.supervised import DPO_FIELDS, OLD_DPO_FIELDS, SUPERVISED_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.translate_all import check_rows

__all__ = ["DPOConfig"]

_SAME = ("beta", "ld_alpha", "f_divergence_type", "use_weighting", "precompute_ref_log_probs")
"""Fields with one name and meaning in both."""
_OF_ONE = {
    "discopop_tau": ("discopop",),
    "label_smoothing": ("sigmoid", "robust", "exo_pair", "cpo"),
}
"""Fields that only these losses take."""


class _DPO(Arguments):
    """What DPOConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **SUPERVISED_FIELDS, **DPO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_DPO_FIELDS}

    def _check(self) -> None:
        """What of its values is not there."""
        super()._check()
        check_rows(self)
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        make_preference_objective(self.to_whet())

    def to_whet(self) -> PreferenceConfig:
        """The objective as whet's own configuration."""
        losses = tuple(self.loss_type)
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        fields |= {n: getattr(self, n) for n, of in _OF_ONE.items() if set(of) & set(losses)}
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
