"""What engines and the Sampler refuse to take, each in words: arrays, keys, ids, and requests after the end."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import prompts, requests

from whet import Sampler
from whet.errors import ConfigError, EngineError
from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.generate_options import freeze_options
from whet.rollout.hf import HFEngine
from whet.rollout.mock import MockEngine

KINDS = [EmbeddedEngine, HFEngine, MockEngine]


@pytest.fixture(params=KINDS, ids=lambda k: k.__name__)
def engine(request, model):
    return request.param(model)


def one(**changes):
    return replace(requests(prompts((3,)), Sampling(max_tokens=2))[0], **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": np.array([1.0, 2.0])}, r"an array of integer ids \[P\], got float64 \[2\]"),
        ({"tokens": np.array([[1, 2]])}, r"an array of integer ids \[P\], got int64 \[1, 2\]"),
        ({"tokens": [1, 2]}, r"an array of integer ids \[P\], got list"),
        ({"tokens": np.array([], np.int32)}, "an empty prompt"),
        ({"rng_key": (0, 0, 0)}, r"four integers, \(seed, step, prompt, generation\), got \(0, 0, 0\)"),
        ({"rng_key": (0, 0, 0, 0.5)}, r"four integers, .* got \(0, 0, 0, 0\.5\)"),
    ],
)
def test_a_request_of_another_form_is_refused_and_none_is_queued(engine, changes, said):
    with pytest.raises(EngineError, match=f"request .*{said}"):
        engine.submit([one(id=1), one(id=2, **changes)])
    assert engine.stats().in_flight == 0


def test_a_request_that_leaves_no_token_is_refused(model):
    size = model.get_input_embeddings().weight.shape[0]
    for engine in (EmbeddedEngine(model), HFEngine(model)):
        with pytest.raises(EngineError, match=f"all {size} ids are forbidden; leave one to draw"):
            engine.submit([one(sampling=Sampling(forbidden_ids=tuple(range(size))))])
        but_one, stop = tuple(range(1, size)), (0,)
        with pytest.raises(EngineError, match=f"all {size} ids are forbidden, stop ids until token 2; leave one"):
            engine.submit([one(sampling=Sampling(forbidden_ids=but_one, stop_ids=stop, min_tokens=2))])
        engine.submit([one(sampling=Sampling(forbidden_ids=but_one, stop_ids=stop))])
        assert engine.step()[0].tokens.tolist() == [0]
    with pytest.raises(EngineError, match=r"all .* ids are forbidden"):
        Sampler(model, "byte")("a", 4, temperature=1.0, forbidden_tokens=range(size))


def test_a_closed_engine_takes_no_request(engine):
    engine.close()
    with pytest.raises(EngineError, match=r"closed( engine)?; make another"):
        engine.submit([one()])


def test_a_closed_sampler_draws_nothing(model):
    with Sampler(model, "byte") as sampler:
        assert sampler("a", 2).text
    with pytest.raises(EngineError, match="this Sampler is closed; make another"):
        sampler("a", 2)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("bad_words_ids", [[9999]], "token 9999 is outside the vocabulary"),
        ("bad_words_ids", [[-1]], "must not be negative, got -1"),
        ("bad_words_ids", 5, "expected a list, .a, b., got 5"),
        ("bad_words_ids", [], "at least 1 item"),
        ("bad_words_ids", [[]], "at least 1 item"),
        ("bad_words_ids", [["a"]], "expected an integer, got 'a'"),
        ("begin_suppress_tokens", [9999], "token 9999 is outside the vocabulary"),
        ("begin_suppress_tokens", 5, "expected a list, .a, b., got 5"),
        ("sequence_bias", [[[5, 9999], 2.0]], "token 9999 is outside the vocabulary"),
        ("sequence_bias", {5: 2.0}, "expected a list, .a, b., got 5"),
        ("sequence_bias", [[[5], 2]], "an instance of float, got 2"),
        ("sequence_bias", [], "at least 1 item"),
        ("forced_eos_token_id", 9999, "token 9999 is outside the vocabulary"),
        ("forced_eos_token_id", "a", r"expected int \| TokenIds \| None, got 'a'"),
        ("forced_eos_token_id", [], "at least 1 item|expected"),
        ("exponential_decay_length_penalty", [1], "expected 2 values, got 1"),
        ("no_repeat_ngram_size", "a", "must be a positive integer"),
        ("no_repeat_ngram_size", 0, "must be a positive integer"),
        ("typical_p", "a", "expected a number, got 'a'"),
        ("eta_cutoff", 2, "less than 1, got 2"),
        ("epsilon_cutoff", 0.0, "greater than 0, got 0.0"),
        ("top_h", True, "expected a number, got True"),
        ("top_h", 1.5, "less than or equal to 1, got 1.5"),
    ],
)
def test_a_value_of_an_option_that_fits_no_model_is_refused_before_it_runs(model, name, value, said, beams):
    engine, options = HFEngine(model), {name: value, **({"num_beams": beams} if beams > 1 else {})}
    sampling = Sampling(max_tokens=2, temperature=0.0, stop_ids=(2,), generation_kwargs=freeze_options(options))
    with pytest.raises(ConfigError, match=rf"generation_kwargs: {name}.*{said}"):
        engine.submit([one(sampling=sampling)])


@pytest.mark.parametrize(("name", "value"), [("length_penalty", "a"), ("early_stopping", "a")])
def test_a_value_that_ranks_beams_is_checked_too(model, name, value):
    options = freeze_options({"num_beams": 2, name: value})
    with pytest.raises(ConfigError, match=f"generation_kwargs: {name}: expected .*, got 'a'"):
        HFEngine(model).submit([one(sampling=Sampling(temperature=0.0, generation_kwargs=options))])
