"""A library is built once, kept where nobody else can write, and built anew when anything about it changed."""

import os
import platform
import shutil
import stat
import threading
import time

import pytest
from builds import compiler

from whet.errors import ConfigError
from whet.native import build
from whet.native.build import Library, Unavailable, load_library

needs_compiler = pytest.mark.skipif(
    isinstance(load_library("decode"), Unavailable), reason="no kernels can be built here"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source that is built in no time, and its header."""
    path = tmp_path / "sources"
    path.mkdir()
    (path / "number.h").write_text("#define NUMBER 1\n")
    (path / "number.cpp").write_text('#include "number.h"\nextern "C" int number() { return NUMBER; }\n')
    monkeypatch.setattr(build, "SOURCE", path)
    return path


def number():
    """What the library says."""
    found = load_library("number")
    assert isinstance(found, Library), found
    return found.handle.number()


@needs_compiler
def test_it_is_built_once_and_no_half_built_file_stays(cache, folder, monkeypatch):
    assert number() == 1
    (built,) = cache.iterdir()
    assert built.suffix == ".so" and stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert built.name.startswith("number-")
    before = built.stat().st_mtime_ns
    assert number() == 1 and built.stat().st_mtime_ns == before
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DNEW"))
    assert number() == 1 and len(list(cache.iterdir())) == 2
    monkeypatch.setenv("CXX", "g++ -DOLD")
    if shutil.which("g++"):
        assert number() == 1 and all(x.suffix == ".so" for x in cache.iterdir())


@needs_compiler
def test_of_processes_that_begin_together_one_builds(cache, folder, monkeypatch):
    compiled, run = [], build._run

    def counted(*command):
        if "-c" in command:
            compiled.append(command)
            time.sleep(0.2)
        return run(*command)

    monkeypatch.setattr(build, "_run", counted)
    threads = [threading.Thread(target=number) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(list(cache.iterdir())) == 1


@needs_compiler
def test_a_header_or_a_processor_that_changed_means_another_library(cache, folder, monkeypatch):
    assert number() == 1
    (folder / "number.h").write_text("#define NUMBER 2\n")
    assert number() == 2
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert number() == 2 and len(list(cache.iterdir())) == 3


@needs_compiler
@pytest.mark.parametrize("fault", ["cut short", "written by others", "in a folder of others"])
def test_a_library_that_is_broken_or_could_be_another_users_is_not_loaded(cache, folder, fault, tmp_path, monkeypatch):
    assert number() == 1
    (built,) = cache.iterdir()
    again = tmp_path / "again" / "whet"  # a path that this process has not loaded before
    again.mkdir(mode=0o700, parents=True)
    broken = again / built.name
    broken.write_bytes(built.read_bytes()[:100])
    broken.chmod(0o700)
    if fault != "cut short":
        (broken if fault == "written by others" else again).chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(again.parent))
    assert number() == 1
    if fault == "in a folder of others":
        assert len(broken.read_bytes()) == 100
    else:
        assert len(broken.read_bytes()) > 100 and stat.S_IMODE(broken.stat().st_mode) & 0o022 == 0


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_home_that_cannot_be_written_costs_a_build_only(tmp_path, folder, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert number() == 1


@needs_compiler
def test_the_reason_why_there_is_none_is_the_compilers(cache, folder, tmp_path, monkeypatch):
    (folder / "number.cpp").write_text("int number() { return missing; }\n")
    found = load_library("number")
    assert isinstance(found, Unavailable)
    assert found.reason.startswith("building them failed: ") and "missing" in found.reason
    assert not list(cache.iterdir())
    monkeypatch.setenv(
        "CXX", compiler(tmp_path, "test $1 = --version && echo cc || { echo 'no such flag' >&2; exit 1; }")
    )
    assert load_library("number") == Unavailable("building them failed: no such flag")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))  # says no version
    assert str(load_library("number")).startswith("building them failed: ")
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert str(load_library("number")).startswith("building them failed: ")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library("number") == Unavailable("no C++ compiler (g++) is installed")
    assert not list(cache.iterdir())


def test_a_system_that_is_not_linux_or_a_torch_without_gnu_openmp_is_named(monkeypatch):
    monkeypatch.delenv("WHET_NATIVE", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_openmp", lambda: None)
        if platform.system() == "Linux":
            assert load_library("decode") == Unavailable("torch has no GNU OpenMP here")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert load_library("decode") == Unavailable("no native kernels on Darwin")


@pytest.mark.parametrize("word", ["0", "false", "Off", "no"])
def test_a_variable_of_the_environment_switches_all_of_it_off(cache, monkeypatch, word):
    monkeypatch.setenv("WHET_NATIVE", word)
    for source in ("decode", "segments", "layers"):
        assert load_library(source) == Unavailable(f"WHET_NATIVE={word} switches them off")
    assert not cache.exists()


def test_another_word_in_it_is_refused(monkeypatch):
    monkeypatch.setenv("WHET_NATIVE", "never")
    with pytest.raises(ConfigError, match="WHET_NATIVE=never in the environment must be 1 or 0"):
        load_library("decode")


@needs_compiler
def test_without_a_home_they_are_built_for_the_process_and_this_is_said(folder, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", homeless)
    with caplog.at_level("INFO", "whet"):
        assert number() == 1
    said = [r.getMessage() for r in caplog.records]
    assert said[0] == (
        "native kernels can't be cached and are built for this process only: Could not determine home directory."
    )
    assert said[1].startswith("building native kernels (number) with ")


def test_a_compiler_with_an_open_quote_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.delenv("WHET_NATIVE", raising=False)
    monkeypatch.setenv("CXX", "g++ 'open")
    assert str(load_library("number")) == "building them failed: No closing quotation"


@pytest.mark.parametrize("given", ["", "cache", "./cache", "~/cache"])
def test_a_relative_cache_folder_is_none(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "whet"
    monkeypatch.setenv("HOME", "home")
    with pytest.raises(OSError, match="HOME=home is not an absolute path"):
        build.cache_folder()


@needs_compiler
def test_a_link_of_the_librarys_name_is_replaced_and_what_it_names_is_left_alone(cache, folder, tmp_path, monkeypatch):
    assert number() == 1
    (built,) = cache.iterdir()
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    again = tmp_path / "again" / "whet"  # a path that this process has not loaded before
    again.mkdir(mode=0o700, parents=True)
    (again / built.name).symlink_to(other)
    monkeypatch.setenv("XDG_CACHE_HOME", str(again.parent))
    assert number() == 1 and other.read_bytes() == b"mine"
    assert [x.name for x in again.iterdir()] == [built.name] and not (again / built.name).is_symlink()


@needs_compiler
def test_what_is_half_built_lies_in_a_folder_that_is_made_for_it_alone(cache, folder, monkeypatch):
    seen, run = [], build._run

    def watched(*command):
        if "-o" in command:
            place = build.Path(command[command.index("-o") + 1]).parent
            seen.append((place, stat.S_IMODE(place.stat().st_mode)))
        return run(*command)

    monkeypatch.setattr(build, "_run", watched)
    assert number() == 1
    (folder / "number.h").write_text("#define NUMBER 2\n")
    assert number() == 2
    assert {mode for _, mode in seen} == {0o700} and {place.parent for place, _ in seen} == {cache}
    assert len({place for place, _ in seen}) == 2
