"""Loggers: where metrics go besides the run folder.

A logger is anything with log(step, values) and close(); one with log_completions(step, name, rows) is given completions
too. The ones known by name are TensorBoard (its own file writer, without torch), Weights & Biases, trackio, MLflow,
SwanLab and JSONL. A resumed run goes on in the same run of such a service, by the id that lies in the run folder.
One that can't start is an error before the first step; one that fails later is dropped with a warning and ends no run.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from whet.config import MetricsLoggerOptions
from whet.config.loader import flatten
from whet.errors import ConfigError, format_exception, lookup_error, raise_all
from whet.storage.files import make_writable_folder, open_for_append, to_json, write_atomic
from whet.util.install import install_hint
from whet.util.references import is_ref, resolve_ref

__all__ = [
    "LOGGERS",
    "Jsonl",
    "Logger",
    "Loggers",
    "MLflow",
    "SwanLab",
    "TensorBoard",
    "Trackio",
    "Wandb",
    "check_loggers",
]

log = logging.getLogger(__name__)


@runtime_checkable
class Logger(Protocol):
    """What a run asks of a logger."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of one step; names are like train/reward."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


@runtime_checkable
class _Flushing(Protocol):
    def flush(self) -> None: ...


@runtime_checkable
class _Tabling(Protocol):
    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Jsonl:
    """Lines of {"step": ..., name: value}.

    Args:
        folder: of the file, unless `path` says otherwise.
        options, config: not used.
        path: the file.
    """

    def __init__(
        self, folder: Path, options: MetricsLoggerOptions, config: Mapping[str, Any], *, path: str = ""
    ) -> None:
        file = Path(path).open("ab") if path else open_for_append(folder / "log.jsonl")  # noqa: SIM115 - closed by close()
        self._file = io.TextIOWrapper(file, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line; NaN becomes null."""
        self._file.write(to_json({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files for `tensorboard --logdir`.

    Args: folder: for the files. options: flush_every_n_steps counts. config: not used.
    """

    def __init__(self, folder: Path, options: MetricsLoggerOptions, config: Mapping[str, Any]) -> None:
        writer = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._summary, self._summary_metadata = summaries.Summary, summaries.SummaryMetadata
        self._tensor = importlib.import_module("tensorboard.compat.proto.tensor_pb2").TensorProto
        self._writer = writer.EventFileWriter(str(folder / "tensorboard"))
        self._every, self._calls = options.flush_every_n_steps, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        points = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=points))
        self._writer.add_event(event)
        self._calls += 1
        if self._calls % self._every == 0:
            self._writer.flush()

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table of completions to the tab of texts. Args: name: of the table. rows: one each."""
        columns, data = _columns(rows)
        cell = lambda value: str(value).replace("|", "\\|").replace("\n", "<br>")
        lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in data)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        plugin = self._summary_metadata.PluginData(plugin_name="text")
        value = self._summary.Value(
            tag=f"{name}/text_summary",
            metadata=self._summary_metadata(plugin_data=plugin),
            tensor=self._tensor(dtype="DT_STRING", string_val=[text.encode("utf-8", "replace")]),
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def flush(self) -> None:
        """Writes what is held back."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class Wandb:
    """Weights & Biases; `backend_kwargs: {wandb: {mode: offline}}` needs no network, `mode: disabled` turns it off.

    Where it is to be seen is logged.

    Args:
        folder: for its files.
        options: project and run name.
        config: shown with the run.
        run_id: of the run there that a resumed run goes on in; None = a new one.
        kwargs: of wandb.init.
    """

    def __init__(
        self,
        folder: Path,
        options: MetricsLoggerOptions,
        config: Mapping[str, Any],
        *,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        wandb = _package("wandb", "wandb")
        os.environ.setdefault("WANDB_SILENT", "true")  # it would write over the progress bar, and ask on the terminal
        self.run_id = run_id or secrets.token_hex(4)
        given = {"project": options.project_name, "name": options.run_name or folder.name, "dir": str(folder)}
        self._run = wandb.init(**{**given, "config": dict(config), "id": self.run_id, "resume": "allow", **kwargs})
        self._table = wandb.Table
        url = self._run.url  # None where nothing is sent
        log.info("wandb: %s", url or f"nothing is sent (mode {kwargs.get('mode', 'offline')})")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._run.log(dict(values), step=step)

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table of completions. Args: name: of the table. rows: one each, of the same columns."""
        columns, data = _columns(rows)
        self._run.log({name: self._table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


class Trackio:
    """trackio, a local dashboard: `trackio show`.

    Args:
        folder: names the run where options don't.
        options: project and run name.
        config: shown with the run.
        run_id: the name of the run there that a resumed run goes on in; None = a new one.
        kwargs: of trackio.init.
    """

    def __init__(
        self,
        folder: Path,
        options: MetricsLoggerOptions,
        config: Mapping[str, Any],
        *,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._trackio = _package("trackio", "trackio")
        given = {"project": options.project_name, "name": options.run_name or folder.name, "config": dict(config)}
        if run_id is not None:
            given |= {"name": run_id, "resume": "allow"}
        with contextlib.redirect_stdout(io.StringIO()):  # it greets on standard output, over the progress bar
            self.run_id = str(self._trackio.init(**{**given, **kwargs}).name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._trackio.log(dict(values), step=step)

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table of completions. Args: name: of the table. rows: one each, of the same columns."""
        columns, data = _columns(rows)
        self._trackio.log({name: self._trackio.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Ends the run there."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI, or where MLflow writes by default (mlflow.db in the working folder).

    MLflow's names take no characters but letters, digits and "_-. :/": others become "_".

    Args:
        folder: names the run where options don't.
        options: project (MLflow's experiment) and run name.
        config: its values are the run's parameters.
        run_id: of the run there that a resumed run goes on in; None = a new one.
        kwargs: of MlflowClient, e.g. tracking_uri.
    """

    MAX_VALUE, MAX_PARAMS, MAX_METRICS = 6000, 100, 1000
    """Characters of a parameter's value, and parameters and metrics of one call, which MLflow limits."""

    def __init__(
        self,
        folder: Path,
        options: MetricsLoggerOptions,
        config: Mapping[str, Any],
        *,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        mlflow = _package("mlflow", "mlflow")
        self._client, self._entities = mlflow.MlflowClient(**kwargs), mlflow.entities
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
            return
        project = options.project_name
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self.run_id = self._client.create_run(experiment, run_name=options.run_name or folder.name).info.run_id
        params = [
            self._entities.Param(_plain_name(name), str(value)[: self.MAX_VALUE])
            for name, value in flatten(config).items()
            if name and value is not None  # an empty configuration is one value without a name
        ]
        for start in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + self.MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        now = int(time.time() * 1000)
        points = [self._entities.Metric(_plain_name(name), float(x), now, step) for name, x in values.items()]
        for start in range(0, len(points), self.MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=points[start : start + self.MAX_METRICS])

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds completions to the table of that name. Args: rows: one each, of the same columns."""
        table = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self.run_id, table, artifact_file=f"{_plain_name(name)}.json")

    def close(self) -> None:
        """Ends the run there."""
        self._client.set_terminated(self.run_id)


class SwanLab:
    """SwanLab; `backend_kwargs: {swanlab: {mode: offline}}` needs no network, and `mode: local` its own board here.

    Args:
        folder: for its files.
        options: project and run name.
        config: shown with the run.
        run_id: of the run there that a resumed run goes on in; None = a new one.
        kwargs: of swanlab.init.
    """

    def __init__(
        self,
        folder: Path,
        options: MetricsLoggerOptions,
        config: Mapping[str, Any],
        *,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._swanlab = _package("swanlab", "swanlab")
        self.run_id = run_id or secrets.token_hex(11)[:21]  # as long as SwanLab's own
        given = {"project": options.project_name, "name": options.run_name or folder.name, "log_dir": str(folder)}
        self._run = self._swanlab.init(
            **{**given, "config": dict(config), "id": self.run_id, "resume": "allow", **kwargs}
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._run.log(dict(values), step=step)

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds completions as texts, which is what SwanLab has for them. Args: rows: one each."""
        texts = [self._swanlab.Text(to_json(row), caption=f"{number}") for number, row in enumerate(rows)]
        self._run.log({name: texts}, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


MAX_TABLE_ROWS = 64
"""Completions in a table."""
_PACKAGES = {
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard.summary.writer.event_file_writer",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""What each logger is made of."""

LOGGERS: dict[str, Callable[..., Logger]] = {
    "jsonl": Jsonl,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}
"""Loggers by name: called with (folder, options, config, **backend_kwargs[name])."""
RESUMED = frozenset({"mlflow", "swanlab", "trackio", "wandb"})
"""Those whose service has runs of its own, which a resumed run goes on in: they take run_id= and have a run_id."""


class _Function:
    """A plain function(step, values) as a logger."""

    def __init__(self, fn: Callable[[int, Mapping[str, float]], Any]) -> None:
        self._fn = fn

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._fn(step, values)

    def close(self) -> None:
        pass


class Loggers:
    """All loggers of a run as one. Made on rank 0 alone, after any fork: threads and sockets don't survive one.

    Args:
        given: names, "package.module:name", objects with log and close, classes of them (called with nothing), or
            functions (step, values).
        options: their options.
        folder: the run's; where files go unless options.log_dir is set.
        config: the run's, as plain dicts.
        prefix: put before every name, with a slash.
    Raises: ConfigError: an unknown name, or one that can't start: its package is not installed, its folder can't be
        written, its server can't be reached.

    >>> seen = []
    >>> loggers = Loggers([lambda step, values: seen.append((step, dict(values)))])
    >>> loggers.log(3, {"reward": 0.5}); seen
    [(3, {'train/reward': 0.5})]
    """

    def __init__(
        self,
        given: Sequence[Any],
        *,
        options: MetricsLoggerOptions | None = None,
        folder: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self._options = options or MetricsLoggerOptions()
        place = self._options.log_dir or folder
        self._folder = None if place is None else Path(place).absolute()
        self._run = None if folder is None else Path(folder).absolute()
        self._key = "trainer.metrics_logging_options.log_dir" if self._options.log_dir else "trainer.run_dir"
        self._config = config or {}
        self._prefix = f"{prefix}/" if prefix else ""
        self._loggers: dict[str, Logger] = {}
        check_loggers(given, self._options)
        try:
            raise_all([partial(self._start, item) for item in given])
        except ConfigError:
            self.close()
            raise

    def _start(self, item: Any) -> None:
        try:
            name, logger = self._made(item)
        except (Exception, SystemExit) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(_no_start(item, error)) from error
        self._loggers[f"{name} {len(self._loggers)}" if name in self._loggers else name] = logger

    def _made(self, item: Any) -> tuple[str, Logger]:
        name = item if isinstance(item, str) else getattr(item, "__qualname__", type(item).__name__)
        if isinstance(item, str) and item in LOGGERS:
            if self._folder is None:
                raise ConfigError(
                    f"logger {item!r} writes files; set trainer.run_dir, or metrics_logging_options.log_dir"
                )
            make_writable_folder(self._folder, self._key)
            kwargs = self._options.backend_kwargs.get(item, {})
            if item in RESUMED and self._run is not None:
                return name, self._resumed(item, self._run, self._folder, kwargs)
            return name, LOGGERS[item](self._folder, self._options, self._config, **kwargs)
        if isinstance(item, str):
            item = resolve_ref(item, "logger")
        if isinstance(item, type):
            item = item()
        if isinstance(item, Logger):
            return name, item
        if callable(item):
            return name, _Function(item)
        raise ConfigError(f"logger {item!r} has no log(step, values) and close(), and is not a function either")

    def _resumed(self, name: str, run: Path, folder: Path, kwargs: Mapping[str, Any]) -> Logger:
        """A logger in the same run of its service for one run folder; the id is kept there once it has begun."""
        kept = make_writable_folder(run, "trainer.run_dir") / f"{name}-id.txt"
        text = kept.read_text(errors="replace").strip() if kept.is_file() else ""
        known = text if re.fullmatch(r"[\w. -]{1,200}", text) else None
        made: Any = LOGGERS[name](folder, self._options, self._config, run_id=known, **kwargs)
        if made.run_id != known:
            write_atomic(kept, made.run_id.encode())
        return made

    def log(self, step: int, values: Mapping[str, float], mode: str = "train") -> None:
        """Gives the metrics of one step to every logger, under "<prefix>/<mode>/<name>"."""
        named = {f"{self._prefix}{mode}/{name}": value for name, value in values.items()}
        self._each(lambda logger: logger.log(step, named))

    def log_completions(self, step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any], mode: str) -> None:
        """Gives completions to the loggers that take them: of every evaluation, and of each n-th step of training.

        Args: step, columns, rewards: as in `RunFolder.write_completions`. mode: of the step.
        """
        every = self._options.completions_every_n_steps
        if not every or not len(columns["completion"]) or (mode == "train" and step % every and step != 1):
            return
        rows = _table_rows(step, columns, rewards)
        name = f"{self._prefix}{mode}/completions"
        self._each(lambda logger: logger.log_completions(step, name, rows) if isinstance(logger, _Tabling) else None)

    def flush(self) -> None:
        """Makes those that hold rows back write them; a logger of your own that does has a method `flush`."""
        self._each(lambda logger: logger.flush() if isinstance(logger, _Flushing) else None)

    def close(self) -> None:
        """Closes every logger."""
        self._each(lambda logger: logger.close())
        self._loggers = {}

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                call(logger)
            except (Exception, SystemExit) as error:
                del self._loggers[name]
                _dropped(name, error)


def check_loggers(given: Sequence[Any], options: MetricsLoggerOptions | None = None) -> None:
    """Looks at loggers without starting them.

    Raises: ConfigError: unknown names, references that can't be resolved, packages that are not installed, no login to
        Weights & Biases, a log_dir that can't be written; all of these at once.
    """
    options = options or MetricsLoggerOptions()
    unknown = [name for name in options.backend_kwargs if name not in LOGGERS]
    checks: list[Callable[[], Any]] = [
        partial(_raise, lookup_error("logger in backend_kwargs", n, LOGGERS)) for n in unknown
    ]
    checks += [
        partial(_check_name, name, options.backend_kwargs.get(name, {})) for name in given if isinstance(name, str)
    ]
    if options.log_dir and given:
        checks.append(partial(make_writable_folder, options.log_dir, "trainer.metrics_logging_options.log_dir"))
    raise_all(checks)


def _check_name(name: str, kwargs: Mapping[str, Any]) -> None:
    if name in _PACKAGES:
        package = _package(_PACKAGES[name], name)
        if name == "wandb" and kwargs.get("mode", "online") == "online" and "settings" not in kwargs:
            _check_login(package)
    elif name not in LOGGERS:
        if not is_ref(name):
            raise lookup_error("logger", name, LOGGERS)
        resolve_ref(name, "logger")


def _check_login(wandb: Any) -> None:
    """Raises ConfigError where Weights & Biases is to be sent to and nobody has logged in; its server is not asked."""
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        wandb.login(verify=False)  # returns at once where the environment or its settings say offline
    except Exception as error:
        raise ConfigError(_no_start("wandb", error)) from error


def _raise(error: ConfigError) -> None:
    raise error


def _table_rows(step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first completions of a step as rows of a table: texts, rewards and advantages."""
    shown = {
        name: columns[name]
        for name in ("prompt", "completion", "reward", "advantage", "finish_reason")
        if name in columns
    }
    shown |= {f"reward/{name}": values for name, values in rewards.items()}
    count = min(MAX_TABLE_ROWS, len(columns["completion"]))
    text = lambda value: to_json(value) if isinstance(value, list | tuple) else value
    number = lambda value: float(value) if isinstance(value, np.floating) else value
    return [{"step": step, **{name: number(text(values[i])) for name, values in shown.items()}} for i in range(count)]


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and each row's values in their order."""
    columns = list(rows[0])
    return columns, [[row[column] for column in columns] for row in rows]


def _plain_name(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _no_start(item: Any, error: BaseException) -> str:
    name = item if isinstance(item, str) else getattr(item, "__qualname__", item)
    known = (
        f"look at trainer.metrics_logging_options.backend_kwargs.{item}" if item in list(LOGGERS) else "fix the logger"
    )
    return f"logger {name} can't start: {format_exception(error)}; {known}, or take it out of trainer.loggers"


def _dropped(name: str, error: BaseException) -> None:
    log.warning("logger %s failed and is dropped: %s", name, format_exception(error))


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"logger {extra!r} needs a package that is not installed; {install_hint(extra)}") from error
