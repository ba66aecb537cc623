import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    END,
    cluster,
    completion,
    gap,
    length_reward,
    prompt,
    random_batch,
    rows,
    same,
    tiny_model,
    weights_of,
)

from whet.config import DataConfig, GRPOConfig, Mode, OptimConfig
from whet.errors import ConfigError, EngineError
from whet.learners.grpo import GRPOLearner
from whet.learners.policy import sequences_with_signal
from whet.learners.step import Step
from whet.ops import clipped_surrogate, drgrpo_advantages, grpo_advantages, token_weights
from whet.packing import plan_cache as plans_module
from whet.rollout.base import EngineCaps
from whet.rollout.hf import HFEngine
from whet.types import Group


def own_loss(x):
    """As good as whet's, but who knows what a user's own does with completions without an advantage."""
    return clipped_surrogate(x)


def learner(c=None, reward=length_reward, *, batch=4, shuffle=False, **algo):
    """A learner of tiny models; `algo` are fields of GRPOConfig."""
    config = GRPOConfig(**{"num_generations": 4, "beta": 0.0, **algo})
    data = DataConfig(batch_size=batch, shuffle=shuffle)
    return GRPOLearner(cluster() if c is None else c, config, reward, data=data)


def watch(monkeypatch, thing, name):
    """Notes the calls of a method, which still runs."""
    calls, method = [], getattr(thing, name)

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        return method(*args, **kwargs)

    monkeypatch.setattr(thing, name, noted)
    return calls


# ---- old logprobs --------------------------------------------------------------------------------------------------


def batches_of(monkeypatch, made, count=4):
    """The batches that `update` receives in a run of `made` over `count` rows."""
    seen = []
    update = made.update
    monkeypatch.setattr(made, "update", lambda step, mini: (seen.append(mini), update(step, mini))[1])
    made.train(rows(count))
    return seen


def test_the_engine_gives_up_its_memory_before_scores_are_computed(monkeypatch):
    made, held = learner(use_rollout_logps=False), []
    logprobs = made.cluster.actor.logprobs
    note = lambda *args, **kw: (held.append(made.cluster.engine.stats().kv_bytes), logprobs(*args, **kw))[1]
    monkeypatch.setattr(made.cluster.actor, "logprobs", note)
    made.train(rows(4))
    assert held == [0]


def test_one_update_after_each_rollout_needs_no_old_logprobs(monkeypatch):
    made = learner()
    calls = watch(monkeypatch, made.cluster.actor, "logprobs")
    (mini,) = batches_of(monkeypatch, made)
    assert mini.old_logprobs is None and not calls
    assert made.num_updates(4) == 1


@pytest.mark.parametrize(
    ("training", "algo", "updates"), [({"mini_batch_size": 2}, {}, 2), ({}, {"num_iterations": 3}, 3)]
)
def test_several_updates_take_the_samplers_logprobs_as_old_ones(monkeypatch, training, algo, updates):
    made = learner(cluster(**training), **algo)
    calls = watch(monkeypatch, made.cluster.actor, "logprobs")
    minis = batches_of(monkeypatch, made)
    assert len(minis) == updates == made.num_updates(4) and not calls
    assert all(torch.equal(m.old_logprobs, m.sampler_logprobs) for m in minis)


def test_old_logprobs_are_those_of_the_start_of_each_step_where_the_trainer_computes_them(monkeypatch):
    made = learner(cluster(max_steps=2), batch=2, use_rollout_logps=False, num_iterations=2)
    calls = watch(monkeypatch, made.cluster.actor, "logprobs")
    minis = batches_of(monkeypatch, made)
    assert len(calls) == 2 and len(minis) == 4  # one pass for each step, not for each update
    for mini in minis:  # of the policy that sampled, in the second step too: those of step 0 would be far off
        torch.testing.assert_close(mini.old_logprobs, mini.sampler_logprobs, atol=1e-4, rtol=0)
    assert torch.equal(minis[0].old_logprobs, minis[1].old_logprobs)
    now = made.cluster.actor.logprobs(minis[2]).logprobs
    assert (now - minis[2].old_logprobs).abs().max() > 1e-2


class Silent(HFEngine):
    """An engine that does not say how likely its tokens were."""

    caps = EngineCaps(logprobs=False, shared_weights=True)


class Apart(HFEngine):
    """An engine with weights of its own."""

    caps = EngineCaps(shared_weights=False, keyed_draws=True)

    def update_weights(self, version, weights=None):
        super().update_weights(version)


def test_an_engine_with_its_own_weights_gives_the_old_logprobs_of_a_single_update_too(monkeypatch):
    (mini,) = batches_of(monkeypatch, learner(cluster(engine=Apart)))
    assert torch.equal(mini.old_logprobs, mini.sampler_logprobs)


def test_a_loss_without_a_ratio_warns_of_an_engine_with_its_own_weights(caplog):
    learner(cluster(engine=Apart), policy_loss_fn="reinforce", sampler_is="token")
    learner(cluster(), policy_loss_fn="reinforce")
    assert "has no ratio" not in caplog.text
    learner(cluster(engine=Apart), policy_loss_fn="reinforce")
    assert "policy_loss_fn='reinforce' has no ratio that corrects for it" in caplog.text


def stale(batch, token=0):
    """The same, one token drawn from the policy before the current one."""
    versions = batch.versions.clone()
    versions[token] -= 1
    return batch.replace(versions=versions)


def sampled(made):
    """The batch of a first step at policy version 1, before it is scored."""
    return sampled_step(made).batch


def sampled_step(made):
    """That step: with its rewards and its batch."""
    made.cluster.sync_weights()
    encode = made.cluster.encoder()
    prompts = [encode(row, i) for i, row in enumerate(rows(4))]
    return made.batch(made.reward(made.sample(Step(index=1, prompts=prompts))))


def score(made, batch):
    return made.score(Step(index=1, batch=batch)).batch


def test_one_stale_token_needs_the_old_logprobs_of_its_policy_and_a_masked_one_does_not():
    made = learner()
    step = sampled_step(made)
    batch = step.batch
    assert set(batch.versions.tolist()) == {1} and score(made, batch).old_logprobs is None
    other = stale(batch)
    other.sampler_logprobs[0] -= 1.0  # the older policy found it e times less likely
    scored = made.assign_advantages(made.score(step.replace(batch=other))).batch
    assert torch.equal(scored.old_logprobs, other.sampler_logprobs)
    every = scored.replace(weights=torch.ones(scored.num_tokens), advantages=torch.ones(scored.num_tokens))
    found = made.cluster.actor.evaluate(every, made.loss, reductions={"is_ratio": {"most": "max"}})
    assert found["most"].value == pytest.approx(np.e, rel=1e-4)
    mask = batch.mask.clone()
    mask[0] = False
    assert score(made, other.replace(mask=mask)).old_logprobs is None


def test_stale_tokens_without_logprobs_are_refused_with_the_way_out():
    made = learner(cluster(engine=Silent))
    batch = sampled(made)
    assert score(made, batch).old_logprobs is None
    with pytest.raises(
        EngineError, match=r"tokens from the policy versions 0, the actor is at 1.*use_rollout_logps=False"
    ):
        score(made, stale(batch))
    scored = score(learner(made.cluster, use_rollout_logps=False), stale(batch))
    assert scored.old_logprobs is not None


def test_sampler_and_trainer_are_compared_before_the_policy_moves():
    row = learner(cluster(mini_batch_size=1, lr=5e-2)).train(rows(4)).rows[0]
    assert row["is_ratio/max"] > 1.1 and row["sampling/sampling_logp_difference/max"] < 1e-3


def test_off_policy_updates_without_any_old_logprobs_are_refused_with_the_way_out(monkeypatch):
    with pytest.raises(EngineError, match=r"old_logprobs are not available for off-policy RL.*use_rollout_logps"):
        learner(cluster(engine=Silent), num_iterations=2).train(rows(4))
    assert learner(cluster(engine=Silent)).train(rows(4)).step == 1
    made = learner(cluster(engine=Silent), num_iterations=2, use_rollout_logps=False)
    assert all(m.old_logprobs is not None for m in batches_of(monkeypatch, made))


def test_sampler_correction_compares_the_trainers_logprobs_with_the_samplers(monkeypatch):
    made = learner(sampler_is="token", sampler_is_threshold=1.5)
    (mini,) = batches_of(monkeypatch, made)
    assert mini.old_logprobs is not None
    logged = learner(sampler_is="token", sampler_is_threshold=1.5).train(rows(4)).rows[0]
    assert logged["sampler_is/weight_mean"] == pytest.approx(1.0, abs=1e-5)  # one policy, one code path
    assert logged["sampler_is/weight_min"] == pytest.approx(1.0, abs=1e-4)
    weights = mini.replace(weights=torch.ones(mini.num_tokens))
    far = weights.replace(sampler_logprobs=mini.old_logprobs - 1.0)  # e times as likely: truncated at 1.5
    near = weights.replace(sampler_logprobs=mini.old_logprobs)
    losses = [made.cluster.actor.evaluate(b, made.loss)["loss"].value for b in (near, far)]
    assert losses[1] == pytest.approx(1.5 * losses[0], rel=1e-5)


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_is_read_only_where_the_divergence_counts(monkeypatch):
    for algo, passes in (({"beta": 0.0}, 0), ({"beta": 0.1}, 1), ({"force_compute_kl": True}, 1)):
        made = learner(cluster(reference=tiny_model(1)), **algo)
        calls = watch(monkeypatch, made.cluster.worker("reference"), "logprobs")
        run = made.train(rows(4))
        assert len(calls) == passes, algo
        assert ("kl" in run.rows[0]) == bool(passes)


def test_a_missing_reference_is_refused_where_it_is_needed():
    for algo in ({"beta": 0.1}, {"force_compute_kl": True}):
        with pytest.raises(ConfigError, match=r"RLCluster\(reference=\.\.\.\)"):
            learner(**algo)


def test_the_divergence_is_a_metric_only_or_part_of_the_loss():
    plain, metric, loss = (
        learner(cluster(reference=tiny_model(1)), **algo)
        for algo in ({}, {"force_compute_kl": True}, {"beta": 0.5, "kl_loss_mode": "low_var_kl"})
    )
    runs = [made.train(rows(4)) for made in (plain, metric, loss)]
    weights = [weights_of(made.cluster.actor.module) for made in (plain, metric, loss)]
    assert gap(weights[0], weights[1]) < 1e-4  # the groups without signal are run here: another order of sums
    assert gap(weights[0], weights[2]) > 1e-3
    for run, beta in ((runs[1], 0.0), (runs[2], 0.5)):
        row = run.rows[0]
        assert row["loss"] == pytest.approx(row["reduced_pg_loss"] + beta * row["kl_loss"], abs=1e-7)


def test_a_run_notes_which_passes_it_leaves_out_and_why(tmp_path, caplog):
    with caplog.at_level("INFO", logger="whet"):
        learner(cluster(run_dir=str(tmp_path))).train(rows(4))
    noted = json.loads((tmp_path / "environment.json").read_text())["passes"]
    assert noted["old_logprobs"].startswith("skipped: one update follows each rollout")
    assert noted["ref_logprobs"] == "skipped: beta is 0"
    assert noted["completions with advantage 0"].startswith("skipped: they have no gradient")
    said = "skipped, since not needed: old_logprobs, ref_logprobs, completions with advantage 0 (see environment.json)"
    assert said in caplog.messages and not any("skipped:" in message for message in caplog.messages)
    made = learner(cluster(reference=tiny_model(1), mini_batch_size=1), beta=0.1)
    passes = ("old_logprobs", "ref_logprobs", "completions with advantage 0")
    assert [made.planned_passes(4)[name].split(":")[0] for name in passes] == ["skipped", "runs", "run"]
    assert made.planned_passes(4)["old_logprobs"] == "skipped: the sampler's are used"
    assert learner(use_rollout_logps=False).planned_passes(4)["old_logprobs"].startswith("runs")
    assert "truncated completions" not in noted
    masking = learner(mask_truncated_completions=True)
    assert masking.planned_passes(4)["truncated completions"].startswith("skipped: masked")


# ---- groups without signal -----------------------------------------------------------------------------------------


def half_flat(prompts, completions, **_):
    """The same for all completions of some prompts, different ones for others."""
    return [1.0 if prompt < "2" else length_reward([text])[0] for prompt, text in zip(prompts, completions)]


@pytest.mark.parametrize("mode", ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale"])
def test_groups_without_signal_are_not_run_and_count_all_the_same(monkeypatch, mode):
    skipping, running = (learner(cluster(lr=1e-3), half_flat, loss_agg_mode=mode) for _ in range(2))
    running.skips_without_signal = False
    calls = watch(monkeypatch, skipping.cluster.actor, "forward_backward")
    steps = [made.train(rows(4)).rows[0] for made in (skipping, running)]
    (batch,) = [args[0] for args, _ in calls]
    assert steps[0]["skipped/sequences"] == 16 - batch.num_sequences and steps[1]["skipped/sequences"] == 0
    assert steps[0]["skipped/tokens"] == steps[0]["completions/tokens"] - batch.num_tokens
    assert 4 <= batch.num_sequences <= 8  # of 16
    assert (batch.advantages != 0).all()
    assert gap(weights_of(skipping.cluster.actor.module), weights_of(running.cluster.actor.module)) < 1e-6
    # weights made after the groups left would be twice as large in the first mode
    assert batch.weights.sum() < 0.9 or mode == "sequence-mean-token-scale"


def test_a_step_without_any_signal_is_a_step_of_zero_gradients():
    made = learner(cluster(max_steps=1), lambda completions, **_: [0.9] * len(completions))
    before = weights_of(made.cluster.actor.module)
    run = made.train(rows(4))
    assert run.rows[0]["grad_norm"] == 0.0 and run.rows[0]["advantage/nonzero_frac"] == 0.0
    assert same(weights_of(made.cluster.actor.module), before)
    assert run.rows[0]["frac_reward_zero_std"] == 1.0 and run.rows[0]["optim/updates"] == 1.0


def test_groups_without_signal_are_run_where_another_term_needs_them(monkeypatch):
    made = learner(cluster(reference=tiny_model(1)), half_flat, beta=0.1)
    calls = watch(monkeypatch, made.cluster.actor, "forward_backward")
    made.train(rows(4))
    assert calls[0][0][0].num_sequences == 16
    mine = learner(policy_loss_fn=own_loss)  # who knows what a user's own loss does with them
    assert not mine.skips_without_signal


def test_a_sequence_has_signal_where_a_token_that_counts_has_an_advantage_of_either_sign():
    batch = random_batch((3, [2, 2, 2, 2, 2]))
    batch = batch.replace(
        advantages=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, -1.0, 2.0, 2.0, torch.nan, 1.0]),
        mask=torch.tensor([True, True, True, True, True, True, False, False, False, True]),
    )
    assert sequences_with_signal(batch).tolist() == [
        0,
        2,
        4,
    ]  # what is not a number where nothing is trained takes none away


# ---- what is not trained -------------------------------------------------------------------------------------------


def test_completions_that_reward_functions_say_nothing_of_get_advantage_0(monkeypatch):
    def partly(completions, **_):
        return [None if i % 4 == 0 else float(i) for i in range(len(completions))]

    made, totals = learner(reward=partly), []
    assign = made.assign_advantages
    monkeypatch.setattr(made, "assign_advantages", lambda step: (totals.append(step.rewards.total), assign(step))[1])
    (mini,) = batches_of(monkeypatch, made)
    firsts = mini.advantages[mini.ends - mini.lengths]
    assert (firsts[0::4] == 0).all() and np.isnan(totals[0][0::4]).all()
    torch.testing.assert_close(firsts[1:4], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0)  # std of 1, 2, 3 is 1


def test_truncated_completions_are_left_out_where_asked(monkeypatch):
    ends = {"eos_tokens": tuple(range(225, 264))}
    made, plain = (learner(cluster(rollout=ends), mask_truncated_completions=mask) for mask in (True, False))
    (mini,), (all_,) = batches_of(monkeypatch, made), batches_of(monkeypatch, plain)
    cut = [int(last) not in ends["eos_tokens"] for last in mini.tokens[mini.ends - 1]]
    assert 0 < sum(cut) < 16
    for i, gone in enumerate(cut):
        assert mini.mask[mini.sequence == i].any().item() is not gone
    assert all_.mask.all()
    assert not same(weights_of(made.cluster.actor.module), weights_of(plain.cluster.actor.module))


def test_failed_completions_stay_left_out_where_truncated_ones_are_too():
    made, failed = learner(mask_truncated_completions=True), replace(completion([7], 2, finish="error"), messages=())
    each = (completion([5, 5]), completion([6, 6], 1, finish="length"), failed)
    groups = [Group(prompt=prompt([5]), completions=each)]
    step = Step(index=1, groups=groups, rewards=made.reward_manager(groups, [["a", "b", "c"]]))
    assert made.batch(step).batch.mask.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("algo", [{"beta": 0.1}, {"policy_loss_fn": own_loss}], ids=["kl", "own loss"])
def test_completions_without_a_trained_token_are_not_run_whatever_the_loss(monkeypatch, algo):
    ends = {"eos_tokens": tuple(range(225, 264))}
    sgd = OptimConfig(name="sgd", lr=1.0)
    leaving, running = (
        learner(
            cluster(reference=tiny_model(1), rollout=ends, actor_optimizer=sgd), mask_truncated_completions=True, **algo
        )
        for _ in range(2)
    )
    calls = [watch(monkeypatch, made.cluster.actor, "forward_backward") for made in (leaving, running)]
    found = leaving.train(rows(4)).rows[0]
    monkeypatch.setattr(
        "whet.learners.policy.sequences_with_trained_tokens", lambda batch: torch.arange(batch.num_sequences)
    )
    want = running.train(rows(4)).rows[0]
    part, whole = (args[0] for ((args, _),) in calls)
    assert 0 < part.num_sequences < whole.num_sequences == 16
    assert found["skipped/sequences"] == 16 - part.num_sequences and want["skipped/sequences"] == 0
    assert found["skipped/tokens"] == whole.num_tokens - part.num_tokens > 0
    assert torch.equal(part.weights, whole.weights[whole.mask])
    after = [weights_of(made.cluster.actor.module) for made in (leaving, running)]
    assert gap(after[0], after[1]) < 1e-5 < gap(after[0], weights_of(tiny_model()))
    for name in ("loss", "grad_norm", "entropy", "is_ratio/mean"):
        assert found.get(name) == pytest.approx(want.get(name), abs=1e-5, rel=1e-5), name


def test_a_step_whose_completions_are_all_masked_out_is_a_step_of_zero_gradients():
    never = {"forbidden_tokens": (END,)}
    made = learner(cluster(reference=tiny_model(1), rollout=never), beta=0.1, mask_truncated_completions=True)
    row = made.train(rows(4)).rows[0]
    assert row["grad_norm"] == 0.0 and row["skipped/sequences"] == 16.0
    assert same(weights_of(made.cluster.actor.module), weights_of(tiny_model()))


# ---- names ---------------------------------------------------------------------------------------------------------


def half_advantage(rewards, group_ids):
    return grpo_advantages(rewards, group_ids) / 2


def by_hand(mask, unit_of, norm, num_units):
    return token_weights(mask, unit_of, "token-mean")


@pytest.mark.parametrize("field", ["advantage_estimator", "policy_loss_fn", "loss_agg_mode"])
def test_parts_are_names_functions_or_references(field):
    choices = {
        "advantage_estimator": ("drgrpo", drgrpo_advantages, "whet.ops:drgrpo_advantages"),
        "policy_loss_fn": ("grpo", clipped_surrogate, "whet.ops:clipped_surrogate"),
        "loss_agg_mode": ("token-mean", by_hand, f"{__name__}:by_hand"),
    }[field]
    weights = []
    for choice in choices:
        made = learner(cluster(lr=1e-3), **{field: choice})
        made.train(rows(4))
        weights.append(weights_of(made.cluster.actor.module))
    assert gap(weights[0], weights[1]) < 1e-6 and gap(weights[0], weights[2]) < 1e-6


@pytest.mark.parametrize(
    ("field", "word", "near"),
    [
        ("advantage_estimator", "drgpro", "drgrpo"),
        ("policy_loss_fn", "gspo_token", "gspo-token"),
        ("loss_agg_mode", "token_mean", "token-mean"),
        ("reward_manager", "sequence", "sequence-level"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_before_anything_is_sampled(field, word, near):
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        learner(**{field: word})


def test_an_estimator_decides_the_gradient():
    grpo, halved = learner(cluster(lr=1e-3)), learner(cluster(lr=1e-3), advantage_estimator=half_advantage)
    runs = [made.train(rows(4)) for made in (grpo, halved)]
    assert runs[1].rows[0]["grad_norm"] == pytest.approx(runs[0].rows[0]["grad_norm"] / 2, rel=1e-4)


def test_clip_settings_reach_the_loss():
    made = learner(cluster(lr=3e-2), num_iterations=4, epsilon=0.0, epsilon_high=1e9, epsilon_c=3.0)
    row = made.train(rows(4)).rows[0]
    assert row["clip_ratio/high_mean"] == 0.0 and row["clip_ratio/low_mean"] > 0.0
    assert "pg_clipfrac_lower" in row


def test_the_ratio_of_gspo_is_one_for_a_whole_sequence():
    seen = []
    for algo in ({"policy_loss_fn": "gspo-token"}, {}):
        made = learner(cluster(lr=1e-3), num_iterations=2, **algo)
        made.train(rows(4))
        seen.append(weights_of(made.cluster.actor.module))
    assert gap(seen[0], seen[1]) > 1e-5


def test_the_scale_of_dr_grpo_is_the_longest_completion_unless_given():
    made = learner(loss_agg_mode="sequence-mean-token-scale")
    assert made.cluster.actor_trainer.loss_agg_norm == 8.0
    made = learner(loss_agg_mode="sequence-mean-token-scale", loss_agg_norm=3.0)
    assert made.cluster.actor_trainer.loss_agg_norm == 3.0


# ---- micro-batches -------------------------------------------------------------------------------------------------


def test_a_step_is_the_same_however_its_passes_are_cut(monkeypatch):
    settings = (
        {},
        {"mini_batch_size": 4, "train_micro_batch_size": 1},
        {"mini_batch_size": 4, "train_micro_batch_size": 2, "compute_logps_micro_batch_size": 1},
        {"mini_batch_size": 4, "train_micro_batch_size": 4, "rollout_micro_batch_size": 2},
        {"max_tokens_per_microbatch": 20},
    )
    found, rewards, passes = [], [], []
    for training in settings:
        made = learner(
            cluster(reference=tiny_model(1), rollout={"max_prompt_length": 12}, lr=1e-3, max_steps=2, **training),
            beta=0.05,
        )
        calls = watch(monkeypatch, made.cluster.actor, "micro_batches")
        run = made.train(rows(8))
        passes.append(len(made.cluster.actor.micro_batches(*calls[0][0])))
        found.append(weights_of(made.cluster.actor.module))
        rewards.append([row["reward"] for row in run.rows])
    assert rewards.count(rewards[0]) == len(settings)  # the same draws
    assert passes[0] == 1 and passes[1] == 4 and passes[2] == 2 and passes[3] == 1 and passes[4] > 4
    assert max(gap(found[0], other) for other in found[1:]) < 1e-5


@pytest.mark.parametrize(
    ("training", "advantages_of_0", "plans"),
    [
        ({}, False, 1),  # scoring by actor and reference, and both updates
        ({}, True, 2),  # an update leaves sequences out, the next one the same
        ({"compute_logps_micro_batch_size": 1}, False, 2),  # scoring within another limit
        ({"mini_batch_size": 2}, False, 5),  # scoring, and every mini-batch of both iterations
    ],
)
def test_a_batch_is_planned_once_for_the_passes_that_run_it_within_the_same_limits(
    monkeypatch, training, advantages_of_0, plans
):
    made = learner(
        cluster(reference=tiny_model(1), max_steps=1, **training),
        beta=0.05,
        use_rollout_logps=False,
        num_iterations=2,
    )
    if advantages_of_0:
        monkeypatch.setattr(
            "whet.learners.policy.sequences_with_trained_tokens", lambda batch: torch.arange(2, batch.num_sequences)
        )
    calls = watch(monkeypatch, plans_module, "plan_micro_batches")
    made.train(rows(4))
    assert len(calls) == plans


# ---- metrics -------------------------------------------------------------------------------------------------------

TUNIX = """
    loss grad_norm learning_rate entropy kl kl_loss ppo_kl pg_clipfrac pg_clipfrac_lower is_ratio/mean is_ratio/max
    is_ratio/min log_ratio/abs_mean reduced_pg_loss unreduced_pg_loss pg_loss/unclipped_mean pg_loss/clipped_mean
    advantage/abs_mean advantage/nonzero_frac
    sampler_is/weight_mean sampler_is/weight_min sampler_is/weight_max sampler_is/frac_clipped_at_threshold
    sampler_trainer/logp_diff_mean sampler_trainer/logp_diff_max sampler_trainer/prob_diff_mean
    sampler_trainer/prob_diff_max sampler_trainer/probs_pearson_corr
    rewards/length_reward rewards/advantage/mean rewards/advantage/max rewards/advantage/min rewards/advantage/std
    completions/mean_length completions/max_length completions/min_length perf/global_step_time
""".split()
TRL = """
    loss grad_norm learning_rate epoch num_tokens completions/mean_length completions/min_length completions/max_length
    completions/mean_terminated_length completions/min_terminated_length completions/max_terminated_length
    completions/clipped_ratio rewards/length_reward/mean rewards/length_reward/std reward reward_std
    frac_reward_zero_std entropy kl clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max
    clip_ratio/region_mean sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
""".split()
OURS = "optim/skipped optim/updates perf/tokens_per_second time/rollout time/rewards time/update time/step".split()
ELSEWHERE = {
    "advantage/max": "rewards/advantage/max",  # Tunix logs both
    "advantage/min": "rewards/advantage/min",
    "step_time": "time/step",  # what depends on the clock stands under time/ and perf/
    "sampling/importance_sampling_ratio/mean": "sampler_is/weight_mean",
    "sampling/importance_sampling_ratio/min": "sampler_is/weight_min",
    "sampling/importance_sampling_ratio/max": "sampler_is/weight_max",
    "generation/completions/mean_length": "completions/mean_length",
    "generation/prompts/mean_length": "prompts/mean_length",
}
"""TRL's and Tunix's names of what has another name here."""


def test_every_metric_that_users_of_grpo_expect_is_in_the_rows():
    ends = {"max_tokens_to_generate": 30, "eos_tokens": tuple(range(200, 264))}
    c = cluster(reference=tiny_model(1), rollout=ends, mini_batch_size=2)
    made = learner(c, beta=0.1, sampler_is="token", epsilon_c=3.0)
    row = made.train(rows(4)).rows[0]
    missing = [name for name in [*TUNIX, *TRL, *OURS, *ELSEWHERE.values()] if name not in row]
    assert not missing
    assert row["loss"] == pytest.approx(row["reduced_pg_loss"] + 0.1 * row["kl_loss"], abs=1e-6)


def test_means_over_tokens_do_not_depend_on_the_split():
    short = {"max_prompt_length": 12}
    whole, cut = (learner(cluster(rollout=short, lr=0.0, max_tokens_per_microbatch=n)) for n in (None, 20))
    a, b = (made.train(rows(4)).rows[0] for made in (whole, cut))
    clock = ("time/", "perf/")
    assert {n for n in a if not n.startswith(clock)} == {n for n in b if not n.startswith(clock)}
    for name, value in a.items():
        if not name.startswith((*clock, "mode")):
            assert b[name] == pytest.approx(value, abs=2e-5, nan_ok=True), name


def test_the_metrics_of_the_loss_can_be_chosen_before_the_learner_is_made():
    c = cluster()
    c.actor_trainer.set_metric_reductions({"ppo_kl": ("mean", "max"), "entropy": {"H": "min"}})
    row = learner(c).train(rows(4)).rows[0]
    assert {"ppo_kl/mean", "ppo_kl/max", "H"} <= row.keys() and "entropy" not in row


def test_metric_functions_see_the_samples_and_land_in_the_row():
    seen = {}

    def mine(prompts, completions, advantages, rewards, answer, **_):
        seen.update(prompts=prompts, completions=completions, advantages=advantages, rewards=rewards, answer=answer)
        return {"mine/best": (max(rewards), np.max)}

    config = GRPOConfig(num_generations=4, beta=0.0)
    made = GRPOLearner(
        cluster(), config, length_reward, metric_fns=[mine], data=DataConfig(batch_size=4, shuffle=False)
    )
    run = made.train(rows(4, answer=[1, 2, 3, 4]))
    assert seen["answer"] == [a for a in (1, 2, 3, 4) for _ in range(4)]
    assert seen["prompts"][::4] == [f"{i}+1=" for i in range(4)]
    assert seen["rewards"] == length_reward(seen["completions"])
    want = grpo_advantages(torch.tensor(seen["rewards"]), torch.arange(4).repeat_interleave(4))
    torch.testing.assert_close(torch.tensor(seen["advantages"]), want)
    assert run.rows[0]["mine/best"] == max(seen["rewards"])


def test_metric_functions_see_the_mean_advantage_of_trained_tokens():
    class Ramp(GRPOLearner):
        """Advantages per token, 0, 1, 2 ... within each completion, the first token masked out."""

        def assign_advantages(self, step):
            step = super().assign_advantages(step)
            batch = step.batch
            place = torch.arange(batch.num_tokens) - batch.starts.index_select(0, batch.sequence)
            lengths.extend(batch.lengths.tolist())
            return step.replace(batch=batch.replace(advantages=place.float(), mask=batch.mask & (place > 0)))

    def mine(advantages):
        seen.extend(advantages)
        return {}

    lengths, seen = [], []
    data = DataConfig(batch_size=2, shuffle=False)
    c = cluster(rollout={"forbidden_tokens": (END,)})  # two tokens at least
    Ramp(c, GRPOConfig(beta=0.0), length_reward, metric_fns=[mine], data=data).train(rows(2))
    assert seen == [n / 2 for n in lengths]  # the mean of 1 ... n - 1


def test_reward_functions_see_columns_ids_mode_and_fields_of_the_algorithm():
    seen = []

    def reward(prompts, completions, completion_ids, answer, trajectory_ids, mode, num_generations):
        seen.append((mode, num_generations, trajectory_ids, answer, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    c = cluster(rollout={"eval": {"temperature": 0.0}})
    made = learner(c, reward, batch=2)
    made.train(rows(2, answer=[5, 6]), rows(1, answer=[7]))
    assert [Mode(mode) for mode, *_ in seen] == [Mode.EVAL, Mode.TRAIN, Mode.EVAL]
    _, g, ids, answer, tokens = seen[1]
    assert g == 4 and answer == [5] * 4 + [6] * 4
    assert ids == [f"{row}_{i}" for row in (0, 1) for i in range(4)]
    assert all(END not in t[:-1] for t in tokens)


def test_weights_of_several_reward_functions():
    def one(completions, **_):
        return [1.0] * len(completions)

    made = GRPOLearner(
        cluster(),
        GRPOConfig(beta=0.0, reward_weights=(2.0, 0.5)),
        [one, functools.partial(one)],
        data=DataConfig(batch_size=2),
    )
    row = made.train(rows(2)).rows[0]
    assert row["reward"] == 2.5 and row["rewards/one"] == row["rewards/one_2"] == 1.0
