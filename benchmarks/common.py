"""What the benchmarks share: jobs handed to a process of each library, rates, statistics, records.

Nothing but the standard library is imported here: the peer's interpreter reads this file too, and has no whet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = ("whet", "trl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, the same for every library."""

    model: str
    """Folder with model and tokenizer."""
    rows: list[dict[str, Any]]
    """Data in the order of the steps; each has a "prompt"."""
    reward: str
    """A name of tasks.REWARDS."""
    steps: int
    """Rollouts, each followed by one optimizer step."""
    prompts: int
    """Prompts of a step."""
    generations: int
    """Completions of a prompt."""
    max_prompt: int
    """Longest prompt in tokens."""
    max_tokens: int
    """Longest completion in tokens."""
    min_tokens: int = 0
    """No completion ends before so many tokens."""
    lr: float = 1e-9
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    budget: int | None = None
    """whet: tokens of one forward and backward pass; None = its default."""
    micro: int = 64
    """TRL: completions of one forward and backward pass."""
    continuous: bool = False
    """TRL: transformers' continuous batching instead of generate."""
    pages: int | None = None
    """TRL: pages of 64 tokens that continuous batching sets aside; None = a share of the free memory."""
    cache: str | None = None
    """TRL: the cache of generate, "static" or None = transformers' default, which grows."""
    compile: bool = False
    """TRL: torch.compile of the model."""
    autocast: bool = True
    """TRL in bf16: autocast over fp32 weights; off, the weights themselves are bf16 and there are no fp32 ones."""
    without: str = ""
    """train_step.py, whet: the mechanism that is switched off."""


# ---- processes -------------------------------------------------------------------------------------------------------


def common_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the comparisons share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--peer", default="trl", choices=["trl"], help="library to compare with")
    parser.add_argument(
        "--peer-python", default=None, help="interpreter that has the peer; by default this one, or .venv-trl's"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads of each side")
    parser.add_argument(
        "--record", type=Path, default=None, help="also write the result here (a folder: under a name made up)"
    )
    return parser


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peer_python(given: str | None) -> str:
    """The interpreter of the peer: the one given, else .venv-trl's if there is one, else this one."""
    beside = HERE.parent / ".venv-trl" / "bin" / "python"
    return given or (str(beside) if beside.is_file() else sys.executable)


def run_side(side: str, job: Job, *, python: str = sys.executable, script: str = "sides.py") -> dict[str, Any]:
    """Runs a job in a process of its own.

    Args: side: a name that the script knows: "whet" or "trl". python: its interpreter. script: what runs it.
    Returns: what the script says of it. Raises RuntimeError with the end of its output where it fails.
    """
    n = str(job.threads)
    env = {**os.environ, "OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if job.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(job)))
        command = [python, str(HERE / script), side, str(path)]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side} failed ({python}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def read_job(path: str) -> Job:
    """The job that `run_side` wrote."""
    return Job(**json.loads(Path(path).read_text()))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (sample standard deviation over the root of n).

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def differ(a: Sequence[float], b: Sequence[float], errors: float) -> bool:
    """Whether two samples' means differ by more than so many pooled standard errors.

    >>> differ([1.0, 3.0], [2.0, 4.0], 2.0), differ([1.0, 1.0], [2.0, 2.0], 2.0)
    (False, True)
    """
    (mean_a, error_a), (mean_b, error_b) = mean_and_error(a), mean_and_error(b)
    return abs(mean_a - mean_b) > errors * math.hypot(error_a, error_b)


def rounded(tree: Any, digits: int = 4) -> Any:
    """The same containers with every float at so many significant digits.

    >>> rounded({"a": [1.23456, 2]})
    {'a': [1.235, 2]}
    """
    if isinstance(tree, dict):
        return {k: rounded(v, digits) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(v, digits) for v in tree]
    return float(f"{tree:.{digits}g}") if isinstance(tree, float) else tree


class Resident:
    """The peak of this process's memory above what it holds when this is made.

    On a CPU resident bytes: Linux lets the peak be reset; elsewhere an earlier, higher peak would hide a later one,
    and `exact` is False. On a GPU the bytes that torch has allocated.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.exact = True
        if self.cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.exact = False
        self.start = _resident("VmRSS")

    def peak(self) -> int:
        """Bytes above the start."""
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated() - self.start
        return _resident("VmHWM") - self.start


def _resident(field: str) -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        assert found is not None, field
        return int(found[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, where it is in bytes


# ---- records ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures were measured on: versions, processor with its flags, devices, commit."""
    from whet.observe.environment import collect_environment

    found = collect_environment()
    kept = {name: found[name] for name in ("versions", "cpu", "devices", "cuda") if name in found}
    return {**kept, "system": found["platform"]["system"], "commit": commit()}


def commit() -> str | None:
    """The checkout's commit, with "+" where whet/ or benchmarks/ differ from it; None outside a checkout."""
    root = ["git", "-C", str(HERE.parent)]
    head = subprocess.run([*root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    changed = subprocess.run(
        [*root, "status", "--porcelain", "--", "whet", "benchmarks/*.py"], capture_output=True, text=True
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine_kind(found: dict[str, Any], device: str) -> str:
    """A short name of the machine for file names.

    >>> machine_kind({"cpu": {"model": "AMD EPYC", "cores": 2, "flags": ["avx2", "avx512f", "avx512_bf16"]}}, "cpu")
    'amd-epyc-2-avx512_bf16'
    """
    if device == "cuda":
        return _slug(found["devices"][0])
    cpu = found["cpu"]
    model = re.sub(r"\(.*?\)|CPU|Processor|@.*|\d+-Core", " ", cpu["model"] or "cpu")
    best = next(
        (f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd") if f in cpu["flags"]), "plain"
    )
    return f"{_slug(model)}-{cpu['cores']}-{best}"


def _slug(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9_]+", text.lower()))


def finish(name: str, result: dict[str, Any], *, device: str, record: Path | None) -> None:
    """Prints the result as the last line, and writes it with the machine beside it where asked."""
    result = rounded(result)
    if record is not None:
        found = machine()
        path = record / f"{name}-{machine_kind(found, device)}.json" if record.is_dir() else record
        path.write_text(json.dumps({**result, "machine": found}, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)
    print(json.dumps(result))
