import math

import pytest
import torch
from torch import tensor

from whet.ops.logprobs import entropy, selective_log_softmax


def test_logprob_of_three_tokens_by_hand():
    # logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8
    logits = tensor([[math.log(1), math.log(2), math.log(5)]], dtype=torch.float64).expand(3, 3)
    got = selective_log_softmax(logits, tensor([0, 1, 2]))
    assert got.tolist() == pytest.approx([math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)])


def test_selected_equals_all_then_gather_with_its_gradient():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=g, dtype=torch.float64)
    ids = torch.randint(11, (2, 5), generator=g)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    x = selective_log_softmax(a, ids)
    y = b.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(x, y)
    x.square().sum().backward()
    y.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_entropy_of_uniform_and_of_eighths():
    # 1/8 ln 8 + 2/8 ln 4 + 5/8 ln(8/5) = .25993 + .34657 + .29375 = .90026
    eighths = [math.log(1), math.log(2), math.log(5)]
    assert entropy(tensor([eighths, [3.0, 3.0, 3.0]])).tolist() == pytest.approx([0.90026, math.log(3)], abs=1e-5)


def test_infinite_logits_add_nothing_and_have_finite_gradient():
    logits = tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    short = tensor([[0.0, 1.0]], requires_grad=True)
    for f in (entropy, lambda z: selective_log_softmax(z, tensor([1]))):
        logits.grad = short.grad = None
        (a := f(logits)).sum().backward()
        (b := f(short)).sum().backward()
        assert a.item() == pytest.approx(b.item())
        assert logits.grad is not None and short.grad is not None
        assert logits.grad[0].tolist() == pytest.approx([*short.grad[0].tolist(), 0.0])


def test_one_token_vocabulary_is_certain():
    assert entropy(tensor([[4.0]])).item() == 0 and selective_log_softmax(tensor([[4.0]]), tensor([0])).item() == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computed_in_fp32_or_wider(given, expected):
    logits = torch.zeros(1, 1000, dtype=given)
    assert entropy(logits).dtype == selective_log_softmax(logits, tensor([0])).dtype == expected
    assert entropy(logits).item() == pytest.approx(math.log(1000), rel=1e-6)


def test_logprobs_keep_their_digits_where_logits_are_large():
    logits = torch.tensor([[0.0, 1.0, -0.5]])
    want = selective_log_softmax(logits.double(), torch.tensor([2]))
    got = selective_log_softmax(logits + 2.0**16, torch.tensor([2]))  # the sum is exact in fp32, its spacing 1/128
    assert torch.allclose(got.double(), want, atol=1e-6)
