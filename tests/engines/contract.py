"""What every engine promises: one suite, run over each of them by test_contract.py, by what its caps say it can do.

To run it over another engine, import all of it and define the fixtures `policy`, `engine` and `rounding` anew.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import full
from tiny import build, drain, letters, prompts, requests, run

from whet.errors import EngineError, WhetError
from whet.rollout import resolve_engine
from whet.rollout.base import PartialOutput, Request, RolloutEngine, Sampling
from whet.rollout.driver import stream

ENGINES = {
    "mock": {"vocabulary": 64, "length_distribution": "uniform", "per_step": 3},
    "hf": {},
    "hf-float64": {},
    "embedded": {},
    "embedded-module": {"fast": False},
    "embedded-torch": {"native": False},
    "embedded-own": {"own_weights": True},
    "embedded-small": {"max_batch": 3, "prefill_tokens": 8, "kv_cache_tokens": 192},
    "embedded-float64": {},
    "embedded-bfloat16": {},
}
"""Engine, dtype if it is not fp32, and options."""
REPEATS = ("hf-float64", "embedded-torch", "embedded-float64")
"""They run the code of others; `make check-full` alone has them."""
PLAIN = Sampling(max_tokens=6)
STOPS = tuple(range(0, 64, 4))


@pytest.fixture(params=[full(name) if name in REPEATS else name for name in ENGINES])
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def models():
    made = build(gain=3.0)
    return {name: copy.deepcopy(made).to(getattr(torch, name)) for name in ("float32", "float64", "bfloat16")}


@pytest.fixture
def policy(variant, models):
    """The model behind the engine, whose weights the tests change; None = none."""
    kind, _, how = variant.partition("-")
    return None if kind == "mock" else models.get(how, models["float32"])


@pytest.fixture
def engine(variant, policy):
    made = resolve_engine(variant.partition("-")[0])(policy, decode=letters, **ENGINES[variant])
    yield made
    made.close()


@pytest.fixture
def rounding(variant):
    """How far logprobs of the same tokens may be apart; beyond 1e-3 a draw may fall the other way now and then."""
    return 0.15 if "bfloat16" in variant else 1e-5


def needs(engine, *caps):
    """Skips where the engine can't."""
    missing = [c for c in caps if not vars(engine.caps)[c]]
    if missing:
        pytest.skip(f"no caps.{missing[0]}")


def same(a, b):
    return a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason


def assert_same(got, want, rounding):
    """Equal outputs; in half precision, nearly all of them."""
    assert got.keys() == want.keys()
    equal = [i for i in want if same(got[i], want[i])]
    assert len(want) - len(equal) <= (1 + len(want) // 8 if rounding > 1e-3 else 0)
    for i in equal:
        np.testing.assert_allclose(got[i].logprobs, want[i].logprobs, atol=rounding)


def announce(engine, policy, version):
    """Gives the engine the policy's weights as they are now."""
    if policy is None or engine.caps.shared_weights:
        engine.update_weights(version)
    else:
        engine.update_weights(version, iter(policy.named_parameters()))


@contextmanager
def retrained(engine, policy, version):
    """Other weights under a new version; the policy has its own back at the end, and the engine isn't told."""
    old = [] if policy is None else [(p, p.detach().clone()) for p in policy.parameters()]
    with torch.no_grad():
        for p, _ in old:
            p.mul_(1.1)
    announce(engine, policy, version)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, x in old:
                p.copy_(x)


def going_on(request, made):
    """The request that goes on behind these tokens of its completion."""
    return replace(
        request,
        tokens=np.concatenate([request.tokens, made]).astype(np.int32),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(made)),
        offset=request.offset + len(made),
    )


def begin(engine, work):
    """Submits and computes a little; what has been made by then."""
    engine.submit(work)
    for _ in work:
        assert engine.step(timeout_s=0.0) == []
        made = engine.peek([r.id for r in work])
        if any(len(p.tokens) for p in made.values()):
            return made
    raise AssertionError("no token was made")


def test_it_is_an_engine(engine):
    assert isinstance(engine, RolloutEngine)


def test_step_at_rest_returns_nothing(engine):
    assert engine.step() == []
    run(engine, requests(prompts(), PLAIN))
    assert engine.step() == []


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
        Request(id=i, tokens=p, sampling=Sampling(max_tokens=i + 1), group=i, rng_key=(0, 0, i, 0))
        for i, p in enumerate(prompts())
    ]
    for i, o in run(engine, work).items():
        assert len(o.tokens) <= i + 1


def test_tokens_carry_the_version_that_made_them(engine, policy):
    announce(engine, policy, 7)
    assert {v for o in run(engine, requests(prompts(), PLAIN)).values() for v in o.versions} == {7}
    announce(engine, policy, 8)
    assert {v for o in run(engine, requests(prompts(), PLAIN)).values() for v in o.versions} == {8}


def test_the_same_address_gives_the_same_tokens(engine, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), PLAIN, group=2)
    assert_same(run(engine, work), run(engine, work), rounding)


def test_another_seed_gives_other_tokens(engine):
    first = run(engine, requests(prompts(), PLAIN, group=4, seed=1))
    second = run(engine, requests(prompts(), PLAIN, group=4, seed=2))
    assert sum(not same(first[i], second[i]) for i in first) > len(first) // 2


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(engine, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), PLAIN, group=5)
    crowd, some = run(engine, work), (0, 7, 12, 24)
    assert_same({i: run(engine, [work[i]])[i] for i in some}, {i: crowd[i] for i in some}, rounding)


def test_going_on_with_an_offset_equals_going_through(engine, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), Sampling(max_tokens=12))
    whole = run(engine, work)
    cut = {r.id: len(whole[r.id].tokens) // 2 for r in work}
    rest = run(engine, [going_on(r, whole[r.id].tokens[: cut[r.id]]) for r in work if cut[r.id]])
    behind = {i: replace(whole[i], tokens=whole[i].tokens[n:], logprobs=whole[i].logprobs[n:]) for i, n in cut.items()}
    assert_same(rest, {i: behind[i] for i in rest}, rounding)


def test_a_later_turn_does_not_repeat_the_draws_of_the_first(engine):
    needs(engine, "keyed_draws")
    work = requests(prompts(), Sampling(max_tokens=12), group=3)
    first = run(engine, work)
    later = run(engine, [replace(r, draw=12) for r in work])
    assert sum(not same(first[i], later[i]) for i in first) > len(first) // 2


def test_aborted_requests_come_back_once_as_aborted(engine):
    needs(engine, "abort")
    work = requests(prompts(), Sampling(max_tokens=40), group=2)
    engine.submit(work)
    out = engine.abort([2, 5, 999])
    assert sorted(o.id for o in out) == [2, 5]
    assert {o.finish_reason for o in out} == {"abort"}
    assert sorted(drain(engine)) == [r.id for r in work if r.id not in (2, 5)]


def test_a_sleeping_engine_refuses_to_step_and_goes_on_when_woken(engine, rounding):
    needs(engine, "sleep", "keyed_draws")
    work = requests(prompts(), PLAIN, group=2)
    want = run(engine, work)
    engine.submit(work)
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.step()
    engine.wake_up()
    assert_same(drain(engine), want, rounding)


def test_weights_that_come_while_it_sleeps_are_used_after_waking_or_refused(engine, policy, rounding):
    needs(engine, "sleep", "keyed_draws")
    work = requests(prompts(), PLAIN)
    before = run(engine, work)
    with retrained(engine, policy, 1):
        want = run(engine, work)
    announce(engine, policy, 2)
    engine.sleep()
    try:
        with retrained(engine, policy, 3):
            engine.wake_up()
            assert_same(run(engine, work), want, rounding)
    except EngineError as error:
        assert "wake" in str(error)
        engine.wake_up()
        assert_same(run(engine, work), before, rounding)


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.zeros(0, np.int32)}, "empty prompt"),
        ({"tokens": np.array([3, 64], np.int32)}, "token 64 is outside the vocabulary of 64"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens 0"),
        ({"sampling": Sampling(stop_ids=(64,))}, "64"),
        ({"offset": 2}, r"offset 2 must be in 0\.\.1"),
        ({"draw": -1}, "draw -1 must be 0 or more"),
    ],
)
def test_a_request_that_could_never_be_served_is_refused_and_none_is_queued(engine, fields, message):
    good = requests(prompts(), PLAIN)
    bad = {
        **{"id": 99, "tokens": np.array([3, 4], np.int32), "sampling": PLAIN, "group": 9, "rng_key": (0, 0, 0, 0)},
        **fields,
    }
    with pytest.raises(WhetError, match=message):
        engine.submit([*good, Request(**bad)])
    assert engine.step() == []


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
    assert engine.step() == []


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


def test_a_stream_gives_every_token_once_and_ends_each_request_once(engine, rounding):
    work = requests(prompts(), Sampling(max_tokens=12), group=2)
    want = run(engine, work)
    pieces = {r.id: [] for r in work}
    for piece in stream(engine, work):
        assert isinstance(piece, PartialOutput)
        assert all(p.finish_reason is None for p in pieces[piece.id])  # nothing follows the end
        pieces[piece.id].append(piece)
    streamed = {}
    for i, parts in pieces.items():
        whole = {n: np.concatenate([vars(p)[n] for p in parts]) for n in ("tokens", "logprobs", "versions")}
        streamed[i] = PartialOutput(id=i, finish_reason=parts[-1].finish_reason, **whole)
        assert len(whole["tokens"]) == len(whole["logprobs"]) == len(whole["versions"])
        assert len(parts) > 1 or not engine.caps.peek
    if engine.caps.keyed_draws:
        assert_same(streamed, want, rounding)


def test_a_stream_left_early_leaves_nothing_in_flight(engine):
    for _ in stream(engine, requests(prompts(), Sampling(max_tokens=40), group=2)):
        break
    assert engine.stats().in_flight == 0 and engine.step() == []


def test_a_stream_beside_other_requests_is_refused(engine):
    work = requests(prompts(), PLAIN)
    engine.submit(work[:2])
    with pytest.raises(EngineError, match="2 requests are in flight"):
        next(stream(engine, work[2:]))
    assert sorted(drain(engine)) == [0, 1]


def test_peek_shows_what_has_been_made_and_computes_nothing(engine, rounding):
    needs(engine, "peek")
    work = requests(prompts((9, 40)), Sampling(max_tokens=12))
    engine.submit(work)
    assert {len(p.tokens) for p in engine.peek([0, 1]).values()} <= {0}
    engine.abort([0, 1])
    first = begin(engine, work)
    again = engine.peek([0, 1, 999])
    assert set(first) == set(again) <= {0, 1}
    for i, p in first.items():
        assert len(p.tokens) < 12 and p.finish_reason is None
        assert p.tokens.tolist() == again[i].tokens.tolist()
        assert len(p.tokens) == len(p.logprobs) == len(p.versions)
    for i, o in drain(engine).items():
        assert o.tokens[: len(first[i].tokens)].tolist() == first[i].tokens.tolist()
    assert engine.peek([0, 1]) == {}


def test_pauses_change_nothing(engine, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), Sampling(max_tokens=12, stop_ids=STOPS), group=2)
    want, got = run(engine, work), {}
    engine.submit(work)
    while engine.stats().in_flight:
        got |= {o.id: o for o in engine.step(timeout_s=0.0)}
    assert_same(got, want, rounding)


def test_an_aborted_completion_goes_on_from_its_own_tokens(engine, rounding):
    needs(engine, "abort", "peek", "keyed_draws")
    work = requests(prompts((5, 9, 40)), Sampling(max_tokens=24))
    want = run(engine, work)
    begin(engine, work)
    parts = {o.id: o for o in engine.abort([r.id for r in work])}
    assert sorted(parts) == [0, 1, 2] and engine.stats().in_flight == 0
    assert 0 < sum(len(p.tokens) for p in parts.values()) and all(len(p.tokens) < 24 for p in parts.values())
    rest = run(engine, [going_on(r, parts[r.id].tokens) for r in work])
    joined = {
        i: replace(o, **{n: np.concatenate([vars(parts[i])[n], vars(o)[n]]) for n in ("tokens", "logprobs")})
        for i, o in rest.items()
    }
    assert_same(joined, want, rounding)


def test_new_weights_are_used_and_old_ones_come_back_whole(engine, policy, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), Sampling(max_tokens=8), group=2)
    before = run(engine, work)
    with retrained(engine, policy, 1):
        after = run(engine, work)
    assert {v for o in after.values() for v in o.versions} == {1}
    if policy is not None:
        assert all(np.abs(after[i].logprobs[0] - before[i].logprobs[0]) > 1e-4 for i in before)
    announce(engine, policy, 2)
    assert_same(run(engine, work), before, rounding)


def test_new_weights_under_way_make_all_tokens_behind_them(engine, policy, rounding):
    needs(engine, "updates_in_flight", "peek", "keyed_draws")
    work = requests(prompts((5, 9, 40)), Sampling(max_tokens=24))
    made = begin(engine, work)
    with retrained(engine, policy, 4):
        done = drain(engine)
        again = run(engine, [going_on(r, made[r.id].tokens) for r in work])
    behind = {}
    for i, o in done.items():
        n = len(made[i].tokens)
        assert o.tokens[:n].tolist() == made[i].tokens.tolist()
        np.testing.assert_array_equal(o.logprobs[:n], made[i].logprobs)
        assert o.versions.tolist() == [0] * n + [4] * (24 - n)
        behind[i] = replace(o, tokens=o.tokens[n:], logprobs=o.logprobs[n:])
    assert_same(behind, again, rounding)


def test_without_updates_under_way_a_completion_has_one_version(engine, policy):
    if engine.caps.updates_in_flight:
        pytest.skip("takes them under way")
    engine.submit(requests(prompts(), PLAIN, group=2))
    done = {o.id: o for o in engine.step()}
    announce(engine, policy, 3)
    done |= drain(engine)
    assert all(len(set(o.versions.tolist())) == 1 for o in done.values())


def test_turns_of_a_conversation_say_what_they_would_say_alone(engine, rounding):
    needs(engine, "keyed_draws")
    contexts, tokens = dict(enumerate(prompts())), Sampling(max_tokens=8)
    for turn in range(3):
        work = [Request(id=i, tokens=p, sampling=tokens, group=i, rng_key=(1, turn, i, 0)) for i, p in contexts.items()]
        alone = run(engine, work)
        before = engine.stats()
        done = run(engine, [replace(r, conversation=r.id) for r in work])
        assert_same(done, alone, rounding)
        count = engine.stats().since(before)
        assert count.prefilled + count.reused == sum(len(p) for p in contexts.values())
        if turn and engine.caps.conversations and engine.stats().kv_tokens_bound is None:
            assert count.prefilled == 5 * 4  # what was said since, and the last token of the answer
        contexts = {i: np.concatenate([p, done[i].tokens, p[:1], p[-1:], p[:1]]) for i, p in contexts.items()}


def test_hints_change_no_token(engine, rounding):
    needs(engine, "keyed_draws")
    work = requests(prompts(), PLAIN, group=2)
    hinted = [replace(r, expected=1 + r.id % 5, conversation=r.id % 3) for r in work]
    assert_same(run(engine, hinted), run(engine, work), rounding)


def test_many_more_requests_than_fit_all_come_back(engine):
    work = requests(prompts((3, 40, 9, 70, 5)), Sampling(max_tokens=20, stop_ids=STOPS), group=10)
    engine.submit(work)
    bound, done = engine.stats().kv_tokens_bound, []
    while outputs := engine.step():
        done += [o.id for o in outputs]
        assert bound is None or engine.stats().kv_tokens <= bound
    assert sorted(done) == list(range(50))
