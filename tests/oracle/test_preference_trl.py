"""Preference and reward losses against TRL's own code, where TRL is installed: values and gradients to 1e-6.

TRL's methods run as they are on a stand-in for the trainer, whose models give made-up log-probabilities.
"""

import collections
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from preference_inputs import batch_of, inputs

from whet.config import PreferenceConfig
from whet.learners.preference_objective import make_preference_objective
from whet.ops import aggregate, unit_weights
from whet.ops.preference import StepPasses, bradley_terry, mismatched
from whet.types import LossInputs

pytest.importorskip("trl")
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

PROMPT = 3
NAMES = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
NAMES += ["logps/chosen", "logps/rejected"]
SAME = SimpleNamespace(
    device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x, parallelism_config=None
)


class Given(torch.nn.Module):
    """A model that gives made-up statistics [rows, T]."""

    is_gradient_checkpointing = False

    def __init__(self, **stats):
        super().__init__()
        self.stats = stats

    def forward(self, **_):
        return SimpleNamespace(**self.stats)


class Pairs:
    """Pairs of random lengths, as TRL has them (chosen, then rejected, right-padded) and as whet does (end to end)."""

    def __init__(self, pairs=5, *, dtype=torch.float64, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.batch = batch_of(torch.randint(1, 7, (pairs, 2), generator=g).tolist(), seed=seed)
        ends, starts, lengths = self.batch.ends, self.batch.starts, self.batch.lengths
        order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2)]
        width = PROMPT + int(lengths.max())
        self.place = torch.full((2 * pairs, width - 1), -1)
        for row, i in enumerate(order):
            self.place[row, PROMPT - 1 : PROMPT - 1 + int(lengths[i])] = torch.arange(int(starts[i]), int(ends[i]))
        self.inside = self.place >= 0
        draw = lambda n: torch.rand(n, generator=g, dtype=torch.float64)
        total = self.batch.num_tokens
        self.logprobs = (-draw(total) * 2 - 0.02).to(dtype).requires_grad_()
        self.ref = (-draw(total) * 2 - 0.02).to(dtype)
        self.log_sum = (-draw(total)).to(dtype)
        self.correct = draw(total) > 0.4
        completion = F.pad(self.inside, (1, 0)).long()
        self.inputs = {
            "input_ids": torch.ones_like(completion),
            "attention_mask": torch.ones_like(completion),
            "completion_mask": completion,
        }

    def padded(self, column):
        """[2 pairs, T - 1], 0 outside."""
        return torch.where(self.inside, column[self.place.clamp(min=0)], column.new_zeros(()))

    def model(self):
        stats = {"log_probs": self.logprobs, "log_sum_sq_probs": self.log_sum, "is_top1": self.correct}
        zeros = torch.zeros(self.place.shape)
        return Given(entropy=zeros, mean_logits=zeros, **{n: self.padded(c) for n, c in stats.items()})

    def dpo(self, *, rows=None, **fields):
        """TRL's loss and metrics. Args: rows: of its inputs, a micro-batch of whole pairs."""
        config = PreferenceConfig(**fields)
        model, ref = self.model(), Given(log_probs=self.padded(self.ref))
        given = self.inputs
        if rows is not None:
            model.stats = {n: c[rows] for n, c in model.stats.items()}
            ref.stats = {n: c[rows] for n, c in ref.stats.items()}
            given = {n: c[rows] for n, c in given.items()}
        own = SimpleNamespace(
            accelerator=SAME,
            model=model,
            ref_model=ref,
            args=SimpleNamespace(discopop_tau=config.discopop_tau, gradient_checkpointing_kwargs=None),
            loss_types=list(config.loss_type),
            loss_weights=list(config.loss_weights or [1.0] * len(config.loss_type)),
            aux_loss_enabled=False,
            precompute_ref_logps=False,
            _metrics={"train": collections.defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            **{n: getattr(config, n) for n in ("beta", "label_smoothing", "ld_alpha", "use_weighting")},
            **{n: getattr(config, n) for n in ("f_divergence_type", "f_alpha_divergence_coef")},
        )
        loss = DPOTrainer._compute_loss(own, model, given, False)
        return loss, {n: v[0] for n, v in own._metrics["train"].items()}

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.logprobs, retain_graph=True)[0]

    def ours(self, *, parts=1, **fields):
        """Whet's loss and means of metrics, as a worker would sum them over parts."""
        made = make_preference_objective(PreferenceConfig(**fields))
        batch = self.batch.with_token_columns(ref_logprobs=self.ref)
        batch, _ = made.with_passes(made.with_counts(batch), StepPasses(logprobs=self.logprobs.detach()))
        weights = unit_weights(batch.mask, batch.unit)
        total, sums = torch.zeros(()), collections.Counter()
        for units in torch.arange(batch.num_units).chunk(parts):
            sequences = [i for i in range(batch.num_sequences) if int(batch.unit_of[i]) in units.tolist()]
            constants = {"correct": self.correct, "log_sum_sq_probs": self.log_sum}
            loss, metrics = made(inputs(batch, self.logprobs, sequences, **constants))
            total = total + aggregate(loss, weights[units].to(loss.dtype))
            sums.update({n: float(m.sum()) for n, m in metrics.items()})
        means = {n: v / batch.num_units for n, v in sums.items()}
        means["mean_token_accuracy"] = sums["mean_token_accuracy"] / sums["tokens/chosen"]
        return total, means


def agree(pairs, theirs, ours):
    """The same value and the same gradient of every token's log-probability, to 1e-6."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    got, want = pairs.gradient(ours), pairs.gradient(theirs)
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


DPO = {
    "sigmoid": {},
    "sigmoid_norm": {"beta": 2.0},
    "hinge": {"beta": 0.5},
    "ipo": {},
    "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {"beta": 1.5},
    "aot": {"label_smoothing": 0.2},
    "aot_unpaired": {"label_smoothing": 0.2},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.1},
    "sft": {},
}


CASES = [(name, options) for name in DPO for options in ({}, {"ld_alpha": 0.3})]
WEIGHTED = [name for name in DPO if name not in ("aot", "aot_unpaired", "hinge", "sft")]
"""With use_weighting: the first two are refused by both, the others fail in TRL."""
CASES += [(name, {"use_weighting": True}) for name in WEIGHTED]


def fields_of(name, **others):
    return {"loss_type": name, **({} if name == "sft" else {"beta": 0.3}), **DPO[name], **others}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_dpo_losses_are_trl_s(name, options):
    pairs, fields = Pairs(), fields_of(name, **options)
    theirs, their_metrics = pairs.dpo(**fields)
    ours, metrics = pairs.ours(**fields)
    agree(pairs, theirs, ours)
    for metric in (*NAMES, "mean_token_accuracy"):
        if not (name == "sft" and metric.startswith("rewards/")):  # which reads no reference here
            assert metrics[metric] == pytest.approx(their_metrics[metric], rel=1e-6, abs=1e-7), metric


@pytest.mark.parametrize(
    "divergence",
    [
        {"f_divergence_type": "forward_kl"},
        {"f_divergence_type": "js_divergence"},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"])
def test_f_divergences_are_trl_s(name, divergence):
    coefficient = divergence.get("f_alpha_divergence_coef", 1.0)
    dtype = torch.float64 if coefficient == 1.0 else torch.float32  # TRL has no other alpha in float64
    pairs, fields = Pairs(dtype=dtype), {"loss_type": name, "beta": 0.3, **DPO[name], **divergence}
    theirs, ours = pairs.dpo(**fields)[0], pairs.ours(**fields)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float64 else 2e-6, atol=1e-7)
    got, want = pairs.gradient(ours), pairs.gradient(theirs)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6 * want.abs().max().item())


def test_a_mix_of_losses_is_trl_s():
    fields = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.5}
    pairs = Pairs()
    ours, metrics = pairs.ours(**fields)
    agree(pairs, pairs.dpo(**fields)[0], ours)
    assert metrics["loss/sigmoid"] * 0.8 + metrics["loss/bco_pair"] * 0.2 + metrics["loss/sft"] == pytest.approx(
        ours.item()
    )


@pytest.mark.parametrize("name", ["sigmoid", "sft", "ipo", "aot", "aot_unpaired"])
def test_in_parts_ours_is_that_of_the_whole_and_trl_s_where_it_is_a_mean_of_pairs(name):
    pairs, fields = Pairs(6), fields_of(name)
    whole, parts = pairs.ours(**fields)[0], pairs.ours(parts=3, **fields)[0]
    agree(pairs, pairs.dpo(**fields)[0], parts)
    torch.testing.assert_close(pairs.gradient(parts), pairs.gradient(whole))
    split = [pairs.dpo(rows=[2 * i, 2 * i + 1, 2 * i + 6, 2 * i + 7], **fields)[0] for i in range(3)]
    theirs = torch.stack(split).mean()  # accumulated: the mean over micro-batches
    # Ranks, and the mean over the chosen tokens, are of each micro-batch in TRL.
    assert torch.allclose(theirs, parts, rtol=1e-6) == (name in ("sigmoid", "ipo")), (theirs, parts)


def test_where_trl_s_dpo_differs():
    pairs = Pairs()
    # label_smoothing does nothing to its sigmoid loss, with or without.
    smooth, plain = (pairs.dpo(loss_type="sigmoid", label_smoothing=e)[0].item() for e in (0.2, 0.0))
    assert smooth == plain == pytest.approx(pairs.ours(loss_type="sigmoid")[0].item(), rel=1e-6)
    own = pairs.ours(loss_type="sigmoid", label_smoothing=0.2)[0].item()
    assert own == pytest.approx(0.8 * plain + 0.2 * (plain + 0.1 * margin(pairs)), rel=1e-6)
    # It multiplies by WPO's weights in place, which neither a mean that was expanded nor relu's gradient allows.
    with pytest.raises(RuntimeError, match="single memory location"):
        pairs.dpo(loss_type="sft", use_weighting=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pairs.gradient(pairs.dpo(loss_type="hinge", use_weighting=True)[0])
    weights = pairs.padded(pairs.logprobs.detach() - pairs.log_sum).sum(1) / pairs.inside.sum(1)
    chosen, rejected = weights.exp().chunk(2)
    nll = -pairs.padded(pairs.logprobs.detach())[:5].sum(1)
    ours = pairs.ours(loss_type="sft", use_weighting=True)[0].item()
    assert ours == pytest.approx(((nll * chosen * rejected).sum() / pairs.inside[:5].sum()).item(), rel=1e-6)
    theirs, ours = (made(loss_type="hinge", use_weighting=True)[0].item() for made in (pairs.dpo, pairs.ours))
    assert ours == pytest.approx(theirs, rel=1e-6)
    with pytest.raises(KeyError):  # no float64 in its table of the largest exponents
        pairs.dpo(loss_type="sigmoid", f_divergence_type="alpha_divergence")


def margin(pairs):
    """The mean difference of the log-ratios."""
    ratio = pairs.padded(pairs.logprobs.detach() - pairs.ref).sum(1)
    return (ratio[:5] - ratio[5:]).mean().item()


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
    rows = mismatched(batch)
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
    rows, tokens = mismatched(batch), [batch.tokens[batch.sequence == i].tolist() for i in range(4)]
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
