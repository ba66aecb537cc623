"""How a run is observed: progress, loggers, plots, profiles and the time trace. Nothing here changes training."""

from whet.observe.environment import collect_environment
from whet.observe.loggers import Logger, Loggers
from whet.observe.plots import plot_curves
from whet.observe.profiler import StepProfiler
from whet.observe.progress import Progress, setup_logging, sparkline
from whet.observe.trace import Trace

__all__ = [
    "Logger",
    "Loggers",
    "Progress",
    "StepProfiler",
    "Trace",
    "collect_environment",
    "plot_curves",
    "setup_logging",
    "sparkline",
]
