"""Calls a user's function that makes a model: model=package.module:function or file.py:function.

Left out on purpose: functions that return a module. The function writes a folder, so that a resumed run finds it.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from whet.errors import ConfigError, WhetError, format_exception
from whet.util.references import resolve_callable

__all__ = ["call_model_factory"]

CALL = "it is called as function(folder=..., seed=...), and returns the folder into which it wrote the model"


def call_model_factory(reference: str, folder: str, seed: int) -> str:
    """Calls the function, and checks what it returns.

    Args: reference: to the function. folder: where it is to write a model. seed: of the run.
    Returns: the folder or name that it returned.
    Raises: ConfigError: no such function, it does not take these arguments, it raised, or it returned something else.
        Errors of whet pass through unchanged.

    Example: call_model_factory("whet.demo:pupil", "run/start", 0).
    """
    make = resolve_callable(reference, "model")
    _check_arguments(make, reference)
    try:
        made: Any = make(folder=folder, seed=seed)
    except WhetError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        raise ConfigError(f"model {reference!r} raised {format_exception(error)}; {CALL}") from error
    if not isinstance(made, str | Path) or not str(made):
        what = "an empty name" if made == "" else f"a {type(made).__name__}"
        hint = " (save it: model.save_pretrained(folder))" if hasattr(made, "save_pretrained") else ""
        raise ConfigError(f"model {reference!r} returned {what}{hint}; {CALL}")
    return str(made)


def _check_arguments(make: Any, reference: str) -> None:
    """Raises ConfigError where a function can't be called as CALL says."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some built-in functions have none: the call will tell
        return
    try:
        signature.bind(folder="", seed=0)
    except TypeError as error:
        raise ConfigError(f"model {reference!r} takes {signature}: {error}; {CALL}") from error
