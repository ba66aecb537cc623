"""Tunix's configuration of performance metrics. whet logs time/ metrics in any case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whet.config import PerfMetricsOptions
from whet.errors import ConfigError

__all__ = ["PerfMetricsConfig", "PerfMetricsExport", "perf_options"]


class PerfMetricsExport:
    """Tunix's export functions. The spans they make are there in any case, as `time/` metrics of each step."""

    @staticmethod
    def from_cluster_config(cluster_config: Any, *args: Any, **options: Any) -> Callable[..., dict[str, Any]]:
        """Returns what a PerfMetricsConfig takes as its export function; `time/` metrics are logged with it and
        without.
        """
        return _default_export


@dataclass
class PerfMetricsConfig:
    """Which function makes metrics of a run's spans: PerfMetricsExport's, or none."""

    custom_export_fn: Callable[..., Any] | None = None
    custom_export_fn_v2: Callable[..., Any] | None = None


def perf_options(config: Any) -> PerfMetricsOptions | None:
    """Returns what a run takes for a perf_config. Raises ConfigError: a function of the user's own, which has no spans
    here.
    """
    if not isinstance(config, PerfMetricsConfig):
        return config
    for name, function in vars(config).items():
        if function is not None and function is not _default_export:
            raise ConfigError(
                f"PerfMetricsConfig.{name}: there are no Tunix spans to export; time/ metrics go to every logger, and "
                "perf_metrics_options=PerfMetricsOptions(trace_dir=...) of RLTrainingConfig writes a timeline"
            )
    return None


def _default_export(*_: Any, **__: Any) -> dict[str, Any]:
    return {}
