"""Checkpoints in TRL's layout: output_dir/checkpoint-{optimizer step}, each a self-contained folder.

    checkpoint-4/ model.safetensors, config.json, generation_config.json, the tokenizer      as transformers loads them
                  (or adapter_model.safetensors, adapter_config.json)                        as PEFT does
                  trainer_state.json                                                         transformers' TrainerState
                  run.pt, run.json, sums.json, whet/{optimizer.safetensors, state.pt}        for a resume
                  reference/                                                                 if it moves

A folder is complete or absent, and holds no links: it may be copied, moved and removed. Several runs may share an
output_dir; as in transformers, a run replaces checkpoints of its own steps and leaves the others.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from whet.errors import CheckpointError
from whet.storage.checkpoint import read_run_id, remove_checkpoint, write_folder_atomic, write_with_checksums
from whet.storage.files import is_temporary, remove_path
from whet.storage.folder_lock import FolderLock
from whet.train.model_files import separate_training_state
from whet.train.role_checkpoints import Checkpoints

__all__ = ["TrainerCheckpoints", "checkpoint_path", "find_checkpoint", "rotate_checkpoints"]


class NoCheckpoint(CheckpointError, ValueError):
    """There is no checkpoint to resume from: transformers raises a ValueError."""


class TrainerCheckpoints(Checkpoints):
    """A trainer's checkpoints. Args: trainer: the trainer. root: output_dir; None = no resumable checkpoints."""

    def __init__(self, trainer: Any, root: str | None) -> None:
        models = trainer.models
        super().__init__(root, models.trainers, models.workers)
        self._trainer = trainer

    def open(self, *, new: bool = False) -> None:
        """Makes and locks output_dir, and removes what a kill left half written. Args: new: makes no difference."""
        self.run = secrets.token_hex(8)  # of each run: one resumed from an earlier step writes the later ones again
        if self.root is None or self._lock is not None:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.root, "output_dir")
        except OSError as error:
            raise CheckpointError(
                f"checkpoints can't be written to output_dir={self.root}: {error}; fix its permissions or make room, "
                'give another output_dir, or set save_strategy="no"'
            ) from error
        for path in self.root.iterdir():
            if is_temporary(path.name):
                remove_path(path)

    def exist(self) -> bool:
        """Whether the folder is another run's: runs may share it."""
        return False

    def discard(self, *, after: int) -> None:
        """Later checkpoints stay until they are written again, as in transformers."""

    def of_step(self, step: int) -> Path | None:
        """The checkpoint of now."""
        return None if self.root is None else checkpoint_path(self.root, self._trainer.state.global_step)

    def place(self, folder: Path, role: str) -> Path:
        """The model in training lies in the checkpoint's own folder, so that other libraries load it from there."""
        return folder if role == self._trainer.role.value else folder / role

    def save(self, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None) -> Path | None:
        """Writes the checkpoint of now, in place of one of its name by another run."""
        folder = self.of_step(step)
        if folder is None:
            return None
        if read_run_id(folder) == self.run:
            return folder
        self._trainer.prepare_save()
        state = {**state, "trl": self._trainer.resume_state()}  # which knows now whether this one is the best

        def fill(place: Path) -> None:
            self.write_files(place, state=state, tokenizer=tokenizer)
            separate_training_state(place)
            self._trainer.save_user_files(place)

        def write(place: Path) -> None:
            write_with_checksums(place, fill, run=self.run, step=step)
            self._trainer.state.save_to_json(str(place / "trainer_state.json"))

        write_folder_atomic(folder, write)
        return folder

    def load_best(self, folder: Path) -> None:
        """Loads the weights of a checkpoint. Raises CheckpointError: it is gone."""
        try:
            _check_resumable(folder)
            self.trainers[self._trainer.role].worker.load(folder)
        except CheckpointError as error:
            raise CheckpointError(f"load_best_model_at_end can't load {folder}: {error}; leave it as it is") from error


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """The folder of an optimizer step."""
    return Path(output_dir) / f"checkpoint-{step}"


def _saved(output_dir: str) -> list[Path]:
    """The checkpoints, oldest first."""
    found = {p: re.fullmatch(r"checkpoint-(\d+)", p.name) for p in Path(output_dir).glob("checkpoint-*")}
    return sorted((p for p, m in found.items() if m), key=lambda p: int(p.name.rpartition("-")[2]))


def rotate_checkpoints(output_dir: str, keep: int | None, never: Sequence[Path]) -> None:
    """Removes the oldest checkpoints. Args: keep: how many stay; None = all. never: not removed."""
    folders = _saved(output_dir)
    kept = {folder.absolute() for folder in never}
    spare = [folder for folder in folders if folder.absolute() not in kept]
    excess = 0 if keep is None else len(folders) - max(keep, len(folders) - len(spare))
    for folder in spare[: max(excess, 0)]:
        remove_checkpoint(folder)


def find_checkpoint(output_dir: str, requested: str | Literal[True]) -> Path:
    """The checkpoint that a run resumes from. Args: requested: True = the newest checkpoint, or its folder.

    Raises: NoCheckpoint: there is none. CheckpointError: it has no state to resume from.
    """
    if requested is True:
        folders = _saved(output_dir)
        if not folders:
            raise NoCheckpoint(f"No valid checkpoint found in output directory ({output_dir}); train without resume")
        requested = str(folders[-1])
    folder = Path(requested)
    _check_resumable(folder)
    return folder


def _check_resumable(folder: Path) -> None:
    """Raises NoCheckpoint: the folder does not exist. CheckpointError: it has no state to resume from."""
    if (folder / "run.pt").is_file():
        return
    if not folder.is_dir():
        raise NoCheckpoint(f"{folder} does not exist: no valid checkpoint; give a folder checkpoint-* of output_dir")
    raise CheckpointError(
        f"{folder} can't be resumed: it has no run.pt, so it was written with save_only_model=True or by TRL; give the "
        "folder as the model to go on from its weights"
    )
