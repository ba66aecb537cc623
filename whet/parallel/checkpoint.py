"""Checkpoint folders: whole or absent, the last few kept, read without pickle.

    checkpoints/step-000100/{actor/{model.safetensors, optimizer.safetensors, state.pt}, run.pt, sums.json}
    checkpoints/latest                      a text file: "step-000100"

A folder is written under a temporary name, flushed to disk, and renamed; `latest` moves after that. A killed process
leaves at most a temporary folder, which the next run sweeps away. Tensors lie in safetensors, the rest in files read
with weights_only=True. `sums.json` has the SHA-256 of every file, so that a bit lost on a disk is seen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whet.errors import CheckpointError

__all__ = [
    "checkpoints",
    "discard",
    "find_checkpoint",
    "load_state",
    "publish",
    "read_state",
    "save_state",
    "saved",
    "sweep",
    "verify",
    "write_folder",
]

log = logging.getLogger("whet")

_STEP = re.compile(r"step-(\d{6,})")
_SUMS = "sums.json"


def publish(root: Path, step: int, write: Callable[[Path], None], *, keep: int | None = None) -> Path:
    """Writes one checkpoint folder that is either whole or absent, then moves `latest`, then drops the oldest.

    Args: root: the folder of checkpoints. step: its number. write: fills the folder it is given. keep: folders to
        keep, the new one included; None = all.
    Returns: root/step-<step>. A folder of that step that is already there is left as it is: a step's state is one.
    Raises: CheckpointError: it could not be written (a full disk); nothing half-written stays.
    """
    root.mkdir(parents=True, exist_ok=True)
    final, tmp = root / f"step-{step:06d}", root / f".tmp-{step:06d}-{uuid.uuid4().hex[:8]}"
    if not final.exists():
        try:
            _filled(tmp, lambda folder: _summed(folder, write))
            tmp.rename(final)
            _fsync(root)
        except BaseException as e:
            shutil.rmtree(tmp, ignore_errors=True)
            if isinstance(e, (OSError, SafetensorError)):
                raise CheckpointError(f"checkpoint of step {step} could not be written to {root}: {e}") from e
            raise
    _point(root, final.name)
    for old in checkpoints(root)[: -keep or None] if keep else []:
        if old != final:
            discard(old)
    return final


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder that is whole or absent, in place of the one that has its name.

    Args: path: the folder. write: fills the folder it is given.
    Raises: CheckpointError: it could not be written; the old one stays.
    """
    tmp, old = (path.with_name(f".{path.name}.{word}") for word in ("tmp", "old"))
    for left in (tmp, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        _filled(tmp, write)
    except BaseException as e:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(e, (OSError, SafetensorError)):
            raise CheckpointError(f"{path} could not be written: {e}; make room, then trainer.resume=latest") from e
        raise
    if path.exists():
        path.rename(old)
    tmp.rename(path)
    _fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _summed(folder: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder, and notes the checksum of every file."""
    write(folder)
    sums = {p.relative_to(folder).as_posix(): _sum(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / _SUMS).write_text(json.dumps(sums, indent=1) + "\n")


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> None:
    """Reads every file of a checkpoint and compares it with what was written.

    Args: folder: a checkpoint; one without sums.json (made by hand) passes.
    Raises: CheckpointError: a file is missing or has changed.
    """
    path = folder / _SUMS
    if not path.is_file():
        return
    advice = "resume from an earlier step-* folder"
    try:
        sums = json.loads(path.read_text())
        if not isinstance(sums, dict) or not all(isinstance(x, str) for x in sums.values()):
            raise ValueError("no mapping of names to checksums")
    except ValueError as e:
        raise CheckpointError(f"{path} can't be read ({e}); {advice}") from e
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing from its checkpoint; {advice}")
        if (found := _sum(folder / name)) != expected:
            raise CheckpointError(
                f"{folder / name} is not what was written: its SHA-256 is {found[:12]}..., sums.json has "
                f"{expected[:12]}...; {advice}, or, if you changed it yourself, delete sums.json"
            )


def _filled(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes a folder and what is in it, on the disk, as readable as the process's umask lets files be."""
    folder.mkdir()
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    write(folder)
    for place, _, files in os.walk(folder):
        for name in files:
            (Path(place) / name).chmod(mode)
            _fsync(Path(place) / name)
        _fsync(Path(place))


def discard(folder: Path) -> None:
    """Removes a checkpoint. It loses its name first: one that a kill left half removed must not pass for whole."""
    gone = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _point(root: Path, name: str) -> None:
    """Moves `latest`, in one step."""
    link = root / ".latest.tmp"
    link.write_text(name + "\n")
    _fsync(link)
    link.replace(root / "latest")
    _fsync(root)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints under a folder, oldest step first."""
    found = [p for p in root.glob("step-*") if _STEP.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=lambda p: int(p.name[5:]))


def saved(root: Path) -> list[Path]:
    """The checkpoints under a folder that a run has written, a file of which may have gone since, oldest step first."""
    return [p for p in checkpoints(root) if (p / "run.pt").is_file() or (p / _SUMS).is_file()]


def sweep(root: Path) -> None:
    """Removes what killed processes left half-written."""
    for p in root.glob(".tmp-*") if root.is_dir() else []:
        shutil.rmtree(p, ignore_errors=True)


def find_checkpoint(resume: str, root: Path | None) -> Path | None:
    """The checkpoint that `resume` names.

    Args: resume: "latest", or a folder. root: the run's checkpoints.
    Returns: the folder; None where "latest" finds none: the run then starts from the beginning.
    Raises: CheckpointError: a folder that is no checkpoint; the newest one lacks its run.pt, and is not passed over.
    """
    if resume != "latest":
        path = Path(resume)
        if not (path / "run.pt").is_file():
            missing = path / "run.pt"
            raise CheckpointError(f"resume={resume!r} is no checkpoint: {missing} is missing; give a step-* folder")
        return path
    if root is None:
        raise CheckpointError("resume='latest' needs a run_dir or a checkpoint_root_directory to look in")
    pointer = root / "latest"
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    there = saved(root)
    for p in checkpoints(root):
        if p not in there:
            log.warning("%s is passed over: it has neither run.pt nor sums.json, so it is no checkpoint", p)
    if not there:
        return None
    newest = next((p for p in there if p.name == name), there[-1])
    if name not in ("", newest.name):
        log.warning("%s names %r, which is gone; taking %s", pointer, name, newest)
    if not (newest / "run.pt").is_file():
        whole = [p for p in there if (p / "run.pt").is_file()]
        other = f"trainer.resume={whole[-1]} goes on from there" if whole else "begin anew in another folder"
        raise CheckpointError(f"{newest / 'run.pt'} is missing from the newest checkpoint; put it back, or {other}")
    return newest


def read_state(path: Path, *, needs: Iterable[str] = ()) -> dict[str, Any]:
    """A .pt file of plain containers and tensors.

    Args: path: the file. needs: keys that it must have.
    Raises: CheckpointError: it is missing, cut short or pickled, or holds something else.
    """
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
        raise CheckpointError(f"{path} can't be read ({why}); resume from an earlier step-* folder") from e
    if missing := [n for n in needs if not isinstance(found, dict) or n not in found]:
        raise CheckpointError(f"{path} is not what this version saves: no {', '.join(missing)}; resume from another")
    return found


def save_state(module: nn.Module, path: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Writes parameters and persistent buffers, each shared tensor once, masters in place of parameters."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **_buffers(module), **(masters or {})}
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def load_state(module: nn.Module, path: Path, masters: Mapping[str, Tensor] | None = None) -> None:
    """Reads what `save_state` wrote into the module and its masters, in place.

    Raises: CheckpointError: unreadable, a name missing or left over, or another shape; nothing is changed then.
    """
    targets: dict[str, Tensor] = {**dict(module.named_parameters()), **_buffers(module)}
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} can't be read ({e}); resume from an earlier step-* folder") from e
    if odd := sorted(targets.keys() ^ found.keys()):
        raise CheckpointError(f"{path} holds another model: {odd[0]!r} is on one side only ({len(odd)} such names)")
    for name, t in targets.items():
        if t.shape != found[name].shape:
            raise CheckpointError(f"{path}: {name} is {tuple(found[name].shape)} there and {tuple(t.shape)} here")
    with torch.no_grad():
        for name, t in targets.items():
            if masters and name in masters:
                masters[name].copy_(found[name])
            t.copy_(found[name])


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, under their full names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, m in module.named_modules()
        for name, buffer in m._buffers.items()
        if buffer is not None and name not in m._non_persistent_buffers_set
    }
