"""The embedded engine's life: turns of a conversation, new weights under way, little memory, what it counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import FORMS, VOCABULARY, build, drain, letters, prompts, requests, run

from whet.errors import EngineError
from whet.rollout.base import EngineStats, Request, Sampling
from whet.rollout.driver import stream
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.engine.places import Places
from whet.rollout.engine.prefix_cache import CachedSequence, PrefixCache
from whet.rollout.engine.scheduler import Scheduler
from whet.rollout.in_flight import InFlightRequest

EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
STOPS = tuple(range(0, VOCABULARY, 6))


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


def said(turn, row):
    """What a user says after a turn."""
    return np.random.RandomState(100 * turn + row).randint(1, VOCABULARY, 3 + 2 * row).astype(np.int32)


def talk(engine, first, sampling, *, turns=3, generations=2, hold=True):
    """Conversations of some turns, all at once; by (turn, conversation), the requests and their outputs."""
    contexts = {i * generations + g: p for i, p in enumerate(first) for g in range(generations)}
    log = {}
    for turn in range(turns):
        work = [
            Request(
                id=c,
                tokens=context,
                sampling=sampling,
                group=c // generations if turn == 0 else c,
                rng_key=(0, turn, c // generations, c % generations),
                conversation=c if hold else None,
            )
            for c, context in contexts.items()
        ]
        done = run(engine, work)
        log |= {(turn, r.id): (r, done[r.id]) for r in work}
        contexts = {c: np.concatenate([contexts[c], done[c].tokens, said(turn, c)]) for c in contexts}
    return log


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for key in want:
        assert got[key][1].tokens.tolist() == want[key][1].tokens.tolist()
        assert got[key][1].finish_reason == want[key][1].finish_reason
        np.testing.assert_allclose(got[key][1].logprobs, want[key][1].logprobs, atol=1e-5)


@pytest.mark.spread(6)
@EACH
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=9, temperature=0.0), Sampling(max_tokens=9, stop_ids=STOPS, repetition_penalty=1.2)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3_value_size"])
def test_a_turn_encodes_what_is_new_alone_and_says_what_it_would_have_said(family, sampling, form):
    model = build(family, gain=3.0)
    engine = EmbeddedEngine(model, **form, prefill_tokens=16)
    want = talk(EmbeddedEngine(model, **form), prompts(), sampling, hold=False)
    got = talk(engine, prompts(), sampling)
    assert_equal(got, want)
    # the first prompts once each; then what the user said, and the last token of the answer, which was never run
    fresh = sum(map(len, prompts())) + sum(len(said(turn, c)) + 1 for turn in (0, 1) for c in range(10))
    stats = engine.stats()
    assert stats.prefilled == fresh
    assert stats.prefilled + stats.reused == sum(len(r.tokens) for r, _ in got.values())
    assert (stats.held, stats.kv_tokens > 0) == (10, True)


def test_requests_without_a_conversation_hold_nothing(model):
    engine = EmbeddedEngine(model)
    talk(engine, prompts(), Sampling(max_tokens=9), hold=False)
    assert engine.stats().held == 0


def test_a_prompt_that_leaves_the_earlier_turn_reuses_what_they_begin_with(model):
    engine, sampling = EmbeddedEngine(model), Sampling(max_tokens=8)
    first = replace(requests(prompts((20,)), sampling)[0], conversation=7)
    made = run(engine, [first])[0].tokens
    for changed in (5, 20, 24):  # inside the prompt, at its end, inside the answer
        tokens = np.concatenate([first.tokens, made, said(0, 1)])
        tokens[changed] = (tokens[changed] + 1) % VOCABULARY
        other = replace(first, tokens=tokens, rng_key=(0, 0, 0, changed))
        run(engine, [first])
        before = engine.stats()
        got = run(engine, [other])[0]
        assert engine.stats().since(before).reused == changed
        want = run(EmbeddedEngine(model), [replace(other, conversation=None)])[0]
        assert got.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def test_the_same_prompt_again_runs_its_last_token_alone(model):
    engine = EmbeddedEngine(model)
    ask = replace(requests(prompts((20,)), Sampling(max_tokens=8))[0], conversation=0)
    first = run(engine, [ask])[0]
    before = engine.stats()
    again = run(engine, [ask])[0]
    assert engine.stats().since(before).prefilled == 1
    assert again.tokens.tolist() == first.tokens.tolist()
    np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-5)


def test_a_shorter_prompt_than_what_is_held_is_answered_rightly(model):
    engine = EmbeddedEngine(model)
    ask = replace(requests(prompts((20,)), Sampling(max_tokens=8))[0], conversation=0)
    run(engine, [ask])
    short = replace(ask, tokens=ask.tokens[:11])
    got, want = run(engine, [short])[0], run(EmbeddedEngine(model), [short])[0]
    assert got.tokens.tolist() == want.tokens.tolist()


def test_what_a_running_turn_has_in_its_own_row_is_not_held_twice(model):
    engine = EmbeddedEngine(model)
    ask = replace(requests(prompts((20,)), Sampling(max_tokens=8))[0], conversation=0)
    made = run(engine, [ask])[0].tokens
    begin(engine, [replace(ask, tokens=np.concatenate([ask.tokens, made, said(0, 1)]))])
    assert (engine.stats().live, engine.stats().held) == (1, 0)
    other = replace(ask, id=1, conversation=1, tokens=prompts((9,))[0])
    run(engine, [other])
    begin(engine, [replace(other, tokens=other.tokens[:4])])
    assert engine.stats().held == 2  # its row has a part alone


def test_another_conversation_with_the_same_words_reuses_nothing(model):
    """What else went through the engine moves no bit of a request, so a resumed run equals the uninterrupted one."""
    engine = EmbeddedEngine(model)
    ask = replace(requests(prompts((20,)), Sampling(max_tokens=8))[0], conversation=0)
    run(engine, [ask])
    before = engine.stats()
    run(engine, [replace(ask, conversation=1)])
    assert engine.stats().since(before).reused == 0


def test_equal_prompts_of_different_groups_are_encoded_once(model):
    engine = EmbeddedEngine(model)
    p = prompts((20,))[0]
    work = [Request(id=i, tokens=p, sampling=Sampling(max_tokens=8), group=i, rng_key=(0, 0, i, 0)) for i in range(3)]
    done = run(engine, work)
    assert (engine.stats().prefilled, engine.stats().reused) == (20, 40)
    for r in work:
        assert done[r.id].tokens.tolist() == run(EmbeddedEngine(model), [r])[r.id].tokens.tolist()


@pytest.mark.spread(5)
@EACH
@pytest.mark.parametrize("bound", [137, 160, 200, 300, 500])
def test_a_tight_bound_fails_no_turn_changes_no_token_and_is_kept(model, bound, form):
    sampling = Sampling(max_tokens=9, stop_ids=STOPS)
    want = talk(EmbeddedEngine(model, **form), prompts(), sampling, hold=False)
    engine, held = EmbeddedEngine(model, **form, kv_cache_tokens=bound), []
    step = engine.step
    engine.step = lambda *a: (step(*a), held.append(engine.stats()))[0]
    assert_equal(talk(engine, prompts(), sampling), want)
    assert all(s.kv_tokens <= bound and s.kv_tokens_bound == bound for s in held)
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes
    assert all(s.kv_bytes <= bound * token for s in held)
    assert all(s.kv_bytes == s.kv_tokens * token for s in held) and max(s.kv_bytes for s in held) > 0
    assert max(s.held for s in held) >= 1


def peaks(engine):
    """KV in tokens after each forward pass, whatever step does."""
    seen, inner = [], engine._runner.forward.features
    engine._runner.forward.features = lambda *a: (inner(*a), seen.append(engine.stats().kv_tokens))[0]
    return seen


@pytest.mark.parametrize("prefill_tokens", [4, 8192])
@pytest.mark.parametrize(("bound", "most"), [(180, 12), (200, 12), (160, 30), (400, 30)])
def test_the_bound_is_kept_in_each_pass_also_where_turns_end_at_once(model, bound, most, prefill_tokens):
    """A row that ends with its first token leaves before the rows beside it have any places of their own."""
    sampling = Sampling(max_tokens=most, stop_ids=STOPS)
    want = talk(EmbeddedEngine(model), prompts(), sampling, hold=False)
    engine = EmbeddedEngine(model, kv_cache_tokens=bound, prefill_tokens=prefill_tokens)
    seen = peaks(engine)
    assert_equal(talk(engine, prompts(), sampling), want)
    assert max(seen) <= bound


def test_the_bound_is_kept_by_a_lone_turn_that_takes_all_of_it(model):
    engine = EmbeddedEngine(model, kv_cache_tokens=100)
    first, other = (replace(r, conversation=r.id) for r in requests(prompts((20, 21)), Sampling(max_tokens=8)))
    done = run(engine, [first, other])
    assert engine.stats().held == 2
    tokens = np.concatenate([first.tokens, done[0].tokens, said(0, 5)])
    turn = replace(first, tokens=tokens, sampling=Sampling(max_tokens=36))
    seen = peaks(engine)
    got, want = run(engine, [turn])[0], run(EmbeddedEngine(model), [turn])[0]
    assert got.tokens.tolist() == want.tokens.tolist()
    assert max(seen) <= 100


def test_without_a_bound_no_more_conversations_are_held_than_the_batch_has_rows(model):
    engine = EmbeddedEngine(model, max_batch=4)
    talk(engine, prompts(), Sampling(max_tokens=4), turns=1)
    assert engine.stats().held == 4


def test_new_weights_drop_what_is_held():
    model, sampling = build(gain=3.0), Sampling(max_tokens=9)
    engine = EmbeddedEngine(model)
    first = talk(engine, prompts(), sampling, turns=1)
    change(model)
    engine.update_weights(1)
    assert (engine.stats().held, engine.kv_bytes) == (0, 0)
    for c, (r, o) in ((c, x) for (_, c), x in first.items()):
        turn = replace(r, tokens=np.concatenate([r.tokens, o.tokens, said(0, c)]))
        got, want = (run(e, [turn])[c] for e in (engine, EmbeddedEngine(model)))
        assert got.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        assert set(got.versions.tolist()) == {1}


@pytest.mark.parametrize("end", ["sleep", "close"])
def test_sleep_and_close_free_what_is_held(model, end):
    engine = EmbeddedEngine(model)
    talk(engine, prompts(), Sampling(max_tokens=4), turns=1)
    assert engine.kv_bytes > 0
    getattr(engine, end)()
    assert (engine.stats().held, engine.kv_bytes, engine.stats().kv_tokens) == (0, 0, 0)


def change(model, factor=1.1):
    """Other weights, in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


def going_on(request, made):
    """The request that goes on behind these tokens."""
    return replace(
        request,
        tokens=np.concatenate([request.tokens, made]).astype(np.int32),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(made)),
        offset=request.offset + len(made),
    )


def begin(engine, work):
    """Submits and decodes one block of steps, so that all are under way."""
    engine.submit(work)
    assert engine.step(timeout_s=0.0) == []


@pytest.mark.spread(3)
@EACH
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 9, "repetition_penalty": 1.3}])
def test_tokens_behind_an_update_are_those_of_a_new_engine_going_on_with_the_new_weights(fields, form):
    model = build(gain=3.0)
    work = requests(prompts(), Sampling(max_tokens=20, **fields), group=2)
    engine = EmbeddedEngine(model, **form)
    begin(engine, work)
    held = engine.peek([r.id for r in work])
    change(model)
    engine.update_weights(3)
    done = drain(engine)
    for r in work:
        got, before = done[r.id], held[r.id]
        n = len(before.tokens)
        assert 0 < n < len(got.tokens)
        assert got.tokens[:n].tolist() == before.tokens.tolist()
        np.testing.assert_array_equal(got.logprobs[:n], before.logprobs)
        assert got.versions.tolist() == [0] * n + [3] * (len(got.tokens) - n)
        fresh = run(EmbeddedEngine(model, **form), [going_on(r, before.tokens)])[r.id]
        assert got.tokens[n:].tolist() == fresh.tokens.tolist()
        np.testing.assert_allclose(got.logprobs[n:], fresh.logprobs, atol=1e-5)


@EACH
@pytest.mark.parametrize("how", ["update", "abort"])
def test_sequences_of_a_group_that_are_taken_up_again_encode_their_prompt_once(model, how, form):
    work = requests(prompts((40, 9)), Sampling(max_tokens=20), group=4)
    want = run(EmbeddedEngine(model, **form), work)
    engine = EmbeddedEngine(model, **form, prefill_tokens=16)
    begin(engine, work)
    made, before = engine.peek(range(8)), engine.stats()
    if how == "update":
        engine.update_weights(0)
    else:
        engine.submit([going_on(work[o.id], o.tokens) for o in engine.abort(range(8))])
    got = drain(engine)
    assert engine.stats().since(before).prefilled <= 49 + sum(len(p.tokens) for p in made.values())
    for i, o in want.items():
        n = len(o.tokens) - len(got[i].tokens)
        assert n == (0 if how == "update" else len(made[i].tokens))
        assert got[i].tokens.tolist() == o.tokens[n:].tolist()
        np.testing.assert_allclose(got[i].logprobs, o.logprobs[n:], atol=1e-5)


@pytest.mark.parametrize("end", ["update", "sleep"])
def test_a_sequence_taken_up_again_stays_within_the_bound_it_was_checked_against(model, end):
    """Its row would be of 128 places with the tokens it has made, and the cache has 84."""
    ask = requests(prompts((60,)), Sampling(max_tokens=20), group=3)
    want = run(EmbeddedEngine(model), ask)
    engine = EmbeddedEngine(model, kv_cache_tokens=84)
    engine.submit(ask)
    done = {}
    for _ in range(100):
        done |= {o.id: o for o in engine.step(timeout_s=0.0)}
        assert engine.stats().kv_tokens <= 84
        if len(done) == 3:
            break
        engine.update_weights(0) if end == "update" else (engine.sleep(), engine.wake_up())
    for i, o in want.items():
        assert done[i].tokens.tolist() == o.tokens.tolist()
        np.testing.assert_allclose(done[i].logprobs, o.logprobs, atol=1e-5)


def test_every_update_shows_in_the_versions():
    model = build(gain=3.0)
    engine = EmbeddedEngine(model)
    engine.update_weights(5)
    work = requests(prompts((4, 9)), Sampling(max_tokens=30))
    engine.submit(work)
    marks = []
    for version in (6, 7, 7, 9):
        assert engine.step(timeout_s=0.0) == []
        marks.append({i: len(p.tokens) for i, p in engine.peek([0, 1]).items()})
        engine.update_weights(version)
    for i, o in drain(engine).items():
        a, b, c, d = (m[i] for m in marks)
        assert 0 < a < b < c < d < 30
        assert o.versions.tolist() == [5] * a + [6] * (b - a) + [7] * (d - b) + [9] * (30 - d)


@EACH
@pytest.mark.parametrize("conversation", [None, 4], ids=["alone", "conversation"])
def test_an_aborted_sequence_goes_on_from_its_own_tokens(model, conversation, form):
    sampling = Sampling(max_tokens=24, top_p=0.9)
    work = [replace(r, conversation=conversation and r.id) for r in requests(prompts((5, 9, 40)), sampling, group=2)]
    want = run(EmbeddedEngine(model, **form), work)
    engine, tokens, logprobs = EmbeddedEngine(model, **form), {}, {}
    todo = {r.id: r for r in work}
    begin(engine, work)
    for _ in range(3):  # broken off and taken up three times
        for o in engine.abort(todo):
            assert o.finish_reason == "abort" and 0 < len(o.tokens) < todo[o.id].sampling.max_tokens
            tokens.setdefault(o.id, []).extend(o.tokens.tolist())
            logprobs.setdefault(o.id, []).extend(o.logprobs.tolist())
            todo[o.id] = going_on(todo[o.id], o.tokens)
        before = engine.stats()
        assert before.in_flight == 0
        begin(engine, list(todo.values()))
        if conversation is not None:  # what was held is not encoded again
            assert engine.stats().since(before).prefilled == len(todo)
    for i, o in drain(engine).items():
        assert tokens[i] + o.tokens.tolist() == want[i].tokens.tolist()
        np.testing.assert_allclose(logprobs[i] + o.logprobs.tolist(), want[i].logprobs, atol=1e-5)


def test_what_could_never_fit_is_refused_also_with_much_held(model):
    engine = EmbeddedEngine(model, kv_cache_tokens=100)
    ask = replace(requests(prompts((20,)), Sampling(max_tokens=8))[0], conversation=0)
    made = run(engine, [ask])[0].tokens
    assert engine.stats().held == 1
    turn = replace(ask, tokens=np.concatenate([ask.tokens, made, said(0, 5)]))
    with pytest.raises(
        EngineError, match=r"41 prompt tokens \(a row of 64\) \+ 37 new tokens = 101, but the cache holds 100"
    ):
        engine.submit([replace(turn, sampling=Sampling(max_tokens=37))])
    engine.submit([replace(turn, sampling=Sampling(max_tokens=36))])
    assert len(drain(engine)[0].tokens) == 36


def test_occupancy_is_the_share_of_the_batch_and_of_the_cache(model):
    engine = EmbeddedEngine(model, max_batch=8, kv_cache_tokens=1000)
    begin(engine, requests(prompts((5, 9, 12)), Sampling(max_tokens=20), group=2))
    s = engine.stats()
    assert (s.live, s.waiting, s.occupancy) == (6, 0, 0.75)
    assert (s.steps, s.row_steps, s.mean_batch_size, s.generated) == (4, 24, 6.0, 30)
    assert s.kv_tokens_bound == 1000 and s.kv_bytes == engine.kv_bytes > 0
    drain(engine)
    assert engine.stats().generated == 120 and engine.stats().live == 0


def test_those_expected_to_be_longest_start_first_and_the_order_changes_no_token(model):
    work = requests(prompts((5, 6, 7, 8)), Sampling(max_tokens=8))
    guessed = [replace(r, expected=e) for r, e in zip(work, (3, 99, None, 5))]
    want = run(EmbeddedEngine(model, max_batch=1), work)
    engine, order = EmbeddedEngine(model, max_batch=1), []
    engine.submit(guessed)
    while outputs := engine.step():
        order += [o.id for o in outputs]
        assert all(o.tokens.tolist() == want[o.id].tokens.tolist() for o in outputs)
    assert order == [2, 1, 3, 0]  # 8 tokens (the longer prompt first; no more can come), 8, 5, 3


def test_requests_that_an_update_takes_out_of_the_batch_wait_in_their_order(model):
    engine, work = EmbeddedEngine(model), requests(prompts((5, 6, 7)), Sampling(max_tokens=40))
    engine.submit(work)
    engine.step(timeout_s=0.0)
    order = [flight.request.id for flight, _ in engine._rows.all]
    engine.update_weights(1)
    assert [flight.request.id for flight in engine._scheduler.queue] == order and len(order) == 3
    engine.abort(order)


def test_a_stop_string_ends_a_stream_with_the_token_that_completes_it(model):
    engine = EmbeddedEngine(model, decode=letters)
    ask = requests(prompts((5,)), Sampling(max_tokens=20))[0]
    free = run(engine, [ask])[0].tokens
    text = letters(free)
    ask = replace(ask, sampling=Sampling(max_tokens=20, stop=(text[6:8],)))
    pieces = list(stream(engine, [ask]))
    assert letters(np.concatenate([p.tokens for p in pieces])) == text[: text.index(text[6:8]) + 2]
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def held(n):
    return CachedSequence(tokens=np.arange(n, dtype=np.int32), layers={0: (torch.zeros(2, n, 4), torch.zeros(2, n, 6))})


def test_a_shelf_drops_the_oldest_first_and_what_is_asked_for_last():
    shelf = PrefixCache(3)
    for c, n in enumerate((5, 6, 7, 8)):
        shelf.put(c, held(n), None)
    assert [c for c in range(4) if shelf.get(c)] == [1, 2, 3] and shelf.tokens == 21
    assert shelf.bytes == 21 * 2 * (4 + 6) * 4
    shelf.shrink(14, [1])
    assert [c for c in range(4) if shelf.get(c)] == [1, 3]
    shelf.put(3, held(2), 9)  # instead of the earlier one
    assert shelf.tokens == 8
    shelf.put(5, held(10), 9)  # never fits, and drops nobody
    assert [c for c in range(6) if shelf.get(c)] == [1, 3]
    shelf.shrink(0, [3, 1])
    assert len(shelf) == 0 and shelf.get(None) is None


def test_a_shelf_is_bounded_in_bytes():
    shelf = PrefixCache(None, max_bytes=held(12).bytes)
    for c, n in enumerate((5, 6, 6)):
        shelf.put(c, held(n), None)
    assert [c for c in range(3) if shelf.get(c)] == [1, 2]
    shelf.put(3, held(13), None)  # more than all of it
    assert shelf.bytes <= held(12).bytes and shelf.get(3) is None


def test_stats_of_a_new_engine_are_zero(model):
    s = EmbeddedEngine(model, max_batch=3).stats()
    assert s == EngineStats(max_batch=3)
    assert (s.occupancy, s.kv_tokens, s.mean_batch_size, s.kv_tokens_bound) == (0, 0, 0, None)


@pytest.mark.parametrize("form", [{"native": False}, {"fast": False}], ids=["torch", "module"])
def test_what_was_drawn_before_changes_no_bit_in_half_precision(form):
    """A resumed run does not repeat the evaluation, whose longer completions made the rows longer."""
    half = build(gain=3.0).to(torch.bfloat16)
    work = requests(prompts((70, 9)), Sampling(max_tokens=24), group=3)
    used, fresh = EmbeddedEngine(half, **form), EmbeddedEngine(half, **form)
    run(used, requests(prompts((70, 5)), Sampling(max_tokens=150), group=2))
    long = used._runner.completion_store.length
    got, want = run(used, work), run(fresh, work)
    assert used._runner.completion_store.length == fresh._runner.completion_store.length < long
    for i, o in want.items():
        assert got[i].tokens.tolist() == o.tokens.tolist() and got[i].logprobs.tolist() == o.logprobs.tolist()


@pytest.mark.parametrize("form", [{}, {"native": False}], ids=["native", "torch"])
def test_min_tokens_count_from_the_first_token_also_where_a_sequence_is_taken_up_again(form):
    model, stops = build(gain=3.0), tuple(range(0, VOCABULARY, 6))
    work = requests(prompts((3, 9)), Sampling(max_tokens=40, min_tokens=20, stop_ids=stops), group=2)
    want = run(EmbeddedEngine(model, **form), work)
    assert any(20 < len(o.tokens) < 40 for o in want.values())
    engine = EmbeddedEngine(model, **form)
    engine.submit(work)
    assert engine.step(timeout_s=0.0) == [] and all(0 < len(p.tokens) < 20 for p in engine.peek(range(4)).values())
    engine.update_weights(0)  # the same weights: nothing may change
    got = drain(engine)
    for i, o in want.items():
        assert got[i].tokens.tolist() == o.tokens.tolist()
        np.testing.assert_allclose(got[i].logprobs, o.logprobs, atol=1e-5)


@EACH
def test_an_update_takes_weights_that_were_written_without_a_trace(form):
    model, work = build(), requests(prompts(), Sampling(max_tokens=9, temperature=0.0))
    engine = EmbeddedEngine(model, **form)
    before = run(engine, work)
    for p in model.parameters():
        p.data.mul_(-0.9)  # counts no new version of the tensor
    engine.update_weights(1)
    after, want = run(engine, work), run(EmbeddedEngine(model, **form), work)
    tokens = lambda outputs: {i: o.tokens.tolist() for i, o in outputs.items()}
    assert tokens(after) == tokens(want) != tokens(before)


# ---- places of a pool ------------------------------------------------------------------------------------------------


def flight(i, tokens, new, conversation=None):
    fields = {"tokens": np.full(tokens, i, np.int32), "sampling": Sampling(max_tokens=new)}
    request = Request(id=i, group=i, rng_key=(0, 0, i, 0), conversation=conversation, **fields)
    return InFlightRequest(request=request)


def one_turn(tokens):
    conversations = PrefixCache(None)
    conversations.put(1, held(tokens), None)
    return conversations


def in_pool(tokens):
    scheduler = Scheduler(max_batch=4, kv_cache_tokens=tokens)
    scheduler.pool = Places(tokens)
    return scheduler


def test_rows_that_grow_leave_earlier_turns_what_the_bound_leaves():
    scheduler, conversations, row = in_pool(100), one_turn(70), flight(0, 5, 64)
    (row.place,), row.room = scheduler.pool.take(8), 8
    assert scheduler.grow([row], np.array([5]), 4, conversations) == ([], True) and conversations.tokens == 70
    assert scheduler.grow([row], np.array([39]), 4, conversations) == ([], True) and row.room == 48
    assert conversations.tokens == 0


def test_a_request_that_does_not_fit_leaves_its_places_to_others():
    scheduler, conversations = in_pool(200), one_turn(60)
    scheduler.add([flight(0, 61, 72, conversation=1), flight(2, 80, 64)])
    admitted = scheduler.admit(num_live=0, longest=0, prefixes={}, conversations=conversations, min_free=1)
    assert [f.request.id for f, _ in admitted] == [0]  # beside it the earlier turn would have no room
    assert scheduler.pool.used == 61 + 9


def test_what_had_finished_in_a_step_that_was_cut_short_is_given_once(model):
    engine = EmbeddedEngine(model)
    done = run(engine, requests(prompts((3,)), Sampling(max_tokens=2)))
    engine._finished = [*done.values()]
    assert [o.id for o in engine.abort([0])] == [0] and engine.step() == []
