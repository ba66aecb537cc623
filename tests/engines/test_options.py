"""Options of transformers' generate in the hf engine, against transformers' own generate."""

import logging

import numpy as np
import pytest
import torch
import transformers
from tiny import build, letters, prompts, requests, run
from transformers import GenerationConfig

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.load import load_model
from whet.rollout.base import Request, Sampling
from whet.rollout.build import make_engine, make_sampling
from whet.rollout.driver import RolloutDriver, single_turns
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.generate_options import (
    _stop_string_criterion,
    check_trainable,
    freeze_options,
    logits_processors,
    validate_options,
)
from whet.rollout.hf import HFEngine
from whet.types import Prompt

STOPS = (4, 8, 12)
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
CHANGING = [
    {"sequence_bias": {(5,): 3.0, (7, 9): -4.0, (11,): -2.0}},
    {"sequence_bias": [[[5], 3.0], [[7, 9], -4.0]]},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 9], [30, 31]]},
    {"begin_suppress_tokens": [3, 9, 21]},
    {"exponential_decay_length_penalty": [2, 1.8]},
    {"forced_eos_token_id": 8},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.05},
    {"top_h": 0.4},
    {"no_repeat_ngram_size": 2, "sequence_bias": {(5,): 2.0}, "typical_p": 0.8},
]


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


def sampling(options, **fields):
    return Sampling(**{"max_tokens": 10, "stop_ids": STOPS, "generation_kwargs": freeze_options(options), **fields})


def theirs(model, prompt, options, **fields):
    """transformers' generate on one prompt, with everything set that it would otherwise take from the model."""
    base = {"max_new_tokens": 10, "eos_token_id": list(STOPS), "pad_token_id": 0, "top_k": 0, "do_sample": False}
    config = GenerationConfig(**{**base, "return_dict_in_generate": True, "output_scores": True, **options, **fields})
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def request(tokens, s, *, generation=0, **fields):
    return Request(id=generation, tokens=tokens, sampling=s, group=0, rng_key=(0, 0, 0, generation), **fields)


@pytest.mark.parametrize("options", [o for o in CHANGING if o.keys() - {"top_h", "typical_p"}], ids=str)
def test_greedy_completions_are_those_of_transformers(model, options):
    engine = HFEngine(model)
    changed = 0
    for i, p in enumerate(prompts((3, 9, 20))):
        (mine,) = run(engine, [request(p, sampling(options, temperature=0.0))]).values()
        (plain,) = run(engine, [request(p, sampling({}, temperature=0.0))]).values()
        assert mine.tokens.tolist() == theirs(model, p, options).sequences[0, len(p) :].tolist(), i
        changed += mine.tokens.tolist() != plain.tokens.tolist()
    if options.keys() & {"no_repeat_ngram_size", "sequence_bias", "exponential_decay_length_penalty"}:
        assert changed  # else the comparison would show nothing


@pytest.mark.spread(12)
@pytest.mark.parametrize("options", CHANGING, ids=str)
@pytest.mark.parametrize("own", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_the_distribution_drawn_from_is_that_of_transformers(model, options, own):
    (p,) = prompts((9,))
    out = theirs(model, p, options, **{"do_sample": True, **own})
    made = logits_processors(model, out.sequences[:, : len(p)], request(p, sampling(options, **own)))
    for step, expected in enumerate(out.scores):
        ids = out.sequences[:, : len(p) + step]
        logits = model(input_ids=ids).logits[:, -1]
        scores = made(ids, logits)
        assert torch.equal(scores == -torch.inf, expected == -torch.inf)
        assert (scores.softmax(-1) - expected.softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("options", CHANGING[:4], ids=str)
def test_logprobs_are_of_the_distribution_drawn_from_or_of_the_full_one(model, options):
    (p,) = prompts((9,))
    mine = sampling(options, temperature=0.8)
    done = run(HFEngine(model), requests([p], mine, group=6))
    full = run(HFEngine(model), requests([p], sampling(options, temperature=0.8, logprobs_mode="full"), group=6))
    for i, o in done.items():
        assert o.tokens.tolist() == full[i].tokens.tolist()
        whole = torch.tensor([*p.tolist(), *o.tokens.tolist()])[None]
        logits = model(input_ids=whole).logits[0, len(p) - 1 : -1]
        plain = (logits / 0.8).log_softmax(-1).gather(1, whole[0, len(p) :, None]).squeeze(1)
        assert np.abs(full[i].logprobs - plain.detach().numpy()).max() < 1e-4
        for t, token in enumerate(o.tokens):
            ids = whole[:, : len(p) + t]
            scores = logits_processors(model, ids[:, : len(p)], request(p, mine))(ids, logits[t : t + 1])
            assert abs(scores.log_softmax(-1)[0, token].item() - o.logprobs[t]) < 1e-4


@pytest.mark.parametrize(
    "own",
    [
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.6, "logprobs_mode": "full"},
        {"min_p": 0.2},
        {"repetition_penalty": 3.0},
        {"repetition_penalty": 3.0, "temperature": 0.0},
        {"forbidden_ids": tuple(range(1, 40))},
        {"stop_ids": tuple(range(32)), "min_tokens": 6},
    ],
    ids=str,
)
def test_fields_of_whets_own_mean_the_same_where_transformers_carries_them_out(model, own):
    nothing = {"no_repeat_ngram_size": 99}
    for offset in (0, 3):
        work = [
            [
                request(p, sampling(options, **own), generation=i, offset=offset)
                for i, p in enumerate(prompts((5, 9, 9)))
            ]
            for options in (nothing, {})
        ]
        theirs, ours = (run(HFEngine(model), requests) for requests in work)
        alone = [run(HFEngine(model), [r])[r.id].tokens.tolist() for r in work[0]]
        assert [o.tokens.tolist() for _, o in sorted(theirs.items())] == alone
        for i, o in ours.items():
            assert theirs[i].tokens.tolist() == o.tokens.tolist()
            assert np.abs(theirs[i].logprobs - o.logprobs).max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"top_h": 1, "typical_p": 0.999, "epsilon_cutoff": 0.999, "eta_cutoff": 1e-9},
        pytest.param(
            {"no_repeat_ngram_size": 1, "exponential_decay_length_penalty": [-1, 2], "forced_eos_token_id": [4, 63]},
            marks=pytest.mark.skipif(OLD, reason="transformers 5.17 makes NaN of −inf in this penalty"),
        ),
        {"sequence_bias": {(0,): float("-inf"), (1, 2, 3): 1.0}, "bad_words_ids": [[0, 63]], "typical_p": None},
        {"num_beams": 2, "length_penalty": -3, "early_stopping": "never"},
    ],
    ids=str,
)
def test_values_at_the_ends_of_their_ranges_are_carried_out(model, options):
    cool = {"temperature": 0.0} if "num_beams" in options else {}
    (o,) = run(HFEngine(model), [request(prompts()[1], sampling(options, **cool))]).values()
    assert len(o.tokens) and np.isfinite(o.logprobs).all()


def test_going_on_with_an_offset_equals_going_through_also_where_options_count_tokens(model):
    (p,) = prompts((9,))
    options = {"begin_suppress_tokens": list(range(1, 40)), "exponential_decay_length_penalty": [3, 1.5]}
    (whole,) = run(HFEngine(model), [request(p, sampling(options))]).values()
    cut = min(4, len(whole.tokens) - 1)
    rest = request(np.concatenate([p, whole.tokens[:cut]]), sampling(options, max_tokens=10 - cut), offset=cut)
    (after,) = run(HFEngine(model), [rest]).values()
    assert after.tokens.tolist() == whole.tokens[cut:].tolist()


def test_a_forced_end_comes_at_the_last_token_also_where_a_completion_goes_on(model):
    (p,) = prompts((9,))
    s = sampling({"forced_eos_token_id": 8}, stop_ids=())
    whole = run(HFEngine(model), [request(p, s)])[0].tokens
    rest = sampling({"forced_eos_token_id": 8}, stop_ids=(), max_tokens=6)
    after = run(HFEngine(model), [request(np.concatenate([p, whole[:4]]), rest, offset=4)])[0].tokens
    assert after.tolist() == whole[4:].tolist()
    assert whole[-1] == 8 and set(whole[:-1].tolist()) != {8}


def test_completions_of_one_length_that_go_on_from_different_places_are_run_apart(model):
    (p,) = prompts((9,))
    s = sampling({"begin_suppress_tokens": list(range(1, 60))}, max_tokens=3, stop_ids=())
    work = [request(p, s, generation=0), request(p, s, generation=1, offset=2)]
    together = run(HFEngine(model), work)
    for r in work:
        assert together[r.id].tokens.tolist() == run(HFEngine(model), [r])[r.id].tokens.tolist()
    assert together[0].tokens[0] in (0, *range(60, 64))


# ---- beam search -----------------------------------------------------------------------------------------------------


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "length_penalty": 2.0},
        {"num_beams": 4, "length_penalty": -1.0},
        {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("stops", [STOPS, ()])
def test_beams_are_those_of_transformers_with_the_models_own_logprobs(model, options, stops):
    s = sampling(options, temperature=0.0, stop_ids=stops)
    work = requests(prompts((3, 9, 9)), s, group=2)
    done = run(HFEngine(model, batch_size=8), work)
    for r in work:
        out = theirs(model, r.tokens, options, num_return_sequences=2, eos_token_id=list(stops) or None)
        expected = out.sequences[r.rng_key[3], len(r.tokens) :].tolist()
        o = done[r.id]
        assert o.tokens.tolist() == expected[: len(o.tokens)] and set(expected[len(o.tokens) :]) <= {0, *stops}
        assert o.finish_reason == ("stop" if o.tokens[-1] in stops else "length")
        whole = torch.tensor([*r.tokens.tolist(), *o.tokens.tolist()])[None]
        logprobs = model(input_ids=whole).logits[0, len(r.tokens) - 1 : -1].log_softmax(-1)
        assert (
            np.abs(logprobs.gather(1, whole[0, len(r.tokens) :, None])[:, 0].detach().numpy() - o.logprobs).max() < 1e-4
        )


def test_the_first_beam_is_at_least_as_likely_as_the_greedy_completion(model):
    better = 0
    for p in prompts((3, 9, 20)):
        greedy = run(HFEngine(model), [request(p, Sampling(max_tokens=8, temperature=0.0))])[0]
        beams = run(
            HFEngine(model), [request(p, sampling({"num_beams": 8}, temperature=0.0, max_tokens=8, stop_ids=()))]
        )
        assert beams[0].logprobs.sum() >= greedy.logprobs.sum() - 1e-4
        better += beams[0].logprobs.sum() > greedy.logprobs.sum() + 1e-3
    assert better


def test_a_models_own_generation_config_changes_no_beam_and_is_given_back(model):
    (p,) = prompts((9,))
    s = sampling({"num_beams": 3}, temperature=0.0)
    before = run(HFEngine(model), [request(p, s)])[0].tokens.tolist()
    own, model.generation_config = model.generation_config, GenerationConfig(no_repeat_ngram_size=1, max_new_tokens=2)
    try:
        assert run(HFEngine(model), [request(p, s)])[0].tokens.tolist() == before
        assert model.generation_config.no_repeat_ngram_size == 1
    finally:
        model.generation_config = own


def test_a_stop_string_ends_a_beam(model):
    (p,) = prompts((9,))
    free = run(HFEngine(model, decode=letters), [request(p, sampling({"num_beams": 3}, temperature=0.0, stop_ids=()))])[
        0
    ]
    stop = letters(free.tokens[2:4])
    s = sampling({"num_beams": 3}, temperature=0.0, stop_ids=(), stop=(stop,))
    for o in run(HFEngine(model, decode=letters), [request(p, s, generation=g) for g in range(3)]).values():
        text = letters(o.tokens)
        assert (stop in text) == (o.finish_reason == "stop") and stop not in text[:-1]


def test_looking_for_a_stop_string_decodes_the_last_tokens_of_a_beam_alone(model):
    decoded, (p,) = [], prompts((9,))

    def decode(ids):
        decoded.append(len(ids))
        return letters(ids)

    s = sampling({"num_beams": 3}, temperature=0.0, max_tokens=80, stop_ids=(), stop=("never",))
    o = run(HFEngine(model, decode=decode), [request(p, s)])[0]
    assert len(o.tokens) == 80 and len(decoded) > 3 * 80
    assert sum(length > 32 for length in decoded) <= 1  # the whole beam that was found, to be cut where it ended


def test_a_beam_that_ended_stays_ended_where_nothing_else_is_left_to_go_on_with():
    look = _stop_string_criterion(letters, ("51",), prompt=1)
    ended = [look(torch.tensor(rows), None).tolist() for rows in ([[9, 5], [9, 1]], [[9, 5, 1], [9, 1, 1]])]
    ended += [look(torch.tensor([[9, 5, 1, 7], [9, 1, 1, 5]]), None).tolist()]
    assert ended == [[False, False], [True, False], [True, False]]


def test_logits_of_a_beam_are_those_of_the_model(model):
    (p,) = prompts((3,))
    s = sampling({"num_beams": 2}, temperature=0.0, return_logits=True)
    o = run(HFEngine(model), [request(p, s)])[0]
    assert o.logits.shape == (len(o.tokens), 64)
    logprobs = torch.from_numpy(o.logits).log_softmax(-1).gather(1, torch.from_numpy(o.tokens).long()[:, None])[:, 0]
    assert np.abs(logprobs.numpy() - o.logprobs).max() < 1e-5


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({"num_beans": 2}, {}, "unknown key num_beans; did you mean num_beams"),
        ({"temperatur": 2}, {}, "unknown key temperatur; did you mean temperature"),
        ({"xyzzy": 2}, {}, "generation_kwargs: unknown key xyzzy"),
        ({"top_k": 2}, {}, "top_k: has a field of its own: set top_k"),
        ({"max_new_tokens": 2}, {}, "set max_tokens_to_generate"),
        ({"use_cache": False}, {}, "use_cache: belongs to the inside"),
        ({"num_beams": 0}, {"temperature": 0.0}, "num_beams must be a positive integer. Got: 0"),
        ({"num_beams": True}, {"temperature": 0.0}, "num_beams must be a positive integer. Got: True"),
        ({"num_beams": 2}, {}, "num_beams=2 searches, it does not draw: set temperature=0.0"),
        ({"num_beams": 2, "typical_p": 0.5}, {"temperature": 0.0}, "typical_p=0.5 truncates draws, not beams"),
        ({"length_penalty": 2.0}, {}, "length_penalty=2.0 ranks beams; give num_beams"),
        ({"typical_p": 3.0}, {}, "typical_p: .* less than 1, got 3.0"),
        ({"no_repeat_ngram_size": "a"}, {}, "no_repeat_ngram_size must be a positive integer. Got: 'a'"),
        ({"bad_words_ids": [5]}, {}, "bad_words_ids.0: expected a list, .a, b., got 5"),
        ({"exponential_decay_length_penalty": [1, 1.1]}, {"stop_ids": ()}, "needs a stop token"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_runs(model, options, fields, words):
    engine = HFEngine(model)
    with pytest.raises(ConfigError, match=words):
        engine.submit([request(prompts()[0], sampling(options, **fields))])
    assert engine.step() == []


def test_beams_answer_no_more_generations_than_there_are_and_no_offset(model):
    s = sampling({"num_beams": 2}, temperature=0.0)
    with pytest.raises(EngineError, match="generation 2, but num_beams=2"):
        HFEngine(model).submit([request(prompts()[1], s, generation=2)])
    with pytest.raises(EngineError, match=r"after 1 tokens, .*of a bare prompt"):
        HFEngine(model).submit([request(prompts()[1], s, offset=1)])


def test_options_that_leave_no_token_say_so(model):
    s = sampling({"bad_words_ids": [[i] for i in range(64)]}, stop_ids=())
    with pytest.raises(EngineError, match="leave no token"):
        run(HFEngine(model), [request(prompts()[0], s)])


def test_another_engine_refuses_options(model):
    with pytest.raises(EngineError, match="EmbeddedEngine does not support num_beams; use rollout_engine 'hf'"):
        asked = sampling({"num_beams": 2}, temperature=0.0)
        RolloutDriver(EmbeddedEngine(model)).run(single_turns([Prompt(tokens=prompts()[0], source="")], asked))


def test_options_make_embedded_hf_and_say_why(model, caplog):
    config = RolloutConfig(generation_kwargs={"no_repeat_ngram_size": 2})
    with caplog.at_level(logging.WARNING, "whet"):
        made = make_engine(
            "embedded",
            load_model(model),
            config=config,
            decode=letters,
            tokenizer=None,
            generation_kwargs=config.generation_kwargs,
        )
    assert isinstance(made, HFEngine) and "generation_kwargs (no_repeat_ngram_size)" in caplog.text
    with pytest.raises(ConfigError, match="did you mean num_beams"):
        make_engine(
            "hf", load_model(model), config=config, decode=letters, tokenizer=None, generation_kwargs=["num_bemas"]
        )


def test_the_configuration_names_the_field_that_stands_for_an_option():
    with pytest.raises(ConfigError, match="generation_kwargs: do_sample has a field of its own: set temperature"):
        RolloutConfig(generation_kwargs={"do_sample": True})
    validate_options(dict.fromkeys(["num_beams", "sequence_bias"]))


def test_training_takes_options_under_full_support_alone_and_never_beams():
    with pytest.raises(ConfigError, match="num_beams=4 searches"):
        check_trainable(sampling({"num_beams": 4}, temperature=0.0, logprobs_mode="full"))
    with pytest.raises(ConfigError, match="no_repeat_ngram_size: the trainer does not know"):
        check_trainable(sampling({"no_repeat_ngram_size": 2}))
    check_trainable(sampling({"no_repeat_ngram_size": 2}, logprobs_mode="full"))
    check_trainable(make_sampling(RolloutConfig(), (1,)))
