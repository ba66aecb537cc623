"""FlexAttention over packed rows that share prefixes: one compiled kernel for rows that need masks on the plain path.

    token i sees token j   ⟺   order[j] <= order[i] <= end[j]   and   position[j] >= since[i]

order[i] is the place of token i in a depth-first walk over the segments. end[j] is the last place of the walk in the
subtree of j's segment. position counts from the root, and since = position - window + 1 (0 without a window).
The tokens of an ancestor come earlier in the walk, and their subtree ends later. The subtree of another branch ends
earlier, or starts later. Within a segment the walk follows the row. So the first condition is true for the token itself
and for its ancestors, up to the token's own place. The mask is one function of four int32 tables with one number per
token, for every tree and every window, so the kernel is compiled once.

The row is padded to blocks of 128. A padding token sees only itself. Only blocks with a visible pair are run.
Dim legend: T tokens, P tokens with padding; H query heads, KV key heads, D head size; N = P / 128 blocks.

Left out on purpose: kernel options, autotuning, and float64 (FlexAttention has no kernel for it). varlen.py has rows
that need neither caps nor sinks.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from whet.errors import format_exception
from whet.models.buckets import BucketRow, segment_positions
from whet.ops.masked import fp32_or_wider
from whet.util.device import on_device
from whet.util.transfer import to_device

__all__ = [
    "FlexCase",
    "FlexRow",
    "compare_with_plain",
    "depth_first_order",
    "describe_case",
    "flex_unsupported_reason",
    "record_flex_failure",
    "run_in_thread",
]

log = logging.getLogger("whet")
T = TypeVar("T")

BLOCK = 128
"""Tokens per block, torch's default."""
CHUNK_PAIRS = 1 << 25
"""Query-key pairs that are compared at a time when the visible pairs of blocks are counted."""
MAX_COMPILED = 64
"""The most variants that may be compiled (head counts, dtypes, with and without a gradient)."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""The largest accepted difference between the probe and the plain path in fp32, relative to the largest number."""
TF32_TOLERANCE = 5e-3
"""The same limit for fp32 if products may be rounded to TF32."""
PROBES = (([70, 45, 130, 20, 60, 1], [-1, 0, 0, 2, -1, 4]), ([200, 150, 120, 64], [-1, 0, 0, -1]))
"""(lengths, parents) of the probe's rows. They fill 3 and 5 blocks, so the second row has another shape."""
UNPADDED_PROBES = (([128, 200, 184, 128], [-1, 0, 0, -1]), ([300, 200, 296, 100], [-1, 0, 0, -1]))
"""The same for rows of 5 and 7 whole blocks. They need no padding, so the kernel gets the model's own strides."""


class FlexCase(NamedTuple):
    """The properties of a call that decide which kernel is compiled.

    >>> q = torch.zeros(1, 5, 4, 8).transpose(1, 2)     # 5 tokens, 4 heads of 8, strides as in a model
    >>> FlexCase.from_call(q, q[:, :2], q[:, :2], scale=0.5, softcap=None, sinks=None).pitches
    (32, 32, 32)
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    size: int
    """Head size of queries and keys."""
    value_size: int
    softcap: bool
    sinks: bool
    scale: float | None = None
    """The scores are multiplied by it; None = 1 / √size."""
    grads: tuple[bool, ...] = (True, True, True, True)
    """Whether queries, keys, values and sinks each need a gradient."""
    inference: bool = False
    """The call is in inference mode."""
    pitches: tuple[int | None, ...] = (None, None, None)
    """The strides from a token to the next, of queries, keys and values; None = the tensor is stored head by head."""
    sink_dtype: torch.dtype | None = None

    @classmethod
    def from_call(
        cls, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, sinks: Tensor | None
    ) -> FlexCase:
        """Returns the case of a call. Args: see FlexRow.attend."""
        tracked = torch.is_grad_enabled()
        return cls(
            device=q.device,
            dtype=q.dtype,
            heads=q.shape[1],
            groups=k.shape[1],
            size=q.shape[3],
            value_size=v.shape[3],
            softcap=softcap is not None,
            sinks=sinks is not None,
            scale=scale,
            grads=tuple(tracked and x.requires_grad for x in (q, k, v, sinks) if x is not None),
            inference=torch.is_inference_mode_enabled(),
            pitches=tuple(x.stride(2) if x.stride(2) >= x.shape[1] * x.shape[3] else None for x in (q, k, v)),
            sink_dtype=None if sinks is None else sinks.dtype,
        )


@dataclass
class _ProbeResult:
    """The result of probing a case."""

    reason: str | None
    """Why flex can't run the case; None = it can."""


def depth_first_order(lengths: Sequence[int], parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of each token in a depth-first walk over the segments, and the last place of its segment's
    subtree.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
    Returns: order and end, int32 [T].

    >>> order, end = depth_first_order([2, 1, 1], [-1, 0, 0])     # a prompt of 2 and two completions of 1
    >>> order.tolist(), end.tolist()
    ([0, 1, 2, 3], [3, 3, 2, 3])
    """
    subtree = list(lengths)
    for i in range(len(parents) - 1, -1, -1):  # children come after their parents, so the sum of child i is complete
        if parents[i] >= 0:
            subtree[parents[i]] += subtree[i]
    next_start = {-1: 0}
    starts = []
    for i, p in enumerate(parents):
        starts.append(next_start[p])
        next_start[p] += subtree[i]
        next_start[i] = starts[i] + lengths[i]
    order = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
    end = np.repeat(np.array(starts) + np.array(subtree) - 1, lengths)
    return order.astype(np.int32), end.astype(np.int32)


class FlexRow:
    """The tables of one packed row, and its block masks: one per window, made when a layer first needs it.

    Args: lengths, parents: the segments, as SegmentLayout has them. position_ids: long [1 T], on the device to use.

    Example: `FlexRow(layout.lengths, layout.parents, layout.position_ids).attend(q, k, v, scale=0.125)`.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], position_ids: Tensor) -> None:
        self.tokens = position_ids.shape[1]
        self.padded = max(-(-self.tokens // BLOCK), 2) * BLOCK  # a single block would need another kernel
        padding = np.arange(self.tokens, self.padded, dtype=np.int32)
        tables = [torch.from_numpy(np.concatenate([x, padding])) for x in depth_first_order(lengths, parents)]
        with torch.inference_mode(False):  # the row may be scored first, and trained on later
            self._order, self._end = to_device(tables, position_ids.device)
            self._position = F.pad(position_ids[0].to(torch.int32), (0, self.padded - self.tokens))
        self._masks: dict[int | None, BlockMask] = {}

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> FlexRow:
        """Returns the same with fn(x) for each table x. Args: fn: moves a tensor to a device."""
        mapped = copy.copy(self)
        mapped._order, mapped._end, mapped._position = fn(self._order), fn(self._end), fn(self._position)
        mapped._masks = {}
        return mapped

    def mask(self, window: int | None) -> BlockMask:
        """Returns the block mask: blocks with a visible pair, blocks with visible pairs only, and the function for one
        pair.

        Args: window: a token sees keys less than this many positions back; None = all.
        Returns: a BlockMask of [1, 1, P, P].
        """
        if window not in self._masks:
            with torch.inference_mode(False):  # the mask outlives this pass, and the next pass may need a gradient
                self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> BlockMask:
        order, end, position = self._order, self._end, self._position
        since = torch.zeros_like(position) if window is None else position - (window - 1)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            """Returns whether token i sees token j. It reads only tables: a number would be compiled in for
            this row.
            """
            return (order[j] <= order[i]) & (order[i] <= end[j]) & (position[j] >= since[i])

        zero = torch.zeros((), dtype=torch.int32, device=order.device)
        keys = torch.arange(self.padded, device=order.device)
        rows = max(CHUNK_PAIRS // (self.padded * BLOCK), 1) * BLOCK
        counts = torch.cat(
            [
                sees(zero, zero, i[:, None], keys).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).sum((1, 3))
                for i in keys.split(rows)
            ]
        )[None, None]  # [1 1 N N]: visible pairs of each block
        full = counts == BLOCK * BLOCK
        return BlockMask.from_kv_blocks(
            *_block_lists((counts > 0) & ~full),
            *_block_lists(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(self.padded, self.padded),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention over the row. On a GPU it is compiled; on a CPU it stores all scores and has no gradient.

        Args: q: [1 H T D]. k, v: [1 KV T D] (the head size of v may differ). The others: see Layout.attend.
        Returns: [1 H T D of v].
        """
        gap = self.padded - self.tokens
        if gap:
            q, k, v = (F.pad(x, (0, 0, 0, gap)) for x in (q, k, v))
        wide = fp32_or_wider(q.dtype)
        cap = None if softcap is None else torch.full((q.shape[1],), softcap, dtype=wide, device=q.device)
        run = _attention if q.device.type == "cpu" else _compiled()
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            return run(q, k, v, self.mask(window), scale, cap, sinks)[:, :, : self.tokens]


def flex_unsupported_reason(case: FlexCase) -> str | None:
    """Returns why flex can't run a case; None = it can. Each case is probed once, and the result is logged.

    The probe calls flex on small trees with the strides, scale, mode and gradients of the case. It compares values and
    gradients with the plain path. The kernels that it compiles are used by the calls themselves.
    Args: case: the properties of the call.
    Returns: the reason, or None.

    >>> flex_unsupported_reason(FlexCase(torch.device("cpu"), torch.float32, 4, 2, 16, 16, False, False))
    'FlexAttention has no backward pass on cpu'
    """
    if case.device.type != "cuda":
        return f"FlexAttention has no backward pass on {case.device.type}"
    return _probe_once(case).reason


def record_flex_failure(case: FlexCase, error: Exception) -> str:
    """Records that a call failed although its case passed the probe; the plain path runs this case from now on.

    Args: case: the properties of the call. error: the exception of the call.
    Returns: why flex can't run the case.
    Raises: the error itself if the kernel is not the cause: memory is exhausted, or the device is lost.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    reason = f"it does not compile: {format_exception(error, 200)}"
    if _probe_once(case).reason is None:
        _probe_once(case).reason = reason
        log.warning("packed attention (%s): using plain from now on, because %s", describe_case(case), reason)
    return reason


@functools.cache
def _probe_once(case: FlexCase) -> _ProbeResult:
    """Probes a case once, and logs the result once."""
    reason = _probe(case)
    if reason is None:
        log.info("packed attention (%s): using FlexAttention", describe_case(case))
    else:
        log.warning("packed attention (%s): using plain, because %s", describe_case(case), reason)
    return _ProbeResult(reason)


def describe_case(case: FlexCase) -> str:
    """Describes a case in the words of the log."""
    use = "training" if any(case.grads) else "scoring"
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{case.heads} query / {case.groups} KV heads, size {case.size}, {dtype}, {use}"


def _probe(case: FlexCase) -> str | None:
    """Compiles and compares with the plain path."""
    if case.dtype not in TOLERANCE:
        return f"FlexAttention has no kernel in {case.dtype}"

    def compare() -> str | None:
        if torch._dynamo.config.disable:  # private, like recompile_limit: if they are gone, the probe fails
            return "torch.compile is off (TORCHDYNAMO_DISABLE)"
        return _compare_with_plain(case)

    try:
        return run_in_thread(case.device, compare)
    except torch.OutOfMemoryError:  # no fault of the kernel: it is tried again
        raise
    except Exception as error:  # dynamo, inductor, triton and its C compiler have many exception classes
        return f"it does not compile: {format_exception(error, 200)}"


def run_in_thread(device: torch.device, compare: Callable[[], T]) -> T:
    """Runs a comparison in a new thread, where the hooks, modes and grad state of the calling layer are not set."""

    def compare_on_device() -> T:
        with on_device(device):  # a new thread starts on the first device
            return compare()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compare_on_device).result()


def _compare_with_plain(case: FlexCase) -> str | None:
    """Calls `compare_with_plain` for flex."""

    def make(lengths: Sequence[int], parents: Sequence[int]) -> Callable[..., Tensor]:
        return FlexRow(
            lengths, parents, torch.from_numpy(segment_positions(lengths, parents))[None].to(case.device)
        ).attend

    return compare_with_plain(case, make)


def compare_with_plain(
    case: FlexCase, make: Callable[[Sequence[int], Sequence[int]], Callable[..., Tensor]]
) -> str | None:
    """Compares values and gradients of a kernel with those of the plain path, on the rows of PROBES.

    Args: case: the properties of the calls. make: (lengths, parents) -> the kernel's attention over that row.
    Returns: the first difference that exceeds the tolerance; None = there is none.
    """
    generator = torch.Generator().manual_seed(0)
    tf32 = case.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    limit = TF32_TOLERANCE if tf32 else TOLERANCE[case.dtype]
    names = [n for n, g in zip(("dq", "dk", "dv", "dsinks"), case.grads) if g]
    for lengths, parents in PROBES + (UNPADDED_PROBES if any(case.pitches) else ()):
        plain, kernel = BucketRow(lengths, parents, case.device, multiple=1).attend, make(lengths, parents)
        tokens = sum(lengths)
        inputs = _random_inputs(case, tokens, generator)
        grad = torch.randn(1, case.heads, tokens, case.value_size, generator=generator).to(case.device, case.dtype)
        for window in (None, 33):
            scale = case.size**-0.5 if case.scale is None else case.scale
            options = {"scale": scale, "window": window, "softcap": 2.0 if case.softcap else None}
            with torch.inference_mode(case.inference), torch.set_grad_enabled(any(case.grads)):
                expected = _run(plain, [x.float() for x in inputs], grad.float(), case.grads, options)
                actual = _run(kernel, inputs, grad, case.grads, options)
            for name, a, b in zip(("output", *names), actual, expected):
                error = float((a.float() - b).abs().max() / b.abs().max())
                if not error <= limit:
                    return f"its {name} is {error:.1e} from the plain path's, over {limit:.0e} (window {window})"
    return None


def _random_inputs(case: FlexCase, tokens: int, generator: torch.Generator) -> list[Tensor]:
    """Random queries, keys and values with the strides of the case, and sinks if it has some."""
    random = lambda *shape: torch.randn(shape, generator=generator).to(case.device, case.dtype)
    heads = ((case.heads, case.size), (case.groups, case.size), (case.groups, case.value_size))
    inputs = []
    for (h, d), pitch in zip(heads, case.pitches):
        wide = None if pitch is None else random(1, tokens, pitch)[..., : h * d]
        inputs.append(random(1, h, tokens, d) if wide is None else wide.unflatten(2, (h, d)).transpose(1, 2))
    return inputs + ([random(case.heads).to(case.sink_dtype or case.dtype)] if case.sinks else [])


def _run(
    attend: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    grads: Sequence[bool],
    options: dict[str, object],
) -> list[Tensor]:
    """Returns the output, and the gradient of each input that needs one."""
    inputs = [x.detach().requires_grad_(g) for x, g in zip(inputs, grads)]
    out = attend(*inputs[:3], sinks=inputs[3] if len(inputs) > 3 else None, **options)
    tracked = [x for x, g in zip(inputs, grads) if g]
    return [out.detach(), *(torch.autograd.grad(out, tracked, grad) if tracked else ())]


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """From bool [1 1 N N]: how many blocks each row has, and their indices first, in the form that torch takes."""
    indices = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, cap: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """softmax(cap·tanh(scores / cap), sink) v. The sink is applied to the output, by the log-sum-exp of the scores.

    The softmax over scores s and a sink z equals the softmax over s, times Σ eˢ / (Σ eˢ + eᶻ) = sigmoid(log Σ eˢ - z).
    """
    grouped = q.shape[1] != k.shape[1]

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Returns the soft-capped score. The cap is read from a table, because a number would be compiled in."""
        assert cap is not None
        return cap[h] * torch.tanh(score / cap[h])

    score_mod = None if cap is None else capped
    if sinks is None:
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped)
    out, aux = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # [1 H P]
    return (out * share[..., None]).to(q.dtype)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """Returns the kernel, compiled for any length. fullgraph: a graph break would run it uncompiled and store all
    scores.
    """
    return torch.compile(_attention, dynamic=True, fullgraph=True)
