"""The commands of `whet` on several processes write what one process writes."""

import itertools
import json
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
import torch
from helpers import full, rows, tiny_model
from processes import free_port, needs_gloo, start, wait
from run_folders import (
    assert_same_completions,
    assert_same_rows,
    assert_same_run,
    assert_same_tensors,
    rows_of,
    run_command,
    run_commands,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from whet.cli import main
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.parallel.placement import Placement
from whet.storage.model_paths import model_folder

REWARD = """
import os

def length(completions, completion_ids, mode, **_):
    with open(f"rewarded-{os.environ.get('RANK')}", "a") as file:
        file.writelines(f"{mode} {ids}\\n" for ids in completion_ids)
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
COMMON = ["trainer.pbar_description=null", "trainer.max_segments_per_packed_row=4"]
GRPO = ["grpo", "model=model", "actor.dtype=float32", "data=rows.jsonl", "data.eval_path=eval.jsonl",
        "reward=reward.py:length", "data.batch_size=3", "algo.num_generations=3", "actor.optim.lr=1e-3",
        "rollout.max_tokens_to_generate=8", *COMMON]  # fmt: skip
RUN = "trainer.run_dir=run"


SUPERVISED = ["model=model", "data.batch_size=5", "trainer.max_steps=2"]
SGD = ["actor.optim.name=sgd", "actor.optim.lr=0.1"]
"""For gradients near 0, of which AdamW would make steps of the full size, with the sign of their rounding."""
LORA = ["actor.lora.r=2", *SGD]
COMMANDS = {
    "sft": ["sft", *SUPERVISED, "data=sft.jsonl", "data.eval_path=sft-eval.jsonl", "actor.dtype=float32"],
    "sft-dropout": ["sft", *SUPERVISED, "data=sft.jsonl", "actor.dtype=float32", *LORA, "actor.lora.lora_dropout=0.3"],
    "dpo": ["dpo", *SUPERVISED, "data=pairs.jsonl", "actor.dtype=float32", "reference.dtype=float32"],
    "dpo-lora": ["dpo", *SUPERVISED, "data=pairs.jsonl", "actor.dtype=float32", *LORA],
    "rm": ["rm", *SUPERVISED, "data=pairs.jsonl", "reward_model.dtype=float32"],
    "ppo": ["ppo", *(word for word in GRPO[1:] if "generations" not in word), "trainer.max_steps=2",
            "critic.dtype=float32", "reference.dtype=float32", "algo.beta=0.1"],
    "ppo-shared": ["ppo", *(word for word in GRPO[1:] if "generations" not in word), "trainer.max_steps=2",
                   "critic.model=actor", *SGD],
    "kto": ["dpo", *SUPERVISED, "data=pairs.jsonl", "actor.dtype=float32", "reference.dtype=float32",
            "algo.loss_type=kto"],
    "grpo-updates": [*GRPO, "trainer.max_steps=2", "algo.num_iterations=2", "trainer.mini_batch_size=1",
                     "algo.beta=0.04", "reference.dtype=float32", "algo.sync_ref_model=true",
                     "algo.ref_model_sync_steps=1", "algo.target_kl=0.1", *SGD],
    "grpo-recomputed": [*GRPO, "trainer.max_steps=2", "actor.gradient_checkpointing=full", "rollout.top_k=20",
                        "algo.loss_masks=[top-entropy]", "algo.top_entropy_quantile=0.2", *SGD],
    "grpo-hf": [*GRPO, "trainer.max_steps=2", "rollout_engine=hf", *SGD],
    "grpo-hf-lora": [*GRPO, "trainer.max_steps=2", "rollout_engine=hf", *LORA],
    "grpo-lora": [*GRPO, "trainer.max_steps=2", *LORA, "algo.beta=0.1", "trainer.merge_adapter=true"],
    "ppo-offload": ["ppo", *(word for word in GRPO[1:] if "generations" not in word), "trainer.max_steps=2",
                    "critic.dtype=float32", "reference.dtype=float32", "algo.beta=0.1", "offload_to_cpu=true", *LORA],
    "grpo-distillation": [*GRPO, "trainer.max_steps=2", "teacher.model=teacher", "teacher.dtype=float32",
                          "algo.policy_loss_fn=gkd", *SGD],
    "grpo-reward-model": [*GRPO, "trainer.max_steps=2", "reward=[reward_model, reward.py:length]",
                          "reward_model.model=judge", "reward_model.dtype=float32", *SGD],
}  # fmt: skip
"""Commands of `whet` by their run folders."""
QUICK = ("sft-dropout", "grpo-lora", "grpo-reward-model")
SAVES = "trainer.checkpointing_options.save_interval_steps=1"
UNCLIPPED = ["actor.optim.name=sgd", "actor.optim.lr=0.1", "actor.optim.max_grad_norm=0"]
ROUNDINGS = 40
"""Results that are rounded on the way to a gradient: of some ten operations a layer, forward and backward."""


def in_bf16(words):
    """The same command, in bf16."""
    return [word.replace("dtype=float32", "dtype=bfloat16") for word in words]


@pytest.fixture(scope="session")
def models(tmp_path_factory, model_folder, tokenizer):
    """Folders of models: the policy, a teacher, and a reward model."""
    root = tmp_path_factory.mktemp("models")
    (root / "model").symlink_to(model_folder)
    tiny_model(3).save_pretrained(root / "teacher")
    judge = load_model(tiny_model(4), role="critic").module
    with torch.no_grad():
        judge.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    judge.save_pretrained(root / "judge")
    for name in ("teacher", "judge"):
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def folders(tmp_path, models):
    """Two folders with the same models, rows and reward function, for two runs."""
    made = []
    written = [{**row, "completion": "7" * (1 + i % 5)} for i, row in enumerate(rows(12))]
    pairs = [{**row, "chosen": "7" * (1 + i % 5), "rejected": "3" * (2 + i % 3)} for i, row in enumerate(rows(12))]
    data = {"rows": rows(12), "eval": rows(3), "sft": written, "sft-eval": written[:3], "pairs": pairs}
    for name in ("one", "several"):
        folder = tmp_path / name
        folder.mkdir()
        for model in models.iterdir():
            (folder / model.name).symlink_to(model)
        for file, of_file in data.items():
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
        (folder / "reward.py").write_text(REWARD)
        made.append(folder)
    return made


def run_to_failure(folder, words, more=None):
    """Runs a command on two processes until one has failed and the other has seen it.

    Returns: their exit codes, -9 of one that torchrun would have to end, and their standard errors.
    """
    processes = start(2, run_command, folder, free_port(), words, more or {})
    try:
        for patience in (60, 5):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], patience)
        if processes[0].is_alive():  # it waits for the other one
            processes[0].join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [p.exitcode for p in processes], [(folder / f"stderr-{rank}").read_text() for rank in range(2)]


def compare(folders, monkeypatch, commands, size=2):
    """Runs commands on several processes, and in this one meanwhile; compares the run folders."""
    run_both(folders, monkeypatch, commands, size)
    one, several = folders
    for run in {word for words in commands for word in words if word.startswith("trainer.run_dir=")}:
        name = run.removeprefix("trainer.run_dir=")
        assert_same_run(one / name, several / name)


def run_both(folders, monkeypatch, commands, size=2, more=()):
    """Runs commands on several processes, and in this one meanwhile. Args: more: words for several processes."""
    one, several = folders
    processes = start(size, run_commands, several, free_port(), [[*words, *more] for words in commands])
    try:
        monkeypatch.chdir(one)
        for words in commands:
            assert main(words) == 0
    finally:
        wait(processes, several)


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [QUICK, *(full((name,)) for name in COMMANDS if name not in QUICK)], ids=" ".join)
def test_every_command_writes_the_run_of_one_process(folders, monkeypatch, names):
    seen = ["trainer.perf_metrics_options.enable_trace_writer=true"]
    of_rl = ["trainer.token_stats_every_n_steps=1"]
    words = {n: [*COMMANDS[n], *COMMON, *seen, *(of_rl if n.startswith(("grpo", "ppo")) else [])] for n in names}
    compare(folders, monkeypatch, [[*words[name], f"trainer.run_dir={name}"] for name in names])
    for name in names:
        of_one, of_both = (json.loads((folder / name / "trace.json").read_text())["traceEvents"] for folder in folders)
        assert {e["pid"] for e in of_one} == {0} and {e["pid"] for e in of_both} == {0, 1}
        if name.startswith("grpo"):
            stored = pandas.read_parquet(folders[1] / name / "completions/train-000001.parquet")
            assert any(len(values) for values in stored.trainer_logprobs.dropna())


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("key, names", [
    ("tensor_parallel_size", ("grpo-lora",)),
    full("context_parallel_size", ("sft-dropout", "grpo-distillation", "ppo-shared")),
    full("data_parallel_replicate_size", ("sft-dropout", "grpo-distillation", "ppo-shared")),
    full("tensor_parallel_size", ("sft", "grpo-updates", "grpo-distillation", "ppo-shared")),
    full("tensor_parallel_size", ("grpo-reward-model", "grpo-hf", "grpo-hf-lora", "dpo-lora")),
])  # fmt: skip
def test_other_meshes_train_and_resume_as_one_process(folders, monkeypatch, key, names):
    steps = ["trainer.max_steps=1"], ["trainer.max_steps=2", "trainer.resume=latest"]
    words = [[*COMMANDS[n], *COMMON, SAVES, *more, f"trainer.run_dir={n}"] for n in names for more in steps]
    run_both(folders, monkeypatch, words, more=[f"trainer.{key}=2"])
    for name in names:
        one, several = (folder / name for folder in folders)
        assert_same_rows(rows_of(one), rows_of(several))
        for path in one.rglob("*.safetensors"):
            assert_same_tensors(load_file(path), load_file(several / path.relative_to(one)), str(path))


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [full(name) for name in COMMANDS])
def test_bf16_differs_by_the_rounding_of_fp32(folders, monkeypatch, name):
    """The masters, the sums of gradients and their norm are fp32, and all else is rounded alike in the same passes."""
    monkeypatch.setattr(Placement, "data_size", 2)
    compare(folders, monkeypatch, [in_bf16([*COMMANDS[name], *COMMON, RUN])])


@needs_gloo
@pytest.mark.timeout(200)
def test_bf16_is_bit_equal_and_resumes_where_each_rank_has_one_pass(folders, monkeypatch):
    """A sum of two gradients does not depend on their order, nor on where the shards lie."""
    words = {"sft": ["sft", *SUPERVISED[:2], "data=sft.jsonl", "actor.dtype=bfloat16", *COMMON, *UNCLIPPED, SAVES],
             "grpo": [*in_bf16(GRPO), "data.batch_size=2", *UNCLIPPED, SAVES, "offload_to_cpu=true"]}  # fmt: skip
    steps = [["trainer.max_steps=1"], ["trainer.max_steps=2", "trainer.resume=latest"]]
    compare(folders, monkeypatch, [[*words[n], *more, f"trainer.run_dir={n}"] for n in words for more in steps])
    for name in ("sft", "grpo"):
        a, b = (load_file(f / name / "checkpoints/step-000002/actor/model.safetensors") for f in folders)
        assert all(torch.equal(a[key], b[key]) for key in a) and {x.dtype for x in b.values()} == {torch.float32}
        made = json.loads((folders[1] / name / "environment.json").read_text())
        assert made["compute_dtype"] == {"actor": "bfloat16"}


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.full
def test_an_update_in_bf16_is_that_of_one_process_to_the_rounding_of_bf16(folders, monkeypatch):
    """Here one process runs fewer passes, and the gradient of each pass is rounded."""
    words = {"sft": COMMANDS["sft"], "grpo": GRPO}
    last = [*UNCLIPPED, "trainer.max_steps=1", "data.eval_path=null", "trainer.max_segments_per_packed_row=64"]
    run_both(folders, monkeypatch, [in_bf16([*words[n], *COMMON, *last, f"trainer.run_dir={n}"]) for n in words])
    start_weights = load_file(folders[0] / "model/model.safetensors")
    bound = ROUNDINGS**0.5 * torch.finfo(torch.bfloat16).eps / 2
    for name in words:
        one, several = (load_file(folder / name / "final/model.safetensors") for folder in folders)
        for key, weight in one.items():
            assert 0 < (several[key] - weight).norm() <= bound * (weight - start_weights[key]).norm(), (name, key)


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, full(4)])
def test_grpo_refills_evaluates_saves_and_resumes_as_one_process(folders, monkeypatch, size):
    """Of four ranks one has no prompt to sample."""
    more = [
        *GRPO,
        RUN,
        SAVES,
        "algo.dynamic_sampling=true",
        "algo.group_reward_bounds=[2.5, 3.5]",
    ]
    compare(folders, monkeypatch, [[*more, "trainer.max_steps=1"],
                                   [*more, "trainer.max_steps=3", "trainer.resume=latest"]], size)  # fmt: skip
    drawn = [row["dynamic_sampling/batches"] for row in rows_of(folders[0] / "run") if row["mode"] == "train"]
    assert max(drawn) > 1
    one, several = ([path.read_text().splitlines() for path in f.glob("rewarded-*")] for f in folders)
    assert sorted(itertools.chain(*several)) == sorted(*one) and len(several) == min(size, 3)


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [["actor.optim.name=adamw"], LORA], ids=["adamw", "lora"])
def test_a_run_of_two_processes_goes_on_in_one_and_then_in_two(folders, monkeypatch, optimizer, dtype):
    one, several = folders
    words = [*GRPO, *optimizer, RUN, SAVES]
    words = words if dtype == "float32" else in_bf16(words)
    part = lambda steps: [*words, f"trainer.max_steps={steps}", "trainer.resume=latest"]
    wait(start(2, run_commands, several, free_port(), [part(1)]), several)
    monkeypatch.chdir(several)
    assert main(part(2)) == 0
    wait(start(2, run_commands, several, free_port(), [part(3)]), several)
    monkeypatch.chdir(one)
    for steps in (1, 2, 3):
        assert main(part(steps)) == 0
    assert_same_run(one / "run", several / "run")


RESUMED = {
    "adamw": [*GRPO, "actor.optim.name=adamw"],
    "momentum": [*GRPO, "actor.optim.name=sgd", "actor.optim.lr=0.1", "actor.optim.momentum=0.9"],
    "lora": [*GRPO, "actor.lora.r=2", "actor.optim.name=adamw"],
    "critic": COMMANDS["ppo"],
}
"""Commands whose checkpoints of two processes are resumed by other numbers of processes."""


SHARDED = "trainer.checkpointing_options.sharded=true"
ASYNC = "trainer.checkpointing_options.enable_async_checkpointing=true"


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [[], [SHARDED], [ASYNC]], ids=["whole", "sharded", "async"])
@pytest.mark.parametrize("name", [full(name) for name in RESUMED])
def test_a_checkpoint_of_two_processes_is_resumed_by_one_two_and_four(folders, monkeypatch, name, kind):
    """The next three steps are those of a run of one process that was never interrupted."""
    one, several = folders
    part = lambda run, steps: [*RESUMED[name], *kind, f"trainer.run_dir={run}", SAVES, f"trainer.max_steps={steps}",
                               "data.eval_path=null", "trainer.resume=latest"]  # fmt: skip
    monkeypatch.chdir(one)
    assert main(part("run-1", 4)) == 0
    wait(start(2, run_commands, several, free_port(), [part("run-1", 1)]), several)
    for size in (2, 4):
        shutil.copytree(several / "run-1", several / f"run-{size}")
        wait(start(size, run_commands, several, free_port(), [part(f"run-{size}", 4)]), several)
    monkeypatch.chdir(several)
    assert main(part("run-1", 4)) == 0
    for size in (1, 2, 4):
        run = several / f"run-{size}"
        assert_same_rows(rows_of(one / "run-1"), rows_of(run))
        for path in (one / "run-1").rglob("*.safetensors") if not kind else (one / "run-1/final").glob("*.safetensors"):
            assert_same_tensors(load_file(path), load_file(run / path.relative_to(one / "run-1")), str(path))


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [[], [SHARDED], [ASYNC]], ids=["whole", "sharded", "async"])
def test_a_checkpoint_of_two_processes_that_divide_matrices_is_resumed_on_other_meshes(folders, monkeypatch, kind):
    one, several = folders
    words = [*RESUMED["adamw"], *kind, SAVES, "data.eval_path=null", "trainer.resume=latest"]
    part = lambda run, steps, size: [*words, f"trainer.run_dir={run}", f"trainer.max_steps={steps}",
                                     f"trainer.tensor_parallel_size={size}"]  # fmt: skip
    monkeypatch.chdir(one)
    assert main(part("whole", 3, 1)) == 0
    wait(start(2, run_commands, several, free_port(), [part("1", 1, 2)]), several)
    for run in ("2", "4"):
        shutil.copytree(several / "1", several / run)
    wait(start(2, run_commands, several, free_port(), [part("2", 2, 1), part("2", 3, 2)]), several)
    wait(start(4, run_commands, several, free_port(), [part("4", 3, 2)]), several)
    monkeypatch.chdir(several)
    assert main(part("1", 3, 1)) == 0
    final = load_file(one / "whole/final/model.safetensors")
    for run in ("1", "2", "4"):
        assert_same_rows(rows_of(one / "whole"), rows_of(several / run))
        assert_same_tensors(final, load_file(several / run / "final/model.safetensors"), run)


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_sharded_checkpoint_is_resumed_bit_by_bit(folders, monkeypatch):
    """An asynchronous one: the steps that run while it is written must not change it."""
    several = folders[1]
    part = lambda run, steps: ["sft", *SUPERVISED[:2], *COMMON, "data=sft.jsonl", "actor.dtype=float32", ASYNC, SAVES,
                               f"trainer.run_dir={run}", f"trainer.max_steps={steps}",
                               "trainer.resume=latest"]  # fmt: skip
    words = [part(*of) for of in (("whole", 3), ("parts", 2), ("parts", 3))]
    wait(start(2, run_commands, several, free_port(), words), several)
    a, b = (load_file(several / run / "final/model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    files = several.glob("whole/checkpoints/step-000002/shards/*")
    assert sorted(x.name[:11] for x in files) == ["shard-00001", "shard-00002"]
    monkeypatch.chdir(several)
    shutil.rmtree("parts/checkpoints/step-000003")
    Path("parts/checkpoints/latest").write_text("step-000002")
    assert main(words[2]) == 0  # in one process, with its own rounding
    assert_same_tensors(load_file("parts/final/model.safetensors"), a, "final")
    damaged = next(Path("parts/checkpoints/step-000003/shards").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert main([*words[2], "trainer.max_steps=4"]) == 2
    with pytest.raises(ConfigError, match="shards can't be read: SafetensorError"):
        model_folder("parts/checkpoints/step-000003")


DRAWING = """
import os
import numpy as np

rank = int(os.environ["RANK"])
np.random.seed(100 + rank)

def drawn(completions, **_):
    rewards = [float(np.random.random()) for _ in completions]
    with open(f"drawn-{rank}", "a") as file:
        file.write(f"{rewards}\\n")
    return rewards
"""


@needs_gloo
@pytest.mark.timeout(200)
def test_a_resume_restores_the_random_generators_of_each_rank(folders):
    """From a checkpoint whose shards both wrote while the next step ran."""
    folder = folders[1]
    (folder / "reward.py").write_text(DRAWING)
    words = [*GRPO, RUN, "reward=reward.py:drawn", "data.batch_size=2", "data.eval_path=null", "trainer.max_steps=2",
             SAVES, ASYNC]  # fmt: skip
    for more in ([], ["trainer.resume=run/checkpoints/step-000001"]):
        wait(start(2, run_commands, folder, free_port(), [[*words, *more]]), folder)
    (_, first, again), (_, other_first, other_again) = (
        (folder / f"drawn-{rank}").read_text().splitlines() for rank in range(2)
    )
    assert (again, other_again) == (first, other_first) and first != other_first
    assert len(list(folder.glob("run/checkpoints/step-000001/shards/*"))) == 2


FAULTY = """
import os, sys, time
import whet.models.forward, whet.train.model_files

def length(completions, mode, **_):
    if mode == "train" and os.environ["RANK"] == "{rank}":
        {fault}
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
MISSING = "rewards: the other ranks did not all arrive here: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 8000"
FAULTS = {
    "raises": (1, "raise ValueError('judge broke')", "rewards: rank 1 of 2 failed: RewardError; its own output says"),
    "exits": (1, "os._exit(3)", "rewards: rank 1 has ended; its output says why"),
    "sleeps": (1, "time.sleep(300)", MISSING),
    "forward": (1, "whet.models.forward.model_stats = None", "update: another process ended; its own message says why"),
    "hangs": (1, "whet.models.forward.model_stats = lambda *_, **__: time.sleep(300)",
              "update: another process did not answer within trainer.collective_timeout_s; it hangs"),
    "save": (0, "whet.train.model_files.save_weights = None", "checkpoint\n"),
}  # fmt: skip
"""The rank that fails, what its reward function does, and what rank 0 says."""


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", ["raises", *map(full, ("exits", "sleeps", "forward", "hangs", "save"))])
def test_a_fault_of_one_rank_ends_the_others_with_rank_step_and_phase(folders, fault):
    folder, (rank, code, message) = folders[1], FAULTS[fault]
    (folder / "reward.py").write_text(FAULTY.format(rank=rank, fault=code))
    words = [*GRPO, RUN, "trainer.max_steps=2", "trainer.collective_timeout_s=8", "data.eval_path=null",
             SAVES]  # fmt: skip
    codes, output = run_to_failure(folder, words)
    assert all(codes) and f"rank 0 of 2, step 1, {message}" in output[0], output
    if fault == "raises":  # each says it once
        own = "whet grpo: rank 1 of 2, step 1, rewards: reward function length raised ValueError: judge broke"
        assert own in output[1] and [x.count("judge broke") for x in output] == [0, 2], output
        at_first = (folder / "reward.py").read_text().replace('"train"', '"eval"')
        (folder / "reward.py").write_text(at_first)
        _, output = run_to_failure(folder, [*words, "data.eval_path=eval.jsonl", "trainer.run_dir=evaluated"])
        assert "whet grpo: rank 0 of 2, rewards: rank 1 of 2 failed: RewardError; its own output says why" in output[0]
        assert "whet grpo: rank 1 of 2, rewards: reward function length raised ValueError: judge broke" in output[1]


KILLED = {
    0: "whet.train.model_files.write_state = lambda *_: os.kill(os.getpid(), 9)",
    1: "whet.parallel.fsdp.gather_full_tensor = lambda *_: os.kill(os.getpid(), 9)",
}
"""Rank -> what kills it in its next save: rank 0 when it has written weights, rank 1 before it gives its shards."""
KILLED_IN_THREAD = "whet.parallel.shards.file_sum = lambda *_: os.kill(os.getpid(), 9)"
"""What kills a rank when it has written its shards, while the next step runs."""


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", [[], [ASYNC]], ids=["whole", "async"])
@pytest.mark.parametrize("rank", [full(rank) for rank in KILLED])
def test_a_rank_killed_in_a_save_loses_no_earlier_checkpoint(folders, monkeypatch, rank, kind):
    one, several = folders
    killed = KILLED_IN_THREAD if kind else KILLED[rank]
    is_saved = "os.path.isdir('run/checkpoints/step-000001')"  # step 2 waits for it
    fault = f"calls.append(1)\n        while calls[1:] and not {is_saved}: time.sleep(0.05)"
    fault += f"\n        calls[1:] and exec({killed!r})"
    loaded = "import whet.parallel.fsdp, whet.parallel.shards\ncalls = []\n"
    (several / "reward.py").write_text(loaded + FAULTY.format(rank=rank, fault=fault))
    words = [*GRPO, *kind, RUN, SAVES, "trainer.max_steps=3", "data.eval_path=null", "trainer.resume=latest"]
    codes, output = run_to_failure(several, words)
    assert codes[rank] == -9 and all(codes), output
    kept = [path.name for path in (several / "run/checkpoints").glob("step-*")]
    unfinished = list((several / "run/checkpoints").glob(".tmp-*"))
    assert kept == ["step-000001"] and len(unfinished) == (rank == 0)  # rank 0 removes its own, unless it is killed
    (several / "reward.py").write_text(REWARD)
    wait(start(2, run_commands, several, free_port(), [words]), several)
    assert not list((several / "run/checkpoints").glob(".tmp-*"))
    monkeypatch.chdir(one)
    assert main(words) == 0
    assert_same_rows(rows_of(one / "run"), rows_of(several / "run")) if kind else assert_same_run(
        one / "run", several / "run"
    )
    assert AutoModelForCausalLM.from_pretrained(several / "run/final").dtype == torch.float32


@needs_gloo
@pytest.mark.timeout(200)
def test_ranks_with_other_data_or_settings_are_told_before_they_compute(folders):
    folder = folders[1]
    words = [*COMMANDS["sft"], *COMMON, RUN, "data.eval_path=null", "trainer.collective_timeout_s=20"]
    (folder / "rank-1").mkdir()
    (folder / "rank-1/model").symlink_to(folder / "model")
    (folder / "rank-1/sft.jsonl").write_text((folder / "sft.jsonl").read_text().replace("7", "77"))
    for place in (folder, folder / "rank-1"):  # a stream, since rows are compared at the start
        (place / "stream.py").write_text("import json\ndef rows(): yield from map(json.loads, open('sft.jsonl'))\n")
    codes, output = run_to_failure(folder, [*words, "data.path=stream.py:rows"])
    assert codes == [2, 2] and all("step 1, update: rank 1 has another batch than rank 0: tokens " in x for x in output)
    (folder / "rank-1/sft.jsonl").write_text("".join((folder / "sft.jsonl").read_text().splitlines(True)[:5]))
    codes, output = run_to_failure(folder, [*words, "data.path=stream.py:rows", "trainer.run_dir=shorter"])
    said = "step 1, data: rank 1 has another batch than rank 0: rows 5 and none, since the data have ended there"
    assert codes == [2, 2] and all(said in x for x in output), output
    apart = [word for word in words if not word.startswith("trainer.max_steps")]
    codes, output = run_to_failure(folder, apart, {0: ["trainer.max_steps=2"], 1: ["trainer.max_steps=9"]})
    said = "rank 1 of 2 has other settings than rank 0: trainer.max_steps: 2 -> 9; give all processes the same command"
    assert codes == [2, 2] and said in output[0], output


PLANTED = "torch.OutOfMemoryError('planted')"
OUT_OF_MEMORY = f"import torch; whet.train.worker.aggregate = lambda *_: (_ for _ in ()).throw({PLANTED})"


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_process_that_ran_out_of_memory_makes_the_passes_of_all_smaller_after_a_restart(folders, monkeypatch):
    one, several = folders
    (several / "reward.py").write_text("import whet.train.worker\n" + FAULTY.format(rank=1, fault=OUT_OF_MEMORY))
    words = [*GRPO, RUN, SAVES, *UNCLIPPED, "trainer.max_steps=2", "data.eval_path=null", "trainer.resume=latest",
             "trainer.max_segments_per_packed_row=8"]  # fmt: skip
    codes, output = run_to_failure(several, words)
    assert all(codes) and "it continues with at most" in output[1], output
    noted = json.loads((several / "run/checkpoints/micro_batch_tokens.json").read_text())["actor"]
    (several / "reward.py").write_text(REWARD)
    codes, output = run_to_failure(several, words)
    assert codes == [0, 0] and f"have at most {noted} tokens in a micro-batch" in output[0], output
    monkeypatch.chdir(one)
    assert main(words) == 0
    assert_same_tensors(*(load_file(f / "run/final/model.safetensors") for f in folders), "final")


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
def test_max_restarts_goes_on_from_the_last_checkpoint(folders, monkeypatch):
    one, several = folders
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    fault = f"{first} and os.path.isdir('run/checkpoints/step-000002') and os._exit(1)"
    (several / "reward.py").write_text(FAULTY.format(rank=1, fault=fault))
    words = [*GRPO, RUN, "trainer.max_steps=4", SAVES]
    done = torchrun(several, ["-m", "whet", *words, "trainer.resume=latest"], "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr and "step 2 is done" in done.stderr
    monkeypatch.chdir(one)
    assert main(words) == 0
    assert_same_rows(rows_of(one / "run"), rows_of(several / "run"))


def torchrun(folder, program, *options):
    """Runs a program on two processes that torchrun starts."""
    root = str(Path(__file__).parents[2])
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options, *program]
    return subprocess.run(words, cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("front", ["command", "script"])
def test_torchrun_itself_starts_them(folders, monkeypatch, front):
    one, several = folders
    words = [*GRPO, RUN, "trainer.max_steps=2"]
    (several / "train.py").write_text(f"import sys\nfrom whet.cli import main\nsys.exit(main({words!r}))\n")
    program = ["-m", "whet", *words] if front == "command" else ["train.py"]
    done = torchrun(several, program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 processes train together: FSDP over gloo") == 1
    monkeypatch.chdir(one)
    assert main(words) == 0
    assert_same_run(one / "run", several / "run")


@needs_gloo
@pytest.mark.timeout(200)
def test_an_evaluation_of_two_processes_is_that_of_one_and_resumes(folders, monkeypatch):
    """The resumed one finds all there, and calls no reward function."""
    one, several = folders
    words = ["eval", "model=model", "data=rows.jsonl", "reward=reward.py:length", "dtype=float32", "out=out",
             "data.batch_size=5", "data.limit=7", "num_generations=2", "temperature=1",
             "max_tokens_to_generate=8"]  # fmt: skip
    processes = start(2, run_commands, several, free_port(), [words, [*words, "resume=true"]])
    try:
        monkeypatch.chdir(one)
        assert main(words) == 0
    finally:
        wait(processes, several)
    a, b = (json.loads((folder / "out/results.json").read_text()) for folder in folders)
    a["seconds"] = b["seconds"] = 0.0
    assert a == b
    for path in sorted((one / "out/completions").iterdir()):
        assert_same_completions(*(pandas.read_parquet(folder / "out/completions" / path.name) for folder in folders))
    ranks = [path.read_text().splitlines() for path in several.glob("rewarded-*")]
    assert len(ranks) == 2 and sum(map(len, ranks)) == 14


FAKES = {
    "scontrol": "echo 127.0.0.1; echo node1",
    "srun": """pids=()
for _ in $(seq $SLURM_NNODES); do "$@" & pids+=($!); done
trap 'kill -TERM ${pids[@]}' TERM
for pid in ${pids[@]}; do wait $pid; wait $pid; done""",
    "torchrun": """words=("${@/--nproc_per_node=8/--nproc_per_node=1}")
exec $PYTHON -m torch.distributed.run --local_addr=127.0.0.1 "${words[@]/:29500/:$PORT}" $MORE""",
}
"""Stand-ins for SLURM's commands; both nodes are this host, with one process each in place of eight."""


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_slurm_script_of_the_docs_stops_by_a_signal_and_goes_on(folders):
    folder, root = folders[1], Path(__file__).parents[2]
    page = (root / "docs/scaling.md").read_text()
    (folder / "job.sh").write_text("#!/bin/bash" + page.split("#!/bin/bash")[1].split("```")[0])
    (folder / "bin").mkdir()
    for name, text in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    words = [*GRPO[1:], SAVES, "data.eval_path=null"]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(root),
                   "PYTHON": sys.executable, "SLURM_NNODES": "2", "SLURM_JOB_ID": "7",
                   "SLURM_JOB_NODELIST": "node[0-1]"}  # fmt: skip

    def submit(steps, output):
        more = " ".join([*words, f"trainer.max_steps={steps}"])
        run = environment | {"PORT": str(free_port()), "MORE": more}
        with (folder / output).open("w") as file:
            return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=run, stderr=file, stdout=file)

    job, metrics = submit(10_000, "first"), folder / "runs/a/metrics.jsonl"
    try:
        while job.poll() is None and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.1)
        job.terminate()
        job.wait(60)
    finally:
        job.kill()
    said = (folder / "first").read_text()
    assert "torchrun ends the processes after 570 s" in said and "stopped after step" in said, said
    done = len(metrics.read_text().splitlines())
    assert submit(done + 1, "second").wait(120) == 0, (folder / "second").read_text()
    said = (folder / "second").read_text()
    assert "resumed from" in said and len(metrics.read_text().splitlines()) == done + 1, said
