"""Rule 1: weights once, sums everywhere. A batch has the gradient of any split of it, in every aggregation mode."""

import pytest
import torch
from families import BATCH, gradients, one_by_one, tiny, worst

from whet.models.forward import token_stats
from whet.models.load import load_model
from whet.ops.loss_aggregation import LOSS_AGG_MODES, token_weights
from whet.packing.micro_batch_planner import plan_micro_batches

SPLITS = {
    "whole": {"max_tokens": 10_000},
    "separate prefixes": {"max_tokens": 10_000, "shared_prefix": False},
    "20 tokens": {"max_tokens": 20},
    "one sequence each": {"max_tokens": 10_000, "max_sequences": 1},
    "padded": {"max_tokens": 10_000, "packable": False},
    "padded, split": {"max_tokens": 50, "max_sequences": 2, "packable": False},
}
# Qwen3's norms compute in fp32 whatever the model's dtype; Phi's LayerNorms stay in float64
LIMIT = {("Qwen3", torch.float32): 1e-5, ("Phi", torch.float64): 1e-12}
ADVANTAGES = torch.randn(BATCH.num_sequences, generator=torch.Generator().manual_seed(2)).index_select(
    0, BATCH.sequence
)
PROMPT = BATCH.group_of.index_select(0, BATCH.trajectory)


def objective(logprobs, index, weights):
    """A clipped surrogate against old logprobs, weighted and summed: what the worker runs."""
    old = torch.linspace(-6, -1, BATCH.num_tokens, dtype=torch.float64)[index].to(logprobs.dtype)
    ratio = (logprobs - old).clamp(max=5).exp()
    advantages = ADVANTAGES[index].to(logprobs.dtype)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (weights[index].to(logprobs.dtype) * loss).sum()


@pytest.mark.spread(4)
@pytest.mark.parametrize(("family", "dtype"), LIMIT, ids=str)
@pytest.mark.parametrize("mode", sorted(LOSS_AGG_MODES))
def test_any_split_gives_the_gradient_of_the_whole(mode, family, dtype):
    model = tiny(family, dtype)
    loaded = load_model(model)
    weights = token_weights(BATCH.mask, BATCH.trajectory, mode, norm=14.0, prompt=PROMPT)
    assert (weights > 0).sum() > 20 and (weights == 0).any()
    # not eager: its softmax is in fp32 whatever the model's dtype
    objective(one_by_one(model, BATCH, attention="sdpa"), torch.arange(BATCH.num_tokens), weights).backward()
    want = gradients(model)
    for name, split in SPLITS.items():
        model.set_attn_implementation("whet" if split.get("packable", True) else "sdpa")
        plan = plan_micro_batches(BATCH, **split)
        assert len(plan) > 1 or "0 tokens" not in name
        for micro in plan:
            objective(token_stats(loaded, micro).logprobs, micro.token_index, weights).backward()
        assert worst(gradients(model), want) <= LIMIT[family, dtype], name


def test_weights_made_per_micro_batch_would_be_wrong():
    model = tiny("Phi", torch.float64)
    loaded = load_model(model)

    def run(weights_of):
        for micro in plan_micro_batches(BATCH, max_tokens=20):
            weights = torch.zeros(BATCH.num_tokens, dtype=torch.float64)
            weights[micro.token_index] = weights_of(micro.token_index)
            objective(token_stats(loaded, micro).logprobs, micro.token_index, weights).backward()
        return gradients(model)

    whole = token_weights(BATCH.mask, BATCH.trajectory, "token-mean")
    part = lambda i: token_weights(BATCH.mask[i], BATCH.trajectory[i], "token-mean")
    assert worst(run(part), run(lambda i: whole[i])) > 0.5
