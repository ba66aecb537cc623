"""Adapters belong to the record: off for a reference that is a view of the trained module."""

import pytest
import torch
from families import BATCH, tiny

from whet.config import OptimConfig
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.models.lora_layers import Adapter, SeededDropout, effective_weight
from whet.rollout.engine import EmbeddedEngine
from whet.train.worker import ModelWorker

peft = pytest.importorskip("peft")


def adapted(**options):
    model = tiny("Qwen3")
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options), model
    )


def state(model):
    return {name: (p.requires_grad, p.dtype) for name, p in model.named_parameters()}


def test_the_record_knows_the_adapter_and_the_model_is_packed_as_without():
    loaded = load_model(adapted())
    assert loaded.packable and loaded.lm_head.kind == "identity"
    assert len(loaded.adapter.layers) == 6 and len(list(loaded.adapter.parameters())) == 12
    assert load_model(tiny("Qwen3")).adapter is None


def test_off_is_the_base_model_and_afterwards_everything_is_as_before():
    loaded = load_model(adapted())
    loaded.adapter.layers["model.layers.0.self_attn.q_proj"].lora_A["default"].weight.requires_grad_(False)
    read = lambda x: ModelWorker(x).logprobs(BATCH).logprobs
    want, before = read(load_model(tiny("Qwen3"))), state(loaded.module)
    on = read(loaded.base_view()), ModelWorker(loaded, optim=OptimConfig()).logprobs(BATCH).logprobs
    torch.testing.assert_close(on[0], want, atol=1e-6, rtol=1e-6)
    assert (on[0] - on[1]).abs().max() > 1e-2
    assert state(loaded.module) == before
    with pytest.raises(RuntimeError, match="inside"), loaded.adapter.disabled():
        raise RuntimeError("inside")
    assert not any(layer.disable_adapters for layer in loaded.adapter.layers.values())
    assert state(loaded.module) == before
    with loaded.adapter.disabled():
        with loaded.adapter.disabled():  # a reference that is read while it is off
            pass
        assert all(layer.disable_adapters for layer in loaded.adapter.layers.values())


def test_the_effective_weight_of_a_layer_that_is_off_is_its_base():
    adapter = load_model(adapted()).adapter
    layer = next(iter(adapter.layers.values()))
    base, on = layer.get_base_layer().weight, effective_weight(layer)
    assert not torch.equal(on, base)
    with adapter.disabled():
        assert torch.equal(effective_weight(layer), base)
    assert torch.equal(effective_weight(layer), on)
    layer.merge()  # the base's own tensor has the adapter in it now: nothing is added twice
    assert torch.equal(effective_weight(layer), base)
    torch.testing.assert_close(base, on)


def test_dropout_keeps_the_mean_and_draws_anew_in_each_layer():
    layers = [SeededDropout(0.25, number) for number in (0, 1)]
    x = torch.ones(200, 200)
    for layer in layers:
        layer.keys = torch.arange(200)
    a, b = (layer(x) for layer in layers)
    assert sorted(set(a.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert a.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(a, b) and torch.equal(a, layers[0](x))
    assert a.mean(0).std() < 0.07 and a.mean(1).std() < 0.07  # of 200 draws: 0.577 / sqrt(200) = 0.041
    layers[0].keys = torch.arange(199, -1, -1)  # a token's draws go with its key, not with its place
    assert torch.equal(layers[0](x), a.flip(0))
    with pytest.raises(ConfigError, match="reads 150 of a pass's 200 tokens, as expert layers do"):
        layers[0](x[:150])


def test_a_view_neither_freezes_nor_casts_the_module_that_its_owner_trains():
    loaded = load_model(adapted())
    before = state(loaded.module)
    owner = ModelWorker(loaded, optim=OptimConfig(lr=1e-2))
    view = ModelWorker(loaded.base_view(), dtype=torch.bfloat16)
    assert state(loaded.module) == before and view.module is owner.module
    reference = view.logprobs(BATCH).logprobs
    own = [p for p in loaded.adapter.parameters() if p.requires_grad]
    drawn = [p.detach().clone() for p in own]
    batch = BATCH.replace(weights=torch.ones(BATCH.num_tokens))
    owner.forward_backward(batch, lambda x: (-x.logprobs, {}))
    owner.optim_step()
    assert all(not torch.equal(a, b) for a, b in zip(own, drawn))
    torch.testing.assert_close(view.logprobs(BATCH).logprobs, reference, atol=1e-6, rtol=1e-6)


def test_a_view_is_only_read_and_only_of_a_model_with_an_adapter():
    loaded = load_model(adapted())
    with pytest.raises(ConfigError, match="no adapter to switch off"):
        load_model(tiny("Qwen3")).base_view()
    with pytest.raises(ConfigError, match="read-only view"):
        ModelWorker(loaded.base_view(), optim=OptimConfig())
    with pytest.raises(ConfigError, match="read-only view"):
        EmbeddedEngine(loaded.base_view())


def test_a_merged_adapter_can_t_be_switched_off():
    model = adapted()
    for layer in Adapter.from_module(model).layers.values():
        layer.merge()
    with pytest.raises(ConfigError, match="unmerge it first"), Adapter.from_module(model).disabled():
        pass
