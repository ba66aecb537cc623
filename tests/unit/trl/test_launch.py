"""Scripts that `accelerate launch` or `torchrun` has started."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.trl import GRPOConfig

ROOT = Path(__file__).resolve().parents[3]


def started(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_several_processes_are_refused_with_the_step_of_one(monkeypatch):
    started(monkeypatch, WORLD_SIZE="4", RANK="0", LOCAL_RANK="0")
    with pytest.raises(ConfigError, match=r"4 processes.*--num_processes 1.*gradient_accumulation_steps by 4: 8"):
        GRPOConfig(gradient_accumulation_steps=2)
    started(monkeypatch, WORLD_SIZE="1")
    assert GRPOConfig().world_size == 1


def test_what_accelerate_was_told_counts(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "whet")
    started(monkeypatch, ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_USE_FSDP="true")
    args = GRPOConfig(bf16=False)
    assert args.bf16
    assert args.device.type == "cpu"
    assert args.use_cpu
    assert "FSDP does not shard the model" in caplog.text
    started(monkeypatch, ACCELERATE_MIXED_PRECISION="fp16")
    assert GRPOConfig().bf16 is None  # the configuration's own default stands above the launcher's, as in TRL
    with pytest.raises(ConfigError, match="--mixed_precision bf16 or no"):
        GRPOConfig(bf16=False)
    started(monkeypatch, ACCELERATE_MIXED_PRECISION="no")
    assert GRPOConfig(bf16=False).bf16 is False


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [["accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1", "--cpu", "--mixed_precision", "no",
      "--dynamo_backend", "no"],
     ["torch.distributed.run", "--nproc_per_node", "1", "--master_port", "0"]],
    ids=["accelerate", "torchrun"],
)  # fmt: skip
@pytest.mark.timeout(400)
def test_a_launched_script_trains(launcher, tmp_path):
    pytest.importorskip(launcher[0].split(".")[0])
    script = ROOT / "examples" / "trl" / "resume.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", *launcher, str(script)], cwd=tmp_path, env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[1, 2]" in done.stdout
    assert (tmp_path / "resume-grpo" / "checkpoint-2" / "model.safetensors").exists()
