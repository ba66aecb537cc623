"""The types of fields, with their limits.

They convert nothing implicitly: True is not an integer, nor is 2.0. numpy's numbers are accepted. Every number has
limits, so that a typo is refused here with its key, and not later by a library or the memory allocator. A field that
needs narrower limits checks them itself.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from whet.errors import format_value

__all__ = [
    "MAX_DEPTH",
    "TYPE_NAMES",
    "Bool",
    "Count",
    "Float",
    "Fn",
    "Functions",
    "Int",
    "Items",
    "Name",
    "Number",
    "Seconds",
    "Seed",
    "Size",
    "Strings",
    "Temperature",
    "Text",
    "Tree",
    "as_name",
]

MAX_DEPTH = 64
"""Largest nesting depth of lists and mappings, far below Python's recursion limit."""
MAX_FLOAT, MIN_FLOAT = 3.4e38, 1.2e-38
"""The largest and the smallest positive number of fp32."""


def _is_bool(value: Any) -> bool:
    """Returns whether a value is Python's or numpy's bool. numpy calls it bool_ or bool, depending on its version."""
    return type(value).__name__ in ("bool", "bool_")


def _integer(value: Any) -> int:
    if _is_bool(value):
        raise ValueError(f"expected an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"expected an integer, got {format_value(value)}") from None


def _int(value: Any, *, least: int, rule: str) -> int:
    number = _integer(value)
    if not least <= number < 2**63:
        raise ValueError(f"must be {rule}, got {format_value(value)}")
    return number


def _count(value: Any, *, most: int) -> int:
    try:
        number = _integer(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"must be a positive integer. Got: {format_value(value)}")
    if number > most:
        raise ValueError(f"must be at most {most}, got {format_value(value)}")
    return number


def _number(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError(f"must not be negative, got {format_value(value)}")
    if number > 10**9:
        raise ValueError(f"must be at most {10**9}, got {format_value(value)}")
    return number


def _float(value: Any, *, least: float, most: float, unit: str) -> float:
    if _is_bool(value):
        raise ValueError(f"expected a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, got {format_value(value)}") from None
    except OverflowError:  # an integer beyond every float
        number = 10 * most if value > 0 else -10 * most
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {format_value(value)}")
    if not least <= number <= most:
        raise ValueError(f"must be between {least:g} and {most:g}{unit}, got {format_value(value)}")
    return number


def _fp32(value: Any) -> float:
    number = _float(value, least=-MAX_FLOAT, most=MAX_FLOAT, unit=", the range of fp32")
    if 0 < abs(number) < MIN_FLOAT:
        raise ValueError(
            f"must be 0 or at least {MIN_FLOAT} in magnitude, which fp32 can hold, got {format_value(value)}"
        )
    return number


def _temperature(value: Any) -> float:
    number = _fp32(value)
    if number < 0:
        raise ValueError(f"must not be negative, got {number!r}; 0.0 is greedy")
    if number and not 1e-6 <= number <= 1e6:
        raise ValueError(f"must be 0.0 (greedy) or between 1e-06 and 1e+06, got {number!r}")
    return number


def _bool(value: Any) -> bool:
    if _is_bool(value):
        return bool(value)
    raise ValueError(f"expected true or false, got {format_value(value)}")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{format_value(value)} is not valid text: {error.reason}") from None
    return value


def as_name(value: str) -> str:
    """Returns a text that is a name or a path. Raises ValueError for an empty text."""
    if not value.strip():
        raise ValueError(f"must not be empty, got {value!r}; leave the key out")
    if "\0" in value:
        raise ValueError(f"must not hold a NUL character, got {format_value(value)}")
    if value == "None":
        raise ValueError("is the text 'None'; nothing is null in YAML, None in Python")
    return _text(value)


def _check_plain(value: Any, depth: int = 0) -> Any:
    """Returns the value. Raises ValueError for a value that a YAML file would not give back unchanged."""
    if depth > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, Mapping):
        for key, inside in value.items():
            _check_plain(key, depth + 1)
            _check_plain(inside, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for inside in value:
            _check_plain(inside, depth + 1)
    elif isinstance(value, str):
        _text(value)
    elif isinstance(value, int) and abs(value) >= 10**300:
        raise ValueError("contains an integer of more than 300 digits")
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError("contains a NaN, which equals nothing; leave it out")
    return value


_whole64 = functools.partial(_int, least=-(2**63), rule="an integer of 64 bits, -2**63 to 2**63 - 1")
_seconds = functools.partial(_float, least=0, most=threading.TIMEOUT_MAX, unit=" seconds")
_seed = functools.partial(_int, least=0, rule="an integer between 0 and 2**63 - 1")

Int = Annotated[int, BeforeValidator(_whole64)]
"""An integer of 64 bits, numpy's included; neither a bool nor a float."""
Seed = Annotated[int, BeforeValidator(_seed)]
"""An integer between 0 and 2**63 - 1."""
Number = Annotated[int, BeforeValidator(_number)]
"""An integer between 0 and 10**9: steps or tokens, with 0 allowed."""
Count = Annotated[int, BeforeValidator(functools.partial(_count, most=10**9))]
"""A positive integer up to 10**9: steps or tokens."""
Size = Annotated[int, BeforeValidator(functools.partial(_count, most=10**6))]
"""A positive integer up to 10**6: a batch size or another number of things processed at once."""
Float = Annotated[float, BeforeValidator(_fp32)]
"""A finite number that fp32 holds."""
Seconds = Annotated[float, BeforeValidator(_seconds)]
"""A time in seconds between 0 and threading.TIMEOUT_MAX, almost three centuries on Linux."""
Temperature = Annotated[float, BeforeValidator(_temperature)]
"""A sampling temperature: 0.0, or a number between 1e-6 and 1e6."""
Bool = Annotated[bool, BeforeValidator(_bool)]
"""True or false; no number and no text."""
Text = Annotated[str, AfterValidator(_text)]
"""Text that UTF-8 holds; may be empty."""
Name = Annotated[str, AfterValidator(as_name)]
"""Text that is not empty: a name, a path."""
Strings = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]
"""A list of strings; a single string counts as a list."""
Items = Annotated[tuple[Any, ...], BeforeValidator(_as_tuple), AfterValidator(_check_plain)]
"""A list of names or objects; a single one counts as a list."""
Tree = Annotated[dict[str, Any], AfterValidator(_check_plain)]
"""Arguments for another library: any plain values, up to 64 levels deep."""
Fn = Callable[..., Any]
"""A function, class or partial."""
Functions = Annotated[tuple[Name | Fn, ...], BeforeValidator(_as_tuple)]
"""A list of names or functions; a single one counts as a list."""

TYPE_NAMES = {
    "Bool": "bool",
    "Count": "positive int",
    "Float": "float",
    "Fn": "callable",
    "Int": "int",
    "Items": "list",
    "Meshes": "dict[Role, DeviceMesh]",
    "Name": "str",
    "Number": "int",
    "Recompute": "auto | none | selective | full",
    "Pieces": "list of str | callable",
    "Seconds": "float",
    "Seed": "int",
    "Size": "positive int",
    "Sources": "str | list",
    "Strings": "list of str",
    "Temperature": "float",
    "Text": "str",
    "Tree": "dict[str, Any]",
}
"""Type -> its name in help and messages."""
