"""What is said aloud of a configuration that is allowed and seldom meant."""

from __future__ import annotations

import logging

from whet.config import PolicyConfig
from whet.config.algo.effect import changed

__all__ = ["advise"]

log = logging.getLogger("whet")

_OF_KL = ("kl_type", "kl_loss_mode", "kl_method", "kl_clamp_value", "use_bias_correction_kl")


def advise(config: PolicyConfig) -> None:
    """Warns of choices that don't go together, where beta or a level is often the only thing that was changed.

    Args: config: an algorithm's.
    """
    c, mode = config, config.keywords["kl_loss_mode"]
    if c.beta and c.kl_type == "loss" and mode in ("kl", "k1") and not c.use_bias_correction_kl:
        log.warning(
            "algo.kl_loss_mode=%r with algo.beta=%s: the gradient of k1 is that of log pi alone, so it does not pull "
            "towards the reference; algo.kl_loss_mode='low_var_kl' does",
            mode,
            c.beta,
        )
    idle = changed(c, *_OF_KL)
    if idle and not c.beta and not c.force_compute_kl:
        named = ", ".join(f"{name}={value!r}" for name, value in idle.items())
        log.warning("%s: no effect while beta is 0.0", named)
    of_sequences = c.importance_sampling_level in ("sequence", "sequence-sum") or c.loss_name == "gmpo"
    if of_sequences and c.loss_agg_mode == "token-mean":
        log.warning(
            "algo.loss_agg_mode='token-mean' with a ratio of whole sequences: longer completions count more; the "
            "papers mean sequence-mean-token-mean"
        )
