"""RunModel: the model of a training run, for the calls of agents. The run decides how its tokens are drawn."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any, Self

import numpy as np

from whet.rollout.base import Sampling
from whet.serve.api_errors import ApiError
from whet.serve.bodies import SamplingBody
from whet.serve.chat_model import ChatModel

__all__ = ["RunModel"]

log = logging.getLogger("whet")

RUN_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "seed", "ignore_eos")
"""Fields of a call that have no effect in a run: the trainer computes its logprobs under the run's own settings."""
DROPPED_FIELDS = ("frequency_penalty", "logit_bias", "presence_penalty", "reasoning_effort", "verbosity")
"""Fields of OpenAI's that have none either, and that `whet serve` does not implement."""


class RunModel(ChatModel):
    """The policy behind an agent's base URL. Args: as those of ChatModel.

    A call may lower max_tokens and add stop strings. The other settings of sampling are the run's; a call that asks for
    others is answered nevertheless, with one warning for each field.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run_sampling = Sampling()
        """Of a call, by the run's configuration."""
        self._warned: set[str] = set()

    def with_sampling(self, sampling: Sampling) -> Self:
        """Returns the same model under other sampling parameters. Args: sampling: its max_tokens is the most of
        a call.
        """
        model = copy.copy(self)
        model.run_sampling = sampling
        return model

    def check_name(self, name: str | None) -> None:
        """Accepts each name: an agent may have one of its own for the model."""

    def sampling(self, body: SamplingBody, *, max_tokens: int | None, response_format: Any = None) -> Sampling:
        """Returns the run's sampling parameters, with the call's stop strings.

        Args: as in ChatModel. Raises: ApiError: a response_format, which would change the distribution.
        """
        if response_format is not None and response_format.get("type") != "text":
            raise ApiError(
                400,
                "response_format: a training run draws each completion under the same constraint; leave it out, or set "
                "rollout.constraint",
                param="response_format",
            )
        if body.stop_token_ids and self.run_sampling.min_tokens:
            raise ApiError(
                400,
                f"stop_token_ids: rollout.min_tokens={self.run_sampling.min_tokens} forbids the ids that end a "
                "completion, and they are the same for all; leave stop_token_ids out, or set rollout.min_tokens=0",
                param="stop_token_ids",
            )
        self._warn_of_own_settings(body)
        run, stop = self.run_sampling, body.stop or ()
        return replace_lengths(
            run,
            most=min(run.max_tokens, max_tokens or run.max_tokens),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=tuple(body.stop_token_ids or ()),
        )

    def limit(self, sampling: Sampling, prompt: np.ndarray, *, max_tokens: int | None) -> Sampling:
        """Returns the sampling parameters with max_tokens for the room that a prompt leaves.

        Args: as in ChatModel. Raises: ApiError: the prompt leaves no room for a token.
        """
        room = self.room(prompt)
        if room is None:
            return sampling
        if room < 1:
            raise self.context_error(f"{len(prompt)} tokens in the prompt")
        return replace_lengths(sampling, most=min(sampling.max_tokens, room))

    def without_own_settings(self, fields: Any) -> Any:
        """Returns the fields of a call without those that have no effect in a run, with one warning for each.

        The model is free to call a tool or not, so a tool_choice that forces it is "auto".

        Args: fields: the body of the call, which may be wrong.
        """
        if not isinstance(fields, dict):
            return fields
        dropped = [name for name in DROPPED_FIELDS if fields.get(name)]
        if fields.get("tool_choice") not in (None, "auto", "none"):
            dropped.append("tool_choice")
        for name in dropped:
            self._warn_of(name, fields[name])
        return {name: value for name, value in fields.items() if name not in (*DROPPED_FIELDS, *dropped)}

    def context_error(self, wanted: str) -> ApiError:
        """Returns the error for a call that leaves no room, with one warning in the run."""
        if "context" not in self._warned:
            self._warned.add("context")
            log.warning(
                "an agent's call has %s, and the limit with its completion is %d tokens "
                "(rollout.max_prompt_length plus rollout.max_episode_tokens, in training at most "
                "trainer.max_tokens_per_microbatch, and the model's context length); raise the limit, or let the agent "
                "shorten its history",
                wanted,
                self.longest,
            )
        return super().context_error(wanted)

    def _warn_of_own_settings(self, body: SamplingBody) -> None:
        """Warns once of each field that an agent sets to a value that the run does not have."""
        for name in RUN_FIELDS:
            asked = getattr(body, name)
            if asked is not None and asked is not False and asked != getattr(self.run_sampling, name, None):
                self._warn_of(name, asked)

    def _warn_of(self, name: str, asked: Any) -> None:
        """Warns once of a field that has no effect."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "the agent asks for %s=%r; a training run samples by its own settings (rollout.*, trainer.seed), so "
                "this has no effect",
                name,
                asked,
            )


def replace_lengths(
    sampling: Sampling, *, most: int, stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = ()
) -> Sampling:
    """Sampling parameters with another limit, and with more that ends a completion. Args: most: max_tokens."""
    merged = {
        "stop": tuple(dict.fromkeys([*sampling.stop, *stop])),
        "stop_ids": tuple(dict.fromkeys([*sampling.stop_ids, *stop_ids])),
    }
    return replace(sampling, max_tokens=most, **merged)
