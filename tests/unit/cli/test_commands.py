import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import yaml
from datasets import Dataset, load_dataset
from helpers import same, tiny_model, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from whet import cli
from whet.cli import commands, main
from whet.cli.rows import load_train_and_eval
from whet.config import load_run
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.models.load import load_model, save_model
from whet.storage.run_folder import RunFolder

REWARD = """
import os, signal

def digits(prompts, completions, answer, **columns):
    return [float(sum(c.isdigit() for c in text)) + len(text) % 3 for text in completions]

def turns(prompts, completions, **columns):
    assert prompts[0][-1]["role"] == "user"
    return [float(len(c[0]["content"])) for c in completions]

def stops(prompts, completions, done=[], **columns):
    if not done:
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    return turns(prompts, completions)
"""
QUICK = [
    "rollout.max_tokens_to_generate=6",
    "rollout.temperature=1.0",
    "data.batch_size=4",
    "actor.lr=1e-2",
    "actor.dtype=float32",
    "trainer.max_steps=2",
    "algo.beta=0.0",
    "algo.num_generations=2",
    "data.apply_chat_template=false",
]


@pytest.fixture
def words(tmp_path, model_folder):
    """The words of a small run, in a folder of its own."""
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "rewards.py").write_text(REWARD)
    return [
        f"model={model_folder}",
        f"data={tmp_path / 'rows.jsonl'}",
        f"reward={tmp_path / 'rewards.py'}:digits",
        f"trainer.run_dir={tmp_path / 'run'}",
        *QUICK,
    ]


def test_a_stream_that_is_to_be_shuffled_says_that_it_keeps_its_order(words, caplog):
    streamed = [*words, "data.streaming=true"]
    rows, _ = load_train_and_eval(load_run(streamed))
    assert [row["answer"] for row in rows] == list(range(1, 11))
    assert "data.shuffle has no effect on a stream without data.shuffle_buffer: it keeps its own order" in caplog.text
    caplog.clear()
    load_train_and_eval(load_run([*streamed, "data.shuffle=false"]))
    load_train_and_eval(load_run(words))
    assert caplog.text == ""


def test_a_run_that_began_elsewhere_has_no_evaluation_before_it():
    evaluations = [{"step": 4, "reward": 0.5, "accuracy": 0.5}, {"step": 6, "reward": 0.25, "accuracy": 0.25}]
    task = SimpleNamespace(main_metric="reward", eval_unit="prompts")
    run = SimpleNamespace(evaluations=evaluations, rows=[], step=6, task=task)
    found = commands.summarise(run, load_run(["model=m"]), 1.0)
    assert found["eval_reward_before"] is None and found["eval_reward_after"] == 0.25
    assert "accuracy_before" not in found


@pytest.mark.parametrize("lengths", [[], ["rollout.max_prompt_length=4"]])
def test_each_row_is_encoded_once_and_each_mode_has_one_encoder(words, lengths, monkeypatch):
    made, read = [], []
    for name, calls in (("__init__", made), ("_read_row", read)):
        own = getattr(PromptEncoder, name)
        counted = lambda *args, own=own, calls=calls, **options: calls.append(args[-1]) or own(*args, **options)
        monkeypatch.setattr(PromptEncoder, name, counted)
    run = [*words, *lengths, "data.eval_fraction=0.2", "data.batch_size=4", "trainer.max_steps=1"]
    assert commands.grpo(load_run(run))["steps"] == 1
    assert len(made) == 2 and sorted(read) == sorted([*range(8), *range(2)])


def test_the_command_trains_from_a_shell_and_leaves_a_complete_folder(tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-m", "whet.cli", "grpo", *words, "data.eval_fraction=0.2"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [line for line in done.stderr.splitlines() if line.startswith(("first prompt", "  "))]
    assert shown[:3] == ["first prompt, row 0: 4 tokens", "  | 0+1=", "  plain text, without a chat template"]
    folder = tmp_path / "run"
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "completions", "checkpoints", "final"} <= names
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["eval_prompts"] == 2
    assert {"eval_reward_before", "eval_reward_after", "reward_first", "reward_last"} <= summary.keys()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["actor"]["optim"]["lr"] == 0.01 and config["data"]["batch_size"] == 4
    assert "versions" in json.loads((folder / "environment.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["mode"]) for row in rows] == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]
    files = sorted(str(p) for p in (folder / "completions").iterdir())
    table = pandas.read_parquet(files[-1])
    assert {"prompt", "completion", "reward", "reward/digits", "advantage", "tokens"} <= set(table.columns)
    assert [bytes(ids.tolist()).decode() for ids in table.prompt_tokens] == table.prompt_text.tolist()
    assert table.prompt_text.tolist() == table.prompt.tolist()  # plain text
    assert len(load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))) == 24
    AutoModelForCausalLM.from_pretrained(folder / "final")
    assert AutoTokenizer.from_pretrained(folder / "final").eos_token_id == 256
    assert (folder / "checkpoints" / "step-000002" / "run.pt").is_file()


@pytest.mark.full
def test_a_closed_session_ends_a_run_with_a_checkpoint_though_its_output_is_gone_and_its_reward_forks(tmp_path, words):
    """As a user has it: the reward's workers, the terminal's signal to the whole group, nobody who reads on."""
    (tmp_path / "pooled.py").write_text(
        "import multiprocessing, time\n"
        "def late(text):\n"
        "    time.sleep(0.1)\n"
        "    return float(len(text) % 3)\n"
        "def pooled(completions, **_):\n"
        "    print('to nobody', flush=True)\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        return pool.map(late, completions[:4], 1) * (len(completions) // 4)\n"
    )
    changed = [w for w in words if not w.startswith(("reward=", "trainer.max"))]
    changed += [f"reward={tmp_path / 'pooled.py'}:pooled", "trainer.max_steps=1000"]
    rows = tmp_path / "run" / "metrics.jsonl"
    with open("/dev/full", "w") as full:
        child = subprocess.Popen(
            [sys.executable, "-m", "whet.cli", "grpo", *changed],
            stdout=subprocess.PIPE,
            stderr=full,
            cwd=tmp_path,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    child.stdout.close()
    try:
        until = time.monotonic() + 100
        while not (rows.is_file() and rows.read_text()) and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGHUP)
        assert child.wait(60) == 130
    finally:
        child.kill()
    steps = len(rows.read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{steps:06d}\n"


def test_conversations_train_in_process_and_one_that_is_stopped_says_the_command_that_goes_on(tmp_path, words, capsys):
    chats = [w for w in words if not w.startswith(("data=", "reward="))]
    chats += [f"data={tmp_path / 'chats.jsonl'}", f"reward={tmp_path / 'rewards.py'}:stops", "trainer.seed=3"]
    assert main(["grpo", *chats]) == 130
    said, how, command = capsys.readouterr().err.strip().rsplit("\n", 2)
    assert said.endswith(f"stopped after step 1; checkpoint: {tmp_path}/run/checkpoints/step-000001")
    there, command = command.split(" && ")
    assert how == "continue with:" and there == f"  cd {shlex.quote(str(Path.cwd()))}"
    assert command.endswith(f" grpo trainer.run_dir={tmp_path}/run trainer.resume=latest")
    again = shlex.split(command)
    assert main(again[again.index("grpo") :]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000002.parquet")
    assert json.loads(table.prompt[0])[0]["role"] == "user"
    folder = tmp_path / "run"
    whole, short = (yaml.safe_load((folder / f"config{name}.yaml").read_text()) for name in ("_full", ""))
    assert whole["algo"]["kl_loss_mode"] == "low_var_kl" and "kl_loss_mode" not in short["algo"]
    capsys.readouterr()
    assert main(["grpo", f"trainer.run_dir={folder}", "trainer.resume=latest", "trainer.max_steps=3"]) == 0
    said = capsys.readouterr().err
    assert "resume: settings of the run that the command does not set again:\n" in said
    assert "trainer.seed=3 (default 0)" in said
    assert main(["grpo", f"trainer.run_dir={folder}", "trainer.resume=latest", "trainer.seed=4"]) == 2
    said = capsys.readouterr().err
    assert "trainer.seed: 3 -> 4" in said and "run folder:" not in said  # the model is not loaded yet


def test_the_written_configuration_gives_the_same_run_again(tmp_path, words):
    assert main(["grpo", *words]) == 0
    again = ["--config", str(tmp_path / "run" / "config.yaml"), f"trainer.run_dir={tmp_path / 'again'}"]
    assert main(["grpo", *again]) == 0
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "final") for name in ("run", "again")]
    assert same(*map(weights_of, models))


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        (("model=", None), "no model; write model="),
        (("data=", None), "no data; write data="),
        (("reward=", None), "no reward; write reward="),
        (("model=", "model=/nowhere/at/all"), "/nowhere/at/all"),
        (("reward=", "reward=exact_mach"), "did you mean exact_match"),
        (("data.batch_size", "data.batch_sise=4"), "did you mean data.batch_size"),
        (("trainer.max", "trainer.mini_batch_size=3"), "must be a multiple of mini_batch_size=3"),
        (("algo.beta", "algo.num_generations=1"), "num_generations must be greater than 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_message_with_status_2(words, change, words_, capsys):
    start, new = change
    changed = [w for w in words if not w.startswith(start)] + ([] if new is None else [new])
    assert main(["grpo", *changed]) == 2
    said = capsys.readouterr().err
    assert words_ in said and "Traceback" not in said


def test_a_reference_is_loaded_only_for_the_divergence(words):
    with_kl = [w for w in words if not w.startswith("algo.beta")]
    for argv, roles in ((words, {"actor"}), ([*with_kl, "algo.beta=0.1"], {"actor", "reference"})):
        learner, train, held = commands.make_rl_learner(load_run(argv))
        assert {role.value for role in learner.cluster.workers} == roles
        assert len(list(train)) == 10 and held is None


def test_a_teacher_takes_the_place_of_rewards(words, tmp_path, capsys):
    save_model(load_model(tiny_model(3)), byte_tokenizer(), tmp_path / "teacher")
    alone = [w for w in words if not w.startswith("reward=")]
    asked = [*alone, f"teacher.model={tmp_path / 'teacher'}", "teacher.dtype=float32", "algo.policy_loss_fn=gkd"]
    assert main(["grpo", *asked]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["divergence"] > 0 and row["grad_norm"] > 0 and row["reward"] is None for row in rows)
    assert {p.name for p in (tmp_path / "run" / "checkpoints" / "step-000002").iterdir() if p.is_dir()} == {"actor"}
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["teacher"]["dtype"] == "float32"
    for change, said in (
        (["algo.policy_loss_fn=grpo"], "teacher has no effect: algo.policy_loss_fn='grpo' does not use one"),
        (["teacher.model=null"], "teacher has no model; write teacher.model="),
        (["algo.policy_loss_fn=distillation", "algo.gkd_beta=0.1"], "gkd_beta=0.1 has no effect"),
        (["teacher=null"], "no reward; write reward="),
    ):
        assert main(["grpo", *asked, *change]) == 2
        assert said in capsys.readouterr().err


def test_rows_are_held_out_once_and_never_trained_on(words, tmp_path):
    train, held = load_train_and_eval(load_run([*words, "data.eval_fraction=0.3"]))
    train, held = [r["prompt"] for r in train], [r["prompt"] for r in held]
    assert len(held) == 3 and len(train) == 7 and not set(train) & set(held)
    train, held = load_train_and_eval(load_run([*words, f"data.eval_path={tmp_path / 'chats.jsonl'}"]))
    assert len(list(train)) == len(list(held)) == 10


def test_evaluation_data_are_not_the_training_split_and_take_the_subset(words, tmp_path, monkeypatch):
    for name in ("train", "test"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    folder = str(tmp_path / "set")
    argv = [*words, f"data.eval_path={folder}", f"data.path={folder}"]
    argv = [w for w in argv if not w.startswith("data=")]
    assert load_train_and_eval(load_run(argv)) == ([{"prompt": "train"}], [{"prompt": "test"}])
    assert load_train_and_eval(load_run([*argv, "data.eval_split=train"]))[1] == [{"prompt": "train"}]
    asked = []
    monkeypatch.setattr("whet.cli.rows.load_rows", lambda source, **k: asked.append((source, k["split"], k["subset"])))
    load_train_and_eval(load_run([*argv, "data.subset=main"]))
    assert asked == [(folder, "train", "main"), (folder, None, "main")]


def test_a_split_of_what_has_none_is_refused_for_evaluation(words, tmp_path, capsys):
    (tmp_path / "made.py").write_text("def rows():\n    return [{'prompt': '1+1=', 'answer': 2}] * 8\n")
    Dataset.from_list([{"prompt": "1+1=", "answer": 2}] * 8).save_to_disk(str(tmp_path / "saved"))
    for source in (words[1], f"data={tmp_path}/made.py:rows", f"data={tmp_path}/saved"):
        assert main(["grpo", *words, source, "data.eval_split=test"]) == 2
        assert "data.eval_split=test: " in (said := capsys.readouterr().err)
        assert "has no splits, so its training rows would be evaluated; give data.eval_path" in said


def test_evaluation_on_the_training_data_is_said(words, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for given in (
        "data.eval_path=./rows.jsonl",
        "data.eval_path=rows.jsonl data.eval_split=test",
        "data.eval_split=train",
    ):
        caplog.clear()
        _, evaluated = load_train_and_eval(load_run([*words, *given.split()]))
        assert len(evaluated) == 10 and "evaluations are of the training data" in caplog.text
    caplog.clear()
    load_train_and_eval(load_run([*words, "data.eval_path=chats.jsonl", "data.eval_split=test"]))
    load_train_and_eval(load_run([*words, "data.eval_fraction=0.5"]))
    assert caplog.text == ""


def test_a_run_without_a_folder_gets_one_by_the_clock(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = commands.grpo(load_run([w for w in words if not w.startswith("trainer.run_dir")]))
    assert summary["run_dir"].startswith("runs/") and (tmp_path / summary["run_dir"] / "summary.json").is_file()


def test_a_model_can_be_made_by_a_function_in_the_run_folder(words, tmp_path, model_folder):
    (tmp_path / "make.py").write_text(
        "import shutil\n"
        "def model(folder, seed):\n"
        f"    shutil.copytree({model_folder!r}, folder, dirs_exist_ok=True)\n"
        "    return folder\n"
    )
    made = [w for w in words if not w.startswith("model=")] + [f"model={tmp_path / 'make.py'}:model"]
    assert main(["grpo", *made]) == 0
    assert (tmp_path / "run" / "start" / "config.json").is_file()
    assert main(["grpo", *made, "trainer.max_steps=3", "trainer.resume=latest"]) == 0


def test_ppo_has_a_critic_of_the_actors_model_and_a_reward_model_among_its_rewards(words, tmp_path, capsys):
    judge = load_model(tiny_model(3), role="critic")
    save_model(judge, None, tmp_path / "judge")
    digits = f"{tmp_path / 'rewards.py'}:digits"
    words = [w for w in words if not w.startswith("reward=")]
    more = [f"reward_model.model={tmp_path / 'judge'}", "reward_model.dtype=float32", "critic.lr=1e-3"]
    ppo = [*words, *more, f"reward={{reward_model: 0.5, '{digits}': 2.0}}", "algo.critic_warmup_steps=1"]
    assert main(["ppo", *ppo]) == 0
    said = capsys.readouterr().err
    assert said.count("with a fresh score head") == 1 and "judge has no tokenizer" in said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = [row for row in rows if row["mode"] == "train"]
    assert first["reward"] == 0.5 * first["rewards/judge"] + 2.0 * first["rewards/digits"]
    assert "learning_rate" not in first and last["learning_rate"] == 1e-2 and last["critic/learning_rate"] == 1e-3
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert {p.name for p in saved.iterdir() if p.is_dir()} == {"actor", "critic"}
    assert AutoModelForSequenceClassification.from_pretrained(saved / "critic").config.num_labels == 1
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["algo"]["advantage_estimator"] == "gae" and "model" not in config["critic"]
    assert main(["ppo", *ppo, "trainer.max_steps=3", "trainer.resume=latest"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["grpo", "critic.lr=1"], "critic: GRPO has no critic; leave it out, or train with whet ppo"),
        (["ppo", "reward_model.dtype=float32"], "reward_model has no model; write reward_model.model="),
        (["ppo", "reward=reward_model"], "reward names reward_model, and there is none; set reward_model.model"),
        (["ppo", "algo.loss_algo=grpo"], "unknown key algo.loss_algo; did you mean algo.policy_loss_fn"),
        (["ppo", "algo.kl_method=kl"], "unknown key algo.kl_method; did you mean algo.kl_loss_mode"),
        (["grpo", "algo.gae_lambda=1"], "algo.gae_lambda: GRPO has no critic"),
        (["ppo", "algo.gae_lambda=1.5"], "gae_lambda must be between 0 and 1, got 1.5"),
        (["ppo", "algo.clip_range_value=0"], "clip_range_value must be positive"),
        (["ppo", "algo.epsilon_low=-0.1"], "epsilon_low must not be negative"),
    ],
)
def test_what_ppo_and_grpo_do_not_have_is_said(words, argv, said, capsys):
    assert main([argv[0], *words, *argv[1:]]) == 2
    assert said in capsys.readouterr().err


def test_a_reward_model_alone_is_a_reward_and_weights_count_it():
    given = ["model=a", "data=b", "reward_model.model=c"]
    assert load_run(given).reward_names == ("reward_model",) and load_run(given).reward_weights is None
    listed = load_run([*given, "reward={exact_match: 0.5}"])
    assert listed.reward_names == ("exact_match", "reward_model") and listed.reward_weights == (0.5, 1.0)
    with pytest.raises(ConfigError, match="1 values for 2 reward functions"):
        load_run([*given, "reward=exact_match", "algo.reward_weights=[1.0]"])


@pytest.mark.parametrize("command", ["grpo", "rm", "eval"])
def test_what_is_loaded_is_said_before_anything_heavy_is_imported(command, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_run_command", lambda *_: sys.stderr.write("work\n"))
    reward = [] if command == "rm" else ["reward=exact_match"]
    assert main([command, "model=my/model", "data=rows.jsonl", *reward]) == 0
    assert capsys.readouterr().err.splitlines() == ["loading the model my/model and the data rows.jsonl", "work"]


def test_the_end_of_a_run_shows_held_out_prompts_that_changed(tmp_path):
    def write(step, completions, rewards):
        n = len(rewards)
        columns = {
            "row": [7, 7, 3, 3], "generation": [0, 1, 0, 1], "prompt": ["2+2=\n", "2+2=\n", "1-3=", "1-3="],
            "completion": completions, "tokens": [[1]] * n, "logprobs": [[-0.5]] * n, "finish_reason": ["stop"] * n,
            "version": [step] * n, "reward": rewards,
        }  # fmt: skip
        with RunFolder(tmp_path) as folder:
            folder.write_completions(step=step, mode="eval", columns=columns, rewards={"f": rewards})

    write(0, ["5", "4", "2", "-2"], [0.75, 1.0, 0.0, 1.0])
    assert commands.compare_examples(tmp_path, [0]) == commands.compare_examples(tmp_path, [0, 9]) == []
    write(20, ["4\n.", "4", "\x1b[2J-2", "2"], [0.5, 1.0, 1.0, 0.0])
    lines = ["held-out prompts: 1 better than before, 1 worse, 0 equal", "  2+2="]
    lines += ["    before (reward 0.75): 5", "    after  (reward 0.5): 4 ."]
    assert commands.compare_examples(tmp_path, [0, 10, 20], 1) == lines
    last = ["  1-3=", "    before (reward 0): 2", "    after  (reward 1): ␛[2J-2"]
    assert commands.compare_examples(tmp_path, [0, 20]) == [*lines, *last]
    write(30, ["5", "4", "2", "2"], [0.75, 1.0, 0.0, 0.0])
    assert commands.compare_examples(tmp_path, [0, 30]) == [lines[0].replace("1", "0").replace("0 equal", "2 equal")]
