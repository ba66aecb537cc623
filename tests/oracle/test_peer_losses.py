"""Losses, aggregations and metrics against the loss code of TRL and TorchRL, run where those are installed.

TRL's trainers are stood in for by a namespace that has what _compute_loss reads; the logprobs come from it. A batch of
whet is the same sequences end to end. Values and gradients to 1e-6 relative; where a difference is meant, both numbers.
"""

import functools

import pytest
import torch
from peer_code import trl_trainer
from surrogates import changed, gradient, random_inputs

from whet.ops import POLICY_LOSSES, aggregate, token_weights

LENGTHS, LONGEST = (3, 1, 5, 4), 6
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}


def rows(x, column):
    """[B, T] of a column [s], 0 at the right."""
    out = torch.zeros(x.num_sequences, max(LENGTHS), dtype=column.dtype)
    for i in range(x.num_sequences):
        own = column[x.sequence == i]
        out[i, : len(own)] = own
    return out


def trl_batch(x, **columns):
    """The batch of TRL, less its logprobs."""
    blank = torch.zeros(x.num_sequences, 1, dtype=torch.long)
    mask = rows(x, x.mask).long()
    advantages = torch.stack([x.advantages[x.sequence == i][0] for i in range(x.num_sequences)])
    return {
        "prompt_ids": blank,
        "prompt_mask": blank,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": rows(x, x.old_logprobs),
        "old_logps": (rows(x, x.old_logprobs) * mask).sum(1),
        "num_items_in_batch": mask.sum(),
        **columns,
    }


def trl(x, trainer, **columns):
    """Loss, gradient [s] and metrics of TRL."""
    logprobs = x.logprobs.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        rows(x, logprobs),
        torch.zeros(x.num_sequences, max(LENGTHS)),
        None,
    )
    loss = trainer.run(trl_batch(x, **columns))
    loss.backward()
    return loss.detach(), logprobs.grad, {k: v[-1] for k, v in trainer._metrics["train"].items()}


def whet(x, name, mode, *, units=None, **fields):
    """Loss, gradient [s] and metrics of whet."""
    weights = token_weights(x.mask, x.sequence, mode, norm=LONGEST, num_units=units, prompt=x.sequence)
    loss, metrics, slope = gradient(functools.partial(POLICY_LOSSES[name], **fields), x, weights)
    return aggregate(loss, weights), slope, metrics


def close(found, expected):
    """Loss and gradient are equal."""
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


AGGREGATIONS = {
    "bnpo": ("token-mean", None),
    "cispo": ("token-mean", None),
    "dapo": ("token-mean", None),
    "dr_grpo": ("sequence-mean-token-scale", 4),
    "grpo": ("sequence-mean-token-mean", 4),
    "luspo": ("seq-mean-token-sum", 4),
    "sapo": ("sequence-mean-token-mean", 4),
    "vespo": ("token-mean", None),
}
SURROGATES = {"cispo": ("cispo-trl", CLIP), "sapo": ("sapo", {}), "vespo": ("vespo", {})}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", sorted(AGGREGATIONS))
def test_trl_s_loss_types(loss_type, level):
    (mode, units), (name, fields) = AGGREGATIONS[loss_type], SURROGATES.get(loss_type, ("grpo", CLIP))
    fields = fields if loss_type == "vespo" else {**fields, "importance_sampling_level": level}
    for seed in range(3):
        x = random_inputs(seed, LENGTHS, masked=seed > 0)
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **CLIP, level=level, loss_type=loss_type)
        close(whet(x, name, mode, units=units, **fields), trl(x, trainer))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [0.9, 1.1, 1.5, 4.0])
def test_trl_s_delta(delta, level):
    for seed in range(3):
        x = random_inputs(seed, LENGTHS, spread=1.0)
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **CLIP, level=level, delta=delta)
        fields = {**CLIP, "delta": delta, "importance_sampling_level": level}
        close(whet(x, "grpo", "sequence-mean-token-mean", units=4, **fields), trl(x, trainer))


@pytest.mark.parametrize("masked", [False, True])
def test_trl_s_clip_metrics(masked):
    x = random_inputs(1, LENGTHS, spread=1.0, masked=masked)
    for level in ("token", "sequence"):
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **CLIP, level=level)
        theirs = trl(x, trainer)[2]
        ours = whet(x, "grpo", "token-mean", **CLIP, importance_sampling_level=level)[2]
        for side in ("low", "high", "region"):
            column = ours[f"clip_ratio/{side}" if level == "token" else f"sequence_clip_ratio/{side}"]
            found = column[x.mask].mean()
            if level == "sequence":  # one of each row; TRL counts the ratio of 1 of an empty one too
                found = torch.stack([column[x.sequence == i].max() for i in range(x.num_sequences)]).mean()
            assert float(found) == pytest.approx(theirs[f"clip_ratio/{side}_mean"], rel=1e-6), (side, level)


def test_trl_s_metrics_of_cispo_and_vespo():
    x = random_inputs(2, LENGTHS, spread=1.0, masked=False)
    trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **CLIP, loss_type="cispo")
    share = whet(x, "cispo-trl", "token-mean", **CLIP)[2]["cispo_clip_ratio"].mean()
    assert 0 < float(share) == pytest.approx(trl(x, trainer)[2]["cispo_clip_ratio"], rel=1e-6)
    trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", loss_type="vespo")
    phi = whet(x, "vespo", "token-mean")[2]["vespo/phi_seq_mean"]
    starts = [int((x.sequence == i).nonzero()[0]) for i in range(4)]
    assert float(phi[starts].mean()) == pytest.approx(trl(x, trainer)[2]["vespo/phi_seq_mean"], rel=1e-6)


def test_trl_s_vespo_with_a_correction_in_its_weight():
    fields = {"vespo_k_pos": 1.5, "vespo_lambda_neg": 0.5}
    for seed in range(3):
        x = random_inputs(seed, LENGTHS)
        ratio = (x.old_logprobs - x.sampler_logprobs).exp().clamp(max=1.2)
        ratio[x.mask.nonzero()[0]] = 0.0  # a token that the correction masks: its log is held at ln 1e-8
        trained = torch.where(x.mask, ratio, 1.0)  # as TRL has it: 1 at tokens that are not trained
        theirs = torch.where(rows(x, x.mask) > 0, rows(x, trained), 1.0)
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", loss_type="vespo", use_vllm=True, **fields)
        expected = trl(x, trainer, importance_sampling_ratio=theirs)
        close(whet(x, "vespo", "token-mean", **fields, correction=lambda x, ratio=ratio: ratio), expected)


def test_trl_s_sapo_temperatures():
    x = random_inputs(4, LENGTHS, spread=1.0)
    fields = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 3.0}
    trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", loss_type="sapo", **fields)
    close(whet(x, "sapo", "sequence-mean-token-mean", units=4, **fields), trl(x, trainer))


def test_trl_s_rloo():
    for seed in range(3):
        x = random_inputs(seed, LENGTHS, spread=0.3, masked=False)
        trainer = trl_trainer("trl.trainer.rloo_trainer", "RLOOTrainer", **CLIP)
        fields = {**CLIP, "importance_sampling_level": "sequence-sum"}
        close(whet(x, "grpo", "sequence-mean-token-mean", units=4, **fields), trl(x, trainer))


def test_trl_s_gmpo():
    for seed in range(3):
        x = random_inputs(seed, LENGTHS, spread=0.7, masked=seed > 0)
        fields = {"epsilon": 0.4, "epsilon_high": 0.5}
        trainer = trl_trainer("trl.experimental.gmpo.gmpo_trainer", "GMPOTrainer", **fields)
        loss, slope, _ = whet(x, "gmpo", "sequence-mean-token-mean", units=4, **fields)
        empty = [i for i in range(4) if not x.mask[x.sequence == i].any()]
        for i in empty:  # a ratio of 1 to TRL, a number without a gradient; nothing here
            loss = loss - x.advantages[x.sequence == i][0] / 4
        close((loss, slope), trl(x, trainer))


def test_trl_s_cispo_has_its_cap_at_epsilon_high_itself():
    x = random_inputs(5, LENGTHS)
    x = changed(x, old_logprobs=x.logprobs.clone())
    trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", loss_type="cispo")
    theirs, ours = trl(x, trainer), whet(x, "cispo", "token-mean")
    torch.testing.assert_close(theirs[1], 0.2 * ours[1])  # on policy, where every weight is 1
    trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", loss_type="cispo", epsilon_high=5.0)
    close(whet(random_inputs(6), "cispo", "token-mean", epsilon_high=4.0), trl(random_inputs(6), trainer))


def split(x, rows):
    """A batch with the mask of some rows alone: a micro-batch, whatever else is in it."""
    return changed(x, mask=x.mask & torch.isin(x.sequence, torch.tensor(rows)))


def test_accumulation_equals_trl_s_where_it_divides_by_the_whole_and_not_where_it_does_not():
    # rows of 3, 1, 5 and 4 tokens in two micro-batches: 4 tokens and 9
    x = random_inputs(7, LENGTHS, masked=False)
    whole = {mode: whet(x, "grpo", mode, units=units, **CLIP) for mode, units in AGGREGATIONS.values()}
    for loss_type in ("dapo", "bnpo"):
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **CLIP, loss_type=loss_type, parts=2)
        parts = [trl(split(x, r), trainer, num_items_in_batch=torch.tensor(13)) for r in ([0, 1], [2, 3])]
        total = [sum(column) for column in zip(*(p[:2] for p in parts), strict=True)]
        if loss_type == "dapo":
            close(whole["token-mean"], total)
            continue
        own = [whet(split(x, r), "grpo", "token-mean", **CLIP) for r in ([0, 1], [2, 3])]
        close([sum(column) / 2 for column in zip(*(o[:2] for o in own), strict=True)], total)
        # divided by each half's own tokens, one of the short half weighs 13/8 of its share, one of the long half 13/18
        expected = whole["token-mean"][1] * torch.where(x.sequence < 2, 13 / 8, 13 / 18)
        torch.testing.assert_close(total[1], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["GRPOLoss", "CISPOLoss"])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_torchrl_s_losses_and_aggregations(name, aggregation):
    objectives = pytest.importorskip("torchrl.objectives.llm")
    theirs = getattr(objectives, name)(clip_epsilon=(0.2, 0.28), aggregation=aggregation, entropy_bonus=False)
    ours, mode = {"GRPOLoss": "grpo", "CISPOLoss": "cispo-torchrl"}[name], "token-mean"
    units = None
    if aggregation == "prompt_mean":
        mode, units = "sequence-mean-token-mean", 4
    for seed in range(3):
        x = random_inputs(seed, LENGTHS, spread=1.0, masked=seed > 0)
        logprobs = x.logprobs.clone().requires_grad_()
        log_weight = rows(x, torch.where(x.mask, logprobs - x.old_logprobs, 0.0)).unsqueeze(-1)
        objective, clipped = theirs._compute_policy_objective(log_weight, rows(x, x.advantages).unsqueeze(-1))
        loss = theirs._aggregate_loss_value(objective, rows(x, x.mask)).squeeze()
        loss.backward()
        found = whet(x, ours, mode, units=units, **CLIP)
        close(found, (loss.detach(), logprobs.grad))
        if name == "CISPOLoss":  # a share of all positions there
            assert float(found[2]["clip_ratio/region"].sum()) / 20 == pytest.approx(float(clipped), rel=1e-6)
