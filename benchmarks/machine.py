"""This machine's rates: what the shares and utilisations of the other benchmarks are shares of.

    python benchmarks/machine.py

- decode: the products of one decode step of a 25 M model (8 layers of distinct weights, too large for the nearest
  caches), for several numbers of rows, by the best kernel: torch's default, a weight stored transposed, oneDNN, oneDNN
  with packed weights, and whet's own. Shares of the floor in rollout are of this rate.
- matmul: the product of two 2048 x 2048 matrices, by the same kernels. Utilisation in training is of the best.
- copy: bytes read plus bytes written per second by a copy that no cache holds.

Rates are the best of several trials, since whatever disturbs a trial only slows it down. bf16 entries are null, with
the reason, where the machine has no bf16 arithmetic. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import tasks

DTYPES = ("float32", "bfloat16")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--threads", type=int, default=common.usable_cores(), help="threads of torch (all usable cores)"
    )
    parser.add_argument("--rows", default="16,32,64,128", help="rows of a decode step (%(default)s)")
    parser.add_argument("--size", type=int, default=2048, help="side of the square matrices (%(default)s)")
    parser.add_argument("--copy-mib", type=int, default=512, help="size of the copied tensor (%(default)s)")
    parser.add_argument(
        "--shape", default="25m", choices=list(tasks.SHAPES), help="model of the decode step (%(default)s)"
    )
    parser.add_argument("--trial-s", type=float, default=0.3, help="seconds of a trial (%(default)s)")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    args = parser.parse_args(argv)
    args.rows = [int(n) for n in args.rows.split(",")]
    return args


def seconds(fn: Callable[[], Any], *, device: str, trial_s: float, trials: int = 5) -> float:
    """Seconds of one call, the best trial's mean."""
    import torch

    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    fn()
    sync()
    start = time.perf_counter()
    fn()
    sync()
    calls = max(1, round(trial_s / trials / max(time.perf_counter() - start, 1e-9)))
    best = float("inf")
    for _ in range(trials):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        sync()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def has_bf16(device: str) -> str | None:
    """None where the device has bf16 arithmetic, else why not."""
    import torch

    if device == "cuda":
        return None if torch.cuda.is_bf16_supported() else "this GPU has no bf16 arithmetic"
    try:
        found = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):
        return "this torch does not say whether the processor has bf16 arithmetic"
    return None if found else "this processor has no bf16 arithmetic"


def kernels(weights: list[Any], rows: int) -> dict[str, list[Callable[[Any], Any]]]:
    """What can multiply rows by each of the weights [out, in]: name -> one function per weight.

    oneDNN's own operators are private to torch: where they are not there, or refuse, they are left out.
    """
    import torch

    def transposed(w: Any) -> Callable[[Any], Any]:
        held = w.t().contiguous()
        return lambda x: torch.mm(x, held)

    found = {
        "torch": [lambda x, w=w: torch.nn.functional.linear(x, w) for w in weights],
        "transposed": [transposed(w) for w in weights],
    }
    if weights[0].device.type != "cpu":
        return found
    if own := native(weights):
        found["native"] = own
    try:
        ops = torch.ops.mkldnn
        pointwise, packed = ops._linear_pointwise, [ops._reorder_linear_weight(w, rows) for w in weights]
        found["onednn"] = [lambda x, w=w: pointwise(x, w, None, "none", [], "") for w in weights]
        found["onednn packed"] = [lambda x, w=w: pointwise(x, w, None, "none", [], "") for w in packed]
        for name in ("onednn", "onednn packed"):
            found[name][0](torch.zeros(rows, weights[0].shape[1], dtype=weights[0].dtype))
    except (AttributeError, RuntimeError, NotImplementedError):
        found = {name: fns for name, fns in found.items() if not name.startswith("onednn")}
    return found


def native(weights: list[Any]) -> list[Callable[[Any], Any]] | None:
    """whet's own products, where they can be built."""
    from torch import nn

    from whet.native.build import Unavailable
    from whet.native.decode import decode_kernels
    from whet.rollout.engine.packed_linear import PackedLinear

    loaded = decode_kernels()
    if isinstance(loaded, Unavailable):
        return None
    products = []
    for w in weights:
        layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(w, requires_grad=False)
        products.append(PackedLinear([layer], kernels=loaded))
    return products


def rates(args: argparse.Namespace, dtype: str, shapes: list[tuple[int, int]], rows: int) -> dict[str, Any]:
    """GFLOP/s of every kernel for products of so many rows with weights of these shapes, and the best of them."""
    import torch

    weights = [torch.randn(shape, dtype=getattr(torch, dtype), device=args.device) for shape in shapes]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=args.device) for w in weights}
    flops = sum(2 * rows * w.numel() for w in weights)
    found = {}
    for name, fns in kernels(weights, rows).items():
        calls = list(zip(fns, [inputs[w.shape[1]] for w in weights], strict=True))

        def step(calls: list[Any] = calls) -> None:
            for fn, x in calls:
                fn(x)

        found[name] = flops / seconds(step, device=args.device, trial_s=args.trial_s) / 1e9
    best = max(found, key=lambda name: found[name])
    return {"gflop_per_s": found[best], "kernel": best, "all": found}


def decode_rates(args: argparse.Namespace, dtype: str, rows: int) -> dict[str, Any]:
    """The rates of the products of one decode step."""
    s = tasks.SHAPES[args.shape]
    qkv = (s["heads"] + 2 * s["kv_heads"]) * s["head"]
    shapes = [
        (qkv, s["width"]),
        (s["width"], s["heads"] * s["head"]),
        (2 * s["mlp"], s["width"]),
        (s["width"], s["mlp"]),
    ]
    return rates(args, dtype, shapes * s["layers"], rows)


def matmul_rates(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The rates of the product of two square matrices."""
    return rates(args, dtype, [(args.size, args.size)], args.size)


def copy_rate(args: argparse.Namespace) -> float:
    """GB/s, read and written, of a copy."""
    import torch

    source = torch.ones(args.copy_mib * 2**18, dtype=torch.float32, device=args.device)
    target = torch.empty_like(source)
    size = 2 * source.numel() * source.element_size()
    return size / seconds(lambda: target.copy_(source), device=args.device, trial_s=4 * args.trial_s) / 1e9


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    import torch

    args = arguments(argv)
    torch.set_num_threads(args.threads)
    why_not = has_bf16(args.device)
    result: dict[str, Any] = {"device": args.device, "threads": args.threads, "copy_gb_per_s": copy_rate(args)}
    with torch.inference_mode():
        for dtype in DTYPES:
            if dtype == "bfloat16" and why_not:
                result[dtype] = None
                result["bfloat16_why_not"] = why_not
                continue
            decode = {str(rows): decode_rates(args, dtype, rows) for rows in args.rows}
            square = matmul_rates(args, dtype)
            result[dtype] = {"decode": decode, f"matmul_{args.size}": square}
            named = {
                **{f"decode of {rows} rows": found for rows, found in decode.items()},
                f"{args.size} cubed": square,
            }
            for name, found in named.items():
                said = ", ".join(f"{kernel} {rate:.0f}" for kernel, rate in found["all"].items())
                print(f"{dtype} {name}, GFLOP/s: {said}", flush=True)
    print(f"copy, GB/s read and written: {result['copy_gb_per_s']:.1f}")
    found = common.machine()
    result |= {"cpu": found["cpu"], "devices": found["devices"], "versions": found["versions"]}
    result["kind"] = common.machine_kind(found, args.device)
    common.finish("machine", result, device=args.device, record=args.record)


if __name__ == "__main__":
    main()
