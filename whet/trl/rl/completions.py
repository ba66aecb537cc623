"""log_completions: a table on the console, output_dir/completions/completions_{step:05d}.parquet, wandb and trackio."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.learners.step import Step

__all__ = ["Completions"]


class Completions:
    """The completions of the last rollout, written when the run logs.

    Args: args: the configuration: log_completions, num_completions_to_print, log_unique_prompts, output_dir.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.columns: dict[str, list[Any]] = {}
        """Of the last rollout: prompt, completion, a column for each reward function and log_extra, advantage."""

    def add(self, step: Step, extra: dict[str, list[Any]]) -> None:
        """Takes a rollout in place of the last one."""
        rewarded, batch = step.need_rewarded(), step.need_batch()
        if not self.args.log_completions:
            return
        count = len(rewarded.inputs.prompts)
        self.columns = {
            "prompt": list(rewarded.inputs.prompts),
            "completion": list(rewarded.inputs.completions),
            **{name: values.tolist() for name, values in rewarded.table.items()},
            **{name: values for name, values in extra.items() if len(values) == count},
            "advantage": batch.trajectory_advantages.tolist(),
        }

    def write(self, step: int) -> None:
        """Prints, stores and sends them, if there are any. Args: step: optimizer steps so far."""
        if not self.columns:
            return
        import pandas

        table = pandas.DataFrame({"step": [step] * len(self.columns["prompt"]), **self.columns})
        folder = Path(self.args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        self._print(table, step)
        if self.args.log_unique_prompts:
            table = table[~table["prompt"].astype(str).duplicated()]
        for logger in self._loggers():
            logger.log({"completions": logger.Table(dataframe=table)})
        self.columns = {}

    def _loggers(self) -> Iterator[Any]:
        """Those of report_to that show tables."""
        for name in ("wandb", "trackio"):
            if name in self.args.report_to:
                logger: Any = importlib.import_module(name)
                if name == "trackio" or logger.run is not None:
                    yield logger

    def _print(self, table: Any, step: int) -> None:
        from rich.console import Console
        from rich.table import Table

        shown = table if self.args.num_completions_to_print is None else table.head(self.args.num_completions_to_print)
        made = Table(title=f"Step {step}", show_lines=True)
        names = [name for name in shown.columns if name != "step"]
        for name in names:
            made.add_column(name)
        for row in shown[names].itertuples(index=False):
            made.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row))
        Console(file=sys.stdout).print(made)
