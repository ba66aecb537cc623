"""The format numbers of the files in a checkpoint: what a later release looks at before it believes the rest.

    file                              written   read
    run.pt                            1         1, and files without a number, which are 1
    <role>/state.pt                   2         1 (no number), 2
    <role>/optimizer.safetensors      2         1 (no number), 2; the number is "whet_format" of its metadata
    sums.json                         2         1 (no number: names and checksums alone), 2

Since 2 the optimizer's state is kept by the name of its parameter; in 1 by its place among the optimizer's groups.
model.safetensors and config.json are Hugging Face's own, and have no number of whet's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.errors import CheckpointError

__all__ = ["OPTIMIZER_FORMAT", "RUN_FORMAT", "STATE_FORMAT", "SUMS_FORMAT", "check_format"]

RUN_FORMAT = 1
STATE_FORMAT = 2
OPTIMIZER_FORMAT = 2
SUMS_FORMAT = 2


def check_format(path: Path, number: Any, known: int, *, weights: Path) -> int:
    """The format of a file, if this release knows it.

    Args:
        path: the file.
        number: what it gives as its format.
        known: the newest that this release reads; it reads all before it too.
        weights: the folder of the model, from which a new run can start in any case.

    Raises:
        CheckpointError: another number, or no number at all.

    >>> check_format(Path("run.pt"), 1, 2, weights=Path("actor"))
    1
    """
    if type(number) is int and 1 <= number <= known:
        return number
    formats = "format 1" if known == 1 else f"formats 1 to {known}"
    raise CheckpointError(
        f"{path} has format {number!r:.40}, and this release of whet reads {formats}; resume with the release that "
        f"wrote it, or begin a new run from its weights: actor.model={weights}"
    )
