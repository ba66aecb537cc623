"""The releases of TorchRL whose defaults and keys `compat` selects."""

from __future__ import annotations

from whet.errors import lookup_error

__all__ = ["RELEASES", "check_compat"]

RELEASES = ("0.14", "0.9")


def check_compat(compat: str) -> None:
    """Raises ConfigError if the release is not one of RELEASES.

    >>> check_compat("0.14")
    """
    if compat not in RELEASES:
        raise lookup_error("release of TorchRL, compat=", compat, RELEASES)
