"""Attention by varlen_attn, whose kernel needs a GPU: a stand-in takes its calls, from its definition."""

import inspect
import logging

import pytest
import torch

from tests.unit.models.test_attention import TREES, oracle, qkv
from tests.varlen_standin import varlen_attn as standin
from tests.varlen_standin import varlen_attn_2_11
from whet.models import attention, flex, varlen
from whet.models.attention import SegmentLayout
from whet.models.flex import FlexCase
from whet.models.varlen import VarlenRow, varlen_unsupported_reason
from whet.rollout.engine import prefill
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.prefill import PrefillLayout, PrefillSpan, sequence_ends

CASE = FlexCase(torch.device("cuda"), torch.bfloat16, 4, 2, 8, 8, False, False)
HOW = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", standin)
    varlen_unsupported_reason.cache_clear()
    yield
    varlen_unsupported_reason.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("tree", TREES)
def test_a_row_equals_the_definition(tree, window):
    row, layout = VarlenRow(*TREES[tree]), SegmentLayout(*TREES[tree])
    tensors = qkv(sum(TREES[tree][0]), value_size=8)
    got = row.attend(*tensors, scale=0.3, window=window)
    want = oracle(layout, *tensors, **{**HOW, "window": window})
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = [torch.autograd.grad(x, tensors, weight) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_gradients_of_a_shared_prompt_are_summed_in_fp32():
    row = VarlenRow([1] + [1] * 512, [-1] + [0] * 512)
    x = torch.ones(513, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    varlen._Gather.apply(x, row.keys).sum().backward()
    assert x.grad[0].item() == 512  # bf16 stops at 256 + 1


@pytest.mark.parametrize(
    ("tree", "how", "taken"),
    [
        (([5, 5], [-1, -1]), {}, True),
        (([5, 3, 4], [-1, 0, 0]), {"window": 3}, True),
        (([50, 1, 1, 1], [-1, 0, 0, 0]), {}, False),  # its keys would be gathered four times over
        (([5, 3], [-1, 0]), {"softcap": 1.0}, False),
        (([5, 3], [-1, 0]), {"sinks": torch.zeros(4)}, False),
    ],
)
def test_auto_takes_it_where_the_kernel_can(tree, how, taken, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "varlen_unsupported_reason", lambda case: None)
    monkeypatch.setattr(VarlenRow, "attend", lambda self, *a, **k: calls.append(k))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    tensors = [x.detach() for x in qkv(sum(tree[0]), value_size=8)]
    for choice in ("auto", "plain"):
        SegmentLayout(*tree, attention=choice).attend(0, *tensors, **{**HOW, **how})
    assert calls == ([{"scale": 0.3, "window": how.get("window")}] if taken else [])


@pytest.mark.parametrize("window", [None, 4])
def test_prompts_of_an_engine_are_one_call_with_the_keys_of_their_stores(window, monkeypatch):
    def run(one_call):
        store, outs = KVStore(rows=3, length=32), []
        span = lambda count, start, length, slot: PrefillSpan(
            count=count, start=start, length=length, store=store, slot=slot
        )
        for spans in ([span(2, 0, 7, 0), span(1, 0, 12, 2)], [span(1, 7, 5, 1), span(1, 7, 2, 0), span(1, 12, 9, 2)]):
            layout = PrefillLayout(spans, ends=sequence_ends(spans) if one_call else None)
            tensors = [x.detach() for x in qkv(layout.position_ids.shape[1], value_size=8)]
            outs.append(layout.attend(0, *tensors, **{**HOW, "window": window}))
        return [*outs, *store.layer(0, *tensors[1:])]

    plain, calls = run(False), []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: (calls.append(1), standin(*a, **k))[1])
    monkeypatch.setattr(prefill, "varlen_unsupported_reason", lambda case: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for got, want in zip(run(True), plain, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert len(calls) == 2


def here(monkeypatch, kernel):
    """The reason of a comparison on this processor, in bf16."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    fake_cuda = CASE._replace(device=type("Device", (), {"type": "cuda"})())
    compare = varlen.compare_with_plain
    monkeypatch.setattr(varlen, "run_in_thread", lambda device, compare: compare())
    monkeypatch.setattr(varlen, "compare_with_plain", lambda case, make: compare(
        CASE._replace(device=torch.device("cpu")), lambda *tree: VarlenRow(*tree).attend))  # fmt: skip
    return varlen_unsupported_reason(fake_cuda)


def test_a_kernel_that_agrees_is_taken_and_another_is_not(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "whet"):
        for kernel in (standin, varlen_attn_2_11):
            assert here(monkeypatch, kernel) is None
            varlen_unsupported_reason.cache_clear()
        first_key = lambda *a, **k: standin(*a, **k, last_key=False)
        assert "its output is" in here(monkeypatch, first_key)
        varlen_unsupported_reason.cache_clear()
        assert "unexpected keyword" in here(monkeypatch, lambda q, k, v, *ends, scale: q)
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING", "WARNING"]


@pytest.mark.parametrize(("module", "name"), [(varlen, "varlen_unsupported_reason"), (flex, "flex_unsupported_reason")])
def test_a_comparison_that_runs_out_of_memory_is_made_again(monkeypatch, module, name):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    flex._probe_once.cache_clear()
    monkeypatch.setattr(module, "compare_with_plain", full)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(module, name)(CASE)
    monkeypatch.setattr(module, "compare_with_plain", lambda *args: None)
    assert getattr(module, name)(CASE) is None
    flex._probe_once.cache_clear()


def test_what_the_kernel_does_not_have_is_refused_without_a_try():
    for change in ({"dtype": torch.float32}, {"softcap": True}, {"sinks": True}, {"value_size": 4}):
        assert "varlen_attn has no" in varlen_unsupported_reason(CASE._replace(**change))


def test_torch_takes_the_arguments_that_the_stand_in_takes():
    from torch.nn.attention.varlen import varlen_attn

    names, newer = set(inspect.signature(varlen_attn).parameters), {"enable_gqa", "seqused_k"}
    older = set(inspect.signature(varlen_attn_2_11).parameters)
    assert set(inspect.signature(standin).parameters) - {"last_key"} == older | newer and older <= names
    assert torch.__version__.startswith("2.11.") or newer <= names
