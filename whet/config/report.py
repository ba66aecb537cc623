"""The configuration of `whet report`."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.base import config, config_from_dict
from whet.config.fields import Float, Name, Strings
from whet.config.loader import parse_config_args
from whet.errors import ConfigError

__all__ = ["ReportConfig", "check_report", "load_report"]


@config
class ReportConfig:
    """Everything that `whet report` needs.

    >>> load_report(["runs/a", "runs/b", "max_mb=50"]).runs
    ('runs/a', 'runs/b')
    """

    runs: Strings = ()
    """Run folders; several are drawn over each other. The first words may be the folders without `runs=`."""
    out: Name | None = None
    """Folder of the report; None = report/ in the folder of the run, or in this folder for several runs."""
    max_mb: Float = 200.0
    """Megabytes of completions, about. Beyond it the report leaves out training steps evenly, and says so."""


def load_report(argv: Sequence[str]) -> ReportConfig:
    """A ReportConfig from command-line arguments. The first ones may be run folders.

    Raises: ConfigError: every problem at once, a line each.
    """
    words = list(argv)
    folders = []
    while words and "=" not in words[0] and not words[0].startswith("--"):
        folders.append(words.pop(0))
    values = parse_config_args(words, cls=ReportConfig)
    if folders and "runs" in values:
        raise ConfigError(f"runs={values['runs']} and the words {' '.join(folders)} both name runs; give one of them")
    return config_from_dict(ReportConfig, {"runs": folders, **values} if folders else values)


def check_report(config: ReportConfig) -> None:
    """Raises ConfigError if no run is given, or no room for completions.

    >>> check_report(ReportConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no run; write whet report runs/a
    """
    if not config.runs:
        raise ConfigError("no run; write whet report runs/a")
    if not config.max_mb > 0:
        raise ConfigError(f"max_mb={config.max_mb:g}: expected megabytes above 0, e.g. max_mb=200")
