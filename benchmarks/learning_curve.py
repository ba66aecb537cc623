"""Whether whet learns as a peer does: the same weights, data, reward and hyper-parameters, several seeds each.

    python benchmarks/learning_curve.py --peer trl

A small model over bytes is asked for one kind of character ("digit:", "lower!", ...) and rewarded with the share of
them in what it says. What is compared is the mean reward of the last 20 of 60 steps. AdamW without decay, constant
rate, a clip of 0.2, 8 completions of each of 8 prompts, temperature 1, no KL, every completion weighing the same.
The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import tasks
from common import SIDES, Job

LEARNING_RATE = 3e-3


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.common_arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each side; a seed is also the weights'")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--last", type=int, default=20, help="steps at the end whose reward is compared")
    parser.add_argument("--max-tokens", type=int, default=8, help="longest completion")
    parser.add_argument("--shape", default="small", choices=list(tasks.SHAPES), help="size of the model")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    args = parser.parse_args(argv)
    if not 1 <= args.last <= args.steps:
        parser.error(f"--last must lie in 1..--steps ({args.steps})")
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no spread")
    return args


def make_job(args: argparse.Namespace, model: Path, seed: int) -> Job:
    """The job of one seed."""
    return Job(
        model=str(model),
        rows=[{"prompt": p} for p in tasks.CLASS_PROMPTS] * args.steps,
        reward="class",
        steps=args.steps,
        prompts=len(tasks.CLASS_PROMPTS),
        generations=8,
        max_prompt=16,
        max_tokens=args.max_tokens,
        lr=args.lr,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        seed=seed,
    )


def compare(curves: dict[str, list[list[float]]], last: int) -> dict[str, Any]:
    """Each side's reward at the end, seed by seed, and the difference beside two pooled standard errors.

    Args: curves: side -> for each seed, the mean reward of every step. last: steps at the end that count.

    >>> compare({"whet": [[0.0, 1.0], [0.0, 3.0]], "trl": [[1.0], [1.0]]}, last=1)["difference"]
    1.0
    """
    ends = {side: [statistics.fmean(c[-last:]) for c in found] for side, found in curves.items()}
    (whet, whet_error), (trl, trl_error) = (common.mean_and_error(ends[side]) for side in SIDES)
    bound = 2 * math.hypot(whet_error, trl_error)
    return {
        "reward": ends,
        "mean": {"whet": whet, "trl": trl},
        "first_step": {side: statistics.fmean(c[0] for c in found) for side, found in curves.items()},
        "whole_curve": {side: [statistics.fmean(c) for c in found] for side, found in curves.items()},
        "difference": whet - trl,
        "two_pooled_standard_errors": bound,
        "within": abs(whet - trl) <= bound,
        "not_worse": whet - trl >= -bound,
    }


def main(argv: list[str] | None = None) -> None:
    """Runs every seed on both sides and prints the result."""
    from whet.data.tokenizer import byte_tokenizer

    args = arguments(argv)
    pythons = {"whet": sys.executable, "trl": common.peer_python(args.peer_python)}
    curves: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    versions: dict[str, Any] = {}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            # The usual spread of weights is too small at this width: 1 / sqrt(64) learns faster.
            count = tasks.make_model(Path(folder), args.shape, byte_tokenizer(), seed=seed, spread=0.1, flat=True)
            job = make_job(args, Path(folder), seed)
            for side in SIDES:
                said = common.run_side(side, job, python=pythons[side])
                curves[side].append([s["reward"] for s in said["steps"]])
                versions[side] = said["versions"]
                ends = statistics.fmean(curves[side][-1][-args.last :])
                print(f"seed {seed} {side}: first {curves[side][-1][0]:.3f}, last {args.last}: {ends:.3f}", flush=True)
    found = compare(curves, args.last)
    print(
        f"a Qwen3 of {count / 1e3:.0f} k parameters; whet {found['mean']['whet']:.4f}, trl {found['mean']['trl']:.4f}, "
        f"difference {found['difference']:+.4f}, two pooled standard errors {found['two_pooled_standard_errors']:.4f}"
    )
    result = {**found, "dtype": args.dtype, "device": args.device, "threads": args.threads, "versions": versions}
    result |= {"steps": args.steps, "last": args.last, "lr": args.lr, "curves": curves}
    common.finish("learning_curve", result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
