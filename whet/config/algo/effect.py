"""What is refused because it would change nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from whet.errors import ConfigError

__all__ = ["check_effect"]


def check_effect(config: Any, *names: str, needs: str) -> None:
    """Refuses fields that were set and are read only together with something else, which is not chosen.

    Args: config: a configuration. names: of its fields. needs: what they need, as it is written.
    Raises: ConfigError: one of them is not at its default.
    """
    usual = {f.name: f.default for f in fields(config)}
    for name in names:
        if getattr(config, name) != usual[name]:
            raise ConfigError(f"{name}={getattr(config, name)!r} has no effect without {needs}")
