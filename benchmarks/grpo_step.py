"""A GRPO step in whet and in a peer: the same model, prompts, lengths, loss and optimizer, on the same machine.

    python benchmarks/grpo_step.py --peer trl
    python benchmarks/grpo_step.py --front trl      # the drop-in too: whet.trl.GRPOTrainer by its own train()
    python benchmarks/grpo_step.py --model smollm2  # a pretrained model of 135 M parameters

Rounds are interleaved (whet, peer, whet, peer ...), each side in a process of its own with the same number of threads.
The ratios are the peer's cost over whet's, the median over the rounds; memory is the peak above the loaded model.
docs/benchmarks.md says how each side is set up, and why that is fair. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import tasks
from common import SIDES, Job

COSTS = ("step", "rollout", "update", "memory")
FRONT = "front"
"""The side of the drop-in."""
MICRO = {"A": 16, "B": 16, "C": 16, "S": 16}
"""TRL's completions of one forward and backward pass; `--tune` finds the fastest on a machine."""
COMPILE_STEPS = 3
"""Further steps for warm-up where `--tune` compiles TRL's model."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.common_arguments(__doc__)
    parser.add_argument(
        "--front", default=None, choices=["trl"], help="measure whet.trl as well, which trains by the peer's script"
    )
    parser.add_argument(
        "--workloads", default=None, help=f"some of {','.join(tasks.WORKLOADS)}; by default A,B,C, and S with smollm2"
    )
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--steps", type=int, default=2, help="steps measured in a round, after one for warm-up")
    parser.add_argument("--model", default=None, help="smollm2, or a folder; by default one of --shape is made")
    parser.add_argument("--shape", default="25m", choices=list(tasks.SHAPES), help="size of the model that is made")
    parser.add_argument("--peer-micro", type=int, default=None, help="completions of one pass of the peer")
    parser.add_argument(
        "--peer-weights", default="float32", choices=["float32", "bfloat16"], help="the peer's, in bfloat16"
    )
    parser.add_argument(
        "--budget", type=int, default=None, help="tokens of one pass of whet; by default its own default"
    )
    parser.add_argument("--tune", action="store_true", help="time each side in each of its settings, once, and stop")
    args = parser.parse_args(argv)
    args.workloads = (args.workloads or ("S" if args.model == tasks.SMOLLM2 else "A,B,C")).split(",")
    unknown = [w for w in args.workloads if w not in tasks.WORKLOADS]
    if unknown:
        parser.error(f"--workloads {','.join(unknown)}: known are {', '.join(tasks.WORKLOADS)}")
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return args


def make_job(args: argparse.Namespace, name: str, model: Path, tokenizer: Any, seed: int) -> Job:
    """The job of one round of a workload."""
    w = tasks.WORKLOADS[name]
    return Job(
        model=str(model),
        rows=tasks.make_rows(w, args.steps + 1, tokenizer, seed),
        reward="letters",
        steps=args.steps + 1,
        prompts=w.prompts,
        generations=w.generations,
        max_prompt=2 * w.prompt,
        max_tokens=w.max_tokens,
        min_tokens=w.min_tokens,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        seed=seed,
        budget=args.budget,
        micro=args.peer_micro or MICRO.get(name, 64),
        autocast=args.peer_weights == "float32",
    )


# ---- one workload ----------------------------------------------------------------------------------------------------


def costs(said: dict[str, Any]) -> dict[str, float]:
    """Means over the measured steps of a side's round, the first step left out; the memory of the whole round.

    >>> step = {"step": 3.0, "rollout": 1.0, "update": 2.0}
    >>> costs({"steps": [{**step, "step": 9.0}, step], "memory": 8})
    {'step': 3.0, 'rollout': 1.0, 'update': 2.0, 'memory': 8.0}
    """
    measured = said["steps"][1:]
    return {
        **{c: statistics.fmean(s[c] for s in measured) for c in COSTS[:-1]},
        "memory": float(said["memory"]),
    }


def compare(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds of a workload say.

    Args: rounds: for each, side -> what its process said.
    Returns: ratios (medians over the rounds), spread (least and greatest), cost (medians by side), tokens; with a front
        its own ratios and spread, and its seconds of a processor over those of the native run.
    """
    sides = tuple(rounds[0])
    found = [{side: costs(r[side]) for side in sides} for r in rounds]
    lengths = {side: [n for r in rounds for s in r[side]["steps"][1:] for n in s["lengths"]] for side in sides}
    steps = len(rounds) * (len(rounds[0]["whet"]["steps"]) - 1)
    made = {
        **_ratios(found, "trl", "whet"),
        "cost": {side: {c: statistics.median(f[side][c] for f in found) for c in COSTS} for side in sides},
        "tokens": {
            "per_step": {side: sum(n) / steps for side, n in lengths.items()},
            "mean_length": {side: list(common.mean_and_error(n)) for side, n in lengths.items()},
            "agree": not any(common.differ(lengths["whet"], lengths[side], 3.0) for side in sides[1:]),
        },
        "reward": {side: statistics.fmean(s["reward"] for r in rounds for s in r[side]["steps"][1:]) for side in sides},
    }
    if FRONT in sides:
        cpu = [[statistics.fmean(s["cpu"] for s in r[side]["steps"][1:]) for side in (FRONT, "whet")] for r in rounds]
        made[FRONT] = {
            **_ratios(found, "trl", FRONT),
            "over_native": {
                **_ratios(found, FRONT, "whet")["ratios"],
                "cpu": statistics.median(front / native for front, native in cpu),
            },
        }
    return made


def _ratios(found: list[dict[str, dict[str, float]]], over: str, under: str) -> dict[str, Any]:
    """The medians of one side's costs over another's in the same round, and their least and greatest."""
    ratios = {c: [f[over][c] / f[under][c] for f in found] for c in COSTS}
    return {
        "ratios": {c: statistics.median(v) for c, v in ratios.items()},
        "spread": {c: [min(v), max(v)] for c, v in ratios.items()},
    }


def run_workload(
    args: argparse.Namespace, name: str, model: Path, tokenizer: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All rounds of a workload: what they say, and the versions of each side."""
    pythons = {"whet": sys.executable, FRONT: sys.executable, "trl": common.peer_python(args.peer_python)}
    sides = SIDES if args.front is None else (SIDES[0], FRONT, SIDES[1])
    rounds = []
    for i in range(args.rounds):
        job = make_job(args, name, model, tokenizer, seed=i)
        rounds.append({side: common.run_side(side, job, python=pythons[side]) for side in sides})
        print(
            f"{name} round {i + 1}: " + "   ".join(_line(side, costs(rounds[-1][side])) for side in sides), flush=True
        )
    found = compare(rounds)
    tokens = found["tokens"]
    print(
        f"{name} ratios (trl / whet): "
        + ", ".join(
            f"{c} {found['ratios'][c]:.2f} [{low:.2f}, {high:.2f}]" for c, (low, high) in found["spread"].items()
        )
        + "\n  completion tokens of a step: "
        + ", ".join(f"{side} {n:.0f}" for side, n in tokens["per_step"].items())
        + ("" if tokens["agree"] else "   THE LENGTHS DIFFER: the ratios don't compare equal work")
    )
    if args.front:
        front = found[FRONT]
        print(
            f"{name} ratios (trl / whet.trl): {_listed(front['ratios'])}\n"
            f"  whet.trl over whet: {_listed(front['over_native'])}",
            flush=True,
        )
    found["memory_exact"] = all(r[side]["memory_exact"] for r in rounds for side in sides)
    return found, {side: rounds[0][side]["versions"] for side in sides}


def _listed(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())


def _line(side: str, cost: dict[str, float]) -> str:
    seconds = " ".join(f"{c} {cost[c]:.2f} s" for c in COSTS[:-1])
    return f"{side} {seconds} memory {cost['memory'] / 2**20:.0f} MiB"


# ---- the settings of each side ---------------------------------------------------------------------------------------


def settings(job: Job) -> list[tuple[str, str, dict[str, Any]]]:
    """What is worth trying on each side: (side, label, the job's fields)."""
    size = job.prompts * job.generations
    whet = [("whet", f"budget {budget or 'default'}", {"budget": budget}) for budget in (None, 8192, 4096, 2048)]
    precisions = {"float32": {" fp32": True}, "bfloat16": {" fp32 weights": True, " bf16 weights": False}}[job.dtype]
    trl = [
        ("trl", f"{micro}x{size // micro} generate{label}", {"micro": micro, "autocast": autocast})
        for micro, (label, autocast) in itertools.product((size, size // 2, size // 4, size // 8), precisions.items())
    ]
    micro = size // 4
    static = {"micro": micro, "cache": "static"}
    # A compiled model meets new shapes for some steps; those are left out of its figures.
    compiled = {"micro": micro, "compile": True, "steps": job.steps + COMPILE_STEPS, "rows": job.rows * 4}
    # With bf16 weights since TRL turns them into bf16 for good where continuous batching meets its autocast.
    continuous = {"micro": micro, "continuous": True, "autocast": False}
    pages = size * -(-(job.max_prompt + job.max_tokens) // 64) + size
    return [
        *whet,
        *trl,
        ("trl", f"{micro}x4 generate, static cache", static),
        ("trl", f"{micro}x4 generate, compiled", compiled),
        ("trl", f"{micro}x4 continuous batching, a share of memory", continuous),
        ("trl", f"{micro}x4 continuous batching, pages as needed", {**continuous, "pages": pages}),
    ]


def tune(args: argparse.Namespace, name: str, model: Path, tokenizer: Any) -> dict[str, Any]:
    """Times each side in each of its settings, one round each: "side setting" -> costs."""
    pythons = {"whet": sys.executable, "trl": common.peer_python(args.peer_python)}
    job, found = make_job(args, name, model, tokenizer, seed=0), {}
    for side, label, fields in settings(job):
        try:
            said = common.run_side(side, dataclasses.replace(job, **fields), python=pythons[side])
        except RuntimeError as error:
            print(f"{name} {side} {label}: failed, {str(error).splitlines()[-1]}", flush=True)
            continue
        said["steps"] = said["steps"][-job.steps :]
        found[f"{side} {label}"] = costs(said)
        print(f"{name} {label}: {_line(side, costs(said))}", flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    """Runs the workloads and prints the result."""
    from transformers import AutoTokenizer

    args = arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = tasks.smollm2_folder() if args.model == tasks.SMOLLM2 else Path(args.model or folder)
        if args.model is None:
            count = tasks.make_model(model, args.shape, tasks.char_tokenizer())
            print(f"model: a random Qwen3 of {count / 1e6:.1f} M parameters ({args.shape})")
        tokenizer = AutoTokenizer.from_pretrained(model)
        if args.tune:
            found = {name: tune(args, name, model, tokenizer) for name in args.workloads}
            common.finish(
                "grpo_step_tune", {"tune": found, "dtype": args.dtype}, device=args.device, record=args.record
            )
            return
        results, versions = {}, {}
        for name in args.workloads:
            results[name], versions = run_workload(args, name, model, tokenizer)
    result = {
        "ratios": {name: r.pop("ratios") for name, r in results.items()},
        "dtype": args.dtype,
        "seconds": {
            name: {s: {c: cost[c] for c in COSTS[:-1]} for s, cost in r["cost"].items()} for name, r in results.items()
        },
        "versions": versions,
        "model": args.shape if args.model is None else Path(args.model).name,
        "device": args.device,
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "budget": args.budget,
        "peer_micro": {name: args.peer_micro or MICRO.get(name, 64) for name in args.workloads},
        "peer_weights": args.peer_weights if args.dtype == "bfloat16" else "float32",
        "workloads": results,
    }
    name = "grpo_step" if args.dtype == "float32" else "grpo_step-bf16"
    if args.model == tasks.SMOLLM2:
        name += f"-{tasks.SMOLLM2}"
    common.finish(name, result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
