"""Implements log_completions: prints a table of completions, writes it as parquet, and sends it to wandb and trackio.

The file is output_dir/completions/completions_{step:05d}.parquet.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.learners.step import Step

__all__ = ["Completions"]


class Completions:
    """The completions of the last rollout, which a log with log_completions writes.

    Args: args: has log_completions, num_completions_to_print, log_unique_prompts, output_dir and report_to.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.prompts: list[Any] = []
        self.completions: list[Any] = []
        self.rewards: dict[str, list[float]] = {}
        """Reward function -> its reward of each completion."""
        self.extra: dict[str, list[Any]] = {}
        """The columns that reward functions logged by log_extra."""
        self.advantages: list[float] = []
        self.pending = False
        """Whether the completions have not been written yet."""

    def add(self, step: Step, extra: dict[str, list[Any]]) -> None:
        """Replaces the completions by those of a new rollout. Args: extra: columns from log_extra."""
        rewarded, batch = step.rewards, step.batch
        self.prompts, self.completions = list(rewarded.inputs.prompts), list(rewarded.inputs.completions)
        self.rewards = {name: values.tolist() for name, values in rewarded.table.items()}
        self.extra = {name: values for name, values in extra.items() if len(values) == len(self.prompts)}
        self.advantages = batch.trajectory_advantages.tolist()
        self.pending = True

    def logs(self) -> dict[str, Any]:
        """Returns the last rollout under the names of TRL's `trainer._logs`."""
        return {
            "prompt": self.prompts,
            "completion": self.completions,
            "rewards": self.rewards,
            "advantages": self.advantages,
            "extra": self.extra,
        }

    def write(self, step: int) -> None:
        """Prints, stores and sends the pending completions. Args: step: optimizer steps so far."""
        if not self.pending or not self.args.log_completions or not self.args.should_log:
            return
        import pandas

        columns = {"prompt": self.prompts, "completion": self.completions, **self.rewards, **self.extra}
        table = pandas.DataFrame({"step": [step] * len(self.prompts), **columns, "advantage": self.advantages})
        folder = Path(self.args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        self._print(table, step)
        if self.args.log_unique_prompts:
            table = table[~table["prompt"].astype(str).duplicated()]
        for logger in self._loggers():
            logger.log({"completions": logger.Table(dataframe=table)})
        self.pending = False

    def _loggers(self) -> Iterator[Any]:
        """Yields the modules of report_to that show tables."""
        for name in ("wandb", "trackio"):
            if name in self.args.report_to:
                logger: Any = importlib.import_module(name)
                if name == "trackio" or logger.run is not None:
                    yield logger

    def _print(self, table: Any, step: int) -> None:
        from rich.console import Console
        from rich.table import Table

        shown = table if self.args.num_completions_to_print is None else table.head(self.args.num_completions_to_print)
        printed = Table(title=f"Step {step}", show_lines=True)
        names = [name for name in shown.columns if name != "step"]
        for name in names:
            printed.add_column(name)
        for row in shown[names].itertuples(index=False):
            printed.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row))
        Console(file=sys.stdout).print(printed)
