"""How reward functions are called: by keyword, each with a deadline, and nothing that they return goes unchecked.

    fn(prompts=, completions=, **columns) -> list[float | None]        plain, async, partial or any callable

What is offered, one entry per completion: `prompts`, `completions`, `prompt_ids`, `completion_ids`, every column of the
data set, `trajectory_ids` ("{row}_{generation}"); and once: `mode`. A function is given what its signature names, or
all of it where it has **kwargs; fields of the algorithm's configuration only by name. Worker processes: workers.py.
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
from whet.rewards.checked_values import Judged, OnError, checked_rewards, judged, raised, settled
from whet.rewards.deadline import call_in_time, late, like_here
from whet.rewards.function_info import is_per_completion
from whet.rewards.model import RewardModel
from whet.rewards.workers import Call, RewardWorkers

__all__ = [
    "Called",
    "OnError",
    "RewardFn",
    "RewardInputs",
    "call_rewards",
    "checked_rewards",
    "copied",
    "function_name",
    "keywords",
]

LOG = logging.getLogger(__name__)
RewardFn = Callable[..., Any]
_GOES_ON = "continues in a thread that can't be ended"
LOOP_GRACE_S = 0.5
"""How long after the deadline an event loop may take to report which functions were late."""
EACH = ("prompts", "completions", "prompt_ids", "completion_ids", "trajectory_ids")
"""What functions are offered of each trajectory besides the columns of the data; RESERVED_COLUMNS has more."""


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
    """What a function is called in metrics and messages: its own name, which an object may have in `__name__`, of a
    partial the inner one's, of a reward model that of its folder, else its class's.

    >>> function_name(functools.partial(max, 3)), function_name(lambda: 0)
    ('max', 'lambda')
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, RewardModel):
        return fn.name
    name = getattr(fn, "__name__", None)
    return (name if isinstance(name, str) else type(fn).__name__).strip("<>")


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
            given[parameter.name] = offered[parameter.name] if parameter.name in offered else by_name[parameter.name]
    return given


class Called(NamedTuple):
    """What the functions gave for a batch of N."""

    rewards: dict[str, np.ndarray]
    """float64 [N] by name, NaN = not applicable."""
    errors: dict[str, int]
    """Failed entries by name."""
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
) -> Called:
    """Every reward function on the same trajectories.

    Plain functions run one after the other on the caller's thread, async ones all together on one event loop meanwhile.
    On the main thread a plain function that is late is interrupted; elsewhere each has a thread of its own, which can't
    be ended and continues in the background (deadline.py). A reward model has no deadline. Gradient mode, CUDA device
    and context variables are those of the caller.

    Args:
        fns: by name. inputs: what they are offered. timeout_s: for each; None = no deadline, on the caller's thread.
        on_error: "raise", or "none": a failure counts as "not applicable".
        workers: processes that call all but the reward models; None = they are called here. nan_is_none: as of
            checked_rewards, of functions that are called here.

    Returns:
        Rewards, failures and seconds by name.

    Raises:
        ConfigError: a function needs what is not offered. RewardError: it raised, hung, or returned something wrong.

    >>> x = RewardInputs(prompts=["a"], completions=["bc"], completion_ids=[[98, 99]], trajectory_ids=["0_0"])
    >>> made = call_rewards({"length": lambda completions: [len(c) for c in completions]}, x)
    >>> made.rewards, made.errors
    ({'length': array([2.])}, {'length': 0})
    """
    words = {
        n: keywords(fn, inputs.offered(), inputs.algo_fields, name=n, extras=inputs.extras.keys())
        for n, fn in fns.items()
    }
    away = (
        {} if workers is None else {n: _call(fn, words[n], inputs) for n, fn in fns.items() if n in workers.functions}
    )
    found: dict[str, Judged | RewardError] = {}
    seconds: dict[str, float] = {}
    if workers is not None and away:
        made, seconds = workers.call(away, timeout_s=timeout_s, stop=on_error == "raise")
        found.update(made)
    values, spent = _called_here({n: fn for n, fn in fns.items() if n not in away}, words, inputs, timeout_s)
    for name, value in values.items():
        failed = isinstance(value, RewardError)
        found[name] = value if failed else judged(value, inputs.trajectory_ids, name=name, nan_is_none=nan_is_none)
    rewards, errors = {}, {}
    for name in fns:
        rewards[name], errors[name] = settled(found[name], len(inputs.prompts), on_error)
    return Called(rewards, errors, {name: {**seconds, **spent}[name] for name in fns})


def _call(fn: RewardFn, words: Mapping[str, Any], inputs: RewardInputs) -> Call:
    count = len(inputs.trajectory_ids)
    each = [word for word in words if word in {*inputs.columns, *EACH} and len(words[word]) == count]
    return Call(words=words, ids=inputs.trajectory_ids, each=each, per_completion=is_per_completion(fn))


def _called_here(
    fns: Mapping[str, RewardFn],
    words: Mapping[str, Mapping[str, Any]],
    inputs: RewardInputs,
    timeout_s: float | None,
) -> tuple[dict[str, Any], dict[str, float]]:
    """What each returned, or the RewardError of its failure, and the seconds that it took, in this process."""
    calls = {
        name: functools.partial(fn, **{word: _own(word, value, inputs) for word, value in words[name].items()})
        for name, fn in fns.items()
    }
    together = _Loop({name: call for name, call in calls.items() if _is_async(call)}, timeout_s)
    values: dict[str, Any] = {}
    seconds = {}
    for name, call in calls.items():
        if name not in together.calls:
            begun = time.perf_counter()
            limit = None if isinstance(fns[name], RewardModel) else timeout_s
            values[name] = call_in_time(call, f"reward function {name}", limit)
            seconds[name] = time.perf_counter() - begun
    late = {name: value for name, value in values.items() if inspect.isawaitable(value)}  # plain, but gave a coroutine
    for loop in (_Loop({name: functools.partial(_same, value) for name, value in late.items()}, timeout_s), together):
        values |= loop.outcomes()
        for name, spent in loop.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + spent
    return values, seconds


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


class _Loop:
    """Async functions, together on one event loop in a thread of its own: the caller may be in a loop itself."""

    def __init__(self, calls: Mapping[str, Callable[[], Awaitable[Any]]], timeout_s: float | None) -> None:
        self.calls, self.timeout_s = calls, timeout_s
        self.box: dict[str, Any] = {}
        self.seconds = dict.fromkeys(calls, 0.0 if timeout_s is None else timeout_s)
        """That each took; the limit, where it is late."""
        self.started = time.monotonic()
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=like_here(self._run), daemon=True)
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
        limit, begun = asyncio.timeout(self.timeout_s), time.perf_counter()
        try:
            async with limit:
                self.box[name] = await call()
                self.seconds[name] = time.perf_counter() - begun
        except BaseException as error:  # none of them is the user's: signals reach the main thread alone
            what = f"reward function {name}"
            self.box[name] = late(what, self.timeout_s, _GOES_ON) if limit.expired() else raised(what, error, __file__)

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
            return value if name in self.box else late(f"reward function {name}", self.timeout_s, _GOES_ON)
        text = f"the event loop of {', '.join(self.calls)} was ended by {format_exception(self.ended)}"
        failed = RewardError(
            f"reward function {name} returned nothing: {text}; let no task of an async function raise SystemExit or "
            "KeyboardInterrupt, nor stop its loop"
        )
        failed.__cause__ = self.ended
        return failed


def _note_lost(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Logs what went wrong in a task that was not awaited: no reward depends on it."""
    error = context.get("exception")
    what = "" if error is None else f": {format_exception(error)}"
    LOG.warning("async reward functions: %s%s", context["message"], what)


def _cancelled(error: BaseException | None) -> bool:
    return isinstance(error, asyncio.CancelledError)
