"""Bases held in 4 bits: with a stand-in for bitsandbytes, and with the package itself where it is installed."""

import sys
import types

import pytest
import torch
from families import BATCH, tiny
from torch import nn

from whet.config import LoraConfig, OptimConfig, RoleConfig
from whet.errors import ConfigError
from whet.models import quantized
from whet.models.load import load_model, save_model
from whet.models.lora import merged_model
from whet.models.lora_layers import merged_weights
from whet.models.quantized import cast_parameters, quantization_config, quantized_layer_names
from whet.rollout.engine import EmbeddedEngine
from whet.train.worker import ModelWorker

pytest.importorskip("peft")
WEIGHTED = BATCH.replace(weights=torch.ones(BATCH.num_tokens))
nll = lambda x: (-x.logprobs, {})


class Params4bit(nn.Parameter):
    """Holds sixteenths in bytes; quant_state is the shape."""

    def __new__(cls, whole):
        made = torch.Tensor._make_subclass(cls, (whole * 16).round().clamp(-127, 127).to(torch.int8), False)
        made.quant_state = whole.shape
        return made

    def __deepcopy__(self, memo):
        return type(self)(self.data.float() / 16)


class Linear4bit(nn.Linear):
    """As the package's: a linear layer, of a dtype that it is told."""

    compute_dtype, compute_type_is_set = None, False

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = Params4bit(layer.weight.data)

    def forward(self, x):
        return nn.functional.linear(x, (self.weight.data.float() / 16).to(x.dtype))


@pytest.fixture
def standin(monkeypatch):
    """A package in its place, which PEFT does not know: it wraps the layers as the linear ones that they are."""
    package = types.ModuleType("bits")
    package.nn = types.SimpleNamespace(Linear4bit=Linear4bit, Params4bit=Params4bit)
    package.functional = types.SimpleNamespace(dequantize_4bit=lambda data, state: (data.float() / 16).view(state))
    monkeypatch.setattr(quantized, "PACKAGE", "bits")
    monkeypatch.setitem(sys.modules, "bits", package)


def held(model):
    """A model whose linear layers are held in bits, the head aside."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Linear4bit(layer))
    return model


def stirred(loaded):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in loaded.adapter.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_neither_cast_nor_trained_and_the_adapter_is(standin, dtype):
    loaded = load_model(held(tiny("Qwen3")), lora=LoraConfig(r=2))
    assert len(quantized_layer_names(loaded.module)) == 14 and loaded.packable
    worker = ModelWorker(loaded, optim=OptimConfig(lr=1e-2), dtype=dtype)
    layer = loaded.module.model.layers[0].mlp.up_proj
    assert layer.get_base_layer().weight.dtype == torch.int8 and layer.get_base_layer().compute_dtype == dtype
    assert worker.dtype == dtype and worker.backends["base"] == "bitsandbytes, 4 bits in 14 layers"
    losses = []
    for _ in range(3):
        losses.append(worker.forward_backward(WEIGHTED, nll)["loss"].value)
        worker.optim_step()
    assert losses[2] < losses[0]
    assert sum(t.numel() for t in worker.optim.masters.values()) == sum(p.numel() for p in loaded.adapter.parameters())


def test_others_are_given_whole_weights_under_the_bases_names(standin):
    loaded = stirred(load_model(held(tiny("Qwen3")), lora=LoraConfig(r=2)))
    named, bare = dict(merged_weights(loaded.module)), tiny("Qwen3")
    shapes = {n: p.shape for n, p in bare.named_parameters(remove_duplicate=False)}
    assert {n: w.shape for n, w in named.items()} == shapes and all(w.is_floating_point() for w in named.values())
    plain = merged_model(loaded.module)
    assert not quantized_layer_names(plain) and len(quantized_layer_names(loaded.module)) == 14
    ours, theirs = (ModelWorker(x).logprobs(BATCH).logprobs for x in (loaded, load_model(plain)))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_the_engine_runs_the_module_and_says_why(standin):
    loaded = load_model(held(tiny("Qwen3")), lora=LoraConfig(r=2))
    assert EmbeddedEngine(loaded).backends["backbone"].startswith("module (its q_proj is a Linear")


def test_all_weights_can_t_be_trained_in_bits(standin):
    with pytest.raises(ConfigError, match="13 other layers are held in 4 bits"):
        ModelWorker(load_model(held(tiny("Qwen3"))), optim=OptimConfig())
    with pytest.raises(ConfigError, match="give a folder or a hub name"):
        load_model(tiny("Qwen3"), quantization="nf4")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[qlora\]'"):
        quantization_config("nf4", torch.device("cpu"))
    with pytest.raises(ConfigError, match="quantization"):
        RoleConfig(quantization="int3")


def test_where_the_package_does_not_run_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    with pytest.raises(ConfigError, match="does not run on mps"):
        quantization_config("nf4", torch.device("mps"))


def test_a_plain_model_is_cast_whole():
    cast_parameters(model := tiny("Qwen3"), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_base_that_bitsandbytes_holds_trains_saves_and_comes_back(tmp_path, kind):
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    tiny("Qwen3", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    read = lambda loaded: ModelWorker(loaded).logprobs(BATCH).logprobs
    loaded = load_model(str(tmp_path / "base"), lora=LoraConfig(r=2), quantization=kind)
    worker = ModelWorker(loaded, optim=OptimConfig(lr=1e-2))
    losses = []
    for _ in range(3):
        losses.append(worker.forward_backward(WEIGHTED, nll)["loss"].value)
        worker.optim_step()
    assert losses[2] < losses[0]
    want = worker.logprobs(BATCH).logprobs
    save_model(loaded, None, tmp_path / "adapter")
    assert torch.equal(read(load_model(str(tmp_path / "adapter"), quantization=kind)), want)
    save_model(loaded, None, tmp_path / "merged", merge=True)
    torch.testing.assert_close(read(load_model(str(tmp_path / "merged"))), want, atol=1e-4, rtol=1e-4)
