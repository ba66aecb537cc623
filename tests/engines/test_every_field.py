"""Every field of Sampling is carried out or refused: by each engine, and by the trainer that scores what was drawn.

A new field fails here until CHANGES says how to set it and each engine does something with it.
"""

import functools
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_constraint import tokenizer
from tiny import VOCABULARY, build, letters, requests, run

from whet.errors import ConfigError, EngineError
from whet.ops.logits_processors import LogitsProcessors, process_logits
from whet.rollout import sglang, vllm
from whet.rollout.base import Constraint, Sampling, check_caps, sampling_processors
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.generate_options import check_trainable
from whet.rollout.hf import HFEngine
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.mock import MockEngine
from whet.tunix.base_rollout import BaseRolloutAdapter

BASE = Sampling(max_tokens=12, stop_ids=tuple(range(0, VOCABULARY, 4)))
CHANGES = {
    "constraint": (BASE, Constraint(kind="regex", text="[ab]{2,9}")),
    "forbidden_ids": (BASE, tuple(range(1, 40))),
    "generation_kwargs": (BASE, (("no_repeat_ngram_size", 1),)),
    "logprobs_mode": (replace(BASE, top_k=2), "full"),
    "max_tokens": (BASE, 3),
    "min_p": (BASE, 0.5),
    "min_tokens": (BASE, 8),
    "repetition_penalty": (BASE, 3.0),
    "return_logits": (BASE, True),
    "stop": (replace(BASE, stop_ids=()), tuple("123579")),
    "stop_ids": (BASE, tuple(range(1, VOCABULARY, 2))),
    "temperature": (BASE, 0.2),
    "top_k": (BASE, 2),
    "top_p": (BASE, 0.3),
}
"""Field -> a Sampling, and a value that changes what is drawn or reported under it."""
NO_MODEL = {"logprobs_mode", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"}
"""Fields that the mock engine has nothing to do with: it draws evenly, whatever a model's distribution would be."""
ENDS = {"max_tokens", "stop", "return_logits"}
"""Fields that say where a completion ends, or what comes with it; no token's probability depends on them."""


def test_there_is_a_case_for_every_field():
    assert CHANGES.keys() == {f.name for f in fields(Sampling)}
    assert all(vars(base)[name] != value for name, (base, value) in CHANGES.items())


def drawn(engine, sampling):
    """What an engine makes of a Sampling, in a form that can be compared."""
    check_caps(engine, sampling)
    work = requests([np.array([3, 5, 3], np.int32), np.array([9], np.int32)], sampling, group=4)
    done = run(engine, work)
    return [(o.tokens.tolist(), o.logprobs.tolist(), o.logits is None, o.finish_reason) for o in done.values()]


class Rollout:
    """A class of Tunix's kind; its completions, as many as they are, show the configuration that it was given."""

    def generate(self, prompts, rollout_config):
        shown = hash(tuple(vars(rollout_config).items()))
        tokens = [np.array([2 * (shown >> 6 * i) % VOCABULARY + 1 for i in range(20)]) for _ in prompts]
        return SimpleNamespace(text=[], tokens=tokens, logprobs=None, left_padded_prompt_tokens=None)


def external(name, sampling):
    """What vLLM or SGLang would be asked, and where its tokens would be cut; neither package is needed for that."""
    if name == "vllm":
        vllm.VLLMEngine._check_sampling(SimpleNamespace(_reports="drawn"), sampling)
    else:
        sglang.SGLangEngine._check_sampling(SimpleNamespace(_seeded=False), sampling)
    (request,) = requests([np.array([3], np.int32)], sampling)
    flight = InFlightRequest(request=request)
    flight.add(list(range(1, 40, 2)), [0.0] * 20, version=0, decode=letters)
    return {"vllm": vllm, "sglang": sglang}[name].sampling_arguments(request), flight.tokens


@functools.cache
def model():
    return build(gain=3.0)


@functools.cache
def made(name):
    """An engine by name: from a Sampling to what it makes of it."""
    grammars = Grammars(tokenizer(), vocabulary=VOCABULARY)
    if name in ("vllm", "sglang"):
        return functools.partial(external, name)
    if name == "a class of Tunix's kind":
        return functools.partial(drawn, BaseRolloutAdapter(Rollout(), decode=letters))
    if name == "mock":
        return functools.partial(drawn, MockEngine(vocabulary=VOCABULARY, length_distribution="uniform"))
    if name == "hf":
        return functools.partial(drawn, HFEngine(model(), decode=letters, grammars=grammars))
    return functools.partial(drawn, EmbeddedEngine(model(), decode=letters, grammars=grammars, fast=name == "embedded"))


@functools.cache
def outcome(name, sampling):
    """What an engine makes of a Sampling, or why it refuses it."""
    try:
        return made(name)(sampling)
    except (EngineError, ConfigError) as error:
        return str(error)


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize(
    "name", ["embedded", "embedded, module", "hf", "mock", "vllm", "sglang", "a class of Tunix's kind"]
)
def test_an_engine_does_something_with_a_field_or_refuses_it(name, field):
    base, value = CHANGES[field]
    found = [outcome(name, sampling) for sampling in (base, replace(base, **{field: value}))]
    for i, error in enumerate(found):
        if isinstance(error, str):
            words = (field, str(value), "constraint", "logits", "stop string", "no_repeat_ngram_size", "truncation")
            assert any(word in error for word in words)
            found[i] = "refused"
    assert (found[0] != found[1]) != (name == "mock" and field in NO_MODEL)
    if name in ("embedded", "embedded, module", "hf"):
        assert found[0] != "refused" and (found[1] != "refused" or field == "generation_kwargs")


@pytest.mark.parametrize("field", CHANGES)
def test_the_trainer_knows_what_a_field_does_to_the_distribution_or_refuses_to_train_on_it(field):
    base, value = CHANGES[field]
    changed = replace(base, **{field: value})
    try:
        check_trainable(changed)
    except ConfigError:
        assert field == "generation_kwargs"
        return
    assert (sampling_processors(changed) != sampling_processors(base)) == (field not in ENDS)


SUPPORTS = {
    "constrained": (LogitsProcessors(), True),
    "forbidden_ids": (LogitsProcessors(), (1,)),
    "full": (LogitsProcessors(top_k=2), True),
    "min_p": (LogitsProcessors(), 0.5),
    "min_tokens": (LogitsProcessors(stop_ids=(2,)), 3),
    "repetition_penalty": (LogitsProcessors(), 2.0),
    "stop_ids": (LogitsProcessors(min_tokens=3), (2,)),
    "temperature": (LogitsProcessors(), 0.5),
    "top_k": (LogitsProcessors(), 1),
    "top_p": (LogitsProcessors(), 0.5),
}
"""Field of Support -> another value, under which the distribution is another."""


def test_every_field_of_a_support_changes_the_distribution_that_is_scored():
    assert SUPPORTS.keys() == {f.name for f in fields(LogitsProcessors)}
    rest = {"seen": torch.tensor([[True, False, True, False]]), "position": torch.tensor([1])}
    rest["allowed"] = torch.tensor([[0b0110]], dtype=torch.uint8)
    logits = torch.tensor([[1.0, 3.0, 2.5, -1.0]])
    for name, (base, value) in SUPPORTS.items():
        changed = replace(base, **{name: value})
        assert not torch.equal(process_logits(logits, changed, **rest), process_logits(logits, base, **rest)), name
