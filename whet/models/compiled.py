"""Gates and rotary embeddings of training on a GPU in one kernel each, which torch's compiler makes.

torch's own kernels read and write memory once for each operation. Here a gate takes one kernel forward and one backward
in place of two and five, and a rotary embedding one kernel a tensor each way in place of three. The compiler is asked
to round where torch's kernels round (OPTIONS), so that both give nearly the same bits.
A function is compiled when a call first needs it, so in the rehearsal before step 1. torch.export traces it, for any
number of rows: a call has no guards of torch.compile, which would take longer than the launches that are saved, and is
never compiled again. Before its first use it is compared with the function itself. If it does not compile, or is
further from the exact numbers, torch's own kernels run, after one warning.
Dim legend: n rows (tokens), M width of the MLP, H heads, D head size.
Left out on purpose: norms, for which torch has a kernel; calls with few rows, where launching a kernel takes longest,
and so decode steps; CPUs, which have native kernels; and autograd, whose functions call these and choose what to save.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.errors import format_exception
from whet.models.flex import run_in_thread

__all__ = ["gate_grads", "gate_grads_and_product", "gated", "in_one_kernel", "rotated"]

log = logging.getLogger("whet")

DEVICE = "cuda"
"""The kind of device that runs them; tests set another."""
MIN_ROWS = 1024
"""The fewest rows of a call that is compiled."""
MAX_NUMBERS = 2**31 - 1
"""The most numbers of a tensor: indices are int32."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Of the compiler: each operation rounds to the dtype of its output, as torch's own kernels do. In C++ it has no effect
before torch 2.13: only the results are rounded."""
MORE_ERROR = 1.1
"""The largest accepted error, in root mean square, as a multiple of that of torch's kernels."""


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [n M]."""
    return F.silu(gate) * up


def gate_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of silu(gate) · up by gate and by up, [n M] each. Args: grad: of the product."""
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def gate_grads_and_product(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and silu(gate) · up again."""
    return (*gate_grads(gate, up, grad), gated(gate, up))


def rotated(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Returns x cos + r(x) signed; r exchanges the halves of a head. Args: x: [n H D]. cos, signed: [n D]."""
    low, high = x.chunk(2, -1)
    swapped = torch.cat([high, low], -1)  # roll and flip become loads of 2 bytes on a GPU, and this of 16
    return (x * cos.unsqueeze(1)).addcmul_(swapped, signed.unsqueeze(1))


class _Case(NamedTuple):
    """What a function is compiled for: all but the number of rows."""

    function: Callable[..., Any]
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]
    """Of a row of each argument."""


def in_one_kernel(function: Callable[..., Any], *rows: Tensor) -> Any:
    """Returns function(*rows), without gradient; None = it can't be one kernel, so the caller uses torch's own.

    Args: function: one of this file. rows: [n ...] each.

    >>> in_one_kernel(gated, torch.ones(2, 3), torch.ones(2, 3)) is None  # on a CPU
    True
    """
    first = rows[0]
    fits = first.device.type == DEVICE and len(first) >= MIN_ROWS and first.numel() <= MAX_NUMBERS
    if not fits or not all(x.is_contiguous() for x in rows):
        return None
    run = _kernel(_Case(function, first.device, first.dtype, tuple(x.shape[1:] for x in rows)))
    return None if run is None else run(*rows)


@functools.cache
def _kernel(case: _Case) -> Callable[..., Any] | None:
    """Compiles and compares a case once, and logs the result; after a failure on a device it is not tried there."""
    if case.device in _FAILED:
        return None
    dtype = str(case.dtype).removeprefix("torch.")
    what = f"{case.function.__name__} in training ({dtype}, {' and '.join(str([*s]) for s in case.shapes)} a row)"

    def compile_and_compare() -> Callable[..., Any]:
        _compare(run := _compile(case), case)
        return run

    try:
        if torch._dynamo.config.disable:  # private: if it is gone, nothing is compiled
            raise RuntimeError("TORCHDYNAMO_DISABLE is set")
        run = run_in_thread(case.device, compile_and_compare)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # no fault of the kernel: it is tried again
        raise
    except Exception as error:  # export, inductor, triton and its C compiler have many exception classes
        reason = format_exception(error, 200)
        log.warning("%s: using torch's kernels for gates and rotary embeddings from now on: %s", what, reason)
        _FAILED.add(case.device)
        return None
    log.info("%s: compiled to one kernel", what)
    return run


_FAILED: set[torch.device] = set()
"""Devices for which a function did not compile, or was less exact."""


class _Module(torch.nn.Module):
    """A function as torch.export takes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *rows: Tensor) -> Any:
        return self.function(*rows)


@torch.no_grad()
def _compile(case: _Case) -> Callable[..., Any]:
    """Compiles a function for the sizes of a row, which are constants in its indices, and any number of rows."""
    count = torch.export.Dim("count", min=2, max=MAX_NUMBERS // case.shapes[0].numel())
    sizes = {"rows": tuple({0: count} for _ in case.shapes)}
    program = torch.export.export(_Module(case.function), _draw(case, MIN_ROWS), dynamic_shapes=sizes)
    inputs = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    run: Any = torch._inductor.compile(program.graph_module, inputs, options=OPTIONS)
    return lambda *rows: found[0] if len(found := run(*rows)) == 1 else tuple(found)


@torch.no_grad()
def _compare(run: Callable[..., Any], case: _Case) -> None:
    """Compares what was compiled with the function itself. Raises: ValueError: it is further from the exact numbers."""
    for rows in (_draw(case, 64), _draw(case, 67)):  # few, since memory may be short
        found = run(*rows), case.function(*rows), case.function(*(x.double() for x in rows))
        for a, b, exact in zip(*((x,) if isinstance(x, Tensor) else x for x in found)):
            ours, torchs = (float((x - exact).square().mean().sqrt()) for x in (a, b))
            if not ours <= MORE_ERROR * torchs:
                raise ValueError(f"its numbers are {ours:.1e} off on average, those of torch's kernels {torchs:.1e}")


def _draw(case: _Case, count: int) -> tuple[Tensor, ...]:
    """Random arguments."""
    generator = torch.Generator().manual_seed(count)
    numbers = (torch.randn(count, *shape, generator=generator).mul_(3) for shape in case.shapes)
    return tuple(x.to(case.device, case.dtype) for x in numbers)
