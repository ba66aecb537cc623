"""Calls a user's function that creates a model: model=package.module:function or file.py:function.

Left out on purpose: functions that return a module. The function writes a folder, so that a resumed run can load it.
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
    """Calls the function, and checks its result.

    Args: reference: names the function. folder: the function writes the model there. seed: the run's seed.
    Returns: the folder or name that the function returned.
    Raises: ConfigError: the function does not exist, does not take these arguments, raised, or returned something else.
        Errors of whet pass through unchanged.

    Example: call_model_factory("whet.demo:sft_model", "run/start", 0).
    """
    function: Any = resolve_callable(reference, "model")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        signature = None
    try:
        if signature is not None:
            signature.bind(folder="", seed=0)
    except TypeError as error:
        raise ConfigError(f"model {reference!r} takes {signature}: {error}; {CALL}") from error
    try:
        result: Any = function(folder=folder, seed=seed)
    except WhetError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        raise ConfigError(f"model {reference!r} raised {format_exception(error)}; {CALL}") from error
    if not isinstance(result, str | Path) or not str(result):
        kind = "an empty name" if result == "" else f"a {type(result).__name__}"
        hint = " (save it: model.save_pretrained(folder))" if hasattr(result, "save_pretrained") else ""
        raise ConfigError(f"model {reference!r} returned {kind}{hint}; {CALL}")
    return str(result)
