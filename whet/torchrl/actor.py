"""The current policy's logprobs, entropies and mask, from a TorchRL actor or from any module that yields logprobs.

Dim legend: B rows, T tokens of a row (prompt and response), V vocabulary, n requested tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.ops import entropy as entropy_of_logits
from whet.torchrl.errors import MissingKeyError

__all__ = ["STRATEGIES", "Scored", "padded", "score"]

STRATEGIES = ("generic", "rlhf", "sft")
_MASKS = {"rlhf": ("masks", "all_assistant_mask"), "generic": ("masks", "all_attention_mask")}
_IGNORED = -100


@dataclass(frozen=True)
class Scored:
    """The output of an actor for a batch."""

    logprobs: Tensor
    """[B, T], with gradient."""
    mask: Tensor
    """Bool [B, T]: the tokens that the masking strategy trains."""
    entropy: Callable[[Tensor], Tensor]
    """fn(Bool [B, T]) -> [n]: with gradient, of the tokens that are True, row by row."""


def padded(data: TensorDictBase, key: Any, value: float, *, side: str = "left", need: bool = True) -> Any:
    """A tensor of the data, rows of different lengths padded. Raises MissingKeyError: it is needed and not there."""
    options = {"as_padded_tensor": True, "padding_side": side, "padding_value": value}
    try:
        found = data.get(key, None, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    except ValueError:  # a tensor where the key has a TensorDict: tokens, and not tokens.prompt
        found = None
    if found is None and need:
        keys = sorted(map(str, data.keys(True, True)))
        raise MissingKeyError(
            f"the loss reads {key!r}, which is not in the data; name the key with set_keys(...). There are "
            f"{', '.join(keys)}"
        )
    return found


def score(actor: Any, data: TensorDictBase, *, keys: Any, strategy: str, samples: int) -> Scored:
    """Runs an actor.

    Args:
        actor: has get_dist(tensordict), as TorchRL's and tensordict's actors (of its wrappers the method of the
            masking strategy is called); or is called with the TensorDict and returns logprobs [B, T], the pair of
            logprobs and entropies, or a TensorDict with the key `sample_log_prob`, and `entropy` where it has that.
        keys: the loss's tensor_keys.
        strategy: sft, rlhf or generic.
        samples: of an entropy that has no formula.
    Raises: ConfigError: no such actor. MissingKeyError, DataError: what is missing of tokens, logprobs or masks.
    """
    distribution = _distribution(actor, data, strategy)
    if distribution is not None:
        return _of_distribution(distribution, data, keys=keys, strategy=strategy, samples=samples)
    if not callable(actor):
        raise ConfigError(
            f"actor_network is {type(actor).__name__}; give a module with get_dist(tensordict), or one that returns "
            "logprobs [B, T]"
        )
    logprobs, entropy = _yielded(actor(data.copy()), data, keys)
    if entropy is None:

        def entropies(mask: Tensor) -> Tensor:
            raise DataError(
                "the entropy bonus (on by default) needs the policy's entropy, and actor_network returned logprobs "
                "alone; return the pair (logprobs, entropy), or set entropy_bonus=False"
            )

    else:

        def entropies(mask: Tensor) -> Tensor:
            return entropy[mask]

    return Scored(logprobs, _mask(data, logprobs, keys, strategy), entropies)


def _distribution(actor: Any, data: TensorDictBase, strategy: str) -> Any:
    """The actor's distribution; None where it has none."""
    for name in (f"_get_{strategy}_dist", "get_dist"):
        if hasattr(actor, name):
            return getattr(actor, name)(data)
    return None


def _of_distribution(dist: Any, data: TensorDictBase, *, keys: Any, strategy: str, samples: int) -> Scored:
    action = padded(data, keys.action, _IGNORED)
    takes_ignored = hasattr(dist, "ignore_index")
    logprobs = dist.log_prob(action if takes_ignored else action.clamp(min=0))
    mask = getattr(dist, "mask", None)
    mask = _mask(data, logprobs, keys, strategy, action) if mask is None else mask.bool()

    def entropies(kept: Tensor) -> Tensor:
        logits = getattr(dist, "logits", None)
        if logits is not None and logits.shape[:-1] == kept.shape and getattr(dist, "position_level_masking", True):
            return entropy_of_logits(logits[kept])  # of these tokens alone: no masked copy of all logits
        try:
            return dist.entropy()[kept]
        except NotImplementedError:
            drawn = dist.sample((samples,))
            return -dist.log_prob(drawn).mean(0)[kept]

    return Scored(logprobs, mask, entropies)


def _yielded(found: Any, data: TensorDictBase, keys: Any) -> tuple[Tensor, Tensor | None]:
    """Logprobs and entropies of what a module returned."""
    if is_tensor_collection(found):
        logprobs = padded(found, keys.sample_log_prob, 0.0, need=False)
        if logprobs is None or found.get(keys.sample_log_prob) is data.get(keys.sample_log_prob, None):
            raise MissingKeyError(
                f"actor_network wrote no {keys.sample_log_prob!r}; write the current logprobs there, or return them"
            )
        return logprobs, padded(found, "entropy", 0.0, need=False)
    logprobs, entropy = found if isinstance(found, tuple) else (found, None)
    if not isinstance(logprobs, Tensor):
        raise DataError(
            f"actor_network returned a {type(logprobs).__name__}; return logprobs [B, T], (logprobs, entropy) or a "
            "TensorDict"
        )
    return logprobs, entropy


def _mask(data: TensorDictBase, logprobs: Tensor, keys: Any, strategy: str, action: Tensor | None = None) -> Tensor:
    """The trained tokens, where no distribution has a mask."""
    key = keys.mask or _MASKS.get(strategy)
    if key is not None:
        return padded(data, key, False).bool()
    mask = logprobs.detach().isfinite()
    action = padded(data, keys.action, _IGNORED, need=False) if action is None else action
    if action is not None:
        mask = mask & (action != _IGNORED)
    attended = padded(data, _MASKS["generic"], False, need=False)
    mask = mask if attended is None else mask & attended.bool()
    prompt = padded(data, ("tokens", "prompt"), _IGNORED, need=False)
    if prompt is not None and prompt.shape[-1] < mask.shape[-1]:
        place = torch.arange(mask.shape[-1], device=mask.device)
        mask = mask & (place >= prompt.shape[-1])
    return mask
