"""Models that are converted once to an ordinary Hugging Face folder in the user's cache: all other code reads that."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from whet.errors import ConfigError

__all__ = ["convert_once"]

logger = logging.getLogger("whet")


def convert_once(source: Path, name: str, write: Callable[[Path], None]) -> str:
    """Returns the converted folder of a source, which is written if the cache lacks it.

    Args: source: for messages. name: of the folder in whet/ of $XDG_CACHE_HOME or ~/.cache, with a hash of what the
        source holds. write: fills an empty folder; it may raise any error.
    Returns: the folder.
    Raises: ConfigError: the cache can't be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (root if root.is_absolute() else Path.home() / ".cache") / "whet" / name
    try:
        if folder.is_dir():
            return str(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"can't convert {source}: {error}; set XDG_CACHE_HOME to a writable folder") from error
    logger.info("converting %s once, to %s", source, folder)
    try:
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        return str(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
