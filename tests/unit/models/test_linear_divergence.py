import pytest
import torch
import torch.nn.functional as F

from whet.models import matmul
from whet.models.linear_divergence import HeadStates, linear_divergence
from whet.models.projection import Projection
from whet.ops import generalized_jsd

BETAS = [0.0, 0.3, 1.0]
HEADS = [
    (Projection(), Projection()),
    (Projection(0.7), Projection(0.7, softcap=3.0)),
    (Projection(1.3, scale=0.25), Projection(1.3)),
    (Projection(0.5, softcap=2.0), Projection(0.5, scale=0.5)),
]


def states(dtype, seed, projection=None, rows=7, width=5, vocab=11):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return HeadStates(make(rows, width), make(vocab, width), make(vocab), projection or Projection())


def leaves(of):
    return [x.requires_grad_() for x in (of.hidden, of.weight, of.bias)]


def logprobs(policy, teacher):
    """Those of both over whole logits, by plain autograd."""
    size = min(len(policy.weight), len(teacher.weight))

    def over_whole_logits(of):
        z = F.linear(of.hidden, of.weight, of.bias) * of.projection.scale
        if (cap := of.projection.softcap) is not None:
            z = cap * torch.tanh(z / cap)
        return (z / of.projection.temperature)[:, :size].log_softmax(-1)

    return over_whole_logits(policy), over_whole_logits(teacher).detach()


def oracle(policy, teacher, beta):
    return generalized_jsd(*logprobs(policy, teacher), gkd_beta=beta)


@pytest.mark.spread(14)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_chunked_equals_plain_autograd(dtype, beta, heads, wide, monkeypatch):
    monkeypatch.setattr(matmul, "has_full_width_avx512", lambda: wide)  # whichever library makes the weight's gradient
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    policy, teacher = states(dtype, 0, heads[0]), states(dtype, 1, heads[1], width=3)
    inputs = leaves(policy)
    weights = torch.randn(7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    exact = [HeadStates(s.hidden.double(), s.weight.double(), s.bias.double(), s.projection) for s in (policy, teacher)]
    want = oracle(*exact, beta)
    wanted = torch.autograd.grad((weights.double() * want).sum(), inputs)
    p, q = logprobs(*exact)  # a term is p (log p - log q), and the exponent of p is off by eps of its size
    limit = 4 * torch.finfo(dtype).eps * max(x.abs().max().item() for x in (p, q)) * (1 + (p - q).abs().max().item())
    for chunk in (1, 200, 10**6):
        got = linear_divergence(policy, teacher, gkd_beta=beta, chunk_bytes=chunk)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
        for x, y in zip(torch.autograd.grad((weights * got).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2 * limit * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("own", "other"), [(11, 13), (13, 11)])
def test_a_vocabulary_that_is_padded_further_loses_what_the_other_does_not_have(beta, own, other):
    policy, teacher = states(torch.float64, 0, vocab=own), states(torch.float64, 1, vocab=other)
    inputs = leaves(policy)
    run = lambda found: torch.autograd.grad(found.sum(), inputs)
    got, want = linear_divergence(policy, teacher, gkd_beta=beta), oracle(policy, teacher, beta)
    torch.testing.assert_close(got, want)
    for x, y in zip(run(got), run(want), strict=True):
        torch.testing.assert_close(x, y)
    cut = linear_divergence(*(x.take(slice(0, 11), is_own=False) for x in (policy, teacher)), gkd_beta=beta)
    assert torch.equal(got, cut)


def test_the_teacher_gets_no_gradient_and_only_what_asks_for_one_does():
    policy, teacher = states(torch.float64, 0), states(torch.float64, 1)
    for x in (policy.weight, teacher.hidden, teacher.weight):
        x.requires_grad_()
    linear_divergence(policy, teacher).sum().backward()
    assert policy.weight.grad is not None
    assert all(x.grad is None for x in (policy.hidden, policy.bias, teacher.hidden, teacher.weight))
    with torch.no_grad():
        assert not linear_divergence(policy, teacher).requires_grad


@pytest.mark.parametrize("beta", BETAS)
def test_a_policy_that_is_the_teacher_has_no_gradient_but_rounding(beta):
    policy = states(torch.float64, 0)
    (hidden, *_) = leaves(policy)
    found = linear_divergence(policy, states(torch.float64, 0), gkd_beta=beta)
    found.sum().backward()
    assert found.abs().max() < 1e-14 and hidden.grad.abs().max() < 1e-14


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_the_bias_of_both_forbids_adds_nothing(beta):
    policy, teacher = states(torch.float64, 0), states(torch.float64, 1)
    for s in (policy, teacher):
        s.bias[3] = -torch.inf
    inputs = leaves(policy)[:2]
    kept = torch.tensor([i for i in range(11) if i != 3])
    short = [HeadStates(s.hidden, s.weight[kept], s.bias[kept]) for s in (policy, teacher)]
    got, want = linear_divergence(policy, teacher, gkd_beta=beta), oracle(*short, beta)
    torch.testing.assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(f.sum(), inputs) for f in (got, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_bf16_heads_sum_in_fp32_and_dtypes_may_differ():
    policy, teacher = states(torch.bfloat16, 0, rows=64, width=16), states(torch.float32, 1, rows=64)
    inputs = leaves(policy)[:2]
    exact = [HeadStates(s.hidden.double(), s.weight.double(), s.bias.double()) for s in (policy, teacher)]
    got, want = linear_divergence(policy, teacher, chunk_bytes=200), oracle(*exact, 0.5)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 0.02
    for x, y in zip(*(torch.autograd.grad(f.sum(), inputs) for f in (got, want)), strict=True):
        assert x.dtype == torch.bfloat16 and (x.double() - y.double()).abs().max() < 0.05 * y.abs().max()


def test_no_row():
    policy, teacher = states(torch.float64, 0, rows=0), states(torch.float64, 1, rows=0)
    leaves(policy)
    found = linear_divergence(policy, teacher)
    found.sum().backward()
    assert found.shape == (0,) and policy.weight.grad.abs().max() == 0
