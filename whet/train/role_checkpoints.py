"""Checkpoints of a run. One folder, written atomically, holds every trained role, every read-only role with replaced
weights, and the run's own state.

    whole        rank 0 gathers each tensor in turn, and writes the same files as one process
    sharded      each rank writes its own shards (parallel/shards.py), rank 0 all other files
    async        as sharded: shards are copied to the host, and a thread writes them while the next steps run

A folder gets its name when all of its files are written. An asynchronous save ends at the latest before the next one
begins, and before the run ends.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whet.config import CheckpointingOptions, Role
from whet.errors import CheckpointError, ConfigError, format_exception
from whet.parallel.ranks import Ranks
from whet.storage.checkpoint import (
    CHECKPOINT_FORMAT,
    begin_checkpoint,
    find_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    open_checkpoint_root,
    read_run_id,
    remove_checkpoint,
    remove_old_checkpoints,
    step_number,
    verify_checkpoint,
    write_checkpoint,
    write_folder_atomic,
    write_pointer,
    write_state,
)
from whet.storage.files import remove_path
from whet.storage.folder_lock import FolderLock
from whet.storage.run_state import read_run_state
from whet.train.out_of_memory import BUDGETS, read_budgets, write_budgets
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker

if TYPE_CHECKING:
    from whet.parallel.shards import ShardReader

__all__ = ["Checkpoints"]

log = logging.getLogger("whet")


class Checkpoints:
    """Saves and restores the trained roles, and read-only roles with weights that changed after loading.

    Args:
        root: the folder of the checkpoints; None = no checkpoints are written.
        trainers: the trained roles.
        workers: all roles; a read-only role is saved if its worker is `replaced`.
        options: whether checkpoints are sharded, and written meanwhile; None = neither.
        ranks: the processes that train together; None = one. Only rank 0 changes files, except shards.
    Raises: ConfigError: root is empty.
    """

    def __init__(
        self,
        root: str | Path | None,
        trainers: Mapping[Role, RoleTrainer],
        workers: Mapping[Role, ModelWorker] | None = None,
        *,
        options: CheckpointingOptions | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if root is not None and not str(root).strip():
            raise ConfigError("trainer.checkpoint_root_directory is empty; give it the name of a folder")
        self.root = None if root is None else Path(root).absolute()
        self.trainers, self.ranks = trainers, ranks or Ranks()
        self.only_read = {role: w for role, w in (workers or {}).items() if role not in trainers}
        self.run: str | None = secrets.token_hex(8)
        """The run's id, so that no run removes another's checkpoints; None = the resumed checkpoint has no run.json."""
        self._lock: FolderLock | None = None
        self._created = False
        self.options = options or CheckpointingOptions()
        self._background: _BackgroundSave | None = None
        """The asynchronous save that runs, or has ended since the last step."""
        self._stager: Any = None
        self._thread_ranks: Ranks | None = None
        """The processes, for the threads that save; made at the first asynchronous save, as the stager is."""
        self._protected: dict[str, int] = {}
        """Pointer name -> step of a checkpoint that max_to_keep does not remove."""

    def open(self, *, new: bool = False) -> None:
        """Creates the folder, checks that it can be written, locks it, and removes half-written files of killed runs.

        Args: new: the run is a new one, so the folder must not hold checkpoints.
        Raises: CheckpointError: the folder can't be written. ConfigError: another process uses it, or a new run finds
            checkpoints there.
        """
        if not self.ranks.is_writer:
            return
        if self.root is not None and self._lock is None:
            self._created = not self.root.exists()
            self._lock = open_checkpoint_root(self.root)
        if new and self.exist():
            raise ConfigError(
                f"{self.root} holds the checkpoints of a run; set trainer.resume=latest to resume it, or another folder"
            )

    def close(self) -> None:
        """Waits for an asynchronous save, and releases the lock.

        Removes the folder if this run created it and it is empty.
        """
        self.join()
        if self._lock is not None:
            self._lock.release()
            with suppress(OSError):  # a folder that isn't empty stays
                if self._created:
                    self._lock.path.parent.rmdir()
        self._lock = None

    def find(self, resume: str) -> Path | None:
        """Returns the checkpoint that `resume` names: see storage.checkpoint.find_checkpoint."""
        return find_checkpoint(resume, self.root)

    def exist(self) -> bool:
        """Returns whether the folder holds a checkpoint."""
        return self.root is not None and bool(list_checkpoints(self.root))

    def _is_own(self, folder: Path) -> bool:
        """Returns whether a checkpoint is one of this run's step-* folders."""
        if self.root is None or step_number(folder) is None:
            return False
        return folder.absolute().parent.resolve() == self.root.resolve()

    def discard(self, *, after: int) -> None:
        """Removes the checkpoints after a step, since the resumed run will do those steps again.

        Raises: CheckpointError: one belongs to another run (then none is removed), or one can't be removed.
        """
        if not self.ranks.is_writer:
            return
        late = [p for p in ([] if self.root is None else list_checkpoints(self.root)) if (step_number(p) or 0) > after]
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
                    f"{folder} is from a later step and can't be removed: {error}; fix the permissions of its folder"
                ) from error

    def save(self, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None) -> Path | None:
        """Writes the checkpoint of a step.

        Args:
            step: the global step.
            state: the run's own state, as plain containers and tensors.
            tokenizer: saved with the weights, so that transformers loads the folder.
            keep: the number of checkpoints to keep; None = all.
        Returns: the folder; None if there is no root.
        Raises: CheckpointError: it could not be written, or the folder of that step belongs to another run.
        """
        if self.root is None:
            return None
        if self.options.sharded or self.options.enable_async_checkpointing:
            return self._save_sharded(self.root, step, state, tokenizer=tokenizer, keep=keep)
        if not self.ranks.is_writer:
            if self.ranks.broadcast(None) is not None:
                self.write_files(None, state=state, tokenizer=tokenizer)
            return self.of_step(step)
        written: list[Path] = []

        def write(folder: Path) -> None:
            written.append(self.ranks.broadcast(folder))
            self.write_files(folder, state=state, tokenizer=tokenizer)

        folder = write_checkpoint(self.root, step, write, run=self.run, keep=keep, spared=self._protected.values())
        if not written:  # the checkpoint was there already
            self.ranks.broadcast(None)
        for name in self._protected:
            self._point(name)
        return folder

    def _save_sharded(
        self, root: Path, step: int, state: Mapping[str, Any], *, tokenizer: Any, keep: int | None
    ) -> Path | None:
        """As `save`; every rank writes its shards, at once or in a thread."""
        from whet.parallel.shards import SHARDS, Stager, write_shards  # imported where shards are written

        self.wait()
        tensors: dict[str, Tensor] = {}
        rests: dict[Role, Any] = {}
        for role, worker in self._saved_workers().items():
            own, rests[role] = worker.shards()
            tensors |= {f"{role.value}.{name}": tensor for name, tensor in own.items()}

        def write(folder: Path) -> None:
            for role, worker in self._saved_workers().items():
                (folder / role.value).mkdir()
                worker.files.write_plain(folder / role.value, worker.version, rests[role])
                if role in self.trainers:
                    tokenizer.save_pretrained(folder / role.value)
            self._write_run_state(folder, state)

        folder = self.ranks.call_on_writer(lambda: begin_checkpoint(root, step, write, run=self.run))
        if folder is None:  # the checkpoint was there already
            if self.ranks.is_writer:
                write_pointer(root, f"step-{step:06d}")
            return self.of_step(step)

        def save(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
            try:
                sums = write_shards(tensors, folder / SHARDS, ranks)
            except BaseException as error:
                if ranks.is_writer:
                    remove_path(folder)
                if not isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    f"checkpoint of step {step}: {error}; earlier ones are kept. Make room or fix its permissions, "
                    "then resume with trainer.resume=latest"
                ) from error
            known = {f"{SHARDS}/{name}": digest for name, digest in sums.items()}
            ranks.call_on_writer(lambda: finish_checkpoint(root, step, folder, run=self.run, known=known))

        def tidy() -> None:
            if self.ranks.is_writer:
                remove_old_checkpoints(root, step, run=self.run, keep=keep, spared=self._protected.values())
            for name in self._protected:
                self._point(name)

        if not self.options.enable_async_checkpointing:
            save(self.ranks, tensors)
            tidy()
            return self.of_step(step)
        if self._thread_ranks is None:
            self._thread_ranks, self._stager = self.ranks.in_thread(), Stager()
        threads, staged = self._thread_ranks, self._stager.stage(tensors)
        threads.step, threads.phase = step, lambda: "asynchronous save"
        self._background = _BackgroundSave(step, lambda: save(threads, staged), tidy)
        return self.of_step(step)

    def join(self) -> None:
        """Waits until the asynchronous save, if one runs, has ended in this process, and so its files are written."""
        if self._background is not None:
            self._background.join()

    def wait(self) -> None:
        """Waits until the asynchronous save, if one runs, has ended on every rank. Every rank must call it.

        Raises: CheckpointError: it has failed.
        """
        if self._background is None:
            return
        background, self._background = self._background, None
        background.join()
        errors = [error for error in self.ranks.all_gather(background.error) if error is not None]
        if errors:
            raise CheckpointError(errors[0])
        background.tidy()

    def _saved_workers(self) -> dict[Role, ModelWorker]:
        """Returns the workers that a checkpoint holds: of trained roles, and of read-only roles with replaced
        weights.
        """
        replaced = {role: worker for role, worker in self.only_read.items() if worker.replaced}
        return {**{role: trainer.worker for role, trainer in self.trainers.items()}, **replaced}

    def write_files(self, folder: Path | None, *, state: Mapping[str, Any], tokenizer: Any) -> None:
        """Writes the files of the roles and run.pt into an empty folder. write_checkpoint adds its own files.

        Args: folder: None = another rank writes; this one only gives it the shards of the weights.
        """
        if folder is None:
            for worker in self._saved_workers().values():
                worker.save(None)
            return
        for role, worker in self._saved_workers().items():
            place = self.place(folder, role.value) if role in self.trainers else folder / role.value
            place.mkdir(exist_ok=True)
            worker.save(place)
            if role in self.trainers:
                tokenizer.save_pretrained(place)
        self._write_run_state(folder, state)

    def _write_run_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Writes run.pt."""
        replaced = [role for role, worker in self.only_read.items() if worker.replaced]
        updates = {role.value: trainer.train_steps for role, trainer in self.trainers.items()}
        skipped = {role.value: trainer.skipped for role, trainer in self.trainers.items()}
        own = {"updates": updates, "skipped": skipped, "replaced": [role.value for role in replaced]}
        write_state({**state, **own, "format": CHECKPOINT_FORMAT}, folder / "run.pt")

    def place(self, folder: Path, role: str) -> Path:
        """Returns the folder of a trained role in a checkpoint, which may not exist yet."""
        return folder / role

    def of_step(self, step: int) -> Path | None:
        """Returns the folder of a step's checkpoint, which may not exist yet; None = no checkpoints are written."""
        return None if self.root is None else self.root / f"step-{step:06d}"

    def protect(self, name: str, step: int | None) -> bool:
        """Protects the checkpoint of a step from removal, in place of the one that `name` protected before.

        Args: name: the text file next to the checkpoints that names the folder. step: the step, which may not be saved
            yet; None = protect none.
        Returns: whether the checkpoint exists.
        """
        if step is None:
            self._protected.pop(name, None)
            if self.root is not None and self.ranks.is_writer:
                (self.root / name).unlink(missing_ok=True)
            return False
        self._protected[name] = step
        return self._point(name)

    def _point(self, name: str) -> bool:
        """Writes the file that names a protected checkpoint, if the checkpoint exists. Returns: whether it exists."""
        if self.root is None or not (self.root / f"step-{self._protected[name]:06d}" / "run.pt").is_file():
            return False
        write_pointer(self.root, f"step-{self._protected[name]:06d}", name)
        return True

    def write_token_budgets(self) -> None:
        """Notes for a restart the token budgets of updates that ran out of memory in this process, if any did."""
        budgets = {role.value: trainer.worker.tokens_after_restart for role, trainer in self.trainers.items()}
        known_budgets = {role: tokens for role, tokens in budgets.items() if tokens is not None}
        if self.root is not None and known_budgets:
            write_budgets(self.root, known_budgets)

    def restore_token_budgets(self) -> None:
        """Takes over what `write_token_budgets` noted, on every rank."""
        budgets = self.ranks.broadcast({} if self.root is None else read_budgets(self.root))
        for role, trainer in self.trainers.items():
            if role.value in budgets:
                trainer.worker.limit_tokens(budgets[role.value])
                log.warning(
                    "the %s's updates have at most %d tokens in a micro-batch, since one ran out of memory before (%s)",
                    role.value,
                    budgets[role.value],
                    BUDGETS,
                )

    @staticmethod
    def export(
        folder: Path, step: int, worker: ModelWorker, tokenizer: Any, *, merge: bool = False, dtype: str = "auto"
    ) -> None:
        """Writes a model in Hugging Face's format, with its step in run.json. The folder is written atomically.

        Args: merge: write the base with the adapter merged, not only the adapter. dtype: see ModelWorker.export.
        Raises: CheckpointError: it could not be written; an older folder stays.
        """

        def write(place: Path) -> None:
            worker.export(place, tokenizer, merge=merge, dtype=dtype)
            (place / "run.json").write_text(f'{{"step": {step}}}\n')

        write_folder_atomic(folder, write)

    def load(self, folder: Path) -> None:
        """Restores the roles that `save` wrote. Raises CheckpointError if they don't fit.

        If the checkpoint is in this run's folder, the run takes over the id of the run that wrote it.
        """
        from whet.parallel.shards import SHARDS, ShardReader  # imported where shards are read

        state = self.state(folder)
        updates = state["updates"]
        counts = [updates.get(role.value) if isinstance(updates, dict) else None for role in self.trainers]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise CheckpointError(
                f"{folder / 'run.pt'} has an unexpected format: its updates are {updates!r:.80}; resume from another "
                "step-* folder"
            )
        shards = ShardReader(folder / SHARDS, self.ranks) if (folder / SHARDS).is_dir() else None
        for role, trainer in self.trainers.items():
            own = None if shards is None else shards.with_prefix(f"{role.value}.")
            trainer.load(self.place(folder, role.value), skipped=state["skipped"].get(role.value, 0), shards=own)
            if trainer.train_steps != updates[role.value]:
                raise CheckpointError(
                    f"{folder / 'run.pt'} records {updates[role.value]} updates of the {role.value}, but its "
                    f"optimizer's state records {trainer.train_steps}; resume from another step-* folder"
                )
        self._load_replaced(folder, state["replaced"], shards)
        if self._is_own(folder):
            self.run = read_run_id(folder)

    def _load_replaced(self, folder: Path, replaced: Collection[str], shards: ShardReader | None) -> None:
        """Restores the read-only roles with replaced weights.

        Raises: CheckpointError: a role's weights were replaced here but not in the checkpoint, so the original weights
            are gone.
        """
        for role, worker in self.only_read.items():
            if role.value in replaced:
                worker.load(folder / role.value, None if shards is None else shards.with_prefix(f"{role.value}."))
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

        Raises: CheckpointError: a file is missing or has changed, or the checkpoint is in another folder while this
            run's folder holds checkpoints of its own.
        """
        if self.exist() and not self._is_own(folder):
            raise CheckpointError(
                f"{folder} is not among the checkpoints in {self.root}, which belong to another run; give another "
                "trainer.checkpoint_root_directory or trainer.run_dir, or trainer.resume=latest to resume those"
            )
        if (folder / "shards").is_dir():
            verify_checkpoint(folder, ["run.pt", *(f"{role.value}/state.pt" for role in self.trainers)])
            return
        workers = {role.value: trainer.worker for role, trainer in self.trainers.items()}
        for role, worker in workers.items():
            worker.files.check(self.place(folder, role))
        own = [path for role, worker in workers.items() for path in worker.files.paths(self.place(folder, role))]
        verify_checkpoint(folder, ["run.pt", *(path.relative_to(folder).as_posix() for path in own)])

    @staticmethod
    def state(folder: Path, needs: Collection[str] = ()) -> dict[str, Any]:
        """Returns the run's own state in a checkpoint.

        Args: needs: required entries, in addition to those that every run writes.
        Raises: CheckpointError: `save` did not write it, or its step is not that of the folder's name.
        """
        return read_run_state(folder / "run.pt", needs)


class _BackgroundSave:
    """An asynchronous save, which begins at once.

    Args: step: of the checkpoint. save: writes it, in a thread. tidy: called by the main thread after it.
    """

    def __init__(self, step: int, save: Callable[[], None], tidy: Callable[[], None]) -> None:
        self.step, self.tidy = step, tidy
        self.error: str | None = None
        self._save = save
        self._thread = threading.Thread(target=self._run, name="whet-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._save()
        except BaseException as error:  # it ends the run at the next save
            self.error = str(error) if isinstance(error, CheckpointError) else format_exception(error)
            log.error("the asynchronous save of step %d failed: %s", self.step, self.error)

    def join(self) -> None:
        """Waits until it has ended."""
        self._thread.join()
