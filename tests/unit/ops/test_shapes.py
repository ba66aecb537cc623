"""Tensors of the wrong shape are refused by name where torch would broadcast them."""

import pytest
import torch
from surrogates import inputs

from whet.errors import DataError
from whet.ops import (
    LogitsProcessors,
    aggregate,
    clipped_surrogate,
    draw,
    entropy_rank,
    generalized_jsd,
    group_spread,
    is_argmax,
    kl_divergence,
    kl_rewards,
    log_mixture,
    masked_column,
    mismatch_metrics,
    process_logits,
    segment_count,
    segment_mean,
    segment_sum,
    selective_log_softmax,
    sequence_mean_kl,
    unit_weights,
    weight_metrics,
)
from whet.ops.shapes import check_shapes

S, ONE = torch.ones(5), torch.ones(1)
MASK, IDS, LOGITS = torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.long), torch.zeros(5, 7)
CALLS = {
    "aggregate": lambda wrong: aggregate(wrong, S),
    "entropy_rank": lambda wrong: entropy_rank(wrong, MASK),
    "group_spread": lambda wrong: group_spread(wrong, IDS),
    "kl_divergence": lambda wrong: kl_divergence(S, wrong, mode="k3"),
    "kl_rewards": lambda wrong: kl_rewards(S, wrong, mask=MASK, beta=0.1),
    "masked_column": lambda wrong: masked_column(wrong, MASK),
    "mismatch_metrics": lambda wrong: mismatch_metrics(S, wrong, mask=MASK),
    "segment_count": lambda wrong: segment_count(wrong, IDS, 1),
    "segment_mean": lambda wrong: segment_mean(wrong, MASK, IDS, 1),
    "segment_sum": lambda wrong: segment_sum(wrong, IDS, 1),
    "sequence_mean_kl": lambda wrong: sequence_mean_kl(wrong, mask=MASK, sequence=IDS, num_sequences=1),
    "unit_weights": lambda wrong: unit_weights(wrong, IDS),
    "weight_metrics": lambda wrong: weight_metrics(S, wrong, mask=MASK, threshold=None, lower=None),
    "draw": lambda wrong: draw(LOGITS, wrong),
    "process_logits": lambda wrong: process_logits(LOGITS, LogitsProcessors(), position=IDS, keep=wrong.long()),
    "is_argmax": lambda wrong: is_argmax(LOGITS, wrong.long()),
    "selective_log_softmax": lambda wrong: selective_log_softmax(LOGITS, wrong.long()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [ONE, S.unsqueeze(1), torch.ones(()), torch.ones(3)], ids=lambda t: f"{t.dim()}-d")
def test_a_tensor_of_another_shape_is_refused_with_names_and_shapes(name, wrong):
    with pytest.raises(DataError, match=r"is \[5\].*all must have the one shape \[") as caught:
        CALLS[name](wrong)
    assert f"is {list(wrong.shape)}" in str(caught.value)


@pytest.mark.parametrize("fn", [generalized_jsd, lambda own, other: log_mixture(own, other, 0.5)])
def test_distributions_of_another_shape_are_refused(fn):
    with pytest.raises(DataError, match=r"logprobs is \[5, 7\] and teacher_logprobs is \[1, 7\]"):
        fn(LOGITS, LOGITS[:1])


@pytest.mark.parametrize("column", ["advantages", "old_logprobs", "mine"])
def test_a_column_that_is_not_one_number_per_token_is_refused(column):
    with pytest.raises(DataError, match=rf"{column} has the shape \[1\], and there are 3 tokens"):
        inputs([0.0, 0.0, 0.0], **{column: [1.0]})


def test_old_logprobs_with_a_further_dimension_are_refused():
    x = inputs([0.0, 0.0, 0.0], advantages=[1.0, 1.0, 1.0], old_logprobs=[[0.0], [0.0], [0.0]])
    with pytest.raises(DataError, match=r"logprobs is \[3\] and old_logprobs is \[3, 1\]"):
        clipped_surrogate(x)


def test_a_missing_tensor_and_any_number_of_dimensions_are_let_through():
    check_shapes("[S]", mask=MASK, token_rewards=None)
    check_shapes("[...]", a=LOGITS, b=LOGITS.shape)
    with pytest.raises(DataError, match=r"a is \[5, 7\] and b is \[5, 7\]; all must have the one shape \[S\]"):
        check_shapes("[S]", a=LOGITS, b=LOGITS)


def test_the_check_is_traced_and_leaves_no_operation_behind():
    loss = lambda logprobs, mask: masked_column(logprobs, mask).sum()
    graph = torch.fx.experimental.proxy_tensor.make_fx(loss, tracing_mode="symbolic")(S, MASK)
    assert not any("eq" in str(node.target) for node in graph.graph.nodes)
    assert graph(S, MASK) == 5
    explained = torch._dynamo.explain(loss)(S, MASK)
    assert explained.graph_break_count == 0
