import math

import pytest
import torch
from torch import tensor

from whet.errors import ConfigError
from whet.ops.kl import KL_MODES, adapted_beta, kl_divergence, kl_rewards, sequence_mean_kl


def test_each_mode_by_hand():
    # d = -1 - (-2) = 1: k1 1, k2 .5, k3 exp(-1) + 1 - 1 = .367879; d = -1: k1 -1, k2 .5, k3 e - 1 - 1 = .718282, abs 1
    p, q = tensor([-1.0, -2.0]), tensor([-2.0, -1.0])
    expected = {"k1": [1, -1], "k2": [0.5, 0.5], "k3": [0.367879, 0.718282], "abs": [1, 1]}
    for mode, values in expected.items():
        assert kl_divergence(p, q, mode=mode).tolist() == pytest.approx(values, abs=1e-6)
    for name, same in {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}.items():
        assert kl_divergence(p, q, mode=name).tolist() == kl_divergence(p, q, mode=same).tolist()


def test_clamp_is_symmetric_on_the_result():
    p, q = tensor([-50.0, 0.0, 50.0]), tensor([50.0, 0.0, -50.0])  # differences -100, 0, 100
    assert kl_divergence(p, q, mode="kl", clamp=10).tolist() == [-10, 0, 10]
    assert kl_divergence(tensor([200.0, -200.0]), tensor([0.0, 0.0]), mode="kl", clamp=5).tolist() == [5, -5]
    assert kl_divergence(p, q, mode="kl").tolist() == [-100, 0, 100]


def test_k3_neither_overflows_nor_loses_small_differences():
    far = kl_divergence(tensor([-200.0]), tensor([0.0]), mode="k3")  # exp(20) - 1 - 200
    assert far.item() == pytest.approx(math.expm1(20) - 200, rel=1e-6)
    # d = 1e-4: d²/2 = 5e-9, which exp(-d) + d - 1 loses in fp32 (the spacing at 1 is 1.2e-7)
    assert kl_divergence(tensor([1e-4]), tensor([0.0]), mode="k3").item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize("mode", sorted(KL_MODES))
def test_no_estimate_ever_pushes_away_from_the_reference(mode):
    # d far below and far above 0, beyond where the exponent of k3 is held: descent must not widen |d|
    p = tensor([-1000.0, -25.0, -20.5, -5.0, 5.0, 25.0, 1000.0], requires_grad=True)
    kl_divergence(p, torch.zeros(7), mode=mode).sum().backward()
    assert p.grad is not None and p.grad.isfinite().all()
    if mode not in ("k1", "kl"):  # whose gradient is that of log pi alone, wherever it stands
        assert (p.grad * p.detach() >= 0).all()
    if mode == "k3":  # 1 - exp(-d), the exponent held at 20
        assert p.grad[:3].tolist() == pytest.approx([-math.expm1(20)] * 3)


def test_k3_of_an_impossible_token_is_no_nan():
    assert kl_divergence(tensor([-math.inf]), tensor([0.0]), mode="k3").item() == -math.inf


def test_gradients_by_hand():
    # d/dlogp at d = 1: k1 1, k2 d = 1, k3 1 - exp(-1) = .632121
    for mode, slope in {"k1": 1.0, "k2": 1.0, "k3": 0.632121, "abs": 1.0}.items():
        p = tensor([-1.0], requires_grad=True)
        kl_divergence(p, tensor([-2.0]), mode=mode).sum().backward()
        assert p.grad is not None and p.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("mode", ["k1", "k3"])
def test_mean_under_the_policy_is_the_exact_kl(mode):
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 20, generator=g, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    assert (p.exp() * kl_divergence(p, q, mode=mode)).sum().item() == pytest.approx(exact.item())


def test_half_precision_is_computed_in_fp32_and_float64_stays():
    for mode in KL_MODES:
        half = torch.ones(1, dtype=torch.bfloat16)
        assert kl_divergence(half, half, mode=mode).dtype == torch.float32
        assert kl_divergence(half.double(), half.double(), mode=mode).dtype == torch.float64
    # both are exact in bf16, their difference is not (it would be 199)
    p, q = tensor([-1.0078125], dtype=torch.bfloat16), tensor([-200.0], dtype=torch.bfloat16)
    assert kl_divergence(p, q, mode="k1").item() == 198.9921875


def test_unknown_mode_lists_the_known_and_a_bad_clamp_is_refused():
    with pytest.raises(ConfigError, match="unknown KL mode 'lowvar_kl'; did you mean low_var_kl"):
        kl_divergence(tensor([0.0]), tensor([0.0]), mode="lowvar_kl")
    with pytest.raises(ConfigError, match="clamp -1"):
        kl_divergence(tensor([0.0]), tensor([0.0]), mode="kl", clamp=-1)


def test_the_kl_of_a_rollout_is_a_mean_over_sequences_that_have_tokens():
    # (1 + 3) / 2 and 5, whose other token is masked out; the third sequence has none
    kl, mask = tensor([1.0, 3.0, 5.0, math.nan, math.nan]), tensor([True, True, True, False, False])
    found = sequence_mean_kl(kl, mask=mask, sequence=tensor([0, 0, 1, 1, 2]), num_sequences=3)
    assert found == pytest.approx(3.5)
    assert sequence_mean_kl(kl, mask=~mask & mask, sequence=tensor([0, 0, 1, 1, 2]), num_sequences=3) == 0.0


def test_a_coefficient_follows_the_proportional_error_by_hand():
    step = lambda kl: adapted_beta(0.5, kl, target_kl=0.1, num_sequences=10, kl_horizon=100.0)
    assert step(0.11) == pytest.approx(0.5 * (1 + 0.1 * 0.1))  # an error of 0.1
    assert step(0.1) == 0.5
    assert step(0.0) == pytest.approx(0.5 * (1 - 0.2 * 0.1)) == step(0.05)  # the error is clipped to 0.2
    assert step(math.inf) == pytest.approx(0.5 * (1 + 0.2 * 0.1))


def test_a_coefficient_moves_by_a_fifth_at_most_however_many_sequences_a_step_has():
    step = lambda kl: adapted_beta(0.5, kl, target_kl=0.1, num_sequences=1000, kl_horizon=10.0)
    assert (step(0.0), step(math.inf)) == pytest.approx((0.4, 0.6))


def test_kl_in_the_reward_by_hand():
    old, ref = tensor([-1.0, -2.0, math.nan]), tensor([-2.0, -1.0, -1.0])
    mask = tensor([True, True, False])
    found = kl_rewards(old, ref, mask=mask, beta=0.1, kl_loss_mode="kl", kl_clamp_value=0.5)
    assert found.tolist() == pytest.approx([-0.05, 0.05, 0.0])  # d = 1 and -1, held in 0.5
