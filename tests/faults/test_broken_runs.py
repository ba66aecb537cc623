"""What a run does where it can't go on: a changed configuration, damaged files, a full disk, a folder in use."""

import errno
import json
import os
import shutil
import stat

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import cluster, length_reward, rows, same, weights_of

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, Mode, OptimConfig, RoleConfig, RolloutConfig
from whet.errors import CheckpointError, ConfigError, EngineError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.ops import clipped_surrogate
from whet.storage import checkpoint
from whet.storage.run_folder import RunFolder
from whet.train.role_checkpoints import Checkpoints
from whet.train.worker import ModelWorker

EACH_STEP = CheckpointingOptions(save_interval_steps=1)


def learner(folder, *, reward=length_reward, epsilon=0.2, policy_loss_fn="grpo", system_prompt="", **training):
    options = {"run_dir": str(folder), "checkpointing_options": EACH_STEP, **training}
    algo = GRPOConfig(num_generations=2, beta=0.0, epsilon=epsilon, policy_loss_fn=policy_loss_fn)
    data = DataConfig(batch_size=2, system_prompt=system_prompt, apply_chat_template=bool(system_prompt))
    return GRPOLearner(cluster(**options), algo, reward, data=data)


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


# ---- configuration -------------------------------------------------------------------------------------------------


def test_a_changed_configuration_is_refused_with_the_differences_and_can_be_allowed(tmp_path, caplog):
    learner(tmp_path, max_steps=1).train(rows(8))
    changes = {"epsilon": 0.3, "mini_batch_size": 1, "max_steps": 2, "resume": "latest"}
    with pytest.raises(CheckpointError) as error:
        learner(tmp_path, **changes).train(rows(8))
    text = str(error.value)
    assert "algo.epsilon: 0.2 -> 0.3" in text and "trainer.mini_batch_size: " in text and "allow_config_change" in text
    assert "max_steps" not in text  # a run may be prolonged
    assert len(lines(tmp_path)) == 1
    run = learner(tmp_path, allow_config_change=True, **changes).train(rows(8))
    assert run.step == 2 and len(lines(tmp_path)) == 2
    assert "algo.epsilon: 0.2 -> 0.3" in caplog.text


def test_what_a_run_from_python_has_beside_its_sections_may_not_change_either(tmp_path, model_folder):
    def train(seed=1, temperature=0.5, engine="embedded", lr=1e-3, **training):
        modes = {Mode.TRAIN: 1.0, Mode.EVAL: temperature}
        c = cluster(
            RoleConfig(model=model_folder, dtype="float32", optim=OptimConfig(lr=lr)),
            engine=engine,
            rollout={mode: RolloutConfig(max_tokens_to_generate=4, temperature=t) for mode, t in modes.items()},
            **{"actor_optimizer": None, "run_dir": str(tmp_path), **training},
        )
        algo, data = GRPOConfig(num_generations=2, beta=0.0), DataConfig(batch_size=2)
        return GRPOLearner(c, algo, length_reward, data_shuffle_seed=seed, data=data).train(rows(8))

    train(max_steps=1)
    for change, said in (
        ({"seed": 2}, "data_shuffle_seed: 1 -> 2"),
        ({"temperature": 0.0}, "temperature: 0.5 -> 0.0"),
        ({"temperature": 1.0}, r"temperature: 0.5 -> \(none\)"),  # as in training
        ({"engine": "hf"}, "rollout_engine: 'embedded' -> 'hf'"),
        ({"lr": 2e-3}, "actor.optim.lr: 0.001 -> 0.002"),
    ):
        with pytest.raises(CheckpointError, match=said):
            train(resume="latest", max_steps=2, **change)
    assert train(resume="latest", max_steps=2).step == 2
    folder = tmp_path / "checkpoints" / "step-000002"
    state = Checkpoints.state(folder)
    for name in ("actor", "rollout_engine", "from Python"):  # sections that one side lacks are not compared
        del state["settings"][name]
    torch.save(state, folder / "run.pt")
    (folder / "sums.json").unlink()
    assert train(resume="latest", max_steps=3, seed=2, lr=2e-3).step == 3


def test_other_data_are_refused_whatever_may_change(tmp_path):
    learner(tmp_path, max_steps=1).train(rows(8))
    with pytest.raises(CheckpointError, match="have rows 8, these have 6"):
        learner(tmp_path, resume="latest", allow_config_change=True).train(rows(6))
    with pytest.raises(CheckpointError, match="have seed 0, these have 1"):  # another order: rows would come twice
        learner(tmp_path, resume="latest", allow_config_change=True, seed=1).train(rows(8))
    with pytest.raises(CheckpointError, match=r"data\.system_prompt: '' -> 'Count!'"):
        learner(tmp_path, resume="latest", system_prompt="Count!").train(rows(8))


def test_a_prolonged_run_is_the_run_that_was_long_from_the_start(tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    learner(short, max_steps=2).train(rows(8))
    resumed = learner(short, max_steps=4, resume="latest")
    resumed.train(rows(8))
    whole = learner(long, max_steps=4)
    whole.train(rows(8))
    assert same(weights_of(resumed.cluster.actor.module), weights_of(whole.cluster.actor.module))


def test_an_evaluation_that_a_longer_run_never_makes_leaves_no_trace_in_it(tmp_path):
    def train(name, **options):
        at_the_end = CheckpointingOptions(save_interval_steps=100)
        made = learner(tmp_path / name, reward=drawn, checkpointing_options=at_the_end, **options)
        return weights_of(made.cluster.actor.module), made.train(rows(8), rows(3)).rows

    def drawn(completions, **_):
        return [r + 0.5 * np.random.random() for r in length_reward(completions)]

    np.random.seed(0)
    train("short", max_steps=2)
    np.random.seed(7)  # another process
    weights, found = train("short", max_steps=4, resume="latest")
    np.random.seed(0)
    whole_weights, whole = train("whole", max_steps=4)
    assert [(r["step"], r["mode"]) for r in found if r["mode"] == "eval"] == [(n, "eval") for n in (0, 2, 4)]
    found = [r for r in found if (r["step"], r["mode"]) != (2, "eval")]
    assert [(r["step"], r["mode"], r["reward"]) for r in found] == [(r["step"], r["mode"], r["reward"]) for r in whole]
    assert same(weights, whole_weights)
    saved = [Checkpoints.state(tmp_path / n / "checkpoints" / "step-000004")["cluster"] for n in ("short", "whole")]
    assert saved[0]["next_id"] == saved[1]["next_id"]


def test_a_schedule_that_spans_the_run_spans_its_new_length_and_says_so(tmp_path, caplog):
    def train(name, **options):
        linear = OptimConfig(lr=1.0e-3, schedule="linear")
        found = learner(tmp_path / name, actor_optimizer=linear, **options).train(rows(8)).rows
        return [round(row["learning_rate"] * 1e3, 6) for row in found]

    assert train("a", max_steps=2) == [1.0, 0.5]
    assert "now runs over" not in caplog.text
    assert train("a", max_steps=4, resume="latest") == [1.0, 0.5, 0.5, 0.25]
    assert "optim.schedule=linear now runs over 4 updates; it was saved with 2, and 2 updates are done" in caplog.text


def test_counters_go_on_where_the_checkpoint_left_them(tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    learner(short, max_steps=1).train(rows(8))
    resumed = learner(short, max_steps=2, resume="latest").train(rows(8)).rows[-1]
    whole = learner(long, max_steps=2).train(rows(8)).rows[-1]
    assert all(resumed[n] == whole[n] for n in ("step", "num_tokens", "optim/updates", "epoch"))


def test_a_run_resumed_before_its_last_checkpoint_takes_the_later_steps_anew(tmp_path):
    learner(tmp_path, max_steps=3).train(rows(8))
    before = (tmp_path / "final" / "model.safetensors").read_bytes()
    early = tmp_path / "checkpoints" / "step-000001"
    run = learner(tmp_path, max_steps=2, resume=str(early)).train(rows(8))
    assert run.step == 2 and len(lines(tmp_path)) == 2
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000001", "step-000002"]
    run = learner(tmp_path, max_steps=3, resume="latest").train(rows(8))
    assert run.step == 3 and (tmp_path / "final" / "model.safetensors").read_bytes() == before


def test_latest_begins_anew_where_there_is_no_checkpoint_yet(tmp_path):
    assert learner(tmp_path, resume="latest").train(rows(4)).step == 2


def test_steps_without_a_checkpoint_are_moved_aside_never_deleted(tmp_path, caplog):
    never = CheckpointingOptions(save_interval_steps=100)
    for _ in range(2):
        with pytest.raises(RewardError):
            learner(tmp_path, reward=_once(), checkpointing_options=never, resume="latest").train(rows(8))
        shutil.rmtree(tmp_path / "checkpoints")  # as after a kill
    old = (tmp_path / "metrics.before-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in old] == [1] and len(lines(tmp_path)) == 1
    assert [p.name for p in (tmp_path / "completions.before-1").iterdir()] == ["train-000001.parquet"]
    assert "metrics.before-1.jsonl" in caplog.text
    assert learner(tmp_path, resume="latest").train(rows(4)).step == 2 and len(lines(tmp_path)) == 2
    assert (tmp_path / "metrics.before-2.jsonl").is_file()


def _once():
    """A reward that is there for one step only."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return length_reward(completions) if len(calls) == 1 else None

    return reward


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_still_serves(tmp_path):
    learner(tmp_path, max_steps=2).train(rows(8))
    for name in ("run.pt", "actor/model.safetensors", "actor/optimizer.safetensors", "actor/state.pt"):
        path = tmp_path / "checkpoints" / "step-000002" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-30])
        with pytest.raises(CheckpointError) as error:
            learner(tmp_path, resume="latest").train(rows(8))
        assert str(path) in str(error.value) and "resume from an earlier step-* folder" in str(error.value)
        if name != "actor/state.pt":
            path.write_bytes(whole)
    early = tmp_path / "checkpoints" / "step-000001"
    assert learner(tmp_path, resume=str(early), max_steps=2).train(rows(8)).step == 2


def test_a_newest_checkpoint_without_run_pt_is_named_with_the_one_to_go_on_from(tmp_path):
    learner(tmp_path, max_steps=2).train(rows(8))
    one, two = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (1, 2))
    (two / "run.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"{two}/run\.pt is missing .*trainer\.resume={one}$"):
        learner(tmp_path, resume="latest").train(rows(8))
    with pytest.raises(ConfigError, match="holds the checkpoints of a run"):
        learner(tmp_path / "new", checkpoint_root_directory=str(two.parent)).train(rows(8))
    assert learner(tmp_path, resume=str(one), max_steps=2).train(rows(8)).step == 2


def test_a_bit_that_was_lost_in_a_checkpoint_is_seen_before_it_is_taken_up(tmp_path):
    learner(tmp_path, max_steps=1).train(rows(8))
    for name in ("actor/model.safetensors", "actor/optimizer.safetensors"):
        path = tmp_path / "checkpoints" / "step-000001" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])  # of the last number: it can still be read
        with pytest.raises(CheckpointError, match=f"{name} has changed since it was written"):
            learner(tmp_path, max_steps=2, resume="latest").train(rows(8))
        path.write_bytes(whole)


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(tmp_path, monkeypatch):
    saves, save = [], safetensors.torch.save_file

    def full(tensors, path, **options):
        saves.append(path)
        if len(saves) > 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(tensors, path, **options)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 could not be written to .*No space left"):
        learner(tmp_path).train(rows(8))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000001", "step-000002"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert len(lines(tmp_path)) == 3  # the step itself was done
    monkeypatch.undo()
    run = learner(tmp_path, resume="latest").train(rows(8))  # room again
    assert run.step == 4 and len(lines(tmp_path)) == 4


def test_the_final_model_is_whole_or_absent_and_readable_by_others(tmp_path, monkeypatch):
    learner(tmp_path, max_steps=1).train(rows(8))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*.*") if p.is_file()}
    plain = tmp_path / "plain.txt"
    plain.touch()
    assert {modes["model.safetensors"], modes["run.pt"]} == {stat.S_IMODE(plain.stat().st_mode)}
    old = (tmp_path / "final" / "model.safetensors").read_bytes()

    def half(self, folder, *_, **__):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(ModelWorker, "export", half)
    with pytest.raises(CheckpointError, match=r"final.*No space left.*resume=latest"):
        learner(tmp_path, max_steps=2, resume="latest").train(rows(8))
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == old  # the one of step 1, whole
    monkeypatch.undo()
    learner(tmp_path, max_steps=2, resume="latest").train(rows(8))
    assert (tmp_path / "final" / "model.safetensors").read_bytes() != old
    assert not list(tmp_path.glob(".final*"))


def test_a_run_resumed_before_its_end_has_no_final_model_until_it_ends_again(tmp_path):
    learner(tmp_path, max_steps=2).train(rows(8))
    (tmp_path / "summary.json").write_text('{"steps": 2}')
    early = str(tmp_path / "checkpoints" / "step-000001")
    with pytest.raises(RewardError):
        learner(tmp_path, max_steps=3, resume=early, reward=lambda completions: None).train(rows(8))
    assert not (tmp_path / "final").exists() and not (tmp_path / "summary.json").exists()


def test_the_checkpoint_of_another_run_is_not_taken_into_a_folder_with_steps_of_its_own(tmp_path):
    for name in "ab":
        learner(tmp_path / name, max_steps=2).train(rows(8))
    other = str(tmp_path / "b" / "checkpoints" / "step-000001")
    with pytest.raises(CheckpointError, match=r"a holds steps of its own.*another trainer\.run_dir"):
        learner(tmp_path / "a", resume=other).train(rows(8))
    assert len(lines(tmp_path / "a")) == 2
    assert learner(tmp_path / "c", resume=other, max_steps=2).train(rows(8)).step == 2


def test_state_files_of_another_program_are_named(tmp_path):
    learner(tmp_path, max_steps=1).train(rows(8))
    folder = tmp_path / "checkpoints" / "step-000001"
    (folder / "sums.json").unlink()
    for name in ("actor/state.pt", "run.pt"):
        torch.save({"something": "else"}, folder / name)
        with pytest.raises(CheckpointError, match=f"{name}.* has an unexpected format"):
            learner(tmp_path, resume="latest").train(rows(8))


def test_a_disk_without_room_for_a_row_is_named_with_the_fix(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path / "a") as folder:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl.*No space left.*resume=latest"):
            folder.log(step=1, mode="train", version=0, values={})
        with pytest.raises(CheckpointError, match=r"x\.json.*No space left.*resume=latest"):
            folder.write_json("x.json", {})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written.*another trainer\.run_dir"):
        RunFolder(tmp_path / "file")


def test_a_reward_that_changes_the_working_folder_moves_nothing(tmp_path, monkeypatch):
    def moves(completions, **_):
        os.chdir(tmp_path / "elsewhere")
        return length_reward(completions)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert learner("run", reward=moves).train(rows(4)).step == 2
    assert (tmp_path / "run" / "final").is_dir() and not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "run" / "checkpoints" / "latest").is_file()


def test_what_is_broken_beside_the_checkpoints_does_not_stop_a_resume(tmp_path, caplog):
    learner(tmp_path, max_steps=2).train(rows(8))
    (tmp_path / "environment.json").write_text("{half")
    (tmp_path / "checkpoints" / "latest").write_bytes(b"\xff\x00")
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    (tmp_path / "completions" / "train-000009.parquet").mkdir()
    run = learner(tmp_path, max_steps=3, resume="latest").train(rows(8))
    assert run.step == 3 and [row["step"] for row in run.rows] == [1, 2, 3]
    assert "environment.json" in caplog.text
    assert "step-000009 is ignored" in caplog.text and "step-000002" in caplog.text


# ---- a folder in use -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [None, "latest"])
def test_a_second_run_in_a_folder_is_refused_and_takes_nothing_from_the_first(tmp_path, resume):
    tried = []

    def reward(completions, **_):
        if not tried:
            tried.append(True)
            half = tmp_path / "checkpoints" / ".tmp-000009-x"
            half.mkdir(parents=True)  # what the first is writing
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                learner(tmp_path, resume=resume).train(rows(4))
            assert half.is_dir()
        return length_reward(completions)

    assert learner(tmp_path, reward=reward).train(rows(4)).step == 2
    assert tried and len(lines(tmp_path)) == 2


def test_a_new_run_takes_neither_the_folder_nor_the_checkpoints_of_another(tmp_path):
    learner(tmp_path / "a", checkpoint_root_directory=str(tmp_path / "c")).train(rows(4))
    with pytest.raises(ConfigError, match=r"holds a run of 2 steps; set trainer\.resume=latest"):
        learner(tmp_path / "a").train(rows(4))
    with pytest.raises(ConfigError, match="holds the checkpoints of a run"):
        learner(tmp_path / "b", checkpoint_root_directory=str(tmp_path / "c")).train(rows(4))


def test_two_runs_never_share_a_folder_of_checkpoints(tmp_path):
    shared, tried = str(tmp_path / "c"), []

    def reward(completions, **_):
        if not tried:
            tried.append(True)
            for resume in (None, "latest"):
                with pytest.raises(ConfigError, match=r"c is in use by process .* trainer\.checkpoint_root_directory"):
                    learner(tmp_path / "b", checkpoint_root_directory=shared, resume=resume).train(rows(4))
        return length_reward(completions)

    learner(tmp_path / "a", reward=reward, checkpoint_root_directory=shared).train(rows(4))
    steps = [p.name for p in sorted((tmp_path / "c").iterdir())]
    assert tried and steps == ["latest", "step-000001", "step-000002"]
    learner(tmp_path / "d", max_steps=1).train(rows(4))
    other = str(tmp_path / "d" / "checkpoints" / "step-000001")
    said = rf"{other} is not among the checkpoints in {shared}, which belong to another"
    with pytest.raises(CheckpointError, match=said):
        learner(tmp_path / "e", checkpoint_root_directory=shared, resume=other).train(rows(4))
    assert steps == [p.name for p in sorted((tmp_path / "c").iterdir())]


def test_a_run_goes_on_under_its_own_name_and_leaves_later_steps_of_others(tmp_path):
    learner(tmp_path / "a", max_steps=1).train(rows(8))
    learner(tmp_path / "b", max_steps=2).train(rows(8))
    ours, theirs = (tmp_path / name / "checkpoints" for name in "ab")
    shutil.copytree(theirs / "step-000002", ours / "step-000002")
    one = str(ours / "step-000001")
    with pytest.raises(CheckpointError, match=r"step-000002 is from a later step and belongs to a different run than"):
        learner(tmp_path / "a", max_steps=2, resume=one).train(rows(8))
    assert (ours / "step-000002" / "run.pt").is_file()
    shutil.rmtree(ours / "step-000002")
    learner(tmp_path / "a", max_steps=2, resume=one).train(rows(8))
    assert checkpoint.read_run_id(ours / "step-000002") == checkpoint.read_run_id(ours / "step-000001") is not None
    for step in (1, 2):  # whoever removed these has a checkpoint of no known run
        (ours / f"step-{step:06d}" / "run.json").unlink()
        (ours / f"step-{step:06d}" / "sums.json").unlink()
    keep = CheckpointingOptions(save_interval_steps=1, max_to_keep=2)
    learner(tmp_path / "a", max_steps=3, resume="latest", checkpointing_options=keep).train(rows(8))
    assert sorted(p.name for p in ours.iterdir()) == ["latest", "step-000002", "step-000003"]


# ---- what is not what it says --------------------------------------------------------------------------------------


def test_checkpoints_that_cannot_be_written_are_found_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    root = str(tmp_path / "file" / "c")

    def never(completions, **_):
        raise AssertionError("a step was taken")

    with pytest.raises(CheckpointError, match=rf"checkpoints can't be written to {root}: .*set another trainer"):
        learner(tmp_path / "run", reward=never, checkpoint_root_directory=root).train(rows(4))
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("step", [0, -1, 10**18, True, "1", 2.0])
def test_a_state_of_another_step_than_its_folders_is_refused_and_nothing_is_removed(tmp_path, step):
    root = tmp_path / "checkpoints"
    for n in (2, 3):
        torch.save({"step": n}, _made(root / f"step-{n:06d}") / "run.pt")
    folder = _made(root / "step-000001")
    needs = (
        "cluster",
        "diagnostics",
        "inputs",
        "learner",
        "observers",
        "random",
        "replaced",
        "settings",
        "skipped",
        "stream",
    )
    torch.save({**dict.fromkeys((*needs, "tokens", "updates")), "format": 1, "step": step}, folder / "run.pt")
    with pytest.raises(CheckpointError, match=r"is of step .*, but its folder is named step-000001"):
        learner(tmp_path, resume=str(folder)).train(rows(8))
    assert len(checkpoint.step_folders(root)) == 3


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def test_updates_that_are_none_are_refused(tmp_path):
    made = learner(tmp_path / "run", max_steps=1)
    made.train(rows(8))
    path = tmp_path / "run" / "checkpoints" / "step-000001" / "run.pt"
    state = torch.load(path, weights_only=True)
    for updates in (None, {}, {"actor": "1"}, {"actor": -1}, [1]):
        torch.save({**state, "updates": updates}, path)
        with pytest.raises(CheckpointError, match=r"run\.pt (has an unexpected format: its|has .* as) updates"):
            made.cluster.checkpoints.load(path.parent)


def test_a_folder_whose_files_have_gone_is_no_checkpoint_of_the_run_that_begins_anew(tmp_path, caplog):
    learner(tmp_path, max_steps=1).train(rows(8))
    one = tmp_path / "checkpoints" / "step-000001"
    for name in ("run.pt", "sums.json"):
        (one / name).unlink()
    (tmp_path / "metrics.jsonl").unlink()
    learner(tmp_path, max_steps=1, resume="latest").train(rows(8))
    assert (one / "run.pt").is_file() and (one / "sums.json").is_file()
    assert (tmp_path / "checkpoints" / "step-000001.broken" / "actor").is_dir()
    assert "it is kept as step-000001.broken" in caplog.text
    assert learner(tmp_path, max_steps=2, resume="latest").train(rows(8)).step == 2


def test_a_checkpoint_without_its_sums_is_said_and_without_more_refused(tmp_path, caplog):
    learner(tmp_path, max_steps=1).train(rows(8))
    folder = tmp_path / "checkpoints" / "step-000001"
    (folder / "sums.json").unlink()
    assert learner(tmp_path, max_steps=1, resume="latest").train(rows(8)).step == 1
    assert "step-000001 has no sums.json, so its files" in caplog.text
    (folder / "actor" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing from its checkpoint"):
        learner(tmp_path, max_steps=1, resume="latest").train(rows(8))


def test_a_refused_run_writes_nothing_over_the_one_that_lies_there(tmp_path):
    learner(tmp_path, max_steps=1).train(rows(8))
    (tmp_path / "metrics.jsonl").unlink()
    before = {p: p.read_bytes() for p in tmp_path.glob("*.*") if p.is_file()}
    with pytest.raises(ConfigError, match="holds the checkpoints of a run"):
        learner(tmp_path, epsilon=0.3).train(rows(8))
    assert {p: p.read_bytes() for p in before} == before and len(before) == 4  # config twice, environment, card


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_an_update_that_is_not_finite_is_skipped_and_the_run_goes_on(tmp_path):
    calls = []

    def sometimes(x):
        calls.append(1)
        loss, metrics = clipped_surrogate(x)
        return (loss * torch.nan if len(calls) == 1 else loss), metrics

    made = learner(tmp_path, policy_loss_fn=sometimes)
    before = weights_of(made.cluster.actor.module)
    run = made.train(rows(4))
    assert [row["optim/skipped"] for row in run.rows] == [1.0, 0.0]
    assert "grad_norm" not in run.rows[0] and run.rows[1]["grad_norm"] > 0
    after = weights_of(made.cluster.actor.module)
    assert not same(before, after) and all(w.isfinite().all() for w in after.values())


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_a_model_whose_logits_are_not_finite_ends_the_run_with_what_to_do(tmp_path, engine):
    def breaks(completions, **_):
        with torch.no_grad():
            next(made.cluster.actor.module.parameters()).fill_(torch.nan)
        return [1.0] * len(completions)

    model = cluster(engine=engine, run_dir=str(tmp_path))
    made = GRPOLearner(model, GRPOConfig(num_generations=2, beta=0.0), breaks, data=DataConfig(batch_size=2))
    with pytest.raises(EngineError, match=r"logits are not finite at step 2; resume from an earlier .*learning rate"):
        made.train(rows(8))
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1]
