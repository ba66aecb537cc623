"""Attention over packed rows that share prefixes, under the name "whet" in transformers' registry.

A layout defines which tokens a token attends to. The model passes it down as the keyword `whet_layout=`, and each layer
calls `whet_attn` with it. Importing this module registers the name. Four implementations run a layout:
- the C++ kernels, on a CPU (native/segments.py);
- torch's varlen_attn, on a GPU in half precision, without caps and sinks, if a comparison passes (varlen.py);
- FlexAttention, on a GPU if the rows need masks and the probe passes (flex.py);
- torch's operator, with one call per bucket, in all other cases (buckets.py).
Dim legend: B rows, T tokens, H query heads, D head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whet.errors import ConfigError, DataError, lookup_error
from whet.models.buckets import BucketRow, segment_positions
from whet.models.flex import FlexCase, FlexRow, flex_unsupported_reason, record_flex_failure
from whet.models.varlen import VarlenRow, varlen_unsupported_reason
from whet.native.build import log_fallback
from whet.native.segments import SegmentTables, attend_segments, segments_unsupported_reason

__all__ = ["ATTENTION", "KERNELS", "Layout", "SegmentLayout", "whet_attn"]

ATTENTION = "whet"
"""The name under which transformers finds `whet_attn`."""
KERNELS = ("auto", "flex", "plain")
"""Implementations of a layout. auto = the fastest that works here; plain = torch's operator, a call per bucket."""
IGNORED_KEYWORDS = frozenset(
    {"cache_position", "output_attentions", "output_router_logits", "position_ids", "use_cache"}
)
"""Keyword arguments of models that do not change which tokens are attended to."""


class Layout:
    """Defines which tokens attend to which in one forward pass. Not a dataclass: FSDP2 would rebuild and cast it.

    Example: `model(input_ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)`.
    """

    position_ids: Tensor
    """Long [B T]."""

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
        """Attention of one layer.

        Args:
            layer: index of the layer.
            q: [B H T D].
            k, v: [B KV T D] (the head size of v may differ).
            scale: factor of the scores.
            window: a token sees keys less than this many positions back; None = all.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: [H], a score per head without a value.
        Returns: [B H T D of v].
        """
        raise NotImplementedError


class SegmentLayout(Layout):
    """Segments in one row: each attends to all of its ancestors, and causally to itself. Immutable.

    Packed sequences are roots. A group is one root (the prompt) with one child per completion; forks make deeper trees.
    Positions start at 0 in a root, and continue after the parent in a child. So a token attends to the same tokens, at
    the same positions, as in an unpacked sequence.

    Args:
        lengths: tokens of each segment, in row order.
        parents: -1 = root, else an earlier segment.
        device: the device of the index tensors.
        attention: one of KERNELS. "auto" uses the native kernels on a CPU; on a GPU varlen_attn, or flex if the rows
            need masks, where its comparison passes.
        multiple: torch's operator pads the tokens of a bucket, and those of its ancestors, to a multiple of this
            number, so that fewer shapes occur.
    Raises: DataError: an empty segment, or a parent that is not an earlier segment.

    >>> SegmentLayout([2, 1, 2], [-1, 0, 0]).position_ids      # a prompt of 2 and two completions
    tensor([[0, 1, 2, 2, 3]])
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        attention: str = "auto",
        multiple: int = 1,
    ) -> None:
        if attention not in KERNELS:
            raise lookup_error("attention", attention, KERNELS)
        self.attention = attention
        self.lengths = tuple(int(n) for n in lengths)
        self.parents = tuple(int(p) for p in parents)
        if len(self.lengths) != len(self.parents) or not self.lengths:
            raise DataError(
                f"{len(self.lengths)} lengths and {len(self.parents)} parents; give one of each per segment"
            )
        for i, (n, p) in enumerate(zip(self.lengths, self.parents)):
            if n < 1 or not -1 <= p < i:
                raise DataError(
                    f"segment {i} has {n} tokens and parent {p}; it needs a token and an earlier parent, or -1"
                )
        self.position_ids = torch.from_numpy(segment_positions(self.lengths, self.parents))[None].to(device)
        self.multiple = multiple
        self._tables: dict[int, SegmentTables] = {}

    def to(self, device: torch.device | str) -> SegmentLayout:
        """Returns the same layout on another device."""
        return SegmentLayout(self.lengths, self.parents, device, attention=self.attention, multiple=self.multiple)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> SegmentLayout:
        """Returns the same layout with fn(x) for each of its tensors x, those that attention on a GPU will read
        included.

        Args: fn: moves a tensor to a device.
        """
        mapped = copy.copy(self)
        mapped._tables = {}
        for name in ("bucket_row", "_flex", "_varlen"):
            vars(mapped).pop(name, None)
        mapped.position_ids = fn(self.position_ids)
        if self.attention != "flex":
            mapped.bucket_row = self.bucket_row.map_tensors(fn)
        if self.attention == "flex" or (self.attention == "auto" and not self.bucket_row.needs_no_mask(None)):
            mapped._flex = self._flex.map_tensors(fn)
        if self.attention == "auto":
            mapped._varlen = self._varlen.map_tensors(fn)
        return mapped

    @functools.cached_property
    def bucket_row(self) -> BucketRow:
        """The segments as buckets of padded calls."""
        with torch.inference_mode(False):  # the buckets outlive this pass, and the next pass may need a gradient
            return BucketRow(self.lengths, self.parents, self.position_ids.device, self.multiple)

    @functools.cached_property
    def _flex(self) -> FlexRow:
        return FlexRow(self.lengths, self.parents, self.position_ids)

    @functools.cached_property
    def _varlen(self) -> VarlenRow:
        return VarlenRow(self.lengths, self.parents, self.position_ids.device)

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
        """Attention of one layer; see Layout.attend.

        Raises: DataError: the tensors have more than one row, or another number of tokens than the layout.
            ConfigError: attention="flex", and FlexAttention can't run this call.
        """
        if q.shape[0] != 1 or q.shape[2] != self.position_ids.shape[1]:
            raise DataError(
                f"a layout of 1 row of {self.position_ids.shape[1]} tokens was given {q.shape[0]} of {q.shape[2]}"
            )
        if self.attention == "auto" and q.is_cuda and softcap is None and sinks is None and self._varlen.fits:
            case = FlexCase.from_call(q, k, v, scale=scale, softcap=None, sinks=None)
            if varlen_unsupported_reason(case) is None:
                return self._varlen.attend(q, k, v, scale=scale, window=window)
        if self._use_flex(q, k, v, window, softcap, sinks, scale):
            try:
                return self._flex.attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
            except Exception as error:  # many classes, as in the probe: another length may be compiled again
                case = FlexCase.from_call(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
                self._raise_if_required(record_flex_failure(case, error))
        if self.attention == "auto" and not q.is_cuda:
            capped = softcap is not None or sinks is not None
            reason = "scores have caps or sinks" if capped else segments_unsupported_reason(q, k, v)
            if reason is None:
                group = q.shape[1] // k.shape[1]  # query heads per KV head
                if group not in self._tables:
                    self._tables[group] = SegmentTables(self.lengths, self.parents, group)
                return attend_segments(q, k, v, self._tables[group], scale=scale, window=window)
            log_fallback("attention of training", reason)
        return self.bucket_row.attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def _use_flex(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float | None = None,
    ) -> bool:
        """Returns whether FlexAttention runs this call. Rows that need no mask are faster in torch's operator."""
        if self.attention == "plain" or (self.attention == "auto" and not q.is_cuda):
            return False
        if self.attention == "auto" and softcap is None and sinks is None and self.bucket_row.needs_no_mask(window):
            return False
        reason = flex_unsupported_reason(FlexCase.from_call(q, k, v, scale=scale, softcap=softcap, sinks=sinks))
        if reason is not None:
            self._raise_if_required(reason)
        return reason is None

    def _raise_if_required(self, reason: str) -> None:
        """Raises: ConfigError: attention="flex"."""
        if self.attention == "flex":
            raise ConfigError(f'attention "flex" can\'t serve this model: {reason}; set it to auto or plain')


def whet_attn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    whet_layout: Layout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Returns the attention function that transformers calls in each layer; it calls the layout.

    Args:
        module: the attention module, with its layer_idx.
        query: [B H T D].
        key, value: [B KV T D].
        attention_mask: must be None.
        s_aux: [H] sink scores.
        whet_layout: which tokens attend to which. The others are those of transformers.
    Returns: ([B T H D], None).
    Raises: ConfigError: no layout, a mask, dropout, or an unknown keyword, which may change which tokens are attended
        to.

    Example: `model.set_attn_implementation("whet")`, after which the model's forward takes `whet_layout=`.
    """
    if whet_layout is None:
        raise ConfigError(
            f'attention "{ATTENTION}" was called without whet_layout=; pass a layout, or set another attention'
        )
    if attention_mask is not None:
        raise ConfigError("attention_mask and whet_layout were both given; pass only whet_layout")
    if dropout:
        raise ConfigError(f'attention "{ATTENTION}" has no dropout, got {dropout}; set the dropout of the config to 0')
    if unknown := set(extra) - IGNORED_KEYWORDS:
        raise ConfigError(
            f'attention "{ATTENTION}" does not know {", ".join(sorted(unknown))}; train this model padded'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    out = whet_layout.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


# No mask function is registered. Without one, transformers makes no mask, and it does not read the position ids to find
# out whether the rows are packed, which would synchronise with the device in every pass.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, whet_attn)
