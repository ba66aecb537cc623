"""Scripts that `accelerate launch` or `torchrun` has started."""

import dataclasses
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import length_reward, rows, tiny_model

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).resolve().parents[3]


def started(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_batches_count_processes_as_trl_does(monkeypatch):
    started(monkeypatch, WORLD_SIZE="4", RANK="3", LOCAL_RANK="1")
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "num_generations": 8}
    args = GRPOConfig(**sizes, gradient_accumulation_steps=2)
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (4, 3, 1, False)
    assert args.generation_batch_size == 16 and args.batches.prompts == 2 and args.batches.rows == 16
    with pytest.raises(ConfigError, match="split_batches=True divides per_device_train_batch_size=2 by 4 processes"):
        GRPOConfig(**sizes, accelerator_config={"split_batches": True})
    assert dataclasses.replace(args, seed=1).generation_batch_size == 16
    with pytest.raises(
        ConfigError, match=r"global eval batch size \(3 \* 4\).*per_device_eval_batch_size=4, or .* 12$"
    ):
        GRPOConfig(**sizes, eval_strategy="steps", eval_steps=1)
    with pytest.raises(
        ConfigError, match=r"generation_batch_size \(12\) must be divisible by the global batch .*\(8\)"
    ):
        GRPOConfig(**sizes, generation_batch_size=12)
    started(monkeypatch, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    assert GRPOConfig().world_size == 1
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK is 2 in the environment, and WORLD_SIZE is 1"):
        GRPOConfig()


class Environment:
    def reset(self, **_):
        return None


def test_what_runs_in_one_process_is_refused_in_several(monkeypatch, tmp_path):
    started(monkeypatch, WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    args = GRPOConfig(str(tmp_path), use_cpu=True, num_generations=2)
    make = functools.partial(GRPOTrainer, tiny_model(), length_reward, args, rows(8), processing_class=byte_tokenizer())
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, and tools and environments run in one process"):
        make(environment_factory=Environment)
    with pytest.raises(ConfigError, match="each of 2 processes has only a shard of them; set optim"):
        make(optimizers=(torch.optim.SGD(tiny_model().parameters()), None))
    started(monkeypatch, ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_TP_SIZE="2")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_TP_SIZE=2 splits each model over 2 processes by tp, and"):
        GRPOConfig()


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
