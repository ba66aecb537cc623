import math

import numpy as np
import pytest
import torch
from torch import tensor

from whet.errors import ConfigError
from whet.ops.corrections import (
    effective_sample_size,
    mismatch_metrics,
    sampler_importance,
    sampler_log_ratio,
    sampler_rejection,
    weight_metrics,
)
from whet.types import LossInputs


def inputs(old, sampler, mask=None, sequence=None, **columns):
    """Tokens of one sequence, unless said otherwise; those of the rollout policy are the current ones too."""
    n = len(old)
    return LossInputs(
        sequence=torch.zeros(n, dtype=torch.long) if sequence is None else sequence,
        mask=torch.ones(n, dtype=torch.bool) if mask is None else mask,
        logprobs=old,
        old_logprobs=old,
        sampler_logprobs=sampler,
        **columns,
    )


def both(old, sampler, *, mask, threshold):
    """The truncated weights, and all that is logged of them."""
    x = inputs(old, sampler, mask)
    weights = sampler_importance(x, sampler_is_threshold=threshold)
    logged = weight_metrics(weights, sampler_log_ratio(x), mask=mask, threshold=threshold, lower=None)
    return weights, {**mismatch_metrics(old, sampler, mask=mask), **logged}


def test_weights_and_metrics_by_hand():
    # ratios .5/.5 = 1, .9/.3 = 3 cut to 2, .2/.4 = .5; the last token is masked out
    old, sampler = tensor([0.5, 0.9, 0.2, math.nan]).log(), tensor([0.5, 0.3, 0.4, 0.1]).log()
    weights, metrics = both(old, sampler, mask=tensor([True, True, True, False]), threshold=2.0)
    assert weights.tolist() == pytest.approx([1, 2, 0.5, 0])
    pearson = np.corrcoef([0.5, 0.9, 0.2], [0.5, 0.3, 0.4])[0, 1]
    assert metrics == pytest.approx(
        {
            "sampler_is/ess": 3.5**2 / (3 * 5.25),
            "sampler_is/frac_clipped_at_lower": 0,
            "sampler_is/frac_clipped_at_threshold": 1 / 3,
            "sampler_is/weight_max": 2,
            "sampler_is/weight_mean": 3.5 / 3,
            "sampler_is/weight_min": 0.5,
            "sampler_trainer/ess": 4.5**2 / (3 * 10.25),
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
    assert not sampler_importance(inputs(logp, tensor([-2.0]))).requires_grad


@pytest.mark.parametrize("n", [0, 3])
def test_an_empty_mask_gives_zeros(n):
    none = torch.zeros(n, dtype=torch.bool)
    weights, metrics = both(torch.full((n,), math.nan), torch.zeros(n), mask=none, threshold=2.0)
    assert weights.tolist() == [0] * n
    assert {name for name, value in metrics.items() if value} == {"sampler_is/ess", "sampler_trainer/ess"}
    assert metrics["sampler_is/ess"] == 1.0  # nothing speaks against it


def test_threshold_must_be_positive():
    x = inputs(tensor([0.0]), tensor([0.0]))
    with pytest.raises(ConfigError, match="sampler_is_threshold 0 must be positive"):
        sampler_importance(x, sampler_is_threshold=0)
    with pytest.raises(ConfigError, match=r"rejection_lower 2\.0 must be below rejection_threshold 1\.001"):
        sampler_rejection(x, rejection_lower=2.0)
    with pytest.raises(ConfigError, match="unknown sampler_is_mode 'masked'; did you mean mask"):
        sampler_importance(x, sampler_is_mode="masked")
    with pytest.raises(ConfigError, match=r"unknown level .* 'tokens'; did you mean token"):
        sampler_log_ratio(x, "tokens")


def test_a_weight_of_exactly_the_threshold_is_not_clipped():
    # an engine that is exact to the bit, under a threshold of 1: nothing is cut
    same = tensor([-1.0, -2.0])
    _, found = both(same, same, mask=torch.tensor([True, True]), threshold=1.0)
    assert found["sampler_is/frac_clipped_at_threshold"] == 0 and found["sampler_is/weight_max"] == 1


# ---- levels and modes ----------------------------------------------------------------------------------------------

TWO = {  # sequences with ratios (1, 4) and (1/2, -, 1/2): products 4 and 1/4, geometric means 2 and 1/2
    "old": tensor([1.0, 4.0, 0.5, math.nan, 0.5]).log(),
    "sampler": tensor([1.0, 1.0, 1.0, 1.0, 1.0]).log(),
    "mask": tensor([True, True, True, False, True]),
    "sequence": tensor([0, 0, 1, 1, 1]),
}


@pytest.mark.parametrize(
    ("level", "mode", "upper", "lower", "expected"),
    [
        ("token", "truncate", 2.0, None, [1, 2, 0.5, 0, 0.5]),
        ("token", "truncate", None, 0.75, [1, 4, 0.75, 0, 0.75]),
        ("token", "truncate", None, None, [1, 4, 0.5, 0, 0.5]),
        ("token", "mask", 2.0, 0.75, [1, 0, 0, 0, 0]),
        ("token", "mask", 4.0, 0.5, [1, 4, 0.5, 0, 0.5]),  # the bounds themselves are inside
        ("token", "mask", None, None, [1, 4, 0.5, 0, 0.5]),
        ("sequence", "truncate", 2.0, None, [2, 2, 0.25, 0, 0.25]),
        ("sequence", "mask", 3.0, None, [0, 0, 0.25, 0, 0.25]),
        ("geometric", "truncate", 1.5, 0.75, [1.5, 1.5, 0.75, 0, 0.75]),
        ("geometric", "mask", 3.0, 0.75, [2, 2, 0, 0, 0]),
    ],
)
def test_each_level_and_mode_by_hand(level, mode, upper, lower, expected):
    x = inputs(**TWO)
    found = sampler_importance(x, level=level, sampler_is_mode=mode, sampler_is_threshold=upper, sampler_is_lower=lower)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_icepop_is_a_band_of_token_ratios_by_hand():
    # arXiv:2510.18855: the ratio within [0.5, 5], else 0
    ratios = tensor([0.4, 0.5, 1.0, 5.0, 5.1])
    x = inputs(ratios.log(), torch.zeros(5))
    found = sampler_importance(x, sampler_is_mode="mask", sampler_is_lower=0.499999, sampler_is_threshold=5.00001)
    assert found.tolist() == pytest.approx([0, 0.5, 1, 5, 0], rel=1e-5)


def test_rejection_takes_whole_sequences_by_their_geometric_mean():
    x = inputs(**TWO)
    assert sampler_rejection(x, rejection_lower=0.75, rejection_threshold=3.0).tolist() == [1, 1, 0, 0, 0]
    assert sampler_rejection(x, rejection_lower=0.4, rejection_threshold=1.5).tolist() == [0, 0, 1, 0, 1]
    assert sampler_rejection(x, rejection_level="sequence", rejection_lower=None, rejection_threshold=3.0).tolist() == [
        0,
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_sampler_logprob_that_is_not_known_counts_as_no_difference(level):
    old, sampler = tensor([0.5, 0.9]).log(), tensor([0.25, math.nan]).log()
    expected = {"token": [2, 1], "sequence": [2, 2], "geometric": [math.sqrt(2)] * 2}[level]
    found = sampler_importance(inputs(old, sampler), level=level, sampler_is_threshold=None)
    assert found.tolist() == pytest.approx(expected)
    assert mismatch_metrics(old, sampler, mask=tensor([True, True]))["sampler_trainer/logp_diff_mean"] == pytest.approx(
        math.log(2)
    )


def test_a_nan_of_the_trainer_is_not_hidden():
    assert sampler_importance(inputs(tensor([math.nan]), tensor([-1.0]))).isnan().all()


def test_normalised_weights_are_divided_by_the_mean_of_the_step():
    x = inputs(tensor([0.0, 0.0]), tensor([2.0, 4.0]).log(), token_columns={"sampler_is_mean": tensor([0.25, 0.25])})
    found = sampler_importance(x, sampler_is_normalize=True)
    assert found.tolist() == pytest.approx([2.0, 1.0])


def test_the_effective_sample_size_by_hand_and_where_nothing_has_weight():
    mask = tensor([True, True, True, False])
    assert effective_sample_size(tensor([1.0, 1.0, 1.0, 9.0]), mask).item() == 1.0
    assert effective_sample_size(tensor([1.0, 0.0, 0.0, math.nan]), mask).item() == pytest.approx(1 / 3)
    assert effective_sample_size(torch.zeros(4), mask).item() == 1.0
    assert effective_sample_size(torch.ones(4), torch.zeros(4, dtype=torch.bool)).item() == 1.0
