"""Reads the settings that `torchrun` and `accelerate launch` pass in environment variables.

Process groups are not supported: one process trains.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from whet.errors import ConfigError
from whet.parallel.torchrun_env import world_size

__all__ = ["apply_launcher"]

log = logging.getLogger("whet")

_TRUE = ("1", "on", "t", "true", "y", "yes")
_SHARDED = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}
"""Variable of accelerate that asks for a sharded model -> the library."""


def apply_launcher(args: Any) -> None:
    """Applies the launcher's settings.

    Args: args: a configuration; use_cpu and bf16 may be set.
    Raises: ConfigError: several processes; fp16 or fp8 if the script does not set the precision itself.
    """
    if (count := world_size()) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {count}: the launcher started {count} processes, but whet.trl trains in one; start one "
            "(accelerate launch --num_processes 1, torchrun --nproc_per_node 1), and for the same step multiply "
            f"gradient_accumulation_steps by {count}: {count * args.gradient_accumulation_steps}"
        )
    if _is_set("ACCELERATE_USE_CPU"):
        args.use_cpu = True
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision == "bf16":
        args.bf16 = True
    elif precision != "no" and args.bf16 is False:
        raise ConfigError(
            f"ACCELERATE_MIXED_PRECISION={precision} is not supported: it needs loss scaling, which whet lacks; "
            "launch with --mixed_precision bf16 or no"
        )
    for name, library in _SHARDED.items():
        if _is_set(name):
            log.warning("%s has no effect: with one process %s does not shard the model", name, library)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE
