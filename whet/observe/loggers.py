"""Loggers: they send metrics to TensorBoard, Weights & Biases, trackio, MLflow, SwanLab or a JSONL file.

A logger is any object with log(step, values) and close(). One with log_completions(step, name, rows) also receives
completions. A resumed run continues the same run of a service, by the id in the run folder. A logger that can't start
is an error before the first step. One that fails later is dropped with a warning, and training continues.
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
    """The methods that a run calls on a logger."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of one step, with names like train/reward."""
        ...

    def close(self) -> None:
        """Writes what is buffered, and closes the logger."""
        ...


@runtime_checkable
class _HasFlush(Protocol):
    def flush(self) -> None: ...


@runtime_checkable
class _HasCompletions(Protocol):
    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Jsonl:
    """Lines of {"step": ..., name: value}.

    Args:
        folder: of log.jsonl.
        options, config: not used.
        path: the file; "" = log.jsonl in the folder.
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

    It needs tensorboard's own file writer only, not torch.

    Args: folder: for the files. options: flush_every_n_steps is used. config: not used.
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
        """Adds a table of completions to the text tab. Args: name: of the table. rows: one for each completion."""
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
        """Writes what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class _TrackedRun:
    """A run of a tracking service whose client has init(), log() and finish().

    Args:
        folder: for the service's files; names the run if the options don't.
        options: project and run name.
        config: shown with the run.
        run_id: of the service's run that a resumed run continues; None = a new one.
        kwargs: further arguments of the service's init().
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
        init = {"project": options.project_name, "name": options.run_name or folder.name, "config": dict(config)}
        self.run_id = run_id or ""
        self._run: Any = None
        self._start(init, str(folder), kwargs)

    def _start(self, init: dict[str, Any], folder: str, kwargs: Mapping[str, Any]) -> None:
        """Sets `_run` and `run_id`. Args: init: arguments of init() that all services have. kwargs: of the user."""
        raise NotImplementedError

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Returns completions as the service shows them."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._run.log(dict(values), step=step)

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table of completions. Args: name: of the table. rows: one for each completion, same columns."""
        self._run.log({name: self._table(rows)}, step=step)

    def close(self) -> None:
        """Ends the service's run."""
        self._run.finish()


class Wandb(_TrackedRun):
    """Weights & Biases; `backend_kwargs: {wandb: {mode: offline}}` needs no network, `mode: disabled` turns it off.

    The address of the run is logged.
    """

    def _start(self, init: dict[str, Any], folder: str, kwargs: Mapping[str, Any]) -> None:
        self._wandb = _package("wandb", "wandb")
        os.environ.setdefault("WANDB_SILENT", "true")  # else it writes over the progress bar, and asks on the terminal
        self.run_id = self.run_id or secrets.token_hex(4)
        self._run = self._wandb.init(**{**init, "dir": folder, "id": self.run_id, "resume": "allow", **kwargs})
        url = self._run.url  # None if nothing is sent
        log.info("wandb: %s", url or f"nothing is sent (mode {kwargs.get('mode', 'offline')})")

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        columns, data = _columns(rows)
        return self._wandb.Table(columns=columns, data=data)


class Trackio(_TrackedRun):
    """trackio, a local dashboard: `trackio show`. The id of a run is its name there."""

    def _start(self, init: dict[str, Any], folder: str, kwargs: Mapping[str, Any]) -> None:
        self._run = _package("trackio", "trackio")
        resumed = {"name": self.run_id, "resume": "allow"} if self.run_id else {}
        with contextlib.redirect_stdout(io.StringIO()):  # else its greeting goes over the progress bar
            self.run_id = str(self._run.init(**{**init, **resumed, **kwargs}).name)

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        columns, data = _columns(rows)
        return self._run.Table(columns=columns, data=data)

    def close(self) -> None:
        """Ends the service's run."""
        with contextlib.redirect_stdout(io.StringIO()):
            super().close()


class SwanLab(_TrackedRun):
    """SwanLab; `backend_kwargs: {swanlab: {mode: offline}}` needs no network, `mode: local` uses a local dashboard.

    Completions are texts, since SwanLab has no tables.
    """

    def _start(self, init: dict[str, Any], folder: str, kwargs: Mapping[str, Any]) -> None:
        self._swanlab = _package("swanlab", "swanlab")
        self.run_id = self.run_id or secrets.token_hex(11)[:21]  # as long as SwanLab's own ids
        self._run = self._swanlab.init(**{**init, "log_dir": folder, "id": self.run_id, "resume": "allow", **kwargs})

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return [self._swanlab.Text(to_json(row), caption=f"{number}") for number, row in enumerate(rows)]


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI, or where MLflow writes by default (mlflow.db in the working folder).

    MLflow's names allow letters, digits and "_-. :/" only; other characters become "_".

    Args:
        folder: names the run if the options don't.
        options: project (MLflow's experiment) and run name.
        config: its values are the run's parameters.
        run_id: of MLflow's run that a resumed run continues; None = a new one.
        kwargs: of MlflowClient, e.g. tracking_uri.
    """

    MAX_VALUE, MAX_PARAMS, MAX_METRICS = 6000, 100, 1000
    """MLflow's limits: characters of a parameter's value; parameters and metrics of one call."""

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
        known = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if known is None else known.experiment_id
        self.run_id = self._client.create_run(experiment, run_name=options.run_name or folder.name).info.run_id
        params = [
            self._entities.Param(_mlflow_name(name), str(value)[: self.MAX_VALUE])
            for name, value in flatten(config).items()
            if name and value is not None  # `flatten` gives an empty configuration as one value without a name
        ]
        for start in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + self.MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        now = int(time.time() * 1000)
        points = [self._entities.Metric(_mlflow_name(name), float(x), now, step) for name, x in values.items()]
        for start in range(0, len(points), self.MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=points[start : start + self.MAX_METRICS])

    def log_completions(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds completions to a table. Args: name: of the table. rows: one for each completion, same columns."""
        table = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self.run_id, table, artifact_file=f"{_mlflow_name(name)}.json")

    def close(self) -> None:
        """Ends MLflow's run."""
        self._client.set_terminated(self.run_id)


MAX_TABLE_ROWS = 64
"""The completions in a table at most."""
_PACKAGES = {
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard.summary.writer.event_file_writer",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The module that each logger imports."""

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
"""The loggers of services with runs of their own, which a resumed run continues. They take and have a run_id."""


class _FunctionLogger:
    """A function f(step, values) as a logger."""

    def __init__(self, fn: Callable[[int, Mapping[str, float]], Any]) -> None:
        self._fn = fn

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._fn(step, values)

    def close(self) -> None:
        pass


class Loggers:
    """All loggers of a run as one. Make it on rank 0 only, after any fork: threads and sockets don't survive a fork.

    Args:
        loggers: names, "package.module:name", objects with log and close, classes of such objects (called without
            arguments), or functions f(step, values).
        options: of the loggers.
        folder: the run's, for files if options.log_dir is not set.
        config: the run's, as plain dicts.
        prefix: put before every metric name, with a slash.
    Raises: ConfigError: a name is unknown, or a logger can't start: its package is not installed, its folder can't be
        written, or its server can't be reached.

    >>> seen = []
    >>> loggers = Loggers([lambda step, values: seen.append((step, dict(values)))])
    >>> loggers.log(3, {"reward": 0.5}); seen
    [(3, {'train/reward': 0.5})]
    """

    def __init__(
        self,
        loggers: Sequence[Any],
        *,
        options: MetricsLoggerOptions | None = None,
        folder: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self._options = options or MetricsLoggerOptions()
        log_dir = self._options.log_dir or folder
        self._log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._run_dir = None if folder is None else Path(folder).absolute()
        self._key = "trainer.metrics_logging_options.log_dir" if self._options.log_dir else "trainer.run_dir"
        self._config = config or {}
        self._prefix = f"{prefix}/" if prefix else ""
        self._loggers: dict[str, Logger] = {}
        check_loggers(loggers, self._options)
        try:
            raise_all([partial(self._start, item) for item in loggers])
        except ConfigError:
            self.close()
            raise

    def _start(self, item: Any) -> None:
        try:
            name, logger = self._make_logger(item)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_start_error(item, error)) from error
        self._loggers[f"{name} {len(self._loggers)}" if name in self._loggers else name] = logger

    def _make_logger(self, item: Any) -> tuple[str, Logger]:
        name = item if isinstance(item, str) else getattr(item, "__qualname__", type(item).__name__)
        if isinstance(item, str) and item in LOGGERS:
            if self._log_dir is None:
                raise ConfigError(
                    f"logger {item!r} writes files; set trainer.run_dir, or metrics_logging_options.log_dir"
                )
            make_writable_folder(self._log_dir, self._key)
            kwargs = self._options.backend_kwargs.get(item, {})
            if item in RESUMED and self._run_dir is not None:
                return name, self._make_resumable(item, self._run_dir, self._log_dir, kwargs)
            return name, LOGGERS[item](self._log_dir, self._options, self._config, **kwargs)
        if isinstance(item, str):
            item = resolve_ref(item, "logger")
        if isinstance(item, type):
            item = item()
        if isinstance(item, Logger):
            return name, item
        if callable(item):
            return name, _FunctionLogger(item)
        raise ConfigError(f"logger {item!r} has no log(step, values) and close(), and is not a function either")

    def _make_resumable(self, name: str, run_dir: Path, log_dir: Path, kwargs: Mapping[str, Any]) -> Logger:
        """Returns a logger that continues its service's run. The id of that run is in the run folder, in
        <name>-id.txt.
        """
        id_file = make_writable_folder(run_dir, "trainer.run_dir") / f"{name}-id.txt"
        text = id_file.read_text(errors="replace").strip() if id_file.is_file() else ""
        run_id = text if re.fullmatch(r"[\w. -]{1,200}", text) else None
        logger: Any = LOGGERS[name](log_dir, self._options, self._config, run_id=run_id, **kwargs)
        if logger.run_id != run_id:
            write_atomic(id_file, logger.run_id.encode())
        return logger

    def log(self, step: int, values: Mapping[str, float], mode: str = "train") -> None:
        """Logs the metrics of one step with every logger, under "<prefix>/<mode>/<name>"."""
        named = {f"{self._prefix}{mode}/{name}": value for name, value in values.items()}
        self._each(lambda logger: logger.log(step, named))

    def log_completions(self, step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any], mode: str) -> None:
        """Logs completions with the loggers that take them: of every evaluation, and of each n-th training step.

        Args: step, columns, rewards: as in `RunFolder.write_completions`. mode: "train" or "eval".
        """
        every = self._options.completions_every_n_steps
        if not every or not len(columns["completion"]) or (mode == "train" and step % every and step != 1):
            return
        rows = _table_rows(step, columns, rewards)
        name = f"{self._prefix}{mode}/completions"
        self._each(
            lambda logger: logger.log_completions(step, name, rows) if isinstance(logger, _HasCompletions) else None
        )

    def flush(self) -> None:
        """Flushes the loggers that have a method `flush`."""
        self._each(lambda logger: logger.flush() if isinstance(logger, _HasFlush) else None)

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
                log.warning("logger %s failed and is dropped: %s", name, format_exception(error))


def check_loggers(loggers: Sequence[Any], options: MetricsLoggerOptions | None = None) -> None:
    """Checks loggers without starting them.

    Raises: ConfigError: unknown names, references that can't be resolved, packages that are not installed, no login to
        Weights & Biases, a log_dir that can't be written; one error names all of these.
    """
    options = options or MetricsLoggerOptions()
    unknown = [name for name in options.backend_kwargs if name not in LOGGERS]
    checks: list[Callable[[], Any]] = [
        partial(_raise, lookup_error("logger in backend_kwargs", n, LOGGERS)) for n in unknown
    ]
    checks += [
        partial(_check_name, name, options.backend_kwargs.get(name, {})) for name in loggers if isinstance(name, str)
    ]
    if options.log_dir and loggers:
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
    """Raises ConfigError if nobody has logged in to Weights & Biases. Does not ask its server."""
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        wandb.login(verify=False)  # returns at once if the environment or its settings say offline
    except Exception as error:
        raise ConfigError(_start_error("wandb", error)) from error


def _raise(error: ConfigError) -> None:
    raise error


def _table_rows(step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the first completions of a step as table rows: texts, rewards and advantages."""
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
    """Returns the names of the columns, and each row's values in their order."""
    columns = list(rows[0])
    return columns, [[row[column] for column in columns] for row in rows]


def _mlflow_name(name: str) -> str:
    """Returns a metric or parameter name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _start_error(item: Any, error: BaseException) -> str:
    """Returns the message for a logger that can't start."""
    name = item if isinstance(item, str) else getattr(item, "__qualname__", item)
    known = (
        f"look at trainer.metrics_logging_options.backend_kwargs.{item}" if item in list(LOGGERS) else "fix the logger"
    )
    return f"logger {name} can't start: {format_exception(error)}; {known}, or take it out of trainer.loggers"


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"logger {extra!r} needs a package that is not installed; {install_hint(extra)}") from error
