"""The base of the configurations: fields from a table, checks, and the properties that callbacks read.

A configuration is a dataclass with TRL's fields, which HfArgumentParser and TrlParser can read. It has the properties
of transformers.TrainingArguments that callbacks use, and needs no accelerate.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import ParallelMode

from whet.compat.field import Table
from whet.errors import ConfigError, lookup_error, nearest
from whet.parallel import torchrun_env
from whet.parallel.processes import join_processes
from whet.trl.config.launch import apply_launcher
from whet.trl.config.training import OWN_FIELDS

__all__ = ["Arguments", "WrongArgument", "dataclass_of"]

log = logging.getLogger("whet")

_LEVELS = {
    "debug": logging.DEBUG,
    "detail": logging.INFO,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": None,
}
_RENAMED = {"evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu", "warmup_ratio": "warmup_steps"}
"""Field of an earlier transformers -> its new name."""
_ONLY = {"save_safetensors": True, "group_by_length": False, "tp_size": 1}
"""Field of an earlier transformers -> the only accepted value."""


class WrongArgument(ConfigError, TypeError):
    """An unknown argument or a wrong type. It is a TypeError too, which TRL raises."""


class Arguments:
    """The base of the configurations; `dataclass_of` makes the subclasses."""

    TABLE: ClassVar[Table] = {}
    OLD: ClassVar[Table] = {}
    OWN: ClassVar[Table] = OWN_FIELDS
    COMPAT: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    compat = None
    """An earlier release of TRL, whose defaults and metric names are used; a field of configurations in COMPAT."""

    def __getattr__(self, name: str) -> Any:  # declares the tables' fields to a type checker
        """Raises AttributeError; for transformers' set_... methods, the message has the alternative."""
        if name.startswith("set_") and hasattr(TrainingArguments, name):
            raise AttributeError(f"{type(self).__name__} has no {name}; give the fields that it sets by name")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(self, output_dir: str | None = None, **values: Any) -> None:
        """Args: output_dir: the folder of checkpoints. values: the other fields, by name.

        Raises: WrongArgument: an unknown field; the message names the nearest. ConfigError: a refused value.
        """
        known = {f.name: f for f in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise WrongArgument(f"{type(self).__name__} has no field {unknown[0]!r}{nearest(unknown[0], known)}")
        for name, f in known.items():
            default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # pyright: ignore
            setattr(self, name, values.get(name, default))
        self.output_dir = output_dir
        self._set_fields = frozenset(values)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Applies old names, derives fields from others, and checks all values."""
        self._apply_compat()
        self._apply_old_names()
        for name, row in self.TABLE.items():
            value = getattr(self, name)
            if row.refuses(value):
                raise ConfigError(f"{name}={value!r} is not supported: {row.note}")
            if row.kind is dict and isinstance(value, str) and (row.state != "no effect" or value.startswith("{")):
                setattr(self, name, _parse_dict(name, value))
        self._derive_fields()
        self._check()

    def _apply_compat(self) -> None:
        """Applies the defaults of the earlier release that `compat` names."""
        release = getattr(self, "compat", None)
        if release is None:
            return
        if release not in self.COMPAT:
            raise lookup_error("compat", release, self.COMPAT)
        set_fields = getattr(self, "_set_fields", frozenset())
        for name, value in self.COMPAT[release].items():
            default = self.TABLE[name].default if name in self.TABLE else None
            if name not in set_fields and getattr(self, name) == default:
                setattr(self, name, value)

    def _apply_old_names(self) -> None:
        """Moves the values of earlier releases' fields to their new names."""
        for before, now in self.renamed().items():
            value = getattr(self, before, None)
            if value is not None:
                setattr(self, now, value)
                setattr(self, before, None)
        for name, only in _ONLY.items():
            value = getattr(self, name, None)
            if value is not None and value != only:
                raise ConfigError(f"{name}={value!r} is not supported: {self.OLD[name].note}")

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> its new name."""
        return {before: now for before, now in _RENAMED.items() if before in cls.OLD}

    def _derive_fields(self) -> None:
        """Derives fields from others, as transformers does."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self.output_dir = str(Path(self.output_dir).expanduser())
        self.parse_enums()
        self.accelerator_config = _to_accelerator_config(self.accelerator_config)
        loggers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        if loggers == ["all"]:
            from transformers.integrations.integration_utils import get_available_reporting_integrations

            loggers = get_available_reporting_integrations()
        self.report_to = [] if loggers == ["none"] else loggers
        apply_launcher(self)
        if self.world_size > 1 and self.accelerator_config.split_batches:
            raise ConfigError(
                f"accelerator_config: split_batches=True divides per_device_train_batch_size="
                f"{self.per_device_train_batch_size} by {self.world_size} processes; leave it out, and give the rows "
                "of one process"
            )
        if self.disable_tqdm is None:
            self.disable_tqdm = False
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        self.gradient_checkpointing = self.activation_checkpointing
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        self.do_eval = self.do_eval or self.eval_strategy != "no"
        if (self.load_best_model_at_end or self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")) and (
            self.metric_for_best_model is None
        ):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def parse_enums(self) -> None:
        """Replaces strings by members of transformers' enumerations. Raises ConfigError: an unknown value."""
        for name, kind in (
            ("eval_strategy", IntervalStrategy),
            ("logging_strategy", IntervalStrategy),
            ("save_strategy", SaveStrategy),
            ("lr_scheduler_type", SchedulerType),
        ):
            value, known = getattr(self, name), [member.value for member in kind]
            if value not in known:
                raise lookup_error(name, str(value), known)
            setattr(self, name, kind(value))

    def _check(self) -> None:
        if self.logging_strategy == "steps" and self.logging_steps <= 0:
            raise ConfigError(f"logging_steps={self.logging_steps!r} must be positive; or logging_strategy='no'")
        if self.lr_scheduler_type.value in ("reduce_lr_on_plateau", "greedy") and self.eval_strategy == "no":
            raise ConfigError(
                f"lr_scheduler_type={self.lr_scheduler_type.value!r} needs evaluations, and eval_strategy is 'no'; set "
                "eval_strategy and eval_dataset, or a schedule that follows the steps (cosine)"
            )
        if self.max_steps == 0:
            raise ConfigError("max_steps=0 trains nothing; give the run's steps, or -1: num_train_epochs decides")
        if self.log_level not in _LEVELS:
            raise lookup_error("log_level", self.log_level, _LEVELS)
        if self.load_best_model_at_end and self.save_only_model:
            raise ConfigError("load_best_model_at_end needs complete checkpoints; set save_only_model=False")
        if not self.load_best_model_at_end or self.save_strategy == "best":
            return
        if self.eval_strategy.value != self.save_strategy.value:
            raise ConfigError(
                f"load_best_model_at_end requires the save and eval strategy to match: eval_strategy="
                f"{self.eval_strategy.value!r}, save_strategy={self.save_strategy.value!r}; set both to the same value"
            )
        if self.eval_strategy == "steps" and self.save_steps % self.eval_steps:
            raise ConfigError(
                f"load_best_model_at_end requires save_steps={self.save_steps} to be a multiple of eval_steps="
                f"{self.eval_steps}; set save_steps={self.eval_steps}"
            )

    # ---- properties of TrainingArguments that callbacks read --------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        if self.use_cpu or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda") if self.world_size == 1 else torch.device("cuda", self.local_process_index)

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return torchrun_env.world_size()

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return torchrun_env.rank()

    @property
    def local_process_index(self) -> int:
        """The index of this process on its machine."""
        return torchrun_env.local_rank()

    @property
    def should_log(self) -> bool:
        """Whether this process logs: the first does."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process saves: the first does."""
        return self.process_index == 0

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED if several processes train."""
        return ParallelMode.NOT_PARALLEL if self.world_size == 1 else ParallelMode.DISTRIBUTED

    @property
    def train_batch_size(self) -> int:
        """The rows of a micro-step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The rows of an evaluation batch."""
        return self.per_device_eval_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the updates of the warmup: warmup_steps, or if it is below 1, this share of all updates."""
        steps = self.warmup_steps
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    def get_process_log_level(self) -> int:
        """Returns the level of this process's loggers."""
        return _LEVELS[self.log_level if self.should_log else self.log_level_replica] or logging.WARNING

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Returns a context that the first process has left before the others enter it. Args: local, desc: have no
        effect.
        """
        ranks = join_processes(self.ddp_timeout)
        if not ranks.is_writer:
            ranks.all_gather(None)
        yield
        if ranks.is_writer:
            ranks.all_gather(None)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, with tokens hidden."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore
        values["accelerator_config"] = self.accelerator_config.to_dict()
        plain = {n: v.value if isinstance(v, IntervalStrategy | SaveStrategy | SchedulerType) else v
                 for n, v in values.items()}  # fmt: skip
        return {n: f"<{n.upper()}>" if n.endswith("_token") and v else copy.copy(v) for n, v in plain.items()}

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` for loggers: numbers and texts."""
        return {n: v if isinstance(v, bool | int | float | str) else str(v) for n, v in self.to_dict().items()}


def _to_accelerator_config(value: Any) -> AcceleratorConfig:
    """Converts a dict of fields, the path of a JSON file, or None to transformers' AcceleratorConfig."""
    if isinstance(value, AcceleratorConfig):
        return value
    try:
        return AcceleratorConfig.from_json_file(value) if isinstance(value, str) else AcceleratorConfig(**(value or {}))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"accelerator_config={value!r}: {error}") from error


def _parse_dict(name: str, value: str) -> dict[str, Any]:
    """Parses the text of a dict field. Raises ConfigError: not a JSON object."""
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}={value!r} is not JSON ({error}); give an object: '{{\"key\": 1}}'") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}={value!r} is not a JSON object; give one: '{{\"key\": 1}}'")
    return parsed


def dataclass_of(name: str, base: type[Arguments], doc: str) -> Any:
    """Makes a configuration's class: a dataclass with the fields of the base's tables. Old fields default to None."""
    fields = []
    for field, row in {**base.TABLE, **base.OWN, **base.OLD}.items():
        kind = row.kind or type(row.default)
        kind = dict | str if kind is dict else kind  # on transformers' command line, a dict is a JSON text
        optional = kind | None if row.default is None else kind
        metadata = {"help": f"{row.state}: {row.note}".replace("%", "%%")}
        if isinstance(row.default, list | dict):
            fields.append((field, kind, dataclasses.field(default_factory=row.default.copy, metadata=metadata)))
        else:
            fields.append((field, optional, dataclasses.field(default=row.default, metadata=metadata)))
    cls = dataclasses.make_dataclass(name, fields, bases=(base,), init=False, repr=True, eq=True)
    cls.__doc__, cls.__module__ = doc, base.__module__
    return cls
