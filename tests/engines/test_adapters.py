"""A model with a LoRA adapter keeps the fused backbone and the native kernels, and samples what its module samples."""

import copy

import pytest
import torch
from test_paths import tokens
from tiny import build, prompts, requests, run
from torch import nn

from whet.config import OptimConfig
from whet.errors import EngineError
from whet.models.load import load_model
from whet.models.lora_layers import Adapter, effective_weight, plain_linear
from whet.native.build import Unavailable
from whet.native.decode import decode_kernels
from whet.rollout.base import Sampling
from whet.rollout.driver import RolloutDriver, single_turns
from whet.rollout.engine import EmbeddedEngine, packed_linear
from whet.rollout.engine.packed_linear import PackedLinear
from whet.rollout.hf import HFEngine
from whet.train.worker import ModelWorker
from whet.types import Prompt, TokenBatch

peft = pytest.importorskip("peft")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = Sampling(max_tokens=8, temperature=0.0)
PLAIN = Sampling(max_tokens=8)


def adapted(targets=ALL, seed=0, family="qwen3", **options):
    """A model with an adapter that changes what it says."""
    torch.manual_seed(seed)
    model = build(family, gain=3.0)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, **options)
    return peft.inject_adapter_in_model(config, model)


def merged(model):
    """The oracle: the same model without layers of PEFT, the adapter added to its weights by PEFT itself."""
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    return plain


@pytest.mark.parametrize("targets", [ALL, ["k_proj", "down_proj"]], ids=["all", "two"])
def test_a_gpus_products_add_all_their_adapters_at_once_and_round_once(targets):
    model = adapted(targets).bfloat16()
    block, generator = model.model.layers[0], torch.Generator().manual_seed(1)
    names = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    groups = [[getattr(block.self_attn, n, None) or getattr(block.mlp, n) for n in group] for group in names]
    for layers in groups:
        product, adapters = PackedLinear(layers), [layer for layer in layers if hasattr(layer, "lora_A")]
        product.join()
        first = [layer.lora_A["default"].weight for layer in adapters]
        together = len({a.untyped_storage().data_ptr() for a in first}) == 1
        assert together or len(adapters) < len(layers)
        x = torch.randn(5, product.inputs, generator=generator).bfloat16()
        for change in ("none", "values", "memory", "off"):
            with torch.no_grad():
                for layer in adapters:
                    layer.enable_adapters(change != "off")
                    if change == "values":
                        layer.lora_A["default"].weight.mul_(0.5)
                    if change == "memory":
                        layer.lora_A["default"].weight.data = layer.lora_A["default"].weight.data * 2
                product.refresh()
                got, want = product(x), torch.cat([layer(x) for layer in layers], -1)
                exact = torch.cat([nn.functional.linear(x.double(), exact_weight(layer)) for layer in layers], -1)
                added = product.add_to(torch.zeros_like(got), x) if len(layers) == 1 else got
            assert torch.equal(added, got)
            assert (got - exact).abs().mean() <= (want - exact).abs().mean() < 0.01 * exact.abs().mean()


def exact_weight(layer):
    """W + s B A in float64."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return layer.get_parameter("base_layer.weight" if hasattr(layer, "lora_A") else "weight").double()
    a, b = (x["default"].weight.double() for x in (layer.lora_A, layer.lora_B))
    return layer.base_layer.weight.double() + layer.scaling["default"] * b @ a


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("targets", [ALL, ["q_proj", "down_proj"]], ids=["all", "two"])
def test_an_adapted_model_keeps_the_fast_paths_and_samples_what_the_module_samples(targets, native):
    model = adapted(targets)
    engine = EmbeddedEngine(model, native=native)
    assert engine.backends["backbone"] == "fused"
    if native and not isinstance(decode_kernels(), Unavailable):
        assert engine.backends["products"] == "native, packed" and engine.backends["kernels"].startswith("native")
    for sampling in (GREEDY, PLAIN):
        work = requests(prompts(), sampling, group=2)
        got = tokens(run(engine, work))
        assert got == tokens(run(HFEngine(model), work))
        assert got == tokens(run(HFEngine(merged(model)), work))
    assert got != tokens(run(HFEngine(build("qwen3", gain=3.0)), work))  # the adapter says something


@pytest.mark.parametrize("native", [True, False])
def test_an_optimizer_step_on_the_adapter_alone_reaches_the_engine(native):
    model = adapted()
    engine = EmbeddedEngine(model, native=native)
    work = requests(prompts(), PLAIN, group=2)
    before = tokens(run(engine, work))
    own = list(Adapter.from_module(model).parameters())
    base = {n: p.clone() for n, p in model.named_parameters() if id(p) not in {id(x) for x in own}}
    optimizer = torch.optim.SGD(own, lr=0.5)
    for p in own:
        p.grad = torch.randn_like(p, generator=None)
    optimizer.step()
    engine.update_weights(1)
    after = tokens(run(engine, work))
    assert after == tokens(run(HFEngine(model), work)) != before
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)


def test_the_effective_weight_is_what_peft_merges():
    model = adapted()
    plain = dict(merged(model).named_modules())
    for name, layer in Adapter.from_module(model).layers.items():
        torch.testing.assert_close(effective_weight(layer), plain[name].weight, atol=1e-6, rtol=1e-5)
        with Adapter.from_module(model).disabled():
            assert torch.equal(effective_weight(layer), plain_linear(layer).weight)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}])
def test_an_adapter_that_is_more_than_a_product_of_two_runs_as_a_module(options):
    model = adapted(**options)
    if "lora_dropout" in options:  # loading takes the noise out
        assert plain_linear(model.model.layers[0].mlp.up_proj) is None
        assert EmbeddedEngine(load_model(model)).backends["backbone"] == "fused"
        return
    engine = EmbeddedEngine(model)
    assert engine.backends["backbone"] == "module (its q_proj is a Linear)"
    work = requests(prompts(), PLAIN)
    assert tokens(run(engine, work)) == tokens(run(HFEngine(model), work))


def test_a_base_layer_in_bf16_with_an_adapter_in_fp32_keeps_the_fast_paths():
    model = adapted().to(torch.bfloat16)
    for p in Adapter.from_module(model).parameters():
        p.data = p.data.float()
    engine = EmbeddedEngine(model)
    assert engine.backends["backbone"] == "fused"
    if not isinstance(decode_kernels(), Unavailable):
        assert engine.backends["products"] == "native, packed"


def half(rslora=False, **options):
    """A bf16 model whose adapter adds less to each weight than its rounding, and by which it says other things."""
    model = adapted(use_rslora=rslora, **options).to(torch.bfloat16)
    with torch.no_grad():
        for layer in Adapter.from_module(model).layers.values():
            weight, added = layer.weight.float(), effective_weight_of(layer) - layer.weight.float()
            layer.lora_B["default"].weight.mul_(weight.abs().mean() * EPS / 4 / added.abs().mean())
    return model


EPS = torch.finfo(torch.bfloat16).eps


def effective_weight_of(layer):
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    return layer.weight.float() + layer.scaling["default"] * (b @ a)


def rounded_where_peft_rounds(layer, x):
    """A layer's result in bf16, and where it is sure: sums in fp32 in another order round to no other neighbour."""

    def linear(x, weight, bias=None):
        wide = [None if t is None else t.double() for t in (x, weight, bias)]
        exact, size = (nn.functional.linear(*args) for args in (wide, [None if t is None else t.abs() for t in wide]))
        error = (x.shape[-1] + 1) ** 0.5 * torch.finfo(torch.float32).eps * size  # of a sum of n: √n eps of their sizes
        low, high = ((exact + side).bfloat16() for side in (-error, error))
        return low, low == high

    base = plain_linear(layer)
    out, sure = linear(x, base.weight, base.bias)
    if base is not layer:
        a, sure_a = linear(x, layer.lora_A["default"].weight)
        b, sure_b = linear(a, layer.lora_B["default"].weight)
        out, sure = out + b * layer.scaling["default"], sure & sure_a.all(-1, keepdim=True) & sure_b
    return out, sure


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rslora", [False, True])
def test_products_in_bf16_add_what_an_adapter_adds_though_a_merged_weight_would_round_it_away(native, rslora):
    """Three layers of widths that share panels, one of them without an adapter, and an odd rank."""
    if native and isinstance(decode_kernels(), Unavailable):
        pytest.skip("no native kernels")
    torch.manual_seed(0)
    layers = nn.ModuleDict({"a": nn.Linear(48, 40), "b": nn.Linear(48, 8), "c": nn.Linear(48, 24)})
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["a", "c"], init_lora_weights=False, use_rslora=rslora)
    peft.inject_adapter_in_model(config, layers)
    layers.to(torch.bfloat16)
    product = PackedLinear(list(layers.values()), kernels=decode_kernels() if native else None)
    for version in range(2):
        for rows in (1, 7, 30):
            x = torch.randn(rows, 48, dtype=torch.bfloat16)
            with torch.no_grad():
                parts = [rounded_where_peft_rounds(layer, x) for layer in layers.values()]
                got = product(x)
            want, sure = (torch.cat(part, -1) for part in zip(*parts, strict=True))
            assert torch.equal(got[sure], want[sure]) and sure.double().mean() > 0.8
        with torch.no_grad():
            layers["a"].lora_B["default"].weight.mul_(2.0)
        product.refresh()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rslora", [False, True])
def test_in_bf16_the_sampler_is_as_near_to_the_trainer_with_an_adapter_as_without(native, rslora):
    """Before an update and after one; what the adapter adds is below the rounding of the base's weights."""
    model = half(rslora)
    loaded = load_model(model)
    worker = ModelWorker(loaded, optim=OptimConfig(lr=1e-2), dtype=torch.bfloat16)
    engine = EmbeddedEngine(loaded, native=native)
    assert engine.backends["backbone"] == "fused"
    rows = [Prompt(tokens=p, source="", columns={}, row=i) for i, p in enumerate(prompts())]

    def gap(engine, worker):
        groups = RolloutDriver(engine).run(single_turns(rows, Sampling(max_tokens=12), num_generations=4))
        batch = TokenBatch.from_groups(groups)
        return (worker.logprobs(batch).logprobs - batch.sampler_logprobs).abs().mean().item(), batch

    bare = load_model(build("qwen3", gain=3.0).to(torch.bfloat16))
    without, _ = gap(EmbeddedEngine(bare, native=native), ModelWorker(bare))
    for version in range(2):
        engine.update_weights(version)
        found, batch = gap(engine, worker)
        assert found < 2 * without
        weights = torch.full((batch.num_tokens,), 1 / batch.num_tokens)
        worker.forward_backward(batch.replace(weights=weights), lambda x: (x.logprobs, {}))
        worker.optim_step()


def test_adapters_in_bf16_take_no_second_copy_of_the_weights():
    model = half()
    size = sum(p.nbytes for p in Adapter.from_module(model).parameters())
    plain, bare = (EmbeddedEngine(m, native=False)._runner.forward.bytes for m in (model, build().to(torch.bfloat16)))
    assert plain == bare == 0
    if not isinstance(decode_kernels(), Unavailable):
        packs, bare = (EmbeddedEngine(m)._runner.forward.bytes for m in (model, build().to(torch.bfloat16)))
        assert 0 < packs - bare < 40 * size  # tiny widths: panels are wider than most of these layers


@pytest.mark.parametrize("native", [True, False])
def test_effective_weights_are_renewed_in_place_once_a_version(native, monkeypatch):
    """So that captured steps, which know addresses, go on; and are there again after sleep."""
    model, calls = adapted(), []
    effective = packed_linear.effective_weight
    monkeypatch.setattr(packed_linear, "effective_weight", lambda layer: calls.append(layer) or effective(layer))
    engine = EmbeddedEngine(model, native=native)
    held = lambda: [t.data_ptr() for p in engine._runner.forward._backbone.products() for t in p._merged.values()]
    work = requests(prompts(), PLAIN, group=2)
    run(engine, work)
    places, calls[:] = held(), []
    assert len(places) == (0 if engine.backends["products"] != "torch" else 14)
    with torch.no_grad():
        for p in Adapter.from_module(model).parameters():
            p.mul_(1.5)
    engine.update_weights(1)
    after = tokens(run(engine, work))
    assert tokens(run(engine, work)) == after == tokens(run(HFEngine(model), work))
    packs = engine.backends["products"] != "torch"
    assert len(calls) == (15 if packs else 14) and held() == places  # each layer once; packed, the head too
    engine.sleep()
    assert not held() and engine._runner.forward.bytes == 0
    engine.wake_up()
    assert tokens(run(engine, work)) == after


def test_an_engine_with_weights_of_its_own_is_sent_the_adapter_alone():
    model = load_model(adapted())
    own = EmbeddedEngine(model, own_weights=True)
    work = requests(prompts(), PLAIN, group=2)
    before = tokens(run(own, work))
    worker = ModelWorker(model, optim=OptimConfig())
    with torch.no_grad():
        for p in model.adapter.parameters():
            p.mul_(1.5)
    sent = dict(worker.trained_weights())
    assert own.caps.adapters and len(sent) == 28 and all("lora_" in name for name in sent)
    assert tokens(run(own, work)) == before
    own.update_weights(1, iter(sent.items()))
    assert tokens(run(own, work)) == tokens(run(EmbeddedEngine(model), work)) != before
    with pytest.raises(EngineError, match="no weights were given"):
        own.update_weights(2, iter(list(sent.items())[:-1]))
    with pytest.raises(EngineError, match="trained_weights"):
        own.update_weights(2)
