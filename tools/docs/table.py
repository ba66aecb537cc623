"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

from whet.compat.field import STATES, Field

__all__ = ["legend", "row", "table"]


def row(*cells: str) -> str:
    r"""A line of a table; a bar within a cell is escaped.

    >>> print(row("name", "one|two"))
    | name | one\|two |
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table. Args: heads: of its columns. rows: the cells of each line.

    >>> print(table(["name", "note"], [["a", "b"]]))
    | name | note |
    |---|---|
    | a | b |
    """
    heads = list(heads)
    return "\n".join([row(*heads), "|" + "---|" * len(heads), *(row(*cells) for cells in rows)])


def legend(fields: Iterable[Field]) -> str:
    """A list of the states that a page's fields have, with their meanings."""
    states = {field.state for field in fields}
    return "\n".join(f"- *{state}*: {meaning}." for state, meaning in STATES.items() if state in states)
