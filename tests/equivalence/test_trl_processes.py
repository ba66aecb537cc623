"""whet.trl on several processes makes the steps of TRL on as many, and those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from helpers import full, tiny_model
from processes import free_port, needs_gloo, start, wait
from run_folders import assert_same_completions, assert_same_tensors, files_of
from safetensors.torch import load_file
from trl_scripts import run_scripts

METHODS = ("SFT", "DPO", "GRPO")
ROOT = Path(__file__).parents[2]
TIMED = ("runtime", "per_second", "step_time")


def assert_same_logs(a, b):
    """That two logs differ in times alone, and by rounding."""
    for row, other in zip(a, b, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if not name.endswith(TIMED):
                assert other[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(200)
def test_two_processes_take_the_steps_of_trl_on_two(tmp_path):
    """The same prompts in each process, the same losses and gradient norms, and weights that SGD has moved alike."""
    pytest.importorskip("trl")
    wait(start(2, run_scripts, tmp_path, free_port(), ("trl", "whet.trl"), METHODS), tmp_path)
    theirs, ours = tmp_path / "trl", tmp_path / "whet.trl"
    for method in METHODS:
        assert_same_tensors(*(load_file(folder / method / "model.safetensors") for folder in (theirs, ours)))
        for rank in range(2):
            a, b = (json.loads((folder / f"{method}-{rank}.json").read_text()) for folder in (theirs, ours))
            assert a["prompts"] == b["prompts"] and len(a["prompts"]) == (2 if method == "GRPO" else 0)
            keep = ("loss", "grad_norm", "reward", "rewards/margins", "num_tokens", "epoch", "step", "learning_rate")
            a, b = ([{n: v for n, v in row.items() if n in keep} for row in x["log"]] for x in (a, b))
            assert len(a) == 3 and "grad_norm" in a[1]
            assert_same_logs(a, b)


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"],
}  # fmt: skip


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", [full(name) for name in LAUNCHERS])
def test_a_launched_program_writes_the_files_of_one_process(tmp_path, launcher):
    for package in ("peft", LAUNCHERS[launcher][0].partition(".")[0]):
        pytest.importorskip(package)
    program, folders = str(Path(__file__).with_name("trl_program.py")), [tmp_path / name for name in ("one", "two")]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "equivalence")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for words, folder in zip(([], ["-m", *LAUNCHERS[launcher]]), folders, strict=True):
        folder.mkdir()
        tiny_model().save_pretrained(folder / "model")
        done = subprocess.run([sys.executable, *words, program, str(folder)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = folders
    assert files_of(one) == files_of(two)
    for name in sorted(files_of(one)):
        a, b = one / name, two / name
        if name.endswith(".safetensors"):
            assert_same_tensors(load_file(a), load_file(b), name)
        elif name.endswith(".parquet"):
            assert_same_completions(pandas.read_parquet(a), pandas.read_parquet(b))
        elif name.count("/") == 0:
            logs = [json.loads(path.read_text()) for path in (a, b)]
            for row in (*logs[0], *logs[1]):  # of two calls, each for its own completions, the mean of both
                row.pop("longest", None), row.pop("eval_longest", None)
            assert_same_logs(*logs)
