"""check_output: validates the outputs of engines, which may be a user's own."""

from __future__ import annotations

from typing import get_args

import numpy as np

from whet.errors import EngineError, lookup_error
from whet.rollout.base import Output, Request, RolloutEngine
from whet.types import FinishReason

__all__ = ["check_output"]


def check_output(output: Output, request: Request, engine: RolloutEngine, *, vocab_size: int | None = None) -> None:
    """Refuses an output that does not fit its request.

    Args:
        output, request: of one id.
        engine: that returned it, for the message.
        vocab_size: of the model; None = unknown.
    Raises: EngineError: columns of different lengths, more tokens than max_tokens, ids that the model does not have, an
        unknown finish_reason, logprobs that are not finite.

    >>> from whet.rollout.base import Sampling
    >>> from whet.rollout.mock import MockEngine
    >>> request = Request(id=0, tokens=np.array([5]), sampling=Sampling(max_tokens=1), group=0, rng_key=(0, 0, 0, 0))
    >>> two = Output(id=0, tokens=np.array([1, 2]), logprobs=np.zeros(2), versions=np.zeros(2), finish_reason="length")
    >>> check_output(two, request, MockEngine())
    Traceback (most recent call last):
    whet.errors.EngineError: MockEngine gave 2 tokens for a request of max_tokens=1; an engine must stop there
    """
    name, count, limit = type(engine).__name__, len(output.tokens), request.sampling.max_tokens
    for column in (output.logprobs, output.versions):
        if len(column) != count:
            raise EngineError(
                f"{name} gave {count} tokens, {len(output.logprobs)} logprobs and {len(output.versions)} versions; an "
                "Output has one of each for every token"
            )
    if count > limit:
        raise EngineError(f"{name} gave {count} tokens for a request of max_tokens={limit}; an engine must stop there")
    if output.finish_reason not in get_args(FinishReason):
        raise EngineError(str(lookup_error(f"finish_reason of {name}", output.finish_reason, get_args(FinishReason))))
    if count:
        tokens = output.tokens
        if not np.issubdtype(tokens.dtype, np.integer):
            raise EngineError(f"{name} gave tokens of type {tokens.dtype}; they must be integers, int32 best")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0:
            raise EngineError(f"{name} gave token {low}; ids are 0 or above")
        if vocab_size is not None and high >= vocab_size:
            raise EngineError(f"{name} gave token {high}; the model's ids are 0 to {vocab_size - 1}")
    if not np.isfinite(output.logprobs).all():
        raise EngineError(
            f"the model's logits are not finite at step {request.rng_key[1]}",
            fix="resume from an earlier checkpoint with a lower learning rate and trainer.allow_config_change=true "
            f"(or {name} reports wrong logprobs)",
            key="trainer.allow_config_change",
            engine=name,
        )
