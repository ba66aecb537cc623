"""What is written and tested with stand-ins, but has never run on the hardware it is for: a warning when it is chosen.

A piece of code leaves this list when it has run there; until then check its figures and its results
before you rely on them. Left out on purpose: a switch that silences it.
"""

from __future__ import annotations

import functools
import logging

__all__ = ["warn_experimental"]

log = logging.getLogger("whet")


@functools.cache
def warn_experimental(what: str) -> None:
    """Logs once per process that something is experimental.

    Args: what: its name, as the user chose it: "rollout_engine 'sglang'".
    """
    log.warning(
        "%s is experimental: it has never been run on the hardware it is for; check its first results against another "
        "engine or setting",
        what,
    )
