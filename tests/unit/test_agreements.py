"""What several parts must agree on: names that reach the engine, checks on every way to it, folders, dtypes."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import END, cluster, tiny_model

from whet import Sampler
from whet.cli.chat import Chat
from whet.config import ProfilerOptions, Role, RolloutConfig, TrainingConfig
from whet.config.generate import ChatConfig
from whet.errors import ConfigError, DataError, EngineError
from whet.models.load import load_model
from whet.observe.profiler import StepProfiler
from whet.observe.trace import Trace
from whet.rollout.base import Constraint, Output, Request, Sampling
from whet.rollout.build import make_sampling
from whet.rollout.driver import stream
from whet.rollout.queue_engine import QueueEngine
from whet.train.role_workers import RoleWorkers


def test_top_k_of_minus_one_is_off():
    assert make_sampling(RolloutConfig(top_k=-1), (1,)).top_k == 0


def test_a_module_on_the_cpu_is_named_where_there_is_a_gpu(monkeypatch, caplog):
    cluster()
    monkeypatch.setattr(RoleWorkers, "device", lambda self, role: torch.device("cuda"))
    assert "though there is a GPU" not in caplog.text
    RoleWorkers(TrainingConfig()).load(Role.ACTOR, tiny_model())
    assert "the actor is a module on the CPU, and runs there, though there is a GPU" in caplog.text


def test_a_sampler_takes_fp32_on_a_gpu_that_only_emulates_bf16(monkeypatch):
    from whet.rollout import sampler

    seen = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(sampler, "check_device", torch.device)  # none is needed to choose
    monkeypatch.setattr(sampler, "read_width", lambda *_: 128)
    monkeypatch.setattr(sampler, "model_folder", lambda folder: folder)
    monkeypatch.setattr(sampler, "load_model", lambda *_, dtype, **__: seen.append(dtype))
    sampler._load("folder", None, "auto", "cuda", False)
    assert seen == ["float32"]


def test_a_model_under_the_home_folder_is_found(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert load_model("~/model").packable
    assert Sampler("~/model")("hi", 2).text


class Plain(QueueEngine):
    def __init__(self, *_, **__):
        super().__init__("plain")

    def step(self, timeout_s=None):
        gone, self.queue = list(self.queue), type(self.queue)()
        n = np.zeros(1, np.int32)
        return [
            Output(id=r.id, tokens=n + 97, logprobs=n + np.float32("nan"), versions=n, finish_reason="length")
            for r in gone
        ]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ("a",)},
        {"constraint": Constraint(kind="regex", text="[0-9]")},
        {"generation_kwargs": (("top_h", 0.5),)},
    ],
)
def test_what_an_engine_can_t_do_is_refused_also_token_by_token(fields):
    engine = Plain()
    engine.caps = type(engine.caps)(stop_strings=False)
    r = Request(id=0, tokens=np.array([5]), sampling=Sampling(**fields), group=0, rng_key=(0, 0, 0, 0))
    with pytest.raises(EngineError, match=r"does not (support|return) "):
        list(stream(engine, [r]))


def test_logits_that_are_not_finite_end_a_stream():
    r = Request(id=0, tokens=np.array([5]), sampling=Sampling(), group=0, rng_key=(0, 0, 0, 0))
    with pytest.raises(EngineError, match="not finite"):
        list(stream(Plain(), [r]))


def test_a_chat_leaves_room_for_the_tokens_that_must_come(tokenizer):
    sampler = Sampler(tiny_model(max_position_embeddings=256), tokenizer)
    c = Chat(sampler, ChatConfig(min_tokens=100, seed=1, temperature=1.0))
    assert "".join(c.say("x" * 20))
    with pytest.raises(DataError, match="/reset starts a new conversation"):
        all("".join(c.say("x" * 20)) for _ in range(6))


@pytest.mark.parametrize("stop", ["<|im_end|>", "x<|im_start|>y"])
def test_a_stop_string_with_a_special_token_is_refused_with_the_ids_to_give(stop, tokenizer):
    token = stop.strip("xy")
    ids = sorted({END, tokenizer.convert_tokens_to_ids(token)})
    special = f"stop={stop!r}: {token!r} is a special token"
    words = re.escape(special) + r".*rollout\.eos_tokens.*" + re.escape(str(ids))
    for rollout in ({"stop": (stop,)}, {"eval": {"stop": ("a", stop)}}):
        with pytest.raises(ConfigError, match=words):
            cluster(rollout=rollout)
    with pytest.raises(ConfigError, match=words):
        Sampler(tiny_model(), tokenizer)("a", 2, stop=stop)
    assert cluster(rollout={"stop": ("im_end", "|", "é")}).sampling().stop == ("im_end", "|", "é")


def test_padding_of_a_tokenizer_without_pad_and_end(tokenizer):
    c = cluster(tiny_model())
    c.tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=None)
    c.eos_ids = ()
    assert c.pad_id == 0


def test_a_profile_that_can_t_be_written_undoes_no_step(tmp_path):
    (tmp_path / "file").write_text("")
    options = ProfilerOptions(log_dir=str(tmp_path / "file" / "x"), skip_first_n_steps=0, profiler_steps=1)
    with StepProfiler(options, folder=None, trace=Trace()).step(1):
        torch.ones(2).sum()
