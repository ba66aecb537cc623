"""An engine that writes its sampling alone: what it draws, what it is lent, and what it is not let get away with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import build, prompts, requests, run

from whet.errors import EngineError
from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.engine.engine import EmbeddedEngine
from whet.rollout.queue_engine import SimpleEngine


class Plain(SimpleEngine):
    """The naive loop."""

    def complete(self, request):
        sampling, ids = request.sampling, torch.tensor(request.tokens).long()
        assert not torch.is_grad_enabled() and not self.module.training
        tokens, logprobs = [], []
        for u in self.draws(request):
            logits = self.module(input_ids=ids[None]).logits[0, -1].float()
            logp = (logits / (sampling.temperature or 1.0)).log_softmax(0)
            sums = logp.double().exp().cumsum(0)
            drawn = torch.searchsorted(sums, u * sums[-1], right=True) if sampling.temperature else logp.argmax()
            ids = torch.cat([ids, drawn.view(1)])
            tokens.append(int(drawn))
            logprobs.append(float(logp[drawn]))
            if tokens[-1] in sampling.stop_ids:
                break
        return tokens, logprobs


def made_of(tokens, logprobs):
    """An engine whose completions are these."""
    made = type("Given", (SimpleEngine,), {"complete": lambda self, request: (tokens, logprobs)})
    return made(build())


@pytest.fixture(scope="module")
def model():
    return build(gain=3.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_a_naive_loop_draws_what_the_embedded_engine_draws(model, temperature):
    sampling = Sampling(max_tokens=7, temperature=temperature, stop_ids=tuple(range(0, 64, 6)))
    work = requests(prompts((3, 9, 1)), sampling, group=3)
    work[0] = replace(work[0], draw=40)  # a later turn
    work[1] = replace(work[1], offset=2)  # gone on with
    plain, other = Plain(model), EmbeddedEngine(model)
    assert isinstance(plain, RolloutEngine)
    model.train()
    plain.update_weights(5)
    found, want = run(plain, work), run(other, work)
    model.eval()
    assert {o.finish_reason for o in found.values()} == {"stop", "length"} or temperature == 0
    for i, o in found.items():
        assert (o.tokens.tolist(), o.finish_reason) == (want[i].tokens.tolist(), want[i].finish_reason)
        np.testing.assert_allclose(o.logprobs, want[i].logprobs, atol=1e-5)
        assert set(o.versions.tolist()) == {5}
    assert plain.step() == [] and plain.stats().generated == sum(len(o.tokens) for o in found.values())


def test_it_reads_the_weights_as_they_are(model):
    work, engine = requests(prompts((4,)), Sampling(max_tokens=4)), Plain(model)
    before = run(engine, work)[0].logprobs
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert not np.allclose(run(engine, work)[0].logprobs, before)
    with torch.no_grad():
        model.lm_head.weight.div_(1.5)


def test_what_the_sampling_does_not_follow_is_refused_until_it_says_that_it_does(model):
    for name, value in {"top_p": 0.9, "top_k": 3, "min_tokens": 2, "forbidden_ids": (1,)}.items():
        work = requests(prompts((2,)), replace(Sampling(), **{name: value}))
        with pytest.raises(EngineError, match=rf"{name}=.*Plain samples by temperature; .*Plain\.samples"):
            Plain(model).submit(work)
        type("More", (Plain,), {"samples": ("temperature", name)})(model).submit(work)
    Plain(model).submit(requests(prompts((2,)), Sampling(logprobs_mode="full")))  # the same without truncation


@pytest.mark.parametrize(
    ("tokens", "logprobs", "said"),
    [
        ([5, 6], [-1.0], r"tokens \[2\] and logprobs \[1\]; give one for each"),
        ([], [], "returned 0 tokens; return 1 to max_tokens=3"),
        ([5] * 4, [-1.0] * 4, "returned 4 tokens; return 1 to max_tokens=3"),
        ([5, 6], [-1.0, -1.0], "ended after 2 of 3 tokens without a stop id"),
        ([9, 6], [-1.0, -1.0], "continues after the stop id 9; end with it"),
        ([5, 9], [0.5, -1.0], "gave the logprob 0.5; it is the log of the probability"),
        ([5, 9], [float("nan"), -1.0], "gave the logprob nan"),
        ([5, 9], [float("-inf"), -1.0], "gave the logprob -inf.*finite"),
        ([5.5, 9], [-1.0, -1.0], r"gave the token 5\.5; tokens are whole numbers"),
        (["a", 9], [-1.0, -1.0], "must return two lists of numbers, got"),
    ],
)
def test_a_completion_that_breaks_a_rule_is_an_error(tokens, logprobs, said):
    engine = made_of(tokens, logprobs)
    engine.submit(requests(prompts((2,)), Sampling(max_tokens=3, stop_ids=(9,))))
    with pytest.raises(EngineError, match=said):
        engine.step()


@pytest.mark.parametrize("done", [None, ([9], [-1.0], 3), "text"])
def test_what_is_no_pair_is_an_error(model, done):
    engine = type("Odd", (SimpleEngine,), {"complete": lambda self, request: done})(model)
    engine.submit(requests(prompts((2,)), Sampling(stop_ids=(9,))))
    with pytest.raises(EngineError, match=r"Odd\.complete\(\) of request 0 must return \(tokens, logprobs\), got"):
        engine.step()


def test_an_engine_without_its_sampling_says_what_to_write(model):
    engine = SimpleEngine(model)
    engine.submit(requests(prompts((2,)), Sampling()))
    with pytest.raises(NotImplementedError, match="must write complete"):
        engine.step()
