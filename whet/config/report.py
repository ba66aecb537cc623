"""The configurations of `whet report`, `whet watch` and `whet compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from whet.config.base import config, config_from_dict
from whet.config.fields import Bool, Count, Float, Name, Number, Strings
from whet.config.loader import parse_config_args
from whet.errors import ConfigError

__all__ = [
    "CompareConfig",
    "ReportConfig",
    "WatchConfig",
    "check_compare",
    "check_report",
    "check_watch",
    "load_compare",
    "load_report",
    "load_watch",
]


C = TypeVar("C")


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


@config
class WatchConfig:
    """Everything that `whet watch` needs.

    >>> load_watch(["runs/a", "port=0"]).port
    0
    """

    runs: Strings = ()
    """Run folders; several are drawn over each other. The first words may be the folders without `runs=`."""
    host: Name = "127.0.0.1"
    """Address to listen at. On any other than loopback, the page needs the token that is printed."""
    port: Number = 7860
    """Port to listen at; 0 = a free one."""
    demo: Bool = False
    """Open a small run, which the command makes first if runs/watch-demo is not there."""


@config
class CompareConfig:
    """Everything that `whet compare` needs.

    >>> load_compare(["runs/a", "runs/b", "last=20"]).last
    20
    """

    runs: Strings = ()
    """Run folders; runs that differ only in the seed share a column. The first words may be the folders."""
    metrics: Strings = ()
    """Metrics to compare, by their names in metrics.jsonl, those of evaluations as "eval reward"; empty = the usual
    ones."""
    last: Count = 10
    """Steps over which a metric of training is averaged."""
    html: Bool = False
    """Write the tables as a page, too."""
    out: Name = "compare.html"
    """The file of the page."""


def load_compare(argv: Sequence[str]) -> CompareConfig:
    """Returns a CompareConfig from command-line arguments, as `load_report` takes them."""
    return _load(CompareConfig, argv)


def load_report(argv: Sequence[str]) -> ReportConfig:
    """Returns a ReportConfig from command-line arguments. The first ones may be run folders.

    Raises: ConfigError: every problem at once, a line each.
    """
    return _load(ReportConfig, argv)


def load_watch(argv: Sequence[str]) -> WatchConfig:
    """Returns a WatchConfig from command-line arguments, as `load_report` takes them."""
    return _load(WatchConfig, argv)


def _load(cls: type[C], argv: Sequence[str]) -> C:
    flags = [f"--{field.name}" for field in dataclasses.fields(cls) if field.default is False]  # type: ignore[arg-type]
    words = [word for word in argv if word not in flags]
    folders = []
    while words and "=" not in words[0] and not words[0].startswith("--"):
        folders.append(words.pop(0))
    words += [f"{flag[2:]}=true" for flag in flags if flag in argv]
    values = parse_config_args(words, cls=cls)
    if folders and "runs" in values:
        raise ConfigError(f"runs={values['runs']} and the words {' '.join(folders)} both name runs; give one of them")
    return config_from_dict(cls, {"runs": folders, **values} if folders else values)


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


def check_watch(config: WatchConfig) -> None:
    """Raises ConfigError if no run is given, or the port is none.

    >>> check_watch(WatchConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no run; write whet watch runs/a, or whet watch --demo
    """
    if not config.runs and not config.demo:
        raise ConfigError("no run; write whet watch runs/a, or whet watch --demo")
    if config.runs and config.demo:
        raise ConfigError(f"demo=true opens a run of its own; leave out {' '.join(config.runs)} or --demo")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"port={config.port}: expected 0 to 65535")


def check_compare(config: CompareConfig) -> None:
    """Raises ConfigError if there are fewer than two runs.

    >>> check_compare(CompareConfig(runs=("runs/a",)))
    Traceback (most recent call last):
    whet.errors.ConfigError: a comparison needs two runs or more; write whet compare runs/a runs/b
    """
    if len(config.runs) < 2:
        raise ConfigError("a comparison needs two runs or more; write whet compare runs/a runs/b")
