"""Packed, shared-prefix, padded, one at a time: one answer, for every family."""

import pytest
import torch
from families import BATCH, PACKABLE, REFUSED, gradients, one_by_one, tiny, worst
from helpers import rounding

from whet.models.forward import token_stats
from whet.models.load import load_model
from whet.packing.micro_batch_planner import plan_micro_batches

WAYS = {
    "shared": {"max_tokens": 10_000},
    "separate": {"max_tokens": 10_000, "shared_prefix": False},
    "split": {"max_tokens": 20},
    "padded": {"max_tokens": 60, "packable": False},
}
ROUNDINGS = 2 * 64
"""Of a layer's sums, there and back: at most 64 numbers each. All weights are moved, so each layer counts its own."""
COEFFICIENTS = torch.randn(BATCH.num_tokens, generator=torch.Generator().manual_seed(1))


def run(loaded, way):
    """[S] logprobs, with sum(c * logprobs) propagated."""
    out = torch.full((BATCH.num_tokens,), torch.nan)
    for micro in plan_micro_batches(BATCH, **WAYS[way]):
        logprobs = token_stats(loaded, micro).logprobs
        (logprobs * COEFFICIENTS[micro.token_index]).sum().backward()
        out[micro.token_index] = logprobs.detach()
    return out


def alone(model, attention="eager"):
    """Logprobs [S] of each sequence alone with the gradients of sum(c * logprobs), and how far rounding brings them."""

    def program():
        logprobs = one_by_one(model, BATCH, attention)
        (logprobs * COEFFICIENTS).sum().backward()
        found.update(gradients(model))
        return [logprobs.detach(), *found.values()]

    found = {}
    limits = rounding(program, list(model.parameters()), roundings=ROUNDINGS)
    logprobs, *grads = program()
    grads = dict(zip(found, grads, strict=True))
    return {"logprobs": logprobs, **grads}, dict(zip(["logprobs", *grads], limits, strict=True))


def agree(model, logprobs, want, limits):
    """Logprobs and the model's gradients are as far from the oracle's as two roundings bring them."""
    got = {"logprobs": logprobs, **gradients(model)}
    assert got.keys() == want.keys() and len(want) > 4
    for name, x in got.items():
        assert (x - want[name]).abs().max() <= 2 * limits[name], name


@pytest.mark.parametrize("family", PACKABLE)
def test_packed_and_shared_prefix_equal_each_sequence_alone(family):
    model = tiny(family)
    loaded = load_model(model)
    assert loaded.packable, loaded.unpackable_reasons
    want, limits = alone(model)
    for way in ("shared", "separate", "split"):
        agree(model, run(loaded, way), want, limits)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_says_why_and_is_right_padded(family):
    model = tiny(family)
    loaded = load_model(model)
    assert not loaded.packable and loaded.unpackable_reasons
    want, limits = alone(model, attention=None)
    agree(model, run(loaded, "padded"), want, limits)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Cohere"])
def test_padded_rows_of_a_packable_family_equal_packed_ones(family):
    model = tiny(family)
    loaded = load_model(model)
    want = run(loaded, "shared")
    grads = gradients(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(run(loaded, "padded"), want, atol=1e-5, rtol=1e-5)
    assert worst(gradients(model), grads) < 2e-5


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # the name that all versions have
def test_gradient_checkpointing_changes_nothing():
    model = tiny("Qwen3")
    loaded = load_model(model)
    want, grads = run(loaded, "shared"), gradients(model)
    model.gradient_checkpointing_enable()
    assert torch.equal(run(loaded, "shared"), want)
    assert worst(gradients(model), grads) == 0
