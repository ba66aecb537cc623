"""Counter-based random numbers without state: a uniform number for each key and position.

The key of a completion is (seed, step, prompt, generation). A number depends only on key and position, so batch
composition, scheduling, restarts and the number of processes don't change it. Integer arithmetic only (64 bit,
wrapping), so CPU and CUDA give the same bits. Dim legend: n draws.
Left out on purpose: normal numbers and permutations; and secrecy: the hash is for statistics, not for cryptography.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hash_rng_key", "keep_mask", "uniform"]

# splitmix64 (Steele, Lea, Flood, OOPSLA 2014): the increment and the multipliers of its finaliser.
_GAMMA = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_MASK64 = 2**64 - 1
# the multipliers of MurmurHash3's 32-bit finaliser, as int32
_MUR1 = 0x85EBCA6B - 2**32
_MUR2 = 0xC2B2AE35 - 2**32


def hash_rng_key(seed: int, step: int, prompt: int, generation: int) -> int:
    """Returns the hash of an rng_key, which tells where in the run a completion stands.

    k₀ = 0, kᵢ = mix(kᵢ₋₁ xor aᵢ), a the four parts in order; mix(z) is splitmix64's finaliser of z + γ.

    Args:
        seed: the run's, 0..2**64-1.
        step: the rollout.
        prompt: place in the data set.
        generation: 0..G-1.
    Returns: an integer in int64's range, so that it fits a Long tensor.
    Source: splitmix64's finaliser, chained.

    >>> hash_rng_key(0, 0, 0, 0) == hash_rng_key(0, 0, 0, 1)
    False
    >>> -(2**63) <= hash_rng_key(2**63, 7, 1, 2) < 2**63
    True
    """
    key = 0
    for part in (seed, step, prompt, generation):
        key = ((key ^ part) + _GAMMA) & _MASK64
        key = ((key ^ (key >> 30)) * _MUL1) & _MASK64
        key = ((key ^ (key >> 27)) * _MUL2) & _MASK64
        key ^= key >> 31
    return _signed(key)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns the uniform number of each key and position.

    u = ⌊h / 2¹¹⌋ · 2⁻⁵³, h = mix(mix(k) xor t), k the key and t the position; mix as in hash_rng_key. The first round
    keeps plain keys apart: without it, (k=0, t=1) and (k=1, t=0) would be the same draw.
    Args: keys: Long [n], from hash_rng_key. positions: Long [n], place of the token in its completion, 0, 1, ...
    Returns: float64 [n] in [0, 1), multiples of 2**-53; the same bits on every device.
    Source: splitmix64; 53 bits as in Python's random and numpy.

    >>> import torch
    >>> u = uniform(torch.tensor([5, 5]), torch.tensor([0, 1]))
    >>> u.dtype, bool(u[0] != u[1]), bool((u == uniform(torch.tensor([5, 5]), torch.tensor([0, 1]))).all())
    (torch.float64, True, True)
    """
    h = _mix(_mix(keys) ^ positions)
    return _shift(h, 11).double() * 2.0**-53


def keep_mask(keys: Tensor, width: int, p: float) -> Tensor:
    """Returns which numbers of a matrix dropout keeps: each is dropped with probability p, rounded to a multiple of
    2**-24.

    A number depends on the key of its row and on its column only. It has 32 bits, since a mask is as large as what it
    masks: mur(kᵢ xor cⱼ), with k and c the upper halves of mix(key) and mix(column).

    Args: keys: Long [n]. width: columns. p: between 0 and 1.
    Returns: Bool [n width].
    Source: MurmurHash3's finaliser, fmix32.

    >>> kept = keep_mask(torch.arange(1000), 1000, 0.25)
    >>> round(kept.double().mean().item(), 2)
    0.75
    >>> bool((keep_mask(torch.tensor([7]), 1000, 0.25) == kept[7]).all())
    True
    """
    rows, columns = (_mix(x).bitwise_right_shift(32).int() for x in (keys, torch.arange(width, device=keys.device)))
    h = rows[:, None] ^ columns
    h ^= (h >> 16) & 0xFFFF
    h *= _MUR1
    h ^= (h >> 13) & 0x7FFFF
    h *= _MUR2
    h ^= (h >> 16) & 0xFFFF
    h >>= 8
    h &= 0xFFFFFF
    return h >= round(p * 2**24)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser of z + γ; Long in, Long out, sums and products wrap."""
    z = z + _signed(_GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(_MUL1)
    z = (z ^ _shift(z, 27)) * _signed(_MUL2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> copies the sign bit, so the copies are masked off."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return x - 2**64 if x >= 2**63 else x
