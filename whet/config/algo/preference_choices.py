"""The names of preference losses, and when to choose each: for help, docs/preference.md and error messages.

The functions themselves are in whet.ops.preference, which needs torch; a test compares the names.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PREFERENCE_CHOICES"]

PREFERENCE_CHOICES: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        "sigmoid": "the usual one, DPO; set label_smoothing if labels are noisy",
        "sigmoid_norm": "DPO per token, for answers of unlike length; it needs a larger beta",
        "hinge": "it stops at a margin",
        "ipo": "for labels that are almost certain, which DPO would overfit",
        "robust": "for labels that are flipped at random with a known probability, label_smoothing",
        "exo_pair": "it seeks the better answer's mode; its paper has label_smoothing=1e-3",
        "nca_pair": "for data on which DPO lowers the chosen answers too (mathematics, code)",
        "bco_pair": "for answers that are clearly good or bad without comparison; the quality term of MPO",
        "bco": "bco_pair with the shift of its paper; it costs another pass for each step",
        "sppo_hard": "for self-play, with pairs that the policy has sampled itself",
        "aot": "it compares the rewards of pairs as distributions; it costs another pass for each step",
        "aot_unpaired": "aot for chosen and rejected answers of different prompts",
        "apo_zero": "for chosen answers that are better than the model's own",
        "apo_down": "for chosen answers that are worse than the model's own",
        "discopop": "the loss that a search by language models discovered",
        "sft": "it keeps the chosen answers likely; used with others",
        "cpo": "it reads no reference and needs half the memory; for translation",
        "cpo_hinge": "cpo that stops at a margin",
        "cpo_ipo": "cpo for labels that are almost certain",
        "simpo": "no reference, a reward per token; its paper has cpo_alpha=0, beta=2, simpo_gamma=1",
        "alphapo": "simpo with cpo_alpha=0 and a reward that alpha shapes",
        "orpo": "it needs no reference and no SFT before it: both in one stage",
        "kto": "for rows with a label instead of pairs",
        "apo_zero_unpaired": "kto without a KL, which needs no further passes",
    },
    "f_divergence_type": {
        "reverse_kl": "the usual one, DPO's",
        "forward_kl": "it keeps to what the reference does; rewards are bounded above",
        "js_divergence": "it is between the two",
        "alpha_divergence": "a family between the two; f_alpha_divergence_coef chooses",
    },
}
"""Field -> name -> what it does, and when to choose it."""
