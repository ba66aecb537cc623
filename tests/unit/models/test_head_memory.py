"""Logits are never held whole: the peak of memory grows with the chunk, not with tokens times vocabulary."""

from functools import partial

import pytest
import torch
from helpers import random_batch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from whet.models import forward
from whet.models.linear_divergence import HeadStates, linear_divergence
from whet.models.linear_logprob import linear_logprob, linear_stats
from whet.models.load import load_model
from whet.ops import LogitsProcessors
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.types.loss import CONSTANTS

VOCAB, WIDTH = 8192, 16
ROW = VOCAB * 4
"""Bytes of the logits of one token."""


class Peak(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live, at their most."""

    def __init__(self):
        super().__init__()
        self.bytes, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = ref, storage.nbytes()
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


def test_the_peak_is_counted():
    with Peak() as peak:
        a = torch.zeros(1000)
        b = a + 1
        del a
        b.mul_(2).view(10, 100)
        torch.zeros(500)
    assert peak.bytes == 8000


HEADS = {"plain": {}, "entropy, temperature": {"entropy": True, "temperature": 0.7}, "soft cap": {"softcap": 2.0}}


@pytest.mark.parametrize("name", HEADS)
def test_the_fused_head_holds_a_chunk_of_logits(name):
    def peak(rows, chunk):
        g = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, WIDTH, generator=g).requires_grad_() for n in (rows, VOCAB))
        targets = torch.randint(0, VOCAB, (rows,), generator=g)
        with Peak() as seen:
            got, entropies = linear_logprob(
                hidden, weight, targets, max_kept_bytes=0, chunk_bytes=chunk * ROW, **HEADS[name]
            )
            (got.sum() + (0 if entropies is None else entropies.sum())).backward()
        assert hidden.grad is not None and weight.grad is not None
        return seen.bytes

    few = peak(64, chunk=2)
    assert peak(128, chunk=2) - few < 64 * ROW / 16
    assert peak(64, chunk=16) - few >= 14 * ROW
    assert peak(64, chunk=64) > 64 * ROW  # whole logits would have been seen


SUPPORTS = {
    "plain": LogitsProcessors(),
    "temperature": LogitsProcessors(temperature=0.6),
    "truncated": LogitsProcessors(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
}


def model(kind, tied):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": WIDTH,
        "tie_word_embeddings": tied,
    }
    if kind == "soft cap":
        return Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=3.0))
    return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.mark.spread(4)
@pytest.mark.parametrize("train", [True, False], ids=["trained", "read"])
@pytest.mark.parametrize(
    ("kind", "processors", "tied"),
    [
        ("linear", "plain", True),
        ("linear", "temperature", False),
        ("linear", "truncated", True),
        ("soft cap", "truncated", False),
    ],
)
def test_a_pass_holds_a_chunk_of_logits(kind, processors, tied, train, monkeypatch):
    loaded = load_model(model(kind, tied))

    def peak(completions, chunk):
        monkeypatch.setattr(forward, "CHUNK_BYTES", chunk * ROW)
        monkeypatch.setattr(forward, "MAX_KEPT_BYTES", 0)
        head = partial(linear_stats, chunk_bytes=chunk * ROW, max_kept_bytes=0)
        monkeypatch.setattr(forward, "linear_stats", head)
        (micro,) = plan_micro_batches(random_batch((4, [32] * completions)), max_tokens=10_000)
        loaded.module.zero_grad()
        with torch.set_grad_enabled(train), Peak() as seen:
            stats = forward.token_stats(
                loaded, micro, processors=SUPPORTS[processors], entropy=True, constants=CONSTANTS
            )
            if train:
                (stats.logprobs.sum() + stats.entropy.sum()).backward()
        return seen.bytes

    few = peak(2, chunk=2)
    assert peak(4, chunk=2) - few < 64 * ROW / 4  # 64 more tokens: their activations, and not their logits
    assert peak(2, chunk=16) - few >= 12 * ROW


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_divergence_holds_a_chunk_of_both_models_logits(beta):
    def peak(rows, chunk):
        g = torch.Generator().manual_seed(0)
        own, other = (
            HeadStates(*(torch.randn(n, WIDTH, generator=g).requires_grad_() for n in (rows, VOCAB))) for _ in range(2)
        )
        with Peak() as seen:
            linear_divergence(own, other, gkd_beta=beta, chunk_bytes=chunk * ROW).sum().backward()
        assert own.hidden.grad is not None and own.weight.grad is not None
        return seen.bytes

    few = peak(64, chunk=2)
    assert peak(128, chunk=2) - few < 64 * ROW / 16
    grown = peak(64, chunk=16) - few
    assert 2 * 14 * ROW <= grown < 12 * 14 * ROW  # of both models, and what is made of them
