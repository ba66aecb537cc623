"""The environment variables of torchrun: RANK, WORLD_SIZE and LOCAL_RANK."""

from __future__ import annotations

import os
import re

from whet.errors import ConfigError, format_value

__all__ = ["rank", "require_single_process", "world_size"]


def rank() -> int:
    """The rank of this process; 0 without torchrun. Raises ConfigError: RANK is not a valid rank."""
    return _number("RANK", 0, least=0)


def world_size() -> int:
    """The number of processes; 1 without torchrun. Raises ConfigError: WORLD_SIZE is not a valid number."""
    return _number("WORLD_SIZE", 1, least=1)


def require_single_process() -> None:
    """Raises ConfigError if torchrun started several processes, each of which would train its own copy of the model.

    Also raises ConfigError if RANK, LOCAL_RANK or WORLD_SIZE is not a valid number.
    """
    count = world_size()
    if count > 1:
        raise ConfigError(
            f"WORLD_SIZE is {count}, and training over several processes is not part of this release; "
            "start one process (torchrun --nproc_per_node=1, or without torchrun)"
        )
    if rank() > 0:
        raise ConfigError(f"RANK is {rank()} in the environment, and there is one process; unset RANK")
    _number("LOCAL_RANK", 0, least=0)


def _number(name: str, default: int, *, least: int) -> int:
    """The value of an environment variable of torchrun."""
    text = os.environ.get(name, "")
    if not text.strip():
        return default
    if not re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII) or int(text) < least:
        raise ConfigError(
            f"{name}={format_value(text)} in the environment must be a whole number from {least} up, as torchrun sets "
            f"it; unset {name}"
        )
    return int(text)
