"""RolloutDriver: groups as they end, refilled, cancelled; episodes of several turns; errors leave nothing behind."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whet.errors import DataError, EngineError
from whet.rollout.base import Output, PartialOutput, Request, Sampling
from whet.rollout.driver import Episode, RolloutDriver, completion, single_turn, single_turns, stream
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.hf import HFEngine
from whet.rollout.mock import MockEngine
from whet.types import Prompt, TokenBatch

sys.path.append(str(Path(__file__).parents[2] / "engines"))
from tiny import VOCABULARY, build, prompts, requests

ANSWER = np.array([7, 8, 9], np.int32)
STOPS = tuple(range(0, VOCABULARY, 4))


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


@pytest.fixture(params=["embedded", "hf"])
def engine(request, model):
    made = EmbeddedEngine(model, max_batch=8) if request.param == "embedded" else HFEngine(model, batch_size=3)
    yield made
    made.close()


def rows(count=5):
    return [Prompt(tokens=p, source="", row=i) for i, p in enumerate(prompts((3, 9, 40, 9, 1)[:count]))]


def mock(**options):
    return MockEngine(vocabulary=VOCABULARY, length_distribution="uniform", **options)


def tokens(groups):
    return [[c.tokens.tolist() for c in g.completions] for g in groups]


def flat(lists):
    return [x for one in lists for x in one]


# ---- single turns ----------------------------------------------------------------------------------------------------


def test_single_turns_equal_requests_submitted_by_hand(engine):
    sampling = Sampling(max_tokens=12, stop_ids=STOPS)
    engine.submit(requests([p.tokens for p in rows()], sampling, group=3))
    want = {}
    while outputs := engine.step():
        want |= {o.id: o.tokens.tolist() for o in outputs}
    groups = RolloutDriver(engine).run(single_turns(rows(), sampling, num_generations=3))
    assert [g.prompt.row for g in groups] == [0, 1, 2, 3, 4]
    assert flat(tokens(groups)) == [want[i] for i in range(15)]


def test_requests_are_numbered_in_order_and_a_group_by_its_first(monkeypatch):
    made, seen = mock(), []
    submit = made.submit
    note = lambda work: seen.append([(r.id, r.group, r.rng_key) for r in work]) or submit(work)
    monkeypatch.setattr(made, "submit", note)
    rollouts = RolloutDriver(made, next_id=10)
    rollouts.run(single_turns(rows(2), Sampling(), num_generations=2, rng_key=(3, 4, 5)))
    assert seen == [[(10, 10, (3, 4, 5, 0)), (11, 10, (3, 4, 5, 1)), (12, 12, (3, 4, 6, 0)), (13, 12, (3, 4, 6, 1))]]
    assert rollouts.next_id == 14


def test_groups_come_as_they_end_and_more_may_be_started_while_others_run(model):
    lengths = [Sampling(max_tokens=n) for n in (40, 2, 20, 2, 30)]
    engine = EmbeddedEngine(model, max_batch=6)
    alone = tokens(RolloutDriver(engine).run(single_turns(rows(), lengths, num_generations=2)))
    rollouts = RolloutDriver(engine)
    keys = rollouts.start(single_turns(rows()[:3], lengths[:3], num_generations=2))
    assert keys == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    order, got = [], {}
    rest = iter([3, 4])
    while groups := rollouts.ready():
        for g in groups:
            order.append(g.prompt.row)
            got[g.prompt.row] = g
            if (i := next(rest, None)) is not None:
                rollouts.start(single_turns([rows()[i]], lengths[i], num_generations=2, rng_key=(0, 0, i)))
    assert order[0] == 1 and sorted(order) == [0, 1, 2, 3, 4] and order[-1] in (0, 4)
    assert tokens([got[i] for i in range(5)]) == alone
    assert rollouts.in_flight == () and rollouts.ready() == []


def test_ready_returns_when_the_time_is_up_and_goes_on_later(model):
    rollouts = RolloutDriver(EmbeddedEngine(model))
    want = tokens(rollouts.run(single_turns(rows(2), Sampling(max_tokens=40))))
    rollouts.start(single_turns(rows(2), Sampling(max_tokens=40)))
    assert rollouts.ready(timeout_s=0.0) == [] and len(rollouts.in_flight) == 2
    got = []
    while groups := rollouts.ready():
        got += groups
    assert tokens(sorted(got, key=lambda g: g.prompt.row)) == want


def test_cancelled_groups_leave_the_engine_and_the_others_draw_as_before(engine):
    rollouts = RolloutDriver(engine)
    work = lambda: single_turns(rows(), Sampling(max_tokens=20), num_generations=2)
    want = tokens(rollouts.run(work()))
    keys = rollouts.start(work())
    rollouts.ready(timeout_s=0.0)
    rollouts.cancel([keys[2], keys[4]])
    assert not {keys[2], keys[4]} & {*rollouts.in_flight}
    got = {g.prompt.row: g for g in rollouts.run(single_turns(rows(1), Sampling(max_tokens=2), rng_key=(9, 9, 0)))}
    assert tokens(got.values()) != []
    done = {}
    while groups := rollouts.ready():
        done |= {g.prompt.row: g for g in groups}
    assert not {2, 4} & done.keys()
    assert all(tokens([g]) == [want[i]] for i, g in done.items())
    assert tokens(rollouts.run(work())) == want  # a cancelled group may be started again


def test_a_run_leaves_to_ready_what_else_ends_meanwhile(model):
    rollouts = RolloutDriver(EmbeddedEngine(model))
    rollouts.start(single_turns(rows(2), Sampling(max_tokens=2)))
    (other,) = rollouts.run(single_turns(rows(1), Sampling(max_tokens=30), rng_key=(1, 0, 0)))
    assert len(other.completions[0].tokens) == 30
    assert sorted(g.prompt.row for g in rollouts.ready()) == [0, 1]


class Stubborn(MockEngine):
    """Ends no request before its time."""

    def abort(self, ids):
        return []


def test_what_an_engine_that_cannot_abort_gives_back_later_is_dropped():
    rollouts = RolloutDriver(Stubborn(vocabulary=VOCABULARY))
    rollouts.cancel(rollouts.start(single_turns(rows(2), Sampling())))
    (group,) = rollouts.run(single_turns(rows(1), Sampling(max_tokens=3), rng_key=(1, 1, 1)))
    assert len(group.completions) == 1 and rollouts.engine.stats().in_flight == 0


# ---- several turns ---------------------------------------------------------------------------------------------------


def two_turns(sampling):
    """The model speaks, the world answers, the model speaks again."""

    def run(episode):
        prompt = episode.prompt.tokens
        first = yield episode.request(prompt, sampling)
        second = yield episode.request(np.concatenate([prompt, first.tokens, ANSWER]), sampling)
        return completion(first, ANSWER, second, generation=episode.generation, info={"turns": 2})

    return run


def episodes(run, count=5, generations=2, seed=0):
    return [Episode(p, (seed, 0, i, g), run) for i, p in enumerate(rows(count)) for g in range(generations)]


def naive(engine, prompt, rng_key, sampling):
    """The same two turns, each submitted alone, with the books kept by hand."""

    def alone(tokens, draw):
        engine.submit([Request(id=0, tokens=tokens, sampling=sampling, group=0, rng_key=rng_key, draw=draw)])
        return engine.step()[0]

    first = alone(prompt, 0)
    second = alone(np.concatenate([prompt, first.tokens, ANSWER]).astype(np.int32), sampling.max_tokens)
    drawn = np.concatenate([first.tokens, ANSWER, second.tokens])
    logprobs = np.concatenate([first.logprobs, np.zeros(3), second.logprobs])
    versions = [*first.versions.tolist(), -1, -1, -1, *second.versions.tolist()]
    return drawn.tolist(), logprobs, versions


def test_two_turns_equal_a_naive_loop_that_submits_each_alone(engine):
    sampling = Sampling(max_tokens=9, stop_ids=STOPS)
    groups = RolloutDriver(engine).run(episodes(two_turns(sampling)))
    for i, g in enumerate(groups):
        for c in g.completions:
            drawn, logprobs, versions = naive(engine, g.prompt.tokens, (0, 0, i, c.generation), sampling)
            assert c.tokens.tolist() == drawn and c.versions.tolist() == versions and c.info == {"turns": 2}
            np.testing.assert_allclose(c.logprobs, logprobs, atol=1e-5)
    batch = TokenBatch.from_groups(groups)
    masked = batch.tokens[~batch.mask].tolist()
    assert masked == ANSWER.tolist() * 10 and not batch.sampler_logprobs[~batch.mask].any()


def test_interleaved_episodes_draw_what_each_draws_alone(engine):
    sampling = Sampling(max_tokens=9, stop_ids=STOPS)
    rollouts = RolloutDriver(engine)
    crowd = tokens(rollouts.run(episodes(two_turns(sampling)) + single_turns(rows(), sampling, rng_key=(1, 0, 0))))
    alone = [rollouts.run([e])[0] for e in episodes(two_turns(sampling))]
    assert flat(crowd[:5]) == flat(tokens(alone))
    assert crowd[5:] == [tokens(rollouts.run([e]))[0] for e in single_turns(rows(), sampling, rng_key=(1, 0, 0))]


def test_the_turns_of_an_episode_never_share_a_number():
    drawn = []

    def run(episode):
        prompt = episode.prompt.tokens
        both = yield [episode.request(prompt, Sampling(max_tokens=n)) for n in (4, 6)]
        third = yield (asked := episode.request(prompt, Sampling(max_tokens=5)))
        drawn.append([len(o.tokens) for o in both] + [asked.draw])
        return [completion(o, generation=0) for o in (*both, third)]

    (group,) = RolloutDriver(MockEngine(vocabulary=VOCABULARY)).run([Episode(rows(1)[0], (0, 0, 0, 0), run)])
    assert drawn == [[4, 6, 10]]  # outputs in the order asked; the third begins behind the 4 + 6 set aside
    assert [c.generation for c in group.completions] == [0, 0, 0]  # forks of one trajectory
    assert len({tuple(c.tokens[:4].tolist()) for c in group.completions}) == 3
    assert TokenBatch.from_groups([group]).trajectory_of.tolist() == [0, 0, 0]


def test_a_turn_that_was_aborted_goes_on_where_it_stopped(model):
    engine, sampling = EmbeddedEngine(model), Sampling(max_tokens=12)
    (whole,) = RolloutDriver(engine).run([single_turn(rows(1)[0], sampling, rng_key=(0, 0, 0, 0))])

    def run(episode):  # the first four tokens, then the rest of the same turn
        asked = episode.request(episode.prompt.tokens, sampling)
        part = yield replace(asked, sampling=replace(sampling, max_tokens=4))
        rest = yield asked.resume_from(part.tokens)
        return completion(part, rest, generation=0)

    (parts,) = RolloutDriver(engine).run([Episode(rows(1)[0], (0, 0, 0, 0), run)])
    assert tokens([parts]) == tokens([whole])


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def idle(rollouts):
    return rollouts.in_flight == () and rollouts.engine.stats().in_flight == 0 and rollouts.engine.step() == []


def test_an_episode_that_raises_ends_all_and_closes_the_others():
    closed = []

    def raises(episode):
        yield episode.request(episode.prompt.tokens, Sampling(max_tokens=3))
        raise KeyError("a broken world")

    def watches(episode):
        try:
            while True:
                yield episode.request(episode.prompt.tokens, Sampling(max_tokens=3))
        finally:
            closed.append(episode.rng_key)

    rollouts = RolloutDriver(mock(per_step=1))
    with pytest.raises(KeyError, match="broken world"):
        rollouts.run([Episode(rows(1)[0], (0, 0, 0, 0), watches), Episode(rows(1)[0], (0, 0, 1, 0), raises)])
    assert closed == [(0, 0, 0, 0)] and idle(rollouts)
    assert rollouts.run(single_turns(rows(1), Sampling()))


class Faulty(MockEngine):
    """Fails in its own way at the second step."""

    def __init__(self, fault):
        super().__init__(vocabulary=VOCABULARY, per_step=1)
        self.fault, self.steps = fault, 0

    def step(self, timeout_s=None):
        self.steps += 1
        return self.fault(super().step()) if self.steps == 2 else super().step()


def interrupt(outputs):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (lambda outputs: [], EngineError, "the engine is idle, but 3 of 4 requests never finished"),
        (interrupt, KeyboardInterrupt, None),
        (
            lambda outputs: [replace(o, logprobs=o.logprobs * np.nan) for o in outputs],
            EngineError,
            "logits are not finite at step 7; resume from an earlier checkpoint",
        ),
        (
            lambda outputs: [replace(outputs[0], id=99)],
            EngineError,
            "the engine returned request 99, which this driver did not submit",
        ),
    ],
)
def test_an_engine_that_fails_is_left_with_nothing(fault, error, words):
    rollouts = RolloutDriver(Faulty(fault))
    rollouts.start(single_turns(rows(4), Sampling(max_tokens=3), rng_key=(0, 7, 0)))
    assert len(rollouts.ready()) == 1
    with pytest.raises(error, match=words):
        rollouts.ready()
    assert idle(rollouts)


def test_a_refused_request_begins_nothing_and_others_go_on():
    rollouts = RolloutDriver(mock(per_step=1))
    rollouts.start(single_turns(rows(2), Sampling(max_tokens=3)))
    with pytest.raises(EngineError, match="max_tokens 0 must be at least 1"):
        rollouts.start(single_turns(rows(2), Sampling(max_tokens=0), rng_key=(1, 0, 0)))
    with pytest.raises(EngineError, match="MockEngine does not support stop strings"):
        rollouts.start(single_turns(rows(2), Sampling(stop=("x",)), rng_key=(1, 0, 0)))
    assert rollouts.in_flight == ((0, 0, 0), (0, 0, 1)) and rollouts.engine.stats().in_flight == 2
    assert len(rollouts.run(single_turns(rows(2), Sampling(), rng_key=(1, 0, 0)))) == 2


def test_draws_that_would_be_the_same_are_refused():
    rollouts = RolloutDriver(mock())
    (episode,) = single_turns(rows(1), Sampling())
    with pytest.raises(EngineError, match=r"two episodes have the same rng_key .* \(0, 0, 0, 0\)"):
        rollouts.start([episode, *single_turns(rows(1), Sampling())])
    rollouts.start([episode])
    with pytest.raises(EngineError, match=r"a group at .* \(0, 0, 0\) is already running"):
        rollouts.start(single_turns(rows(1), Sampling()))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda e: iter(()), "returned None; return its Completion"),
        (lambda e: (yield []), "yielded no request"),
    ],
)
def test_an_episode_that_returns_or_yields_nothing_is_an_error(run, words):
    def empty(episode):
        return
        yield

    rollouts = RolloutDriver(mock())
    with pytest.raises(DataError, match=words):
        rollouts.run([Episode(rows(1)[0], (0, 0, 0, 0), empty if "returned" in words else run)])
    assert idle(rollouts)


def test_a_completion_of_another_generation_is_an_error():
    def wrong(episode):
        output = yield episode.request(episode.prompt.tokens, Sampling(max_tokens=1))
        return completion(output, generation=3)

    with pytest.raises(DataError, match=r"returned \[3\].*with generation 0"):
        RolloutDriver(mock()).run([Episode(rows(1)[0], (0, 0, 0, 0), wrong)])


def test_logits_of_a_single_turn_travel_with_it():
    shown = Output(
        id=0,
        tokens=np.array([1]),
        logprobs=np.zeros(1),
        versions=np.zeros(1),
        finish_reason="stop",
        logits=np.zeros((1, 4)),
    )
    assert completion(shown, generation=0).logits.shape == (1, 4)
    several = completion(shown, ANSWER, generation=0)
    assert several.logits is None and several.info == {}


def test_draws_of_a_group_that_has_ended_and_was_not_yet_given_are_refused_too():
    row = [Prompt(tokens=np.array([5, 6], np.int32), source="", row=0)]
    rollouts = RolloutDriver(EmbeddedEngine(build(gain=3.0)))
    rollouts.start(single_turns(row, Sampling(max_tokens=2)))
    rollouts.run(single_turns(row, Sampling(max_tokens=30), rng_key=(1, 0, 0)))
    assert rollouts.in_flight == ()  # the first has ended meanwhile
    with pytest.raises(EngineError, match=r"a group at .* \(0, 0, 0\) is already running"):
        rollouts.start(single_turns(row, Sampling(max_tokens=2)))
    assert len(rollouts.ready()) == 1
    rollouts.start(single_turns(row, Sampling(max_tokens=2)))  # now it may come again
    assert len(rollouts.ready()) == 1


def test_a_group_that_is_cancelled_after_its_end_is_not_given():
    row = [Prompt(tokens=np.array([5, 6], np.int32), source="", row=0)]
    rollouts = RolloutDriver(EmbeddedEngine(build(gain=3.0)))
    keys = rollouts.start(single_turns(row, Sampling(max_tokens=2)))
    rollouts.run(single_turns(row, Sampling(max_tokens=30), rng_key=(1, 0, 0)))
    rollouts.cancel(keys)
    assert rollouts.ready() == []
    assert len(rollouts.run(single_turns(row, Sampling(max_tokens=2)))) == 1


class Broken(MockEngine):
    """Has drawn a token from logits that are not finite, and no request of its has ended."""

    def step(self, timeout_s=None):
        return []

    def peek(self, ids):
        one = {"tokens": np.array([7], np.int32), "versions": np.zeros(1, np.int32)}
        return {i: PartialOutput(id=i, logprobs=np.array([np.nan], np.float32), **one) for i in ids}


def test_a_stream_shows_no_token_of_logits_that_are_not_finite():
    with pytest.raises(EngineError, match="logits are not finite"):
        next(stream(Broken(vocabulary=VOCABULARY), requests(prompts((3,)), Sampling(max_tokens=4))))


# ---- engines that answer wrongly -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "MockEngine gave 3 tokens, 1 logprobs and 3 versions"),
        ({"tokens": np.arange(9), "logprobs": np.zeros(9), "versions": np.zeros(9)}, "9 tokens .* max_tokens=3"),
        ({"finish_reason": "done"}, "finish_reason of MockEngine.*'done'.*stop"),
        ({"tokens": np.array([0.0, 1.0, 2.0])}, "float64; they must be integers"),
        ({"tokens": np.array([0, -1, 2])}, "gave token -1"),
        ({"tokens": np.array([0, VOCABULARY, 2])}, f"gave token {VOCABULARY}; the model's ids are 0 to"),
        ({"logprobs": np.array([0.0, np.nan, 0.0])}, "not finite at step 0; .*or MockEngine reports wrong logprobs"),
    ],
)
def test_what_an_engine_of_ones_own_gives_is_looked_at(change, says, monkeypatch):
    engine = mock()
    step = engine.step
    given = {"tokens": np.arange(3), "logprobs": np.zeros(3), "versions": np.zeros(3, int), "finish_reason": "length"}
    monkeypatch.setattr(engine, "step", lambda **k: [Output(id=o.id, **{**given, **change}) for o in step(**k)])
    with pytest.raises(EngineError, match=says):
        RolloutDriver(engine, vocab_size=VOCABULARY).run(single_turns(rows(2), Sampling(max_tokens=3)))
    assert engine.stats().in_flight == 0
