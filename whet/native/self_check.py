"""The self-check of native kernels: their results on this machine are compared with torch's before they are used.

A compiler, a flag or a processor may be faulty, and training on wrong numbers raises no error. Each family of kernels
defines its shapes and tolerances as `KernelComparison`s, which are compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from torch import Tensor

from whet.native.build import Unavailable

__all__ = ["KernelComparison", "allclose", "self_check"]

K = TypeVar("K")


class KernelComparison(NamedTuple):
    """A result of the kernels, and the expected result."""

    failure: str
    """The reason if they differ: "norms differ from torch's"."""
    actual: Tensor
    expected: Tensor
    """fp32, of the same shape."""
    tolerance: float
    """The largest allowed difference, relative to the largest expected number."""


def self_check(kernels: K | Unavailable, check: Callable[[K], Iterable[KernelComparison]]) -> K | Unavailable:
    """Returns the kernels if their results are correct, else the reason why they are not used.

    Args: kernels: from load_functions. check: yields the comparisons; it runs in a separate thread, which no hook, mode
        or grad state of the calling layer reaches. The first difference ends it.

    >>> import torch
    >>> double = lambda x: [KernelComparison("doubles differ", torch.tensor(2.0 * x), torch.tensor(4.0), 1e-5)]
    >>> self_check(2, double)
    2
    >>> self_check(3, double)
    Unavailable(reason='doubles differ on this machine')
    """
    if isinstance(kernels, Unavailable):
        return kernels
    first = lambda: next((x.failure for x in check(kernels) if not allclose(x.actual, x.expected, x.tolerance)), None)
    with ThreadPoolExecutor(1) as pool:
        failure = pool.submit(first).result()
    return kernels if failure is None else Unavailable(f"{failure} on this machine")


def allclose(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Returns whether max |actual - expected| <= tolerance · max |expected|; a NaN is a difference.

    >>> import torch
    >>> allclose(torch.ones(2), torch.ones(2), 0.0), allclose(torch.full((2,), float("nan")), torch.ones(2), 1.0)
    (True, False)
    """
    return bool((actual.float() - expected).abs().max() <= tolerance * expected.abs().max())
