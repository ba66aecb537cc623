"""What the processes of a run could decide differently is decided for all: several ranks, each a run in a thread."""

import time

import pytest
from helpers import cluster, length_reward, rows
from meeting import together

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, Mode
from whet.errors import RewardError, RolloutStopped, WhetError
from whet.learners.grpo import GRPOLearner
from whet.run.observer import Observer
from whet.run.signals import Stopped


def learner(ranks, *observers, **training):
    """One rank's learner; its placement takes part in the meeting."""
    c = cluster(engine="mock", max_steps=3, **training)
    c.ranks = c.checkpoints.ranks = ranks
    data = DataConfig(batch_size=2, shuffle=False)
    return GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=data, observers=observers)


class After(Observer):
    """Does something after step 1."""

    def __init__(self, what):
        self.what = what

    def on_step_end(self, run, step):
        if run.step == 1:
            self.what(run)


def test_what_an_observer_requests_on_rank_0_all_ranks_do():
    def evaluated(ranks):
        wish = After(lambda run: setattr(run.control, "evaluate", True))
        run = learner(ranks, wish).train(rows(6), rows(1))
        return [row["step"] for row in run.rows if row["mode"] == "eval"]

    def stopped(ranks):
        return learner(ranks, After(lambda run: setattr(run.control, "stop", True))).train(rows(6)).step

    assert together(2, evaluated) == [[0, 1, 3]] * 2
    assert together(2, stopped) == [1, 1]


def test_rows_that_differ_only_in_what_rewards_read_are_refused_before_a_step():
    def trained(ranks):
        learner(ranks).train(rows(6, answer=["1"] * 5 + [str(ranks.rank)]))

    for error in together(2, trained):
        assert "rank 1 has another data set than rank 0: other columns" in str(error)


def test_observers_are_notified_on_rank_0_only():
    def notified(ranks):
        seen = []
        learner(ranks, After(lambda run: seen.append(run.step))).train(rows(6))
        return seen

    assert together(2, notified) == [[1], []]


def test_a_signal_that_one_rank_has_ends_all_after_the_same_step():
    def done(ranks):
        made = learner(ranks)
        after_step = made.after_step

        def signalled(run, step):
            run._signals.stop_requested = ranks.rank == 1
            after_step(run, step)

        made.after_step = signalled
        with pytest.raises(KeyboardInterrupt, match="stopped after step 1"):
            made.train(rows(6))
        return "ended"

    assert together(2, done) == ["ended"] * 2


def test_a_signal_that_one_rank_has_in_the_first_evaluation_ends_all_before_a_step():
    def done(ranks):
        made = learner(ranks)
        rollout = made.rollout

        def signalled(prompts, **options):
            assert options["mode"] is Mode.EVAL
            made.run._signals.stop_requested = ranks.rank == 1
            return rollout(prompts, **options)

        made.rollout = signalled
        made.new_run, new_run = (lambda *data: setattr(made, "run", new_run(*data)) or made.run), made.new_run
        with pytest.raises(Stopped, match="nothing was trained"):
            made.train(rows(6), rows(2))
        return "ended"

    assert together(2, done) == ["ended"] * 2


def test_a_rollout_that_one_rank_gives_up_ends_all_with_the_finished_steps_saved(tmp_path):
    """A signal came, and episodes of one rank hang."""

    def done(ranks):
        saves = CheckpointingOptions(save_interval_steps=100)
        made = learner(ranks, run_dir=str(tmp_path / "run"), checkpointing_options=saves)
        made.cluster._rollouts._ranks = ranks
        run, steps = made.cluster.build_engine() or made.cluster._rollouts.driver.run, []

        def give_up(episodes):
            steps.append(1)
            if ranks.rank == 1 and len(steps) == 2:
                raise RolloutStopped("gave up waiting")
            return run(episodes)

        made.cluster._rollouts.driver.run = give_up
        with pytest.raises(KeyboardInterrupt, match=r"stopped after step 1; checkpoint: .*step-000001"):
            made.train(rows(6))
        return "ended"

    assert together(2, done) == ["ended"] * 2
    assert (tmp_path / "run/checkpoints/step-000001/run.pt").is_file()


def test_under_torchrun_the_message_of_a_signal_names_its_time_limit(monkeypatch):
    effects = lambda: [run._signals.effect for run in together(2, lambda ranks: learner(ranks).new_run(rows(6)))]
    assert effects() == ["stopping after this step; nothing is saved, since trainer.run_dir is not set"] * 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert all("torchrun ends the processes after 30 s; if the step takes longer" in x for x in effects())


@pytest.mark.parametrize("raised, said", [
    ("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
     "another process ended; its own message says why"),
    ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete",
     "another process did not answer within trainer.collective_timeout_s; it hangs, or needs longer than that"),
])  # fmt: skip
def test_a_lost_process_is_one_message_with_rank_step_and_fix(raised, said):
    def ended(ranks):
        made = learner(ranks)

        def fail(*args):
            raise RuntimeError(raised)

        made.update = fail
        made.train(rows(6))

    for rank, error in enumerate(together(2, ended)):
        message = f"rank {rank} of 2, step 1: {said}; "
        assert str(error) == message + "trainer.resume=latest continues from the last checkpoint"


@pytest.mark.parametrize("event", ["on_run_begin", "on_step_end", "on_run_end"])
def test_an_observer_that_fails_ends_all_ranks(event):
    class Broken(Observer):
        pass

    def fail(self, run, *args):
        raise RewardError("mine")

    setattr(Broken, event, fail)

    def ended(ranks):
        try:
            learner(ranks, Broken()).train(rows(6))
        except (WhetError, KeyboardInterrupt) as error:
            return str(error)

    own, other = together(2, ended)
    assert own == "mine"
    assert ("stopped after step 1" if event == "on_step_end" else "failed in another process") in other


def test_the_clock_of_rank_0_says_when_a_checkpoint_is_due():
    def due(ranks):
        made = learner(ranks, checkpointing_options=CheckpointingOptions(save_interval_s=100.0))
        run = made.new_run(rows(6))
        run.saved_at = time.monotonic() - (200.0 if ranks.rank == 0 else 0.0)
        return run._is_save_due(1)

    assert together(2, due) == [True, True]


def test_rank_0_alone_logs_and_shows_how_far_it_is():
    def seen(ranks):
        logged = []
        run = learner(ranks, loggers=[lambda step, row: logged.append(step)], pbar_description="T").train(rows(6))
        return logged, run.progress.description is not None

    (logged, shown), other = together(2, seen)
    assert logged == [1, 2, 3] and shown
    assert other == ([], False)
