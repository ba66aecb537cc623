import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.value_losses import VALUE_LOSSES, clipped_value
from whet.types import LossInputs


def inputs(v, old, target, mask=None) -> LossInputs:
    return LossInputs(
        sequence=torch.zeros(len(v), dtype=torch.long),
        mask=tensor([True] * len(v) if mask is None else mask),
        logprobs=torch.zeros(len(v)),
        new_values=v if isinstance(v, torch.Tensor) else tensor(v),
        values=tensor(old),
        returns=tensor(target),
    )


def test_the_larger_of_the_plain_and_the_clipped_error_by_hand():
    # v = 1, old 0: clipped to .2. R = 2: max(1, 3.24) / 2 = 1.62; R = 0: max(1, .04) / 2 = .5; v = .1 is not clipped
    loss, metrics = clipped_value(inputs([1.0, 1.0, 0.1], [0.0, 0.0, 0.0], [2.0, 0.0, 2.0]))
    assert loss.tolist() == pytest.approx([1.62, 0.5, 0.5 * 1.9**2])
    assert metrics["vf_clipfrac"].tolist() == [1, 0, 0]
    assert metrics["vpred"].tolist() == pytest.approx([1, 1, 0.1]) and metrics["return"].tolist() == [2, 0, 2]
    assert metrics["vf_loss"].tolist() == loss.tolist()


def test_the_gradient_at_the_bound_itself_is_that_of_the_error():
    v = torch.tensor([0.5], requires_grad=True)
    clipped_value(inputs(v, [0.0], [2.0]), clip_range_value=0.5)[0].sum().backward()
    assert v.grad is not None and v.grad.tolist() == [-1.5]


def test_gradient_is_the_error_where_the_plain_term_wins_and_zero_where_the_clip_does():
    v = tensor([1.0, 1.0], requires_grad=True)
    clipped_value(inputs(v, [0.0, 0.0], [2.0, 0.0]))[0].sum().backward()
    assert v.grad is not None and v.grad.tolist() == [0.0, 1.0]  # clip(v) is constant; d(v - 0)²/2 = v


def test_masked_out_tokens_reach_neither_loss_nor_gradient():
    v = tensor([1.0, math.nan], requires_grad=True)
    loss, _ = VALUE_LOSSES["ppo"](inputs(v, [0.0, math.inf], [0.0, math.nan], [True, False]))
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0] and v.grad is not None and v.grad.tolist() == [1, 0]


def test_what_is_missing_or_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="clip_range_value must be positive, got 0"):
        clipped_value(inputs([1.0], [1.0], [1.0]), clip_range_value=0)
    with pytest.raises(DataError, match="needs new_values"):
        clipped_value(LossInputs(sequence=tensor([0]), mask=tensor([True]), logprobs=tensor([0.0])))


def columns(seed):
    """New values [12], away from the edges of the clip, old ones and returns, in float64; a mask."""
    g = torch.Generator().manual_seed(seed)
    old, target, side = (torch.randn(12, generator=g, dtype=torch.float64) for _ in range(3))
    near = torch.rand(12, generator=g) < 0.5
    return old + torch.where(near, 0.1, 0.35) * side.sign(), old, target, torch.rand(12, generator=g) < 0.7


def made(v, old, target, mask):
    return LossInputs(
        sequence=torch.zeros(len(v), dtype=torch.long),
        mask=mask,
        logprobs=torch.zeros(len(v)),
        new_values=v,
        values=old,
        returns=target,
    )


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_the_gradient_is_that_of_finite_differences(name):
    v, old, target, mask = columns(0)
    loss = lambda values: VALUE_LOSSES[name](made(values, old, target, mask))[0]
    for c in (v, old, target):
        c.requires_grad_()
    loss(v).sum().backward()
    assert old.grad is target.grad is None
    step = torch.eye(12, dtype=torch.float64) * 1e-6
    wanted = torch.stack([(loss(v.detach() + h) - loss(v.detach() - h)).sum() / 2e-6 for h in step])
    torch.testing.assert_close(v.grad, wanted, rtol=1e-6, atol=1e-8)
    assert not v.grad[~mask].any() and v.grad.any()


@pytest.mark.parametrize("name", VALUE_LOSSES)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_a_tokens_loss_depends_on_nothing_but_its_own_numbers(name, seed):
    v, old, target, mask = columns(seed)
    loss, metrics = VALUE_LOSSES[name](made(v, old, target, mask))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    dirty = [torch.where(mask, c, math.nan) for c in (v, old, target)]
    shuffled, others = VALUE_LOSSES[name](made(*(c[order] for c in (*dirty, mask))))
    assert torch.equal(shuffled, loss[order]) and not loss[~mask].any()
    assert all(torch.equal(others[n], metrics[n][order]) and metrics[n].shape == (12,) for n in metrics)
