"""Advantages against loops over groups, and against numbers recorded from Tunix and TRL."""

import math
import random
import statistics

import pytest
import torch
from torch import tensor

from whet.ops import ADVANTAGE_ESTIMATORS, group_relative


def naive(name: str, groups: dict[int, list[float]]) -> dict[int, list[float]]:
    out = {}
    for g, rewards in groups.items():
        given = [r for r in rewards if not math.isnan(r)]
        if len(given) < 2 or max(given) == min(given):
            out[g] = [0.0] * len(rewards)
            continue
        mean = statistics.fmean(given)
        values = {
            "grpo": lambda r, m=mean, s=statistics.stdev(given): (r - m) / (s + 1e-6),
            "drgrpo": lambda r, m=mean: r - m,
            "rloo": lambda r, given=given: r - (sum(given) - r) / (len(given) - 1),
        }[name]
        out[g] = [0.0 if math.isnan(r) else values(r) for r in rewards]
    return out


@pytest.mark.parametrize("name", ["drgrpo", "grpo", "rloo"])
@pytest.mark.parametrize("seed", range(5))
def test_estimators_equal_the_loop(name, seed):
    rng = random.Random(seed)
    groups = {
        g: [rng.choice([0.0, 1.0, 0.9, rng.gauss(0, 3), math.nan]) for _ in range(rng.randint(1, 8))] for g in range(12)
    }
    flat = [(g, r) for g, rewards in groups.items() for r in rewards]
    expected = [a for group in naive(name, groups).values() for a in group]
    got = ADVANTAGE_ESTIMATORS[name](tensor([r for _, r in flat], dtype=torch.float64), tensor([g for g, _ in flat]))
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


R = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", R, [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]),
        ("drgrpo", R, [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747]),
        ("rloo", [1.0, 2, 3, 4, 5, 6], [-1.5, 0, 1.5, -1.5, 0, 1.5]),
    ],
)
def test_recorded_from_tunix(name, rewards, expected):
    got = ADVANTAGE_ESTIMATORS[name](tensor(rewards), tensor([0, 0, 0, 1, 1, 1]))
    assert got.tolist() == pytest.approx(expected, abs=2e-6)


def test_recorded_from_trl():
    got = group_relative(tensor([1.0, 0, 0, 1]), tensor([0, 0, 0, 0]), eps=1e-4)
    assert got.tolist() == pytest.approx([0.8659, -0.8659, -0.8659, 0.8659], abs=5e-5)
