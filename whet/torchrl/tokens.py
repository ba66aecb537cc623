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
from whet.torchrl.actor import Scored, padded
from whet.torchrl.errors import HasGradientError, MissingKeyError

__all__ = ["Keys", "Keys2025", "Tokens", "read_tokens", "reference_logprobs"]

log = logging.getLogger("whet")


@dataclass
class Keys:
    """The keys that a loss reads: TorchRL's names and defaults, and `mask`, for actors without one."""

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
    """A padded batch: everything [B, T], a number at masked-out places has no meaning."""

    mask: Tensor
    """Bool: the tokens that are trained."""
    logprobs: Tensor
    """The current policy's, with gradient."""
    sampled: Tensor
    """The logprobs recorded when sampling."""
    advantages: Tensor

    @property
    def share(self) -> Tensor:
        """The trained tokens as a share of all places."""
        return self.mask.sum() / self.mask.numel()

    def inputs(self) -> LossInputs:
        """The trained tokens end to end, as whet's losses take them: [s]; the sampler is the old policy."""
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

    def grid(self, column: Tensor) -> Tensor:
        """[B, T] of a column [s], 0 at tokens that are not trained."""
        return column.new_zeros(self.mask.shape).masked_scatter(self.mask, column)

    def only(self, kept: Tensor) -> Tokens:
        """The trained tokens that are True in a column Bool [s]."""
        return replace(self, mask=self.grid(kept))


def read_tokens(data: TensorDictBase, scored: Scored, keys: Any, *, strategy: str, compat: str) -> Tokens:
    """The tokens of a batch, and which are trained.

    Trained is what the actor's mask says and has a recorded logprob that is finite; with compat="0.9" what has a
    recorded logprob other than 0. Under the strategy "generic" the first token of a row is left out where none was
    recorded.

    Raises: MissingKeyError: no advantage, no recorded logprobs. HasGradientError: those have a gradient. DataError:
        shapes that do not fit; an advantage of a trained token that is not finite.
    """
    advantages = padded(data, keys.advantage, 0.0)
    sampled = _sampled(data, keys, scored.logprobs)
    if sampled.requires_grad:
        raise HasGradientError(f"{keys.sample_log_prob!r} has a gradient; record it under torch.no_grad()")
    if sampled.shape != scored.logprobs.shape:
        raise DataError(
            f"the actor's logprobs have the shape {list(scored.logprobs.shape)}, those recorded under "
            f"{keys.sample_log_prob!r} {list(sampled.shape)}; both are of the whole row, prompt and response, padded "
            "on the left: record them with the same actor and masking_strategy, or name another key with set_keys"
        )
    if compat == "0.9":
        mask = sampled != 0
    else:
        mask = scored.mask & sampled.isfinite()
        first = _unrecorded(sampled, mask)
        if strategy == "generic":  # nothing stands before it, so it has no distribution
            mask = mask & ~first
        else:
            sampled = torch.where(first, scored.logprobs.detach().to(sampled.dtype), sampled)
    tokens = Tokens(mask, scored.logprobs, sampled, _per_token(advantages, mask))
    _check_trained(tokens.advantages[mask], keys)
    return tokens


def reference_logprobs(data: TensorDictBase, key: Any, tokens: Tokens, *, side: str, value: float) -> Tensor:
    """The reference's logprobs of the trained tokens: [s]. Raises MissingKeyError, DataError: none, another shape."""
    found = padded(data, key, value, side=side)
    found = found.squeeze(-1) if found.ndim == tokens.mask.ndim + 1 else found
    if found.shape != tokens.mask.shape:
        raise DataError(
            f"{key!r} has the shape {list(found.shape)}, the actor's logprobs {list(tokens.mask.shape)}; they must be "
            "of the same tokens, [B, T] or [B, T, 1]"
        )
    return found[tokens.mask].detach()


def _check_trained(advantages: Tensor, keys: Any) -> None:
    """Raises DataError for an advantage that would make every weight NaN; a warning where nothing is trained."""
    if not len(advantages):
        log.warning(
            "no token of the batch is trained, so the loss is 0: the mask of the actor or of the data is False "
            "everywhere, or no logprob was recorded"
        )
    elif bad := int((~advantages.isfinite()).sum()):
        raise DataError(
            f"{bad} of the {len(advantages)} trained tokens have an advantage ({keys.advantage!r}) that is NaN or "
            "infinite, and one update with it makes every weight NaN; leave their rows out, or set it to 0: a group of "
            "one reward, or a reward that is NaN, is what mostly makes it"
        )


def _sampled(data: TensorDictBase, keys: Any, current: Tensor) -> Tensor:
    """The recorded logprobs; those of the response alone are laid at the right end, and NaN stands before them."""
    found = padded(data, keys.sample_log_prob, 0.0, need=False)
    if found is None and keys.sample_log_prob == ("log_probs", "full"):
        response = padded(data, ("log_probs", "response"), float("nan"), need=False)
        if response is not None and response.shape[-1] <= current.shape[-1]:
            return torch.nn.functional.pad(response, (current.shape[-1] - response.shape[-1], 0), value=float("nan"))
    if found is None:
        raise MissingKeyError(
            f"the loss reads {keys.sample_log_prob!r}, the logprobs recorded when sampling, which are not in the data; "
            "set return_log_probs=True on the actor that generates, or name the key with "
            "set_keys(sample_log_prob=...)"
        )
    return found.squeeze(-1) if found.ndim == current.ndim + 1 else found


def _unrecorded(sampled: Tensor, mask: Tensor) -> Tensor:
    """The first trained token of each row where all those have a recorded logprob of exactly 0.0: Bool [B, T].

    TransformersWrapper records 0.0 for the first generated token, and for the first of a whole row, whatever its
    logprob; the current one takes its place. Where 0.0 were true for every row, that is 0 too, and nothing changes.
    """
    first = mask & (mask.cumsum(-1) == 1)
    if not first.any() or (sampled[first] != 0).any():
        return torch.zeros_like(first)
    log.debug("the first recorded logprob of every row is exactly 0.0: taken as not recorded")
    return first


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B, T] of advantages [B], [B, 1], [B, T], [B, 1, 1] or [B, T, 1]. Raises DataError: another shape."""
    shape = advantages.shape
    found = advantages.squeeze(-1) if advantages.ndim == mask.ndim + 1 else advantages
    found = found.unsqueeze(-1) if found.ndim == mask.ndim - 1 else found
    if found.ndim != mask.ndim or found.shape[-1] not in (1, mask.shape[-1]) or found.shape[:-1] != mask.shape[:-1]:
        raise DataError(
            f"the advantages have the shape {list(shape)} for tokens {list(mask.shape)}; give one for each row, "
            "[B, 1, 1], or for each token, [B, T, 1]"
        )
    return found.expand(mask.shape)
