"""The numbers of an evaluation for a person: a table on a terminal, aligned lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from whet.evaluation.estimators import Estimate

__all__ = ["show_table", "text_table"]

Numbers = Mapping[str, Estimate]


def rows_of(results: Numbers, by_source: Mapping[str, Numbers]) -> list[list[str]]:
    """The cells of the table, its head first: a row for all prompts and one for each source. A single reward function
    has no column besides the reward.
    """
    functions = [name for name in results if name.startswith("rewards/")]
    results = {n: e for n, e in results.items() if len(functions) > 1 or n not in functions}
    parts = {"all": results, **by_source} if len(by_source) != 1 else {next(iter(by_source)): results}
    head = ["source" if by_source else "", "prompts", *results]
    return [head] + [
        [name, str(max((e.prompts for e in found.values()), default=0)), *(_cell(n, found[n]) for n in results)]
        for name, found in parts.items()
    ]


def _cell(name: str, one: Estimate) -> str:
    """A number with its standard error: shares in percent, others with four digits.

    >>> _cell("pass@1", Estimate(0.5, 0.05, 4)), _cell("tokens", Estimate(12.0, math.nan, 1))
    ('50.0 ±5.0 %', '12')
    """
    if math.isnan(one.value):
        return "-"
    share = name == "cut" or name.startswith(("pass@", "majority@"))
    form = (lambda x: f"{100 * x:.1f}") if share else (lambda x: f"{x:.4g}")
    error = "" if math.isnan(one.se) else f" ±{form(one.se) if share else f'{one.se:.2g}'}"
    return form(one.value) + error + (" %" if share else "")


def text_table(results: Numbers, by_source: Mapping[str, Numbers]) -> str:
    """The table as aligned lines: ± is the standard error.

    >>> print(text_table({"pass@1": Estimate(0.5, 0.25, 4)}, {}))
         prompts  pass@1
    all  4        50.0 ±25.0 %
    """
    cells = rows_of(results, by_source)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def show_table(results: Numbers, by_source: Mapping[str, Numbers]) -> None:
    """Writes the table to standard output, drawn where that is a terminal."""
    if not sys.stdout.isatty():
        sys.stdout.write(text_table(results, by_source) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    head, *rows = rows_of(results, by_source)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(Text(name), no_wrap=True)
    for row in rows:
        table.add_row(*(Text("".join(c for c in cell if c.isprintable())) for cell in row))
    Console(highlight=False).print(table)
    sys.stdout.flush()
