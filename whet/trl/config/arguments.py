"""The base of TRL's configurations: fields from a table, checks, and the properties that callbacks read.

A configuration is a dataclass with TRL's fields, so that HfArgumentParser and TrlParser read it. It has the properties
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

from whet.errors import ConfigError, lookup_error, nearest
from whet.fronts.field import Table
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
    """An unknown argument, or one of a wrong type: in TRL a TypeError of Python's own."""


class Arguments:
    """The base of the configurations; `dataclass_of` makes the subclasses."""

    TABLE: ClassVar[Table] = {}
    OLD: ClassVar[Table] = {}
    OWN: ClassVar[Table] = OWN_FIELDS
    COMPAT: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    compat = None
    """The earlier release of TRL with these defaults and metric names; a field where there are any."""

    def __getattr__(self, name: str) -> Any:  # the fields, for a type checker: they are made of the tables
        """Raises AttributeError; for a setter of transformers', with the alternative."""
        if name.startswith("set_") and hasattr(TrainingArguments, name):
            raise AttributeError(f"{type(self).__name__} has no {name}; give the fields that it sets by name")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        """Args: output_dir: the folder of checkpoints. given: the other fields, by name.

        Raises: WrongArgument: an unknown field, with the nearest. ConfigError: a refused value.
        """
        known = {f.name: f for f in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise WrongArgument(f"{type(self).__name__} has no field {unknown[0]!r}{nearest(unknown[0], known)}")
        for name, f in known.items():
            default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # pyright: ignore
            setattr(self, name, given.get(name, default))
        self.output_dir = output_dir
        self._given = frozenset(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Applies old names, fills in fields that follow from others, and checks."""
        self._apply_compat()
        self._apply_old_names()
        for name, row in self.TABLE.items():
            value = getattr(self, name)
            if row.refuses(value):
                raise ConfigError(f"{name}={value!r} is not supported: {row.note}")
            if row.kind is dict and isinstance(value, str) and (row.state != "no effect" or value.startswith("{")):
                setattr(self, name, _mapping(name, value))
        self._fill_in()

    def _apply_compat(self) -> None:
        """Takes the defaults of an earlier release, where `compat` names one."""
        release = getattr(self, "compat", None)
        if release is None:
            return
        if release not in self.COMPAT:
            raise lookup_error("compat", release, self.COMPAT)
        given = getattr(self, "_given", frozenset())
        for name, value in self.COMPAT[release].items():
            default = self.TABLE[name].default if name in self.TABLE else None
            if name not in given and getattr(self, name) == default:
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

    def _fill_in(self) -> None:
        """Fills in the fields that follow from others, as transformers does."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self.output_dir = str(Path(self.output_dir).expanduser())
        self.parse_enums()
        self.accelerator_config = _accelerator(self.accelerator_config)
        reports = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        self.report_to = _available() if reports == ["all"] else [] if reports == ["none"] else reports
        apply_launcher(self)
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
        self._check()

    def parse_enums(self) -> None:
        """Replaces words by members of transformers' enumerations. Raises: ConfigError: an unknown word."""
        for name, kind in (
            ("eval_strategy", IntervalStrategy),
            ("logging_strategy", IntervalStrategy),
            ("save_strategy", SaveStrategy),
            ("lr_scheduler_type", SchedulerType),
        ):
            setattr(self, name, _word(name, getattr(self, name), kind))

    def _check(self) -> None:
        if self.logging_strategy == "steps" and self.logging_steps <= 0:
            raise ConfigError(f"logging_steps={self.logging_steps!r} must be positive; or logging_strategy='no'")
        if self.lr_scheduler_type.value in ("reduce_lr_on_plateau", "greedy") and self.eval_strategy == "no":
            raise ConfigError(
                f"lr_scheduler_type={self.lr_scheduler_type.value!r} goes by an evaluation, and eval_strategy is 'no'; "
                "set it, with an eval_dataset, or take one that goes by the step (cosine)"
            )
        if self.max_steps == 0:
            raise ConfigError(
                "max_steps=0 asks for no step; give the steps of the run, or -1: num_train_epochs decides"
            )
        if self.log_level not in _LEVELS:
            raise lookup_error("log_level", self.log_level, _LEVELS)
        if self.load_best_model_at_end and self.save_only_model:
            raise ConfigError("load_best_model_at_end reads whole checkpoints; set save_only_model=False")
        if not self.load_best_model_at_end or self.save_strategy == "best":
            return
        if self.eval_strategy.value != self.save_strategy.value:
            raise ConfigError(
                f"load_best_model_at_end requires the save and eval strategy to match: eval_strategy="
                f"{self.eval_strategy.value!r}, save_strategy={self.save_strategy.value!r}; set both to one"
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
        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")

    @property
    def n_gpu(self) -> int:
        """GPUs of this process."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """Processes."""
        return 1

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return 0

    @property
    def local_process_index(self) -> int:
        """The index of this process on its machine."""
        return 0

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return True

    @property
    def should_save(self) -> bool:
        """Whether this process saves."""
        return True

    @property
    def parallel_mode(self) -> ParallelMode:
        """One process trains."""
        return ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Completions of a micro-step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Completions of one evaluation batch."""
        return self.per_device_eval_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Updates of the warm-up: warmup_steps, or that share of all."""
        given = self.warmup_steps
        return int(given) if given >= 1 else math.ceil(num_training_steps * given)

    def get_process_log_level(self) -> int:
        """The level of the loggers."""
        return _LEVELS[self.log_level] or logging.WARNING

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Waits for nothing: there is one process."""
        yield

    def to_dict(self) -> dict[str, Any]:
        """Every field, tokens hidden."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore
        found["accelerator_config"] = self.accelerator_config.to_dict()
        plain = {n: v.value if isinstance(v, IntervalStrategy | SaveStrategy | SchedulerType) else v
                 for n, v in found.items()}  # fmt: skip
        return {n: f"<{n.upper()}>" if n.endswith("_token") and v else copy.copy(v) for n, v in plain.items()}

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` for loggers: numbers and texts."""
        return {n: v if isinstance(v, bool | int | float | str) else str(v) for n, v in self.to_dict().items()}


def _accelerator(given: Any) -> AcceleratorConfig:
    """accelerator_config as transformers has it. Args: given: one, its fields, a JSON file's path, or None."""
    if isinstance(given, AcceleratorConfig):
        return given
    try:
        return AcceleratorConfig.from_json_file(given) if isinstance(given, str) else AcceleratorConfig(**(given or {}))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"accelerator_config={given!r}: {error}") from error


def _available() -> list[str]:
    """The installed loggers."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    return get_available_reporting_integrations()


def _mapping(name: str, value: str) -> dict[str, Any]:
    """Parses the text of a dict field. Raises ConfigError: it is not a JSON object."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}={value!r} is no JSON ({error}); give an object: '{{\"key\": 1}}'") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={value!r} is no JSON object; give one: '{{\"key\": 1}}'")
    return found


def _word(name: str, value: Any, kind: Any) -> Any:
    """A member of an enumeration of transformers."""
    known = [member.value for member in kind]
    if value not in known:
        raise lookup_error(name, str(value), known)
    return kind(value)


def dataclass_of(name: str, base: type[Arguments], doc: str) -> Any:
    """Makes a configuration's class: a dataclass with the fields of its tables; old fields are None by default."""
    made = []
    for field, row in {**base.TABLE, **base.OWN, **base.OLD}.items():
        kind = row.kind or type(row.default)
        kind = dict | str if kind is dict else kind  # transformers' parser takes the text, which is JSON
        optional = kind | None if row.default is None else kind
        metadata = {"help": f"{row.state}: {row.note}".replace("%", "%%")}
        if isinstance(row.default, list | dict):
            made.append((field, kind, dataclasses.field(default_factory=row.default.copy, metadata=metadata)))
        else:
            made.append((field, optional, dataclasses.field(default=row.default, metadata=metadata)))
    cls = dataclasses.make_dataclass(name, made, bases=(base,), init=False, repr=True, eq=True)
    cls.__doc__, cls.__module__ = doc, base.__module__
    return cls
