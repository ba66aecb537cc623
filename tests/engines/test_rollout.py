"""Names of engines, the mock's lengths, and the adapter of Tunix's rollout classes."""

import functools
import importlib
import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import prompts, requests, run

import whet.rollout
import whet.tunix
from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.rollout import ENGINES, resolve_engine
from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.build import _warn_unused, describe_engine
from whet.rollout.mock import MockEngine
from whet.tunix.base_rollout import BaseRolloutAdapter

MODULES = [m.name for m in pkgutil.walk_packages(whet.rollout.__path__, "whet.rollout.")]


@pytest.mark.parametrize("name", ["whet.rollout", *MODULES])
def test_public_names_are_sorted(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("name", ENGINES)
def test_every_name_resolves_to_an_engine_class(name):
    assert callable(resolve_engine(name).step)
    assert resolve_engine(ENGINES[name]) is resolve_engine(name)
    assert resolve_engine(MockEngine) is MockEngine


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean embedded"):
        resolve_engine("embeded")
    with pytest.raises(ConfigError, match="has no 'Nothing'"):
        resolve_engine("whet.rollout.mock:Nothing")


@pytest.mark.parametrize(
    ("distribution", "mean", "spread"),
    [("fixed", 40, 0), ("uniform", 20.5, 11.5), ("normal", 20, 5), ("skewed", 7.6, 8)],
)
def test_mock_lengths_follow_their_distribution(distribution, mean, spread):
    work = requests(prompts((3,)), Sampling(max_tokens=40, stop_ids=(2,)), group=600)
    done = run(MockEngine(vocabulary=64, length_distribution=distribution), work)
    lengths = np.array([len(o.tokens) for o in done.values()])
    assert lengths.mean() == pytest.approx(mean, rel=0.06)
    assert lengths.std() == pytest.approx(spread, rel=0.15, abs=0.1)
    assert all((o.tokens[-1] == 2) == (o.finish_reason == "stop") for o in done.values())


def test_an_unknown_length_distribution_is_refused():
    with pytest.raises(ConfigError, match="did you mean normal"):
        MockEngine(length_distribution="norml")


class Echo:
    """A BaseRollout that answers with the letters of its prompt, then 9, then more."""

    def __init__(self, logprobs=None):
        self.logprobs, self.calls, self.params = logprobs, [], None

    def generate(self, prompts, rollout_config):
        self.calls.append((prompts, rollout_config))
        tokens = [np.array([*map(ord, p), 9, 50]) for p in prompts]
        logprobs = None if self.logprobs is None else [np.full(len(t), self.logprobs) for t in tokens]
        return SimpleNamespace(text=prompts, tokens=tokens, logprobs=logprobs, left_padded_prompt_tokens=None)

    def update_params(self, params):
        self.params = dict(params)

    def pad_id(self):
        return 0

    def eos_id(self):
        return 9

    def model(self):
        return None


def decode(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("made", [Echo, functools.partial(Echo), Echo()])
def test_a_base_rollout_becomes_an_engine(made):
    engine = BaseRolloutAdapter(made, decode=decode)
    assert isinstance(engine, RolloutEngine) and not engine.caps.logprobs
    engine.update_weights(3, iter([("w", 1)]))
    done = run(engine, requests(prompts((2, 3)), Sampling(max_tokens=10, stop_ids=(9,)), group=2))
    for i, o in done.items():
        assert o.tokens.tolist() == [*prompts((2, 3))[i // 2], 9]  # cut behind the stop token
        assert o.finish_reason == "stop" and o.logprobs.tolist() == [0.0] * len(o.tokens)
        assert set(o.versions.tolist()) == {3}
    assert engine.step() == []


def test_a_base_rollout_gets_the_samplings_values_in_its_config():
    inner = Echo(logprobs=-0.5)
    engine = BaseRolloutAdapter(
        inner, decode=decode, rollout_config=whet.tunix.RolloutConfig(return_logprobs=True, temperature=0.9)
    )
    done = run(engine, requests(prompts((2,)), Sampling(max_tokens=2, temperature=0.3, min_p=0.1)))
    config = inner.calls[0][1]
    assert isinstance(config, RolloutConfig)
    assert (config.temperature, config.max_tokens_to_generate) == (0.3, 2)
    assert engine.caps.logprobs and done[0].logprobs.tolist() == [-0.5, -0.5] and done[0].finish_reason == "length"


def test_a_base_rollout_that_breaks_its_word_is_an_error():
    engine = BaseRolloutAdapter(Echo(), decode=decode, rollout_config=whet.tunix.RolloutConfig(return_logprobs=True))
    with pytest.raises(EngineError, match="return_logprobs=False"):
        run(engine, requests(prompts((2,)), Sampling()))
    with pytest.raises(EngineError, match=r"min_p=0\.1"):
        BaseRolloutAdapter(Echo(), decode=decode).submit(requests(prompts((2,)), Sampling(min_p=0.1)))


def test_a_run_notes_what_an_engine_of_the_users_own_says_of_itself():
    engine = MockEngine()
    assert describe_engine(engine) == {"engine": "MockEngine"}
    engine.backends = {"server": "2.1"}
    assert describe_engine(engine) == {"engine": "MockEngine", "server": "2.1"}


def test_the_mock_takes_the_vocabulary_of_a_model(model):
    assert MockEngine(model)._vocabulary == model.get_input_embeddings().weight.shape[0]
    assert MockEngine()._vocabulary == 256


@pytest.mark.parametrize(
    ("spec", "fields", "said"),
    [
        ("embedded", {"vllm": {"hbm_utilization": 1.0}}, "rollout.vllm.hbm_utilization=1.0: no effect"),
        ("hf", {"vllm": {"async_scheduling": True}}, "rollout.vllm.async_scheduling=True: no effect"),
        ("embedded", {"sglang": {"page_size": 1}}, "rollout.sglang.page_size=1: no effect"),
        ("vllm", {"vllm": {"hbm_utilization": 0.5}}, ""),
        ("sglang", {"vllm": {"hbm_utilization": 0.5}}, "vllm.hbm_utilization=0.5: no effect"),
        (MockEngine, {"vllm": {"hbm_utilization": 0.5}}, ""),
    ],
)
def test_fields_of_another_engine_are_not_dropped_in_silence(spec, fields, said, caplog):
    _warn_unused(spec, RolloutConfig(**fields))
    assert said in caplog.text and bool(said) == bool(caplog.records)
