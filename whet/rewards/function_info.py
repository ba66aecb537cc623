"""What is known of a reward function besides its call: how another process finds it, and whether it judges one by one.

Left out on purpose: sending a function itself. What lies in a module or a file is imported where it is needed; a
lambda, a closure or an object with a state has no place to be imported from, and each process would have another state.
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
from whet.rewards.conversation import is_of_conversation, of_conversation
from whet.util.references import is_ref, resolve_ref

__all__ = ["Named", "is_per_completion", "named", "per_completion"]

F = TypeVar("F", bound=Callable[..., Any])
REMEDY = (
    "give reward_workers what a process can import: a function of a module or a file (file.py:name), or "
    "functools.partial of one; or set reward_workers=0"
)


def per_completion(fn: F) -> F:
    """Says of a reward function that it judges each completion by itself, whatever else is in the batch.

    With trainer.reward_workers it is then called for one completion at a time, by all of the processes, and one that
    hangs or crashes costs that completion's reward alone. The lists that it is given have one entry then. Without
    workers nothing changes.

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
    """Whether a function is said to judge each completion by itself; one of a single conversation does."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return bool(getattr(fn, "per_completion", False))  # an attribute that any callable may have


@dataclass(frozen=True, kw_only=True)
class Named:
    """A function as another process finds it.

    Example: Named(ref="/home/me/rewards.py:score").found() imports the file and gives its `score`.
    """

    ref: str
    """ "package.module:name" or "/folder/file.py:name"."""
    bound: bytes | None = None
    """What functools.partial has bound: its arguments and keywords, pickled; None = nothing."""

    def found(self) -> Callable[..., Any]:
        """The function. Raises: ConfigError: it can't be imported, or what is bound can't be read."""
        fn = resolve_ref(self.ref, "reward function")
        fn = of_conversation(fn) if is_of_conversation(fn) else fn
        if self.bound is None:
            return fn
        try:
            args, words = pickle.loads(self.bound)
        except Exception as error:  # of a class of the user's own
            raise ConfigError(
                f"reward function {self.ref!r}: what is bound to it can't be read in a worker process "
                f"({format_exception(error)}); {REMEDY}"
            ) from error
        return functools.partial(fn, *args, **words)


def named(given: Any, fn: Callable[..., Any], name: str) -> Named:
    """How a worker process finds a reward function.

    Args: given: by the user: a name, a reference or the function. fn: what it stands for. name: for messages.
    Raises: ConfigError: it can't be found from elsewhere, with what to do.

    >>> import whet.rewards.text
    >>> named("exact_match", whet.rewards.text.exact_match, "exact_match").ref
    'whet.rewards.text:exact_match'
    >>> named(len, lambda completions: [], "lambda")
    Traceback (most recent call last):
    whet.errors.ConfigError: reward function lambda is a lambda, which worker processes can't import; give \
reward_workers what a process can import: a function of a module or a file (file.py:name), or functools.partial of \
one; or set reward_workers=0
    """
    if isinstance(given, str) and is_ref(given):
        place, _, word = given.rpartition(":")
        return Named(ref=f"{Path(place).expanduser().absolute()}:{word}" if place.endswith(".py") else given)
    if isinstance(fn, functools.partial):
        inner = named(fn.func, fn.func, name)
        try:
            return Named(ref=inner.ref, bound=pickle.dumps((fn.args, fn.keywords)))
        except Exception as error:  # pickling is the values' own business
            raise ConfigError(
                f"reward function {name}: what is bound to it can't be sent to a worker process "
                f"({format_exception(error)}); bind plain values, or set reward_workers=0"
            ) from error
    if (why := _unreachable(fn)) is not None:
        raise ConfigError(f"reward function {name} is {why}; {REMEDY}")
    ref = _ref(fn)
    there = resolve_ref(ref, "reward function")
    if there is not fn and there is not getattr(fn, "__wrapped__", None):  # a function of one conversation is wrapped
        raise ConfigError(f"reward function {name}: {ref} is another object by now; {REMEDY}")
    return Named(ref=ref)


def _ref(fn: Any) -> str:
    """Where a function lies: its module, or the file of a module that was imported as a file."""
    if fn.__module__.startswith("whet_file_"):
        return f"{sys.modules[fn.__module__].__file__}:{fn.__qualname__}"
    return f"{fn.__module__}:{fn.__qualname__}"


def _unreachable(fn: Any) -> str | None:
    """Why a function can't be imported elsewhere; None = it can."""
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
