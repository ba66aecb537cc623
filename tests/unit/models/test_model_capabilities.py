"""Facts about a model are those of its small random twin."""

import pytest
import torch
import transformers
from families import PACKABLE, REFUSED, tiny

from whet.models import model_capabilities
from whet.models.load import load_model
from whet.models.model_capabilities import _make_twin, _plan_twin, find_capabilities, probe_capabilities


def make_small_twin(module):
    return _make_twin(_plan_twin(module))


@pytest.mark.spread(15)
@pytest.mark.parametrize("family", [*PACKABLE, *REFUSED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_of_every_family_tells_what_the_model_itself_tells(family, dtype):
    model = tiny(family, dtype)
    twin, own = probe_capabilities(make_small_twin(model), family), probe_capabilities(model, family)
    assert (twin.head.kind, twin.unpackable_reasons) == (own.head.kind, own.unpackable_reasons)
    assert twin.head.scale == pytest.approx(own.head.scale) and twin.head.softcap == pytest.approx(own.head.softcap)
    assert bool(own.unpackable_reasons) == (family in REFUSED)


@pytest.mark.parametrize("family", PACKABLE)
def test_loading_runs_none_of_the_weights(family, monkeypatch):
    model, ran = tiny(family), []
    real = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: ran.append(self) or real(self, *a, **k))
    assert load_model(model).packable
    assert not any(m is model for m in ran)


def test_a_model_on_the_meta_device_can_be_asked():
    config = transformers.Qwen3Config(num_hidden_layers=40, vocab_size=150_000)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    loaded = load_model(model, device="meta")
    assert loaded.packable and loaded.lm_head.kind == "identity"
    assert next(loaded.module.parameters()).is_meta


def test_a_twin_is_small_keeps_a_layer_of_each_kind_and_draws_from_no_generator_of_the_run():
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    config = transformers.Qwen2Config(num_hidden_layers=4, layer_types=kinds, sliding_window=8, use_sliding_window=True)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    before = torch.get_rng_state()
    twin = make_small_twin(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert twin.config.layer_types == ["full_attention", "sliding_attention"]
    assert twin.config.vocab_size == 64 and {p.device.type for p in twin.parameters()} == {"cpu"}
    assert model.config.num_hidden_layers == 4  # the model's own config stays


@pytest.mark.parametrize("change", ["layer", "hook", "forward", "size"])
def test_a_model_that_is_not_as_its_class_makes_it_is_asked_itself(change, monkeypatch):
    model, asked = tiny("Llama"), []
    if change == "layer":
        model.model.norm = torch.nn.LayerNorm(32)
    elif change == "hook":
        model.model.norm.register_forward_hook(lambda m, i, o: o * 2)
    elif change == "forward":
        model.model.norm.forward = type(model.model.norm).forward.__get__(model.model.norm)
    else:
        model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 40, bias=False)
        model.model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 40, bias=False)
        model.model.layers[0].mlp.down_proj = torch.nn.Linear(40, 32, bias=False)
    real = model_capabilities.probe_capabilities
    monkeypatch.setattr(model_capabilities, "probe_capabilities", lambda m, name: asked.append(m) or real(m, name))
    assert find_capabilities(model, "llama").unpackable_reasons == ()
    assert asked == [model]
