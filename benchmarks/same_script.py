"""TRL's GRPO quickstart by TRL and by whet.trl: the same script, of which only the import differs.

    python benchmarks/same_script.py                       # SmolLM2, three seeds, ten steps each
    python benchmarks/same_script.py --seeds 1 --steps 2   # a trial

The script is that of TRL's documentation of GRPOTrainer: a data set, a reward function, a GRPOConfig, train(). The data
are made here, since the documentation's are on the hub: questions about sums, and a reward of 1 where the answer's last
number is right. Each run has a process of its own with the same number of threads; runs are interleaved. A step lasts
from the end of the step before; the first step of a run is left out of times. Memory is the peak of the whole process.
The ratios are TRL's cost over whet's, the median over the seeds. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import tasks

SCRIPT = """\
import json, random, re, sys, time
from datasets import Dataset
from transformers import TrainerCallback
from {module} import GRPOConfig, GRPOTrainer

model, steps, seed, rows, tokens = sys.argv[1], *map(int, sys.argv[2:])
dataset = Dataset.from_list(json.load(open("rows.json")))


def reward_last_number(completions, answer, **kwargs):
    numbers = [re.findall(r"-?[0-9]+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer)]


class Clock(TrainerCallback):
    ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.time())


training_args = GRPOConfig(
    output_dir="out", max_steps=steps, seed=seed, per_device_train_batch_size=rows, num_generations=8,
    max_completion_length=tokens, learning_rate=1e-5, lr_scheduler_type="constant", logging_steps=1,
    save_strategy="no", report_to="none", disable_tqdm=True, use_cpu={cpu}, bf16={bf16},
)
trainer = GRPOTrainer(
    model=model, reward_funcs=reward_last_number, args=training_args, train_dataset=dataset, callbacks=[Clock()]
)
ready = time.time()
trainer.train()
log = [row for row in trainer.state.log_history if "reward" in row]
json.dump({{"ready": ready, "ends": Clock.ends, "log": log}}, open("result.json", "w"))
"""
"""The script of both sides."""
MODULES = {"whet": "whet.trl", "trl": "trl"}
COSTS = ("step", "memory", "start")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.common_arguments(__doc__)
    parser.add_argument("--model", default=tasks.SMOLLM2, help="smollm2, or a folder with a chat template")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step, with 8 completions each")
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    args = parser.parse_args(argv)
    if min(args.seeds, args.prompts, args.tokens) < 1 or args.steps < 2:
        parser.error("--seeds, --prompts and --tokens must be at least 1, --steps at least 2")
    return args


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversational prompts with their answers.

    >>> make_rows(1, 0)[0]["prompt"][0]["role"]
    'user'
    """
    import random

    rng = random.Random(seed)
    questions = [tasks.sum_question(rng) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": text}], "answer": right} for text, right in questions]


def run(args: argparse.Namespace, side: str, model: str, seed: int) -> dict[str, Any]:
    """One run of the script. Raises RuntimeError: it failed."""
    n = str(args.threads)
    env = {**os.environ, "OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if args.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    python = sys.executable if side == "whet" else common.peer_python(args.peer_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps(make_rows(args.steps * args.prompts, seed)))
        text = SCRIPT.format(module=MODULES[side], cpu=args.device == "cpu", bf16=args.dtype == "bfloat16")
        (folder / "train.py").write_text(text)
        words = [model, args.steps, seed, args.prompts * 8, args.tokens]
        with (folder / "log.txt").open("w") as log:
            begun = time.time()
            child = subprocess.Popen(
                [python, "train.py", *map(str, words)], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{side} failed ({python}):\n{(folder / 'log.txt').read_text()[-4000:]}")
        found = json.loads((folder / "result.json").read_text())
    return {
        **measures(found, begun, args.prompts * 8),
        "memory": peak_bytes(usage),
        "cpu": usage.ru_utime + usage.ru_stime,
    }


def peak_bytes(usage: resource.struct_rusage) -> int:
    """The peak of a process's resident memory."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measures(found: dict[str, Any], begun: float, completions: int) -> dict[str, Any]:
    """What a run's clock and log say.

    Args: found: what the script wrote. begun: when its process started. completions: of a step.
    Returns: start (seconds until the trainer is made), first (those of the first step), step and tokens_per_s (means of
        the later steps), rewards and lengths (of each step).

    >>> log = [{"reward": 0.5, "completions/mean_length": 4.0}] * 3
    >>> measures({"ready": 3.0, "ends": [9.0, 11.0, 13.0], "log": log}, 1.0, 8)["tokens_per_s"]
    16.0
    """
    ends, log = found["ends"], found["log"]
    lengths = [float(row["completions/mean_length"]) for row in log]
    step = (ends[-1] - ends[0]) / (len(ends) - 1)
    return {
        "start": found["ready"] - begun,
        "first": ends[0] - found["ready"],
        "step": step,
        "tokens_per_s": completions * statistics.fmean(lengths[1:]) / step,
        "rewards": [float(row["reward"]) for row in log],
        "lengths": lengths,
    }


def compare(runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the runs say. Args: runs: for each seed, side -> what `run` returns.

    Returns: ratios (medians over the seeds) and spread of each cost; by side, means of costs, and the mean and standard
        error over the seeds of the reward of the first and of the last third of the steps.
    """
    ratios = {cost: [r["trl"][cost] / r["whet"][cost] for r in runs] for cost in COSTS}
    sides = {}
    for side in MODULES:
        own = [r[side] for r in runs]
        third = max(1, len(own[0]["rewards"]) // 3)
        sides[side] = {
            **{name: statistics.fmean(r[name] for r in own) for name in (*COSTS, "first", "tokens_per_s", "cpu")},
            "reward_first": common.mean_and_error([statistics.fmean(r["rewards"][:third]) for r in own]),
            "reward_last": common.mean_and_error([statistics.fmean(r["rewards"][-third:]) for r in own]),
            "length": statistics.fmean(n for r in own for n in r["lengths"]),
        }
    return {
        "ratios": {cost: statistics.median(v) for cost, v in ratios.items()},
        "spread": {cost: [min(v), max(v)] for cost, v in ratios.items()},
        "sides": sides,
    }


def main(argv: list[str] | None = None) -> None:
    """Runs both sides and prints the result."""
    from importlib import metadata

    args = arguments(argv)
    model = str(tasks.smollm2_folder()) if args.model == tasks.SMOLLM2 else args.model
    runs = []
    for seed in range(args.seeds):
        order = list(MODULES)[:: 1 if seed % 2 == 0 else -1]
        runs.append({side: run(args, side, model, seed) for side in order})
        for side in order:
            r = runs[-1][side]
            print(
                f"seed {seed} {side}: start {r['start']:.1f} s, first step {r['first']:.1f} s, step {r['step']:.2f} s, "
                f"{r['tokens_per_s']:.0f} tok/s, {r['memory'] / 2**20:.0f} MiB, rewards "
                + " ".join(f"{x:.2f}" for x in r["rewards"]),
                flush=True,
            )
    settings = {
        name: getattr(args, name) for name in ("dtype", "device", "threads", "seeds", "steps", "prompts", "tokens")
    }
    versions = {name: metadata.version(name) for name in ("trl", "torch", "transformers") if args.peer_python is None}
    result = {**compare(runs), "model": Path(args.model).name, **settings, "versions": versions}
    common.finish(
        "same_script" if args.dtype == "float32" else "same_script-bf16", result, device=args.device, record=args.record
    )


if __name__ == "__main__":
    main()
