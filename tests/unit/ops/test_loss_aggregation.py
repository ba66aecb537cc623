import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.loss_aggregation import LOSS_AGG_MODES, aggregate, token_weights

NAN = math.nan
LOSS = tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
MASK = tensor([True, True, False, True, True, True])
UNIT = tensor([0, 0, 0, 1, 1, 1])


def agg(mode, loss=LOSS, mask=MASK, trajectory=UNIT, **kw):
    kw.setdefault("prompt", trajectory)
    return aggregate(loss, token_weights(mask, trajectory, mode, **kw)).item()


@pytest.mark.parametrize(
    ("mode", "norm", "expected"),
    [
        ("token-mean", None, 0.36),  # (.1 + .2 + .4 + .5 + .6) / 5
        ("sequence-mean-token-mean", None, 0.325),  # (.3/2 + 1.5/3) / 2
        ("sequence-mean-token-scale", 3, 0.3),  # (.3/3 + 1.5/3) / 2
        ("sequence-mean-token-scale", 3.14, 1.8 / 3.14 / 2),
        ("seq-mean-token-sum", None, 0.9),  # (.3 + 1.5) / 2
        ("sequence-mean-token-sum-norm", None, 0.9),  # 1.8 / 2 units
        ("sequence-mean-token-sum-norm", 4, 0.45),  # 1.8 / 4
        ("prompt-mean-token-mean", None, 0.325),  # a trajectory each: sequence-mean-token-mean
    ],
)
def test_each_mode_by_hand(mode, norm, expected):
    assert agg(mode, norm=norm) == pytest.approx(expected)


def test_the_modes_are_tunix_s_five_and_the_mean_over_prompts():
    assert sorted(LOSS_AGG_MODES) == [
        "prompt-mean-token-mean",
        "seq-mean-token-sum",
        "sequence-mean-token-mean",
        "sequence-mean-token-scale",
        "sequence-mean-token-sum-norm",
        "token-mean",
    ]


@pytest.mark.parametrize("mode", sorted(LOSS_AGG_MODES))
def test_nothing_to_train_gives_zero(mode):
    assert token_weights(torch.zeros(6, dtype=torch.bool), UNIT, mode, norm=3, prompt=UNIT).tolist() == [0.0] * 6
    none = torch.zeros(0).long()
    assert token_weights(none.bool(), none, mode, norm=3, prompt=none).tolist() == []


def test_units_with_nothing_to_train_are_not_counted():
    # rows [.1, .2] and [.3, .4] with the second masked: 1 unit, .3 / 1; with norm 4 .3 / 4
    loss, mask, trajectory = tensor([0.1, 0.2, 0.3, 0.4]), tensor([True, True, False, False]), tensor([0, 0, 1, 1])
    assert agg("seq-mean-token-sum", loss, mask, trajectory) == pytest.approx(0.3)
    assert agg("sequence-mean-token-sum-norm", loss, mask, trajectory, norm=4) == pytest.approx(0.075)
    assert agg("sequence-mean-token-mean", loss, mask, trajectory) == pytest.approx(0.15)
    assert agg("sequence-mean-token-mean", loss, mask, trajectory, num_units=2) == pytest.approx(0.075)


def test_masked_out_tokens_weigh_nothing_whatever_their_loss():
    weights = token_weights(MASK, UNIT, "token-mean")
    assert weights[2] == 0 and weights.dtype == torch.float64
    loss = tensor([1.0, 1, NAN, 1, 1, 1], requires_grad=True)
    total = aggregate(loss, weights)
    total.backward()
    assert total.item() == 1 and loss.grad is not None
    assert loss.grad.tolist() == pytest.approx([0.2, 0.2, 0, 0.2, 0.2, 0.2])


def test_half_precision_loss_is_summed_in_fp32():
    loss = tensor([1, 2, 3], dtype=torch.bfloat16)
    total = aggregate(loss, token_weights(tensor([True, True, False]), tensor([0, 0, 0]), "token-mean"))
    assert total.item() == 1.5 and total.dtype == torch.float32
    assert aggregate(loss.double(), torch.ones(3)).dtype == torch.float64


@pytest.mark.parametrize("mode", sorted(LOSS_AGG_MODES))
def test_parts_of_a_batch_add_up_to_the_whole(mode):
    g = torch.Generator().manual_seed(0)
    trajectory = torch.arange(9).repeat_interleave(torch.tensor([1, 5, 2, 8, 3, 1, 9, 4, 7]))
    loss = torch.randn(40, generator=g, dtype=torch.float64)
    weights = token_weights(torch.rand(40, generator=g) < 0.6, trajectory, mode, norm=9, prompt=trajectory // 2)
    parts = sum(aggregate(a, b) for a, b in zip(loss.split(7), weights.split(7), strict=True))
    torch.testing.assert_close(parts, aggregate(loss, weights))


def test_equal_weight_for_each_sequence_not_for_each_token():
    # advantages 1.5 on 3 tokens and 3.0 on 1: (-1.5 - 3) / 2 = -2.25; pooling the row would give -7.5 / 4 = -1.875
    loss, mask = tensor([-1.5, -1.5, -1.5, -3.0]), torch.ones(4, dtype=torch.bool)
    assert agg("sequence-mean-token-mean", loss, mask, tensor([0, 0, 0, 1])) == -2.25
    assert agg("token-mean", loss, mask, tensor([0, 0, 0, 1])) == -1.875


@pytest.mark.parametrize("norm", [0, -1, NAN, math.inf, True, "4", [4]])
def test_an_invalid_norm_is_refused(norm):
    for mode in LOSS_AGG_MODES:
        with pytest.raises(ConfigError, match="Invalid 'norm' value"):
            token_weights(MASK, UNIT, mode, norm=norm)


def test_numpy_numbers_are_numbers():
    for norm in (np.int64(4), np.float32(4), np.float64(4)):
        assert agg("sequence-mean-token-sum-norm", norm=norm) == pytest.approx(0.45)


def test_token_scale_asks_for_norm_and_unknown_modes_list_the_known():
    with pytest.raises(ConfigError, match="give norm, the longest completion allowed"):
        token_weights(MASK, UNIT, "sequence-mean-token-scale")
    with pytest.raises(ConfigError, match="unknown loss_agg_mode 'token_mean'; did you mean token-mean"):
        token_weights(MASK, UNIT, "token_mean")
    with pytest.raises(DataError, match=r"mask is \[6\] and unit is \[1\]"):
        token_weights(MASK, tensor([0]), "token-mean")


def test_a_function_serves_as_a_mode():
    weights = token_weights(MASK, UNIT, lambda mask, trajectory, norm, num_units: trajectory + norm, norm=2)
    assert weights.tolist() == [2, 2, 0, 3, 3, 3]


@pytest.mark.parametrize(
    ("mode", "norm", "expected"),
    [
        ("seq-mean-token-sum", None, 1 / 4),
        ("sequence-mean-token-scale", 5, 1 / (5 * 4)),
        ("sequence-mean-token-sum-norm", None, 1 / 4),
    ],
)
def test_a_given_number_of_units_takes_the_place_of_those_counted(mode, norm, expected):
    mask, trajectory = torch.ones(3, dtype=torch.bool), tensor([0, 0, 1])
    weights = token_weights(mask, trajectory, mode, norm=norm, num_units=4)
    assert weights.tolist() == pytest.approx([expected] * 3)


def test_a_negative_weight_counts():
    # a batch may come with weights of its own
    assert aggregate(tensor([1.0, 3.0, torch.nan]), tensor([0.5, -0.5, 0.0])).item() == -1


def test_a_mean_over_prompts_pools_the_tokens_of_a_prompt_s_trajectories():
    # prompts: trajectories 0 and 1 (tokens .1 .2 .4), 2 (.6): (.7 / 3 + .6) / 2; the mask leaves the third one empty
    loss = tensor([0.1, 0.2, 0.4, 0.6, 0.9])
    mask, trajectory = tensor([True, True, True, True, False]), tensor([0, 0, 1, 2, 3])
    prompt = tensor([0, 0, 0, 1, 2])
    mode = "prompt-mean-token-mean"
    assert agg(mode, loss, mask, trajectory, prompt=prompt) == pytest.approx((0.7 / 3 + 0.6) / 2)
    assert agg(mode, loss, mask, trajectory, prompt=prompt, num_units=4) == pytest.approx((0.7 / 3 + 0.6) / 3)
    # the mean over sequences that TorchRL calls prompt_mean is another number
    assert agg("sequence-mean-token-mean", loss, mask, trajectory) == pytest.approx((0.15 + 0.4 + 0.6) / 3)
    for wrong in (None, tensor([0])):
        with pytest.raises(DataError, match="needs prompt="):
            token_weights(mask, trajectory, mode, prompt=wrong)


def test_a_function_that_asks_for_the_prompt_is_given_it():
    weights = token_weights(
        MASK, UNIT, lambda mask, trajectory, norm, num_units, *, prompt: 1.0 + prompt, prompt=UNIT + 2
    )
    assert weights.tolist() == [3, 3, 0, 4, 4, 4]


@pytest.mark.parametrize("mode", sorted(LOSS_AGG_MODES))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), data=st.data())
def test_neither_order_nor_padding_changes_a_token_s_weight(mode, seed, rows, data):
    g = torch.Generator().manual_seed(seed)
    trajectory = torch.arange(rows).repeat_interleave(torch.randint(1, 5, (rows,), generator=g))
    mask = torch.rand(len(trajectory), generator=g) < 0.7
    weigh = lambda m, t: token_weights(m, t, mode, norm=7, prompt=t.div(2, rounding_mode="floor"))
    weights = weigh(mask, trajectory)
    order = torch.tensor(data.draw(st.permutations(range(len(trajectory)))))
    assert weigh(mask[order], trajectory[order]).tolist() == weights[order].tolist()
    wide = weigh(torch.cat([mask, torch.zeros(4, dtype=torch.bool)]), torch.cat([trajectory, trajectory[:1].expand(4)]))
    assert wide.tolist() == [*weights.tolist(), 0, 0, 0, 0]
