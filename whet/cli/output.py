"""What a command writes to standard output."""

from __future__ import annotations

import os
import sys

__all__ = ["print_text", "rank", "write_torchrun_error"]


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


def write_torchrun_error(text: str, is_own: bool = True) -> None:
    """Writes why this process fails to the file that torchrun reads: its report then ends with the text of the first
    process that failed, which may have ended the others before they printed it. Without torchrun it does nothing.

    Args: is_own: it is no other process's failure. torchrun wants whole seconds, and of equal ones takes the lower rank
        for the cause, so only one's own are rounded down.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    import json
    import time
    from contextlib import suppress
    from pathlib import Path

    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()) + (not is_own))}}
    part = Path(f"{name}.part")
    with suppress(OSError):
        part.write_text(json.dumps({"message": message}))
        part.replace(name)  # at once: torchrun fails at half a file


def rank() -> int:
    """This process's place among several; 0 where there is one, or the environment has no such number."""
    number, size = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    several = number.isdecimal() and size.isdecimal() and int(number) < int(size)
    return int(number) if several else 0
