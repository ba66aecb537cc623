"""The folder that a run gets: none of an empty name, none that another run has, none that is left empty."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from whet.cli import commands
from whet.config import RLTrainingConfig, load_run
from whet.errors import ConfigError
from whet.parallel.ranks import Ranks
from whet.run.task import Task
from whet.storage.model_paths import model_folder


@pytest.mark.parametrize("name", ["run_dir", "checkpoint_root_directory", "resume"])
def test_an_empty_name_is_an_error_that_says_so(name):
    for words in ([f"trainer.{name}="], [f"trainer.{name}= "]):
        with pytest.raises(ConfigError, match=f"trainer.{name} must not be empty, got .*; leave the key out"):
            load_run(words)
    with pytest.raises(ConfigError, match=f"{name} must not be empty"):
        RLTrainingConfig(**{name: ""})
    assert vars(load_run([f"trainer.{name}=null"]).trainer)[name] is None


def test_runs_that_begin_in_one_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands.time, "strftime", lambda form: "20260101-000000")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "20260101-000000").symlink_to("nowhere")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: commands._with_run_dir(load_run([]), Ranks()).trainer.run_dir, range(8)))
    assert sorted(got) == [f"runs/20260101-000000-{n}" for n in range(2, 10)]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "runs").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"can't be created: .*; give another trainer\.run_dir"):
        commands._with_run_dir(load_run([]), Ranks())


def test_a_run_that_never_began_leaves_no_empty_folder_and_takes_none_away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    words = ["model=model", "data=nowhere.jsonl", "reward=exact_match"]
    with pytest.raises(Exception, match="nowhere"):
        commands.grpo(load_run(words))
    assert not (tmp_path / "runs").exists()
    (tmp_path / "nowhere.jsonl").write_text("no rows\n")
    with pytest.raises(Exception, match="nowhere"):
        commands.grpo(load_run(words))
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(Exception, match="nowhere"):
        commands.grpo(load_run([*words, "trainer.run_dir=mine"]))
    assert (tmp_path / "mine").is_dir()


def test_rows_of_any_kind_have_a_summary():
    odd = [{"step": 0, "mode": mode, **values} for mode in ("train", "eval") for values in (
        {}, {"reward": "1"}, {"reward": 10**400, "prompts/count": 1e999})]  # fmt: skip
    run = SimpleNamespace(rows=odd, evaluations=odd[2:], step=3, task=Task())
    summary = commands.summarise(run, load_run([]), 1.0)
    assert summary["reward_first"] is summary["eval_reward_after"] is None and summary["eval_prompts"] == 0


def test_a_checkpoint_that_was_moved_aside_is_recommended_to_nobody(tmp_path):
    for name in ("step-000001", "step-000001.broken", "step-000002.broken"):
        (tmp_path / "checkpoints" / name / "actor").mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"its newest checkpoint: .*step-000001$"):
        model_folder(tmp_path)
