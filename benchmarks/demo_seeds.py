"""What `make demo` reaches and how long it takes, seed by seed.

    python benchmarks/demo_seeds.py

Each seed is a run of `whet demo` in a process of its own, as a user starts it. Printed are the greedy accuracy on the
256 held-out prompts before and after, the seconds that the run says, and the processor's time; the last line is the
result as JSON.
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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="0 to SEEDS - 1 (%(default)s)")
    parser.add_argument("--out", type=Path, default=None, help="keep the run folders here")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    parser.add_argument("words", nargs="*", help="overrides of the recipe, key=value")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    return args


def one_run(folder: Path, seed: int, words: list[str]) -> dict[str, Any]:
    """A demonstration of one seed."""
    command = [sys.executable, "-m", "whet", "demo", f"seed={seed}", f"trainer.run_dir={folder}", *words]
    started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seed": seed,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "steps": summary["steps"],
        "seconds": round(summary["train_seconds"], 1),
        "process_seconds": round(whole, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
    }


def main(argv: list[str] | None = None) -> None:
    """Runs all seeds and prints the result."""
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        runs = []
        for seed in range(args.seeds):
            runs.append(run := one_run(out / f"seed-{seed}", seed, args.words))
            print(
                f"seed {seed}: {run['before']:.1%} -> {run['after']:.1%} in {run['seconds']} s "
                f"({run['cpu_seconds']} s of the processor)",
                flush=True,
            )
    after = [run["after"] for run in runs]
    print(f"lowest {min(after):.1%}, mean {statistics.fmean(after):.1%}, highest {max(after):.1%}")
    result = {"runs": runs, "load": os.getloadavg()[0], "machine": common.machine()}
    common.finish("demo", result, device="cpu", record=args.record)


if __name__ == "__main__":
    main()
