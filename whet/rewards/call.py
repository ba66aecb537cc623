"""Calls reward functions by keyword, each with a deadline, and checks their return values.

    fn(prompts=, completions=, **columns) -> list[float | None]        plain, async, partial or any callable

Available keywords with one entry per completion: `prompts`, `completions`, `prompt_ids`, `completion_ids`, every column
of the data set, `trajectory_ids` ("{row}_{generation}"); and a single value: `mode`. A function receives the keywords
of its signature, or all of them if it has **kwargs; fields of the algorithm's configuration only by name. workers.py
calls functions in worker processes.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from whet.data.prompts import RESERVED_COLUMNS
from whet.errors import ConfigError, RewardError, format_exception, nearest
from whet.rewards.checked_values import (
    CheckedRewards,
    OnError,
    apply_on_error,
    check_values,
    error_from_exception,
)
from whet.rewards.deadline import call_with_deadline, timeout_error, with_caller_context
from whet.rewards.function_info import is_per_completion
from whet.rewards.model import RewardModel
from whet.rewards.workers import RewardCall, RewardWorkers

__all__ = [
    "CallResults",
    "RewardFn",
    "RewardInputs",
    "call_rewards",
    "copy_argument",
    "function_name",
    "select_keywords",
]

LOG = logging.getLogger(__name__)
RewardFn = Callable[..., Any]
_CONTINUES = "continues in a thread that can't be ended"
LOOP_GRACE_S = 0.5
"""Seconds after the deadline in which an event loop can still report the functions that timed out."""
EACH = ("prompts", "completions", "prompt_ids", "completion_ids", "trajectory_ids")
"""Keywords with an entry for each trajectory, besides the columns of the data; RESERVED_COLUMNS has more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardInputs:
    """The available arguments of the reward functions in one call, for N trajectories.

    Example: RewardInputs(prompts=["2+2="], completions=["4"], columns={"answer": [4]}, trajectory_ids=["7_0"],
    completion_ids=[[52, 256]]).
    """

    prompts: list[Any]
    """[N]: text or messages, as in the data set."""
    completions: list[Any]
    """[N]: text; messages [{"role": "assistant", "content": text}] if the prompt is a list of messages."""
    completion_ids: list[list[int]]
    """[N]: the tokens, with the stop token."""
    trajectory_ids: list[str]
    """[N]: "{row}_{generation}"."""
    prompt_ids: list[list[int]] = field(default_factory=list)
    """[N]: the tokens of the prompt."""
    mode: Any = "train"
    """"train" or "eval"; a Mode is a string too."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """[N] each: the data set's other columns."""
    algo_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the algorithm's configuration, for functions that name them."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords, which are not copied."""

    @classmethod
    def cat(cls, parts: Sequence[RewardInputs]) -> RewardInputs:
        """Concatenates the inputs of several calls; a column that a part lacks is None there."""
        joined = {name: [x for part in parts for x in getattr(part, name)] for name in EACH}
        known = dict.fromkeys(name for part in parts for name in part.columns)
        columns = {n: [x for p in parts for x in p.columns.get(n, [None] * len(p.prompts))] for n in known}
        return replace(parts[0], columns=columns, **joined)

    def select(self, chosen: Iterable[int]) -> RewardInputs:
        """Selects trajectories. Args: chosen: their indices."""
        at = [int(i) for i in chosen]
        selected = {name: [getattr(self, name)[i] for i in at] for name in EACH}
        return replace(self, columns={n: [values[i] for i in at] for n, values in self.columns.items()}, **selected)

    def keywords(self) -> dict[str, Any]:
        """Returns all keywords with their values, as lists."""
        each = {name: getattr(self, name) for name in EACH}
        lists = {name: list(values) for name, values in {**self.columns, **each}.items()}
        return {**self.extras, **lists, "mode": self.mode}


def function_name(fn: Any) -> str:
    """Returns a function's name in metrics and messages.

    It is `__name__`, for a partial that of the inner function, for a reward model its folder's name, else the class.

    >>> function_name(functools.partial(max, 3)), function_name(lambda: 0)
    ('max', 'lambda')
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, RewardModel):
        return fn.name
    name = getattr(fn, "__name__", None)
    return (name if isinstance(name, str) else type(fn).__name__).strip("<>")


def select_keywords(
    fn: RewardFn,
    offered: Mapping[str, Any],
    by_name: Mapping[str, Any],
    *,
    name: str,
    kind: str = "reward function",
    extras: Collection[str] = (),
) -> dict[str, Any]:
    """Selects a function's keyword arguments.

    Args:
        fn: the function.
        offered: arguments for functions that name them or have **kwargs.
        by_name: arguments for functions that name them; `offered` has priority.
        name, kind: the function's name and kind, for messages.
        extras: keys of `offered` that are not columns.

    Returns:
        Keyword -> value, without the arguments that a partial has bound.

    Raises:
        ConfigError: an argument that is not available (the message names the nearest), a positional-only argument, or
            no signature.

    >>> select_keywords(lambda completions, answer=0: [], {"completions": ["4"], "mode": "train"}, {}, name="f")
    {'completions': ['4']}
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name}: {error}; wrap it in a def that names its arguments") from error
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    selected: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            selected |= {word: value for word, value in offered.items() if word not in selected and word not in bound}
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in bound:
            continue
        known = parameter.name in offered or parameter.name in by_name
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(f"{kind} {name} takes {parameter.name!r} as a positional-only argument; remove the '/'")
        if not known and parameter.default is parameter.empty:
            always = [word for word in offered if word in RESERVED_COLUMNS] + [
                word for word in extras if word not in RESERVED_COLUMNS
            ]
            columns = [word for word in offered if word not in always]
            alike = [word for word in always if word.startswith(parameter.name) or parameter.name.startswith(word)]
            near = nearest(parameter.name, dict.fromkeys([*columns, *by_name, *alike]))
            if parameter.name == "messages":
                near = "; a function of one conversation takes messages and answer, both."
            raise ConfigError(
                f"{kind} {name} needs {parameter.name!r}, which is not a column; your columns: "
                f"{', '.join(columns) or 'none besides the prompt'}{near or '.'} Rename the argument or the column, or "
                f"give it a default. Always offered: {', '.join(always)}"
            )
        if known and parameter.kind is not parameter.POSITIONAL_ONLY:
            selected[parameter.name] = offered[parameter.name] if parameter.name in offered else by_name[parameter.name]
    return selected


class CallResults(NamedTuple):
    """The functions' results for a batch of N."""

    rewards: dict[str, np.ndarray]
    """float64 [N] by name; NaN = not applicable."""
    errors: dict[str, int]
    """The number of failed entries by name."""
    seconds: dict[str, float]
    """Seconds by name."""


def call_rewards(
    fns: Mapping[str, RewardFn],
    inputs: RewardInputs,
    *,
    timeout_s: float | None = 60.0,
    on_error: OnError = "raise",
    workers: RewardWorkers | None = None,
    nan_is_none: bool = False,
) -> CallResults:
    """Calls all reward functions on the same trajectories.

    Plain functions run one after the other on the caller's thread. Async functions run together on an event loop in the
    meantime. On the main thread, a plain function is interrupted at the deadline. On other threads each plain function
    has its own thread, which can't be ended and continues in the background (deadline.py). A reward model has no
    deadline. Functions have the caller's gradient mode, CUDA device and context variables.

    Args:
        fns: the functions by name.
        inputs: the available arguments.
        timeout_s: the time limit of each function; None = no limit, and plain functions stay on the caller's thread.
        on_error: "raise", or "none": a failure counts as "not applicable".
        workers: processes that call all functions except reward models; None = this process calls them.
        nan_is_none: see check_values; it applies to functions that this process calls.

    Returns:
        Rewards, failures and seconds by name.

    Raises:
        ConfigError: a function needs an argument that is not available. RewardError: a function raised, hung, or
            returned an invalid value.

    >>> x = RewardInputs(prompts=["a"], completions=["bc"], completion_ids=[[98, 99]], trajectory_ids=["0_0"])
    >>> results = call_rewards({"length": lambda completions: [len(c) for c in completions]}, x)
    >>> results.rewards, results.errors
    ({'length': array([2.])}, {'length': 0})
    """
    offered, extras = inputs.keywords(), inputs.extras.keys()
    arguments = {n: select_keywords(fn, offered, inputs.algo_fields, name=n, extras=extras) for n, fn in fns.items()}
    remote: dict[str, RewardCall] = {}
    for name in [] if workers is None else [name for name in fns if name in workers.functions]:
        kwargs, count = arguments[name], len(inputs.trajectory_ids)
        each = [word for word in kwargs if word in {*inputs.columns, *EACH} and len(kwargs[word]) == count]
        per_completion = is_per_completion(fns[name])
        remote[name] = RewardCall(kwargs=kwargs, ids=inputs.trajectory_ids, each=each, per_completion=per_completion)
    checked: dict[str, CheckedRewards | RewardError] = {}
    seconds: dict[str, float] = {}
    if workers is not None and remote:
        remote_rewards, seconds = workers.call(remote, timeout_s=timeout_s, stop=on_error == "raise")
        checked.update(remote_rewards)
    local = {n: fn for n, fn in fns.items() if n not in remote}
    values, local_seconds = _call_in_process(local, arguments, inputs, timeout_s)
    for name, value in values.items():
        checked[name] = (
            value
            if isinstance(value, RewardError)
            else check_values(value, inputs.trajectory_ids, name=name, nan_is_none=nan_is_none)
        )
    rewards, errors = {}, {}
    for name in fns:
        rewards[name], errors[name] = apply_on_error(checked[name], len(inputs.prompts), on_error)
    return CallResults(rewards, errors, {name: {**seconds, **local_seconds}[name] for name in fns})


def _call_in_process(
    fns: Mapping[str, RewardFn],
    arguments: Mapping[str, Mapping[str, Any]],
    inputs: RewardInputs,
    timeout_s: float | None,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Calls functions in this process. Returns: each function's value, or the RewardError of its failure; its seconds.

    Each function receives copies of the lists, which it may change.
    """
    copies = {*inputs.columns, *EACH}
    calls = {
        name: functools.partial(
            fn, **{word: copy_argument(value) if word in copies else value for word, value in arguments[name].items()}
        )
        for name, fn in fns.items()
    }
    async_calls = _AsyncCalls({name: call for name, call in calls.items() if _is_async(call)}, timeout_s)
    values: dict[str, Any] = {}
    seconds = {}
    for name, call in calls.items():
        if name not in async_calls.calls:
            begun = time.perf_counter()
            limit = None if isinstance(fns[name], RewardModel) else timeout_s
            values[name] = call_with_deadline(call, f"reward function {name}", limit)
            seconds[name] = time.perf_counter() - begun
    coroutines = {name: value for name, value in values.items() if inspect.isawaitable(value)}  # from plain functions
    returned = _AsyncCalls({name: functools.partial(_identity, value) for name, value in coroutines.items()}, timeout_s)
    for group in (returned, async_calls):
        values |= group.outcomes()
        for name, spent in group.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + spent
    return values, seconds


def copy_argument(values: Any) -> Any:
    """Returns a copy of an argument, which a function may change. The entries of a list are copied one by one.

    >>> chats = [[{"role": "user"}]]
    >>> copy_argument(chats) == chats, copy_argument(chats)[0][0] is chats[0][0]
    (True, False)
    """
    return [_copy_item(item) for item in values] if isinstance(values, list) else _copy_item(values)


def _copy_item(item: Any) -> Any:
    """Returns a deep copy; the item itself if it is immutable or can't be copied (a lock, a connection)."""
    if item is None or isinstance(item, str | bytes | bool | int | float):
        return item
    if type(item) is list and all(type(x) is int for x in item):  # token ids: deepcopy would be slow
        return item.copy()
    try:
        return copy.deepcopy(item)
    except Exception:  # an object's __deepcopy__ may raise anything
        return item


def _is_async(call: Any) -> bool:
    """Returns whether a callable is async: async def, a partial of one, or an object with an async __call__."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _identity(value: Any) -> Any:
    return value


class _AsyncCalls:
    """Runs async functions together on one event loop, in a separate thread because the caller may be in a loop."""

    def __init__(self, calls: Mapping[str, Callable[[], Awaitable[Any]]], timeout_s: float | None) -> None:
        self.calls, self.timeout_s = calls, timeout_s
        self.values: dict[str, Any] = {}
        self.seconds = dict.fromkeys(calls, 0.0 if timeout_s is None else timeout_s)
        """The seconds of each function; the limit if it timed out."""
        self.started = time.monotonic()
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=with_caller_context(self._run), daemon=True)
        if calls:
            self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._call_all())
        except BaseException as error:  # SystemExit in a function's task ends the loop with all functions
            self.ended = error

    async def _call_all(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_task_error)
        await asyncio.gather(*(self._call_one(name, call) for name, call in self.calls.items()))

    async def _call_one(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        limit, begun = asyncio.timeout(self.timeout_s), time.perf_counter()
        try:
            async with limit:
                self.values[name] = await call()
                self.seconds[name] = time.perf_counter() - begun
        except BaseException as error:  # not the user's interrupt: signals reach only the main thread
            what = f"reward function {name}"
            self.values[name] = (
                timeout_error(what, self.timeout_s, _CONTINUES)
                if limit.expired()
                else error_from_exception(what, error, __file__)
            )

    def outcomes(self) -> dict[str, Any]:
        """Waits until all functions have ended or timed out. Returns: their values, or the RewardErrors."""
        if self.calls:
            rest = None if self.timeout_s is None else self.started + self.timeout_s + LOOP_GRACE_S - time.monotonic()
            self.thread.join(None if rest is None else max(rest, 0.0))
        return {name: self._outcome(name) for name in self.calls}

    def _outcome(self, name: str) -> Any:
        value = self.values.get(name)
        is_cancelled = isinstance(value, RewardError) and isinstance(value.__cause__, asyncio.CancelledError)
        if self.ended is None or (name in self.values and not is_cancelled):
            if name in self.values:
                return value
            return timeout_error(f"reward function {name}", self.timeout_s, _CONTINUES)
        error = RewardError(
            f"reward function {name} returned nothing: the event loop of {', '.join(self.calls)} was ended by "
            f"{format_exception(self.ended)}; let no task of an async function raise SystemExit or KeyboardInterrupt, "
            "nor stop its loop"
        )
        error.__cause__ = self.ended
        return error


def _log_task_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Logs an error in a task that was not awaited: no reward depends on it."""
    error = context.get("exception")
    what = "" if error is None else f": {format_exception(error)}"
    LOG.warning("async reward functions: %s%s", context["message"], what)
