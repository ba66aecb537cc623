"""A metric's name that a peer has means what it means there: against the peers' formulas over padded arrays."""

import numpy as np
import pytest
import torch
from helpers import cluster, completion, length_reward, prompt, rows, tiny_model

from whet.config import DataConfig, GRPOConfig
from whet.learners.grpo import GRPOLearner
from whet.learners.sampler_mismatch import compare_sampler
from whet.ops import zero_without_advantage
from whet.types import Group, TokenBatch

EPSILON, BETA = 0.02, 0.2


def run(**algo):
    """One update far from the rollout's policy: what it logged, and [B, T] arrays of what it was made of."""
    config = {"num_generations": 4, "beta": BETA, "epsilon": EPSILON, "kl_loss_mode": "low_var_kl", **algo}
    c = cluster(reference=tiny_model(1), rollout={"eos_tokens": tuple(range(180, 264))})
    made = GRPOLearner(c, GRPOConfig(**config), length_reward, data=DataConfig(batch_size=4, shuffle=False))
    seen = {}
    loss = made.loss

    def spy(x):
        found = loss(x)
        seen["x"] = x
        return found

    update = made.update

    def moved(step, mini):
        noise = torch.Generator().manual_seed(0)
        shift = 0.3 * torch.randn(mini.num_tokens, generator=noise)
        mini = mini.replace(old_logprobs=mini.sampler_logprobs + shift)
        seen["mini"] = mini
        return update(step, mini)

    made.update = moved
    c.actor_trainer.set_loss(spy)
    row = made.train(rows(4)).rows[0]
    return row, arrays(seen["x"], seen["mini"])


def arrays(x, mini):
    """The columns of one micro-batch of all sequences, padded to [B, T] float64, in the peers' names."""
    counts = torch.bincount(x.sequence).tolist()
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "entropy")
    padded = {n: np.zeros((len(counts), max(counts))) for n in (*names, "mask")}
    for n in names:
        for row, part in zip(padded[n], getattr(x, n).detach().double().split(counts), strict=True):
            row[: len(part)] = part.numpy()
    for row, count in zip(padded["mask"], counts, strict=True):
        row[:count] = 1
    assert len(counts) == mini.num_sequences
    return padded


def tunix(a, agg):
    """grpo_loss_fn's auxiliary metrics."""
    mask = a["mask"]
    mean = lambda v: (v * mask).sum() / mask.sum()
    aggregate = {
        "token-mean": mean,
        "sequence-mean-token-mean": lambda v: ((v * mask).sum(1) / mask.sum(1)).mean(),
        "seq-mean-token-sum": lambda v: (v * mask).sum(1).mean(),
    }[agg]
    log_ratio = a["logprobs"] - a["old_logprobs"]
    ratio = np.exp(log_ratio)
    unclipped = -a["advantages"] * ratio
    clipped = -a["advantages"] * ratio.clip(1 - EPSILON, 1 + EPSILON)
    loss = np.maximum(unclipped, clipped)
    bound = -1.01 * a["advantages"]
    held = (loss > bound) & (a["advantages"] < 0)
    loss = np.where(held, bound, loss)
    d = a["ref_logprobs"] - a["logprobs"]
    kl = np.exp(d) - d - 1
    inside = a["advantages"][mask > 0]
    return {
        "loss": aggregate(loss) + BETA * aggregate(kl),
        "reduced_pg_loss": aggregate(loss),
        "unreduced_pg_loss": aggregate(loss),
        "kl": mean(kl),
        "kl_loss": aggregate(kl),
        "entropy": aggregate(a["entropy"]),
        "pg_clipfrac": mean(clipped > unclipped),
        "pg_clipfrac_lower": aggregate(held * 1.0),
        "ppo_kl": mean(-log_ratio),
        "is_ratio/mean": mean(ratio),
        "is_ratio/max": ratio[mask > 0].max(),
        "is_ratio/min": ratio[mask > 0].min(),
        "log_ratio/abs_mean": mean(abs(log_ratio)),
        "pg_loss/unclipped_mean": mean(unclipped),
        "pg_loss/clipped_mean": mean(clipped),
        "advantage/abs_mean": abs(inside).mean(),
        "advantage/nonzero_frac": (abs(inside) > 1e-8).mean(),
        "advantage/max": inside.max(),
        "advantage/min": inside.min(),
    }


@pytest.mark.parametrize("agg", ["token-mean", "sequence-mean-token-mean", "seq-mean-token-sum"])
def test_tunix_names_are_tunix_numbers(agg):
    row, a = run(loss_agg_mode=agg, epsilon_c=1.01)
    want = tunix(a, agg)
    for name, value in want.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0 < row["pg_clipfrac_lower"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_names_are_trl_numbers(level):
    row, a = run(policy_loss_fn="gspo-token" if level == "sequence" else "grpo")
    mask, log_ratio = a["mask"], a["logprobs"] - a["old_logprobs"]
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        advantages, mask = a["advantages"][:, :1], np.ones_like(log_ratio)
    else:
        advantages = a["advantages"]
    ratio = np.exp(log_ratio)
    low = ((ratio < 1 - EPSILON) & (advantages < 0)) * 1.0
    high = ((ratio > 1 + EPSILON) & (advantages > 0)) * 1.0
    of_all = lambda v: (v * mask).sum() / mask.sum()
    of_each = lambda v: (v * mask).sum(1) / mask.sum(1)
    want = {
        "clip_ratio/low_mean": of_all(low),
        "clip_ratio/high_mean": of_all(high),
        "clip_ratio/region_mean": of_all(low + high),
        "clip_ratio/low_min": of_each(low).min(),
        "clip_ratio/high_max": of_each(high).max(),
        "entropy/token_mean": (a["entropy"] * a["mask"]).sum() / a["mask"].sum(),  # which TRL calls entropy
    }
    for name, value in want.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0 < row["clip_ratio/high_mean"] < row["clip_ratio/high_max"] <= 1


def test_reward_std_is_that_of_the_whole_batch_and_advantages_are_logged_by_trajectory_and_by_token():
    scores = iter([0.0, 1.0, 2.0, 5.0, 3.0, 3.0, 3.0, 3.0])
    reward = lambda completions, **_: [next(scores) for _ in completions]
    made = GRPOLearner(
        cluster(rollout={"eos_tokens": tuple(range(180, 264))}),
        GRPOConfig(num_generations=4, beta=0.0),
        reward,
        data=DataConfig(batch_size=2, shuffle=False),
    )
    seen = []
    update = made.update
    made.update = lambda step, mini: (seen.append(mini), update(step, mini))[1]
    row = made.train(rows(2)).rows[0]
    given = np.array([0.0, 1.0, 2.0, 5.0, 3.0, 3.0, 3.0, 3.0])
    assert row["reward_std"] == pytest.approx(given.std(ddof=1))
    (mini,) = seen
    tokens = mini.advantages[mini.mask].numpy()
    each = np.array([float(mini.advantages[i]) for i in mini.starts.tolist()])
    assert row["advantage/abs_mean"] == pytest.approx(abs(tokens).mean(), rel=1e-5)
    assert row["advantage/nonzero_frac"] == pytest.approx((tokens != 0).mean())
    assert row["rewards/advantage/mean"] == pytest.approx(each.mean(), abs=1e-7)
    assert row["rewards/advantage/std"] == pytest.approx(each.std(), rel=1e-6)  # np.std, as Tunix


def test_completions_that_are_not_run_count_as_unclipped_and_their_weight_in_the_entropy():
    half = lambda completions, completion_ids, **_: [float(i // 4 and len(c)) for i, c in enumerate(completion_ids)]
    found = []
    for skips in (True, False):
        c = cluster(rollout={"eos_tokens": tuple(range(180, 264))}, num_epochs=1, lr=0.0)
        made = GRPOLearner(
            c,
            GRPOConfig(num_generations=4, beta=0.0, epsilon=0.0, num_iterations=2, loss_agg_mode="seq-mean-token-sum"),
            half,
            data=DataConfig(batch_size=2, shuffle=False),
        )
        made.skips_without_signal = skips
        row = made.train(rows(2)).rows[0]
        assert (row["skipped/sequences"] > 0) == skips
        found.append(row)
    skipping, running = found
    for name in ("pg_clipfrac", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert skipping[name] == pytest.approx(running[name], rel=1e-5), name
    assert skipping["clip_ratio/low_min"] == running["clip_ratio/low_min"] == 0
    assert skipping["entropy"] == pytest.approx(running["entropy"], rel=0.5)  # not half of it: see of_whole_batch


def test_units_that_divide_the_loss_are_those_trained_or_all(monkeypatch):
    losses = {}
    for units in ("trained", "all"):
        made = GRPOLearner(
            cluster(rollout={"eos_tokens": tuple(range(180, 264))}),
            GRPOConfig(num_generations=4, beta=0.0, loss_agg_units=units, mask_truncated_completions=True),
            length_reward,
            data=DataConfig(batch_size=4, shuffle=False),
        )
        seen = []
        update = made.update
        monkeypatch.setattr(made, "update", lambda step, mini, u=update, s=seen: (s.append(mini), u(step, mini))[1])
        made.train(rows(4))
        (mini,) = seen
        weights = made.cluster.actor_trainer.add_loss_weights(mini).weights
        trained = len(mini.trajectory[mini.mask].unique())
        assert 0 < trained < 16
        losses[units] = (float(weights.sum()), trained)
    assert losses["trained"][0] == pytest.approx(1.0)
    assert losses["all"][0] == pytest.approx(losses["all"][1] / 16)


def test_a_loss_of_ones_own_says_what_is_zero_without_an_advantage_and_is_skipped_there():
    def push(x):
        """A clip of its own: what would be pushed up further than it is already."""
        up = (x.advantages > 0) & (x.logprobs.detach() > -6)
        return -x.need("advantages") * x.logprobs, {"pushed": up.float(), "own/pushed": up.float()}

    half = lambda completions, completion_ids, **_: [float(i // 4 and len(c)) for i, c in enumerate(completion_ids)]
    rows_of = []
    for loss in (push, zero_without_advantage("pushed", "own/pushed")(lambda x: push(x))):
        c = cluster(rollout={"eos_tokens": tuple(range(180, 264))}, num_epochs=1, lr=0.0)
        c.actor_trainer.set_metric_reductions({"own/pushed": {"own/mean": "sequence_mean", "own/least": "min"}})
        config = GRPOConfig(num_generations=4, beta=0.0, policy_loss_fn=loss)
        made = GRPOLearner(c, config, half, data=DataConfig(batch_size=2, shuffle=False))
        rows_of.append(made.train(rows(2)).rows[0])
    running, skipping = rows_of
    assert running["skipped/sequences"] == 0 < skipping["skipped/sequences"] and 0 < running["pushed"] < 1
    for name in ("pushed", "own/mean", "own/least", "loss", "grad_norm"):
        assert skipping[name] == pytest.approx(running[name], rel=1e-5), name


def test_a_sampler_logprob_that_is_unknown_is_left_out_of_the_means_over_tokens():
    made = GRPOLearner(
        cluster(), GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=4, shuffle=False)
    )
    update, seen = made.update, {}

    def with_unknown(step, mini):
        apart = torch.linspace(0.1, 0.9, mini.num_tokens)
        sampler = torch.where(torch.arange(mini.num_tokens) % 3 == 0, torch.nan, mini.sampler_logprobs - apart)
        seen["gap"] = apart[mini.mask & ~sampler.isnan()].double()
        return update(step, mini.replace(sampler_logprobs=sampler))

    made.update = with_unknown
    made.cluster.actor_trainer.set_metric_reductions({"sampling/kl_approx": {"a": "mean", "b": "min"}})
    row, gap = made.train(rows(4)).rows[0], seen["gap"]
    want = {
        "sampling/sampling_logp_difference/mean": gap.mean(),
        "sampling/sampling_logp_difference/max": gap.max(),
        "a": -gap.mean(),
        "b": -gap.max(),
        "sampling/kl_to_inference": (torch.expm1(-gap) + gap).mean(),
        "sampling/ess": gap.exp().sum() ** 2 / (len(gap) * gap.exp().square().sum()),
    }
    assert {name: row[name] for name in want} == pytest.approx({n: v.item() for n, v in want.items()}, rel=1e-4)


def test_where_no_sampler_logprob_is_known_there_is_no_mean_of_them():
    made = GRPOLearner(cluster(), GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=4))
    update = made.update
    made.update = lambda step, mini: update(step, mini.replace(sampler_logprobs=torch.full((mini.num_tokens,), np.nan)))
    row = made.train(rows(4)).rows[0]
    assert "sampling/sampling_logp_difference/mean" not in row and "sampling/kl_approx" not in row


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_mean_weight_of_a_correction_is_over_sequences_where_a_weight_is_one_of_sequences(level):
    lengths, weights = [1, 3, 2], [0.5, 2.0, 1.0]
    done = tuple(completion(range(n), g) for g, n in enumerate(lengths))
    batch = TokenBatch.from_groups([Group(prompt=prompt("a"), completions=done)])
    each = torch.tensor(weights).log()[batch.sequence]
    gaps = each / torch.tensor(lengths)[batch.sequence] if level == "sequence" else each
    batch = batch.replace(old_logprobs=torch.zeros(6), sampler_logprobs=-gaps)
    _, found = compare_sampler(batch, GRPOConfig(num_generations=3, sampler_is=level, sampler_is_threshold=9.0))
    want = np.average(weights, weights=lengths if level == "token" else None)
    assert found["sampler_is/weight_mean"].value == pytest.approx(want, rel=1e-5)
