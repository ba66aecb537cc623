"""The lock of a folder: held by one process while it writes there, free when it ends, however it ends.

Left out on purpose: file systems without locks (an error is raised), and other hosts where a network's file system does
not carry them.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.storage.files import read_json

__all__ = ["FolderLock", "check_unlocked"]


class FolderLock:
    """Holds a folder's `.lock` until it is released or the process dies.

    The system's lock ends with the process, but a forked child would keep it alive: where the process named in the
    file is gone, the file is replaced.

    Args: folder: it exists. setting: the key that names the folder, for the messages.
    Raises: ConfigError: another process holds it; `.lock` is a link or not a regular file. OSError: it can't be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     FolderLock(Path(folder), "trainer.run_dir").release()
    """

    def __init__(self, folder: Path, setting: str) -> None:
        self.path, self._setting = folder / ".lock", setting
        self._handle: int | None = self._taken()

    def release(self) -> None:
        """Releases the lock."""
        if self._handle is not None:
            self._let_go(self._handle)
            self._handle = None

    def _let_go(self, handle: int) -> None:
        if _same_file(handle, self.path):  # not one by which somebody took the folder over
            with suppress(OSError):
                self.path.unlink()
        os.close(handle)

    def _taken(self) -> int:
        while True:
            handle = self._opened()
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self._check_gone(handle)
                continue
            except OSError as error:
                os.close(handle)
                raise OSError(f"{self.path} can't be locked: {error}") from error
            if not _same_file(handle, self.path):  # one that was replaced meanwhile
                os.close(handle)
                continue
            try:
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_me()).encode(), 0)
            except BaseException:
                self._let_go(handle)
                raise
            return handle

    def _check_gone(self, handle: int) -> None:
        """Takes the file away from a holder that has ended. Raises ConfigError where it may live."""
        try:
            holder = _holder(os.pread(handle, 4096, 0))
            if not holder or holder["host"] != socket.gethostname() or _alive(holder):
                who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
                raise ConfigError(
                    f"{self.path.parent} is in use by {who}; end it, or set another {self._setting}"
                ) from None
            if _same_file(handle, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def _opened(self) -> int:
        """The file, made if absent; it is written into, so it must be no other file by another name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        refused = ConfigError(
            f"{self.path} is a link or not a regular file, so it is not whet's lock; remove it, or set another "
            f"{self._setting}"
        )
        try:
            handle = os.open(self.path, flags, 0o644)
        except OSError as error:
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
                raise refused from error
            raise
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(handle)
            raise refused
        return handle


def check_unlocked(folder: str | Path, setting: str) -> None:
    """Raises ConfigError where another process holds a folder's lock. Args: folder: may be absent. setting: its key."""
    place = Path(folder).absolute()
    if os.path.lexists(place / ".lock"):
        with suppress(OSError):  # it can't be written: said where that is looked at
            FolderLock(place, setting).release()


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def _holder(text: bytes) -> dict[str, Any] | None:
    """Who holds the lock, as the file has it; None where whet did not write it."""
    try:
        found = read_json(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("host"), str):
        return None
    pid = found.get("pid")
    return found if type(pid) is int and 0 < pid < 2**31 else None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _alive(holder: Mapping[str, Any]) -> bool:
    """Whether the very process that took the lock still runs, not another with its number."""
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return holder.get("started") in (None, _started(holder["pid"]))
