"""What is said before data and models are loaded, all of it at once."""

import sys

import pytest

from whet.cli import main
from whet.cli.commands import make_rl_learner
from whet.cli.preflight import check_run
from whet.cluster import RLCluster
from whet.config import (
    ClusterConfig,
    DPORunConfig,
    GRPOConfig,
    OptimConfig,
    RLTrainingConfig,
    RoleConfig,
    SFTRunConfig,
    load_run,
    load_supervised,
)
from whet.errors import CheckpointError, ConfigError, DataError, raise_all
from whet.learners.grpo import GRPOLearner
from whet.storage.folder_lock import FolderLock


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where data or a model are loaded."""

    def loaded(*_, **__):
        raise AssertionError("something was loaded before all was checked")

    monkeypatch.setattr("whet.cli.rows.load_rows", loaded)
    monkeypatch.setattr("whet.models.load.read_model", loaded)
    monkeypatch.setattr("whet.train.role_workers.load_model", loaded)


def findings(error):
    return str(error.value).split("\n")


RUN = {
    "data=/no/such/rows.jsonl": "no file or folder '/no/such/rows.jsonl'",
    "reward=[exakt, nowhere.py:fn]": "unknown reward function 'exakt'. Known: boxed, code_tests, exact_match",
    "algo.advantage_estimator=grop": "unknown advantage estimator 'grop'; did you mean grpo or",
    "algo.policy_loss_fn=gspoo": "unknown policy loss 'gspoo'",
    "algo.loss_agg_mode=token-maen": "unknown loss_agg_mode 'token-maen'; did you mean token-mean",
    "algo.loss_masks=[of-policy]": "unknown loss mask 'of-policy'; did you mean off-policy?",
    "algo.kl_loss_mode=low_var": "unknown KL mode 'low_var'; did you mean low_var_kl",
    "algo.reward_manager=sequenc": "unknown reward manager 'sequenc'; did you mean sequence-level?",
    "rollout_engine=embeded": "unknown rollout engine 'embeded'; did you mean embedded?",
    "rollout.temperature=0": "rollout.temperature=0 draws the same completion",
    "rollout.env_path=no_such_env.py": "no file no_such_env.py",
    "actor.optim.name=adamww": "unknown optim.name 'adamww'; did you mean adamw",
    "actor.optim.schedule=linaer": "unknown optim.schedule 'linaer'; did you mean linear?",
    "trainer.mini_batch_size=3": "batch_size=8 must be a multiple of mini_batch_size=3; use mini_batch_size=2 or 4",
    "trainer.max_tokens_per_microbatch=10": "max_tokens_per_microbatch=10 is smaller than the longest sequence",
    "trainer.loggers=[tensorbord]": "unknown logger 'tensorbord'; did you mean tensorboard?",
    "trainer.keep_best=accuracy": "trainer.keep_best needs evaluations, and there is no evaluation data",
    "tokenizer=/no/such/tokenizer": "there is no folder /no/such/tokenizer",
    "reference.model=/no/such/reference": "there is no folder /no/such/reference",
}


def test_all_names_references_sizes_and_loggers_are_checked_at_once_before_anything_is_loaded(unloaded, capsys):
    lengths = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64"]  # else the data tell them
    assert main(["grpo", *RUN, *lengths]) == 2
    said = capsys.readouterr().err
    missing = [finding for finding in ["no model; write model=", *RUN.values(), "nowhere.py"] if finding not in said]
    assert missing == []
    assert said.startswith("whet grpo:\n") and len(said.splitlines()) == len(RUN) + 3  # the head, the model, nowhere.py


def test_wrong_keys_are_told_with_all_else_that_does_not_hang_on_them(unloaded, capsys, model_folder):
    wrong = {
        "actor.lrr=1e-6": "unknown key actor.lrr; did you mean actor.lr",
        "rollout.top_p=hot": "rollout.top_p: expected a number, got 'hot'",
        "reward=exakt": "unknown reward function 'exakt'",
        f"model={model_folder}x": f"there is no folder {model_folder}x",
        "trainer.loggers=[tensorbord]": "unknown logger 'tensorbord'",
        "trainer.mini_batch_size=3": "batch_size=8 must be a multiple of mini_batch_size=3",
    }

    def said(*words):
        assert main(["grpo", *wrong, *words]) == 2
        head, *lines = capsys.readouterr().err.splitlines()
        assert head == "whet grpo:"
        return [[finding for finding in (*wrong.values(), "no data; write data=") if finding in line] for line in lines]

    every = [[finding] for finding in (*wrong.values(), "no data; write data=")]
    assert sorted(said()) == sorted(every)
    assert sorted(said("rollout.temperature=0")) == sorted(every)  # which says nothing of a section that lacks a key
    without = [finding for finding in every if "must be a multiple" not in finding[0]]
    assert sorted(filter(None, said("batch_sise=6"))) == sorted(without)  # it may have been data.batch_size
    assert sorted(filter(None, said("data.batch_sise=6"))) == sorted(f for f in without if "no data" not in f[0])
    assert main(["dpo", "algo.bta=1", f"model={model_folder}x", "algo.loss_type=simpoo"]) == 2
    assert [line.split(";")[0].split()[:2] for line in capsys.readouterr().err.splitlines()[1:]] == [
        ["unknown", "key"],
        ["no", "data"],
        ["there", "is"],
    ]


def test_supervised_runs_are_checked_likewise(unloaded, model_folder):
    given = ["data=rows.jsonl", f"model={model_folder}x", "trainer.loggers=[wanb]"]
    with pytest.raises(ConfigError) as error:
        check_run(load_supervised([*given, "algo.loss_type=simpoo"], DPORunConfig))
    whole = findings(error)
    assert len(whole) == 4
    for part in ("loss_type 'simpoo'", "no file or folder 'rows.jsonl'", f"no folder {model_folder}x", "logger 'wanb'"):
        assert any(part in line for line in whole), part
    with pytest.raises(ConfigError, match="unknown SFT loss 'nl'"):
        check_run(load_supervised([f"data={model_folder}", f"model={model_folder}", "algo.loss_type=nl"], SFTRunConfig))


def test_a_folder_that_holds_a_run_and_a_checkpoint_that_is_none_are_found_before_too(unloaded, tmp_path, model_folder):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "mode": "train", "version": 3}\n')
    words = [f"model={model_folder}", f"data={tmp_path}", "reward=exact_match", "tokenizer=byte"]
    with pytest.raises(ConfigError, match=r"holds a run of 3 steps; set trainer\.resume=latest"):
        check_run(load_run([*words, f"trainer.run_dir={tmp_path}"]))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        check_run(load_run([*words, f"trainer.resume={tmp_path / 'step-000001'}"]))
    other = tmp_path / "other" / "run"
    check_run(load_run([*words, f"trainer.run_dir={other}"]))
    assert not other.parent.exists()
    below = tmp_path / "metrics.jsonl" / "run"  # which is not a folder
    with pytest.raises(ConfigError) as error:
        check_run(load_run([*words, f"trainer.run_dir={below}", f"trainer.checkpoint_root_directory={below}"]))
    said = [line.partition(" can't be written")[0] for line in findings(error)]
    assert said == [f"trainer.run_dir={below}", f"trainer.checkpoint_root_directory={below}"]


def test_an_environment_without_a_reward_is_found_before_too(unloaded, tmp_path, model_folder):
    (tmp_path / "env.py").write_text("class World:\n    def step(self, message): ...")
    words = [f"model={model_folder}", f"data={tmp_path}", f"rollout.env_path={tmp_path}/env.py:World"]
    with pytest.raises(ConfigError, match=r"no reward: environment World has neither get_reward\(\) nor"):
        check_run(load_run(words))
    check_run(load_run([*words, "reward=exact_match"]))


def test_from_python_a_cluster_and_a_learner_check_theirs(unloaded, monkeypatch):
    training = RLTrainingConfig(loggers=["wanb"], actor_optimizer=OptimConfig(name="adm"))
    with pytest.raises(ConfigError) as error:
        RLCluster(
            actor=RoleConfig(model="/no/model"),
            tokenizer="byte",
            cluster_config=ClusterConfig(training_config=training, rollout_engine="vanila"),
        )
    assert [line.split("'")[1] for line in findings(error) if "unknown" in line] == ["vanila", "adm", "wanb"]
    assert "there is no folder /no/model" in str(error.value)
    with pytest.raises(ConfigError) as error:
        GRPOLearner(None, GRPOConfig(advantage_estimator="a", policy_loss_fn="b"), "exact_match")  # pyright: ignore
    assert [line.split("'")[1] for line in findings(error)] == ["a", "b"]


def test_one_finding_keeps_its_class_and_the_same_one_is_said_once():
    def fails(error):
        raise error

    with pytest.raises(DataError, match=r"^a$"):
        raise_all([lambda: fails(DataError("a")), lambda: fails(ConfigError("a"))])
    with pytest.raises(ConfigError, match=r"^a\nb$"):
        raise_all([lambda: fails(DataError("a")), lambda: fails(ConfigError("b")), lambda: fails(ConfigError("a"))])
    with pytest.raises(ZeroDivisionError):
        raise_all([lambda: 1 / 0])


def test_reward_functions_are_looked_at_beside_the_data_before_a_model_is_loaded(tmp_path, model_folder, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("a model was loaded before the rewards were checked")

    monkeypatch.setattr("whet.cli.commands.RLCluster", loaded)
    (tmp_path / "own.py").write_text("def graded(completions, gold): ...\ndef easy(completions, anwser=0): ...\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1/2+1=", "answer": "3/2"}\n')
    words = [f"model={model_folder}", f"data={tmp_path / 'rows.jsonl'}", f"trainer.run_dir={tmp_path / 'run'}"]

    def refused(reward, *more):
        with pytest.raises((ConfigError, DataError, AssertionError)) as error:
            make_rl_learner(load_run([*words, f"reward=[{reward}]", *more]))
        return findings(error)

    lengths = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=4"]  # rows, not prompts, are looked at
    for given in ([], lengths):
        said = refused(f"{tmp_path}/own.py:graded, {tmp_path}/own.py:easy, last_number, exact_match", *given)
        assert [line.split(",")[0] for line in said] == [
            "reward function graded needs 'gold'",
            "last_number can't read the answer of 1 of 2 rows (row 1: '3/2')",
        ]
        assert "a model was loaded" in refused("exact_match", *given)[0]
    assert "a model was loaded" in refused("last_number", "trainer.on_reward_error=none")[0]
    (tmp_path / "env.py").write_text("class Quiz:\n    def reset(self, gold): ...\n    def get_reward(self): ...\n")
    said = refused("exact_match", f"rollout.env_path={tmp_path}/env.py:Quiz", *lengths)
    assert said[0].startswith("reset of Quiz needs 'gold', which is not a column; your columns: answer")
    talk = '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "4"}]}\n'
    (tmp_path / "rows.jsonl").write_text(talk)
    assert "a model was loaded" in refused("exact_match", "data.on_answered=take_off", *lengths)[0]


def test_a_package_that_is_not_installed_is_told_before_anything_is_loaded(unloaded, capsys, monkeypatch):
    for package in ("vllm", "torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["grpo", "model=a/b", "rollout_engine=vllm", "actor.optim.name=adamw8bit"]) == 2
    said = capsys.readouterr().err
    assert "rollout_engine 'vllm' needs vLLM" in said and "optim.name='adamw8bit' needs torchao" in said


@pytest.mark.parametrize("option", ["sharded", "enable_async_checkpointing"])
def test_moments_that_can_not_be_sharded_are_told_before_anything_is_loaded(unloaded, capsys, option):
    words = [f"trainer.checkpointing_options.{option}=true", "actor.optim.name=adamw8bit"]
    assert main(["sft", "model=a/b", "data=rows.jsonl", *words]) == 2
    assert "the moments of optim.name='adamw8bit' can't be sharded" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_the_columns_of_supervised_rows_are_looked_at_before_a_model_is_loaded(
    command, tmp_path, monkeypatch, capsys, model_folder
):
    def loaded(*_, **__):
        raise AssertionError("a model was loaded before the first row was read")

    monkeypatch.setattr("whet.train.role_workers.load_model", loaded)
    (tmp_path / "rows.jsonl").write_text('{"reply": "b", "grade": "c"}\n')
    words = [f"model={model_folder}", f"data={tmp_path / 'rows.jsonl'}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert main([command, *words, "trainer.max_steps=1"]) == 2
    assert "row 0 has the columns reply, grade" in capsys.readouterr().err


def test_a_busy_folder_and_an_adapter_that_fits_nothing_are_said_before_anything_is_loaded(
    unloaded, tmp_path, model_folder, capsys
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run", "trainer.run_dir")
    try:
        words = [f"model={model_folder}", f"data={tmp_path}/rows.jsonl", "reward=exact_match"]
        words += [f"trainer.run_dir={tmp_path}/run", "actor.lora.target_modules=[q_prj]"]
        assert main(["grpo", *words]) == 2
    finally:
        lock.release()
    said = capsys.readouterr().err
    assert f"{tmp_path}/run is in use by process" in said and "unknown lora.target_modules 'q_prj'" in said
