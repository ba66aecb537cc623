"""docs/preference.md: the losses of preference and reward-model training, with what each reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tools.docs.algorithms import equation, source
from tools.docs.table import table
from whet.config import PreferenceConfig, RewardModelConfig
from whet.config.introspection import choices, field_docs
from whet.learners.from_config import keyword_arguments
from whet.ops.preference import F_DIVERGENCES, PREFERENCE_LOSSES, REWARD_LOSSES, declared_needs

__all__ = ["PREFERENCE_KNOWN", "page"]

PREFERENCE_KNOWN: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "loss_type": PREFERENCE_LOSSES,
    "f_divergence_type": F_DIVERGENCES,
}
"""Field of PreferenceConfig -> the functions that it names."""
_OPTIONS = ("loss_weights", "beta", "label_smoothing", "reference_free", "ld_alpha", "use_weighting")
_OF_REFERENCE = ("precompute_ref_log_probs", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
_INTRO = """# Preference training and reward models

    loss of a unit = v · Σ weight · loss of its two sides
    loss of a step = mean over the units of the step

A unit is a pair, a chosen and a rejected answer to a prompt, or a single row with a label. One command trains with all
of these losses: `whet dpo ... algo.loss_type=simpo`. `algo.loss_type` is a name, a list of names (added up with
`algo.loss_weights`), a function, or "file.py:function". `whet rm` trains a reward model.

r_w = log π(y_w|x) − log π_ref(y_w|x) is the log-ratio of the chosen side, a sum over its trained tokens, r_l that of
the rejected side; h_w and h_l are log π alone. δ is the difference of both scores: r_w − r_l, or with another
f-divergence f'(exp r_w) − f'(exp r_l). σ is the logistic function, β `algo.beta`, |y| the trained tokens of a side.

A parameter that none of the chosen losses takes is refused where it was set. The column "reads" says what a step costs
besides its update: `reference` a pass of the reference (none with `algo.precompute_ref_log_probs`), `batch` a pass of
the policy before the update, since the loss looks across the whole batch of an optimizer step; `mismatched` a pass of
both over mismatched rows. What is looked up across the batch is of the whole optimizer step, however it is cut into
micro-batches. TRL does it for each micro-batch, which is the same only without gradient accumulation.
"""
_OWN = """## A loss of your own

A function of [PreferenceInputs](extending.md) that returns a number for each unit, or that and metrics. It is given
those of its keyword-only arguments that `algo` has as fields, and says by `needs` what it reads:

```python
import torch.nn.functional as F

from whet.config import PreferenceConfig
from whet.learners.preference_from_config import make_preference_objective
from whet.ops.preference import needs


@needs(reference=False)
def per_token(p, *, beta=0.1, simpo_gamma=0.5):
    chosen, rejected = (side.per_token(side.logps) for side in (p.chosen, p.rejected))
    return -F.logsigmoid(beta * (chosen - rejected) - simpo_gamma)


make_preference_objective(PreferenceConfig(loss_type=per_token, simpo_gamma=1.0))
```

What looks across the batch declares `step=`, a function of the whole optimizer step's sums (`StepInputs`) that returns
columns (`StepColumns`), and with `policy_pass=True` the policy is read before the update. `aot` in
`whet/ops/preference/optimal_transport.py` is an example.
"""


def _parameters(fn: Callable[..., Any], config: type) -> str:
    """The fields that a function takes, with their defaults, and the values that its name fixes."""
    taken = keyword_arguments(fn)
    words = [f"`{f.name}={f.default}`" for f in fields(config) if f.name in taken]
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    return ", ".join([*words, *(f"{name} = {value}" for name, value in fixed.items())])


def _reads(fn: Callable[..., Any]) -> str:
    """The rows of a loss, and the passes that it declares."""
    need = declared_needs(fn)
    passes = {"reference": need.reference, "batch": need.policy_pass, "mismatched": need.mismatched_pass}
    return ", ".join([need.rows, *(name for name, asked in passes.items() if asked)])


def _table(config: type, field: str, known: Mapping[str, Callable[..., Any]], reads: bool) -> str:
    """A row for each name, in the order in which help shows them."""
    heads = ["name", "what it is", "when", "parameters", *(["reads"] if reads else []), "source"]
    rows = []
    for name, when in choices(config, field).items():
        fn = known[name]
        cells = [f"`{name}`", equation(fn), when, _parameters(fn, config)]
        rows.append([*cells, *([_reads(fn)] if reads else []), source(fn)])
    return table(heads, rows)


def _options(names: tuple[str, ...]) -> str:
    """A row for each field: its default and what it is."""
    docs, defaults = field_docs(PreferenceConfig), {f.name: f.default for f in fields(PreferenceConfig)}
    rows = [(f"`algo.{name}`", f"`{defaults[name]}`", " ".join(docs[name].split())) for name in names]
    return table(["key", "default", "what it does"], rows)


def page() -> str:
    """The text of docs/preference.md."""
    parts = [
        _INTRO,
        f"## Losses\n\n{_table(PreferenceConfig, 'loss_type', PREFERENCE_LOSSES, True)}\n",
        f"## Options\n\n{_options(_OPTIONS)}\n",
        "## The divergence from the reference\n\n`algo.f_divergence_type`: which function of the log-ratio the reward "
        "is, for the losses that are made of δ.\n",
        _table(PreferenceConfig, "f_divergence_type", F_DIVERGENCES, False) + "\n",
        f"## The reference\n\n{_options(_OF_REFERENCE)}\n",
        "## Reward models\n",
        _table(RewardModelConfig, "loss_type", REWARD_LOSSES, False) + "\n",
        _OWN,
    ]
    return "\n".join(parts)
