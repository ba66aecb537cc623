"""Parsing the tool calls of a turn, and encoding the tools' answers.

    ids of a turn -> {"role": "assistant", "content": ..., "tool_calls": [{"type": "function", "function": {...}}]}
    messages of tools -> the ids between that turn and the next one

The tokenizer's response template says how calls are written. Without one, the form is found by how the chat template
writes a probe: as JSON with name and arguments between two marks (Hermes, Qwen, ```json blocks), or as one of
CALL_FORMS. A form is taken only if it reads the probe's calls back from the template's own text. Left out on purpose: a
table of known models' templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import jinja2
import numpy as np

from whet.errors import ConfigError

__all__ = ["CALL_FORMS", "ReasoningStream", "ToolTemplate", "parse_turn", "split_reasoning"]

CALL_FORMS: dict[str, dict[str, Any]] = {
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; the schema gives the types
    "qwen3_coder": {
        "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*(?:</tool_call>)?\s*",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    },
    # {"name": NAME, "parameters": {...}}, also behind <|python_tag|>, several with ; between them
    "llama3_json": {
        "open_pattern": r'(?:<\|python_tag\|>)?\s*\{\s*(?:"type":\s*"function",\s*)?"name":\s*"(?P<name>[^"]+)",\s*'
        r'"(?:parameters|arguments)":\s*',
        "close_pattern": r'\}\s*(?:;\s*|(?=(?:<\|python_tag\|>)?\s*\{\s*"(?:name|type)")|(?=END)|$)',
        "content": "json",
    },
}
"""Name, as vLLM calls its parser -> the field tool_calls of transformers' response templates, whose close_pattern may
name END, the marks that end a turn."""

_NAME, _KEY, _VALUE, _TEXT = "tool_name_7f3a", "tool_key_51c0", "tool_value_c2d9", "said_e84b"
"""Words of the probes, which no template contains."""
_NO_TOOLS = (
    "The provided chat template does not support tool calling: it leaves out a part of the messages user, assistant "
    "with tool_calls, tool; take the tokenizer of a model that calls tools, or set tokenizer.chat_template"
)


class ToolTemplate:
    """A tokenizer's chat template for conversations with tools: parses turns, encodes answers.

    Args: tokenizer: of transformers, with a chat template. options: of the template. end_ids: ids that end a turn.
    Raises: ConfigError: the template leaves out tools, or nothing says how their calls are written.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> t = byte_tokenizer()
    >>> ToolTemplate(t, {}, [t.eos_token_id])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: The provided chat template does not support tool calling: ...
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], end_ids: Sequence[int]) -> None:
        self.tokenizer, self.options = tokenizer, dict(options)
        self._end_marks = [str(tokenizer.decode([i])) for i in end_ids]
        self._check_tools()
        self.response_template = tokenizer.response_template or self._derive_response_template()
        self._answers: dict[str, np.ndarray] = {}

    def parse(self, tokens: Iterable[int], context: Iterable[int], tools: Sequence[Any]) -> dict[str, Any]:
        """Returns a turn as a message: see `parse_turn`."""
        return parse_turn(self.tokenizer, self.response_template, tokens, context, tools)

    # ---- answers -------------------------------------------------------------------------------------------------

    def encode_answer(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 [C]: the messages of tools, and the header of the model's next turn.

        Args: messages: that answer a turn which has ended.
        Raises: ConfigError: the template changes what stands before the messages, so that their text can't be found.
        """
        key = json.dumps(list(messages), sort_keys=True, default=str)
        if key not in self._answers:
            text = self._answer_text(messages)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            self._answers = {key: np.asarray(ids, np.int32)}  # only the last one: calls often repeat in a group
        return self._answers[key]

    def _answer_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        user = {"role": "user", "content": "dummy"}
        calling = {"role": "assistant", "content": "", "tool_calls": [_call(messages[0]["name"], {})]}
        before = self._render([user, calling])
        ends = (before.rfind(mark) + len(mark) for mark in self._end_marks if mark in before)
        turn_end = max(ends, default=len(before))
        after = self._render([user, calling, *messages], add_generation_prompt=True)
        if after.startswith(before[:turn_end]):
            return after[turn_end:]
        # The template writes the last turn differently (Qwen3's adds empty thinking): take the text after a known text.
        after = self._render([user, {"role": "assistant", "content": _TEXT}, *messages], add_generation_prompt=True)
        _, separator, rest = after.rpartition(_TEXT)
        if not separator:
            raise ConfigError(
                "the chat template rewrites earlier turns, so the tokens of a tool's answer are not known; set "
                "tokenizer.chat_template to one that only appends"
            )
        return next((rest.removeprefix(mark) for mark in self._end_marks if rest.startswith(mark)), rest)

    # ---- what the template does ----------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.options
            )
        )

    def _check_tools(self) -> None:
        """Raises ConfigError where the template leaves out a call's name, argument or value, or a tool's answer."""
        user, calling = _probe(_NAME)
        tool = {"role": "tool", "name": _NAME, "content": _TEXT}
        try:
            if self.tokenizer.chat_template is None:
                raise ConfigError(_NO_TOOLS)
            text = self._render([user, {**calling, "content": ""}, tool])
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"{_NO_TOOLS} ({error})") from error
        if any(word not in text for word in (_NAME, _KEY, _VALUE, _TEXT)):
            raise ConfigError(_NO_TOOLS)

    def _derive_response_template(self) -> dict[str, Any]:
        """Returns a response template, from how the chat template writes two calls.

        Raises: ConfigError: no known form reads them.
        """
        try:
            calls, text = 2, self._render(_probe(_NAME, _NAME))
        except jinja2.TemplateError:  # Llama's: one call a turn
            calls, text = 1, self._render(_probe(_NAME))
        user = [{"role": "user", "content": "hi"}]
        header = self._render(user, add_generation_prompt=True).removeprefix(self._render(user))
        anchor = header[: header.find("\n") + 1] or header
        end = "|".join(map(re.escape, dict.fromkeys([self.tokenizer.eos_token, *self._end_marks])))
        before, _, turn = text.rpartition(anchor) if anchor else ("", "", text)
        forms = {
            name: {
                **form,
                "close_pattern": form["close_pattern"].replace("END", end),
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            }
            for name, form in CALL_FORMS.items()
        }
        for form in [_marked_json(text.partition(_TEXT)[2]), *forms.values()]:
            if form is None:
                continue
            template: dict[str, Any] = {
                "defaults": {"role": "assistant"},
                "start_anchor": anchor,
                "fields": {
                    "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
                    "tool_calls": {**form, "repeats": True},
                    "content": {"close_pattern": rf"(?:{end})\s*", "content": "text"},
                },
            }
            with suppress(ValueError, TypeError):
                message = self.tokenizer.parse_response(turn, template, prefix=before + anchor)
                if message.get("tool_calls") == [_call(_NAME, {_KEY: _VALUE})] * calls:
                    return template
        raise ConfigError(
            "the tokenizer has no response_template, and its chat template writes calls neither as JSON with name and "
            f"arguments between two marks, nor as {', '.join(CALL_FORMS)}; set tokenizer.response_template "
            "(transformers' page on response parsing says how)"
        )


def parse_turn(
    tokenizer: Any,
    response_template: Mapping[str, Any],
    tokens: Iterable[int],
    context: Iterable[int],
    tools: Sequence[Any],
) -> dict[str, Any]:
    """Returns a turn as a message with its tool calls; a turn that can't be parsed becomes its plain text.

    Args:
        tokenizer: of transformers.
        response_template: as transformers' parse_response takes it.
        tokens: of the turn.
        context: ids that the turn follows.
        tools: schemas of the tools, which give the arguments their types.
    """
    ids, before = [int(i) for i in tokens], [int(i) for i in context]
    try:
        message = tokenizer.parse_response(ids, response_template, prefix=before, tools=list(tools) or None)
        return _checked_message(message, tokenizer.eos_token)
    except (ValueError, TypeError):
        return {"role": "assistant", "content": str(tokenizer.decode(ids, skip_special_tokens=True))}


def split_reasoning(text: str) -> dict[str, Any]:
    r"""Returns the text of a turn as a message, with what stands before </think> as its reasoning_content.

    The mark <think> may be the end of the prompt. Args: text: without calls.

    >>> split_reasoning("<think>\n2 and 3\n</think>\n\n5")
    {'role': 'assistant', 'content': '5', 'reasoning_content': '2 and 3'}
    """
    thought, mark, said = text.rpartition("</think>")
    if not mark:
        return {"role": "assistant", "content": text}
    thought = thought.strip().removeprefix("<think>").strip()
    return {"role": "assistant", "content": said.lstrip(), "reasoning_content": thought}


class ReasoningStream:
    """Separates the thinking from the content of a turn while it grows: `split_reasoning` for a stream.

    A turn that begins with <think> is thinking up to </think>, or to its end if that is missing.

    Args: is_open: the prompt ends with <think>.

    >>> turn = ReasoningStream(is_open=False)
    >>> turn.push("<thi"), turn.push("nk>2 and 3</"), turn.push("think> 5", last=True)
    (('', ''), ('2 and 3', ''), ('', '5'))
    """

    def __init__(self, *, is_open: bool) -> None:
        self._place: Literal["start", "thought", "content"] = "thought" if is_open else "start"
        self._held, self._at_start = "", True

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Returns what more text adds to the thinking and to the content. Args: last: no more text follows."""
        self._held += text
        if self._place == "start":
            begun = self._held.lstrip()
            if begun.startswith("<think>"):
                self._place, self._held = "thought", begun.removeprefix("<think>")
            elif last or not "<think>".startswith(begun):
                self._place, self._at_start = "content", False
            else:
                return "", ""
        thought = ""
        if self._place == "thought":
            inside, mark, rest = self._held.partition("</think>")
            keep = 0 if mark or last else next((n for n in range(8, 0, -1) if inside.endswith("</think>"[:n])), 0)
            inside, held = inside[: len(inside) - keep], inside[len(inside) - keep :]
            spaces = inside[len(inside.rstrip()) :]
            thought = self._without_first_spaces(inside.rstrip())
            if not mark:
                self._held = "" if last else spaces + held
                return thought, ""
            self._place, self._held, self._at_start = "content", rest, True
        content, self._held = self._without_first_spaces(self._held), ""
        return thought, content

    def _without_first_spaces(self, text: str) -> str:
        """Returns a text without the spaces with which its part of the turn begins."""
        text = text.lstrip() if self._at_start else text
        self._at_start = self._at_start and not text
        return text


def _checked_message(message: Any, eos: str) -> dict[str, Any]:
    """Returns the message with a text as its content and arguments in each call. Raises ValueError: it has another
    form.
    """
    if not isinstance(message, dict):
        raise ValueError("no message")
    content = message.get("content")
    message = {**message, "content": content.removesuffix(eos) if isinstance(content, str) else ""}
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call without a name")
        if function.get("arguments") is None:
            function["arguments"] = {}
    return message


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _probe(*names: str) -> list[dict[str, Any]]:
    """Returns a conversation in which the model says a word and calls tools of these names."""
    calls = [_call(name, {_KEY: _VALUE}) for name in names]
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _TEXT, "tool_calls": calls}]


def _marked_json(text: str) -> dict[str, Any] | None:
    """Returns the field tool_calls for calls as JSON between two marks; None = they are written otherwise.

    Args: text: of two calls.
    """
    try:
        opening, _, rest = _split_at_json(text)
        between, _, _ = _split_at_json(rest)
    except ValueError:
        return None
    opening = opening.strip()
    closing = between.strip().removesuffix(opening).strip()
    if not opening or not closing:
        return None
    return {
        "open": opening,
        "close_pattern": rf"{re.escape(closing)}\s*",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }


def _split_at_json(text: str) -> tuple[str, Any, str]:
    """Returns the text before the first JSON object, the object, and the text after it. Raises ValueError: there is
    none.
    """
    start = text.index("{")
    value, end = json.JSONDecoder().raw_decode(text, start)
    return text[:start], value, text[end:]
