"""Reads the trained tokens of a padded TensorDict as columns for whet's losses.

Dim legend: B rows, T tokens of a row, s tokens that are trained, row by row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from whet.errors import DataError
from whet.ops import LossInputs
from whet.torchrl.actor import ActorOutput, get_padded
from whet.torchrl.errors import HasGradientError, MissingKeyError

__all__ = ["Keys", "Keys2025", "Tokens", "read_tokens", "reference_logprobs"]

log = logging.getLogger("whet")


@dataclass
class Keys:
    """The keys that a loss reads: TorchRL's names and defaults, and `mask`, for an actor without a mask."""

    advantage: Any = "advantage"
    action: Any = ("tokens", "full")
    sample_log_prob: Any = ("log_probs", "full")
    ref_log_probs: Any = ("next", "ref_log_probs", "full")
    mask: Any = None


@dataclass
class Keys2025:
    """The keys of TorchRL in mid-2025, before the release of 0.9."""

    advantage: Any = "advantage"
    action: Any = "tokens_response"
    sample_log_prob: Any = "log_probs"
    ref_log_prob: Any = ("next", "ref_log_prob")
    mask: Any = None

    @property
    def ref_log_probs(self) -> Any:
        """Today's name of the key."""
        return self.ref_log_prob


@dataclass(frozen=True)
class Tokens:
    """A padded batch: each tensor is [B, T], and its values at masked-out positions have no meaning."""

    mask: Tensor
    """Bool: the tokens that are trained."""
    logprobs: Tensor
    """The current policy's, with gradient."""
    sampled: Tensor
    """The logprobs recorded when sampling."""
    advantages: Tensor

    @property
    def share(self) -> Tensor:
        """The share of positions with a trained token."""
        return self.mask.sum() / self.mask.numel()

    def inputs(self) -> LossInputs:
        """Returns the trained tokens as columns [s] for whet's losses; the sampler is the old policy."""
        rows = self.mask.nonzero()[:, 0]
        return LossInputs(
            sequence=rows,
            mask=torch.ones_like(rows, dtype=torch.bool),
            logprobs=self.logprobs[self.mask],
            old_logprobs=self.sampled[self.mask],
            sampler_logprobs=self.sampled[self.mask],
            advantages=self.advantages[self.mask],
            num_sequences=len(self.mask),
        )

    def to_grid(self, column: Tensor) -> Tensor:
        """Returns a column [s] as [B, T], with 0 at tokens that are not trained."""
        return column.new_zeros(self.mask.shape).masked_scatter(self.mask, column)

    def select(self, chosen: Tensor) -> Tokens:
        """Keeps only the trained tokens that are True in a column, Bool [s]."""
        return replace(self, mask=self.to_grid(chosen))


def read_tokens(data: TensorDictBase, actor_output: ActorOutput, keys: Any, *, strategy: str, compat: str) -> Tokens:
    """Reads the tokens of a batch and decides which of them are trained.

    A token is trained if the actor's mask has it and its recorded logprob is finite; with compat="0.9", if its recorded
    logprob is not 0. Under the strategy "generic" the first token of a row is left out if it has no recorded logprob.

    Raises: MissingKeyError: no advantage, or no recorded logprobs. HasGradientError: the recorded logprobs have a
        gradient. DataError: shapes that do not fit, or an advantage of a trained token that is not finite.
    """
    advantages = get_padded(data, keys.advantage, 0.0)
    sampled = _sampled(data, keys, actor_output.logprobs)
    if sampled.requires_grad:
        raise HasGradientError(f"{keys.sample_log_prob!r} has a gradient; record it under torch.no_grad()")
    if sampled.shape != actor_output.logprobs.shape:
        raise DataError(
            f"the actor's logprobs have the shape {list(actor_output.logprobs.shape)}, those recorded under "
            f"{keys.sample_log_prob!r} {list(sampled.shape)}; both must be of prompt and response, "
            "padded left: record them with the same actor and masking_strategy, or name another key with set_keys"
        )
    if compat == "0.9":
        mask = sampled != 0
    else:
        mask = actor_output.mask & sampled.isfinite()
        first = _unrecorded(sampled, mask)
        if strategy == "generic":  # no token precedes it, so it has no distribution
            mask = mask & ~first
        else:
            sampled = torch.where(first, actor_output.logprobs.detach().to(sampled.dtype), sampled)
    tokens = Tokens(mask, actor_output.logprobs, sampled, _per_token(advantages, mask))
    _check_trained(tokens.advantages[mask], keys)
    return tokens


def reference_logprobs(data: TensorDictBase, key: Any, tokens: Tokens, *, side: str, value: float) -> Tensor:
    """Returns the reference's logprobs of the trained tokens: [s].

    Raises: MissingKeyError: there are none. DataError: they have another shape.
    """
    logprobs = get_padded(data, key, value, side=side)
    logprobs = logprobs.squeeze(-1) if logprobs.ndim == tokens.mask.ndim + 1 else logprobs
    if logprobs.shape != tokens.mask.shape:
        raise DataError(
            f"{key!r} has the shape {list(logprobs.shape)}, the actor's logprobs {list(tokens.mask.shape)}; they must "
            "be of the same tokens, [B, T] or [B, T, 1]"
        )
    return logprobs[tokens.mask].detach()


def _check_trained(advantages: Tensor, keys: Any) -> None:
    """Raises DataError for an advantage that would make every weight NaN; warns if no token is trained."""
    if not len(advantages):
        log.warning(
            "no token of the batch is trained, so the loss is 0: the mask of the actor or of the data is False "
            "everywhere, or no logprob was recorded"
        )
    elif bad := int((~advantages.isfinite()).sum()):
        raise DataError(
            f"{bad} of the {len(advantages)} trained tokens have an advantage ({keys.advantage!r}) that is NaN or "
            "infinite, and one update with it makes every weight NaN; leave their rows out, or set it to 0. Usual "
            "causes are a group with a single reward and a reward that is NaN"
        )


def _sampled(data: TensorDictBase, keys: Any, current: Tensor) -> Tensor:
    """Returns the recorded logprobs. Those of a response are put at the right end of the row, with NaN before them."""
    logprobs = get_padded(data, keys.sample_log_prob, 0.0, required=False)
    if logprobs is None and keys.sample_log_prob == ("log_probs", "full"):
        response = get_padded(data, ("log_probs", "response"), float("nan"), required=False)
        if response is not None and response.shape[-1] <= current.shape[-1]:
            return torch.nn.functional.pad(response, (current.shape[-1] - response.shape[-1], 0), value=float("nan"))
    if logprobs is None:
        raise MissingKeyError(
            f"the loss reads {keys.sample_log_prob!r}, the logprobs recorded when sampling, which are not in the data; "
            "set return_log_probs=True on the actor that generates, or name the key with "
            "set_keys(sample_log_prob=...)"
        )
    return logprobs.squeeze(-1) if logprobs.ndim == current.ndim + 1 else logprobs


def _unrecorded(sampled: Tensor, mask: Tensor) -> Tensor:
    """Bool [B, T]: the first trained token of each row, if all of these have a recorded logprob of exactly 0.0.

    TransformersWrapper records 0.0 for the first generated token and for the first token of a whole row, whatever their
    logprobs are. The current logprob replaces it. If 0.0 was right for every row, the current logprob is 0 as well.
    """
    first = mask & (mask.cumsum(-1) == 1)
    if not first.any() or (sampled[first] != 0).any():
        return torch.zeros_like(first)
    log.debug("the first recorded logprob of every row is exactly 0.0: treated as not recorded")
    return first


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Expands advantages [B], [B, 1], [B, T], [B, 1, 1] or [B, T, 1] to [B, T]. Raises DataError: another shape."""
    shape = advantages.shape
    columns = advantages.squeeze(-1) if advantages.ndim == mask.ndim + 1 else advantages
    columns = columns.unsqueeze(-1) if columns.ndim == mask.ndim - 1 else columns
    fits = columns.ndim == mask.ndim and columns.shape[:-1] == mask.shape[:-1]
    if not fits or columns.shape[-1] not in (1, mask.shape[-1]):
        raise DataError(
            f"the advantages have the shape {list(shape)} for tokens {list(mask.shape)}; give one for each row, "
            "[B, 1, 1], or for each token, [B, T, 1]"
        )
    return columns.expand(mask.shape)
