"""Pairs as TRL has them and as whet does, and a stand-in for DPOTrainer, that the tests against TRL build on."""

import collections
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from preference_inputs import batch_of, inputs

from whet.config import PreferenceConfig
from whet.learners.preference_from_config import make_preference_objective
from whet.ops import aggregate, unit_weights
from whet.ops.preference import StepPasses

DPOTrainer = pytest.importorskip("trl").DPOTrainer

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


def dpo_trainer(config, model, ref):
    """What DPOTrainer's _compute_loss asks of its trainer."""
    return SimpleNamespace(
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
        own = dpo_trainer(config, model, ref)
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
