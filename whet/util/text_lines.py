"""Text for a terminal: line wrapping, and control characters made visible."""

from __future__ import annotations

import re
import textwrap
from functools import partial

__all__ = ["escape_control_characters", "join_fields", "shorten_middle", "wrap_columns", "wrap_text"]

_WRAPPER = partial(textwrap.TextWrapper, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
WIDTH = 80
"""Default width of a line, in characters."""


def escape_control_characters(text: str) -> str:
    r"""Replaces control characters, which could move a terminal's cursor or change its title, by visible symbols.

    >>> escape_control_characters("a\x1b[31m b\n")
    'a␛[31m b\n'
    """
    escaped = lambda c: chr(0x2400 + ord(c)) if ord(c) < 32 else "\N{REPLACEMENT CHARACTER}"
    return "".join(c if c in "\n\t" or (c.isprintable() or ord(c) > 159) else escaped(c) for c in text)


def wrap_text(text: str, width: int = WIDTH, indent: str = "  ") -> str:
    """Wraps text at blanks to a width; continued lines are indented, and long words are not broken.

    >>> print(wrap_text("a: long words, and more of them", 16))
    a: long words,
      and more of
      them
    """
    lines = []
    for line in text.split("\n"):
        own_indent = line[: len(line) - len(line.lstrip())]
        lines += _WRAPPER(width=width, subsequent_indent=own_indent + indent).wrap(line) or [line]
    return "\n".join(lines)


def wrap_columns(text: str, width: int = WIDTH) -> str:
    """Wraps text of two columns, which two or more blanks separate; the second column stays aligned.

    >>> print(wrap_columns("  data=...  rows: a file, or a folder", 26))
      data=...  rows: a file,
                or a folder
    """
    lines = []
    for line in text.split("\n"):
        first = re.match(r" *\S.*? {2,}(?=\S)", line)
        hang = len(first[0]) if first and len(first[0]) < width // 2 else len(line) - len(line.lstrip()) + 2
        lines += _WRAPPER(width=width, subsequent_indent=" " * hang).wrap(line) or [line]
    return "\n".join(lines)


def join_fields(fields: list[str], width: int = WIDTH) -> str:
    r"""Joins fields with two blanks, on several lines if they exceed the width; no field is broken.

    >>> join_fields(["step 3", "reward 0.5", "kl 0.01"], 20)
    'step 3  reward 0.5\n  kl 0.01'
    """
    lines = [fields[0]]
    for field in fields[1:]:
        if len(lines[-1]) + 2 + len(field) > width:
            lines.append("")
        lines[-1] += f"  {field}"
    return "\n".join(lines)


def shorten_middle(text: str, most: int) -> str:
    """Replaces the middle of a long text by the number of characters left out.

    >>> shorten_middle("abcdefghij", 6), shorten_middle("abc", 6)
    ('abc [4 characters] hij', 'abc')
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
