"""Options behind the name of a data source: `library:name?option=value&...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from whet.config.yaml12 import parse
from whet.errors import ConfigError, lookup_error

__all__ = ["source_options"]


def source_options(
    source: str, known: Sequence[str], least: Mapping[str, int], *, dotted: bool = False
) -> dict[str, Any]:
    """Returns the options of a source, their values read as YAML.

    Args: source: "library:name?option=value&...". known: the names of options. least: option -> its smallest value, of
        those that are whole numbers. dotted: whether a known name may have further names behind a dot.
    Raises: ConfigError: an unknown option, or a number that is too small.

    >>> source_options("reasoning_gym:chain_sum?size=20", ["size"], {"size": 1})
    {'size': 20}
    """
    name, _, query = source.partition("?")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if (key.partition(".")[0] if dotted else key) not in known:
            raise lookup_error(f"option of {name}", key, known)
        options[key] = parse(value, source)
    for key, low in least.items():
        if not isinstance(value := options.get(key, low), int) or value < low:
            raise ConfigError(f"{source}: {key}={value} must be a whole number from {low} on")
    return options
