"""Loads the rows that a configuration names. `whet data` imports this module without any code of models."""

from __future__ import annotations

import logging
from typing import Any

from whet.config import RunConfig, SupervisedRunConfig
from whet.config.data import source_paths
from whet.data.prompt_stream import hold_out
from whet.data.sources import have_same_rows, load_rows

__all__ = ["load_train_and_eval"]

log = logging.getLogger("whet")


def load_train_and_eval(config: RunConfig | SupervisedRunConfig) -> tuple[Any, Any]:
    """Loads the training and evaluation rows of a configuration; the latter are None where it names none."""
    c = config.data
    if c.streaming and c.shuffle and not c.shuffle_buffer:
        log.warning(
            "data.shuffle has no effect on a stream without data.shuffle_buffer: it keeps its own order; set "
            "data.shuffle_buffer=10000, or data.shuffle=false to silence this"
        )
    rows = load_rows(c.path, split=c.split, subset=c.subset, streaming=c.streaming, limit=c.limit)
    evaluated: Any = c.eval_path or c.path
    if c.eval_path is not None or c.eval_split is not None:
        if have_same_rows(c.path or (), c.split, evaluated, c.eval_split):
            log.warning(
                "evaluations are of the training data, %s: they measure memorised rows; give data.eval_path "
                "other rows, or set data.eval_fraction=0.1",
                ", ".join(source_paths(evaluated)),
            )
        is_part = c.eval_path is None and c.eval_split != c.split
        return rows, load_rows(evaluated, split=c.eval_split, subset=c.subset, is_part=is_part)
    return hold_out(rows, c.eval_fraction, config.trainer.seed) if c.eval_fraction else (rows, None)
