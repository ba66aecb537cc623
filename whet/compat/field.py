"""Field: one field, option or key of another library, and its treatment in whet.

A compatibility layer (whet.trl, whet.rl2) has tables of these rows. They decide which values it accepts and refuses,
and its page in docs/ is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["STATES", "Field", "State", "Table", "deprecated", "differs", "no_effect", "refused", "works"]

State = Literal["works", "differs", "no effect", "refused", "absent", "deprecated", "own"]
STATES: Mapping[State, str] = {
    "works": "name, default and meaning are the same",
    "differs": "it works, and differs as the note says",
    "no effect": "it is accepted; the note says why whet has nothing to do for it",
    "refused": "a value other than the default raises ConfigError, which gives the reason and the alternative",
    "absent": "it does not exist here; the note names the alternative",
    "deprecated": "an earlier release had it; it is read as the note says",
    "own": "it is whet's own: the other library has no such field",
}
"""Each state with its meaning."""


class Field(NamedTuple):
    """One row of a table.

    Args:
        default: the other library's default.
        state: what happens to the field here.
        note: the difference, or the reason and the alternative.
        kind: the field's type on a command line; None = the type of the default.
        harmless: values of a refused field that change nothing, and are accepted like the default.
        key: whet's key, or several with commas, for the value; "" = no single key.
    """

    default: Any = None
    state: State = "works"
    note: str = ""
    kind: Any = None
    harmless: tuple[Any, ...] = ()
    key: str = ""

    def refuses(self, value: Any) -> bool:
        """Returns whether a value raises. A bool differs from the number that equals it.

        >>> refused(None, "one process trains", harmless=(1,)).refuses(2)
        True
        """
        same = lambda other: value == other and isinstance(value, bool) == isinstance(other, bool)
        return self.state == "refused" and not any(map(same, (self.default, *self.harmless)))


Table = Mapping[str, Field]
"""Name -> row."""


def works(default: Any, note: str = "", kind: Any = None) -> Field:
    """Returns a field that works as in the other library."""
    return Field(default, "works", note, kind)


def differs(default: Any, note: str, kind: Any = None) -> Field:
    """Returns a field that works, with a difference."""
    return Field(default, "differs", note, kind)


def no_effect(default: Any, note: str, kind: Any = None) -> Field:
    """Returns a field without effect: whet always does this, or has no such part."""
    return Field(default, "no effect", note, kind)


def refused(default: Any, note: str, kind: Any = None, harmless: tuple[Any, ...] = ()) -> Field:
    """Returns a field that accepts only its default and harmless values."""
    return Field(default, "refused", note, kind, harmless)


def deprecated(note: str, kind: Any = str) -> Field:
    """Returns a field of an earlier release; None = not set."""
    return Field(None, "deprecated", note, kind)
