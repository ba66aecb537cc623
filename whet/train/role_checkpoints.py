"""Checkpoints of a run's roles: every trained worker, every read-only one whose weights were replaced, and the run's
own state in one folder, whole or absent.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from whet.config import Role
from whet.errors import CheckpointError, ConfigError
from whet.storage.checkpoint import (
    CHECKPOINT_FORMAT,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint_root,
    read_run_id,
    remove_checkpoint,
    step_of,
    verify_checkpoint,
    write_checkpoint,
    write_folder_atomic,
    write_pointer,
    write_state,
)
from whet.storage.folder_lock import FolderLock
from whet.storage.run_state import read_run_state
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker

__all__ = ["Checkpoints"]

log = logging.getLogger("whet")


class Checkpoints:
    """Saves and restores the trained roles, and those of the others whose weights are not what was loaded.

    Args: root: where the folders lie; None = none are written. trainers: the roles that are trained. workers: all
        roles; of those that are not trained, the ones with `replaced` weights are saved too.
    Raises: ConfigError: root is empty.
    """

    def __init__(
        self,
        root: str | Path | None,
        trainers: Mapping[Role, RoleTrainer],
        workers: Mapping[Role, ModelWorker] | None = None,
    ) -> None:
        if root is not None and not str(root).strip():
            raise ConfigError("the folder of checkpoints has an empty name; give trainer.checkpoint_root_directory one")
        self.root = None if root is None else Path(root).absolute()
        self.trainers = trainers
        self.only_read = {role: w for role, w in (workers or {}).items() if role not in trainers}
        self.run: str | None = secrets.token_hex(8)
        """Who writes here, so that no run removes another's; None = the checkpoint that it resumed has no run.json."""
        self._lock: FolderLock | None = None
        self._made = False
        self._protected: dict[str, int] = {}
        """The steps whose checkpoints are kept whatever their number, by what they are kept as."""

    def open(self, *, new: bool = False) -> None:
        """Creates the folder, checks that it can be written, locks it, and removes what a kill left half written.

        Args: new: for a new run, which would take another's checkpoints there for its own.
        Raises: CheckpointError: it can't be written. ConfigError: another process uses it, or a new run finds some.
        """
        if self.root is not None and self._lock is None:
            self._made = not self.root.exists()
            self._lock = open_checkpoint_root(self.root)
        if new and self.exist():
            raise ConfigError(
                f"{self.root} holds the checkpoints of a run; set trainer.resume=latest to resume it, or another folder"
            )

    def close(self) -> None:
        """Releases the lock; a folder that was made and stayed empty is taken away."""
        if self._lock is not None:
            self._lock.release()
            with suppress(OSError):  # what holds something stays
                if self._made:
                    self._lock.path.parent.rmdir()
        self._lock = None

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` names: see parallel.find_checkpoint."""
        return find_checkpoint(resume, self.root)

    def exist(self) -> bool:
        """Whether a run has saved any here."""
        return self.root is not None and bool(list_checkpoints(self.root))

    def _is_own(self, folder: Path) -> bool:
        """Whether a checkpoint lies among those of this run, under a step's name."""
        if self.root is None or step_of(folder) is None:
            return False
        return folder.absolute().parent.resolve() == self.root.resolve()

    def discard(self, *, after: int) -> None:
        """Removes the checkpoints of steps that a run resumed before them will run again.

        Raises: CheckpointError: one of them is another run's, and none is removed; or one can't be removed.
        """
        late = [p for p in ([] if self.root is None else list_checkpoints(self.root)) if (step_of(p) or 0) > after]
        for folder in late:
            if read_run_id(folder) != self.run:
                raise CheckpointError(
                    f"{folder} is from a later step and belongs to a different run than the checkpoint being resumed; "
                    "move it to another folder first"
                )
        for folder in late:
            try:
                remove_checkpoint(folder)
            except OSError as error:
                raise CheckpointError(
                    f"{folder}, of a later step, can't be removed: {error}; fix the permissions of its folder"
                ) from error

    def save(self, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None) -> Path | None:
        """Writes the checkpoint of a step.

        Args: state: the run's own, plain containers and tensors. tokenizer: saved with the weights, so that
            transformers loads them. keep: folders to keep; None = all.
        Returns: the folder; None where there is no root.
        Raises: CheckpointError: it could not be written, or the folder of that step is another run's.
        """
        if self.root is None:
            return None

        write = partial(self.fill, state=state, tokenizer=tokenizer)
        folder = write_checkpoint(self.root, step, write, run=self.run, keep=keep, spared=self._protected.values())
        for name in self._protected:
            self._point(name)
        return folder

    def fill(self, folder: Path, *, state: Mapping[str, Any], tokenizer: Any) -> None:
        """Writes a checkpoint's files, but for what a folder of checkpoints adds. Args: folder: empty."""
        replaced = [role for role, worker in self.only_read.items() if worker.replaced]
        for role, trainer in self.trainers.items():
            place = self.place(folder, role.value)
            place.mkdir(exist_ok=True)
            trainer.worker.save(place)
            tokenizer.save_pretrained(place)
        for role in replaced:
            (folder / role.value).mkdir()
            self.only_read[role].save(folder / role.value)
        updates = {role.value: trainer.train_steps for role, trainer in self.trainers.items()}
        skipped = {role.value: trainer.skipped for role, trainer in self.trainers.items()}
        own = {"updates": updates, "skipped": skipped, "replaced": [role.value for role in replaced]}
        write_state({**state, **own, "format": CHECKPOINT_FORMAT}, folder / "run.pt")

    def place(self, folder: Path, role: str) -> Path:
        """Where the files of a trained role lie. Args: folder: the checkpoint, which may be still to be filled."""
        return folder / role

    def of_step(self, step: int) -> Path | None:
        """The folder of a step's checkpoint, which may be still to be written; None = none are."""
        return None if self.root is None else self.root / f"step-{step:06d}"

    def protect(self, name: str, step: int | None) -> bool:
        """Keeps the checkpoint of a step, whatever their number, in place of the one that was kept as `name` before.

        Args: name: of a text file next to the checkpoints that says which it is. step: it may be written later; None =
            no checkpoint.
        Returns: whether it is there already.
        """
        if step is None:
            self._protected.pop(name, None)
            if self.root is not None:
                (self.root / name).unlink(missing_ok=True)
            return False
        self._protected[name] = step
        return self._point(name)

    def _point(self, name: str) -> bool:
        """Writes the file that names a checkpoint set aside, if it is there. Returns: whether it is."""
        if self.root is None or not (self.root / f"step-{self._protected[name]:06d}" / "run.pt").is_file():
            return False
        write_pointer(self.root, f"step-{self._protected[name]:06d}", name)
        return True

    @staticmethod
    def export(
        folder: Path, step: int, worker: ModelWorker, tokenizer: Any, *, merge: bool = False, dtype: str = "auto"
    ) -> None:
        """Writes a model in Hugging Face's format, the folder whole or absent, with run.json: the step it is of.

        Args: merge: an adapter's base with it merged, in place of the adapter alone. dtype: see ModelWorker.export.
        Raises: CheckpointError: it could not be written; an older one stays.
        """

        def write(place: Path) -> None:
            worker.export(place, tokenizer, merge=merge, dtype=dtype)
            (place / "run.json").write_text(f'{{"step": {step}}}\n')

        write_folder_atomic(folder, write)

    def load(self, folder: Path) -> None:
        """Restores the roles that `save` wrote. Raises CheckpointError where they don't fit.

        Where the checkpoint lies among this run's own, the run continues as the one that has written it.
        """
        state = self.state(folder)
        updates = state["updates"]
        counts = [updates.get(role.value) if isinstance(updates, dict) else None for role in self.trainers]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise CheckpointError(
                f"{folder / 'run.pt'} has an unexpected format: its updates are {updates!r:.80}; resume from another "
                "step-* folder"
            )
        for role, trainer in self.trainers.items():
            trainer.load(self.place(folder, role.value), skipped=state["skipped"].get(role.value, 0))
            if trainer.train_steps != updates[role.value]:
                raise CheckpointError(
                    f"{folder / 'run.pt'} says {updates[role.value]} updates of the {role.value}, its optimizer's "
                    f"state says {trainer.train_steps}; resume from another step-* folder"
                )
        self._load_replaced(folder, state["replaced"])
        if self._is_own(folder):
            self.run = read_run_id(folder)

    def _load_replaced(self, folder: Path, replaced: Collection[str]) -> None:
        """Restores the roles that are not trained and whose weights were replaced.

        Raises: CheckpointError: a role's weights were replaced here and not in the checkpoint: those loaded are gone.
        """
        for role, worker in self.only_read.items():
            if role.value in replaced:
                worker.load(folder / role.value)
                worker.replaced = True
            elif worker.replaced:
                raise CheckpointError(
                    f"the {role.value}'s weights were changed after loading (load_weights), but {folder} was written "
                    "before that; reload the original models, then resume"
                )
        for role in sorted(set(replaced) - {role.value for role in self.only_read}):
            log.warning("%s holds the weights of the %s, but this run has no %s", folder, role, role)

    def verify(self, folder: Path) -> None:
        """Checks a checkpoint before it is resumed.

        Raises: CheckpointError: a file is missing or has changed, or it lies elsewhere and other checkpoints here.
        """
        if self.exist() and not self._is_own(folder):
            raise CheckpointError(
                f"{folder} is not among the checkpoints in {self.root}, which belong to another run; give another "
                "trainer.checkpoint_root_directory or trainer.run_dir, or trainer.resume=latest to resume those"
            )
        workers = {role.value: trainer.worker for role, trainer in self.trainers.items()}
        for role, worker in workers.items():
            worker.files.check(self.place(folder, role))
        own = [path for role, worker in workers.items() for path in worker.files.paths(self.place(folder, role))]
        verify_checkpoint(folder, ["run.pt", *(path.relative_to(folder).as_posix() for path in own)])

    @staticmethod
    def state(folder: Path, needs: Collection[str] = ()) -> dict[str, Any]:
        """The run's own state in a checkpoint.

        Args: needs: entries that the reader requires, besides those that every run writes.
        Raises: CheckpointError: it is not what `save` wrote, or of another step than its folder.
        """
        return read_run_state(folder / "run.pt", needs)
