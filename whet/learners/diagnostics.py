"""Diagnostics: warnings about a run that goes wrong, each with the key to set. They change nothing.

A Symptom is a function of a row of metrics. SYMPTOMS lists them, and `symptoms` adds the bounds of trainer.warn_when.
Four further problems are found in the rewards, the batch and the sampler of a step: no advantage differs from 0
(no_signal), the gradient is 0 (zero_gradient), and the policy is certain of every token (deterministic) or of none
(uniform). docs/troubleshooting.md has a table of all of them.

Each problem is logged once, and again only where it gets worse. Checkpoints hold the few numbers that this needs, so a
resumed run warns where the uninterrupted one would. Gradients that are not finite are left to RoleTrainer, which ends a
run that has many of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.cluster import RLCluster
from whet.config import Mode, Role
from whet.config.monitoring import Band
from whet.data.templates import uses_chat_template
from whet.envs.agent import AGENT_REWARD
from whet.errors import nearest
from whet.models.modes import max_positions
from whet.ops import LogitsProcessors
from whet.train.role_trainer import lower_lr_advice
from whet.types import TokenBatch

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = [
    "BANDS",
    "SYMPTOMS",
    "Diagnostics",
    "Finding",
    "Symptom",
    "find_out_of_band",
    "find_sampler_mismatch",
    "find_truncation",
    "num_choices",
    "symptoms",
]

log = logging.getLogger("whet")

MAX_TRUNCATED_SHARE = 0.5
"""More than this share of truncated completions is a problem."""
RAISE_LIMIT = "raise rollout.max_tokens_to_generate"
"""The advice where completions are too short."""
SHORTEN_PROMPTS = "make room by shorter prompts (rollout.max_prompt_length): the model's positions are all taken"
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
FIRST_STEPS = {"no_signal": 3, "zero_gradient": 10, "deterministic": 10, "uniform": 10}
"""The first warning comes after so many steps in a row."""
REPEAT_FACTOR = 10
"""The next warning comes when a problem has lasted this many times as long as at the warning before."""
MISSING_STEPS = 3
"""A metric of trainer.warn_when that no row has had by then is reported."""
MIN_ENTROPY = 1e-4
"""At a mean entropy below this, in nats, the completions of a prompt are almost surely all the same."""
UNIFORM_SHARE = 1e-3
"""A mean entropy below its maximum by less than this share is that of uniform draws."""


# ---- symptoms: problems that a row of metrics shows ------------------------------------------------------------------


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
    >>> find_truncation(row).message[:100]
    '90% of completions were truncated, at 64 tokens, and 10% of those scored above 0; raise rollout.max_'
    """
    share = row.get("completions/clipped_ratio", math.nan)
    if not share > MAX_TRUNCATED_SHARE:
        return None
    scored = row.get("completions/clipped_scored_ratio", math.nan)
    of_those = "" if math.isnan(scored) else f", and {scored:.0%} of those scored above 0"
    stops = ["its chat template (data.apply_chat_template=true)"] * can_set_template
    stops += ["its end token (rollout.eos_tokens)"] * can_set_eos
    advice = [more_room]
    if stops:
        advice.append(f"where the model never ends by itself, give it {' or '.join(stops)}")
    longest = row.get("completions/max_length", math.nan)
    message = f"{share:.0%} of completions were truncated, at {longest:.0f} tokens{of_those}; {', or '.join(advice)}"
    return Finding(message, share)


def find_sampler_mismatch(
    row: Mapping[str, float], *, engine: str = "embedded", dtype: str = "bfloat16"
) -> Finding | None:
    """Sampler and trainer compute different log-probabilities for the same tokens, with the same weights.

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
    """A metric lies outside its band.

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
    """The symptoms that a run looks for. Args: bands: trainer.warn_when; its metrics replace those of BANDS.

    >>> sorted(symptoms({"kl": Band(above=2.0), "grad_norm": Band(above=50.0)}))
    ['entropy/token_mean', 'grad_norm', 'kl', 'sampler_mismatch', 'truncated']
    """
    out_of_band = {
        metric: Symptom(partial(find_out_of_band, metric=metric, band=band), band.steps, repeat_factor=3.0)
        for metric, band in {**BANDS, **(bands or {})}.items()
    }
    return {**SYMPTOMS, **out_of_band}


# ---- the diagnostics of a run ----------------------------------------------------------------------------------------


class Diagnostics:
    """Checks each step of a run, and logs the problems.

    Args:
        cluster: the run's.
        learns_from_rewards: whether only tokens with an advantage are learned from.
        bands: trainer.warn_when.
        templated: whether prompts that are plain text go through the chat template too.

    Example: diagnostics.check(step, row, rewards, batch) after each step; diagnostics.state() into the checkpoint.
    """

    def __init__(
        self,
        cluster: RLCluster,
        *,
        learns_from_rewards: bool = True,
        bands: Mapping[str, Band] | None = None,
        templated: bool = False,
    ) -> None:
        self.cluster = cluster
        self.learns_from_rewards = learns_from_rewards
        self.templated = templated
        self.symptoms = symptoms(bands)
        self._unseen = set(bands or {})
        """The metrics of bands that no row has had."""
        self._since: dict[str, tuple[int, int]] = {}
        """Problem -> (the first step that had it, the number of rows that have had it since)."""
        self._severity: dict[str, float] = {}
        """Problem -> its severity at the last warning."""

    def check(self, step: int, row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch) -> None:
        """Logs the problems that are new or worse.

        Args: step: the step that has just finished. row: its metrics. rewards, batch: what it was trained on.
        """
        signal = _has_signal(rewards, batch) or not self.learns_from_rewards
        problems = {
            "no_signal": not signal,
            # None = this step does not tell: all its updates were skipped, or it had no signal
            "zero_gradient": row["grad_norm"] == 0.0 if signal and "grad_norm" in row else None,
            **self._check_entropy(row),
        }
        for name, present in problems.items():
            if present is None:
                continue
            lasted = self._count(name, step) if present else self._reset(name)
            first = 1 if name == "no_signal" and bool(np.isnan(rewards.total).all()) else FIRST_STEPS[name]
            if lasted >= first and lasted >= REPEAT_FACTOR * self._severity.get(name, 0.0):
                self._warn(name, lasted, self._describe(name, row, rewards, batch))
        for name, symptom in self.symptoms.items():
            finding = symptom.find(row)
            if finding and name == "truncated":
                finding = find_truncation(row, **self._truncation_advice(rewards))
            if finding and name == "sampler_mismatch":
                dtype = self.cluster.dtypes[Role.ACTOR.value]
                finding = find_sampler_mismatch(row, engine=self.cluster.engine_name, dtype=dtype)
            lasted = self._reset(name) if finding is None else self._count(name, step)
            worse = symptom.repeat_factor * self._severity.get(name, 0.0)
            if finding and lasted >= symptom.steps and finding.severity >= worse:
                self._warn(name, finding.severity, finding.message, finding.fix)
        self._unseen -= row.keys()
        for name in sorted(self._unseen):
            if self._count(f"no {name}", step) == MISSING_STEPS:
                hint = nearest(name, row) or "; whet docs run-folder lists the metrics, and when each is logged"
                log.warning("trainer.warn_when.%s: %d rows, and none had that metric%s", name, MISSING_STEPS, hint)

    def _count(self, name: str, step: int) -> int:
        """Counts a row that has a problem. Returns: how many in a row have it now."""
        first, count = self._since.get(name, (step, 0))
        self._since[name] = (first, count + 1)
        return count + 1

    def _reset(self, name: str) -> int:
        self._since.pop(name, None)
        return 0

    def _warn(self, name: str, severity: float, message: str, fix: str = "") -> None:
        self._severity[name] = severity
        first, count = self._since[name]
        when = f"step {first}" if count == 1 else f"for {count} steps, since step {first}"
        log.warning("%s: %s%s", when, message, fix and f"; {fix}", extra={"fix": fix, "key": "trainer.warn_when"})

    def _check_entropy(self, row: Mapping[str, float]) -> dict[str, bool | None]:
        """Whether the policy is certain of every token, or of none; None where no entropy was measured."""
        entropy = row.get("entropy/token_mean", math.nan)
        if math.isnan(entropy):
            return {"deterministic": None, "uniform": None}
        choices = self._num_choices()
        uniform = choices is not None and entropy >= (1 - UNIFORM_SHARE) * math.log(choices)
        return {"deterministic": entropy <= MIN_ENTROPY, "uniform": uniform}

    def _num_choices(self) -> int | None:
        actor = self.cluster.actor
        vocabulary = int(actor.module.get_input_embeddings().weight.shape[0])  # pyright: ignore
        return num_choices(actor.processors, vocabulary)

    def _describe(self, name: str, row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch) -> str:
        """A problem, what it means, and what to look at."""
        if name == "no_signal":
            return _describe_no_signal(row, rewards, batch, self._truncation_advice(rewards)["more_room"])
        if name == "zero_gradient":
            return (
                "the gradient is exactly 0 though advantages are not, so nothing is learned; look at "
                "algo.policy_loss_fn and algo.loss_agg_mode (a loss without a gradient, weights of 0), and at entropy "
                "(0: the policy is certain of every token)"
            )
        if name == "deterministic":
            return (
                f"the policy is certain of every token (entropy {row['entropy/token_mean']:.3g}), so all "
                "completions of a prompt are the same and nothing more is learned. If the reward is still too low: "
                f"{lower_lr_advice(Role.ACTOR)}; a higher rollout.temperature or algo.beta helps prevent this"
            )
        return (
            f"the policy samples nearly uniformly from {self._num_choices()} tokens (entropy "
            f"{row['entropy/token_mean']:.6g}), as a model with random weights does; if it was better before, "
            f"{lower_lr_advice(Role.ACTOR)}"
        )

    def _truncation_advice(self, rewards: RewardBatch) -> dict[str, Any]:
        """The arguments of find_truncation: the keys that this run can still set."""
        rollout, positions = self.cluster.rollout_for(Mode.TRAIN), max_positions(self.cluster.actor.module)
        prompts = [group.prompt for group in rewards.groups]
        room = math.inf if positions is None else positions - rollout.max_tokens_to_generate
        full = room <= max(len(p.tokens) for p in prompts) or room == rollout.max_prompt_length
        plain_text = isinstance(prompts[0].source, str) and not self.templated
        return {
            "more_room": SHORTEN_PROMPTS if full else RAISE_LIMIT,
            "can_set_template": plain_text and uses_chat_template(self.cluster.tokenizer, rollout.chat_template_kwargs),
            "can_set_eos": not rollout.eos_tokens,
        }

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For checkpoints: how long each problem has lasted, and its severity at the last warning."""
        return {"since": {name: list(pair) for name, pair in self._since.items()}, "severity": dict(self._severity)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self._since = {name: (int(first), int(count)) for name, (first, count) in state["since"].items()}
        self._severity = {name: float(severity) for name, severity in state["severity"].items()}


def num_choices(processors: LogitsProcessors, vocabulary: int) -> int | None:
    """The number of tokens that a uniform policy draws from: its entropy is the logarithm of this number.

    Args: processors: of the draws. vocabulary: the number of tokens.
    Returns: None where the number is less than two, or differs from token to token (a constraint).

    >>> num_choices(LogitsProcessors(), 100), num_choices(LogitsProcessors(top_k=50, top_p=0.5), 100)
    (100, 25)
    """
    if processors.full or processors.temperature == 0:
        return vocabulary if vocabulary > 1 else None
    if processors.constrained:
        return None
    number = vocabulary - len({i for i in processors.forbidden_ids if 0 <= i < vocabulary})
    number = min(number, processors.top_k or number)
    number = math.ceil(number * processors.top_p)
    return number if number > 1 else None


def _has_signal(rewards: RewardBatch, batch: TokenBatch) -> bool:
    """Whether some trained token has an advantage other than 0."""
    if batch.advantages is None:
        return bool(batch.mask.any() and rewards.have_spread.any())
    return bool(((batch.advantages != 0) & batch.mask).any())


def _describe_no_signal(row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch, more_room: str) -> str:
    """Why no token has an advantage, and what to look at. Args: more_room: the advice for truncated completions."""
    group, text = rewards.groups[0], rewards.texts[0][0]
    reward = float(rewards.total[0])
    scored = "no reward" if math.isnan(reward) else f"reward {reward}"
    example = f"To {group.prompt.source!r:.80} the model said {text!r:.80}, {scored}"
    reasons = [c.finish_reason for g in rewards.groups for c in g.completions]
    failed, truncated = reasons.count("error"), reasons.count("length") / len(reasons)
    ended = "All completions ended by themselves"
    if failed:
        ended = f"The agent or environment failed in {failed} of {len(reasons)} episodes: look at the warnings above"
    elif truncated:
        ended = f"{truncated:.0%} of the completions were truncated: {more_room} if that is why"
    cause = _find_cause(row, rewards, batch, more_room)
    return f"nothing is learned from the rewards: {cause}. {ended}. {example}. See completions/ for all of them"


def _find_cause(row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch, more_room: str) -> str:
    if all(c.finish_reason == "error" for g in rewards.groups for c in g.completions):
        return (
            "all rewards are None, since the agent or environment failed in each episode and "
            "trainer.on_reward_error=none ends it without one; repair it, or set that to raise"
        )
    if not batch.mask.any():
        return (
            "no completion ended by itself, and algo.mask_truncated_completions leaves those out; "
            f"{more_room}, or switch it off"
        )
    missing, number = int(np.isnan(rewards.total).sum()), len(rewards.total)
    functions = ", ".join(rewards.table) or "the reward functions"
    if missing == number:
        failed = [name for name in rewards.table if f"rewards/{name}/errors" in row]
        if failed:
            return (
                f"all rewards are None, since {', '.join(failed)} failed and trainer.on_reward_error=none counts that "
                "as None; look at rewards/<function>/errors and at the warnings above, or set it to raise"
            )
        if [*rewards.table] == [AGENT_REWARD]:
            return (
                "all rewards are None, since the agent returned None in each episode, or raised when its context was "
                "full; a function without `return` returns None: return its reward, a number"
            )
        return f"all rewards are None: {functions} applied to no completion; look at the columns that they read"
    if rewards.have_spread.any():
        return "rewards differ, but all advantages are 0; look at algo.advantage_estimator"
    same = all(len({c.tokens.tobytes() for c in g.completions}) == 1 for g in rewards.groups)
    if same and all(len(g.completions) > 1 for g in rewards.groups):
        return (
            "the completions of each group are all the same, and so are their rewards: the policy has collapsed or "
            f"rollout.temperature is too low; raise it, or {lower_lr_advice(Role.ACTOR)}"
        )
    some = f" ({missing} of {number} are None)" if missing else ""
    return (
        f"the rewards within each group are all equal{some}; check {functions} and algo.reward_weights, raise "
        "algo.num_generations or rollout.temperature, or bring prompts that are neither too hard nor too easy"
    )
