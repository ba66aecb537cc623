"""One update (scoring, loss, gradients, optimizer) in whet, in a plain padded loop and in TRL, without a rollout.

    python benchmarks/train_step.py

The completions are given: those that the random model of grpo_step.py would draw. Reported are tokens per second,
utilisation of this machine's best rate for large products, the peak of memory above the loaded model, and what each of
whet's mechanisms is worth: the cost without it over the cost with it. Each side runs in a process of its own, in turn.
docs/benchmarks.md says how the figures are counted. The last line printed is the result as JSON.
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
from common import Job

SIDES = ("whet", "naive", "trl")
MICRO = 16
"""Completions of one pass of the padded sides, as in grpo_step.py."""
LARGE = 32_768
"""Vocabulary of workload V."""
WORKLOADS = {
    **tasks.WORKLOADS,
    "V": dataclasses.replace(tasks.WORKLOADS["A"], prompts=2),
}
"""Those of grpo_step.py, and V: two prompts of A for a model with a large vocabulary."""
WITHOUT = {
    "A": ("shared prefixes", "packing", "fast layers", "native kernels"),
    "B": ("shared prefixes", "native kernels"),
    "C": ("skipping",),
    "V": ("fused head",),
    "tiny": ("shared prefixes", "packing", "fused head", "skipping", "fast layers", "native kernels"),
}
"""The mechanisms that are switched off, each where it shows."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.common_arguments(__doc__)
    parser.add_argument("--workloads", default="A,B,C,V", help=f"some of {','.join(WORKLOADS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help="who runs; whet always does")
    parser.add_argument("--rounds", type=int, default=1, help="times each side runs")
    parser.add_argument("--steps", type=int, default=1, help="updates measured in a round, after one for warm-up")
    parser.add_argument("--shape", default="25m", choices=list(tasks.SHAPES), help="size of the model that is made")
    parser.add_argument("--budget", type=int, default=None, help="tokens of one pass of whet; by default its own")
    parser.add_argument("--no-mechanisms", action="store_true", help="leave out the runs with a mechanism off")
    args = parser.parse_args(argv)
    for name, known in (("workloads", WORKLOADS), ("sides", SIDES)):
        words = getattr(args, name).split(",")
        if unknown := [w for w in words if w not in known]:
            parser.error(f"--{name} {','.join(unknown)}: known are {', '.join(known)}")
        setattr(args, name, words)
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return args


def make_job(args: argparse.Namespace, name: str, model: Path, tokenizer: Any, seed: int) -> Job:
    """The job of one round of a workload: rows with their completions, one step more than are measured."""
    w = WORKLOADS[name]
    rows = tasks.make_rows(w, args.steps + 1, tokenizer, seed)
    completions = tasks.make_completions(w, len(rows) * w.generations, seed)
    for i, row in enumerate(rows):
        row["completions"] = completions[i * w.generations : (i + 1) * w.generations]
    return Job(
        model=str(model),
        rows=rows,
        reward="letters",
        steps=args.steps + 1,
        prompts=w.prompts,
        generations=w.generations,
        max_prompt=2 * w.prompt,
        max_tokens=w.max_tokens,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        seed=seed,
        budget=args.budget,
        micro=min(MICRO, w.prompts * w.generations),
    )


def needed(job: Job, shape: dict[str, int], vocabulary: int) -> tuple[int, float]:
    """What the measured steps need, however they are run.

    A prompt is run once for its completions, a completion without its last token, which predicts nothing; groups of
    equal rewards are not run. 6 operations for each weight and token (2 forward, 4 backward), the output's for
    completion tokens alone; 12 for each pair of a token and one that it sees, head and dim (two products of 2, three
    times).
    Returns: completion tokens, those that need not be run too, and operations.

    >>> job = Job(model="", rows=[{"prompt": "ab", "flat": False, "completions": [[1, 2], [3]]}] * 2, reward="letters",
    ...           steps=2, prompts=1, generations=2, max_prompt=4, max_tokens=2)
    >>> shape = {"layers": 1, "width": 2, "heads": 1, "kv_heads": 1, "head": 2, "mlp": 4}
    >>> needed(job, shape, 5)      # 3 tokens of 40 weights, 3 outputs of 10, 3 + 3 pairs of 2 dims
    (3, 1044.0)
    """
    s = shape
    layer = s["width"] * s["head"] * 2 * (s["heads"] + s["kv_heads"]) + 3 * s["width"] * s["mlp"]
    tokens, flops = 0, 0.0
    for row in job.rows[job.prompts :]:
        lengths = [len(c) for c in row["completions"]]
        tokens += sum(lengths)
        if row["flat"]:
            continue
        p = len(row["prompt"])
        run = p + sum(lengths) - len(lengths)
        pairs = p * (p + 1) / 2 + sum((n - 1) * p + n * (n - 1) / 2 for n in lengths)
        flops += 6 * run * layer * s["layers"] + 6 * sum(lengths) * s["width"] * vocabulary
        flops += 12 * pairs * s["heads"] * s["head"] * s["layers"]
    return tokens, flops


def compare(rounds: list[dict[str, dict[str, Any]]], tokens: int, flops: float) -> dict[str, Any]:
    """What the rounds of a workload say: medians over the rounds.

    Args: rounds: for each, side (or "without <mechanism>") -> what its process said, and "rate". tokens, flops: of
        the measured steps of a round.
    Returns: cost (seconds, tokens_per_s, utilisation, of_default, memory) by side; ratios of a side's time and memory
        to whet's, with their spread over the rounds; grad_norm by side.
    """
    names = [n for n in rounds[0] if n != "rate"]
    time = {n: [sum(r[n]["seconds"]) for r in rounds] for n in names}
    memory = {n: [float(r[n]["memory"]) for r in rounds] for n in names}
    rate, default = ([r["rate"][kind] * 1e9 for r in rounds] for kind in ("gflop_per_s", "default"))
    ratios = {
        n: {
            what: [x / y for x, y in zip(found[n], found["whet"], strict=True)]
            for what, found in (("time", time), ("memory", memory))
        }
        for n in names
        if n != "whet"
    }
    return {
        "cost": {
            n: {
                "seconds": statistics.median(time[n]),
                "tokens_per_s": statistics.median(tokens / t for t in time[n]),
                "utilisation": statistics.median(flops / t / r for t, r in zip(time[n], rate, strict=True)),
                "of_default": statistics.median(flops / t / r for t, r in zip(time[n], default, strict=True)),
                "memory": statistics.median(memory[n]),
            }
            for n in names
        },
        "ratios": {n: {what: statistics.median(v) for what, v in found.items()} for n, found in ratios.items()},
        "spread": {n: {what: [min(v), max(v)] for what, v in found.items()} for n, found in ratios.items()},
        "grad_norm": {n: rounds[0][n]["grad_norm"] for n in names if "grad_norm" in rounds[0][n]},
        "gflop_per_s": statistics.median(rate) / 1e9,
        "default_gflop_per_s": statistics.median(default) / 1e9,
    }


def run_workload(args: argparse.Namespace, name: str, model: Path, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
    """All rounds of a workload."""
    rounds, tokens, flops = [], 0, 0.0
    sides = ["whet", *(s for s in args.sides if s != "whet" and name != "V")]
    for i in range(args.rounds):
        job = make_job(args, name, model, tokenizer, seed=i)
        tokens, flops = needed(job, tasks.SHAPES[args.shape], vocabulary)
        said: dict[str, dict[str, Any]] = {}
        for side in ("rate", *sides):
            python = common.peer_python(args.peer_python) if side == "trl" else sys.executable
            said[side] = common.run_side(side, job, python=python, script="train_sides.py")
        for mechanism in () if args.no_mechanisms else WITHOUT[name]:
            off = dataclasses.replace(job, without=mechanism)
            said[f"without {mechanism}"] = common.run_side("whet", off, script="train_sides.py")
        rounds.append(said)
    found = compare(rounds, tokens, flops)
    for side, cost in found["cost"].items():
        ratio = "".join(f"   {what} x{v:.2f}" for what, v in found["ratios"].get(side, {}).items())
        shares = f"utilisation {cost['utilisation']:.2f} ({cost['of_default']:.2f} of torch's product)"
        print(
            f"{name} {side}: {cost['seconds']:.2f} s, {cost['tokens_per_s']:.0f} tokens/s, {shares}, memory "
            f"{cost['memory'] / 2**20:.0f} MiB{ratio}",
            flush=True,
        )
    exact = all(r[s]["memory_exact"] for r, s in itertools.product(rounds, sides))
    return {**found, "tokens": tokens, "gflop": flops / 1e9, "memory_exact": exact}


def main(argv: list[str] | None = None) -> None:
    """Runs the workloads and prints the result."""
    args = arguments(argv)
    tokenizer = tasks.char_tokenizer()
    results = {}
    for name in args.workloads:
        vocabulary = LARGE if name == "V" else tasks.SHAPES[args.shape].get("vocabulary", len(tokenizer))
        with tempfile.TemporaryDirectory() as folder:
            tasks.make_model(Path(folder), args.shape, tokenizer, vocabulary=vocabulary)
            results[name] = run_workload(args, name, Path(folder), tokenizer, vocabulary)
    result = {
        "utilisation": {name: r["cost"]["whet"]["utilisation"] for name, r in results.items()},
        "ratios": {name: r.pop("ratios") for name, r in results.items()},
        "dtype": args.dtype,
        "model": args.shape,
        "device": args.device,
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "budget": args.budget,
        "workloads": results,
    }
    common.finish(
        "train_step" if args.dtype == "float32" else "train_step-bf16", result, device=args.device, record=args.record
    )


if __name__ == "__main__":
    main()
