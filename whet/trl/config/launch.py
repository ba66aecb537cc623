"""Reads the settings that `torchrun` and `accelerate launch` pass in environment variables.

Of several processes each has a share of every model: whet shards by FSDP2 itself, and needs no plugin of accelerate.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from whet.errors import ConfigError
from whet.parallel.torchrun_env import check_torchrun_env, world_size

__all__ = ["apply_launcher"]

log = logging.getLogger("whet")

_TRUE = ("1", "on", "t", "true", "y", "yes")
_SHARDED = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}
"""Variable of accelerate that asks for a sharded model -> the library."""
_SIZES = {f"PARALLELISM_CONFIG_{name}_SIZE": name.lower() for name in ("CP", "SP", "TP")}
"""Variable of accelerate with the size of a mesh's axis -> the axis."""


def apply_launcher(args: Any) -> None:
    """Applies the launcher's settings.

    Args: args: a configuration; use_cpu and bf16 may be set.
    Raises: ConfigError: torchrun's variables are wrong; an axis of the mesh that whet does not have; fp16 or fp8 if
        the script does not set the precision itself.
    """
    check_torchrun_env()
    for variable, axis in _SIZES.items() if _is_set("ACCELERATE_USE_PARALLELISM_CONFIG") else ():
        if (size := os.environ.get(variable, "1")) != "1":
            raise ConfigError(
                f"{variable}={size} splits each model over {size} processes by {axis}, and whet shards over all "
                f"{world_size()} by FSDP2 alone; launch without --parallelism_config_{axis}_size"
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
            reason = f"with one process {library} does not shard the model"
            several = "several processes share the model by whet's own FSDP2 (whet docs scaling)"
            log.warning("%s has no effect: %s", name, reason if world_size() == 1 else several)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE
