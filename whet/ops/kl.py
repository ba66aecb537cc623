"""Estimates of the KL divergence between two policies from the logprobs of sampled tokens.

Left out on purpose: the exact KL over the vocabulary, which needs both models' logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.errors import ConfigError, lookup_error
from whet.ops.masked import to_fp32

__all__ = ["KL_MODES", "kl_divergence"]


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    """exp(−d) + d − 1, the exponent held in ±20: exp(88.8) is already infinite in fp32.

    The gradient passes through the clamp, as 1 − exp(20) far below 0: without it that of d alone would be left, which
    pushes the policy further away from the reference.
    """
    held = (-d.detach()).clamp(-20.0, 20.0)
    free = (-d).clamp(-1e30, 1e30)  # finite, so that the difference below is 0 and not NaN
    return (held + (free - free.detach())).expm1() + d


KL_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "kl": _k1,
    "low_var_kl": _k3,
    "mse_kl": _k2,
}
"""Functions of d = logprobs − ref_logprobs, by the names that Tunix (kl, mse_kl, low_var_kl) and others use."""


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, *, mode: str, clamp: float | None = None) -> Tensor:
    """KL divergence of the policy to the reference, estimated at each sampled token.

    With d = log π(a) − log π_ref(a): k1 = d; k2 = d²/2; k3 = exp(−d) + d − 1; abs = |d|. Under π the mean of k1 and of
    k3 is KL(π‖π_ref); k3 is never negative and varies less; the mean gradient of k2 is that of the KL.
    Args: logprobs, ref_logprobs [...], in nats. mode: a name of KL_MODES. clamp: if given, results are held in ±clamp.
    Returns: [...], fp32 or wider.
    Raises: ConfigError: an unknown mode, or a clamp that is not positive.
    Source: Schulman, "Approximating KL divergence" (2020); Tunix's compute_kl_divergence, from which k3 differs where
        |d| > 20: the exponent is held there, so that it can't overflow (below d = −4·10⁸ it is
        negative then); its gradient is that at the bound.

    >>> kl_divergence(torch.tensor([-1.]), torch.tensor([-2.]), mode="low_var_kl")  # d = 1: exp(-1) + 1 - 1
    tensor([0.3679])
    """
    if mode not in KL_MODES:
        raise lookup_error("KL mode", mode, KL_MODES)
    if clamp is not None and not clamp > 0:
        raise ConfigError(f"the KL clamp {clamp!r} must be positive; None = no clamp")
    kl = KL_MODES[mode](to_fp32(logprobs) - to_fp32(ref_logprobs))
    return kl if clamp is None else kl.clamp(-clamp, clamp)
