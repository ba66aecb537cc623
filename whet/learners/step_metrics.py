"""The metrics of a step's samples: lengths, ends, rewards, advantages. Names are Tunix's, else TRL's.

Dim legend: N sequences, J trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from whet.envs.failures import num_failed
from whet.evaluation.columns import make_completion_columns
from whet.evaluation.estimators import pass_at_k, resolve_ks
from whet.metrics import Max, Mean, Metric, Min, Sum, merge
from whet.ops import AdvantageInputs
from whet.rewards.reward_batch import sample_std
from whet.rollout.base import EngineStats
from whet.train.metric_reduction import Reductions, metric_labels
from whet.types import Group, TokenBatch

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = [
    "TOKEN_STATS",
    "advantage_metrics",
    "average_over_known",
    "average_over_mini_batch",
    "completion_columns",
    "completion_metrics",
    "engine_metrics",
    "evaluation_metrics",
    "known_totals",
    "rollout_metrics",
    "skipped_metrics",
    "spread",
    "total_metrics",
    "value_metrics",
]

TOKEN_STATS = {"trainer_logprobs": "trainer_logprobs", "trainer_entropy": "entropy"}
"""The columns of a batch that `token_stats` records in updates, float [S], NaN = unknown, and their names in files."""


def spread(name: str, values: np.ndarray, *, prefix: bool = False) -> dict[str, Metric]:
    """Mean, max and min of values, as name/mean, or with `prefix` as in TRL: mean_name.

    >>> sorted(spread("turns", np.array([0.0, 1.0])))
    ['turns/max', 'turns/mean', 'turns/min']
    """
    if len(values) == 0:
        return {}
    head, _, tail = name.rpartition("/")

    def label(how: str) -> str:
        return f"{head}/{how}_{tail}" if prefix else f"{name}/{how}"

    return {
        label("mean"): Mean(float(values.sum()), len(values)),
        label("max"): Max(float(values.max())),
        label("min"): Min(float(values.min())),
    }


def completion_metrics(rewards: RewardBatch) -> dict[str, Metric]:
    """Returns the metrics of reward functions and completions, which training and evaluation both log.

    completions/clipped_scored_ratio: the share with a total above 0 among the completions that ended neither with a
    stop nor by a failure. It is absent if there are none.
    """
    scored = [
        bool(total > 0)
        for group, totals in zip(rewards.groups, rewards.totals_by_group, strict=True)
        for place, total in zip(group.last, totals, strict=True)
        if group.completions[place].finish_reason not in ("stop", "error")
    ]
    metrics = {**rewards.metrics, **rollout_metrics(rewards.groups)}
    return {**metrics, "completions/clipped_scored_ratio": Mean(float(sum(scored)), len(scored))} if scored else metrics


def total_metrics(rewards: RewardBatch) -> dict[str, Metric]:
    """Returns the metrics of the total reward. NaN (no function applies) is left out everywhere.

    TRL's names: reward, the mean; reward_std, the standard deviation (n - 1) over the whole batch;
    frac_reward_zero_std, the share of groups in which all rewards are equal. whet's own: reward_max and reward_min;
    reward_std_within_groups, the mean over groups of the standard deviation in a group (n - 1; 0 for a group of one).
    Standard deviations merge across batches as means.
    """
    parts = known_totals(rewards)
    known = np.concatenate([*parts, np.empty(0)])
    equal = len(parts) - int(rewards.have_spread.sum())
    bounds = {"reward_max": Max(float(known.max())), "reward_min": Min(float(known.min()))} if len(known) else {}
    return {
        "reward": Mean(float(known.sum()), len(known)),
        **bounds,
        "reward_std": Mean(sample_std(known), 1) if len(known) else Mean(0.0, 0),
        "reward_std_within_groups": Mean(float(sum(sample_std(part) for part in parts)), len(parts)),
        "frac_reward_zero_std": Mean(float(equal), len(parts)),
    }


def evaluation_metrics(rewards: RewardBatch) -> dict[str, Metric]:
    """Returns the metrics of an evaluation: of rewards and completions, and of the best completion of each group.

    Where all rewards are 0 or 1, the accuracy and pass@k are added. pass@k is the mean over groups of the estimate that
    `whet eval` uses too (evaluation.estimators).
    """
    metrics, total = {**completion_metrics(rewards), **total_metrics(rewards)}, rewards.total
    groups, generations = known_totals(rewards), max(rewards.sizes)
    if generations > 1:
        best = np.array([known.max() for known in groups])
        metrics = merge(metrics, spread(f"rewards/best_of_{generations}", best))
    if np.isin(total, (0.0, 1.0)).all():
        metrics = merge(metrics, {"accuracy": Mean(float(total.sum()), len(total))})
        for k in resolve_ks(None, generations) if generations > 1 else ():
            estimates = [pass_at_k(len(known), int(known.sum()), k) for known in groups if len(known) >= k]
            metrics[f"pass@{k}"] = Mean(float(sum(estimates)), len(estimates))
    return metrics


def known_totals(rewards: RewardBatch) -> list[np.ndarray]:
    """Returns the totals of each group without NaN, float64; groups with none are left out."""
    parts = [part[~np.isnan(part)] for part in rewards.totals_by_group]
    return [part for part in parts if len(part)]


def rollout_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Returns the lengths and ends of completions, counts of tokens and prompts, and the turns of episodes.

    completions/clipped_ratio is the share without a stop, also that of aborted ones, as TRL's is. Failed ones (their
    environment or agent failed) are left out of it: turns/failed counts them.
    """
    done = [c for g in groups for c in g.completions]
    lengths = np.array([len(c.tokens) for c in done])
    stopped, failed = (np.array([c.finish_reason == reason for c in done]) for reason in ("stop", "error"))
    return {
        **spread("completions/length", lengths, prefix=True),
        **spread("completions/terminated_length", lengths[stopped], prefix=True),
        "completions/clipped_ratio": Mean(float((~stopped & ~failed).sum()), int((~failed).sum())),
        "completions/tokens": Sum(float(lengths.sum())),
        "prompts/count": Sum(float(len(groups))),
        "prompts/mean_length": Mean(float(sum(len(g.prompt.tokens) for g in groups)), len(groups)),
        **_turn_metrics(groups),
    }


def _turn_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Returns the metrics of episodes with turns; {} without such.

    turns/{mean,max,min}: the model's turns. completions/sampled_tokens: the tokens that the model drew. turns/forks:
    sequences after the first of each episode. turns/failed: episodes that failed by no doing of the model;
    turns/failed_infrastructure: those of them that failed by their infrastructure. turns/retried: attempts after the
    first.
    tools/call_frequency: calls of tools per episode. tools/failure_frequency: failures per call.
    """
    last = [c for g in groups for place in g.last if (c := g.completions[place]).messages]
    if not last:
        return {}
    turns = [sum(m["role"] == "assistant" for m in c.messages or ()) for c in last]
    sampled = sum(int((c.versions >= 0).sum()) for g in groups for c in g.completions)
    with_tools = [c.info for c in last if "tool_calls" in c.info]
    calls, errors = (sum(info[name] for info in with_tools) for name in ("tool_calls", "tool_errors"))
    tools: dict[str, Metric] = {}
    if with_tools:
        tools["tools/call_frequency"] = Mean(float(calls), len(with_tools))
        tools["tools/failure_frequency"] = Mean(float(errors), calls)
    return {
        **spread("turns", np.array(turns)),
        "turns/forks": Sum(float(sum(len(g.completions) for g in groups) - len(last))),
        "turns/failed": Sum(float(sum(c.has_failed for c in last))),
        "turns/failed_infrastructure": Sum(float(num_failed(groups))),
        "turns/retried": Sum(float(sum(c.info.get("attempts", 1) - 1 for c in last))),
        "completions/sampled_tokens": Sum(float(sampled)),
        **tools,
    }


def engine_metrics(done: EngineStats) -> dict[str, Metric]:
    """Returns the engine's counts for a step. The mean batch size is left out if the engine reports no decode steps.

    >>> engine_metrics(EngineStats(steps=10, row_steps=70))["rollout/mean_batch_size"].value
    7.0
    """
    metrics: dict[str, Metric] = {
        "rollout/prefilled_tokens": Sum(float(done.prefilled)),
        "rollout/reused_tokens": Sum(float(done.reused)),
    }
    if done.steps:
        metrics["rollout/mean_batch_size"] = Mean(float(done.row_steps), done.steps)
    return metrics


def advantage_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """Advantages of trajectories, rewards/advantage/*, and of trained tokens, advantage/*, both as in Tunix."""
    assert batch.advantages is not None
    each = batch.trajectory_advantages.numpy()
    each = each[~np.isnan(each)]
    tokens = batch.advantages[batch.mask].double().numpy()
    metrics = {
        **spread("rewards/advantage", each),
        "rewards/advantage/std": Mean(float(each.std()) if len(each) else 0.0),
        "advantage/abs_mean": Mean(float(np.abs(tokens).sum()), len(tokens)),
        "advantage/nonzero_frac": Mean(float((np.abs(tokens) > 1e-8).sum()), len(tokens)),
    }
    if len(tokens):
        metrics |= {"advantage/max": Max(float(tokens.max())), "advantage/min": Min(float(tokens.min()))}
    return metrics


def value_metrics(x: AdvantageInputs, batch: TokenBatch) -> dict[str, Metric]:
    """Returns the metrics of a critic, over trained tokens.

    Tunix's names: advantages/*, advantages/returns/*, advantages/old_values/*; rewards/reward/*, the rewards of
    trajectories with those of their tokens. whet's own: critic/explained_variance, 1 − var(R − V) / var(R): 1 = the
    values at rollout are the returns, 0 = they predict no better than a constant.
    Returns and explained variance are over trajectories with a reward: the return of another one is the value itself.
    """
    columns = (batch.need("advantages"), batch.need("returns"), batch.need("values"))
    advantages, _, old = (c[batch.mask].double().numpy() for c in columns)
    known = batch.mask & ~x.rewards.isnan().index_select(0, x.trajectory)
    returns, values = (c[known].double().numpy() for c in columns[1:])
    rewards = x.returns
    metrics = {
        **spread("advantages", advantages),
        **spread("advantages/returns", returns),
        **spread("advantages/old_values", old),
        **spread("rewards/reward", rewards[~rewards.isnan()].numpy()),
    }
    if len(returns) > 1 and returns.var() > 0:
        metrics["critic/explained_variance"] = Mean(1.0 - float((returns - values).var() / returns.var()))
    return metrics


def skipped_metrics(mini: TokenBatch, run: TokenBatch) -> dict[str, Metric]:
    """Returns the sequences and tokens of a mini-batch that were not run."""
    return {
        "skipped/sequences": Sum(float(mini.num_sequences - run.num_sequences)),
        "skipped/tokens": Sum(float(mini.num_tokens - run.num_tokens)),
    }


def average_over_mini_batch(
    metrics: Mapping[str, Metric], mini: TokenBatch, run: TokenBatch, *, zero: Mapping[str, str]
) -> dict[str, Metric]:
    """Returns an update's metrics as those of the whole mini-batch, where sequences without signal were not run.

    A metric that is 0 without an advantage, such as a share of clipped tokens, counts the tokens that were not run as
    0. The entropy is that of the tokens run, under the weights of all. Other means are over the tokens run.

    Args:
        metrics: the update's.
        mini: the mini-batch, with its weights.
        run: the part of it that was run.
        zero: the metrics that are 0 without an advantage, each with its reduction (one of REDUCTIONS).
    """
    assert mini.weights is not None
    assert run.weights is not None
    tokens = int(mini.mask.sum() - run.mask.sum())
    if tokens == 0:
        return dict(metrics)
    sequences = len(mini.sequence[mini.mask].unique()) - len(run.sequence[run.mask].unique())
    metrics = dict(metrics)
    for name, how in zero.items():
        metric = metrics.get(name)
        if isinstance(metric, Mean) and how in ("mean", "sequence_mean"):
            metrics[name] = Mean(metric.sum, metric.count + (tokens if how == "mean" else sequences))
        elif isinstance(metric, Min):
            metrics[name] = metric.merge(Min(0.0))
        elif isinstance(metric, Max):
            metrics[name] = metric.merge(Max(0.0))
    if isinstance(mean := metrics.get("entropy"), Mean) and run.weights.sum() > 0:
        metrics["entropy"] = Mean(mean.sum * float(mini.weights.sum() / run.weights.sum()), mean.count)
    return metrics


def average_over_known(
    metrics: Mapping[str, Metric], prefix: str, run: TokenBatch, known: Tensor, reductions: Reductions
) -> dict[str, Metric]:
    """Returns an update's metrics, with those of a prefix averaged only over the tokens at which they are known.

    Args:
        metrics: the update's. Those of the prefix are 0 at tokens at which they are not known.
        prefix: of the loss's names for them.
        run: the part of the mini-batch that was run.
        known: Bool [S].
        reductions: the trainer's.
    Returns: all metrics; a mean over no known token is left out.
    """
    unknown, metrics = run.mask & ~known, dict(metrics)
    if not unknown.any():
        return metrics
    sequences = {*run.sequence[run.mask].tolist()} - {*run.sequence[run.mask & known].tolist()}
    fewer = {"mean": int(unknown.sum()), "sequence_mean": len(sequences)}
    names = [name for name in (*metrics, *reductions) if name.startswith(prefix)]
    hows = {label: how for name in names for label, how in metric_labels(name, reductions).items()}
    for label, how in hows.items():
        metric = metrics.get(label)
        if isinstance(metric, Mean) and how in fewer:
            del metrics[label]
            if count := metric.count - fewer[how]:
                metrics[label] = Mean(metric.sum, count)
    return metrics


def completion_columns(
    rewards: RewardBatch, batch: TokenBatch | None, decode: Callable[[np.ndarray], str]
) -> tuple[dict[str, list[Any]], dict[str, np.ndarray]]:
    """Returns the columns of completions/ in the run folder, and the rewards of each function.

    Args: rewards: of the step. batch: with advantages, and on some steps with TOKEN_STATS; None = an evaluation.
        decode: a prompt's ids -> text with special tokens.
    """
    at = rewards.trajectory_of
    columns = make_completion_columns(rewards.groups, rewards.texts, rewards.total[at].tolist(), decode)
    if batch is not None and batch.advantages is not None:
        columns["advantage"] = batch.trajectory_advantages.numpy()[at].tolist()
    if batch is not None and all(name in batch.token_columns for name in TOKEN_STATS):
        for name, stored in {**TOKEN_STATS, "advantages": "advantages"}.items():
            values = batch.token_columns[name].float().masked_fill(~batch.mask, math.nan)
            columns[stored] = np.split(values.numpy(), batch.ends[:-1].numpy())
    return columns, {name: values[at] for name, values in sorted(rewards.table.items())}
