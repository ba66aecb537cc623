"""Rewards from worker processes: the same as from this one, whatever a function does to its process."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from whet.errors import ConfigError, RewardError
from whet.rewards.call import RewardInputs, call_rewards
from whet.rewards.function_info import make_function_ref
from whet.rewards.manager import RewardManager
from whet.rewards.resolve import resolve_rewards
from whet.rewards.text import exact_match, format_match
from whet.rewards.workers import RewardWorkers

SOURCE = '''
import ctypes, functools, os, re, sys, time
from whet.rewards import per_completion

def thirds(completions, answer, mode, **columns):
    """Looks at the whole batch, and at nothing that the trainer has imported."""
    assert "torch" not in sys.modules or "pytest" in sys.modules  # the trainer's
    print("said by a function")
    longest = max(len(c) for c in completions)
    return [len(c) / 3 / longest if mode == "train" else None for c in completions]

async def later(completions):
    return [0.1 * len(c) for c in completions]

def of_one(messages, answer):
    return len(messages[-1]["content"]) / 7

bound = functools.partial(thirds, answer="bound")

@per_completion
def faulty(completions, power=1.0):
    [text] = completions
    if text == "hang":
        re.match(r"(a+)+$", "a" * 40 + "b")  # in C, with the interpreter locked
    elif text == "_exit":
        os._exit(3)
    elif text == "crash":
        ctypes.string_at(0)
    elif text == "exit":
        sys.exit("enough")
    elif text == "fork" and os.fork() == 0:
        return [9.0]
    return [len(text) / 3 * power]

def whole(completions):
    return [faulty([c])[0] for c in completions]

def pid(completions):
    held.append(bytearray(2**20 * len(completions)))
    return [float(os.getpid())] * len(completions)

held = []

def started(completions):
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    open(completions[0], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def inputs(texts, **columns):
    ids = [f"{i // 2}_{i % 2}" for i in range(len(texts))]
    every = {name: [value] * len(texts) for name, value in columns.items()}
    tokens = [[1] * len(text) for text in texts]
    return RewardInputs(
        prompts=["p"] * len(texts), completions=texts, completion_ids=tokens, trajectory_ids=ids, columns=every
    )


def workers(file, *names, count=2, **options):
    """The functions of the file, and processes that call them."""
    refs = [name if ":" in name or name == "exact_match" else f"{file}:{name}" for name in names]
    fns = resolve_rewards(refs)
    pairs = zip(refs, fns.items(), strict=True)
    return fns, RewardWorkers({name: make_function_ref(ref, fn, name) for ref, (name, fn) in pairs}, count, **options)


def alive(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(*pids):
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def made(file):
    """All functions, and two processes that call them."""
    names = ("thirds", "later", "of_one", "faulty", "exact_match", "bound", "whole", "pid")
    fns, pool = workers(file, *names)
    yield fns, pool
    pool.close()


def called(made, name, texts, **options):
    fns, pool = made
    return call_rewards({name: fns[name]}, inputs(texts), workers=pool, **options)


@pytest.mark.parametrize("count", [2, 1])
def test_rewards_are_those_of_this_process_to_the_bit_for_any_number(file, made, count, capfd):
    fns, pool = made
    if count != 2:
        pool = RewardWorkers(pool.functions, count)
    fns = {name: fn for name, fn in fns.items() if name not in ("whole", "pid")}
    given = inputs(["a" * (i % 5) + "é" for i in range(11)], answer="aé")
    here = call_rewards({n: fn for n, fn in fns.items() if n != "faulty"}, given)
    pool.start()
    there = call_rewards(fns, given, workers=pool)
    for name, values in here.rewards.items():
        assert there.rewards[name].tobytes() == values.tobytes(), name
    assert there.rewards["faulty"].tolist() == [len(text) / 3 for text in given.completions]
    assert not any(there.errors.values()) and list(there.rewards) == list(fns)
    assert all(0 < there.seconds[name] < 5 for name in fns) and set(here.seconds) == set(here.rewards)
    assert "said by a function" in capfd.readouterr().out
    if count == 1:
        pids = [worker.process.pid for worker in pool._workers]
        pool.close()
        assert gone(*pids)


def test_what_hangs_or_crashes_costs_its_own_reward_alone(made, caplog):
    texts = ["ok", "hang", "_exit", "good", "crash", "exit", "fork", "last"]
    found = called(made, "faulty", texts, timeout_s=0.5, on_error="none")
    expected = [np.nan if text in ("hang", "_exit", "crash", "exit") else len(text) / 3 for text in texts]
    np.testing.assert_array_equal(found.rewards["faulty"], expected)
    assert found.errors == {"faulty": 4} and found.seconds["faulty"] > 0.5
    [said] = [r.getMessage() for r in caplog.records if "faulty" in r.getMessage()]
    assert "nothing for row 0, generation 1, within 0.5 s and was killed" in said and "; 4 such entries counted" in said
    found = called(made, "whole", ["ok", "_exit"], on_error="none")  # of the whole batch, so lost as a whole
    assert np.isnan(found.rewards["whole"]).all() and found.errors == {"whole": 2}


def test_a_failure_ends_the_step_with_what_happened_and_what_to_do(made):
    for texts, words in (
        (["hang"], r"nothing for row 0, generation 0, within 0\.5 s and was killed.*on_reward_error=none goes on"),
        (["a", "crash"], r"ended its process for row 0, generation 1, \(killed by SIGSEGV\)"),
        (["exit"], r"faulty raised SystemExit: enough \(mine\.py:\d+"),
    ):
        with pytest.raises(RewardError, match=words):
            called(made, "faulty", texts, timeout_s=0.5)
    with pytest.raises(RewardError, match="thirds: its argument 'lock' can't be sent to a worker process"):
        call_rewards({"thirds": made[0]["thirds"]}, inputs(["a"], answer="", lock=(x for x in "a")), workers=made[1])
    assert called(made, "faulty", ["ok"]).rewards["faulty"].tolist() == [2 / 3]


def test_a_worker_is_replaced_when_it_has_grown_or_been_called_often(file):
    fns, pool = workers(file, "pid", count=1, growth_bytes=12 * 2**20)  # 8 MiB a call, since the first

    def who(times):
        return [called((fns, pool), "pid", ["a"] * 8).rewards["pid"][0] for _ in range(times)]

    first, second, third, fourth = who(4)
    assert first == second == third != fourth and gone(int(first))
    pool.most_calls = 2
    assert who(1) == [fourth] and gone(int(fourth))


def test_signals_are_the_trainers_alone_and_a_worker_that_ends_between_calls_costs_nothing(made):
    first = int(called(made, "pid", ["a"]).rewards["pid"][0])
    assert os.getpgid(first) == first  # a terminal's signals go to another group
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(first, number)
    assert called(made, "pid", ["a"]).rewards["pid"][0] == first
    os.kill(first, signal.SIGKILL)  # while nobody has asked it anything: another makes its calls
    assert called(made, "pid", ["a"]).rewards["pid"][0] != first


class Judge:
    def __call__(self, completions):
        return [1.0]

    def score(self, completions):
        return [1.0]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda completions: [1.0], "is a lambda, which worker processes can't import; with .*file.py:name"),
        (Judge(), "an object of class Judge, and each worker process would have a state of its own"),
        (Judge().score, r"a method of an object \(Judge\)"),
        (functools.partial(exact_match, answer=(x for x in "a")), "its bound arguments can't be sent.*generator"),
    ],
)
def test_what_a_process_cannot_import_is_refused_at_once_with_what_to_do(fn, words):
    assert RewardManager(fn).workers is None
    with pytest.raises(ConfigError, match=words):
        RewardManager(fn, workers=2)


def test_functions_of_the_program_itself_and_files_that_do_not_import_are_refused(tmp_path, monkeypatch):
    def score(completions):
        return [1.0]

    with pytest.raises(ConfigError, match="is defined within test_functions_of_the_program"):
        RewardManager(score, workers=1)
    monkeypatch.setattr(score, "__qualname__", "score")
    monkeypatch.setattr(score, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"defined in the program itself \(__main__\).* with reward_workers, give"):
        RewardManager(score, workers=1)
    for fault, words in (
        ("raise OSError('no')", r"importing .*moody\d+\.py raised OSError: no"),
        ("import os; os._exit(4)", r"ended while it imported the functions \(exit status 4\)"),
    ):
        path = tmp_path / f"moody{len(fault)}.py"
        path.write_text(f"import sys\nif 'pytest' not in sys.modules:\n    {fault}\ndef f(completions):\n    pass\n")
        with pytest.raises(ConfigError, match=words):
            RewardManager(f"{path}:f", workers=1).check([])


def test_bound_arguments_and_the_managers_metric(file):
    manager = RewardManager([functools.partial(format_match, pattern="a+"), f"{file}:bound"], workers=1)
    made = call_rewards(manager.fns, inputs(["aa", "b"]), workers=manager.workers)
    assert made.rewards["format_match"].tolist() == [1.0, 0.0] and set(made.seconds) == {"format_match", "bound"}
    manager.close()


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_no_process_outlives_the_trainer(file, tmp_path, how):
    noted = tmp_path / "pids"
    program = f"""
    import sys
    from whet.rewards.function_info import FunctionRef
    from whet.rewards.workers import RewardCall, RewardWorkers
    assert "torch" not in sys.modules
    workers = RewardWorkers({{"started": FunctionRef(ref={file + ":started"!r})}}, 2)
    workers.call({{"started": RewardCall(kwargs={{"completions": [{str(noted)!r}]}}, ids=["0_0"])}}, timeout_s=None)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (noted.is_file() and len(noted.read_text().split()) == 2) and time.monotonic() < end:
        time.sleep(0.02)
    worker, child = map(int, noted.read_text().split())
    trainer.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
    trainer.wait(30)
    assert gone(worker)
    if how == "killed":
        os.kill(child, signal.SIGKILL)  # what the function has started is not the worker
    else:
        assert gone(child)
