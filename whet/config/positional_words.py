"""Command-line arguments that are not key=value: configuration files, and suggestions for mistakes.

An argument that ends in .yaml or .yml is a configuration file, as after --config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["is_config_file", "rest_of_value", "suggest_key"]

_ROWS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_KEY = re.compile(r"(?:--)?[A-Za-z_]\w*(?:[.-]\w+)*")
_CLOSING = {"[": "]", "{": "}"}


def is_config_file(word: str) -> bool:
    """Returns whether a command-line argument is a configuration file.

    >>> is_config_file("run.yaml"), is_config_file("a=run.yaml"), is_config_file("--run.yaml")
    (True, False, False)
    """
    return word.endswith((".yaml", ".yml")) and "=" not in word and not word.startswith("-")


def suggest_key(words: Sequence[str], place: int, short: Mapping[str, str]) -> str:
    """Returns the end of the message about an argument that is neither key=value nor a flag: the fix.

    Args: words: all arguments. place: of the wrong one. short: the command's shorthands.

    >>> suggest_key(["model", "=", "a/b"], 0, {}), suggest_key(["a.jsonl"], 0, {"data": "data.path"})
    ('; write model=a/b, without blanks', '; did you mean data=a.jsonl?')
    """
    word, after = words[place], [*words[place + 1 :], "", ""]
    before = words[place - 1] if place else ""
    if before.endswith("=") and before != "=":
        return f"; write {before}{word}, without a blank"
    if after[0] == "=" and after[1]:
        return f"; write {word}={after[1]}, without blanks"
    if word.startswith("-"):
        return f"; write --config {after[0] or 'FILE'}" if is_config_file(after[0]) else "; options have two dashes"
    key, colon, value = word.partition(":")
    if colon and value and _KEY.fullmatch(key) and not key.endswith(".py"):
        return f"; write {key}={value}"
    if short and word.endswith(_ROWS):
        return f"; did you mean {'data' if 'data' in short else 'prompts'}={word}?"
    if short and ("/" in word or Path(word).is_dir()):
        return f"; did you mean model={word}?"
    if not _KEY.fullmatch(word):
        return ""
    value = after[0] if after[0] and "=" not in after[0] and not after[0].startswith("--") else "VALUE"
    return f"; write {word}={value}"


def rest_of_value(key: str, text: str, words: Sequence[str]) -> str:
    """Returns the end of the message about a value that the shell has split at its blanks; "" if it is not split.

    Args: key, text: of the argument. words: the arguments that follow.

    >>> rest_of_value("rollout.eval", "{temperature:", ["0.0}", "a=1"])
    "; a value with blanks is quoted: 'rollout.eval={temperature: 0.0}'"
    """
    whole = text
    for word in ("", *words):
        whole = f"{whole} {word}".strip()
        if all(whole.count(a) == whole.count(b) for a, b in _CLOSING.items()):
            return f"; a value with blanks is quoted: '{key}={whole}'" if whole != text else ""
    return ""
