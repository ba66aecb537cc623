"""What holds of every policy loss, by its name: a new one is covered without a new test."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surrogates import COLUMNS, DISTINCT, cases, changed, gradient, inputs, random_inputs

from whet.ops import POLICY_LOSSES, metrics_without_advantage

CASES = cases()
few = settings(max_examples=6, deadline=None)
seeds = st.integers(0, 10**6)
lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def bound(name, level):
    loss = POLICY_LOSSES[name]
    return loss if level is None else functools.partial(loss, importance_sampling_level=level)


def part(x, keep):
    """Some sequences of a batch as a micro-batch of their own, in this order."""
    at = torch.cat([(x.sequence == i).nonzero().flatten() for i in keep])
    rank = torch.empty(x.num_sequences, dtype=torch.long)
    rank[torch.tensor(keep)] = torch.arange(len(keep))
    columns = {k: v[at] for k, v in x.token_columns.items()}
    fields = {"mask": x.mask[at], "logprobs": x.logprobs[at], "sequence": rank[x.sequence[at]], "num_units": len(keep)}
    fields |= {"num_sequences": len(keep), "unit_of": torch.arange(len(keep))}
    return changed(x, **fields, **columns), at


def padded(x, value):
    """A token before and after each sequence that is masked out and has this value in every column."""
    sequence, order = torch.cat([torch.arange(x.num_sequences).repeat_interleave(2), x.sequence]).sort(stable=True)
    n = 2 * x.num_sequences
    fill = lambda column, v: torch.cat([torch.full((n,), v, dtype=column.dtype), column])[order]
    columns = {k: fill(v, value) for k, v in x.token_columns.items()}
    fields = {"sequence": sequence, "mask": fill(x.mask, False), "logprobs": fill(x.logprobs, value)}
    return changed(x, **fields, **columns), (order >= n).nonzero().flatten()


@pytest.mark.parametrize(("name", "level"), CASES)
@few
@given(seed=seeds, lengths=lengths, data=st.data())
def test_neither_order_nor_split_into_micro_batches_changes_a_loss(name, level, seed, lengths, data):
    x, loss = random_inputs(seed, lengths), bound(name, level)
    whole, metrics, slope = gradient(loss, x)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    for keep in (list(order), list(order[:cut]), list(order[cut:])):
        if not keep:
            continue
        own, at = part(x, keep)
        found, own_metrics, own_slope = gradient(loss, own)
        torch.testing.assert_close(found, whole[at], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_slope, slope[at], rtol=1e-12, atol=1e-12)
        for key, value in own_metrics.items():
            torch.testing.assert_close(value, metrics[key][at], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "level"), CASES)
@few
@given(seed=seeds, lengths=lengths, bad=st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e30, -1e30]))
def test_neither_padding_nor_garbage_at_masked_tokens_reaches_a_loss(name, level, seed, lengths, bad):
    x, loss = random_inputs(seed, lengths), bound(name, level)
    whole, metrics, slope = gradient(loss, x)
    dirt = {c: torch.where(x.mask, x.column(c) if c != "logprobs" else x.logprobs, bad) for c in ("logprobs", *COLUMNS)}
    dirty, (wide, at) = changed(x, **dirt), padded(x, bad)
    everywhere = torch.arange(len(x.mask))
    for other, where in ((dirty, everywhere), (wide, at)):
        found, other_metrics, other_slope = gradient(loss, other)
        torch.testing.assert_close(found[where], whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other_slope[where], slope, rtol=1e-12, atol=1e-12)
        assert (found[~other.mask] == 0).all() and (other_slope[~other.mask] == 0).all()
        for key, value in other_metrics.items():
            torch.testing.assert_close(value[where], metrics[key], rtol=1e-12, atol=1e-12)
            assert (value[~other.mask] == 0).all(), key


@pytest.mark.parametrize(("name", "level"), CASES)
def test_metrics_are_detached_numbers_of_each_token_in_the_loss_s_dtype(name, level):
    for dtype in (torch.float32, torch.float64):
        x = random_inputs(0, dtype=dtype)
        loss, metrics, slope = gradient(bound(name, level), x)
        assert loss.dtype == slope.dtype == dtype and "pg_loss" in metrics
        for key, value in metrics.items():
            assert value.shape == loss.shape and value.dtype == dtype and not value.requires_grad, key


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_ratio_of_one_gives_the_policy_gradient(name, level):
    x = random_inputs(3, masked=False)
    expected = -x.advantages
    if name == "cispo-trl":
        expected = 0.2 * expected  # its cap is epsilon_high itself
    if name == "distillation":
        expected = expected + x.logprobs - x.teacher_logprobs
        if level == "sequence":  # the mean of the sequence's own
            expected = torch.stack([expected[x.sequence == i].mean() for i in x.sequence])
        elif level == "sequence-sum":
            expected = torch.stack([expected[x.sequence == i].sum() for i in x.sequence])
    elif level == "sequence-sum" and name not in ("cispo", "cispo-trl"):  # each of n tokens' losses moves every token
        expected = expected * torch.bincount(x.sequence)[x.sequence]
    for same in (changed(x, old_logprobs=x.logprobs.clone()), changed(x, old_logprobs=None)):
        _, metrics, slope = gradient(bound(name, level), same)
        torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)
        assert (metrics.get("is_ratio", torch.ones(1)) == 1).all()


@pytest.mark.parametrize(("name", "level"), CASES)
def test_no_ratio_makes_a_gradient_that_is_not_finite(name, level):
    # gmpo's means and the sums of sequences too; float32 overflows at exp(88.8)
    for gap, sign in itertools.product((19.0, 25.0, 89.0, 3e38, math.inf), (1, -1)):
        x = inputs(
            [0.0, -1.0, -gap if sign < 0 else 0.0, -2.0],
            [0, 0, 1, 1],
            old_logprobs=[0.0, -1.5, 0.0 if sign < 0 else -gap, -2.5],
            advantages=[1.0, 1.0, -1.0, -1.0],
            teacher_logprobs=[-1.0] * 4,
        )
        if not math.isfinite(gap) and sign < 0 and name in ("cispo", "cispo-trl", "vespo", "reinforce"):
            continue  # -A log π of a token of probability 0 is infinite, whatever the ratio
        if gap > 1e38 and sign > 0 and name == "distillation":
            continue  # log π_old - log π_teacher, its advantage, is too large itself
        _, _, slope = gradient(bound(name, level), x)
        assert slope.isfinite().all(), (sign, slope)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_what_is_declared_zero_without_an_advantage_is(name, level):
    loss = bound(name, level)
    declared = metrics_without_advantage(loss)
    x = random_inputs(4, (3, 4, 2, 3), spread=2.0)
    some = torch.where(x.sequence == 1, 0.0, x.advantages)
    found, metrics, slope = gradient(loss, changed(x, advantages=some))
    without = (x.sequence == 1) & x.mask
    if declared is None:
        assert name == "distillation" and (slope[without] != 0).all()
        return
    assert (slope[without] == 0).all() and (found[without] == 0).all()
    named = set(declared) - {"pg_clipfrac_lower"}  # there with epsilon_c alone
    assert named <= metrics.keys()
    for key in named:
        assert (metrics[key][without] == 0).all(), key
    kept, at = part(changed(x, advantages=some), [0, 2, 3])  # not running it changes nothing
    torch.testing.assert_close(gradient(loss, kept)[2], slope[at], rtol=1e-12, atol=1e-12)
    clips = {k for k in metrics if "clip" in k and not k.startswith("pg_loss")}
    assert clips <= set(declared)  # nothing that could be declared is forgotten


@pytest.mark.parametrize("name", DISTINCT)
def test_old_logprobs_advantages_and_the_teacher_get_no_gradient(name):
    x = random_inputs(5)
    columns = {c: x.token_columns[c].clone().requires_grad_() for c in COLUMNS}
    logprobs = x.logprobs.clone().requires_grad_()
    POLICY_LOSSES[name](changed(x, logprobs=logprobs, **columns))[0].sum().backward()
    assert logprobs.grad is not None and all(c.grad is None for c in columns.values())
