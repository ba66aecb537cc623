"""What a field of TRL's configurations is here: one row of a configuration's table.

The rows are the one source: the configuration's fields and defaults, what is refused and why, and docs/from-trl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from whet.errors import ConfigError

__all__ = ["STATES", "Field", "Table", "WrongArgument", "inert", "old", "other", "refused", "works"]

STATES: Mapping[str, str] = {
    "works": "as in TRL",
    "other": "works, and differs as the note says",
    "no effect": "accepted; the note says why whet has nothing to do for it",
    "refused": "a value other than the default raises ConfigError, which says why and what to use instead",
    "old": "of TRL's and transformers' releases of 2025; read as the note says",
    "own": "whet's own: TRL has no such field",
}
"""The states, each with what it means."""


class WrongArgument(ConfigError, TypeError):
    """An argument that is not there, or of another kind: Python's own TypeError in TRL."""


class Field(NamedTuple):
    """A field: its default in TRL, its state here, and a note."""

    default: Any
    state: str
    note: str = ""
    kind: Any = None
    """Its type, for a command line; None = that of the default."""
    harmless: tuple[Any, ...] = ()
    """Of a refused field: values besides the default that ask for nothing."""


Table = Mapping[str, Field]


def works(default: Any, note: str = "", kind: Any = None) -> Field:
    """A field that does what it does in TRL."""
    return Field(default, "works", note, kind)


def other(default: Any, note: str, kind: Any = None) -> Field:
    """A field that works, with a difference."""
    return Field(default, "other", note, kind)


def inert(default: Any, note: str, kind: Any = None) -> Field:
    """A field that asks for something that is so in any case, or that does not exist here."""
    return Field(default, "no effect", note, kind)


def refused(default: Any, note: str, kind: Any = None, harmless: tuple[Any, ...] = ()) -> Field:
    """A field of which only the default is taken."""
    return Field(default, "refused", note, kind, harmless)


def old(note: str, kind: Any = str) -> Field:
    """A field of an earlier release; None = not given."""
    return Field(None, "old", note, kind)
