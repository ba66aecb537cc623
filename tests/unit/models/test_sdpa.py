"""Grouped heads under a mask: a GPU's kernels take no both, so there they go without repeated keys or held scores."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from whet.models.attention import SegmentLayout
from whet.rollout.engine import prefill
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.prefill import PrefillLayout, PrefillSpan

HEADS, KV, SIZE = 6, 2, 8


class Calls(TorchFunctionMode):
    """Calls of torch's operator: whether a GPU has a kernel for them that holds no scores."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            fits = mask is None or (args[0].shape[1] == args[1].shape[1] and mask.dtype == args[0].dtype)
            self.seen.append(fits)  # a mask, shared heads: no kernel; a bool mask: made anew in every call
        return function(*args, **kwargs)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that is made, views and masks left out."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        made = [x for x in tree_iter(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.numbers = max([self.numbers, *(x.numel() for x in made if x.untyped_storage()._cdata not in given)])
        return out


@pytest.fixture
def as_gpu(monkeypatch):
    """Makes tensors call themselves CUDA's, from when it is called."""
    return lambda: monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


def heads(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, tokens, SIZE, generator=g) for h in (HEADS, KV, KV)]


SCORES = [{}, {"softcap": 0.7}, {"sinks": torch.randn(HEADS)}, {"softcap": 0.7, "sinks": torch.randn(HEADS)}]


def prefilled(start, length, window, counts=(2,), **how):
    """Attention of prompts whose first tokens are there already."""
    store, runs, slot = KVStore(rows=sum(counts), length=start + length), [], 0
    _, k, v = heads(sum(counts) * (start + length))
    for pair, x in zip(store.layer(0, k, v), (k, v)):
        pair.copy_(x[0].unflatten(1, (sum(counts), -1)).transpose(0, 1))
    for count in counts:
        runs.append(PrefillSpan(count=count, start=start, length=length, store=store, slot=slot))
        slot += count
    layout = PrefillLayout(runs)
    how = {"scale": 0.3, "window": window, "softcap": None, "sinks": None} | how
    with Calls() as calls, Largest() as largest:
        out = layout.attend(0, *heads(sum(counts) * length, seed=1), **how)
    return out, calls.seen, largest.numbers


@pytest.mark.parametrize("how", SCORES)
@pytest.mark.parametrize(("start", "length", "window"), [(60, 4, None), (0, 40, 7), (30, 20, 9)])
def test_prompts_on_a_gpu_repeat_no_keys_and_equal_those_of_a_cpu(as_gpu, monkeypatch, start, length, window, how):
    want, _, _ = prefilled(start, length, window, **how)
    as_gpu()
    monkeypatch.setattr(prefill, "MAX_BLOCK_SCORES", 1000)
    got, calls, largest = prefilled(start, length, window, **how)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert all(calls) and bool(calls) == (not how)
    q, keys = 2 * HEADS * length * SIZE, 2 * KV * (start + length) * SIZE
    assert largest <= max(q, keys, length * (start + length))


def test_scores_that_are_held_on_a_gpu_are_held_piece_by_piece(as_gpu, monkeypatch):
    as_gpu()
    monkeypatch.setattr(prefill, "MAX_BLOCK_SCORES", 500)
    seen = []
    part = prefill.partial_attention
    record = lambda q, k, *a, **o: (seen.append((q, k)), part(q, k, *a, **o))[1]
    monkeypatch.setattr(prefill, "partial_attention", record)
    prefilled(60, 40, None, softcap=0.7)
    assert max(q.shape[:3].numel() * k.shape[2] for q, k in seen) <= 500 and len(seen) > HEADS // KV
    assert {k.shape[1] for _, k in seen} == {KV}


@pytest.mark.parametrize("how", SCORES)
@pytest.mark.parametrize("window", [None, 9])
def test_segments_on_a_gpu_repeat_no_keys_and_have_the_gradients_of_a_cpu(as_gpu, how, window):
    tree = ([200, 4, 4, 3], [-1, 0, 0, -1])
    how = {"scale": 0.3, "window": window, "softcap": None, "sinks": None} | how

    def run():
        tensors = [x.requires_grad_() for x in heads(sum(tree[0]))]
        with Calls() as calls, Largest() as largest:
            out = SegmentLayout(*tree, attention="plain").attend(0, *tensors, **how)
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out).cumsum(2))
        return [out, *grads], calls.seen, largest.numbers

    want, _, before = run()
    as_gpu()
    got, calls, largest = run()
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert all(calls) and bool(calls) == (not how["softcap"] and how["sinks"] is None)
    assert largest <= (before if not calls else max(HEADS * sum(tree[0]) * SIZE, 200 * 200 if window else 0))
