import pytest
import torch
import torch.nn.functional as F

from whet.models import matmul
from whet.models.linear_logprob import linear_logprob, linear_stats
from whet.types.loss import CONSTANTS


def oracle(hidden, weight, targets, bias=None, temperature=1.0, scale=1.0, softcap=None):
    """Plain autograd over whole logits."""
    z = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def tensors(dtype, rows=7, width=5, vocab=11):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return make(rows, width), make(vocab, width), make(vocab), torch.randint(0, vocab, (rows,), generator=g)


HEADS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "scale": 0.0625},
    {"softcap": 2.0},
    {"softcap": 2.0, "temperature": 0.5},
]
CHUNKS = [
    {"max_kept_bytes": 10**9},
    {"max_kept_bytes": 0},
    {"max_kept_bytes": 0, "chunk_bytes": 1},
    {"max_kept_bytes": 0, "chunk_bytes": 300},
]


@pytest.mark.spread(14)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_fused_equals_plain_autograd(dtype, entropy, head, wide, monkeypatch):
    monkeypatch.setattr(matmul, "has_full_width_avx512", lambda: wide)  # whichever library makes the weight's gradient
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    hidden, weight, bias, targets = tensors(dtype)
    leaves = (hidden, weight, bias)
    want, want_entropy = oracle(hidden, weight, targets, bias, **head)
    a, b = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    total = lambda x, e: (a * x).sum() + ((b * e).sum() if entropy else 0.0)
    grads = torch.autograd.grad(total(want, want_entropy), leaves)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    for how in CHUNKS:
        got, got_entropy = linear_logprob(hidden, weight, targets, bias=bias, entropy=entropy, **head, **how)
        assert got.dtype == dtype and (got_entropy is None) == (not entropy)
        torch.testing.assert_close(got, want, atol=limit, rtol=0)
        for x, y in zip(torch.autograd.grad(total(got, got_entropy), leaves), grads):
            torch.testing.assert_close(x, y, atol=limit, rtol=0)


def test_a_tied_weight_sums_both_gradients():
    hidden, weight, _, targets = tensors(torch.float64)
    ids = torch.arange(7)
    run = lambda f: torch.autograd.grad(f(F.embedding(ids, weight) * hidden, weight, targets)[0].sum(), weight)[0]
    torch.testing.assert_close(run(linear_logprob), run(oracle), atol=1e-12, rtol=0)


@pytest.mark.parametrize("max_kept_bytes", [0, 10**9])
def test_bf16_sums_in_fp32(max_kept_bytes):
    hidden, weight, bias, targets = tensors(torch.bfloat16, rows=64, width=16)
    want, _ = oracle(*(x.detach().float().requires_grad_() for x in (hidden, weight)), targets, bias.detach().float())
    got, _ = linear_logprob(hidden, weight, targets, bias=bias, max_kept_bytes=max_kept_bytes, chunk_bytes=200)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=0.1, rtol=0)  # the logits themselves are rounded to 8 bits
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(oracle(*wide, targets, bias.detach().double())[0].sum(), wide[1])[0]
    grad = torch.autograd.grad(got.sum(), weight)[0]
    assert grad.dtype == torch.bfloat16
    assert (grad.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_many_small_gradients_of_a_bf16_head_are_not_lost():
    hidden, weight, bias = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((1024, 2), (8, 2), (8,)))
    weight.requires_grad_(), bias.requires_grad_()
    got, _ = linear_logprob(hidden + 1, weight, torch.zeros(1024).long(), bias=bias, max_kept_bytes=0, chunk_bytes=1)
    got.sum().backward()  # 7/8 or -1/8 a row: a sum in bf16 would stand still at 256
    want = torch.tensor([896.0] + [-128.0] * 7)
    assert torch.equal(bias.grad.float(), want) and torch.equal(weight.grad.float(), want[:, None].expand(8, 2))


def test_only_the_gradients_asked_for_are_made():
    hidden, weight, _, targets = tensors(torch.float64)
    got, _ = linear_logprob(hidden.detach(), weight, targets)
    got.sum().backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.no_grad():
        assert not linear_logprob(hidden, weight, targets)[0].requires_grad


def test_backward_twice_gives_the_same_gradient():
    hidden, weight, _, targets = tensors(torch.float64)
    got, entropies = linear_logprob(hidden, weight, targets, entropy=True)
    run = lambda: torch.autograd.grad((got + entropies).sum(), weight, retain_graph=True)[0]
    assert torch.equal(run(), run())


def test_one_row_and_no_row():
    hidden, weight, _, targets = tensors(torch.float64)
    got, _ = linear_logprob(hidden[:1], weight, targets[:1])
    torch.testing.assert_close(got, oracle(hidden[:1], weight, targets[:1])[0])
    empty, entropies = linear_logprob(hidden[:0], weight, targets[:0], entropy=True)
    (empty.sum() + entropies.sum()).backward()
    assert empty.shape == (0,) and weight.grad.abs().max() == 0


def test_a_head_without_opinion_gives_log_vocabulary():
    logprobs, entropies = linear_logprob(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([3]), entropy=True)
    assert logprobs.item() == pytest.approx(-1.3862944) and entropies.item() == pytest.approx(1.3862944)  # log 4


@pytest.mark.parametrize("max_kept_bytes", [0, 1 << 20])
def test_a_token_that_the_bias_forbids_adds_nothing_to_the_entropy(max_kept_bytes):
    hidden, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0.0, -torch.inf, 0.0, 0.1, 0.0])
    allowed = torch.tensor([0, 2, 3, 4])
    targets, leaves = torch.tensor([0, 2, 4]), [hidden.requires_grad_(), weight.requires_grad_()]
    logp = F.linear(hidden, weight[allowed], bias[allowed]).log_softmax(1)
    want = (logp.gather(1, torch.tensor([[0], [1], [3]])).squeeze(1), -(logp.exp() * logp).sum(1))
    got = linear_logprob(hidden, weight, targets, bias=bias, entropy=True, max_kept_bytes=max_kept_bytes)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        for x, y in zip(*(torch.autograd.grad(z.sum(), leaves, retain_graph=True) for z in (a, b)), strict=True):
            assert torch.allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_constants_are_those_of_whole_logits_and_change_no_gradient(head, dtype):
    hidden, weight, bias, targets = tensors(dtype)
    z = F.linear(hidden, weight, bias) * head.get("scale", 1.0)
    z = z if "softcap" not in head else head["softcap"] * torch.tanh(z / head["softcap"])
    p = (z / head.get("temperature", 1.0)).softmax(-1)
    targets = torch.where(torch.arange(len(targets)) % 2 == 0, p.argmax(-1), targets)
    plain = linear_logprob(hidden, weight, targets, bias=bias, entropy=True, **head)
    grads = torch.autograd.grad(plain[0].sum() + plain[1].sum(), (hidden, weight, bias))
    for how in CHUNKS:
        got = linear_stats(hidden, weight, targets, bias=bias, entropy=True, constants=CONSTANTS, **head, **how)
        assert got.correct.tolist() == (p.argmax(-1) == targets).tolist() and 3 < got.correct.sum()
        torch.testing.assert_close(got.log_sum_sq_probs, (p * p).sum(-1).log())
        torch.testing.assert_close(got.mean_logits, (z / head.get("temperature", 1.0)).mean(-1))
        constants = (got.log_sum_sq_probs, got.mean_logits)
        assert not any(x.requires_grad for x in constants) and got.logprobs.requires_grad
        again = torch.autograd.grad(got.logprobs.sum() + got.entropy.sum(), (hidden, weight, bias))
        for a, b in zip(again, grads, strict=True):
            torch.testing.assert_close(a, b)
    assert linear_stats(hidden, weight, targets).correct is None
