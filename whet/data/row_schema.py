"""The forms that rows come in: what is a text, what a conversation, and which column holds it.

A conversation is a list of messages with role and content, or with from and value (ShareGPT's form, whose names of
roles are replaced), or such a list as JSON in a text, which is what a CSV file can hold.
Left out on purpose: images, and guessing at names of columns beyond those listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import DataError, format_value, nearest
from whet.types import Message

__all__ = [
    "EMPTY_PROMPT",
    "check_no_images",
    "check_text",
    "find_column",
    "has_text",
    "message_text",
    "normalize_message",
    "normalize_messages",
    "read_messages",
    "read_text_or_messages",
    "template_options",
]

IMAGE_COLUMNS = ("image", "images")
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles."""

TextOrMessages = str | list[Message]
"""A text, or a conversation."""
EMPTY_PROMPT = (
    "row %d: the prompt is empty, so the model is asked nothing; fill it, or leave such rows out (only the first is "
    "named)"
)
"""The warning about a prompt that has no text."""


def find_column(row: Mapping[str, Any], names: Sequence[str], given: str | None, number: int, what: str) -> str | None:
    """The column that holds something: the one that was named, else the first of the usual names that is there.

    Args: row: column -> value. names: the usual ones. given: what the configuration names, or None. number: of the row.
        what: the field that names it, for the message.
    Returns: its name; None where none of the usual names is there, or it holds None.
    Raises: DataError: the one that was named is not there.

    >>> find_column({"question": "2+2="}, ("prompt", "question"), None, 0, "prompt_column")
    'question'
    """
    if given is not None and given not in row:
        names = [str(name) for name in row]
        raise DataError(
            f"row {number} has no column {given!r}, which {what} names{nearest(given, names)}; it has "
            f"{', '.join(names)}"
        )
    return next((n for n in ((given,) if given else names) if row.get(n) is not None), None)


def read_text_or_messages(row: Mapping[str, Any], column: str, number: int) -> TextOrMessages:
    """What a column says: a text, or a conversation; the JSON of a list of messages is a conversation.

    Raises: DataError: it holds neither.

    >>> read_text_or_messages({"prompt": '[{"from": "human", "value": "hi"}]'}, "prompt", 0)
    [{'role': 'user', 'content': 'hi'}]
    """
    value = row[column]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        listed = _json_list(value)
        return (
            check_text(str(value), f"row {number}, column {column!r}")
            if listed is None
            else normalize_messages(listed, number)
        )
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        number_of_csv = "; a csv file's numbers are read as numbers: keep texts such as '42' in a .jsonl file"
        raise DataError(
            f"row {number}: column {column!r} holds {type(value).__name__} {format_value(value)}; expected a text or a "
            f"list of messages{number_of_csv if isinstance(value, int | float) else ''}"
        )
    return normalize_messages(value, number)


def read_messages(row: Mapping[str, Any], column: str, number: int) -> list[Message]:
    """A column's conversation. Raises DataError where it holds something else."""
    value = read_text_or_messages(row, column, number)
    if isinstance(value, str):
        raise DataError(
            f"row {number}: column {column!r} holds the text {format_value(value, 60)}; expected a list of messages, "
            "or its JSON",
            fix="name a column of plain text in text_column, or in prompt_column and response_column",
            key="data.text_column",
        )
    return value


def template_options(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A row's own arguments of the template: its columns tools and chat_template_kwargs, as they are or as JSON.

    Raises: DataError: they are something else.

    >>> template_options({"tools": '[{"name": "add"}]', "chat_template_kwargs": None}, 0)
    {'tools': [{'name': 'add'}]}
    """
    options: dict[str, Any] = {}
    for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise DataError(
                    f"row {number}: column {column!r} is not JSON: {error}: {format_value(value, 60)}"
                ) from error
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if value is not None and not isinstance(value, kind):
            raise DataError(
                f"row {number}: column {column!r} holds {format_value(value, 60)}; expected "
                f"{'a list of functions as JSON schemas' if kind is list else 'a mapping'}, or its JSON"
            )
        if value:
            options |= {"tools": drop_none(value)} if kind is list else value
    return options


def check_no_images(row: Mapping[str, Any], number: int) -> None:
    """Raises DataError for columns of images."""
    for column in IMAGE_COLUMNS:
        if column in row and row[column] is not None:
            raise DataError(f"row {number} has an {column!r} column; whet trains on text alone, remove the column")


def check_text(text: str, where: str) -> str:
    """The text, if UTF-8 can hold it. Raises DataError where it can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {text[:40]!r} is not valid text ({error.reason}); repair the encoding") from error
    return text


def normalize_message(message: Any, place: int, number: int) -> Message:
    """One message, checked; keys that a table filled with None are left out.

    Args: message: with a role, and a content or tool_calls. place: its, in the conversation. number: of the row.
    Raises: DataError: it is no message, or has parts that are no text.
    """
    if isinstance(message, Mapping) and "content" not in message and message.get("tool_calls"):
        message = {**message, "content": ""}
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise DataError(f"row {number}, message {place}: {format_value(message)}; a message has a role and a content")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not (isinstance(content, str | list | tuple) or "tool_calls" in message):
        raise DataError(
            f"row {number}, message {place}: role {format_value(role)} with content {format_value(content, 60)}; both "
            "are texts: leave the message out, or give it a text"
        )
    parts = content if isinstance(content, list | tuple) else ()
    for text in (content, *(p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str))):
        if isinstance(text, str):
            check_text(text, f"row {number}, message {place}")
    kinds = {part["type"] for part in parts if isinstance(part, Mapping) and "type" in part}
    if kinds - {"text"}:
        raise DataError(
            f"row {number}, message {place} has parts {', '.join(sorted(kinds))}; whet trains on text alone"
        )
    if wrong := [part for part in parts if not isinstance(part, str | Mapping)]:
        raise DataError(f"row {number}, message {place} has the part {format_value(wrong[0], 60)}; a part is a text")
    known = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**known, "tool_calls": drop_none(known["tool_calls"])} if "tool_calls" in known else known


def message_text(message: Message) -> str:
    """The text of a message, its parts joined.

    >>> message_text({"role": "user", "content": [{"type": "text", "text": "2+2"}, "="]})
    '2+2='
    """
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def has_text(messages: Iterable[Message]) -> bool:
    """Whether a message of these has text besides white space.

    >>> has_text([{"role": "system", "content": ""}, {"role": "user", "content": " "}])
    False
    """
    return any(message_text(message).strip() for message in messages)


def drop_none(value: Any) -> Any:
    """A value without the keys that a table filled with None, since all its rows have the same.

    >>> drop_none([{"name": "add", "arguments": {"a": 1, "city": None}}])
    [{'name': 'add', 'arguments': {'a': 1}}]
    """
    if isinstance(value, Mapping):
        return {key: drop_none(inner) for key, inner in value.items() if inner is not None}
    return [drop_none(inner) for inner in value] if isinstance(value, list | tuple | np.ndarray) else value


def normalize_messages(messages: Iterable[Any], number: int) -> list[Message]:
    """The messages of a row, checked, those of ShareGPT's form in the usual one. Raises DataError for what is none."""
    return [normalize_message(_renamed(m, place, number), place, number) for place, m in enumerate(messages)]


def _renamed(message: Any, place: int, number: int) -> Any:
    """A message of ShareGPT's form in the usual one; any other as it is."""
    if not isinstance(message, Mapping) or not {"from", "value"} <= message.keys() or "role" in message:
        return message
    if message["from"] not in ROLES:
        raise DataError(
            f"row {number}, message {place}: from {format_value(message['from'], 40)} is no known role"
            f"{nearest(str(message['from']), ROLES)}; known: {', '.join(sorted(ROLES))}"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": ROLES[message["from"]], "content": message["value"], **rest}


def _json_list(text: str) -> list[Any] | None:
    """The list of messages that a text is the JSON of; None where it is another text."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ({"role", "content"}, {"from", "value"})
    messages = [m for m in value if isinstance(m, dict) and any(k <= m.keys() for k in keys)]
    return value if value and len(messages) == len(value) else None
