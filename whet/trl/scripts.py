"""The parts of TRL's scripts: argument classes, TrlParser, mixtures of data sets, configurations of adapters."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from whet.config import read_yaml
from whet.errors import ConfigError, nearest
from whet.util.install import install_hint

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ModelConfig",
    "RewardScriptArguments",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "init_zero_verbose",
]


@dataclasses.dataclass
class DatasetConfig:
    """A data set of a mixture: arguments of datasets.load_dataset, the columns to keep, and its share of all rows."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclasses.dataclass
class DatasetMixtureConfig:
    """The data sets that a script trains on together. A `--config` file has them as a list of mappings."""

    datasets: list[DatasetConfig] = dataclasses.field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        """Converts mappings to DatasetConfig."""
        self.datasets = [DatasetConfig(**d) if isinstance(d, dict) else d for d in self.datasets]


@dataclasses.dataclass
class ScriptArguments:
    """The location of a script's data set."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclasses.dataclass
class RewardScriptArguments(ScriptArguments):
    """The location of a script's data set, and the rewards."""

    reward_model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "A reward model, by name or folder."}
    )
    reward_funcs: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "Built-in rewards by name, module.function, or file.py:function."}
    )


@dataclasses.dataclass
class ModelConfig:
    """A script's model. Raises ConfigError: both load_in_8bit and load_in_4bit."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = dataclasses.field(
        default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]}
    )
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        """Checks the bits. Unwraps a list of one target, because the target may be a set such as all-linear."""
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("You can't use 8 bit and 4 bit precision at the same time; set one of them")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # pyright: ignore[reportAttributeAccessIssue]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Loads a mixture: the rows of its data sets, one data set after the other.

    Returns: a datasets.DatasetDict with `train`, and with `test` if test_split_size is set.
    Raises: ConfigError: no data set; `fraction` for only some data sets, or for streams.
    """
    import datasets

    configs, streaming = mixture_config.datasets, mixture_config.streaming
    if not configs:
        raise ConfigError("No datasets were loaded from the mixture configuration: `datasets` is empty; name one")
    shares = [config.fraction for config in configs if config.fraction is not None]
    if shares and len(shares) < len(configs):
        raise ConfigError("`fraction` must be set for either all datasets in the mixture or none of them")
    if shares and streaming:
        raise ConfigError("`fraction` is not supported with streaming datasets, which have no length; leave one out")
    parts: list[Any] = [_load_rows(config, streaming) for config in configs]
    if shares:
        total = min(len(part) * sum(shares) / share for part, share in zip(parts, shares, strict=True) if share > 0)
        parts = [
            part.select(range(round(total * share / sum(shares)))) for part, share in zip(parts, shares, strict=True)
        ]
    rows: Any = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return rows.train_test_split(test_size=mixture_config.test_split_size)
    return (datasets.IterableDatasetDict if streaming else datasets.DatasetDict)({"train": rows})


def _load_rows(config: DatasetConfig, streaming: bool) -> Any:
    """Loads one data set of a mixture."""
    import datasets

    rows: Any = datasets.load_dataset(
        config.path,
        config.name,
        data_dir=config.data_dir,
        data_files=config.data_files,
        split=config.split,
        streaming=streaming,
    )
    return rows if config.columns is None else rows.select_columns(config.columns)


def init_zero_verbose() -> None:
    """Logs errors only, and each Python warning as one line."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        logging.warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)

    warnings.showwarning = show


def get_peft_config(model_args: Any) -> Any:
    """PEFT's configuration of a script's adapter; None if use_peft is off. Raises ConfigError without PEFT."""
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(f"use_peft=True needs PEFT ({error}); {install_hint('lora')}") from error
    targets = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **({} if targets is None else {"target_parameters": targets}),
    )


def get_quantization_config(model_args: Any) -> Any:
    """Returns the quantization configuration for 4 or 8 bits; None = neither is set."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


class TrlParser(HfArgumentParser):
    """HfArgumentParser that also reads `--config file.yaml`: keys are flags, `env` has environment variables.

    Args: dataclass_types: one class or several. kwargs: HfArgumentParser's arguments.
    Raises: ConfigError: a class with a field `config`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        types = [] if dataclass_types is None else dataclass_types
        types = list(types) if isinstance(types, Iterable) else [types]
        for kind in types:
            if "config" in kind.__dataclass_fields__:
                raise ConfigError(f"{kind.__name__} has a field 'config', which is the flag of the file; rename it")
        super().__init__(dataclass_types=types, **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parses the dataclasses. The command line overrides the file, and the file overrides the defaults.

        Args:
            args: the words; None = the process's arguments.
            return_remaining_strings: return the unknown strings as the last element.
            fail_with_unknown_args: raise an error for an unknown key of the file.
            separate_remaining_strings: return the unknown strings of the file and of the command line separately.
        Raises: ConfigError: the file is not a mapping, or has an unknown key.
        """
        words = sys.argv[1:] if args is None else list(args)
        unread: list[str] = []
        if "--config" in words:
            at = words.index("--config")
            _, path = words.pop(at), words.pop(at)
            unread = self._read_config(path)
        parsed = self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            remaining = parsed[-1]
            both = (unread, remaining) if separate_remaining_strings else (unread + remaining,)
            return (*parsed[:-1], *both)
        if fail_with_unknown_args and unread:
            known = [action.dest for action in _actions(self)]
            raise ConfigError(f"Unknown arguments from config file: {unread}{nearest(unread[0].lstrip('-'), known)}")
        return parsed

    def _read_config(self, path: str) -> list[str]:
        """Sets a file's values as defaults. Returns: the unknown keys and values, as flags."""
        values = read_yaml(Path(path))
        env = values.pop("env", {})
        if not isinstance(env, dict):
            raise ConfigError(f"{path}: `env` should be a mapping, got {type(env).__name__}")
        os.environ.update({name: str(value) for name, value in env.items()})
        return self.set_defaults_with_config(**values)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Sets defaults by name; the flags are no longer required. Returns: the unknown keys and values, as flags."""
        known: set[str] = set()
        for action in _actions(self):
            if action.dest in values:
                action.default, action.required = values[action.dest], False
                known.add(action.dest)
        return [word for name in values if name not in known for word in (f"--{name}", str(values[name]))]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield action
