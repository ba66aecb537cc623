"""Signals: what they ask of a run, whom they are left to, and what a forked child makes of them."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time

import pytest
import safetensors.torch
from helpers import cluster, length_reward, rows

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.learners.grpo import GRPOLearner
from whet.run.run import Run
from whet.run.signals import SignalHandler
from whet.train.worker import ModelWorker

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def handler():
    before = {n: signal.getsignal(n) for n in SIGNALS}
    found = SignalHandler()
    found.install()
    yield found
    found.uninstall()
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_wish_that_is_said_once(handler, number, caplog):
    signal.raise_signal(number)
    assert handler.stop_requested and [r.message.partition(":")[0] for r in caplog.records] == [number.name]
    for again in SIGNALS[1:]:  # shells and `timeout` send theirs twice, and mean one
        signal.raise_signal(again)
    assert len(caplog.records) == 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_does_not_end_a_process_that_is_about_to_say_why_it_fails(handler, caplog):
    handler.uninstall(keep_sigterm=True)
    signal.raise_signal(signal.SIGTERM)
    assert not caplog.records and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_what_others_handle_or_ignore_is_left_to_them(tmp_path):
    mine, log = (lambda *_: None), (tmp_path / "log").open("w")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, mine)  # nohup; a program's own
    faulthandler.register(signal.SIGUSR1, log)
    handler = SignalHandler()
    handler.install()
    try:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is mine
        signal.raise_signal(signal.SIGUSR1)
        assert not handler.stop_requested and "test_signals.py" in (tmp_path / "log").read_text()
    finally:
        handler.uninstall()
        faulthandler.unregister(signal.SIGUSR1)
        log.close()
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])


# ---- a forked child ------------------------------------------------------------------------------------------------


def exit_of(target, *args):
    """The exit status of a forked child; it is a daemon, so that one that hangs ends with the tests."""
    child = FORK.Process(target=target, args=args, daemon=True)
    child.start()
    child.join(30)
    return child.exitcode


def raised(*numbers):
    """Sends itself signals: 7 = it lives on, 8 = the last was a KeyboardInterrupt."""
    try:
        for number in numbers:
            signal.raise_signal(number)
    except KeyboardInterrupt:
        os._exit(8)
    os._exit(7)


def test_a_child_goes_on_with_the_step_until_a_second_ctrl_c_and_sigterm_ends_it(handler):
    passed = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGHUP)
    assert exit_of(raised, *passed) == 7
    assert exit_of(raised, *passed, signal.SIGINT) == 8
    assert exit_of(raised, signal.SIGTERM) == -signal.SIGTERM
    assert exit_of(handler._handle, signal.SIGTERM, None) == -signal.SIGTERM  # where no hook of a fork ran
    assert not handler.stop_requested


def orphaned(handler):
    handler._pid = 2**22 + 1  # of a run that is over
    raised(signal.SIGHUP)


def test_a_child_that_outlives_its_run_is_hung_up_as_any_other(handler):
    assert exit_of(orphaned, handler) == -signal.SIGHUP


def test_a_child_that_is_ended_before_it_has_run_a_line_ends(handler):
    for _ in range(10):
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


BUSY = FORK.Event()


def never_done():
    BUSY.set()
    while True:
        time.sleep(60)


def test_a_pool_that_a_thread_makes_while_a_run_listens_ends(handler):
    found = []

    def pooled():
        with FORK.Pool(2) as pool:
            found.append(pool.map(abs, [-1, 2]))
            pool.apply_async(never_done)
            assert BUSY.wait(60)
        pool.join()

    thread = threading.Thread(target=pooled, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [[1, 2]] and not thread.is_alive()


# ---- a run ---------------------------------------------------------------------------------------------------------


def learner(folder, reward=length_reward, **training):
    c = cluster(run_dir=str(folder), **training)
    return GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), reward, data=DataConfig(batch_size=2))


@pytest.mark.parametrize("where", ["rewarding", "generating", "saving"])
def test_a_run_asked_in_the_midst_of_a_step_ends_after_it_with_a_checkpoint(tmp_path, monkeypatch, where):
    def asks(fn):
        def asked(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return fn(*args, **kwargs)

        return asked

    each = CheckpointingOptions(save_interval_steps=1 if where == "saving" else 100)
    made = learner(tmp_path, asks(length_reward) if where == "rewarding" else length_reward, checkpointing_options=each)
    if where == "generating":
        monkeypatch.setattr(made.cluster.engine, "step", asks(made.cluster.engine.step))
    if where == "saving":
        monkeypatch.setattr(safetensors.torch, "save_file", asks(safetensors.torch.save_file))
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 1; .*step-000001\nto continue, .*resume=.latest"):
        made.train(rows(8))
    monkeypatch.undo()
    run = learner(tmp_path, resume="latest", checkpointing_options=each).train(rows(8))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]


def test_a_second_ctrl_c_ends_a_run_in_the_midst_of_a_reward(tmp_path, caplog):
    def twice(completions, **_):
        os.kill(os.getpid(), signal.SIGINT)
        while "SIGINT: stopping after this step" not in caplog.text:
            never.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        return never.wait(60)

    never = threading.Event()
    with pytest.raises(KeyboardInterrupt) as stopped:
        learner(tmp_path, twice).train(rows(8))
    never.set()
    assert str(stopped.value) == "" and not list(tmp_path.glob("checkpoints/step-*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_is_said_and_leaves_the_final_model_whole(tmp_path, monkeypatch, caplog, number):
    made = learner(tmp_path)
    export, evaluate, there = made.cluster.checkpoints.export, Run.evaluate, []

    def asked(*args, **kwargs):
        os.kill(os.getpid(), number)
        return export(*args, **kwargs)

    monkeypatch.setattr(made.cluster.checkpoints, "export", asked)
    finals = lambda run, step: there.append((tmp_path / "final").is_dir()) or evaluate(run, step)
    monkeypatch.setattr(Run, "evaluate", finals)
    run = made.train(rows(2), rows(2))
    assert (tmp_path / "final" / "run.json").is_file() and run.step == 1
    assert there == [False, True]  # before the first step, and after the model was written
    assert f"{signal.Signals(number).name}: all steps are done, and the run ends once final/" in caplog.text


def test_a_second_ctrl_c_while_the_final_model_is_written_leaves_none_and_a_checkpoint(tmp_path, monkeypatch):
    made = learner(tmp_path)

    def asked(worker, place, *_, **__):
        (place / "config.json").write_text("{}")
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ModelWorker, "export", asked)
    with pytest.raises(KeyboardInterrupt):
        made.train(rows(2))
    assert not (tmp_path / "final").exists() and (tmp_path / "checkpoints" / "step-000001").is_dir()
    monkeypatch.undo()
    learner(tmp_path, resume="latest").train(rows(2))
    assert (tmp_path / "final" / "run.json").is_file()
