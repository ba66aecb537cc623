"""The fused backbone and packed weights: equal to the module where they fit, aside where they don't, never stale."""

from dataclasses import replace

import pytest
import torch
import transformers as tf
from tiny import FAMILIES, FORMS, build, prompts, requests, run
from torch import nn

from whet.models.heads import Head
from whet.models.linear_logprob import linear_logprob
from whet.models.load import load_model
from whet.native.build import Unavailable
from whet.native.decode import decode_kernels
from whet.ops.logprobs import selective_log_softmax
from whet.rollout.base import Sampling
from whet.rollout.driver import RolloutDriver, single_turns
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.engine.model_forward import FusedForward, ModuleForward, make_forward
from whet.rollout.engine.packed_linear import PackedLinear
from whet.rollout.hf import HFEngine
from whet.train.worker import ModelWorker
from whet.types import Prompt, TokenBatch

PLAIN = Sampling(max_tokens=8)
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def tokens(done):
    return {i: o.tokens.tolist() for i, o in done.items()}


KERNELS = decode_kernels()
native_only = pytest.mark.skipif(isinstance(KERNELS, Unavailable), reason=f"no native kernels: {KERNELS}")
WAYS = pytest.mark.parametrize("kernels", [None, pytest.param(KERNELS, marks=native_only)], ids=["torch", "native"])


@WAYS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 200])
def test_a_product_equals_the_layers_one_by_one(rows, bias, kernels):
    torch.manual_seed(0)
    layers = [nn.Linear(48, 40, bias=bias), nn.Linear(48, 8, bias=False)]
    product = PackedLinear(layers, kernels=kernels)
    x = torch.randn(rows, 48)
    want = torch.cat([layer(x) for layer in layers], -1)
    with torch.no_grad():
        torch.testing.assert_close(product(x), want, atol=2e-6, rtol=1e-5)
        assert kernels is not None or torch.equal(product(x), want)
    assert (product.bytes == 0) == (kernels is None) and product.bytes >= 0


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_takes_the_norm_before_it_in_where_it_rounds_no_worse(dtype):
    torch.manual_seed(0)
    layer, norm = nn.Linear(48, 40, dtype=dtype), nn.RMSNorm(48, dtype=dtype)
    nn.init.normal_(norm.weight)
    product, x = PackedLinear([layer], kernels=KERNELS, norm=norm), torch.randn(3, 48, dtype=dtype)
    with torch.no_grad():
        want = layer(x * norm.weight)
        assert (product.gain is None) == (dtype == torch.bfloat16)
        torch.testing.assert_close(
            product(x if product.gain is not None else x * norm.weight), want, atol=2e-5, rtol=1e-2
        )
        norm.weight.mul_(2.0)
        product.refresh()
        if product.gain is not None:
            torch.testing.assert_close(product(x), layer(x * norm.weight), atol=2e-5, rtol=1e-4)
    product.drop()
    assert product.gain is None and torch.equal(product(x), layer(x))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral_window"])
def test_the_fused_backbone_without_packing_makes_the_same_tokens(family):
    model = build(family, gain=3.0)
    engine = EmbeddedEngine(model, native=False)
    assert engine.backends["backbone"] == "fused"
    assert engine.backends["products"] == "torch" and engine.weight_bytes == 0
    work = requests(prompts(), PLAIN, group=3)
    assert tokens(run(engine, work)) == tokens(run(HFEngine(model), work))


def test_the_backbone_norms_with_the_models_own_epsilon():
    model = build("qwen3", gain=3.0, rms_norm_eps=0.3)
    engine, work = EmbeddedEngine(model), requests(prompts(), PLAIN)
    assert engine.backends["backbone"] == "fused"
    assert tokens(run(engine, work)) == tokens(run(HFEngine(model), work))


def spoiled(model, what):
    """A model of the right structure that does something else."""
    layer = model.model.layers[1]
    if what == "scaled residual":
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x: inner(x) * 1.01
    elif what == "adapter":
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    elif what == "hidden hook":
        layer.register_forward_hook(lambda m, a, out: out + 0.01)
    elif what == "norm":
        layer.input_layernorm.register_parameter("bias", nn.Parameter(torch.zeros(32)))
    return model


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("scaled residual", "hidden states differ by"),
        ("adapter", "its q_proj is a Sequential"),
        ("hidden hook", "hidden states differ by"),
        ("norm", "not a plain RMSNorm"),
    ],
)
def test_a_model_that_does_something_else_runs_as_the_module(what, reason):
    model = spoiled(build(gain=3.0), what)
    engine = EmbeddedEngine(model)
    assert reason in engine.backends["backbone"] and engine.weight_bytes == 0
    work = requests(prompts(), PLAIN)
    assert tokens(run(engine, work)) == tokens(run(HFEngine(model), work))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_is_named_and_the_module_runs_where_the_backbone_does_not_fit(family):
    made = make_forward(load_model(build(family)), fast=True, native=True)
    assert isinstance(made, FusedForward) == (made.backends["backbone"] == "fused")
    assert isinstance(made, ModuleForward) == made.backends["backbone"].startswith("module (")
    assert make_forward(made.loaded, fast=False, native=True).backends["backbone"] == "module (fast=False)"


def test_bf16_logprobs_of_both_paths_agree_to_its_rounding():
    model = build(gain=1.0).bfloat16()
    work = requests(prompts(), Sampling(max_tokens=1, return_logits=True))
    fast, slow = EmbeddedEngine(model), EmbeddedEngine(model, fast=False)
    assert fast.backends["backbone"] == "fused"
    a, b = run(fast, work), run(slow, work)
    for i in a:
        got, want = (torch.from_numpy(x[i].logits).log_softmax(-1) for x in (a, b))
        assert 0 <= (got - want).abs().max() < 0.02


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("announced", [True, False])
def test_new_weights_are_packed_again(announced, native):
    model = build(gain=3.0)
    engine, work = EmbeddedEngine(model, native=native), requests(prompts(), PLAIN, group=2)
    before = tokens(run(engine, work))
    with torch.no_grad():
        for p in model.parameters():
            (p.data if announced else p).mul_(-0.9)  # a write through .data can't be seen, but is announced
    if announced:
        engine.update_weights(1)
    after = tokens(run(engine, work))
    assert after != before
    assert after == tokens(run(HFEngine(model), work))


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_sleep_frees_the_packed_copies_and_they_come_back(native):
    engine, work = EmbeddedEngine(build(gain=3.0), native=native), requests(prompts(), PLAIN)
    held, want = engine.weight_bytes, tokens(run(engine, work))
    engine.sleep()
    assert engine.weight_bytes == 0
    engine.wake_up()
    assert tokens(run(engine, work)) == want and engine.weight_bytes == held


def test_what_the_engine_leaves_behind_can_still_be_trained():
    model = build(gain=3.0)
    run(EmbeddedEngine(model), requests(prompts(), PLAIN))
    model.set_attn_implementation("eager")
    model(input_ids=torch.arange(6)[None]).logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@EACH
def test_in_bf16_a_request_gives_the_same_tokens_alone_and_in_a_crowd(form):
    """Products round a row the same way whatever stands beside it; torch's piecewise attention does not."""
    engine = EmbeddedEngine(build(gain=2.0).bfloat16(), **form)
    work = requests(prompts(), Sampling(max_tokens=24), group=6)
    crowd = tokens(run(engine, work))
    other = [i for i in range(0, 30, 3) if tokens(run(engine, [work[i]]))[i] != crowd[i]]
    assert len(other) <= engine.backends["kernels"].startswith("torch")  # a draw within rounding of a boundary aside


@EACH
def test_logprobs_in_bf16_are_those_of_the_model_to_its_rounding(form):
    model = build(gain=1.0).bfloat16()
    work = requests(prompts(), Sampling(max_tokens=20), group=2)
    done = run(EmbeddedEngine(model, **form), work)
    model.set_attn_implementation("eager")
    for r in work:
        ids = torch.tensor([[*r.tokens.tolist(), *done[r.id].tokens.tolist()]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, len(r.tokens) - 1 : -1].float().log_softmax(-1)
        want = logp.gather(1, torch.from_numpy(done[r.id].tokens).long()[:, None])[:, 0]
        assert (torch.from_numpy(done[r.id].logprobs) - want).abs().max() < 0.02


HEADS = {
    "granite": (tf.GraniteConfig, {"logits_scaling": 0.3, "embedding_multiplier": 3.0}, Head("scale", 1 / 0.3)),
    "cohere": (tf.CohereConfig, {"logit_scale": 0.7}, Head("scale", 0.7)),
    "capped": (tf.Qwen3Config, {}, Head("softcap", softcap=7.0)),
    "fused": (tf.Qwen3Config, {}, Head("scale", 0.7)),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_half_precision_head_is_rounded_alike_for_the_sampler_and_the_trainer(name, monkeypatch):
    config, own, head = HEADS[name]
    monkeypatch.setitem(FAMILIES, name, (config, own))
    loaded = replace(load_model(build(name).to(torch.bfloat16)), lm_head=head)
    made = make_forward(loaded, fast=name in ("capped", "fused"), native=False)  # torch's own, on both sides
    assert type(made) is (FusedForward if name in ("capped", "fused") else ModuleForward)
    layer = loaded.module.get_output_embeddings()
    hidden = (4 * torch.randn(200, 32, generator=torch.manual_seed(0))).to(torch.bfloat16)
    ids = torch.arange(200) % layer.out_features
    with torch.no_grad():
        logits = made.logits(hidden)
        want, _ = linear_logprob(hidden, layer.weight, ids, scale=head.scale, softcap=head.softcap)
        torch.testing.assert_close(logits, head.logits(layer(hidden)), rtol=0, atol=0)
    assert logits.dtype == torch.float32 and logits.abs().max() > 4
    torch.testing.assert_close(selective_log_softmax(logits, ids), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["granite", "cohere"])
def test_logprobs_of_a_half_precision_model_that_scales_its_logits_are_the_trainers(name, monkeypatch):
    config, own, head = HEADS[name]
    monkeypatch.setitem(FAMILIES, name, (config, own))
    loaded = load_model(build(name, gain=2.0).to(torch.bfloat16))
    assert loaded.lm_head.scale == pytest.approx(head.scale)
    rows = [Prompt(tokens=p, source="", columns={}, row=i) for i, p in enumerate(prompts())]
    groups = RolloutDriver(EmbeddedEngine(loaded)).run(single_turns(rows, Sampling(max_tokens=12), num_generations=4))
    batch = TokenBatch.from_groups(groups)
    apart = (ModelWorker(loaded).logprobs(batch).logprobs - batch.sampler_logprobs).abs()
    assert apart.mean() < 0.01 and apart.max() < 0.05
