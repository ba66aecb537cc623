"""A supervised job in one library: python supervised_sides.py whet|trl job.json. Prints what it measured, last.

A step lasts from the end of the step before to its own end, on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from common import Resident


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedJob:
    """One run of SFT or DPO, the same for every library."""

    kind: str
    """"sft" or "dpo"."""
    model: str
    """Folder with model and tokenizer."""
    rows: list[dict[str, Any]]
    """prompt and completion, or prompt, chosen and rejected."""
    steps: int
    batch: int
    """whet: rows of a step. TRL: of DPO too; of SFT it packs rows of `max_length`, `packed` a step."""
    max_length: int
    packed: int
    """TRL's SFT: packed rows of a step, of as many tokens as whet's batch."""
    micro: int
    """TRL: rows of one forward and backward pass."""
    lr: float = 1e-6
    device: str = "cpu"
    threads: int = 1
    seed: int = 0


class Steps:
    """Seconds and tokens of each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []
        self.last, self.tokens = time.perf_counter(), 0.0

    def ends(self, tokens: float, loss: float) -> None:
        """Ends a step. Args: tokens: all up to now."""
        now = time.perf_counter()
        self.found.append({"step": now - self.last, "tokens": tokens - self.tokens, "loss": loss})
        self.last, self.tokens = now, tokens

    def log(self, step: int, values: dict[str, float]) -> None:
        """Ends a step, as a logger of whet."""
        if "train/loss" in values:
            self.ends(values["train/num_tokens"], values["train/loss"])

    def close(self) -> None:
        """Nothing is held."""


def run_whet(job: SupervisedJob) -> dict[str, Any]:
    """The job in whet."""
    from whet.config import OptimConfig, RoleConfig, SupervisedDataConfig, SupervisedTrainingConfig
    from whet.train.supervised_models import SupervisedModels

    steps = Steps()
    config = SupervisedTrainingConfig(max_steps=job.steps, seed=job.seed, pbar_description=None, loggers=(steps,))
    data = SupervisedDataConfig(batch_size=job.batch, shuffle=False, max_length=job.max_length)
    role = RoleConfig(model=job.model, dtype="float32", optim=OptimConfig(lr=job.lr))
    warm(job)
    memory = Resident(job.device)
    models = SupervisedModels(
        actor=role,
        reference=RoleConfig(model=job.model, dtype="float32") if job.kind == "dpo" else None,
        tokenizer=job.model,
        config=config,
    )
    if job.kind == "sft":
        from whet.learners.sft import SFTLearner

        learner: Any = SFTLearner(models, data=data)
    else:
        from whet.config import PreferenceConfig
        from whet.learners.preference import PreferenceLearner

        learner = PreferenceLearner(models, PreferenceConfig(), data=data)
    steps.last = time.perf_counter()
    learner.train(job.rows)
    return said(steps, memory, "whet")


def warm(job: SupervisedJob) -> None:
    """Loads a model and forgets it, so that what importing and reading take is no side's cost."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)


def run_trl(job: SupervisedJob) -> dict[str, Any]:
    """The job in TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    steps = Steps()

    class OnLog(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                steps.ends(float(logs["num_tokens"]), float(logs["loss"]))

    warm(job)
    memory = Resident(job.device)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa")
    size = job.packed if job.kind == "sft" else job.batch
    micro = min(job.micro, size)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": job.steps,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": size // micro,
            "learning_rate": job.lr,
            "lr_scheduler_type": "constant",
            "max_length": job.max_length,
            "max_grad_norm": 1.0,
            "optim": "adamw_torch_fused",
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": job.device == "cpu",
            "dataloader_pin_memory": job.device == "cuda",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": job.seed,
        }
        given = {
            "model": model,
            "train_dataset": Dataset.from_list(job.rows),
            "processing_class": AutoTokenizer.from_pretrained(job.model),
            "callbacks": [OnLog()],
        }
        if job.kind == "sft":
            trainer: Any = SFTTrainer(args=SFTConfig(packing=True, **common), **given)
        else:
            reference = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
            trainer = DPOTrainer(ref_model=reference, args=DPOConfig(**common), **given)
        steps.last = time.perf_counter()
        trainer.train()
    return said(steps, memory, "trl")


def said(steps: Steps, memory: Resident, library: str) -> dict[str, Any]:
    """What a side measured."""
    named = {library: "whet-rl" if library == "whet" else library, "torch": "torch", "transformers": "transformers"}
    versions = {name: metadata.version(distribution) for name, distribution in named.items()}
    return {
        "steps": steps.found,
        "memory": memory.peak(),
        "memory_exact": memory.exact,
        "versions": {**versions, "python": platform.python_version()},
    }


def main() -> None:
    """Runs the job."""
    import torch

    side, path = sys.argv[1:]
    job = SupervisedJob(**json.loads(Path(path).read_text()))
    torch.set_num_threads(job.threads)
    print(json.dumps({"whet": run_whet, "trl": run_trl}[side](job)))


if __name__ == "__main__":
    main()
