"""Losses without a reference, of rows with a label and of reward models against TRL's own code, to 1e-6.

Its methods run as they are on stand-ins for the trainers, with made-up logits, log-probabilities and scores.
"""

import collections
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from preference_inputs import batch_of, inputs
from preference_trl import NAMES, PROMPT, SAME, Given, Pairs
from trl import KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from whet.config import PreferenceConfig
from whet.learners.preference_from_config import make_preference_objective
from whet.ops.preference import StepPasses, bradley_terry, mismatched_rows
from whet.types import LossInputs


class Logits:
    """A model that gives made-up logits, for the trainers that compute log-probabilities themselves."""

    def __init__(self, pairs, prompt, g):
        self.pairs, vocab = pairs, 5
        rows, width = pairs.place.shape
        self.prompt, self.shift = prompt, PROMPT - prompt
        self.ids = torch.randint(0, vocab, (rows, width + 1 - self.shift), generator=g)
        raw = torch.randn(rows, width + 1 - self.shift, vocab, generator=g, dtype=torch.float64)
        self.logits = raw.requires_grad_()

    def __call__(self, *_, **__):
        return SimpleNamespace(logits=self.logits)

    def logprobs(self):
        """[S]: of the batch's tokens, and [rows T-1], of all."""
        every = self.logits[:, :-1].log_softmax(-1).gather(2, self.ids[:, 1:, None]).squeeze(2)
        place = self.pairs.place[:, self.shift :]
        flat = every.new_zeros(self.pairs.batch.num_tokens).index_put((place[place >= 0],), every[place >= 0])
        return flat, every

    def batch(self):
        inside = self.pairs.place[:, self.shift :] >= 0
        labels = torch.where(F.pad(inside, (1, 0)), self.ids, -100)
        there = F.pad(inside, (1, 0)) | (torch.arange(labels.shape[1]) < self.prompt)
        half, made = len(labels) // 2, {}
        for side, rows in (("chosen", slice(half)), ("rejected", slice(half, None))):
            made |= {f"{side}_input_ids": self.ids[rows], f"{side}_labels": labels[rows]}
            made |= {f"{side}_attention_mask": there[rows].long()}
        return made


def plain_trainer(trainer, config, **fields):
    """What CPO's and ORPO's methods ask of their trainer."""
    own = SimpleNamespace(
        accelerator=SAME,
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        pad_token_id=0,
        padding_value=0,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        cpo_alpha=config.cpo_alpha,
        simpo_gamma=config.simpo_gamma,
        alpha=config.alpha,
        **fields,
    )
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(own, name, getattr(trainer, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer, name):
            setattr(own, name, getattr(trainer, name).__get__(own))
    return own


def without_reference(name, fields, *, prompt, trainer, loss_type=None, pairs=None):
    """(TRL's loss, metrics, ours, metrics, the logits) of a loss without a reference."""
    pairs = pairs or Pairs()
    model = Logits(pairs, prompt, torch.Generator().manual_seed(3))
    config = PreferenceConfig(loss_type=name, **fields)
    own = plain_trainer(trainer, config, loss_type=loss_type)
    theirs, their_metrics = trainer.get_batch_loss_metrics(own, model, model.batch())
    made = make_preference_objective(config)
    logprobs, _ = model.logprobs()
    batch = made.with_counts(pairs.batch)
    loss, metrics = made(inputs(batch, logprobs))
    return theirs, their_metrics, loss.mean(), {n: m.mean().item() for n, m in metrics.items()}, model


CPO = [
    ("cpo", "sigmoid", {"label_smoothing": 0.1}),
    ("cpo", "sigmoid", {"cpo_alpha": 0.3, "alpha": 0.2}),
    ("cpo_hinge", "hinge", {"beta": 0.5}),
    ("cpo_ipo", "ipo", {"cpo_alpha": 0.0, "beta": 0.4}),
    ("cpo_ipo", "ipo", {"alpha": 0.5}),
    ("simpo", "simpo", {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
    ("simpo", "simpo", {"beta": 2.0, "label_smoothing": 0.2}),
    ("alphapo", "simpo", {"beta": 2.0, "alpha": 0.25, "cpo_alpha": 0.0}),
]


@pytest.mark.parametrize(("name", "loss_type", "fields"), CPO)
def test_losses_without_a_reference_are_trl_s_cpo(name, loss_type, fields):
    asked = {n: v for n, v in fields.items() if not (name == "alphapo" and n == "cpo_alpha")}
    theirs, their_metrics, ours, metrics, model = without_reference(
        name, asked, prompt=2, trainer=CPOTrainer, loss_type=loss_type
    )
    if name == "alphapo":
        own = plain_trainer(CPOTrainer, PreferenceConfig(loss_type="simpo", **fields), loss_type="simpo")
        theirs, their_metrics = CPOTrainer.get_batch_loss_metrics(own, model, model.batch())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    got, want = (torch.autograd.grad(loss, model.logits, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    for metric in NAMES:
        assert metrics[metric] == pytest.approx(their_metrics[metric], rel=1e-6), metric
    assert metrics.get("nll_loss", 0.0) == pytest.approx(their_metrics["nll_loss"], rel=1e-6)


def test_orpo_is_trl_s_but_for_the_prompt_in_the_likelihood():
    theirs, their_metrics, ours, metrics, model = without_reference("orpo", {}, prompt=1, trainer=ORPOTrainer)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-6)  # its ratio is in fp32 whatever it is given
    got, want = (torch.autograd.grad(loss, model.logits, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * want.abs().max().item())
    for metric in (*NAMES, "nll_loss", "log_odds_ratio", "log_odds_chosen"):
        assert metrics[metric] == pytest.approx(their_metrics[metric], rel=1e-5), metric
    # With a prompt of three tokens TRL's likelihood is of its two last and of the answer; ours of the answer.
    theirs, their_metrics, ours, metrics, model = without_reference("orpo", {}, prompt=3, trainer=ORPOTrainer)
    every = model.logprobs()[1]
    inside = model.pairs.place[:5] >= 0
    assert metrics["nll_loss"] == pytest.approx(-every[:5][inside].mean().item())
    besides = inside | (torch.arange(inside.shape[1]) < 2)
    assert their_metrics["nll_loss"] == pytest.approx(-every[:5][besides].mean().item())
    assert (theirs - their_metrics["nll_loss"]).item() == pytest.approx((ours - metrics["nll_loss"]).item(), rel=1e-5)


def test_trl_s_alphapo_has_no_number_for_a_long_answer():
    h = torch.tensor([-120.0])
    own = plain_trainer(CPOTrainer, PreferenceConfig(loss_type="cpo", alpha=0.01), loss_type="sigmoid")
    assert CPOTrainer.cpo_loss(own, h, h)[0].isnan()
    batch = batch_of([(1, 1)])
    made = make_preference_objective(PreferenceConfig(loss_type="cpo", alpha=0.01))
    batch = made.with_counts(batch)
    _, metrics = made(inputs(batch, torch.tensor([-120.0, -120.0])))
    assert metrics["rewards/chosen"].item() == pytest.approx(0.1 * (1 - math.exp(1.2)) / 0.01)


def kto_of(name, fields, rows, batch, logprobs, kl):
    """TRL's loss and metrics of some rows, whose KL rows have made-up sums (policy, reference)."""
    config = PreferenceConfig(loss_type=name, **fields)
    lengths = batch.lengths[rows]
    width = int(lengths.max())
    inside = torch.arange(width) < lengths[:, None]
    place = (batch.starts[rows][:, None] + torch.arange(width)).clamp(max=batch.num_tokens - 1)
    padded = lambda c: torch.where(inside, c[place], c.new_zeros(()))
    zeros = torch.zeros(len(rows), width)
    model = Given(log_probs=padded(logprobs), entropy=zeros, mean_logits=zeros)
    ref = Given(log_probs=padded(batch.ref_logprobs))
    own = SimpleNamespace(
        accelerator=SAME,
        model=model,
        ref_model=ref,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_type=name,
        calculate_KL=name == "kto",
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        _compute_kl_logps=lambda m, _: kl[0 if m is model else 1][rows] if name == "kto" else None,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **{n: getattr(config, n) for n in ("beta", "desirable_weight", "undesirable_weight")},
    )
    completion = F.pad(inside, (1, 0)).long()
    given = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion)}
    given |= {"completion_mask": completion, "label": batch.label[rows] > 0.5}
    loss = KTOTrainer._compute_loss(own, model, given, False)
    return loss, {n: v[0] for n, v in own._metrics["train"].items()}


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_losses_of_labelled_rows_are_trl_s(name):
    g = torch.Generator().manual_seed(1)
    draw = lambda n: torch.rand(n, generator=g, dtype=torch.float64)
    labels = lambda i: {"label": (float(i % 3 > 0),)}
    batch = batch_of([(n,) for n in (3, 1, 6, 2, 4, 5)], columns=labels)
    logprobs = (-draw(batch.num_tokens) * 2).requires_grad_()
    batch = batch.with_token_columns(ref_logprobs=-draw(batch.num_tokens) * 2)
    rows = mismatched_rows(batch)
    own, ref = -draw(rows.num_tokens), -draw(rows.num_tokens) * 1.5
    sums = [torch.zeros(6).double().index_add(0, rows.sequence, c) for c in (own, ref)]
    fields = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    made = make_preference_objective(PreferenceConfig(loss_type=name, **fields))
    other = rows.with_token_columns(ref_logprobs=ref)
    batch, _ = made.with_passes(made.with_counts(batch), StepPasses(mismatched=other, mismatched_logprobs=own))
    loss, metrics = made(inputs(batch, logprobs))
    ours, (theirs, their_metrics) = loss.mean(), kto_of(name, fields, torch.arange(6), batch, logprobs, sums)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    got, want = (torch.autograd.grad(total, logprobs, retain_graph=True)[0] for total in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    for side in ("chosen", "rejected"):
        for metric in (f"rewards/{side}", f"logps/{side}"):
            share = metrics[metric].sum() / metrics[f"rows/{side}"].sum()
            assert share.item() == pytest.approx(their_metrics[metric], rel=1e-6)
    if name == "kto":
        assert metrics["kl"][0].item() == pytest.approx(their_metrics["kl"], rel=1e-6) and their_metrics["kl"] > 0.1
        # Of two micro-batches TRL has two KLs, and the mean of two means.
        parts = [kto_of(name, fields, torch.arange(i, i + 3), batch, logprobs, sums)[1]["kl"] for i in (0, 3)]
        assert abs(parts[0] - parts[1]) > 0.05 and sum(parts) / 2 == pytest.approx(their_metrics["kl"])


def test_the_mismatched_rows_are_trl_s():
    batch = batch_of([(n,) for n in (3, 1, 6, 2)], columns=lambda i: {"label": (1.0,)})
    rows, tokens = mismatched_rows(batch), [batch.tokens[batch.sequence == i].tolist() for i in range(4)]
    turned = [tokens[-1], *tokens[:-1]]  # KTOTrainer's add_kl_completion_ids, whose batches are of the data set
    assert [rows.tokens[rows.sequence == i].tolist() for i in range(4)] == turned
    assert [rows.prefix(i).tolist() for i in range(4)] == [batch.prefix(i).tolist() for i in range(4)]


@pytest.mark.parametrize("coefficient", [None, 0.01])
@pytest.mark.parametrize("margins", [False, True])
def test_the_reward_model_s_loss_is_trl_s(coefficient, margins):
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(5, 2, generator=g, dtype=torch.float64).requires_grad_()
    margin = torch.rand(5, generator=g, dtype=torch.float64)
    own = SimpleNamespace(
        accelerator=SAME,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    given = {"attention_mask": torch.ones(10, 3)} | ({"margin": margin} if margins else {})
    model = lambda **_: SimpleNamespace(logits=scores.t().reshape(10, 1))
    theirs = RewardTrainer.compute_loss(own, model, given)
    columns = {"chosen": torch.tensor([1.0, 0.0] * 5)} | ({"margin": margin.repeat_interleave(2)} if margins else {})
    x = LossInputs(
        sequence=torch.arange(10),
        mask=torch.ones(10, dtype=torch.bool),
        logprobs=None,
        scores=scores.flatten(),
        unit_of=torch.arange(10) // 2,
        sequence_columns=columns,
    )
    loss, metrics = bradley_terry(x, center_rewards_coefficient=coefficient)
    torch.testing.assert_close(loss.mean(), theirs, rtol=1e-6, atol=0)
    got, want = (torch.autograd.grad(total, scores, retain_graph=True)[0] for total in (loss.mean(), theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    reduce = {"min_reward": torch.min, "max_reward": torch.max}
    for name, value in metrics.items():
        assert reduce.get(name, torch.mean)(value).item() == pytest.approx(own._metrics["train"][name][0], rel=1e-6)
