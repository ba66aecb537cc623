"""Turns of an episode: a later one draws numbers of its own, and what stands between two turns is no completion."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import completion, prompt
from test_constraint import spell, tokenizer
from tiny import VOCABULARY, build, letters, prompts, requests, run

from whet.models.load import load_model
from whet.rollout.base import Constraint, Request, Sampling, sampling_processors
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.hf import HFEngine
from whet.train.worker import ModelWorker
from whet.types import Group, TokenBatch

FORMS = {"embedded": {}, "module": {"fast": False}, "torch": {"native": False}, "hf": None}


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


@pytest.fixture(params=FORMS)
def make(request, model):
    """Builds the engine; of keywords, hf takes those that it knows."""
    options = FORMS[request.param]
    return lambda **given: HFEngine(model, **given) if options is None else EmbeddedEngine(model, **options, **given)


def context(request, *tokens):
    return replace(request, tokens=np.concatenate([request.tokens, *tokens]).astype(np.int32))


def test_token_t_of_a_turn_uses_the_number_at_its_draw_plus_t(make):
    engine = make()
    work = requests(prompts(), Sampling(max_tokens=12), group=2)
    whole = run(engine, work)
    # the same context and the same numbers, once as the rest of a completion and once as a turn that begins there
    turns = [context(replace(r, draw=5, sampling=Sampling(max_tokens=7)), whole[r.id].tokens[:5]) for r in work]
    assert {i: o.tokens.tolist() for i, o in run(engine, turns).items()} == {
        i: o.tokens[5:].tolist() for i, o in whole.items()
    }
    # a turn that goes on keeps its draw
    rest = [
        context(replace(r, draw=5, offset=3, sampling=Sampling(max_tokens=4)), whole[r.id].tokens[:8]) for r in work
    ]
    assert {i: o.tokens.tolist() for i, o in run(engine, rest).items()} == {
        i: o.tokens[8:].tolist() for i, o in whole.items()
    }


def test_with_offset_0_and_draw_0_a_later_turn_repeats_the_first_ones_numbers(make):
    engine = make()
    flat = Sampling(max_tokens=8, temperature=1000.0)  # the token is the number, nearly
    (first,) = requests(prompts((9,)), flat)
    said = run(engine, [first])[0].tokens
    second = context(first, said, np.array([7, 8]))
    near = lambda a, b: np.abs(a.astype(int) - b.astype(int)).max() <= 2
    assert near(run(engine, [second])[0].tokens, said)
    assert not near(run(engine, [replace(second, draw=len(said))])[0].tokens, said)


def test_min_tokens_are_those_of_the_turn(make):
    engine = make()
    sampling = Sampling(max_tokens=6, min_tokens=4, stop_ids=tuple(range(1, VOCABULARY)))  # only 0 does not end it
    (turn,) = requests(prompts((9,)), sampling)
    turn = replace(turn, draw=5)
    assert run(engine, [turn])[0].tokens[:4].tolist() == [0, 0, 0, 0]
    assert run(engine, [replace(turn, offset=4)])[0].tokens[0] != 0


def test_the_trainer_counts_min_tokens_as_the_sampler_does(make, model):
    engine = make()
    sampling = Sampling(max_tokens=6, min_tokens=4, stop_ids=tuple(range(0, VOCABULARY, 3)))
    groups = []
    for first in requests(prompts((9, 5, 7)), sampling):
        said = run(engine, [first])[first.id]
        answer = np.array([7, 8, 3], np.int32)
        second = replace(context(first, said.tokens, answer), draw=len(said.tokens))
        again = run(engine, [second])[second.id]
        tokens = np.concatenate([said.tokens, answer, again.tokens])
        logprobs = np.concatenate([said.logprobs, np.zeros(3, np.float32), again.logprobs])
        versions = np.array([0] * len(said.tokens) + [-1] * 3 + [0] * len(again.tokens), np.int32)
        made = replace(completion(tokens.tolist()), logprobs=logprobs, versions=versions)
        groups.append(Group(prompt=prompt(first.tokens.tolist(), first.id), completions=(made,)))
    batch = TokenBatch.from_groups(groups)
    got = ModelWorker(load_model(model), processors=sampling_processors(sampling)).logprobs(batch).logprobs
    sampled = batch.versions >= 0
    torch.testing.assert_close(got[sampled], batch.sampler_logprobs[sampled], atol=1e-5, rtol=1e-5)


def test_a_stop_string_does_not_begin_in_what_stands_before_the_turn(make):
    engine = make(decode=letters)
    (turn,) = requests(prompts((9,)), Sampling(max_tokens=4, temperature=0.0))
    turn = replace(turn, draw=3)
    said = run(engine, [turn])[0].tokens
    stop = (letters([*turn.tokens[-2:], said[0]]),)
    stopping = replace(turn, sampling=replace(turn.sampling, stop=stop))
    assert run(engine, [stopping])[0].tokens.tolist() == said.tolist()
    assert run(engine, [replace(stopping, offset=2)])[0].tokens.tolist() == said[:1].tolist()


def test_a_constraint_holds_of_each_turn_alone(make):
    engine = make(decode=spell, grammars=Grammars(tokenizer(), vocabulary=VOCABULARY))
    constraint = Constraint(kind="regex", text="[ab]{6}")
    sampling = Sampling(constraint=constraint, max_tokens=8)
    first = Request(id=0, tokens=np.array([3, 4, 5], np.int32), sampling=sampling, group=0, rng_key=(0, 0, 0, 0))
    said = run(engine, [first])[0].tokens
    second = replace(context(first, said, np.array([7, 8, 9])), draw=len(said))  # which no such text holds
    again = run(engine, [second])[0].tokens
    for tokens in (said, again):
        assert len(spell(tokens)) == 6 and set(spell(tokens)) <= {*"ab"}
