"""Sequences that begin alike, run as trees, against padded rows: gradients, log-probabilities, penalties."""

import pytest
import torch
from families import gradients, tiny, worst
from helpers import examples, forest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.models.forward import token_stats
from whet.models.load import load_model
from whet.ops import LogitsProcessors
from whet.packing.micro_batch_planner import plan_micro_batches

LIMIT = 1e-5


def run(loaded, batch, processors, **plan):
    """[S] log-probabilities with a gradient of their weighted sum, and the tokens that were run."""
    coefficients = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    out, tokens = torch.full((batch.num_tokens,), torch.nan), 0
    for micro in plan_micro_batches(batch, **plan):
        logprobs = token_stats(loaded, micro, processors=processors).logprobs
        (logprobs * coefficients[micro.token_index]).sum().backward()
        out[micro.token_index] = logprobs.detach()
        tokens += micro.num_tokens
    return out, tokens


def compare(family, batch, *budgets, processors=LogitsProcessors(), limit=LIMIT):
    model = tiny(family)
    loaded = load_model(model)
    model.set_attn_implementation("sdpa" if family in ("Qwen3", "Llama") else "eager")
    want, _ = run(loaded, batch, processors, max_tokens=10_000, packable=False)
    grads = gradients(model)
    model.set_attn_implementation("whet")
    separate = sum(m.num_tokens for m in plan_micro_batches(batch, max_tokens=10_000, shared_prefix=False))
    for budget in budgets:
        got, tokens = run(loaded, batch, processors, max_tokens=budget)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert worst(gradients(model), grads) <= limit
        assert tokens <= separate


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 10))
def test_random_trees_have_the_gradients_of_padded_rows(seed, n):
    batch = forest(seed, n)
    longest = int((batch.prefix_lengths[batch.prefix_of] + batch.lengths).max())
    compare("Qwen3", batch, 10_000, longest)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Mistral", "GptOss", "Qwen3Moe", "Phi"])
def test_windows_caps_and_sinks_hold_in_deep_trees(family):
    batch = forest(3, 9)
    compare(family, batch, 10_000, limit=2e-5 if family in ("Gemma2", "GptOss") else LIMIT)


def test_penalties_see_each_sequence_alone():
    compare(
        "Llama", forest(3, 9), 10_000, processors=LogitsProcessors(repetition_penalty=1.7, temperature=0.8, top_k=20)
    )
