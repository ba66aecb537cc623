"""Layers with other forwards: the same numbers and gradients as the module's own, or its own."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from whet.models import fast_layers, matmul
from whet.models.activation_checkpointing import checkpoint_activations
from whet.models.fast_layers import FastLayers
from whet.models.lora_layers import Adapter, SeededDropout
from whet.models.matmul import linear, onednn_unsupported_reason
from whet.native.build import Unavailable

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(autouse=True)
def small_products_count(monkeypatch):
    """Products of any size go the fast way."""
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)


def qwen(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})).to(dtype)
    for name, p in model.named_parameters():
        if "norm" in name:  # ones at first
            nn.init.uniform_(p, 0.5, 1.5)
    return model


def run(model, fast=None):
    ids = torch.arange(30).view(2, 15)
    with fast.enabled() if fast else torch.enable_grad():
        logits = model(ids).logits
        logits.square().sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": logits.detach(), **found}


def same(got, want, limit):
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).abs().max() <= limit * want[name].abs().max(), name


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_every_gradient_are_the_modules_own(dtype, limit, bias):
    model = qwen(dtype, attention_bias=bias)
    fast = FastLayers(model)
    kinds = [run.__name__ for _, run in fast._layers]
    assert kinds.count("_run_gated") == 2 and kinds.count("_run_norm") == (9 if dtype == torch.float32 else 0)
    assert kinds.count("_run_linear") == (15 if dtype == torch.float32 and onednn_unsupported_reason() is None else 0)
    same(run(model, fast), run(model), limit)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_layer_run_again_under_checkpointing_has_the_same_gradients_to_the_bit(mode):
    model = qwen().train()
    plain, want = run(model), run(model, FastLayers(model))
    checkpoint_activations(model, mode)
    same(run(model, FastLayers(model)), want, 0.0)
    same(want, plain, 1e-5)


def test_the_gradient_of_a_norm_is_that_of_its_formula():
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    norm = lambda x, w: fast_layers._Norm.apply(x, w, 1e-3)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w
    assert (norm(x, w) - want).abs().max() < 1e-14
    assert torch.autograd.gradcheck(norm, (x.requires_grad_(), w.requires_grad_()))


def test_frozen_weights_get_no_gradient_and_pass_one_on():
    model = qwen()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0.mlp.gate_proj" in name or "embed" in name)
    found = run(model, FastLayers(model))
    assert len(found) == 3
    same(found, run(model), 1e-5)


def test_the_module_is_as_it_was_afterwards_also_after_an_error():
    model = qwen()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(ZeroDivisionError), FastLayers(model).enabled():
        assert any("forward" in vars(m) for m in model.modules())
        raise ZeroDivisionError
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


def as_on_a_gpu(model, kind):
    return [pair for pair in fast_layers._in_fewer_kernels(model) if pair[1] is kind]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_mlp_of_a_gpu_keeps_two_halves_and_has_the_modules_own_bits(dtype, lora, monkeypatch):
    monkeypatch.setattr(fast_layers, "_native", lambda *tensors: None)
    monkeypatch.setattr(fast_layers, "_cache_blocks", lambda rows: [slice(None)])
    model, fast, held = adapted(dtype) if lora else qwen(dtype), FastLayers(qwen()), []
    fast._layers = as_on_a_gpu(model, fast_layers._run_gated)
    assert len(fast) == 2
    own = run(model)
    for layers in (fast, None):
        keep = lambda x: held[-1].update({x.untyped_storage().data_ptr(): x}) or x
        held.append({})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            same(run(model, layers), own, 0.0)
    wide = [sum(x.shape[-1] == 48 and x.dim() < 4 and len(x) in (2, 30) for x in kept.values()) for kept in held]
    assert wide == [2 * (3 if lora else 2), 2 * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_a_gpu_is_torchs_where_it_only_rounds_less_often(dtype):
    model, wide, fast = qwen(dtype), qwen(torch.float64), FastLayers(qwen())
    fast._layers = as_on_a_gpu(model, fast_layers._run_norm_in_one)
    assert len(fast) == 9 and not fast_layers._in_fewer_kernels(Gemma2ForCausalLM(Gemma2Config(**SIZES)).to(dtype))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in wide.named_parameters()}
    wide.load_state_dict({n: p.double() for n, p in model.state_dict().items()})
    exact, found, own = run(wide), run(model, fast), run(model)
    off = lambda numbers: sum((numbers[n].double() - exact[n]).square().sum() for n in exact).sqrt()
    assert off(found) < 1.1 * off(own)


class Operations(TorchDispatchMode):
    """Counts what a GPU would run as a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "mul", "add", "add_")
        return func(*args, **(kwargs or {}))


def adapted(dtype, targets=("q_proj", "up_proj", "down_proj")):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(targets), init_lora_weights=False)
    model = qwen().requires_grad_(False)
    torch.manual_seed(1)
    return peft.inject_adapter_in_model(config, model).to(dtype)


def test_a_layer_with_lora_is_eight_products_on_a_gpu_which_round_less_often():
    model, wide = adapted(torch.bfloat16), adapted(torch.float64)
    wide.load_state_dict({n: p.double() for n, p in model.state_dict().items()})
    fast = FastLayers(qwen())
    for m, limit in ((wide, 1e-12), (model, None)):
        fast._layers = as_on_a_gpu(m, fast_layers._run_adapted)
        assert len(fast) == 6
        found, own = run(m, fast), run(m)
        assert len(own) == 13
        if limit:
            exact = own
            same(found, own, limit)
    off = lambda numbers: sum((numbers[n].double() - exact[n]).square().sum() for n in exact).sqrt()
    assert off(found) < 1.1 * off(own)
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(9, 32, dtype=torch.bfloat16, requires_grad=True)
    for runs, count in ((fast_layers._run_adapted, 8), (type(layer).forward, 12)):
        with Operations() as operations:
            torch.autograd.grad(runs(layer, x).sum(), (x, *(p for p in layer.parameters() if p.requires_grad)))
            assert operations.count == count


def gradient(y, weight):
    return torch.autograd.grad(y.sum(), weight)[0] if weight.requires_grad else weight


def test_a_layer_with_lora_runs_as_its_own_where_the_formula_is_another(monkeypatch):
    model, x = adapted(torch.bfloat16), torch.randn(2, 9, 32, dtype=torch.bfloat16)
    layer, called = model.model.layers[0].mlp.up_proj, []
    own = type(layer).forward
    plain = own(layer, x)
    layer.lora_A["default"].register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(fast_layers._run_adapted(layer, x), plain) and called
    layer = model.model.layers[1].mlp.up_proj
    with Adapter.from_module(model).disabled():
        assert torch.equal(fast_layers._run_adapted(layer, x), own(layer, x))
    layer.lora_dropout["default"] = SeededDropout(0.5, 0)
    assert not torch.equal(fast_layers._run_adapted(layer, x), own(layer, x))
    layer.lora_dropout["default"].keys = torch.arange(18)
    assert torch.equal(fast_layers._run_adapted(layer, x), own(layer, x))
    for wide, frozen in ((True, True), (False, False)):  # adapters in fp32; a base that is trained too
        layer = adapted(torch.bfloat16).model.layers[0].mlp.up_proj
        layer.get_base_layer().requires_grad_(not frozen)
        layer.lora_A.to(torch.float32 if wide else torch.bfloat16), layer.lora_B.to(layer.lora_A.default.weight.dtype)
        results = fast_layers._run_adapted(layer, x), own(layer, x)
        assert torch.equal(*results) and torch.equal(*(gradient(y, layer.get_base_layer().weight) for y in results))
    layer = adapted(torch.bfloat16).model.layers[0].mlp.up_proj
    assert fast_layers._matches_adapter(layer)
    monkeypatch.setattr(type(layer), "forward", lambda self, x: 1.1 * own(self, x))
    assert not fast_layers._matches_adapter(layer)


def test_what_passes_through_an_adapter_whose_a_is_frozen_has_its_gradient():
    layer, x = adapted(torch.float64).model.layers[0].mlp.up_proj, torch.randn(9, 32, dtype=torch.float64)
    layer.lora_A.requires_grad_(False)
    x.requires_grad_(True)
    wanted, held = (x, layer.lora_B.default.weight), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.data_ptr()) or t, lambda t: t):
        y = fast_layers._run_adapted(layer, x)
        fast_layers._Linear.apply(x, layer.get_base_layer().weight, None)
    for a, b in zip(torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(layer(x).sum(), wanted)):
        torch.testing.assert_close(a, b)
    assert x.data_ptr() not in held  # no gradient needs it


def test_the_gradient_of_a_product_of_gates_is_also_that_of_what_is_added_to_it():
    gate, up, other = (torch.randn(5, 48, requires_grad=True) for _ in range(3))
    grad = torch.randn(5, 48)
    y = fast_layers._GatedProduct.apply(gate, up) + other
    assert torch.equal(torch.autograd.grad(y, (gate, up, other), grad.clone())[2], grad)


def test_layers_of_another_formula_keep_their_own_forward():
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES))  # norms of 1 + w, an MLP of gelu
    assert not [run for _, run in FastLayers(gemma)._layers if run.__name__ != "_run_linear"]
    same(run(gemma, FastLayers(gemma)), run(gemma), 1e-5)
    assert not FastLayers(gemma.bfloat16().to("meta")) and FastLayers(qwen(torch.bfloat16).to("meta"))


def test_a_hook_on_a_layer_is_called():
    model = qwen()
    fast, seen = FastLayers(model), []
    mlp = model.model.layers[0].mlp
    for layer in (mlp, mlp.down_proj, model.model.layers[1].mlp.down_proj, model.model.norm):
        layer.register_forward_hook(lambda m, args, out: seen.append(m))
    want = run(model)
    assert len(seen) == 4
    same(run(model, fast), want, 1e-5)
    assert len(seen) == 8


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_every_kind_of_hook_on_the_last_part_of_an_mlp_is_called(kind):
    model, seen = qwen(), []
    fast, down = FastLayers(model), model.model.layers[0].mlp.down_proj
    getattr(down, f"register_{kind}")(lambda *args: seen.append(kind))
    run(model, fast)
    assert seen == [kind]


def test_a_layer_runs_its_own_forward_while_its_parameters_are_of_another_class():
    class Sharded(nn.Parameter):
        pass

    model, ran = qwen(), []
    fast, down = FastLayers(model), model.model.layers[1].mlp.down_proj
    fast._layers = [(layer, lambda m, x, own=own: ran.append(m) or own(m, x)) for layer, own in fast._layers]
    want, plain = run(model), [run(model, fast), *ran]
    ran.clear()
    changed = (model.model.norm, model.lm_head, down)
    for layer in changed:
        layer.weight = Sharded(layer.weight.detach().clone())
    got = run(model, fast)
    same(got, want, 1e-5)
    same(plain[0], want, 1e-5)
    assert [layer for layer in plain[1:] if layer not in changed] == ran and model.model.norm in plain


def test_processes_keep_the_layers_that_all_have_found():
    model = qwen()
    fast, other = FastLayers(model), FastLayers(model)
    other._layers = other._layers[::2]
    theirs = []
    other.agree(lambda own: theirs.append(own) or [own])
    fast.agree(lambda own: [own, *theirs])
    assert 0 < len(fast) == len(other) and fast._layers == other._layers
    fast.agree(lambda own: [own, ([("lm_head", "another")], None)])
    assert not fast
    for others, is_kept in ((3, True), (2, False)):  # rotary functions
        fast._rotary = [None] * 3
        fast.agree(lambda own, n=others: [own, ([], n)])
        assert (fast._rotary is not None) is is_kept


def test_in_bf16_logits_are_the_modules_own_and_gradients_at_least_as_near_to_the_exact_ones():
    model = qwen(torch.bfloat16)
    fast = FastLayers(model)
    assert sorted({run.__name__ for _, run in fast._layers}) == ["_run_gated", "_run_norm"] and len(fast) == 11
    exact = qwen(torch.float32)
    exact.load_state_dict(model.state_dict())
    own, got, want = run(model), run(model, fast), run(exact)
    assert (got["logits"] != own["logits"]).double().mean() < 0.02
    assert all(g.dtype == torch.bfloat16 for g in got.values())
    gap = lambda found, name: (found[name].float() - want[name]).norm() / want[name].norm()
    for name in want:
        assert gap(got, name) < 1.2 * gap(own, name) + 1e-3, name
    assert sum(gap(got, n) for n in want) < 1.02 * sum(gap(own, n) for n in want)


def test_a_norm_that_rounds_at_another_place_keeps_its_own_forward_in_bf16():
    class Late(nn.Module):
        """Times its weight in fp32, then rounded, as OLMo 2 does it."""

        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, 32)), 1e-6

        def forward(self, x):
            wide = x.float() * (x.float().square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
            return (self.weight * wide).to(x.dtype)

    assert len(FastLayers(Late())) == 1 and len(FastLayers(Late().to(torch.bfloat16))) == 0


def test_a_norm_in_bf16_keeps_its_own_forward_for_wider_rows():
    norm = qwen(torch.bfloat16).model.norm
    x = torch.randn(3, 32)
    want = norm(x)
    with FastLayers(norm).enabled():
        got = norm(x)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert torch.equal(fast_layers._run_norm_in_one(norm, x), want)


def test_a_module_in_fp16_or_without_known_layers_is_left_alone():
    assert len(FastLayers(qwen(torch.float16))) == 0
    assert len(FastLayers(nn.Embedding(3, 2))) == 0


@pytest.mark.skipif(onednn_unsupported_reason() is not None, reason="this processor's default products are as fast")
def test_a_product_by_onednn_is_the_default_one_for_any_layout():
    torch.manual_seed(0)
    x, w, b = torch.randn(37, 24), torch.randn(40, 24), torch.randn(40)
    for weight in (w, w.t().contiguous().t()):
        for bias in (None, b):
            want = nn.functional.linear(x, weight, bias)
            assert (linear(x, weight, bias) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.75), (torch.bfloat16, 0.6)])
def test_an_mlp_keeps_two_halves_for_the_backward_pass_and_a_norm_only_its_input(dtype, share):
    model = qwen(dtype)
    kept = {}
    for name, fast in (("own", None), ("fast", FastLayers(model))):
        sizes = {}
        held = lambda x, sizes=sizes: sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        with torch.autograd.graph.saved_tensors_hooks(lambda x, held=held: (held(x), x)[1], lambda x: x):
            run(model, fast)
        kept[name] = sum(sizes.values()) - sum(p.nbytes for p in model.parameters())
    assert kept["fast"] < share * kept["own"]


LAYOUTS = {
    "rows": lambda n: torch.randn(7, n),
    "one_row": lambda n: torch.randn(1, n),
    "no_row": lambda n: torch.randn(2, 0, n),
    "one_vector": lambda n: torch.randn(n),
    "transposed": lambda n: torch.randn(n, 7).t(),
    "part_of_wider_rows": lambda n: torch.randn(2, 5, 3 * n)[..., n : 2 * n],
    "expanded": lambda n: torch.randn(1, n).expand(6, n),
}


def formula(name, ins):
    """The three functions, from their equations."""
    if name == "norm":
        x, w = ins
        return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-3).sqrt() * w
    x, w, b = (ins[0] / (1 + (-ins[0]).exp()) * ins[1], *ins[2:]) if name == "gated" else ins
    return torch.einsum("...i,oi->...o", x, w) + b


@pytest.mark.spread(16)
@pytest.mark.parametrize("width", [24, 48])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["linear", "gated", "norm"])
def test_values_and_gradients_are_those_of_the_formulas_for_any_layout_and_any_part_that_is_asked_for(
    name, layout, native, width, monkeypatch
):
    torch.manual_seed(0)
    if not native:
        monkeypatch.setattr(fast_layers, "layer_kernels", lambda: Unavailable("no compiler"))
        monkeypatch.setattr(matmul, "layer_kernels", lambda: Unavailable("no compiler"))
    inputs = [LAYOUTS[layout](width) for _ in range(2 if name == "gated" else 1)]
    inputs += [torch.randn(width)] if name == "norm" else [torch.randn(40, width), torch.randn(40)]
    function = {"linear": fast_layers._Linear, "gated": fast_layers._Gated, "norm": fast_layers._Norm}[name].apply
    rest = (1e-3,) if name == "norm" else ()
    for asked in itertools.product([False, True], repeat=len(inputs)):
        mine = [x.detach().requires_grad_(a) for x, a in zip(inputs, asked)]
        want = [x.detach().double().requires_grad_(a) for x, a in zip(inputs, asked)]
        got, right = function(*mine, *rest), formula(name, want)
        close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
        close(got.double(), right)
        grad = torch.randn(right.shape[::-1]).permute(*range(right.dim() - 1, -1, -1))
        for kind in (grad, torch.ones(()).expand(right.shape)) if any(asked) else ():  # as of a sum
            found = torch.autograd.grad(got, [x for x in mine if x.requires_grad], kind, retain_graph=True)
            exact = torch.autograd.grad(right, [x for x in want if x.requires_grad], kind.double(), retain_graph=True)
            for a, b in zip(found, exact, strict=True):
                close(a.double(), b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_work_done_in_parts_changes_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(fast_layers, "layer_kernels", lambda: Unavailable("no compiler"))  # they have no parts
    monkeypatch.setattr(matmul, "layer_kernels", lambda: Unavailable("no compiler"))
    model = qwen(dtype, hidden_size=64, intermediate_size=64)  # torch's own tails, below 64 numbers, round differently
    want = run(model, FastLayers(model))
    monkeypatch.setattr(fast_layers, "CACHE_BLOCK", 7 * 64)  # 30 rows: five parts, the last a short one
    same(run(model, FastLayers(model)), want, 0.0)


class Clamped(nn.Module):
    """An MLP whose gate stops at 10: the formula for all smaller numbers."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj, self.act_fn = nn.Linear(48, 32), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x))


class LateRounding(nn.Module):
    """A norm that meets its weight in fp32: the same bits as another's while the weight is 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32, dtype=torch.bfloat16)), 1e-6

    def forward(self, x):
        wide = x.float()
        return (self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())).to(x)


class GatedNorm(nn.Module):
    """A norm that takes a gate."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x, gate=None):
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def silent():
    """An MLP of another activation whose output is 0."""
    mlp = Gemma2ForCausalLM(Gemma2Config(**SIZES)).model.layers[0].mlp
    nn.init.zeros_(mlp.down_proj.weight)
    return mlp


@pytest.mark.parametrize("make", [Clamped, LateRounding, GatedNorm, silent])
def test_what_one_trial_would_not_tell_apart_keeps_its_own_forward(make):
    torch.manual_seed(0)
    layer = make()
    assert [found for found, run in FastLayers(layer)._layers if run.__name__ != "_run_linear"] == []


def test_a_forward_of_the_users_own_on_the_last_part_of_an_mlp_is_run():
    mlp = qwen().model.layers[0].mlp
    seen, down = [], mlp.down_proj
    down.forward = functools.partial(lambda layer, x: seen.append(1) or type(layer).forward(layer, x), down)
    fast = FastLayers(mlp)
    seen.clear()  # the trial's own call
    with fast.enabled():
        mlp(torch.randn(3, 32))
    assert seen == [1]


@pytest.mark.parametrize(("wide", "native"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_weights_are_the_product_whoever_makes_them(wide, native, dtype, monkeypatch):
    torch.manual_seed(0)
    grad, x, made = torch.randn(30, 40).to(dtype), torch.randn(24, 30).to(dtype).t(), []
    monkeypatch.setattr(matmul, "has_full_width_avx512", lambda: wide)
    monkeypatch.setattr(matmul, "linear", lambda *factors: made.append(1) or linear(*factors))
    if not native:
        monkeypatch.setattr(matmul, "layer_kernels", lambda: Unavailable("no compiler"))
    elif isinstance(matmul.layer_kernels(), Unavailable):
        pytest.skip("no kernels can be built here")
    want = grad.double().t() @ x.double()
    got = matmul.weight_grad(grad, x)
    assert got.dtype == dtype
    assert (got - want).abs().max() < {torch.bfloat16: 1e-2}.get(dtype, 1e-5) * want.abs().max()
    assert len(made) == (wide and not native and dtype == torch.float32)


def test_only_a_processor_of_amd_with_whole_registers_is_taken_for_one(monkeypatch):
    for family, refusal, wide in (("26", None, True), ("25", None, False), (None, None, False), ("26", "no", False)):
        monkeypatch.setattr(matmul, "cpu_info", lambda family=family: {"family": family})
        monkeypatch.setattr(matmul, "onednn_unsupported_reason", lambda refusal=refusal: refusal)
        assert matmul.has_full_width_avx512.__wrapped__() is wide


def test_an_expert_that_no_token_goes_to_has_gradients_of_zero():
    mlp = qwen().model.layers[0].mlp
    with FastLayers(mlp).enabled():
        out = mlp(torch.zeros(0, 32))
        out.sum().backward()
    assert out.shape == (0, 32) and all((p.grad == 0).all() for p in mlp.parameters())
