"""Checkpoints in TRL's layout: output_dir/checkpoint-{optimizer step}, each a self-contained folder.

    checkpoint-4/ model.safetensors, config.json, generation_config.json, the tokenizer      transformers loads these
                  (or adapter_model.safetensors, adapter_config.json)                        PEFT loads these
                  trainer_state.json                                                         transformers' TrainerState
                  run.pt, run.json, sums.json, whet/{optimizer.safetensors, state.pt}        for resuming the run
                  reference/                                                                 if the reference changes

A folder is complete or absent, and has no links, so it can be copied, moved and removed. Several runs may share an
output_dir; as in transformers, a run replaces the checkpoints of the steps that it saves and keeps the others.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from whet.errors import CheckpointError, format_value
from whet.storage.checkpoint import read_run_id, remove_checkpoint, write_folder_atomic, write_with_checksums
from whet.storage.files import is_temporary, remove_path
from whet.storage.folder_lock import FolderLock
from whet.train.model_files import separate_training_state
from whet.train.role_checkpoints import Checkpoints

__all__ = ["TrainerCheckpoints", "checkpoint_path", "find_checkpoint", "rotate_checkpoints"]


class NoCheckpoint(CheckpointError, ValueError):
    """There is no checkpoint to resume from. It is a ValueError too, which transformers raises."""


class TrainerCheckpoints(Checkpoints):
    """A trainer's checkpoints. Args: trainer: the trainer. root: output_dir; None = no resumable checkpoints."""

    def __init__(self, trainer: Any, root: str | None) -> None:
        models = trainer.models
        super().__init__(root, models.trainers, models.workers, ranks=models.ranks)
        self._trainer = trainer

    def open(self, *, new: bool = False) -> None:
        """Creates and locks output_dir, and removes unfinished files of a killed run. Args: new: has no effect."""
        self.run = secrets.token_hex(8)  # new for each run, which writes later checkpoints again after a resume
        if self.root is None or self._lock is not None or not self.ranks.is_writer:
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
        """Returns False: runs may share the folder."""
        return False

    def discard(self, *, after: int) -> None:
        """Does nothing: as in transformers, later checkpoints stay until they are overwritten."""

    def of_step(self, step: int) -> Path | None:
        """Returns the folder of the current optimizer step; None without checkpoints."""
        return None if self.root is None else checkpoint_path(self.root, self._trainer.state.global_step)

    def place(self, folder: Path, role: str) -> Path:
        """Returns the folder of a role's files. The trained model is at the top level, where other libraries load it
        from.
        """
        return folder if role == self._trainer.role.value else folder / role

    def save(self, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None) -> Path | None:
        """Writes the checkpoint of the current step. It replaces a checkpoint of the same name from another run."""
        folder = self.of_step(step)
        if folder is None:
            return None
        if self.ranks.broadcast(read_run_id(folder) == self.run):
            return folder
        self._trainer.prepare_save()
        if not self.ranks.is_writer:  # it gives its shards to the first process
            place = self.ranks.broadcast(None)
            self.write_files(None, state=state, tokenizer=tokenizer)
            self._trainer.save_user_files(place)
            return folder
        state = {**state, "trl": self._trainer.resume_state()}  # prepare_save has updated the best checkpoint

        def fill(place: Path) -> None:
            self.ranks.broadcast(place)
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
    """Returns the folder of an optimizer step."""
    return Path(output_dir) / f"checkpoint-{step}"


def _list_checkpoints(output_dir: str) -> list[Path]:
    """Returns the checkpoints, oldest first."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-(\d+)", p.name)]
    return sorted(folders, key=lambda p: int(p.name.rpartition("-")[2]))


def rotate_checkpoints(output_dir: str, keep: int | None, protected: Sequence[Path]) -> None:
    """Removes the oldest checkpoints.

    Args: keep: the number of checkpoints to keep; None = all. protected: checkpoints that are never removed.
    """
    folders = _list_checkpoints(output_dir)
    never = {folder.absolute() for folder in protected}
    removable = [folder for folder in folders if folder.absolute() not in never]
    excess = 0 if keep is None else len(folders) - max(keep, len(folders) - len(removable))
    for folder in removable[: max(excess, 0)]:
        remove_checkpoint(folder)


def find_checkpoint(output_dir: str, requested: str | Literal[True]) -> Path:
    """Returns the checkpoint that a run resumes from. Args: requested: a checkpoint's folder, or True = the newest
    checkpoint.

    Raises: NoCheckpoint: there is no checkpoint. CheckpointError: the checkpoint has no state to resume from.
    """
    if requested is True:
        folders = _list_checkpoints(output_dir)
        if not folders:
            raise NoCheckpoint(f"No valid checkpoint found in output directory ({output_dir}); train without resume")
        requested = str(folders[-1])
    if not isinstance(requested, str | os.PathLike):
        raise NoCheckpoint(
            "resume_from_checkpoint must be a checkpoint-* folder of output_dir, or True for the newest, got "
            f"{format_value(requested, 80)}"
        )
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
