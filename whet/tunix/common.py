"""The helpers of Tunix's rl.common, over tensors: masks, positions, log-probabilities, scores, divergences, losses.

They take padded arrays, [B, P] left-padded prompts and [B, C] right-padded completions, of torch, numpy or lists, and a
model where Tunix takes its graph and state. A run does not call them: it computes on sequences without padding.

Dim legend: B rows, P prompt, C completion, T = P + C, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import ConfigError, DataError, lookup_error
from whet.models.modes import transformers_attention
from whet.ops import LOSS_AGG_MODES, aggregate, kl_divergence, token_weights
from whet.ops import entropy as entropy_of_logits
from whet.tunix.padded import TrainExample, completion_mask

__all__ = [
    "TrainExample",
    "aggregate_loss",
    "build_positions_from_mask",
    "compute_kl_divergence",
    "compute_per_token_logps",
    "compute_score",
    "get_per_token_logps",
    "make_causal_attn_mask",
    "make_completion_mask",
    "np_make_completion_mask",
    "pad_to_length",
    "process_ids",
    "reduced_loss_agg",
    "selective_log_softmax",
]

_KL = ("kl", "mse_kl", "low_var_kl")


# ---- masks and positions ---------------------------------------------------------------------------------------------


def make_completion_mask(completion_ids: Any, eos_tok: int = 0) -> Tensor:
    """1 up to and including the first end id; a row without an end id has 1 everywhere: Int [B, C].

    >>> make_completion_mask([[1, 2, 0, 0], [1, 2, 3, 4]]).tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    return completion_mask(torch.as_tensor(completion_ids), [eos_tok]).int()


def np_make_completion_mask(completion_ids: Any, eos_tok: int = 0) -> np.ndarray:
    """Returns the same as a numpy array: int32 [B, C]."""
    return make_completion_mask(np.asarray(completion_ids), eos_tok).numpy()


def build_positions_from_mask(input_mask: Any) -> Tensor:
    """Returns the position of each token among the True tokens of its row, 0 before the first of them: Int [B, T].

    >>> build_positions_from_mask([[0, 1, 1, 1]]).tolist()
    [[0, 0, 1, 2]]
    """
    positions = torch.as_tensor(input_mask).long().cumsum(-1)
    return positions - (positions >= 1).long()


def make_causal_attn_mask(input_mask: Any) -> Tensor:
    """Returns the causal attention mask: Bool [B, T, T], True where a query may attend to a key that is not padding.

    Raises: DataError: the mask is not [B, T].

    >>> make_causal_attn_mask([[0, 1]]).long().tolist()
    [[[0, 0], [0, 1]]]
    """
    mask = torch.as_tensor(input_mask).bool()
    if mask.dim() != 2:
        raise DataError(f"the mask has the shape {list(mask.shape)}; give [B, T]")
    width = mask.shape[1]
    return mask[:, None, :] & torch.ones(width, width, dtype=torch.bool, device=mask.device).tril()


def pad_to_length(x: Any, target_length: int, pad_value: Any = 0, left: bool = False, axis: int = 0) -> Tensor:
    """Returns an array padded along an axis to a length; a longer array is returned unchanged.

    >>> pad_to_length([1, 2], 4, left=True).tolist()
    [0, 0, 1, 2]
    """
    x = torch.as_tensor(x)
    missing = target_length - x.shape[axis]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[axis] = missing
    padding = x.new_full(shape, pad_value)
    return torch.cat([padding, x] if left else [x, padding], axis)


def process_ids(
    prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int, segment_ids: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the inputs of a model for padded arrays.

    Args: eos_id: no effect, as in Tunix: every token with the pad id is padding. segment_ids: refused unless None.
    Returns: ids [B, T], positions [B, T], the causal attention mask [B, T, T] and the padding mask, Int [B, T].
    Raises: DataError: arrays that don't fit. ConfigError: rows packed by hand.
    """
    _check_not_packed(segment_ids)
    prompts, completions = (
        torch.as_tensor(np.asarray(x) if isinstance(x, list) else x).long() for x in (prompt_tokens, completion_tokens)
    )
    if prompts.dim() != 2 or completions.dim() != 2 or len(prompts) != len(completions):
        raise DataError(
            f"prompt_tokens {list(prompts.shape)} and completion_tokens {list(completions.shape)}: give [B, P] and "
            "[B, C] of the same B"
        )
    ids = torch.cat([prompts, completions], 1)
    mask = ids != pad_id
    return ids, build_positions_from_mask(mask), make_causal_attn_mask(mask), mask.int()


def _check_not_packed(segment_ids: Any) -> None:
    """Raises ConfigError for rows that were packed by hand."""
    if segment_ids is not None:
        raise ConfigError("segment_ids: whet packs sequences by itself; give a row for each, padded")


# ---- log-probabilities and scores ------------------------------------------------------------------------------------


def selective_log_softmax(logits: Any, input_ids: Any) -> Tensor:
    """Returns the log-probability of each id: fp32 [B, C], from logits [B, C, V]."""
    logits, ids = torch.as_tensor(logits).float(), torch.as_tensor(input_ids).long()
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def get_per_token_logps(
    model: nn.Module, input_tokens: Any, positions: Any, attn_mask: Any, logits_to_keep: int
) -> Tensor:
    """Returns the log-probabilities of the last `logits_to_keep` tokens of each row: [B, logits_to_keep].

    Args: attn_mask: the padding mask [B, T] or the attention mask [B, T, T].
    """
    ids = torch.as_tensor(input_tokens).long()
    seen = torch.as_tensor(attn_mask).bool()
    seen = seen.any(1) if seen.dim() == 3 else seen  # no query attends to padding
    logits = _forward(model, ids, torch.as_tensor(positions), seen).logits[:, -logits_to_keep - 1 : -1]
    return selective_log_softmax(logits, ids[:, -logits_to_keep:])


def compute_per_token_logps(
    model: nn.Module,
    prompt_tokens: Any,
    completion_tokens: Any,
    pad_id: int,
    eos_id: int,
    stop_gradient: bool = True,
    return_entropy: bool = False,
    segment_ids: Any = None,
    temperature: float = 1.0,
    chunk_size: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the log-probabilities of completion tokens under a causal model of transformers.

    Args:
        model: in place of Tunix's graphdef and state.
        stop_gradient: compute without gradient.
        return_entropy: return the entropies too.
        segment_ids: refused unless None.
        temperature: the logits are divided by it; 0 and 1 leave them unchanged.
        chunk_size: no effect.
    Returns: [B, C], or the pair with the entropies. The values at padding have no meaning.
    """
    ids, positions, _, seen = process_ids(prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids)
    width = len(completion_tokens[0])
    with torch.set_grad_enabled(torch.is_grad_enabled() and not stop_gradient):
        logits = _forward(model, ids, positions, seen).logits[:, -width - 1 : -1].float()
        logits = logits if temperature in (0.0, 1.0) else logits / temperature
        logps = selective_log_softmax(logits, ids[:, -width:].to(logits.device))
        return (logps, entropy_of_logits(logits)) if return_entropy else logps


def compute_score(
    model: nn.Module,
    prompt_tokens: Any,
    completion_tokens: Any,
    pad_id: int,
    eos_id: int,
    stop_gradient: bool = True,
    segment_ids: Any = None,
) -> Tensor:
    """Returns the score of each token by a token classifier, or by a sequence classifier with one label: [B, T].

    Raises: ConfigError: the model does not return one number for each token.
    """
    ids, positions, _, seen = process_ids(prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not stop_gradient):
        if hasattr(model, "score") and hasattr(model, "model"):  # its forward returns the last token's score only
            scores = model.score(_forward(model.model, ids, positions, seen).last_hidden_state)  # pyright: ignore
        else:
            scores = _forward(model, ids, positions, seen)[0]
    if scores.shape != (*ids.shape, 1):
        raise ConfigError(
            f"{type(model).__name__} returns {list(scores.shape)} for tokens {list(ids.shape)}; a score is one number "
            "per token: give a token classifier or a sequence classifier with num_labels=1"
        )
    return scores.squeeze(-1)


def _forward(model: nn.Module, ids: Tensor, positions: Tensor, seen: Tensor) -> Any:
    device = next(model.parameters()).device
    with transformers_attention(model):
        return model(
            input_ids=ids.to(device),
            attention_mask=seen.long().to(device),
            position_ids=positions.to(device),
            use_cache=False,
        )


# ---- divergences and losses ------------------------------------------------------------------------------------------


def compute_kl_divergence(
    per_token_logps: Any, ref_per_token_logps: Any, method: str = "low_var_kl", clamp_value: float | None = None
) -> Tensor:
    """Returns the KL estimate of each token, fp32.

    Args: method: "kl", "mse_kl" or "low_var_kl". clamp_value: bound of the absolute value; None = no bound.
    Raises: ConfigError: an unknown method.

    >>> compute_kl_divergence([-1.0], [-1.5], "kl").tolist()
    [0.5]
    """
    if method not in _KL:
        raise lookup_error("KL method", method, _KL)
    logps, ref = (torch.as_tensor(x).float() for x in (per_token_logps, ref_per_token_logps))
    kl = kl_divergence(logps, ref, mode=method)
    return kl if clamp_value is None else kl.clamp(-clamp_value, clamp_value)


def aggregate_loss(
    per_token_loss: Any,
    completion_mask: Any,
    loss_agg_mode: str,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    norm: float | None = None,
) -> Tensor:
    """Returns the loss of padded rows as one number. Tunix returns its sum and its denominator; this is the quotient.

    Args: per_token_loss, completion_mask: [B, C]. norm: the denominator of the modes that have one; None = the width of
        the rows for sequence-mean-token-scale, the number of rows with a token for sequence-mean-token-sum-norm.
    Raises: ConfigError: an unknown mode; rows packed by hand; a norm that is not positive.

    >>> loss, mask = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[1, 1, 0], [1, 1, 1]]
    >>> round(float(aggregate_loss(loss, mask, "sequence-mean-token-mean")), 4)
    0.325
    """
    _check_not_packed(segment_ids)
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise lookup_error("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    loss, mask = torch.as_tensor(per_token_loss).float(), torch.as_tensor(completion_mask).bool()
    if norm is None and loss_agg_mode == "sequence-mean-token-scale":
        norm = float(loss.shape[-1])
    rows = torch.arange(len(loss))[:, None].expand_as(mask).flatten()
    weights = token_weights(mask.flatten().cpu(), rows, loss_agg_mode, norm=norm, prompt=rows)
    return aggregate(loss.flatten(), weights.to(loss.device))


reduced_loss_agg = aggregate_loss
"""Tunix's second name of the function; it returns the quotient too."""
