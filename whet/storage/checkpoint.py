"""Checkpoint folders: whole or absent, the last few kept, read without pickle.

    checkpoints/step-000100/{actor/{model.safetensors, optimizer.safetensors, state.pt}, run.pt, run.json, sums.json}
    checkpoints/latest                      a text file: "step-000100"

A folder is written under a temporary name, flushed to disk, and renamed; then `latest` is moved. A killed process
leaves at most a temporary folder, which the next run removes. Tensors are in safetensors files, the rest in files read
with weights_only=True. `sums.json` has the SHA-256 of every file, to detect damaged ones. `run.json` names the run: no
run removes or resumes another's checkpoints.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from whet.errors import CheckpointError, format_exception
from whet.storage.files import fsync as _fsync
from whet.storage.files import is_temporary, read_json, remove_path, temporary_path, write_atomic
from whet.storage.folder_lock import FolderLock
from whet.util.references import check_access

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "CHECKPOINT_FORMAT",
    "begin_checkpoint",
    "check_format",
    "check_same_weights",
    "clean_root",
    "file_sum",
    "find_checkpoint",
    "finish_checkpoint",
    "list_checkpoints",
    "load_weights",
    "named_weights",
    "open_checkpoint_root",
    "read_run_id",
    "read_state",
    "remove_checkpoint",
    "remove_old_checkpoints",
    "save_weights",
    "step_folders",
    "step_number",
    "verify_checkpoint",
    "write_checkpoint",
    "write_folder_atomic",
    "write_pointer",
    "write_state",
    "write_with_checksums",
]

log = logging.getLogger("whet")

CHECKPOINT_FORMAT = 1
"""The format of run.pt, sums.json, <role>/state.pt and <role>/optimizer.safetensors. Each file holds this number."""
_STEP = re.compile(r"step-([0-9]{6,})")
_SUMS = "sums.json"
_RUN = "run.json"
_FULL = re.compile(r"os error|no space left|file write failed|PytorchStreamWriter|inline_container", re.IGNORECASE)
"""Words in the errors of torch and tokenizers for a file that could not be written."""


def open_checkpoint_root(root: Path) -> FolderLock:
    """Creates the folder of checkpoints, locks it, checks that it can be written, and removes leftovers.

    It writes, renames and removes a folder there, so that a failure comes before the first step and not after an hour.

    Returns: the lock; release it at the end.
    Raises: CheckpointError: it can't be made or written. ConfigError: another process uses it.
    """
    lock = None
    tried, renamed = temporary_path(root / "probe"), temporary_path(root / "probe")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(root, "trainer.checkpoint_root_directory")
        _write_and_sync(tried, lambda folder: (folder / "file").touch())
        tried.rename(renamed)
        remove_path(renamed, strict=True)
        if (root / "latest").is_dir():
            raise CheckpointError(f"{root / 'latest'} is a folder, but must be a file that names one; remove it")
        clean_root(root)
    except BaseException as error:
        if lock is not None:
            remove_path(tried)
            lock.release()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"checkpoints can't be written to {root}: {error}; fix its permissions or make room, or "
                "set another trainer.checkpoint_root_directory (None = checkpoints/ in trainer.run_dir)"
            ) from error
        raise
    return lock


def write_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    run: str | None = None,
    keep: int | None = None,
    spared: Iterable[int] = (),
) -> Path:
    """Writes a checkpoint folder, whole or not at all, then moves `latest`, then removes the oldest.

    Args:
        root: the folder of checkpoints.
        step: of the checkpoint.
        write: writes the files into a folder.
        run: the id of the run, for run.json; None = not recorded.
        keep: the number of this run's folders to keep, with the new one; None = all.
        spared: steps whose folders are kept as well.
    Returns: root/step-<step>. An existing whole folder of that step and run is not written again.
    Raises: CheckpointError: it could not be written (a full disk); nothing half-written stays, and nothing is lost.
        Or another run's folder has that step.
    """
    if (folder := begin_checkpoint(root, step, write, run=run)) is not None:
        finish_checkpoint(root, step, folder, run=run)
    else:
        write_pointer(root, f"step-{step:06d}")
    remove_old_checkpoints(root, step, run=run, keep=keep, spared=spared)
    return root / f"step-{step:06d}"


def begin_checkpoint(root: Path, step: int, write: Callable[[Path], None], *, run: str | None) -> Path | None:
    """Writes files of a checkpoint into a folder with a temporary name; the arguments are those of write_checkpoint.

    Returns: the folder, for `finish_checkpoint`; None = the checkpoint is there already.
    Raises: CheckpointError: as write_checkpoint.
    """
    final = root / f"step-{step:06d}"
    tmp = temporary_path(final)
    with _removed_on_error(root, step, tmp):
        root.mkdir(parents=True, exist_ok=True)
        if _is_there(final, run):
            return None
        tmp.mkdir()
        write(tmp)
    return tmp


def finish_checkpoint(
    root: Path, step: int, folder: Path, *, run: str | None, known: Mapping[str, str] | None = None
) -> None:
    """Adds the checksums, flushes the files to disk, gives the folder its name, and moves `latest`.

    Args: folder: from `begin_checkpoint`. known: checksums that other processes have computed. The others: see
        write_checkpoint.
    Raises: CheckpointError: as write_checkpoint.
    """
    final = root / f"step-{step:06d}"
    with _removed_on_error(root, step, folder):
        _write_sums(folder, run=run, step=step, known=known or {})
        _sync(folder)
        folder.rename(final)
        _fsync(root)
    write_pointer(root, final.name)


def remove_old_checkpoints(
    root: Path, step: int, *, run: str | None, keep: int | None, spared: Iterable[int] = ()
) -> None:
    """Removes the oldest checkpoints of a run. Args: step: the newest one. The others: see write_checkpoint."""
    kept = {root / f"step-{other:06d}" for other in (step, *spared)}
    own = [p for p in step_folders(root) if (p / "run.pt").is_file() and read_run_id(p) == run]
    for old in own[: -keep or None] if keep else []:
        if old not in kept:
            try:
                remove_checkpoint(old)
            except OSError as error:
                log.warning("the old checkpoint %s can't be removed and stays: %s", old, error)


@contextmanager
def _removed_on_error(root: Path, step: int, folder: Path) -> Iterator[None]:
    """Returns a context that removes an unfinished checkpoint after an error; those of a full disk become
    CheckpointErrors.
    """
    try:
        yield
    except BaseException as e:
        remove_path(folder)
        if _is_disk_error(e):
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {root}: {e}; earlier ones are kept. Make "
                "room or fix its permissions, then resume with trainer.resume=latest"
            ) from e
        raise


def _is_there(final: Path, run: str | None) -> bool:
    """Returns whether a run has this checkpoint already. A folder of this name that is not a checkpoint is renamed."""
    if not os.path.lexists(final):
        return False
    if final not in list_checkpoints(final.parent):
        _move_aside(final)
        return False
    if read_run_id(final) != run:
        raise CheckpointError(
            f"{final} belongs to another run, which wrote it meanwhile; end that run or move its folders away, "
            "and give each run a trainer.checkpoint_root_directory of its own"
        )
    if (final / "run.pt").is_file():
        return True
    _move_aside(final)
    return False


def write_folder_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder, whole or not at all. It replaces the folder of this name.

    Args: path: the folder. write: writes the files into a folder.
    Raises: CheckpointError: it could not be written; the old one stays.
    """
    tmp = temporary_path(path)
    old = tmp.with_name(f"{tmp.name}.old")
    try:
        _write_and_sync(tmp, write)
        if os.path.lexists(path):
            path.rename(old)
        tmp.rename(path)
        _fsync(path.parent)
    except BaseException as e:
        if os.path.lexists(old) and not os.path.lexists(path):
            with suppress(OSError):
                old.rename(path)
        remove_path(tmp)
        if _is_disk_error(e):
            raise CheckpointError(
                f"{path} could not be written: {e}; make room or fix its permissions, then resume with "
                "trainer.resume=latest"
            ) from e
        raise
    remove_path(old)


def _is_disk_error(error: BaseException) -> bool:
    """Returns whether an error means that a file could not be written; each library raises its own class."""
    if isinstance(error, OSError | SafetensorError):
        return True
    return type(error) in (Exception, RuntimeError) and _FULL.search(str(error)) is not None


def write_with_checksums(folder: Path, write: Callable[[Path], None], *, run: str | None, step: int) -> None:
    """Writes the files of a step into a folder, with the id of the run and the checksum of every file."""
    write(folder)
    _write_sums(folder, run=run, step=step)


def _write_sums(folder: Path, *, run: str | None, step: int, known: Mapping[str, str] | None = None) -> None:
    """Writes run.json and sums.json. Args: known: checksums by the path in the folder, which are not computed again."""
    if run is not None:
        (folder / _RUN).write_text(json.dumps({"run": run, "step": step}) + "\n")
    names = (p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file())
    sums = {name: (known or {}).get(name) or file_sum(folder / name) for name in names}
    (folder / _SUMS).write_text(json.dumps({"format": CHECKPOINT_FORMAT, "sums": sums}, indent=1) + "\n")


def file_sum(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_checkpoint(folder: Path, needs: Iterable[str] = ()) -> None:
    """Compares every file of a checkpoint with its checksum.

    Args: folder: a checkpoint; without sums.json there is only a warning. needs: files that it must have.
    Raises: CheckpointError: a file is missing or has changed.
    """
    path = folder / _SUMS
    advice = "resume from an earlier step-* folder"
    if missing := [name for name in needs if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / missing[0]} is missing from its checkpoint; {advice}")
    if not path.is_file():
        log.warning("%s has no %s, so its files can't be checked for changes", folder, _SUMS)
        return
    try:
        manifest = read_json(path)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise ValueError("no mapping of names to checksums")
        check_format(path, manifest.get("format"), weights=folder)
        sums = manifest.get("sums")
        if not isinstance(sums, dict) or not all(isinstance(x, str) for x in sums.values()):
            raise ValueError("no mapping of names to checksums")
        if outside := [n for n in sums if "\0" in n or ".." in PurePosixPath(n).parts or n.startswith("/")]:
            raise ValueError(f"{outside[0]!r} is not a file of the checkpoint")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} can't be read ({e}); {advice}") from e
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing from its checkpoint; {advice}")
        if (actual := file_sum(folder / name)) != expected:
            raise CheckpointError(
                f"{folder / name} has changed since it was written: its SHA-256 is {actual[:12]}..., sums.json has "
                f"{expected[:12]}...; {advice}, or, if you changed it yourself, delete sums.json"
            )


def _write_and_sync(folder: Path, write: Callable[[Path], None]) -> None:
    """Creates a folder with its files, flushed to disk, with the permissions of the process's umask."""
    folder.mkdir()
    write(folder)
    _sync(folder)


def _sync(folder: Path) -> None:
    """Flushes a folder and its files to disk, with the permissions of the process's umask."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for place, _, files in os.walk(folder):
        for name in files:
            (Path(place) / name).chmod(mode)
            _fsync(Path(place) / name)
        _fsync(Path(place))


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a half removed one is never taken for whole."""
    gone = temporary_path(folder)
    folder.rename(gone)
    remove_path(gone)


def write_pointer(root: Path, name: str, pointer: str = "latest") -> None:
    """Writes the name of a checkpoint to a text file in the folder of the checkpoints, atomically."""
    write_atomic(root / pointer, f"{name}\n".encode())


def check_format(path: Path, number: Any, *, weights: Path) -> None:
    """Checks that this release reads the format of a checkpoint's file.

    Args: path: the file. number: the format that it holds. weights: the folder of the model, for the message.
    Raises: CheckpointError: another number, or no number.

    >>> check_format(Path("run.pt"), CHECKPOINT_FORMAT, weights=Path("actor"))
    """
    if type(number) is not int or number != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} has format {number!r:.40}, and this release of whet reads format {CHECKPOINT_FORMAT}; resume with "
            f"the release that wrote it, or start a new run from its weights: actor.model={weights}"
        )


def step_number(folder: Path) -> int | None:
    """Returns the step in a folder's name; None if it is not the name of a checkpoint.

    >>> step_number(Path("step-000100")), step_number(Path("step-000100.broken")), step_number(Path("step-0000100"))
    (100, None, None)
    """
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match and folder.name == f"step-{int(match[1]):06d}" else None


def read_run_id(folder: Path) -> str | None:
    """Returns the id of the run that wrote a checkpoint; None if it is not recorded."""
    try:
        record = read_json(folder / _RUN)
    except (OSError, ValueError):
        return None
    name = record.get("run") if isinstance(record, dict) else None
    return name if isinstance(name, str) else None


def step_folders(root: Path) -> list[Path]:
    """Returns the folders with a checkpoint's name, oldest step first."""
    folders = [(step, p) for p in root.glob("step-*") if (step := step_number(p)) is not None] if root.is_dir() else []
    return [p for _, p in sorted(folders)]


def list_checkpoints(root: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest step first. Files of them may have been removed since."""
    return [p for p in step_folders(root) if (p / "run.pt").is_file() or (p / _SUMS).is_file()]


def clean_root(root: Path) -> None:
    """Removes half-written files of killed processes, and renames folders that are not checkpoints but named so."""
    for p in list(root.iterdir()) if root.is_dir() else []:
        if is_temporary(p.name):
            remove_path(p)
    there = list_checkpoints(root)
    for p in step_folders(root):
        if p not in there:
            _move_aside(p)


def _move_aside(folder: Path) -> None:
    """Renames a folder that is not a checkpoint to <name>.broken."""
    n, aside = 1, folder.with_name(f"{folder.name}.broken")
    while os.path.lexists(aside):
        n += 1
        aside = folder.with_name(f"{folder.name}-{n}.broken")
    folder.rename(aside)
    log.warning("%s is not a checkpoint, since files of it are missing; it is kept as %s", folder, aside.name)


def find_checkpoint(resume: str, root: Path | None) -> Path | None:
    """Returns the checkpoint that `resume` names.

    Args: resume: "latest", or a folder. root: the run's checkpoints.
    Returns: the folder; None if "latest" finds none: the run then starts from the beginning.
    Raises: CheckpointError: the folder is not a checkpoint, or the newest one has no run.pt; it is not skipped.
    """
    if resume != "latest":
        path = Path(resume)
        if not (path / "run.pt").is_file():
            missing = path / "run.pt"
            check_access(missing)
            raise CheckpointError(f"resume={resume!r} is not a checkpoint: {missing} is missing; give a step-* folder")
        return path
    if root is None:
        raise CheckpointError("resume='latest' needs a trainer.run_dir or a checkpoint_root_directory to look in")
    pointer = root / "latest"
    try:
        name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    except OSError as error:
        raise CheckpointError(f"{pointer} can't be read: {error}; fix its permissions or remove it") from error
    there = list_checkpoints(root)
    for p in step_folders(root):
        if p not in there:
            log.warning("%s is ignored: it has neither run.pt nor sums.json, so it is not a checkpoint", p)
    if not there:
        return None
    newest = next((p for p in there if p.name == name), there[-1])
    if newest.name == name and newest != there[-1]:
        log.warning(
            "%s points to %s; the newer %s is ignored and its steps will be run again; trainer.resume=%s resumes from "
            "there instead",
            pointer,
            name,
            there[-1].name,
            there[-1],
        )
    if name not in ("", newest.name):
        log.warning("%s points to %.80r, which is gone; using %s", pointer, name, newest)
    if not (newest / "run.pt").is_file():
        whole = [p for p in there if (p / "run.pt").is_file()]
        other = f"resume with trainer.resume={whole[-1]}" if whole else "start a new run in another folder"
        raise CheckpointError(f"{newest / 'run.pt'} is missing from the newest checkpoint; put it back, or {other}")
    return newest


def read_state(path: Path, *, needs: Iterable[str] = ()) -> dict[str, Any]:
    """Reads a .pt file of plain containers and tensors.

    Args: path: the file. needs: keys that it must have.
    Raises: CheckpointError: it is missing, cut short or pickled, or holds something else.
    """
    import torch  # here and below, since `whet push` looks at checkpoints and needs no torch

    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as e:
        why = format_exception(e)
        raise CheckpointError(f"{path} can't be read ({why}); resume from an earlier step-* folder") from e
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} has an unexpected format: a {type(state).__name__}, not a dict; resume from another step-* folder"
        )
    if missing := [n for n in needs if n not in state]:
        raise CheckpointError(
            f"{path} has an unexpected format: no {', '.join(missing)}; resume from another step-* folder"
        )
    return state


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Writes plain containers and tensors as `read_state` reads them.

    Raises: OSError: it could not be written. torch.save would raise a RuntimeError without the reason.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    path.write_bytes(buffer.getbuffer())


def save_weights(module: nn.Module, path: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Writes parameters and persistent buffers, each shared tensor once, with masters in place of parameters."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {**named_weights(module), **(masters or {})}
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def load_weights(module: nn.Module, path: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Loads what `save_weights` wrote into the module and its masters, in place.

    Raises: CheckpointError: unreadable, a name missing or left over, or another shape; nothing is changed then.
    """
    import torch
    from safetensors.torch import load_file

    from whet.util.tensor_subclasses import copy_full_tensor

    targets = named_weights(module)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} can't be read ({e}); resume from an earlier step-* folder") from e
    check_same_weights(path, targets, {name: tensor.shape for name, tensor in tensors.items()})
    with torch.no_grad():
        for name, t in targets.items():
            if masters and name in masters:
                copy_full_tensor(masters[name], tensors[name])
            copy_full_tensor(t, tensors[name])


def check_same_weights(path: Path, targets: Mapping[str, Tensor], found: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckpointError if saved weights have other names or shapes. Args: found: name -> shape in the file."""
    if unmatched := sorted(targets.keys() ^ found.keys()):
        raise CheckpointError(
            f"{path} holds another model: {unmatched[0]!r} is on one side only ({len(unmatched)} such names)"
        )
    for name, t in targets.items():
        if t.shape != found[name]:
            raise CheckpointError(f"{path}: {name} is {tuple(found[name])} there and {tuple(t.shape)} here")


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers, each shared tensor once, by their full names."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, m in module.named_modules()
        for name, buffer in m._buffers.items()
        if buffer is not None and name not in m._non_persistent_buffers_set
    }
    return {**dict(module.named_parameters()), **buffers}
