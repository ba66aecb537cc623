"""Describes reward functions: a reference for other processes, and whether a function scores completions one by one.

Functions are not sent to other processes: these import them from a module or a file. A lambda, a closure or an object
with state can't be imported, and each process would have another state.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import ConfigError, format_exception
from whet.rewards.conversation import batch_conversation_function, is_conversation_function
from whet.util.references import is_ref, resolve_ref

__all__ = ["FunctionRef", "is_per_completion", "make_function_ref", "per_completion"]

F = TypeVar("F", bound=Callable[..., Any])
REMEDY = (
    "with reward_workers, give functions that a process can import: of a module or a file (file.py:name), or "
    "functools.partial of one; or set reward_workers=0"
)


def per_completion(fn: F) -> F:
    """Declares that a reward function scores each completion independently of the rest of the batch.

    With trainer.reward_workers, all processes then call it for one completion at a time, with lists of one entry. A
    call that hangs or crashes costs only that completion's reward. Without workers nothing changes.

    Args: fn: plain or async. Returns: the same function.

    >>> @per_completion
    ... def short(completions, **columns):
    ...     return [float(len(text) < 9) for text in completions]
    >>> is_per_completion(short), is_per_completion(functools.partial(short, mode="eval")), is_per_completion(len)
    (True, True, False)
    """
    fn.per_completion = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def is_per_completion(fn: Callable[..., Any]) -> bool:
    """Returns whether a function is declared `per_completion`; functions of one conversation are."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return bool(getattr(fn, "per_completion", False))  # an attribute that any callable may have


@dataclass(frozen=True, kw_only=True)
class FunctionRef:
    """A reference to a function, which another process can import.

    Example: FunctionRef(ref="/home/me/rewards.py:score").load() imports the file and returns its `score`.
    """

    ref: str
    """ "package.module:name" or "/folder/file.py:name"."""
    bound: bytes | None = None
    """The pickled arguments and keywords of a functools.partial; None = not a partial."""

    def load(self) -> Callable[..., Any]:
        """Imports the function. Raises: ConfigError: it can't be imported, or its bound arguments can't be read."""
        fn = resolve_ref(self.ref, "reward function")
        fn = batch_conversation_function(fn) if is_conversation_function(fn) else fn
        if self.bound is None:
            return fn
        try:
            args, kwargs = pickle.loads(self.bound)
        except Exception as error:  # of a class of the user's own
            raise ConfigError(
                f"reward function {self.ref!r}: its bound arguments can't be read in a worker process "
                f"({format_exception(error)}); {REMEDY}"
            ) from error
        return functools.partial(fn, *args, **kwargs)


def make_function_ref(given: Any, fn: Callable[..., Any], name: str) -> FunctionRef:
    """Makes the reference by which a worker process imports a reward function.

    Args: given: the user's name, reference or function. fn: the resolved function. name: its name in messages.
    Raises: ConfigError: the function can't be imported by another process; the message has the fix.

    >>> import whet.rewards.text
    >>> make_function_ref("exact_match", whet.rewards.text.exact_match, "exact_match").ref
    'whet.rewards.text:exact_match'
    >>> make_function_ref(len, lambda completions: [], "lambda")
    Traceback (most recent call last):
    whet.errors.ConfigError: reward function lambda is a lambda, which worker processes can't import; with \
reward_workers, give functions that a process can import: of a module or a file (file.py:name), or functools.partial \
of one; or set reward_workers=0
    """
    if isinstance(given, str) and is_ref(given):
        place, _, word = given.rpartition(":")
        return FunctionRef(ref=f"{Path(place).expanduser().absolute()}:{word}" if place.endswith(".py") else given)
    if isinstance(fn, functools.partial):
        inner = make_function_ref(fn.func, fn.func, name)
        try:
            return FunctionRef(ref=inner.ref, bound=pickle.dumps((fn.args, fn.keywords)))
        except Exception as error:  # pickling is the values' own business
            raise ConfigError(
                f"reward function {name}: its bound arguments can't be sent to a worker process "
                f"({format_exception(error)}); bind plain values, or set reward_workers=0"
            ) from error
    if (why := _unreachable(fn)) is not None:
        raise ConfigError(f"reward function {name} is {why}; {REMEDY}")
    ref = _ref(fn)
    imported = resolve_ref(ref, "reward function")
    if imported is not fn and imported is not getattr(fn, "__wrapped__", None):  # conversation functions are wrapped
        raise ConfigError(f"reward function {name}: {ref} is now another object; {REMEDY}")
    return FunctionRef(ref=ref)


def _ref(fn: Any) -> str:
    """Returns a reference to a function by its module, or by its file if the module was imported from a file."""
    if fn.__module__.startswith("whet_file_"):
        return f"{sys.modules[fn.__module__].__file__}:{fn.__qualname__}"
    return f"{fn.__module__}:{fn.__qualname__}"


def _unreachable(fn: Any) -> str | None:
    """Returns the reason why other processes can't import a function; None = they can."""
    if not (inspect.isroutine(fn) or inspect.isclass(fn)):
        return f"an object of class {type(fn).__name__}, and each worker process would have a state of its own"
    if inspect.ismethod(fn) and not inspect.isclass(fn.__self__):
        return f"a method of an object ({type(fn.__self__).__name__}), and each worker process would have its own"
    if "<lambda>" in fn.__qualname__:
        return "a lambda, which worker processes can't import"
    if "<locals>" in fn.__qualname__:
        return f"defined within {fn.__qualname__.split('.<locals>')[0]}, where worker processes can't import it"
    if fn.__module__ == "__main__":
        return "defined in the program itself (__main__), which each worker process would run again"
    if fn.__module__ not in sys.modules:
        return f"of the module {fn.__module__}, which worker processes can't import"
    return None
