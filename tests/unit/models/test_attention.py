import pytest
import torch
import torch.nn.functional as F
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import SmolLM3Config
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whet.errors import ConfigError, DataError
from whet.models.attention import ATTENTION, SegmentLayout, whet_attn

PLAIN = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}


def oracle(layout, q, k, v, *, scale, window, softcap, sinks):
    """Token by token over the definition: who is an ancestor, whose position is within the window."""
    lengths, parents = layout.lengths, layout.parents
    segment = [i for i, n in enumerate(lengths) for _ in range(n)]
    position = layout.position_ids[0].tolist()
    family = []
    for i, p in enumerate(parents):
        family.append({i} | (family[p] if p >= 0 else set()))
    T, window = len(segment), 1 << 30 if window is None else window
    sees = lambda i, j: segment[j] in family[segment[i]] and 0 <= position[i] - position[j] < window
    seen = torch.tensor([[sees(i, j) for j in range(T)] for i in range(T)])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, T, 1)], -1)
    return scores.softmax(-1)[..., :T] @ v


def qkv(T, dtype=torch.float64, heads=4, groups=2, size=8, value_size=6):
    g = torch.Generator().manual_seed(T)
    make = lambda h, d: torch.randn(1, h, T, d, generator=g, dtype=dtype).requires_grad_()
    return make(heads, size), make(groups, size), make(groups, value_size)


def agree(layout, **how):
    """Output and all gradients equal the oracle's to 1e-12 in float64."""
    how = {**PLAIN, **how}
    tensors = list(qkv(sum(layout.lengths)))
    if how["sinks"] is not None:
        tensors.append(how["sinks"])
    got, want = layout.attend(0, *tensors[:3], **how), oracle(layout, *tensors[:3], **how)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    grad = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(9))
    for a, b in zip(torch.autograd.grad(got, tensors, grad), torch.autograd.grad(want, tensors, grad)):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


TREES = {
    "padding at the very end": ([1, 2, 1], [-1, 0, 0]),
    "one segment": ([5], [-1]),
    "one token": ([1], [-1]),
    "packed": ([4, 1, 7], [-1, -1, -1]),
    "one group": ([5, 3, 4, 1], [-1, 0, 0, 0]),
    "groups of many lengths": ([3, 2, 9, 8, 4, 4, 1, 6], [-1, 0, 0, -1, 3, 3, -1, 6]),
    "forks of forks": ([5, 3, 7, 2, 9, 4, 6, 6], [-1, 0, -1, 2, 2, 1, 4, 5]),
    "very unequal": ([20, 2, 70, 3, 1, 60], [-1, 0, 0, 0, -1, 4]),
}


@pytest.mark.spread(12)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
def test_attention_equals_the_definition(tree, window):
    agree(SegmentLayout(*TREES[tree]), window=window)


@pytest.mark.parametrize("tree", ["one group", "forks of forks"])
@pytest.mark.parametrize("window", [None, 4])
def test_softcap_and_sinks_equal_the_definition(tree, window):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    agree(SegmentLayout(*TREES[tree]), window=window, softcap=0.7)
    agree(SegmentLayout(*TREES[tree]), window=window, sinks=sinks)
    agree(SegmentLayout(*TREES[tree]), window=window, sinks=sinks, softcap=0.7)


@pytest.mark.spread(8)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("multiple", [2, 16])
def test_attention_with_padded_buckets_equals_the_definition(tree, multiple):
    layout = SegmentLayout(*TREES[tree], multiple=multiple)
    assert all(b.own % multiple == b.above % multiple == 0 for b in layout.bucket_row.buckets)
    for window in (None, 4):
        agree(layout, window=window)
    agree(layout, softcap=0.7)


def test_lengths_of_any_kind_make_few_shapes_of_calls_where_buckets_are_padded():
    shapes = set()
    for n in range(1, 65):
        layout = SegmentLayout([20 + n % 12, n, n], [-1, 0, 0], multiple=32)
        shapes |= {(b.own, b.above) for b in layout.bucket_row.buckets}
    assert shapes == {(32, 0), (32, 32), (64, 32)}


def test_ancestors_of_one_length_share_one_mask_where_buckets_are_padded():
    layout = SegmentLayout([5, 7, 7, 7], [-1, 0, 0, 0], multiple=8)
    bucket = layout.bucket_row.buckets[1]
    assert (bucket.count, bucket.own, bucket.above) == (3, 8, 8)
    assert bucket.mask(None, torch.zeros(1), torch.float32).shape == (1, 1, 8, 16)


@st.composite
def trees(draw):
    n = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    return lengths, [draw(st.integers(-1, i - 1)) for i in range(n)]


@settings(max_examples=examples(10), deadline=None)
@given(trees(), st.sampled_from([None, 3]), st.sampled_from([1, 1, 4]))
def test_any_tree_equals_the_definition(tree, window, multiple):
    agree(SegmentLayout(*tree, multiple=multiple), window=window)


def per_segment(layout, q, k, v):
    """The naive loop: one call per segment over its ancestors' keys and its own."""
    qs, ks, vs = (x.split(layout.lengths, 2) for x in (q, k, v))
    chains, out = [], []
    for i, p in enumerate(layout.parents):
        chains.append([*(chains[p] if p >= 0 else []), i])
        keys, values = (torch.cat([x[j] for j in chains[i]], 2) for x in (ks, vs))
        n, K = layout.lengths[i], keys.shape[2]
        mask = torch.ones(n, K, dtype=torch.bool).tril(K - n)
        out.append(F.scaled_dot_product_attention(qs[i], keys, values, attn_mask=mask, scale=0.3, enable_gqa=True))
    return torch.cat(out, 2)


def test_hundreds_of_tiny_segments_equal_the_loop_in_few_calls(monkeypatch):
    layout = SegmentLayout([8] * 16 + [14] * 128, [-1] * 16 + [i // 8 for i in range(128)], attention="plain")
    tensors = qkv(sum(layout.lengths), torch.float32, size=8, value_size=8)
    want = per_segment(layout, *tensors)
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    got = layout.attend(0, *tensors, **PLAIN)
    assert len(calls) == 2  # 16 prompts at once, 128 completions at once; the loop makes 144
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[400, 90, 95, 10, 300], [64, *range(20, 120, 7)], [8, *[100] * 4, 900]])
def test_padding_is_a_quarter_of_the_work_at_most(lengths):
    layout = SegmentLayout(lengths, [-1] + [0] * (len(lengths) - 1))
    for b in layout.bucket_row.buckets:
        own = [int(n) for n in b.real.reshape(b.count, b.own).sum(1)]
        work = sum(n * (b.above + n) for n in own)
        assert b.count * b.own * (b.above + b.own) <= max(1.25 * work, work + 4096) + 1


def test_positions_go_on_after_the_parent():
    layout = SegmentLayout([2, 2, 1, 3], [-1, 0, 1, -1])
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_the_layout_serves_backward_after_inference_mode(attention):
    layout = SegmentLayout([3, 2, 4], [-1, 0, 0], attention=attention)
    q, k, v = qkv(9, torch.float32, value_size=8)
    with torch.inference_mode():
        layout.attend(0, q, k, v, **PLAIN)
    layout.attend(0, q, k, v, **PLAIN).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_two_threads_repeat_the_gradient_to_the_bit(attention):
    layout = SegmentLayout([30, *[20] * 8], [-1] + [0] * 8, attention=attention)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q, k, v = qkv(190, torch.float32, size=16, value_size=16)
        runs = [torch.autograd.grad(layout.attend(0, q, k, v, **PLAIN).square().sum(), (q, k, v)) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("tree", [([], []), ([0], [-1]), ([2, 2], [-1, 1]), ([2], [-2]), ([2, 1], [-1])])
def test_an_impossible_tree_is_refused(tree):
    with pytest.raises(DataError):
        SegmentLayout(*tree)


def test_a_layout_of_other_tokens_is_refused():
    with pytest.raises(DataError, match="1 row of 4 tokens was given 1 of 5"):
        SegmentLayout([4], [-1]).attend(0, *qkv(5), **PLAIN)


class Module(nn.Module):
    layer_idx = 0


def test_whet_attn_refuses_what_it_does_not_know():
    q, k, v = qkv(4)
    layout = SegmentLayout([4], [-1])
    out, weights = whet_attn(Module(), q, k, v, None, whet_layout=layout, position_ids=None, use_cache=False)
    assert out.shape == (1, 4, 4, 6) and weights is None
    with pytest.raises(ConfigError, match="without whet_layout"):
        whet_attn(Module(), q, k, v, None)
    with pytest.raises(ConfigError, match="block_indices"):
        whet_attn(Module(), q, k, v, None, whet_layout=layout, block_indices=1)
    with pytest.raises(ConfigError, match="mask"):
        whet_attn(Module(), q, k, v, torch.zeros(1), whet_layout=layout)
    with pytest.raises(ConfigError, match="dropout"):
        whet_attn(Module(), q, k, v, None, whet_layout=layout, dropout=0.1)


def test_the_name_is_registered_and_no_mask_is_built_for_it():
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION] is whet_attn
    config = SmolLM3Config(attn_implementation=ATTENTION)
    for mask in (None, torch.ones(1, 5, dtype=torch.long)):
        assert create_causal_mask(config, torch.zeros(1, 5, 8), mask, None, torch.arange(5)[None]) is None
