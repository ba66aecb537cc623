"""The environment variables of torchrun, RANK, WORLD_SIZE and LOCAL_RANK, and whether settings fit them."""

from __future__ import annotations

import os
import re

from whet.errors import ConfigError, format_value

__all__ = ["check_mesh", "check_torchrun_env", "local_rank", "rank", "require_single_process", "world_size"]


def rank() -> int:
    """Returns the rank of this process; 0 without torchrun. Raises ConfigError: RANK is not a valid rank."""
    return _number("RANK", 0, least=0)


def world_size() -> int:
    """Returns the number of processes; 1 without torchrun. Raises ConfigError: WORLD_SIZE is not a valid number."""
    return _number("WORLD_SIZE", 1, least=1)


def local_rank() -> int:
    """Returns the number of this process on its host; 0 without torchrun. Raises ConfigError: LOCAL_RANK is not
    valid.
    """
    return _number("LOCAL_RANK", 0, least=0)


def check_torchrun_env() -> None:
    """Raises ConfigError if RANK, LOCAL_RANK or WORLD_SIZE is not a valid number, or they contradict each other."""
    own, count = rank(), world_size()
    if own >= count:
        fix = "unset RANK" if count == 1 else "start the processes with torchrun"
        raise ConfigError(f"RANK is {own} in the environment, and WORLD_SIZE is {count}; {fix}")
    local_rank()


def check_mesh(
    size: int, context_parallel_size: int, data_parallel_replicate_size: int, tensor_parallel_size: int = 1
) -> None:
    """Raises ConfigError if so many processes can't form such a grid.

    >>> check_mesh(8, 2, 4)
    >>> check_mesh(1, 2, 1)
    Traceback (most recent call last):
    whet.errors.ConfigError: trainer.context_parallel_size=2 does not divide the number of processes, 1; start a \
multiple of 2 with torchrun --nproc_per_node, or set it to 1
    """
    sizes = {
        "context_parallel_size": context_parallel_size,
        "data_parallel_replicate_size": data_parallel_replicate_size,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, n in sizes.items():
        if size % n:
            raise ConfigError(
                f"trainer.{name}={n} does not divide the number of processes, {size}; start a multiple of {n} with "
                f"torchrun --nproc_per_node, or set it to {'1' if size == 1 else f'a divisor of {size}'}"
            )
    for name in ("context_parallel_size", "data_parallel_replicate_size"):
        n = sizes[name] * tensor_parallel_size
        if size % n:
            raise ConfigError(
                f"trainer.tensor_parallel_size={tensor_parallel_size} times trainer.{name}={sizes[name]} is {n}, which "
                f"does not divide the number of processes, {size}; start a multiple of {n} with torchrun "
                "--nproc_per_node, or lower one of them"
            )


def require_single_process(what: str) -> None:
    """Raises ConfigError if torchrun started several processes for a program that runs in one.

    Args: what: the program, for the message. Also raises what `check_torchrun_env` raises.
    """
    count = world_size()
    if count > 1:
        raise ConfigError(
            f"WORLD_SIZE is {count}, and {what} runs in one process in this release; start one process (torchrun "
            "--nproc_per_node=1, or without torchrun)"
        )
    check_torchrun_env()


def _number(name: str, default: int, *, least: int) -> int:
    """Returns the value of an environment variable of torchrun."""
    text = os.environ.get(name, "")
    if not text.strip():
        return default
    if not re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII) or int(text) < least:
        raise ConfigError(
            f"{name}={format_value(text)} in the environment must be a whole number from {least} up, as torchrun sets "
            f"it; unset {name}"
        )
    return int(text)
