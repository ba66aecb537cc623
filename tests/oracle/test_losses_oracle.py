"""Losses against loops written from the papers in plain Python floats, and against numbers recorded from the peers."""

import functools
import itertools
import math
import random

import pytest
import torch
from helpers import grpo_objective
from torch import tensor

from whet.ops import (
    IMPORTANCE_LEVELS,
    POLICY_LOSSES,
    aggregate,
    clipped_surrogate,
    clipped_value,
    kl_divergence,
    token_weights,
)
from whet.types import LossInputs


def naive_kl(p: float, q: float, mode: str, clamp: float | None) -> float:
    d = p - q
    value = {"kl": d, "mse_kl": d * d / 2, "low_var_kl": math.exp(min(20.0, max(-20.0, -d))) - 1 + d, "abs": abs(d)}[
        mode
    ]
    return value if clamp is None else max(-clamp, min(clamp, value))


def naive_surrogate(seqs, *, low=0.2, high=0.2, dual=None, level="token", beta=0.0, mode="kl", clamp=None):
    """Loss of each token; a sequence is a list of (logp, old, ref, advantage, sampler weight, mask)."""
    out = []
    for seq in seqs:
        ratios = [max(-20.0, min(20.0, logp - old)) for logp, old, *_ in seq]
        kept = [r for r, token in zip(ratios, seq, strict=True) if token[-1]]
        if level == "sequence-sum":
            ratios = [max(-20.0, min(20.0, sum(kept)))] * len(seq)
        elif level != "token":
            most = 10.0 if level == "sequence-token" else 20.0
            ratios = [min(most, sum(kept) / max(len(kept), 1))] * len(seq)
        for log_ratio, (logp, _, ref, a, w, m) in zip(ratios, seq, strict=True):
            if not m:
                out.append(0.0)
                continue
            r = math.exp(log_ratio)
            gain = min(r * a, max(1 - low, min(1 + high, r)) * a)
            if dual is not None and a < 0:
                gain = max(gain, dual * a)
            out.append(-gain * w + beta * naive_kl(logp, ref, mode, clamp))
    return out


def batch(seed: int):
    rng = random.Random(seed)
    seqs = []
    for n in [1, 4, 9, 2, 6]:
        a = rng.choice([-1.5, -0.2, 0.7, 2.0])
        seqs.append(
            [
                (
                    lp := -rng.expovariate(1),
                    lp - rng.gauss(0, 0.5),
                    lp + rng.gauss(0, 1),
                    a,
                    rng.random(),
                    rng.random() < 0.8,
                )
                for _ in range(n)
            ]
        )
    return seqs


def to_inputs(seqs) -> LossInputs:
    logp, old, ref, advantages, weights, mask = (list(c) for c in zip(*itertools.chain(*seqs), strict=True))
    double = {"dtype": torch.float64}
    x = LossInputs(
        sequence=torch.repeat_interleave(torch.arange(len(seqs)), tensor([len(s) for s in seqs])),
        mask=tensor(mask),
        logprobs=tensor(logp, **double),
        old_logprobs=tensor(old, **double),
        ref_logprobs=tensor(ref, **double),
        sampler_logprobs=tensor(old, **double) - tensor(weights, **double).log(),
        advantages=tensor(advantages, **double),
    )
    return x


@pytest.mark.spread(40)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("level", sorted(IMPORTANCE_LEVELS))
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize(
    ("beta", "mode", "clamp"), [(0.0, "kl", None), (0.3, "low_var_kl", None), (0.1, "mse_kl", 0.2)]
)
def test_surrogate_equals_the_loop(seed, level, dual, beta, mode, clamp):
    seqs = batch(seed)
    expected = naive_surrogate(seqs, high=0.28, dual=dual, level=level, beta=beta, mode=mode, clamp=clamp)
    loss, _ = grpo_objective(
        to_inputs(seqs),
        surrogate=functools.partial(
            clipped_surrogate, epsilon_high=0.28, epsilon_c=dual, importance_sampling_level=level
        ),
        beta=beta,
        kl_mode=mode,
        kl_clamp=clamp,
        sampler_is_threshold=2.0,
    )
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", ["kl", "mse_kl", "low_var_kl", "abs"])
def test_kl_equals_the_loop(mode):
    p, q = [-0.1, -3.0, -40.0, -1.0], [-0.2, -1.0, -2.0, -1.0]
    for clamp in (None, 0.5):
        got = kl_divergence(tensor(p).double(), tensor(q).double(), mode=mode, clamp=clamp)
        expected = [naive_kl(a, b, mode, clamp) for a, b in zip(tensor(p).tolist(), tensor(q).tolist(), strict=True)]
        assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_value_loss_equals_the_loop(seed):
    rng = random.Random(seed)
    rows = [(rng.gauss(0, 1), rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(50)]
    v, old, target = (tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    x = LossInputs(
        sequence=torch.zeros(50, dtype=torch.long),
        mask=torch.ones(50, dtype=torch.bool),
        logprobs=v,
        new_values=v,
        values=old,
        returns=target,
    )
    expected = [max((a - r) ** 2, (max(o - 0.3, min(o + 0.3, a)) - r) ** 2) / 2 for a, o, r in rows]
    assert clipped_value(x, clip_range_value=0.3)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_tunix_golden_of_a_uniform_policy_with_kl():
    # 32 equal logits: logp = -ln 32; beta .1, token-mean, ratio 1: mean(-A + beta (-ln 32 - ref))
    logp = -math.log(32)
    for ref in (-0.1, -1.1):
        advantages = tensor([-1.0, 1.0, 0.0, 0.0]).repeat_interleave(5)
        x = LossInputs(
            sequence=torch.arange(4).repeat_interleave(5),
            mask=torch.ones(20, dtype=torch.bool),
            logprobs=torch.full((20,), logp),
            ref_logprobs=torch.full((20,), ref),
            advantages=advantages,
        )
        loss, _ = grpo_objective(x, beta=0.1)
        total = aggregate(loss, token_weights(x.mask, x.sequence, "token-mean"))
        assert total.item() == pytest.approx(0.1 * (logp - ref), rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo-token"])
def test_tunix_golden_of_a_packed_row(name):
    # one row of two sequences, 3 tokens at 1.5 and 1 at 3: (-1.5 - 3) / 2; pooled over the row it would be -1.875
    x = LossInputs(
        sequence=tensor([0, 0, 0, 1]),
        mask=torch.ones(4, dtype=torch.bool),
        logprobs=tensor([-1.0, -2.0, -0.5, -0.7]),
        advantages=tensor([1.5, 1.5, 1.5, 3.0]),
    )
    loss, _ = POLICY_LOSSES[name](x)
    assert aggregate(loss, token_weights(x.mask, x.sequence, "sequence-mean-token-mean")).item() == -2.25
