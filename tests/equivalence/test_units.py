"""Losses per unit and scores of the last state: any split has the gradient and the metrics of the whole (float64)."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import exact_model, forest, gap, one_by_one, random_batch

from whet.config import OptimConfig
from whet.errors import ConfigError, DataError
from whet.models.load import load_model
from whet.ops import nll, segment_sum, unit_weights
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker


def splits(batch):
    """Ways to cut a batch: whole, by tokens, by sequences; packed, and padded."""
    longest = int((batch.prefix_lengths[batch.prefix_of] + batch.lengths).max())  # a unit has two sequences at most
    return {
        "whole": {"max_tokens": 10_000},
        "few tokens": {"max_tokens": 2 * longest},
        "few sequences": {"max_tokens": 10_000, "max_sequences": 3},
        "padded": {"max_tokens": 10_000, "packable": False},
        "padded, split": {"max_tokens": 2 * longest, "packable": False},
    }


def exact(role="actor"):
    """The exact model in a role, a critic's head drawn at random."""
    loaded = load_model(exact_model(), role=role)
    if role == "critic":
        with torch.no_grad():
            loaded.score_head.weight.copy_(torch.randn(1, 32, dtype=torch.float64))
    return loaded


def make(loaded, *, packable=True, **limits):
    loaded.module.set_attn_implementation("whet" if packable else "sdpa")
    return ModelWorker(dataclasses.replace(loaded, packable=packable), optim=OptimConfig(name="sgd"), **limits)


def pairs(batch):
    """The sequences in pairs, begun under one prompt or not, one of them left over; the last pair is not trained."""
    n = batch.num_sequences
    unit_of = torch.arange(n).flip(0) // 2
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    mask = (batch.unit if batch.unit_of is unit_of else unit_of.index_select(0, batch.sequence)) != 0
    batch = batch.replace(unit_of=unit_of, mask=mask).with_sequence_columns(sign=sign)
    return batch.replace(unit_weights=unit_weights(batch.mask, batch.unit))


BATCHES = {
    "groups": lambda: pairs(random_batch((5, [3, 9, 1, 14]), (12, [8, 4]), (2, [7]), (1, [6, 6, 6]))),
    "forks": lambda: pairs(forest(3, 9)),
}


def preference(x):
    """-log σ(Σ ± log π(sequence)), a number per pair."""
    sequences = segment_sum(x.logprobs / 20, x.sequence, x.num_sequences)
    margin = segment_sum(sequences * x.need("sign"), x.unit_of, x.num_units)
    return -F.logsigmoid(margin), {"margin": margin.detach()}


def bradley_terry(x):
    """-log σ(Σ ± score), a number per pair."""
    margin = segment_sum(x.need("scores") * x.need("sign"), x.unit_of, x.num_units)
    return -F.logsigmoid(margin), {"margin": margin.detach()}


def plain_scores(loaded, batch):
    """The oracle: the module on each sequence alone, the head on its last state."""
    loaded.module.set_attn_implementation("sdpa")
    head, out = loaded.score_head, []
    for i in range(batch.num_sequences):
        ids = torch.cat([batch.prefix(i), batch.tokens[int(batch.starts[i]) : int(batch.ends[i])]])[None]
        hidden = loaded.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        out.append(head(hidden)[0, -1, 0])
    return torch.stack(out)


def compare(loaded, batch, loss, margins, **options):
    """The worker's gradient and metrics under every split, against those of the margins [U] of the oracle."""
    there = batch.unit_weights > 0
    assert 2 < there.sum() < len(there)  # a unit without a trained token does not count
    total = -(F.logsigmoid(margins)[there]).sum() / there.sum()
    loaded.module.zero_grad()
    total.backward()
    want = {n: p.grad.clone() for n, p in loaded.module.named_parameters() if p.grad is not None}
    assert any(g.abs().max() > 1e-4 for g in want.values())
    inside, seen = margins[there].detach(), []
    for name, split in splits(batch).items():
        loaded.module.zero_grad()
        worker = make(loaded, **split)
        hows = {"margin": {"mean": "mean", "max": "max", "min": "min", "weighted": "weighted", "each": "sequence_mean"}}
        found = worker.forward_backward(batch, loss, reductions=hows, **options)
        got = {n: p.grad for n, p in loaded.module.named_parameters() if p.grad is not None}
        assert gap(got, want) < 1e-12, name
        numbers = {n: m.value for n, m in found.items()}
        mean = pytest.approx(inside.mean().item(), abs=1e-12)
        assert numbers == {
            "loss": pytest.approx(total.item(), abs=1e-12),
            "mean": mean,
            "each": mean,
            "weighted": mean,
            "max": pytest.approx(inside.max().item()),
            "min": pytest.approx(inside.min().item()),
        }, name
        assert found["mean"].count == there.sum()  # units, not tokens
        seen.append(len(worker.micro_batches(batch, split.get("max_sequences"))))
    assert seen[0] == 1 < min(seen[1], seen[2], seen[4])


@pytest.mark.parametrize("shape", BATCHES)
def test_a_loss_per_unit_has_the_gradient_of_the_whole_in_any_split(shape):
    batch, loaded = BATCHES[shape](), exact()
    logprobs = torch.where(batch.mask, one_by_one(loaded.module, batch) / 20, 0.0)
    sequences = segment_sum(logprobs, batch.sequence, batch.num_sequences)
    compare(loaded, batch, preference, segment_sum(sequences * batch.sign, batch.unit_of, batch.num_units))


@pytest.mark.parametrize("shape", BATCHES)
def test_a_reward_models_loss_reads_the_scores_with_gradient_in_any_split(shape):
    batch, loaded = BATCHES[shape](), exact("critic")
    margins = segment_sum(plain_scores(loaded, batch) * batch.sign, batch.unit_of, batch.num_units)
    compare(loaded, batch, bradley_terry, margins, scores=True)


@pytest.mark.parametrize("shape", BATCHES)
def test_scores_are_those_of_each_sequence_alone(shape):
    batch, loaded = BATCHES[shape](), exact("critic")
    with torch.no_grad():
        want = plain_scores(loaded, batch)
    longest = int((batch.prefix_lengths[batch.prefix_of] + batch.lengths).max())
    for split in (*splits(batch).values(), {"max_tokens": longest}):  # units need no common pass for what is only read
        got = make(loaded, **split).scores(batch)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        assert not got.requires_grad
    with pytest.raises(DataError, match=f"over the token budget trainer.max_tokens_per_microbatch={longest - 1}"):
        make(loaded, max_tokens=longest - 1).scores(batch)
    worker = make(loaded, max_tokens=10_000)
    before = worker.values(batch)  # of the state before each token, as ever
    assert before.shape == (batch.num_tokens,) and not torch.isin(got, before).all()


def test_scores_of_a_model_without_a_value_head_are_refused():
    with pytest.raises(ConfigError, match="load the model with role='critic'"):
        make(exact()).scores(random_batch((3, [2])))


def test_the_weights_say_which_form_a_loss_has_and_another_shape_is_refused():
    batch = pairs(random_batch((3, [4, 2]), (2, [3, 5])))
    worker = make(exact())
    with pytest.raises(
        DataError, match=r"the loss has shape \[14\], and the batch has unit_weights.*per unit, \[u\] = \[2\]"
    ):
        worker.forward_backward(batch, nll)
    tokens = batch.replace(unit_weights=None, weights=batch.mask.double())
    with pytest.raises(
        DataError, match=r"the loss has shape \[2\], and the batch has weights.*per token, \[s\] = \[14\]"
    ):
        worker.forward_backward(tokens, preference)
    with pytest.raises(DataError, match="the batch has both weights and unit_weights"):
        worker.forward_backward(batch.replace(weights=batch.mask.double()), preference)
    odd = lambda x: (preference(x)[0], {"logps": x.logprobs.detach()})
    with pytest.raises(DataError, match=r"its metric 'logps' has shape \[14\]"):
        worker.forward_backward(batch, odd)


def test_a_trainer_weighs_units_alike():
    batch = pairs(random_batch((3, [4, 2]), (2, [3, 5]), (6, [1, 1]))).replace(unit_weights=None)
    trainer = RoleTrainer(make(exact()), loss=nll)
    trainer.set_loss(preference, loss_per="unit")
    assert trainer.add_loss_weights(batch).unit_weights.tolist() == [0.0, 0.5, 0.5]  # the first pair is masked out
    trainer.set_loss(preference, loss_agg_units="all")
    assert trainer.add_loss_weights(batch).unit_weights.tolist() == [0.0] + [1 / 3] * 2
    assert trainer.add_loss_weights(batch).weights is None
    assert trainer.update(batch)["margin"].count == 2
    critic = RoleTrainer(make(exact("critic")), loss=nll)
    critic.set_loss(bradley_terry, loss_per="unit", scores=True)
    first = critic.update(batch)["loss"].value
    for _ in range(3):
        last = critic.update(batch)["loss"].value
    assert last < first
    assert critic.evaluate_batch(batch)["margin"].count == 2
