"""Rollouts in whet's engine and in its peers: the same model, prompts and lengths, on the same machine.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --models smollm2   # a pretrained model of 135 M parameters

For each model and dtype every engine runs in a process of its own with the same number of threads, which loads the
model once. Rounds are interleaved: one workload in each engine, one engine after the other while the others wait. Timed
is the way from token ids to token ids and logprobs, prefill included. The ratios are whet's tokens per second over the
other's, the median over the rounds; "floor" is the least time that the machine's own rates allow over whet's time.
docs/benchmarks.md says how each engine is set up and what is counted. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import floor
import machine
import tasks
from rollout_sides import SIDES, Spec, Work

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SHAPE_OF = {"tiny": "tiny", "1m": "1m", "25m": "25m", "smollm2": tasks.SMOLLM2, "0.6b": "qwen3-0.6b"}
TRIED = {
    "whet": ("defaults",),
    "generate": ("dynamic, all", "static, all"),
    "continuous": ("forked, all",),
    "vllm": ("defaults",),
}
"""Settings: the fastest in a trial runs the rounds. `--tune` tries all that rollout_sides.py knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One rollout: so many prompts of a length, and the lengths of their completions."""

    model: str
    dtype: str
    """A name of DTYPES."""
    prompt: int
    kind: str
    """"equal" or "mixed"."""
    new: int
    """Tokens of a completion; the longest of mixed ones."""
    prompts: int = 8
    generations: int = 8

    @property
    def name(self) -> str:
        """As in the result."""
        return f"{self.model}-{self.dtype}-p{self.prompt}-{self.kind}"

    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        count = self.prompts * self.generations
        return (
            [self.new] * count
            if self.kind == "equal"
            else mixed_lengths(count, mean=min(96, self.new), longest=self.new)
        )


def mixed_lengths(count: int, *, mean: int, longest: int, shortest: int = 4, seed: int = 1) -> list[int]:
    """Geometric lengths, cut at both ends: always the same ones.

    >>> lengths = mixed_lengths(64, mean=96, longest=512)
    >>> round(sum(lengths) / 64), min(lengths), max(lengths)
    (90, 4, 468)
    """
    rng, base = random.Random(seed), math.log(1 - 1 / mean)
    return [min(longest, max(shortest, 1 + int(math.log(1 - rng.random()) / base))) for _ in range(count)]


def all_workloads(device: str) -> list[Workload]:
    """Every workload of a device, those of a model and dtype beside each other."""
    found = [
        Workload(model=model, dtype=dtype, prompt=prompt, kind=kind, new=new)
        for model in ("1m", "25m")
        for dtype in DTYPES
        for prompt in (32, 512)
        for kind, new in (("equal", 128), ("mixed", 512))
    ]
    found += [
        Workload(model="smollm2", dtype=dtype, prompt=48, kind=kind, new=64)
        for dtype in DTYPES
        for kind in ("equal", "mixed")
    ]
    found.append(Workload(model="0.6b", dtype="bf16", prompt=32, kind="equal", new=32, prompts=2))
    if device == "cuda":
        found.append(Workload(model="0.6b", dtype="bf16", prompt=128, kind="equal", new=512, prompts=32))
    tiny = {"prompt": 6, "prompts": 2, "generations": 2}
    found += [
        Workload(model="tiny", dtype=dtype, kind=kind, new=8, **tiny) for dtype in DTYPES for kind in ("equal", "mixed")
    ]
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=common.usable_cores(), help="of each engine (all usable cores)")
    parser.add_argument("--rounds", type=int, default=3, help="times each engine runs a workload (%(default)s)")
    parser.add_argument(
        "--side-s", type=float, default=30.0, help="an engine stops after a round that would go on beyond this many "
        "seconds of a workload, so that slow ones run fewer rounds (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--models", default="1m,25m,0.6b", help=f"some of {','.join(SHAPE_OF)} (%(default)s)")
    parser.add_argument("--dtypes", default="fp32,bf16", help="some of fp32,bf16 (%(default)s)")
    parser.add_argument("--workloads", default="*", help="patterns of names, e.g. '*-p32-*,25m-fp32-*' (%(default)s)")
    parser.add_argument("--engines", default=",".join(SIDES), help="(%(default)s); whet is always among them")
    parser.add_argument("--vllm-python", default=None, help="interpreter that has vLLM; by default .venv-vllm's")
    parser.add_argument("--vllm-compile", action="store_true", help="let vLLM compile the model")
    parser.add_argument(
        "--clock", default="seconds", choices=["seconds", "cpu_s"], help="cpu_s: processor time, for a look on a "
        "machine that is busy, with one thread",
    )  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="try every setting of every engine, on whole workloads")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    for option, known in (("models", SHAPE_OF), ("dtypes", DTYPES), ("engines", SIDES)):
        given = getattr(args, option).split(",")
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{option} {','.join(unknown)}: known are {', '.join(known)}")
        setattr(args, option, [name for name in known if name in given or name == "whet"])
    patterns = args.workloads.split(",")
    args.chosen = [
        w
        for w in all_workloads(args.device)
        if w.model in args.models and w.dtype in args.dtypes and any(fnmatch.fnmatch(w.name, p) for p in patterns)
    ]
    if not args.chosen:
        parser.error(f"--workloads {args.workloads}: no workload of these models and dtypes has such a name")
    return args


# ---- engines in their processes --------------------------------------------------------------------------------------


class Process:
    """An engine that waits for work."""

    def __init__(self, side: str, spec: Spec, python: str, folder: Path) -> None:
        self.side, self.log = side, folder / f"{side}.log"
        (folder / f"{side}.json").write_text(json.dumps(dataclasses.asdict(spec)))
        n = str(spec.threads)
        env = {**os.environ, "OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "TOKENIZERS_PARALLELISM": "false"}
        env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        if spec.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                [python, str(common.HERE / "rollout_sides.py"), side, str(folder / f"{side}.json")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, cwd=folder, text=True,
            )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next line that it says. Raises RuntimeError: with what went wrong in it."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        said = json.loads(line) if line else {"error": f"it ended with status {self.child.wait()}"}
        if "error" in said:
            raise RuntimeError(f"{self.side} failed:\n{said['error']}\n{self.log.read_text()[-3000:]}")
        return said

    def ask(self, work: Work, clock: str = "seconds") -> dict[str, Any]:
        """What a work gave; its "seconds" by that clock. Raises RuntimeError."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(dataclasses.asdict(work)) + "\n")
        self.child.stdin.flush()
        said = self.answer()
        return {**said, "seconds": said[clock]}

    def close(self) -> None:
        """Ends it."""
        self.child.kill()
        self.child.communicate()


def spec_of(args: argparse.Namespace, chosen: Sequence[Workload], model: Path) -> Spec:
    """How the engines of a model and dtype are started: with room for the largest of its workloads."""
    first = chosen[0]
    token = floor.kv_bytes(SHAPE_OF[first.model], DTYPES[first.dtype])
    return Spec(
        model=str(model),
        dtype=DTYPES[first.dtype],
        device=args.device,
        threads=args.threads,
        max_length=max(64, *(w.prompt + w.new for w in chosen)),
        completions=max(w.prompts * w.generations for w in chosen),
        kv_bytes=max(token * sum(w.prompt + n for n in w.lengths()) for w in chosen),
        compile=args.vllm_compile,
    )


def start(
    args: argparse.Namespace, spec: Spec, first: Work, folder: Path
) -> tuple[dict[str, Process], dict[str, Any], str | None]:
    """The engines, loaded and tried: side -> process, side -> versions, and why vLLM is not among them."""
    vllm = Path(args.vllm_python or common.HERE.parent / ".venv-vllm" / "bin" / "python")
    missing = "vllm" in args.engines and not vllm.is_file()
    why_not = f"there is no {vllm}" if missing else None
    running = {
        side: Process(side, spec, str(vllm) if side == "vllm" else sys.executable, folder)
        for side in args.engines
        if not (side == "vllm" and missing)
    }
    versions = {}
    for side, process in list(running.items()):
        try:
            versions[side] = process.answer()["ready"]
            process.ask(first)
        except RuntimeError as error:
            if side != "vllm":
                stop(running)
                raise
            why_not = str(error).split("\n\n")[0].splitlines()[-1]  # the last line of its traceback
            running.pop(side).close()
    if why_not:
        print(f"vllm: left out, {why_not}", flush=True)
    return running, versions, why_not


def stop(running: dict[str, Process]) -> None:
    """Ends all."""
    for process in running.values():
        process.close()


# ---- one workload ----------------------------------------------------------------------------------------------------


def make_work(w: Workload, seed: int, *, lengths: list[int] | None = None, greedy: bool = False) -> Work:
    """Prompts of random tokens, others for each seed, so that no cache of the round before helps."""
    rng = random.Random(1000 + seed)
    ids = range(100, 49_000) if w.model == tasks.SMOLLM2 else range(len(tasks.ALPHABET))
    prompts = [[rng.choice(ids) for _ in range(w.prompt)] for _ in range(w.prompts)]
    return Work(
        prompts=prompts, generations=w.generations, lengths=lengths or w.lengths(), seed=seed, greedy=greedy
    )  # fmt: skip


def same_model(running: dict[str, Process], w: Workload) -> dict[str, float]:
    """The share of prompts that every engine continues greedily with the same tokens as whet.

    Raises: RuntimeError: in fp32, fewer than seven of eight; equal weights differ at near ties only.
    """
    w = dataclasses.replace(w, prompts=8, generations=1, prompt=min(w.prompt, 32))
    work = make_work(w, 0, lengths=[4] * 8, greedy=True)
    ids = {side: p.ask(work)["ids"] for side, p in running.items()}
    found = {side: sum(a == b for a, b in zip(x, ids["whet"], strict=True)) / 8 for side, x in ids.items()}
    if w.dtype == "fp32" and min(found.values()) < 7 / 8:
        raise RuntimeError(f"{w.model}: greedy tokens differ from whet's; share of prompts that agree: {found}")
    return found


def warm(args: argparse.Namespace, process: Process, w: Workload) -> tuple[str, dict[str, float]]:
    """Warms an engine up for a workload, and tries its settings where there is more than one.

    A trial is a run of the whole workload where the model is small, else of one prompt and its completions.
    Returns: the setting that was fastest, and setting -> seconds.
    """
    settings = SIDES[process.side].settings if args.tune else TRIED[process.side]
    whole, group = make_work(w, 998), w.generations
    first = max(range(0, len(whole.lengths), group), key=lambda i: max(whole.lengths[i : i + group]))
    one = dataclasses.replace(whole, prompts=whole.prompts[:1], lengths=whole.lengths[first : first + group])
    if args.device == "cuda":  # shapes are compiled and captured: they must be those of the rounds
        short = one = whole
    else:
        short = dataclasses.replace(one, lengths=[4] * group)
    tried = {}
    for setting in settings:
        process.ask(dataclasses.replace(short, setting=setting))
        if len(settings) > 1:
            trial = whole if args.tune or w.model in ("tiny", "1m") else one
            tried[setting] = process.ask(dataclasses.replace(trial, setting=setting), args.clock)["seconds"]
    return min(tried, key=lambda s: tried[s]) if tried else settings[0], tried


def run_rounds(args: argparse.Namespace, running: dict[str, Process], w: Workload) -> dict[str, Any]:
    """All rounds of a workload: side -> rounds (what it said), setting, tried (setting -> seconds)."""
    found: dict[str, Any] = {}
    for side, process in running.items():
        setting, tried = warm(args, process, w)
        found[side] = {"rounds": [], "setting": setting, "tried": tried}
    sides = list(running)
    for i in range(args.rounds):
        for side in sides[i % len(sides) :] + sides[: i % len(sides)]:
            f = found[side]
            seconds = [r["seconds"] for r in f["rounds"]]
            if i and side != "whet" and (len(seconds) < i or sum(seconds) + seconds[-1] > args.side_s):
                continue
            f["rounds"].append(
                running[side].ask(dataclasses.replace(make_work(w, i), setting=f["setting"]), args.clock)
            )
    return found


def compare(found: dict[str, Any], floor_s: float) -> dict[str, Any]:
    """What the rounds of a workload say.

    Args: found: what `run_rounds` gives. floor_s: the least time.
    Returns: ratios (None where a side is missing), spread (least and greatest), tokens_per_s (medians), kv_bytes ...
    Raises: RuntimeError: the mean logprobs differ by more than 0.1 and four standard errors, so the sides don't draw
        from one distribution.
    """
    whet = [r["seconds"] for r in found["whet"]["rounds"]]
    ratios: dict[str, list[float]] = {
        side: [r["seconds"] / s for r, s in zip(f["rounds"], whet, strict=False)]
        for side, f in found.items()
        if side != "whet"
    }
    ratios["floor"] = [floor_s / s for s in whet]
    logprobs = {side: statistics.fmean(r["logprob"] for r in f["rounds"]) for side, f in found.items()}
    tokens = found["whet"]["rounds"][0]["tokens"]
    errors = {
        side: math.hypot(*(r["logprob_error"] for r in f["rounds"])) / len(f["rounds"]) for side, f in found.items()
    }
    low, high = min(logprobs, key=lambda s: logprobs[s]), max(logprobs, key=lambda s: logprobs[s])
    apart = max(0.1, 4 * math.hypot(errors[low], errors[high]))
    if tokens >= 500 and logprobs[high] - logprobs[low] > apart:
        raise RuntimeError(f"the mean logprobs of what was drawn differ: {logprobs}, {errors}")
    return {
        "ratios": {side: statistics.median(ratios[side]) if side in ratios else None for side in [*SIDES, "floor"][1:]},
        "spread": {side: [min(v), max(v)] for side, v in ratios.items()},
        "tokens": tokens,
        "tokens_per_s": {s: tokens / statistics.median(r["seconds"] for r in f["rounds"]) for s, f in found.items()},
        "kv_bytes": {side: max(r["kv_bytes"] for r in f["rounds"]) for side, f in found.items()},
        "rounds": {side: len(f["rounds"]) for side, f in found.items()},
        "setting": {side: f["setting"] for side, f in found.items()},
        "tried_s": {side: f["tried"] for side, f in found.items() if f["tried"]},
        "mean_logprob": logprobs,
        "floor_s": floor_s,
    }


def line(w: Workload, result: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [f"{w.name:<22}"]
    for side, rate in result["tokens_per_s"].items():
        mib = result["kv_bytes"][side] / 2**20
        cells.append(f"{side} {rate:.0f} tok/s {mib:.0f} MiB ({result['rounds'][side]}x, {result['setting'][side]})")
    ratios = ", ".join(f"{side} {x:.2f}" for side, x in result["ratios"].items() if x is not None)
    return "   ".join(cells) + f"\n{'':<22}   whet over: {ratios}"


# ---- all of them -----------------------------------------------------------------------------------------------------


def run_model(args: argparse.Namespace, chosen: list[Workload], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All workloads of a model and dtype: name -> result, and what is common to them."""
    first = chosen[0]
    shape, dtype = SHAPE_OF[first.model], DTYPES[first.dtype]
    tokenizer = tasks.char_tokenizer()
    if shape == tasks.SMOLLM2:
        model = tasks.smollm2_folder()
    else:
        tasks.make_model(model := folder / "model", shape, tokenizer, dtype=dtype)
    vocabulary = tasks.SHAPES[shape].get("vocabulary", len(tokenizer))
    spec = spec_of(args, chosen, model)
    hello = make_work(first, 998, lengths=[2] * len(first.lengths()))
    running, versions, why_not = start(args, spec, hello, folder)
    try:
        agree = same_model(running, first)
        rows = floor.GRID  # equal lengths need their own number of rows, and the prefill's
        if all(w.kind == "equal" for w in chosen):
            rows = [n for n in floor.GRID if n >= min(spec.completions, floor.GRID[-1])][:2]
        rates = floor.measure(shape, dtype, device=args.device, rows=rows)
        results = {}
        for w in chosen:
            least = floor.floor_seconds(
                shape, dtype, vocabulary=vocabulary, prompt=w.prompt, lengths=w.lengths(), generations=w.generations,
                rates=rates["rates"], copy=rates["copy"],
            )  # fmt: skip
            results[w.name] = compare(run_rounds(args, running, w), least)
            print(line(w, results[w.name]), flush=True)
    finally:
        stop(running)
    return results, {"versions": versions, "rates": rates, "greedy_agree": agree, "vllm_why_not": why_not}


def main(argv: list[str] | None = None) -> None:
    """Runs the workloads and prints the result."""
    import torch

    args, begun = arguments(argv), time.perf_counter()
    torch.set_num_threads(args.threads)
    why_not = machine.has_bf16(args.device)
    results: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for key in dict.fromkeys((w.model, w.dtype) for w in args.chosen):
        chosen = [w for w in args.chosen if (w.model, w.dtype) == key]
        if key[1] == "bf16" and why_not:
            results |= {w.name: None for w in chosen}
            print(f"{key[0]} bf16: left out, {why_not}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found, models["-".join(key)] = run_model(args, chosen, Path(folder))
        results |= found
    seconds = time.perf_counter() - begun
    print(f"{seconds:.0f} s in all")
    result: dict[str, Any] = {
        "ratios": {name: r and r.pop("ratios") for name, r in results.items()},
        "device": args.device,
        "threads": args.threads,
        "rounds": args.rounds,
        "clock": args.clock,
        "seconds": seconds,
        "models": models,
        "workloads": results,
    }
    if why_not:
        result["bfloat16_why_not"] = why_not
    common.finish("rollout_tune" if args.tune else "rollout", result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
