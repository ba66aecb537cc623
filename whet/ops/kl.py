"""Estimates of the KL divergence between two policies from the logprobs of sampled tokens, and where they act.

Left out on purpose: the exact KL over the vocabulary, which needs both models' logits.
Dim legend: s tokens of a micro-batch, S of a batch, N its sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from whet.errors import ConfigError, lookup_error
from whet.ops.masked import masked_column, segment_count, segment_mean, to_fp32
from whet.ops.policy_losses.ratios import log_ratios
from whet.ops.shapes import check_shapes
from whet.types import LossInputs

__all__ = ["KL_MODES", "adapted_beta", "kl_divergence", "kl_rewards", "reference_kl", "sequence_mean_kl"]


def _k1(d: Tensor) -> Tensor:
    """k1 = d."""
    return d


def _k2(d: Tensor) -> Tensor:
    """k2 = d²/2."""
    return 0.5 * d.square()


def _abs(d: Tensor) -> Tensor:
    """|d|."""
    return torch.abs(d)


def _k3(d: Tensor) -> Tensor:
    """k3 = exp(−d) + d − 1, the exponent clamped to ±20: exp(88.8) is already infinite in fp32.

    The gradient passes through the clamp, as 1 − exp(20) far below 0. Otherwise only the gradient of d would remain,
    which pushes the policy further away from the reference.
    """
    clamped = (-d.detach()).clamp(-20.0, 20.0)
    free = (-d).clamp(-1e30, 1e30)  # finite, so that the difference below is 0 and not NaN
    return (clamped + (free - free.detach())).expm1() + d


def _straight_through(estimate: Callable[[Tensor], Tensor], d: Tensor) -> Tensor:
    """The value of an estimate, with the gradient of k2."""
    slope = _k2(d.clamp(-1e15, 1e15))  # finite, so that the difference below is 0 and not NaN
    return estimate(d).detach() + (slope - slope.detach())


KL_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": _abs,
    "abs+": functools.partial(_straight_through, _abs),
    "k1": _k1,
    "k1+": functools.partial(_straight_through, _k1),
    "k2": _k2,
    "k3": _k3,
    "k3+": functools.partial(_straight_through, _k3),
    "kl": _k1,
    "kl+": functools.partial(_straight_through, _k1),
    "low_var_kl": _k3,
    "low_var_kl+": functools.partial(_straight_through, _k3),
    "mse_kl": _k2,
}
"""Functions of d = logprobs − ref_logprobs, by the names that Tunix (kl, mse_kl, low_var_kl) and others use."""


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, *, mode: str | Callable[[Tensor], Tensor], clamp: float | None = None
) -> Tensor:
    """KL divergence of the policy to the reference, estimated at each sampled token.

    With d = log π(a) − log π_ref(a): k1 = d; k2 = d²/2; k3 = exp(−d) + d − 1; abs = |d|. Under π the mean of k1 and of
    k3 is KL(π‖π_ref); k3 is never negative and, near the reference, varies less; the mean gradient of k2 is that of the
    KL. A "+" takes the value of one and the gradient of k2, d·∇log π, which on policy is unbiased.
    Args: logprobs, ref_logprobs [...], in nats. mode: a name of KL_MODES, or a function of d. clamp: if given, results
        are clamped to ±clamp, without a gradient beyond.
    Returns: [...], fp32 or wider.
    Raises: ConfigError: an unknown mode, or a clamp that is not positive. DataError: different shapes.
    Source: Schulman, "Approximating KL divergence" (2020); Tunix's compute_kl_divergence, from which k3 differs where
        |d| > 20: the exponent is clamped there, so that it can't overflow (below d = −4·10⁸ it is negative then); its
        gradient is that at the bound. The modes with "+" are verl's, which clamps k3 to ±10 always.

    >>> kl_divergence(torch.tensor([-1.]), torch.tensor([-2.]), mode="low_var_kl")  # d = 1: exp(-1) + 1 - 1
    tensor([0.3679])
    """
    if not callable(mode) and mode not in KL_MODES:
        raise lookup_error("KL mode", mode, KL_MODES)
    if clamp is not None and not clamp > 0:
        raise ConfigError(f"the KL clamp {clamp!r} must be positive; None = no clamp")
    check_shapes("[...]", logprobs=logprobs, ref_logprobs=ref_logprobs)
    estimate = mode if callable(mode) else KL_MODES[mode]
    kl = estimate(to_fp32(logprobs) - to_fp32(ref_logprobs))
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def reference_kl(
    x: LossInputs,
    *,
    kl_loss_mode: str | Callable[[Tensor], Tensor] = "low_var_kl",
    kl_clamp_value: float | None = None,
    use_bias_correction_kl: bool = False,
    importance_sampling_level: str = "token",
) -> Tensor:
    """The divergence from the reference at each token, with a gradient only to the policy.

    KL_t = k(d_t), d = log π − log π_ref. With the correction: KL_t = k(d_t)·r_t, r = π/π_old with its gradient, at a
    level of IMPORTANCE_LEVELS, its log clamped to ±20. With the ratio of the token its mean under π_old is KL(π‖π_ref),
    and if k is k1 or k3 the mean of its gradient is the gradient of that. Without the ratio neither holds.

    Args:
        x: needs ref_logprobs, which gets no gradient; old_logprobs None = logprobs.detach(), a ratio of exactly 1.
        kl_loss_mode: a name of KL_MODES, or a function of d.
        kl_clamp_value: bound of k(d), both ways; None = off.
        use_bias_correction_kl: multiply by the importance ratio.
        importance_sampling_level: the level of that ratio, a name of IMPORTANCE_LEVELS.
    Returns: [s], 0 where masked out; divided by nothing.
    Raises: as kl_divergence; DataError: no ref_logprobs.
    Source: GRPO arXiv:2402.03300, equation 4. The correction: DeepSeek-V3.2 arXiv:2512.02556, with the token's ratio;
        agrees with TRL's use_bias_correction_kl at both of its levels.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                old_logprobs=torch.tensor([-1.]), ref_logprobs=torch.tensor([-1.]))
    >>> reference_kl(x, kl_loss_mode="mse_kl"), reference_kl(x, kl_loss_mode="mse_kl", use_bias_correction_kl=True)
    (tensor([0.5000]), tensor([1.3591]))
    """
    logprobs, ref = masked_column(x.logprobs, x.mask), masked_column(x.need("ref_logprobs"), x.mask).detach()
    kl = kl_divergence(logprobs, ref, mode=kl_loss_mode, clamp=kl_clamp_value)
    if not use_bias_correction_kl:
        return kl
    _, log_ratio = log_ratios(x, importance_sampling_level)
    return kl * log_ratio.exp()


def kl_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    mask: Tensor,
    beta: float,
    kl_loss_mode: str | Callable[[Tensor], Tensor] = "low_var_kl",
    kl_clamp_value: float | None = None,
) -> Tensor:
    """The KL penalty of each token, for a KL in the reward or in the advantage.

    r_t = −β·k(d_t), d = log π_old − log π_ref, π_old the policy that sampled.

    Args:
        logprobs, ref_logprobs [S]: of π_old and the reference. mask: Bool [S], True = sampled and trained.
        beta: β. kl_loss_mode: a name of KL_MODES, or a function of d: k1 is the usual one here, since no gradient
            is taken. kl_clamp_value: bound of k(d); None = off.
    Returns: [S], without gradient, 0 where masked out; divided by nothing.
    Raises: as kl_divergence.
    Source: InstructGPT arXiv:2203.02155; agrees with Tunix's PPO (kl_method), verl's apply_kl_penalty and RL2's
        kl.type=reward and advantage.

    >>> kl_rewards(torch.tensor([-1., 0.]), torch.tensor([-2., 0.]), mask=torch.tensor([True, False]), beta=0.1,
    ...            kl_loss_mode="k1")
    tensor([-0.1000, -0.0000])
    """
    own, ref = masked_column(logprobs.detach(), mask), masked_column(ref_logprobs.detach(), mask)
    return -beta * masked_column(kl_divergence(own, ref, mode=kl_loss_mode, clamp=kl_clamp_value), mask)


def sequence_mean_kl(kl: Tensor, *, mask: Tensor, sequence: Tensor, num_sequences: int) -> float:
    """The divergence that controls an adaptive coefficient: the mean over sequences of their means over tokens.

    Args: kl [S]. mask: Bool [S]. sequence: Long [S]. num_sequences: N.
    Returns: over the sequences with a trained token; 0.0 where there are none.
    Source: verl's apply_kl_penalty, which counts sequences without a trained token as 0.

    >>> sequence_mean_kl(torch.tensor([1., 3., 4.]), mask=torch.tensor([True, True, True]),
    ...                  sequence=torch.tensor([0, 0, 1]), num_sequences=2)
    3.0
    """
    means = segment_mean(kl.double(), mask, sequence, num_sequences)
    count = int((segment_count(mask, sequence, num_sequences) > 0).sum())
    return float(means.sum()) / max(count, 1)


def adapted_beta(beta: float, kl: float, *, target_kl: float, num_sequences: int, kl_horizon: float) -> float:
    """The next coefficient of a KL, to keep it near a target.

    β ← β·(1 + clip(KL/target − 1, ±0.2)·min(N/horizon, 1)), N the sequences that the KL was measured on.
    Args: beta: β. kl: measured. target_kl: in nats per token, positive. num_sequences: N. kl_horizon: sequences over
        which β may change by a fifth, the most that one call changes it.
    Source: Ziegler et al., arXiv:1909.08593, section 2.2; agrees with verl's AdaptiveKLController while N is at most
        the horizon. Beyond it verl's β moves further, and below 0 where N is over five times the horizon.

    >>> adapted_beta(0.1, 0.3, target_kl=0.1, num_sequences=64, kl_horizon=640)  # the error 2 is clipped to 0.2
    0.10200000000000001
    """
    error = min(max(kl / target_kl - 1.0, -0.2), 0.2)
    return beta * (1.0 + error * min(num_sequences / kl_horizon, 1.0))
