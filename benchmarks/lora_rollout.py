"""A rollout of a model with a low-rank adapter beside one of the bare model: what the adapter costs the sampler.

    python benchmarks/lora_rollout.py

Both engines lie in one process; rounds are interleaved, the first of each is not counted. A round is what a training
step has: new weights are announced, then every completion is drawn, so that making the effective weights is in it. The
ratio is the adapted model's tokens per second over the bare one's, of each round; the median is what counts.
`cpu_ratio` is the same by the processor's time: where other programs have the machine, it is the steadier of the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import tasks


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="25m", choices=list(tasks.SHAPES), help="size of the model (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rank", type=int, default=16, help="of the adapter on all linear layers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="counted ones (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens of each completion (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="without native kernels, as on a CPU without a compiler")
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    return parser.parse_args(argv)


def engines(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The two engines over one set of base weights."""
    import torch

    from whet.config import LoraConfig
    from whet.models.load import load_model
    from whet.rollout.engine import EmbeddedEngine

    tasks.make_model(folder, args.shape, tasks.char_tokenizer())
    made = {}
    for name, lora in (("bare", None), ("adapted", LoraConfig(r=args.rank))):
        loaded = load_model(str(folder), dtype=args.dtype, device=args.device, lora=lora)
        if loaded.adapter is not None:
            with torch.no_grad():
                for p in loaded.adapter.parameters():
                    p.add_(torch.randn_like(p) * 0.01)
        made[name] = EmbeddedEngine(loaded, native=not args.plain)
    return made


def one_round(engine: Any, args: argparse.Namespace, version: int) -> tuple[float, float]:
    """Tokens per second of an update and a rollout: by the clock, and by the processor's time."""
    import numpy as np

    from whet.rollout.base import Request, Sampling

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, 32).astype(np.int32) for _ in range(args.prompts)]
    sampling = Sampling(max_tokens=args.new)
    count = args.prompts * args.generations
    start, used = time.perf_counter(), time.process_time()
    engine.update_weights(version)
    engine.submit(
        [
            Request(
                id=version * count + i,
                tokens=prompts[i // args.generations],
                sampling=sampling,
                group=version * count + i // args.generations,
                rng_key=(version, 0, i // args.generations, i % args.generations),
            )
            for i in range(count)
        ]
    )
    done = tokens = 0
    while done < count:
        for output in engine.step():
            done, tokens = done + 1, tokens + len(output.tokens)
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - used)


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints the result as JSON."""
    import torch

    args = arguments(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        made = engines(args, Path(folder))
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for version in range(1, args.rounds + 2):
            for name in list(made)[:: 1 if version % 2 else -1]:
                rates[name].append(one_round(made[name], args, version))
            if version > 1:
                wall, cpu = (a / b for a, b in zip(rates["adapted"][-1], rates["bare"][-1]))
                print(f"round {version - 1}: {wall:.3f}, processor {cpu:.3f}", file=sys.stderr)
    pairs = list(zip(rates["adapted"][1:], rates["bare"][1:]))
    ratios, cpu_ratios = ([a[i] / b[i] for a, b in pairs] for i in range(2))
    result = {
        "shape": args.shape,
        "dtype": args.dtype,
        "rank": args.rank,
        "threads": args.threads,
        "backends": {name: engine.backends for name, engine in made.items()},
        "tokens_per_second": {name: statistics.median(x for x, _ in r[1:]) for name, r in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
    }
    common.finish("lora-rollout", result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
