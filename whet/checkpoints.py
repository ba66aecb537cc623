"""Checkpoints of a cluster's roles: every trained worker and the run's own state in one folder, whole or absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whet.config import Role
from whet.errors import CheckpointError
from whet.parallel.checkpoint import (
    checkpoints,
    discard,
    find_checkpoint,
    publish,
    saved,
    sweep,
    verify,
    write_folder,
)
from whet.parallel.run_state import FORMAT, read_run_state
from whet.role_trainer import RoleTrainer
from whet.worker import ModelWorker

__all__ = ["Checkpoints"]


class Checkpoints:
    """Saves and restores the trained roles.

    Args: root: where the folders lie; None = none are written. trainers: the roles that are trained.
    """

    def __init__(self, root: str | Path | None, trainers: Mapping[Role, RoleTrainer]) -> None:
        self.root = None if root is None else Path(root).absolute()
        self.trainers = trainers

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` names: see parallel.find_checkpoint."""
        return find_checkpoint(resume, self.root)

    def exist(self) -> bool:
        """Whether a run has saved any here."""
        return self.root is not None and bool(saved(self.root))

    def sweep(self) -> None:
        """Removes what a kill left half written. Only where the run folder is locked: another may be writing it."""
        if self.root is not None:
            sweep(self.root)

    def discard(self, *, after: int) -> None:
        """Removes the checkpoints of steps that a run resumed before them will take anew."""
        for folder in [] if self.root is None else checkpoints(self.root):
            if int(folder.name.removeprefix("step-")) > after:
                discard(folder)

    def save(self, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None) -> Path | None:
        """Writes the checkpoint of a step.

        Args: state: the run's own, plain containers and tensors. tokenizer: beside the weights, so that transformers
            loads them. keep: folders to keep; None = all.
        Returns: the folder; None where there is no root.
        """
        if self.root is None:
            return None

        def write(folder: Path) -> None:
            for role, trainer in self.trainers.items():
                (folder / role.value).mkdir()
                trainer.worker.save(folder / role.value)
                tokenizer.save_pretrained(folder / role.value)
            updates = {role.value: trainer.train_steps for role, trainer in self.trainers.items()}
            torch.save({"format": FORMAT, **state, "updates": updates}, folder / "run.pt")

        return publish(self.root, step, write, keep=keep)

    @staticmethod
    def export(folder: Path, step: int, worker: ModelWorker, tokenizer: Any) -> None:
        """Writes a model in Hugging Face's format, the folder whole or absent, with run.json: the step it is of.

        Raises: CheckpointError: it could not be written; an older one stays.
        """

        def write(place: Path) -> None:
            worker.export(place, tokenizer)
            (place / "run.json").write_text(f'{{"step": {step}}}\n')

        write_folder(folder, write)

    def load(self, folder: Path) -> None:
        """Restores the roles that `save` wrote. Raises CheckpointError where they don't fit."""
        updates = self.state(folder)["updates"]
        if absent := [role.value for role in self.trainers if role.value not in updates]:
            raise CheckpointError(f"{folder}/run.pt has no updates of the {absent[0]}; resume with the roles it has")
        for role, trainer in self.trainers.items():
            trainer.worker.load(folder / role.value)
            trainer.train_steps = updates[role.value]

    @staticmethod
    def verify(folder: Path) -> None:
        """Compares a checkpoint with its checksums. Raises CheckpointError where a file has changed."""
        verify(folder)

    @staticmethod
    def state(folder: Path) -> dict[str, Any]:
        """The run's own state in a checkpoint. Raises CheckpointError where it is not what `save` wrote."""
        return read_run_state(folder / "run.pt")
