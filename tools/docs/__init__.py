"""Writes the pages of docs/ that are made from the code: `python -m tools.docs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs import algorithms, defaults, from_rl2, from_torchrl, from_trl, from_tunix, preference
from whet.util.text_lines import wrap_text

__all__ = ["DOCS", "PAGES", "text_of"]

DOCS = Path(__file__).parents[2] / "docs"
"""The folder of the pages."""
PAGES: Mapping[str, Callable[[], str]] = {
    "algorithms.md": algorithms.page,
    "defaults.md": defaults.page,
    "from-rl2.md": from_rl2.page,
    "from-torchrl.md": from_torchrl.page,
    "from-trl.md": from_trl.page,
    "from-tunix.md": from_tunix.page,
    "preference.md": preference.page,
}
"""File in docs/ -> the function that makes its text."""
WIDTH = 120
"""Columns of a line of prose; rows of tables and headings are as long as they are."""


def text_of(name: str) -> str:
    """The text of a page, with a last line that names its generator. Args: name: a key of PAGES."""
    lines = [wrap(line) for line in PAGES[name]().rstrip().split("\n")]
    return "\n".join(lines) + "\n\nWritten by `python -m tools.docs`; a test keeps it current.\n"


def wrap(line: str) -> str:
    r"""Breaks a line of prose before WIDTH; what follows a list's mark stays under its text.

    >>> [len(part) for part in wrap("- " + "word " * 30).split("\n")]
    [116, 36]
    """
    if len(line) <= WIDTH or line.startswith(("|", "#", "    ")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return wrap_text(line, WIDTH, indent)
