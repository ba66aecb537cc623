"""Preference losses: per unit, never a mean; the weights of units turn them into one number.

Every loss is fn(p: PreferenceInputs, **kw) -> [u], or ([u], {metric: [u]}). The decorator `needs` declares its input:
pairs or rows with a label, a reference, the whole batch of an optimizer step, numbers from step to step. A
PreferenceObjective mixes losses. Statistics of the whole batch are computed once before the update, as columns:
`with_counts` and `with_passes`.

The losses of TRL's trainers:

    DPOTrainer                loss_type: the same names; reference_free is of its older releases
    CPOTrainer                cpo (sigmoid), cpo_hinge (hinge), cpo_ipo (ipo), simpo, alphapo
    ORPOTrainer, KTOTrainer   orpo; kto and apo_zero_unpaired
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from whet.ops.preference.f_divergences import F_DIVERGENCES, bounded
from whet.ops.preference.inputs import (
    Needs,
    PreferenceInputs,
    Side,
    StepColumns,
    StepInputs,
    declared_needs,
    make_pair,
    needs,
    preference_inputs,
)
from whet.ops.preference.optimal_transport import aot, aot_unpaired
from whet.ops.preference.pairs import (
    apo_down,
    apo_zero,
    bco,
    bco_pair,
    discopop,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    robust,
    sigmoid,
    sigmoid_norm,
    smoothed_logsigmoid,
    sppo_hard,
)
from whet.ops.preference.preference_objective import PreferenceObjective, StepPasses
from whet.ops.preference.reference_free import alpha_reward, cpo, cpo_hinge, cpo_ipo, log_odds, orpo, sft, simpo
from whet.ops.preference.reward import REWARD_REDUCTIONS, bradley_terry
from whet.ops.preference.unpaired import apo_zero_unpaired, kto, mismatched_rows

__all__ = [
    "F_DIVERGENCES",
    "PREFERENCE_LOSSES",
    "REWARD_LOSSES",
    "REWARD_REDUCTIONS",
    "Needs",
    "PreferenceInputs",
    "PreferenceObjective",
    "Side",
    "StepColumns",
    "StepInputs",
    "StepPasses",
    "alpha_reward",
    "bounded",
    "bradley_terry",
    "declared_needs",
    "log_odds",
    "make_pair",
    "mismatched_rows",
    "needs",
    "preference_inputs",
    "smoothed_logsigmoid",
]

PREFERENCE_LOSSES: dict[str, Callable[..., Any]] = {
    "alphapo": partial(simpo, cpo_alpha=0.0),
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_down": apo_down,
    "apo_zero": apo_zero,
    "apo_zero_unpaired": apo_zero_unpaired,
    "bco": bco,
    "bco_pair": bco_pair,
    "cpo": cpo,
    "cpo_hinge": cpo_hinge,
    "cpo_ipo": cpo_ipo,
    "discopop": discopop,
    "exo_pair": exo_pair,
    "hinge": hinge,
    "ipo": ipo,
    "kto": kto,
    "nca_pair": nca_pair,
    "orpo": orpo,
    "robust": robust,
    "sft": sft,
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "simpo": simpo,
    "sppo_hard": sppo_hard,
}
"""fn(p: PreferenceInputs, **kw) -> [u], or ([u], metrics), by name."""
REWARD_LOSSES: dict[str, Callable[..., Any]] = {"bradley_terry": bradley_terry}
"""fn(x: LossInputs, **kw) -> ([u], metrics), of x.scores, by name."""
