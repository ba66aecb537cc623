"""What every engine promises: one suite, run over each of them by test_contract.py."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import build, drain, letters, prompts, requests, run

from whet.errors import EngineError, WhetError
from whet.rollout import resolve_engine
from whet.rollout.base import Piece, Request, RolloutEngine, Sampling, stream

ENGINES = ("mock", "hf", "vanilla")
PLAIN = Sampling(max_tokens=6)
STOPS = tuple(range(0, 64, 4))


@pytest.fixture(scope="module")
def shared_model():
    return build(gain=3.0)


@pytest.fixture(params=ENGINES)
def engine(request, shared_model):
    kind = resolve_engine(request.param)
    if request.param == "mock":
        yield kind(vocabulary=64, length_distribution="uniform", per_poll=3)
        return
    made = kind(shared_model, decode=letters)
    yield made
    made.close()


def same(a, b):
    return a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason


def test_it_is_an_engine(engine):
    assert isinstance(engine, RolloutEngine)


def test_poll_at_rest_returns_nothing(engine):
    assert engine.poll() == []
    run(engine, requests(prompts(), PLAIN))
    assert engine.poll() == []


def test_every_request_comes_back_once_with_columns_of_one_length(engine):
    work = requests(prompts(), PLAIN, group=3)
    done = run(engine, work)
    assert sorted(done) == [r.id for r in work]
    for o in done.values():
        assert 1 <= len(o.tokens) <= 6
        assert len(o.tokens) == len(o.logprobs) == len(o.versions)
        assert (o.tokens.dtype, o.logprobs.dtype, o.versions.dtype) == (np.int32, np.float32, np.int32)
        assert np.isfinite(o.logprobs).all() and (o.logprobs <= 0).all()


def test_the_stop_token_stays_and_nothing_follows_it(engine):
    done = run(engine, requests(prompts(), Sampling(max_tokens=24, stop_ids=STOPS), group=4))
    reasons = {o.finish_reason for o in done.values()}
    assert "stop" in reasons and reasons <= {"stop", "length"}
    for o in done.values():
        assert not set(o.tokens[:-1].tolist()) & set(STOPS)
        assert (int(o.tokens[-1]) in STOPS) == (o.finish_reason == "stop")
        assert o.finish_reason == "stop" or len(o.tokens) == 24


def test_max_tokens_of_one_gives_one_token(engine):
    done = run(engine, requests(prompts(), Sampling(max_tokens=1), group=2))
    assert {len(o.tokens) for o in done.values()} == {1}
    assert {o.finish_reason for o in done.values()} == {"length"}


def test_requests_of_different_lengths_end_at_their_own_limit(engine):
    work = [
        Request(id=i, tokens=p, sampling=Sampling(max_tokens=i + 1), group=i, address=(0, 0, i, 0))
        for i, p in enumerate(prompts())
    ]
    for i, o in run(engine, work).items():
        assert len(o.tokens) <= i + 1


def test_tokens_carry_the_version_that_made_them(engine):
    engine.update(7)
    assert {v for o in run(engine, requests(prompts(), PLAIN)).values() for v in o.versions} == {7}
    engine.update(8)
    assert {v for o in run(engine, requests(prompts(), PLAIN)).values() for v in o.versions} == {8}


def test_the_same_address_gives_the_same_tokens(engine):
    work = requests(prompts(), PLAIN, group=2)
    first, second = run(engine, work), run(engine, work)
    assert all(same(first[i], second[i]) for i in first)


def test_another_seed_gives_other_tokens(engine):
    first = run(engine, requests(prompts(), PLAIN, group=4, seed=1))
    second = run(engine, requests(prompts(), PLAIN, group=4, seed=2))
    assert sum(not same(first[i], second[i]) for i in first) > len(first) // 2


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(engine):
    work = requests(prompts(), PLAIN, group=5)
    crowd = run(engine, work)
    for i in (0, 7, 24):
        assert same(run(engine, [work[i]])[i], crowd[i])


def test_going_on_with_an_offset_equals_going_through(engine):
    whole = run(engine, requests(prompts(), Sampling(max_tokens=12)))
    for r in requests(prompts(), Sampling(max_tokens=12)):
        made = whole[r.id].tokens
        cut = len(made) // 2
        if cut == 0:
            continue
        rest = Request(
            id=r.id,
            tokens=np.concatenate([r.tokens, made[:cut]]),
            sampling=Sampling(max_tokens=12 - cut),
            group=r.group,
            address=r.address,
            offset=cut,
        )
        assert run(engine, [rest])[r.id].tokens.tolist() == made[cut:].tolist()


def test_aborted_requests_come_back_once_as_aborted(engine):
    work = requests(prompts(), Sampling(max_tokens=40), group=2)
    engine.submit(work)
    out = engine.abort([2, 5, 999])
    assert sorted(o.id for o in out) == [2, 5]
    assert {o.finish_reason for o in out} == {"abort"}
    assert sorted(drain(engine)) == [r.id for r in work if r.id not in (2, 5)]


def test_a_sleeping_engine_refuses_to_poll_and_goes_on_when_woken(engine):
    work = requests(prompts(), PLAIN, group=2)
    want = run(engine, work)
    engine.submit(work)
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.poll()
    engine.wake()
    got = drain(engine)
    assert all(same(want[i], got[i]) for i in want)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.zeros(0, np.int32)}, "empty prompt"),
        ({"tokens": np.array([3, 64], np.int32)}, "token 64 is outside the vocabulary of 64"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens 0"),
        ({"sampling": Sampling(stop_ids=(64,))}, "64"),
        ({"offset": 2}, r"offset 2 must be in 0\.\.1"),
    ],
)
def test_a_request_that_could_never_be_served_is_refused_and_none_is_queued(engine, fields, message):
    good = requests(prompts(), PLAIN)
    bad = {
        **{"id": 99, "tokens": np.array([3, 4], np.int32), "sampling": PLAIN, "group": 9, "address": (0, 0, 0, 0)},
        **fields,
    }
    with pytest.raises(WhetError, match=message):
        engine.submit([*good, Request(**bad)])
    assert engine.poll() == []


def test_an_id_in_flight_is_refused(engine):
    work = requests(prompts(), PLAIN)
    engine.submit(work)
    with pytest.raises(EngineError, match="request id 0 is in flight"):
        engine.submit(work[:1])
    assert sorted(drain(engine)) == [r.id for r in work]
    assert sorted(run(engine, work[:1])) == [0]


def test_close_forgets_what_waits(engine):
    engine.submit(requests(prompts(), PLAIN))
    engine.close()
    assert engine.poll() == []


def needs(engine, *caps):
    """Skips where the engine can't."""
    missing = [c for c in caps if not vars(engine.caps)[c]]
    if missing:
        pytest.skip(f"no caps.{missing[0]}")


def test_stats_count_what_waits_and_what_was_done(engine):
    before = engine.stats()
    assert before.in_flight == 0
    work = requests(prompts(), PLAIN, group=3)
    engine.submit(work)
    assert engine.stats().in_flight == len(work)
    done = drain(engine)
    after = engine.stats()
    assert (after.in_flight, after.live, after.waiting) == (0, 0, 0)
    done_since = after.since(before)
    assert done_since.generated == sum(len(o.tokens) for o in done.values())
    assert done_since.prefilled + done_since.reused == sum(len(r.tokens) for r in work)


def test_a_stream_gives_every_token_once_and_ends_each_request_once(engine):
    work = requests(prompts(), Sampling(max_tokens=12), group=2)
    want = run(engine, work)
    pieces = {r.id: [] for r in work}
    for piece in stream(engine, work):
        assert isinstance(piece, Piece)
        assert all(p.finish_reason is None for p in pieces[piece.id])  # nothing follows the end
        pieces[piece.id].append(piece)
    for i, o in want.items():
        assert np.concatenate([p.tokens for p in pieces[i]]).tolist() == o.tokens.tolist()
        assert sum(len(p.versions) for p in pieces[i]) == sum(len(p.logprobs) for p in pieces[i]) == len(o.tokens)
        assert pieces[i][-1].finish_reason == o.finish_reason
        if engine.caps.peek and len(o.tokens) > 6:
            assert len(pieces[i]) > 1


def test_a_stream_left_early_leaves_nothing_in_flight(engine):
    for _ in stream(engine, requests(prompts(), Sampling(max_tokens=40), group=2)):
        break
    assert engine.stats().in_flight == 0 and engine.poll() == []


def test_a_stream_beside_other_requests_is_refused(engine):
    work = requests(prompts(), PLAIN)
    engine.submit(work[:2])
    with pytest.raises(EngineError, match="2 requests are in flight"):
        next(stream(engine, work[2:]))
    assert sorted(drain(engine)) == [0, 1]


def test_peek_shows_what_has_been_made_and_computes_nothing(engine):
    needs(engine, "peek")
    work = requests(prompts(), Sampling(max_tokens=12), group=2)
    want = run(engine, work)
    engine.submit(work)
    ids = [r.id for r in work]
    assert {len(p.tokens) for p in engine.peek(ids).values()} == {0}
    assert engine.poll(timeout_s=0.0) == []
    first, again = engine.peek([0, 3, 999]), engine.peek([0, 3])
    assert sorted(first) == [0, 3]
    for i, p in first.items():
        assert 0 < len(p.tokens) < 12 and p.finish_reason is None
        assert p.tokens.tolist() == want[i].tokens[: len(p.tokens)].tolist() == again[i].tokens.tolist()
        assert len(p.tokens) == len(p.logprobs) == len(p.versions)
    got = drain(engine)
    assert all(same(got[i], want[i]) for i in want) and engine.peek(ids) == {}
