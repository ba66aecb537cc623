"""TRL's trainers over whet's learners: change the import, and a script for TRL runs. TRL itself is not needed.

config/        TRL's configurations: tables of their fields, checks, and the translation to whet's configuration
trainer/       the base of all trainers: callbacks, state, logs, files
rl/            GRPOTrainer, RLOOTrainer        agents/    tools, environments, rollout_func
supervised/    SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer
rewards.py     TRL's reward functions          scripts.py    the arguments of its scripts
data_utils.py, models.py, callbacks.py         helpers for rows and models, and callbacks
command.py     `python -m whet.trl`            missing_names.py     TRL's names that whet.trl lacks

The names here are imported when they are first used, so that a script imports what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whet.trl.missing_names import MISSING_NAMES
from whet.util.garbage import pause_collector

if TYPE_CHECKING:
    from whet.trl.callbacks import LogCompletionsCallback, RichProgressCallback, SyncRefModelCallback, WinRateCallback
    from whet.trl.config.dpo import DPOConfig
    from whet.trl.config.grpo import GRPOConfig
    from whet.trl.config.kto import KTOConfig
    from whet.trl.config.reward import RewardConfig
    from whet.trl.config.rloo import RLOOConfig
    from whet.trl.config.sft import SFTConfig
    from whet.trl.data_utils import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        pack_dataset,
        truncate_dataset,
        unpair_preference_dataset,
    )
    from whet.trl.models import clone_chat_template, create_reference_model, setup_chat_format
    from whet.trl.rl.grpo import GRPOTrainer
    from whet.trl.rl.rloo import RLOOTrainer
    from whet.trl.scripts import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_dataset,
        get_peft_config,
        get_quantization_config,
        init_zero_verbose,
    )
    from whet.trl.supervised.dpo import DPOTrainer
    from whet.trl.supervised.kto import KTOTrainer
    from whet.trl.supervised.reward import RewardTrainer
    from whet.trl.supervised.sft import SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "SyncRefModelCallback",
    "TrlParser",
    "WinRateCallback",
    "apply_chat_template",
    "clone_chat_template",
    "create_reference_model",
    "extract_prompt",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "init_zero_verbose",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "setup_chat_format",
    "truncate_dataset",
    "unpair_preference_dataset",
]

_MODULES = {
    "whet.trl.callbacks": (
        "LogCompletionsCallback",
        "RichProgressCallback",
        "SyncRefModelCallback",
        "WinRateCallback",
    ),
    "whet.trl.config.dpo": ("DPOConfig",),
    "whet.trl.config.grpo": ("GRPOConfig",),
    "whet.trl.config.kto": ("KTOConfig",),
    "whet.trl.config.reward": ("RewardConfig",),
    "whet.trl.config.rloo": ("RLOOConfig",),
    "whet.trl.config.sft": ("SFTConfig",),
    "whet.trl.data_utils": (
        "apply_chat_template",
        "extract_prompt",
        "is_conversational",
        "is_conversational_from_value",
        "maybe_apply_chat_template",
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "pack_dataset",
        "truncate_dataset",
        "unpair_preference_dataset",
    ),
    "whet.trl.models": (
        "clone_chat_template",
        "create_reference_model",
        "setup_chat_format",
    ),
    "whet.trl.rl.grpo": ("GRPOTrainer",),
    "whet.trl.rl.rloo": ("RLOOTrainer",),
    "whet.trl.scripts": (
        "DatasetMixtureConfig",
        "ModelConfig",
        "ScriptArguments",
        "TrlParser",
        "get_dataset",
        "get_peft_config",
        "get_quantization_config",
        "init_zero_verbose",
    ),
    "whet.trl.supervised.dpo": ("DPOTrainer",),
    "whet.trl.supervised.kto": ("KTOTrainer",),
    "whet.trl.supervised.reward": ("RewardTrainer",),
    "whet.trl.supervised.sft": ("SFTTrainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # so that a type checker refuses names that are not there

    def __getattr__(name: str) -> Any:
        """Imports a name when it is first used. Raises ImportError: a name that only TRL has, with an alternative."""
        if name in MISSING_NAMES:
            raise ImportError(f"whet.trl has no {name}: {MISSING_NAMES[name]}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with pause_collector():
            value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
