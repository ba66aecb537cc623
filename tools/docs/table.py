"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["row", "table"]


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
