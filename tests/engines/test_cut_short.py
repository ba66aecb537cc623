"""A step that is cut short (Ctrl-C, no memory) loses no request and leaves nothing behind."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import tiny_model
from whet import Sampler
from whet.errors import EngineError
from whet.rollout import resolve_engine
from whet.rollout.base import Request, Sampling
from whet.rollout.engine import EmbeddedEngine

PROMPTS = ["2+2=", "a prompt that is long enough for a row of sixty-four", "7*3="]


@pytest.mark.spread(5)
@pytest.mark.parametrize("bound", [None, 200])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 8])
def test_a_call_after_ctrl_c_is_as_if_nothing_had_happened(bound, at):
    sampler = Sampler(tiny_model(gain=1.0), "byte", max_batch_size=4, kv_cache_tokens=bound)
    call = lambda: [t.tolist() for t in sampler(PROMPTS, 12, temperature=1.0, seed=5, num_generations=2).tokens]
    want, (engine,) = call(), sampler.engines
    forward, count = engine._runner.forward, 0
    features = forward.features

    def interrupted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return features(*args, **kwargs)

    forward.features = interrupted
    with pytest.raises(KeyboardInterrupt):
        call()
    forward.features = features
    assert engine.stats().in_flight == 0
    assert call() == want and call() == want
    assert not engine._prefixes and not engine._in_flight
    assert bound is None or engine.stats().kv_tokens <= bound


def test_a_step_that_was_cut_short_goes_on():
    engine = EmbeddedEngine(tiny_model(gain=1.0), max_batch=4)
    ask = lambda i: Request(
        id=i, tokens=np.arange(1, 80, dtype=np.int32), sampling=Sampling(max_tokens=9), group=0, rng_key=(0, 0, 0, i)
    )
    engine.submit([ask(0), ask(1)])
    want = {o.id: o.tokens.tolist() for o in engine.step()}
    features = engine._runner.forward.features
    for at in (1, 2, 5):
        left = iter([True] * (at - 1) + [False])
        engine._runner.forward.features = lambda *a, **k: features(*a, **k) if next(left) else 1 / 0
        engine.submit([ask(0), ask(1)])
        with pytest.raises(ZeroDivisionError):
            engine.step()
        engine._runner.forward.features = features
        done = {}
        while outputs := engine.step():
            done |= {o.id: o.tokens.tolist() for o in outputs}
        assert done == want


def test_an_aborted_request_that_fitted_goes_on_under_the_bound():
    engine = EmbeddedEngine(tiny_model(gain=1.0), max_batch=4, kv_cache_tokens=110)
    r = Request(
        id=0, tokens=np.arange(60, dtype=np.int32), sampling=Sampling(max_tokens=40), group=0, rng_key=(0, 0, 0, 0)
    )
    engine.submit([r])
    (want,) = engine.step()
    engine.submit([r])
    engine.step(timeout_s=0.0)
    engine.step(timeout_s=0.0)
    (part,) = engine.abort([0])
    n = len(part.tokens)
    rest = np.concatenate([r.tokens, part.tokens])
    assert len(rest) > 64  # the next row is 128 places long, more than the bound
    engine.submit([replace(r, tokens=rest, offset=n, sampling=Sampling(max_tokens=40 - n))])
    (out,) = engine.step()
    assert [*part.tokens, *out.tokens] == want.tokens.tolist()
    with pytest.raises(EngineError, match="can never fit"):
        engine.submit([replace(r, id=1, tokens=rest, sampling=Sampling(max_tokens=40 - n))])


def test_an_engine_may_lie_in_a_file(tmp_path):
    (tmp_path / "own.py").write_text("class Own:\n    pass\n")
    assert resolve_engine(f"{tmp_path}/own.py:Own").__name__ == "Own"
