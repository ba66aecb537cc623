"""Symptoms: problems that a row of metrics shows, each with the key to set. They read numbers alone, without torch.

`SYMPTOMS` lists them, and `symptoms` adds the bounds of trainer.warn_when. Diagnostics (diagnostics.py) decides when a
run logs them; `whet report` and `whet watch` show them of a run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from whet.config.monitoring import Band

__all__ = [
    "BANDS",
    "RAISE_EPISODE_LIMIT",
    "RAISE_LIMIT",
    "SHORTEN_PROMPTS",
    "SYMPTOMS",
    "Finding",
    "Symptom",
    "find_no_signal",
    "find_out_of_band",
    "find_sampler_mismatch",
    "find_truncation",
    "symptoms",
]

MAX_TRUNCATED_SHARE = 0.5
"""More than this share of truncated completions is a problem."""
RAISE_LIMIT = "raise rollout.max_tokens_to_generate"
"""The advice where completions are too short."""
RAISE_EPISODE_LIMIT = "raise rollout.max_episode_tokens (the environment's words count in it)"
"""The advice where the environment's words leave no room for a turn."""
SHORTEN_PROMPTS = (
    "shorten the prompts (rollout.max_prompt_length), since they and the completions fill the model's context"
)
"""The advice where the limit of completions can't be raised."""
MAX_DIFFERENCE = 0.1
"""Sampler and trainer may differ by this many nats per token, on average."""
ROUNDING = {"bfloat16": "0.02 to 0.05", "float32": "less than 0.001"}
"""The difference that rounding causes, by dtype: measured on SmolLM2-135M with the embedded engine."""
BANDS = {
    "kl": Band(above=0.5, steps=3),
    "entropy/token_mean": Band(below=0.02, above=6.0, steps=5),
}
"""The bounds of trainer.warn_when where the configuration sets none."""


class Finding(NamedTuple):
    """A problem that a row of metrics shows."""

    message: str
    """The problem, and what to do."""
    severity: float
    """Above 0; larger is worse."""
    fix: str = ""
    """The keys to set, apart from the message, since a compatibility layer may have other names for them."""


@dataclass(frozen=True)
class Symptom:
    """A rule that finds a problem in a row of metrics."""

    find: Callable[[Mapping[str, float]], Finding | None]
    """Row -> the problem; None = there is none."""
    steps: int = 1
    """The first warning comes after so many rows in a row."""
    repeat_factor: float = 1.5
    """The next warning comes when the severity is this many times that of the warning before."""


def find_truncation(
    row: Mapping[str, float], *, more_room: str = RAISE_LIMIT, can_set_template: bool = True, can_set_eos: bool = True
) -> Finding | None:
    """Most completions end at the limit.

    Args:
        row: metrics.
        more_room: the advice that gives completions more room.
        can_set_template, can_set_eos: whether the advice names the chat template, and the end token.

    >>> find_truncation({"completions/clipped_ratio": 0.4}) is None
    True
    >>> row = {"completions/clipped_ratio": 0.9, "completions/clipped_scored_ratio": 0.1, "completions/max_length": 64}
    >>> find_truncation(row).message[:86]
    '90% of completions were truncated, at 64 tokens, and 10% of those had a reward above 0'
    """
    share = row.get("completions/clipped_ratio", math.nan)
    if not share > MAX_TRUNCATED_SHARE:
        return None
    scored = row.get("completions/clipped_scored_ratio", math.nan)
    of_those = "" if math.isnan(scored) else f", and {scored:.0%} of those had a reward above 0"
    stops = ["its chat template (data.apply_chat_template=true)"] * can_set_template
    stops += ["its end token (rollout.eos_tokens)"] * can_set_eos
    advice = more_room
    if stops:
        advice += f"; if the model never ends a completion by itself, give it {' or '.join(stops)}"
    longest = row.get("completions/max_length", math.nan)
    message = f"{share:.0%} of completions were truncated, at {longest:.0f} tokens{of_those}; {advice}"
    return Finding(message, share)


def find_no_signal(row: Mapping[str, float]) -> Finding | None:
    """The completions of each prompt have equal rewards. In a run, Diagnostics finds it in the rewards, with the cause.

    >>> find_no_signal({"frac_reward_zero_std": 0.9}) is None
    True
    """
    if row.get("frac_reward_zero_std") != 1.0:
        return None
    return Finding(
        f"all completions of each prompt have the same reward (mean {row.get('reward', math.nan):.3g}), so nothing is "
        "learned: read some of them, check the reward functions, raise algo.num_generations or rollout.temperature, or "
        "bring prompts that are neither too hard nor too easy",
        1.0,
    )


def find_sampler_mismatch(
    row: Mapping[str, float], *, engine: str = "embedded", dtype: str = "bfloat16"
) -> Finding | None:
    """Finds that sampler and trainer compute different log-probabilities for the same tokens, with the same weights.

    Args: row: metrics. engine: the engine's name. dtype: the trainer's.

    >>> find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 1e-3}) is None
    True
    >>> find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 0.3}, dtype="float32").message[61:]
    '(embedded engine, float32), where rounding makes less than 0.001; correct for it by algo.sampler_is=token'
    """
    gap = row.get("sampling/sampling_logp_difference/mean", math.nan)
    if not gap > MAX_DIFFERENCE:
        return None
    advice = ["take rollout_engine=embedded, which samples with the trainer's own weights"] * (engine != "embedded")
    advice += ["set actor.dtype=float32"] * (dtype != "float32") + ["correct for it by algo.sampler_is=token"]
    rounding = f", where rounding makes {ROUNDING[dtype]}" if dtype in ROUNDING else ""
    message = (
        f"sampler and trainer are {gap:.2g} nats apart at a token on average ({engine} engine, {dtype}){rounding}; "
        f"{', or '.join(advice)}"
    )
    return Finding(message, gap)


def find_out_of_band(row: Mapping[str, float], *, metric: str, band: Band) -> Finding | None:
    """Finds a metric that lies outside its band.

    >>> find_out_of_band({"kl": 0.2}, metric="kl", band=Band(above=0.5)) is None
    True
    >>> find_out_of_band({"x": 3.0}, metric="x", band=Band(above=2.0)).message
    'x is 3, above 2'
    """
    value = row.get(metric, math.nan)
    low, high = band.below, band.above
    if low is not None and value < low:
        side, bound, distance = "below", low, low - value
    elif high is not None and value > high:
        side, bound, distance = "above", high, value - high
    else:
        return None
    key = f"{metric}.{side}"
    advice = _ADVICE.get((metric, side), "")
    return Finding(
        f"{metric} is {value:.3g}, {side} {bound:g}{advice and '; ' + advice}",
        1 + distance / max(abs(bound), 1e-9),
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
"""The keys to set where a metric lies outside its band."""

SYMPTOMS: dict[str, Symptom] = {
    "truncated": Symptom(find_truncation),
    "sampler_mismatch": Symptom(find_sampler_mismatch, steps=2),
}
"""The symptoms by name, without those of bands."""


def symptoms(bands: Mapping[str, Band] | None) -> dict[str, Symptom]:
    """Returns the symptoms that a run looks for. Args: bands: trainer.warn_when; its metrics replace those of BANDS.

    >>> sorted(symptoms({"kl": Band(above=2.0), "grad_norm": Band(above=50.0)}))
    ['entropy/token_mean', 'grad_norm', 'kl', 'sampler_mismatch', 'truncated']
    """
    out_of_band = {
        metric: Symptom(partial(find_out_of_band, metric=metric, band=band), band.steps, repeat_factor=3.0)
        for metric, band in {**BANDS, **(bands or {})}.items()
    }
    return {**SYMPTOMS, **out_of_band}
