"""Renames whet's metrics to TRL's names, and averages them between two logs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from whet.errors import ConfigError
from whet.learners.kl_controller import MEASURED_ENTROPY

__all__ = ["MetricsWindow", "best_metric_name", "supervised_metrics", "trl_metrics"]

_RENAMED = {
    MEASURED_ENTROPY: "entropy",
    "sampler_is/weight_max": "sampling/importance_sampling_ratio/max",
    "sampler_is/weight_mean": "sampling/importance_sampling_ratio/mean",
    "sampler_is/weight_min": "sampling/importance_sampling_ratio/min",
    "time/step": "step_time",
}
"""Whet's name -> TRL's, where they differ."""
_SAME = re.compile(
    r"loss|grad_norm|learning_rate|kl|policy_loss|entropy_coef|reward|reward_std|frac_reward_zero_std|cispo_clip_ratio"
    r"|vespo/phi_seq_mean|rewards/.+/(mean|std)|completions/((mean|min|max)_(terminated_)?length|clipped_ratio)"
    r"|clip_ratio/(low_mean|low_min|high_mean|high_max|region_mean)|sampling/sampling_logp_difference/(mean|max)"
)
"""Names that whet and TRL share."""
_SUPERVISED = re.compile(
    r"loss|grad_norm|learning_rate|entropy|kl|mean_token_accuracy|rewards/(chosen|rejected|accuracies|margins)"
    r"|(logps|logits)/(chosen|rejected)|accuracy|margin|(min|mean|max)_reward"
)
"""Names that whet and TRL share in supervised training."""
_TIMED = re.compile(r"loss|runtime|(samples|steps)_per_second")
"""Metrics that transformers computes for each evaluation set."""
_EXCLUDED = ("rewards/advantage/",)
_TERMINATED = tuple(f"completions/{how}_terminated_length" for how in ("mean", "min", "max"))


def trl_metrics(row: Mapping[str, Any], *, compat: str | None = None) -> dict[str, float]:
    """Renames whet's metrics to TRL's names; metrics that TRL does not log are left out.

    Args: row: whet's metrics. compat: "0.16" = add the names of TRL 0.16.

    >>> trl_metrics({"sampler_is/weight_mean": 0.9, "perf/x": 1.0})
    {'sampling/importance_sampling_ratio/mean': 0.9}
    >>> trl_metrics({"reward": 0.5, "entropy/token_mean": 2.0, "perf/x": 1.0, "rewards/f/mean": 0.5}, compat="0.16")
    {'reward': 0.5, 'entropy': 2.0, 'rewards/f/mean': 0.5, 'rewards/f': 0.5, 'reward/f': 0.5}
    """
    metrics = {}
    for name, value in row.items():
        if name in _RENAMED:
            metrics[_RENAMED[name]] = value
        elif _SAME.fullmatch(name) and not name.startswith(_EXCLUDED):
            metrics[name] = value
    if "completions/mean_length" in metrics:
        metrics = {**dict.fromkeys(_TERMINATED, 0.0), **metrics}  # 0 if no completion terminated
    if compat == "0.16":
        metrics |= _trl_0_16_metrics(metrics, row)
    return metrics


def supervised_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Selects the metrics of supervised training that TRL logs, under the same names.

    >>> supervised_metrics({"loss": 0.5, "entropy": 2.0, "rewards/chosen": 1.0, "perf/x": 1.0})
    {'loss': 0.5, 'entropy': 2.0, 'rewards/chosen': 1.0}
    """
    return {name: value for name, value in row.items() if _SUPERVISED.fullmatch(name)}


def _trl_0_16_metrics(metrics: Mapping[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics under the names of TRL 0.16."""
    old = {}
    if "completions/mean_length" in metrics:
        old["completion_length"] = metrics["completions/mean_length"]
    if "clip_ratio/region_mean" in metrics:
        old["clip_ratio"] = metrics["clip_ratio/region_mean"]
    if "reward_std_within_groups" in row:
        old["reward_std"] = row["reward_std_within_groups"]
    for name, value in metrics.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            fn = name.removeprefix("rewards/").removesuffix("/mean")
            old |= {f"rewards/{fn}": value, f"reward/{fn}": value}
    return old


def best_metric_name(args: Any, sets: Iterable[str], known: Callable[[str], bool]) -> str | None:
    """Returns the full name of the metric that chooses the best checkpoint, e.g. eval_loss; None = no metric is set.

    Args: args: has metric_for_best_model. sets: the names of the evaluation sets; "" is the name of a single set. With
        several sets, a metric without a set's name means the last set, as in TRL. known: whether an evaluation can
        have a metric.
    Raises: ConfigError: no evaluation can have the metric, or several sets have it.
    """
    if args.metric_for_best_model is None:
        return None
    requested, sets = args.metric_for_best_model, [name for name in sets if name]
    metric = requested.removeprefix("eval_")
    prefix = next((name for name in sets if metric.startswith(f"{name}_")), None)
    if prefix is not None:
        metric = metric.removeprefix(f"{prefix}_")
    if prefix is None and sets and _TIMED.fullmatch(metric):
        names = " or ".join(f"eval_{name}_{metric}" for name in sets)
        raise ConfigError(f"metric_for_best_model={requested!r}: there are several evaluation sets; choose {names}")
    if not (_TIMED.fullmatch(metric) or known(metric)):
        raise ConfigError(f"metric_for_best_model={requested!r}: no evaluation has this metric; use e.g. eval_loss")
    return f"eval_{metric}" if not sets else f"eval_{prefix or sets[-1]}_{metric}"


class MetricsWindow:
    """The means of metrics since the last log. As in TRL, NaN is left out, and a metric with NaN only is None.

    >>> w = MetricsWindow()
    >>> w.add({"loss": 1.0, "kl": float("nan")}); w.add({"loss": 3.0}); w.take()
    {'loss': 2.0, 'kl': None}
    """

    FIRST = ("loss", "grad_norm", "learning_rate")
    """The first columns of a printed row, as in transformers."""
    _LAST = ("num_tokens", "grad_norm", "learning_rate", "entropy_coef")

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, float]) -> None:
        """Adds a row of metrics."""
        for name, value in row.items():
            values = self._values.setdefault(name, [])
            if not math.isnan(value):
                values.append(float(value))

    def take(self) -> dict[str, Any]:
        """Returns the means and clears them. Counters, rates and the gradient norm have their last value."""
        rows, self._values = self._values, {}
        values = {**{name: rows[name] for name in self.FIRST if name in rows}, **rows}
        return {n: None if not v else v[-1] if n in self._LAST else sum(v) / len(v) for n, v in values.items()}
