"""One decode step and one prefill of the layouts against attention written out row by row."""

import numpy as np
import pytest
import torch

from whet.rollout.base import Request, Sampling
from whet.rollout.engine import layouts
from whet.rollout.engine.kv_cache import KVStore, padded_length
from whet.rollout.engine.layouts import DecodeLayout
from whet.rollout.engine.prefill import PrefillLayout, PrefillSpan
from whet.rollout.engine.scheduler import Scheduler
from whet.rollout.in_flight import InFlightRequest

CASES = {
    "plain": {},
    "window_in_the_prompt": {"window": 9},
    "window_in_own_tokens": {"window": 3},
    "window_that_hides_one_token_of_the_longest_row": {"window": 42},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"window": 7, "softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def oracle(q, k, v, *, scale, window=None, softcap=None, sinks=None):
    """The last token's attention: q [H, D] over k, v [KV, S, D]; positions are places."""
    out = []
    for h in range(len(q)):
        g = h * len(k) // len(q)
        scores = (k[g] @ q[h]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[: max(0, len(scores) - window)] = -torch.inf
        weights = torch.cat([scores, sinks[h : h + 1].to(scores)]) if sinks is not None else scores
        out.append(weights.softmax(0)[: len(scores)] @ v[g])
    return torch.stack(out)


@pytest.mark.parametrize("value_size", [8, 6])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode_equals_attention_written_out(case, value_size):
    torch.manual_seed(0)
    options = {"window": None, "softcap": None, "sinks": None, **case}
    plens, own, which = [5, 40, 12, 12], [0, 4, 2, 7, 7, 1], [2, 0, 1, 2, 0, 3]  # prompts of two buckets, out of order
    k = [torch.randn(2, plens[w] + n + 1, 8) for w, n in zip(which, own)]
    v = [torch.randn(2, plens[w] + n + 1, value_size) for w, n in zip(which, own)]
    for row, w in enumerate(which):  # rows of one prompt share its keys
        first = which.index(w)
        k[row][:, : plens[w]], v[row][:, : plens[w]] = k[first][:, : plens[w]], v[first][:, : plens[w]]
    stores, slots = {}, []
    for w, p in enumerate(plens):
        store = stores.setdefault(padded_length(p), KVStore())
        slots.append(store.rows)
        store.reserve(store.rows + 1, padded_length(p))
        keys, values = store.layer(3, k[0][None], v[0][None])
        row = which.index(w)
        keys[slots[w], :, :p], values[slots[w], :, :p] = k[row][:, :p], v[row][:, :p]
    mine = KVStore(rows=len(own), length=50)
    keys, values = mine.layer(3, k[0][None], v[0][None])
    for row, (w, n) in enumerate(zip(which, own)):
        keys[row, :, :n], values[row, :, :n] = k[row][:, plens[w] : -1], v[row][:, plens[w] : -1]
        keys[row, :, n:], values[row, :, n:] = 1e3, 1e3  # what a finished row left there
    layout = DecodeLayout(mine, torch.device("cpu"))
    of = lambda f: np.array([f(w) for w in which])
    layout.regroup(stores, of(lambda w: padded_length(plens[w])), of(lambda w: slots[w]), of(lambda w: plens[w]))
    made = torch.tensor(own)
    position = torch.tensor([plens[w] + n for w, n in zip(which, own)])
    layout.begin(position, made, longest=int(made.max()), furthest=int(position.max()), equal=False)
    q = torch.randn(6, 4, 1, 8)
    now = [torch.stack([x[:, -1:] for x in y]) for y in (k, v)]
    got = layout.attend(3, q, *now, scale=0.4, **options)
    assert got.shape == (6, 4, 1, value_size)
    for row in range(6):
        want = oracle(q[row, :, 0], k[row], v[row], scale=0.4, **options)
        torch.testing.assert_close(got[row, :, 0], want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("value_size", [8, 6])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill_in_chunks_equals_attention_written_out(case, value_size):
    torch.manual_seed(0)
    options = {"window": None, "softcap": None, "sinks": None, **case}
    store = KVStore()
    store.reserve(3, 32)
    q, k, v = torch.randn(3, 4, 12, 8), torch.randn(3, 2, 12, 8), torch.randn(3, 2, 12, value_size)
    first = [
        PrefillSpan(count=2, start=0, length=7, store=store, slot=0),
        PrefillSpan(count=1, start=0, length=12, store=store, slot=2),
    ]
    second = [PrefillSpan(count=2, start=7, length=5, store=store, slot=0)]
    got = torch.zeros(3, 4, 12, value_size)
    for runs in (first, second):
        spans = [(r.slot + i, slice(r.start, r.start + r.length)) for r in runs for i in range(r.count)]
        packed = [torch.cat([x[row, :, span] for row, span in spans], 1)[None] for x in (q, k, v)]
        layout = PrefillLayout(runs)
        assert layout.position_ids[0].tolist() == [i for _, s in spans for i in range(s.start, s.stop)]
        out = layout.attend(0, *packed, scale=0.4, **options)
        for (row, span), part in zip(spans, out[0].split([s.stop - s.start for _, s in spans], 1)):
            got[row, :, span] = part
    for row in range(3):
        for t in range(12):
            want = oracle(q[row, :, t], k[row, :, : t + 1], v[row, :, : t + 1], scale=0.4, **options)
            torch.testing.assert_close(got[row, :, t], want, atol=2e-6, rtol=1e-5)


def test_a_store_keeps_what_it_held_when_it_grows_moves_and_shrinks():
    store = KVStore()
    store.reserve(2, 3)
    assert (store.rows, store.length) == (2, 32)
    k, v = store.layer(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 6))
    k[1], v[1] = 7.0, 8.0
    store.reserve(5, 40, longest=48)
    assert (store.rows, store.length) == (5, 48)
    k, v = store.layer(0, k, v)
    assert k.shape == (5, 2, 48, 4) and v.shape == (5, 2, 48, 6)
    assert (k[1, :, :32] == 7).all() and (k[1, :, 32:] == 0).all() and (v[1, :, :32] == 8).all()
    store.move(torch.tensor([1]), torch.tensor([0]), 32)
    store.shrink(1, 16)
    k, v = store.layer(0, k, v)
    assert k.shape == (1, 2, 16, 4) and (k == 7).all() and (v == 8).all()
    assert store.bytes == 2 * 16 * 10 * 4
    store.drop()
    assert store.bytes == store.rows == 0


def test_a_store_that_makes_room_never_loses_places():
    store = KVStore()
    store.reserve(1, 40)
    keys, _ = store.layer(0, *torch.ones(2, 1, 1, 1, 2))
    keys[0, :, 60] = 1.0
    store.reserve(2, 8, longest=32)
    assert (store.rows, store.length) == (2, 64)
    assert store.layer(0, keys, keys)[0][0, :, 60].eq(1).all()


def test_sequences_that_had_been_admitted_wait_in_front_and_in_their_order():
    first, second, third = (
        InFlightRequest(request=Request(id=i, tokens=np.ones(1), sampling=Sampling(), group=i, rng_key=(0, 0, i, 0)))
        for i in range(3)
    )
    scheduler = Scheduler(max_batch=2, kv_cache_tokens=None)
    scheduler.add([third])
    scheduler.resume([first, second])
    assert list(scheduler.queue) == [first, second, third]


def test_the_operator_for_many_scores_equals_the_plain_product(monkeypatch):
    torch.manual_seed(0)
    layout = DecodeLayout(KVStore(rows=3, length=40), torch.device("cpu"))
    store = KVStore(rows=1, length=32)
    store.layer(0, torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    layout.regroup({32: store}, np.full(3, 32), np.zeros(3, np.int64), np.ones(3, np.int64))
    outs = []
    for held in (layouts.MAX_SCORES, 0):
        monkeypatch.setattr(layouts, "MAX_SCORES", held)
        keys, values = (torch.randn(3, 2, 40, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
        layout.completion_store._layers[0] = (keys, values)
        layout.begin(torch.tensor([7, 3, 20]), torch.tensor([7, 3, 20]), longest=20, furthest=20, equal=False)
        q, k, v = torch.ones(3, 4, 1, 8), torch.ones(3, 2, 1, 8), torch.ones(3, 2, 1, 8)
        outs.append(layout.attend(0, q, k, v, scale=0.3, window=None, softcap=None, sinks=None))
    torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-5)
