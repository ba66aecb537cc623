"""Runs programs that a model wrote, confined: no network, no files but an empty folder, and limits.

    with Sandbox() as sandbox:
        sandbox.run("print(sum(map(int, input().split())))", stdin="1 2 3").stdout

A program can't start processes, send signals to others, open sockets, read the environment or any file but the
interpreter's, change modes or owners, or raise its limits. It needs no root and no container: Landlock and seccomp are
parts of Linux. Where the machine has neither, a Sandbox is refused.
Programs of several processes and in other languages: command_sandbox.py. Left out on purpose: secrecy of what `stat`
tells about files elsewhere, which Landlock does not hide.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import IO, Any, Literal, cast

from whet.envs import sandbox_server
from whet.envs.sandbox_server import missing_protection
from whet.errors import ConfigError, InfrastructureError

__all__ = ["Sandbox", "SandboxLimits", "SandboxResult", "check_names", "missing_protection"]

Status = Literal["finished", "failed", "timeout", "output", "threads", "memory", "files"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What a program may use; one that goes beyond is killed."""

    seconds: float = 5.0
    """By the clock."""
    cpu_seconds: float = 5.0
    """Of a processor."""
    memory_mb: float = 512.0
    """Of addresses of a process, libraries included, and of memory of all its processes together."""
    output_bytes: int = 65_536
    """Of standard output and standard error together."""
    files_mb: float = 64.0
    """Of files in its folder."""
    threads: int = 64
    """At a time, of all processes together."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value}: a limit of the sandbox is a number above 0")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    status: Status
    """"finished" = by itself with exit code 0, "failed" = otherwise by itself; else the limit that it went beyond."""
    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    memory_mb: float


class Sandbox:
    """Confined processes that run programs in Python, with this interpreter and its packages.

    Args:
        limits: of each program.
        workers: programs that run at a time; `run` waits for a free one. Each worker is a process.
        unconfined: run programs with your own permissions where the machine can't confine them. The limit of
            cpu_seconds does not hold then.
    Raises: ConfigError: the machine can't confine programs and `unconfined` is false.

    A program starts in a few milliseconds, since each is a fork of a process that waits.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1, unconfined: bool = False) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers}: a sandbox needs 1 or more")
        missing = missing_protection()
        if missing is not None and not unconfined:
            raise ConfigError(
                f"programs of a model can't be confined here: {missing}; take another machine, or pass unconfined=True "
                "to run them with your own permissions, files and network"
            )
        self.limits = limits or SandboxLimits()
        self._confined = missing is None
        self._workers = [_Worker(self._confined) for _ in range(workers)]
        self._lock = threading.Lock()
        self._free = deque(self._workers)
        self._waiting: deque[queue.SimpleQueue[_Worker]] = deque()
        """Threads that wait for a worker, the first first: a lock or a queue would let others overtake them."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Runs a program. Threads may call it at the same time.

        Args: code: the program's text. stdin: what it reads. files: name -> text, of files in its folder.
        Raises: ConfigError: a file's name leaves the folder. InfrastructureError: the sandbox itself failed, not the
            program.
        """
        check_names(files or {})
        request = {"code": code, "stdin": stdin, "files": dict(files or {}), "limits": asdict(self.limits)}
        worker = self._take()
        try:
            answer = worker.ask(request)
        except (OSError, EOFError, ValueError) as error:
            worker.close()
            self._workers.remove(worker)
            worker = _Worker(self._confined)
            self._workers.append(worker)
            ended = f"the sandbox's process ended during a program ({error}); it is replaced"
            raise InfrastructureError(ended) from error
        finally:
            self._give(worker)
        if "error" in answer:
            raise InfrastructureError(f"the sandbox could not run a program: {answer['error']}")
        return SandboxResult(**answer)

    def _take(self) -> _Worker:
        """Returns a free worker, once those that came before have theirs."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            place: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
            self._waiting.append(place)
        return place.get()

    def _give(self, worker: _Worker) -> None:
        """Passes a worker on to the first that waits."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(worker)
            else:
                self._free.append(worker)

    def close(self) -> None:
        """Ends the processes; programs that still run are killed."""
        for worker in self._workers:
            worker.close()


def check_names(files: Mapping[str, str]) -> None:
    """Raises ConfigError: a file's name leaves the folder."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or name.startswith(".stdin"):
            raise ConfigError(f"file {name!r}: name a file inside the program's folder, such as data/a.txt")


@functools.lru_cache(maxsize=1)
def _starter(pid: int) -> ThreadPoolExecutor:
    """Returns the thread of this process that starts workers.

    A worker is killed when the thread that started it ends, so this has to be one that lasts. Args: pid: a fork has
    none of its parent's threads.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="whet-sandbox")


class _Worker:
    """A process of sandbox_server.py and the way to it."""

    def __init__(self, confined: bool) -> None:
        self._connection, other = socket.socketpair()
        with other:
            mode = "confined" if confined else "open"
            start = functools.partial(
                subprocess.Popen,
                [sys.executable, "-I", sandbox_server.__file__, str(other.fileno()), mode],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._process = _starter(os.getpid()).submit(start).result()
        self._stream = cast(IO[bytes], self._connection.makefile("rwb"))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        self._stream.write(struct.pack(">I", len(body)) + body)
        self._stream.flush()
        head = self._stream.read(4)
        if len(head) < 4:
            raise EOFError("no answer")
        return json.loads(self._stream.read(struct.unpack(">I", head)[0]))

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()
        self._connection.close()
        self._process.kill()
        self._process.wait()
