"""Symptoms: what a row of metrics says of a run that goes wrong, each with the key to set. It changes nothing.

A symptom is a pure function of a row, (row) -> Finding or None, in the table SYMPTOMS, which docs/troubleshooting.md
shows. What has to look at more than numbers (why no group teaches, whether the policy is certain of everything) is in
health.py, which says all of them: each once, and again where it got worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from whet.config.monitoring import Band

__all__ = ["BANDS", "FULL", "RAISE", "SYMPTOMS", "Finding", "Symptom", "apart", "beyond", "symptoms", "truncated"]

MAX_TRUNCATED_SHARE = 0.5
"""A share of completions above which most are truncated."""
RAISE = "raise rollout.max_tokens_to_generate"
"""What to do where completions are too short."""
FULL = "make room by shorter prompts (rollout.max_prompt_length): the model's positions are all taken"
"""What to do instead where that can't be raised."""
MAX_DIFFERENCE = 0.1
"""Nats by which sampler and trainer may differ at a token, on average: see `ROUNDING`."""
ROUNDING = {"bfloat16": "0.02 to 0.05", "float32": "less than 0.001"}
"""What rounding makes of that: measured on SmolLM2-135M by each path of the embedded engine, with an adapter or not."""
BANDS = {
    "kl": Band(above=0.5, steps=3),
    "entropy/token_mean": Band(below=0.02, above=6.0, steps=5),
}
"""What trainer.warn_when has where nothing else is set."""


class Finding(NamedTuple):
    """What a row says of a symptom."""

    message: str
    """What is wrong, and what to do."""
    badness: float
    """How bad it is: the greater the worse, above 0."""
    fix: str = ""
    """What to set, where a front may have other words for it."""


@dataclass(frozen=True)
class Symptom:
    """A symptom, and when it is said."""

    find: Callable[[Mapping[str, float]], Finding | None]
    """What a row says of it."""
    steps: int = 1
    """Rows in a row that have it before it is said."""
    worse: float = 1.5
    """It is said again where its badness is so many times what it was."""


def truncated(
    row: Mapping[str, float], *, longer: str = RAISE, template: bool = True, end: bool = True
) -> Finding | None:
    """Most completions end at the limit.

    Args: row: of metrics. longer: what gives completions more room. template, end: whether a chat template, an end
        token is still to be set.

    >>> truncated({"completions/clipped_ratio": 0.4}) is None
    True
    >>> row = {"completions/clipped_ratio": 0.9, "completions/clipped_scored_ratio": 0.1, "completions/max_length": 64}
    >>> truncated(row).message[:100]
    '90% of completions were truncated, at 64 tokens, and 10% of those scored above 0; raise rollout.max_'
    """
    share = row.get("completions/clipped_ratio", math.nan)
    if not share > MAX_TRUNCATED_SHARE:
        return None
    scored = row.get("completions/clipped_scored_ratio", math.nan)
    of_those = "" if math.isnan(scored) else f", and {scored:.0%} of those scored above 0"
    never = ["its chat template (data.apply_chat_template=true)"] * template + [
        "its end token (rollout.eos_tokens)"
    ] * end
    ways = [longer, *([f"where the model never ends by itself, give it {' or '.join(never)}"] if never else [])]
    longest = row.get("completions/max_length", math.nan)
    return Finding(
        f"{share:.0%} of completions were truncated, at {longest:.0f} tokens{of_those}; {', or '.join(ways)}", share
    )


def apart(row: Mapping[str, float], *, engine: str = "embedded", dtype: str = "bfloat16") -> Finding | None:
    """Sampler and trainer give the same tokens other log-probabilities, with the same weights.

    Args: row: of metrics. engine: what samples. dtype: what the trainer computes in.

    >>> apart({"sampling/sampling_logp_difference/mean": 1e-3}) is None
    True
    >>> apart({"sampling/sampling_logp_difference/mean": 0.3}, dtype="float32").message[61:]
    '(embedded engine, float32), where rounding makes less than 0.001; correct for it by algo.sampler_is=token'
    """
    gap = row.get("sampling/sampling_logp_difference/mean", math.nan)
    if not gap > MAX_DIFFERENCE:
        return None
    ways = ["take rollout_engine=embedded, which samples with the trainer's own weights"] * (engine != "embedded")
    ways += ["set actor.dtype=float32"] * (dtype != "float32") + ["correct for it by algo.sampler_is=token"]
    rounding = f", where rounding makes {ROUNDING[dtype]}" if dtype in ROUNDING else ""
    message = (
        f"sampler and trainer are {gap:.2g} nats apart at a token on average ({engine} engine, {dtype}){rounding}; "
        f"{', or '.join(ways)}"
    )
    return Finding(message, gap)


def beyond(row: Mapping[str, float], *, metric: str, band: Band) -> Finding | None:
    """A metric lies outside its band.

    >>> beyond({"kl": 0.2}, metric="kl", band=Band(above=0.5)) is None
    True
    >>> beyond({"x": 3.0}, metric="x", band=Band(above=2.0)).message
    'x is 3, above 2'
    """
    value = row.get(metric, math.nan)
    low, high = band.below, band.above
    if low is not None and value < low:
        side, bound, badness = "below", low, 1 + (low - value) / max(abs(low), 1e-9)
    elif high is not None and value > high:
        side, bound, badness = "above", high, 1 + (value - high) / max(abs(high), 1e-9)
    else:
        return None
    key = f"{metric}.{side}"
    advice = _ADVICE.get((metric, side), "")
    return Finding(
        f"{metric} is {value:.3g}, {side} {bound:g}{advice and '; ' + advice}",
        badness,
        fix=f"trainer.stop_when.{key}={bound:g} ends a run there, trainer.warn_when.{key} sets the bound",
    )


_ADVICE = {
    ("kl", "above"): "the policy has moved far from the reference: raise algo.beta, or lower actor.lr",
    ("entropy/token_mean", "below"): (
        "completions become alike: raise rollout.temperature, algo.entropy_coef or algo.epsilon_high, or lower actor.lr"
    ),
    ("entropy/token_mean", "above"): (
        "completions become noise: lower rollout.temperature, algo.entropy_coef or actor.lr"
    ),
}
"""What to set where a metric lies outside its band."""

SYMPTOMS: dict[str, Symptom] = {
    "truncated": Symptom(truncated),
    "apart": Symptom(apart, steps=2),
}
"""The symptoms by name, besides those of bands."""


def symptoms(bands: Mapping[str, Band] | None) -> dict[str, Symptom]:
    """The symptoms that a run looks for. Args: bands: trainer.warn_when, in place of BANDS by their metrics.

    >>> sorted(symptoms({"kl": Band(above=2.0), "grad_norm": Band(above=50.0)}))
    ['apart', 'entropy/token_mean', 'grad_norm', 'kl', 'truncated']
    """
    given = {**BANDS, **(bands or {})}
    watched = {name: Symptom(partial(beyond, metric=name, band=band), band.steps, 3.0) for name, band in given.items()}
    return {**SYMPTOMS, **watched}
