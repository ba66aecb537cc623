"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): replaces groups without signal by groups of further prompts.

All advantages of a group with equal rewards are 0. `filter_groups` finds such groups, and `complete_groups` those with
an episode that failed by its infrastructure. `refill_groups` samples and
rewards further batches of prompts until the step has as many groups as before, or max_num_gen_batches is reached.
Surplus groups are discarded: in the next step they would come from an older policy.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from whet.config.algo import PolicyConfig
from whet.envs.failures import num_failed
from whet.errors import ConfigError
from whet.learners.step import Step
from whet.metrics import Mean, Metric, Sum
from whet.rewards.reward_batch import RewardBatch
from whet.types import Group, Prompt

if TYPE_CHECKING:
    from whet.learners.base import RLLearner

__all__ = ["check_dynamic_sampling", "filter_groups", "refill_groups"]

log = logging.getLogger("whet")


def check_dynamic_sampling(learner: RLLearner, config: PolicyConfig, max_steps: int | None) -> None:
    """Raises ConfigError where groups are replaced and max_steps is not set, or the rollout does not take `first`.

    Args: learner: its `rollout` is checked. config: of the learner. max_steps: of the run.
    """
    refills = learner.failures.on_infrastructure == "refill"
    if not config.dynamic_sampling and not refills:
        return
    setting = "algo.dynamic_sampling" if config.dynamic_sampling else "rollout.on_infrastructure_failure=refill"
    if max_steps is None:
        raise ConfigError(
            f"{setting} takes as many prompts as a step needs, so the data do not say how many steps there "
            "are; set trainer.max_steps"
        )
    if "first" not in inspect.signature(learner.rollout).parameters:
        raise ConfigError(
            f"{type(learner).__name__}.rollout does not take `first`, the place of its first prompt in the step. "
            "Without it a further batch would draw the same random numbers; add the parameter, or leave out "
            f"{setting}"
        )


def filter_groups(
    rewards: RewardBatch, bounds: tuple[float, float] | None = None, clip: tuple[float, float] | None = None
) -> np.ndarray:
    """Returns which groups have signal: Bool [groups].

    Without bounds, these are the groups with two different totals; with bounds, those with low < mean total < high. NaN
    totals are left out. A group with NaN totals only has no signal.
    Args: bounds: (low, high). clip: reward_clip_range; the totals are clipped first, as they are for the advantages.
    """
    if clip is not None:
        rewards = rewards.with_total(rewards.total.clip(*clip))
    if bounds is None:
        return rewards.have_spread
    low, high = bounds
    means = [np.nan if np.isnan(totals).all() else float(np.nanmean(totals)) for totals in rewards.totals_by_group]
    return np.array([low < mean < high for mean in means], bool)


def complete_groups(groups: Sequence[Group]) -> np.ndarray:
    """Returns which groups have no episode that failed by its infrastructure: Bool [groups]."""
    return np.array([num_failed([group]) == 0 for group in groups], bool)


def refill_groups(
    learner: RLLearner, config: PolicyConfig, step: Step, next_batch: Callable[[], list[Prompt] | None]
) -> Step:
    """Replaces groups without signal, or with episodes that failed, by groups of further prompts.

    Args:
        learner: its stages `sample` and `reward` make the further groups.
        config: the learner's.
        step: sampled and rewarded.
        next_batch: returns a further batch of prompts; None = the data have ended.
    Returns: the step with the groups that are kept, in the order in which they were drawn. If none is kept, its groups
        are those of the step. Metrics under dynamic_sampling/: batches; groups_left_out,
        completions_left_out, tokens_left_out; reward, the mean over all completions that were drawn. turns/replaced:
        episodes left out that had failed by their infrastructure.
    """
    wanted, drawn = len(step.groups), [step]

    def keep(rewards: RewardBatch) -> np.ndarray:
        kept = np.ones(len(rewards.groups), bool)
        if config.dynamic_sampling:
            kept &= filter_groups(rewards, config.group_reward_bounds, config.reward_clip_range)
        if learner.failures.on_infrastructure == "refill":
            kept &= complete_groups(rewards.groups)
        return kept

    kept = int(keep(step.rewards).sum())
    while kept < wanted and len(drawn) < config.max_num_gen_batches and (prompts := next_batch()) is not None:
        first = sum(len(s.prompts) for s in drawn)
        drawn.append(learner.reward(learner.sample(Step(index=step.index, prompts=prompts, first=first))))
        kept += int(keep(drawn[-1].rewards).sum())
    if kept < wanted:
        ended = len(drawn) < config.max_num_gen_batches
        reason = "the data ended" if ended else f"max_num_gen_batches={config.max_num_gen_batches}"
        what = "have different rewards" if config.dynamic_sampling else "have no failed episode"
        log.warning("step %d: %d of %d groups %s (%s)", step.index, kept, wanted, what, reason)
    rewards = RewardBatch.cat([s.rewards for s in drawn])
    chosen = np.flatnonzero(keep(rewards))[:wanted]
    result = rewards.select(chosen if len(chosen) else range(wanted))
    for further in drawn[1:]:
        step = step.log(further.metrics)
    versions = sorted({v for s in drawn for v in s.versions})
    step = step.replace(rewards=result, groups=result.groups, versions=tuple(versions))
    metrics = _count_groups(rewards, result, len(drawn))
    if learner.failures.on_infrastructure == "refill":
        metrics["turns/replaced"] = Sum(float(num_failed(rewards.groups) - num_failed(result.groups)))
    return step.replace(prompts=[g.prompt for g in result.groups]).log(metrics)


def _count_groups(drawn: RewardBatch, kept: RewardBatch, batches: int) -> dict[str, Metric]:
    """Returns the metrics of the groups that were drawn, and of those that were left out."""

    def count(groups: Sequence[Group]) -> tuple[int, int]:
        completions = [c for g in groups for c in g.completions]
        return len(completions), sum(len(c.tokens) for c in completions)

    (completions, tokens), (kept_completions, kept_tokens) = count(drawn.groups), count(kept.groups)
    known = drawn.total[~np.isnan(drawn.total)]
    return {
        "dynamic_sampling/batches": Sum(float(batches)),
        "dynamic_sampling/groups_left_out": Sum(float(len(drawn.groups) - len(kept.groups))),
        "dynamic_sampling/completions_left_out": Sum(float(completions - kept_completions)),
        "dynamic_sampling/tokens_left_out": Sum(float(tokens - kept_tokens)),
        "dynamic_sampling/reward": Mean(float(known.sum()), len(known)),
    }
