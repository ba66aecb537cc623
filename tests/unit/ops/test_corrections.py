import math

import numpy as np
import pytest
import torch
from torch import tensor

from whet.errors import ConfigError
from whet.ops.corrections import mismatch_metrics, truncated_weights


def both(old, sampler, **kw):
    return truncated_weights(old, sampler, **kw), mismatch_metrics(old, sampler, **kw)


def test_weights_and_metrics_by_hand():
    # ratios .5/.5 = 1, .9/.3 = 3 cut to 2, .2/.4 = .5; the last token is masked out
    old, sampler = tensor([0.5, 0.9, 0.2, math.nan]).log(), tensor([0.5, 0.3, 0.4, 0.1]).log()
    weights, metrics = both(old, sampler, mask=tensor([True, True, True, False]), threshold=2.0)
    assert weights.tolist() == pytest.approx([1, 2, 0.5, 0])
    pearson = np.corrcoef([0.5, 0.9, 0.2], [0.5, 0.3, 0.4])[0, 1]
    assert metrics == pytest.approx(
        {
            "sampler_is/frac_clipped_at_threshold": 1 / 3,
            "sampler_is/weight_max": 2,
            "sampler_is/weight_mean": 3.5 / 3,
            "sampler_is/weight_min": 0.5,
            "sampler_trainer/logp_diff_max": math.log(3),
            "sampler_trainer/logp_diff_mean": (math.log(3) + math.log(2)) / 3,
            "sampler_trainer/prob_diff_max": 0.6,
            "sampler_trainer/prob_diff_mean": 0.8 / 3,
            "sampler_trainer/probs_pearson_corr": pearson,
        },
        rel=1e-5,
    )


def test_log_ratio_is_held_at_20_before_exp():
    weights, _ = both(tensor([0.0]), tensor([-500.0]), mask=tensor([True]), threshold=1e30)
    assert weights.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_equal_logprobs_have_weight_one_and_no_difference():
    logp = tensor([-1.0, -2.0, -0.5])
    weights, metrics = both(logp, logp, mask=tensor([True, True, True]), threshold=2.0)
    assert weights.tolist() == [1, 1, 1] and metrics["sampler_trainer/logp_diff_max"] == 0
    assert metrics["sampler_trainer/probs_pearson_corr"] == pytest.approx(1)


def test_weights_carry_no_gradient():
    logp = tensor([-1.0], requires_grad=True)
    assert not truncated_weights(logp, tensor([-2.0]), mask=tensor([True]), threshold=2.0).requires_grad


@pytest.mark.parametrize("n", [0, 3])
def test_an_empty_mask_gives_zeros(n):
    none = torch.zeros(n, dtype=torch.bool)
    weights, metrics = both(torch.full((n,), math.nan), torch.zeros(n), mask=none, threshold=2.0)
    assert weights.tolist() == [0] * n and set(metrics.values()) == {0.0}


def test_threshold_must_be_positive():
    with pytest.raises(ConfigError, match="sampler_is_threshold 0 must be positive"):
        truncated_weights(tensor([0.0]), tensor([0.0]), mask=tensor([True]), threshold=0)


def test_a_weight_of_exactly_the_threshold_is_not_clipped():
    # an engine that is exact to the bit, under a threshold of 1: nothing is cut
    same = tensor([-1.0, -2.0])
    found = mismatch_metrics(same, same, mask=torch.tensor([True, True]), threshold=1.0)
    assert found["sampler_is/frac_clipped_at_threshold"] == 0 and found["sampler_is/weight_max"] == 1
