"""The objectives of reward models and preference training: the section algo of `whet rm` and `whet dpo`.

Names and defaults are TRL's where TRL has the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from whet.config.algo.fields_read import PREFERENCE_READS, REWARD_MODEL_READS, Readers
from whet.config.algo.preference_choices import PREFERENCE_CHOICES
from whet.config.algo.sft import SupervisedConfig
from whet.config.algo.unused_fields import check_fields_read
from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Functions, Name
from whet.errors import ConfigError

__all__ = ["PreferenceConfig", "RewardModelConfig"]


@config
class RewardModelConfig(SupervisedConfig):
    """Training of a reward model on pairs, by the preference model of Bradley and Terry on the scores of last tokens.

    >>> RewardModelConfig(center_rewards_coefficient=-1.0)
    Traceback (most recent call last):
    whet.errors.ConfigError: center_rewards_coefficient must not be negative, got -1.0
    """

    CHOICES: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "loss_type": {"bradley_terry": "the usual one; it reads margins if the rows have them"}
    }
    READS: ClassVar[Readers] = REWARD_MODEL_READS

    loss_type: Name | Fn = "bradley_terry"
    """The loss of a pair, from its two scores: a name, a function or "package.module:function"."""
    center_rewards_coefficient: Float | None = None
    """c of the term c·(s_w + s_l)², which keeps rewards around 0; 0.01 is usual, None = off."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        c = self.center_rewards_coefficient
        if c is not None and c < 0:
            raise ConfigError(f"center_rewards_coefficient must not be negative, got {c!r}")


@config
class PreferenceConfig(SupervisedConfig):
    """Preference training: DPO and its relatives, on pairs or on rows with a label.

    >>> PreferenceConfig(loss_type="simpo", cpo_alpha=0.0, beta=2.0).loss_type
    ('simpo',)
    >>> PreferenceConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0])
    Traceback (most recent call last):
    whet.errors.ConfigError: loss_weights has 1 number for 2 losses (sigmoid, sft); give one for each
    """

    CHOICES: ClassVar[Mapping[str, Mapping[str, str]]] = PREFERENCE_CHOICES
    READS: ClassVar[Readers] = PREFERENCE_READS
    REFUSED: ClassVar[dict[str, str]] = {
        "max_length": "set the length of rows in the section data: data.max_length",
        "padding_free": "rows are packed wherever the model takes it",
        "precompute_ref_batch_size": "passes follow the reference's token budget: reference.max_tokens_per_micro_batch",
        "truncation_mode": "set the treatment of rows that are too long in the section data: data.on_long",
    }

    loss_type: Functions = ("sigmoid",)
    """The loss of a pair or labelled row: a name, a function or "package.module:function"; or a list of them, added up
    with loss_weights."""
    loss_weights: tuple[Float, ...] | None = None
    """Weight of each loss_type, in their order; None = 1.0 each. MPO: loss_type=[sigmoid, bco_pair, sft] with
    [0.8, 0.2, 1.0]."""
    beta: Float = 0.1
    """β, the factor from log-ratio to reward; a larger one keeps the policy nearer to the reference. It is ipo's τ and
    orpo's λ."""
    label_smoothing: Float = 0.0
    """ε, the probability that a preference has the wrong direction."""
    reference_free: Bool = False
    """Take the reference's log-probabilities as 0 everywhere and load no reference."""
    ld_alpha: Float | None = None
    """α of LD-DPO, 0.0 to 1.0: the weight of tokens beyond the length of the shorter answer; None = 1.0."""
    f_divergence_type: Name | Fn = "reverse_kl"
    """The divergence from the reference that defines the rewards; for losses of the difference of two rewards."""
    f_alpha_divergence_coef: Float = 0.5
    """α of f_divergence_type=alpha_divergence."""
    use_weighting: Bool = False
    """Weigh each pair as WPO does, by the policy's own probability of both answers."""
    discopop_tau: Float = 0.05
    """discopop: τ, the temperature of the change from the logistic to the exponential loss."""
    simpo_gamma: Float = 0.5
    """simpo and alphapo: γ, the margin between the two rewards."""
    cpo_alpha: Float = 1.0
    """cpo, cpo_hinge, cpo_ipo and simpo: λ, the weight of the chosen answers' likelihood; 0.0 = SimPO as in its
    paper."""
    alpha: Float = 0.0
    """cpo, cpo_hinge, cpo_ipo, simpo and alphapo: α of AlphaPO's reward (1 - p^-α) / α; 0.0 = log p."""
    desirable_weight: Float = 1.0
    """Rows with a label: λ_D, the weight of desirable rows."""
    undesirable_weight: Float = 1.0
    """Rows with a label: λ_U, the weight of undesirable rows. Choose both weights so that the weighted numbers of rows
    are similar."""
    log_entropy: Bool = False
    """Log the mean entropy of the distributions of the trained tokens, in nats. It costs some time."""
    precompute_ref_log_probs: Bool = False
    """Score the whole data set with the reference before the first step, then free its memory."""
    sync_ref_model: Bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps (TR-DPO)."""
    ref_model_mixup_alpha: Float = 0.6
    """α of sync_ref_model: reference = α * policy + (1 - α) * reference; 1.0 = copy the policy."""
    ref_model_sync_steps: Count = 512
    """Steps between two moves of the reference with sync_ref_model."""

    def __post_init__(self) -> None:
        """Checks the ranges, and that nothing is set that would have no effect."""
        names = ", ".join(loss if isinstance(loss, str) else "a function" for loss in self.loss_type)
        if not self.loss_type:
            raise ConfigError("loss_type is empty; give at least one loss")
        if twice := [loss for i, loss in enumerate(self.loss_type) if loss in self.loss_type[:i]]:
            raise ConfigError(f"loss_type has {twice[0]!r} twice; give it once, with the sum of both loss_weights")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            count = len(self.loss_weights)
            raise ConfigError(
                f"loss_weights has {count} number{'s' * (count != 1)} for {len(self.loss_type)} losses ({names}); give "
                "one for each"
            )
        for name in ("beta", "discopop_tau", "ref_model_mixup_alpha"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")
        for name in ("cpo_alpha", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing must be at least 0 and less than 0.5, got {self.label_smoothing!r}: from 0.5 on "
                "preferences would mean the opposite"
            )
        if "exo_pair" in self.loss_type and self.label_smoothing == 0:
            raise ConfigError("loss_type=exo_pair divides by label_smoothing, got 0.0; its paper has 1e-3")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"ld_alpha must be between 0 and 1, got {self.ld_alpha!r}; None turns it off")
        if self.ref_model_mixup_alpha > 1:
            raise ConfigError(f"ref_model_mixup_alpha must be at most 1, got {self.ref_model_mixup_alpha!r}")
        self._check_reference()

    def _check_reference(self) -> None:
        """Raises ConfigError for fields about the reference that contradict one another, or have no effect."""
        check_fields_read(self)
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "precompute_ref_log_probs reads the reference once, and sync_ref_model moves it; choose one"
            )
        if self.reference_free:
            for name in ("sync_ref_model", "precompute_ref_log_probs"):
                if getattr(self, name):
                    raise ConfigError(f"{name}=True has no effect with reference_free=True, which reads no reference")
            if self.f_divergence_type != "reverse_kl":
                raise ConfigError(
                    f"f_divergence_type={self.f_divergence_type!r} is a divergence from the reference, and "
                    "reference_free=True reads none; leave one of them out"
                )
