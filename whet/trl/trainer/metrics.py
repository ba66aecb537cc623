"""Renames metrics to TRL's names, and averages them between two logs."""

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
"""whet's name -> TRL's, where they differ."""
_SAME = re.compile(
    r"loss|grad_norm|learning_rate|kl|policy_loss|entropy_coef|reward|reward_std|frac_reward_zero_std|cispo_clip_ratio"
    r"|vespo/phi_seq_mean|rewards/.+/(mean|std)|completions/((mean|min|max)_(terminated_)?length|clipped_ratio)"
    r"|clip_ratio/(low_mean|low_min|high_mean|high_max|region_mean)|sampling/sampling_logp_difference/(mean|max)"
)
"""Names that are the same."""
_SUPERVISED = re.compile(
    r"loss|grad_norm|learning_rate|entropy|kl|mean_token_accuracy|rewards/(chosen|rejected|accuracies|margins)"
    r"|(logps|logits)/(chosen|rejected)|accuracy|margin|(min|mean|max)_reward"
)
"""Names that are the same in supervised training."""
_TIMED = re.compile(r"loss|runtime|(samples|steps)_per_second")
"""Metrics that transformers computes for each evaluation set."""
_NOT = ("rewards/advantage/",)
_TERMINATED = tuple(f"completions/{how}_terminated_length" for how in ("mean", "min", "max"))


def trl_metrics(row: Mapping[str, Any], *, compat: str | None = None) -> dict[str, float]:
    """A row of whet's under TRL's names; what TRL does not log is left out.

    Args: row: of numbers. compat: "0.16" = that release's names besides.

    >>> trl_metrics({"sampler_is/weight_mean": 0.9, "perf/x": 1.0})
    {'sampling/importance_sampling_ratio/mean': 0.9}
    >>> trl_metrics({"reward": 0.5, "entropy/token_mean": 2.0, "perf/x": 1.0, "rewards/f/mean": 0.5}, compat="0.16")
    {'reward': 0.5, 'entropy': 2.0, 'rewards/f/mean': 0.5, 'rewards/f': 0.5, 'reward/f': 0.5}
    """
    found = {}
    for name, value in row.items():
        if name in _RENAMED:
            found[_RENAMED[name]] = value
        elif _SAME.fullmatch(name) and not name.startswith(_NOT):
            found[name] = value
    if "completions/mean_length" in found:
        found = {**dict.fromkeys(_TERMINATED, 0.0), **found}  # 0 where none ended by itself
    if compat == "0.16":
        found |= _names_of_0_16(found, row)
    return found


def supervised_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """A row of supervised training under TRL's names, which are whet's; what TRL does not log is left out.

    >>> supervised_metrics({"loss": 0.5, "entropy": 2.0, "rewards/chosen": 1.0, "perf/x": 1.0})
    {'loss': 0.5, 'entropy': 2.0, 'rewards/chosen': 1.0}
    """
    return {name: value for name, value in row.items() if _SUPERVISED.fullmatch(name)}


def _names_of_0_16(found: Mapping[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    old = {}
    if "completions/mean_length" in found:
        old["completion_length"] = found["completions/mean_length"]
    if "clip_ratio/region_mean" in found:
        old["clip_ratio"] = found["clip_ratio/region_mean"]
    if "reward_std_within_groups" in row:
        old["reward_std"] = row["reward_std_within_groups"]
    for name, value in found.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            fn = name.removeprefix("rewards/").removesuffix("/mean")
            old |= {f"rewards/{fn}": value, f"reward/{fn}": value}
    return old


def best_metric_name(args: Any, sets: Iterable[str], known: Callable[[str], bool]) -> str | None:
    """The metric of the best checkpoint, under its name in an evaluation; None = none.

    Args: args: with metric_for_best_model. sets: names of the evaluation sets; "" is that of a single one. Of several,
        a metric without a name of theirs is the last one's, as in TRL, whose own metrics go without. known: whether an
        evaluation may have a metric.
    Raises: ConfigError: no evaluation can have the metric.
    """
    if args.metric_for_best_model is None:
        return None
    given, sets = args.metric_for_best_model, [name for name in sets if name]
    bare = given.removeprefix("eval_")
    of = next((name for name in sets if bare.startswith(f"{name}_")), None)
    own = bare if of is None else bare.removeprefix(f"{of}_")
    if of is None and sets and _TIMED.fullmatch(own):
        names = " or ".join(f"eval_{name}_{own}" for name in sets)
        raise ConfigError(f"metric_for_best_model={given!r}: there are several evaluation sets; name one's: {names}")
    if not (_TIMED.fullmatch(own) or known(own)):
        raise ConfigError(f"metric_for_best_model={given!r}: no evaluation has this metric; take eval_loss, or another")
    return f"eval_{own}" if not sets else f"eval_{of or sets[-1]}_{own}"


class MetricsWindow:
    """The means of metrics since the last log, as in TRL: NaN is left out; a metric with NaN only is None.

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
        """Adds a row."""
        for name, value in row.items():
            values = self._values.setdefault(name, [])
            if not math.isnan(value):
                values.append(float(value))

    def take(self) -> dict[str, Any]:
        """Returns the means and clears them; counters, rates and the gradient norm have their last value."""
        found, self._values = self._values, {}
        values = {**{name: found[name] for name in self.FIRST if name in found}, **found}
        return {n: None if not v else v[-1] if n in self._LAST else sum(v) / len(v) for n, v in values.items()}
