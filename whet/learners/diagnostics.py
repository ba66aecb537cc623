"""Diagnostics: warnings about a run that goes wrong, each with the key to set. They change nothing.

A Symptom is a function of a row of metrics (symptoms.py). Four further problems are found in the rewards, the batch and
the sampler of a step: no advantage differs from 0 (no_signal), the gradient is 0 (zero_gradient), and the policy is
certain of every token (deterministic) or of none (uniform). docs/troubleshooting.md has a table of all of them.

Each problem is logged once, and again only where it gets worse. Checkpoints hold the few numbers that this needs, so a
resumed run warns where the uninterrupted one would. Gradients that are not finite are left to RoleTrainer, which ends a
run that has many of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.cluster import RLCluster
from whet.config import Mode, Role
from whet.config.monitoring import Band
from whet.data.templates import uses_chat_template
from whet.envs.agent import AGENT_REWARD
from whet.errors import nearest
from whet.learners.symptoms import (
    RAISE_EPISODE_LIMIT,
    RAISE_LIMIT,
    SHORTEN_PROMPTS,
    find_sampler_mismatch,
    find_truncation,
    symptoms,
)
from whet.models.modes import max_positions
from whet.ops import LogitsProcessors
from whet.train.role_trainer import lower_lr_advice
from whet.types import TokenBatch

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = ["Diagnostics", "num_choices"]

log = logging.getLogger("whet")

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
        """Returns whether the policy is certain of every token, or of none; None where no entropy was measured."""
        entropy = row.get("entropy/token_mean", math.nan)
        if math.isnan(entropy):
            return {"deterministic": None, "uniform": None}
        choices = self._num_choices()
        uniform = choices is not None and entropy >= (1 - UNIFORM_SHARE) * math.log(choices)
        return {"deterministic": entropy <= MIN_ENTROPY, "uniform": uniform}

    def _num_choices(self) -> int | None:
        actor = self.cluster.actor
        return num_choices(actor.processors, actor.loaded.num_ids)

    def _describe(self, name: str, row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch) -> str:
        """Returns a problem, what it means, and what to look at."""
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
        """Returns the arguments of find_truncation: the keys that this run can still set."""
        rollout, positions = self.cluster.rollout_for(Mode.TRAIN), max_positions(self.cluster.actor.module)
        prompts = [group.prompt for group in rewards.groups]
        room = math.inf if positions is None else positions - rollout.max_tokens_to_generate
        longest = max(len(p.tokens) for p in prompts)
        full = room <= longest or room == rollout.max_prompt_length
        plain_text = isinstance(prompts[0].source, str) and not self.templated
        truncated = [c for g in rewards.groups for c in g.completions if c.finish_reason == "length"]
        by_answers = 2 * sum(c.info.get("status") == "out of context" for c in truncated) > len(truncated)
        full |= by_answers and positions is not None and positions < longest + rollout.most_tokens
        return {
            "more_room": SHORTEN_PROMPTS if full else RAISE_EPISODE_LIMIT if by_answers else RAISE_LIMIT,
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
    """Returns the number of tokens that a uniform policy draws from: its entropy is the logarithm of this number.

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
    """Returns whether some trained token has an advantage other than 0."""
    if batch.advantages is None:
        return bool(batch.mask.any() and rewards.have_spread.any())
    return bool(((batch.advantages != 0) & batch.mask).any())


def _describe_no_signal(row: Mapping[str, float], rewards: RewardBatch, batch: TokenBatch, more_room: str) -> str:
    """Returns why no token has an advantage, and what to look at. Args: more_room: the advice for truncated
    completions.
    """
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
