"""Checks that a chat template shows the text of every message, and does not trim, rewrite or omit it.

The template runs a second time on messages in which stand-ins replace the text. A missing stand-in means that the
template omitted the text. If the output with the stand-ins replaced by the original text differs from the first output,
the template changed the text. Tags (<think>, </think>) and the white space next to them are kept, because templates
search for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.templates import ChatTemplate
from whet.errors import DataError
from whet.types import Message

__all__ = ["RenderedText", "find_changed_text"]

TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold text."""
TAG = re.compile("(<[^<>\n\ue000]{1,40}>)")
STAND_IN = re.compile("\ue000([0-9]+)\ue001")
MAX_SHOWN = 160
"""Characters of each text in a message."""


@dataclass(frozen=True)
class RenderedText:
    """The output of a template for the first messages. Example: RenderedText("<user>hi<end>", 1, {})."""

    text: str
    messages: int
    """How many messages were rendered."""
    options: Mapping[str, Any]
    """Further arguments of the template."""


class _StandIns:
    """The texts of messages and their stand-ins."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.owners: list[int] = []
        """The index of the message that holds each text."""
        self.place = -1
        self.escaped: set[int] = set()
        """The stand-ins that a template may write as JSON: those in tool calls and tool answers."""

    def of_text(self, text: str, json_too: bool) -> str:
        """Returns a text with stand-ins: one for each part between tags, including white space at the ends of
        the text.
        """
        parts = TAG.split(text)
        last = len(parts) - 1
        for place in range(0, last + 1, 2):
            part = parts[place]
            stripped = part.strip()
            at_end = place in (0, last)
            start = len(part) - len(part.lstrip()) if place > 0 and (stripped or not at_end) else 0
            end = len(part.rstrip()) if place < last and (stripped or not at_end) else len(part)
            if start < end:
                parts[place] = part[:start] + self._add(part[start:end], json_too) + part[end:]
        joined = "".join(parts)
        return self._add(text, json_too) if text and joined == text else joined  # nothing but tags

    def _add(self, text: str, json_too: bool) -> str:
        self.texts.append(text)
        self.owners.append(self.place)
        if json_too:
            self.escaped.add(len(self.texts) - 1)
        return f"\ue000{len(self.texts) - 1}\ue001"

    def message(self, message: Message) -> Message:
        """Returns the next message, with stand-ins."""
        self.place += 1
        replaced = dict(message)
        tool = message["role"] in ("tool", "ipython", "function")
        for key in TEXT_KEYS:
            value = message.get(key)
            if isinstance(value, str):
                replaced[key] = self.of_text(value, tool)
            elif isinstance(value, list | tuple):
                replaced[key] = [self._part(part, tool) for part in value]
        if message.get("tool_calls"):
            replaced["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return replaced

    def _part(self, part: Any, tool: bool) -> Any:
        if isinstance(part, str):
            return self.of_text(part, tool)
        return {k: self.of_text(v, tool) if k == "text" and isinstance(v, str) else v for k, v in part.items()}

    def _call(self, call: Any) -> Any:
        """Returns a call with stand-ins for the function's name and the texts of its arguments."""
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        return {k: self._leaves(v) if k in ("name", "arguments") else v for k, v in call.items()}

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.of_text(value, True)
        if isinstance(value, Mapping):
            return {k: self._leaves(v) for k, v in value.items()}
        return [self._leaves(v) for v in value] if isinstance(value, list | tuple) else value

    def shows(self, with_stand_ins: str, text: str) -> bool:
        """Returns whether `text` results from replacing the stand-ins with their texts."""
        if STAND_IN.sub(lambda match: self.texts[int(match[1])], with_stand_ins) == text:
            return True
        parts = STAND_IN.split(with_stand_ins)
        pattern = [re.escape(p) if place % 2 == 0 else self.either(int(p)) for place, p in enumerate(parts)]
        return bool(self.escaped) and re.fullmatch("".join(pattern), text) is not None

    def either(self, number: int) -> str:
        """Returns a regular expression for every form in which a template may write the text of a stand-in."""
        text = self.texts[number]
        forms = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]]
        accepted = dict.fromkeys(forms if number in self.escaped else forms[:1])
        return f"(?:{'|'.join(re.escape(form) for form in accepted)})"


def find_changed_text(
    template: ChatTemplate, messages: Sequence[Message], shown: Sequence[RenderedText], row: int = 0
) -> str:
    """Describes the first text of a message that a template changes or omits; "" = there is none.

    Args:
        template: the template of the outputs.
        messages: a conversation.
        shown: the outputs of the template; the text of each message must occur in one of them.
        row: the row number for error messages.
    Raises: DataError: the template prints a list or a mapping in Python's notation.
    """
    if _shows_plain_texts(template, messages, shown, row):
        return ""
    stand_ins = _StandIns()
    most = max(s.messages for s in shown)
    replaced = [stand_ins.message(m) for m in messages[:most]]
    texts = [template.text_of_stand_ins(replaced[: s.messages], row, s.options) for s in shown]
    missing = dict(enumerate(_texts_with_stand_ins(m) for m in replaced))
    for one, text in zip(shown, texts, strict=True):
        _check_no_python_notation(messages[: one.messages], one, row)
        for place in list(missing):
            missing[place] = [words for words in missing[place] if words not in text]
    for place, words in missing.items():
        if words:
            where = next(s for s in shown if s.messages > place)
            expected = STAND_IN.sub(lambda found: stand_ins.texts[int(found[1])], words[0])
            return _describe_difference(
                place, str(messages[place]["role"]), expected, _text_after(messages, place, where.text)
            )
    for one, text in zip(shown, texts, strict=True):
        if not stand_ins.shows(text, one.text) and not _shows_all_texts(template, messages, one, row):
            return _first_change(messages, stand_ins, text, one.text)
    return ""


def _shows_plain_texts(
    template: ChatTemplate, messages: Sequence[Message], shown: Sequence[RenderedText], row: int
) -> bool:
    """Tells whether each output is that of the stand-ins with the texts put in, quickly for messages that have only
    a role and a text without tags: the output of the stand-ins then depends on the roles alone.

    Returns: False also says that a closer look is needed.
    """
    messages = messages[: max(s.messages for s in shown)]
    for message in messages:
        text = message.get("content")
        if not isinstance(text, str) or not text or len(message) != 2 or ("<" in text and TAG.search(text)):
            return False
    if any("tools" in s.options for s in shown):
        return False
    key = (*(m["role"] for m in messages), *((s.messages, repr(s.options)) for s in shown))
    if key not in template.forms:
        replaced: list[Message] = [{**m, "content": f"\ue000{i}\ue001"} for i, m in enumerate(messages)]
        texts = [template.text_of_stand_ins(replaced[: s.messages], row, s.options) for s in shown]
        found = {number for text in texts for number in STAND_IN.findall(text)}
        forms = [STAND_IN.split(text) for text in texts] if len(found) == len(messages) else []
        template.forms[key] = forms
    forms = template.forms[key]
    return bool(forms) and all(
        "".join(str(messages[int(p)]["content"]) if i % 2 else p for i, p in enumerate(form)) == s.text
        for form, s in zip(forms, shown, strict=True)
    )


def _texts_with_stand_ins(message: Message) -> list[str]:
    """Returns all texts of a message that contain a stand-in."""
    texts: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, Mapping):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)

    for key in (*TEXT_KEYS, "tool_calls"):
        walk(message.get(key))
    return [text for text in texts if STAND_IN.search(text)]


def _shows_all_texts(template: ChatTemplate, messages: Sequence[Message], shown: RenderedText, row: int) -> bool:
    """Returns whether the output shows all texts, for templates that write something else around other texts.

    White space at the ends of a text counts where it changes the output.
    """
    for place, message in enumerate(messages[: shown.messages]):
        content = message.get("content")
        if not isinstance(content, str) or "tool_calls" in message or content not in shown.text:
            return False
        if content != content.strip():
            bare = [*messages[:place], {**message, "content": content.strip()}, *messages[place + 1 : shown.messages]]
            if template.text(bare, row=row, **shown.options) == shown.text:
                return False
    return True


def _first_change(messages: Sequence[Message], stand_ins: _StandIns, with_stand_ins: str, text: str) -> str:
    """Describes the first message that the output shows with a different text, with both texts."""
    at, pieces, number = 0, STAND_IN.split(with_stand_ins), 0
    for place in range(0, len(pieces) - 2, 2):
        number, after = int(pieces[place + 1]), pieces[place + 2]
        at += len(pieces[place])
        match = re.compile(stand_ins.either(number) + re.escape(after)).match(text, at)
        if match is None:
            break
        at = match.end() - len(after)
    place, after = stand_ins.owners[number], pieces[2 * pieces[1::2].index(str(number)) + 2]
    end = text.find(after, at) if after else len(text)
    shown = text[at : end if end > at else len(text)]
    return _describe_difference(place, str(messages[place]["role"]), stand_ins.texts[number], shown)


def _text_after(messages: Sequence[Message], place: int, text: str) -> str:
    """Returns the rest of the output after the message before `place`."""
    before = messages[place - 1].get("content") if place else None
    at = text.find(before) if isinstance(before, str) else -1
    return text[at + len(str(before)) :] if at >= 0 else text


def _describe_difference(place: int, role: str, text: str, shown: str) -> str:
    original, rendered = _excerpt(text, shown), _excerpt(shown, text)
    return f"message {place} ({role}) says {original!r}, and the chat template shows {rendered!r}"


def _excerpt(text: str, other: str) -> str:
    """Returns the part of a text where it begins to differ from another."""
    if len(text) <= MAX_SHOWN:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, min(same - MAX_SHOWN // 2, len(text) - MAX_SHOWN))
    return ("..." if start else "") + text[start : start + MAX_SHOWN] + ("..." if start + MAX_SHOWN < len(text) else "")


def _check_no_python_notation(messages: Sequence[Message], shown: RenderedText, row: int) -> None:
    """Raises DataError if the output contains a list or a mapping in Python's notation."""
    values: list[Any] = [m.get(key) for m in messages for key in (*TEXT_KEYS, "tool_calls")]
    for value in (node for v in (*values, shown.options.get("tools")) for node in _nodes(v)):
        printed = repr(value)
        if printed in shown.text and printed not in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            raise DataError(
                f"row {row}: the chat template prints {printed[:MAX_SHOWN]} in Python's notation, so it does not "
                "support such a value; use a text instead, or a template that supports it"
            )


def _nodes(value: Any) -> list[Any]:
    """Returns the non-empty lists and mappings in a value, outer ones first."""
    if isinstance(value, Mapping):
        return [dict(value), *(n for inner in value.values() for n in _nodes(inner))] if value else []
    if isinstance(value, list | tuple):
        return [list(value), *(n for inner in value for n in _nodes(inner))] if value else []
    return []
