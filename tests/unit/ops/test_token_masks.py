import math

import pytest
import torch
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.token_masks import (
    binary_kl_mask,
    entropy_rank,
    high_entropy_mask,
    sampler_kl_mask,
    total_variation_mask,
)
from whet.types import LossInputs


def moved(old, new, advantages, **columns):
    """One sequence of tokens whose probabilities have moved."""
    return LossInputs(
        sequence=torch.zeros(len(old), dtype=torch.long),
        mask=torch.ones(len(old), dtype=torch.bool),
        logprobs=tensor(new).log(),
        old_logprobs=tensor(old).log(),
        advantages=tensor(advantages),
        **columns,
    )


def test_total_variation_masks_what_is_pushed_too_far_by_hand():
    # up .3 and down .3, of good, bad and indifferent tokens; and moves of .1, which are near enough
    x = moved(
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        [0.8, 0.2, 0.8, 0.2, 0.8, 0.2, 0.6, 0.4],
        [1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 1.0, -1.0],
    )
    assert total_variation_mask(x, dppo_threshold=0.2).tolist() == [0, 1, 1, 0, 1, 0, 1, 1]
    assert total_variation_mask(x, dppo_threshold=0.2, dppo_threshold_high=0.35).tolist() == [1, 1, 1, 0, 1, 0, 1, 1]
    with pytest.raises(ConfigError, match="dppo_threshold 0 must be positive"):
        total_variation_mask(x, dppo_threshold=0)


def test_a_rare_token_may_have_a_large_ratio_under_dppo():
    # p grows a hundredfold, by .0099: the ratio clip of PPO would stop it, its share of the probability is small
    assert total_variation_mask(moved([0.0001], [0.01], [1.0])).tolist() == [1]


def test_binary_kl_masks_what_is_pushed_too_far_by_hand():
    x = moved([0.5, 0.5, 0.5, 0.5], [0.8, 0.2, 0.8, 0.2], [1.0, 1.0, -1.0, -1.0])
    divergence = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)  # .22314, the same for .2
    assert binary_kl_mask(x, dppo_threshold=divergence - 1e-5).tolist() == [0, 1, 1, 0]
    assert binary_kl_mask(x, dppo_threshold=divergence + 1e-5).tolist() == [1, 1, 1, 1]
    certain = moved([0.5], [1.0], [1.0])  # log(1 - p) is held
    assert binary_kl_mask(certain, dppo_threshold=5.0).tolist() == [0]


def test_a_policy_that_has_not_moved_keeps_all_tokens():
    x = moved([0.5, 1.0], [0.5, 1.0], [1.0, -1.0])
    now = LossInputs(sequence=x.sequence, mask=x.mask, logprobs=x.logprobs, advantages=x.advantages)
    for mask in (total_variation_mask, binary_kl_mask):
        assert mask(x).tolist() == mask(now).tolist() == [1, 1]


def test_tokens_far_from_the_sampler_are_masked_by_hand():
    x = LossInputs(
        sequence=tensor([0, 0, 0, 0]),
        mask=tensor([True, True, True, False]),
        logprobs=tensor([-1.0, -1.0, -1.0, -1.0]),
        sampler_logprobs=tensor([-1.9, -2.1, math.nan, -9.0]),
    )
    assert sampler_kl_mask(x, kl_mask_threshold=0.5).tolist()[:3] == [1, 0, 1]  # .405, .605, not known
    assert sampler_kl_mask(x).tolist()[:3] == [1, 1, 1]


def test_the_rank_of_an_entropy_by_hand():
    mask = tensor([True, True, True, True, False])
    assert entropy_rank(tensor([2.0, 1.0, 2.0, 3.0, math.nan]), mask).tolist() == pytest.approx([2 / 3, 0, 2 / 3, 1, 0])
    assert entropy_rank(tensor([2.0, 9.0]), tensor([True, False])).tolist() == [1, 0]
    assert entropy_rank(tensor([2.0]), tensor([False])).tolist() == [0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("n", [1, 2, 7, 10, 11])
def test_the_share_kept_is_what_is_at_least_the_quantile(n, share):
    g = torch.Generator().manual_seed(n)
    entropy = torch.randint(0, 6, (n,), generator=g) / 4.0  # with ties
    mask = torch.rand(n, generator=g) > 0.2
    x = LossInputs(
        sequence=torch.zeros(n, dtype=torch.long),
        mask=mask,
        logprobs=torch.zeros(n),
        token_columns={"entropy_rank": entropy_rank(entropy, mask)},
    )
    expected = mask & (entropy >= torch.quantile(entropy[mask], 1 - share)) if mask.any() else mask
    assert high_entropy_mask(x, top_entropy_quantile=share).bool().tolist() == expected.tolist()


def test_the_entropies_have_to_be_there():
    x = moved([0.5], [0.5], [1.0])
    with pytest.raises(DataError, match="the loss needs entropy_rank"):
        high_entropy_mask(x, top_entropy_quantile=0.5)
