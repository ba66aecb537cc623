"""What a command of RL2's computes here is what RL2's formulas say, written naively below."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers import cluster, completion, length_reward, prompt, reward_batch, rows, tiny_model

from whet.config import DataConfig, OptimConfig, PPOConfig, Role
from whet.learners.from_config import advantage_inputs, bind_fields, make_estimator, make_objective
from whet.learners.kl_controller import KLController
from whet.learners.kl_penalty import kl_penalty_in_advantage, kl_penalty_in_reward
from whet.learners.ppo import PPOLearner, _split_mini_batch
from whet.ops import LOSS_AGG_MODES, VALUE_LOSSES, advantages_and_returns, aggregate, estimate, token_weights
from whet.rl2.translate import translate_command
from whet.train.optimizer import Optim
from whet.types import Group, LossInputs, TokenBatch

COMMAND = [
    "actor.model_name=m",
    "data.path=d.jsonl",
    "data.prompts_per_rollout=12",
    "data.responses_per_prompt=3",
    "rollout.env_path=env.py",
    "rollout.train_sampling_params.max_new_tokens=16",
    "actor.entropy.coef=0",
]
EPS = float(np.finfo(np.float32).eps)


def algo(*words):
    return translate_command("ppo", [*COMMAND, *words]).algo


def rolled_out(groups=3, each=3, *, seed=0):
    """Episodes with turns: what was not sampled between those of the model, and forks in every other one."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(groups):
        done = []
        for g in range(each):
            for fork in range(1 + (row + g) % 2):
                n = int(rng.integers(4, 9))
                version = np.where(np.arange(n) % 4 == 2, -1, 0)
                more = {"prefix": [1, 2, row, g]} if fork else {}
                done.append(completion(rng.integers(0, 250, n), g, version=version, **more))
        made.append(Group(prompt=prompt([1, 2, row], row), completions=tuple(done)))
    batch = TokenBatch.from_groups(made)
    rewards = reward_batch(rng.integers(0, 4, groups * each).astype(float), batch.group_of.tolist())
    draw = lambda: torch.where(batch.mask, torch.from_numpy(rng.normal(size=batch.num_tokens)) * 0.3 - 1, 0.0)
    return batch.replace(old_logprobs=draw(), ref_logprobs=draw(), sampler_logprobs=draw(), values=draw()), rewards


def estimate_kl(name, logp, ref):
    d = logp - ref
    return {"k1": d, "k2": d**2 / 2, "k3": d + torch.exp(-d) - 1}[name]


# ---- the actor's loss ------------------------------------------------------------------------------------------------


def rl2_loss(x, *, clip=0.2, level="token", tis=0.0, coef=0.0, where=None, estimator="k2", entropy=0.0):
    """RL2's actor_ppo_loss and aggregate_values."""
    ratio = torch.exp(x["logps"] - x["old"])
    loss = -torch.min(x["adv"] * ratio, x["adv"] * torch.clamp(ratio, 1 - clip, 1 + clip))
    if coef > 0 and where == "loss":
        loss = loss + coef * estimate_kl(estimator, x["logps"], x["ref"])
    if tis > 0:
        loss = loss * torch.exp(x["logps"].detach() - x["llm"]).clamp(max=tis)
    loss = loss - entropy * x["entropy"]
    if level == "token":
        return loss[x["mask"]].sum() / x["mask"].sum()
    means = [loss[own & x["mask"]].sum() / ((own & x["mask"]).sum() + EPS) for own in x["sequences"]]
    return torch.stack(means).sum() / len(means)


LOSSES = [
    ([], {}),
    (["actor.clip=0.1", "actor.entropy.coef=0.01"], {"clip": 0.1, "entropy": 0.01}),
    (["actor.avg_level=sequence"], {"level": "sequence"}),
    (["actor.tis_coef=1.2"], {"tis": 1.2}),
    *(
        (
            ["actor.tis_coef=1.2", "actor.kl.coef=0.3", "actor.kl.type=loss", f"actor.kl.loss_estimator={k}"],
            {"tis": 1.2, "coef": 0.3, "where": "loss", "estimator": k},
        )
        for k in ("k1", "k2", "k3")
    ),
    (
        ["actor.kl.coef=0.3", "actor.kl.type=loss", "actor.avg_level=sequence"],
        {"coef": 0.3, "where": "loss", "level": "sequence"},
    ),
    (["actor.kl.coef=0.3", "actor.kl.type=reward", "actor.tis_coef=1.2"], {"tis": 1.2}),  # its KL is not in the loss
]


@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
@pytest.mark.parametrize(("words", "formula"), LOSSES)
def test_the_actors_loss_and_its_gradient_are_rl2s(words, formula, estimator):
    config = algo(*words, f"adv.estimator={estimator}")
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 7, 4])
    sequence = torch.repeat_interleave(torch.arange(4), lengths)
    mask = torch.rand(17) < 0.7
    mask[sequence == 3] = False  # a sequence without a trained token counts in the mean over sequences
    logps = torch.where(mask, torch.randn(17).double() - 2, 0.0).requires_grad_()
    near = lambda: torch.where(mask, logps.detach() + 0.3 * torch.randn(17).double(), 0.0)
    x = {"logps": logps, "old": near(), "ref": near(), "llm": near(), "entropy": logps.exp(), "mask": mask}
    x |= {"adv": torch.randn(17).double(), "sequences": [sequence == i for i in range(4)]}
    want = rl2_loss(x, **formula)
    (slope,) = torch.autograd.grad(want, logps)

    control, objective = KLController(config), make_objective(config)
    objective = dataclasses.replace(objective, beta=control.loss_beta, entropy_coef=control.loss_entropy_coef)
    columns = {"old_logprobs": x["old"], "ref_logprobs": x["ref"], "sampler_logprobs": x["llm"], "advantages": x["adv"]}
    loss, _ = objective(LossInputs(sequence=sequence, mask=mask, logprobs=logps, entropy=logps.exp(), **columns))
    units = 4.0 if config.loss_agg_units == "all" else None
    got = aggregate(loss, token_weights(mask, sequence, config.loss_agg_mode, num_units=units))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(got, logps)[0], slope, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_critics_loss_is_rl2s(level):
    config = algo("adv.estimator=gae", "critic.clip=0.3", f"critic.avg_level={level}", f"actor.avg_level={level}")
    torch.manual_seed(0)
    sequence, mask = torch.repeat_interleave(torch.arange(3), 4), torch.rand(12) < 0.7
    new, old, returns = (torch.randn(12).double() for _ in range(3))
    clipped = torch.clamp(new, old - 0.3, old + 0.3)
    each = torch.max((new - returns) ** 2, (clipped - returns) ** 2)
    parts = [each[mask & (sequence == i)] for i in range(3)]
    want = each[mask].mean() if level == "token" else sum(p.sum() / (len(p) + EPS) for p in parts) / 3
    columns = {"new_values": new, "values": old, "returns": returns}
    x = LossInputs(sequence=sequence, mask=mask, logprobs=torch.zeros(12), **columns)
    loss, _ = bind_fields(VALUE_LOSSES[config.value_loss_fn], config)(x)
    weights = token_weights(mask, sequence, config.value_loss_agg_mode)
    assert config.value_loss_agg_mode in LOSS_AGG_MODES
    torch.testing.assert_close(aggregate(loss, weights), want, rtol=1e-6, atol=0)


# ---- advantages ------------------------------------------------------------------------------------------------------


def whets(config, batch, rewards):
    control = KLController(config)
    batch = kl_penalty_in_reward(config, batch, control.beta)
    batch = batch.replace(advantages=estimate(make_estimator(config), advantage_inputs(batch, rewards)))
    return kl_penalty_in_advantage(config, batch, control.beta)


def rl2_rewards(batch, outcomes, coef=0.0, where=None, estimator="k1"):
    """The reward of each trained token of each trajectory, its sequences joined: the outcome is at the last."""
    kl = estimate_kl(estimator, batch.old_logprobs, batch.ref_logprobs)
    found = []
    for j in range(len(outcomes)):
        own = batch.mask & (batch.trajectory == j)
        rewards = -coef * kl[own] if where == "reward" else torch.zeros(int(own.sum()), dtype=torch.float64)
        rewards[-1] += outcomes[j]
        found.append((own, rewards))
    return found, kl


KLS = [
    ({}, []),
    *(
        (
            {"coef": 0.2, "where": w, "estimator": e},
            ["actor.kl.coef=0.2", f"actor.kl.type={w}", f"actor.kl.reward_estimator={e}"],
        )
        for w, e in (("reward", "k1"), ("reward", "k3"), ("advantage", "k2"))
    ),
]


@pytest.mark.parametrize(("kl", "words"), KLS)
@pytest.mark.parametrize(
    ("norm_var", "global_norm", "each"),
    [(False, False, 3), (True, False, 3), (False, True, 3), (True, True, 3), (True, False, 1)],
)
def test_reinforce_is_rl2s(kl, words, norm_var, global_norm, each):
    switches = [f"adv.norm_var={norm_var}", f"adv.global_norm={global_norm}", f"data.responses_per_prompt={each}"]
    config = algo(*words, *switches)
    batch, outcomes = rolled_out(4, each)
    joined, penalty = rl2_rewards(batch, outcomes.total, **kl)
    table = torch.stack([r.sum() for _, r in joined]).view(-1, each)
    wide = each == 1 or global_norm
    mean, std = (table.mean(), table.std()) if wide else (table.mean(-1, keepdim=True), table.std(-1, keepdim=True))
    advantages = ((table - mean) / (std + EPS) if norm_var else table - mean).flatten()
    want = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for (own, _), a in zip(joined, advantages, strict=True):
        want[own] = a
    if kl.get("where") == "advantage":
        want = torch.where(batch.mask, want - kl["coef"] * penalty, 0.0)
    got = torch.where(batch.mask, whets(config, batch, outcomes).advantages.double(), 0.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kl", "words"), KLS)
def test_gae_joins_the_turns_and_forks_of_a_trajectory_as_rl2(kl, words):
    config = algo(*words, "adv.estimator=gae", "adv.gamma=0.9", "adv.lamda=0.8")
    batch, outcomes = rolled_out(3)
    joined, penalty = rl2_rewards(batch, outcomes.total, **kl)
    want, returns = torch.zeros(batch.num_tokens, dtype=torch.float64), torch.zeros(batch.num_tokens).double()
    for own, rewards in joined:
        values, ahead, found = batch.values[own], 0.0, []
        for t in reversed(range(len(rewards))):
            following = values[t + 1] if t + 1 < len(rewards) else 0.0
            ahead = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * ahead
            found.append(ahead)
        want[own] = torch.stack(found[::-1])
        returns[own] = want[own] + values
    trained = want[batch.mask]
    want = torch.where(batch.mask, (want - trained.mean()) / (trained.std() + EPS), 0.0)
    if kl.get("where") == "advantage":
        want = torch.where(batch.mask, want - kl["coef"] * penalty, 0.0)
    scored = whets(config, batch, outcomes)
    torch.testing.assert_close(scored.advantages.double(), want, rtol=1e-5, atol=1e-5)
    _, learned = bind_fields(advantages_and_returns, config)(advantage_inputs(scored, outcomes))
    torch.testing.assert_close(learned[batch.mask], returns[batch.mask], rtol=1e-6, atol=1e-6)


# ---- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "warmup"), [(0.25, 2), (0.1, 0), (0.0, 0)])
def test_a_warm_up_is_a_share_of_all_updates_rounded_down(ratio, warmup):
    rates = []
    for more in ({"warmup_ratio": ratio}, {"warmup_steps": warmup}):
        layer = torch.nn.Linear(2, 2)
        optim = Optim(layer, OptimConfig(lr=1.0, schedule="cosine", total_steps=9, **more))
        rates.append([])
        for _ in range(9):
            layer(torch.ones(2)).sum().backward()
            rates[-1].append(optim.step()[1])
    assert rates[0] == rates[1] and (rates[0][1] == 0.5) == (warmup == 2)


@pytest.mark.parametrize(("actor", "critic"), [(1, 3), (2, 4)])
def test_the_critic_makes_its_own_updates_and_its_schedule_spans_them(actor, critic):
    model = tiny_model(1)
    made = cluster(critic=model, max_steps=1, mini_batch_size=4 // actor)
    config = PPOConfig(beta=0.0, num_generations=1, critic_updates=critic // actor)
    learner = PPOLearner(made, config, length_reward, data=DataConfig(batch_size=4))
    learner.train(rows(4))
    parts = {1: {3: 2}, 2: {4: 4}}[actor][critic]  # of 4 groups in at most 3 parts of one size: 2 and 2
    assert made.critic_worker.optim.updates == parts == learner.total_updates(Role.CRITIC, 1, 4)
    assert made.actor.optim.updates == actor == learner.total_updates(Role.ACTOR, 1, 4)


def test_updates_are_contiguous_slices_of_a_rollout():
    run = translate_command(
        "ppo", [*COMMAND, "actor.update_per_rollout=3", "critic.update_per_rollout=6", "adv.estimator=gae"]
    )
    assert run.trainer.mini_batch_size == 4 and run.algo.critic_updates == 2
    batch, _ = rolled_out(5, 2)
    for number in (1, 2, 4, 9):
        size = math.ceil(5 / min(number, 5))
        found = [sorted({int(t) for t in part.prefixes[2::3]}) for part in _split_mini_batch(batch, number)]
        assert sum(len(p.group_of.unique()) for p in _split_mini_batch(batch, number)) == 5
        assert len(found) == math.ceil(5 / size)
    rejoined = TokenBatch.cat(list(_split_mini_batch(batch, 2)))
    assert torch.equal(rejoined.tokens, batch.tokens) and torch.equal(rejoined.trajectory_of, batch.trajectory_of)
