"""Masked and segmented sums, means and variances.

Values at masked-out places never matter, NaN and infinities included, neither in the value nor in the gradient. An
empty mask gives 0 with gradient 0. Half precision is summed in fp32.
Dim legend: S tokens on the token axis, num segments.
Sums by segment are repeatable on the CPU; on CUDA index_add uses atomics and the last bit may differ between runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.shapes import check_shapes

__all__ = [
    "fp32_or_wider",
    "masked_column",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "segment_count",
    "segment_mean",
    "segment_sum",
    "to_fp32",
]


def fp32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute sums and differences in: fp32, or float64 for float64.

    >>> fp32_or_wider(torch.bfloat16), fp32_or_wider(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def to_fp32(x: Tensor) -> Tensor:
    """Returns the numbers in fp32, or unchanged if they are float64, to compute sums and differences.

    Args: x: of any floating dtype.

    >>> to_fp32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_fp32(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(fp32_or_wider(x.dtype))


def masked_column(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the numbers in fp32 or wider, and 0 where masked out, so that NaN there reaches neither a loss nor its
    gradient.

    Args: x [S]. mask: Bool [S].
    Returns: [S], fp32 or wider.
    Raises: DataError: x and mask are not both [S].

    >>> masked_column(torch.tensor([1., torch.nan]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    check_shapes("[S]", x=x, mask=mask)
    return torch.where(mask.bool(), to_fp32(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the places where the mask is True.

    Args: x [...]. mask: Bool, broadcastable to x. dim: the dim to sum over; None = all.
    Returns: 0-d, or x's shape without `dim`; fp32 or wider, Long for integers.

    >>> masked_sum(torch.tensor([1., 2., torch.nan]), torch.tensor([True, True, False]))
    tensor(3.)
    """
    x = _summable(x)
    kept = torch.where(mask.bool(), x, x.new_zeros(()))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the places where the mask is True; 0 where there are none.

    Args: x [...]. mask: Bool, broadcastable to x. dim: the dim to average over; None = all.
    Returns: 0-d, or x's shape without `dim`; fp32 or wider.

    >>> masked_mean(torch.tensor([1., 2., 3., 4., 5.]), torch.tensor([1, 1, 0, 0, 1]))  # (1 + 2 + 5) / 3
    tensor(2.6667)
    """
    kept = mask.bool().expand_as(x)
    count = kept.sum() if dim is None else kept.sum(dim)
    return masked_sum(x, kept, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the places where the mask is True; 0 where there are fewer than two.

    v = Σ m(x − μ)² / (n − 1), μ the masked mean, n = Σ m; unbiased=False divides by n.
    Args: x [...]. mask: Bool, broadcastable to x. unbiased: Bessel's correction.
    Returns: 0-d, fp32 or wider; computed in float64, and exactly 0 where all numbers are equal.

    >>> masked_var(torch.tensor([1., 2., 3., 4., 5.]), torch.tensor([1, 1, 0, 0, 1]))  # mean 8/3: (25 + 4 + 49) / 9 / 2
    tensor(4.3333)
    """
    kept = mask.bool().expand_as(x)
    return _var(_centred(x, kept), kept, unbiased).to(fp32_or_wider(x.dtype))


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and variance 1 over the places where the mask is True.

    y = (x − μ) / √(v + 1e-8), μ and v the masked mean and unbiased variance.
    Args: x [...]. mask: Bool, broadcastable to x.
    Returns: x's shape, fp32 or wider; 0 where masked out, and everywhere if all numbers are equal. Computed in float64:
        in fp32, numbers that are all 1000.1 would be whitened to values up to 0.5 by the rounding of their mean.
    Source: the whitening of PPO in Tunix, verl and TRL; they leave numbers at masked-out places.

    >>> masked_whiten(torch.tensor([1., 3., 9.]), torch.tensor([True, True, False]))  # mean 2, variance 2
    tensor([-0.7071,  0.7071,  0.0000])
    """
    kept = mask.bool().expand_as(x)
    centred = _centred(x, kept)
    return (centred * (_var(centred, kept, unbiased=True) + 1e-8).rsqrt()).to(fp32_or_wider(x.dtype))


def segment_sum(x: Tensor, segments: Tensor, num: int) -> Tensor:
    """Sum of each segment.

    Args: x [S]. segments: Long [S], the segment of each place, 0..num-1 in any order. num: segments there are.
    Returns: [num], fp32 or wider (integers stay Long); 0 for a segment without places.

    >>> segment_sum(torch.tensor([1., 2., 4.]), torch.tensor([0, 0, 1]), 3)
    tensor([3., 4., 0.])
    """
    check_shapes("[S]", x=x, segments=segments)
    x = _summable(x)
    return x.new_zeros(num).index_add(0, segments, x)


def segment_count(mask: Tensor, segments: Tensor, num: int) -> Tensor:
    """Places of each segment where the mask is True.

    Args: mask: Bool [S]. segments: Long [S]. num: segments there are.
    Returns: Long [num].

    >>> segment_count(torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), 2)
    tensor([1, 1])
    """
    return segment_sum(mask.bool().long(), segments, num)


def segment_mean(x: Tensor, mask: Tensor, segments: Tensor, num: int) -> Tensor:
    """Mean of each segment over the places where the mask is True; 0 where there are none.

    Args: x [S]. mask: Bool [S]. segments: Long [S]. num: segments there are.
    Returns: [num], fp32 or wider.

    >>> segment_mean(torch.tensor([1., 3., 9.]), torch.tensor([True, True, False]), torch.tensor([0, 0, 1]), 2)
    tensor([2., 0.])
    """
    check_shapes("[S]", x=x, mask=mask, segments=segments)
    kept = torch.where(mask.bool(), _summable(x), 0.0)
    return segment_sum(kept, segments, num) / segment_count(mask, segments, num).clamp(min=1)


def _centred(x: Tensor, kept: Tensor) -> Tensor:
    """X less its masked mean, in float64; 0 where masked out, and everywhere if all numbers kept are equal."""
    x = x.double()
    high, low = x.detach().masked_fill(~kept, -torch.inf), x.detach().masked_fill(~kept, torch.inf)
    differs = (high.max() > low.min()) | (high != high).any() if x.numel() else kept.any()
    return torch.where(kept & differs, x - masked_mean(x, kept), 0.0)


def _var(centred: Tensor, kept: Tensor, unbiased: bool) -> Tensor:
    """0-d: the variance of numbers that are already centred, and 0 where masked out."""
    return centred.square().sum() / (kept.sum() - int(unbiased)).clamp(min=1)


def _summable(x: Tensor) -> Tensor:
    """fp32 for half precision, Long for small integers; else x itself."""
    return to_fp32(x) if x.is_floating_point() else x.long()
