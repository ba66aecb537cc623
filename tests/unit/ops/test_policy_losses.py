import functools
import math

import pytest
import torch
from helpers import grpo_objective
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.policy_losses import POLICY_LOSSES, clipped_surrogate, nll
from whet.types import LossInputs

NAN = math.nan


def inputs(logprobs, sequence=None, mask=None, **columns) -> LossInputs:
    n = len(logprobs)
    return LossInputs(
        sequence=tensor([0] * n if sequence is None else sequence),
        mask=tensor([True] * n if mask is None else mask),
        logprobs=torch.as_tensor(logprobs, dtype=torch.float32),
        **{k: torch.as_tensor(v, dtype=torch.float32) for k, v in columns.items()},
    )


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
