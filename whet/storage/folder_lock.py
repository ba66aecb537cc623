"""FolderLock: only one process at a time writes to a folder. The lock ends with the process, however it ends.

Not supported: file systems without locks (they raise an error), and processes on other hosts if the network file system
does not share locks.
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
    """Holds a folder's `.lock` until it is released or the process ends.

    The kernel's lock ends with the process, but a forked child can keep it alive. So the file names the process that
    took the lock, and the file is replaced if that process has ended.

    Args: folder: an existing folder. setting: the configuration key of the folder, for messages.
    Raises: ConfigError: another process holds the lock, or `.lock` is a link or not a regular file. OSError: the file
        can't be created or locked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     FolderLock(Path(folder), "trainer.run_dir").release()
    """

    def __init__(self, folder: Path, setting: str) -> None:
        self.path, self._setting = folder / ".lock", setting
        self._handle: int | None = self._acquire()

    def release(self) -> None:
        """Releases the lock."""
        if self._handle is not None:
            self._remove_and_close(self._handle)
            self._handle = None

    def _remove_and_close(self, handle: int) -> None:
        if _same_file(handle, self.path):  # another process may have taken the lock
            with suppress(OSError):
                self.path.unlink()
        os.close(handle)

    def _acquire(self) -> int:
        while True:
            handle = self._open()
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self._remove_stale(handle)
                continue
            except OSError as error:
                os.close(handle)
                raise OSError(f"{self.path} can't be locked: {error}") from error
            if not _same_file(handle, self.path):  # another process replaced it meanwhile
                os.close(handle)
                continue
            try:
                os.ftruncate(handle, 0)
                own = {"pid": os.getpid(), "host": socket.gethostname(), "started": _start_time(os.getpid())}
                os.pwrite(handle, json.dumps(own).encode(), 0)
            except BaseException:
                self._remove_and_close(handle)
                raise
            return handle

    def _remove_stale(self, handle: int) -> None:
        """Removes the file if its holder has ended. Raises ConfigError if the holder may still run."""
        try:
            holder = _holder(os.pread(handle, 4096, 0))
            if not holder or holder["host"] != socket.gethostname() or _is_alive(holder):
                who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
                raise ConfigError(
                    f"{self.path.parent} is in use by {who}; end it, or set another {self._setting}"
                ) from None
            if _same_file(handle, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def _open(self) -> int:
        """Opens the file, or creates it. It will be overwritten, so it must not be a link to another file."""
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
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(handle)
            raise refused
        return handle


def check_unlocked(folder: str | Path, setting: str) -> None:
    """Raises ConfigError if another process holds the lock of a folder, which may be absent.

    Args: folder: the folder. setting: its configuration key.
    """
    place = Path(folder).absolute()
    if os.path.lexists(place / ".lock"):
        with suppress(OSError):  # check_writable reports a folder that can't be written
            FolderLock(place, setting).release()


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def _holder(text: bytes) -> dict[str, Any] | None:
    """Returns the process that the file names; None if whet did not write the file."""
    try:
        holder = read_json(text)
    except ValueError:
        return None
    if not isinstance(holder, dict) or not isinstance(holder.get("host"), str):
        return None
    pid = holder.get("pid")
    return holder if type(pid) is int and 0 < pid < 2**31 else None


def _start_time(pid: int) -> str | None:
    """Returns the start time of a process in the kernel's ticks; None if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _is_alive(holder: Mapping[str, Any]) -> bool:
    """Returns whether the process that took the lock still runs; another process may have its number now."""
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return holder.get("started") in (None, _start_time(holder["pid"]))
