"""A step of SFT and one of DPO in whet and in a peer: the same model, rows, optimizer and machine.

    python benchmarks/sft_step.py --peer trl
    python benchmarks/sft_step.py --model smollm2  # a pretrained model of 135 M parameters

Rounds are interleaved (whet, peer, whet, peer ...), each side in a process of its own with the same number of threads.
TRL's SFT packs rows to max_length, so the time of a step is taken per token that the model was given; in DPO both sides
take the same pairs. Memory is the peak above a process that has read the model once, weights and optimizer included.
The ratios are the peer's cost over whet's, the median over the rounds. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import tasks
from common import SIDES
from supervised_sides import SupervisedJob

KINDS = ("sft", "dpo")
COSTS = ("time", "memory")
PROMPT, SHORTEST, LONGEST = 64, 16, 384
"""Tokens of prompts, and of the shortest and longest answer: evenly spread between them."""
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")
MAX_LENGTH = 512
MICRO = {"sft": 1, "dpo": 4}
"""TRL's rows of a pass. Packed rows of one pass are laid end to end, and without flash attention each is scored against
all of them: one row a pass takes a quarter less time than four, and half the memory."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.common_arguments(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of sft,dpo")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--steps", type=int, default=3, help="steps measured in a round, after one for warm-up")
    parser.add_argument("--model", default=None, choices=[tasks.SMOLLM2], help="by default a random one of --shape")
    parser.add_argument("--shape", default="25m", choices=list(tasks.SHAPES), help="size of the random model")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step; of DPO half as many pairs")
    parser.add_argument("--micro", type=int, default=None, help=f"rows of one pass of the peer (default: {MICRO})")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    if unknown := [k for k in args.kinds if k not in KINDS]:
        parser.error(f"--kinds {','.join(unknown)}: known are {', '.join(KINDS)}")
    if min(args.rounds, args.steps, 1 if args.micro is None else args.micro) < 1 or args.batch < 2:
        parser.error("--rounds, --steps and --micro must be at least 1, --batch at least 2")
    return args


def make_rows(kind: str, count: int, seed: int, *, words: bool = False) -> list[dict[str, str]]:
    """Prompts and answers of random letters, or of words with a space before each; answers of a pair differ in length.

    A letter is a token of the random model, and such a word one of a pretrained model.

    >>> sorted(make_rows("dpo", 1, 0)[0])
    ['chosen', 'prompt', 'rejected']
    """
    rng = random.Random(seed)
    parts = [f" {word}" for word in WORDS] if words else list(string.ascii_letters)

    def text(length: int) -> str:
        return "".join(rng.choices(parts, k=length))

    answers = ("completion",) if kind == "sft" else ("chosen", "rejected")
    return [
        {"prompt": text(PROMPT), **{name: text(rng.randint(SHORTEST, LONGEST)) for name in answers}}
        for _ in range(count)
    ]


def make_job(args: argparse.Namespace, kind: str, model: Path, seed: int) -> SupervisedJob:
    """The job of one round."""
    batch = args.batch if kind == "sft" else args.batch // 2
    micro = args.micro or MICRO[kind]
    mean = PROMPT + (SHORTEST + LONGEST) / 2 + 1
    return SupervisedJob(
        kind=kind,
        model=str(model),
        # more than TRL's packed rows take
        rows=make_rows(kind, 2 * batch * (args.steps + 1), seed, words=args.model == tasks.SMOLLM2),
        steps=args.steps + 1,
        batch=batch,
        max_length=MAX_LENGTH,
        packed=max(1, round(batch * mean / MAX_LENGTH / micro)) * micro,
        micro=micro,
        device=args.device,
        threads=args.threads,
        seed=seed,
    )


def costs(said: dict[str, Any], kind: str) -> dict[str, float]:
    """Of a side's round, the first step left out: seconds of a step, or of 1,000 tokens; the peak of memory.

    >>> steps = [{"step": 9.0, "tokens": 1.0}, {"step": 2.0, "tokens": 500.0}]
    >>> costs({"steps": steps, "memory": 8}, "sft"), costs({"steps": steps, "memory": 8}, "dpo")
    ({'time': 4.0, 'memory': 8.0}, {'time': 2.0, 'memory': 8.0})
    """
    measured = said["steps"][1:]
    seconds = sum(s["step"] for s in measured)
    per = sum(s["tokens"] for s in measured) / 1000 if kind == "sft" else len(measured)
    return {"time": seconds / per, "memory": float(said["memory"])}


def run_kind(args: argparse.Namespace, kind: str, model: Path) -> dict[str, Any]:
    """All rounds of SFT or DPO: ratios with their spread, costs, losses, versions."""
    pythons = {"whet": sys.executable, "trl": common.peer_python(args.peer_python)}
    rounds: list[dict[str, dict[str, Any]]] = []
    for i in range(args.rounds):
        job = make_job(args, kind, model, seed=i)
        rounds.append(
            {s: common.run_side(s, job, python=pythons[s], script="supervised_sides.py") for s in SIDES}  # pyright: ignore
        )
        found = {side: costs(rounds[-1][side], kind) for side in SIDES}
        unit = "s/1000 tokens" if kind == "sft" else "s"
        print(
            f"{kind} round {i + 1}: "
            + "   ".join(f"{s} {c['time']:.3f} {unit}, {c['memory'] / 2**20:.0f} MiB" for s, c in found.items()),
            flush=True,
        )
    every = [{side: costs(r[side], kind) for side in SIDES} for r in rounds]
    ratios = {c: [f["trl"][c] / f["whet"][c] for f in every] for c in COSTS}
    return {
        "ratios": {c: statistics.median(v) for c, v in ratios.items()},
        "spread": {c: [min(v), max(v)] for c, v in ratios.items()},
        "cost": {side: {c: statistics.median(f[side][c] for f in every) for c in COSTS} for side in SIDES},
        "tokens": {side: statistics.fmean(s["tokens"] for r in rounds for s in r[side]["steps"][1:]) for side in SIDES},
        "first_loss": {side: [r[side]["steps"][0]["loss"] for r in rounds] for side in SIDES},
        "memory_exact": all(r[side]["memory_exact"] for r in rounds for side in SIDES),
        "versions": {side: rounds[0][side]["versions"] for side in SIDES},
    }


def main(argv: list[str] | None = None) -> None:
    """Runs the rounds and prints the result."""
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) if args.model is None else tasks.smollm2_folder()
        if args.model is None:
            count = tasks.make_model(model, args.shape, tasks.char_tokenizer())
            print(f"model: a random Qwen3 of {count / 1e6:.1f} M parameters ({args.shape})")
        results = {kind: run_kind(args, kind, model) for kind in args.kinds}
    result = {
        "ratios": {kind: r.pop("ratios") for kind, r in results.items()},
        "model": args.model or args.shape,
        "device": args.device,
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "batch": args.batch,
        "micro": {kind: args.micro or MICRO[kind] for kind in args.kinds},
        "max_length": MAX_LENGTH,
        "results": results,
    }
    common.finish("sft_step" + (f"-{args.model}" if args.model else ""), result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
