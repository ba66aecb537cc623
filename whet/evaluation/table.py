"""The numbers of an evaluation for a person: a table of aligned lines."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from whet.evaluation.estimators import Estimate

__all__ = ["format_table", "print_table"]

Numbers = Mapping[str, Estimate]
WIDTH = 80
"""Of a terminal."""
GAP = "  "
"""Between columns."""


def table_rows(results: Numbers, by_source: Mapping[str, Numbers]) -> list[list[str]]:
    """The cells of the table, its head first: a column for all prompts and one for each source, a row for each number.
    A single reward function has no row besides the reward.
    """
    functions = [name for name in results if name.startswith("rewards/")]
    results = {n: e for n, e in results.items() if len(functions) > 1 or n not in functions}
    parts = {"all": results, **by_source} if len(by_source) != 1 else {next(iter(by_source)): results}
    counts = [str(max((e.prompts for e in found.values()), default=0)) for found in parts.values()]
    return [
        ["source" if by_source else "", *parts],
        ["prompts", *counts],
        *([name, *(_cell(name, found[name]) for found in parts.values())] for name in results),
    ]


def _cell(name: str, one: Estimate) -> str:
    """A number with its standard error: shares in percent, others with four digits.

    >>> _cell("pass@1", Estimate(0.5, 0.05, 4)), _cell("tokens", Estimate(12.0, math.nan, 1))
    ('50.0 ±5.0 %', '12')
    """
    if math.isnan(one.value):
        return "-"
    share = name == "truncated" or name.startswith(("pass@", "majority@"))
    form = (lambda x: f"{100 * x:.1f}") if share else (lambda x: f"{x:.4g}")
    error = "" if math.isnan(one.se) else f" ±{form(one.se) if share else f'{one.se:.2g}'}"
    return form(one.value) + error + (" %" if share else "")


def format_table(results: Numbers, by_source: Mapping[str, Numbers]) -> str:
    """The table as aligned lines of a terminal's width, sources that don't fit below the others: ± is the standard
    error.

    >>> print(format_table({"pass@1": Estimate(0.5, 0.25, 4)}, {}))
             all
    prompts  4
    pass@1   50.0 ±25.0 %
    """
    names, *columns = zip(*table_rows(results, by_source), strict=True)
    blocks, room = [[names]], WIDTH - _wide(names)
    for column in columns:
        room -= _wide(column) + len(GAP)
        if room < 0 and len(blocks[-1]) > 1:
            blocks.append([names])
            room = WIDTH - _wide(names) - _wide(column) - len(GAP)
        blocks[-1].append(column)
    return "\n\n".join(map(_aligned, blocks))


def _wide(column: Sequence[str]) -> int:
    return max(map(len, column))


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    padded = [[cell.ljust(_wide(column)) for cell in column] for column in columns]
    return "\n".join(GAP.join(row).rstrip() for row in zip(*padded, strict=True))


def print_table(results: Numbers, by_source: Mapping[str, Numbers]) -> None:
    """Writes the table to standard output, its names without what would move a terminal's cursor."""
    shown = {"".join(c for c in name if c.isprintable()): found for name, found in by_source.items()}
    sys.stdout.write(format_table(results, shown) + "\n")
    sys.stdout.flush()
