"""What whet decides about vLLM where vLLM is not installed: stand-ins take its calls."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from helpers import cluster

from whet.config import RolloutConfig
from whet.errors import EngineError
from whet.rollout import check_engine
from whet.rollout.choose import choose_engine
from whet.rollout.vllm import TESTED, VLLMEngine

CUDA = torch.device("cuda")


class LLM:
    """Notes the calls that vLLM gets."""

    def __init__(self):
        self.log = []

    def sleep(self, level, mode):
        self.log.append(f"sleep {level}")

    def wake_up(self, tags):
        self.log.append(f"wake {tags[0]}")

    def reset_prefix_cache(self, **options):
        self.log.append("drop")
        return True

    def collective_rpc(self, name, kwargs):
        self.log.append(f"{name}: {len(list(kwargs['weights_iterator']))}")


def test_weights_come_between_the_memory_for_them_and_that_for_the_cache():
    engine, module = object.__new__(VLLMEngine), torch.nn.Linear(2, 2)
    engine._llm, engine._sleeps, engine._has_weights, engine._asleep, engine._in_flight = LLM(), True, True, False, {}
    engine._names, engine._done = SimpleNamespace(complete=iter), []
    weights = lambda: iter(module.state_dict().items())
    engine.sleep(), engine.sleep()
    with pytest.raises(EngineError, match="call wake"):
        engine.update(1, weights())
    engine.wake()
    with pytest.raises(EngineError, match="dropped its weights"):
        engine.step()
    engine.sleep(), engine.wake()  # of weights that never came nothing is dropped
    engine.update(1, weights())
    engine.update(2, weights())
    assert engine._llm.log == [
        *("drop", "sleep 2", "wake weights", "sleep 2", "wake weights"),
        *("reload_weights: 2", "wake kv_cache", "drop", "reload_weights: 2", "drop"),
    ]
    assert engine.step() == []


@pytest.fixture
def installed(monkeypatch):
    """A tested version of vLLM, by its looks."""
    find, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "vllm" else find(name, *a))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: TESTED + ".0" if name == "vllm" else version(name))


@pytest.mark.parametrize(
    ("rollout", "options", "reason"),
    [
        ({}, {}, None),
        ({"temperature": 3.0}, {}, "temperatures of 0 and 0.01..2"),
        ({"eval": {"temperature": 3.0}}, {}, "temperatures of 0 and 0.01..2"),
        ({"min_p": 0.1, "top_p": 0.9}, {}, "min_p before top_p"),
        ({"constraint": {"regex": "a+"}}, {}, "is not supported by vllm"),
        ({}, {"device": torch.device("cuda", 1)}, "lies on cuda:1"),
        ({}, {"device": torch.device("cpu")}, "not on a GPU"),
        ({}, {"num_processes": 2}, "2 processes train together"),
        ({}, {"is_quantized": True}, "in 4 bits"),
    ],
)
def test_auto_takes_vllm_where_it_can_do_what_is_asked(installed, caplog, rollout, options, reason):
    with caplog.at_level("INFO", "whet"):
        chosen = choose_engine(RolloutConfig(**rollout), **{"device": CUDA, **options})
    assert chosen == ("embedded" if reason else "vllm")
    assert (reason or "set rollout_engine=embedded") in caplog.text


def test_auto_takes_no_vllm_that_is_missing_or_untested(installed, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.1")
    with caplog.at_level("INFO", "whet"):
        assert choose_engine(RolloutConfig(), device=CUDA) == "embedded"
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
        assert choose_engine(RolloutConfig(), device=CUDA) == "embedded"
    assert f"vLLM 0.99.1 is installed, and {TESTED} is tested" in caplog.text
    assert "vLLM is not installed" in caplog.text
    check_engine("auto")


def test_a_cluster_names_the_engine_that_auto_took():
    made = cluster(engine="auto")
    assert made.engine_name == "embedded" and type(made.rollout).__name__ == "EmbeddedEngine"
