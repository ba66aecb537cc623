"""The native kernels: equal to plain formulas, a row's bits its own, and torch's kernels where they can't be had."""

import os
import platform
import weakref

import numpy as np
import pytest
import torch
from builds import BUILDS, compiler
from helpers import full
from tiny import build, prompts, requests, run

from whet.errors import EngineError
from whet.native import build as native_build
from whet.native.decode import DecodeKernels, decode_kernels
from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine, fused_backbone
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.native_step import NativeLayer, NativeLayout
from whet.rollout.engine.packed_linear import PackedLinear

KERNELS = decode_kernels()
needs_kernels = pytest.mark.skipif(isinstance(KERNELS, native_build.Unavailable), reason=str(KERNELS))
LENGTHS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest difference by dtype, of numbers of size 1."""


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request, tmp_path_factory):
    """The kernels, as this and lesser processors have them."""
    if not BUILDS[request.param]:
        yield KERNELS
        return
    if platform.machine() != "x86_64":
        pytest.skip("flags of x86-64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(native_build, "FLAGS", (*native_build.FLAGS, *BUILDS[request.param]))
        made = load()
    assert isinstance(made, DecodeKernels), made
    assert made.lanes == (8 if request.param == "256 bits" else KERNELS.lanes)
    yield made


def load():
    """Without what this process has loaded already."""
    return decode_kernels.__wrapped__()


class Case:
    """Rows with prompts and own tokens, drawn from a seed: attended by the kernels and by the formula."""

    def __init__(self, kernels, heads, kv, size, dtype, *, norms=True, window=None, rows=7, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.kernels = kernels
        self.draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
        self.heads, self.kv, self.size, self.dtype, self.window = heads, kv, size, dtype, window
        self.plens = {64: [40, 64], 128: [100]}
        self.stores = {bucket: KVStore() for bucket in self.plens}
        for bucket, store in self.stores.items():
            store.reserve(len(self.plens[bucket]), bucket, longest=bucket)
            for x in store.layer(0, *(self.draw(1, kv, 1, size),) * 2):
                x.copy_(self.draw(*x.shape))
        self.buckets = np.array([64, 128, 64, 64, 128, 64, 64])[:rows]
        self.slots = np.array([0, 0, 1, 0, 0, 1, 0])[:rows]
        self.lengths = np.array([self.plens[b][s] for b, s in zip(self.buckets, self.slots, strict=True)])
        self.made = torch.tensor([0, 1, 63, 64, 65, 130, 20])[:rows]
        self.own = KVStore()
        self.own.reserve(7, 160)
        for x in self.own.layer(0, *(self.draw(1, kv, 1, size),) * 2):
            x.copy_(self.draw(*x.shape))
        angle = torch.rand(400, size // 2, generator=generator) * 6
        cos, sin = (torch.cat([f(angle)] * 2, 1).to(dtype) for f in (torch.cos, torch.sin))
        self.cos, self.sin = cos, torch.cat([-sin[:, : size // 2], sin[:, size // 2 :]], 1)
        self.qkv = self.draw(7, (heads + 2 * kv) * size)[:rows]
        self.norm = 1 + 0.1 * self.draw(heads + kv, size) if norms else None

    def attend(self, rows=None):
        """By the kernels, over the rows asked for."""
        at = np.arange(len(self.qkv)) if rows is None else np.array(rows)
        own = KVStore()
        own.reserve(len(at), 160)
        for mine, x in zip(own.layer(0, *self.own.layer(0, None, None)), self.own.layer(0, None, None), strict=True):
            mine.copy_(x[at])
        layout = NativeLayout(self.kernels, own)
        layout.regroup(self.stores, self.buckets[at], self.slots[at], self.lengths[at])
        made = self.made[at]
        layout.begin(made + torch.from_numpy(self.lengths[at]), made, longest=0, furthest=0, equal=False)
        layout.set_rotary(self.cos, self.sin, (self.heads, self.kv))
        layer = NativeLayer(
            norm=self.norm, epsilons=(1e-6, 1e-6), scale=self.size**-0.5, window=self.window,
            before=None, after=None, outer_epsilons=(0.0, 0.0), products=(),
        )  # fmt: skip
        return self.kernels.attend(layout.step, layout.table(0, layer, self.qkv), self.qkv[at].contiguous()), own

    def formula(self):
        """Row by row in fp64, with the roundings of the stored dtype."""
        keys, values = self.own.layer(0, None, None)
        outs = []
        for row, x in enumerate(self.qkv.view(len(self.qkv), -1, self.size)):
            store, slot, n = self.stores[int(self.buckets[row])], int(self.slots[row]), int(self.lengths[row])
            made = int(self.made[row])
            qk = x[: self.heads + self.kv].double()
            if self.norm is not None:
                qk = (qk * (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(self.dtype) * self.norm
                qk = qk.double()
            place = made + n
            qk = qk * self.cos[place] + qk.roll(self.size // 2, -1) * self.sin[place]
            q, new = qk.to(self.dtype).split([self.heads, self.kv])
            pk, pv = (y[slot, :, :n] for y in store.layer(0, None, None))
            k = torch.cat([pk, keys[row, :, :made], new[:, None]], 1).double()
            v = torch.cat([pv, values[row, :, :made], x[-self.kv :, None]], 1).double()
            scores = q.double().view(self.kv, -1, self.size) @ k.mT * self.size**-0.5
            if self.window is not None:
                scores[..., : max(0, place - self.window + 1)] = -torch.inf
            outs.append((scores.softmax(-1) @ v).flatten())
        return torch.stack(outs)


OPTIONS = [{}, {"norms": False}, {"window": 1}, {"window": 50}, {"window": 128}]


@pytest.mark.spread(20)
@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "kv", "size", "options"),
    [
        *((4, 2, 32, options) for options in OPTIONS),
        *((2, 1, 256, options) for options in OPTIONS),
        *((1, 1, 16, options) for options in OPTIONS[1:4]),
        *((6, 2, 48, options) for options in OPTIONS[::2]),
        *((20, 1, 64, options) for options in OPTIONS[::4]),
        *((8, 8, 128, options) for options in OPTIONS[1::2]),
        *((3, 3, 80, options) for options in OPTIONS[::3]),
        *((3, 1, 40, options) for options in OPTIONS[2:4]),
    ],
)
def test_attention_is_the_formula(kernels, heads, kv, size, dtype, options):
    if size % kernels.lanes:
        pytest.skip("no multiple of a register")
    case = Case(kernels, heads, kv, size, dtype, **options)
    got, own = case.attend()
    torch.testing.assert_close(got.double(), case.formula(), atol=LENGTHS[dtype], rtol=LENGTHS[dtype])
    kept = [x[torch.arange(7), :, case.made] for x in own.layer(0, None, None)]
    assert torch.equal(kept[1].flatten(1), case.qkv[:, -kv * size :])
    for mine, before in zip(own.layer(0, None, None), case.own.layer(0, None, None), strict=True):
        changed = (mine != before).any(-1).any(1)
        assert changed.sum() == 7 and changed[torch.arange(7), case.made].all()


@pytest.mark.spread(12)
@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
@pytest.mark.parametrize(("heads", "kv", "size"), [(6, 2, 48), (3, 3, 16), (1, 1, 40), (3, 1, 120)])
def test_a_row_has_the_same_bits_alone_in_a_crowd_and_with_any_number_of_threads(
    kernels, heads, kv, size, dtype, set_threads
):
    if size % kernels.lanes:
        pytest.skip("no multiple of a register")
    case = Case(kernels, heads, kv, size, dtype, window=90)
    crowd, _ = case.attend()
    for count in (1, 2, 3, 8):
        set_threads(count)
        assert torch.equal(case.attend()[0], crowd)
        for row in range(7):
            assert torch.equal(case.attend([row])[0][0], crowd[row])
        assert torch.equal(case.attend([6, 2, 0])[0], crowd[[6, 2, 0]])


@pytest.mark.spread(20)
@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (32, 33), (48, 105), (128, 96), (16, 700)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_formula_and_a_row_has_the_same_bits_in_any_number_of_rows(
    kernels, inputs, outputs, bias, dtype, set_threads
):
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    product = PackedLinear([layer], kernels=kernels)
    x = torch.randn(300, inputs).to(dtype)
    with torch.no_grad():
        want = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        whole = product(x)
        torch.testing.assert_close(whole.double(), want, atol=LENGTHS[dtype], rtol=LENGTHS[dtype])
        for threads in (1, 2, 3, 8):
            set_threads(threads)
            product.refresh()
            for rows in (1, 2, 3, 5, 8, 11, 12, 13, 25, 64, 121, 300):
                assert torch.equal(product(x[:rows]), whole[:rows])
            assert torch.equal(product(x[7:8]), whole[7:8]) and product(x[:0]).shape == (0, outputs)
        for p in layer.parameters():
            p.mul_(2)
        product.refresh()
        assert torch.equal(product(x), 2 * whole)


@needs_kernels
def test_a_product_of_another_dtype_is_refused_and_a_packed_weight_of_another_size_is_packed_anew():
    layer = torch.nn.Linear(32, 32)
    product = PackedLinear([layer], kernels=KERNELS)
    with pytest.raises(TypeError, match="float32 weights got"):
        product(torch.ones(1, 32, dtype=torch.bfloat16))
    with torch.no_grad():
        layer.weight.data = torch.ones(500, 32)
        layer.bias.data = torch.zeros(500)
        product.refresh()
        assert product(torch.ones(1, 32)).tolist() == [[32.0] * 500]


@needs_kernels
@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_model_that_changed_its_kind_behind_the_engine_is_refused(what):
    model = build(gain=3.0)
    engine = EmbeddedEngine(model)
    model.bfloat16() if what == "dtype" else model.resize_token_embeddings(80)
    engine.submit(requests(prompts(), Sampling(max_tokens=2)))
    with pytest.raises(EngineError, match="build a new engine"):
        engine.step()


@needs_kernels
def test_weights_that_the_kernels_would_misread_are_not_theirs():
    model = build(gain=1.0)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(1).expand(32))
    assert "of another dtype than the embedding, or not contiguous" in EmbeddedEngine(model).backends["kernels"]


def test_a_head_in_another_dtype_runs_as_the_module_does():
    model = build(gain=3.0)
    want = run(EmbeddedEngine(model), requests(prompts(), Sampling(max_tokens=5)))
    model.lm_head.double().register_forward_pre_hook(lambda _, x: (x[0].double(),))
    engine = EmbeddedEngine(model)
    assert "its head has another dtype" in engine.backends["backbone"]
    got = run(engine, requests(prompts(), Sampling(max_tokens=5)))
    assert {i: o.tokens.tolist() for i, o in got.items()} == {i: o.tokens.tolist() for i, o in want.items()}


@needs_kernels
def test_large_scores_take_the_largest_and_a_nan_stays_in_its_row():
    case = Case(KERNELS, 4, 2, 32, torch.float32, norms=False)
    case.qkv[:, : 6 * 32] *= 1e3
    got, _ = case.attend()
    torch.testing.assert_close(got.double(), case.formula(), atol=1e-3, rtol=1e-3)
    case.qkv[2] = torch.nan
    spoiled, _ = case.attend()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(spoiled[others], got[others]) and spoiled[2].isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
@pytest.mark.parametrize("rows", [1, 3, 400])
def test_the_norm_adds_first_and_rounds_where_the_module_does(kernels, dtype, rows, set_threads):
    torch.manual_seed(0)
    set_threads(3)
    h, more, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, 96), (rows, 96), (96,)))
    # of fp32: half of what a sum of 96 brings, √96 eps, as a root is taken; half an eps of each of four operations more
    error = (96**0.5 / 2 + 4 / 2) * torch.finfo(torch.float32).eps
    for addend in (None, more):
        for gain in (None, weight):
            kept = h.clone()
            got = kernels.norm(kept, addend, gain, 1e-5)
            wide = h if addend is None else h + addend
            assert torch.equal(kept, wide)
            x = wide.double()
            exact = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
            made = [(exact * (1 + sign * error)).to(dtype) for sign in (-1, 1)]
            ends = torch.stack([y if gain is None else y * gain for y in made])
            assert ((ends.amin(0) <= got) & (got <= ends.amax(0))).all()


@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
def test_the_gate_is_silu_times_up_far_out_too(kernels, dtype, set_threads):
    set_threads(3)
    gate = torch.tensor([*torch.linspace(-30, 30, 56).tolist(), -1e4, 1e4, -88.0, 88.5, torch.inf, -3e38, 0.0, -0.0])
    up = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([gate.expand(300, 64), up], 1).to(dtype)
    want = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    torch.testing.assert_close(kernels.gated(x), want, atol=1e-30, rtol=3e-6 if dtype == torch.float32 else 2**-7)
    x[5, 3] = torch.nan
    assert kernels.gated(x).isnan().nonzero().tolist() == [[5, 3]]


@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
def test_long_equal_prompts_change_no_bit_of_one_another_whatever_the_threads(dtype, set_threads):
    model = build("qwen3", gain=2.0, max_position_embeddings=1024).to(dtype)
    work = requests(prompts((400,) * 6), Sampling(max_tokens=12), group=2)
    done = []
    for count in (1, 2, 3):
        set_threads(count)
        crowd = run(EmbeddedEngine(model), work)
        alone = [run(EmbeddedEngine(model), [r])[r.id] for r in work[::5]]
        done += [{o.id: o for o in alone}, crowd]
    for other in done:
        for i, o in other.items():
            assert o.tokens.tolist() == done[1][i].tokens.tolist()
            assert o.logprobs.tolist() == done[1][i].logprobs.tolist()


@needs_kernels
def test_sleep_frees_the_keys_and_values_of_prompts_too():
    engine = EmbeddedEngine(build(gain=3.0))
    run(engine, requests(prompts(), Sampling(max_tokens=3)))
    engine.submit(requests(prompts(), Sampling(max_tokens=30)))
    while not engine.stats().live:
        engine.step(timeout_s=0.0)
    stores = list(engine._runner.prompt_stores.values())
    assert stores and all(s.bytes for s in stores)
    engine.sleep()
    assert not any(s.bytes for s in stores)


@pytest.mark.spread(3)
@needs_kernels
@pytest.mark.parametrize("dtype", LENGTHS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral_window"])
def test_a_request_gives_the_same_bits_alone_and_in_a_crowd(family, dtype):
    model = build(family, gain=2.0).to(dtype)
    engine = EmbeddedEngine(model, max_batch=11)
    stops = tuple(range(0, 64, 7))
    work = requests(prompts((3, 70, 40, 9, 1, 33)), Sampling(max_tokens=40, stop_ids=stops), group=5)
    crowd = run(engine, work)
    for r in work[::7]:
        alone = run(EmbeddedEngine(model), [r])[r.id]
        assert alone.tokens.tolist() == crowd[r.id].tokens.tolist()
        assert alone.logprobs.tolist() == crowd[r.id].logprobs.tolist()


# ---- where they can't be had -----------------------------------------------------------------------------------------


@needs_kernels
def test_no_keys_are_held_by_the_tables_of_an_engine_that_sleeps():
    engine = EmbeddedEngine(build(gain=3.0))
    engine.submit(requests(prompts(), Sampling(max_tokens=40), group=2))
    engine.step(timeout_s=0.0)
    assert engine.backends["kernels"].startswith("native")
    keys = weakref.ref(engine._runner.completion_store._layers[0][0])
    engine.sleep()
    assert keys() is None


def test_without_a_compiler_the_reason_is_said_and_torch_decodes(cache, tmp_path, monkeypatch):
    if not os.path.exists("/proc/self/maps") or native_build._openmp() is None:
        pytest.skip(str(load()))
    for name in ("CXX", "WHET_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load() == native_build.Unavailable("no C++ compiler (g++) is installed")
    body = "test $1 = --version && echo cc || { echo 'no such flag' >&2; exit 1; }"
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    assert load() == native_build.Unavailable("building them failed: no such flag")
    assert not list(cache.iterdir())
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert "building them failed" in str(load())
    monkeypatch.setattr(fused_backbone, "decode_kernels", load)
    model, work = build(gain=3.0), requests(prompts(), Sampling(max_tokens=8), group=2)
    engine = EmbeddedEngine(model)
    assert engine.backends["kernels"].startswith("torch (building them failed: ")
    want = run(EmbeddedEngine(model, native=False), work)
    assert {i: o.tokens.tolist() for i, o in run(engine, work).items()} == {
        i: o.tokens.tolist() for i, o in want.items()
    }


@needs_kernels
@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        full("x / (1.0f + exponential(-x))", "x / (1.1f + exponential(-x))", "gates"),
        full("sum(squares) / width", "sum(squares) / (width + 1)", "norms"),
        ("num_drawn + 1, size", "num_drawn, size", "attention"),
        full("fused(high, one, a[r][1])", "fused(low, one, a[r][1])", "products"),
        full("all(4.1665795894e-2f)", "all(4.2e-1f)", "gates"),
    ],
)
def test_kernels_that_compute_something_else_are_not_used(cache, rewrite, monkeypatch, old, new, part):
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O0"))  # in less time
    rewrite(old, new)
    assert f"{part} in torch.float32 differ" in str(load())


@needs_kernels
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("load(y + c + size / 2), load(sin", "load(y + c), load(sin", "a decode step differs by"),
        full("norm(h, residual, (const T*)l.a", "norm(h, (T*)nullptr, (const T*)l.a", "a decode step differs by"),
        ("    int64_t window;  ", "    int64_t window, more;  ", "tables.h and decode.py name different fields"),
    ],
)
def test_a_step_that_differs_from_the_module_is_not_used(cache, rewrite, monkeypatch, old, new, reason):
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O0"))  # in less time
    rewrite(old, new)
    monkeypatch.setattr(fused_backbone, "decode_kernels", load)
    engine = EmbeddedEngine(build(gain=1.0))
    assert reason in engine.backends["kernels"] and engine.backends["backbone"] == "fused"
    assert "native" not in engine.backends["products"]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3", {"head_dim": 24, "hidden_size": 32}, "head size 24 is not a multiple of "),
        ("qwen3", {"intermediate_size": 40}, "width 40 is not a multiple of "),
        ("llama", {"hidden_act": "gelu"}, "its activations are "),
        ("qwen3", {}, "native"),
        ("mistral_window", {}, "native"),
    ],
)
def test_a_model_that_does_not_fit_them_decodes_through_torch(family, fields, reason):
    if "multiple of" in reason and KERNELS.lanes == 8:
        pytest.skip("fits registers of 8")
    engine = EmbeddedEngine(build(family, gain=3.0, **fields))
    assert engine.backends["backbone"] == "fused" and reason in engine.backends["kernels"]
    assert EmbeddedEngine(build(), native=False).backends["kernels"] == "torch (switched off)"
    assert "float64" in EmbeddedEngine(build().double()).backends["kernels"]
