"""FlexAttention over packed rows that share prefixes: one compiled kernel where the plain path would need masks.

    token i sees token j   ⟺   order[j] <= order[i] <= end[j]   and   position[j] >= since[i]

order is a token's place in a depth-first walk over the segments, end the last place of the walk below the token's own
segment, position counts from the root, and since = position - window + 1 (0 without a window). An ancestor's tokens
come earlier in the walk and end after it, those of another branch end before it or come later, and within a segment
the walk is the row, so the first half says "itself or an ancestor, and not later". Four int32 tables of one number per
token say it all: whatever the tree and the window, the mask is one function, and the kernel is compiled once.

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
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

__all__ = ["FlexCase", "FlexRow", "flex_refusal", "walk"]

log = logging.getLogger("whet")

BLOCK = 128
"""Tokens of a block, torch's default."""
CHUNK_PAIRS = 1 << 25
"""Query-key pairs looked at together while blocks are counted."""
COMPILED = 64
"""Variants that may be compiled (head counts, dtypes, with and without gradient) before it counts as a fault."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of the probe from the plain path in fp32, relative to the largest number."""
TF32_TOLERANCE = 5e-3
"""The same for fp32 where products may be rounded to TF32."""
PROBES = (([70, 45, 130, 20, 60, 1], [-1, 0, 0, 2, -1, 4]), ([200, 150, 120, 64], [-1, 0, 0, -1]))
"""Trees of the probe: rows of 3 and 5 blocks, so that the shape changes from one to the next."""


class FlexCase(NamedTuple):
    """What a kernel is compiled for."""

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


def walk(lengths: Sequence[int], parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each token's place in a depth-first walk over the segments, and the last place below its segment.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
    Returns: order and end, int32 [T].

    >>> order, end = walk([2, 1, 1], [-1, 0, 0])     # a prompt of 2 and two completions of 1
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
        tables = [torch.from_numpy(np.concatenate([x, alone])) for x in walk(lengths, parents)]
        with torch.inference_mode(False):  # a row that is first scored may be trained on next
            self._order, self._end = (x.to(position_ids.device) for x in tables)
            self._position = F.pad(position_ids[0].to(torch.int32), (0, self.padded - self.tokens))
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Which blocks hold a visible pair, which hold nothing else, and the function that says so of a pair.

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
            *_listed((counts > 0) & ~full),
            *_listed(full),
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
        wide = torch.promote_types(q.dtype, torch.float32)
        cap = None if softcap is None else torch.full((q.shape[1],), softcap, dtype=wide, device=q.device)
        run = _attention if q.device.type == "cpu" else _compiled()
        with torch._dynamo.config.patch(recompile_limit=COMPILED):
            return run(q, k, v, self.mask(window), scale, cap, sinks)[:, :, : self.tokens]


def flex_refusal(case: FlexCase) -> str | None:
    """Why flex can't serve a case; None = it can. Found out by a probe, once per case, and logged.

    The probe runs two small trees forward and backward, and compares values and gradients with the plain path's.
    Args: case: what it would be compiled for.
    Returns: the reason, or None.

    >>> flex_refusal(FlexCase(torch.device("cpu"), torch.float32, 4, 2, 16, 16, False, False))
    'FlexAttention has no backward pass on cpu'
    """
    if case.device.type != "cuda":
        return f"FlexAttention has no backward pass on {case.device.type}"
    return _probed(case)


@functools.cache
def _probed(case: FlexCase) -> str | None:
    """The probe's answer, asked for and logged once."""
    reason = _probe(case)
    what = f"{case.heads}/{case.groups} heads of {case.size} in {case.dtype}"
    if reason is None:
        log.info("attention of %s over packed rows: FlexAttention", what)
    else:
        log.warning("attention of %s over packed rows: the plain path, since %s", what, reason)
    return reason


def _probe(case: FlexCase) -> str | None:
    """Compiles and compares, in a thread: no hook, mode or grad state of the layer that asks reaches it there."""
    if case.dtype not in TOLERANCE:
        return f"FlexAttention has no kernel in {case.dtype}"
    if torch._dynamo.config.disable:
        return "torch.compile is off (TORCHDYNAMO_DISABLE)"
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_compare, case).result()
    except Exception as error:  # dynamo, inductor, triton and its C compiler raise what they like
        return f"it does not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compare(case: FlexCase) -> str | None:
    """The first difference from the plain path above the tolerance, in words."""
    from whet.models.attention import SegmentLayout  # which imports this module

    generator = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=generator).to(case.device, case.dtype)
    tf32 = case.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    limit = TF32_TOLERANCE if tf32 else TOLERANCE[case.dtype]
    for lengths, parents in PROBES:
        layout = SegmentLayout(lengths, parents, case.device, attention="plain")
        row, tokens = FlexRow(lengths, parents, layout.position_ids), sum(lengths)
        heads = ((case.heads, case.size), (case.groups, case.size), (case.groups, case.value_size))
        inputs = [made(1, h, tokens, d) for h, d in heads] + ([made(case.heads)] if case.sinks else [])
        grad = made(1, case.heads, tokens, case.value_size)
        plain, flex = functools.partial(layout.attend, 0), row.attend
        for window in (None, 33):
            how = {"scale": case.size**-0.5, "window": window, "softcap": 2.0 if case.softcap else None}
            want = _run(plain, [x.float() for x in inputs], grad.float(), how)
            for name, a, b in zip(("output", "dq", "dk", "dv", "dsinks"), _run(flex, inputs, grad, how), want):
                error = float((a.float() - b).abs().max() / b.abs().max())
                if not error <= limit:
                    return f"its {name} is {error:.1e} from the plain path's, over {limit:.0e} (window {window})"
    return None


def _run(attend: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, how: dict[str, object]) -> list[Tensor]:
    """The output, and the gradient of each input."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs[:3], sinks=inputs[3] if len(inputs) > 3 else None, **how)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
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
