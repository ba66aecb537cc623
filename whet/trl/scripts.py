"""What TRL's scripts are made of: ScriptArguments, ModelConfig, TrlParser, get_peft_config, get_quantization_config."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from whet.config import read_yaml
from whet.errors import ConfigError, nearest
from whet.util.install import install_hint

__all__ = ["ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config"]


@dataclasses.dataclass
class ScriptArguments:
    """Where a script's data set is."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclasses.dataclass
class ModelConfig:
    """A script's model. Raises ConfigError: 8 and 4 bits at once."""

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
        """Checks the bits; one target that stands for all is a word."""
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("You can't use 8 bit and 4 bit precision at the same time; set one of them")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # pyright: ignore[reportAttributeAccessIssue]


def get_peft_config(model_args: Any) -> Any:
    """PEFT's configuration of a script's adapter; None where use_peft is off. Raises ConfigError without PEFT."""
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
    """The configuration of 4 or 8 bits; None for neither."""
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
    """HfArgumentParser that also reads `--config file.yaml`, whose keys are the flags and `env` environment variables.

    Args: dataclass_types: one or several. kwargs: of HfArgumentParser.
    Raises: ConfigError: one of them has a field `config`.
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
        """The dataclasses, from the command line over the file over the defaults.

        Args: args: None = the program's own. return_remaining_strings: the last element is what nothing has read.
            fail_with_unknown_args: a key of the file that nothing reads is an error. separate_remaining_strings: the
            file's and the command line's stand apart.
        Raises: ConfigError: the file is not a mapping, or has an unknown key.
        """
        words = sys.argv[1:] if args is None else list(args)
        left: list[str] = []
        if "--config" in words:
            at = words.index("--config")
            _, path = words.pop(at), words.pop(at)
            left = self._take(path)
        found = self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            mine = found[-1]
            return (*found[:-1], left, mine) if separate_remaining_strings else (*found[:-1], left + mine)
        if fail_with_unknown_args and left:
            known = [action.dest for action in self._actions]
            raise ConfigError(f"Unknown arguments from config file: {left}{nearest(left[0].lstrip('-'), known)}")
        return found

    def _take(self, path: str) -> list[str]:
        """Makes a file's values the defaults. Returns: those that nothing reads, as words."""
        values = read_yaml(Path(path))
        env = values.pop("env", {})
        if not isinstance(env, dict):
            raise ConfigError(f"{path}: `env` should be a mapping, got {type(env).__name__}")
        os.environ.update({name: str(value) for name, value in env.items()})
        return self.set_defaults_with_config(**values)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Other defaults, by name, none of them required any more. Returns: what nothing reads, as words."""
        known = {action.dest: action for action in self._actions}
        for name in values.keys() & known.keys():
            known[name].default, known[name].required = values[name], False
        return [word for name in values if name not in known for word in (f"--{name}", str(values[name]))]
