"""One update and one exchange of weights on several processes, over each mesh: speed, bytes sent, memory, exactness.

    python benchmarks/scaling.py --meshes 1,2,2c2,2r2

A mesh is a number of processes, then c and context_parallel_size, r and data_parallel_replicate_size, t and
tensor_parallel_size where they are not 1. torchrun starts it on this machine, with one thread a process. A line of JSON
is printed for each:

    tokens_per_s, efficiency     of updates, and by the processes and the speed of the first mesh
    update_s, gather_s, save_s   an update, gathering the whole model as a rollout does, and a checkpoint
    sent                         collectives of one update by kind: calls and MB of their results on a rank
    peak_mb                      of each rank: resident memory in the updates above what it held before
    imbalance                    see perf/rank_imbalance
    kv_mb, weights_mb            of each rank in a rollout of the same number of prompts and completions, 64 tokens each
    gradient_error               the largest difference to the first mesh, by the largest number of the tensor

Processes that share cores show bytes and shares, not speed-up. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import tasks

NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators in the name space of collectives that send nothing."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", default="1,2,2c2,2r2", help="processes, c<context>, r<replicas>, t<tensor>")
    parser.add_argument("--shape", default="25m", choices=list(tasks.SHAPES), help="size of the random model")
    parser.add_argument("--vocabulary", type=int, default=None, help="tokens of the model; default: the tokenizer's")
    parser.add_argument("--steps", type=int, default=3, help="updates measured, after one for warm-up")
    parser.add_argument("--groups", type=int, default=8, help="prompts of an update, of 64 tokens")
    parser.add_argument("--completions", type=int, default=4, help="of each prompt, of 32 to 256 tokens")
    parser.add_argument("--tokens", type=int, default=1024, help="of a pass on each process")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.parsed = [parse_mesh(mesh) for mesh in args.meshes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if min(args.steps, args.groups, args.completions) < 1 or args.tokens < 512:
        parser.error("--steps, --groups and --completions must be at least 1, --tokens at least 512")
    return args


def parse_mesh(text: str) -> tuple[int, int, int, int]:
    """Processes, and the sizes context_parallel, data_parallel_replicate and tensor_parallel. Raises ValueError.

    >>> parse_mesh("8c2r4"), parse_mesh("2t2")
    ((8, 2, 4, 1), (2, 1, 1, 2))
    """
    found = re.fullmatch(r"(\d+)(?:c(\d+))?(?:r(\d+))?(?:t(\d+))?", text)
    size, context, replicas, tensor = (int(x or 1) for x in found.groups()) if found else (0, 1, 1, 1)
    if not size or not context * replicas * tensor or size % (context * tensor) or size % (replicas * tensor):
        raise ValueError(
            f"--meshes {text}: write processes[c<size>][r<size>][t<size>], of sizes that divide the processes"
        )
    return size, context, replicas, tensor


# ---- one process of a mesh -------------------------------------------------------------------------------------------


def make_batch(groups: int, completions: int) -> Any:
    """A batch of random ids of `char_tokenizer`."""
    import numpy as np

    from whet.types import Completion, Group, Prompt, TokenBatch

    rng = np.random.default_rng(0)
    made = []
    for row in range(groups):
        drawn = tuple(
            Completion(
                tokens=(ids := rng.integers(0, 100, rng.integers(32, 257)).astype(np.int32)),
                logprobs=np.zeros(len(ids), np.float32),
                versions=np.zeros(len(ids), np.int32),
                finish_reason="stop",
                generation=i,
            )
            for i in range(completions)
        )
        prompt = Prompt(tokens=rng.integers(0, 100, 64).astype(np.int32), source="", row=row)
        made.append(Group(prompt=prompt, completions=drawn))
    return TokenBatch.from_groups(made)


def counted(fn: Any) -> dict[str, dict[str, float]]:
    """The collectives that a function calls: kind -> calls, and MB of their results."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sent: dict[str, dict[str, float]] = {}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and func._opname not in NO_COLLECTIVES:
                row = sent.setdefault(func._opname.strip("_"), {"calls": 0, "mb": 0.0})
                row["calls"] += 1
                row["mb"] += sum(x.nbytes for x in tree_leaves(args[:1]) if hasattr(x, "nbytes")) / 1e6
            return func(*args, **(kwargs or {}))

    with Mode():
        fn()
    return sent


def run_process(job: dict[str, Any]) -> None:
    """Measures as one of the processes; rank 0 writes what came of it."""
    import torch
    from torch.distributed.tensor import DTensor

    from whet.config import OptimConfig
    from whet.models.load import load_model
    from whet.parallel.placement import Placement
    from whet.parallel.processes import join_processes
    from whet.train.role_trainer import RoleTrainer
    from whet.train.worker import ModelWorker

    torch.set_num_threads(1)
    size, *sizes = job["mesh"]
    ranks, placement = join_processes(), Placement()
    if size > 1:
        from whet.parallel.fsdp import FSDPPlacement
        from whet.parallel.mesh import make_mesh

        placement = FSDPPlacement(make_mesh("cpu", size, *sizes), ranks)
    loaded = load_model(job["model"], dtype="float32", device=torch.device("cpu"))
    budget, optim = job["tokens"] * sizes[0], OptimConfig(name="adamw", lr=1e-5)
    worker = ModelWorker(loaded, optim=optim, max_tokens=budget, placement=placement)

    def loss(x: Any) -> Any:
        return -x.logprobs, {}

    batch = RoleTrainer(worker, loss=loss).add_loss_weights(make_batch(job["groups"], job["completions"]))
    assert worker.optim is not None
    own = {"sent": counted(lambda: worker.forward_backward(batch, loss))}
    whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
    gradients, optim, step = {}, worker.optim, worker.optim.step

    def keep_gradients() -> Any:
        gradients.update({name: whole(m.grad).clone() for name, m in optim.masters.items()})
        return step()

    optim.step = keep_gradients
    worker.optim_step()
    optim.step = step
    worker.pop_imbalance()
    resident, times = common.Resident("cpu"), []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        worker.forward_backward(batch, loss)
        worker.optim_step()
        times.append(time.perf_counter() - start)
    peaks = ranks.all_gather(resident.peak() / 1e6)
    seconds = {}
    for name in ("gather", "save"):
        start = time.perf_counter()
        if name == "save":
            saved = Path(job["folder"]) / "saved"
            saved.mkdir(exist_ok=True)
            worker.save(saved if ranks.is_writer else None)
        else:
            with worker.rollout_weights():
                pass
        ranks.all_gather(None)
        seconds[f"{name}_s"] = time.perf_counter() - start
    update = statistics.median(times)
    tokens = int(batch.prefix_lengths.sum()) + batch.num_tokens
    own |= {"tokens_per_s": tokens / update, "update_s": update, **seconds, "peak_mb": peaks}
    own["imbalance"] = worker.pop_imbalance()
    own |= hold_rollout(job, ranks)
    if ranks.is_writer:
        torch.save((own, gradients), Path(job["folder"]) / "result.pt")


def hold_rollout(job: dict[str, Any], ranks: Any) -> dict[str, list[float]]:
    """Samples on the mesh. Returns: MB of each rank's KV cache, and of the weights that it samples with."""
    import whet
    from whet.config import OptimConfig

    _, context, replicas, tensor = job["mesh"]
    training = whet.RLTrainingConfig(
        actor_optimizer=OptimConfig(lr=1e-5),
        context_parallel_size=context,
        data_parallel_replicate_size=replicas,
        tensor_parallel_size=tensor,
    )
    rollout = whet.RolloutConfig(max_tokens_to_generate=64, temperature=1.0)
    config = whet.ClusterConfig(rollout_engine="embedded", rollout_config=rollout, training_config=training)
    cluster = whet.RLCluster(actor=job["model"], tokenizer=tasks.char_tokenizer(), cluster_config=config)
    encode: Any = cluster.encoder()
    prompts = [encode({"prompt": "1234567+" * 8}, i) for i in range(job["groups"])]
    cluster.sample(prompts, num_generations=job["completions"])
    engine: Any = cluster.engine
    with cluster.actor.rollout_weights(parts=tensor > 1):
        weights = sum(p.nbytes for p in cluster.actor.module.parameters())
    return {"kv_mb": ranks.all_gather(engine.kv_bytes / 1e6), "weights_mb": ranks.all_gather(weights / 1e6)}


# ---- all of them -----------------------------------------------------------------------------------------------------


def run_mesh(args: argparse.Namespace, mesh: tuple[int, int, int, int], model: Path) -> tuple[dict[str, Any], Any]:
    """Starts the processes of a mesh. Returns: what they measured, and the gradients of the first update."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        sizes = {name: getattr(args, name) for name in ("steps", "groups", "completions", "tokens")}
        job = json.dumps({**sizes, "mesh": mesh, "model": str(model), "folder": folder})
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={mesh[0]}"]
        done = subprocess.run([*launch, __file__, "--job", job], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"mesh {mesh} failed:\n{done.stderr[-4000:]}")
        return torch.load(Path(folder) / "result.pt")


def main(argv: list[str] | None = None) -> None:
    """Measures each mesh and prints a line of JSON for it."""
    args = arguments(argv)
    if args.job is not None:
        return run_process(json.loads(args.job))
    rows: list[dict[str, Any]] = []
    first: Any = None
    with tempfile.TemporaryDirectory() as folder:
        tasks.make_model(Path(folder), args.shape, tasks.char_tokenizer(), vocabulary=args.vocabulary)
        for text, mesh in zip(args.meshes.split(","), args.parsed, strict=True):
            found, gradients = run_mesh(args, mesh, Path(folder))
            first = first or gradients
            errors = [float((g - first[n]).abs().max() / first[n].abs().max()) for n, g in gradients.items()]
            row = {"mesh": text, **found, "gradient_error": max(errors)}
            speed = rows[0]["tokens_per_s"] / args.parsed[0][0] if rows else row["tokens_per_s"] / mesh[0]
            rows.append({**row, "efficiency": row["tokens_per_s"] / mesh[0] / speed})
            print(json.dumps(common.rounded(rows[-1])), flush=True)
    sizes = {name: getattr(args, name) for name in ("shape", "vocabulary", "steps", "groups", "completions", "tokens")}
    load = os.getloadavg()[0]  # of this benchmark and of all else that ran
    result = {**sizes, "cores": common.usable_cores(), "threads": 1, "load_average": load, "rows": rows}
    common.finish("scaling", result, device="cpu", record=args.record)


if __name__ == "__main__":
    main()
