import pytest
import torch
from torch import tensor

from whet.ops.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    segment_count,
    segment_mean,
    segment_sum,
)

NAN, INF = torch.nan, torch.inf


def test_mean_and_variance_of_five_numbers():
    x, mask = tensor([1.0, 2, 3, 4, 5]), tensor([1, 1, 0, 0, 1])
    # (1 + 2 + 5) / 3 = 8/3; deviations -5/3, -2/3, 7/3: (25 + 4 + 49) / 9 = 78/9, / 2 = 13/3, / 3 = 26/9
    assert masked_mean(x, mask).item() == pytest.approx(2.666667)
    assert masked_var(x, mask).item() == pytest.approx(4.333333)
    assert masked_var(x, mask, unbiased=False).item() == pytest.approx(26 / 9)


def test_two_dims_and_one_dim_of_two():
    x = tensor([[1.0, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = tensor([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1]])
    # row sums 8 and 6 + 8 + 10 = 24
    assert masked_sum(x, mask, 1).tolist() == [8.0, 24.0]
    assert masked_mean(x, mask, 1).tolist() == pytest.approx([8 / 3, 8.0])
    assert masked_mean(x, mask).item() == pytest.approx(32 / 6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_out_places_reach_neither_value_nor_gradient(bad):
    mask = tensor([True, True, False])
    for f in (masked_sum, masked_mean, masked_var, lambda x, m: masked_whiten(x, m).square().sum()):
        dirty = tensor([1.0, 3.0, bad], requires_grad=True)
        clean = tensor([1.0, 3.0, 0.0], requires_grad=True)
        (a := f(dirty, mask)).backward()
        (b := f(clean, mask)).backward()
        assert a.item() == b.item() and a.isfinite()
        assert dirty.grad is not None and clean.grad is not None
        assert dirty.grad.tolist() == clean.grad.tolist() and dirty.grad[2] == 0


def test_empty_mask_gives_zero_and_zero_gradient():
    mask = torch.zeros(3, dtype=torch.bool)
    for f in (masked_sum, masked_mean, masked_var, lambda x, m: masked_whiten(x, m).sum()):
        x = tensor([1.0, NAN, 3.0], requires_grad=True)
        y = f(x, mask)
        y.backward()
        assert y.item() == 0 and x.grad is not None and x.grad.tolist() == [0, 0, 0]


def test_variance_of_one_number_is_zero():
    assert masked_var(tensor([3.0, 9.0]), tensor([True, False])).item() == 0


def test_whitened_numbers_have_mean_zero_and_variance_one():
    x, mask = torch.linspace(-3, 8, 40), torch.arange(40) % 3 != 0
    y = masked_whiten(x, mask)
    assert masked_mean(y, mask).item() == pytest.approx(0, abs=1e-6)
    assert masked_var(y, mask).item() == pytest.approx(1, abs=1e-5)
    assert (y[~mask] == 0).all()
    tiny = masked_whiten(tensor([0.0, 1e-4]), tensor([True, True]))  # variance 5e-9, half of the 1e-8 beside it
    assert tiny.tolist() == pytest.approx([-0.5e-4 / 1.5e-8**0.5, 0.5e-4 / 1.5e-8**0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_numbers_whiten_to_zero_and_have_no_variance(dtype):
    x, mask = torch.full((1023,), 1000.1, dtype=dtype), torch.arange(1023) % 5 != 0
    assert (masked_whiten(x, mask) == 0).all()
    assert masked_var(x, mask).item() == 0


def test_small_differences_of_large_numbers_survive_whitening():
    for x in (4096 + tensor([0.0, 1.0, 2.0, 3.0]) / 1024, 1000.1 + (torch.arange(1023) % 3) * 2.0**-13):
        want = masked_whiten(x.double(), x > 0)  # in fp32 the rounding of the second mean is half of the deviation
        assert torch.allclose(masked_whiten(x, x > 0).double(), want, atol=1e-6)


def test_integers_are_summed_exactly():
    x = tensor([2**24, 1, 2**53, 5])
    assert masked_sum(x, tensor([True, True, True, False])).item() == 2**24 + 1 + 2**53
    assert masked_sum(x[None], x[None] > 0, 1).dtype == torch.long


def test_half_precision_is_summed_in_fp32():
    x = torch.ones(1000, dtype=torch.bfloat16)  # a bf16 running sum stops at 256
    assert masked_sum(x, x > 0).item() == 1000 and masked_sum(x, x > 0).dtype == torch.float32
    assert segment_sum(x, torch.zeros(1000, dtype=torch.long), 1).item() == 1000


def test_segments_in_any_order_with_an_empty_one():
    x, segments = tensor([1.0, 10, 2, 20, NAN]), tensor([0, 2, 0, 2, 2])
    mask = tensor([True, True, True, False, False])
    assert segment_sum(x[:4], segments[:4], 4).tolist() == [3, 0, 30, 0]
    assert segment_count(mask, segments, 4).tolist() == [2, 0, 1, 0]
    assert segment_mean(x, mask, segments, 4).tolist() == [1.5, 0, 10, 0]


def test_gradient_of_a_segment_mean_is_one_over_its_length():
    x = tensor([1.0, 2, 3, NAN], requires_grad=True)
    segment_mean(x, tensor([1, 1, 1, 0]), tensor([0, 0, 1, 1]), 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.5, 0.5, 1, 0]


def test_no_tokens_at_all():
    none = torch.zeros(0)
    assert segment_mean(none, none.bool(), none.long(), 2).tolist() == [0, 0]
    assert masked_mean(none, none.bool()).item() == 0
