"""The results of an evaluation as a table of text."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from whet.evaluation.estimators import Estimate

__all__ = ["format_table", "print_table"]

Numbers = Mapping[str, Estimate]
WIDTH = 80
"""Width of a terminal."""
GAP = "  "
"""Between columns."""


def table_rows(results: Numbers, by_source: Mapping[str, Numbers]) -> list[list[str]]:
    """Returns the cells of the table, header first: a column for all prompts and one for each source, a row for each
    result.

    A single reward function has no row, since it equals the reward.
    """
    functions = [name for name in results if name.startswith("rewards/")]
    results = {n: e for n, e in results.items() if len(functions) > 1 or n not in functions}
    parts = {"all": results, **by_source} if len(by_source) != 1 else {next(iter(by_source)): results}
    counts = [str(max((e.prompts for e in values.values()), default=0)) for values in parts.values()]
    return [
        ["source" if by_source else "", *parts],
        ["prompts", *counts],
        *([name, *(_cell(name, values[name]) for values in parts.values())] for name in results),
    ]


def _cell(name: str, result: Estimate) -> str:
    """Returns a result with its standard error: shares in percent, others with four digits.

    >>> _cell("pass@1", Estimate(0.5, 0.05, 4)), _cell("tokens", Estimate(12.0, math.nan, 1))
    ('50.0 ±5.0 %', '12')
    """
    if math.isnan(result.value):
        return "-"
    share = name == "truncated" or name.startswith(("pass@", "majority@"))
    fmt = (lambda x: f"{100 * x:.1f}") if share else (lambda x: f"{x:.4g}")
    error = "" if math.isnan(result.se) else f" ±{fmt(result.se) if share else f'{result.se:.2g}'}"
    return fmt(result.value) + error + (" %" if share else "")


def format_table(results: Numbers, by_source: Mapping[str, Numbers]) -> str:
    """Returns the table as aligned lines; sources beyond the terminal's width follow below. ± is the standard error.

    >>> print(format_table({"pass@1": Estimate(0.5, 0.25, 4)}, {}))
             all
    prompts  4
    pass@1   50.0 ±25.0 %
    """
    names, *columns = zip(*table_rows(results, by_source), strict=True)
    blocks, free_width = [[names]], WIDTH - _width(names)
    for column in columns:
        free_width -= _width(column) + len(GAP)
        if free_width < 0 and len(blocks[-1]) > 1:
            blocks.append([names])
            free_width = WIDTH - _width(names) - _width(column) - len(GAP)
        blocks[-1].append(column)
    return "\n\n".join(map(_aligned, blocks))


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    padded = [[cell.ljust(_width(column)) for cell in column] for column in columns]
    return "\n".join(GAP.join(row).rstrip() for row in zip(*padded, strict=True))


def print_table(results: Numbers, by_source: Mapping[str, Numbers]) -> None:
    """Writes the table to standard output; control characters are left out of the names."""
    printable = {"".join(c for c in name if c.isprintable()): values for name, values in by_source.items()}
    sys.stdout.write(format_table(results, printable) + "\n")
    sys.stdout.flush()
