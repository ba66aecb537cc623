import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.ops.counter_rng import hash_rng_key, uniform

MASK = 2**64 - 1


def mix(z: int) -> int:
    """splitmix64's finaliser of z + gamma, in plain integers."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def oracle(key: int, position: int) -> float:
    return (mix(mix(key & MASK) ^ position) >> 11) / 2**53


def test_the_mixer_is_splitmix64():
    assert mix(1234567 & MASK) == 6457827717110365317  # the first number of splitmix64 with seed 1234567


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2**63), min_size=4, max_size=4), st.integers(0, 2**31))
def test_tensors_agree_with_plain_integers_to_the_bit(address, position):
    key = 0
    for part in address:
        key = mix(key ^ part)
    got = hash_rng_key(*address)
    assert -(2**63) <= got < 2**63 and got & MASK == key
    assert uniform(tensor([got]), tensor([position])).item() == oracle(key, position)


def test_every_part_of_an_address_counts_and_their_order_too():
    addresses = {(7, 3, 2, 1), (8, 3, 2, 1), (7, 4, 2, 1), (7, 3, 3, 1), (7, 3, 2, 2), (3, 7, 2, 1), (7, 3, 1, 2)}
    assert len({hash_rng_key(*a) for a in addresses}) == len(addresses)


def test_neighbouring_addresses_share_no_number():
    keys = tensor([hash_rng_key(s, t, p, g) for s in (0, 1) for t in range(5) for p in range(10) for g in range(10)])
    u = uniform(keys.repeat_interleave(50), torch.arange(50).repeat(1000))
    assert len(u.unique()) == 50_000


def test_plain_keys_and_positions_don_t_mix_up():
    keys, positions = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    assert len(uniform(keys.flatten(), positions.flatten()).unique()) == 64 * 64


def test_a_number_depends_on_its_own_address_alone():
    keys, positions = torch.arange(100) * 977, torch.arange(100) % 7
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert uniform(keys[order], positions[order]).tolist() == uniform(keys, positions)[order].tolist()
    assert uniform(keys[3:4], positions[3:4]).item() == uniform(keys, positions)[3].item()


def streams():
    """Three ways to walk through addresses, 2**16 numbers each."""
    n = 2**16
    key = hash_rng_key(0, 0, 0, 0)
    generations = tensor([hash_rng_key(0, 0, 0, g) for g in range(256)]).repeat_interleave(256)
    return {
        "positions of one completion": uniform(torch.full((n,), key), torch.arange(n)),
        "plain neighbouring keys": uniform(torch.arange(n), torch.zeros(n, dtype=torch.long)),
        "generations by positions": uniform(generations, torch.arange(256).repeat(256)),
    }


@pytest.mark.parametrize("name", list(streams()))
def test_numbers_are_uniform_and_serially_independent(name):
    u = streams()[name]
    assert (u >= 0).all() and (u < 1).all()
    n = len(u)
    # chi-square of 256 bins: mean 255, standard deviation sqrt(510) = 22.6; 5 deviations
    counts = torch.bincount((u * 256).long(), minlength=256).double()
    assert abs(float(((counts - n / 256) ** 2 / (n / 256)).sum()) - 255) < 5 * math.sqrt(510)
    # pairs of neighbours in 16 x 16 bins, not overlapping
    pairs = torch.bincount((u[::2] * 16).long() * 16 + (u[1::2] * 16).long(), minlength=256).double()
    assert abs(float(((pairs - n / 512) ** 2 / (n / 512)).sum()) - 255) < 5 * math.sqrt(510)
    # serial correlation has standard deviation 1/sqrt(n)
    for lag in (1, 2, 256):
        corr = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1]
        assert abs(float(corr)) < 5 / math.sqrt(n)


def test_low_bits_are_fair_too():
    h = (streams()["plain neighbouring keys"] * 2**53).long()
    for bit in range(0, 53, 4):
        ones = int(((h >> bit) & 1).sum())
        assert abs(ones - 2**15) < 5 * math.sqrt(2**14)  # variance n/4


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    keys, positions = torch.arange(1000) * 7919 - 500, torch.arange(1000)
    assert uniform(keys.cuda(), positions.cuda()).cpu().tolist() == uniform(keys, positions).tolist()
