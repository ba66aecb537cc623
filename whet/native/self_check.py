"""The self-check of native kernels: their results on this machine are compared with torch's before they are used.

A compiler, a flag or a processor may be faulty, and training on wrong numbers raises no error. Each family of kernels
defines its shapes and tolerances as `Comparison`s, which are compared here.
Left out on purpose: any test of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from torch import Tensor

from whet.native.build import Unavailable

__all__ = ["Comparison", "allclose", "self_check"]

K = TypeVar("K")


class Comparison(NamedTuple):
    """One result of the kernels, next to the right one."""

    failure: str
    """The reason where they differ: "norms differ from torch's"."""
    got: Tensor
    want: Tensor
    """fp32, of the same shape."""
    limit: float
    """Of the largest difference, as a share of the largest number."""


def self_check(kernels: K | Unavailable, check: Callable[[K], Iterable[Comparison]]) -> K | Unavailable:
    """The kernels if their results are right; else why they are not used.

    Args: kernels: as load_functions gives them. check: what to compare; runs in a thread of its own, where no hook,
        mode
        or grad state of the layer that asks first reaches it; it ends at the first difference.

    >>> import torch
    >>> self_check(2, lambda x: [Comparison("doubles differ", torch.full((1,), 2.0 * x), torch.full((1,), 4.0), 1e-5)])
    2
    >>> self_check(3, lambda x: [Comparison("doubles differ", torch.full((1,), 2.0 * x), torch.full((1,), 4.0), 1e-5)])
    Unavailable(reason='doubles differ on this machine')
    """
    if isinstance(kernels, Unavailable):
        return kernels
    first = lambda: next((x.failure for x in check(kernels) if not allclose(x.got, x.want, x.limit)), None)
    with ThreadPoolExecutor(1) as pool:
        failure = pool.submit(first).result()
    return kernels if failure is None else Unavailable(f"{failure} on this machine")


def allclose(got: Tensor, want: Tensor, limit: float) -> bool:
    """Whether max |got - want| <= limit · max |want|; a NaN is a difference.

    >>> import torch
    >>> allclose(torch.ones(2), torch.ones(2), 0.0), allclose(torch.full((2,), float("nan")), torch.ones(2), 1.0)
    (True, False)
    """
    return bool((got.float() - want).abs().max() <= limit * want.abs().max())
