"""Output that nobody reads, or that no disk takes, is no error to whoever writes it."""

import io
import operator
import os
import subprocess
import sys

import pytest

from whet.util.streams import Stderr, flush_or_discard, has_no_reader, ignore_write_errors


def dead_pipe():
    """A text stream into a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize("make", [dead_pipe, full_disk])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_is_written_to_a_dead_stream_is_lost_and_no_error(monkeypatch, make, name):
    stream = make()
    monkeypatch.setattr(sys, name, stream)
    with ignore_write_errors("stdout", "stderr"):
        new = getattr(sys, name)
        for _ in range(3):
            print("ünseen \udcff" * 10_000, file=new, flush=True)
        assert new is not stream and new.fileno() == stream.fileno() and new.name == f"<{name}>"
    assert getattr(sys, name) is stream and not has_no_reader(stream)
    stream.close()  # nothing is left in it that could fail now


def test_a_stream_that_is_read_gets_all_of_it_in_order(monkeypatch, tmp_path):
    for write_through in (False, True):  # as it is; as `python -u` has it
        raw = open(tmp_path / "out", "wb", buffering=0 if write_through else -1)
        stream = io.TextIOWrapper(raw, "utf-8", line_buffering=True, write_through=write_through)
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        with ignore_write_errors("stdout"):
            print("insïde")
            os.write(sys.stdout.fileno(), b"below\n")
        print("after")
        assert (tmp_path / "out").read_text() == "before\ninsïde\nbelow\nafter\n"
        monkeypatch.undo()


def test_a_stream_that_is_no_file_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    with ignore_write_errors("stdout"):
        assert sys.stdout is stream and not has_no_reader(stream)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_somebody_closes_takes_what_is_written_all_the_same(monkeypatch, tmp_path, name):
    monkeypatch.setattr(sys, name, stream := open(tmp_path / "out", "w"))
    with ignore_write_errors("stdout", "stderr"):
        getattr(sys, name).close()
        print("heard", file=getattr(sys, name))
    assert getattr(sys, name) is stream and (tmp_path / "out").read_text() == "heard\n"


@pytest.mark.parametrize("take", ["buffer.close", "buffer.raw.close", "detach"])
def test_a_stream_whose_parts_are_taken_away_ends_without_an_error(monkeypatch, tmp_path, take):
    monkeypatch.setattr(sys, "stdout", stream := open(tmp_path / "out", "w"))
    with ignore_write_errors("stdout"):
        part = operator.attrgetter(take)(sys.stdout)()  # held: what is detached closes when it goes
    assert sys.stdout is stream and (part is None) == (take != "detach")


def test_a_stream_that_was_closed_before_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", stream := open(tmp_path / "out", "w"))
    stream.close()
    with ignore_write_errors("stdout"):
        assert sys.stdout is stream
    flush_or_discard(stream)
    flush_or_discard(None)


@pytest.mark.parametrize("make", [dead_pipe, full_disk])
def test_a_dead_stream_is_buried_so_that_python_ends_without_an_error(make):
    stream = make()
    assert has_no_reader(stream) == (make is dead_pipe)
    stream.write("x")
    flush_or_discard(stream)
    stream.close()


def test_standard_error_as_it_is_at_the_moment_never_raises(monkeypatch):
    said = Stderr()
    closed = io.StringIO()
    closed.close()
    for stream in (closed, dead_pipe(), io.TextIOWrapper(io.BytesIO(), "ascii"), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert said.write("ü\n") == 2 and not said.isatty()
        said.flush()
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    said.write("heard")
    assert stream.getvalue() == "heard"


def test_closed_descriptors_are_filled_so_that_no_file_gets_their_numbers(tmp_path):
    code = (
        "import os, sys; os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None\n"
        "from whet.util.streams import open_descriptors; open_descriptors()\n"
        "print('x'); file = open(sys.argv[1], 'w'); os.write(2, b'complaint')\n"
        "file.write(f'{file.fileno() > 2} {sys.stdin}')"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "out"]).returncode == 0
    assert (tmp_path / "out").read_text() == "True None"
