"""What holds for every correction, mask and KL estimate by name: a new one is tested by being in its dict."""

import functools
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.ops import CORRECTIONS, KL_MODES, TOKEN_MASKS, PolicyObjective, entropy_rank, kl_rewards, reference_kl
from whet.types import LossInputs

OPTIONS = {
    "sampler-kl": {"kl_mask_threshold": 0.3},
    "sampler-rejection": {"rejection_lower": 0.7, "rejection_threshold": 1.4},
    "top-entropy": {"top_entropy_quantile": 0.4},
}
"""What makes a piece do something on the batches below."""
FACTORS = {**CORRECTIONS, **TOKEN_MASKS}
BAD = (float("nan"), float("inf"), -float("inf"), 1e30)


def factor(name):
    return functools.partial(FACTORS[name], **OPTIONS.get(name, {}))


def columns(seed, lengths):
    """Random columns of sequences of these lengths, with holes in the mask."""
    g, n = torch.Generator().manual_seed(seed), sum(lengths)
    draw = lambda: -torch.rand(n, generator=g, dtype=torch.float64) * 2 - 0.05
    mask = torch.rand(n, generator=g) > 0.25
    return {
        "sequence": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "mask": mask,
        "logprobs": draw(),
        "old_logprobs": draw(),
        "ref_logprobs": draw(),
        "sampler_logprobs": draw(),
        "advantages": torch.randn(n, generator=g, dtype=torch.float64),
        "entropy_rank": entropy_rank(-draw(), mask),
    }


def inputs(parts):
    """The loss inputs of such columns."""
    rest = {n: c for n, c in parts.items() if n != "entropy_rank"}
    return LossInputs(**rest, token_columns={"entropy_rank": parts["entropy_rank"]})


def some(parts, sequences):
    """The same sequences in another order, or some of them."""
    places = torch.cat([(parts["sequence"] == i).nonzero().flatten() for i in sequences])
    found = {n: c[places] for n, c in parts.items()}
    number = {old: new for new, old in enumerate(sequences)}
    return {**found, "sequence": torch.tensor([number[i] for i in found["sequence"].tolist()])}, places


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("name", FACTORS)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), lengths=LENGTHS, data=st.data())
def test_a_factor_does_not_depend_on_the_order_of_sequences_or_on_how_they_are_split(name, seed, lengths, data):
    parts = columns(seed, lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    whole = factor(name)(inputs(parts))
    for sequences in (order, order[:cut], order[cut:]):
        if sequences:
            part, places = some(parts, sequences)
            torch.testing.assert_close(factor(name)(inputs(part)), whole[places], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", FACTORS)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), lengths=LENGTHS, bad=st.sampled_from(BAD))
def test_garbage_where_the_mask_is_false_reaches_neither_loss_nor_gradient(name, seed, lengths, bad):
    parts = columns(seed, lengths)
    found = []
    for garbage in (0.0, bad):
        filled = {n: torch.where(parts["mask"], c, garbage) if c.is_floating_point() else c for n, c in parts.items()}
        filled["logprobs"] = filled["logprobs"].requires_grad_()
        objective = PolicyObjective(factors=(factor(name),), kl=reference_kl, beta=0.1)
        loss, _ = objective(inputs(filled))
        loss.sum().backward()
        found.append((loss.detach(), filled["logprobs"].grad))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all() and torch.equal(a, b) and not a[~parts["mask"]].any()


@pytest.mark.parametrize("name", FACTORS)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), lengths=LENGTHS, bad=st.sampled_from(BAD))
def test_padding_changes_no_factor(name, seed, lengths, bad):
    parts = columns(seed, lengths)
    number = len(lengths)
    pad = torch.arange(number + 1)  # a masked-out token for each sequence, and a sequence of nothing else
    longer = {
        n: torch.cat([c, torch.full((number + 1,), bad if c.is_floating_point() else 0, dtype=c.dtype)])
        for n, c in parts.items()
    }
    longer["sequence"][-(number + 1) :] = pad
    order = longer["sequence"].sort(stable=True).indices
    weights = factor(name)(inputs({n: c[order] for n, c in longer.items()}))
    own = weights[order < len(parts["mask"])]
    torch.testing.assert_close(own[parts["mask"]], factor(name)(inputs(parts))[parts["mask"]], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", FACTORS)
def test_the_gradient_under_a_factor_is_that_of_the_surrogate_times_a_number(name):
    parts = columns(5, [3, 4])
    p = parts["logprobs"].clone().requires_grad_()
    frozen = factor(name)(inputs(parts))
    PolicyObjective(factors=(factor(name),))(inputs({**parts, "logprobs": p}))[0].sum().backward()
    expected = frozen * slope(lambda q: PolicyObjective()(inputs({**parts, "logprobs": q}))[0], parts["logprobs"])
    torch.testing.assert_close(p.grad, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_a_constant_that_does_something(name):
    parts = columns(3, [4, 4, 4, 4, 4])
    weights = factor(name)(inputs({**parts, "logprobs": parts["logprobs"].requires_grad_()}))
    assert not weights.requires_grad and weights.shape == parts["mask"].shape
    kept = weights[parts["mask"]]
    assert (kept >= 0).all() and kept.min() < kept.max()
    if name in TOKEN_MASKS:
        assert set(kept.tolist()) == {0.0, 1.0}
    keywords = [p for p in inspect.signature(FACTORS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is not p.empty for p in keywords)


# ---- the KL --------------------------------------------------------------------------------------------------------


def slope(fn, x, step=1e-6):
    """The gradient of fn(x).sum() by central differences."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for sign in (1, -1):
            moved = x.clone()
            moved[i] += sign * step
            out[i] += sign * fn(moved).sum() / (2 * step)
    return out


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("mode", KL_MODES)
def test_the_gradient_of_each_estimate_by_finite_differences(mode, correct):
    parts = columns(1, [3, 4])

    def kl(logprobs, mode=mode, correct=correct):
        x = inputs({**parts, "logprobs": logprobs})
        return reference_kl(x, kl_loss_mode=mode, use_bias_correction_kl=correct)

    p = parts["logprobs"].clone().requires_grad_()
    kl(p).sum().backward()
    free = p.detach()
    if not mode.endswith("+"):
        expected = slope(kl, free)
    else:  # the value is a constant: the slope is that of k2, and with the correction that of the ratio times the value
        value = kl(free, correct=False).detach()
        ratio = lambda q: torch.where(parts["mask"], q - parts["old_logprobs"], 0.0).exp()
        weight = ratio(free) if correct else torch.ones_like(free)
        expected = weight * slope(lambda q: kl(q, "k2", False), free)
        expected = expected + (slope(lambda q: ratio(q) * value, free) if correct else 0.0)
    torch.testing.assert_close(p.grad, torch.as_tensor(expected), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("mode", [m for m in KL_MODES if m.endswith("+")])
def test_a_plus_has_the_value_of_its_estimate_and_its_mean_gradient_is_the_kls(mode):
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ref = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    exact = (p.exp() * (p - ref)).sum()
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    x = LossInputs(sequence=torch.zeros(9).long(), mask=torch.ones(9).bool(), logprobs=p, ref_logprobs=ref)
    estimate = reference_kl(x, kl_loss_mode=mode)
    plain = reference_kl(x, kl_loss_mode=mode[:-1])
    assert torch.equal(estimate.detach(), plain.detach())
    found = torch.autograd.grad((p.detach().exp() * estimate).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(found, wanted)
    biased = torch.autograd.grad((p.detach().exp() * plain).sum(), logits)[0]
    assert (biased - wanted).abs().max() > 0.01


@pytest.mark.parametrize("mode", ["k1", "k3"])
def test_off_policy_the_corrected_kl_is_unbiased_in_value_and_gradient(mode):
    # under the old policy, over all tokens of a vocabulary; k1 is so in value alone without its gradient's correction
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=g, dtype=torch.float64).requires_grad_()
    old, ref = torch.randn(2, 9, generator=g, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    exact = (p.exp() * (p - ref)).sum()
    x = LossInputs(
        sequence=torch.zeros(9).long(), mask=torch.ones(9).bool(), logprobs=p, old_logprobs=old, ref_logprobs=ref
    )
    mean = (old.exp() * reference_kl(x, kl_loss_mode=mode, use_bias_correction_kl=True)).sum()
    torch.testing.assert_close(mean, exact)
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], wanted)


@pytest.mark.parametrize("mode", KL_MODES)
def test_kl_in_the_reward_is_a_finite_constant_whatever_stands_where_the_mask_is_false(mode):
    parts = columns(0, [3, 2])
    own, ref, mask = parts["old_logprobs"].requires_grad_(), parts["ref_logprobs"], parts["mask"]
    found = kl_rewards(own, ref, mask=mask, beta=0.5, kl_loss_mode=mode)
    assert not found.requires_grad and not found[~mask].any()
    plain = reference_kl(inputs({**parts, "logprobs": own}), kl_loss_mode=mode).detach()
    torch.testing.assert_close(found, -0.5 * torch.where(mask, plain, 0.0))
    dirty = torch.where(mask, ref, torch.nan)
    assert torch.equal(kl_rewards(own, dirty, mask=mask, beta=0.5, kl_loss_mode=mode), found)
