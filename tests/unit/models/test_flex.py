import importlib
import logging

import pytest
import torch
from helpers import examples, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models.test_attention import TREES, oracle, trees
from whet.config import RoleConfig
from whet.errors import ConfigError
from whet.models import attention, flex
from whet.models.attention import SegmentLayout
from whet.models.flex import FlexCase, FlexRow, depth_first_order, flex_unsupported_reason
from whet.models.load import load_model
from whet.native.build import Unavailable
from whet.native.segments import segment_kernels
from whet.packing.micro_batch_planner import plan_micro_batches

torch_flex = importlib.import_module("torch.nn.attention.flex_attention")  # the package has a function of that name
CASE = FlexCase(torch.device("cuda"), torch.float32, 4, 2, 8, 6, False, False)
GROUPS = ([130, 40, 7, 60, 25], [-1, 0, 0, -1, 3])
FULL = ([128, 64, 64], [-1, 0, 0])
DEEP = ([40, 30, 70, 20, 90, 10, 60], [-1, 0, -1, 2, 2, 1, 4])


@pytest.fixture
def backward(monkeypatch):
    """torch refuses a backward pass on a CPU at the door; the reference that it compiles from has one."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def fresh():
    """No case has been probed, before and after."""
    flex._probe_once.cache_clear()
    yield
    flex._probe_once.cache_clear()


def row_of(lengths, parents):
    return FlexRow(lengths, parents, SegmentLayout(lengths, parents).position_ids)


def inputs(tokens, heads=4, groups=2, sinks=False):
    g = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, 8), (1, groups, tokens, 8), (1, groups, tokens, 6), *([(heads,)] if sinks else [])]
    return [torch.randn(s, generator=g).requires_grad_() for s in shapes]


def agree(tree, heads=4, groups=2, **how):
    """Output and every gradient of flex and of the plain path, in fp32."""
    how = {"scale": 0.3, "window": None, "softcap": None, "sinks": None, **how}
    layout, row = SegmentLayout(*tree, attention="plain"), row_of(*tree)
    tensors = inputs(sum(tree[0]), heads, groups, how["sinks"] is not None)
    if how["sinks"] is not None:
        how["sinks"] = tensors[3]
    got, want = row.attend(*tensors[:3], **how), layout.attend(0, *tensors[:3], **how)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9))
    for a, b in zip(torch.autograd.grad(got, tensors, grad), torch.autograd.grad(want, tensors, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.spread(5)
@pytest.mark.parametrize("tree", [GROUPS, DEEP, ([256], [-1]), ([1], [-1]), ([100, 90, 110], [-1, -1, -1])])
@pytest.mark.parametrize("window", [None, 1, 33, 1000])
def test_flex_equals_the_plain_path(backward, tree, window):
    agree(tree, window=window)


@pytest.mark.spread(4)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("how", [{}, {"softcap": 0.7}, {"sinks": True}, {"sinks": True, "softcap": 0.7, "window": 33}])
def test_caps_and_sinks_equal_the_plain_path_for_any_grouping_of_heads(backward, groups, how):
    agree(DEEP, groups=groups, **how)


@pytest.mark.parametrize("tree", TREES)
def test_flex_equals_the_definition(backward, tree):
    row, (q, k, v) = row_of(*TREES[tree]), inputs(sum(TREES[tree][0]))
    how = {"scale": 0.3, "window": 4, "softcap": None, "sinks": None}
    want = oracle(SegmentLayout(*TREES[tree]), q, k, v, **how)
    torch.testing.assert_close(row.attend(q, k, v, **how), want, atol=1e-5, rtol=0)


def brute_force(lengths, parents, window):
    """Who sees whom, by walking up from each segment."""
    segment = [i for i, n in enumerate(lengths) for _ in range(n)]
    position = SegmentLayout(lengths, parents).position_ids[0].tolist()
    family = []
    for i, p in enumerate(parents):
        family.append({i} | (family[p] if p >= 0 else set()))
    return torch.tensor(
        [
            [
                segment[j] in family[segment[i]] and 0 <= position[i] - position[j] < (window or 1 << 30)
                for j in range(len(segment))
            ]
            for i in range(len(segment))
        ]
    )


@settings(max_examples=examples(8), deadline=None)
@given(trees(), st.sampled_from([None, 1, 3]))
def test_the_mask_equals_a_brute_force_one(tree, window):
    row = row_of(*tree)
    seen = torch_flex.create_mask(row.mask(window).mask_mod, 1, 1, row.padded, row.padded, device="cpu")[0, 0]
    torch.testing.assert_close(seen[: row.tokens, : row.tokens], brute_force(*tree, window))
    padding = seen.clone()
    padding[: row.tokens, : row.tokens] = torch.eye(row.tokens, dtype=torch.bool)
    assert torch.equal(padding, torch.eye(row.padded, dtype=torch.bool))  # each sees itself alone, and nothing sees it


@pytest.mark.spread(4)
@pytest.mark.parametrize("chunk", [1, 1 << 25])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("tree", [GROUPS, ([400, 300, 128, 300], [-1, 0, 0, -1])])
def test_the_blocks_equal_those_of_torch_from_the_whole_mask(tree, window, chunk, monkeypatch):
    monkeypatch.setattr(flex, "CHUNK_PAIRS", chunk)
    row = row_of(*tree)
    got = row.mask(window)
    want = torch_flex.create_block_mask(got.mask_mod, 1, 1, row.padded, row.padded, device="cpu")
    assert got.shape == want.shape == (1, 1, row.padded, row.padded)
    assert torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(vars(got)[name], vars(want)[name]), name
    for name, many in (("kv_indices", "kv_num_blocks"), ("full_q_indices", "full_q_num_blocks")):
        for a, b, n in zip(vars(got)[name][0, 0], vars(want)[name][0, 0], vars(got)[many][0, 0]):
            assert torch.equal(a[:n], b[:n])


def test_branches_cost_no_blocks_of_each_other():
    row = row_of([128, 256, 256, 256], [-1, 0, 0, 0])
    blocks = row.mask(None).to_dense()[0, 0]
    assert int(blocks.sum()) == 1 + 3 * (2 + 3)  # the prompt's own; each branch's two rows: prompt and own so far


def test_a_mask_is_made_once_per_window():
    row = row_of(*GROUPS)
    assert row.mask(None) is row.mask(None) and row.mask(5) is row.mask(5) and row.mask(5) is not row.mask(None)


def test_a_walk_goes_through_a_branch_before_the_next():
    order, end = depth_first_order([2, 1, 1, 1], [-1, 0, 0, 1])  # the last segment lies below the second
    assert order.tolist() == [0, 1, 2, 4, 3]
    assert end.tolist() == [4, 4, 3, 4, 3]


def test_a_row_scored_in_inference_mode_is_trained_on_next(backward):
    row, (q, k, v) = row_of(*GROUPS), inputs(sum(GROUPS[0]))
    with torch.inference_mode():
        SegmentLayout(*GROUPS)
        row.attend(q, k, v, scale=0.3)
    row.attend(q, k, v, scale=0.3, softcap=1.0).sum().backward()
    assert q.grad is not None


def test_lengths_windows_and_caps_share_a_kernel(backward, monkeypatch):
    graphs = []
    monkeypatch.setattr(
        flex,
        "_attention",
        torch.compile(
            flex._attention, dynamic=True, fullgraph=True, backend=lambda graph, _: (graphs.append(1), graph.forward)[1]
        ),
    )
    seen = []
    for tree in flex.PROBES:
        for window in (None, 33, 50):
            q, k, v = inputs(sum(tree[0]))
            row_of(*tree).attend(q, k, v, scale=0.3, window=window, softcap=1.0 if window is None else float(window))
            seen.append(len(graphs))
    assert len(set(seen)) == 1


# ---- the choice


def test_a_cpu_is_refused_and_auto_is_native_there_where_it_can_be_had():
    assert "no backward pass on cpu" in flex_unsupported_reason(CASE._replace(device=torch.device("cpu")))
    tensors, how = inputs(9), {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    tree = ([4, 2, 3], [-1, 0, 0])
    auto, plain = (SegmentLayout(*tree, attention=a) for a in ("auto", "plain"))
    torch.testing.assert_close(auto.attend(0, *tensors, **how), plain.attend(0, *tensors, **how), atol=1e-5, rtol=0)
    native = not isinstance(segment_kernels(), Unavailable)
    assert ("plain" in vars(auto), "_flex" in vars(auto)) == (not native, False)  # which tables were made
    capped = {**how, "softcap": 0.7}  # what the native kernels leave to torch, to the bit
    assert torch.equal(auto.attend(0, *tensors, **capped), plain.attend(0, *tensors, **capped))
    wide = [x.double() for x in tensors]
    assert torch.equal(auto.attend(0, *wide, **how), plain.attend(0, *wide, **how))
    with pytest.raises(ConfigError, match="no backward pass on cpu; set it to auto or plain"):
        SegmentLayout(*tree, attention="flex").attend(0, *tensors, **how)


def test_flex_serves_a_layout_that_asks_for_it(backward, monkeypatch):
    monkeypatch.setattr(attention, "flex_unsupported_reason", lambda case: None)
    made = []
    monkeypatch.setattr(attention, "FlexRow", lambda *a: (made.append(1), FlexRow(*a))[1])
    tensors, how = inputs(262), {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    layout = SegmentLayout(*GROUPS, attention="flex")
    got = [layout.attend(layer, *tensors, **how) for layer in range(2)]
    want = SegmentLayout(*GROUPS, attention="plain").attend(0, *tensors, **how)
    assert made == [1]  # once per layout, not per layer
    for out in got:
        torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tree", "how", "served"),
    [
        (([5, 5], [-1, -1]), {}, False),  # causality alone says it
        (([5, 3], [-1, 0]), {}, True),
        (([5, 5], [-1, -1]), {"window": 3}, True),
        (([5, 5], [-1, -1]), {"window": 5}, False),
        (([5, 5], [-1, -1]), {"softcap": 1.0}, True),
        (([5, 5], [-1, -1]), {"sinks": torch.zeros(4)}, True),
    ],
)
def test_auto_takes_flex_where_masks_would_be_needed(tree, how, served, monkeypatch):
    monkeypatch.setattr(attention, "flex_unsupported_reason", lambda case: None)
    q = torch.empty(1, 4, 10, 8, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    how = {"window": None, "softcap": None, "sinks": None} | how
    assert SegmentLayout(*tree)._use_flex(q, q, q, **how) is served


def test_a_failed_probe_says_why_once(fresh, monkeypatch, caplog):
    calls = []

    def fail(case):
        calls.append(case)
        raise RuntimeError("no triton here\nand a long trace")

    monkeypatch.setattr(flex, "_compare_with_plain", fail)
    with caplog.at_level(logging.INFO, "whet"):
        reasons = {flex_unsupported_reason(CASE) for _ in range(3)}
    assert reasons == {"it does not compile: RuntimeError: no triton here and a long trace"}
    assert calls == [CASE] and len(caplog.records) == 1
    assert "4 query / 2 KV heads, size 8, float32" in caplog.text and "no triton here" in caplog.text
    assert flex_unsupported_reason(CASE._replace(dtype=torch.float64)) == "FlexAttention has no kernel in torch.float64"


def test_the_probe_passes_what_agrees_and_names_what_does_not(backward, monkeypatch):
    here = CASE._replace(device=torch.device("cpu"), sinks=True, softcap=True)
    assert flex._probe(here) is None
    real = flex._attention
    monkeypatch.setattr(flex, "_attention", lambda q, k, v, *a: real(q, k, v.detach() + 0.01 * (v - v.detach()), *a))
    assert "its dv is" in flex._probe(here)
    monkeypatch.setattr(flex, "_attention", lambda *a: real(*a) * torch.nan)
    assert "its output is nan" in flex._probe(here)


def test_the_probe_leaves_the_layer_that_asks_alone(backward):
    here = CASE._replace(device=torch.device("cpu"))
    packed = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x), lambda x: x):
        assert flex._probe(here) is None  # it takes gradients, in a thread of its own
        assert not torch.is_grad_enabled()
    assert not packed


def signature(q, k, v, mask, scale, cap, sinks):
    """What a kernel is compiled for, beside the lengths of rows."""
    given = [x for x in (q, k, v, sinks) if x is not None]
    strides = [(x.stride(1) if x.stride(1) != x.shape[2] * x.shape[3] else None, *x.stride()[2:]) for x in (q, k, v)]
    grads = [x.requires_grad for x in given] if torch.is_grad_enabled() else []
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*modes, *grads, *strides, scale, *(x.dtype for x in given), cap is None)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_probe_makes_the_calls_that_a_model_makes(backward, fresh, monkeypatch, mode):
    made, real = set(), flex._attention
    monkeypatch.setattr(flex, "_attention", lambda *a: (made.add(signature(*a)), real(*a))[1])
    monkeypatch.setattr(attention, "flex_unsupported_reason", lambda case: flex._probe_once(case).reason)
    monkeypatch.setattr(flex, "PROBES", (GROUPS,))
    monkeypatch.setattr(flex, "UNPADDED_PROBES", (FULL,))
    for tree in (GROUPS, FULL):  # the second fills its blocks: nothing is padded, so copied
        tokens = sum(tree[0])
        token_by_token = [torch.randn(1, tokens, n).unflatten(2, (-1, 8)).transpose(1, 2) for n in (32, 16)]
        q, k = (x.requires_grad_() for x in token_by_token)
        v = torch.randn(1, tokens, 48)[..., 32:].unflatten(2, (-1, 8)).transpose(1, 2)  # a part of one wide product
        sinks = torch.zeros(4, dtype=torch.bfloat16)
        with mode():
            layout = SegmentLayout(*tree, attention="flex")
            assert layout._use_flex(q, k, v, None, None, sinks, 0.3)
            probed = set(made)
            made.clear()
            layout.attend(0, q, k, v, scale=0.3, window=None, softcap=None, sinks=sinks)
        assert len(made) == 1 and made <= probed
        made |= probed


def serving(monkeypatch, error):
    """Flex that passes its probe and fails when it is called."""

    def fail(self, *args, **how):
        raise error

    monkeypatch.setattr(flex, "_probe", lambda case: None)
    monkeypatch.setattr(attention, "flex_unsupported_reason", lambda case: flex._probe_once(case).reason)
    monkeypatch.setattr(FlexRow, "attend", fail)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


@pytest.mark.parametrize("error", [torch._dynamo.exc.InternalTorchDynamoError("recompile_limit"), ValueError("wide")])
def test_a_call_that_does_not_compile_leaves_the_plain_path_and_says_so_once(fresh, monkeypatch, caplog, error):
    tensors, how = inputs(262), {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    want = SegmentLayout(*GROUPS, attention="plain").attend(0, *tensors, **how)
    serving(monkeypatch, error)
    layout = SegmentLayout(*GROUPS)
    with caplog.at_level(logging.WARNING, "whet"):
        for layer in range(2):
            torch.testing.assert_close(layout.attend(layer, *tensors, **how), want, atol=1e-5, rtol=0)
    assert len(caplog.records) == 1 and str(error) in caplog.text
    with pytest.raises(ConfigError, match="set it to auto or plain"):
        SegmentLayout(*GROUPS, attention="flex").attend(0, *tensors, **how)


def test_a_call_that_flex_is_asked_for_and_that_does_not_compile_is_an_error(fresh, monkeypatch):
    tensors, how = inputs(262), {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    serving(monkeypatch, RuntimeError("no triton"))
    with pytest.raises(ConfigError, match="no triton; set it to auto or plain"):
        SegmentLayout(*GROUPS, attention="flex").attend(0, *tensors, **how)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("20 GiB"), torch.AcceleratorError("illegal address")])
def test_memory_that_is_out_is_no_fault_of_the_kernel(fresh, monkeypatch, caplog, error):
    tensors, how = inputs(262), {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    serving(monkeypatch, error)
    with pytest.raises(type(error)):
        SegmentLayout(*GROUPS).attend(0, *tensors, **how)
    assert "plain path" not in caplog.text


def test_the_probe_runs_on_the_models_device(monkeypatch):
    current = []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(flex, "_compare_with_plain", lambda case: f"on {current}")
    assert flex._probe(CASE._replace(device=torch.device("cuda", 1))) == f"on {[torch.device('cuda', 1)]}"


def test_the_switch_reaches_the_layout():
    assert RoleConfig(attention="flex").attention == "flex" and RoleConfig().attention == "auto"
    with pytest.raises(ConfigError, match="attention"):
        RoleConfig(attention="fast")
    with pytest.raises(ConfigError, match="unknown attention 'fast'"):
        SegmentLayout([1], [-1], attention="fast")
    with pytest.raises(ConfigError, match="flex needs a CUDA device, got cpu"):
        load_model("nowhere", attention="flex")
    batch = random_batch((2, [2, 2]))
    (micro,) = plan_micro_batches(batch, max_tokens=100)
    assert micro.layout is not None and micro.layout.attention == "auto"
    (micro,) = plan_micro_batches(batch, max_tokens=100, attention="plain")
    assert micro.layout is not None and micro.layout.attention == "plain"
    moved = micro.to("meta").layout
    assert moved is not None and moved.attention == "plain" and moved.position_ids.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "sinks"), [(False, False), (True, False), (False, True)])
def test_flex_passes_its_probe_on_a_gpu(dtype, softcap, sinks):
    assert flex_unsupported_reason(FlexCase(torch.device("cuda", 0), dtype, 8, 2, 64, 64, softcap, sinks)) is None
