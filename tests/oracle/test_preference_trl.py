"""DPO's losses against TRL's own code, where TRL is installed: values, gradients and metrics to 1e-6.

TRL's method runs as it is on a stand-in for the trainer: with made-up log-probabilities, and with tiny models.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import rounding
from preference_inputs import batch_of
from preference_trl import NAMES, DPOTrainer, Pairs, dpo_trainer
from trl.trainer.utils import add_fused_lm_head

from whet.config import OptimConfig, PreferenceConfig
from whet.learners.preference_from_config import make_preference_objective
from whet.models.load import load_model
from whet.ops import unit_weights
from whet.ops.preference import StepPasses
from whet.train.worker import ModelWorker


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
    found = lambda loss: [loss.detach(), pairs.gradient(loss)]
    theirs, ours = lambda: found(pairs.dpo(**fields)[0]), lambda: found(pairs.ours(**fields)[0])
    # sums of at most 6 tokens of two sequences by two models, ten functions, and a mean of 5 pairs, there and back;
    # the weights of pairs are fp32 in either case
    limits = rounding(theirs, [pairs.logprobs, pairs.ref], roundings=2 * (4 * 6 + 10 + 5))
    for got, want, limit in zip(ours(), theirs(), limits, strict=True):
        assert (got - want).abs().max() <= 2 * limit


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


def policy(seed, dtype=torch.float64):
    """A tiny model whose norms don't go through fp32, each seed another."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=200, **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.to(dtype)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.5},
        {"loss_type": "sigmoid", "use_weighting": True},
        {"loss_type": "aot_unpaired"},
    ],
    ids=["mpo", "wpo", "aot"],
)
def test_a_model_s_gradient_is_trl_s(fields):
    """Its forward, whose head gives log-probabilities and log Σ p² in chunks, padded; ours packed, in micro-batches."""
    batch = batch_of([(3, 5), (1, 2), (6, 4), (2, 2)])
    own, theirs, ref = policy(0), policy(0), policy(1)
    rows = [torch.cat([batch.prefix(i), batch.tokens[batch.sequence == i]]) for i in range(8)]
    order, width = [0, 2, 4, 6, 1, 3, 5, 7], max(map(len, rows))
    padded = lambda values: torch.stack([F.pad(values[i], (0, width - len(values[i]))) for i in order])
    completion = [torch.arange(len(r)) >= len(batch.prefix(i)) for i, r in enumerate(rows)]
    given = {"input_ids": padded(rows), "attention_mask": padded([torch.ones_like(r) for r in rows])}
    given |= {"completion_mask": padded([c.long() for c in completion])}
    config = PreferenceConfig(**fields)
    add_fused_lm_head(theirs, outputs=("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"))
    add_fused_lm_head(ref)
    trainer = dpo_trainer(config, theirs.train(), ref)
    loss = DPOTrainer._compute_loss(trainer, theirs, given, False)
    loss.backward()

    made = make_preference_objective(config)
    reference = ModelWorker(load_model(policy(1)))
    worker = ModelWorker(load_model(own), optim=OptimConfig(), max_tokens=24)
    batch = batch.with_token_columns(ref_logprobs=reference.logprobs(batch).logprobs)
    passes = StepPasses(logprobs=worker.logprobs(batch).logprobs)
    batch, _ = made.with_passes(made.with_counts(batch), passes)
    batch = batch.replace(unit_weights=unit_weights(batch.mask, batch.unit))
    found = worker.forward_backward(batch, made, constants=made.constants)
    assert len(worker.micro_batches(batch, None)) > 1
    assert found["loss"].value == pytest.approx(loss.item(), rel=1e-6)
    want = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in own.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-5, atol=1e-6 * want[name].abs().max().item() + 1e-9)
    right = trainer._metrics["train"]["mean_token_accuracy"][0]
    assert found["mean_token_accuracy"].sum / found["tokens/chosen"].sum == pytest.approx(right, rel=1e-6)
