"""Warnings about settings that are allowed but rarely make sense together."""

from __future__ import annotations

import logging

from whet.config import PolicyConfig
from whet.config.algo.unused_fields import changed_fields, unread_fields

__all__ = ["warn_about_config"]

log = logging.getLogger("whet")

_TOKEN_MASKS = ("dppo-kl", "dppo-tv", "sampler-kl", "top-entropy")
"""The loss_masks that mask single tokens, whatever else is set."""


def warn_about_config(config: PolicyConfig, longest: int | None = None) -> None:
    """Logs a warning for each combination of settings that rarely makes sense.

    Args: config: an algorithm's. longest: the most tokens of a completion; None = unknown.
    """
    c, mode = config, config.keywords["kl_loss_mode"]
    if c.beta and c.kl_type == "loss" and mode in ("kl", "k1") and not c.use_bias_correction_kl:
        log.warning(
            "algo.kl_loss_mode=%r with algo.beta=%s: the gradient of k1 is that of log pi, so it does not pull "
            "towards the reference; algo.kl_loss_mode='low_var_kl' does",
            mode,
            c.beta,
        )
    buffer = c.overlong_buffer
    start = buffer.max_response_length - buffer.overlong_buffer_length
    if buffer.enable and longest is not None and longest <= start:
        log.warning(
            "algo.overlong_buffer never applies: its penalty starts after %d tokens, and completions have at most "
            "rollout.max_tokens_to_generate=%d; set algo.overlong_buffer.max_response_length=%d and "
            "overlong_buffer_length to the last part of it",
            start,
            longest,
            longest,
        )
    unread = changed_fields(c, *(name for name, choice in unread_fields(c).items() if choice == "beta"))
    if unread:
        log.warning("%s: no effect while beta is 0.0", ", ".join(f"{name}={value!r}" for name, value in unread.items()))
    of_sequences = c.importance_sampling_level in ("sequence", "sequence-sum") or c.policy_loss_fn == "gmpo"
    if of_sequences and c.loss_agg_mode == "token-mean":
        log.warning(
            "algo.loss_agg_mode='token-mean' with a ratio of whole sequences: longer completions count more; the "
            "papers mean sequence-mean-token-mean"
        )
    token_masks = (*_TOKEN_MASKS, "sampler-rejection") if c.rejection_level == "token" else _TOKEN_MASKS
    factors = [f"algo.loss_masks=[{name}]" for name in c.loss_masks if name in token_masks]
    factors += ["algo.sampler_is='token'"] if c.sampler_is == "token" else []
    if of_sequences and factors:
        log.warning(
            "%s can't leave out single tokens, because the ratio is of whole sequences: it only scales a token's share "
            "of its sequence's gradient; algo.importance_sampling_level='sequence-token'%s gives each its own",
            ", ".join(factors),
            " and policy_loss_fn='grpo'" if c.policy_loss_fn == "gmpo" else "",
        )
