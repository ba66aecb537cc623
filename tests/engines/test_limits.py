"""Limits that nothing reaches: they take no memory, and what grows on demand changes no token."""

import pytest
from tiny import FORMS, VOCABULARY, build, prompts, requests, run

from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine, runner
from whet.rollout.hf import HFEngine

HUGE = 10**12
STOPS = tuple(range(0, VOCABULARY, 3))


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0, max_position_embeddings=2 * HUGE)


@pytest.mark.parametrize(
    ("kind", "size"), [(EmbeddedEngine, "max_batch"), (HFEngine, "batch_size")], ids=["embedded", "hf"]
)
def test_room_is_made_for_what_is_there_and_not_for_what_may_come(model, kind, size):
    sampling = Sampling(max_tokens=40, stop_ids=STOPS, repetition_penalty=1.3)
    want = run(kind(model, **{size: 16}), requests(prompts((3, 9)), sampling, group=3))
    assert all(o.finish_reason == "stop" for o in want.values())
    sampling = Sampling(max_tokens=HUGE, stop_ids=STOPS, repetition_penalty=1.3)
    got = run(kind(model, **{size: HUGE}), requests(prompts((3, 9)), sampling, group=3))
    assert {i: o.tokens.tolist() for i, o in got.items()} == {i: o.tokens.tolist() for i, o in want.items()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_that_come_while_others_run_find_room_and_change_no_token(model, form, monkeypatch):
    work = requests(prompts((3, 70, 9, 1)), Sampling(max_tokens=24, repetition_penalty=1.3), group=3)
    want = run(EmbeddedEngine(model, **form), work)
    monkeypatch.setattr(runner, "INITIAL_ROWS", 2)
    engine = EmbeddedEngine(model, **form, max_batch=64)
    done = {}
    for first in range(0, len(work), 3):
        engine.submit(work[first : first + 3])
        done |= {o.id: o for o in engine.step(timeout_s=0.0)}
    assert engine._runner.state.shape[1] == 16 and engine.stats().live == len(work)
    done |= run(engine, [])
    assert {i: o.tokens.tolist() for i, o in done.items()} == {i: o.tokens.tolist() for i, o in want.items()}
