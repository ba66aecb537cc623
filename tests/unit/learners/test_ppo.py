import copy
import json

import pytest
import torch
from helpers import cluster, completion, length_reward, prompt, rows, same, tiny_model, weights_of

from whet.config import DataConfig, GRPOConfig, Mode, OptimConfig, PPOConfig, Role, RoleConfig, RolloutConfig
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.step import Step
from whet.ops import generalized_advantages, masked_whiten
from whet.types import Group


def models(*, critic_lr=3e-3, **fields):
    """A cluster of tiny models with a critic of its own."""
    return cluster(**{"critic": tiny_model(2), "critic_optimizer": OptimConfig(lr=critic_lr), **fields})


def ppo(c=None, reward=length_reward, *, batch=4, **algo):
    """A learner of tiny models; `algo` are fields of PPOConfig."""
    data = DataConfig(batch_size=batch, shuffle=False)
    return PPOLearner(models() if c is None else c, PPOConfig(**{"beta": 0.0, **algo}), reward, data=data)


def minibatches_of(monkeypatch, made, count=4):
    """The mini-batches of a run of `made` over `count` rows, and the run."""
    seen, update = [], made.update
    monkeypatch.setattr(made, "update", lambda step, mini: (seen.append(mini), update(step, mini))[1])
    return seen, made.train(rows(count))


def totals_of(monkeypatch, made):
    """The totals of the rewards of each step of `made`."""
    found, assign = [], made.assign_advantages
    note = lambda step: (found.append(torch.from_numpy(step.rewards.total)), assign(step))[1]
    monkeypatch.setattr(made, "assign_advantages", note)
    return found


def moved(made, before):
    return {role.value: not same(before[role], weights_of(w.module)) for role, w in made.cluster.workers.items()}


def all_weights(made):
    return {role: weights_of(w.module) for role, w in made.cluster.workers.items()}


# ---- the stages ----------------------------------------------------------------------------------------------------


def test_it_trains_actor_and_critic_and_nothing_else():
    made = ppo(models(reference=tiny_model(0)), beta=0.1)
    before = all_weights(made)
    run = made.train(rows(8))
    assert run.step == 2 and moved(made, before) == {"actor": True, "reference": False, "critic": True}


def test_a_critic_of_the_actors_own_module_has_a_backbone_of_its_own():
    actor = tiny_model()
    made = ppo(models(actor=actor, critic=actor, lr=0.0))
    ours, theirs = (dict(made.cluster.worker(role).module.named_parameters()) for role in ("actor", "critic"))
    assert not {p.data_ptr() for p in ours.values()} & {p.data_ptr() for p in theirs.values()}
    before = all_weights(made)
    made.train(rows(8))  # the first update moves the head alone, which is 0
    assert moved(made, before) == {"actor": False, "critic": True}


def test_a_critic_learns_what_the_rewards_are():
    made = ppo(
        models(critic_lr=1e-2, lr=0.0),
        lambda completions: [3.0] * len(completions),
        gae_lambda=1.0,
        clip_range_value=100.0,
    )
    losses = [row["critic/vf_loss"] for row in made.train(rows(40)).rows]
    assert losses[0] == pytest.approx(4.5) and losses[-1] < 0.5  # 3² / 2: a fresh head says 0


def test_advantages_and_returns_are_those_of_values_rewards_and_kl(monkeypatch):
    made = ppo(models(reference=tiny_model(1)), beta=0.1, kl_loss_mode="kl", gamma=0.9, gae_lambda=0.7)
    torch.nn.init.normal_(made.cluster.worker(Role.CRITIC).loaded.score_head.weight)
    totals = totals_of(monkeypatch, made)
    (mini,), _ = minibatches_of(monkeypatch, made)
    assert mini.values.abs().min() > 0
    per_token = -0.1 * (mini.sampler_logprobs - mini.ref_logprobs)
    torch.testing.assert_close(mini.token_rewards, per_token)
    for j in range(len(mini.group_of)):  # one trajectory at a time
        at = (mini.trajectory == j).nonzero().flatten()
        r = per_token[at].double()
        r[-1] += totals[0][j]
        v = [*mini.values[at].double().tolist(), 0.0]
        after, found = 0.0, []
        for t in reversed(range(len(at))):
            after = float(r[t]) + 0.9 * v[t + 1] - v[t] + 0.9 * 0.7 * after
            found.append(after + v[t])
        assert mini.returns[at].tolist() == pytest.approx(found[::-1], rel=1e-5, abs=1e-5)
    torch.testing.assert_close(mini.advantages, masked_whiten(mini.returns - mini.values, mini.mask), atol=1e-5, rtol=0)


def test_values_are_of_the_state_before_each_token_and_masked_tokens_are_no_steps():
    made = ppo()
    torch.nn.init.normal_(made.cluster.worker(Role.CRITIC).loaded.score_head.weight)
    done = completion([7, 8, 9, 256], version=[0, -1, -1, 0])  # two tokens of a tool
    step = made.reward(Step(index=1, groups=[Group(prompt=prompt("1+1="), completions=(done,))]))
    scored = made.score(made.batch(step))
    values = scored.batch.values
    batch = made.assign_advantages(scored).batch
    reward = float(step.rewards.total[0])
    _, expected = generalized_advantages(
        torch.tensor([reward]), values[[0, 3]], torch.tensor([True, True]), torch.zeros(2, dtype=torch.long)
    )
    assert batch.returns[batch.mask].tolist() == pytest.approx(expected.tolist())
    other = done.tokens.copy()
    other[3] = 70
    again = completion(other.tolist(), version=[0, -1, -1, 0])
    step = made.reward(Step(index=1, groups=[Group(prompt=prompt("1+1="), completions=(again,))]))
    assert torch.equal(made.score(made.batch(step)).batch.values, values)  # no value has seen its own token


def test_a_completion_without_a_reward_trains_neither(monkeypatch):
    made = ppo(reward=lambda completions: [None, 1.0, None, 0.5])
    totals = totals_of(monkeypatch, made)
    (mini,), run = minibatches_of(monkeypatch, made)
    none = totals[0].isnan().index_select(0, mini.trajectory)
    assert not mini.advantages[none].any() and mini.advantages[~none].any()
    count = float((~none).sum())
    v, r = mini.values[~none], mini.returns[~none]
    assert run.rows[0]["critic/vf_loss"] == pytest.approx(float((v - r).square().sum() / 2 / count), rel=1e-5)


def test_sequences_without_advantage_are_run_for_the_critic():
    made = ppo(reward=lambda completions: [1.0] * len(completions), gae_lambda=1.0, num_generations=2)
    before = all_weights(made)
    run = made.train(rows(4))  # all rewards equal and all values 0: whitened to 0
    assert moved(made, before) == {"actor": False, "critic": True}
    assert run.rows[0]["critic/vf_loss"] == pytest.approx(0.5) and run.rows[0]["skipped/sequences"] == 8


@pytest.mark.parametrize("estimator", ["grpo", "rloo", lambda x: x.need("values") + 1])
def test_the_critic_learns_whatever_the_estimator(estimator):
    made = ppo(advantage_estimator=estimator, num_generations=4)
    before = all_weights(made)
    assert made.train(rows(4)).step == 1 and moved(made, before) == {"actor": True, "critic": True}


def test_iterations_and_minibatches_update_both(monkeypatch):
    made = ppo(models(mini_batch_size=2), num_iterations=3)
    minis, _ = minibatches_of(monkeypatch, made)
    assert len(minis) == 6 and made.critic_trainer.train_steps == made.cluster.actor_trainer.train_steps == 6
    assert torch.equal(minis[0].values, minis[2].values)  # the old ones, which the clip keeps near
    assert all(m.weights is None for m in minis)


def test_the_actor_waits_for_the_critic_and_its_schedule_too():
    actor = OptimConfig(lr=1e-2, schedule="linear")
    made = ppo(models(max_steps=3, actor_optimizer=actor), critic_warmup_steps=2)
    before, seen = all_weights(made), []
    update = made.update
    made.update = lambda step, mini: [update(step, mini), seen.append(moved(made, before))][0]
    run = made.train(rows(12))
    assert seen == [{"actor": False, "critic": True}] * 2 + [{"actor": True, "critic": True}]
    assert "grad_norm" not in run.rows[1] and run.rows[2]["learning_rate"] == 1e-2  # the first of one update, not of 3
    assert [row["critic/grad_norm"] > 0 for row in run.rows] == [True] * 3


def test_the_critics_schedule_knows_that_a_last_mini_batch_is_smaller():
    made = ppo(models(mini_batch_size=2), critic_updates=2)
    assert made.total_updates(Role.CRITIC, 3, 5) == 3 * (2 + 2 + 1) and made.total_updates(Role.ACTOR, 3, 5) == 3 * 3


def test_evaluation_has_its_own_sampling_parameters():
    seen = []

    def reward(completions, mode):
        seen.append((mode, max(map(len, completions))))
        return [0.5] * len(completions)

    rollout = {
        Mode.TRAIN: RolloutConfig(max_tokens_to_generate=8, temperature=1.0),
        Mode.EVAL: RolloutConfig(max_tokens_to_generate=2, temperature=0.0),
    }
    made = ppo(models(rollout=rollout), reward)
    found = made.evaluate(rows(3))
    made.train(rows(4))
    assert [mode for mode, _ in seen] == ["eval", "train"] and seen[0][1] <= 2 < seen[1][1]
    assert found["reward"] == 0.5


# ---- equal to REINFORCE ----------------------------------------------------------------------------------------------


def gradients(monkeypatch, made, learner_rows):
    """The actor's gradient of the first update, by parameter, and its batch."""
    seen, actor = {}, made.cluster.actor
    step = actor.optim.step

    def note():
        seen.update({n: p.grad.clone() for n, p in actor.module.named_parameters() if p.grad is not None})
        return step()

    monkeypatch.setattr(actor.optim, "step", note)
    minis, _ = minibatches_of(monkeypatch, made, learner_rows)
    return seen, minis[0]


def test_without_critic_kl_and_whitening_it_is_reinforce(monkeypatch):
    plain = {"loss_agg_mode": "token-mean", "num_generations": 2}
    made = ppo(models(max_steps=1), gamma=1.0, gae_lambda=1.0, whiten_advantages=False, **plain)
    got, batch = gradients(monkeypatch, made, 4)
    texts = [made.cluster.decode(tokens.numpy()) for tokens in batch.tokens.split(batch.lengths.tolist())]
    assert torch.equal(batch.advantages, torch.tensor(length_reward(texts)).float().index_select(0, batch.sequence))

    def reinforce(x):
        return -x.advantages * x.logprobs

    config = GRPOConfig(beta=0.0, advantage_estimator=lambda r, g: r, policy_loss_fn=reinforce, **plain)
    data = DataConfig(batch_size=4, shuffle=False)
    wanted, _ = gradients(monkeypatch, GRPOLearner(cluster(max_steps=1), config, length_reward, data=data), 4)
    assert got.keys() == wanted.keys() and got
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-7)


# ---- a critic on the actor's backbone ----------------------------------------------------------------------------


def shared(**fields):
    return cluster(**{"critic": "actor", **fields})


def test_the_gradient_of_a_shared_backbone_is_the_policys_and_the_values(monkeypatch):
    words = {"gae_lambda": 1.0, "whiten_advantages": False}
    value = lambda x: 0.5 * (x.new_values - x.returns).square()
    both, _ = gradients(monkeypatch, ppo(shared(max_steps=1), vf_coef=0.3, value_loss_fn=value, **words), 4)
    nothing = lambda x: 0 * x.new_values
    policy, _ = gradients(monkeypatch, ppo(shared(max_steps=1), vf_coef=0.3, value_loss_fn=nothing, **words), 4)
    none = {"policy_loss_fn": lambda x: 0 * x.logprobs, "value_loss_fn": value, "gae_lambda": 1.0}
    values, _ = gradients(monkeypatch, ppo(shared(max_steps=1), vf_coef=0.3, **none), 4)
    assert both.keys() == policy.keys() == values.keys() and any(n.endswith("score.weight") for n in both)
    assert values["score.weight"].abs().max() > 0 and policy["score.weight"].abs().max() == 0
    for name in both:
        torch.testing.assert_close(both[name], policy[name] + values[name], rtol=1e-4, atol=1e-6)
    alone = ppo(models(critic=tiny_model(0), max_steps=1), **none)
    critic = gradients_of(monkeypatch, alone.cluster.worker(Role.CRITIC), alone)
    torch.testing.assert_close(values["score.weight"], 0.3 * critic["score.weight"], rtol=1e-4, atol=1e-6)


def test_a_completion_without_a_reward_trains_no_shared_critic_in_later_passes_either():
    made = ppo(shared(lr=1e-2, max_steps=1), lambda completions: [None, 1.0, None, 0.5], num_iterations=2)
    seen, loss = [], made.cluster.actor_trainer.loss

    def noted(x):
        found, metrics = loss(x)
        (slope,) = torch.autograd.grad(found.sum(), x.new_values, retain_graph=True)
        error = 0.5 * (x.new_values - x.returns).detach().square()
        seen.append((x.need("has_reward").bool(), slope, error))
        return found, metrics

    made.cluster.actor_trainer.loss = noted
    row = made.train(rows(4)).rows[0]
    known, slope, error = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert error[~known].any()  # the second pass finds other values than the first
    assert not slope[~known].any() and slope[known].any()
    assert row["critic/vf_loss"] == pytest.approx(error[known].mean().item(), rel=1e-3)  # nothing is clipped


def gradients_of(monkeypatch, worker, made):
    """The gradient of one update of a worker's model."""
    found, step = {}, worker.optim_step

    def noted():
        found.update({n: p.grad.clone() for n, p in worker.module.named_parameters() if p.grad is not None})
        return step()

    monkeypatch.setattr(worker, "optim_step", noted)
    made.train(rows(4))
    return found


def test_a_shared_critic_learns_and_the_policy_stays_a_language_model(tmp_path):
    made = ppo(
        shared(lr=1e-2, reference=tiny_model(0), max_steps=20, num_epochs=9, run_dir=str(tmp_path)),
        lambda completions: [3.0] * len(completions),
        gae_lambda=1.0,
        clip_range_value=100.0,
        vf_coef=1.0,
    )
    passes = made.planned_passes(4)
    assert passes["loss"].endswith(" + 1.0 * value loss") and "values" in passes["completions with advantage 0"]
    found = made.train(rows(40)).rows
    assert found[0]["critic/vf_loss"] == pytest.approx(4.5) and found[-1]["critic/vf_loss"] < 0.5
    assert {"critic/vpred_mean", "critic/vf_clipfrac", "critic/return_mean"} <= found[0].keys()
    assert "score.weight" not in dict(made.cluster.actor.named_weights())
    again = ppo(cluster(actor=RoleConfig(model=str(tmp_path / "final")), critic="actor"))
    assert torch.equal(again.cluster.actor.loaded.score_head.weight, made.cluster.actor.loaded.score_head.weight)


@pytest.mark.parametrize(
    ("critic", "algo", "says"),
    [
        ("actor", {"critic_warmup_steps": 2}, "critic_warmup_steps=2 trains only the critic"),
        (RoleConfig(model="actor", optim=OptimConfig(lr=1.0)), {}, "remove the other critic"),
        (None, {}, 'or critic="actor"'),
        ("actor", {"vf_coef": 0.0}, "vf_coef must be positive"),
    ],
)
def test_what_a_shared_critic_can_not_have_is_refused(critic, algo, says):
    with pytest.raises(ConfigError, match=says):
        ppo(cluster(critic=critic), **algo)


# ---- names, numbers, refusals ------------------------------------------------------------------------------------


def test_metrics_have_tunixs_names():
    made = ppo(models(reference=tiny_model(1)), lambda completions: [0.7] * len(completions), beta=0.1)
    row = made.train(rows(4)).rows[0]
    each = [f"{n}/{how}" for n in ("advantages", "advantages/returns", "advantages/old_values", "rewards/reward")
            for how in ("mean", "max", "min")]  # fmt: skip
    own = ["rewards/reward_kl_penalty", "critic/vpred_mean", "critic/vf_clipfrac", "critic/vf_loss",
           "critic/return_mean", "critic/explained_variance", "pg_clipfrac", "entropy"]  # fmt: skip
    assert sorted({*each, *own} - row.keys()) == []
    assert row["rewards/reward_kl_penalty"] > 0
    assert row["sampling/ess"] == pytest.approx(1.0, abs=1e-4)  # its first update is on policy
    assert row["reward"] == pytest.approx(0.7)  # Tunix's buffer would make it 0
    assert row["rewards/reward/mean"] < 0.7 and row["advantages/mean"] == pytest.approx(0, abs=1e-6)


def test_the_fields_that_have_tunixs_names_reach_the_losses():
    made = ppo(epsilon_low=0.0, epsilon_high=0.5, epsilon_c=3.0, entropy_coef=None, clip_range_value=0.3)
    clip = {"epsilon": 0.0, "epsilon_high": 0.5, "epsilon_c": 3.0}
    assert clip.items() <= made.objective.surrogate.keywords.items()
    assert made.value_loss.keywords == {"clip_range_value": 0.3} and made.objective.entropy_coef == 0
    assert ppo(entropy_coef=0.01).objective.entropy_coef == 0.01


@pytest.mark.parametrize("metrics", [False, True])
def test_a_value_loss_of_your_own(metrics):
    def absolute(x, *, clip_range_value):
        loss = (x.new_values - x.returns).abs() + clip_range_value
        return (loss, {"off": loss.detach()}) if metrics else loss

    row = ppo(value_loss_fn=absolute, clip_range_value=0.5).train(rows(4)).rows[0]
    assert row["critic/loss"] > 0.5 and ("critic/off" in row) == metrics


def test_what_is_missing_is_said():
    c = models()
    with pytest.raises(ConfigError, match="PPO requires a critic"):
        PPOLearner(cluster(), PPOConfig(beta=0.0), length_reward)
    with pytest.raises(ConfigError, match="PPO requires one of `reward_fns` or a reward model"):
        PPOLearner(c, PPOConfig(beta=0.0))
    with pytest.raises(ConfigError, match=r"beta=0\.04.*needs a reference"):
        PPOLearner(c, PPOConfig(), length_reward)
    for given in ({}, {"ppo_config": PPOConfig(), "algo_config": PPOConfig()}):
        with pytest.raises(ConfigError, match="ppo_config= or algo_config="):
            PPOLearner(c, reward_fns=length_reward, **given)
    with pytest.raises(ConfigError, match="unknown value loss 'mse'"):
        PPOLearner(c, algo_config=PPOConfig(beta=0.0, value_loss_fn="mse"), reward_fns=length_reward)


# ---- a reward model ------------------------------------------------------------------------------------------------


def scorer(seed=5):
    """A tiny reward model."""
    from whet.models.load import load_model

    module = load_model(tiny_model(seed), role="critic").module
    torch.nn.init.normal_(module.score.weight, generator=torch.Generator().manual_seed(seed))
    module.config._attn_implementation = "eager"
    return module


def test_a_reward_model_alone_and_with_functions(monkeypatch):
    module = scorer()
    made = ppo(models(reward=copy.deepcopy(module)), None)
    totals = totals_of(monkeypatch, made)
    (mini,), run = minibatches_of(monkeypatch, made)
    assert torch.equal(totals[0], made.cluster.worker(Role.REWARD).scores(mini).double())
    (name,) = made.reward_manager.fns
    assert run.rows[0][f"rewards/{name}"] == pytest.approx(float(totals[0].mean()))
    both = ppo(models(reward=copy.deepcopy(module)), ["reward_model", length_reward], reward_weights=(0.5, 2.0))
    (mini,), run = minibatches_of(monkeypatch, both)
    assert list(both.reward_manager.weights.values()) == [0.5, 2.0]
    row = run.rows[0]
    assert row["reward"] == pytest.approx(0.5 * row[f"rewards/{name}"] + 2 * row["rewards/length_reward"])
    with pytest.raises(ConfigError, match=r"no reward model is set; .*pass RLCluster"):
        ppo(models(), ["reward_model"])


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, shared):
    module = scorer()
    critic = {"critic": "actor", "critic_optimizer": None} if shared else {}

    def train(folder, steps, **more):
        linear = OptimConfig(lr=3e-3, schedule="linear", warmup_steps=1, total_steps=12)
        c = models(
            reference=tiny_model(1),
            reward=copy.deepcopy(module),
            run_dir=str(folder),
            max_steps=steps,
            mini_batch_size=2,
            actor_optimizer=linear,
            **{"critic_optimizer": linear, **critic},
            **more,
        )
        config = PPOConfig(
            beta=0.05,
            **({"sync_ref_model": True, "ref_model_sync_steps": 2} if shared else {"critic_warmup_steps": 2}),
            num_iterations=2,
            num_generations=2,
            target_kl=0.1,
        )
        learner = PPOLearner(c, config, [length_reward], data_shuffle_seed=1, data=DataConfig(batch_size=4))
        run = learner.train([{"prompt": f"{i}+{i}="} for i in range(20)])
        c.close()
        return run

    train(tmp_path / "whole", 5)
    train(tmp_path / "parts", 1)  # within the critic's warm-up
    train(tmp_path / "parts", 3, resume="latest")
    train(tmp_path / "parts", 5, resume="latest")
    for part in ("actor",) if shared else ("actor", "critic"):
        for name in ("model.safetensors", "optimizer.safetensors"):
            a, b = ((tmp_path / f / "checkpoints/step-000005" / part / name).read_bytes() for f in ("whole", "parts"))
            assert a == b, (part, name)
    numbers = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/", "memory"))}
            for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines()
        ]
        for f in ("whole", "parts")
    ]
    assert [json.dumps(row) for row in numbers[0]] == [json.dumps(row) for row in numbers[1]]
