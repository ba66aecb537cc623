"""TorchRL's GRPO, DAPO and CISPO as modules over a TensorDict, computed by whet's losses.

    loss = Σ w_t (surrogate_t − c H_t + β k3(π, π_ref)_t + β' k3(π, π_sampler)_t),    w from `aggregation`

Dim legend: B rows, T tokens of a row (prompt and response), s tokens that are trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from whet.errors import ConfigError, lookup_error
from whet.ops import (
    LossInputs,
    aggregate,
    cispo,
    clipped_surrogate,
    effective_sample_size,
    kl_divergence,
    masked_mean,
    sampler_kl_mask,
    sampling_metrics,
    token_weights,
)
from whet.ops.policy_losses.base import LossOutput
from whet.torchrl.actor import STRATEGIES, ActorOutput, run_actor
from whet.torchrl.output import CISPOLossOutput, DAPOLossOutput, GRPOLossOutput, LLMLossOutput
from whet.torchrl.tokens import Keys, Keys2025, Tokens, read_tokens, reference_logprobs
from whet.torchrl.versions import check_compat

__all__ = ["DAPO", "CISPOLoss", "GRPOLoss"]

_AGGREGATIONS = {"prompt_mean": "sequence-mean-token-mean", "token_mean": "token-mean"}
_OPTIONS = (
    "actor_network", "aggregation", "clip_epsilon", "compat", "device", "entropy_bonus", "entropy_coeff",
    "kl_mask_threshold", "kl_to_inference_coeff", "kl_to_ref_coeff", "masking_strategy", "ref_log_prob_padding_side",
    "ref_log_prob_padding_value", "reduction", "samples_mc_entropy",
)  # fmt: skip
_DEFAULTS_0_14 = {
    "kl_mask_threshold": None,
    "aggregation": "token_mean",
    "masking_strategy": "sft",
    "ref_log_prob_padding_side": "left",
    "ref_log_prob_padding_value": 0.0,
}
"""Option that compat="0.9" does not have -> its fixed value."""


class GRPOLoss(nn.Module):
    """The clipped surrogate of GRPO over a TensorDict, with TorchRL's options, keys and fields.

    l_t = −min(r_t A_t, clip(r_t, 1 − ε_low, 1 + ε_high) A_t), r = π/π_sampler of the token.

    Args:
        actor_network: gives the current logprobs: see whet.torchrl.actor.run_actor.
        clip_epsilon: ε, or (ε_low, ε_high). They can be set later: clip_epsilon_low and clip_epsilon_high.
        kl_mask_threshold: tokens with ½(log π − log π_sampler)² above it are left out of every part of the loss.
        aggregation: token_mean, prompt_mean (a mean over rows of means over tokens) or none.
        entropy_bonus, entropy_coeff: on by default; samples_mc_entropy: draws for an entropy without a formula.
        reduction: mean, none (as aggregation) or sum (over trained tokens).
        kl_to_ref_coeff, kl_to_inference_coeff: β, β'; None = without that term.
        device: of the clip range; None = the actor's.
        masking_strategy: sft (the response), rlhf (the assistant's tokens) or generic (all tokens, except a first one
            without a recorded logprob).
        ref_log_prob_padding_side, ref_log_prob_padding_value: for reference logprobs of different lengths.
        compat: the version of TorchRL to follow: "0.14", or "0.9" for the development version of mid-2025, which has
            other keys and takes means over all positions, padding included. The release 0.9.0 is like "0.14".
    Returns: GRPOLossOutput; the fields that begin with loss_ sum to the loss.
    A subclass may define TorchRL's `_compute_policy_objective(log_weight, advantage)`, [B, T, 1] each. It returns the
    loss of each token and the clip fraction.

    Raises: ConfigError: an unknown option or value; gamma or clip_value, which need a critic.
        When called: MissingKeyError, DataError: the data lack a key, or do not fit.
    Source: agrees with TorchRL 0.14.1's GRPOLoss in loss_objective and its gradient; docs/from-torchrl.md lists where
        the other fields differ, and why. Log-ratios are clipped to ±20.

    >>> from tensordict import TensorDict
    >>> data = TensorDict({"tokens": {"full": torch.tensor([[3, 4]])}, "advantage": torch.ones(1, 1, 1),
    ...                    "log_probs": {"full": torch.tensor([[-1., -2.]])}}, [1])
    >>> out = GRPOLoss(lambda data: torch.tensor([[-1., -1.]], requires_grad=True), entropy_bonus=False)(data)
    >>> out.loss_objective, out.clip_fraction  # r = 1 and e, which is cut to 1.2
    (tensor(-1.1000, grad_fn=<SumBackward0>), tensor(0.5000))
    """

    output_type: type[LLMLossOutput] = GRPOLossOutput
    default_clip: float | tuple[float, float] = 0.2
    bounded: bool = True
    """Whether ε_low must be below 1, so that the ratio has a lower bound."""
    clip_epsilon_low: Tensor
    clip_epsilon_high: Tensor

    def __init__(
        self,
        actor_network: Any = None,
        *,
        clip_epsilon: float | tuple[float, float] | None = None,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = "token_mean",
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        reduction: str | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: str = "sft",
        ref_log_prob_padding_side: str = "left",
        ref_log_prob_padding_value: float = 0.0,
        compat: str = "0.14",
        **unknown: Any,
    ) -> None:
        super().__init__()
        _check_unknown(unknown)
        check_compat(compat)
        self.actor_network = actor_network
        self.kl_mask_threshold, self.aggregation = kl_mask_threshold, aggregation or "token_mean"
        self.entropy_bonus, self.entropy_coeff, self.samples_mc_entropy = (
            entropy_bonus,
            entropy_coeff,
            samples_mc_entropy,
        )
        self.reduction = reduction or "mean"
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.masking_strategy = masking_strategy
        self.ref_log_prob_padding_side = ref_log_prob_padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        self.compat = compat
        self._check()
        low, high = _clip_range(self.default_clip if clip_epsilon is None else clip_epsilon, bounded=self.bounded)
        if device is None and isinstance(actor_network, nn.Module):
            device = next((parameter.device for parameter in actor_network.parameters()), None)
        self.register_buffer("clip_epsilon_low", torch.tensor(low, device=device))
        self.register_buffer("clip_epsilon_high", torch.tensor(high, device=device))
        self.tensor_keys = (Keys2025 if compat == "0.9" else Keys)()

    def _check(self) -> None:
        """Raises ConfigError for a value out of range, or one that the release of `compat` lacks."""
        for kind, value, known in (
            ("aggregation", self.aggregation, [*_AGGREGATIONS, "none"]),
            ("reduction", self.reduction, ["mean", "none", "sum"]),
            ("masking_strategy", self.masking_strategy, STRATEGIES),
            ("ref_log_prob_padding_side", self.ref_log_prob_padding_side, ["left", "right"]),
        ):
            if value not in known:
                raise lookup_error(kind, value, known)
        for name in ("entropy_coeff", "kl_to_ref_coeff", "kl_to_inference_coeff", "kl_mask_threshold"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ConfigError(f"{name} {value!r} must be a number of at least 0")
        if self.kl_mask_threshold == 0:
            raise ConfigError("kl_mask_threshold 0 must be positive; None keeps all tokens")
        if self.compat == "0.9":
            for name, default in _DEFAULTS_0_14.items():
                if getattr(self, name) != default:
                    raise ConfigError(f"{name} is not an option of compat='0.9'; leave out compat, or the option")

    def __setattr__(self, name: str, value: Any) -> None:
        """The clip range may be set to a number, as a schedule does."""
        if name in ("clip_epsilon_low", "clip_epsilon_high") and isinstance(value, int | float):
            getattr(self, name).fill_(value)
        else:
            super().__setattr__(name, value)

    # ---- keys ----------------------------------------------------------------------------------------------------

    def set_keys(self, **keys: Any) -> None:
        """Sets the keys of the entries to read, e.g. advantage="adv"; None restores a default.

        Raises: ConfigError: an unknown entry.
        """
        known = vars(self.tensor_keys)
        for name, key in keys.items():
            if name not in known:
                raise lookup_error("key", name, known)
            setattr(self.tensor_keys, name, vars(type(self.tensor_keys)())[name] if key is None else key)

    @property
    def in_keys(self) -> list[Any]:
        """The keys to read: the actor's, and those of the loss."""
        loss_keys = [key for key in vars(self.tensor_keys).values() if key is not None]
        return list(dict.fromkeys([*getattr(self.actor_network, "in_keys", []), *loss_keys]))

    @property
    def out_keys(self) -> list[str]:
        """The fields of the output with these options."""
        entropy = ["entropy", "loss_entropy"] if self.entropy_bonus else []
        ref = ["loss_kl_to_ref", "kl_to_ref"] if self.kl_to_ref_coeff else []
        sampler = ["loss_kl_to_inference", "kl_to_inference"] if self.kl_to_inference_coeff is not None else []
        return ["loss_objective", "clip_fraction", "kl_approx", "ESS", *entropy, *ref, *sampler]

    # ---- the loss ------------------------------------------------------------------------------------------------

    @property
    def _clip_bounds(self) -> tuple[Tensor, Tensor]:
        """The clip range of a log-ratio, for a subclass with a `_compute_policy_objective` as TorchRL's."""
        return (-self.clip_epsilon_low).log1p(), self.clip_epsilon_high.log1p()

    def surrogate(self, x: LossInputs, low: float, high: float) -> LossOutput:
        """Returns the loss of each token before aggregation, [s], and whet's metrics of it."""
        return clipped_surrogate(x, epsilon=low, epsilon_high=high)

    def forward(self, tensordict: TensorDictBase) -> LLMLossOutput:
        """Returns the loss of a batch [B]. Returns and Raises: see the class."""
        keys = self.tensor_keys
        actor_output = run_actor(
            self.actor_network,
            tensordict,
            keys=keys,
            strategy=self.masking_strategy,
            samples=self.samples_mc_entropy,
        )
        trained = read_tokens(tensordict, actor_output, keys, strategy=self.masking_strategy, compat=self.compat)
        sampling, x = sampling_metrics(trained.inputs()), trained.inputs()
        kept = trained
        if self.kl_mask_threshold is not None:
            kept = trained.select(sampler_kl_mask(x, kl_mask_threshold=self.kl_mask_threshold).bool())
            x = kept.inputs()
        low, high = float(self.clip_epsilon_low), float(self.clip_epsilon_high)
        ratio = sampling["sampling/weight"]
        outside = ((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype)
        share = trained.share if self.compat == "0.9" else 1.0
        user_objective = getattr(self, "_compute_policy_objective", None)
        if user_objective is None:
            loss, clipped = self.surrogate(x, low, high)[0], _mean(outside) * share
        else:  # the method for users' losses in TorchRL: [B, T, 1] in and out
            log_ratio = kept.to_grid(x.need("logprobs") - x.need("old_logprobs"))
            grid, clipped = user_objective(log_ratio.unsqueeze(-1), kept.advantages.unsqueeze(-1))
            loss = grid.squeeze(-1)[kept.mask]
        fields = {
            "loss_objective": self._objective(loss, kept),
            "clip_fraction": clipped,
            "kl_approx": _mean(sampling["sampling/kl_approx"]) * share,
            "ESS": self._ess(kept).to(ratio.dtype),
        }
        if self.entropy_bonus:
            fields |= self._entropy(actor_output, trained, kept)
        if self.kl_to_ref_coeff:
            side, value = self.ref_log_prob_padding_side, self.ref_log_prob_padding_value
            ref = reference_logprobs(tensordict, keys.ref_log_probs, kept, side=side, value=value)
            fields |= self._kl("kl_to_ref", self.kl_to_ref_coeff, ref, kept)
        if self.kl_to_inference_coeff is not None:
            fields |= self._kl("kl_to_inference", self.kl_to_inference_coeff, x.need("sampler_logprobs"), kept)
        return self.output_type(**fields)  # pyright: ignore[reportArgumentType]

    def _entropy(self, actor_output: ActorOutput, trained: Tokens, kept: Tokens) -> dict[str, Tensor]:
        """Returns the entropy bonus, and the mean entropy over the trained tokens; with compat="0.9" over all
        positions.
        """
        if self.compat == "0.9":
            trained = kept = replace(trained, mask=torch.ones_like(trained.mask))
        entropy = actor_output.entropy(trained.mask)
        loss = self._aggregate(-self.entropy_coeff * trained.to_grid(entropy)[kept.mask], kept)
        return {"entropy": _mean(entropy.detach()), "loss_entropy": loss}

    def _kl(self, name: str, coeff: float, other: Tensor, kept: Tokens) -> dict[str, Tensor]:
        """Returns a divergence (k3) at the tokens of the loss, and its term of the loss; with compat="0.9" always a
        mean.
        """
        kl = kl_divergence(kept.logprobs[kept.mask], other, mode="k3")
        loss = _mean(kl) if self.compat == "0.9" else self._aggregate(kl, kept)
        return {name: _mean(kl.detach()), f"loss_{name}": coeff * loss}

    def _ess(self, kept: Tokens) -> Tensor:
        """Returns the effective sample size of the tokens; with compat="0.9" of the rows at each position, then
        averaged.
        """
        x = kept.inputs()
        weight = sampling_metrics(x)["sampling/weight"]
        if self.compat != "0.9":
            return effective_sample_size(weight, x.mask)
        weights = torch.where(kept.mask, kept.to_grid(weight), 1.0)
        everywhere = torch.ones_like(weights[:, 0], dtype=torch.bool)
        each = torch.stack([effective_sample_size(column, everywhere) for column in weights.unbind(1)])
        return {"none": each, "sum": each.sum(), "mean": each.mean()}[self.reduction]

    def _objective(self, loss: Tensor, kept: Tokens) -> Tensor:
        """Aggregates the surrogate [s]; with compat="0.9" untrained positions count too, with a ratio of 1."""
        if self.compat != "0.9" or type(self).surrogate is not GRPOLoss.surrogate:
            return self._aggregate(loss, kept)
        rest = torch.where(kept.mask, 0.0, -kept.advantages)
        return self._aggregate(loss, kept) + {"none": rest, "sum": rest.sum(), "mean": rest.mean()}[self.reduction]

    def _aggregate(self, loss: Tensor, kept: Tokens) -> Tensor:
        """Aggregates a loss [s] to 0-d, or, per token, spreads it to [B, T, 1] (with compat="0.9" to [B, T])."""
        if "none" in (self.aggregation, self.reduction):
            return kept.to_grid(loss) if self.compat == "0.9" else kept.to_grid(loss).unsqueeze(-1)
        rows = kept.mask.nonzero()[:, 0]
        every = torch.ones_like(rows, dtype=torch.bool)
        if self.reduction == "sum":
            weights = every.double()
        elif self.compat == "0.9":
            weights = every.double() / kept.mask.numel()
        else:
            mode = _AGGREGATIONS[self.aggregation]
            weights = token_weights(every, rows, mode, num_units=len(kept.mask))
        return aggregate(loss, weights)


class DAPO(GRPOLoss):
    """GRPOLoss with DAPO's range, (0.2, 0.28), and its mean over tokens. Its dynamic sampling is MCAdvantage's.

    Source: arXiv:2503.14476. TorchRL's DAPO is its GRPOLoss, with ε = 0.2 on both sides.

    >>> DAPO(None).clip_epsilon_high
    tensor(0.2800)
    """

    output_type = DAPOLossOutput
    default_clip = (0.2, 0.28)


class CISPOLoss(GRPOLoss):
    """The policy gradient weighted by the clipped ratio: a clipped token keeps its gradient.

    l_t = −sg(clip(r_t, 1 − ε_low, 1 + ε_high)) A_t log π_t, sg without gradient. Its value estimates nothing.

    Args: as GRPOLoss; clip_epsilon is (1, 0.2) by default, without a lower bound.
    Source: MiniMax-M1, arXiv:2506.13585. TorchRL's CISPOLoss is −clip(r) A, which has no gradient at a clipped token.

    >>> CISPOLoss(None).clip_epsilon_low
    tensor(1.)
    """

    output_type = CISPOLossOutput
    default_clip = (1.0, 0.2)
    bounded = False

    def surrogate(self, x: LossInputs, low: float, high: float) -> LossOutput:
        """Returns the loss of each token before aggregation, [s], and whet's metrics of it."""
        return cispo(x, epsilon=high, cispo_epsilon_low=low)


def _mean(x: Tensor) -> Tensor:
    """Returns the mean; 0 for an empty tensor."""
    return masked_mean(x, torch.ones_like(x, dtype=torch.bool))


def _clip_range(clip: Any, *, bounded: bool) -> tuple[float, float]:
    """(ε_low, ε_high) of a number or a pair; `bounded`: ε_low is below 1. Raises ConfigError: out of range."""
    pair = clip if isinstance(clip, tuple | list) else (clip, clip)
    try:
        low, high = (float(v) for v in pair)
    except (TypeError, ValueError):
        low = high = -1.0
    if low < 0 or high < 0 or low > 1 or (low == 1 and bounded):
        raise ConfigError(
            f"clip_epsilon {clip!r} must be a number, or a pair (low, high): low at least 0 and less than 1, so that "
            "the ratio has a lower bound above 0, high at least 0"
            if bounded
            else f"clip_epsilon {clip!r} must be a number, or a pair (low, high): low from 0 to 1, high at least 0"
        )
    return low, high


def _check_unknown(unknown: dict[str, Any]) -> None:
    """Raises ConfigError for unknown options, and for gamma and clip_value unless they are None."""
    for name, value in unknown.items():
        if name not in ("gamma", "clip_value"):
            raise lookup_error("option of the loss", name, _OPTIONS)
        if value is not None:
            raise ConfigError(
                f"{name}={value!r}: the loss has no critic, so it would have no effect; leave it out (discounting and "
                "value clipping are PPO's: whet.PPOConfig has gamma and clip_range_value)"
            )
