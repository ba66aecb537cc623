"""Gates and rotary embeddings of training on a GPU in one kernel each, which torch.compile makes.

torch's own kernels read and write memory once for each operation. Here a gate takes one kernel forward and one backward
in place of two and five, and a rotary embedding one kernel a tensor each way in place of three. The compiled functions
round where torch's kernels round, so the choice changes about one number in ten thousand, by its last bit.
A function is compiled when a call first needs it, for any number of rows, so in the rehearsal before step 1; then it is
compared with itself, not compiled. If it does not compile or differs, torch's own kernels run, after one warning.
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
from whet.models.flex import MAX_COMPILED, run_in_thread

__all__ = ["gate_grads", "gate_grads_and_product", "gated", "in_one_kernel", "rotated"]

log = logging.getLogger("whet")

DEVICE = "cuda"
"""The kind of device that runs them; tests set another."""
MIN_ROWS = 1024
"""The fewest rows of a call that is compiled."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Of the compiler: each operation rounds to the dtype of its output, as torch's own kernels do."""
DIFFERENT = 0.01
"""The largest accepted share of numbers that differ in the comparison, each by 2 units in the last place of the largest
number at most."""


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
    return (x * cos.unsqueeze(1)).addcmul_(x.roll(x.shape[-1] // 2, -1), signed.unsqueeze(1))


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
    if first.device.type != DEVICE or len(first) < MIN_ROWS or not all(x.is_contiguous() for x in rows):
        return None
    case = _Case(function, first.device, first.dtype, tuple(x.shape[1:] for x in rows))
    if not _is_usable(case):
        return None
    with torch.no_grad():  # as in the comparison, for the kernel compiled there
        return _compiled(function)(*(x.detach() for x in rows))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled for the sizes that it gets, but for those that are marked as dynamic.

    Sizes of a row are constants: indices need no divisions then, and loads are as wide as the GPU has them.
    """
    return torch.compile(function, dynamic=False, options=OPTIONS)


@functools.cache
def _is_usable(case: _Case) -> bool:
    """Compiles and compares a case once, and logs the result; after a failure on a device it is not tried there."""
    if case.device in _FAILED:
        return False
    try:
        off = torch._dynamo.config.disable  # private: if it is gone, nothing is compiled
        reason = "TORCHDYNAMO_DISABLE is set" if off else run_in_thread(case.device, lambda: _compare(case))
    except Exception as error:  # dynamo, inductor, triton and its C compiler have many exception classes
        reason = f"it does not compile: {format_exception(error, 200)}"
    dtype = str(case.dtype).removeprefix("torch.")
    what = f"{case.function.__name__} in training ({dtype}, {' and '.join(str([*s]) for s in case.shapes)} a row)"
    if reason is None:
        log.info("%s: compiled to one kernel", what)
        return True
    log.warning("%s: using torch's kernels for gates and rotary embeddings from now on, because %s", what, reason)
    _FAILED.add(case.device)
    return False


_FAILED: set[torch.device] = set()
"""Devices for which a function did not compile, or differed."""


def _compare(case: _Case) -> str | None:
    """Returns how the compiled function differs from the function itself; None = it does not."""
    generator, run = torch.Generator().manual_seed(0), _compiled(case.function)
    for count in (MIN_ROWS, MIN_ROWS + 3):
        drawn = (torch.randn(count, *shape, generator=generator) for shape in case.shapes)
        rows = [x.mul_(3).to(case.device, case.dtype) for x in drawn]
        for x in rows:
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            found, expected = run(*rows), case.function(*rows)
        for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (found, expected))):
            share, off = float((a != b).float().mean()), float((a - b).abs().max() / b.abs().max())
            if not (share <= DIFFERENT and off <= 2 * torch.finfo(case.dtype).eps):
                return f"{share:.1%} of its numbers differ, by {off:.0e} of the largest at most"
    return None
