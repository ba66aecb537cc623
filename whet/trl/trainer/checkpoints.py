"""Checkpoints where TRL's users look for them: output_dir/checkpoint-{optimizer step}.

What a resume needs lies once, in output_dir/.whet/<run>/step-*; the folder of transformers' form holds links to the
weights, the configuration and the tokenizer there, and trainer_state.json.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from whet.errors import CheckpointError

__all__ = ["best_state", "checkpoint_at", "linked", "new_root", "rotated", "to_resume"]

_WHOLE = "whet"
"""Link from a checkpoint to the folder that a resume reads."""
_NOT_LINKED = ("optimizer.safetensors", "state.pt")


def new_root(output_dir: str) -> str:
    """A folder for the checkpoints of a new run, of that run alone."""
    held = Path(output_dir) / ".whet"
    taken = [int(p.name.removeprefix("run-")) for p in held.glob("run-*") if p.name.removeprefix("run-").isdigit()]
    return str(held / f"run-{max(taken, default=0) + 1}")


def checkpoint_at(output_dir: str, step: int) -> Path:
    """The folder of an optimizer step."""
    return Path(output_dir) / f"checkpoint-{step}"


def linked(whole: Path, folder: Path, role: str) -> Path:
    """Makes the folder of transformers' form. Args: whole: what a resume reads. role: whose model. Returns: it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in sorted((whole / role).iterdir()):
        if file.name not in _NOT_LINKED:
            (folder / file.name).symlink_to(os.path.relpath(file, folder))
    (folder / _WHOLE).symlink_to(os.path.relpath(whole, folder))
    return folder


def saved(output_dir: str) -> list[Path]:
    """The checkpoints, oldest first."""
    found = {p: re.fullmatch(r"checkpoint-(\d+)", p.name) for p in Path(output_dir).glob("checkpoint-*")}
    return sorted((p for p, m in found.items() if m), key=lambda p: int(p.name.rpartition("-")[2]))


def rotated(output_dir: str, keep: int | None, never: Sequence[Path]) -> None:
    """Removes the oldest checkpoints. Args: keep: how many stay; None = all. never: not removed."""
    folders = saved(output_dir)
    spare = [folder for folder in folders if folder not in never]
    excess = 0 if keep is None else len(folders) - max(keep, len(folders) - len(spare))
    for folder in spare[: max(excess, 0)]:
        whole = folder / _WHOLE
        if whole.is_symlink():
            shutil.rmtree(whole.resolve(), ignore_errors=True)
        shutil.rmtree(folder)


def to_resume(output_dir: str, asked: str | Literal[True]) -> Path:
    """What a run resumes from. Args: asked: True = the newest checkpoint, or its folder.

    Raises: CheckpointError: there is none, or it has no state to go on from.
    """
    if asked is True:
        folders = saved(output_dir)
        if not folders:
            raise CheckpointError(f"No valid checkpoint found in output directory ({output_dir}); train without resume")
        asked = str(folders[-1])
    whole = Path(asked) / _WHOLE
    found = whole.resolve() if whole.is_symlink() else Path(asked)
    if not (found / "run.pt").is_file():
        raise CheckpointError(
            f"{asked} can't be resumed: it has no run.pt; one of save_only_model, of TRL, or moved without "
            f"{Path(output_dir) / '.whet'}. Give the model as a folder to go on from its weights"
        )
    return found


def best_state(folder: Path, role: str) -> Path:
    """What a worker loads of a checkpoint. Args: role: whose. Raises CheckpointError: it is gone."""
    whole = (folder / _WHOLE).resolve() / role
    if not whole.is_dir():
        raise CheckpointError(f"{folder} is gone, and load_best_model_at_end asks for it; leave it where it is")
    return whole
