"""The embedded engine against transformers' generate, plain recomputation and itself."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny import FAMILIES, FORMS, VOCABULARY, build, drain, letters, prompts, requests, run

from whet.errors import ConfigError, EngineError
from whet.ops.counter_rng import hash_rng_key
from whet.rollout.base import Request, Sampling
from whet.rollout.engine import EmbeddedEngine, runner
from whet.rollout.hf import HFEngine
from whet.rollout.stopping import find_stop_string

FUSED = {"qwen3", "qwen2", "llama", "mistral_window"}
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


def watched(engine):
    """The shapes [B, T] that the engine runs, in order."""
    forward, shapes = engine._runner.forward, []
    inner = forward.features
    forward.features = lambda ids, layout: (shapes.append(tuple(ids.shape)), inner(ids, layout))[1]
    return shapes


def generate(model, prompt, count):
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def cut(tokens, stop):
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.spread(10)
@EACH
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_token_for_token(family, form):
    model = build(family, gain=4.0)
    plain = [generate(model, p, 20) for p in prompts()]
    assert max(len(set(t)) for t in plain) >= 3  # not one token over and over
    stop = plain[0][5]
    engine = EmbeddedEngine(model, max_batch=7, prefill_tokens=16, **form)
    assert (engine.backends["backbone"] == "fused") == (form.get("fast", True) and family in FUSED)
    work = requests(prompts(), Sampling(max_tokens=20, temperature=0.0, stop_ids=(stop,)), group=3)
    done = run(engine, work)
    for r in work:
        assert done[r.id].tokens.tolist() == cut(plain[r.group], stop)


def recomputed(model, request, tokens, sampling, *, instead=False):
    """Logprobs by one full forward and the definitions, token by token, in fp64; `instead`: each as the first."""
    ids = [*request.tokens.tolist(), *tokens.tolist()]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    out = []
    for t, token in enumerate(tokens.tolist()):
        t = 0 if instead else t
        z = logits[len(request.tokens) + t - 1].clone()
        if sampling.logprobs_mode == "processed":
            for i in set(ids[: len(request.tokens) + t]) if sampling.repetition_penalty != 1 else ():
                z[i] = z[i] * sampling.repetition_penalty if z[i] < 0 else z[i] / sampling.repetition_penalty
            z[list(sampling.forbidden_ids)] = -torch.inf
            if t < sampling.min_tokens:
                z[list(sampling.stop_ids)] = -torch.inf
        z = z / (sampling.temperature or 1.0)
        if sampling.logprobs_mode == "processed" and sampling.temperature:
            if sampling.top_k:
                z[z < z.sort().values[-sampling.top_k]] = -torch.inf
            if sampling.top_p < 1:
                p, order = z.softmax(0).sort(descending=True)
                z[order[p.cumsum(0) - p >= sampling.top_p]] = -torch.inf
            p = z.softmax(0)
            z[p < sampling.min_p * p.max()] = -torch.inf
        out.append(z.log_softmax(0)[token].item())
    return np.array(out)


SAMPLINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.3},
    "greedy_repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "forbidden": {"forbidden_ids": (3, 4, 5), "stop_ids": (9, 10), "min_tokens": 4},
    "all": {
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "forbidden_ids": (7,),
    },
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("processors", ["processed", "full"])
@pytest.mark.parametrize("kind", [EmbeddedEngine, partial(EmbeddedEngine, fast=False), HFEngine])
def test_logprobs_equal_a_full_forward(model, kind, processors):
    tokens = prompts((3, 12, 7))
    cases = [Sampling(max_tokens=10, logprobs_mode=processors, **s) for s in SAMPLINGS.values()]
    work = [
        Request(id=100 * c + i, tokens=p, sampling=s, group=i, rng_key=(c, 0, i, 0))
        for c, s in enumerate(cases)
        for i, p in enumerate(tokens)
    ]
    done = run(kind(model), work)  # all in one batch: rows of ten different samplings
    for r in work:
        want = recomputed(model, r, done[r.id].tokens, r.sampling)
        np.testing.assert_allclose(done[r.id].logprobs, want, atol=1e-5)
        assert not set(done[r.id].tokens.tolist()) & set(r.sampling.forbidden_ids)
        assert not set(done[r.id].tokens[: r.sampling.min_tokens].tolist()) & set(r.sampling.stop_ids)


@pytest.mark.spread(10)
@EACH
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_draws_equal_the_naive_engines(model, sampling, form):
    stops = tuple(range(0, VOCABULARY, 6))  # rows leave at different times, and others move into their places
    work = requests(prompts(), Sampling(**{"max_tokens": 16, "stop_ids": stops, **sampling}), group=4)
    fast, naive = run(EmbeddedEngine(model, max_batch=6, **form), work), run(HFEngine(model), work)
    for i in naive:
        assert fast[i].tokens.tolist() == naive[i].tokens.tolist()
        assert fast[i].finish_reason == naive[i].finish_reason
        np.testing.assert_allclose(fast[i].logprobs, naive[i].logprobs, atol=2e-5)


@pytest.mark.parametrize("fields", [{}, {"top_k": 6, "temperature": 1.5}, {"top_p": 0.7}])
def test_frequencies_are_those_of_the_model(fields):  # other forms draw the same: see the test before
    """Two tokens from a vocabulary of 64, 4000 times: chi-square over the pairs' first tokens and second tokens."""
    model, count = build(gain=2.0), 4000
    sampling = Sampling(max_tokens=2, **fields)
    work = requests(prompts((4,)), sampling, group=count)
    done = run(EmbeddedEngine(model, max_batch=1000), work)
    first = np.bincount([o.tokens[0] for o in done.values()], minlength=VOCABULARY)
    common = int(first.argmax())
    second = np.bincount([o.tokens[1] for o in done.values() if o.tokens[0] == common], minlength=VOCABULARY)
    for seen, context in ((first, work[0].tokens), (second, np.append(work[0].tokens, common))):
        request = Request(id=0, tokens=context, sampling=sampling, group=0, rng_key=(0, 0, 0, 0))
        p = np.exp(recomputed(model, request, np.arange(VOCABULARY), sampling, instead=True))
        assert p.sum() == pytest.approx(1, abs=1e-6)
        assert seen[p == 0].sum() == 0
        want = p * seen.sum()
        large = want >= 5
        seen, want = np.append(seen[large], seen[~large].sum()), np.append(want[large], want[~large].sum() + 1e-9)
        seen, want = seen[want > 1e-6], want[want > 1e-6]
        degrees = len(want) - 1
        chi2 = ((seen - want) ** 2 / want).sum()
        assert chi2 < degrees + 4.5 * np.sqrt(2 * degrees) + 4  # about 1 in 10^5


@pytest.mark.spread(4)
@EACH
@pytest.mark.parametrize(
    "options", [{"max_batch": 1}, {"max_batch": 3}, {"prefill_tokens": 4}, {"kv_cache_tokens": 160}]
)
def test_sizes_change_no_token(model, options, form):
    stops = tuple(range(0, VOCABULARY, 6))
    work = requests(prompts((3, 70, 40, 9, 1, 33)), Sampling(max_tokens=30, stop_ids=stops), group=4)
    want = run(EmbeddedEngine(model, **form), work)
    got = run(EmbeddedEngine(model, **form, **options), work)
    assert {len(o.tokens) for o in want.values()} != {30}
    for i in want:
        assert got[i].tokens.tolist() == want[i].tokens.tolist()
        np.testing.assert_allclose(got[i].logprobs, want[i].logprobs, atol=1e-5)


def test_a_bounded_cache_holds_no_more_than_its_bound(model):
    engine = EmbeddedEngine(model, kv_cache_tokens=400)
    long = requests(prompts((3, 70, 40, 9)), Sampling(max_tokens=30), group=4)
    short = [Request(**{**vars(r), "id": r.id + 100, "sampling": Sampling(max_tokens=3)}) for r in long]
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes
    for work in (long, short):
        engine.submit(work)
        held, done = [], 0
        while outputs := engine.step():
            done += len(outputs)
            held.append(engine.kv_bytes)
        assert done == len(work)
        assert 100 * token < max(held) <= 400 * token


def test_a_short_request_beside_a_long_one_is_counted_with_the_places_that_its_row_has(model):
    limits = (30, 30, 3, 3, 3, 3, 3, 3)
    work = requests(prompts((9,)), Sampling(max_tokens=3), group=8)
    work = [replace(r, sampling=Sampling(max_tokens=n), group=r.id) for r, n in zip(work, limits)]
    engine, seen = EmbeddedEngine(model, kv_cache_tokens=130), []
    features = engine._runner.forward.features
    engine._runner.forward.features = lambda *a: (features(*a), seen.append(engine.stats().kv_tokens))[0]
    done = run(engine, work)
    assert [len(done[i].tokens) for i in range(8)] == list(limits)
    assert 100 < max(seen) <= 130  # a row of 32, and three of 30


def test_a_request_over_the_cache_is_refused_with_the_numbers(model):
    engine = EmbeddedEngine(model, kv_cache_tokens=64)
    with pytest.raises(
        EngineError, match=r"40 prompt tokens \(a row of 64\) \+ 8 new tokens = 72, but the cache holds 64"
    ):
        engine.submit(requests(prompts((40,)), Sampling(max_tokens=8)))


def test_a_request_over_the_positions_is_refused_with_the_numbers(model):
    with pytest.raises(EngineError, match=r"40 prompt \+ 217 new tokens = 257, but the model has 256 positions"):
        EmbeddedEngine(model).submit(requests(prompts((40,)), Sampling(max_tokens=217)))


def test_a_request_may_fill_the_positions_and_the_cache_to_the_last_place(model):
    EmbeddedEngine(model).submit(requests(prompts((40,)), Sampling(max_tokens=216)))
    EmbeddedEngine(model, kv_cache_tokens=72).submit(requests(prompts((40,)), Sampling(max_tokens=8)))


def test_each_distinct_prompt_of_a_group_is_prefilled_once(model):
    engine = EmbeddedEngine(model)
    rows = watched(engine)
    run(engine, requests(prompts((5, 11)), Sampling(max_tokens=3), group=4))
    assert rows == [(1, 16), (8, 1), (8, 1)]  # 5 + 11 tokens once, then 8 rows for the second and third token


@EACH
def test_live_rows_decode_between_the_chunks_of_a_long_prompt(model, form):
    sizes, stops = (5, 30, 9, 200, 70, 70), tuple(range(0, VOCABULARY, 9))
    work = requests(prompts(sizes), Sampling(max_tokens=40, stop_ids=stops), group=2)
    want = run(EmbeddedEngine(model, **form), work)
    engine = EmbeddedEngine(model, prefill_tokens=16, **form)
    engine.submit(work[:6])
    done = {o.id: o for o in engine.step()}
    live, shapes = 6 - len(done), watched(engine)
    engine.submit(work[6:])
    done |= {o.id: o for o in engine.step()}
    chunks = [i for i, (_, length) in enumerate(shapes) if length > 1]
    between = [shape for shape in shapes[chunks[0] : chunks[-1]] if shape[1] == 1]
    assert len(chunks) > 13 and len(between) >= 8
    assert between[0] == (live, 1) and between[-1][0] < live  # rows that leave meanwhile move prompts
    done |= drain(engine)
    for i, o in want.items():
        assert done[i].tokens.tolist() == o.tokens.tolist()
        np.testing.assert_allclose(done[i].logprobs, o.logprobs, atol=2e-5)


def test_no_prefill_runs_more_tokens_than_asked_for(model):
    engine = EmbeddedEngine(model, prefill_tokens=16)
    shapes = watched(engine)
    run(engine, requests(prompts((1, 3, 5, 7, 9, 16, 17, 40)), Sampling(max_tokens=1)))
    # the four shortest together; 17 and 40 in pieces
    assert [length for _, length in shapes] == [16, 9, 16, 16, 1, 16, 16, 8]


def test_finished_sequences_leave_and_waiting_ones_come_in(model):
    engine = EmbeddedEngine(model, max_batch=4)
    shapes = watched(engine)
    work = [
        Request(id=i, tokens=prompts((5,))[0], sampling=Sampling(max_tokens=n), group=i, rng_key=(0, 0, i, 0))
        for i, n in enumerate((24, 4, 4, 4, 8, 8))
    ]
    done = run(engine, work)
    sizes = [rows for rows, _ in shapes]
    assert [len(done[i].tokens) for i in range(6)] == [24, 4, 4, 4, 8, 8]
    assert max(sizes) == 4 and sizes[-1] == 1
    assert sum(sizes) < 4 * 24


def test_rows_that_differ_in_their_limit_alone_are_drawn_in_one_call(model, monkeypatch):
    calls, draw = [], runner.sample_rows
    monkeypatch.setattr(runner, "sample_rows", lambda x, *args, **kw: calls.append(len(x)) or draw(x, *args, **kw))
    work = [
        Request(id=i, tokens=prompts((5,))[0], sampling=Sampling(max_tokens=n), group=0, rng_key=(0, 0, 0, i))
        for i, n in enumerate((2, 4, 3))
    ]
    run(EmbeddedEngine(model), work)
    assert calls == [3, 3, 2, 1]


def test_step_streams_short_requests_before_long_ones(model):
    engine = EmbeddedEngine(model)
    short, long = Sampling(max_tokens=2), Sampling(max_tokens=30)
    p = prompts((5, 6))
    engine.submit(
        [
            Request(id=0, tokens=p[0], sampling=long, group=0, rng_key=(0, 0, 0, 0)),
            Request(id=1, tokens=p[1], sampling=short, group=1, rng_key=(0, 0, 1, 0)),
        ]
    )
    assert [o.id for o in engine.step()] == [1]
    assert [o.id for o in engine.step()] == [0]


def test_stop_strings_cut_at_the_token_that_completes_them(model):
    free = run(EmbeddedEngine(model, decode=letters), requests(prompts(), Sampling(max_tokens=20)))
    text = letters(free[1].tokens)
    stop = text[6:8]
    where = text.index(stop) + 2
    for kind in (EmbeddedEngine, HFEngine):
        done = run(kind(model, decode=letters), requests(prompts(), Sampling(max_tokens=20, stop=(stop,))))
        assert done[1].tokens.tolist() == free[1].tokens[:where].tolist()
        assert done[1].finish_reason == "stop"


def test_the_cut_is_at_the_first_fresh_token_that_completes_a_string():
    decode = lambda ids: "".join(map(chr, ids))
    places = {stop: find_stop_string(decode, list(b"abcd"), [stop], new=3) for stop in ("b", "ab", "c", "d", "x")}
    assert places == {"b": 2, "ab": 2, "c": 3, "d": 4, "x": None}


def test_a_stop_string_may_begin_in_an_earlier_turn(model):
    request = requests(prompts((5,)), Sampling(max_tokens=20))[0]
    free = run(EmbeddedEngine(model), [request])[0].tokens
    rest = Request(
        id=0,
        tokens=np.concatenate([request.tokens, free[:3]]),
        sampling=Sampling(max_tokens=17, stop=(letters(free[2:4]),)),
        group=0,
        rng_key=request.rng_key,
        offset=3,
    )
    assert run(EmbeddedEngine(model, decode=letters), [rest])[0].tokens.tolist() == [free[3]]


def test_stop_strings_without_decode_are_refused(model):
    with pytest.raises(ConfigError, match="decode"):
        EmbeddedEngine(model).submit(requests(prompts(), Sampling(stop=("a",))))


def test_raw_logits_come_back_where_asked_for(model):
    asked, plain = Sampling(max_tokens=6, temperature=0.5, top_k=3, return_logits=True), Sampling(max_tokens=6)
    work = requests(prompts(), asked, group=2)
    work = [r if r.id % 2 else Request(**{**vars(r), "sampling": plain}) for r in work]
    fast, naive = run(EmbeddedEngine(model, max_batch=3), work), run(HFEngine(model), work)
    for r in work:
        assert (fast[r.id].logits is None) == (r.sampling is plain)
        if r.sampling is asked:
            assert fast[r.id].logits.shape == (6, VOCABULARY)
            np.testing.assert_allclose(fast[r.id].logits, naive[r.id].logits, atol=1e-3)


def begin(engine, work):
    """Submits and decodes a little: until the short request of `work` is out."""
    short = Request(id=-1, tokens=work[0].tokens, sampling=Sampling(max_tokens=6), group=-1, rng_key=(9, 9, 9, 9))
    engine.submit([*work, short])
    assert [o.id for o in engine.step()] == [-1]


def test_abort_returns_what_was_made_and_an_offset_goes_on(model):
    work = requests(prompts((5, 9)), Sampling(max_tokens=20), group=2)
    want = run(EmbeddedEngine(model), work)
    engine = EmbeddedEngine(model)
    begin(engine, work)
    part = {o.id: o for o in engine.abort([0, 3])}
    assert sorted(part) == [0, 3]
    rest = []
    for i in (0, 3):
        made = part[i].tokens
        assert 0 < len(made) < 20 and part[i].finish_reason == "abort"
        rest.append(
            Request(
                id=i,
                tokens=np.concatenate([work[i].tokens, made]),
                sampling=Sampling(max_tokens=20 - len(made)),
                group=work[i].group,
                rng_key=work[i].rng_key,
                offset=len(made),
            )
        )
    engine.submit(rest)
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    for i in want:
        whole = np.concatenate([part[i].tokens, done[i].tokens]) if i in part else done[i].tokens
        assert whole.tolist() == want[i].tokens.tolist()


def test_an_update_in_flight_makes_the_kv_anew_and_stamps_both_versions():
    model = build(gain=3.0)
    work = requests(prompts((5, 9)), Sampling(max_tokens=20), group=2)
    engine = EmbeddedEngine(model)
    begin(engine, work)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    engine.update_weights(4)
    for r, o in ((r, o) for i, o in drain(engine).items() for r in work if r.id == i):
        old = int((o.versions == 0).sum())
        assert 0 < old < 20 and o.versions.tolist() == [0] * old + [4] * (20 - old)
        # under the new weights alone, the tokens made after the update have the logprobs that were reported
        want = recomputed(model, r, o.tokens, r.sampling)
        np.testing.assert_allclose(o.logprobs[old:], want[old:], atol=1e-5)
        assert np.abs(o.logprobs[:old] - want[:old]).max() > 1e-3
        model.set_attn_implementation("whet")


def test_new_weights_are_seen_without_sending_them():
    model = build(gain=3.0)
    engine = EmbeddedEngine(model)
    work = requests(prompts(), Sampling(max_tokens=8))
    before = run(engine, work)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    engine.update_weights(1)
    after, naive = run(engine, work), run(HFEngine(model), work)
    assert any(before[i].tokens.tolist() != after[i].tokens.tolist() for i in before)
    assert all(naive[i].tokens.tolist() == after[i].tokens.tolist() for i in naive)


def test_weights_are_refused_by_engines_that_share_them(model):
    for kind in (EmbeddedEngine, HFEngine):
        with pytest.raises(EngineError, match="without weights"):
            kind(model).update_weights(1, iter([]))


def test_sleep_frees_the_cache_and_flight_goes_on_after_wake(model):
    work = requests(prompts((5, 9)), Sampling(max_tokens=20), group=2)
    want = run(EmbeddedEngine(model), work)
    engine = EmbeddedEngine(model)
    begin(engine, work)
    assert engine.kv_bytes > 0
    engine.sleep()
    assert engine.kv_bytes == 0
    engine.wake_up()
    got = drain(engine)
    assert all(got[i].tokens.tolist() == want[i].tokens.tolist() for i in want)


def test_the_module_is_given_back_in_its_mode(model):
    engine = EmbeddedEngine(model)
    modes = {m: m.training for m in model.modules()}
    assert any(modes.values())
    run(engine, requests(prompts(), Sampling(max_tokens=3)))
    assert {m: m.training for m in model.modules()} == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_naive_engine_gives_the_layouts_attention_back(model):
    EmbeddedEngine(model)
    assert model.config._attn_implementation == "whet"
    run(HFEngine(model), requests(prompts(), Sampling(max_tokens=3)))
    assert model.config._attn_implementation == "whet"


def test_a_model_without_layout_is_refused_with_the_reason_and_the_way_out():
    import transformers as tf

    config = tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match="use rollout_engine 'hf'"):
        EmbeddedEngine(tf.BloomForCausalLM(config))


def test_a_model_without_layout_runs_in_the_naive_engine():
    import transformers as tf

    torch.manual_seed(0)
    config = tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, eos_token_id=None, pad_token_id=0)
    model = tf.BloomForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0)
    work = requests(prompts(), Sampling(max_tokens=6, temperature=0.0))
    for i, o in run(HFEngine(model), work).items():
        assert o.tokens.tolist() == generate(model, work[i].tokens, 6)


def test_draws_follow_their_address_exactly(model):
    """Token t of a request is the inverse CDF of the recomputed distribution at u(rng_key, offset + t)."""
    from whet.ops.counter_rng import uniform

    r = requests(prompts((9,)), Sampling(max_tokens=8))[0]
    tokens = run(EmbeddedEngine(model), [r])[0].tokens
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor([[*r.tokens.tolist(), *tokens.tolist()]])
        p = model(input_ids=ids).logits[0, len(r.tokens) - 1 : -1].double().softmax(1)
    model.set_attn_implementation("whet")
    u = uniform(torch.full((8,), hash_rng_key(*r.rng_key)), torch.arange(8))
    assert [int((row.cumsum(0) <= x).sum()) for row, x in zip(p, u)] == tokens.tolist()


@pytest.mark.parametrize("name", ["max_batch", "prefill_tokens", "kv_cache_tokens"])
def test_sizes_below_one_are_refused(model, name):
    with pytest.raises(ConfigError, match=f"{name} 0 must be at least 1"):
        EmbeddedEngine(model, **{name: 0})


def test_a_full_support_reports_other_numbers_than_the_truncated_one(model):
    work = {s: requests(prompts(), Sampling(max_tokens=6, top_k=2, logprobs_mode=s)) for s in ("processed", "full")}
    done = {s: run(EmbeddedEngine(model), w) for s, w in work.items()}
    for i in done["full"]:
        assert done["full"][i].tokens.tolist() == done["processed"][i].tokens.tolist()
        assert (done["full"][i].logprobs < done["processed"][i].logprobs).all()
