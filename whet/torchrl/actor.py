"""Runs a TorchRL actor, or any module that returns logprobs: the policy's logprobs, entropies and mask.

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

__all__ = ["STRATEGIES", "ActorOutput", "get_padded", "run_actor"]

STRATEGIES = ("generic", "rlhf", "sft")
_MASKS = {"rlhf": ("masks", "all_assistant_mask"), "generic": ("masks", "all_attention_mask")}
_IGNORED = -100


@dataclass(frozen=True)
class ActorOutput:
    """The output of an actor for a batch."""

    logprobs: Tensor
    """[B, T], with gradient."""
    mask: Tensor
    """Bool [B, T]: the tokens that the masking strategy trains."""
    entropy: Callable[[Tensor], Tensor]
    """fn(Bool [B, T]) -> [n]: with gradient, of the tokens that are True, row by row."""


def get_padded(data: TensorDictBase, key: Any, value: float, *, side: str = "left", required: bool = True) -> Any:
    """Returns a tensor of the data with padded rows. Raises MissingKeyError if a required key is missing."""
    options = {"as_padded_tensor": True, "padding_side": side, "padding_value": value}
    try:
        tensor = data.get(key, None, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    except ValueError:  # a tensor where the key has a TensorDict: tokens, and not tokens.prompt
        tensor = None
    if tensor is None and required:
        keys = sorted(map(str, data.keys(True, True)))
        raise MissingKeyError(
            f"the loss reads {key!r}, which is not in the data; name the key with set_keys(...). The data have "
            f"{', '.join(keys)}"
        )
    return tensor


def run_actor(actor: Any, data: TensorDictBase, *, keys: Any, strategy: str, samples: int) -> ActorOutput:
    """Runs an actor.

    Args:
        actor: an object with get_dist(tensordict), such as an actor of TorchRL or tensordict (TorchRL's wrappers have a
            method for each masking strategy); or a function of the TensorDict that returns logprobs [B, T], the pair of
            logprobs and entropies, or a TensorDict with the key `sample_log_prob` and, optionally, `entropy`.
        keys: the loss's tensor_keys.
        strategy: sft, rlhf or generic.
        samples: the number of draws that estimate an entropy without a formula.
    Raises: ConfigError: the actor has neither form. MissingKeyError, DataError: tokens, logprobs or masks are missing.
    """
    distribution = _get_distribution(actor, data, strategy)
    if distribution is not None:
        return _read_distribution(distribution, data, keys=keys, strategy=strategy, samples=samples)
    if not callable(actor):
        raise ConfigError(
            f"actor_network is {type(actor).__name__}; give a module with get_dist(tensordict), or one that returns "
            "logprobs [B, T]"
        )
    logprobs, entropy = _read_output(actor(data.copy()), data, keys)
    if entropy is None:

        def entropies(mask: Tensor) -> Tensor:
            raise DataError(
                "the entropy bonus (on by default) needs the policy's entropy, and actor_network returned only "
                "logprobs; return the pair (logprobs, entropy), or set entropy_bonus=False"
            )

    else:

        def entropies(mask: Tensor) -> Tensor:
            return entropy[mask]

    return ActorOutput(logprobs, _get_mask(data, logprobs, keys, strategy), entropies)


def _get_distribution(actor: Any, data: TensorDictBase, strategy: str) -> Any:
    """Returns the actor's distribution; None if it has none."""
    for name in (f"_get_{strategy}_dist", "get_dist"):
        if hasattr(actor, name):
            return getattr(actor, name)(data)
    return None


def _read_distribution(dist: Any, data: TensorDictBase, *, keys: Any, strategy: str, samples: int) -> ActorOutput:
    action = get_padded(data, keys.action, _IGNORED)
    takes_ignored = hasattr(dist, "ignore_index")
    logprobs = dist.log_prob(action if takes_ignored else action.clamp(min=0))
    mask = getattr(dist, "mask", None)
    mask = _get_mask(data, logprobs, keys, strategy, action) if mask is None else mask.bool()

    def entropies(kept: Tensor) -> Tensor:
        logits = getattr(dist, "logits", None)
        if logits is not None and logits.shape[:-1] == kept.shape and getattr(dist, "position_level_masking", True):
            return entropy_of_logits(logits[kept])  # only of these tokens: no masked copy of all logits
        try:
            return dist.entropy()[kept]
        except NotImplementedError:
            draws = dist.sample((samples,))
            return -dist.log_prob(draws).mean(0)[kept]

    return ActorOutput(logprobs, mask, entropies)


def _read_output(output: Any, data: TensorDictBase, keys: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the logprobs and entropies that a module returned."""
    if is_tensor_collection(output):
        logprobs = get_padded(output, keys.sample_log_prob, 0.0, required=False)
        if logprobs is None or output.get(keys.sample_log_prob) is data.get(keys.sample_log_prob, None):
            raise MissingKeyError(
                f"actor_network wrote no {keys.sample_log_prob!r}; write the current logprobs there, or return them"
            )
        return logprobs, get_padded(output, "entropy", 0.0, required=False)
    logprobs, entropy = output if isinstance(output, tuple) else (output, None)
    if not isinstance(logprobs, Tensor):
        raise DataError(
            f"actor_network returned a {type(logprobs).__name__}; return logprobs [B, T], (logprobs, entropy) or a "
            "TensorDict"
        )
    return logprobs, entropy


def _get_mask(data: TensorDictBase, logprobs: Tensor, keys: Any, strategy: str, action: Tensor | None = None) -> Tensor:
    """Returns the mask of the trained tokens, for a distribution without one."""
    key = keys.mask or _MASKS.get(strategy)
    if key is not None:
        return get_padded(data, key, False).bool()
    mask = logprobs.detach().isfinite()
    action = get_padded(data, keys.action, _IGNORED, required=False) if action is None else action
    if action is not None:
        mask = mask & (action != _IGNORED)
    attended = get_padded(data, _MASKS["generic"], False, required=False)
    mask = mask if attended is None else mask & attended.bool()
    prompt = get_padded(data, ("tokens", "prompt"), _IGNORED, required=False)
    if prompt is not None and prompt.shape[-1] < mask.shape[-1]:
        place = torch.arange(mask.shape[-1], device=mask.device)
        mask = mask & (place >= prompt.shape[-1])
    return mask
