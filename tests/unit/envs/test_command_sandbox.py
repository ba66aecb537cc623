"""Sandboxes for commands: what is tried in vain, limits, and the words of a container."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from whet.envs.command_sandbox import BubblewrapSandbox, ContainerSandbox
from whet.envs.sandbox import SandboxLimits
from whet.errors import ConfigError, InfrastructureError


def bubblewrap(**limits):
    try:
        return BubblewrapSandbox(SandboxLimits(**{"seconds": 20, "files_mb": 4, **limits}))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sandbox():
    with bubblewrap() as sandbox:
        yield sandbox


def test_a_program_and_a_command_of_several_processes_run(sandbox):
    assert sandbox.run("print(open('a/b').read() + input())", stdin="2", files={"a/b": "1"}).stdout == "12\n"
    result = sandbox.run_command(["bash", "-c", "cat - n | sort -r | head -1"], stdin="a\n", files={"n": "b\n"})
    assert (result.status, result.stdout, result.stderr) == ("finished", "b\n", "") and result.memory_mb < 100
    assert sandbox.run_command(["bash", "-c", "echo no >&2; exit 7"]).exit_code == 7
    with pytest.raises(ConfigError, match="name a file inside"):
        sandbox.run("", files={"../a": ""})


ESCAPES = {
    "read a file": "cat {secret}",
    "write outside": "echo x > {folder}/new",
    "write to the system": "echo x > /usr/new || echo x > /new",
    "signal": "kill -9 {pid}",
    "environment": "cat /proc/{pid}/environ",
    "socket": "{python} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2)'",
    "limits": "ulimit -v unlimited",
    "user namespace": "unshare -Ur true",
    "mount": "mount -t tmpfs x /tmp",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_command_does_not_get_out(sandbox, tmp_path, name, monkeypatch):
    if name == "user namespace" and os.getuid() == 0:
        pytest.skip("the user that runs root's commands may make one")
    monkeypatch.setenv("WHET_SECRET", "the trainer's secret")
    (tmp_path / "secret").write_text("the trainer's secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"secret": tmp_path / "secret", "folder": tmp_path, "pid": os.getpid(), "python": sys.executable}
        line = ESCAPES[name].format(**words, port=server.getsockname()[1])
        result = sandbox.run_command(["bash", "-c", f"env; {line}"])
    assert result.status == "failed" and "secret" not in result.stdout, result
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize(
    ("line", "limits", "statuses"),
    [
        ("sleep 60 & sleep 60", {"seconds": 0.5}, {"timeout"}),
        ("yes", {}, {"output"}),
        ("while true; do sleep 60 & done", {"threads": 20, "seconds": 5}, {"threads"}),
        ("f() { f | f; }; f", {"threads": 20, "seconds": 5}, {"threads"}),
        ("for i in 1 2 3 4 5 6; do head -c 30M /dev/zero | tail & done; sleep 60", {"memory_mb": 100}, {"memory"}),
        ("head -c 100M /dev/zero > big", {}, {"failed", "files"}),
        ("while true; do i=$((i+1)); head -c 1M /dev/zero > $i; done", {}, {"files"}),
    ],
)
def test_a_limit_ends_all_processes_of_a_command(line, limits, statuses):
    mark = f"whet-{time.monotonic_ns()}"
    with bubblewrap(**limits) as sandbox:
        result = sandbox.run_command(["bash", "-c", f"exec -a {mark} sleep 61 & {line}"])
    assert result.status in statuses, result
    end = time.monotonic() + 5
    while any_process(mark) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any_process(mark)


def any_process(mark):
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in process.read_bytes():
                return True
        except OSError:
            continue
    return False


DOCKER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in rm) exit 0;; esac
for word in "$@"; do case "$word" in --volume=*) folder=${{word#--volume=}}; cd "${{folder%:/work}}";; esac; done
while [ "$1" != image ]; do shift; done
shift
[ -e daemon-is-away ] && echo "no daemon" >&2 && exit 125
exec "$@"
"""


def test_a_container_has_no_network_no_rights_and_limits(tmp_path):
    (tmp_path / "docker").write_text(DOCKER.format(log=tmp_path / "log"))
    (tmp_path / "docker").chmod(0o755)
    sandbox = ContainerSandbox("image", SandboxLimits(memory_mb=300, threads=9), program=str(tmp_path / "docker"))
    sandbox.python = sys.executable
    assert sandbox.run("print(input())", stdin="1").stdout == "1\n"
    run, remove = (tmp_path / "log").read_text().splitlines()
    name = next(word for word in run.split() if word.startswith("--name=")).removeprefix("--name=")
    wanted = {"--network=none", "--read-only", "--cap-drop=ALL", "--pids-limit=9", "--memory=300m", "--rm"}
    assert wanted < set(run.split()) and remove == f"rm --force {name}"
    with pytest.raises(InfrastructureError, match="could not run a program: no daemon"):
        sandbox.run("", files={"daemon-is-away": ""})
    with pytest.raises(ConfigError, match="is not on the PATH"):
        ContainerSandbox("image", program="no-such-program-here")
