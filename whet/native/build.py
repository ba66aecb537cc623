"""Builds C++ sources with the machine's own compiler, caches the libraries, and loads them.

A source of kernels/ is built once per compiler, processor and version, in a few seconds. It runs in torch's OpenMP
threads. If there is no compiler, or WHET_NATIVE=0 is set, `load_library` returns the reason and torch is used instead.
Left out on purpose: systems other than Linux, and a wheel with binaries: one source fits every processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from whet.errors import ConfigError

__all__ = [
    "Library",
    "Unavailable",
    "cache_folder",
    "kernels_enabled",
    "load_functions",
    "load_library",
    "log_fallback",
    "unsupported_cpu",
]

log = logging.getLogger("whet")
K = TypeVar("K")

SOURCE = Path(__file__).with_name("kernels")
"""Folder of the sources."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
         "-ffp-contract=off", "-w")  # fmt: skip
ON, OFF = ("", "1", "true", "on", "yes"), ("0", "false", "off", "no")
"""Valid values of WHET_NATIVE."""
BUILD_S = 600.0
"""Time limit of the compiler in seconds."""


@dataclass(frozen=True)
class Unavailable:
    """The reason why kernels can't be used; loaders return it in place of the kernels.

    >>> str(Unavailable("no C++ compiler (g++) is installed"))
    'no C++ compiler (g++) is installed'
    """

    reason: str
    """Why torch is used instead."""

    def __str__(self) -> str:
        return self.reason


class Library(NamedTuple):
    """A library that is loaded."""

    handle: ctypes.CDLL
    compiler: str
    """First line of the compiler's --version."""


def load_library(source: str) -> Library | Unavailable:
    """Loads a library of kernels/, and builds it first if it is not in the cache.

    Args: source: the name of its .cpp file. Returns: the library, or the reason why there is none.

    >>> isinstance(load_library("decode"), (Library, Unavailable))
    True
    """
    if not kernels_enabled():
        return Unavailable(f"WHET_NATIVE={os.environ['WHET_NATIVE']} switches them off")
    if platform.system() != "Linux":
        return Unavailable(f"no native kernels on {platform.system()}")
    runtime = _openmp()
    if runtime is None:
        return Unavailable("torch has no GNU OpenMP here")
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or [x for x in ("g++", "c++") if shutil.which(x)][:1]
        if not compiler:
            return Unavailable("no C++ compiler (g++) is installed")
        version = _run(*compiler, "--version").splitlines()[0]
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # torch's own: a second runtime would start more threads
        return Library(_load_or_build(source, compiler, version), version)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:  # ValueError: quotes in $CXX
        message = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
        lines = message.strip().splitlines() or [type(error).__name__]
        return Unavailable(f"building them failed: {next((x for x in lines if 'error' in x), lines[0])}")


def kernels_enabled() -> bool:
    """Returns whether WHET_NATIVE enables the kernels; unset, it does. Raises: ConfigError: an invalid value."""
    word = os.environ.get("WHET_NATIVE", "")
    if word.lower() not in (*ON, *OFF):
        raise ConfigError(f"WHET_NATIVE={word} in the environment must be 1 or 0; set it to 0 to disable the kernels")
    return word.lower() in ON


def load_functions(source: str, make: Callable[[Library], K]) -> K | Unavailable:
    """Loads a library and wraps it. Args: make: wraps its functions. Returns: the wrapper, or why there is none."""
    library = load_library(source)
    if isinstance(library, Unavailable):
        return library
    try:
        return make(library)
    except (OSError, AttributeError) as error:  # a damaged file, or another version's
        return Unavailable(f"loading them failed: {error}")


def unsupported_cpu() -> Unavailable | None:
    """Returns why the kernels of training are disabled: they are untested on this kind of processor; None = they are
    on.
    """
    machine = platform.machine()
    is_tested = machine in ("x86_64", "AMD64")
    return None if is_tested else Unavailable(f"disabled on {machine}: untested there")


@functools.cache
def log_fallback(name: str, reason: str) -> None:
    """Logs once why torch is used instead of a kernel."""
    log.info("%s: using torch instead of the C++ kernels: %s", name, reason)


def cache_folder() -> Path:
    """Returns where built kernels are kept: whet/ in $XDG_CACHE_HOME, or in ~/.cache. Raises: OSError: there is no
    home.

    A relative $XDG_CACHE_HOME counts as unset, as its specification says: the files are loaded as code, and others may
    be able to write in the working folder.

    >>> cache_folder().name
    'whet'
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = root if root.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # neither $HOME nor a user of this number
        raise OSError(str(error)) from error
    if not root.is_absolute():
        raise OSError(f"HOME={os.environ.get('HOME')} is not an absolute path")
    return root / "whet"


def _openmp() -> str | None:
    """Returns the GNU OpenMP library that torch has loaded; callers have imported torch."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((path for line in maps if "libgomp" in (path := line.split(maxsplit=5)[-1])), None)


def _run(*command: str) -> str:
    """Returns the standard output of a command. Raises: OSError, SubprocessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S).stdout


def _load_or_build(source: str, compiler: list[str], version: str) -> ctypes.CDLL:
    """Returns the library, after a build if it is not in the cache. Raises: OSError, SubprocessError."""
    sources = (x.read_text(encoding="utf-8") for x in sorted(SOURCE.iterdir()) if x.suffix in (".cpp", ".h"))
    parts = (*sources, version, shlex.join(compiler), " ".join(FLAGS), _processor())
    name = f"{source}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    try:
        path = cache_folder() / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(path.parent):
            raise PermissionError(f"{path.parent} can be written by others")
        if (library := _load_cached(path)) is not None:
            return library
        temporary = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:  # no home, or one that can't be written, or that others can write
        path, temporary = Path(name), tempfile.TemporaryDirectory(prefix="whet-")
        log.warning("native kernels can't be cached and are built for this process only: %s", error)
    with temporary as folder, _build_lock(path):
        if (library := _load_cached(path)) is not None:  # another process of this host has built it
            return library
        log.info("building native kernels (%s) with %s: some seconds, once", source, compiler[0])
        object_file, library_path = Path(folder) / f"{source}.o", Path(folder) / name
        _run(*compiler, *FLAGS, "-c", str(SOURCE / f"{source}.cpp"), "-o", str(object_file))
        _run(*compiler, "-shared", str(object_file), "-o", str(library_path))  # OpenMP is torch's, found at load time
        if library_path.parent.parent == path.parent:
            library_path = library_path.replace(path)  # atomic, even if another process builds it too
        return ctypes.CDLL(str(library_path))  # it stays loaded after the folder is deleted


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """Returns a library of the cache; None = it is not there, or the file is damaged."""
    if path.exists() and _is_private(path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Returns a context in which no other process of this host builds a library for the same cache."""
    with contextlib.ExitStack() as stack:
        if path.is_absolute():  # else it is of this process only
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            with contextlib.suppress(OSError):  # a file system without locks: both build
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _is_private(path: Path) -> bool:
    """Returns whether no other user can write the file or folder; its content is loaded as code."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _processor() -> str:
    """Returns the processor features that -march=native uses: machines with other processors may share a cache."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in info if line.startswith(("flags", "Features"))), "") + platform.machine()
