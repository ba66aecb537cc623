"""The kernels of training's attention: equal to the definition on any processor, torch's where they can't be had."""

import contextlib
import functools
import itertools
import logging

import pytest
import torch
from builds import BUILDS, built
from helpers import examples, full, rounding
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models.test_attention import TREES, oracle, trees
from whet.models.attention import SegmentLayout
from whet.native import build, segments
from whet.native.segments import (
    SegmentKernels,
    SegmentTables,
    attend_segments,
    segment_kernels,
    segments_unsupported_reason,
)

BUILT = segments._load_kernels
KERNELS = BUILT()  # as they are without a trial: one that fails must not hide why
pytestmark = pytest.mark.skipif(
    isinstance(build.load_library("decode"), build.Unavailable), reason="no kernels can be built here"
)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference by dtype, of the largest number or of 1. Bfloat16 rounds by 2^-8 at most: weights, their
gradients, what is stored, and the output from which the sum of a row's gradients is taken; this is five times that."""
LONG = ((300, 20, 110, 1), (-1, 0, 1, 0))
PLAIN = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}


@contextlib.contextmanager
def used(name):
    """The kernels that run."""
    with pytest.MonkeyPatch.context() as patch:
        made = KERNELS if name == "whole" else built(name, BUILT.__wrapped__)
        patch.setattr(segments, "_load_kernels", lambda: made)
        yield


@pytest.fixture(params=BUILDS)
def each_build(request):
    """The kernels, as this and lesser processors have them."""
    with used(request.param):
        yield request.param


@pytest.fixture
def fresh():
    """Nothing has been built or tried, before and after."""
    for function in (segments._load_kernels, segment_kernels, build.log_fallback):
        function.cache_clear()
    yield
    for function in (segments._load_kernels, segment_kernels, build.log_fallback):
        function.cache_clear()


def draw(tree, dtype=torch.float32, heads=4, kv=2, size=8, value_size=6):
    """Queries, keys, values and the gradient of what comes of them."""
    g = torch.Generator().manual_seed(sum(tree[0]))
    shapes = ((heads, size), (kv, size), (kv, value_size), (heads, value_size))
    return [torch.randn(1, n, sum(tree[0]), d, generator=g).to(dtype) for n, d in shapes]


def native(tree, inputs, scale=0.3, window=None):
    """Output and gradients by the kernels."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    tables = SegmentTables(*tree, q.shape[1] // k.shape[1])
    out = attend_segments(q, k, v, tables, scale=scale, window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def defined(tree, inputs, scale=0.3, window=None):
    """They by the definition, in float64 on the same numbers."""
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    out = oracle(SegmentLayout(*tree), *leaves, scale=scale, window=window, softcap=None, sinks=None)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]


def near(got, want, limit):
    """Output and each gradient agree, none is NaN."""
    for name, x, y in zip(("output", "d_q", "d_k", "d_v"), got, want, strict=True):
        error, most = float((x.double() - y).abs().max()), limit * max(float(y.abs().max()), 1.0)
        assert error <= most, f"{name}: {error:.1e} over {most:.1e}"


@functools.cache
def case(tree, dtype, heads, kv, size, value_size, scale, window):
    """What is asked and what is right, once for all builds."""
    inputs = draw(tree, dtype, heads, kv, size, value_size)
    return inputs, defined(tree, inputs, scale, window)


def agree(tree, dtype, *, heads=4, kv=2, size=8, value_size=6, scale=0.3, window=None):
    """The kernels do what is right."""
    tree = tuple(map(tuple, tree))
    inputs, want = case(tree, dtype, heads, kv, size, value_size, scale, window)
    near(native(tree, inputs, scale, window), want, LIMITS[dtype])


def same(a, b):
    """To the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_where_kernels_can_be_built_these_pass_their_trial(fresh):
    assert isinstance(segment_kernels(), SegmentKernels), segment_kernels()


# ---- equal to the definition ----------------------------------------------------------------------------------------


@pytest.mark.spread(12)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_output_and_gradients_equal_the_definition(each_build, tree, dtype):
    for window in (None, 1, 4, 1000):
        agree(TREES[tree], dtype, window=window)


@pytest.mark.spread(9)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("window", [None, 1, 95, 96, 97, 130])
def test_segments_of_many_blocks_equal_the_definition(each_build, window, dtype):
    agree(LONG, dtype, window=window)


@pytest.mark.spread(16)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("size", "value_size"),
    [(1, 1), (8, 6), (24, 40), (33, 17), (64, 64), (128, 96), (256, 256), (1, 256), (256, 1), (15, 31), (32, 16)],
)
def test_heads_of_any_size_equal_the_definition(each_build, size, value_size, dtype):
    for tree in ("forks of forks", "very unequal"):
        agree(TREES[tree], dtype, size=size, value_size=value_size, scale=size**-0.5, window=50)


@pytest.mark.spread(12)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (3, 3), (6, 3), (4, 1), (3, 1), (10, 2), (32, 1), (49, 1), (96, 1)])
def test_any_number_of_heads_that_share_keys_equals_the_definition(each_build, heads, kv, dtype):
    agree(TREES["forks of forks"], dtype, heads=heads, kv=kv, window=9)
    agree(TREES["very unequal"], dtype, heads=heads, kv=kv)


@pytest.mark.spread(9)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("kv", [1, 2, 3])
def test_any_number_of_threads_equals_the_definition(each_build, threads, kv, set_threads):
    set_threads(threads)
    for dtype in LIMITS:
        agree(LONG, dtype, heads=2 * kv, kv=kv, window=200)
        agree(TREES["one token"], dtype, heads=2 * kv, kv=kv)


@settings(max_examples=examples(15), deadline=None)
@given(
    trees(),
    st.sampled_from(list(BUILDS)),
    st.sampled_from(list(LIMITS)),
    st.sampled_from([None, 1, 3, 8]),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 1)]),
    st.sampled_from([(8, 8), (5, 19), (40, 24)]),
    st.sampled_from([1, 2, 3]),
)
def test_any_tree_equals_the_definition(tree, name, dtype, window, heads, sizes, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with used(name):
            agree(tree, dtype, heads=heads[0], kv=heads[1], size=sizes[0], value_size=sizes[1], window=window)
    finally:
        torch.set_num_threads(before)


def test_a_long_row_equals_torchs_operator(set_threads):
    set_threads(2)
    tree = ((3000, 7, 200), (-1, 0, 1))
    inputs = draw(tree, heads=2, kv=1, size=16, value_size=16)
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out = SegmentLayout(*tree, attention="plain").attend(0, *leaves, **PLAIN)
    near(native(tree, inputs), [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())], 1e-5)


@pytest.mark.parametrize("dtype", LIMITS)
def test_scores_of_ten_thousand_equal_the_definition(each_build, dtype):
    tree = TREES["very unequal"]
    q, k, v, grad = draw(tree, dtype, size=64)
    q, k = ((8 * x).round().clamp(-16, 16) for x in (q, k))  # products whose sums are exact
    inputs = [q, k, v, grad]
    got, want = native(tree, inputs, scale=8.0), defined(tree, inputs, scale=8.0)
    assert float((q.float() @ k.float().repeat_interleave(2, 1).mT * 8).abs().max()) > 1e4
    near(got[:1] * 4, want[:1] * 4, LIMITS[dtype])
    # the log of a row's sum has steps of 1e-3 there, in which its weights are made again
    largest = float(k.double().abs().max() * 8)
    for x, y in zip(got[1:], want[1:], strict=True):
        assert (x.double() - y).abs().max() <= (LIMITS[dtype] + 2e-3) * max(float(y.abs().max()), largest)


# ---- inputs as they come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
def test_inputs_of_any_strides_give_the_same_bits(each_build, dtype):
    tree = TREES["forks of forks"]
    inputs = draw(tree, dtype, heads=4, kv=2, size=24, value_size=40)
    want = native(tree, inputs)
    ways = {
        "heads beside one another": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "numbers of a head apart": lambda x: x.mT.contiguous().mT,
        "every second": lambda x: torch.stack([x, x * torch.nan], -1).flatten(-2)[..., ::2],
        "part of a larger one": lambda x: torch.cat([x * torch.nan, x, x * torch.nan], -1).split(x.shape[-1], -1)[1],
    }
    for way in ways.values():
        moved = [way(x) for x in inputs]
        assert not any(x.is_contiguous() for x in moved) and same(moved, inputs)
        assert same(native(tree, moved), want)
    q, k, v, _ = inputs
    k, v = (x[:, :1].expand(-1, 2, -1, -1) for x in (k, v))  # one head that two stand for
    grad = torch.ones(1, dtype=dtype).expand(inputs[3].shape)
    assert same(native(tree, [q, k, v, grad]), native(tree, [x.contiguous() for x in (q, k, v, grad)]))


def test_a_gradient_that_is_not_asked_for_is_not_given():
    tree = TREES["one group"]
    q, k, v, grad = draw(tree)
    k.requires_grad_()
    tables = SegmentTables(*tree, 2)
    attend_segments(q, k, v, tables, scale=0.3, window=None).backward(grad)
    assert torch.equal(k.grad, native(tree, [q, k, v, grad])[2]) and q.grad is v.grad is None


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v, grad = draw(TREES["one group"])
    out = attend_segments(q.requires_grad_(), k, v, SegmentTables(*TREES["one group"], 2), scale=0.3, window=None)
    (first,) = torch.autograd.grad(out, q, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_gradient_of_zeros_gives_zeros(each_build, dtype):
    *inputs, grad = draw(TREES["forks of forks"], dtype)
    assert not any(x.any() for x in native(TREES["forks of forks"], [*inputs, torch.zeros_like(grad)])[1:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_has_the_same_bits(mode):
    tree = TREES["forks of forks"]
    q, k, v, grad = draw(tree)
    with mode():
        out = attend_segments(q.requires_grad_(), k, v, SegmentTables(*tree, 2), scale=0.3, window=None)
    assert not out.requires_grad and torch.equal(out, native(tree, [q, k, v, grad])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(dtype):
    inputs = draw(LONG)
    want = native(LONG, inputs)
    torch.set_default_dtype(dtype)
    try:
        assert same(native(LONG, inputs), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tree", [TREES["forks of forks"], TREES["one token"], LONG])
def test_what_lay_in_the_memory_before_changes_no_bit(each_build, dtype, tree):
    inputs = draw(tree, dtype, heads=6, kv=2, size=5, value_size=19)
    for window in (None, 50):
        want = native(tree, inputs, window=window)
        torch.use_deterministic_algorithms(True)  # which fills what is empty with NaN
        try:
            assert same(native(tree, inputs, window=window), want)
        finally:
            torch.use_deterministic_algorithms(False)


# ---- what is no number -----------------------------------------------------------------------------------------------


@functools.cache
def depends(which, place):
    """Which numbers of the output and the gradients move with one of the inputs."""
    tree = TREES["groups of many lengths"]
    inputs = [x.double() for x in draw(tree)]
    before = defined(tree, inputs)
    inputs[which][0, 1, place, 3] += 1
    return [(x - y).abs() > 1e-9 for x, y in zip(defined(tree, inputs), before, strict=True)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_never_silent(each_build, value, dtype):
    tree = TREES["groups of many lengths"]
    for which, place in itertools.product(range(4), (1, 9, 20)):
        if which == 1 and value == value:
            continue  # an infinite key may weigh nothing
        inputs = draw(tree, dtype)
        inputs[which][0, 1, place, 3] = value
        moved = depends(which, place)
        assert any(x.any() for x in moved)
        for x, y in zip(native(tree, inputs), moved, strict=True):
            assert not x[y].isfinite().any()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bits", [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF])
def test_a_nan_of_any_payload_stays_one(each_build, bits, dtype):
    tree = TREES["groups of many lengths"]
    nan = torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32)
    for which, low in itertools.product(range(4), (0, 0xFFFF) if dtype == torch.float32 else (0,)):
        inputs = draw(tree, dtype)
        inputs[which][0, 1, 9, 3] = (nan | low).view(torch.float32).to(dtype)
        if dtype == torch.bfloat16:
            inputs[which].view(torch.int16)[0, 1, 9, 3] = (nan >> 16).to(torch.int16)
        for x, y in zip(native(tree, inputs), depends(which, 9), strict=True):
            assert x[y].isnan().all()


@pytest.mark.parametrize("dtype", LIMITS)
def test_scores_of_infinity_are_never_silent(each_build, dtype):
    tree = TREES["one group"]
    q, k, v, grad = draw(tree, dtype)
    k[0, :, 2, 0] = torch.inf
    out = native(tree, [q, k, v, grad])[0]
    sees = torch.arange(13) >= 2  # the third token of the root
    assert out[:, :, sees][q[:, :, sees, 0] > 0].isnan().all()


@pytest.mark.parametrize("dtype", LIMITS)
def test_scores_of_minus_infinity_weigh_nothing(each_build, dtype):
    tree = TREES["one group"]
    q, k, v, grad = draw(tree, dtype)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[0, :, 2, 0] = -torch.inf
    got, want = native(tree, [q, k, v, grad])[0], defined(tree, [q, k, v, grad])[0]
    assert want.isfinite().all()
    near([got] * 4, [want] * 4, LIMITS[dtype])


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_repeats_to_the_bit_and_no_thread_count_changes_the_output(each_build, dtype, threads, set_threads):
    inputs = draw(LONG, dtype, heads=2, kv=1)
    one = native(LONG, inputs)[0]
    set_threads(threads)
    first = native(LONG, inputs)
    assert torch.equal(first[0], one) and all(same(native(LONG, inputs), first) for _ in range(3))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("value", [2.0, torch.nan])
def test_what_another_root_or_branch_holds_changes_no_bit(each_build, dtype, value, set_threads):
    set_threads(3)
    tree = ((101, 30, 7, 50, 120, 3), (-1, 0, 0, -1, 3, 0))
    inputs = draw(tree, dtype, heads=2, kv=1)
    want = native(tree, inputs)
    spans = [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(tree[0], initial=0))]
    changed = [*spans[3], *spans[4]]  # another root and its child
    kept = [*spans[0], *spans[1], *spans[2], *spans[5]]
    for x in inputs:
        x[:, :, changed] *= value
    got = native(tree, inputs)
    assert same([x[:, :, kept] for x in got], [x[:, :, kept] for x in want])
    assert not any(torch.equal(x[:, :, changed], y[:, :, changed]) for x, y in zip(got, want, strict=True))
    for x in inputs:
        x[:, :, spans[1]] *= value  # a branch: its sister sees none of it, nor does their parent's output
    branch = native(tree, inputs)
    assert same([x[:, :, spans[2]] for x in branch], [x[:, :, spans[2]] for x in want])
    assert torch.equal(branch[0][:, :, spans[0]], want[0][:, :, spans[0]])


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 5, 32, 33, 96])
def test_blocks_hold_each_token_once_and_fit(group):
    tables = SegmentTables(*LONG, group)
    starts = list(itertools.accumulate(LONG[0], initial=0))
    above = [0, 300, 320, 300]
    for blocks, most in ((tables.keys, KERNELS.keys), (tables.queries, KERNELS.queries // group)):
        rows = blocks.tolist()
        assert [t for _, first, _, n, _ in rows for t in range(first, first + n)] == list(range(431))
        assert all(place == above[i] + first - starts[i] and 0 < n <= most for i, first, place, n, _ in rows)
        assert all(starts[i] <= first and first + n <= starts[i + 1] for i, first, _, n, _ in rows)
    room = itertools.accumulate((-(-n // KERNELS.wide) * KERNELS.wide for *_, n, _ in tables.keys.tolist()), initial=0)
    assert [*tables.keys[:, 4].tolist(), tables.padded_keys] == list(room)


@pytest.mark.parametrize("tree", [((1,), (-1,)), LONG, ((5781, 1), (-1, -1)), ((9000, *[1] * 40), (-1, *[0] * 40))])
@pytest.mark.parametrize("kv", [1, 2, 3, 8])
def test_stripes_hold_each_block_of_queries_once_and_give_work_to_as_many_threads_as_there_are_stripes(tree, kv):
    tables = SegmentTables(*tree, 1)
    blocks = len(tables.queries)
    for threads, window in itertools.product((1, 2, 3, 4, 5, 8, 64), (0, 7)):
        ends = tables.stripe_ends(kv, threads, window=window, sizes=16).tolist()
        assert ends[-1] == blocks and ends == sorted(ends) and 1 <= len(ends) <= min(segments.MAX_STRIPES, blocks)
        assert len(ends) == 1 if kv % threads == 0 else kv * len(ends) >= min(threads, kv * blocks, 8 * kv)


@pytest.mark.parametrize("window", [0, 200])
def test_stripes_have_like_work(window):
    tables = SegmentTables((4000,), (-1,), 1)
    place, tokens = tables.queries[:, 2], tables.queries[:, 3]
    work = (tokens * (place + tokens if window == 0 else (place + tokens).minimum(window + tokens))).tolist()
    ends = [0, *tables.stripe_ends(1, 4, window=window, sizes=16).tolist()]
    parts = [sum(work[a:b]) for a, b in itertools.pairwise(ends)]
    assert len(parts) == 8 and max(parts) - min(parts) <= 2 * max(work)


def test_stripes_are_fewer_where_their_sums_would_be_large(monkeypatch):
    tables = SegmentTables((4000,), (-1,), 1)
    monkeypatch.setattr(segments, "MAX_STRIPE_BYTES", 3 * 4 * 2 * 16 * tables.padded_keys)
    assert len(tables.stripe_ends(2, 5, window=0, sizes=16)) == 3
    monkeypatch.setattr(segments, "MAX_STRIPE_BYTES", 1)
    assert len(tables.stripe_ends(2, 5, window=0, sizes=16)) == 1


def test_a_row_with_one_visible_key_gives_its_value_and_its_gradient_to_the_bit():
    generator = torch.Generator().manual_seed(5)
    q, k, v, grad = (torch.randn(1, 1, 40, 16, generator=generator) for _ in range(4))
    q, k = q * 100, k * 100
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend_segments(*leaves, SegmentTables((40,), (-1,), 1), scale=0.3, window=1)
    assert torch.equal(out, v)
    d_q, _, d_v = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(d_v, grad) and d_q.abs().max() <= 1e-2 * (k * 0.3).abs().max() * 1e-4 * grad.abs().sum(-1).max()


def test_long_sums_of_one_sign_round_like_short_ones():
    tokens = 60_000
    q, k = torch.zeros(1, 1, tokens, 8), torch.zeros(1, 1, tokens, 8)
    v = (1 + torch.rand(1, 1, tokens, 8, generator=torch.Generator().manual_seed(0))).requires_grad_()
    out = attend_segments(q, k, v, SegmentTables((tokens,), (-1,), 1), scale=1.0, window=4096)
    want = v.detach().double()[0, 0].cumsum(0)
    want[4096:] -= want[:-4096].clone()
    want /= torch.arange(1, tokens + 1).clamp(max=4096)[:, None]
    assert ((out[0, 0] - want).abs().max() <= 2e-6 * want.abs().max()).item()


def test_shapes_that_do_not_fit_each_other_are_refused():
    make = lambda heads, tokens, size: torch.randn(1, heads, tokens, size)
    q = make(4, 9, 8)
    for k, v in ((make(2, 8, 8), make(2, 8, 8)), (make(2, 9, 6), make(2, 9, 6)), (make(2, 9, 8), make(1, 9, 8)),
                 (make(3, 9, 8), make(3, 9, 8)), (make(2, 9, 8), make(2, 7, 8))):  # fmt: skip
        assert "don't fit each other" in segments_unsupported_reason(q, k, v)
    with pytest.raises(ValueError, match="tables of 9 tokens and groups of 1 were given"):
        attend_segments(q, make(2, 9, 8), make(2, 9, 8), SegmentTables((9,), (-1,), 1), scale=1.0, window=None)


# ---- who is served ---------------------------------------------------------------------------------------------------


def served(layout, *qkv):
    """What a layout gives, and whether by the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(segments, "_run", lambda *args, run=segments._run, **how: (calls.append(1), run(*args, **how)))
        out = layout.attend(0, *qkv, **PLAIN)
    return out, bool(calls)


def test_a_layout_takes_them_for_floats_and_torch_for_what_they_do_not_know():
    tree = TREES["forks of forks"]
    auto, plain = SegmentLayout(*tree), SegmentLayout(*tree, attention="plain")
    inputs = draw(tree)
    out, by_kernels = served(auto, *inputs[:3])
    assert by_kernels and torch.equal(out, native(tree, inputs)[0])
    assert not served(plain, *inputs[:3])[1]
    for dtype in (torch.float64, torch.float16):
        qkv = [x.to(dtype) for x in inputs[:3]]
        out, by_kernels = served(auto, *qkv)
        assert not by_kernels and torch.equal(out, plain.attend(0, *qkv, **PLAIN))
        assert segments_unsupported_reason(*qkv) == f"there are none for {str(dtype).removeprefix('torch.')} on cpu"
    for how in ({"softcap": 0.7}, {"sinks": torch.zeros(4)}):
        assert torch.equal(*(x.attend(0, *inputs[:3], **PLAIN | how) for x in (auto, plain)))
    assert segments_unsupported_reason(inputs[0], inputs[1].double(), inputs[2]) is not None


@pytest.mark.parametrize(
    ("heads", "size", "value_size", "reason"),
    [
        (97, 8, 8, "97 heads share a KV head, over 96"),
        (2, 257, 8, "head size 257 is over 256"),
        (2, 8, 257, "head size 257 is over 256"),
        (96, 256, 256, None),
    ],
)
def test_heads_beyond_the_limits_are_torchs(heads, size, value_size, reason):
    tree = TREES["one group"]
    qkv = draw(tree, heads=heads, kv=1, size=size, value_size=value_size)[:3]
    assert segments_unsupported_reason(*qkv) == reason
    out, by_kernels = served(SegmentLayout(*tree), *qkv)
    assert by_kernels == (reason is None)
    wide = [x.double() for x in qkv]
    exact = lambda: [oracle(SegmentLayout(*tree), *wide, **PLAIN)]
    (bound,) = rounding(exact, wide, roundings=size + 2 * out.shape[2])  # a score, a softmax and a sum over tokens
    assert (out.double() - exact()[0]).abs().max() <= bound


def test_bf16_is_torchs_where_the_processor_has_matrix_instructions(monkeypatch):
    for has, reason in ((True, "matrix instructions"), (False, None)):
        monkeypatch.setattr(segments, "_matrix_instructions", lambda has=has: has)
        half = segments_unsupported_reason(*draw(TREES["one token"], torch.bfloat16)[:3])
        assert (reason in half) if reason else half is None
        assert segments_unsupported_reason(*draw(TREES["one token"])[:3]) is None


def test_a_layout_keeps_one_table_per_number_of_heads_that_share():
    tree = TREES["one group"]
    layout = SegmentLayout(*tree)
    for heads, kv in ((4, 2), (4, 2), (2, 1), (4, 1)):
        inputs = draw(tree, heads=heads, kv=kv)
        assert torch.equal(layout.attend(0, *inputs[:3], **PLAIN), native(tree, inputs)[0])
    assert sorted(layout._tables) == [2, 4]


# ---- where they can't be had -----------------------------------------------------------------------------------------


def test_without_a_compiler_torch_attends_and_the_reason_is_said_once(fresh, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    tree = TREES["forks of forks"]
    qkv = draw(tree)[:3]
    with caplog.at_level(logging.INFO, "whet"):
        for _ in range(2):
            out, by_kernels = served(SegmentLayout(*tree), *qkv)
    assert not by_kernels and torch.equal(out, SegmentLayout(*tree, attention="plain").attend(0, *qkv, **PLAIN))
    said = "attention of training: using torch instead of the C++ kernels: no C++ compiler (g++) is installed"
    assert [r.getMessage() for r in caplog.records] == [said]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("state.sums[r] *= less[r];", "", "attention in torch.float32 differs from the formula on this machine"),
        full("- deltas[r + k]", "", "attention in torch.float32 differs from the formula on this machine"),
        full("ahead - c.window + 1", "ahead - c.window", "attention in torch.float32 differs from the formula"),
        ("threads, stripes, window;", "threads, stripes, window, more;", "segments.cpp and segments.py name different"),
        full("int64_t whet_workspace(", "int64_t whet_space(", "loading them failed: "),
    ],
)
def test_kernels_that_compute_something_else_are_not_used(fresh, cache, rewrite, monkeypatch, old, new, reason):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # in less time
    rewrite(old, new)
    assert reason in str(segment_kernels())
    tree = TREES["forks of forks"]
    assert (
        reason in segments_unsupported_reason(*draw(tree)[:3]) and not served(SegmentLayout(*tree), *draw(tree)[:3])[1]
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_are_tried_with_gradients_whoever_asks_first(fresh, mode):
    with mode():
        assert isinstance(segment_kernels(), SegmentKernels)
