"""Context parallelism by Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): processes divide the tokens of a pass.

Each process runs the layers on consecutive tokens of the row. Around attention two exchanges change what is divided:

    [1 H T/c D], all heads of its tokens   ->   [1 H/c T D], its heads of all tokens   ->   back

So attention itself is that of one process, with the same trees, windows and sinks. Where there are more processes than
KV heads, the KV heads are repeated. The statistics of all targets are then gathered, since a loss sees whole sequences;
each process has a gradient for its own targets, and their sum over the processes is the gradient of all.
Dim legend: T tokens of a pass, t = T/c of one process, c processes, H heads, D head size, s targets, n sequences.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whet.errors import ConfigError
from whet.models.attention import Layout, SegmentLayout
from whet.packing.micro_batch import MicroBatch, RankShare
from whet.types import TokenStats

__all__ = ["UlyssesLayout", "check_heads", "gather_stats", "kv_repeats", "take_share"]


class UlyssesLayout(Layout):
    """The layout of a process's share of the tokens.

    Args: whole: of all tokens. tokens: its share. group: the c processes.
    """

    def __init__(self, whole: SegmentLayout, tokens: slice, group: dist.ProcessGroup) -> None:
        self.whole, self.group = whole, group
        self.position_ids = whole.position_ids[:, tokens]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See Layout: q [1 H t D], k and v [1 KV t D], result [1 H t D]."""
        size, rank = self.group.size(), self.group.rank()
        repeats = kv_repeats(k.shape[1], size)
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        q, k, v = (_Exchange.apply(x, self.group, True) for x in (q, k, v))
        own_sinks = None if sinks is None else sinks.chunk(size)[rank]
        out = self.whole.attend(layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=own_sinks)
        return _Exchange.apply(out, self.group, False)


class _Exchange(torch.autograd.Function):
    """One all-to-all. Args: to_heads: [1 H t D] -> [1 H/c T D]; otherwise back, which is also the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    size = group.size()
    _, heads, tokens, width = x.shape
    if to_heads:
        send = x[0].reshape(size, heads // size, tokens, width).contiguous()
    else:
        send = x[0].reshape(heads, size, tokens // size, width).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received.view(-1), send.view(-1), group=group)
    if to_heads:
        return received.transpose(0, 1).reshape(1, heads // size, size * tokens, width)
    return received.reshape(1, size * heads, tokens // size, width)


def kv_repeats(kv_heads: int, size: int) -> int:
    """Returns how often each KV head is repeated so that every process has the KV heads of its query heads.

    Args: kv_heads: before. size: c. The number of query heads is a multiple of both.

    >>> kv_repeats(4, 2), kv_repeats(2, 4), kv_repeats(3, 2)
    (1, 2, 2)
    """
    return size // math.gcd(kv_heads, size)


def check_heads(config: Any, size: int, name: str, tensor_parallel_size: int = 1) -> None:
    """Raises ConfigError if a model's heads can't be divided over the processes.

    Args: config: of the model. size: c. name: of the model. tensor_parallel_size: the heads are divided by this too.
    """
    heads = config.num_attention_heads // tensor_parallel_size
    if heads % size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        each = "" if tensor_parallel_size == 1 else f" for each of trainer.tensor_parallel_size={tensor_parallel_size}"
        raise ConfigError(
            f"{name} has {heads} attention heads{each}, which trainer.context_parallel_size={size} does not divide: "
            f"each process computes attention for a part of the heads; set it to a divisor of {heads} ({divisors})"
        )


def take_share(micro: MicroBatch, group: dist.ProcessGroup) -> MicroBatch:
    """Returns a process's part of a pass: t consecutive tokens, padded at the end of the row, and the targets they
    predict.

    Args: micro: the pass, with a layout. group: the c processes.
    """
    host, size = micro.on_host, group.size()
    assert host.layout is not None and micro.layout is not None, "models without layouts are refused"
    missing = -host.num_tokens % size
    each = (host.num_tokens + missing) // size
    tokens = slice(group.rank() * each, (group.rank() + 1) * each)
    inside = lambda places: ((places >= tokens.start) & (places < tokens.stop)).nonzero().flatten().to(device)
    whole, device = micro.layout, micro.input_ids.device
    targets = inside(host.hidden_index)
    ends = torch.zeros(0, dtype=torch.long, device=device) if host.last_index is None else inside(host.last_index)
    if missing:
        lengths, parents = (*whole.lengths, missing), (*whole.parents, -1)
        whole = SegmentLayout(lengths, parents, device, attention=whole.attention, multiple=whole.multiple)
    columns = ("targets", "token_index", "sequence", "position")
    return dataclasses.replace(
        micro,
        input_ids=F.pad(micro.input_ids, (0, missing))[:, tokens],
        layout=UlyssesLayout(whole, tokens, group),
        hidden_index=micro.hidden_index.index_select(0, targets) - tokens.start,
        last_index=None if micro.last_index is None else micro.last_index.index_select(0, ends) - tokens.start,
        **{name: vars(micro)[name].index_select(0, targets) for name in columns},
        share=RankShare(micro, tokens, targets, ends),
    )


def gather_stats(stats: TokenStats, share: RankShare, group: dist.ProcessGroup) -> TokenStats:
    """Returns the statistics of all targets, from those of each process's own. A process has a gradient for its own
    only.
    """
    whole: dict[str, Tensor] = {}
    for field in dataclasses.fields(stats):
        own = getattr(stats, field.name)
        if own is None:
            continue
        count, at = len(share.whole.targets), share.targets
        if field.name == "scores":
            count, at = len(share.whole.sequences), share.sequences
        column = torch.zeros(count, dtype=own.dtype, device=own.device).index_copy_(0, at, own.detach())
        sums = column.to(torch.uint8) if own.dtype == torch.bool else column  # each place is one process's
        dist.all_reduce(sums, group=group)
        whole[field.name] = sums.bool() if own.dtype == torch.bool else sums.index_copy(0, at, own)
    return TokenStats(**whole)
