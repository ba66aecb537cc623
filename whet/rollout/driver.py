"""RolloutDriver: runs episodes in an engine, and returns each group of completions as soon as its last episode ends.

An episode is a generator: it yields requests, is sent their outputs, and returns its completions. So many episodes
interleave in one engine. A completion to a prompt (`single_turn`) yields once; an environment with ten turns yields ten
times. It may also yield an ExternalCall, such as a tool: the engine goes on with the other episodes until the call
ends. The key of a draw is that of its episode and turn, so a transcript does not depend on which call ends first. Only
`RolloutDriver` calls an engine's submit and step (besides `stream`, which shows tokens to a person).

    rollouts = RolloutDriver(engine)
    rollouts.start(episodes)
    while groups := rollouts.ready():       # as they end; more may be started at any time
        ...

Dim legend: C completion.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whet.errors import DataError, EngineError, RolloutStopped
from whet.observe.trace import Trace
from whet.rollout.base import Output, PartialOutput, Request, RolloutEngine, Sampling, check_caps
from whet.rollout.external_calls import CallResult, ExternalCall, ExternalCalls
from whet.rollout.output_check import check_output
from whet.types import Completion, Group, Prompt

__all__ = ["Episode", "GroupKey", "RolloutDriver", "Turns", "completion", "single_turn", "single_turns", "stream"]

log = logging.getLogger("whet")

GroupKey = tuple[int, int, int]
"""(seed, step, prompt): the rng_key of a group without the generation; it identifies the group while it is running."""
Turns = Generator[Any, Any, Completion | Sequence[Completion]]
"""Yields a Request and is sent its Output, or yields several and is sent a list, or yields an ExternalCall and is sent
its value; returns one Completion, or the forks of one episode."""
CALL_POLL_S = 0.02
"""The time after which a step of the engine returns to collect external calls."""
CALL_GRACE_S = 0.05
"""The time for which the engine waits for calls that have just started. Quick tools then answer in a fixed order, and
their episodes continue in one batch."""
STOP_POLL_S = 0.5
"""The time after which a wait for external calls looks whether the run should stop."""
STOP_WAIT_S = 10.0
"""A run that should stop waits for external calls for this time in all, without the time in which the engine works."""


class Episode:
    """One trajectory.

    Args:
        prompt: of its group.
        rng_key: (seed, step, prompt, generation). The first three identify its group; all four, with the number of the
            draw, determine every random number.
        run: the generator function; its argument is the episode.

    >>> from whet.rollout.mock import MockEngine
    >>> def twice(episode):  # the model speaks, the environment answers with two tokens, the model speaks again
    ...     first = yield episode.request(episode.prompt.tokens, Sampling(max_tokens=3))
    ...     answer = np.array([7, 7], np.int32)
    ...     context = np.concatenate([episode.prompt.tokens, first.tokens, answer])
    ...     second = yield episode.request(context, Sampling(max_tokens=2))
    ...     return completion(first, answer, second, generation=episode.generation)
    >>> prompt = Prompt(tokens=np.array([5, 6], np.int32), source="", row=0)
    >>> (group,) = RolloutDriver(MockEngine()).run([Episode(prompt, (0, 1, 0, 0), twice)])
    >>> group.completions[0].versions.tolist()
    [0, 0, 0, -1, -1, 0, 0]
    """

    def __init__(self, prompt: Prompt, rng_key: tuple[int, int, int, int], run: Callable[[Episode], Turns]) -> None:
        self.prompt, self.rng_key, self.run = prompt, rng_key, run
        self.seconds: dict[str, float] = {}
        """The time that it has waited for the engine ("engine") and for the phases of its external calls."""
        self.rewards: dict[str, float] = {}
        """Rewards by name that `run` gives the episode: Group.rewards. An episode without one has NaN there."""
        self.attempts = 1
        """How often it has been run, this time included."""
        self._draws = 0

    def restart(self) -> None:
        """Begins another attempt, with the same draws and without rewards."""
        self.attempts += 1
        self.reset()

    def reset(self) -> None:
        """Takes the attempt back to its start: no draws and no rewards yet."""
        self._draws = 0
        self.rewards.clear()

    @property
    def generation(self) -> int:
        """Its index in the group."""
        return self.rng_key[3]

    @property
    def group(self) -> GroupKey:
        """The group that it belongs to."""
        return self.rng_key[:3]

    def request(
        self,
        tokens: np.ndarray,
        sampling: Sampling,
        *,
        conversation: int | None = None,
        expected: int | None = None,
    ) -> Request:
        """Returns a request of its next turn. max_tokens random numbers are reserved for it, and no other turn repeats
        them.

        Args:
            tokens: int32 [P], the prompt and everything after it.
            sampling, conversation, expected: as in Request.
        Returns: the request, to be yielded; RolloutDriver sets its id.
        """
        draw, self._draws = self._draws, self._draws + sampling.max_tokens
        return Request(
            id=-1,
            tokens=tokens,
            sampling=sampling,
            group=-1,
            rng_key=self.rng_key,
            draw=draw,
            conversation=conversation,
            expected=expected,
        )


def completion(*parts: Output | np.ndarray, generation: int, info: Mapping[str, Any] | None = None) -> Completion:
    """Returns one training sequence from the outputs of an episode and the tokens between them.

    Args:
        parts: in order: outputs, whose tokens are trained, and int arrays [C] of tokens that were not drawn and are not
            trained (version -1). At least one output.
        generation: of the episode.
        info: for the store.
    Returns: the completion, with the finish_reason of its last output.

    >>> columns = {"tokens": np.array([4]), "logprobs": np.array([-1.0]), "versions": np.array([3])}
    >>> out = Output(id=0, **columns, finish_reason="stop")
    >>> c = completion(out, np.array([8, 9]), generation=0)
    >>> c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist()
    ([4, 8, 9], [-1.0, 0.0, 0.0], [3, -1, -1])
    """
    outputs = [p for p in parts if isinstance(p, Output)]
    logits = outputs[0].logits if len(parts) == 1 else None
    columns = [
        (p.tokens, p.logprobs, p.versions)
        if isinstance(p, Output)
        else (p, np.zeros(len(p), np.float32), np.full(len(p), -1, np.int32))
        for p in parts
    ]
    tokens, logprobs, versions = (np.concatenate(x) for x in zip(*columns, strict=True))
    return Completion(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        versions=versions.astype(np.int32),
        finish_reason=outputs[-1].finish_reason,
        generation=generation,
        info=dict(info or {}),
        logits=logits,
    )


def single_turn(
    prompt: Prompt, sampling: Sampling, *, rng_key: tuple[int, int, int, int], expected: int | None = None
) -> Episode:
    """Returns an episode of one turn: a completion to a prompt. Args: as in Request."""

    def run(episode: Episode) -> Turns:
        output = yield episode.request(prompt.tokens, sampling, expected=expected)
        return completion(output, generation=episode.generation)

    return Episode(prompt, rng_key, run)


def single_turns(
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling],
    *,
    num_generations: int = 1,
    rng_key: GroupKey = (0, 0, 0),
    expected: Sequence[int | None] | None = None,
) -> list[Episode]:
    """Episodes of one turn for some prompts, a group for each prompt.

    Args:
        prompts: encoded.
        sampling: one for all prompts, or one for each.
        num_generations: completions of each prompt.
        rng_key: (seed, step, index of the first prompt).
        expected: expected length of each prompt's completions in tokens; None = no guess.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    seed, step, first = rng_key
    return [
        single_turn(p, s, rng_key=(seed, step, first + i, g), expected=guess)
        for i, (p, s, guess) in enumerate(zip(prompts, each, expected or [None] * len(prompts), strict=True))
        for g in range(num_generations)
    ]


@dataclass(eq=False)
class _RunningEpisode:
    """A running episode."""

    episode: Episode
    turns: Turns
    single: bool = True
    """Whether it yielded one request, not a list of them."""
    since: float = 0.0
    """When its requests were submitted."""
    phase: str = "engine"
    """What it waits for: the engine, or the phase of its external call."""
    call: str = ""
    """The name of its last external call."""
    outputs: list[Output | None] = field(default_factory=list)
    """The outputs of the requests that it waits for; None = not finished yet."""
    completions: tuple[Completion, ...] | None = None
    """None = it is still running."""


@dataclass(eq=False)
class _GroupInFlight:
    """The episodes of one group."""

    running: list[_RunningEpisode] = field(default_factory=list)
    number: int | None = None
    """Request.group in the engine: the id of its first request."""

    def finished(self) -> Group | None:
        """Returns the group, once all its episodes have ended."""
        ordered = sorted(self.running, key=lambda r: r.episode.generation)
        if any(r.completions is None for r in ordered):
            return None
        completions = tuple(c for r in ordered for c in r.completions or ())
        names = dict.fromkeys(name for r in ordered for name in r.episode.rewards)
        rewards = {n: np.array([r.episode.rewards.get(n, np.nan) for r in ordered], np.float64) for n in names}
        return Group(prompt=ordered[0].episode.prompt, completions=completions, rewards=rewards)


class RolloutDriver:
    """Runs episodes in an engine. After an error none of their requests stays in it.

    Args:
        engine: no other code calls its submit and step.
        next_id: id of the first request; the attribute `next_id` counts up from it.
        vocab_size: token ids from here on are refused; None = unknown.
        max_concurrent_calls: external calls that run at once.
        trace: receives the external calls, and the time for which the engine has nothing to do but to wait for them.

    A caller may set `should_stop`. Once it returns True, the engine may wait for external calls for STOP_WAIT_S more;
    then the episodes are cancelled, and RolloutStopped is raised.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        next_id: int = 0,
        vocab_size: int | None = None,
        max_concurrent_calls: int = 64,
        trace: Trace | None = None,
    ) -> None:
        self.engine, self.next_id, self.vocab_size = engine, next_id, vocab_size
        self._groups: dict[GroupKey, _GroupInFlight] = {}
        self._finished: dict[GroupKey, Group] = {}
        self._waiting: dict[int, tuple[_RunningEpisode, int, Request]] = {}
        self._cancelled: set[int] = set()
        self._trace = trace or Trace()
        self._calls = ExternalCalls(max_concurrent_calls)
        self._calling: dict[int, _RunningEpisode] = {}
        self._next_call = self._first_new_call = 0
        self._num_submitted = self._num_episodes = self._num_ended = 0  # since the engine was last idle
        self.should_stop: Callable[[], bool] | None = None
        self._stop_waited = 0.0  # seconds that the engine has waited for calls since it should stop
        self._told_stop = False

    @property
    def in_flight(self) -> tuple[GroupKey, ...]:
        """The groups that are running."""
        return tuple(self._groups)

    def start(self, episodes: Iterable[Episode]) -> list[GroupKey]:
        """Starts episodes; all of a group start together. Others may be running.

        Returns: their groups, in order.
        Raises: EngineError: the engine refuses a request; a group with that key is already running. Any error of an
            episode. None of these episodes is running then; earlier ones continue.
        """
        if not self._groups:
            self._num_submitted = self._num_episodes = self._num_ended = 0
        new: dict[GroupKey, _GroupInFlight] = {}
        for e in episodes:
            if e.group in self._groups or e.group in self._finished:
                raise EngineError(
                    f"a group at (seed, step, prompt) {e.group} is already running; a second one would use the same "
                    "random numbers"
                )
            running = new.setdefault(e.group, _GroupInFlight()).running
            if any(r.episode.generation == e.generation for r in running):
                raise EngineError(
                    f"two episodes have the same rng_key (seed, step, prompt, generation) {e.rng_key}; they would use "
                    "the same random numbers"
                )
            running.append(_RunningEpisode(e, e.run(e)))
        self._groups |= new
        self._num_episodes += sum(len(group.running) for group in new.values())
        try:
            self._advance([(r, r.turns.send, None) for g in new.values() for r in g.running])
        except BaseException:
            self.cancel(new)
            raise
        return list(new)

    def ready(self, timeout_s: float | None = None) -> list[Group]:
        """Computes until a group has ended, and returns all that have ended.

        Args: timeout_s: of waiting; None = no limit.
        Returns: groups in the order in which they ended; [] = nothing is running, or the time is up.
        Raises: EngineError: the engine lost a request, failed, or drew from logits that are not finite. Any error of an
            episode. Nothing is running then; the next call still returns groups that had ended.
        """
        self._compute(lambda: bool(self._finished), timeout_s)
        finished, self._finished = self._finished, {}
        return list(finished.values())

    def run(self, episodes: Iterable[Episode]) -> list[Group]:
        """Runs episodes to their end; others may be running. Returns: a group for each prompt, in order."""
        keys = self.start(episodes)
        try:
            self._compute(lambda: not any(k in self._groups for k in keys), None)
        except BaseException:
            self.cancel(keys)
            raise
        return [self._finished.pop(k) for k in keys]

    def cancel(self, groups: Iterable[GroupKey] | None = None) -> None:
        """Ends groups now, without a result. Args: groups: as `start` returned them; None = all that are running."""
        keys = set(self._groups if groups is None else groups)
        for key in keys:
            self._finished.pop(key, None)
        cancelled = [r for key in keys & self._groups.keys() for r in self._groups.pop(key).running]
        objects = set(map(id, cancelled))
        ids = [i for i, (r, *_) in self._waiting.items() if id(r) in objects]
        for i in ids:
            del self._waiting[i]
        calls = [key for key, r in self._calling.items() if id(r) in objects]
        for key in calls:
            del self._calling[key]
        self._calls.cancel(calls)
        try:
            if ids:
                self._cancelled |= set(ids)  # an engine that can't abort returns them later
                self._cancelled -= {o.id for o in self.engine.abort(ids)}
        finally:
            for r in cancelled:
                r.turns.close()

    def close(self) -> None:
        """Ends all groups, and the loop of external calls; not the engine."""
        self.cancel()
        self._calls.close()

    def _compute(self, is_done: Callable[[], bool], timeout_s: float | None) -> None:
        """Steps the engine and collects external calls until `is_done`, or nothing is running, or the time is up."""
        start = time.monotonic()
        try:
            while self._groups and not is_done():
                rest = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - start))
                if self._waiting:
                    self._step(rest)
                    rest = 0.0
                elif not self._calling:
                    raise EngineError(f"{len(self._groups)} groups are running, but wait for nothing")
                if self._calling:
                    if self._waiting:
                        self._collect_calls(rest)
                    else:
                        self._wait_for_calls(rest)
                if timeout_s is not None and time.monotonic() - start >= timeout_s:
                    break
        except BaseException:  # Ctrl-C in a notebook: the next call must not find these
            self.cancel()
            raise

    def _wait_for_calls(self, timeout_s: float | None) -> None:
        """Collects external calls, while the engine has nothing to do.

        Args: timeout_s: of waiting for the first one; None = no limit.
        Raises: RolloutStopped: the run should stop, and the engine has waited for STOP_WAIT_S since.
        """
        started = time.monotonic()
        with self._trace.span("rollout/tool_wait"):
            self._collect_calls(timeout_s)
        if self.should_stop is None or not self.should_stop():
            self._stop_waited, self._told_stop = 0.0, False
            return
        if not self._calling:
            return
        self._stop_waited += time.monotonic() - started
        counts = Counter(running.call for running in self._calling.values())
        waits = ", ".join(f"{name} in {count} episode{'s' * (count > 1)}" for name, count in counts.items())
        if self._stop_waited >= STOP_WAIT_S:
            raise RolloutStopped(f"gave up waiting for {waits}")
        if not self._told_stop and self._stop_waited >= STOP_WAIT_S / 10:
            self._told_stop = True
            log.warning("waiting for %s; after %g s of waiting in all the step is given up", waits, STOP_WAIT_S)

    def _step(self, timeout_s: float | None) -> None:
        """Runs one step of the engine, a short one while external calls are running."""
        if self._calling:
            timeout_s = CALL_POLL_S if timeout_s is None else min(timeout_s, CALL_POLL_S)
        if timeout_s is None:
            outputs, is_idle = self.engine.step(), True
        else:
            outputs = self.engine.step(timeout_s=timeout_s)
            is_idle = not self.engine.stats().in_flight
        if not outputs and is_idle:
            lost = f"{len(self._waiting)} of {self._num_submitted}"
            raise EngineError(f"the engine is idle, but {lost} requests never finished")
        self._receive(outputs)

    def _receive(self, outputs: Iterable[Output]) -> None:
        """Gives outputs to the episodes that wait for them."""
        ready: list[tuple[_RunningEpisode, Callable[[Any], Any], Any]] = []
        for o in outputs:
            if o.id in self._cancelled:
                self._cancelled.discard(o.id)
                continue
            if o.id not in self._waiting:
                raise EngineError(
                    f"the engine returned request {o.id}, which this driver did not submit or has already received; "
                    "don't call engine.step() yourself"
                )
            running, index, request = self._waiting.pop(o.id)
            check_output(o, request, self.engine, vocab_size=self.vocab_size)
            running.outputs[index] = o
            if None not in running.outputs:
                _add_seconds(running, time.monotonic() - running.since)
                ready.append((running, running.turns.send, o if running.single else list(running.outputs)))
        self._advance(ready)

    def _collect_calls(self, timeout_s: float | None) -> None:
        """Gives the results of external calls to the episodes that wait for them.

        Args: timeout_s: of waiting for the first one; None = no limit. New calls have CALL_GRACE_S to end together.
        """
        new = {key for key in self._calling if key >= self._first_new_call}
        self._first_new_call = self._next_call
        results: list[CallResult] = []
        end = time.monotonic() + CALL_GRACE_S
        while new and (rest := end - time.monotonic()) > 0:
            results += (ended := self._calls.collect(rest))
            new -= {result.key for result in ended}
        if self.should_stop is not None:
            timeout_s = STOP_POLL_S if timeout_s is None else min(timeout_s, STOP_POLL_S)
        results += self._calls.collect(0.0 if results else timeout_s)
        ready: list[tuple[_RunningEpisode, Callable[[Any], Any], Any]] = []
        for result in sorted(results, key=lambda result: result.key):
            running = self._calling.pop(result.key)
            _add_seconds(running, result.seconds)
            self._trace.add(running.phase, result.seconds, call=running.call, episode=running.episode.rng_key)
            resume = running.turns.send if result.error is None else running.turns.throw
            ready.append((running, resume, result.value if result.error is None else result.error))
        self._advance(ready)

    def _advance(self, episodes: Iterable[tuple[_RunningEpisode, Callable[[Any], Any], Any]]) -> None:
        """Resumes episodes until their next requests, which are submitted together, a call, or their end.

        Args: episodes: each with its generator's `send` or `throw`, and the argument of that.
        """
        requests: list[Request] = []
        for running, resume, argument in episodes:
            try:
                yielded = resume(argument)
                if isinstance(yielded, ExternalCall):
                    running.phase, running.call = yielded.phase, yielded.name
                    self._calling[self._next_call] = running
                    self._calls.start(self._next_call, yielded)
                    self._next_call += 1
                else:
                    requests += self._numbered(running, yielded)
            except StopIteration as end:
                episode = running.episode
                running.completions = _check_completions(episode, end.value)
                self._num_ended += 1
                self._trace.count(self._num_ended, self._num_episodes, "completions")
                if group := self._groups[episode.group].finished():
                    del self._groups[episode.group]
                    self._finished[episode.group] = group
        for sampling in {id(r.sampling): r.sampling for r in requests}.values():
            check_caps(self.engine, sampling)
        if requests:
            self._num_submitted += len(requests)
            self.engine.submit(requests)

    def _numbered(self, running: _RunningEpisode, yielded: Request | Sequence[Request]) -> list[Request]:
        """Returns the requests that an episode has yielded, with ids and the number of its group."""
        running.single, running.since, running.phase = isinstance(yielded, Request), time.monotonic(), "engine"
        requests = [yielded] if isinstance(yielded, Request) else list(yielded)
        if not requests:
            raise DataError("an episode yielded no request; yield one or more, or return its completions")
        group = self._groups[running.episode.group]
        group.number = self.next_id if group.number is None else group.number
        running.outputs = [None] * len(requests)
        numbered = [replace(r, id=self.next_id + i, group=group.number) for i, r in enumerate(requests)]
        for index, request in enumerate(numbered):
            self._waiting[request.id] = running, index, request
        self.next_id += len(requests)
        return numbered


def _add_seconds(running: _RunningEpisode, seconds: float) -> None:
    """Adds to the time that an episode has waited for what it waits for."""
    of = running.episode.seconds
    of[running.phase] = of.get(running.phase, 0.0) + seconds


def _check_completions(episode: Episode, returned: Any) -> tuple[Completion, ...]:
    """Returns the completions that an episode returned. Raises DataError: there are none, or another episode's."""
    completions = (returned,) if isinstance(returned, Completion) else tuple(returned or ())
    if not completions or any(c.generation != episode.generation for c in completions):
        description = [c.generation for c in completions] or returned
        raise DataError(
            f"the episode at {episode.rng_key} returned {description!r}; return its Completion, or several, with "
            f"generation {episode.generation}"
        )
    return tuple(replace(c, seconds=episode.seconds) for c in completions)


def stream(engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[PartialOutput]:
    """Runs requests and yields their tokens as they are drawn; an engine without caps.peek yields them at the end.

    Leaving the loop early aborts the requests.

    Args: engine: idle. requests: to submit.
    Returns: PartialOutputs with the new tokens of a request; the last one has the finish_reason, and may be empty.
    Raises: EngineError: other requests are in flight, whose outputs would be lost; the engine does not support a field
        of a Sampling; the model's logits are not finite.

    >>> from whet.rollout.mock import MockEngine
    >>> r = Request(id=3, tokens=np.array([5]), sampling=Sampling(max_tokens=4), group=0, rng_key=(0, 0, 0, 0))
    >>> [(len(p.tokens), p.finish_reason) for p in stream(MockEngine(), [r])]
    [(4, 'length')]
    """
    if in_flight := engine.stats().in_flight:
        raise EngineError(f"{in_flight} requests are in flight; call step until there are none, then stream")
    for sampling in {id(r.sampling): r.sampling for r in requests}.values():
        check_caps(engine, sampling)
    engine.submit(requests)
    counts = {r.id: 0 for r in requests}
    try:
        while counts:
            for output in engine.step(timeout_s=0.0):
                yield _finite(output.skip_tokens(counts.pop(output.id)))
            for i, partial in engine.peek(counts).items():
                if len(partial.tokens) > counts[i]:
                    count, counts[i] = counts[i], len(partial.tokens)
                    yield _finite(partial.skip_tokens(count))
            if counts and not engine.stats().in_flight:
                raise EngineError(f"the engine is idle, but {len(counts)} requests never finished")
    finally:
        engine.abort(counts)


def _finite(partial: PartialOutput) -> PartialOutput:
    """Returns the same output. Raises EngineError: its logprobs are not finite."""
    if not np.isfinite(partial.logprobs).all():
        raise EngineError("the model's logits are not finite; its weights are broken, or its dtype is too narrow")
    return partial
