"""Episodes that wait for tools: none stalls another, and no transcript depends on which tool answers first."""

import asyncio
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from whet.errors import RolloutStopped
from whet.rollout import driver
from whet.rollout.base import Sampling
from whet.rollout.driver import Episode, RolloutDriver, completion, single_turns
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.external_calls import CallTimeoutError, ExternalCall, ExternalCalls
from whet.types import Prompt

sys.path.append(str(Path(__file__).parents[2] / "engines"))
from tiny import build, prompts

SAMPLING = Sampling(max_tokens=5)


@pytest.fixture(scope="module")
def engine():
    made = EmbeddedEngine(build(gain=3.0), max_batch=64)
    yield made
    made.close()


@pytest.fixture
def rollouts(engine):
    made = RolloutDriver(engine)
    yield made
    made.close()


def row(i):
    return Prompt(tokens=prompts((3, 9, 4, 9, 1))[i % 5], source="", row=i)


def with_tool(tool, *, turns=2, **options):
    """Episodes whose turns are each answered by tool(number of the episode, tokens of the turn)."""

    def run(episode):
        context, parts = episode.prompt.tokens, []
        for _ in range(turns):
            output = yield episode.request(context, SAMPLING)
            call = lambda output=output: tool(episode.rng_key[2], output.tokens)
            answer = yield ExternalCall(function=call, name="the tool", **options)
            parts += [output, np.asarray(answer, np.int32)]
            context = np.concatenate([context, output.tokens, parts[-1]])
        return completion(*parts, generation=0)

    return run


def test_a_function_that_has_ended_in_time_is_not_late_when_the_loop_is():
    async def block():
        time.sleep(0.5)

    calls = ExternalCalls()
    calls.start(0, ExternalCall(function=lambda: 5, name="quick", timeout_s=0.2))
    calls.start(1, ExternalCall(function=block, name="block"))
    results = {}
    while len(calls):
        results |= {result.key: result for result in calls.collect(5.0)}
    calls.close()
    assert (results[0].value, results[0].error) == (5, None)


def episodes(run, count=64, seed=0):
    return [Episode(row(i), (seed, 0, i, 0), run) for i in range(count)]


def columns(groups):
    return [(g.completions[0].tokens.tolist(), g.completions[0].logprobs.tolist()) for g in groups]


def test_the_tools_of_64_episodes_wait_at_the_same_time(rollouts):
    waiting, all_wait = [], asyncio.Event()

    async def tool(number, tokens):  # returns once 64 of them wait
        waiting.append(number)
        if len(waiting) == 64:
            all_wait.set()
        await all_wait.wait()
        return [7]

    begun = time.monotonic()
    groups = rollouts.run(episodes(with_tool(lambda *a: tool(*a), turns=1, timeout_s=60.0)))
    assert sorted(waiting) == list(range(64)) and [g.prompt.row for g in groups] == list(range(64))
    assert time.monotonic() - begun < 60


def test_plain_functions_wait_at_the_same_time_too(rollouts):
    barrier = threading.Barrier(64)
    rollouts.run(episodes(with_tool(lambda *_: [barrier.wait(60.0) % 3], turns=1)))
    assert not barrier.broken


def test_no_more_calls_run_at_once_than_allowed(engine):
    running, most, lock = [0], [0], threading.Lock()

    async def tool(number, tokens):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.005)
        running[0] -= 1
        return [7]

    rollouts = RolloutDriver(engine, max_concurrent_calls=3)
    rollouts.run(episodes(with_tool(tool), 12))
    rollouts.close()
    assert most == [3] and lock


def test_the_transcript_does_not_depend_on_which_tool_answers_first(rollouts):
    answer = lambda number, tokens: [int(tokens.sum()) % 50 + 3, number + 3]
    want = columns(rollouts.run(episodes(with_tool(answer, turns=3), 12)))
    for seed in (1, 2):
        delays = random.Random(seed)

        async def slow(number, tokens, delays=delays):
            await asyncio.sleep(delays.random() / 20)
            return answer(number, tokens)

        got = columns(rollouts.run(episodes(with_tool(slow, turns=3), 12)))
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
        for (_, logprobs), (_, expected) in zip(got, want, strict=True):
            np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_others_go_on_while_one_waits(rollouts):
    release = threading.Event()
    rollouts.start(episodes(with_tool(lambda *_: [release.wait(60.0)], turns=1), 1))
    others = rollouts.run(single_turns([row(1), row(2)], Sampling(max_tokens=30), rng_key=(1, 0, 0)))
    assert len(others) == 2 and len(rollouts.in_flight) == 1
    assert rollouts.ready(timeout_s=0.05) == []
    release.set()
    assert len(rollouts.ready()) == 1


def test_a_call_that_is_late_or_raises_ends_in_its_episode(rollouts):
    async def hangs(number, tokens):
        await asyncio.sleep(60)

    def raises(number, tokens):
        raise KeyError("no such page")

    for tool, error, words in (
        (hangs, CallTimeoutError, "the tool returned nothing within 0.05 s"),
        (lambda *_: time.sleep(5), CallTimeoutError, "the tool returned nothing within 0.05 s"),
        (raises, KeyError, "no such page"),
    ):
        with pytest.raises(error, match=words):
            rollouts.run(episodes(with_tool(tool, timeout_s=0.05), 2))
        assert rollouts.in_flight == () and rollouts.engine.stats().in_flight == 0
    assert len(rollouts.run(episodes(with_tool(lambda *_: [5]), 2))) == 2


def test_a_cancelled_episode_ends_its_call(rollouts):
    begun, ended = threading.Event(), threading.Event()

    async def tool(number, tokens):
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    keys = rollouts.start(episodes(with_tool(tool), 1))
    assert rollouts.ready(timeout_s=0.0) == []
    while not begun.is_set():
        rollouts.ready(timeout_s=0.01)
    rollouts.cancel(keys)
    assert ended.wait(10.0) and rollouts.ready() == []


def test_the_seconds_of_an_episode_are_counted_by_phase(rollouts):
    made = episodes(with_tool(lambda *_: time.sleep(0.02) or [5], phase="search"), 1)
    rollouts.run(made)
    assert made[0].seconds["search"] >= 0.04 and made[0].seconds["engine"] > 0


def test_closing_cancels_what_is_running():
    ended = threading.Event()

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    calls = ExternalCalls()
    calls.start(0, ExternalCall(function=hangs, name="hangs"))
    assert calls.collect(0.05) == [] and len(calls) == 1
    calls.close()
    assert ended.wait(10.0) and len(calls) == 0


def test_a_call_that_only_waits_for_an_event_starts_beside_the_calls_that_run():
    ended, calls = threading.Event(), ExternalCalls(max_concurrent=1)
    calls.start(0, ExternalCall(function=ended.wait, name="runs"))
    calls.start(1, ExternalCall(function=lambda: ended.set() or 5, name="waits", only_waits=True))
    found = {}
    while len(found) < 2:
        found |= {result.key: result.value for result in calls.collect(10)}
    assert found == {0: True, 1: 5}
    calls.close()


def test_a_run_that_should_stop_waits_for_calls_for_a_limited_time_in_all(rollouts, monkeypatch, caplog):
    monkeypatch.setattr(driver, "STOP_WAIT_S", 0.5)
    started = time.monotonic()
    rollouts.should_stop = lambda: time.monotonic() - started > 0.2

    async def tool(number, tokens):  # one of the eight ends every 0.04 s, for 15 s
        await asyncio.sleep(0.3 + 0.04 * (number % 8))
        return [number]

    with pytest.raises(RolloutStopped, match=r"^gave up waiting for the tool in \d episodes?$"):
        rollouts.run(episodes(with_tool(tool, turns=30), count=8))
    assert time.monotonic() - started < 6
    assert "after 0.5 s of waiting in all the step is given up" in caplog.text
    rollouts.should_stop = None
