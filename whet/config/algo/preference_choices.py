"""The names of preference losses, and when to choose each. Help, docs/preference.md and error messages show them.

The functions themselves are in whet.ops.preference, which needs torch; a test compares the names.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PREFERENCE_CHOICES"]

PREFERENCE_CHOICES: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        "sigmoid": "the usual one: DPO; label_smoothing where labels are noisy",
        "sigmoid_norm": "answers of unlike length: DPO per token; a larger beta",
        "hinge": "to stop at a margin",
        "ipo": "labels that are almost certain: DPO would overfit them",
        "robust": "labels flipped at random with a known probability, label_smoothing",
        "exo_pair": "to seek the better answer's mode rather than to cover; label_smoothing=1e-3",
        "nca_pair": "where DPO lowers the chosen answers too (mathematics, code)",
        "bco_pair": "where good and bad are clear without comparison; the quality term of MPO",
        "bco": "the same with the shift of its paper: a pass more for each step",
        "sppo_hard": "self-play: pairs that the policy has sampled itself",
        "aot": "rewards as distributions, of pairs: a pass more for each step",
        "aot_unpaired": "the same where chosen and rejected are of different prompts",
        "apo_zero": "chosen answers that are better than the model's own",
        "apo_down": "chosen answers that are worse than the model's own",
        "discopop": "the loss that a search found",
        "sft": "with others: keeps the chosen answers likely",
        "cpo": "no reference: half the memory; translation",
        "cpo_hinge": "the same, to stop at a margin",
        "cpo_ipo": "the same, for labels that are almost certain",
        "simpo": "no reference, reward per token; cpo_alpha=0, beta=2, simpo_gamma=1 as in its paper",
        "alphapo": "the same with cpo_alpha=0 and a reward that alpha shapes",
        "orpo": "no reference and no SFT before: both in one stage",
        "kto": "rows with a label in place of pairs",
        "apo_zero_unpaired": "the same without a KL: no further passes",
    },
    "f_divergence_type": {
        "reverse_kl": "the usual one, DPO's",
        "forward_kl": "to keep to what the reference does: rewards are bounded above",
        "js_divergence": "between the two",
        "alpha_divergence": "a family between the two, by f_alpha_divergence_coef",
    },
}
"""Field -> name -> when to choose it."""
