"""How reward functions are called: by keyword, each with a deadline, and nothing that they return goes unchecked.

    fn(prompts=, completions=, **columns) -> list[float | None]        plain, async, partial or any callable

What is offered, one entry per completion: `prompts`, `completions`, `prompt_ids`, `completion_ids`, every column of the
data set, `trajectory_ids` ("{row}_{generation}"); and once: `mode`. A function is given what its signature names, or
all of it where it has **kwargs; fields of the algorithm's configuration only by name. Left out on purpose: worker
processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
import math
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.data.prompts import GIVEN
from whet.errors import ConfigError, RewardError, nearest
from whet.rewards.model import RewardModel
from whet.rewards.values import OnError, checked_rewards, said

__all__ = [
    "OnError",
    "RewardFn",
    "RewardInputs",
    "call_in_time",
    "call_rewards",
    "checked_rewards",
    "copied",
    "function_name",
    "keywords",
]

LOG = logging.getLogger(__name__)
RewardFn = Callable[..., Any]
LOOP_GRACE_S = 0.5
"""How long after the deadline an event loop may take to report which functions were late."""
EACH = ("prompts", "completions", "prompt_ids", "completion_ids", "trajectory_ids")
"""What functions are offered of each trajectory besides the columns of the data; `GIVEN` is all besides those."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardInputs:
    """What the reward functions of one call are offered; N trajectories.

    Example: RewardInputs(prompts=["2+2="], completions=["4"], columns={"answer": [4]}, trajectory_ids=["7_0"],
    completion_ids=[[52, 256]]).
    """

    prompts: list[Any]
    """[N]: text or messages, as the data set has them."""
    completions: list[Any]
    """[N]: text; messages [{"role": "assistant", "content": text}] where the prompt is a list of messages."""
    completion_ids: list[list[int]]
    """[N]: the tokens, stop token included."""
    trajectory_ids: list[str]
    """[N]: "{row}_{generation}"."""
    prompt_ids: list[list[int]] = field(default_factory=list)
    """[N]: the tokens that the model was given before these."""
    mode: Any = "train"
    """"train" or "eval" (a Mode is also such a string)."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """[N] each: the data set's other columns."""
    algo_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the algorithm's configuration, for functions that name them."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords, handed on as they are."""

    @classmethod
    def cat(cls, parts: Sequence[RewardInputs]) -> RewardInputs:
        """The inputs of several calls as those of one; a column that a part has not is None there."""
        joined = {name: [x for part in parts for x in getattr(part, name)] for name in EACH}
        known = dict.fromkeys(name for part in parts for name in part.columns)
        columns = {n: [x for p in parts for x in p.columns.get(n, [None] * len(p.prompts))] for n in known}
        return replace(parts[0], columns=columns, **joined)

    def select(self, chosen: Iterable[int]) -> RewardInputs:
        """Some of the trajectories."""
        at = [int(i) for i in chosen]
        cut = {name: [getattr(self, name)[i] for i in at] for name in EACH}
        return replace(self, columns={n: [values[i] for i in at] for n, values in self.columns.items()}, **cut)

    def offered(self) -> dict[str, Any]:
        """Every keyword with its value; the lists are new ones, so that a function may change its own."""
        own = {name: getattr(self, name) for name in EACH}
        lists = {name: list(values) for name, values in {**self.columns, **own}.items()}
        return {**self.extras, **lists, "mode": self.mode}


def function_name(fn: Any) -> str:
    """What a function is called in metrics and messages: its own name, of a partial the inner one's, of a
    reward model that of its folder, else its class's.

    >>> function_name(functools.partial(max, 3)), function_name(lambda: 0)
    ('max', 'lambda')
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, RewardModel):
        return fn.name
    name = fn.__name__ if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__name__
    return name.strip("<>")


def keywords(
    fn: RewardFn,
    offered: Mapping[str, Any],
    by_name: Mapping[str, Any],
    *,
    name: str,
    kind: str = "reward function",
    extras: Collection[str] = (),
) -> dict[str, Any]:
    """The arguments that a function is called with.

    Args:
        fn: the function. offered: what it gets where it names it or has **kwargs.
        by_name: what it gets only where it names it; `offered` goes before. name, kind: for messages. extras: words
            of `offered` that are no columns.

    Returns:
        Keyword -> value. What a partial has bound stays as bound.

    Raises:
        ConfigError: the function needs an argument that is not offered (with the nearest), takes one by position alone,
            or has no signature.

    >>> keywords(lambda completions, answer=0: [], {"completions": ["4"], "mode": "train"}, {}, name="f")
    {'completions': ['4']}
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name}: {error}; wrap it in a def that names its arguments") from error
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    given: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= {word: value for word, value in offered.items() if word not in given and word not in bound}
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in bound:
            continue
        known = parameter.name in offered or parameter.name in by_name
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(f"{kind} {name} takes {parameter.name!r} as a positional-only argument; remove the '/'")
        if not known and parameter.default is parameter.empty:
            always = [word for word in offered if word in GIVEN] + [word for word in extras if word not in GIVEN]
            columns = [word for word in offered if word not in always]
            alike = [word for word in always if word.startswith(parameter.name) or parameter.name.startswith(word)]
            near = nearest(parameter.name, dict.fromkeys([*columns, *by_name, *alike]))
            raise ConfigError(
                f"{kind} {name} needs {parameter.name!r}, which is not a column; your columns: "
                f"{', '.join(columns) or 'none besides the prompt'}{near or '.'} Rename the argument or the column, or "
                f"give it a default. Always offered: {', '.join(always)}"
            )
        if known and parameter.kind is not parameter.POSITIONAL_ONLY:
            given[parameter.name] = offered[parameter.name] if parameter.name in offered else by_name[parameter.name]
    return given


def call_rewards(
    fns: Mapping[str, RewardFn],
    inputs: RewardInputs,
    *,
    timeout_s: float | None = 60.0,
    on_error: OnError = "raise",
    nan_is_none: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Every reward function on the same trajectories.

    Plain functions run one after the other, async ones all together on one event loop meanwhile. With a timeout a
    plain function runs in a thread of its own: Python can't end a thread, so one that hangs continues in the background
    (it ends with the process); and what must be on the main thread (signal, so math-verify's own alarm) needs
    timeout_s=None. A reward model has no deadline. Gradient mode, CUDA device and context variables are those of the
    caller.

    Args:
        fns: by name. inputs: what they are offered. timeout_s: for each; None = no deadline, on the caller's thread.
        on_error: "raise", or "none": a failure counts as "not applicable". nan_is_none: as of checked_rewards.

    Returns:
        float64 [N] per name, NaN = not applicable; and the number of failed entries per name.

    Raises:
        ConfigError: a function needs what is not offered. RewardError: it raised, hung, or returned something wrong.

    >>> x = RewardInputs(prompts=["a"], completions=["bc"], completion_ids=[[98, 99]], trajectory_ids=["0_0"])
    >>> call_rewards({"length": lambda completions: [len(c) for c in completions]}, x)
    ({'length': array([2.])}, {'length': 0})
    """
    calls = {}
    for name, fn in fns.items():
        given = keywords(fn, inputs.offered(), inputs.algo_fields, name=name, extras=inputs.extras.keys())
        calls[name] = functools.partial(fn, **{word: _own(word, value, inputs) for word, value in given.items()})
    together = _Loop({name: call for name, call in calls.items() if _is_async(call)}, timeout_s)
    limits = {name: None if isinstance(fn, RewardModel) else timeout_s for name, fn in fns.items()}
    plain = {name: call for name, call in calls.items() if not _is_async(call)}
    values = {name: call_in_time(call, f"reward function {name}", limits[name]) for name, call in plain.items()}
    late = {name: value for name, value in values.items() if inspect.isawaitable(value)}  # plain, but gave a coroutine
    values |= _Loop({name: functools.partial(_same, value) for name, value in late.items()}, timeout_s).outcomes()
    values |= together.outcomes()
    rewards, errors = {}, {}
    for name in fns:
        value = values[name]
        if not isinstance(value, RewardError):
            rewards[name], errors[name] = checked_rewards(
                value, inputs.trajectory_ids, name=name, on_error=on_error, nan_is_none=nan_is_none
            )
        elif on_error == "raise":
            raise value
        else:
            LOG.warning("%s; counted as not applicable", value)
            rewards[name], errors[name] = np.full(len(inputs.prompts), math.nan), len(inputs.prompts)
    return rewards, errors


def _own(word: str, value: Any, inputs: RewardInputs) -> Any:
    """An argument that a function may change as it likes: no entry is shared with anyone."""
    return copied(value) if word in inputs.columns or word in EACH else value


def copied(values: Any) -> Any:
    """A list that a function may change as it likes, entry by entry; whatever else, as a deep copy.

    >>> chats = [[{"role": "user"}]]
    >>> copied(chats) == chats, copied(chats)[0][0] is chats[0][0]
    (True, False)
    """
    return [_copied(item) for item in values] if isinstance(values, list) else _copied(values)


def _copied(item: Any) -> Any:
    """A deep copy; the item itself where it can't be changed or can't be copied (a lock, a connection)."""
    if item is None or isinstance(item, str | bytes | bool | int | float):
        return item
    if type(item) is list and all(type(x) is int for x in item):  # token ids: one by one they would take their time
        return item.copy()
    try:
        return copy.deepcopy(item)
    except Exception:  # a copy is the item's own method, which may raise anything
        return item


def _is_async(call: Any) -> bool:
    """Whether calling it gives a coroutine: async def, also within a partial or as a class's __call__."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _same(value: Any) -> Any:
    return value


def call_in_time(call: Callable[[], Any], what: str, timeout_s: float | None) -> Any:
    """What a plain function of the user's returned, or the RewardError that stands for its failure.

    Args: call: without arguments. what: it is, for messages. timeout_s: in a thread of its own; None = no deadline, on
        the caller's thread.

    >>> str(call_in_time(lambda: 1 / 0, "reward function f", None))[:40]
    'reward function f raised ZeroDivisionErr'
    """
    box: list[Any] = []
    users = KeyboardInterrupt if timeout_s is None else ()  # on the caller's thread an interrupt is the user's

    def run() -> None:
        try:
            box.append(call())
        except users:
            raise
        except BaseException as error:
            box.append(_raised(what, error))

    if timeout_s is None:
        run()
        return box[0]
    thread = threading.Thread(target=_like_here(run), name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return box[0] if box else _hung(what, timeout_s)


class _Loop:
    """Async functions, together on one event loop in a thread of its own: the caller may be in a loop itself."""

    def __init__(self, calls: Mapping[str, Callable[[], Awaitable[Any]]], timeout_s: float | None) -> None:
        self.calls, self.timeout_s = calls, timeout_s
        self.box: dict[str, Any] = {}
        self.started = time.monotonic()
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=_like_here(self._run), daemon=True)
        if calls:
            self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:  # SystemExit in a task of a function's own ends the loop, and all with it
            self.ended = error

    async def _all(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_note_lost)
        await asyncio.gather(*(self._one(name, call) for name, call in self.calls.items()))

    async def _one(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                self.box[name] = await call()
        except BaseException as error:  # none of them is the user's: signals reach the main thread alone
            what = f"reward function {name}"
            self.box[name] = _hung(what, self.timeout_s) if limit.expired() else _raised(what, error)

    def outcomes(self) -> dict[str, Any]:
        """What each returned, or the RewardError of its failure, once all are done or late."""
        if self.calls:
            left = None if self.timeout_s is None else self.started + self.timeout_s + LOOP_GRACE_S - time.monotonic()
            self.thread.join(None if left is None else max(left, 0.0))
        return {name: self._outcome(name) for name in self.calls}

    def _outcome(self, name: str) -> Any:
        value = self.box.get(name)
        lost = name not in self.box or (isinstance(value, RewardError) and _cancelled(value.__cause__))
        if self.ended is None or not lost:
            return value if name in self.box else _hung(f"reward function {name}", self.timeout_s)
        text = f"the event loop of {', '.join(self.calls)} was ended by {type(self.ended).__name__}: {said(self.ended)}"
        failed = RewardError(
            f"reward function {name} returned nothing: {text}; let no task of an async function raise SystemExit or "
            "KeyboardInterrupt, nor stop its loop"
        )
        failed.__cause__ = self.ended
        return failed


def _like_here(run: Callable[[], None]) -> Callable[[], None]:
    """The same to be run in another thread, with this thread's context variables, gradient mode and CUDA device.

    SIGINT and SIGHUP are blocked there, and so in the programs that it starts: a terminal sends them to all, and the
    result of an interrupted program is no reward. This process hears them on its main thread.
    """
    context, grad = contextvars.copy_context(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def there() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(grad):
            context.run(run)

    return there


def _note_lost(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Logs what went wrong in a task that was not awaited: no reward depends on it."""
    error = context.get("exception")
    what = "" if error is None else f": {type(error).__name__}: {said(error)}"
    LOG.warning("async reward functions: %s%s", context["message"], what)


def _cancelled(error: BaseException | None) -> bool:
    return isinstance(error, asyncio.CancelledError)


def _raised(what: str, error: BaseException) -> RewardError:
    """The error for a function that raised."""
    words = said(error)
    text = f"{what} raised {type(error).__name__}: {words}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename != __file__:
        text += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"
    if isinstance(error, AttributeError) and "'list' object" in words:
        text += "; for conversations a completion is a list of messages: whet.rewards.text.text_of(c) is its text"
    if "main thread" in words or "threaded environment" in words:
        text += "; set trainer.reward_timeout_s=null to call it on the main thread"
    failed = RewardError(text)
    failed.__cause__ = error
    return failed


def _hung(what: str, timeout_s: float | None) -> RewardError:
    """The error for a function that is late."""
    return RewardError(
        f"{what} returned nothing within {timeout_s} s; its thread can't be ended and continues in "
        "the background. Give it a limit of its own, or raise trainer.reward_timeout_s (async ones must never block)"
    )
