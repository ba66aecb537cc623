"""The divergence of whole distributions, and the losses made of it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import ConfigError, DataError
from whet.ops import POLICY_LOSSES, generalized_jsd, gkd, teacher_column
from whet.types import LossInputs

BETAS = [0.0, 0.3, 1.0]
few = settings(max_examples=10, deadline=None)


def logits(seed, rows=4, vocab=7):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, vocab, generator=g, dtype=torch.float64).mul(3).unbind()


def test_by_hand():
    p, q = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.25, 0.75]).double().log()
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    # m = 0.4 q + 0.6 p = (0.4, 0.6)
    mixed = 0.4 * (0.25 * math.log(0.25 / 0.4) + 0.75 * math.log(0.75 / 0.6))
    mixed += 0.6 * (0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.4, mixed)):
        assert generalized_jsd(p, q, gkd_beta=beta).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@few
@given(seed=st.integers(0, 10**6))
def test_it_is_positive_and_0_only_for_the_same_distribution(beta, seed):
    p, q = (z.log_softmax(-1) for z in logits(seed))
    assert (generalized_jsd(p, q, gkd_beta=beta) > 0).all()
    torch.testing.assert_close(generalized_jsd(p, p, gkd_beta=beta), torch.zeros(4).double(), atol=1e-14, rtol=0)


@few
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 0.99))
def test_policy_and_teacher_change_places_with_beta(seed, beta):
    p, q = (z.log_softmax(-1) for z in logits(seed))
    there, back = generalized_jsd(p, q, gkd_beta=beta), generalized_jsd(q, p, gkd_beta=1 - beta)
    torch.testing.assert_close(there, back, rtol=1e-9, atol=0)
    assert (there < 0.7).all()  # never more than log 2


@pytest.mark.parametrize(("end", "step"), [(0.0, 1e-6), (1.0, -1e-6)])
def test_the_ends_are_the_limits_of_the_divergence_by_its_weights(end, step):
    p, q = (z.log_softmax(-1) for z in logits(1))
    beta = end + step
    near = generalized_jsd(p, q, gkd_beta=beta) / (beta * (1 - beta))
    torch.testing.assert_close(near, generalized_jsd(p, q, gkd_beta=end), rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_its_gradient_by_finite_differences(beta):
    z, other = logits(2, rows=2)
    fn = lambda z: generalized_jsd(z.log_softmax(-1), other.log_softmax(-1), gkd_beta=beta)
    assert torch.autograd.gradcheck(fn, z.requires_grad_())


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_both_forbid_adds_nothing(beta):
    z, other = logits(3)
    wide = [torch.cat([x, torch.full((4, 1), -torch.inf)], 1) for x in (z, other)]
    z, wide[0] = z.requires_grad_(), wide[0].requires_grad_()
    plain = generalized_jsd(z.log_softmax(-1), other.log_softmax(-1), gkd_beta=beta)
    found = generalized_jsd(wide[0].log_softmax(-1), wide[1].log_softmax(-1), gkd_beta=beta)
    torch.testing.assert_close(found, plain)
    plain.sum().backward(), found.sum().backward()
    torch.testing.assert_close(wide[0].grad[:, :-1], z.grad)
    assert (wide[0].grad[:, -1] == 0).all()


def test_what_the_teacher_can_not_do_is_infinitely_far_by_the_reverse_kl_alone():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, -torch.inf])
    assert generalized_jsd(p, q, gkd_beta=1.0).item() == math.inf
    assert generalized_jsd(p, q, gkd_beta=0.0).item() == pytest.approx(math.log(2))
    assert generalized_jsd(p, q, gkd_beta=0.5).isfinite()


def test_beta_lies_between_0_and_1():
    p = torch.zeros(1)
    for fn in (lambda: generalized_jsd(p, p, gkd_beta=1.5), lambda: gkd(of([0.0]), gkd_beta=-0.1)):
        with pytest.raises(ConfigError, match=r"gkd_beta must be between 0 .* and 1"):
            fn()


def of(divergence, mask=None):
    n = len(divergence)
    return LossInputs(
        sequence=torch.zeros(n, dtype=torch.long),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask),
        logprobs=torch.zeros(n),
        divergence=torch.tensor(divergence).requires_grad_(),
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_the_loss_is_the_divergence_of_trained_tokens(bad):
    x = of([0.25, bad, 0.5], [True, False, True])
    loss, metrics = gkd(x)
    loss.sum().backward()
    assert loss.tolist() == metrics["divergence"].tolist() == [0.25, 0.0, 0.5]
    assert x.divergence.grad.tolist() == [1.0, 0.0, 1.0] and not metrics["divergence"].requires_grad


def test_losses_say_what_they_need_of_a_teacher():
    declared = {name: teacher_column(fn) for name, fn in POLICY_LOSSES.items() if teacher_column(fn) is not None}
    assert declared == {"distillation": "teacher_logprobs", "gkd": "divergence"}
    with pytest.raises(DataError, match="needs divergence"):
        gkd(LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.zeros(1)))
