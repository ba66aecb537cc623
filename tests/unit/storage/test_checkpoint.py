import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import same, tiny_model, weights_of
from torch import nn

from whet.config import Role
from whet.errors import CheckpointError, ConfigError
from whet.storage import checkpoint as module
from whet.storage.checkpoint import (
    clean_root,
    find_checkpoint,
    load_weights,
    open_checkpoint_root,
    read_run_id,
    read_state,
    remove_checkpoint,
    save_weights,
    step_folders,
    step_number,
    verify_checkpoint,
    write_checkpoint,
    write_folder_atomic,
    write_state,
)
from whet.storage.run_state import check_storable


def write(text="x"):
    def into(folder):
        (folder / "actor").mkdir()
        (folder / "actor" / "file").write_text(text)
        (folder / "run.pt").write_text(text)

    return into


def names(root):
    return sorted(p.name for p in root.iterdir())


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_published_whole_under_its_step(tmp_path):
    root = tmp_path / "a" / "checkpoints"
    folder = write_checkpoint(root, 7, write())
    assert folder == root / "step-000007" and (folder / "actor" / "file").read_text() == "x"
    assert (root / "latest").read_text() == "step-000007\n"
    assert names(root) == ["latest", "step-000007"]


def test_only_the_last_few_are_kept(tmp_path):
    for step in (2, 4, 6, 1_000_000):
        write_checkpoint(tmp_path, step, write(), keep=2)
    assert [p.name for p in step_folders(tmp_path)] == ["step-000006", "step-1000000"]  # by number, not by letter
    for step in (8, 9):
        write_checkpoint(tmp_path, step, write(), keep=None)
    assert len(step_folders(tmp_path)) == 4


def test_the_newest_stays_whatever_its_number(tmp_path):
    write_checkpoint(tmp_path, 9, write(), keep=1)
    assert write_checkpoint(tmp_path, 3, write(), keep=1).is_dir()
    assert (tmp_path / "latest").read_text() == "step-000003\n"


def test_a_changed_byte_or_a_missing_file_of_a_checkpoint_is_seen(tmp_path):
    folder = write_checkpoint(tmp_path, 1, write("weights"))
    verify_checkpoint(folder)
    file = folder / "actor" / "file"
    file.write_text("weight5")  # as long as before
    with pytest.raises(CheckpointError, match=r"actor/file has changed since it was written: .*earlier step-\* folder"):
        verify_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="actor/file is missing from its checkpoint"):
        verify_checkpoint(folder)
    (folder / "sums.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"sums\.json can't be read"):
        verify_checkpoint(folder)
    (folder / "sums.json").unlink()
    verify_checkpoint(folder)  # made by hand: nothing to compare with


def test_a_checkpoint_that_could_not_be_written_leaves_nothing_and_the_last_one_stands(tmp_path):
    write_checkpoint(tmp_path, 1, write())

    def full(folder):
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*No space left"):
        write_checkpoint(tmp_path, 2, full)
    assert names(tmp_path) == ["latest", "step-000001"]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step-000001"

    def broken(folder):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # not for the disk's sake: as it is
        write_checkpoint(tmp_path, 2, broken)
    assert names(tmp_path) == ["latest", "step-000001"]


def test_a_kill_before_latest_moves_leaves_the_one_before(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, write())

    def killed(root, name):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_pointer", killed)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, write())
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step-000001"


def test_a_checkpoint_that_is_half_removed_is_none_any_more(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, 1, write())
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # killed before a file was gone
    remove_checkpoint(folder)
    assert step_folders(tmp_path) == []
    monkeypatch.undo()
    clean_root(tmp_path)
    assert names(tmp_path) == ["latest"]


def test_sweeping_takes_half_written_folders_and_nothing_else(tmp_path):
    write_checkpoint(tmp_path, 1, write())
    (tmp_path / ".tmp-0123456789abcdef-step-000002" / "actor").mkdir(parents=True)
    clean_root(tmp_path)
    assert names(tmp_path) == ["latest", "step-000001"]
    clean_root(tmp_path / "nowhere")


def test_a_latest_that_is_a_folder_is_an_error_when_the_root_is_opened(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest is a folder, but must be a file"):
        open_checkpoint_root(tmp_path)
    (tmp_path / "latest").rmdir()
    open_checkpoint_root(tmp_path).release()


def test_latest_is_the_pointer_and_without_it_the_highest_step(tmp_path, caplog):
    assert find_checkpoint("latest", tmp_path / "nowhere") is None
    for step in (1, 2):
        write_checkpoint(tmp_path, step, write())
    (tmp_path / "latest").write_text("step-000001\n")
    assert find_checkpoint("latest", tmp_path).name == "step-000001"
    assert "the newer step-000002 is ignored" in caplog.text
    (tmp_path / "latest").unlink()
    assert find_checkpoint("latest", tmp_path).name == "step-000002"
    (tmp_path / "latest").write_text("step-000009\n")  # gone
    assert find_checkpoint("latest", tmp_path).name == "step-000002"


def test_a_newest_checkpoint_that_is_gone_is_said(tmp_path, caplog):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, write())
    remove_checkpoint(tmp_path / "step-000002")
    assert find_checkpoint("latest", tmp_path).name == "step-000001"
    assert f"{tmp_path}/latest points to 'step-000002', which is gone; using {tmp_path}/step-000001" in caplog.text


@pytest.mark.parametrize("pointer", [True, False])
def test_a_newest_checkpoint_without_its_state_is_not_passed_over(tmp_path, pointer):
    folders = [write_checkpoint(tmp_path, step, write()) for step in (1, 2)]
    if not pointer:
        (tmp_path / "latest").unlink()
    (folders[1] / "run.pt").unlink()
    with pytest.raises(CheckpointError) as error:
        find_checkpoint("latest", tmp_path)
    said = f"{folders[1]}/run.pt is missing from the newest checkpoint; put it back, or resume with "
    assert str(error.value).startswith(f"{said}trainer.resume={folders[0]}")
    (tmp_path / "step-000007").mkdir()  # nobody's
    with pytest.raises(CheckpointError, match=r"step-000002/run\.pt is missing from the newest checkpoint"):
        find_checkpoint("latest", tmp_path)
    (folders[0] / "run.pt").unlink()
    with pytest.raises(CheckpointError, match="start a new run in another folder"):
        find_checkpoint("latest", tmp_path)


def test_a_path_is_taken_as_it_is_and_must_be_a_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 1, write())
    assert find_checkpoint(str(folder), None) == folder
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: .*run\.pt is missing; give a step-\* folder"):
        find_checkpoint(str(tmp_path), None)
    with pytest.raises(CheckpointError, match=r"needs a trainer\.run_dir"):
        find_checkpoint("latest", None)


def test_what_a_name_stands_for_is_on_the_disk_before_it_gets_the_name(tmp_path, monkeypatch):
    synced, sync = set(), os.fsync

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        sync(handle)

    def after_its_parts(move):
        def moved(old, new):
            assert {p.stat().st_ino for p in (old, *old.rglob("*"))} <= synced, f"{new} before its parts"
            synced.clear()
            return move(old, new)

        return moved

    def pointed(root, name):
        assert root.stat().st_ino in synced, "latest before the folder it names"
        point(root, name)

    point = module.write_pointer
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", after_its_parts(Path.rename))
    monkeypatch.setattr(Path, "replace", after_its_parts(Path.replace))
    monkeypatch.setattr(module, "write_pointer", pointed)
    write_checkpoint(tmp_path, 1, write())
    assert tmp_path.stat().st_ino in synced  # latest too


# ---- a folder of checkpoints ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_an_error_when_it_is_opened(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"can't be written to .*file/c: .*Not a directory.*; fix its permissions or"
    ):
        open_checkpoint_root(tmp_path / "file" / "c")
    for where, name in ((Path, "touch"), (Path, "rename"), (shutil, "rmtree")):

        def refused(*args, name=name, **kwargs):
            raise OSError(errno.EACCES, name)

        monkeypatch.setattr(where, name, refused)
        with pytest.raises(CheckpointError, match=rf"can't be written to {tmp_path}/c: .*{name}"):
            open_checkpoint_root(tmp_path / "c")
        monkeypatch.undo()
    lock = open_checkpoint_root(tmp_path / "c")  # nothing is left that would hinder it
    assert names(tmp_path / "c") == [".lock"]
    with pytest.raises(ConfigError, match=r"in use by process .* set another trainer\.checkpoint_root_directory"):
        open_checkpoint_root(tmp_path / "c")
    lock.release()
    assert names(tmp_path / "c") == []


def test_no_run_takes_or_removes_what_another_has_written(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, write("a"), run="a")
    assert read_run_id(write_checkpoint(tmp_path, 2, write("again"), run="a")) == "a"
    assert (tmp_path / "step-000002" / "actor" / "file").read_text() == "a"  # its own: a step's state is one
    for run in ("b", None):
        with pytest.raises(
            CheckpointError, match=r"step-000002 belongs to another run, .*give each run a .*of its own"
        ):
            write_checkpoint(tmp_path, 2, write("b"), run=run)
    for step in (3, 4, 5):
        write_checkpoint(tmp_path, step, write("b"), run="b", keep=1)
    assert [p.name for p in step_folders(tmp_path)] == ["step-000001", "step-000002", "step-000005"]


def test_what_has_the_name_of_a_checkpoint_and_is_none_is_moved_aside(tmp_path, caplog):
    for _ in range(2):
        (tmp_path / "step-000002").mkdir()
        (tmp_path / "step-000002" / "actor").mkdir()
        write_checkpoint(tmp_path, 1, write())
        clean_root(tmp_path)
        assert find_checkpoint("latest", tmp_path).name == "step-000001"
    assert names(tmp_path) == ["latest", "step-000001", "step-000002-2.broken", "step-000002.broken"]
    said = "step-000002 is not a checkpoint, since files of it are missing; it is kept as step-000002.broken"
    assert said in caplog.text
    (tmp_path / "step-000003").mkdir()  # while a run goes on
    folder = write_checkpoint(tmp_path, 3, write(), keep=2)
    assert (folder / "run.pt").is_file() and (tmp_path / "step-000003.broken").is_dir()
    (folder / "run.pt").unlink()
    assert (write_checkpoint(tmp_path, 3, write(), keep=2) / "run.pt").is_file()
    (tmp_path / "step-000002" / "actor").mkdir(parents=True)  # is not one of the two that are kept
    write_checkpoint(tmp_path, 4, write(), keep=2)
    assert [p.name for p in step_folders(tmp_path)] == ["step-000002", "step-000003", "step-000004"]


def test_a_name_is_a_step_in_one_spelling():
    names = ["step-000007", "step-1000000", "step-0000007", "step-7", "step-٠٠٠٠٠٧", "step-000007.broken", "x"]
    assert [step_number(Path(name)) for name in names] == [7, 1_000_000, None, None, None, None, None]


def test_the_move_of_latest_that_fails_is_an_error_in_words(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, write())

    def refused(old, new):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(CheckpointError, match=r"latest can't be written: .*Permission denied; make room or fix"):
        write_checkpoint(tmp_path, 2, write())
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_a_run(tmp_path, monkeypatch, caplog):
    write_checkpoint(tmp_path, 1, write())

    def refused(folder):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(module, "remove_checkpoint", refused)
    assert write_checkpoint(tmp_path, 2, write(), keep=1).is_dir()
    assert "step-000001 can't be removed and stays" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470"),  # torch.save's
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        Exception("No space left on device (os error 28)"),  # a tokenizer's
    ],
    ids=["system", "torch position", "torch write", "tokenizers"],
)
def test_a_full_disk_is_one_whichever_library_meets_it(tmp_path, error):
    write_checkpoint(tmp_path / "c", 1, write())
    write_folder_atomic(tmp_path / "final", write("old"))

    def full(folder):
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*earlier ones are kept\. Make room or"):
        write_checkpoint(tmp_path / "c", 2, full)
    with pytest.raises(CheckpointError, match=r"final could not be written: .*; make room or .*resume=latest"):
        write_folder_atomic(tmp_path / "final", full)
    assert names(tmp_path / "c") == ["latest", "step-000001"] and names(tmp_path) == ["c", "final"]
    assert (tmp_path / "final" / "run.pt").read_text() == "old"
    with pytest.raises(RuntimeError, match="CUDA"):  # no disk's
        write_checkpoint(tmp_path / "c", 2, lambda folder: (_ for _ in ()).throw(RuntimeError("CUDA error")))


def test_a_folder_that_cannot_take_its_name_gives_it_back(tmp_path, monkeypatch):
    write_folder_atomic(tmp_path / "final", write("old"))
    rename = Path.rename

    def refused(old, new):
        if "final" == new.name and "old" not in old.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(old, new)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="final could not be written"):
        write_folder_atomic(tmp_path / "final", write("new"))
    assert names(tmp_path) == ["final"] and (tmp_path / "final" / "run.pt").read_text() == "old"


def test_sums_that_are_gone_are_said_and_other_files_that_are_gone_refused(tmp_path, caplog):
    folder = write_checkpoint(tmp_path, 1, write())
    verify_checkpoint(folder, ["actor/file"])
    assert not caplog.text
    (folder / "sums.json").unlink()
    verify_checkpoint(folder, ["actor/file"])
    assert "step-000001 has no sums.json, so its files can't be checked for changes" in caplog.text
    with pytest.raises(CheckpointError, match=r"actor/other is missing from its checkpoint; resume from an earlier"):
        verify_checkpoint(folder, ["actor/file", "actor/other"])


def test_sums_of_another_format_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path, 1, write())
    whole = json.loads((folder / "sums.json").read_text())
    assert whole["format"] == 1 and set(whole["sums"]) >= {"actor/file"}
    verify_checkpoint(folder)
    (folder / "actor" / "file").write_text("other")
    with pytest.raises(CheckpointError, match="actor/file has changed since it was written"):
        verify_checkpoint(folder)
    (folder / "sums.json").write_text(json.dumps({**whole, "format": 2}))
    with pytest.raises(CheckpointError, match=r"sums\.json has format 2, .*reads format 1; resume with"):
        verify_checkpoint(folder)
    (folder / "sums.json").write_text(json.dumps(whole["sums"]))
    with pytest.raises(CheckpointError, match=r"no mapping of names to checksums.*earlier step"):
        verify_checkpoint(folder)
    (folder / "sums.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match=r"sums\.json can't be read \(no mapping"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../../x", "a\\u0000b"])
def test_sums_name_no_file_outside(tmp_path, name):
    folder = write_checkpoint(tmp_path, 1, write())
    (folder / "sums.json").write_text(f'{{"format": 1, "sums": {{"{name}": "00"}}}}')
    with pytest.raises(CheckpointError, match=r"sums\.json can't be read \(.* is not a file of the checkpoint\)"):
        verify_checkpoint(folder)
    (folder / "sums.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"sums\.json can't be read \(it is nested too deep\)"):
        verify_checkpoint(folder)


def test_what_a_link_points_to_outlives_it(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "c"
    write_checkpoint(root, 1, write())
    (root / "step-000002").symlink_to(tmp_path / "elsewhere")
    (root / ".tmp-0123456789abcdef-x").symlink_to(tmp_path / "elsewhere")
    clean_root(root)
    assert names(root) == ["latest", "step-000001", "step-000002.broken"]
    remove_checkpoint(root / "step-000002.broken")
    assert names(root) == ["latest", "step-000001"] and (tmp_path / "elsewhere").is_dir()


# ---- files ---------------------------------------------------------------------------------------------------------


def test_weights_and_buffers_come_back_bit_for_bit(tmp_path):
    class Toy(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.a = nn.Parameter(torch.randn(3))
            self.b = nn.Linear(2, 2).to(torch.bfloat16)
            self.register_buffer("kept", torch.randn(2))
            self.register_buffer("made", torch.randn(2), persistent=False)

    one, two = Toy(0), Toy(1)
    made = two.made.clone()
    save_weights(one, tmp_path / "m.safetensors")
    load_weights(two, tmp_path / "m.safetensors")
    assert same(weights_of(one), weights_of(two))
    assert torch.equal(one.kept, two.kept) and torch.equal(two.made, made)


def test_masters_are_saved_in_place_of_the_parameters_and_both_come_back(tmp_path):
    one, two = tiny_model(0).bfloat16(), tiny_model(1).bfloat16()
    masters = {n: torch.randn(p.shape) for n, p in one.named_parameters()}
    save_weights(one, tmp_path / "m.safetensors", masters)
    own = {n: torch.zeros(p.shape) for n, p in two.named_parameters()}
    load_weights(two, tmp_path / "m.safetensors", own)
    assert same(own, masters)
    assert same(weights_of(two), {n: m.bfloat16() for n, m in masters.items()})


def test_a_model_file_that_is_cut_short_is_named_with_the_fix(tmp_path):
    path = tmp_path / "m.safetensors"
    model = tiny_model()
    save_weights(model, path)
    before = weights_of(model)
    for size in (path.stat().st_size // 2, 4, 0):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CheckpointError, match=r"m\.safetensors can't be read .*from an earlier step-\* folder"):
            load_weights(model, path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"m\.safetensors can't be read"):
        load_weights(model, path)
    assert same(weights_of(model), before)


def test_a_state_file_that_is_cut_short_or_pickled_is_named_with_the_fix(tmp_path):
    path = tmp_path / "run.pt"
    torch.save({"step": 3, "random": torch.arange(5)}, path)
    assert read_state(path)["step"] == 3
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"run\.pt can't be read .*resume from an earlier step-\* folder"):
        read_state(path)

    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "owned"),)

    torch.save({"step": Evil()}, path)
    with pytest.raises(CheckpointError):
        read_state(path)
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(CheckpointError):
        read_state(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [3, [1], None, torch.zeros(2)], ids=["number", "list", "none", "tensor"])
def test_a_state_file_that_holds_no_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=r"run\.pt has an unexpected format: a .*, not a dict"):
        read_state(tmp_path / "run.pt")


def test_a_state_that_the_disk_does_not_take_is_the_systems_error(tmp_path):
    write_state({"a": torch.arange(3)}, tmp_path / "a.pt")
    assert read_state(tmp_path / "a.pt")["a"].tolist() == [0, 1, 2]
    with pytest.raises(OSError, match="No space left"):
        write_state({"a": 1}, Path("/dev/full"))


def test_an_exported_folder_is_on_the_disk_with_its_name_before_the_old_one_goes(tmp_path, monkeypatch):
    fill = lambda text: lambda folder: (folder / "file").write_text(text)
    write_folder_atomic(tmp_path / "final", fill("old"))
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), sync(handle))[1])
    write_folder_atomic(tmp_path / "final", fill("new"))
    final = tmp_path / "final"
    assert {final.stat().st_ino, (final / "file").stat().st_ino} <= {*synced}
    assert synced[-1] == tmp_path.stat().st_ino  # the rename itself


@pytest.mark.parametrize("key", [Role.ACTOR, np.int64(3), (1, Role.ACTOR)], ids=["enum", "numpy", "in a tuple"])
def test_a_key_that_a_checkpoint_could_not_be_read_with_is_refused_when_the_run_opens(key):
    with pytest.raises(CheckpointError, match=r"a key of learner\.state\(\)\['by'\].* which a checkpoint can't hold"):
        check_storable({"by": {key: 1.0}}, "learner.state()")
    check_storable({"by": {"actor": 1.0, 3: 2.0, (1, "actor"): 3.0}}, "learner.state()")
