"""The warning for code that was tested only with stand-ins, and has never run on its hardware."""

from __future__ import annotations

import functools
import logging

__all__ = ["warn_experimental"]

log = logging.getLogger("whet")


@functools.cache
def warn_experimental(feature: str) -> None:
    """Logs once per process that a feature is experimental.

    Args: feature: as the user chose it, such as "rollout_engine 'sglang'".
    """
    log.warning(
        "%s is experimental: it has never run on its hardware; check its first results against another "
        "engine or setting",
        feature,
    )
