import functools
import math

import pytest
import torch
from helpers import grpo_objective
from surrogates import changed, gradient, inputs
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.policy_losses import (
    POLICY_LOSSES,
    cispo,
    cispo_torchrl,
    cispo_trl,
    clipped_surrogate,
    distillation,
    gmpo,
    nll,
    reinforce,
    sapo,
    vespo,
)
from whet.types import LossInputs

NAN = math.nan


def log(*ratios):
    return [math.log(r) for r in ratios]


def test_the_four_corners_of_the_clip():
    # ratios 2, .5 with A = 1: min(2, 1.2) = 1.2, min(.5, .8) = .5; with A = -1: max(2, 1.2) = 2, max(.5, .8) = .8
    x = inputs(log(2, 0.5, 2, 0.5), old_logprobs=[0.0] * 4, advantages=[1, 1, -1, -1])
    loss, metrics = clipped_surrogate(x)
    assert loss.tolist() == pytest.approx([-1.2, -0.5, 2.0, 0.8])
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 0, 1]
    assert metrics["clip_ratio/high"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_ratio/low"].tolist() == [0, 0, 0, 1]
    assert metrics["clip_ratio/region"].tolist() == [1, 0, 0, 1]
    assert metrics["is_ratio"].tolist() == pytest.approx([2, 0.5, 2, 0.5])
    assert metrics["log_ratio_abs"].tolist() == pytest.approx([math.log(2)] * 4)
    assert metrics["ppo_kl"].tolist() == pytest.approx(log(0.5, 2, 0.5, 2))


def test_the_clipped_corners_have_no_gradient():
    logprobs = tensor(log(2, 0.5, 2, 0.5), requires_grad=True)
    x = inputs([0.0] * 4, old_logprobs=[0.0] * 4, advantages=[1, 1, -1, -1])
    x = LossInputs(**{**vars(x), "logprobs": logprobs})
    clipped_surrogate(x)[0].sum().backward()
    # d(-A r)/dlogp = -A r where not clipped
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0, -0.5, 2, 0])


def test_clip_higher_moves_only_the_upper_bound():
    x = inputs(log(2, 0.5), old_logprobs=[0.0, 0.0], advantages=[1, -1])
    assert clipped_surrogate(x, epsilon=0.1, epsilon_high=0.28)[0].tolist() == pytest.approx([-1.28, 0.9])
    # epsilon_high 0 is a bound, not "unset"
    assert clipped_surrogate(x, epsilon=0.1, epsilon_high=0.0)[0].tolist() == pytest.approx([-1.0, 0.9])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # r = 10: A = -1 costs 10, at most 3; A = 1 stays -1.2; r = 2: 2 < 3 stays
    x = inputs(log(10, 10, 2), old_logprobs=[0.0] * 3, advantages=[-1, 1, -1])
    loss, metrics = clipped_surrogate(x, epsilon_c=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert metrics["pg_clipfrac_lower"].tolist() == [1, 0, 0]
    assert "pg_clipfrac_lower" not in clipped_surrogate(x)[1]


def test_sampler_weights_multiply_after_the_dual_clip_and_get_no_gradient():
    sampler = tensor(log(2, 0.5), requires_grad=True)  # weights 1 / 2 and 1 / .5
    x = inputs(log(10, 1), old_logprobs=[0.0, 0.0], advantages=[-1, 1])
    x = LossInputs(**{**vars(x), "logprobs": x.logprobs.requires_grad_(), "sampler_logprobs": sampler})
    dual = functools.partial(clipped_surrogate, epsilon_c=3.0)
    loss, metrics = grpo_objective(x, surrogate=dual, sampler_is_threshold=5.0)
    assert loss.tolist() == pytest.approx([1.5, -2.0])  # .5 * 3, 2 * -1
    assert metrics["pg_loss"].tolist() == pytest.approx([3.0, -1.0])  # the surrogate's own
    assert grpo_objective(x, surrogate=dual, sampler_is_threshold=1.5)[0].tolist() == pytest.approx([1.5, -1.5])
    loss.sum().backward()
    assert sampler.grad is None


def test_log_ratio_is_held_at_20_and_ppo_kl_is_not():
    x = inputs([0.0, -30.0], old_logprobs=[-30.0, 0.0], advantages=[-1, 1])
    loss, metrics = clipped_surrogate(x)
    assert loss.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-5)
    assert metrics["ppo_kl"].tolist() == [-30, 30] and metrics["log_ratio_abs"].tolist() == [20, 20]


def test_sequence_level_takes_the_mean_of_each_sequence_and_keeps_token_gradients():
    # sequence 0: (ln 2 + ln 8) / 2 = ln 4; its masked token doesn't count; sequence 1: ln 1.1
    logprobs = tensor([*log(2, 8), 5.0, *log(1.1)], requires_grad=True)
    x = LossInputs(
        sequence=tensor([0, 0, 0, 1]),
        mask=tensor([True, True, False, True]),
        logprobs=logprobs,
        old_logprobs=torch.zeros(4),
        advantages=tensor([-1.0, -1.0, -1.0, 1.0]),
    )
    loss, metrics = POLICY_LOSSES["gspo-token"](x)
    assert loss.tolist() == pytest.approx([4, 4, 0, -1.1])
    assert metrics["is_ratio"].tolist() == pytest.approx([4, 4, 0, 1.1])
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([4, 4, 0, -1.1])


def test_sequence_level_ratio_is_at_most_e_to_the_10():
    x = inputs([15.0], old_logprobs=[0.0], advantages=[-1])
    assert POLICY_LOSSES["gspo-token"](x)[0].item() == pytest.approx(math.exp(10), rel=1e-5)


def test_sequence_level_averages_log_ratios_that_are_held_at_20():
    x = inputs([-30.0, 10.0], old_logprobs=[0.0, 0.0], advantages=[-1, -1])  # (-20 + 10) / 2 = -5, clipped up to .8
    loss, metrics = POLICY_LOSSES["gspo-token"](x)
    assert metrics["is_ratio"].tolist() == pytest.approx([math.exp(-5)] * 2) and loss.tolist() == pytest.approx(
        [0.8] * 2
    )


def test_the_reference_gets_no_gradient():
    ref = tensor([-1.0, -0.5], requires_grad=True)
    logprobs = tensor([-0.5, -0.7], requires_grad=True)
    x = inputs(logprobs, advantages=tensor([1.0, -1.0]), ref_logprobs=ref)
    grpo_objective(x, beta=0.1, kl_mode="k3")[0].sum().backward()
    assert ref.grad is None and logprobs.grad is not None


def test_kl_is_added_per_token_and_reported_without_beta():
    x = inputs([-1.0, -2.0], ref_logprobs=[-2.0, -1.0], advantages=[1, 0])
    loss, metrics = grpo_objective(x, beta=0.1)
    assert loss.tolist() == pytest.approx([-0.9, -0.1])  # -1 + .1 * 1; 0 + .1 * -1
    assert metrics["kl"].tolist() == [1, -1] and metrics["pg_loss"].tolist() == [-1, 0]
    plain, metrics = grpo_objective(x)
    assert plain.tolist() == [-1, 0] and metrics["kl"].tolist() == [1, -1]
    assert grpo_objective(x, beta=1.0, kl_clamp=0.5)[0].tolist() == pytest.approx([-0.5, -0.5])
    assert "kl" not in grpo_objective(inputs([0.0], advantages=[1]))[1]


def test_metrics_are_detached_floats_of_one_per_token():
    logprobs = tensor([-1.0, -2.0], requires_grad=True)
    x = LossInputs(
        sequence=tensor([0, 0]),
        mask=tensor([True, True]),
        logprobs=logprobs,
        ref_logprobs=tensor([-1.0, -1.0]),
        advantages=tensor([1.0, 1.0]),
    )
    _, metrics = grpo_objective(x, surrogate=functools.partial(clipped_surrogate, epsilon_c=3.0), beta=0.1)
    assert all(m.shape == (2,) and m.dtype == torch.float32 and not m.requires_grad for m in metrics.values())


def test_float64_stays_float64():
    x = LossInputs(
        sequence=tensor([0]),
        mask=tensor([True]),
        logprobs=tensor([-1.0], dtype=torch.float64),
        advantages=tensor([1.0], dtype=torch.float64),
    )
    assert clipped_surrogate(x)[0].dtype == torch.float64


def test_what_can_t_be_carried_out_is_refused():
    x = inputs([0.0], advantages=[1])
    with pytest.raises(ConfigError, match=r"epsilon_c 1\.0 must be above 1"):
        clipped_surrogate(x, epsilon_c=1.0)
    with pytest.raises(ConfigError, match=r"epsilon_high -0\.1 must be at least 0"):
        clipped_surrogate(x, epsilon_high=-0.1)
    with pytest.raises(ConfigError, match="unknown importance level 'tokens'; did you mean token"):
        clipped_surrogate(x, importance_sampling_level="tokens")
    with pytest.raises(ConfigError, match="unknown KL mode"):
        grpo_objective(inputs([0.0], advantages=[1], ref_logprobs=[0.0]), kl_mode="k9")
    with pytest.raises(DataError, match="needs ref_logprobs"):
        grpo_objective(x, beta=0.1)
    with pytest.raises(DataError, match="needs sampler_logprobs"):
        grpo_objective(x, sampler_is_threshold=2.0)
    with pytest.raises(DataError, match="needs advantages"):
        clipped_surrogate(inputs([0.0]))


def test_nll_is_minus_the_logprob_of_trained_tokens():
    loss, metrics = nll(inputs([-1.5, NAN], mask=[True, False]))
    assert loss.tolist() == [1.5, 0] and metrics["nll"].tolist() == [1.5, 0]


def test_the_unclipped_arm_is_capped_at_delta():
    # r = 10: A = -1 costs 10, at most 3; r = 1.1 under a cap of 1.05: A = 1 gains min(1.05, 1.1), A = -1 costs 1.1
    x = inputs(log(10, 1.1, 1.1), old_logprobs=[0.0] * 3, advantages=[-1, 1, -1])
    assert clipped_surrogate(x, delta=3.0)[0].tolist() == pytest.approx([3.0, -1.1, 1.1])
    assert clipped_surrogate(x, delta=1.05)[0].tolist() == pytest.approx([1.2, -1.05, 1.1])
    with pytest.raises(ConfigError, match=r"delta 0\.9 must be at least 1"):  # or a ratio of 1 would have no gradient
        clipped_surrogate(x, delta=0.9)
    up = inputs(log(10), old_logprobs=[0.0], advantages=[1])  # held by the cap before the clip: not counted
    assert [clipped_surrogate(up, delta=d)[1]["clip_ratio/high"].item() for d in (1.05, 3.0)] == [0, 1]
    for bound in (1.28, 2.0):  # from the upper clip on it is the dual clip
        same = clipped_surrogate(x, epsilon_high=0.28, delta=bound)[0]
        assert same.tolist() == clipped_surrogate(x, epsilon_high=0.28, epsilon_c=bound)[0].tolist()


def test_levels_of_the_ratio_by_hand():
    # a sequence of ratios 2 and 8: their geometric mean is 4, their product 16; a masked token counts in neither
    x = inputs([*log(2, 8), 5.0], mask=[True, True, False], old_logprobs=[0.0] * 3, advantages=[-1, -1, -1])
    for level, values, slope in (
        ("token", [2, 8, 0], [2, 8, 0]),
        ("sequence", [4, 4, 0], [4, 4, 0]),  # two losses, each with half of its gradient at each token
        ("sequence-token", [4, 4, 0], [4, 4, 0]),
        ("sequence-sum", [16, 16, 0], [32, 32, 0]),
    ):
        loss, _, found = gradient(functools.partial(clipped_surrogate, importance_sampling_level=level), x)
        assert loss.tolist() == pytest.approx(values) and found.tolist() == pytest.approx(slope)
    # where tokens weigh differently, the gradient of a sequence's ratio is shared, a token's own is not
    weights = tensor([1.0, 0.0, 0.0])
    for level, slope in (("sequence", [2, 2, 0]), ("sequence-token", [4, 0, 0])):
        loss = functools.partial(clipped_surrogate, importance_sampling_level=level)
        assert gradient(loss, x, weights)[2].tolist() == pytest.approx(slope)


def test_log_ratios_are_held_at_20_before_their_mean_or_sum_and_sums_after_it_too():
    for gaps, level, expected in (
        ([30.0, 10.0], "sequence", 15.0),  # (20 + 10) / 2
        ([30.0, -5.0], "sequence-sum", 15.0),
        ([15.0, 15.0], "sequence-sum", 20.0),
        ([-15.0, -15.0], "sequence-sum", -20.0),
        ([-19.5, -19.5], "sequence", -19.5),
        ([15.0, 15.0], "sequence-token", 10.0),
    ):
        x = inputs(gaps, old_logprobs=[0.0, 0.0], advantages=[1, 1])
        ratio = clipped_surrogate(x, importance_sampling_level=level)[1]["is_ratio"]
        assert ratio.log().tolist() == pytest.approx([expected] * 2)
    # vespo: w is at least 1e-8 and phi(w) = e^(3 - 3w) w^2 there; a correction of 0 is 1e-8
    x = inputs([-19.0, 0.0], [0, 1], old_logprobs=[0.0, 0.0], advantages=[1, 1])
    none = functools.partial(vespo, correction=lambda x: tensor([1.0, 0.0]))
    assert none(x)[1]["vespo/phi_seq_mean"].tolist() == pytest.approx([math.exp(3) * 1e-16] * 2, rel=1e-4, abs=0)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    # ratios 2, .5 with A = 1, -1: weights min(2, 1.2), .5; the loss -w A log π, the gradient -w A
    x = inputs([-1.0, -2.0], old_logprobs=[-1 - math.log(2), -2 + math.log(2)], advantages=[1, -1])
    loss, metrics, slope = gradient(cispo, x)
    assert loss.tolist() == pytest.approx([1.2, -1.0]) and slope.tolist() == pytest.approx([-1.2, 0.5])
    assert metrics["cispo_clip_ratio"].tolist() == [1, 0] and metrics["is_ratio"].tolist() == pytest.approx([2, 0.5])
    lower = functools.partial(cispo, cispo_epsilon_low=0.3)
    assert gradient(lower, x)[2].tolist() == pytest.approx([-1.2, 0.7])
    assert gradient(cispo_trl, x)[2].tolist() == pytest.approx([-0.2, 0.2])  # the cap is epsilon itself
    _, metrics, slope = gradient(cispo_torchrl, x)  # TorchRL's: the opposite
    assert slope.tolist() == [0, 0]
    assert metrics["clip_ratio/high"].tolist() == [1, 0] and metrics["clip_ratio/low"].tolist() == [0, 1]


def test_gmpo_clips_each_token_in_log_space_on_the_side_of_its_advantage():
    # logs .9 and -.9 in ±.4: (.4 - .9) / 2 where A > 0, (.9 - .4) / 2 where A < 0
    x = inputs([0.9, -0.9] * 2, [0, 0, 1, 1], old_logprobs=[0.0] * 4, advantages=[1, 1, -1, -1])
    loss, metrics, slope = gradient(functools.partial(gmpo, epsilon=0.4), x)
    low, high = math.exp(-0.25), math.exp(0.25)
    assert loss.tolist() == pytest.approx([-low, -low, high, high])
    assert slope.tolist() == pytest.approx([0, -low, high, 0])
    assert metrics["clip_ratio/high"].tolist() == [1, 0, 0, 0] and metrics["clip_ratio/low"].tolist() == [0, 0, 0, 1]
    wider = functools.partial(gmpo, epsilon=0.4, epsilon_high=1.0)
    loss, metrics, _ = gradient(wider, x)
    assert loss.tolist() == pytest.approx([-1.0, -1.0, high, high])
    assert metrics["clip_ratio/region"].tolist() == [0, 0, 0, 1]


def test_sapo_is_a_sigmoid_of_the_ratio():
    # r = 2: A = 1, τ = 1: -4 σ(1); A = -1, τ = 2: 2 σ(2). Gradient 4 σ(1 - σ) r
    x = inputs(log(2, 2), old_logprobs=[0.0, 0.0], advantages=[1, -1])
    loss, _, slope = gradient(functools.partial(sapo, sapo_temperature_neg=2.0), x)
    one, two = (1 / (1 + math.exp(-t)) for t in (1, 2))
    assert loss.tolist() == pytest.approx([-4 * one, 2 * two])
    assert slope.tolist() == pytest.approx([-8 * one * (1 - one), 8 * two * (1 - two)])


def test_vespo_weighs_a_sequence_by_the_gamma_of_its_ratio():
    # w = 2: phi = e^3 4 e^-6 where A = 1, e^2 8 e^-4 where A = -1; a correction of .5 makes it 1, and phi 1
    x = inputs([-1.0, -2.0], [0, 1], old_logprobs=[-1 - math.log(2), -2 - math.log(2)], advantages=[1, -1])
    loss, metrics, slope = gradient(vespo, x)
    good, bad = 4 * math.exp(-3), 8 * math.exp(-2)
    assert metrics["vespo/phi_seq_mean"].tolist() == pytest.approx([good, bad])
    assert loss.tolist() == pytest.approx([good, -2 * bad]) and slope.tolist() == pytest.approx([-good, bad])
    assert vespo(changed(x, advantages=torch.zeros(2)))[1]["vespo/phi_seq_mean"].tolist() == pytest.approx([good] * 2)
    half = functools.partial(vespo, correction=lambda x: torch.full_like(x.logprobs, 0.5))
    assert gradient(half, x)[2].tolist() == pytest.approx([-1, 1])


def test_reinforce_and_distillation_by_hand():
    columns = {"old_logprobs": [-1.0, -2.0], "advantages": [1.0, 0.0], "teacher_logprobs": [-3.0, -1.5]}
    x = inputs([-1.0, -2.0], **columns)
    assert gradient(reinforce, x)[0].tolist() == [1.0, 0.0]
    # advantages 1 - .5 (-1 - -3) = 0 and 0 - .5 (-2 - -1.5) = .25
    loss, metrics, slope = gradient(functools.partial(distillation, teacher_coef=0.5), x)
    assert loss.tolist() == slope.tolist() == pytest.approx([0, -0.25])
    assert metrics["teacher_kl"].tolist() == [2.0, -0.5]
    with pytest.raises(DataError, match="needs teacher_logprobs"):
        distillation(inputs([-1.0], advantages=[1.0]))


@pytest.mark.parametrize(
    ("loss", "fields", "message"),
    [
        (clipped_surrogate, {"delta": 0.0}, r"delta 0\.0 must be at least 1"),
        (cispo, {"cispo_epsilon_low": -1.0}, r"must be at least 0"),
        (sapo, {"sapo_temperature_pos": 0.0}, "sapo_temperature_pos 0.0 must be positive"),
        (vespo, {"vespo_k_neg": math.nan}, "vespo_k_neg nan must be positive"),
        (gmpo, {"epsilon": -0.1}, r"epsilon -0\.1 must be at least 0"),
    ],
)
def test_parameters_out_of_range_are_refused(loss, fields, message):
    with pytest.raises(ConfigError, match=message):
        loss(inputs([0.0], advantages=[1.0]), **fields)
