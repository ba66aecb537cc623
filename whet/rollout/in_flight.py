"""InFlightRequest: a request that an engine has not finished, and the tokens drawn for it so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.errors import EngineError
from whet.rollout.base import Output, PartialOutput, Request
from whet.rollout.constrained_decoding import Matcher
from whet.rollout.stopping import find_end
from whet.types import FinishReason

__all__ = ["InFlightRequest"]

NONE = np.zeros(0, np.int32)


@dataclass(kw_only=True, eq=False)
class InFlightRequest:
    """A request in flight. An engine adds tokens to it until `add` says why it ends, and then returns its `output`.

    >>> from whet.rollout.base import Sampling
    >>> sampling = Sampling(stop_ids=(2,))
    >>> flight = InFlightRequest(
    ...     request=Request(id=1, tokens=np.array([5]), sampling=sampling, group=0, rng_key=(0, 0, 0, 0)))
    >>> flight.add([7, 2, 9], [-1.0, -0.5, -0.1], version=3)
    'stop'
    >>> flight.output("stop").tokens.tolist(), flight.output("stop").versions.tolist()
    ([7, 2], [3, 3])
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    """Drawn so far."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The policy version that drew each token."""
    logits: list[np.ndarray] = field(default_factory=list)
    """float32 [steps, V] blocks, where the request asked for them; the last may have rows after the end."""
    matcher: Matcher | None = None
    """Its place in the language of its constraint."""
    plan: int = 0
    """In the embedded engine: the index of its SamplingPlan."""
    place: int = 0
    """In an engine with a KVPool: the first place of the tokens drawn since it was admitted."""
    room: int = 0
    """In an engine with a KVPool: the number of these places."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be drawn for it."""
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def context(self) -> np.ndarray:
        """int32 [T]: the request's tokens, then those drawn so far."""
        return np.concatenate([self.request.tokens, np.array(self.tokens, np.int32)]).astype(np.int32)

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> FinishReason | None:
        """Records new tokens, and drops those after the completion's end.

        Args:
            tokens, logprobs: [n] each, in order.
            version: of the policy that drew them.
            decode: ids -> text, for stop strings.
        Returns: the finish_reason; None = it continues.
        Raises: EngineError: the number of logprobs differs from that of tokens.
        """
        self.extend(tokens, logprobs, version=version)
        end = self.find_end(decode, new=len(tokens))
        if end is None:
            return None
        del self.tokens[end[0] :], self.logprobs[end[0] :], self.versions[end[0] :]
        return end[1]

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], *, version: int) -> None:
        """Records new tokens. Args and Raises: as `add`."""
        if len(tokens) != len(logprobs):
            raise EngineError(f"request {self.request.id}: {len(logprobs)} logprobs came for {len(tokens)} tokens")
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def find_end(
        self, decode: Callable[[Sequence[int]], str] | None, *, new: int, unrecorded: np.ndarray = NONE
    ) -> tuple[int, FinishReason] | None:
        """Returns where and why it ends, as `stopping.find_end` has it.

        Args: new: tokens since the last look. unrecorded: tokens drawn after `self.tokens`.
        """
        r, tokens = self.request, self.tokens
        if len(unrecorded):
            tokens = np.concatenate([np.array(tokens, np.int32), unrecorded]) if tokens else unrecorded
        return find_end(r.sampling, tokens, new=new, decode=decode, earlier=r.tokens[len(r.tokens) - r.offset :])

    def resumed(self) -> Request:
        """Returns the request that continues after the tokens drawn so far."""
        return self.request.resume_from(np.array(self.tokens, np.int32)) if self.tokens else self.request

    def partial(self, tokens: np.ndarray = NONE, logprobs: np.ndarray = NONE, version: int = 0) -> PartialOutput:
        """Returns all of its tokens so far. Args: those drawn after `self.tokens`, and the version that drew them."""
        return PartialOutput(
            id=self.request.id,
            tokens=np.array([*self.tokens, *tokens], np.int32),
            logprobs=np.array([*self.logprobs, *logprobs], np.float32),
            versions=np.array([*self.versions, *[version] * len(tokens)], np.int32),
        )

    def output(self, reason: FinishReason) -> Output:
        """Returns its result. Args: reason: why it ended."""
        logits = np.concatenate(self.logits)[: len(self.tokens)] if self.logits else None
        return self.partial().to_output(reason, logits)
