"""What a command writes to standard output."""

from __future__ import annotations

import os
import sys

__all__ = ["print_text", "rank"]


def print_text(text: str, end: str = "\n") -> None:
    """Writes what was asked for to stdout, once."""
    if rank() != 0:
        return
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from whet.errors import ConfigError

        raise ConfigError(f"standard output can't be written: {error}; make room, or send it elsewhere") from error


def rank() -> int:
    """This process's place among several; 0 where there is one, or the environment has no such number."""
    number, size = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    several = number.isdecimal() and size.isdecimal() and int(number) < int(size)
    return int(number) if several else 0
