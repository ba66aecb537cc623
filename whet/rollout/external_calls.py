"""ExternalCalls: functions that episodes wait for, such as tools, on one asyncio loop beside the engine.

The loop has a thread of its own. Async functions run on it together; each plain function runs in a thread. The driver
starts calls and collects their results between two steps of the engine, so a slow call delays its own episode only.
Left out on purpose: ending a plain function that is late. Python can't end a thread; a process can be killed
(whet.envs.sandbox), and an async function is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

__all__ = ["CallGenerator", "CallResult", "CallTimeoutError", "ExternalCall", "ExternalCalls", "run_function"]

T = TypeVar("T")

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all its programs. Programs that a function starts must not end by them."""


class CallTimeoutError(TimeoutError):
    """A call did not end within its time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExternalCall:
    """A function that an episode waits for. The episode yields it, and is sent its value, or its exception is raised.

    Example: `answer = yield ExternalCall(function=lambda: search(query), name="search", timeout_s=30.0)`.
    """

    function: Callable[[], Any]
    """Plain (it runs in a thread) or async; a plain one may return an awaitable too."""
    name: str
    """For messages."""
    timeout_s: float | None = None
    """Time limit from the start of the function, without its waiting for its turn or for a processor; None = no
    limit. A plain function that has returned within it is in time, however late its value arrives."""
    phase: str = "tools"
    """The name under which its seconds are counted."""
    only_waits: bool = False
    """It only waits for an event, so it starts at once, however many calls are running."""


CallGenerator = Generator[ExternalCall, Any, T]
"""Yields calls, is sent their values, and returns what it made of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CallResult:
    """The end of a call."""

    key: int
    """As `start` was given it."""
    value: Any = None
    error: BaseException | None = None
    """What the function raised; a CallTimeoutError if it was late."""
    seconds: float = 0.0
    """The time that the function ran."""


class ExternalCalls:
    """Runs ExternalCalls. All methods are for one thread.

    Args: max_concurrent: calls that run at once; the others wait, except those that only wait for an event.

    >>> calls = ExternalCalls()
    >>> calls.start(7, ExternalCall(function=lambda: 2 + 3, name="sum"))
    >>> [(result.key, result.value) for result in calls.collect()]
    [(7, 5)]
    """

    def __init__(self, max_concurrent: int = 64) -> None:
        self._max_concurrent = max_concurrent
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore: asyncio.Semaphore | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # only the loop's thread uses them
        self._running: set[int] = set()
        self._results: SimpleQueue[CallResult] = SimpleQueue()

    def __len__(self) -> int:
        """Calls that have not been collected."""
        return len(self._running)

    def start(self, key: int, call: ExternalCall) -> None:
        """Starts a call. Args: key: identifies its result; no other call in progress has it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), name="whet-calls", daemon=True).start()
        self._running.add(key)
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(self._start_task, key, call, context)

    def collect(self, timeout_s: float | None = None) -> list[CallResult]:
        """Returns the calls that have ended since the last time. Waits for the first one.

        Args: timeout_s: of the waiting; None = no limit. Returns: [] = none has ended, or none is running.
        """
        results: list[CallResult] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                result = self._results.get_nowait() if results else self._results.get(timeout=rest)
            except Empty:
                break
            if result.key in self._running:  # else it was cancelled
                self._running.discard(result.key)
                results.append(result)
        return results

    def cancel(self, keys: Iterable[int]) -> None:
        """Ends calls without a result. A plain function goes on in its thread until it returns."""
        for key in keys:
            if key in self._running and self._loop is not None:
                self._running.discard(key)
                self._loop.call_soon_threadsafe(self._cancel_task, key)

    def close(self) -> None:
        """Cancels all calls, and ends the loop."""
        self.cancel(list(self._running))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    # ---- in the loop's thread ------------------------------------------------------------------------------------

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)  # inherited by the threads of plain functions
        self._semaphore = asyncio.Semaphore(self._max_concurrent)
        loop.run_forever()
        if left := asyncio.all_tasks(loop):  # of calls that were just cancelled
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.close()

    def _start_task(self, key: int, call: ExternalCall, context: contextvars.Context) -> None:
        self._tasks[key] = asyncio.get_running_loop().create_task(self._run_call(key, call), context=context)

    def _cancel_task(self, key: int) -> None:
        if task := self._tasks.get(key):
            task.cancel()

    async def _run_call(self, key: int, call: ExternalCall) -> None:
        assert self._semaphore is not None
        started = time.monotonic()
        try:
            async with nullcontext() if call.only_waits else self._semaphore:
                started = time.monotonic()
                limit, progress = asyncio.timeout(None), _Progress()
                try:
                    async with limit:
                        if call.timeout_s is not None:
                            progress.watch(limit, call.timeout_s)
                        value = await run_function(call.function, progress)
                    result = CallResult(key=key, value=value, seconds=time.monotonic() - started)
                except TimeoutError as error:
                    late = CallTimeoutError(f"{call.name} returned nothing within {call.timeout_s} s")
                    raised = late if limit.expired() else error
                    result = CallResult(key=key, error=raised, seconds=time.monotonic() - started)
                finally:
                    progress.end()
        except BaseException as error:  # also SystemExit in a tool, and the cancelling of this task
            result = CallResult(key=key, error=error, seconds=time.monotonic() - started)
        self._results.put(result)
        self._tasks.pop(key, None)


class _Progress:
    """How far a function has come: on a busy machine neither its thread nor the loop runs at once."""

    def __init__(self) -> None:
        self.begun: float | None = None
        """The time at which it began."""
        self.has_returned = False
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, limit: asyncio.Timeout, timeout_s: float) -> None:
        """Ends the limit once the function has run for too long."""
        now = time.monotonic()
        rest = timeout_s - (now - (now if self.begun is None else self.begun))
        if rest > 0:
            self._timer = asyncio.get_running_loop().call_later(rest, self._look, limit, timeout_s)
        else:
            limit.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, limit: asyncio.Timeout, timeout_s: float) -> None:
        if not self.has_returned:
            self.watch(limit, timeout_s)


async def run_function(function: Callable[[], Any], progress: _Progress | None = None) -> Any:
    """Returns the value of a function: an async one is awaited, a plain one runs in a thread.

    The thread is a daemon: one that hangs does not keep the program alive. Args: progress: is told how far it comes.
    """
    progress = progress or _Progress()
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        progress.begun = time.monotonic()
        try:
            return await function()
        finally:
            progress.has_returned = True
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def set_outcome(value: Any, error: BaseException | None) -> None:
        if future.done():  # it was cancelled meanwhile
            return
        if isinstance(error, StopIteration):  # a future refuses it
            error = RuntimeError(f"the function raised {error!r}").with_traceback(error.__traceback__)
        future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value: Any = None
        raised: BaseException | None = None
        progress.begun = time.monotonic()
        try:
            value = context.run(function)
        except BaseException as error:
            raised = error
        progress.has_returned = not inspect.isawaitable(value)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(set_outcome, value, raised)

    threading.Thread(target=run, name="whet-call", daemon=True).start()
    value = await future
    if not inspect.isawaitable(value):
        return value
    try:
        return await value
    finally:
        progress.has_returned = True
