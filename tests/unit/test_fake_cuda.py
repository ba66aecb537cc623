"""Steps of the engine and updates on a fake CUDA device: no mixed devices, few waits for it, the memory of the plan.

tests/fake_cuda.py says what such a device shows. It runs as a program, since a CPU build of torch must see the device
before it is imported.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whet.ops.preference import PREFERENCE_LOSSES

TESTS = Path(__file__).parents[1]
ENGINE = (
    *("greedy", "stores", "truncated", "min-p", "penalty", "logits", "moe", "lora"),
    *("chunks", "store chunks", "bounded", "fp32", "gemma2", "gemma3", "gpt_oss", "windows", "constrained"),
)
UPDATES = (
    *("plain", "entropy", "truncated", "forbidden", "penalty", "constrained", "full"),
    *("selective", "lora", "fp32", "teacher", "critic", "moe", "losses", "offload", "varlen"),
    *("windows", "gemma2", "gpt_oss"),
)
LEARNERS = (
    *("sft", "dft", "reward", "weighted", "kto", "apo_zero_unpaired"),
    *("bco", "aot", "aot_unpaired", "simpo", "orpo"),
)
OTHER_LOSSES = tuple(sorted({*PREFERENCE_LOSSES} - {*LEARNERS, "sigmoid"}))
MORE_COPIES = {"update/forbidden", "update/penalty", "update/constrained"}
"""Updates with data that are made for each micro-batch: places in a turn, tokens seen before, masks of a constraint."""
LAYER = {"engine/plain": 21, "engine/lora": 34}
"""Operations of a layer of a decode step: its kernels, and a view of what attention has written."""
MISTAKES = ("device", "shape", "index", "read")


@pytest.fixture(scope="session")
def device(tmp_path_factory):
    """The path of the built device."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("the fake CUDA device needs a C++ compiler, and there is neither g++ nor c++")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    if not (torch / "lib/libtorch_cpu.so").exists() or (torch / "lib/libtorch_cuda.so").exists():
        pytest.skip("the fake CUDA device is for CPU builds of torch on Linux")
    built = tmp_path_factory.mktemp("device") / "fake_cuda.so"
    paths = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    source = str(TESTS / "fake_cuda.cpp")
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *flags, source, "-o", str(built), *paths, "-lc10", "-ltorch_cpu"], check=True, timeout=120
    )
    return str(built)


def run(device, *cases):
    """The counts of each case."""
    command = [sys.executable, str(TESTS / "fake_cuda.py"), device, *cases]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=1700, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    assert [line["case"] for line in lines] == list(cases), out.stderr[-2000:]
    return lines


def check_step(line):
    """The budgets of an engine's steps, or of an update."""
    assert "error" not in line, f"{line['case']}: {line['error']}"
    if line["case"].startswith("engine/"):
        assert line["waits"] == 0 and line["kernels"] > 0, line
        copies = 2 if line["case"] == "engine/logits" else 1  # tokens with logprobs, and the logits asked for
        for block in line["blocks"]:
            assert block["to_host"] == block["blocking"] == copies, line
        if layer := LAYER.get(line["case"]):  # two layers, and what is outside of them, in each of four steps
            assert max(block["kernels"] for block in line["blocks"]) <= 4 * (2 * layer + 45), line
        first, *others = [block["to_device"] for block in line["blocks"]]
        masks = int(line["case"] == "engine/constrained")  # of the tokens that a step may draw
        assert first <= 1 and max(others) <= masks, line  # the tables that a regrouped batch reads
    else:
        check_update(line)


def check_update(line):
    """The budgets of an update: copies to the device do not block, and there is one for each micro-batch."""
    more_copies = line["case"] in MORE_COPIES
    ids = 2 if line["case"] == "update/forbidden" else 0  # copied once in a run, for which nothing waits
    names = [name for name, _ in line["passes"]]
    assert names[-2:] == ["forward_backward", "optim_step"], names
    for name, found in line["passes"]:
        where, count = f"{line['case']}, {name}: {found}", found["micro_batches"]
        if name == "forward_backward":
            assert count > 1 and found["waits"] == 1, where  # the metrics of all micro-batches, at the end
            assert found["to_host"] == found["blocking"] == 0, where
            assert found["to_device"] <= count + more_copies * count + 1, where  # and the columns of the batch
        elif name == "optim_step":
            assert found["waits"] <= 1, where  # the norm
            assert found["blocking"] == 0, where  # offloaded tensors go to pinned memory
        else:
            assert found["waits"] == 0 and found["to_host"] == found["blocking"] == 1, where
            assert found["to_device"] <= count + more_copies * count + ids, where


def check_mistakes(lines):
    """Mistakes show on the device, so the budgets mean something."""
    errors = {line["case"].split("/")[1]: line.get("error", "") for line in lines}
    assert "FakeTensorDeviceMismatchError" in errors["device"]
    assert "depends on values" in errors["shape"]
    assert "index on the host" in errors["index"]
    assert lines[-1]["waits"] == 2


def test_nothing_waits_for_the_device_inside_a_step(device):
    cases = [f"mistake/{name}" for name in MISTAKES]
    lines = run(device, *cases, "engine/plain", "learner/dpo")
    check_mistakes(lines[: len(cases)])
    for line in lines[len(cases) :]:
        check_step(line)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind, names",
    [("engine", ENGINE), ("update", UPDATES), ("learner", LEARNERS), ("learner", OTHER_LOSSES)],
    ids=["engine", "update", "learner", "losses"],
)
def test_other_steps(device, kind, names):
    for line in run(device, *[f"{kind}/{name}" for name in names]):
        check_step(line)


@pytest.mark.full
def test_shards_lie_on_the_host_and_are_stepped_there_where_several_processes_offload(device):
    for line, place in zip(run(device, "fsdp/device", "fsdp/host"), ("cuda:0", "cpu"), strict=True):
        assert "error" not in line, line["error"]
        assert line["shards"] == [place] and line["device"] == "cuda:0" and line["saved"] == ["cpu"], line
        assert line["sampled"] == [["cuda:0", "torch.bfloat16"]] and "11 of them in fewer kernels" in line["layers"]
        (_, update), (_, step) = line["passes"]
        assert update["kernels"] > 0 and (step["kernels"] > 0) == (place == "cuda:0"), line


@pytest.mark.full
def test_a_pass_holds_what_the_plan_of_memory_says(device):
    for line in run(device, "memory/plain", "memory/lora"):
        assert "in fewer kernels" in line["layers"], line
        assert 0 <= line["held"] - line["planned"] < 200, line  # tables whose size the tokens do not change
