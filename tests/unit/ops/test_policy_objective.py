import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops import PolicyObjective, clipped_surrogate, nll, off_policy_mask, reference_kl, sampler_importance
from whet.types import LossInputs


def batch(seed=0, n=40):
    """Random columns of five sequences with holes in the mask, a gradient on logprobs and entropy."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(n, generator=g, dtype=torch.float64) * 3
    return LossInputs(
        sequence=torch.arange(n) // 8,
        mask=torch.rand(n, generator=g) > 0.2,
        logprobs=draw().requires_grad_(),
        old_logprobs=draw(),
        ref_logprobs=draw(),
        sampler_logprobs=draw(),
        advantages=torch.randn(n, generator=g, dtype=torch.float64),
        entropy=(-draw()).requires_grad_(),
    )


def by_hand(x, *, beta, coef, threshold, drift):
    """The same objective in plain Python, a token at a time."""
    out = []
    for t in range(len(x.logprobs)):
        if not x.mask[t]:
            out.append(0.0)
            continue
        p, old, ref, sampler, a, h = (
            float(c.detach()[t])
            for c in (x.logprobs, x.old_logprobs, x.ref_logprobs, x.sampler_logprobs, x.advantages, x.entropy)
        )
        ratio = math.exp(p - old)
        surrogate = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
        mine = [u for u in range(len(x.logprobs)) if x.sequence[u] == x.sequence[t] and x.mask[u]]
        gap = sum(float(x.sampler_logprobs[u] - x.logprobs[u]) for u in mine) / len(mine)
        keep = 1.0 if a >= 0 or gap <= drift else 0.0
        weight = min(math.exp(old - sampler), threshold)
        kl = math.exp(ref - p) - (ref - p) - 1
        out.append(surrogate * weight * keep + beta * kl - coef * h)
    return out


def whole(**kw):
    return PolicyObjective(
        surrogate=clipped_surrogate,
        factors=(
            functools.partial(sampler_importance, sampler_is_threshold=1.5),
            functools.partial(off_policy_mask, off_policy_mask_threshold=0.1),
        ),
        kl=functools.partial(reference_kl, kl_loss_mode="k3"),
        **kw,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_composed_objective_equals_its_equation_token_by_token(seed):
    x = batch(seed)
    loss, metrics = whole(beta=0.3, entropy_coef=0.01)(x)
    assert loss.tolist() == pytest.approx(by_hand(x, beta=0.3, coef=0.01, threshold=1.5, drift=0.1))
    parts = metrics["pg_loss/corrected"] + 0.3 * metrics["kl"] - 0.01 * torch.where(x.mask, x.entropy.detach(), 0.0)
    assert torch.equal(parts, loss.detach())


def test_factors_and_the_reference_are_constants_and_the_entropy_bonus_is_not():
    x = batch()
    x.ref_logprobs.requires_grad_()
    loss, _ = whole(beta=0.3, entropy_coef=0.01)(x)
    loss.sum().backward()
    assert x.entropy.grad is not None and x.ref_logprobs.grad is None
    assert x.entropy.grad.tolist() == [-0.01 if m else 0 for m in x.mask.tolist()]
    # the gradient of logprobs: that of surrogate and KL alone, with the factors as numbers
    y = batch()
    surrogate, _ = clipped_surrogate(y)
    weights = sampler_importance(y, sampler_is_threshold=1.5) * off_policy_mask(y, off_policy_mask_threshold=0.1)
    kl = reference_kl(y, kl_loss_mode="k3")
    (surrogate * weights.detach() + 0.3 * kl).sum().backward()
    assert torch.allclose(x.logprobs.grad, y.logprobs.grad, atol=1e-12)


def test_the_off_policy_mask_keeps_good_completions_and_near_ones():
    # three sequences of two tokens: drift 1 and bad, drift 1 and good, drift .25 and bad (its masked token is far off)
    x = LossInputs(
        sequence=tensor([0, 0, 1, 1, 2, 2]),
        mask=tensor([True, True, True, True, True, False]),
        logprobs=tensor([-2.0, -2.0, -2.0, -2.0, -1.25, -90.0]),
        sampler_logprobs=tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]),
        advantages=tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
    )
    assert off_policy_mask(x, off_policy_mask_threshold=0.5).tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match="must be at least 0"):
        off_policy_mask(x, off_policy_mask_threshold=-1.0)


def test_a_surrogate_may_return_its_loss_alone():
    x = batch()
    loss, metrics = PolicyObjective(surrogate=lambda x: nll(x)[0])(x)
    assert torch.equal(loss, nll(x)[0]) and set(metrics) == {"pg_loss/corrected"}


@pytest.mark.parametrize("piece", ["surrogate", "factors", "kl"])
def test_a_piece_of_another_shape_is_refused(piece):
    x = batch()
    total = lambda x: x.logprobs.sum()
    pieces = {"surrogate": total} if piece == "surrogate" else {piece: (total,) if piece == "factors" else total}
    with pytest.raises(DataError, match=r"has the shape \[\]; it must have one number for each of the 40 tokens"):
        PolicyObjective(**pieces)(x)


def test_a_surrogate_without_old_logprobs_is_told_what_to_take():
    with pytest.raises(TypeError) as told:
        PolicyObjective(surrogate=lambda x: x.logprobs - x.old_logprobs)(replace(batch(), old_logprobs=None))
    assert "take x.logprobs.detach() there" in told.value.__notes__[0]


def test_an_entropy_bonus_needs_the_entropy():
    x = batch()
    with pytest.raises(DataError, match="needs entropy"):
        PolicyObjective(entropy_coef=0.1)(
            LossInputs(sequence=x.sequence, mask=x.mask, logprobs=x.logprobs, advantages=x.advantages)
        )


def test_the_drift_of_a_sequence_is_a_mean_over_its_trained_tokens_alone():
    # one trained token of three: its gap of .8 is over .5, a third of it would not be
    x = LossInputs(
        sequence=tensor([0, 0, 0]),
        mask=tensor([True, False, False]),
        logprobs=tensor([-1.8, -1.0, -1.0]),
        sampler_logprobs=tensor([-1.0, -1.0, -1.0]),
        advantages=tensor([-1.0, -1.0, -1.0]),
    )
    assert off_policy_mask(x, off_policy_mask_threshold=0.5).tolist() == [0, 0, 0]


def test_a_completion_without_an_advantage_is_not_a_bad_one():
    x = LossInputs(
        sequence=tensor([0]),
        mask=tensor([True]),
        logprobs=tensor([-9.0]),
        sampler_logprobs=tensor([-1.0]),
        advantages=tensor([0.0]),
    )
    assert off_policy_mask(x, off_policy_mask_threshold=0.5).tolist() == [1]
