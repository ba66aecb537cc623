"""What whet decides about vLLM where vLLM is not installed: stand-ins take its calls."""

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import cluster, tiny_model
from tiny import requests

from whet.config import RolloutConfig
from whet.config.lora import LoraConfig
from whet.errors import EngineError
from whet.models.lora import add_adapter
from whet.rollout import check_engine, vllm
from whet.rollout.auto_engine import choose_engine
from whet.rollout.base import EngineStats, Sampling
from whet.rollout.vllm import TESTED, VLLMEngine

CUDA = torch.device("cuda")
KINDS = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")


class LLM:
    """Notes the calls that vLLM gets."""

    def __init__(self):
        self.log = []

    def sleep(self, level, mode):
        self.log.append(f"sleep {level}")

    def wake_up(self, tags):
        self.log.append(f"wake {tags[0]}")

    @property
    def llm_engine(self):
        return SimpleNamespace(
            step=lambda: self.log.append("flush"),
            add_lora=lambda lora: self.log.append(f"adapter from {lora.path}, again: {lora.load_inplace}"),
            engine_core=SimpleNamespace(shutdown=lambda: self.log.append("end")),
        )

    def release_kv_cache_memory(self):
        assert self.log[-1] == "flush", "as vLLM, which has requests that ended to tell of"
        self.log.append("release")

    def reset_prefix_cache(self, **options):
        self.log.append("drop")
        return True

    def collective_rpc(self, name, kwargs):
        self.log.append(f"{name}: {len(list(kwargs['weights_iterator']))}")


def sleeping_engine(shared=None):
    """An engine whose vLLM sleeps, as on a GPU. Args: shared: the weights that it shares."""
    engine = object.__new__(VLLMEngine)
    engine._llm, engine._sleeps, engine._has_weights, engine._asleep, engine._in_flight = LLM(), True, True, False, {}
    engine._names, engine._done = SimpleNamespace(complete=iter), []
    engine._shared, engine._adapter_folder = shared, ""
    return engine


def test_shared_weights_stay_while_the_cache_goes(monkeypatch, tmp_path):
    named = lambda name, number, path, load_inplace: SimpleNamespace(path=path, load_inplace=load_inplace)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=named))
    engine = sleeping_engine(SimpleNamespace(write_adapter=lambda weights, folder: list(weights)))
    engine._adapter_folder = tmp_path
    assert engine._adapter().load_inplace is False  # of a request
    engine.sleep(), engine.sleep()
    engine.wake_up()
    assert engine.step() == []  # without an update: the weights are there
    engine.update_weights(1, iter([("lora_A", torch.ones(1))]))
    engine.sleep(), engine.wake_up()
    asleep = ["drop", "sleep 0", "flush", "release", "wake kv_cache"]
    log = engine._llm.log
    assert log == [*asleep, f"adapter from {tmp_path}, again: True", "drop", *asleep]
    log.clear()
    engine._shared.to_host, engine._shared.to_device = lambda: log.append("to host"), lambda: log.append("to device")
    engine.close()
    assert log == ["to host", "end", "to device"] and not tmp_path.exists()


def test_weights_are_not_shared_where_a_step_of_vllm_stays_under_way_or_its_version_is_unknown(caplog):
    module = tiny_model()
    add_adapter(module, LoraConfig(r=4))
    for options, version, reason in (
        ({}, f"{TESTED[0]}.1", None),
        ({"async_scheduling": True}, f"{TESTED[0]}.1", "async_scheduling=true keeps a step"),
        ({}, f"{TESTED[0]}0.1", f"vLLM {TESTED[0]}0.1 is installed"),
    ):
        config = RolloutConfig(vllm={"share_weights": True, **options})
        assert (vllm._shared_weights(module, config, version) is None) is (reason is not None)
        assert reason is None or reason in caplog.text


def test_weights_come_between_the_memory_for_them_and_that_for_the_cache():
    engine, module = sleeping_engine(), torch.nn.Linear(2, 2)
    weights = lambda: iter(module.state_dict().items())
    engine.sleep(), engine.sleep()
    with pytest.raises(EngineError, match="call wake"):
        engine.update_weights(1, weights())
    engine.wake_up()
    with pytest.raises(EngineError, match="dropped its weights"):
        engine.step()
    engine.sleep(), engine.wake_up()  # of weights that never came nothing is dropped
    engine.update_weights(1, weights())
    engine.update_weights(2, weights())
    assert engine._llm.log == [
        *("drop", "sleep 2", "wake weights", "sleep 2", "wake weights"),
        *("reload_weights: 2", "wake kv_cache", "drop", "reload_weights: 2", "drop"),
    ]
    assert engine.step() == []


class Core:
    """vLLM's engine: draws 10, 11, ... for each request, and keeps what it does not return yet."""

    def __init__(self):
        self.request_states, self.external_req_ids, self.returned = {}, {}, 0
        self.output_processor = self

    def add_request(self, name, prompt, params, lora_request):
        drawn = SimpleNamespace(output_token_ids=[])
        logprobs = SimpleNamespace(logprobs=SimpleNamespace(logprobs=[]))
        state = SimpleNamespace(name=name, detokenizer=drawn, logprobs_processor=logprobs, params=params)
        self.request_states["internal-" + name], self.external_req_ids[name] = state, ["internal-" + name]

    def abort_request(self, names):
        for name in names:
            del self.request_states[self.external_req_ids.pop(name)[0]]

    def step(self):
        outputs = []
        for state in list(self.request_states.values()):
            tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs
            tokens.append(10 + len(tokens))
            logprobs.append(-float(len(tokens)))
            done = len(tokens) == state.params.max_tokens
            if done or state.params.output_kind == KINDS.DELTA:
                start = 0 if state.params.output_kind == KINDS.FINAL_ONLY else len(tokens) - 1
                new = {"token_ids": tokens[start:], "logprobs": SimpleNamespace(logprobs=logprobs[start:])}
                output = SimpleNamespace(**new, finish_reason="length" if done else None)
                outputs.append(SimpleNamespace(request_id=state.name, outputs=[output], num_cached_tokens=0))
            if done:
                self.abort_request([state.name])
        self.returned += len(outputs)
        return outputs


def test_a_request_is_read_once_and_what_it_drew_before_where_that_is_needed(monkeypatch):
    engine, core = object.__new__(VLLMEngine), Core()
    monkeypatch.setattr(VLLMEngine, "_check_requests", lambda *a, **k: None)
    engine._vllm = SimpleNamespace(
        SamplingParams=SimpleNamespace, sampling_params=SimpleNamespace(RequestOutputKind=KINDS)
    )
    llm = SimpleNamespace(collective_rpc=lambda *a, **k: None, reset_prefix_cache=lambda **k: True, llm_engine=core)
    engine._llm, engine._extra, engine._in_flight, engine._done = llm, {}, {}, []
    engine._names, engine._sleeps = SimpleNamespace(complete=iter), False
    engine._shared, engine._adapter_folder = None, ""
    engine._decode, engine._stats, engine.version, engine._asleep, engine._has_weights = (
        None,
        EngineStats(),
        1,
        False,
        True,
    )
    work = requests([np.array([5, 6, 7])] * 3, Sampling(max_tokens=6))
    engine.submit(work)
    for _ in range(2):
        engine._step_vllm()
    assert engine.stats().live == 3 and core.returned == 0
    assert engine.peek([0])[0].tokens.tolist() == [10, 11]
    engine.update_weights(2, iter(()))
    engine._step_vllm()
    (gone,) = engine.abort([2])
    assert (gone.tokens.tolist(), gone.versions.tolist()) == ([10, 11, 12], [1, 1, 2])
    done = engine.step() + engine.step()
    assert [o.tokens.tolist() for o in done] == [[*range(10, 16)]] * 2 and core.returned == 2
    assert [o.versions.tolist() for o in done] == [[1, 1, 2, 2, 2, 2]] * 2
    assert [o.logprobs.tolist() for o in done] == [[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]] * 2
    assert (engine.stats().generated, engine.stats().row_steps, engine.stats().in_flight) == (15, 15, 0)
    engine._decode = lambda ids: "".join(chr(97 + i - 10) for i in ids)
    engine.submit(requests([np.array([5])], Sampling(max_tokens=6, stop=("c",))))  # whet finds its end
    assert engine.step()[0].tokens.tolist() == [10, 11, 12] and not core.request_states


@pytest.fixture
def installed(monkeypatch):
    """A tested version of vLLM, by its looks."""
    find, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "vllm" else find(name, *a))
    tested = lambda name: TESTED[0] + ".0" if name == "vllm" else version(name)
    monkeypatch.setattr(importlib.metadata, "version", tested)


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
    assert "vLLM 0.99.1 is installed, and 0.31 and 0.32 are tested" in caplog.text
    assert "vLLM is not installed" in caplog.text
    check_engine("auto")


def test_a_cluster_names_the_engine_that_auto_took():
    made = cluster(engine="auto")
    assert made.engine_name == "embedded" and type(made.engine).__name__ == "EmbeddedEngine"
