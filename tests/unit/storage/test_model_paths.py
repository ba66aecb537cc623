"""Where a model lies: folders of runs and checkpoints, and names that the hub is asked for."""

import os
from pathlib import Path

import pytest

from whet import Sampler
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.storage.model_paths import check_hub, resolved_path_message
from whet.storage.model_paths import model_folder as model_folder_of


@pytest.fixture
def run(tmp_path, model_folder):
    """A run's folder with two checkpoints, not finished."""
    folder = tmp_path / "run"
    for step in (1, 2):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:06d}" / "actor").symlink_to(model_folder)
    (folder / "metrics.jsonl").touch()
    return folder


def test_a_model_a_finished_run_and_a_checkpoint_stand_for_a_model(run, model_folder):
    assert model_folder_of(model_folder) == model_folder
    step = run / "checkpoints" / "step-000001"
    assert model_folder_of(step) == str(step / "actor")
    (run / "final").symlink_to(model_folder)
    assert model_folder_of(run) == str(run / "final")


def test_a_checkpoint_is_loaded_by_all_that_load(run, caplog):
    step = run / "checkpoints" / "step-000001"
    caplog.set_level("INFO", "whet")
    assert load_model(step).packable and len(load_tokenizer(step)) == 259
    assert Sampler(step)("2+2=", 2).text
    assert f"{step}: using {step}/actor" in caplog.text


def test_an_unfinished_run_is_an_error_with_the_checkpoint_to_give(run):
    step = run / "checkpoints" / "step-000002"
    for load in (load_model, load_tokenizer, Sampler):
        with pytest.raises(
            ConfigError, match=rf"{run} is a run that has not finished; .* its newest checkpoint: {step}$"
        ):
            load(run)
    with pytest.raises(ConfigError, match=rf"has checkpoints, but no model; .* newest checkpoint: {step}$"):
        model_folder_of(run / "checkpoints")


def test_a_folder_of_runs_stands_for_the_newest_that_has_finished_or_says_what_it_holds(run, model_folder, caplog):
    runs = run.parent
    with pytest.raises(ConfigError) as error:
        load_model(runs)
    said, listed = str(error.value).split("\n")
    assert said.startswith(f"{runs} has 1 run, and none has finished; give a checkpoint")
    assert listed == f"  run: {run}/checkpoints/step-000002"
    for name, time in (("old", 1), ("new", 2)):
        (runs / name).mkdir()
        (runs / name / "config.yaml").touch()
        (runs / name / "final").symlink_to(model_folder)
        os.utime(runs / name / "config.yaml", (2**31 + time, 2**31 + time))
    caplog.set_level("INFO", "whet")
    assert Sampler(runs)("2+2=", 2).text and load_tokenizer(runs).eos_token_id == 256
    assert f"{runs}: using {runs}/new/final" in caplog.messages
    os.utime(run / "metrics.jsonl", (2**31 + 3, 2**31 + 3))
    assert (
        resolved_path_message(str(runs), model_folder_of(runs))
        == f"{runs}: using {runs}/new/final (run: newer, and not finished)"
    )
    (runs / "only" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="only has no model, tokenizer or run, but a; give the folder of one"):
        model_folder_of(runs / "only")


def test_what_is_no_model_at_all_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="has not finished, and it has no checkpoint; give the model that it started"):
        model_folder_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a file; give its folder"):
        model_folder_of(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(
        ConfigError, match=r"there is no folder .*rnu, and it is not a valid hub name; did you mean run"
    ):
        model_folder_of(tmp_path / "rnu")


@pytest.mark.parametrize("load", [load_model, load_tokenizer, Sampler])
def test_a_name_without_network_is_one_line(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nope").mkdir()
    with pytest.raises(ConfigError) as error:
        load("nopee")
    assert str(error.value) == (
        "there is no folder 'nopee' here, and the hub can't be reached (HF_HUB_OFFLINE is set); "
        "check the path or the network; did you mean nope?"
    )


def test_a_name_that_the_hub_does_not_have_is_one_line(monkeypatch):
    from huggingface_hub import HfApi

    class RepositoryNotFoundError(Exception):
        pass

    class GatedRepoError(RepositoryNotFoundError):
        pass

    def answer(error):
        def info(*_, **__):
            raise error

        monkeypatch.setattr(HfApi, "model_info", info)
        check_hub("some/model")

    with pytest.raises(
        ConfigError, match="no model of that name on the hub that you can access; check the name, or log in"
    ):
        answer(RepositoryNotFoundError("404 and\nmany lines"))
    with pytest.raises(ConfigError, match=r"the hub can't be reached \(refused\)"):
        answer(ConnectionError("refused"))
    answer(GatedRepoError())
    answer(TimeoutError())  # transformers tries again
    with pytest.raises(ConfigError, match="not a valid hub name"):
        check_hub("a b")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_name_in_the_cache_needs_no_hub(monkeypatch, file):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, wanted: "x" if wanted == file else None)
    check_hub("some/model")


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "is empty"), (" ", "is empty"), ("/" + "n" * 300, "name too long"), ("~nobody_zz/model", "home directory")],
    ids=lambda word: word[:12],
)
@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_names_that_no_folder_can_have_are_errors_of_their_own(load, name, says):
    with pytest.raises(ConfigError, match=says):
        load(name)


def test_a_revision_of_a_hub_name_is_the_snapshot_of_that_revision(tmp_path, model_folder, monkeypatch):
    cache = tmp_path / "models--my--model"
    (cache / "snapshots" / "abc").mkdir(parents=True), (cache / "refs").mkdir()
    for file in Path(model_folder).iterdir():
        (cache / "snapshots" / "abc" / file.name).symlink_to(file)
    (cache / "refs" / "v1.0").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_folder_of("my/model@v1.0") == str(cache / "snapshots" / "abc")
    assert load_tokenizer("my/model@v1.0")("hi").input_ids
    with pytest.raises(
        ConfigError, match=r"'my/model' at revision 'v2' can't be downloaded .*branch, tag or commit after"
    ):
        model_folder_of("my/model@v2")


def test_a_pointer_of_git_lfs_is_named_for_what_it_is(tmp_path):
    (tmp_path / "lfs").mkdir()
    (tmp_path / "lfs" / "config.json").write_text("{}")
    (tmp_path / "lfs" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ConfigError, match=r"model\.safetensors is a Git LFS pointer, .*git lfs pull"):
        model_folder_of(tmp_path / "lfs")
