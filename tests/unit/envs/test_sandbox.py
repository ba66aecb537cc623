"""The sandbox: what a program can do, and what it tries in vain."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from whet.envs import sandbox as module
from whet.envs.sandbox import Sandbox, SandboxLimits
from whet.envs.sandbox_server import missing_protection
from whet.errors import ConfigError, RewardError

MISSING = missing_protection()
confined = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(SandboxLimits(seconds=20, cpu_seconds=10, files_mb=4)) as sandbox:
        yield sandbox


@confined
@pytest.mark.parametrize(
    ("code", "stdin", "wanted"),
    [
        ("print(sum(map(int, input().split())))", "1 2 3", "6\n"),
        ("import sys; print(sys.stdin.read()[::-1])", "ä\U0001f600b", "b\U0001f600ä\n"),
        ("open('a.txt', 'w').write('x'); print(open('a.txt').read(), open('b/c.txt').read())", "", "x given\n"),
        ("import os; print(sorted(os.listdir('.')), sorted(os.environ))", "", None),
        ("import numpy; print(int((numpy.ones((50, 50)) @ numpy.ones(50)).sum()))", "", "2500\n"),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0.01, 5)))", "", "5\n"),
        ("import threading as t; h = t.Thread(target=print, args=(1,)); h.start(); h.join()", "", "1\n"),
        ("import tempfile; f = tempfile.TemporaryFile(dir='.'); f.write(b'1'); print(f.tell())", "", "1\n"),
        (
            "import re, json, math, random, datetime as d, collections, decimal; print(d.date(2000, 1, 1))",
            "",
            "2000-01-01\n",
        ),
        ("import sys; sys.exit(0)", "", ""),
    ],
)
def test_programs_that_tasks_ask_for_run(sandbox, code, stdin, wanted):
    result = sandbox.run(code, stdin=stdin, files={"b/c.txt": "given"})
    assert result.status == "finished" and result.exit_code == 0, result.stderr
    assert result.stdout == (wanted if wanted is not None else result.stdout)
    if wanted is None:
        names, variables = (re.findall(r"'([^']*)'", text) for text in result.stdout.split("]")[:2])
        assert names == ["b"] and set(variables) <= {
            "LANG",
            "LC_CTYPE",
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "PATH",
        }


@confined
def test_a_failure_is_told_as_python_tells_it(sandbox):
    result = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "sandbox_server" not in result.stderr
    result = sandbox.run("import sys; sys.exit('no')")
    assert (result.status, result.exit_code, result.stderr) == ("failed", 1, "no\n")
    assert sandbox.run("f(").stderr.endswith("SyntaxError: '(' was never closed\n")
    assert sandbox.run("import os; os.abort()").exit_code == -6


SECRET = "the trainer's secret"
ESCAPES = {
    "fork": "import os; os.fork()",
    "spawn": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "vfork": "import ctypes; r = ctypes.CDLL(None).syscall(58); assert r < 0; raise PermissionError",
    "socket": "import socket; socket.socket()",
    "datagram pair": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "name lookup": "import socket; socket.create_connection(('localhost', 80))",
    "read a file": "open('{secret}').read()",
    "read by a link": "import os; os.symlink('{secret}', 'l'); open('l').read()",
    "hard link": "import os; os.link('{secret}', 'l')",
    "write outside": "open('{folder}/new', 'w')",
    "remove outside": "import os; os.unlink('{secret}')",
    "rename outside": "import os; open('a', 'w').close(); os.rename('a', '{folder}/new')",
    "truncate outside": "import os; os.truncate('{secret}', 0)",
    "mode": "import os; os.chmod('{secret}', 0o777)",
    "owner": "import os; os.chown('{secret}', 1, 1)",
    "times": "import os; os.utime('{secret}')",
    "environment of the trainer": "open('/proc/{pid}/environ').read()",
    "own parent's environment": "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
    "signal": "import os; os.kill({pid}, 9)",
    "signal the server": "import os; os.kill(os.getppid(), 9)",
    "signal a group": "import os; os.killpg(0, 9)",
    "signal a thread": "import ctypes; assert ctypes.CDLL(None).syscall(234, {pid}, {pid}, 9) < 0; 1 / 0",
    "signal by an owner": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
    "limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "limits of another": "import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE, (1, 1))",
    "trace": "import ctypes; c = ctypes.CDLL(None); assert c.ptrace(16, {pid}, 0, 0) < 0; raise PermissionError",
    "memory of another": "import ctypes; assert ctypes.CDLL(None).syscall(310, {pid}, 0, 0, 0, 0, 0) < 0; 1 / 0",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) < 0; raise PermissionError",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, 0) < 0; 1 / 0",
    "memory file": "import os; os.memfd_create('x')",
    "io_uring": "import ctypes; assert ctypes.CDLL(None).syscall(425, 1, 0) < 0; raise PermissionError",
    "x32": "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)",
    "user": "import os; os.setuid(0); open('{secret}').read()",
    "shared memory": "open('/dev/shm/whet-test', 'w')",
}


@confined
@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_does_not_get_out(sandbox, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    before = secret.stat()
    code = ESCAPES[name].format(secret=secret, folder=tmp_path, pid=os.getpid())
    result = sandbox.run(code)
    assert result.status == "failed" and SECRET not in result.stdout
    assert (
        re.search(
            r"PermissionError|OSError: \[Errno 18\]|gaierror|ZeroDivisionError|not allowed to raise maximum limit",
            result.stderr,
        )
        or result.exit_code == -31
    ), result.stderr
    after = secret.stat()
    same = ("st_mode", "st_uid", "st_mtime", "st_size", "st_nlink")
    assert [getattr(after, n) for n in same] == [getattr(before, n) for n in same] and os.listdir(tmp_path) == [
        "secret"
    ]


@confined
@pytest.mark.parametrize(
    ("code", "limits", "statuses"),
    [
        ("while True: pass", {"seconds": 0.5}, {"timeout"}),
        ("while True: pass", {"cpu_seconds": 1}, {"timeout"}),
        ("import time; time.sleep(60)", {"seconds": 0.3}, {"timeout"}),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", {"seconds": 0.5}, {"timeout"}),
        (
            "import signal as g; [g.signal(s, g.SIG_IGN) for s in (2, 15, 24)]\nwhile True: pass",
            {"seconds": 1},
            {"timeout"},
        ),
        ("while True: print('x' * 1000)", {}, {"output"}),
        ("x = bytearray(10**10)", {}, {"failed"}),
        ("x = []\nwhile True: x.append(bytearray(10**6))", {}, {"failed"}),
        ("for i in range(10**6): open(str(i), 'w').write('x' * 10**5)", {"files_mb": 2}, {"files"}),
        ("f = open('a', 'w')\nwhile True: f.write('x' * 10**6)", {"files_mb": 2}, {"failed", "files"}),
        (
            "import threading as t, time\nt.stack_size(32768)\n"
            "for _ in range(10**5): t.Thread(target=time.sleep, args=(60,)).start()",
            {"threads": 8},
            {"threads", "failed"},
        ),
        ("f = [open('a', 'w') for _ in range(1000)]", {}, {"failed"}),
    ],
)
def test_a_limit_ends_a_program(code, limits, statuses):
    with Sandbox(SandboxLimits(**{"seconds": 20, **limits})) as sandbox:
        result = sandbox.run(code)
        assert result.status in statuses, result
        assert len(result.stdout) <= 65_536
        assert sandbox.run("print(1)").stdout == "1\n"  # the next one is not concerned


@confined
def test_nothing_is_left_of_a_program(tmp_path):
    code = f"import os; print(os.getpid(), os.getcwd()); os.symlink('{tmp_path}', 'l'); import time; time.sleep(60)"
    (tmp_path / "kept").touch()
    with Sandbox(SandboxLimits(seconds=0.5)) as short:
        pid, folder = short.run(
            code.replace("import time", "import sys; sys.stdout.flush(); import time")
        ).stdout.split()
    assert not Path(folder).exists() and not Path(f"/proc/{pid}").exists() and (tmp_path / "kept").exists()


@confined
def test_programs_run_at_the_same_time():
    with Sandbox(workers=3) as sandbox:
        results = []
        threads = [
            threading.Thread(target=lambda i=i: results.append(sandbox.run(f"print({i})").stdout)) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == ["0\n", "1\n", "2\n"]


@confined
def test_a_sandbox_that_a_thread_makes_outlives_the_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(Sandbox()) or made[0].run("print(1)"))
    thread.start()
    thread.join()
    with made[0] as sandbox:
        time.sleep(0.1)
        assert sandbox.run("print(2)").stdout == "2\n"


@confined
def test_a_program_that_waits_is_run_before_those_that_come_later():
    with Sandbox() as sandbox:
        order, busy = [], threading.Event()

        def run_many():
            while "one" not in order and len(order) < 60:
                sandbox.run("")
                order.append("many")
                busy.set()

        many = threading.Thread(target=run_many)
        many.start()
        busy.wait()
        before = len(order)
        sandbox.run("")
        order.append("one")
        many.join()
    assert order.index("one") <= before + 2


@confined
def test_a_server_that_ends_is_replaced():
    with Sandbox() as sandbox:
        sandbox._workers[0]._process.kill()
        with pytest.raises(RewardError, match="it is replaced"):
            sandbox.run("print(1)")
        assert sandbox.run("print(1)").stdout == "1\n"


@confined
def test_the_server_ends_with_the_trainer():
    code = (
        "import os; from whet.envs.sandbox import Sandbox; s = Sandbox(); "
        "print(s._workers[0]._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    pid = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pid and not Path(f"/proc/{pid}").exists()


def test_a_machine_that_cannot_confine_refuses_unless_told(monkeypatch):
    monkeypatch.setattr(module, "missing_protection", lambda: "no Landlock")
    with pytest.raises(
        ConfigError, match="can't be confined here: no Landlock; take another machine, or pass unconfined=True"
    ):
        Sandbox()
    with Sandbox(unconfined=True) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"


@confined
@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".stdin"])
def test_files_stay_in_the_folder(sandbox, name):
    with pytest.raises(ConfigError, match="name a file inside the program's folder"):
        sandbox.run("", files={name: ""})


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"memory_mb": float("nan")}])
def test_limits_are_above_0(limits):
    with pytest.raises(ConfigError, match="above 0"):
        SandboxLimits(**limits)
