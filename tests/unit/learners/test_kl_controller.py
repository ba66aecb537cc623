import dataclasses
import functools

import pytest
import torch
from helpers import cluster, gap, length_reward, random_batch, rows, same, tiny_model, weights_of

from whet.config import DataConfig, GRPOConfig
from whet.errors import ConfigError, EngineError
from whet.learners.grpo import GRPOLearner
from whet.learners.kl_penalty import kl_penalty_in_reward
from whet.learners.step import Step
from whet.ops import grpo_advantages, high_entropy_mask, rloo_advantages
from whet.rollout.base import EngineCaps
from whet.rollout.hf import HFEngine
from whet.run.observer import Observer
from whet.types import LossInputs


def learner(c=None, **algo):
    """A learner of tiny models with a reference; `algo` are fields of GRPOConfig."""
    c = cluster(reference=tiny_model(1), max_steps=2) if c is None else c
    config = GRPOConfig(**{"num_generations": 4, "beta": 0.1, **algo})
    return GRPOLearner(c, config, length_reward, data=DataConfig(batch_size=4, shuffle=False))


def assigned(made):
    """A first step, up to its advantages."""
    encode = made.cluster.encoder()
    prompts = [encode(row, i) for i, row in enumerate(rows(4))]
    return made.assign_advantages(made.score(made.batch(made.reward(made.sample(Step(index=1, prompts=prompts))))))


# ---- where the KL acts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "clip"), [("grpo", None), ("rloo", (0.5, 1.5))])
def test_kl_in_the_reward_is_paid_before_the_estimator_and_after_the_clip(estimator, clip):
    step = assigned(learner(kl_type="reward", kl_loss_mode="kl", advantage_estimator=estimator, reward_clip_range=clip))
    batch, total = step.batch, torch.from_numpy(step.rewards.total)
    paid = -0.1 * (batch.old_logprobs - batch.ref_logprobs).double()
    torch.testing.assert_close(batch.token_rewards.double(), paid, atol=1e-6, rtol=0)
    rewards = total if clip is None else total.clamp(*clip)
    assert clip is None or not torch.equal(rewards, total)
    total = rewards + torch.zeros(16, dtype=torch.float64).index_add(0, batch.sequence, paid)
    known = {"grpo": grpo_advantages, "rloo": rloo_advantages}[estimator](total, batch.group_of)
    torch.testing.assert_close(batch.advantages, known[batch.sequence], atol=1e-5, rtol=0)


def test_kl_in_the_reward_is_added_to_the_rewards_of_tokens():
    x = random_batch((3, [2, 1]))
    own, old = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([-1.0, -2.0, -3.0])
    batch = x.replace(token_rewards=own, old_logprobs=old, ref_logprobs=torch.full((3,), -2.0))
    config = GRPOConfig(beta=0.1, kl_type="reward", kl_loss_mode="kl")
    found = kl_penalty_in_reward(config, batch, 0.1).token_rewards
    torch.testing.assert_close(found, torch.tensor([0.4, 0.0, 2.1]))


def test_kl_in_the_advantage_is_taken_after_the_estimator():
    step = assigned(learner(kl_type="advantage", kl_loss_mode="mse_kl"))
    batch = step.batch
    plain = grpo_advantages(torch.from_numpy(step.rewards.total), batch.group_of)[batch.sequence]
    paid = 0.1 * 0.5 * (batch.old_logprobs - batch.ref_logprobs).square()
    torch.testing.assert_close(batch.advantages, plain - paid, atol=1e-6, rtol=0)
    assert batch.token_rewards is None


@pytest.mark.parametrize("kl_type", ["reward", "advantage"])
def test_kl_outside_the_loss_is_no_term_of_it_and_is_logged(kl_type):
    row = learner(kl_type=kl_type, kl_loss_mode="kl").train(rows(4)).rows[0]
    assert row["loss"] == pytest.approx(row["reduced_pg_loss"], abs=1e-7)
    assert row["kl"] != 0.0 and row["kl_coef"] == 0.1
    assert row["kl_sampled"] != 0.0


def test_the_sampled_kl_is_also_a_mean_over_tokens():
    made = learner(kl_type="reward", kl_loss_mode="kl")
    batch = assigned(made).batch
    each = (batch.old_logprobs - batch.ref_logprobs)[batch.mask].double()
    metrics = made.kl_controller.after_step(batch)
    assert metrics["kl_sampled/token_mean"].value == pytest.approx(float(each.mean()), rel=1e-6)


def test_kl_outside_the_loss_is_of_the_policy_that_sampled():
    # one update follows each rollout: the loss needs no old logprobs, the KL does
    batch = assigned(learner(kl_type="reward")).batch
    assert torch.equal(batch.old_logprobs, batch.sampler_logprobs)
    batch = assigned(learner(kl_type="reward", use_rollout_logps=False)).batch
    assert not torch.equal(batch.old_logprobs, batch.sampler_logprobs)
    torch.testing.assert_close(batch.old_logprobs, batch.sampler_logprobs, atol=1e-4, rtol=0)
    assert assigned(learner()).batch.old_logprobs is None


class Silent(HFEngine):
    """An engine that does not say how likely its tokens were."""

    caps = EngineCaps(logprobs=False, shared_weights=True)


def test_a_silent_engine_is_refused_with_the_way_out():
    silent = functools.partial(cluster, reference=tiny_model(1), engine=Silent)
    with pytest.raises(EngineError, match=r"kl_type='reward' .*reports no logprobs; set algo.use_rollout_logps=False"):
        learner(silent(), kl_type="reward").train(rows(4))
    assert learner(silent(), kl_type="reward", use_rollout_logps=False).train(rows(4)).step == 1


# ---- coefficients that move ----------------------------------------------------------------------------------------


def test_an_adaptive_coefficient_follows_its_equation_from_step_to_step():
    made = learner(kl_type="reward", target_kl=1e-4, kl_horizon=160.0)  # far exceeded: the error is clipped to 0.2
    used = [row["kl_coef"] for row in made.train(rows(8)).rows]
    assert used == pytest.approx([0.1, 0.1 * (1 + 0.2 * 16 / 160)])
    assert made.kl_controller.beta == pytest.approx(0.1 * 1.02**2)


def test_an_adaptive_coefficient_acts_in_the_loss_too():
    row = learner(target_kl=1e-4, kl_horizon=16.0).train(rows(8)).rows[1]
    assert row["kl_coef"] == pytest.approx(0.12)
    assert row["loss"] == pytest.approx(row["reduced_pg_loss"] + 0.12 * row["kl_loss"], abs=1e-6)


def test_the_entropy_coefficient_moves_as_the_entropy_asks():
    made = learner(use_adaptive_entropy=True, entropy_target=1e9, entropy_coef_delta=0.01, entropy_coef_max=0.015)
    found = made.train(rows(8)).rows
    assert [row["entropy_coef"] for row in found] == [0.01, 0.015]
    kl = [row["reduced_pg_loss"] + 0.1 * row["kl_loss"] for row in found]
    assert found[0]["loss"] == pytest.approx(kl[0], abs=1e-6)  # nothing is known of the entropy yet: no bonus
    assert found[1]["loss"] == pytest.approx(kl[1] - 0.01 * found[1]["entropy"], abs=1e-6)
    made = learner(use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=0.0, entropy_coef_min=0.49)
    found = made.train(rows(8)).rows
    assert [row["entropy_coef"] for row in found] == pytest.approx([0.495, 0.49])
    assert found[1]["loss"] == pytest.approx(found[1]["reduced_pg_loss"] + 0.1 * found[1]["kl_loss"], abs=1e-6)


def test_an_entropy_bonus_is_under_the_token_weights_of_the_loss():
    for mode in ("token-mean", "sequence-mean-token-sum-norm"):
        row = learner(entropy_coef=0.3, loss_agg_mode=mode).train(rows(4)).rows[0]
        parts = row["reduced_pg_loss"] + 0.1 * row["kl_loss"] - 0.3 * row["entropy"]
        assert row["loss"] == pytest.approx(parts, abs=1e-5)


def test_an_entropy_bonus_teaches_where_no_completion_has_an_advantage():
    config, data = GRPOConfig(num_generations=2, beta=0.0, entropy_coef=0.3), DataConfig(batch_size=2)
    equal = lambda completions, **_: [1.0] * len(completions)
    row = GRPOLearner(cluster(max_steps=1), config, equal, data=data).train(rows(2)).rows[0]
    assert row["loss"] == pytest.approx(-0.3 * row["entropy"], rel=1e-5) and row["entropy"] > 0


MOVING_REFERENCE = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
MOVING_NUMBERS = {
    "kl_type": "reward",
    "target_kl": 0.01,
    "kl_horizon": 50.0,
    "use_adaptive_entropy": True,
    "entropy_target": 2.0,
}


def test_the_reference_moves_at_the_end_of_every_so_many_steps(monkeypatch):
    made, moved = learner(**MOVING_REFERENCE), []
    note = lambda weights, mixup_alpha: moved.append(mixup_alpha)
    monkeypatch.setattr(made.cluster.worker("reference"), "load_weights", note)
    found = [made.sync_ref_model(step) or len(moved) for step in range(1, 6)]
    assert found == [0, 1, 1, 2, 2] and set(moved) == {0.5}


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path):
    def run(folder, steps, **options):
        c = cluster(
            reference=tiny_model(1), max_steps=steps, checkpoint_root_directory=str(tmp_path / folder), **options
        )
        made = learner(c, **MOVING_REFERENCE, **MOVING_NUMBERS)
        return made, made.train(rows(20))

    whole, straight = run("whole", 5)
    run("cut", 3)
    resumed, rest = run("cut", 5, resume="latest")
    for role in ("actor", "reference"):
        assert same(*(weights_of(made.cluster.worker(role).module) for made in (whole, resumed))), role
    assert whole.kl_controller.state() == resumed.kl_controller.state()
    named = ("kl", "loss", "kl_coef", "entropy_coef")
    assert [{n: row.get(n) for n in named} for row in straight.rows[3:]] == [
        {n: row.get(n) for n in named} for row in rest.rows
    ]


def test_a_learner_of_your_own_that_forgets_the_state_is_refused():
    class Forgetful(GRPOLearner):
        def state(self):
            return {}

    made, fixed = (
        Forgetful(cluster(reference=tiny_model(1), max_steps=1), GRPOConfig(**algo), length_reward)
        for algo in ({"use_adaptive_entropy": True}, {})
    )
    assert fixed.train(rows(8)).step == 1
    with pytest.raises(ConfigError, match=r"Forgetful.state\(\) leaves out .* super\(\)"):
        made.train(rows(4))


def test_an_entropy_that_is_no_longer_measured_is_refused():
    made = learner(use_adaptive_entropy=True)
    made.cluster.actor_trainer.set_metric_reductions({"entropy": "max"})
    with pytest.raises(ConfigError, match="needs the metric entropy/token_mean"):
        made.train(rows(4))


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_moves_towards_the_policy_every_so_many_steps():
    made = learner(cluster(reference=tiny_model(1), max_steps=3), **MOVING_REFERENCE)
    before, seen = weights_of(made.cluster.worker("reference").module), []

    class Watch(Observer):
        def on_step_end(self, run, step):
            seen.append([weights_of(made.cluster.worker(role).module) for role in ("reference", "actor")])

    made.observers.append(Watch())
    made.train(rows(12))
    assert same(seen[0][0], before) and same(seen[1][0], seen[2][0])
    middle = {name: torch.lerp(before[name], seen[1][1][name], 0.5) for name in before}
    assert gap(seen[1][0], middle) < 1e-6 < gap(seen[1][0], before)


def test_a_reference_that_is_a_view_of_the_actor_is_not_moved():
    c = cluster(reference=tiny_model(1))
    worker = c.worker("reference")
    worker.loaded = dataclasses.replace(worker.loaded, is_view=True)
    with pytest.raises(ConfigError, match="sync_ref_model=True moves the reference, which here is a view"):
        learner(c, sync_ref_model=True)


# ---- corrections and masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algo",
    [
        {"sampler_is": "sequence", "sampler_is_mode": "mask", "sampler_is_lower": 0.5},
        {"sampler_is": "geometric", "sampler_is_normalize": True},
        {"loss_masks": ("sampler-rejection",), "rejection_lower": 0.9, "rejection_threshold": 1.1},
        {"loss_masks": ("sampler-kl", "off-policy"), "kl_mask_threshold": 0.5},
        {"loss_masks": ("dppo-tv", "dppo-kl")},
    ],
    ids=lambda algo: next(iter(algo.values())),
)
def test_where_sampler_and_trainer_agree_no_correction_changes_anything(algo):
    plain, corrected = learner(use_rollout_logps=False), learner(use_rollout_logps=False, **algo)
    found = [made.train(rows(4)).rows[0] for made in (plain, corrected)]
    assert found[1]["pg_loss/kept"] == 1.0 and found[1]["sampling/ess"] == pytest.approx(1.0, abs=1e-4)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-5)
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_mean_of_normalised_weights_is_one_over_what_is_trained_of_a_step(level):
    made = learner(sampler_is=level, sampler_is_normalize=True)
    batch = assigned(made).batch
    place = torch.arange(batch.num_tokens)
    trained = (place % 3 > 0) & (batch.sequence > 0) & ((batch.sequence > 6) | (place % 2 > 0))  # none of the first
    near = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    far = batch.replace(mask=trained, sampler_logprobs=batch.sampler_logprobs + torch.where(trained, near, -0.6))
    scored = made.score(Step(index=1, batch=far.replace(old_logprobs=None))).batch
    x = LossInputs(
        sequence=scored.sequence, mask=scored.mask, logprobs=scored.old_logprobs, token_columns=scored.token_columns
    )
    (weights,) = (factor(x) for factor in made.objective.factors)
    counted = weights[trained]
    if level == "sequence":  # one weight for each, however many tokens
        counted = torch.stack([weights[trained & (batch.sequence == i)].mean() for i in range(1, 16)])
    assert counted.mean().item() == pytest.approx(1.0, abs=1e-5) and counted.std() > 0.1


def test_the_highest_entropies_are_those_of_a_whole_optimizer_step_however_it_is_cut():
    seen = []
    cut = {"train_micro_batch_size": 1, "mini_batch_size": 4}
    for options, choice in (({}, "top-entropy"), (cut, high_entropy_mask)):
        made = learner(cluster(reference=tiny_model(1), **options), loss_masks=(choice,), top_entropy_quantile=0.25)
        row = made.train(rows(4)).rows[0]
        assert row["pg_loss/kept"] == pytest.approx(0.25, abs=0.01)
        seen.append((row["loss"], row["grad_norm"], row["pg_loss/kept"]))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert made.planned_passes(4)["entropy"].startswith("runs: loss_masks=[top-entropy]")


def test_the_effective_sample_size_falls_as_the_policy_moves():
    row = learner(cluster(reference=tiny_model(1), lr=3e-2, max_steps=1), num_iterations=4).train(rows(4)).rows[0]
    assert 0 < row["sampling/ess"] < 0.99 and row["sampling/kl_to_inference"] > 0.01
    assert not {"sampling/weight", "sampling/weight_squared"} & row.keys()


def test_an_engine_without_logprobs_has_nothing_to_compare_with():
    with pytest.raises(ConfigError, match="the engine reports no logprobs to compare with"):
        learner(cluster(reference=tiny_model(1), engine=Silent), loss_masks=("off-policy",))
    row = learner(cluster(reference=tiny_model(1), engine=Silent)).train(rows(4)).rows[0]
    assert "sampling/sampling_logp_difference/mean" not in row


def test_without_the_engine_s_logprobs_the_sample_size_is_of_what_the_updates_have_moved():
    made = cluster(reference=tiny_model(1), engine=Silent, lr=3e-2, max_steps=1)
    row = learner(made, num_iterations=4, use_rollout_logps=False).train(rows(4)).rows[0]
    assert 0 < row["sampling/ess"] < 0.99 and row["sampling/kl_to_inference"] > 0.01 and row["sampling/kl_approx"] != 0
    once = learner(cluster(reference=tiny_model(1), engine=Silent, max_steps=1)).train(rows(4)).rows[0]
    assert once["sampling/ess"] == 1.0 and once["sampling/kl_approx"] == 0  # one update: the ratio is 1


def squared(d):
    return d.square()


@pytest.mark.parametrize("choice", [squared, f"{__name__}:squared"])
def test_the_estimate_of_the_kl_may_be_a_function(choice):
    row = learner(kl_loss_mode=choice).train(rows(4)).rows[0]
    assert row["kl"] == pytest.approx(2 * learner(kl_loss_mode="mse_kl").train(rows(4)).rows[0]["kl"], rel=1e-4)


@pytest.mark.parametrize(
    ("field", "word", "near"),
    [
        ("kl_loss_mode", "low_var", "low_var_kl"),
        ("loss_masks", ("top_entropy",), "top-entropy"),
        ("sampler_is", "geometry", "geometric"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(field, word, near):
    with pytest.raises(ConfigError, match=f"did you mean .*{near}"):
        learner(**{field: word})
