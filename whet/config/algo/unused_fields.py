"""What is refused because it would change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from whet.errors import ConfigError

__all__ = ["changed", "check_effect", "own_functions"]


def changed(config: Any, *names: str) -> dict[str, Any]:
    """The fields, of those named that the configuration has, which are not at the default of its class."""
    defaults = {f.name: f.default for f in fields(config) if f.name in names}
    return {name: getattr(config, name) for name, usual in defaults.items() if getattr(config, name) != usual}


def own_functions(config: Any) -> Iterator[tuple[str, Any]]:
    """The pieces that are a user's own, (field, function or reference): they are given any field they ask for."""
    for name in (f.name for f in fields(config) if f.name in type(config).CHOICES):
        value = getattr(config, name)
        for piece in value if isinstance(value, tuple) else (value,):
            if callable(piece) or (isinstance(piece, str) and ":" in piece):
                yield name, piece


def check_effect(config: Any, *names: str, needs: str) -> None:
    """Refuses fields that were set and are read only together with something else, which is not chosen.

    Args: config: a configuration; with a function of a user's own, which may read any field, all are let through.
        names: of its fields. needs: what they need, as it is written.
    Raises: ConfigError: one of them is not at its default.
    """
    defaults = {f.name: f.default for f in fields(config)}
    for name, value in changed(config, *names).items():
        if not any(own_functions(config)):
            raise ConfigError(f"{name}={value!r} has no effect without {needs}; else leave it at {defaults[name]!r}")
