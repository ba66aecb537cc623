"""The process that runs a model's programs: a script of its own, which imports the standard library alone.

A Sandbox starts it once. For each program it forks; the fork confines itself (capabilities, limits, Landlock, seccomp)
and then executes the text. Forking takes milliseconds where starting an interpreter takes tens of them. The server
holds no secret: it is started without the environment of the trainer, and a program sees a copy of its memory.

Protocol: four bytes of length, big endian, then JSON, in both directions; one request at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

__all__ = ["missing_protection", "watch"]

MACHINE = ("Linux", "x86_64")
_ALLOWED = (
    "read=0 write=1 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 rt_sigaction=13 "
    "rt_sigprocmask=14 rt_sigreturn=15 pread64=17 pwrite64=18 readv=19 writev=20 access=21 pipe=22 select=23 "
    "sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36 alarm=37 setitimer=38 getpid=39 "
    "sendto=44 recvfrom=45 shutdown=48 exit=60 uname=63 flock=73 fsync=74 fdatasync=75 ftruncate=77 getdents=78 "
    "getcwd=79 chdir=80 fchdir=81 rename=82 mkdir=83 rmdir=84 unlink=87 symlink=88 readlink=89 umask=95 "
    "gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 "
    "getppid=110 getpgrp=111 sigaltstack=131 arch_prctl=158 gettid=186 time=201 futex=202 sched_getaffinity=204 "
    "getdents64=217 set_tid_address=218 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231 "
    "epoll_wait=232 epoll_ctl=233 openat=257 mkdirat=258 newfstatat=262 unlinkat=263 renameat=264 symlinkat=266 "
    "readlinkat=267 faccessat=269 pselect6=270 ppoll=271 set_robust_list=273 epoll_pwait=281 eventfd2=290 "
    "epoll_create1=291 dup3=292 pipe2=293 preadv=295 pwritev=296 getcpu=309 renameat2=316 getrandom=318 membarrier=324 "
    "statx=332 rseq=334 close_range=436 faccessat2=439"
)
"""The system calls that a program may make, whatever their arguments; `_filter` adds those with a rule of their own.

Left out on purpose, so that they fail: fork and exec, signals to others, sockets, modes and owners of files, hard
links, limits, traces, keys, mounts, and all that a later kernel adds."""
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom", sys.prefix, sys.base_prefix)
"""Files and folders that a program may read."""
_POLL_S = 0.02
"""Seconds between looks at the threads and files of a program."""


def missing_protection() -> str | None:
    """Returns why this machine can't confine a program; None if it can."""
    if (platform.system(), platform.machine()) != MACHINE:
        return (
            f"programs are confined on {' '.join(MACHINE)} alone, and this is {platform.system()} {platform.machine()}"
        )
    abi = _libc().syscall(444, None, 0, 1)
    if abi < 1:
        return "the kernel has no Landlock (Linux 5.13 or later, with landlock among its security modules)"
    return None


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _confine(folder: Path, limits: dict[str, float]) -> None:
    """Confines this process for good: limits, no capabilities, no files but a folder, few system calls."""
    mb = 1 << 20
    cpu_s = max(1, int(limits["cpu_seconds"] + 0.999))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, and SIGKILL where that is ignored
    for which, value in (
        (resource.RLIMIT_AS, int(limits["memory_mb"] * mb)),
        (resource.RLIMIT_FSIZE, int(limits["files_mb"] * mb)),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (value, value))
    libc = _libc()
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(libc.syscall(126, header, none), "capset")
    _restrict_files(libc, folder)
    _filter(libc)


def _checked(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
    return result


def _restrict_files(libc: ctypes.CDLL, folder: Path) -> None:
    """Landlock: the interpreter's files may be read, the folder's read and written, nothing else opened."""
    abi = libc.syscall(444, None, 0, 1)
    rights = (1 << (13 if abi == 1 else 14 if abi == 2 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _checked(libc.syscall(444, attributes, len(attributes), 0), "landlock_create_ruleset")
    execute, write_file, read_file, read_dir = 1, 2, 4, 8
    of_file = execute | write_file | read_file | 1 << 14
    device = 1 << 15  # ioctl on devices
    read, everything = execute | read_file | read_dir, rights & ~device
    for path, allowed in (*((Path(p), read) for p in _READABLE), (folder, everything)):
        if not path.exists():
            continue
        place = os.open(path, os.O_PATH)
        allowed = allowed if path.is_dir() else allowed & of_file
        _checked(libc.syscall(445, rules, 1, struct.pack("=Qi", allowed & rights, place), 0), "landlock_add_rule")
        os.close(place)
    _checked(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _filter(libc: ctypes.CDLL) -> None:
    """seccomp: _ALLOWED, a few calls with bounded arguments; any other call fails with EPERM."""
    load, equal, at_least, any_bit, back, mask = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050000 | 38
    number, arch = 0, 4
    argument = lambda i, high=False: 16 + 8 * i + (4 if high else 0)
    step = lambda code, value, yes=0, no=0: struct.pack("HBBI", code, yes, no, value)

    def case(call: int, *tests: bytes) -> list[bytes]:
        """Returns a call that is allowed where the tests fall through; each jumps to the refusal by its `no`."""
        body = [*tests, step(back, allow), step(back, eperm)]
        return [step(equal, call, 0, len(body)), *body]

    def is_one_of(i: int, *values: int) -> list[bytes]:
        """Tests of argument i, followed by `allow` and `refuse`."""
        tests = [step(load, argument(i))]
        for k, value in enumerate(values):
            last = k == len(values) - 1
            tests.append(step(equal, value, len(values) - 1 - k, 1 if last else 0))
        return tests

    own = os.getpid()
    program = [
        step(load, arch),
        step(equal, 0xC000003E, 1, 0),
        step(back, kill),
        step(load, number),
        step(at_least, 0x40000000, 0, 1),  # the x32 calls
        step(back, kill),
        step(equal, 435, 0, 1),  # clone3: glibc takes clone then
        step(back, enosys),
        *case(56, step(load, argument(0)), step(any_bit, 0x10000, 0, 1)),  # clone: threads alone
        *case(234, *is_one_of(0, own)),  # tgkill
        *case(
            16, *is_one_of(1, 0x5401, 0x5421, 0x541B, 0x5451, 0x5413)
        ),  # ioctl: TCGETS FIONBIO FIONREAD FIOCLEX TIOCGWINSZ
        *case(72, *is_one_of(1, 0, 1, 2, 3, 4, 5, 6, 7, 1030)),  # fcntl: no owner, no signal, no lease
        *case(157, *is_one_of(0, 15, 16)),  # prctl: names of threads
        *case(  # socketpair: a connected pair of streams, as asyncio wants
            53,
            step(load, argument(0)),
            step(equal, 1, 0, 4),
            step(load, argument(1)),
            step(mask, 0xF),
            step(equal, 1, 0, 1),
        ),
        *case(  # prlimit64: read alone
            302,
            step(load, argument(2)),
            step(equal, 0, 0, 3),
            step(load, argument(2, high=True)),
            step(equal, 0, 0, 1),
        ),
    ]
    for item in _ALLOWED.split():
        program += [step(equal, int(item.partition("=")[2]), 0, 1), step(back, allow)]
    program.append(step(back, eperm))
    code = ctypes.create_string_buffer(b"".join(program), len(program) * 8)
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _checked(libc.prctl(22, 2, description, 0, 0), "seccomp")


def _execute(request: dict, folder: Path, out: int, err: int, confined: bool) -> None:
    """Runs the program in this process, and ends it; called in the fork."""
    os.setsid()
    stdin = os.open(folder / ".stdin", os.O_RDONLY)
    for source, target in ((stdin, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    (folder / ".stdin").unlink()
    os.closerange(3, 4096)
    os.chdir(folder)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
        signal.signal(name, signal.SIG_DFL)
    try:
        if confined:
            _confine(folder, request["limits"])
        code = 0
        sys.argv, sys.path[:] = ["program.py"], [str(folder), *sys.path]
        exec(compile(request["code"], "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
    except BaseException as error:
        code = 1
        at = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, at)  # without this file's own line
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _usage(pid: int, folder: Path, most: float) -> tuple[int, float, int]:
    """Returns the threads and the memory in MB of a process and all below it, and the bytes of the files in a
    folder.

    Args: most: threads are not counted further, so that the look at a fork bomb is quick.
    """
    threads, pages, todo = 0, 0, [pid]
    while todo and threads <= most:
        process = Path(f"/proc/{todo.pop()}")
        try:
            used, shared = (process / "statm").read_text().split()[1:3]
            pages += int(used) - int(shared)
            for task in (process / "task").iterdir():
                threads += 1
                todo += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
    size, folders = 0, [folder]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return threads, pages * resource.getpagesize() / 2**20, size


def _run(request: dict, confined: bool) -> dict:
    """Runs one program, and returns its result."""
    limits = request["limits"]
    folder = Path(tempfile.mkdtemp(prefix="whet-sandbox-"))
    try:
        for name, text in request["files"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        (folder / ".stdin").write_text(request["stdin"], encoding="utf-8", errors="replace")
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _execute(request, folder, out_end, err_end, confined)
            finally:
                os._exit(97)
        os.close(out_end)
        os.close(err_end)
        return watch(pid, out, err, folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(pid: int, out: int, err: int, folder: Path, limits: dict[str, float], *, is_tree: bool = False) -> dict:
    """Reads a program's output until it ends or goes beyond a limit, and then kills it.

    Args: pid: a child of this process. out, err: the ends of pipes, which are closed. folder: the program's. limits: a
        SandboxLimits. is_tree: the memory is that of all processes below it, as it was seen.
    Returns: the fields of a SandboxResult.
    """
    begun, most_seen = time.monotonic(), 0.0
    texts, room, stopped = {out: bytearray(), err: bytearray()}, int(limits["output_bytes"]), None
    open_ends, next_look = {out, err}, 0.0
    while stopped is None:
        left = limits["seconds"] - (time.monotonic() - begun)
        if left <= 0:
            stopped = "timeout"
            break
        if open_ends:
            for end in select.select(list(open_ends), [], [], min(left, _POLL_S))[0]:
                data = os.read(end, 65536)
                texts[end] += data
                if not data:
                    open_ends.discard(end)
        elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(min(left, 0.001))
        if sum(map(len, texts.values())) > room:
            stopped = "output"
        elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            if not select.select(list(open_ends), [], [], 0)[0]:
                break
        elif time.monotonic() >= next_look:
            next_look = time.monotonic() + _POLL_S
            threads, memory, size = _usage(pid, folder, limits["threads"])
            most_seen = max(most_seen, memory)
            used_now = {"threads": threads, "memory_mb": memory, "files_mb": size / 2**20}
            stopped = next((n.removesuffix("_mb") for n, value in used_now.items() if value > limits[n]), None)
    if stopped is not None:
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    os.close(out)
    os.close(err)
    code = os.waitstatus_to_exitcode(status)
    if stopped is None:
        of_cpu = code == -signal.SIGKILL and used.ru_utime + used.ru_stime > limits["cpu_seconds"] / 2
        out_of_time = code == -signal.SIGXCPU or of_cpu
        stopped = "finished" if code == 0 else "timeout" if out_of_time else "failed"
    return {
        "status": stopped,
        "exit_code": code,
        "stdout": texts[out][:room].decode("utf-8", "replace"),
        "stderr": texts[err][:room].decode("utf-8", "replace"),
        "seconds": time.monotonic() - begun,
        "memory_mb": most_seen if is_tree else used.ru_maxrss / 1024,
    }


def _serve(connection: socket.socket, confined: bool) -> None:
    """Answers requests until the other end is closed."""
    _libc().prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no server outlives the trainer
    stream = connection.makefile("rwb")
    while len(head := stream.read(4)) == 4:
        request = json.loads(stream.read(struct.unpack(">I", head)[0]))
        try:
            answer = _run(request, confined)
        except OSError as error:
            answer = {"error": str(error)}
        body = json.dumps(answer).encode()
        stream.write(struct.pack(">I", len(body)) + body)
        stream.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2] == "confined")
