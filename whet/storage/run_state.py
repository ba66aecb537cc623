"""run.pt: the run's own state in a checkpoint, and the checks of its fields.

torch.load with weights_only=True runs no code, but the numbers and containers may have any value. A field that is
missing, has another type or is out of range raises an error here, not in the middle of a run. A check that needs more
than this file (such as whether a position lies within the data) is done by the reader of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.config import Role
from whet.errors import CheckpointError
from whet.storage.checkpoint import check_format, read_state, step_number

__all__ = ["check_storable", "read_run_state"]

MAX_COUNT = 2**63 - 1
"""The largest count: counts are 64-bit integers."""


def read_run_state(path: Path, needs: Iterable[str] = ()) -> dict[str, Any]:
    """Reads and checks the run's own state.

    Args: path: run.pt in the folder of a checkpoint. needs: required entries, in addition to those that every run
        writes.
    Raises: CheckpointError: the file can't be read, has a format that this release does not know, lacks a field, or
        has a field with an invalid value.
    """
    state = read_state(path)
    if "format" in state:
        check_format(path, state["format"], weights=path.parent)
    if missing := [name for name in sorted({"format", *_FIELDS, *needs}) if name not in state]:
        raise CheckpointError(
            f"{path} has an unexpected format: no {', '.join(missing)}; resume from another step-* folder"
        )
    step, named = state["step"], step_number(path.parent)
    if named is not None and (type(step) is not int or step != named):
        raise CheckpointError(
            f"{path} is of step {step!r:.40}, but its folder is named {path.parent.name}; rename the folder back, or "
            "resume from another step-* folder"
        )
    for name, (rule, is_valid) in _FIELDS.items():
        _check(path, name, state[name], rule, is_valid)
    for name, (rule, is_valid) in _OPTIONAL.items():
        if name in state:
            _check(path, name, state[name], rule, is_valid)
    if "cluster" in state:
        for name, (rule, is_valid) in _CLUSTER.items():
            _check(path, f"cluster.{name}", state["cluster"].get(name), rule, is_valid)
    return state


def check_storable(value: Any, name: str) -> None:
    """Raises CheckpointError if torch.load with weights_only=True could not read a value back.

    Args: value: nested dicts, lists and tuples of plain values and tensors. name: the value's name, for the message.

    >>> check_storable({"beta": 0.1, "counts": [1, 2]}, "learner.state()")
    """
    if isinstance(value, Mapping) and type(value) is dict:
        for key, part in value.items():
            check_storable(key, f"a key of {name}")
            check_storable(part, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for place, part in enumerate(value):
            check_storable(part, f"{name}[{place}]")
    elif not (type(value) in (str, int, float, bool, type(None)) or isinstance(value, Tensor)):
        raise CheckpointError(
            f"{name} is {type(value).__name__} {value!r:.60}, which a checkpoint can't hold; give numbers, strings, "
            "None, tensors, and lists, tuples and dicts of them"
        )


def _check(path: Path, name: str, value: Any, rule: str, is_valid: Callable[[Any], bool]) -> None:
    if not is_valid(value):
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        raise CheckpointError(
            f"{path} has {shown:.60} as {name}, which must be {rule}; resume from an earlier step-* folder"
        )


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _mapping(value: Any, holds: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and holds(x) for key, x in value.items())


def _diagnostics(value: Any) -> bool:
    pair = lambda x: isinstance(x, list) and len(x) == 2 and all(_count(n) for n in x)
    parts = {
        "since": lambda x: _mapping(x, pair),
        "severity": lambda x: _mapping(x, lambda n: isinstance(n, float | int)),
    }
    return _mapping(value) and set(value) == set(parts) and all(parts[name](part) for name, part in value.items())


def _names(value: Any) -> bool:
    return _mapping(value, lambda name: isinstance(name, str))


def _lengths(value: Any) -> bool:
    right = isinstance(value, Tensor) and value.dtype == torch.long and value.dim() == 2 and len(value) == 2
    return right and bool((value >= 0).all())


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "inputs": ("a mapping", _mapping),
    "observers": ("a mapping by name", _mapping),
    "random": ("a mapping", _mapping),
    "replaced": ("a list of roles", lambda x: isinstance(x, list) and all(role in set(Role) for role in x)),
    "settings": ("a mapping", _mapping),
    "skipped": ("a mapping of whole numbers from 0", lambda x: _mapping(x, _count)),
    "step": ("a whole number from 1", lambda x: _count(x) and x > 0),
    "stream": (
        "a mapping of whole numbers",
        lambda x: _mapping(x) and all(type(n) is int for name, n in x.items() if name != "source"),
    ),
    "tokens": ("a whole number from 0", _count),
    "updates": ("a mapping of whole numbers from 0", lambda x: _mapping(x, _count)),
}
"""Fields that every run writes: the description of a valid value, and its check."""
_OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "cluster": ("a mapping", _mapping),
    "diagnostics": ("a mapping of the warnings that are active", _diagnostics),
    "learner": ("a mapping by name", _mapping),
    "models": (
        "a mapping of the dtype of each role",
        lambda x: _mapping(x) and set(x) == {"dtypes"} and _names(x["dtypes"]),
    ),
    "random_of_other_ranks": ("a list of mappings", lambda x: isinstance(x, list) and all(map(_mapping, x))),
}
"""Fields that only some kinds of runs write."""
_CLUSTER: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "next_id": ("a whole number from 0", _count),
    "dtypes": ("a mapping of names", _names),
    "lengths": ("a mapping of rows and lengths", lambda x: _mapping(x, _lengths)),
}
