"""RL2's commands from their words to the folder of a finished run, on a tiny random model."""

import json
import sys

import pytest
from helpers import END, tiny_model

from whet.data.tokenizer import byte_tokenizer
from whet.rl2.command import main
from whet.rl2.execute import with_steps
from whet.rl2.translate import translate_command

CALCULATOR = '''
def interact(messages):
    """Adds up the bytes of the first turn."""
    if len(messages) > 2:
        return []
    return [{"role": "tool", "content": str(sum(map(ord, messages[-1]["content"])) % 10)}]


def reward_fn(messages, answer):
    return float(len(set(messages[-1]["content"]) & set(answer))) + len(set(messages[1]["content"])) / 10
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl2")
    tiny_model(max_position_embeddings=256).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "env.py").write_text(CALCULATOR)
    chats = [[{"role": "user", "content": f"{i}+1="}] for i in range(12)]
    rows = [{"messages": chat, "answer": f"{i}aeiou"} for i, chat in enumerate(chats)]
    (folder / "rl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = [{"messages": [*chat, {"role": "assistant", "content": str(i + 1)}]} for i, chat in enumerate(chats)]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, said)))
    return folder


def words(place, *more):
    return [
        "ppo",
        f"data.path={place}/rl.jsonl",
        "data.prompts_per_rollout=4",
        "data.responses_per_prompt=3",
        f"actor.model_name={place}/model",
        "actor.lr=1e-2",
        "actor.dtype=float32",
        "actor.max_length_per_device=160",
        f"actor.rollout.env_path={place}/env.py",
        "actor.rollout.max_turns=2",
        "rollout.train_sampling_params.max_new_tokens=6",
        "trainer.disable_wandb=true",
        "whet.trainer.pbar_description=null",
        *more,
    ]


@pytest.mark.parametrize(
    "switches",
    [
        ["adv.estimator=reinforce", "actor.tis_coef=2", "actor.kl.coef=0.01", "actor.kl.type=loss"],
        ["adv.estimator=gae", "actor.kl.coef=0.01", "actor.kl.type=reward", "actor.freeze_steps=1", "critic.lr=1e-3"],
    ],
)
def test_a_calculator_of_two_turns_is_trained_on_what_was_sampled(place, switches, tmp_path):
    import pandas

    text = "whet.rollout.forbidden_tokens=[257,258,259,260,261,262,263]"  # else a turn may fork: it reads otherwise
    more = [f"trainer.save_dir={tmp_path}/run", text, f"data.test_data_path={place}/rl.jsonl"]
    assert main(words(place, *switches, *more)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train, evaluation = ([r for r in rows if r["mode"] == mode] for mode in ("train", "eval"))
    assert len(train) == 3 and len(evaluation) == 2 and train[-1]["turns/mean"] == 2.0
    differences = [
        r["sampling/sampling_logp_difference/max"] for r in train if "sampling/sampling_logp_difference/max" in r
    ]
    assert differences and max(differences) < 1e-4  # the trainer's logprobs of the tokens are the sampler's
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000001.parquet")
    for row in table.itertuples():
        first, tool, last = (m["content"] for m in json.loads(row.completion))
        tokens, logprobs = row.tokens.tolist(), row.logprobs.tolist()
        assert tool == str(sum(map(ord, first)) % 10)
        answer = json.loads((place / "rl.jsonl").read_text().splitlines()[row.row])["answer"]
        assert row.reward == pytest.approx(len(set(last) & set(answer)) + len(set(first)) / 10)
        sampled = [t for t, p in zip(tokens, logprobs) if p != 0]  # what was not sampled has no logprob
        assert len(tokens) - len(sampled) == len(f"<\n<tool\n{tool}<\n<assistant\n") - (
            END in tokens[: len(sampled) // 2]
        )
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_sft_trains_and_evaluates(place, tmp_path, capsys):
    more = ["actor.lr=1e-2", "actor.max_length_per_device=256", f"trainer.save_dir={tmp_path}/run"]
    quiet = ["trainer.disable_wandb=true", "whet.trainer.pbar_description=null", "trainer.n_epochs=3"]
    data = [f"data.path={place}/sft.jsonl", "data.max_length=64", "data.batch_size=4"]
    assert main(["sft", *data, f"actor.model_name={place}/model", *more, *quiet]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 9 and losses[-1] < losses[0]
    capsys.readouterr()
    named = f"whet.trainer.run_dir={tmp_path}/run"
    assert main(["sft", *data, f"actor.model_name={place}/model", *more, *quiet, named]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "set trainer.load_ckpt_from=latest to resume it, or another whet.trainer.run_dir" in told
    assert main(["sft", *data, f"actor.model_name={place}/model", *more, *quiet, "whet.trainer.resume=latest"]) == 0


def test_a_second_run_of_a_name_has_a_folder_of_its_own(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ["trainer.experiment_name=try", "trainer.disable_wandb=true", "whet.trainer.pbar_description=null"]
    data = [f"data.path={place}/sft.jsonl", "data.max_length=64", "data.batch_size=6"]
    command = ["sft", *data, f"actor.model_name={place}/model", *more]
    assert main(command) == 0
    first = (tmp_path / "ckpts" / "try" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(command) == 0
    assert (tmp_path / "ckpts" / "try" / "metrics.jsonl").read_bytes() == first
    rows = lambda: (tmp_path / "ckpts" / "try_2" / "metrics.jsonl").read_text().splitlines()
    assert (
        len(rows()) == 2 and "ckpts/try holds a run, which stays: this one is in ckpts/try_2" in capsys.readouterr().err
    )
    assert main([*command, "trainer.load_ckpt_from=latest", "trainer.n_epochs=2"]) == 0  # the last of them goes on
    assert len(rows()) == 4 and not (tmp_path / "ckpts" / "try_3").exists()


@pytest.mark.parametrize("template", [True, False])
def test_messages_are_read_with_the_chat_template_and_a_prompt_without(place, template, tmp_path, capsys):
    import pandas

    rows = [{"messages": [{"role": "user", "content": f"{i}?"}], "prompt": f"say {i}", "answer": "1"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        *("ppo", f"rollout.train.path={tmp_path}/rows.jsonl", "rollout.train.prompts_per_rollout=4"),
        *(f"rollout.train.apply_chat_template={template}".lower(), "rollout.train.sampling_params.max_new_tokens=4"),
        *(f"rollout.env_path={tmp_path}/env.py", f"actor.model_name={place}/model", "trainer.total_steps=1"),
        *(f"trainer.save_dir={tmp_path}/run", "trainer.use_wandb=false", "rollout.test_ratio=0.0"),
        "whet.trainer.pbar_description=null",
    ]
    (tmp_path / "env.py").write_text(
        "def reward_fn(messages, answer):\n    return float(len(messages[-1]['content']))\n"
    )
    assert main(command) == 0
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000001.parquet")
    assert all(("say" in text, "<|im_start|>" in text) == (not template, template) for text in table.prompt_text)
    said = capsys.readouterr().err
    assert f"{'messages' if template else 'prompt'} is read, as RL2 reads it" in said


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_rows_without_the_column_that_rl2_reads_are_read_by_another(place, verb, tmp_path):
    answers = {"sft": {"response": "1"}, "dpo": {"chosen": "1", "rejected": "2"}}[verb]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?", **answers}) for i in range(4)))
    words = [f"data.path={tmp_path}/rows.jsonl", "data.batch_size=4", f"actor.model_name={place}/model"]
    more = [f"trainer.save_dir={tmp_path}/run", "trainer.disable_wandb=true", "whet.trainer.pbar_description=null"]
    assert main([verb, *words, *more]) == 0


def test_a_long_prompt_of_several_turns_is_taken_and_its_episode_ends_at_the_budget(place, tmp_path):
    import pandas

    row = {"messages": [{"role": "user", "content": "x" * 40}], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    source = "def interact(messages):\n    return [{'role': 'tool', 'content': 'more'}]\n\n\n"
    (tmp_path / "env.py").write_text(source + "def reward_fn(messages, answer):\n    return float(len(messages))\n")
    changed = {"data.path": f"{tmp_path}/rows.jsonl", "actor.max_length_per_device": 100, "actor.rollout.max_turns": 9}
    changed |= {"actor.rollout.env_path": f"{tmp_path}/env.py", "data.responses_per_prompt": 1}
    command = [w for w in words(place) if w.partition("=")[0] not in changed]
    more = [f"{k}={v}" for k, v in changed.items()]
    assert main([*command, *more, f"trainer.save_dir={tmp_path}/run", "trainer.n_epochs=1"]) == 0
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000001.parquet")
    lengths = [len(r.prompt_tokens) + len(r.tokens) for r in table.itertuples()]
    assert max(lengths) <= 100 and min(len(r.prompt_tokens) for r in table.itertuples()) > 25


NEWEST = """
from functools import partial
from RL2.datasets import Sample, base_generate

async def env_step(sample):
    assert sample.sample["answer"].endswith("aeiou") and {"messages", "prompt"} <= sample.sample.keys()
    if len(sample.state_text) < 10:
        found = "<i>4</i>"
        return {"next_state": sample.state_text + sample.action_text + found, "reward": 0.25, "done": False}
    return {"next_state": None, "done": True, "reward": 1.0}

generate = partial(base_generate, env_step_fn=env_step)
"""
SEPTEMBER = """
async def reset(extra_info):
    return " Now: ", {**extra_info, "turns": 0}

async def step(state, action, extra_info):
    turns = extra_info["turns"] + 1
    found = "<i>4</i>"
    return {"next_state": state + action + found, "reward": 0.25 * turns, "done": turns == 3,
            "extra_info": {**extra_info, "turns": turns}, "score": 0.0}
"""


@pytest.mark.parametrize(
    ("source", "rewards"), [pytest.param(NEWEST, {1.25}, marks=pytest.mark.full), (SEPTEMBER, {1.5})]
)
def test_an_environment_of_a_later_form_runs_unchanged(place, source, rewards, tmp_path):
    (tmp_path / "env.py").write_text(source)
    rows = map(json.loads, (place / "rl.jsonl").read_text().splitlines())
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "prompt": "unread"}) for row in rows))
    command = [w for w in words(place) if not any(name in w for name in ("env_path", "max_turns", "data.path"))]
    command.append(f"data.path={tmp_path}/rows.jsonl")
    more = [f"rollout.env_path={tmp_path}/env.py", f"trainer.save_dir={tmp_path}/run", "trainer.n_epochs=1"]
    assert main([*command, *more]) == 0
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000001.parquet")
    assert set(table["reward"]) == rewards and "RL2" not in sys.modules
    last = json.loads(table["completion"][0])
    assert next(m["content"] for m in last if m["role"] == "user") == "<i>4</i>"


def test_an_environment_that_whet_can_t_read_is_refused_with_what_to_write(place, tmp_path, capsys):
    (tmp_path / "env.py").write_text(NEWEST.replace("env_step", "own_step"))
    command = [w for w in words(place) if "env_path" not in w]
    assert main([*command, f"rollout.env_path={tmp_path}/env.py", f"trainer.save_dir={tmp_path}/run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "is written for a later form of RL2's environments" in told
    assert "or write a file with reward_fn(messages, answer) and, for several turns, interact(messages)" in told
    assert "docs/from-rl2.md shows a file in both forms" in told and "fix that first" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["rm", "dpo"])
def test_pairs_train(place, verb, tmp_path):
    pairs = [
        {"messages": [{"role": "user", "content": f"{i}+1="}], "chosen": str(i + 1), "rejected": "no"} for i in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    role = {"rm": "critic", "dpo": "actor"}[verb]
    own = ["actor.beta=0.2"] if verb == "dpo" else []
    data = [f"data.path={tmp_path}/pairs.jsonl", "data.max_length=64", "data.batch_size=4", "trainer.n_epochs=4"]
    more = [f"{role}.model_name={place}/model", f"{role}.lr=1e-2", f"trainer.save_dir={tmp_path}/run", *own]
    quiet = ["trainer.disable_wandb=true", "whet.trainer.pbar_description=null"]
    assert main([verb, *data, *more, *quiet]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] and losses[0] == pytest.approx(0.693, abs=0.01)


def test_filtered_groups_do_not_change_how_many_steps_the_epochs_have(place):
    config = translate_command("ppo", words(place, "trainer.n_epochs=2")[1:])
    assert with_steps(config).trainer.max_steps == 6 and with_steps(config).trainer.num_epochs is None
    plain = translate_command("ppo", words(place, "trainer.n_epochs=2", "rollout.dynamic_filtering=false")[1:])
    assert with_steps(plain) is plain and plain.trainer.num_epochs == 2
