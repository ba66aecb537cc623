import asyncio
import contextvars
import dataclasses
import functools
import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from whet.errors import ConfigError, RewardError
from whet.rewards import deadline
from whet.rewards.call import RewardInputs, call_rewards, function_name, select_keywords
from whet.rewards.checked_values import check_values, error_from_exception
from whet.rewards.model import RewardModel

INPUTS = RewardInputs(
    prompts=["p", "p"],
    completions=["aa", "b"],
    prompt_ids=[[112], [112]],
    completion_ids=[[97, 97, 256], [98, 256]],
    trajectory_ids=["7_0", "7_1"],
    mode="eval",
    columns={"answer": [1, 1], "grid": [[[1]], [[1]]]},
    algo_fields={"beta": 0.5, "answer": "never"},
    extras={"tracker": 3},
)
IDS = INPUTS.trajectory_ids


def call(fn, **options):
    return call_rewards({"f": fn}, INPUTS, **{"timeout_s": 5.0, **options})


def elsewhere(run):
    """What a call on another thread than the main one gives or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def returns(value):
    return lambda completions: value


def test_a_reward_model_has_no_deadline():
    class Slow(RewardModel):
        def __init__(self):
            pass

        def __call__(self, completions, **_):
            time.sleep(0.2)
            return [1.0] * len(completions)

    assert call(Slow(), timeout_s=0.05).rewards["f"].tolist() == [1.0, 1.0]


def test_kwargs_get_everything_offered_but_the_algorithms_fields():
    seen = {}
    call(lambda **kw: seen.update(kw) or [0, 0])
    assert seen == {
        "prompts": ["p", "p"],
        "completions": ["aa", "b"],
        "prompt_ids": [[112], [112]],
        "completion_ids": [[97, 97, 256], [98, 256]],
        "trajectory_ids": ["7_0", "7_1"],
        "mode": "eval",
        "answer": [1, 1],
        "grid": [[[1]], [[1]]],
        "tracker": 3,
    }


def test_a_function_without_kwargs_gets_what_it_names():
    def fn(completions, mode, beta, completion_ids=None, unknown=9):
        assert (mode, beta, unknown) == ("eval", 0.5, 9)
        return [len(ids) for ids in completion_ids]

    assert call(fn)[0]["f"].tolist() == [3.0, 2.0]


def test_named_algorithm_fields_come_beside_kwargs_and_columns_go_before_them():
    def fn(prompts, completions, beta, answer, **kwargs):
        assert "beta" not in kwargs and answer == [1, 1] and beta == 0.5 and kwargs["mode"] == "eval"
        return [0, 0]

    call(fn)


def test_a_column_does_not_hide_what_every_function_is_offered():
    inputs = dataclasses.replace(INPUTS, columns={"completions": ["gold", "gold"], "mode": ["hard", "easy"]})
    assert inputs.keywords()["completions"] == ["aa", "b"] and inputs.keywords()["mode"] == "eval"


def test_a_partial_keeps_what_it_has_bound():
    def fn(completions, answer, scale, **kwargs):
        assert answer == "bound" and "answer" not in kwargs
        return [scale * len(c) for c in completions]

    assert call(functools.partial(fn, scale=2, answer="bound"))[0]["f"].tolist() == [4.0, 2.0]
    assert function_name(functools.partial(functools.partial(fn), scale=2)) == "fn"


def test_callable_objects_and_methods_are_functions():
    class Judge:
        def __call__(self, completions, **kwargs):
            return [1, 2]

        def judge(self, completions):
            return [3, 4]

    assert call(Judge())[0]["f"].tolist() == [1.0, 2.0]
    assert call(Judge().judge)[0]["f"].tolist() == [3.0, 4.0]
    assert (function_name(Judge()), function_name(Judge().judge)) == ("Judge", "judge")


def test_an_argument_that_nobody_offers_is_named_with_the_nearest():
    def fn(completions, anwser):
        return []

    with pytest.raises(
        ConfigError,
        match=r"fn needs 'anwser'.*your columns: .*answer, grid; did you mean answer\? .*offered: prompts, comp",
    ):
        call_rewards({"fn": fn}, INPUTS)
    with pytest.raises(ConfigError, match="as a positional-only argument"):
        select_keywords(lambda completions, /: [], {"completions": []}, {}, name="f")
    with pytest.raises(ConfigError, match="no signature"):
        select_keywords(min, {"completions": []}, {}, name="min")


def test_a_function_may_change_its_own_lists():
    def greedy(completions, **kwargs):
        completions.clear()
        kwargs["answer"].clear()
        return [0, 0]

    made, *_ = call_rewards(
        {"greedy": greedy, "count": lambda completions, answer: [len(completions), len(answer)]}, INPUTS
    )
    assert made["count"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        [1, 0],
        (1.0, 0.0),
        [True, False],
        np.array([1, 0]),
        np.array([True, False]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([1, 0], dtype=torch.bfloat16),
        [np.float32(1), torch.tensor(0)],
    ],
)
def test_numbers_of_any_kind_become_float64(value):
    rewards = call(returns(value))[0]["f"]
    assert rewards.dtype == np.float64 and rewards.tolist() == [1.0, 0.0]


def test_none_means_not_applicable():
    rewards, errors, _ = call(returns([None, 2]))
    assert math.isnan(rewards["f"][0]) and rewards["f"][1] == 2.0 and errors == {"f": 0}


@pytest.mark.parametrize(
    ("value", "says", "failed"),
    [
        (None, r"f returned None; return a list of 2 numbers", 2),
        ([1], r"f returned 1 reward; return a list of 2", 2),
        ([1, 2, 3], r"f returned 3 rewards", 2),
        (1.0, r"f returned float '1.0'", 2),
        ("10", r"f returned str '10'", 2),
        ({1, 2}, r"f returned set", 2),
        ({"a": 1, "b": 2}, r"f returned dict", 2),
        (np.ones((2, 1)), r"f returned shape \[2, 1\]", 2),
        (torch.tensor(1.0), r"f returned shape \[\]", 2),
        ([0, math.nan], r"f returned nan for row 7, generation 1 \(entry 1\).*None where it does not apply", 1),
        (np.array([0, math.nan]), r"f returned nan for row 7, generation 1", 1),
        ([math.inf, 0], r"f returned inf for row 7, generation 0", 1),
        ([0, "1"], r"f returned '1' for row 7", 1),
        ([0, [1]], r"f returned \[1\] for row 7", 1),
        ([0, 10**400], r"f returned 1000", 1),
        ([0, torch.ones(2)], r"f returned tensor", 1),
    ],
)
def test_what_is_no_reward_is_named_or_counted(value, says, failed):
    with pytest.raises(RewardError, match=says):
        call(returns(value))
    rewards, errors, _ = call(returns(value), on_error="none")
    assert errors == {"f": failed} and np.isnan(rewards["f"]).sum() == failed


@pytest.mark.parametrize("timeout_s", [5.0, None])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_exceptions_are_named_with_their_cause_or_counted(timeout_s, asynchronous):
    def plain(completions):
        raise KeyError("gold")

    async def slow(completions):
        raise KeyError("gold")

    fn = slow if asynchronous else plain
    with pytest.raises(RewardError, match="f raised KeyError: 'gold'") as error:
        call(fn, timeout_s=timeout_s)
    assert isinstance(error.value.__cause__, KeyError)
    rewards, errors, _ = call(fn, timeout_s=timeout_s, on_error="none")
    assert errors == {"f": 2} and np.isnan(rewards["f"]).all()


def test_sys_exit_in_a_function_is_a_failure_of_that_function():
    with pytest.raises(RewardError, match="raised SystemExit: 3"):
        call(lambda completions: exit(3))


def test_async_functions_run_together():
    meeting = asyncio.Barrier(3)  # passes only if all three are under way at once

    async def one(completions):
        await meeting.wait()
        return [1, 1]

    class Two:
        async def __call__(self, completions, **kwargs):
            await meeting.wait()
            return [2, 2]

    async def scaled(completions, scale):
        await meeting.wait()
        return [scale, scale]

    fns = {"one": one, "two": Two(), "three": functools.partial(scaled, scale=3), "plain": returns([4, 4])}
    made, *_ = call_rewards(fns, INPUTS, timeout_s=5.0)
    assert list(made) == ["one", "two", "three", "plain"]
    assert [v[0] for v in made.values()] == [1, 2, 3, 4]


def test_a_plain_function_that_gives_a_coroutine_is_awaited():
    async def inner():
        return [5, 6]

    assert call(lambda completions: inner())[0]["f"].tolist() == [5.0, 6.0]


def test_functions_can_be_called_from_inside_an_event_loop():
    async def fn(completions):
        return [1, 2]

    async def main():
        return call(fn)[0]["f"].tolist()

    assert asyncio.run(main()) == [1.0, 2.0]


def test_an_async_function_has_all_the_time_of_its_limit():
    async def fn(completions):
        await asyncio.sleep(0.01)
        return [1, 2]

    assert call(fn, timeout_s=0.4)[0]["f"].tolist() == [1.0, 2.0]


def test_a_late_function_is_named_and_the_others_can_go_on():
    release = threading.Event()

    def hangs(completions):
        release.wait(30)
        return [0, 0]

    async def sleeps(completions):
        await asyncio.sleep(30)

    fns = {"hangs": hangs, "sleeps": sleeps, "fine": returns([1, 1])}
    try:
        with pytest.raises(RewardError, match=r"hangs returned nothing within 0.2 s and was interrupted"):
            call_rewards({"hangs": hangs}, INPUTS, timeout_s=0.2)
        with pytest.raises(RewardError, match=r"hangs returned nothing within 0.2 s and continues in a thread"):
            elsewhere(lambda: call_rewards({"hangs": hangs}, INPUTS, timeout_s=0.2))
        with pytest.raises(RewardError, match=r"sleeps returned nothing within 0.1 s"):
            call_rewards({"sleeps": sleeps}, INPUTS, timeout_s=0.1)
        made, errors, _ = call_rewards(fns, INPUTS, timeout_s=0.2, on_error="none")
        assert errors == {"hangs": 2, "sleeps": 2, "fine": 0} and made["fine"].tolist() == [1.0, 1.0]
    finally:
        release.set()


def test_an_async_function_that_blocks_the_loop_is_late_too():
    async def blocks(completions):
        time.sleep(1.5)

    with pytest.raises(RewardError, match=r"blocks returned nothing within 0.1 s.*must never block"):
        call_rewards({"blocks": blocks}, INPUTS, timeout_s=0.1)


def test_a_timeout_error_of_the_functions_own_is_not_ours():
    async def own(completions):
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="f raised TimeoutError: judge"):
        call(own)


@pytest.mark.parametrize("where", [lambda run: run(), elsewhere], ids=["main", "thread"])
@pytest.mark.parametrize("limit", [None, 60.0])
def test_functions_see_the_callers_context_and_gradient_mode_and_change_neither(limit, where):
    variable = contextvars.ContextVar("variable", default=0)

    def fn(completions):
        found = [variable.get(), torch.is_grad_enabled()]
        variable.set(4)
        torch.set_grad_enabled(True)
        return found

    def run():
        variable.set(3)
        with torch.no_grad():
            assert call(fn, timeout_s=limit)[0]["f"].tolist() == [3.0, 0.0]
            assert not torch.is_grad_enabled()
        assert variable.get() == 3 and torch.is_grad_enabled()

    where(run)


@pytest.mark.parametrize("limit", [None, 60.0])
def test_plain_functions_run_on_the_main_thread_where_they_are_called_from_there(limit):
    def fn(completions):
        return [threading.current_thread() is threading.main_thread()] * 2

    assert call(fn, timeout_s=limit)[0]["f"].tolist() == [1.0, 1.0]


def test_math_verify_gives_its_rewards_as_its_own_documentation_calls_it():
    pytest.importorskip("math_verify", reason="needs the extra whet[math]")
    from math_verify import parse, verify

    def maths(completions):
        return [float(verify(parse("$0.5$"), parse(text))) for text in completions]

    inputs = dataclasses.replace(INPUTS, completions=[r"It is $\frac{2}{4}$", "It is $0.4$"])
    assert call_rewards({"maths": maths}, inputs).rewards["maths"].tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"threaded environment.*train\(\) on the main thread, or .*reward_workers=1"):
        elsewhere(lambda: call_rewards({"maths": maths}, inputs))


def test_an_alarm_of_the_functions_own_ends_what_it_is_set_for():
    class Enough(Exception):
        pass

    def enough(*_):
        raise Enough

    def alarmed(completions):
        before = signal.signal(signal.SIGALRM, enough)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(30)
        except Enough:
            return [1, 0]
        finally:
            signal.signal(signal.SIGALRM, before)

    assert call(alarmed)[0]["f"].tolist() == [1.0, 0.0]


def test_a_late_function_that_catches_everything_is_interrupted_again():
    def stubborn(completions):
        for _ in range(3):
            try:
                time.sleep(30)
            except:  # noqa: E722
                continue
        return [0, 0]

    with pytest.raises(RewardError, match=r"f returned nothing within 0.1 s and was interrupted"):
        call(stubborn, timeout_s=0.1)


def test_that_nothing_interrupts_a_late_function_is_said(monkeypatch, caplog):
    monkeypatch.setattr(deadline, "STUCK_S", 0.1)

    def deaf(completions):
        signal.pthread_sigmask(signal.SIG_BLOCK, [deadline.INTERRUPT_SIGNAL])
        while "nothing interrupts it" not in caplog.text:
            time.sleep(0.01)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [deadline.INTERRUPT_SIGNAL])
        return [0, 0]

    with pytest.raises(RewardError, match="f returned nothing"):
        call(deaf, timeout_s=0.1)
    assert "reward function f is late, and nothing interrupts it" in caplog.text


def test_a_call_leaves_the_main_threads_signals_as_they_were():
    others = {*threading.enumerate()}  # of earlier tests; one may end meanwhile
    held = lambda: (
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        signal.getsignal(deadline.INTERRUPT_SIGNAL),
        {*threading.enumerate()} - others,
    )
    before = held()
    call(returns([1, 1]))
    with pytest.raises(RewardError):
        call(lambda completions: time.sleep(30), timeout_s=0.05)
    with pytest.raises(KeyboardInterrupt):
        call(lambda completions: os.kill(os.getpid(), signal.SIGINT) or time.sleep(30))
    assert held() == before and signal.set_wakeup_fd(-1) == -1


def test_a_ctrl_c_that_comes_just_before_a_wait_in_the_kernel_ends_that_wait(monkeypatch):
    sent = []

    def late(thread, number):
        """The first comes before the wait begins, which the kernel then doesn't end."""
        if sent:
            os.kill(os.getpid(), number)
        sent.append(number)

    monkeypatch.setattr(deadline.signal, "pthread_kill", late)
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(lambda completions: ctrl_c.start() or time.sleep(40))
    assert sent and time.monotonic() - start < 30


def test_a_function_may_run_an_event_loop_where_the_caller_is_in_one():
    async def judge():
        return [1, 0]

    async def notebook():
        found = call(lambda completions: asyncio.run(judge()))
        await asyncio.sleep(0)
        return found

    assert asyncio.run(notebook())[0]["f"].tolist() == [1.0, 0.0]


def test_the_values_of_an_empty_batch_are_no_rewards_and_no_problem():
    checked = check_values([], [], name="f")
    assert checked.rewards.shape == (0,) and checked.wrong == 0 and checked.problem is None


def test_what_is_counted_is_also_logged(caplog):
    def raises(completions):
        raise ValueError("gold")

    call_rewards({"a": raises, "b": returns([1]), "c": returns([math.nan, "x"])}, INPUTS, on_error="none")
    said = " | ".join(record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 3
    for words in ("raised ValueError: gold", "returned 1 reward;", "returned nan for row 7", "2 such entries"):
        assert words in said


# ---- what a function may do ----------------------------------------------------------------------------------------


def test_what_a_function_changes_reaches_neither_the_record_nor_another_function_nor_another_entry():
    chat, meta = [{"role": "user", "content": "q"}], {"a": [1]}
    inputs = RewardInputs(
        prompts=[chat, chat],
        completions=[[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]],
        completion_ids=[[1, 2], [3]],
        trajectory_ids=["0_0", "0_1"],
        columns={"meta": [meta, meta], "lock": [threading.Lock()] * 2},
    )

    def vandal(prompts, completions, completion_ids, meta, lock, **_):
        prompts[0][0]["content"] = completions[0][0]["content"] = "hacked"
        completion_ids[0].append(9)
        meta[0]["a"].append(2)
        assert meta[1] == {"a": [1]} and prompts[1] == [{"role": "user", "content": "q"}]
        return [0, 0]

    def witness(prompts, completions, completion_ids, meta):
        assert prompts[0][0]["content"] == "q" and completions[0][0]["content"] == "x"
        assert completion_ids == [[1, 2], [3]] and meta == [{"a": [1]}] * 2
        return [1, 1]

    made, *_ = call_rewards({"vandal": vandal, "witness": witness}, inputs)
    assert made["witness"].tolist() == [1, 1]
    assert chat[0]["content"] == "q" and meta == {"a": [1]} and inputs.completions[0][0]["content"] == "x"
    assert inputs.completion_ids == [[1, 2], [3]]


def test_a_reward_too_large_for_sums_of_squares_is_refused():
    assert call(returns([1e15, -1e15]))[0]["f"].tolist() == [1e15, -1e15]
    for huge in (1e16, -1e300, 10**400):
        with pytest.raises(RewardError, match=r"for row 7, generation 1 .*1e\+15"):
            call(returns([0, huge]))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_whatever_a_function_raises_in_its_thread_is_raised_not_late(kind):
    def plain(completions):
        raise kind("stop")

    async def together(completions):
        raise kind("stop")

    for fn in (plain, together):
        with pytest.raises(RewardError, match=f"raised {kind.__name__}: stop"):
            elsewhere(lambda fn=fn: call(fn, timeout_s=1.0))


def test_an_interrupt_on_the_main_thread_is_the_users():
    def fn(completions):
        raise KeyboardInterrupt

    for limit in (None, 60.0):
        with pytest.raises(KeyboardInterrupt):
            call(fn, timeout_s=limit)


def test_an_error_inside_a_library_names_the_line_of_the_function_that_called_it():
    def parses(text):
        return json.loads(text)

    with pytest.raises(json.JSONDecodeError) as raised:
        parses("{")
    error = error_from_exception("the agent", raised.value, "elsewhere.py")
    line = parses.__code__.co_firstlineno + 1
    assert str(error).endswith(f"(test_call.py:{line}: return json.loads(text))")
