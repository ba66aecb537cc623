"""Every policy loss at every level against loops in plain floats, in value and, by finite differences, in gradient.

A loop takes two logprobs of each token: the one that may move, and the one that whatever is held constant is made of.
It knows no clamps but those that are part of a loss, so that none shows within a log-ratio of 20.
"""

import functools
import inspect
import math

import pytest
import torch
from surrogates import cases, gradient, random_inputs

from whet.ops import POLICY_LOSSES

EPS, HIGH = 0.2, 0.28
FIELDS = {
    "epsilon": EPS,
    "epsilon_high": HIGH,
    "epsilon_c": 1.9,
    "delta": 1.7,
    "cispo_epsilon_low": 0.3,
    "sapo_temperature_pos": 1.5,
    "sapo_temperature_neg": 2.5,
    "teacher_coef": 0.4,
    "vespo_k_pos": 1.5,
    "vespo_lambda_pos": 2.5,
    "vespo_k_neg": 1.2,
    "vespo_lambda_neg": 0.8,
}


def clip(value, low, high):
    return max(low, min(high, value))


def mean(values):
    return sum(values) / max(len(values), 1)


def ratios(level, free, frozen, old, kept):
    """The ratio of each token of a sequence."""
    gaps, still = ([p - q for p, q in zip(now, old, strict=True)] for now in (free, frozen))
    own = lambda values: [v for v, m in zip(values, kept, strict=True) if m]
    if level == "token":
        logs = gaps
    elif level == "sequence":
        logs = [mean(own(gaps))] * len(free)
    elif level == "sequence-sum":
        logs = [sum(own(gaps))] * len(free)
    else:
        logs = [min(10.0, mean(own(still))) + p - q for p, q in zip(free, frozen, strict=True)]
    return [math.exp(v) for v in logs]


def sequence_loss(name, level, free, frozen, old, a, teacher, kept):
    """Loss of each token of one sequence, whose tokens have the advantage a."""
    f = FIELDS
    r, still = ratios(level, free, frozen, old, kept), ratios(level, frozen, frozen, old, kept)
    if name in ("grpo", "gspo-token"):
        gains = [min(min(v, f["delta"]) * a, clip(v, 1 - EPS, 1 + HIGH) * a) for v in r]
        return [-(max(g, f["epsilon_c"] * a) if a < 0 else g) for g in gains]
    if name == "cispo-torchrl":
        return [-a * clip(v, 1 - EPS, 1 + HIGH) for v in r]
    if name == "sapo":
        t = f["sapo_temperature_pos"] if a > 0 else f["sapo_temperature_neg"]
        return [-a * 4 / t / (1 + math.exp(-t * (v - 1))) for v in r]
    if name == "distillation":
        before = [q - w for q, w in zip(old, teacher, strict=True)]
        return [-v * (a - f["teacher_coef"] * d) for v, d in zip(r, before, strict=True)]
    if name == "gmpo":
        gaps = [p - q for p, q, m in zip(free, old, kept, strict=True) if m]
        return [-a * math.exp(mean([min(g, HIGH) if a > 0 else max(g, -EPS) for g in gaps]))] * len(free)
    if name == "reinforce":
        weights = [1.0] * len(free)
    elif name == "cispo":
        weights = [clip(v, 1 - f["cispo_epsilon_low"], 1 + HIGH) for v in still]
    elif name == "cispo-trl":
        weights = [min(v, HIGH) for v in still]
    else:
        log_w = clip(sum(p - q for p, q, m in zip(frozen, old, kept, strict=True) if m), math.log(1e-8), 20.0)
        k, rate = (f["vespo_k_pos"], f["vespo_lambda_pos"]) if a >= 0 else (f["vespo_k_neg"], f["vespo_lambda_neg"])
        weights = [math.exp(rate + k * log_w - rate * math.exp(log_w))] * len(free)
    return [-w * a * p for w, p in zip(weights, free, strict=True)]


def naive(name, level, x, free):
    """Loss of each token, of logprobs that may move."""
    out = []
    for i in range(x.num_sequences):
        mine = x.sequence == i
        frozen, old, advantages, teacher = (
            c[mine].tolist() for c in (x.logprobs, x.old_logprobs, x.advantages, x.teacher_logprobs)
        )
        kept = x.mask[mine].tolist()
        moved = [p for p, m in zip(free, mine.tolist(), strict=True) if m]
        found = sequence_loss(name, level, moved, frozen, old, advantages[0], teacher, kept)
        out += [v if m else 0.0 for v, m in zip(found, kept, strict=True)]
    return out


def bound(name, level):
    """The loss with the test's parameters."""
    asked = inspect.signature(POLICY_LOSSES[name]).parameters
    fields = {k: v for k, v in FIELDS.items() if k in asked}
    if level is not None:
        fields["importance_sampling_level"] = level
    return functools.partial(POLICY_LOSSES[name], **fields)


@pytest.mark.spread(28)
@pytest.mark.parametrize(("name", "level"), cases())
@pytest.mark.parametrize(("seed", "spread"), [(0, 0.3), (1, 0.7), (2, 3.0)])
def test_each_loss_and_its_gradient_equal_the_loop(name, level, seed, spread):
    x = random_inputs(seed, spread=spread)
    assert float((x.logprobs - x.old_logprobs).abs().max()) < 20
    weights = torch.rand(len(x.mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss, _, found = gradient(bound(name, level), x, weights)
    at = x.logprobs.tolist()
    loop = functools.partial(naive, name, level or ("sequence-token" if name == "gspo-token" else "token"), x)
    assert loss.tolist() == pytest.approx(loop(at), rel=1e-9, abs=1e-12)
    step, expected = 1e-6, []
    for i in range(len(at)):
        up, down = ([*at[:i], at[i] + h, *at[i + 1 :]] for h in (step, -step))
        change = [(b - a) / (2 * step) for a, b in zip(loop(down), loop(up), strict=True)]
        expected.append(sum(w * c for w, c in zip(weights.tolist(), change, strict=True)))
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
