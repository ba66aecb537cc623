"""What training runs on is said in words, noted in the run folder, and compared by a resumed run."""

import json
import logging

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.learners.grpo import GRPOLearner
from whet.models import backends
from whet.models.backends import training_backends
from whet.models.load import load_model
from whet.native.build import Unavailable
from whet.native.layers import layer_kernels
from whet.native.segments import segment_kernels

needs_kernels = pytest.mark.skipif(
    isinstance(segment_kernels(), Unavailable) or isinstance(layer_kernels(), Unavailable),
    reason="no kernels can be built here",
)


@needs_kernels
def test_a_cpu_names_the_compiler_or_who_serves_in_the_kernels_place():
    native = f"native ({segment_kernels().compiler})"
    assert training_backends(load_model(tiny_model())) == {"attention": native, "layers": native}
    assert training_backends(load_model(tiny_model(), attention="plain"))["attention"] == "plain"
    wide = load_model(tiny_model().double())
    why = "torch (there are none for float64 on cpu)"
    assert training_backends(wide) == {"attention": why, "layers": "the module's"}


def test_the_reason_is_said_where_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(backends, "kernels_for", lambda device, dtype: Unavailable("no compiler"))
    monkeypatch.setattr(backends, "layer_kernels", lambda: Unavailable("no compiler"))
    said = training_backends(load_model(tiny_model()))
    assert said == {"attention": "torch (no compiler)", "layers": "torch (no compiler)"}


def test_a_resumed_run_says_that_its_kernels_are_other(tmp_path, monkeypatch, caplog):
    def train(steps, **options):
        often = CheckpointingOptions(save_interval_steps=1)
        c = cluster(run_dir=str(tmp_path), max_steps=steps, checkpointing_options=often, **options)
        GRPOLearner(c, GRPOConfig(beta=0.0), reward_fns=length_reward, data=DataConfig(batch_size=2)).train(rows(8))

    train(1)
    noted = json.loads((tmp_path / "environment.json").read_text())
    assert set(noted["training"]["actor"]) == {"attention", "layers"}
    monkeypatch.setattr(backends, "layer_kernels", lambda: Unavailable("no compiler today"))
    with caplog.at_level(logging.WARNING, "whet"):
        train(2, resume="latest")
    assert "the environment changed since the checkpoint" in caplog.text and "no compiler today" in caplog.text
    assert torch.get_num_threads() == noted["threads"]
