"""ServedModel: the model that answers requests, its tokenizer, and the defaults of sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from whet.config.rollout import ConstraintConfig
from whet.config.serve import ServeConfig
from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.sampler import Sampler
from whet.serve.api_errors import ApiError
from whet.serve.bodies import SamplingBody
from whet.serve.chat_model import ChatModel
from whet.types import Message

__all__ = ["ServedModel", "read_messages"]


class ServedModel(ChatModel):
    """A model behind the API. Its methods may be called from several threads.

    Args: sampler: the model, its tokenizer and engine. config: the server's settings.
    """

    def __init__(self, sampler: Sampler, config: ServeConfig) -> None:
        super().__init__(
            sampler.tokenizer,
            sampler.eos_ids,
            name=config.served_model_name or str(config.model or "model"),
            longest=sampler.longest,
            chat_template_kwargs=config.chat_template_kwargs,
            system_prompt=config.system_prompt,
        )
        self.sampler, self.config = sampler, config

    @property
    def engine(self) -> RolloutEngine:
        """The engine that all requests run on."""
        return self.sampler.engine(Sampling())

    def check_name(self, name: str | None) -> None:
        """Raises ApiError for another model's name."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"no model {name!r}; this server has {self.name!r}", param="model", code="model_not_found"
            )

    def sampling(self, body: SamplingBody, *, max_tokens: int | None, response_format: Any = None) -> Sampling:
        """Returns the sampling parameters of a request, without the limit of its length.

        Args: body: the fields that the client set. max_tokens: of the client; None = see `limit`.
        Raises: ConfigError: a value out of its range. ApiError: an unknown response_format.
        """
        config = self.config
        temperature = config.effective_temperature if body.temperature is None else body.temperature
        options: dict[str, Any] = {}
        for name in ("top_p", "top_k", "min_p"):
            value = getattr(config if getattr(body, name) is None else body, name)
            if value is not None and temperature > 0:  # greedy sampling has no use for them
                options[name] = value
        for name in ("repetition_penalty", "min_tokens"):
            options[name] = getattr(config if getattr(body, name) is None else body, name)
        stop = config.stop if body.stop is None else body.stop
        constraint = _constraint(response_format) or config.constraint
        end_ids = () if body.ignore_eos else (config.eos_tokens or self.sampler.eos_ids)
        with self._lock:
            sampling = self.sampler.sampling(
                max_tokens=max_tokens or config.max_tokens,
                temperature=temperature,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                forbidden_tokens=config.forbidden_tokens,
                constraint=constraint,
                **options,
            )
        return replace(sampling, stop_ids=tuple(dict.fromkeys([*end_ids, *(body.stop_token_ids or ())])))

    def limit(self, sampling: Sampling, prompt: np.ndarray, *, max_tokens: int | None) -> Sampling:
        """Returns the sampling parameters with max_tokens for the room that a prompt leaves.

        Args: max_tokens: of the client; None = the server's, or all the room.
        Raises: ApiError: the prompt and max_tokens are longer than the model allows.
        """
        room = self.room(prompt)
        if room is None:
            return sampling
        if room < (max_tokens or 1):
            wanted = f"{len(prompt)} tokens in the prompt" + (f" and {max_tokens} of max_tokens" if max_tokens else "")
            raise self.context_error(wanted)
        default = self.config.max_tokens or room
        return replace(sampling, max_tokens=max_tokens or min(default, room))


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages of a body as chat templates expect them.

    The role `developer` becomes `system`, parts of text are joined, arguments of calls are parsed, and a tool's message
    gets the name of its call.
    Raises: ApiError: a message without role or text, or with parts other than text.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Be short."}]}])
    [{'role': 'system', 'content': 'Be short.'}]
    """
    names: dict[str, str] = {}
    out: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"{where} has no role; write system, user, assistant or tool", param=where)
        calls = message.get("tool_calls") or []
        fields: Message = {
            "role": "system" if role == "developer" else role,
            "content": _content(message.get("content"), where, required=not calls and role != "assistant"),
        }
        if calls:
            fields["tool_calls"] = [_read_call(call, where) for call in calls]
            names |= {str(c["id"]): f["function"]["name"] for c, f in zip(calls, fields["tool_calls"]) if "id" in c}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if message.get(name) is not None:
                fields[name] = message[name]
        if role == "tool" and "name" not in fields:
            fields["name"] = names.get(str(message.get("tool_call_id")), "tool")
        out.append(fields)
    return out


def _content(content: Any, where: str, *, required: bool) -> str:
    """Returns the text of a message. Raises ApiError: it has none, or parts other than text."""
    if isinstance(content, str):
        return content
    if content is None and not required:
        return ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where} has no content; write a text", param=where)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{where} has a part of type {kind!r}; this model reads text only", param=where)
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Returns a tool call as chat templates expect it: its arguments as a mapping."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} has a tool call without function.name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # the model wrote it so; the template writes it again as it stands
            arguments = json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _constraint(response_format: Any) -> ConstraintConfig | None:
    """Returns the constraint of OpenAI's response_format. Raises ApiError: an unknown type; ConfigError: a wrong
    schema.
    """
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return ConstraintConfig(json_schema={"type": "object"})
    schema = response_format.get("json_schema")
    if response_format.get("type") != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise ApiError(
            400,
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": {...}}}',
            param="response_format",
        )
    return ConstraintConfig(json_schema=schema["schema"])
