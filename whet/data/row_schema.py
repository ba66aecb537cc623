"""Reads texts and conversations from the columns of a row, and checks them.

A conversation is a list of messages with role and content, or with from and value (ShareGPT's form; its role names are
converted). It may also be such a list as a JSON string, which a CSV file can hold.
Left out on purpose: images, and other column names than those listed here.
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
    "row %d: the prompt is empty, so it asks for nothing; fill it, or leave such rows out (only the first is reported)"
)
"""The warning about a prompt that has no text."""


def find_column(row: Mapping[str, Any], names: Sequence[str], name: str | None, number: int, key: str) -> str | None:
    """Returns the column with a value: the configured one, or the first of the default names that exists.

    Args: row: column -> value. names: the default names. name: the configured name, or None. number: the row number.
        key: the configuration field of the name, for the message.
    Returns: the column's name; None = there is no such column, or its value is None.
    Raises: DataError: the configured column does not exist.

    >>> find_column({"question": "2+2="}, ("prompt", "question"), None, 0, "prompt_column")
    'question'
    """
    if name is not None and name not in row:
        columns = [str(column) for column in row]
        raise DataError(
            f"row {number} has no column {name!r}, which {key} names{nearest(name, columns)}; it has "
            f"{', '.join(columns)}"
        )
    return next((n for n in ((name,) if name else names) if row.get(n) is not None), None)


def read_text_or_messages(row: Mapping[str, Any], column: str, number: int) -> TextOrMessages:
    """Returns the text or the conversation in a column; a JSON list of messages is a conversation.

    Raises: DataError: the column holds neither.

    >>> read_text_or_messages({"prompt": '[{"from": "human", "value": "hi"}]'}, "prompt", 0)
    [{'role': 'user', 'content': 'hi'}]
    """
    value = row[column]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        messages = _json_list(value)
        return (
            check_text(str(value), f"row {number}, column {column!r}")
            if messages is None
            else normalize_messages(messages, number)
        )
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        csv_hint = "; a csv file's numbers are read as numbers: keep texts such as '42' in a .jsonl file"
        raise DataError(
            f"row {number}: column {column!r} holds {type(value).__name__} {format_value(value)}; expected a text or a "
            f"list of messages{csv_hint if isinstance(value, int | float) else ''}"
        )
    return normalize_messages(value, number)


def read_messages(row: Mapping[str, Any], column: str, number: int) -> list[Message]:
    """Returns the conversation in a column. Raises DataError if the column holds something else."""
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
    """Returns the template arguments of a row: its columns tools and chat_template_kwargs, as values or as JSON.

    Raises: DataError: a column has another type.

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
            raise DataError(f"row {number} has an {column!r} column; whet trains on text only; remove the column")


def check_text(text: str, where: str) -> str:
    """Returns the text. Raises DataError if it can't be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {text[:40]!r} is not valid text ({error.reason}); repair the encoding") from error
    return text


def normalize_message(message: Any, place: int, number: int) -> Message:
    """Checks a message, and removes keys with the value None, which tables add.

    Args: message: has a role, and content or tool_calls. place: its index in the conversation. number: the row number.
    Raises: DataError: it is not a message, or has parts other than text.
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
        raise DataError(f"row {number}, message {place} has parts {', '.join(sorted(kinds))}; whet trains on text only")
    if wrong := [part for part in parts if not isinstance(part, str | Mapping)]:
        raise DataError(
            f"row {number}, message {place} has the part {format_value(wrong[0], 60)}; a part must be a text"
        )
    fields = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**fields, "tool_calls": drop_none(fields["tool_calls"])} if "tool_calls" in fields else fields


def message_text(message: Message) -> str:
    """Returns the text of a message, its parts joined.

    >>> message_text({"role": "user", "content": [{"type": "text", "text": "2+2"}, "="]})
    '2+2='
    """
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def has_text(messages: Iterable[Message]) -> bool:
    """Returns whether any of the messages has text other than white space.

    >>> has_text([{"role": "system", "content": ""}, {"role": "user", "content": " "}])
    False
    """
    return any(message_text(message).strip() for message in messages)


def drop_none(value: Any) -> Any:
    """Removes keys with the value None from nested mappings; tables add them, because all rows have the same keys.

    >>> drop_none([{"name": "add", "arguments": {"a": 1, "city": None}}])
    [{'name': 'add', 'arguments': {'a': 1}}]
    """
    if isinstance(value, Mapping):
        return {key: drop_none(inner) for key, inner in value.items() if inner is not None}
    return [drop_none(inner) for inner in value] if isinstance(value, list | tuple | np.ndarray) else value


def normalize_messages(messages: Iterable[Any], number: int) -> list[Message]:
    """Checks the messages of a row, and converts ShareGPT's form. Raises DataError for an invalid message."""
    return [normalize_message(_convert_sharegpt(m, place, number), place, number) for place, m in enumerate(messages)]


def _convert_sharegpt(message: Any, place: int, number: int) -> Any:
    """Converts a message of ShareGPT's form; returns any other message unchanged."""
    if not isinstance(message, Mapping) or not {"from", "value"} <= message.keys() or "role" in message:
        return message
    if message["from"] not in ROLES:
        raise DataError(
            f"row {number}, message {place}: from {format_value(message['from'], 40)} is not a known role"
            f"{nearest(str(message['from']), ROLES)}; known: {', '.join(sorted(ROLES))}"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": ROLES[message["from"]], "content": message["value"], **rest}


def _json_list(text: str) -> list[Any] | None:
    """Returns the list of messages in a JSON text; None = the text is not such a list."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ({"role", "content"}, {"from", "value"})
    messages = [m for m in value if isinstance(m, dict) and any(k <= m.keys() for k in keys)]
    return value if value and len(messages) == len(value) else None
