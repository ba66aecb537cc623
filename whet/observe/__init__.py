"""What a run shows of itself: progress, loggers, the run folder, the time trace. Nothing here changes training."""

from whet.observe.environment import collect_environment
from whet.observe.loggers import Logger, Loggers
from whet.observe.plots import plot_curves
from whet.observe.profiler import StepProfiler
from whet.observe.progress import Progress, setup_logging, sparkline
from whet.observe.trace import Trace
from whet.storage.run_folder import RunFolder

__all__ = [
    "Logger",
    "Loggers",
    "Progress",
    "RunFolder",
    "StepProfiler",
    "Trace",
    "collect_environment",
    "plot_curves",
    "setup_logging",
    "sparkline",
]
