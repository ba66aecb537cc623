"""Dynamic sampling: a step is filled with groups that teach something (DAPO, arXiv:2503.14476, section 3.2).

Groups whose rewards are all equal have advantage 0. They are left out, and further batches of prompts are completed
and rewarded until the step has as many groups as before, or a bound is reached. What is left over is thrown away: kept
for the next step, it would be of an older policy.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from whet.config.algo import SelectionFields
from whet.errors import ConfigError
from whet.learners.step import Step
from whet.metrics import Mean, Metric, Sum
from whet.ops import group_spread
from whet.rewards.manager import RewardBatch
from whet.types import Group, Prompt

__all__ = ["check_fill", "filled", "teaches"]

log = logging.getLogger("whet")


class Sampler(Protocol):
    """The stages of a learner that a further batch goes through."""

    @property
    def rollout(self) -> Callable[..., object]:
        """Has groups made of prompts."""
        ...

    def sample(self, step: Step) -> Step:
        """Completes prompts."""
        ...

    def reward(self, step: Step) -> Step:
        """Rewards completions."""
        ...


def check_fill(learner: Sampler, config: SelectionFields, max_steps: int | None) -> None:
    """Raises ConfigError where a step can't be filled.

    Args: learner: whose `rollout` has to take the place of the first prompt. config: of it. max_steps: of the run.
    """
    if not config.dynamic_sampling:
        return
    if max_steps is None:
        raise ConfigError(
            "algo.dynamic_sampling takes as many prompts as a step needs, so the data do not say how many steps there "
            "are; set trainer.max_steps"
        )
    if "first" not in inspect.signature(learner.rollout).parameters:
        raise ConfigError(
            f"{type(learner).__name__}.rollout does not take `first`, the place of its first prompt in the step, "
            "without which a further batch would draw the same random numbers; algo.dynamic_sampling needs it"
        )


def teaches(rewarded: RewardBatch, bounds: tuple[float, float] | None = None) -> np.ndarray:
    """Which groups are trained on: Bool [groups].

    Those with two rewards that differ; with bounds, those with low < mean reward < high. Rewards that are NaN count for
    nothing, and a group without any is not trained on.
    Args: rewarded: all groups. bounds: (low, high).
    """
    sizes = rewarded.sizes
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    if bounds is None:
        return group_spread(torch.from_numpy(rewarded.total), torch.from_numpy(group_of)).numpy()
    low, high = bounds
    parts = (rewarded.total[group_of == i] for i in range(len(sizes)))
    means = (float(np.nanmean(part)) if not np.isnan(part).all() else np.nan for part in parts)
    return np.array([low < mean < high for mean in means])


def filled(learner: Sampler, config: SelectionFields, step: Step, more: Callable[[], list[Prompt] | None]) -> Step:
    """A step of as many groups that teach something as it had prompts, or as could be had.

    Args:
        learner: whose stages further batches go through.
        config: dynamic_sampling is on.
        step: sampled and rewarded.
        more: gives a further batch of prompts; None = the data have ended.
    Returns: the step with the groups that are kept, in the order in which they were drawn. Where none teaches anything
        it keeps those it had. Metrics: dynamic_sampling/batches, what was left out (/groups_left_out,
        /completions_left_out, /tokens_left_out), and /reward, the mean over all that was drawn.
    """
    wanted, drawn = len(step.groups), [step]
    kept = int(teaches(step.rewards, config.group_reward_bounds).sum())
    while kept < wanted and len(drawn) < config.max_num_gen_batches and (prompts := more()) is not None:
        first = sum(len(s.prompts) for s in drawn)
        drawn.append(learner.reward(learner.sample(Step(index=step.index, prompts=prompts, first=first))))
        kept += int(teaches(drawn[-1].rewards, config.group_reward_bounds).sum())
    if kept < wanted:
        ended = len(drawn) < config.max_num_gen_batches
        why = "the data ended" if ended else f"max_num_gen_batches={config.max_num_gen_batches}"
        log.warning("step %d: %d of %d groups teach something (%s)", step.index, kept, wanted, why)
    rewarded = RewardBatch.cat([s.rewards for s in drawn])
    chosen = np.flatnonzero(teaches(rewarded, config.group_reward_bounds))[:wanted]
    result = rewarded.select(chosen if len(chosen) else range(wanted))
    for further in drawn[1:]:
        step = step.log(further.metrics)
    versions = sorted({v for s in drawn for v in s.versions})
    step = step.replace(rewards=result, groups=result.groups, versions=tuple(versions))
    return step.replace(prompts=[g.prompt for g in result.groups]).log(_counts(rewarded, result, len(drawn)))


def _counts(drawn: RewardBatch, kept: RewardBatch, batches: int) -> dict[str, Metric]:
    """What was drawn, and what of it was left out."""

    def completions(groups: Sequence[Group]) -> tuple[int, int]:
        done = [c for g in groups for c in g.completions]
        return len(done), sum(len(c.tokens) for c in done)

    (count, tokens), (kept_count, kept_tokens) = completions(drawn.groups), completions(kept.groups)
    known = drawn.total[~np.isnan(drawn.total)]
    return {
        "dynamic_sampling/batches": Sum(float(batches)),
        "dynamic_sampling/groups_left_out": Sum(float(len(drawn.groups) - len(kept.groups))),
        "dynamic_sampling/completions_left_out": Sum(float(count - kept_count)),
        "dynamic_sampling/tokens_left_out": Sum(float(tokens - kept_tokens)),
        "dynamic_sampling/reward": Mean(float(known.sum()), len(known)),
    }
