"""Preference losses: values by hand, gradients by differences, and what changes nothing, for every name there is."""

import math

import pytest
import torch
from preference_inputs import (
    LABELS,
    PAIRS,
    batch_of,
    inputs,
    objective,
    other_rows,
    prepared,
    random_batch,
)

from whet.config import PreferenceConfig
from whet.errors import ConfigError, DataError
from whet.learners.preference_from_config import make_preference_objective
from whet.ops.preference import (
    PREFERENCE_LOSSES,
    PreferenceObjective,
    StepPasses,
    bradley_terry,
    declared_needs,
    mismatched_rows,
    needs,
)
from whet.types import LossInputs

ALL = sorted(PREFERENCE_LOSSES)


def only(*names):
    return {name: PREFERENCE_LOSSES[name] for name in names}


def loss_and_gradient(made, batch, logprobs, order=None, **constants):
    """(Σ over units, of each unit, gradient [S]) over some sequences."""
    leaf = logprobs.detach().clone().requires_grad_()
    loss, metrics = made(inputs(batch, leaf, order, **constants))
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0], metrics


LOG2 = math.log(2)
BY_HAND = {
    # r_w = 1, r_l = -1 (2 tokens and 1), β = 0.5: β δ = 1
    "sigmoid": ({}, math.log1p(math.exp(-1))),
    "sigmoid_norm": ({}, math.log1p(math.exp(-0.75))),  # 1/2 + 1
    "hinge": ({}, 0.0),
    "ipo": ({}, 0.25),  # (1.5 - 1)²
    "robust": ({"label_smoothing": 0.25}, (0.75 * math.log1p(math.exp(-1)) - 0.25 * math.log1p(math.exp(1))) / 0.5),
    "bco_pair": ({}, 2 * math.log1p(math.exp(-0.5))),
    "nca_pair": ({}, 1.5 * math.log1p(math.exp(-0.5)) + 0.5 * math.log1p(math.exp(0.5))),
    "sppo_hard": ({}, 0.0),
    "apo_zero": ({}, 2 / (1 + math.exp(0.5))),
    "apo_down": ({}, 1 / (1 + math.exp(-0.5)) + 1 / (1 + math.exp(1))),
    "sft": ({}, 1.5),
    "bco": ({}, 2 * math.log1p(math.exp(-0.5))),  # the rewards' mean is 0
    "aot": ({}, math.log1p(math.exp(-1))),  # one pair is its own partner
    "aot_unpaired": ({}, math.log1p(math.exp(-1))),
    "simpo": ({"cpo_alpha": 0.0, "simpo_gamma": 0.25}, math.log1p(math.exp(-0.5))),  # β (-1.5 + 3) - γ = 0.5
    "cpo_ipo": ({"cpo_alpha": 0.0}, 0.25),
    "cpo_hinge": ({"cpo_alpha": 1.0}, 1.0 + 1.5),
    "cpo": ({"cpo_alpha": 1.0}, LOG2 + 1.5),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name):
    fields, want = BY_HAND[name]
    made = objective(name, **fields, **({} if name == "sft" else {"beta": 0.5}))
    batch = batch_of([(2, 1)])
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    ref = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
    batch = prepared(made, batch.with_token_columns(ref_logprobs=ref), logprobs)
    loss, metrics = made(inputs(batch, logprobs))
    assert loss.item() == pytest.approx(want, abs=1e-6)
    if declared_needs(PREFERENCE_LOSSES[name]).reference:
        assert metrics["rewards/margins"].item() == 1.0 and metrics["rewards/accuracies"].item() == 1.0


def test_labelled_rows_by_hand():
    made = objective("kto", beta=1.0, desirable_weight=2.0)
    batch = batch_of([(1,), (1,)], columns=lambda i: {"label": (float(i == 0),)})
    logprobs, ref = torch.tensor([-1.0, -1.0]).double(), torch.tensor([-2.0, -1.5]).double()
    batch = batch.with_token_columns(ref_logprobs=ref)
    rows = mismatched_rows(batch).with_token_columns(ref_logprobs=torch.tensor([-1.0, -1.0]).double())
    passes = StepPasses(mismatched=rows, mismatched_logprobs=torch.tensor([-0.9, -0.7]).double())
    loss, metrics = made(inputs(made.with_passes(batch, passes)[0], logprobs))  # z = (0.1 + 0.3) / 2
    assert made.with_passes(batch, passes, running={"kto_kl": 3.0}, learning=False)[1] == {"kto_kl": 3.0}
    sigma = lambda z: 1 / (1 + math.exp(-z))
    assert loss.tolist() == pytest.approx([2 * (1 - sigma(1 - 0.2)), 1 - sigma(0.2 - 0.5)])
    assert metrics["rewards/chosen"].tolist() == [1.0, 0.0] and metrics["rewards/rejected"].tolist() == [0.0, 0.5]
    assert metrics["rows/chosen"].tolist() == [1.0, 0.0] and metrics["kl"].tolist() == pytest.approx([0.2, 0.2])


def test_units_without_a_trained_token_count_in_nothing_that_is_made_of_a_step():
    batch = batch_of([(2, 1), (3, 3), (1, 2)])
    batch = batch.replace(mask=batch.unit != 1)
    logprobs = torch.linspace(-2.0, -0.1, batch.num_tokens).double()
    batch = batch.with_token_columns(ref_logprobs=torch.full((batch.num_tokens,), -1.0).double())
    made = objective("bco", beta=0.5)
    _, running = made.with_passes(batch, StepPasses(logprobs=logprobs))
    ratios = [float((logprobs + 1)[batch.sequence == i].sum()) for i in (0, 1, 4, 5)]
    assert running["bco_rewards"] == 4 and running["bco_mean"] == pytest.approx(0.5 * sum(ratios) / 4)
    assert objective("sft").with_counts(batch).sequence_columns["tokens_per_pair"].tolist() == [1.5] * 6
    partner = objective("aot", beta=0.5).with_passes(batch, StepPasses(logprobs=logprobs))[0]
    margins = [float(logprobs[batch.sequence == i].sum() - logprobs[batch.sequence == i + 1].sum()) for i in (0, 4)]
    lengths = batch.lengths.tolist()
    of_reference = sorted([-float(lengths[0] - lengths[1]), -float(lengths[4] - lengths[5])])
    wanted = of_reference if margins[0] < margins[1] else of_reference[::-1]
    found = partner.sequence_columns["aot_partner"].tolist()
    assert [found[0], found[4], found[2]] == [*wanted, 0.0]


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_that_of_differences(name):
    made = objective(name)
    batch, logprobs = random_batch(name, rows=4)
    batch = prepared(made, batch, logprobs)
    _, gradient, _ = loss_and_gradient(made, batch, logprobs)
    value = lambda x: made(inputs(batch, x))[0].sum().item()
    # A ranked loss of one unit holds half the value and all of the gradient: its partner holds the other half.
    share = 2.0 if name == "aot_unpaired" else 1.0
    for i in range(batch.num_tokens):
        step = torch.zeros_like(logprobs)
        step[i] = 1e-6
        slope = (value(logprobs + step) - value(logprobs - step)) / 2e-6
        want = slope * share if batch.mask[i] else 0.0
        assert gradient[i].item() == pytest.approx(want, abs=1e-6, rel=1e-5), i


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "bco", "kto"])
def test_the_loss_of_a_step_is_that_of_the_whole_batch(name):
    """Value and gradient against the naive loss, which sorts and averages the whole batch with its gradient."""
    made = objective(name, beta=0.3)
    batch, logprobs = random_batch(name, rows=7)
    got, gradient, _ = loss_and_gradient(made, prepared(made, batch, logprobs), logprobs)
    leaf = logprobs.clone().requires_grad_()
    p = made.inputs(inputs(batch, leaf))
    r, q = p.chosen.logratio, p.rejected.logratio
    if name == "aot":
        ref = (p.chosen.ref_logps - p.rejected.ref_logps).sort().values
        want = -torch.nn.functional.logsigmoid(0.3 * ((p.chosen.logps - p.rejected.logps).sort().values - ref))
    elif name == "aot_unpaired":
        want = -torch.nn.functional.logsigmoid(0.3 * (r.sort().values - q.sort().values))
    elif name == "bco":
        shift = 0.3 * torch.cat([r, q]).detach().mean()
        want = -torch.nn.functional.logsigmoid(0.3 * r - shift) - torch.nn.functional.logsigmoid(shift - 0.3 * q)
    else:
        own, rows = other_rows(batch, logprobs)
        z = torch.zeros(7).double().index_add(0, rows.sequence[rows.mask], (own - rows.ref_logprobs)[rows.mask])
        z = z.mean().clamp(min=0)
        want = torch.where(p.chosen.present, 1 - (0.3 * (r - z)).sigmoid(), 1 - (0.3 * (z - q)).sigmoid())
    assert got.sum().item() == pytest.approx(want.sum().item(), rel=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), leaf)[0], rtol=1e-9, atol=1e-12)


OPTIONS = [(name, {}) for name in ALL] + [
    ("sigmoid", {"ld_alpha": 0.4}),
    ("sigmoid", {"use_weighting": True}),
    ("ipo", {"f_divergence_type": "js_divergence"}),
    ("sigmoid", {"reference_free": True}),
    (("sigmoid", "bco_pair", "sft"), {"loss_weights": (0.8, 0.2, 1.0)}),
]


def case(name, options):
    made = make_preference_objective(PreferenceConfig(loss_type=name, **options)) if options else objective(name)
    batch, logprobs = random_batch(name if isinstance(name, str) else name[0])
    g = torch.Generator().manual_seed(9)
    log_sum = -torch.rand(batch.num_tokens, generator=g, dtype=torch.float64)
    correct = torch.rand(batch.num_tokens, generator=g) > 0.5
    return (
        made,
        prepared(made, batch, logprobs),
        logprobs,
        {"log_sum_sq_probs": log_sum, "correct": correct & batch.mask},
    )


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_order_and_micro_batches_change_nothing(name, options):
    made, batch, logprobs, constants = case(name, options)
    whole, gradient, metrics = loss_and_gradient(made, batch, logprobs, **constants)
    assert whole.shape == (batch.num_units,) and gradient.abs().max() > 0 and not gradient[~batch.mask].any()
    units = torch.randperm(batch.num_units, generator=torch.Generator().manual_seed(1))
    at = torch.zeros_like(gradient)
    for part in units.split(4):
        order = torch.cat([(batch.unit_of == u).nonzero().squeeze(1).flip(0) for u in part])  # rejected comes first
        loss, grad, own = loss_and_gradient(made, batch, logprobs, order, **constants)
        torch.testing.assert_close(loss, whole[part])
        at += grad
        assert own.keys() == metrics.keys()
        for metric, value in own.items():
            torch.testing.assert_close(value, metrics[metric][part])
    torch.testing.assert_close(at, gradient)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_what_stands_at_masked_tokens_never_matters(name, options):
    made, batch, logprobs, constants = case(name, options)
    want, gradient, metrics = loss_and_gradient(made, batch, logprobs, **constants)
    spoilt = lambda c: torch.where(batch.mask, c, torch.nan)
    assert not batch.mask.all()
    broken = batch.with_token_columns(ref_logprobs=spoilt(batch.ref_logprobs))
    broken = prepared(made, broken, spoilt(logprobs))
    constants["log_sum_sq_probs"] = spoilt(constants["log_sum_sq_probs"])
    got, again, other = loss_and_gradient(made, broken, spoilt(logprobs), **constants)
    assert torch.equal(got, want) and torch.equal(again, gradient)
    for metric, value in other.items():
        assert torch.equal(value, metrics[metric]), metric


@pytest.mark.parametrize("name", ALL)
def test_the_better_policy_has_the_smaller_loss(name):
    made = objective(name)
    batch, logprobs = random_batch(name, rows=8)
    batch = prepared(made, batch, logprobs)
    _, gradient, _ = loss_and_gradient(made, batch, logprobs)
    better = logprobs - 1e-4 * gradient
    assert made(inputs(batch, better))[0].sum() < made(inputs(batch, logprobs))[0].sum()


@pytest.mark.parametrize("name", PAIRS)
def test_rewards_follow_the_order_of_the_sides(name):
    """A step down the gradient raises the chosen side's margin, where the pair is the wrong way round."""
    made = objective(name)
    batch = batch_of([(3, 3)] * 2)
    logprobs = torch.tensor([-2.0, -2.0, -2.0, -1.0, -1.0, -1.0] * 2, dtype=torch.float64)
    ref = torch.full_like(logprobs, -1.5)
    batch = prepared(made, batch.with_token_columns(ref_logprobs=ref), logprobs)
    _, gradient, _ = loss_and_gradient(made, batch, logprobs)
    chosen, rejected = gradient[:3].sum(), gradient[3:6].sum()
    assert rejected - chosen > 0
    assert (chosen <= 0) or name == "apo_down"


def test_a_mix_is_the_weighted_sum_and_says_each():
    batch, logprobs = random_batch("sigmoid")
    made = make_preference_objective(
        PreferenceConfig(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    )
    batch = prepared(made, batch, logprobs)
    right = torch.arange(batch.num_tokens) % 3 > 0
    loss, metrics = made(inputs(batch, logprobs, entropy=-logprobs, correct=right))
    assert metrics["entropy"].sum().item() == pytest.approx(-logprobs[batch.mask].sum().item())
    of_chosen = batch.mask & (batch.sequence % 2 == 0)
    assert metrics["mean_token_accuracy"].sum() == (right & of_chosen).sum()
    each = [objective(name)(inputs(batch, logprobs))[0] for name in ("sigmoid", "bco_pair", "sft")]
    torch.testing.assert_close(loss, 0.8 * each[0] + 0.2 * each[1] + each[2])
    assert torch.equal(metrics["loss/bco_pair"], each[1])


def test_bco_keeps_the_mean_of_all_rewards_so_far():
    made, running = objective("bco", beta=0.5), {}
    seen = []
    for seed in range(3):
        batch, logprobs = random_batch("bco", seed=seed, rows=3 + seed)
        p = made.inputs(inputs(batch, logprobs))
        seen.append(torch.cat([0.5 * p.chosen.logratio, 0.5 * p.rejected.logratio]))
        passes = StepPasses(logprobs=logprobs)
        batch, running = made.with_passes(batch, passes, running=running)
        mean = torch.cat(seen).mean().item()
        assert batch.bco_shift[0].item() == pytest.approx(mean)
        assert running == {"bco_mean": pytest.approx(mean), "bco_rewards": sum(len(s) for s in seen)}
    quiet, same = made.with_passes(batch, passes, running=running, learning=False)
    assert same == running and quiet.bco_shift[0].item() == running["bco_mean"]
    mix = make_preference_objective(PreferenceConfig(loss_type=["bco", "aot"], beta=0.5))
    assert mix.with_passes(batch, passes, running=running)[1]["bco_rewards"] > running["bco_rewards"]


def test_length_desensitisation_weighs_what_lies_beyond_the_shorter_side():
    batch = batch_of([(3, 1)])
    logprobs, ref = torch.tensor([-1.0, -2.0, -4.0, -8.0]), torch.zeros(4)
    batch = batch.with_token_columns(ref_logprobs=ref)
    p = objective("sigmoid", ld_alpha=0.5).inputs(inputs(batch, logprobs))
    assert p.chosen.logps.item() == -4.0 and p.rejected.logps.item() == -8.0 and p.chosen.nll.item() == 7.0
    masked = batch.replace(mask=torch.tensor([False, True, True, True]))
    p = objective("sigmoid", ld_alpha=0.5).inputs(inputs(masked, logprobs))
    assert p.chosen.logps.item() == -4.0  # -2 in full, half of -4: untrained tokens have no place


def test_mismatched_rows_are_of_other_rows_and_within_the_limit():
    batch = batch_of([(2, 3), (1, 4), (5, 1)], paired=False)
    rows = mismatched_rows(batch)
    tokens = lambda b: [b.tokens[b.sequence == i].tolist() for i in range(b.num_sequences)]
    own = tokens(batch)
    assert tokens(rows) == own[-2:] + own[:-2] and rows.num_units == 6
    assert rows.mask.all() and "ref_logprobs" not in rows.token_columns
    mixed = batch_of([(2, 3), (4,), (1,), (3, 2)], paired=False)  # rows of one answer and of two
    of_row = [0, 0, 1, 2, 3, 3]
    found = [tokens(mixed).index(turned) for turned in tokens(mismatched_rows(mixed))]
    assert found == [4, 5, 0, 2, 3, 3] and all(of_row[a] != of_row[b] for a, b in enumerate(found))
    short = mismatched_rows(batch, 4)
    room = [max(1, 4 - len(batch.prefix(i))) for i in range(6)]
    assert tokens(short) == [t[:n] for t, n in zip(tokens(rows), room, strict=True)]
    with pytest.raises(DataError, match="at least two rows in an optimizer step, got 1"):
        mismatched_rows(batch_of([(2, 2)], paired=False))


def test_pairs_and_labels_are_not_confused():
    pairs, labels = random_batch("sigmoid")[0], random_batch("kto")[0]
    with pytest.raises(DataError, match="unit 0 is a pair: apo_zero_unpaired takes each row by itself"):
        objective("apo_zero_unpaired").with_counts(pairs)
    with pytest.raises(DataError, match="the loss needs chosen"):
        objective("sigmoid").with_counts(labels)
    with pytest.raises(DataError, match="unit 1 is no pair: sigmoid needs a chosen and a rejected side"):
        objective("sigmoid").with_counts(batch_of([(1, 1), (2,)]).with_token_columns(ref_logprobs=torch.zeros(4)))
    apart = batch_of([(2, 3), (1, 4)], paired=False)  # the sides of pairs, as rows with a label
    apart = apart.with_token_columns(ref_logprobs=torch.zeros(apart.num_tokens))
    made = objective("apo_zero_unpaired")
    found = made(inputs(made.with_counts(apart), torch.full((10,), -0.1)))[1]
    assert found["rows/chosen"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_what_is_missing_is_said():
    batch, logprobs = random_batch("sigmoid")
    with pytest.raises(DataError, match="needs tokens_per_pair, which is computed from the whole batch"):
        objective("sft")(inputs(batch, logprobs))
    bare = batch.replace(ref_logprobs=None)
    with pytest.raises(DataError, match="ref_logprobs"):
        objective("sigmoid")(inputs(bare, logprobs))
    free = objective("sigmoid", reference_free=True)
    p = free.inputs(inputs(batch, logprobs))
    assert torch.equal(p.chosen.logratio, p.chosen.logps)
    assert torch.equal(free(inputs(bare, logprobs))[0], free(inputs(batch, logprobs))[0])
    detached = lambda p: p.chosen.logps.detach()
    with pytest.raises(DataError, match="the loss has no gradient"):
        PreferenceObjective(losses={"own": detached})(inputs(batch, logprobs.clone().requires_grad_()))
    with pytest.raises(DataError, match=r"loss 'own' has the shape \[\]; it must have one number for each of the 6"):
        PreferenceObjective(losses={"own": lambda p: p.chosen.logps.sum()})(inputs(batch, logprobs))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"losses": {}}, "needs a loss, got none"),
        ({"loss_weights": (1.0, 2.0)}, r"loss_weights has 2 numbers for 1 losses \(sigmoid\)"),
        ({"losses": only("sigmoid", "kto")}, r"\(sigmoid: pairs, kto: labels\)"),
        (
            {"losses": only("nca_pair"), "generator": torch.exp},
            "'nca_pair' is not a function of the",
        ),
        ({"losses": only("aot"), "use_weighting": True}, "'aot' ranks the batch"),
        ({"losses": only("kto"), "ld_alpha": 0.5}, "ld_alpha compares the two answers of a pair"),
    ],
)
def test_losses_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceObjective(**fields)


def test_a_loss_of_ones_own_declares_what_it_needs():
    @needs(reference=False)
    def own(p, *, beta=0.1):
        return -(beta * (p.chosen.logps - p.rejected.logps)).sigmoid().log(), {"mine": p.chosen.logps}

    made = make_preference_objective(PreferenceConfig(loss_type=own, beta=0.7))
    assert not made.needs.reference and made.needs.rows == "pairs"
    batch, logprobs = random_batch("sigmoid")
    loss, metrics = made(inputs(batch, logprobs))
    torch.testing.assert_close(loss, objective("sigmoid", reference_free=True, beta=0.7)(inputs(batch, logprobs))[0])
    assert "mine" in metrics


@pytest.mark.parametrize("name", LABELS)
def test_weights_of_labels_scale_their_rows(name):
    batch, logprobs = random_batch(name)
    losses = []
    for fields in ({}, {"desirable_weight": 3.0, "undesirable_weight": 0.5}):
        made = objective(name, **fields)
        losses.append(made(inputs(prepared(made, batch, logprobs), logprobs))[0])
    scale = torch.where(batch.label > 0.5, 3.0, 0.5)
    torch.testing.assert_close(losses[1], losses[0] * scale)


def test_the_loss_of_a_reward_model_by_hand():
    x = LossInputs(
        sequence=torch.arange(4),
        mask=torch.ones(4, dtype=torch.bool),
        logprobs=torch.zeros(4),
        scores=torch.tensor([2.0, 1.0, -1.0, 1.0]),
        unit_of=torch.tensor([0, 0, 1, 1]),
        sequence_columns={"chosen": torch.tensor([1.0, 0.0, 0.0, 1.0]), "margin": torch.tensor([1.5, 1.5, 0.0, 0.0])},
    )
    loss, metrics = bradley_terry(x, center_rewards_coefficient=0.1)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(0.5)) + 0.9, math.log1p(math.exp(-2.0))])
    assert {n: m.tolist() for n, m in metrics.items()} == {
        "accuracy": [1.0, 1.0],
        "margin": [1.0, 2.0],
        "mean_reward": [1.5, 0.0],
        "min_reward": [1.0, -1.0],
        "max_reward": [2.0, 1.0],
    }


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("discopop", {"beta": 1.0}),
        ("discopop", {"discopop_tau": 5.0}),
        ("sigmoid", {"f_divergence_type": "forward_kl"}),
        ("ipo", {"f_divergence_type": "forward_kl"}),
        ("ipo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25}),
        ("orpo", {}),
        ("cpo", {"alpha": 0.25}),
        ("cpo_ipo", {"alpha": 0.25}),
    ],
)
def test_pairs_far_the_wrong_way_round_have_a_loss_and_a_gradient(loss, words):
    """Chosen answers of probability 0 and rejected ones of probability 1, to rounding, and the other way round."""
    made = make_preference_objective(PreferenceConfig(loss_type=loss, **words))
    for chosen, rejected in ((-400.0, 0.0), (-1e5, 0.0), (0.0, -400.0), (0.0, -1e5)):
        logprobs = torch.tensor([chosen, rejected], requires_grad=True)
        x = LossInputs(
            sequence=torch.tensor([0, 1]),
            mask=torch.ones(2, dtype=torch.bool),
            logprobs=logprobs,
            unit_of=torch.tensor([0, 0]),
            ref_logprobs=torch.zeros(2) if made.needs.reference else None,
            sequence_columns={"chosen": torch.tensor([1.0, 0.0]), "tokens_per_pair": torch.ones(2)},
        )
        found, _ = made(x)
        found.sum().backward()
        assert found.isfinite().all() and logprobs.grad.isfinite().all()
        assert chosen == 0.0 or logprobs.grad[0] < 0  # what is far the wrong way round is still moved
