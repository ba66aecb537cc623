"""The kernels of training's norms, gates and gradients of weights: equal to the formulas on any processor."""

import logging
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from builds import BUILDS, built
from helpers import examples, full
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from whet.models import fast_layers
from whet.native import build, layers
from whet.native.build import Unavailable, load_functions, load_library
from whet.native.layers import LayerKernels, layer_kernels
from whet.native.self_check import KernelComparison, allclose, self_check

pytestmark = pytest.mark.skipif(isinstance(load_library("layers"), Unavailable), reason="no kernels can be built here")
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (0, 1, 127, 128, 129, 300)
EPSILON = 1e-6
SIZES = st.sampled_from((1, 12, 13, 31, 32, 33, 70, 512, 1000))


def make():
    """The kernels before their trial: one that fails must not hide why."""
    return load_functions("layers", LayerKernels)


@pytest.fixture(params=BUILDS)
def kernels(request):
    """The kernels, as this and lesser processors have them."""
    return built(request.param, make)


@pytest.fixture
def fresh():
    """Nothing has been built or tried, before and after."""
    for function in (layer_kernels, build.log_fallback):
        function.cache_clear()
    yield
    for function in (layer_kernels, build.log_fallback):
        function.cache_clear()


def draw(n, d, dtype=torch.float32):
    """Two inputs, a gradient and a weight."""
    g = torch.Generator().manual_seed(n + d)
    return [torch.randn(*shape, generator=g).to(dtype) for shape in ((n, d), (n, d), (n, d), (d,))]


def native(kernels, x, up, grad, w, epsilon=EPSILON):
    """All that the kernels of norms and gates give, by name."""
    y, r = kernels.norm(x, w, epsilon)
    d_x, d_w = kernels.norm_grads(x, w, r, grad, of_x=True, of_weight=True)
    d_gate, d_up, product = kernels.gated_grads(x, up, grad.clone(), product=True)
    found = {"norm": y, "r": r, "d_x": d_x, "d_w": d_w}
    return found | {"gated": kernels.gated(x, up), "d_gate": d_gate, "d_up": d_up, "product": product}


def defined(x, up, grad, w, epsilon=EPSILON, wide=torch.float64):
    """They by the formulas, in float64 on the same numbers."""
    a, b, c = (z.detach().to(wide).requires_grad_() for z in (x, up, w))
    r = (a.square().mean(-1) + epsilon).rsqrt()
    y, gated = a * r[:, None] * c, F.silu(a) * b
    d_x, d_w = torch.autograd.grad(y, (a, c), grad.to(wide))
    d_gate, d_up = torch.autograd.grad(gated, (a, b), grad.to(wide))
    found = {"norm": y, "r": r, "d_x": d_x, "d_w": d_w}
    found |= {"gated": gated, "d_gate": d_gate, "d_up": d_up, "product": gated}
    return {name: x.detach() for name, x in found.items()}


ROUNDINGS = {"norm": 2, "gated": 2, "product": 2, "d_up": 2, "d_x": 1, "d_gate": 1, "d_w": 0, "r": 0}
"""To bfloat16, each by 2^-8 of a number at most: going forward before and after a product, and what is stored."""


def near(got, want, dtype):
    """1e-5 of the largest, and in bf16 no number is further off than its roundings bring it."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.shape == want[name].shape and x.dtype == (dtype if ROUNDINGS[name] else torch.float32)
        if x.numel():
            y = want[name].double()
            own = 1.02 * ROUNDINGS[name] * 2**-8 * y.abs() if dtype == torch.bfloat16 else 0
            error, most = float(((x.double() - y).abs() - own).max()), 1e-5 * float(y.abs().max())
            assert error <= most, f"{name} {list(x.shape)}: {error:.1e} over {most:.1e}"


def same(a, b):
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def test_where_kernels_can_be_built_these_pass_their_trial(fresh):
    assert isinstance(layer_kernels(), LayerKernels), layer_kernels()


# ---- norms and gates -------------------------------------------------------------------------------------------------


@pytest.mark.spread(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", ROWS)
def test_norms_and_gates_equal_the_formulas_forward_and_backward(kernels, n, dtype):
    for d in (kernels.lanes, 2 * kernels.lanes, 3 * kernels.lanes, 208, 1536):
        inputs = draw(n, d, dtype)
        before = [x.clone() for x in inputs]
        near(native(kernels, *inputs), defined(*inputs), dtype)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@settings(max_examples=examples(10), deadline=None)
@given(
    st.sampled_from(list(BUILDS)),
    st.sampled_from(DTYPES),
    st.integers(1, 400),
    st.integers(1, 20),
    st.sampled_from([1e-12, 1e-6, 1e-3, 1.0, 100.0]),
    st.sampled_from([1e-3, 1.0, 20.0]),
)
def test_any_rows_of_any_width_and_size_equal_the_formulas(name, dtype, n, registers, epsilon, size):
    kernels = built(name, make)
    x, *rest = draw(n, registers * kernels.lanes, dtype)
    inputs = [x * size, *rest]
    near(native(kernels, *inputs, epsilon), defined(*inputs, epsilon), dtype)


@pytest.mark.parametrize("d", [64, 1536])
def test_in_bf16_what_goes_forward_has_the_bits_of_transformers_modules(kernels, d):
    x, up, grad, w = draw(300, d, torch.bfloat16)
    module = Qwen3RMSNorm(d, eps=EPSILON)
    module.weight = torch.nn.Parameter(w)
    y, product = kernels.norm(x, w, EPSILON)[0], kernels.gated(x, up)
    again = kernels.gated_grads(x, up, grad, product=True)[2]
    for got, want in ((y, module(x)), (product, F.silu(x) * up), (again, F.silu(x) * up)):
        assert (got != want).double().mean() < 1e-3
        assert ((got - want).abs() <= 2**-6 * want.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_asked_for_is_not_given_and_the_rest_has_the_same_bits(kernels, dtype):
    for n in (1, 300):
        x, up, grad, w = draw(n, 48, dtype)
        r = kernels.norm(x, w, EPSILON)[1]
        d_x, d_w = kernels.norm_grads(x, w, r, grad, of_x=True, of_weight=True)
        one, none = kernels.norm_grads(x, w, r, grad, of_x=True, of_weight=False)
        assert torch.equal(one, d_x) and none is None
        none, one = kernels.norm_grads(x, w, r, grad, of_x=False, of_weight=True)
        assert torch.equal(one, d_w) and none is None
        assert kernels.norm_grads(x, w, r, grad, of_x=False, of_weight=False) == (None, None)
        mine = grad.clone()
        d_gate, d_up, _ = kernels.gated_grads(x, up, mine, product=True)
        assert d_up.data_ptr() == mine.data_ptr()  # in its place
        one, other, none = kernels.gated_grads(x, up, grad, product=False)
        assert torch.equal(one, d_gate) and torch.equal(other, d_up) and none is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_of_threads_changes_a_bit(kernels, dtype, set_threads):
    for n, d in ((300, 1536), (129, 208), (1, 1536)):
        inputs = draw(n, d, dtype)
        set_threads(1)
        want = native(kernels, *inputs)
        for threads in (2, 3, 7):
            set_threads(threads)
            assert same(native(kernels, *inputs), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_crowd(kernels, dtype, set_threads):
    set_threads(3)
    inputs = draw(300, 208, dtype)
    crowd = native(kernels, *inputs)
    for rows in (slice(0, 1), slice(129, 130), slice(299, 300), slice(100, 231)):
        few = native(kernels, *(x[rows].contiguous() for x in inputs[:3]), inputs[3])
        assert all(torch.equal(x, crowd[name][rows]) for name, x in few.items() if name != "d_w")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_library_that_computed_for_others_before_changes_no_bit(kernels, dtype):
    inputs, other = draw(129, 208, dtype), draw(300, 1536, dtype)
    want = native(kernels, *inputs)
    native(kernels, *other)
    torch.use_deterministic_algorithms(True)  # which fills what is empty with NaN
    try:
        assert same(native(kernels, *inputs), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(dtype):
    kernels, inputs = make(), draw(129, 48)
    want = native(kernels, *inputs)
    torch.set_default_dtype(dtype)
    try:
        assert same(native(kernels, *inputs), want)
        assert kernels.weight_grad(*inputs[:2]).dtype == torch.float32
        assert all(allclose(x.actual, x.expected, x.tolerance) for x in layers._comparisons(kernels))
    finally:
        torch.set_default_dtype(torch.float32)


# ---- extreme numbers -------------------------------------------------------------------------------------------------


GATES = (-1e4, -200.0, -100.0, -89.0, -88.5, -88.0, -87.5, -87.0, -40.0, -1.28, -0.0, 0.0, 1e-30, 17.0, 88.0, 89.0, 1e4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_any_size_equal_the_formula(kernels, dtype):
    gate = torch.tensor(GATES).to(dtype)[:, None].expand(-1, 64).contiguous()
    _, up, grad, w = draw(len(GATES), 64, dtype)
    got, want = native(kernels, gate, up, grad, w), defined(gate, up, grad, w)
    for name in ("gated", "product", "d_gate", "d_up"):
        rounding = 1e-5 + (1.02 * ROUNDINGS[name] * 2**-8 if dtype == torch.bfloat16 else 0)
        error = (got[name].double() - want[name]).abs() - rounding * want[name].abs()
        # the curve meets 0 near -1.28, where what is left is a difference
        least = 1e-35 + (1e-6 * grad.double().abs() * up.double().abs() if name == "d_gate" else 0)
        assert (error <= least).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_equals_the_formula(kernels, dtype):
    inputs = draw(5, 64, dtype)
    inputs[0][2] = 0
    got, want = native(kernels, *inputs), defined(*inputs)
    near(got, want, dtype)
    assert not got["norm"][2].any() and not got["gated"][2].any()
    near({k: got[k][2:3] for k in ("d_x", "r")}, {k: want[k][2:3] for k in ("d_x", "r")}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e18, 1e-18])
def test_rows_of_huge_and_tiny_numbers_equal_torchs_formula(kernels, size, dtype):
    inputs = draw(5, 64, dtype)
    inputs[0] *= size
    names = ("norm", "r", "d_x", "d_w")
    got, exact = native(kernels, *inputs), defined(*inputs)
    assert all(got[name].isfinite().all() for name in names)
    near({name: got[name] for name in names}, {name: exact[name] for name in names}, dtype)
    inputs[0] = torch.full((5, 64), 3e38 if size > 1 else 1e-38).to(dtype)  # whose squares are none
    got, torchs = native(kernels, *inputs), defined(*inputs, wide=torch.float32)
    torch.testing.assert_close(got["r"], torchs["r"])
    torch.testing.assert_close(got["norm"].float(), torchs["norm"], rtol=1e-2, atol=0)


def spoiled(which, value, dtype):
    """Inputs of which one number is none."""
    inputs = draw(5, 64, dtype)
    x = inputs[which]
    (x if which == 3 else x[2])[21] = value
    return inputs


@pytest.mark.spread(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", range(4))
def test_what_is_no_number_in_torch_is_none_here(kernels, which, value, dtype):
    inputs = spoiled(which, value, dtype)
    got, want = native(kernels, *inputs), defined(*inputs, wide=torch.float32)
    right = defined(*draw(5, 64, dtype))
    for name, x in got.items():
        finite = want[name].isfinite()
        assert not x[~finite].isfinite().any(), name
        same_place = finite & (want[name] - right[name]).abs().le(1e-3)
        limit = 1e-2 * max(1.0, float(right[name].abs().max()))
        assert ((x - want[name]).abs()[same_place] <= limit).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF])
def test_a_nan_of_any_payload_stays_one(kernels, bits, dtype):
    for which, low in ((w, b) for w in range(3) for b in (0, 0xFFFF)):
        inputs = spoiled(which, 0.0, dtype)
        if dtype == torch.bfloat16:
            inputs[which].view(torch.int16)[2, 21] = bits - (bits >> 15 << 16)
        else:
            inputs[which].view(torch.int32)[2, 21] = (bits - (bits >> 15 << 16) << 16) | low
        assert inputs[which][2, 21].isnan()
        got = native(kernels, *inputs)
        names = (("gated", "product", "d_gate", "d_up"), ("gated", "product", "d_gate"), ("d_gate", "d_up"))[which]
        assert all(got[name][2, 21].isnan() for name in names)
        assert all(got[name].isnan().sum() == 1 for name in names)
        assert got["d_w"].isnan().sum() == (0 if which == 1 else 64 if which == 0 else 1)


# ---- gradients of weights --------------------------------------------------------------------------------------------


def agree(kernels, n, out, into):
    """The gradient of a weight is the product of its factors."""
    g = torch.Generator().manual_seed(n + out + into)
    grad, x = torch.randn(n, out, generator=g), torch.randn(n, into, generator=g)
    got, want = kernels.weight_grad(grad, x), grad.double().t() @ x.double()
    assert got.shape == (out, into) and got.dtype == torch.float32
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    return grad, x, got


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from(list(BUILDS)),
    st.sampled_from((0, 1, 37, 128, 129, 300)),
    SIZES,
    SIZES,
    st.sampled_from([1, 2, 3]),
)
def test_any_gradient_of_a_weight_is_the_product(name, n, out, into, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agree(built(name, make), n, out, into)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "out", "into"), [(300, 1000, 1000), (129, 70, 1000), (128, 1000, 13), (257, 13, 33)])
def test_a_gradient_of_a_weight_has_the_same_bits_by_any_threads_and_whatever_lay_in_memory(
    kernels, n, out, into, set_threads
):
    set_threads(1)
    grad, x, want = agree(kernels, n, out, into)
    torch.use_deterministic_algorithms(True)  # which fills what is empty with NaN
    try:
        for threads in (1, 2, 3, 7):
            set_threads(threads)
            assert torch.equal(kernels.weight_grad(grad, x), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_row_that_is_no_number_reaches_its_own_weights_alone(kernels):
    for n, out, into in ((129, 13, 33), (300, 70, 512)):
        grad, x, want = agree(kernels, n, out, into)
        grad[n - 1, out - 1] = torch.nan
        got = kernels.weight_grad(grad, x)
        assert got[-1].isnan().all() and torch.equal(got[:-1], want[:-1])
        grad[n - 1, out - 1], x[0, into - 1] = 0, torch.inf
        got = kernels.weight_grad(grad, x)
        assert not got[:, -1].isfinite().any() and torch.equal(got[:-1, :-1], want[:-1, :-1])


def test_a_weight_of_no_numbers_has_a_gradient_of_none():
    kernels = make()

    def none():
        torch.set_num_threads(1)  # the threads of before are not there in a child
        for n, out, into in ((3, 0, 5), (3, 5, 0), (0, 0, 0)):
            assert kernels.weight_grad(torch.ones(n, out), torch.ones(n, into)).shape == (out, into)

    child = multiprocessing.get_context("fork").Process(target=none, daemon=True)
    child.start()  # a division by zero would end the tests
    child.join(60)
    assert child.exitcode == 0


# ---- who is served ---------------------------------------------------------------------------------------------------


def test_rows_that_do_not_fit_are_refused(kernels):
    x, up, _, w = draw(6, 48)
    assert kernels.fit(x, up) and kernels.fit(x, w) and kernels.fit(x.bfloat16(), w.bfloat16())
    for other in (
        *(x.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.float16, torch.int32)),
        x.to("meta"),
        x.t().contiguous().t(),
        torch.cat([x, x], 1)[:, :48],
        x[:1].expand(6, -1),
        draw(6, 49)[0],
        draw(6, 47)[0],
        draw(6, kernels.lanes // 2)[0],
        draw(6, 32)[0],  # of another width than the rest
    ):
        assert not kernels.fit(x, other) and not kernels.fit(other, x) and not kernels.fit(x, up, other)
    assert not any(kernels.fit(*draw(6, d)[:2]) for d in (47, 49, kernels.lanes // 2))
    assert not any(kernels.fit(x.to(dtype)) for dtype in (torch.float64, torch.float16))


WAYS = {
    "transposed": lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd": lambda x: x[..., 1:].contiguous(),
    "float64": lambda x: x.double(),
}


def by_layers(x, up, grad, w):
    """All that the fast layers give, by name; the gradient is overwritten."""
    y, r = fast_layers._norm(x, w, EPSILON)
    d_x, d_w = fast_layers._norm_grads(x, w, r, grad, True, True)
    gated = fast_layers._gate(x, up)
    d_gate, d_up, product = fast_layers._gate_grads(x, up, grad, True)
    found = {"norm": y, "r": r, "d_x": d_x, "d_w": d_w}
    return found | {"gated": gated, "d_gate": d_gate, "d_up": d_up, "product": product}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_goes_through_torch_with_equal_numbers(way, dtype, monkeypatch):
    x, up, grad, w = (WAYS[way](z) for z in draw(40, 48, dtype))
    assert fast_layers._native(x, up) is None
    got = by_layers(x, up, grad.clone(), w)
    monkeypatch.setattr(fast_layers, "layer_kernels", lambda: Unavailable("no compiler"))
    assert same(got, by_layers(x, up, grad.clone(), w))
    if x.dtype == torch.float32:
        near(got, defined(x, up, grad, w), dtype)


@pytest.mark.parametrize("which", range(4))
def test_one_that_does_not_fit_beside_others_that_do_is_not_misread(which):
    inputs = draw(40, 48)
    mixed = [WAYS["every second"](x) if i == which else x.clone() for i, x in enumerate(inputs)]
    near(by_layers(*mixed), defined(*inputs), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fast_layers_take_the_kernels_for_what_fits(dtype):
    x, up, grad, w = draw(40, 48, dtype)
    kernels = layer_kernels()
    want = native(kernels, x, up, grad, w)
    found = by_layers(x, up, grad.clone(), w)
    assert fast_layers._native(x, up) is kernels and same(found, want)


def test_a_norm_of_another_width_than_its_rows_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="size of tensor"):
        fast_layers._Norm.apply(torch.ones(3, 32), torch.ones(64), EPSILON)
    with pytest.raises(RuntimeError, match="size of tensor"):
        fast_layers._gate(torch.ones(3, 32), torch.ones(3, 16))


# ---- where they can't be had -----------------------------------------------------------------------------------------


def test_without_a_compiler_torch_does_it_and_the_reason_is_said_once(fresh, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    x, up, grad, w = draw(40, 48)
    want = defined(x, up, grad, w)
    with caplog.at_level(logging.INFO, "whet"):
        for _ in range(2):
            got = {"gated": fast_layers._gate(x, up), "norm": fast_layers._norm(x, w, EPSILON)[0]}
            near(got, {name: want[name] for name in got}, torch.float32)
    said = (
        "norms, gates and gradients of weights in training: using torch instead of the C++ kernels: "
        "no C++ compiler (g++) is installed"
    )
    assert [r.getMessage() for r in caplog.records] == [said]


FP32, BF16 = "in torch.float32 differ from torch's on this machine", "in torch.bfloat16 differ from torch's"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("round_as(load(a + c) * r[i], rounding) * load(w + c)", "load(a + c) * r[i]", FP32),
        full("* share * share * share / d", "* share * share / d", FP32),
        full("fused(load(b + c) * share, load(a + c), load(part_sums + c))", "load(b + c) * share * load(a + c)", FP32),
        full("fused(a, 1.0f - s, all(1.0f))", "all(1.0f)", FP32),
        full("store(g + c, slope * activated);", "", FP32),
        full(
            "store(y + c, round_as(silu(load(gate + c)), rounding) * load(up + c))", "store(y + c, load(up + c))", FP32
        ),
        full("if (y) store(y + c, activated * b);", "if (y) store(y + c, activated);", FP32),
        ("rows, to, in, add || from > 0);", "rows, to, in, false);", "gradients of weights differ from torch's"),
        ("return load(bits);", "return load(bits) * 1.1f;", BF16),
        ("void whet_silu_mul_back(", "void whet_back(", "loading them failed: "),
    ],
)
def test_kernels_that_compute_something_else_are_not_used(fresh, cache, rewrite, monkeypatch, old, new, reason):
    lesser = BUILDS.get("256 bits", ())  # which rounds by itself
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0", *lesser))  # in less time
    rewrite(old, new)
    assert reason in str(layer_kernels())
    x, up, grad, w = draw(40, 48)
    assert fast_layers._native(x, up) is None
    want = defined(x, up, grad, w)
    near({"norm": fast_layers._norm(x, w, EPSILON)[0]}, {"norm": want["norm"]}, torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_are_tried_with_gradients_whoever_asks_first(fresh, mode):
    with mode():
        assert isinstance(layer_kernels(), LayerKernels)


def test_what_loading_raises_is_a_reason_and_what_is_no_fault_of_the_library_is_raised():
    def fails(kind):
        def make(found):
            raise kind("no such function")

        return make

    for kind in (OSError, AttributeError):
        assert load_functions("layers", fails(kind)) == Unavailable("loading them failed: no such function")
    with pytest.raises(ZeroDivisionError):
        load_functions("layers", fails(ZeroDivisionError))


def test_a_trial_sees_no_mode_of_who_asks_and_a_note_is_said_once(fresh, caplog):
    seen = []

    def trial(found):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return [KernelComparison("they differ", torch.full((2,), 1.0 + found), torch.ones(2), 0.5)]

    with torch.inference_mode():
        found = [self_check(x, trial) for x in (0, 1, Unavailable("no compiler"))]
        assert found == [0, Unavailable("they differ on this machine"), Unavailable("no compiler")]
    assert seen == [(True, False)] * 2
    with caplog.at_level(logging.INFO, "whet"):
        for reason in ("they differ", "they differ", "no compiler"):
            build.log_fallback("adding", reason)
    said = [
        "adding: using torch instead of the C++ kernels: they differ",
        "adding: using torch instead of the C++ kernels: no compiler",
    ]
    assert [r.getMessage() for r in caplog.records] == said


@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 33, 70), (300, 500, 600)])
def test_a_gradient_of_a_weight_is_added_to_a_sum_that_is_given(shape):
    n, out, width = shape
    kernels = layer_kernels()
    generator = torch.Generator().manual_seed(0)
    grad, x, before = (torch.randn(*s, generator=generator) for s in ((n, out), (n, width), (out, width)))
    into = before.clone()
    assert kernels.weight_grad(grad, x, into) is into
    want = before.double() + grad.double().t() @ x.double()
    assert (into - want).abs().max() <= 1e-6 * want.abs().max()
    assert torch.equal(kernels.weight_grad(grad[:0], x[:0], into.clone()), into)
    with pytest.raises(ValueError, match="must be"):
        kernels.weight_grad(grad, x, into.double())
