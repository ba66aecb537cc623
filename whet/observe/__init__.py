"""What a run shows of itself: progress, loggers, the run folder, the time trace. Nothing here changes training."""

from whet.observe.environment import environment
from whet.observe.loggers import Logger, Loggers
from whet.observe.plots import plot_curves
from whet.observe.profile import StepProfiler
from whet.observe.progress import Progress, setup_logging, sparkline
from whet.observe.store import RunFolder
from whet.observe.trace import Trace

__all__ = [
    "Logger",
    "Loggers",
    "Progress",
    "RunFolder",
    "StepProfiler",
    "Trace",
    "environment",
    "plot_curves",
    "setup_logging",
    "sparkline",
]
