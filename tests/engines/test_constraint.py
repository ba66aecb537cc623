"""Constrained decoding against brute force: what Python's `re` says of every short text."""

import functools
import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_batch
from tiny import VOCABULARY, build, drain, requests, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError, EngineError, WhetError
from whet.ops.logits_processors import LogitsProcessors, allowed_tokens, process_logits
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.rollout.base import Constraint, Request, Sampling
from whet.rollout.constrained_decoding import Grammars, Masks
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.hf import HFEngine
from whet.rollout.mock import MockEngine

LETTERS = "ab0"
WORDS = [*LETTERS, "ab", "ba", "aab", "0b", "abb", "b0", "00", *'{}[]":, xyn1.', '":', '{"', '"x']
END = len(WORDS)
PATTERNS = ["[ab]{2,4}", "(ab)+0?", "a*b", "(a|ab)(0|b0)", "a?b?0?", "[^a0]+", "(aab|abb)*", "0|00|0a0"]
PROMPT = [np.array([3, 4, 5], np.int32)]


def tokenizer(words=WORDS, **special):
    """A byte-level tokenizer of these words; the end token follows them."""
    inner = Tokenizer(models.BPE(vocab={w.replace(" ", "Ġ"): i for i, w in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **(special or {"eos_token": "<end>"}))


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


@pytest.fixture(params=["embedded", "embedded, module", "hf"])
def engine(request, model, grammars):
    if request.param == "hf":
        made = HFEngine(model, decode=spell, grammars=grammars)
    else:
        made = EmbeddedEngine(model, decode=spell, grammars=grammars, fast=request.param == "embedded")
    yield made
    made.close()


def spell(ids):
    return "".join(WORDS[i] for i in ids if i != END)


def sampling(pattern, stops=(END,), **fields):
    return Sampling(constraint=Constraint(kind="regex", text=pattern), stop_ids=stops, **{"max_tokens": 8, **fields})


@functools.cache
def begins(pattern, text):
    """Whether a match begins so: it matches, or does with one or two letters more, which is enough for PATTERNS."""
    endings = ("".join(s) for n in range(3) for s in itertools.product(LETTERS, repeat=n))
    return any(re.fullmatch(pattern, text + s) for s in endings)


def oracle(pattern, text, stops=(END,)):
    """The tokens that may follow a text."""
    live = [i for i, w in enumerate(WORDS) if begins(pattern, text + w)]
    return {*live, *(stops if re.fullmatch(pattern, text) else ())}


def ids_of(mask):
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


# ---- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stops", [(END,), (END, 40), ()])
def test_masks_equal_brute_force_at_every_text_within_reach(grammars, pattern, stops):
    waiting, seen = [(grammars.matcher(sampling(pattern, stops)), "")], set()
    while waiting:
        matcher, text = waiting.pop()
        want = oracle(pattern, text, stops)
        assert ids_of(matcher.allowed) == want, text
        assert matcher.finish_reason == (None if want else "stop")
        for token in want - {*stops}:
            longer = text + WORDS[token]
            if len(longer) <= 4 and not {*longer} - {*LETTERS} and longer not in seen:
                seen.add(longer)
                after = matcher.copy()
                assert after.advance(token)
                grammars.refresh([after])
                waiting.append((after, longer))
    assert len(seen) > 1


def test_bytes_of_one_letter_are_tokens_of_their_own():
    g = Grammars(byte_tokenizer(), vocabulary=300)
    s = Sampling(constraint=Constraint(kind="regex", text="é{1,2}"), stop_ids=(256,))
    allowed = [ids_of(g.matcher(s, "éé".encode()[:n]).allowed) for n in range(5)]
    assert allowed == [{195}, {169}, {195, 256}, {169}, {256}]


def test_a_dot_is_any_letter_but_a_newline():
    g = Grammars(byte_tokenizer(), vocabulary=300)
    allowed = ids_of(g.matcher(Sampling(constraint=Constraint(kind="regex", text="."))).allowed)
    assert 10 not in allowed and {9, 32, 47, 92, 195} <= allowed <= set(range(256))


def test_a_stop_id_that_is_text_too_is_allowed_where_the_language_may_end_and_nowhere_else(grammars):
    a, b = WORDS.index("a"), WORDS.index("b")
    s = sampling("a[ab]*", stops=(b,))
    assert b not in ids_of(grammars.matcher(s).allowed)
    assert {a, b} <= ids_of(grammars.matcher(s, [a]).allowed)


def test_forbidden_ids_and_min_tokens_are_left_out_of_the_masks(grammars):
    a, b = WORDS.index("a"), WORDS.index("b")
    s = sampling("[ab]+", forbidden_ids=(a,), min_tokens=2)
    found = [ids_of(grammars.matcher(s, [b] * n).allowed) for n in range(3)]
    assert a not in found[0] | found[1] | found[2]
    assert [END in f for f in found] == [False, False, True]


def test_a_row_without_a_constraint_allows_everything(grammars):
    rows = grammars.rows([None, grammars.matcher(sampling("a"))])
    allowed = allowed_tokens(rows, VOCABULARY)
    assert allowed[0].all()
    assert allowed[1].nonzero().flatten().tolist() == [WORDS.index("a")]


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest_and_a_longer_one_is_cut():
    bits = torch.tensor([[255]], dtype=torch.uint8)
    assert allowed_tokens(bits, 11).tolist() == [[True] * 8 + [False] * 3]
    assert allowed_tokens(bits, 5).tolist() == [[True] * 5]


def test_the_constraint_comes_before_top_k_and_min_p():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    bits = torch.tensor([[0b11100]], dtype=torch.uint8)
    at = torch.tensor([0])
    inside = lambda **fields: (
        process_logits(logits, LogitsProcessors(constrained=True, **fields), position=at, allowed=bits)
        .isfinite()[0]
        .tolist()
    )
    assert inside(top_k=2) == [False, False, True, True, False]
    assert inside(min_p=0.9) == [False, False, True, False, False]
    assert inside(top_p=0.6) == [False, False, True, False, False]
    assert inside(full=True) == [True] * 5
    with pytest.raises(ConfigError, match="allowed"):
        process_logits(logits, LogitsProcessors(constrained=True), position=at)


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.spread(10)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_completion_matches_and_one_cut_short_could_have_gone_on(engine, pattern):
    done = run(engine, requests(PROMPT * 3, sampling(pattern), group=8))
    for o in done.values():
        text = spell(o.tokens)
        if o.finish_reason == "stop":
            assert re.fullmatch(pattern, text) and o.tokens[-1] == END
        else:
            assert o.finish_reason == "length" and len(o.tokens) == 8 and oracle(pattern, text)
    assert "stop" in {o.finish_reason for o in done.values()}


def test_without_stop_ids_a_completion_ends_where_nothing_may_follow(engine):
    done = run(engine, requests(PROMPT, sampling("[ab]{2,4}", stops=()), group=20))
    assert {o.finish_reason for o in done.values()} == {"stop"}
    assert {len(spell(o.tokens)) for o in done.values()} == {4}


def test_max_tokens_inside_the_language_is_length_and_at_its_end_stop(engine):
    long = run(engine, requests(PROMPT, sampling("[ab]{30}", max_tokens=3), group=4))
    assert {(len(o.tokens), o.finish_reason) for o in long.values()} == {(3, "length")}
    three = {"forbidden_ids": tuple(i for i, w in enumerate(WORDS) if len(w) > 1), "max_tokens": 3}
    ends = {s: run(engine, requests(PROMPT, sampling("[ab]{3}", s, **three))) for s in [(), (END,)]}
    assert [o.finish_reason for done in ends.values() for o in done.values()] == ["stop", "length"]  # END was due


def test_a_language_that_ends_before_min_tokens_ends_the_completion(engine):
    (o,) = run(engine, requests(PROMPT, sampling("a", min_tokens=3))).values()
    assert (o.tokens.tolist(), o.finish_reason) == ([0], "stop")


def test_a_completion_that_no_token_can_go_on_from_ends_as_error(engine, caplog):
    fields = {"forbidden_ids": tuple(i for i, w in enumerate(WORDS) if "b" in w)}
    (o,) = run(engine, requests(PROMPT, sampling("a0b", **fields))).values()
    assert (spell(o.tokens), o.finish_reason) == ("a0", "error")
    assert "no allowed next token after 2 tokens" in caplog.text


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 2, "temperature": 1.3}, {"top_p": 0.7}]
)
@pytest.mark.parametrize("processors", ["processed", "full"])
def test_logprobs_are_renormalised_over_what_brute_force_allows(engine, fields, processors):
    pattern = "(a|ab)(0|b0)"
    s = sampling(pattern, return_logits=True, logprobs_mode=processors, **fields)
    for o in run(engine, requests(PROMPT, s, group=12)).values():
        for t, (token, got) in enumerate(zip(o.tokens, o.logprobs)):
            z = torch.from_numpy(o.logits[t]).double() / (s.temperature or 1.0)
            if processors == "processed":
                inside = torch.tensor([i in oracle(pattern, spell(o.tokens[:t])) for i in range(VOCABULARY)])
                z = z.masked_fill(~inside, -torch.inf)
                if s.top_k:
                    z = z.masked_fill(z < z.topk(min(2, int(inside.sum()))).values[-1], -torch.inf)
                if s.top_p < 1:
                    order = z.argsort(descending=True)
                    before = z.softmax(0)[order].cumsum(0) - z.softmax(0)[order]
                    z[order[before >= s.top_p]] = -torch.inf
                if s.temperature == 0:
                    assert int(token) == int(z.argmax())
            assert got == pytest.approx(float(z.log_softmax(0)[token]), abs=1e-5)


def test_draws_follow_the_renormalised_distribution(engine):
    s = sampling("[ab0]{2,4}", max_tokens=1, temperature=2.0, return_logits=True)
    done = run(engine, requests(PROMPT, s, group=2000))
    z = torch.from_numpy(done[0].logits[0]).double() / 2.0
    inside = sorted(oracle("[ab0]{2,4}", ""))
    p = z[inside].softmax(0).numpy()
    counts = np.array([sum(int(o.tokens[0]) == i for o in done.values()) for i in inside])
    assert counts.sum() == 2000
    expected = 2000 * p
    big = expected > 5
    statistic = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert big.sum() >= 4
    assert statistic < big.sum() + 4 * math.sqrt(2 * big.sum())


def test_a_crowd_of_languages_draws_what_each_draws_alone(engine):
    kinds = [Sampling(max_tokens=8, stop_ids=(END,)), *(sampling(p, temperature=1.5) for p in PATTERNS[:4])]
    (p,) = PROMPT
    work = [Request(id=i, tokens=p, sampling=kinds[i % 5], group=0, rng_key=(0, 0, 0, i)) for i in range(25)]
    crowd = run(engine, work)
    for r in work[:10]:
        alone = run(engine, [r])[r.id]
        assert alone.tokens.tolist() == crowd[r.id].tokens.tolist()
        np.testing.assert_allclose(alone.logprobs, crowd[r.id].logprobs, atol=1e-5)


def test_both_engines_draw_the_same(model, grammars):
    work = requests(PROMPT * 2, sampling("(ab|ba|0)+", temperature=1.2, top_k=3, repetition_penalty=1.3), group=6)
    a, b = (run(kind(model, grammars=grammars), work) for kind in (HFEngine, EmbeddedEngine))
    assert all(a[i].tokens.tolist() == b[i].tokens.tolist() for i in a)


def test_going_on_with_an_offset_equals_going_through(engine):
    (whole,) = run(engine, requests(PROMPT, sampling("[ab0]{20}", max_tokens=10))).values()
    for cut in (1, 4):
        rest = Request(
            id=9,
            tokens=np.concatenate([PROMPT[0], whole.tokens[:cut]]),
            sampling=sampling("[ab0]{20}", max_tokens=10 - cut),
            group=0,
            rng_key=(0, 0, 0, 0),
            offset=cut,
        )
        assert run(engine, [rest])[9].tokens.tolist() == whole.tokens[cut:].tolist()


@pytest.mark.parametrize("interrupt", ["update", "sleep"])
def test_rows_under_way_keep_their_place_in_the_language_through(model, grammars, interrupt):
    work = requests(PROMPT, sampling("[ab0]{9,12}", max_tokens=14), group=6)
    engine = EmbeddedEngine(model, grammars=grammars)
    want = run(engine, work)
    engine.submit(work)
    for _ in range(3):
        assert engine.step(timeout_s=0.0) == []
    if interrupt == "update":
        engine.update_weights(3)
    else:
        engine.sleep()
        engine.wake_up()
    got = drain(engine)
    assert {i: o.tokens.tolist() for i, o in got.items()} == {i: o.tokens.tolist() for i, o in want.items()}


def test_an_aborted_completion_goes_on_where_it_was(model, grammars):
    (r,) = requests(PROMPT, sampling("[ab0]{9,12}", max_tokens=14))
    engine = EmbeddedEngine(model, grammars=grammars)
    want = run(engine, [r])[0].tokens.tolist()
    engine.submit([r])
    for _ in range(3):
        engine.step(timeout_s=0.0)
    (o,) = engine.abort([0])
    assert 0 < len(o.tokens) < len(want)
    rest = replace(
        r,
        tokens=np.concatenate([r.tokens, o.tokens]),
        sampling=replace(r.sampling, max_tokens=14 - len(o.tokens)),
        offset=len(o.tokens),
    )
    assert [*o.tokens.tolist(), *run(engine, [rest])[0].tokens.tolist()] == want


def test_all_constrained_rows_of_a_step_are_looked_up_at_once(engine, grammars, monkeypatch):
    looks, refresh = [], grammars.refresh
    monkeypatch.setattr(grammars, "refresh", lambda matchers: (looks.append(len(matchers)), refresh(matchers)))
    run(engine, requests([PROMPT[0]] * 3, sampling("[ab0]{50}", max_tokens=3)))
    assert looks == [3, 3, 3]


def test_unconstrained_batches_still_take_several_steps_at_once(model, grammars, monkeypatch):
    engine = EmbeddedEngine(model, grammars=grammars)
    steps, plain = [], engine._runner.decode
    monkeypatch.setattr(engine._runner, "decode", lambda n, *rest: steps.append(n) or plain(n, *rest))
    run(engine, requests(PROMPT, Sampling(max_tokens=9)))
    assert max(steps) == 4
    steps.clear()
    run(engine, requests(PROMPT, sampling("[ab]{9}")))
    assert set(steps) == {1}


# ---- schemas and grammars ------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["a", "b"]}, "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["x", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_every_finished_completion_obeys_its_schema(engine):
    s = Sampling(
        constraint=Constraint(kind="json_schema", text=json.dumps(SCHEMA)), stop_ids=(END,), max_tokens=40, top_p=0.9
    )
    done = run(engine, requests(PROMPT, s, group=8))
    finished = [o for o in done.values() if o.finish_reason == "stop"]
    assert len(finished) > 2
    for o in finished:
        value = json.loads(spell(o.tokens))
        assert list(value) == ["x", "n"] and value["x"] in ("a", "b")
        assert len(value["n"]) <= 2 and all(type(n) is int for n in value["n"])


def test_a_grammar_counts_its_brackets(engine):
    s = Sampling(
        constraint=Constraint(kind="grammar", text='start: "x" | "[" start "]"'), stop_ids=(END,), max_tokens=30
    )
    for o in run(engine, requests(PROMPT, s, group=8)).values():
        if o.finish_reason == "stop":
            depth = spell(o.tokens).index("x")
            assert spell(o.tokens) == "[" * depth + "x" + "]" * depth


# ---- the trainer's side --------------------------------------------------------------------------------------------


def test_replay_gives_the_masks_that_the_sampler_saw(grammars):
    s = sampling("(ab)+0?")
    ab, zero = WORDS.index("ab"), WORDS.index("0")
    tokens = np.array([ab, zero, END, 7, ab, END, ab])
    sequence = np.array([0, 0, 0, 0, 0, 0, 1])
    sampled = np.array([True, True, True, False, True, True, True])  # an environment's token between two turns
    masks = grammars.replay(s, tokens, sequence, sampled).numpy()
    texts = ["", "ab", "ab0", None, "", "ab", ""]
    for mask, text in zip(masks, texts, strict=True):
        assert ids_of(mask) >= set(range(VOCABULARY)) if text is None else ids_of(mask) == oracle("(ab)+0?", text)
    assert grammars.replay(s, tokens[:0], sequence[:0], sampled[:0]).shape == (0, masks.shape[1])


@pytest.mark.parametrize("tokens", [[1], [3, 2, 0], [3, END, 3]])
def test_replay_refuses_what_was_not_drawn_under_the_constraint(grammars, tokens):
    everywhere = np.ones(len(tokens), bool)
    with pytest.raises(DataError, match=r"completion token .* rollout\.logprobs_mode='full'"):
        grammars.replay(sampling("(ab)+0?"), np.array(tokens), np.zeros(len(tokens), int), everywhere)


def completions(seed=0, count=12):
    """(tokens, sequence, sampled) of random texts of a language, some of them equal, some cut short."""
    rng, words = np.random.RandomState(seed), {w: i for i, w in enumerate(WORDS)}
    texts = [["ab"] * rng.randint(1, 4) + ["0"] * rng.randint(2) for _ in range(count)]
    rows = [[*(words[w] for w in text), *([END] * rng.randint(2))] for text in texts]
    tokens, sequence = np.concatenate(rows), np.repeat(np.arange(count), [len(r) for r in rows])
    return tokens, sequence, np.ones(len(tokens), bool)


@pytest.mark.parametrize("most", [0, 100, 2**20])
def test_kept_masks_are_those_of_a_replay_in_any_order_of_any_passes_and_with_any_room(grammars, most):
    s, masks = sampling("(ab)+0?"), Masks(grammars, max_bytes=most)
    tokens, sequence, sampled = completions()
    sampled[5] = False
    for seed in range(6):
        rng = np.random.RandomState(seed)
        picked = rng.permutation(12)[: rng.randint(1, 12)]
        at = np.concatenate([np.flatnonzero(sequence == i) for i in picked])
        part = tokens[at], sequence[at], sampled[at]
        assert torch.equal(masks.replay(s, *part), grammars.replay(s, *part))
    assert masks.bytes <= most and (masks.bytes > 0) == (most > 0)
    assert masks.replay(s, tokens[:0], sequence[:0], sampled[:0]).shape == (0, grammars.replay(s, *part).shape[1])


def test_masks_of_a_batch_are_made_once_until_they_are_dropped(grammars, monkeypatch):
    made, replay = [], Grammars.replay
    monkeypatch.setattr(Grammars, "replay", lambda g, s, t, *rest: made.append(len(t)) or replay(g, s, t, *rest))
    s, masks, batch = sampling("(ab)+0?"), Masks(grammars), completions()
    distinct = {tuple(batch[0][batch[1] == i]) for i in range(12)}
    for _ in range(3):
        masks.replay(s, *batch)
    assert sum(made) == sum(map(len, distinct)) < len(batch[0])
    assert masks.bytes < len(batch[0]) * 4  # equal masks are held once
    masks.replay(sampling("(ab)+0*"), *batch)
    assert sum(made) == 2 * sum(map(len, distinct))
    masks.drop()
    masks.replay(s, *batch)
    assert sum(made) == 3 * sum(map(len, distinct)) and masks.bytes > 0


def test_the_masks_of_a_micro_batch_read_nothing_from_the_device(grammars, monkeypatch):
    batch, masks = random_batch((3, [4, 2]), (2, [5]), masked=True), Masks(grammars)
    (micro,) = plan_micro_batches(batch, max_tokens=100)
    monkeypatch.setattr(masks, "replay", lambda *given: given)
    s = sampling("(ab)+0?")
    _, tokens, sequence, sampled = masks.of_targets(s, micro.to("meta"))  # a number of this device can't be read
    assert tokens.tolist() == batch.tokens[micro.token_index].tolist() and sequence.tolist() == micro.sequence.tolist()
    assert sampled.tolist() == batch.mask[micro.token_index].tolist() and not sampled.all()


def test_kept_masks_refuse_what_was_not_drawn_under_the_constraint_each_time(grammars):
    masks = Masks(grammars)
    for _ in range(2):
        with pytest.raises(DataError, match=r"completion token 1 .* rollout\.logprobs_mode='full'"):
            masks.replay(sampling("(ab)+0?"), np.array([3, 1]), np.zeros(2, int), np.ones(2, bool))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "[ab", r"constraint regex '\[ab' is refused: .*unclosed character class.*whet docs constraints"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "z+", "no allowed first token"),
        ("json_schema", '{"type": ', "is not JSON"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("regexp", "a", "did you mean regex"),
    ],
)
def test_a_malformed_constraint_is_refused_before_anything_is_queued(engine, kind, text, message):
    good = requests(PROMPT, sampling("a"))
    with pytest.raises(ConfigError, match=message):
        bad = requests(PROMPT, Sampling(constraint=Constraint(kind=kind, text=text)))
        engine.submit([*good, replace(bad[0], id=1)])
    assert engine.step() == []


def test_an_engine_without_grammars_refuses_a_constraint(model):
    for made in (HFEngine(model), EmbeddedEngine(model), MockEngine(vocabulary=64)):
        with pytest.raises(ConfigError, match=r"constraint regex 'a'.*pass grammars="):
            made.submit(requests(PROMPT, sampling("a")))
        assert made.step() == []


def test_transformers_own_options_and_a_constraint_are_refused_together(model, grammars):
    both = sampling("a", generation_kwargs=(("no_repeat_ngram_size", 2),))
    with pytest.raises(ConfigError, match=r"no_repeat_ngram_size=2: they do not go together with a constraint"):
        HFEngine(model, grammars=grammars).submit(requests(PROMPT, both))


@pytest.mark.parametrize(("tail", "message"), [([1], "completion token 0 is 1"), ([0], "nothing may follow")])
def test_going_on_from_outside_the_language_or_from_its_end_is_refused(engine, tail, message):
    r = replace(requests(PROMPT, sampling("a", ()))[0], tokens=np.array([5, *tail], np.int32), offset=1)
    with pytest.raises(EngineError, match=f"request 0: .*{message}"):
        engine.submit([r])
    assert engine.step() == []


def test_a_tokenizer_that_can_not_spell_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), eos_token="e")
    for t, message in [
        (None, "needs the tokenizer"),
        (bare, "byte-level or byte-fallback"),
        (tokenizer(["a", "b"], clean_up_tokenization_spaces=False), "has no special token"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Grammars(t, vocabulary=64).check(sampling("a", ()))


def test_a_missing_library_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(WhetError, match=r"pip install .*\[grammar\]'"):
        Grammars(tokenizer(), vocabulary=64).check(sampling("a"))
    Grammars(tokenizer(), vocabulary=64).check(Sampling())  # without a constraint nothing is imported
