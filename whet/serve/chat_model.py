"""ChatModel: what a call needs of a model besides its engine: tokenizer, chat template, tool calls, and sampling.

ServedModel (served_model.py) is that of `whet serve`, RunModel (run_model.py) that of a training run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.templates import ChatTemplate
from whet.envs.sessions import ChatRenderer
from whet.envs.tool_calls import ToolTemplate
from whet.rollout.base import Sampling
from whet.serve.api_errors import ApiError
from whet.serve.bodies import SamplingBody
from whet.types import Message

__all__ = ["CONTEXT_CODE", "ChatModel"]

CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code of the error for a prompt that is too long."""


class ChatModel(ChatRenderer):
    """A model behind the API. Its methods may be called from several threads.

    Args:
        tokenizer: of transformers.
        eos_ids: the ids that end a turn.
        name: of the model, in responses.
        longest: the most tokens of a prompt and its completion together; None = no bound.
        chat_template_kwargs: more arguments of the chat template.
        system_prompt: added before messages without a system turn; None or "" = off.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        name: str,
        longest: int | None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        super().__init__(tokenizer, template, eos_ids, system_prompt=system_prompt)
        self.eos_ids, self.name, self.longest = tuple(eos_ids), name, longest
        self.created = int(time.time())
        self.most_characters = math.inf if longest is None else longest * max(map(len, tokenizer.get_vocab()))
        """That the context holds: its length times that of the longest token."""

    def check_name(self, name: str | None) -> None:
        """Raises ApiError for another model's name."""
        raise NotImplementedError

    # ---- prompts -------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """int32 [P]: the ids of a rendered conversation, or of a part of it. Raises ApiError: it can't fit."""
        self._check_characters(text)
        return super().encode(text)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [P]: the ids of a text, with the tokenizer's own special tokens. Raises ApiError: it can't fit."""
        self._check_characters(text)
        with self._lock:
            return np.asarray(self.tokenizer(text, verbose=False).input_ids, np.int32)

    def _check_characters(self, text: str) -> None:
        """Raises ApiError for a text that can't fit: a tokenizer takes seconds for a megabyte, and all calls wait."""
        if len(text) > self.most_characters:
            raise self.context_error(f"a prompt of {len(text)} characters")

    # ---- sampling ------------------------------------------------------------------------------------------------

    def sampling(self, body: SamplingBody, *, max_tokens: int | None, response_format: Any = None) -> Sampling:
        """Returns the sampling parameters of a request, without the limit of its length.

        Args: body: the fields that the client set. max_tokens: of the client; None = see `limit`.
        Raises: ConfigError: a value out of its range. ApiError: an unknown response_format.
        """
        raise NotImplementedError

    def limit(self, sampling: Sampling, prompt: np.ndarray, *, max_tokens: int | None) -> Sampling:
        """Returns the sampling parameters with max_tokens for the room that a prompt leaves.

        Args: max_tokens: of the client; None = the server's, or all the room.
        Raises: ApiError: the prompt leaves no room.
        """
        raise NotImplementedError

    def room(self, prompt: np.ndarray) -> int | None:
        """Returns the tokens that a prompt leaves for its completion; None = no bound. Raises ApiError: it has no
        tokens.
        """
        if len(prompt) == 0:
            raise ApiError(400, "the prompt has no tokens; write something in it", param="prompt")
        return None if self.longest is None else self.longest - len(prompt)

    def context_error(self, wanted: str) -> ApiError:
        """Returns the error for a prompt that leaves too little room. Args: wanted: the size of the request."""
        return ApiError(
            400,
            f"this model's context length is {self.longest} tokens, and the request has {wanted}; shorten the prompt "
            "or lower max_tokens",
            param="messages",
            code=CONTEXT_CODE,
        )

    # ---- completions ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def tool_template(self) -> ToolTemplate:
        """Reads tool calls in the form of the chat template. Raises ConfigError: the template has no tools."""
        return ToolTemplate(self.tokenizer, {**self.template.options}, self.eos_ids)

    def read_turn(self, tokens: np.ndarray, prompt: np.ndarray, tools: Sequence[Any]) -> Message:
        """Returns a completion as a message with its tool calls."""
        template = self.tool_template
        with self._lock:
            return template.parse(tokens, prompt, tools)

    def token_text(self, token: int) -> str:
        """Returns the text of one token, special tokens included."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
