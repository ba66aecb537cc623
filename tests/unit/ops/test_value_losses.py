import math

import pytest
import torch
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
