"""FlexAttention over packed rows that share prefixes: one compiled kernel where the plain path would need masks.

    token i sees token j   ⟺   order[j] <= order[i] <= end[j]   and   position[j] >= since[i]

order is a token's place in a depth-first walk over the segments, end the last place of the walk below the token's own
segment, position counts from the root, and since = position - window + 1 (0 without a window). An ancestor's tokens
come earlier in the walk and end after it, those of another branch end before it or come later, and within a segment
the walk is the row, so the first half says "itself or an ancestor, and not later". Four int32 tables of one number per
token are enough: whatever the tree and the window, the mask is one function, and the kernel is compiled once.

The row is padded to blocks of 128 with tokens that see themselves alone. Only blocks with a visible pair are run.
Dim letters: T tokens, padded: P; H query heads, KV key heads, D head size; N blocks, P / 128.

Left out on purpose: torch's varlen_attn, which takes no shared prefix, and no grouped heads before torch 2.12; kernel
options and autotuning; and float64, which has no kernel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from whet.errors import format_exception
from whet.models.buckets import BucketRow, segment_positions
from whet.ops.masked import fp32_or_wider
from whet.util.device import on_device

__all__ = ["FlexCase", "FlexRow", "depth_first_order", "flex_unsupported_reason", "record_flex_failure"]

log = logging.getLogger("whet")

BLOCK = 128
"""Tokens of a block, torch's default."""
CHUNK_PAIRS = 1 << 25
"""Query-key pairs looked at together while blocks are counted."""
MAX_COMPILED = 64
"""Variants that may be compiled (head counts, dtypes, with and without gradient) before it counts as a fault."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of the probe from the plain path in fp32, relative to the largest number."""
TF32_TOLERANCE = 5e-3
"""The same for fp32 where products may be rounded to TF32."""
PROBES = (([70, 45, 130, 20, 60, 1], [-1, 0, 0, 2, -1, 4]), ([200, 150, 120, 64], [-1, 0, 0, -1]))
"""Trees of the probe: rows of 3 and 5 blocks, so that the shape changes from one to the next."""
UNPADDED_PROBES = (([128, 200, 184, 128], [-1, 0, 0, -1]), ([300, 200, 296, 100], [-1, 0, 0, -1]))
"""The same for rows of 5 and 7 blocks that need no padding: what they are called with is as it lies in the model."""


class FlexCase(NamedTuple):
    """The properties of a call for which a kernel is compiled.

    >>> q = torch.zeros(1, 5, 4, 8).transpose(1, 2)     # 5 tokens, 4 heads of 8, as a model's product gives them
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
    """Factor of the scores; None = 1 / √size."""
    grads: tuple[bool, ...] = (True, True, True, True)
    """Of queries, keys, values and sinks: whether a gradient is taken."""
    inference: bool = False
    """In inference mode."""
    pitches: tuple[int | None, ...] = (None, None, None)
    """Of queries, keys and values: numbers from one token of a head to the next; None = they lie head by head."""
    sink_dtype: torch.dtype | None = None

    @classmethod
    def from_call(
        cls, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, sinks: Tensor | None
    ) -> FlexCase:
        """The case of a call. Args: as FlexRow.attend."""
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
    """The result of a case's probe."""

    reason: str | None
    """Why flex can't run it; None = it can."""


def depth_first_order(lengths: Sequence[int], parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each token's place in a depth-first walk over the segments, and the last place below its segment.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
    Returns: order and end, int32 [T].

    >>> order, end = depth_first_order([2, 1, 1], [-1, 0, 0])     # a prompt of 2 and two completions of 1
    >>> order.tolist(), end.tolist()
    ([0, 1, 2, 3], [3, 3, 2, 3])
    """
    below = list(lengths)
    for i in range(len(parents) - 1, -1, -1):  # a child comes after its parent, so its own sum is done
        if parents[i] >= 0:
            below[parents[i]] += below[i]
    free = {-1: 0}
    starts = []
    for i, p in enumerate(parents):
        starts.append(free[p])
        free[p] += below[i]
        free[i] = starts[i] + lengths[i]
    order = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
    end = np.repeat(np.array(starts) + np.array(below) - 1, lengths)
    return order.astype(np.int32), end.astype(np.int32)


class FlexRow:
    """The tables of one packed row and its block masks, one per window, made when first asked for.

    Args: lengths, parents: the segments, as SegmentLayout has them. position_ids: long [1 T], on the device to use.

    Example: `FlexRow(layout.lengths, layout.parents, layout.position_ids).attend(q, k, v, scale=0.125)`.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], position_ids: Tensor) -> None:
        self.tokens = position_ids.shape[1]
        self.padded = max(-(-self.tokens // BLOCK), 2) * BLOCK  # a single block would be compiled apart
        alone = np.arange(self.tokens, self.padded, dtype=np.int32)
        tables = [torch.from_numpy(np.concatenate([x, alone])) for x in depth_first_order(lengths, parents)]
        with torch.inference_mode(False):  # a row that is first scored may be trained on next
            self._order, self._end = (x.to(position_ids.device) for x in tables)
            self._position = F.pad(position_ids[0].to(torch.int32), (0, self.padded - self.tokens))
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Which blocks hold a visible pair, which hold nothing else, and the function that decides it for a pair.

        Args: window: a token sees keys less than this many positions back; None = all.
        Returns: a BlockMask of [1, 1, P, P].
        """
        if window not in self._masks:
            with torch.inference_mode(False):  # it outlives this pass, and the next one may need a gradient
                self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        order, end, position = self._order, self._end, self._position
        since = torch.zeros_like(position) if window is None else position - (window - 1)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            """Whether token i sees token j; tables alone, no numbers, so that every row has the same kernel."""
            return (order[j] <= order[i]) & (order[i] <= end[j]) & (position[j] >= since[i])

        nothing = torch.zeros((), dtype=torch.int32, device=order.device)
        keys = torch.arange(self.padded, device=order.device)
        rows = max(CHUNK_PAIRS // (self.padded * BLOCK), 1) * BLOCK
        counts = torch.cat(
            [
                sees(nothing, nothing, i[:, None], keys).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).sum((1, 3))
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
        """Attention over the row, compiled on a GPU; on a CPU with its scores held, and without a gradient.

        Args: q: [1 H T D]. k, v: [1 KV T D] (the head size of v may differ). The others as Layout.attend.
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
    """Why flex can't run a case; None = it can. A probe finds out once per case, and the result is logged.

    The probe calls flex as the case does, with the same strides, scale, mode and gradients, over small trees, and
    compares values and gradients with the plain path's. What it has compiled serves the calls themselves.
    Args: case: what it would be compiled for.
    Returns: the reason, or None.

    >>> flex_unsupported_reason(FlexCase(torch.device("cpu"), torch.float32, 4, 2, 16, 16, False, False))
    'FlexAttention has no backward pass on cpu'
    """
    if case.device.type != "cuda":
        return f"FlexAttention has no backward pass on {case.device.type}"
    return _probe_once(case).reason


def record_flex_failure(case: FlexCase, error: Exception) -> str:
    """Records that a case which passed its probe failed when it was called; the plain path serves it from now on.

    Args: case: of the call. error: what it raised.
    Returns: why flex can't serve.
    Raises: the error, where it is not the kernel's fault: memory is out, or the device is lost.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    reason = _compile_failure(error)
    if _probe_once(case).reason is None:
        _probe_once(case).reason = reason
        log.warning("packed attention (%s): using plain from now on, because %s", _describe(case), reason)
    return reason


@functools.cache
def _probe_once(case: FlexCase) -> _ProbeResult:
    """The probe's answer, asked for and logged once."""
    reason = _probe(case)
    if reason is None:
        log.info("packed attention (%s): using FlexAttention", _describe(case))
    else:
        log.warning("packed attention (%s): using plain, because %s", _describe(case), reason)
    return _ProbeResult(reason)


def _describe(case: FlexCase) -> str:
    use = "training" if any(case.grads) else "scoring"
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{case.heads} query / {case.groups} KV heads, size {case.size}, {dtype}, {use}"


def _compile_failure(error: Exception) -> str:
    return f"it does not compile: {format_exception(error, 200)}"


def _probe(case: FlexCase) -> str | None:
    """Compiles and compares, in a thread: no hook, mode or grad state of the layer that asks reaches it there."""
    if case.dtype not in TOLERANCE:
        return f"FlexAttention has no kernel in {case.dtype}"

    def there() -> str | None:
        if torch._dynamo.config.disable:  # private, as is recompile_limit: without them the probe has failed
            return "torch.compile is off (TORCHDYNAMO_DISABLE)"
        with on_device(case.device):  # a new thread begins on the first one
            return _compare(case)

    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(there).result()
    except Exception as error:  # dynamo, inductor, triton and its C compiler raise what they like
        return _compile_failure(error)


def _compare(case: FlexCase) -> str | None:
    """The first difference from the plain path above the tolerance, described."""
    generator = torch.Generator().manual_seed(0)
    tf32 = case.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    limit = TF32_TOLERANCE if tf32 else TOLERANCE[case.dtype]
    names = [n for n, g in zip(("dq", "dk", "dv", "dsinks"), case.grads) if g]
    for lengths, parents in PROBES + (UNPADDED_PROBES if any(case.pitches) else ()):
        positions = torch.from_numpy(segment_positions(lengths, parents))[None].to(case.device)
        row, tokens = FlexRow(lengths, parents, positions), sum(lengths)
        plain, flex = BucketRow(lengths, parents, case.device, multiple=1).attend, row.attend
        inputs = _random_inputs(case, tokens, generator)
        grad = torch.randn(1, case.heads, tokens, case.value_size, generator=generator).to(case.device, case.dtype)
        for window in (None, 33):
            scale = case.size**-0.5 if case.scale is None else case.scale
            how = {"scale": scale, "window": window, "softcap": 2.0 if case.softcap else None}
            with torch.inference_mode(case.inference), torch.set_grad_enabled(any(case.grads)):
                want = _run(plain, [x.float() for x in inputs], grad.float(), case.grads, how)
                got = _run(flex, inputs, grad, case.grads, how)
            for name, a, b in zip(("output", *names), got, want):
                error = float((a.float() - b).abs().max() / b.abs().max())
                if not error <= limit:
                    return f"its {name} is {error:.1e} from the plain path's, over {limit:.0e} (window {window})"
    return None


def _random_inputs(case: FlexCase, tokens: int, generator: torch.Generator) -> list[Tensor]:
    """Random queries, keys and values as they lie in the case, and sinks where it has them."""
    made = lambda *shape: torch.randn(shape, generator=generator).to(case.device, case.dtype)
    heads = ((case.heads, case.size), (case.groups, case.size), (case.groups, case.value_size))
    inputs = []
    for (h, d), pitch in zip(heads, case.pitches):
        wide = None if pitch is None else made(1, tokens, pitch)[..., : h * d]
        inputs.append(made(1, h, tokens, d) if wide is None else wide.unflatten(2, (h, d)).transpose(1, 2))
    return inputs + ([made(case.heads).to(case.sink_dtype or case.dtype)] if case.sinks else [])


def _run(
    attend: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    grads: Sequence[bool],
    how: dict[str, object],
) -> list[Tensor]:
    """The output, and the gradient of each input that has one."""
    inputs = [x.detach().requires_grad_(g) for x, g in zip(inputs, grads)]
    out = attend(*inputs[:3], sinks=inputs[3] if len(inputs) > 3 else None, **how)
    tracked = [x for x, g in zip(inputs, grads) if g]
    return [out.detach(), *(torch.autograd.grad(out, tracked, grad) if tracked else ())]


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [1 1 N N] as torch wants it: blocks in each row, and which, those first."""
    first = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), first.to(torch.int32)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, cap: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """softmax(cap·tanh(scores / cap), sink) v. A sink takes its share through the log-sum-exp, which has a gradient.

    The softmax over scores s and a sink z is that over s alone, times Σ eˢ / (Σ eˢ + eᶻ) = sigmoid(log Σ eˢ - z).
    """
    grouped = q.shape[1] != k.shape[1]

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The cap from a table, since a number would be compiled in."""
        assert cap is not None
        return cap[h] * torch.tanh(score / cap[h])

    change = None if cap is None else capped
    if sinks is None:
        return flex_attention(q, k, v, score_mod=change, block_mask=mask, scale=scale, enable_gqa=grouped)
    out, aux = flex_attention(
        q, k, v, score_mod=change, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None  # it was asked for
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # [1 H P]
    return (out * share[..., None]).to(q.dtype)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """The kernel, compiled for any length; whole, so that it never runs in parts with its scores held."""
    return torch.compile(_attention, dynamic=True, fullgraph=True)
