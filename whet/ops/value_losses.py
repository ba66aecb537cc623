"""Value losses of a critic: per token, never a mean. Dim legend: s tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.masked import masked_column
from whet.types import LossInputs

__all__ = ["VALUE_LOSSES", "clipped_value", "clipped_value_without_half"]


def clipped_value_without_half(x: LossInputs, *, clip_range_value: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """`clipped_value` without its ½: max((v − R)², (clip(v, v_old − c, v_old + c) − R)²).

    Args, Returns, Raises: those of `clipped_value` (0 where masked out, divided by nothing, v_old and R constants); the
        metric vf_loss has no ½ either.
    Source: RL2's critic. The gradient is twice as large, which Adam does not see, and max_grad_norm does.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                new_values=torch.tensor([1.]), values=torch.tensor([0.]), returns=torch.tensor([2.]))
    >>> clipped_value_without_half(x)[0]
    tensor([3.2400])
    """
    loss, metrics = clipped_value(x, clip_range_value=clip_range_value)
    return 2 * loss, {**metrics, "vf_loss": 2 * metrics["vf_loss"]}


def clipped_value(x: LossInputs, *, clip_range_value: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the value, the larger of the plain one and the one clipped near the old value.

    l = ½·max((v − R)², (clip(v, v_old − c, v_old + c) − R)²), v the new value, v_old the one at rollout, R the return,
    c the clip range; values are those of the state before each token.
    Args: x: needs mask, new_values, values and returns, the last two constants. clip_range_value: c, above 0.
    Returns: loss [s], 0 where masked out, divided by nothing; and per token: vf_loss, vpred, vf_clipfrac, return; all
        detached.
    Raises: ConfigError: clip_range_value not positive. DataError: a missing column.
    Source: the value loss of PPO (openai/baselines); agrees with Tunix. RL2's has no ½: clipped_value_without_half.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                new_values=torch.tensor([1.]), values=torch.tensor([0.]), returns=torch.tensor([2.]))
    >>> clipped_value(x)[0]  # max((1 - 2)**2, (0.2 - 2)**2) / 2
    tensor([1.6200])
    """
    if not clip_range_value > 0:
        raise ConfigError(f"clip_range_value must be positive, got {clip_range_value!r}")
    v, old, target = (
        masked_column(c, x.mask) for c in (x.need("new_values"), x.need("values").detach(), x.need("returns").detach())
    )
    free = (v - target).square()
    clipped = (v.clamp(old - clip_range_value, old + clip_range_value) - target).square()
    loss = 0.5 * torch.where(clipped > free, clipped, free)  # at the bound torch 2.14 halves the gradient of clamp
    metrics = {"return": target, "vf_clipfrac": clipped > free, "vf_loss": loss, "vpred": v}
    return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}


VALUE_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo": clipped_value,
    "ppo-rl2": clipped_value_without_half,
}
"""fn(x: LossInputs, **kw) -> (loss [s], metrics), by name."""
