"""Turns with calls of tools: what the model said, read by the tokenizer's response template, and what is appended.

    ids of a turn -> {"role": "assistant", "content": ..., "tool_calls": [{"type": "function", "function": {...}}]}
    messages of tools -> the ids between that turn and the next one

A template that writes a call as a mark, JSON with name and arguments, and a mark (Qwen's, Hermes') needs no response
template: it is asked how. Left out on purpose: a table of known models' templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from whet.errors import ConfigError

__all__ = ["Chat", "read_turn"]

_NAME, _KEY, _VALUE, _SAID = "tool_name_7f3a", "tool_key_51c0", "tool_value_c2d9", "said_e84b"
"""Words that no template has, by which one is asked what it does."""
_NO_TOOLS = (
    "The provided chat template does not support tool calling: of user, assistant with tool_calls, tool it leaves "
    "something out; take the tokenizer of a model that calls tools, or set tokenizer.chat_template"
)


class Chat:
    """A tokenizer's chat template, as turns with tools go through it.

    Args: tokenizer: of transformers, with a chat template. options: of the template. end_ids: that end a turn.
    Raises: ConfigError: the template can't tell of tools, or nothing says how their calls are written.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> t = byte_tokenizer()
    >>> Chat(t, {}, [t.eos_token_id])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: The provided chat template does not support tool calling: ...
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], end_ids: Sequence[int]) -> None:
        self.tokenizer, self.options = tokenizer, dict(options)
        self._ends = [str(tokenizer.decode([i])) for i in end_ids]
        self._check()
        self.template = tokenizer.response_template or self._found_template()
        self._suffixes: dict[str, np.ndarray] = {}

    def read(self, tokens: Iterable[int], context: Iterable[int], tools: Sequence[Any]) -> dict[str, Any]:
        """A turn as a message, as `read_turn` has it."""
        return read_turn(self.tokenizer, self.template, tokens, context, tools)

    # ---- what is appended ----------------------------------------------------------------------------------------

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 [C]: the messages of tools and the header of the next turn. Args: messages: after a turn that ended.

        Raises: ConfigError: the template writes what stands before them in no way that can be told apart.
        """
        known = json.dumps(list(messages), sort_keys=True, default=str)
        if known not in self._suffixes:
            text = self._text_after(messages)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            self._suffixes = {known: np.asarray(ids, np.int32)}  # the last alone: calls often repeat in a group
        return self._suffixes[known]

    def _text_after(self, messages: Sequence[Mapping[str, Any]]) -> str:
        user = {"role": "user", "content": "dummy"}
        called = {"role": "assistant", "content": "", "tool_calls": [_call(messages[0]["name"], {})]}
        before = self._text([user, called])
        cut = max((before.rfind(end) + len(end) for end in self._ends if end in before), default=len(before))
        after = self._text([user, called, *messages], asks=True)
        if after.startswith(before[:cut]):
            return after[cut:]
        # The template writes the last turn as it writes no other (Qwen3's adds empty thinking): what follows a text.
        after = self._text([user, {"role": "assistant", "content": _SAID}, *messages], asks=True)
        _, found, rest = after.rpartition(_SAID)
        if not found:
            raise ConfigError(
                "the chat template rewrites earlier turns, and so the tokens of a tool's answer can't be told; set "
                "tokenizer.chat_template to one that only appends"
            )
        return next((rest.removeprefix(end) for end in self._ends if rest.startswith(end)), rest)

    # ---- what the template does ----------------------------------------------------------------------------------

    def _text(self, messages: Sequence[Any], *, asks: bool = False) -> str:
        made = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=asks, **self.options
        )
        return str(made)

    def _calling(self, *names: str) -> list[Any]:
        """A conversation in which the model says a word and calls tools."""
        calls = [_call(name, {_KEY: _VALUE}) for name in names]
        return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _SAID, "tool_calls": calls}]

    def _check(self) -> None:
        tool = {"role": "tool", "name": _NAME, "content": _SAID}
        try:
            if self.tokenizer.chat_template is None:
                raise ConfigError(_NO_TOOLS)
            text = self._text([*self._calling(_NAME)[:1], {**self._calling(_NAME)[1], "content": ""}, tool])
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"{_NO_TOOLS} ({error})") from error
        if any(word not in text for word in (_NAME, _KEY, _VALUE, _SAID)):
            raise ConfigError(_NO_TOOLS)

    def _found_template(self) -> dict[str, Any]:
        """A response template, from how the chat template writes two calls. Raises ConfigError: in another form."""
        try:
            text = self._text(self._calling(_NAME, _NAME))
            _, _, rest = text.partition(_SAID)
            opens, first, rest = _around_json(rest)
            between, second, _ = _around_json(rest)
        except (jinja2.TemplateError, ValueError):
            opens = between = first = second = None
        opens = (opens or "").strip()
        closes = (between or "").strip().removesuffix(opens).strip()
        expected = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        if not opens or not closes or [first, second] != [expected] * 2:
            raise ConfigError(
                "the tokenizer has no response_template, and its chat template does not write calls as a mark, JSON "
                "with name and arguments, and a mark; set tokenizer.response_template (transformers' page on response "
                "parsing says how)"
            )
        asked, told = (
            self._text([{"role": "user", "content": "hi"}], asks=True),
            self._text([{"role": "user", "content": "hi"}]),
        )
        header = asked.removeprefix(told)
        end = re.escape(self.tokenizer.eos_token)
        return {
            "defaults": {"role": "assistant"},
            "start_anchor": header[: header.find("\n") + 1] or header,
            "fields": {
                "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
                "tool_calls": {"open": opens, "close_pattern": rf"{re.escape(closes)}\s*", "repeats": True,
                               "content": "json", "transform": {"type": "function", "function": "{content}"}},
                "content": {"close_pattern": rf"{end}\s*", "content": "text"},
            },
        }  # fmt: skip


def read_turn(
    tokenizer: Any, template: Mapping[str, Any], tokens: Iterable[int], context: Iterable[int], tools: Sequence[Any]
) -> dict[str, Any]:
    """A turn as a message; one that can't be read, since its calls are none, is its text.

    Args: template: a response template of transformers. tokens: of the turn. context: that it was given. tools: whose
        calls have arguments by their types.
    """
    ids, before = [int(i) for i in tokens], [int(i) for i in context]
    try:
        found = tokenizer.parse_response(ids, template, prefix=before, tools=list(tools) or None)
        return _checked(found, tokenizer.eos_token)
    except (ValueError, TypeError):
        return {"role": "assistant", "content": str(tokenizer.decode(ids, skip_special_tokens=True))}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _around_json(text: str) -> tuple[str, Any, str]:
    """What stands before the first JSON object of a text, the object, and what stands after it."""
    start = text.index("{")
    found, end = json.JSONDecoder().raw_decode(text, start)
    return text[:start], found, text[end:]


def _checked(message: Any, eos: str) -> dict[str, Any]:
    """A parsed message whose content is a text and whose calls have names. Raises ValueError: it is none."""
    if not isinstance(message, dict):
        raise ValueError("no message")
    content = message.get("content")
    made = {**message, "content": content.removesuffix(eos) if isinstance(content, str) else ""}
    for call in made.get("tool_calls") or ():
        called = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            raise ValueError("a call without a name")
        if called.get("arguments") is None:
            called["arguments"] = {}
    return made
