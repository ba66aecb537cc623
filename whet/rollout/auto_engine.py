"""The engine that rollout_engine "auto" stands for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from whet.config import Mode, RolloutConfig
from whet.rollout.base import Sampling
from whet.rollout.build import make_sampling
from whet.rollout.vllm import unsuitable_reason

__all__ = ["AUTO", "choose_engine"]

log = logging.getLogger("whet")

AUTO = "auto"
"""The name that stands for the engine of choose_engine."""


def choose_engine(
    config: RolloutConfig,
    samplings: Sequence[Sampling] = (),
    *,
    device: torch.device,
    num_processes: int = 1,
    is_quantized: bool = False,
) -> str:
    """Returns the engine that rollout_engine "auto" stands for, which is logged with the reason.

    Args: config: of the rollout. samplings: of the modes; () = those of config. device: of the policy. num_processes:
        that train together. is_quantized: whether the policy's weights are packed in 4 bits.
    Returns: "vllm" on a GPU where a tested version of it is installed and nothing is asked for that it refuses;
        else "embedded".
    """
    samplings = samplings or [make_sampling(config.for_mode(mode), ()) for mode in Mode]
    reason = "the policy's weights are in 4 bits" if is_quantized else None
    if num_processes > 1:
        reason = f"{num_processes} processes train together"
    reason = reason or unsuitable_reason(config, samplings, device=device)
    if reason is None:
        log.info("rollout_engine auto: vllm; set rollout_engine=embedded to sample with the trainer's own weights")
        return "vllm"
    log.info("rollout_engine auto: embedded, since %s", reason)
    return "embedded"
