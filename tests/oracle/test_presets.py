"""Each preset against its source: advantages, surrogate, KL and aggregation at once, value and gradient, in float64.

Of a paper the source is a loop written here from its formula, one completion at a time; of TRL it is TRL's own code.
What whet does is built from the preset as a learner builds it. Advantages are fp32 in whet, hence 1e-6.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import completion, prompt, reward_batch
from peer_code import function, run, source, statements_from, trl_trainer

from whet import presets
from whet.learners.from_config import advantage_inputs, bind_fields, make_estimator, make_objective
from whet.learners.kl_controller import KLController
from whet.learners.kl_penalty import kl_penalty_in_advantage, kl_penalty_in_reward
from whet.ops import VALUE_LOSSES, advantages_and_returns, estimate, token_weights
from whet.types import Group, LossInputs, TokenBatch

LONGEST = 7
"""rollout.max_tokens_to_generate."""


class Example:
    """Two prompts of `size` completions each: lists of tensors per completion, and rewards."""

    def __init__(self, seed=0, size=3):
        g = torch.Generator().manual_seed(seed)
        draw = lambda n: torch.randn(n, generator=g).double()  # of fp32, so that no side rounds another number
        self.size, self.number = size, 2 * size
        self.lengths = torch.randint(1, LONGEST, (self.number,), generator=g).tolist()
        self.old = [-0.5 - draw(n).abs() for n in self.lengths]
        self.now = [(o + 0.4 * draw(n)).clamp(max=-0.01) for o, n in zip(self.old, self.lengths, strict=True)]
        for i, far in ((1, 1.7), (size, 1.9)):  # ratios of 5.5 and 6.7
            self.old[i][0], self.now[i][0] = -3.0, -3.0 + far
        self.now = [now.requires_grad_() for now in self.now]
        self.ref = [o + 0.3 * draw(n) for o, n in zip(self.old, self.lengths, strict=True)]
        self.table = {"a": torch.rand(self.number, generator=g).double(), "b": draw(self.number)}
        self.weights = {"a": 1.0, "b": 0.5}
        self.rewards = self.table["a"] + 0.5 * self.table["b"]
        self.greedy = draw(2)
        self.values = [draw(n) for n in self.lengths]
        self.prompt = [i // size for i in range(self.number)]

    @property
    def rho(self):
        """The ratio of each token, by completion."""
        return [(n - o).exp() for n, o in zip(self.now, self.old, strict=True)]

    def of_prompt(self, values):
        """Values per completion as [prompt, completion]."""
        return torch.as_tensor(values).view(2, self.size)


def batch_of(e):
    """The example as a scored batch."""
    ids = [list(range(10, 10 + n)) for n in e.lengths]
    groups = [
        Group(
            prompt=prompt([1 + g], g),
            completions=tuple(completion(ids[i], i % e.size) for i in range(e.number) if e.prompt[i] == g),
        )
        for g in range(2)
    ]
    batch = TokenBatch.from_groups(groups)
    return batch.replace(old_logprobs=torch.cat(e.old), ref_logprobs=torch.cat(e.ref), values=torch.cat(e.values))


def rewards_of(e):
    """The rewards of the example; the totals of its functions follow from their weights."""
    table = {name: values.numpy() for name, values in e.table.items()}
    return reward_batch(e.rewards, e.prompt, table=table, weights=e.weights, greedy=e.greedy.numpy())


def whet(config, e):
    """Loss and gradient by completion of whet, from a configuration alone."""
    batch = batch_of(e)
    control = KLController(config)
    given = advantage_inputs(kl_penalty_in_reward(config, batch, control.beta), rewards_of(e))
    batch = batch.replace(advantages=estimate(make_estimator(config), given))
    batch = kl_penalty_in_advantage(config, batch, control.beta)
    logprobs = torch.cat([n.detach() for n in e.now]).requires_grad_()
    x = LossInputs(sequence=batch.sequence, mask=batch.mask, logprobs=logprobs, token_columns=batch.token_columns)
    objective = dataclasses.replace(make_objective(config), beta=control.loss_beta)
    norm = float(LONGEST) if config.loss_agg_mode == "sequence-mean-token-scale" else config.loss_agg_norm
    weights = token_weights(
        batch.mask,
        batch.trajectory,
        config.loss_agg_mode,
        norm=norm,
        num_units=float(e.number) if config.loss_agg_units == "all" else None,
        prompt=batch.group_of.index_select(0, batch.trajectory),
    )
    loss = (objective(x)[0] * weights).sum()
    loss.backward()
    return loss.detach(), logprobs.grad


def of_source(loss, e):
    """The same of a loss of the example."""
    return loss.detach(), torch.cat(torch.autograd.grad(loss, e.now))


def close(found, expected):
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)


# ---- the formulas of the papers --------------------------------------------------------------------------------------


def scaled(e, eps=1e-6):
    """(r - mean) / (std + ε) in the group."""
    r = e.of_prompt(e.rewards)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + eps)).flatten()


def centred(e, rewards=None):
    r = e.of_prompt(e.rewards if rewards is None else rewards)
    return (r - r.mean(1, keepdim=True)).flatten()


def clipped(ratio, a, low=0.2, high=0.2):
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def mean_of_means(rows):
    return sum(row.mean() for row in rows) / len(rows)


def mean_of_tokens(rows):
    return torch.cat(rows).mean()


def mean_of_sums(rows):
    return sum(row.sum() for row in rows) / len(rows)


def deepseek_grpo(e):
    rows = []
    for rho, a, now, ref in zip(e.rho, scaled(e), e.now, e.ref, strict=True):
        rows.append(clipped(rho, a) + 0.04 * ((ref - now).exp() - (ref - now) - 1))
    return mean_of_means(rows)


def dr_grpo(e):
    return sum(clipped(rho, a).sum() / LONGEST for rho, a in zip(e.rho, centred(e), strict=True)) / e.number


def dapo(e):
    return mean_of_tokens([clipped(rho, a, 0.2, 0.28) for rho, a in zip(e.rho, scaled(e), strict=True)])


def sequence_ratios(e):
    return [(n - o).mean().exp() for n, o in zip(e.now, e.old, strict=True)]


def gspo(e):
    return sum(clipped(s, a, 3e-4, 4e-4) for s, a in zip(sequence_ratios(e), scaled(e), strict=True)) / e.number


def luspo(e):
    rows = zip(sequence_ratios(e), scaled(e), e.lengths, strict=True)
    return sum(n * clipped(s, a, 2e-3, 2.5e-3) for s, a, n in rows) / e.number


def reinforced(e, advantages):
    """-A Σ log π, a mean over completions."""
    return mean_of_sums([-a * now for a, now in zip(advantages, e.now, strict=True)])


def with_kl(e, beta):
    paid = [beta * (o - ref).sum() for o, ref in zip(e.old, e.ref, strict=True)]
    return e.rewards - torch.stack(paid)


def rloo(e):
    rewards = with_kl(e, 0.03)
    others = [torch.stack([rewards[j] for j in range(e.number) if e.prompt[j] == e.prompt[i] and j != i]).mean()
              for i in range(e.number)]  # fmt: skip
    return reinforced(e, [r - b for r, b in zip(rewards, others, strict=True)])


def opo(e):
    lengths = torch.tensor(e.lengths).double()
    base = e.of_prompt(lengths * e.rewards).sum(1) / e.of_prompt(lengths).sum(1)
    return reinforced(e, [e.rewards[i] - base[e.prompt[i]] for i in range(e.number)])


def remax(e):
    return reinforced(e, [e.rewards[i] - e.greedy[e.prompt[i]] for i in range(e.number)])


def weighed(e, advantages, cap):
    return [-rho.detach().clamp(max=cap) * a * now for rho, a, now in zip(e.rho, advantages, e.now, strict=True)]


def cispo(e):
    return mean_of_tokens(weighed(e, scaled(e), 5.0))


def scale_rl(e):
    a = centred(e)
    rows = weighed(e, a / (a.std(unbiased=False) * math.sqrt(len(a) / (len(a) - 1)) + 1e-6), 5.0)
    return sum(mean_of_tokens(rows[g * e.size : (g + 1) * e.size]) for g in range(2)) / 2


def whitened(rows):
    every = torch.cat(rows)
    return [(row - every.mean()) / (every.var() + 1e-8).sqrt() for row in rows]


def reinforce_pp(e):
    earned = []
    for r, old, ref in zip(e.rewards, e.old, e.ref, strict=True):
        given = -0.01 * (old - ref)
        given[-1] += r
        earned.append(given.flip(0).cumsum(0).flip(0))
    return mean_of_means([clipped(rho, a) for rho, a in zip(e.rho, whitened(earned), strict=True)])


def reinforce_pp_baseline(e, beta=1e-5):
    advantages = whitened([a * torch.ones(n) for a, n in zip(centred(e), e.lengths, strict=True)])
    kl = [beta * 0.5 * (now - ref) ** 2 for now, ref in zip(e.now, e.ref, strict=True)]
    return mean_of_means([clipped(rho, a) + k for rho, a, k in zip(e.rho, advantages, kl, strict=True)])


def sapo(e):
    rows = []
    for rho, a in zip(e.rho, scaled(e), strict=True):
        tau = 1.0 if a > 0 else 1.05
        rows.append(-a * torch.sigmoid(tau * (rho - 1)) * 4 / tau)
    return mean_of_means(rows)


def gmpo(e):
    total = 0.0
    for now, old, a in zip(e.now, e.old, scaled(e), strict=True):
        log_ratio = now - old
        held = log_ratio.clamp(max=0.4) if a > 0 else log_ratio.clamp(min=-0.4)
        total = total - a * held.mean().exp()
    return total / e.number


def vespo(e):
    rows = []
    for now, old, a in zip(e.now, e.old, scaled(e), strict=True):
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        w = (now - old).sum().detach().exp()
        rows.append(-(w**k * (rate - rate * w).exp()) * a * now)
    return mean_of_tokens(rows)


def gdpo(e):
    total = torch.zeros(2, e.size)
    for name, weight in e.weights.items():
        r = e.of_prompt(e.table[name])
        total = total + weight * (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)
    advantages = ((total - total.mean()) / (total.std() + 1e-6)).flatten()
    return mean_of_tokens([clipped(rho, a) for rho, a in zip(e.rho, advantages, strict=True)])


def dppo(e):
    total = 0.0
    for now, old, a in zip(e.now, e.old, centred(e), strict=True):
        moved = now.detach().exp() - old.exp()
        kept = moved <= 0.2 if a > 0 else moved >= -0.2
        total = total + torch.where(kept, -(now - old).exp() * a, 0.0).sum() / LONGEST
    return total / e.number


def rl2_reinforce(e):
    return mean_of_tokens([clipped(rho, a) for rho, a in zip(e.rho, centred(e), strict=True)])


def test_the_examples_reach_every_bound():
    ratios = torch.cat([torch.cat(Example(seed, size=4).rho) for seed in range(4)]).detach()
    assert (ratios < 0.8).any() and ((ratios > 1.2) & (ratios < 1.28)).any() and (ratios > 6).any()


def gae(e, rows, lam):
    """(advantages, returns) of rewards per token by completion, γ = 1, backwards as the equation has it."""
    found = []
    for row, v in zip(rows, e.values, strict=True):
        ahead, last, own = 0.0, 0.0, [0.0] * len(v)
        for t in reversed(range(len(v))):
            ahead = row[t] + last - v[t] + lam * ahead
            own[t], last = ahead, v[t]
        found.append(torch.stack(own))
    return found, [a + v for a, v in zip(found, e.values, strict=True)]


def outcomes(e, beta):
    """The reward at the last token, less the KL at each."""
    rows = [-beta * (old - ref) for old, ref in zip(e.old, e.ref, strict=True)]
    return [torch.cat([row[:-1], row[-1:] + r]) for row, r in zip(rows, e.rewards, strict=True)]


def of_actor(e, beta, lam):
    advantages = whitened(gae(e, outcomes(e, beta), lam)[0])
    return mean_of_tokens([clipped(rho, a) for rho, a in zip(e.rho, advantages, strict=True)])


def ppo(e):
    return of_actor(e, 0.02, 0.95)


def rl2_ppo(e):
    return of_actor(e, 0.0, 1.0)


FORMULAS = {f.__name__: f for f in (
    cispo, dapo, deepseek_grpo, dppo, dr_grpo, gdpo, gmpo, gspo, luspo, opo, ppo, reinforce_pp, reinforce_pp_baseline,
    remax, rl2_ppo, rl2_reinforce, rloo, sapo, scale_rl, vespo,
)}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_a_preset_is_the_formula_of_its_source(name):
    for seed in range(4):
        e = Example(seed, size=4)
        close(whet(presets.PRESETS[name](), e), of_source(FORMULAS[name](e), e))


@pytest.mark.parametrize(("name", "lam", "beta", "clip"), [("ppo", 0.95, 0.02, 0.2), ("rl2_ppo", 1.0, 0.0, 0.5)])
def test_what_the_critic_learns_by_a_preset(name, lam, beta, clip):
    config = presets.PRESETS[name]()
    e = Example(3, size=4)
    given = advantage_inputs(kl_penalty_in_reward(config, batch_of(e), config.beta), rewards_of(e))
    returns = bind_fields(advantages_and_returns, config)(given)[1]
    expected = torch.cat(gae(e, outcomes(e, beta), lam)[1])
    torch.testing.assert_close(returns, expected, rtol=1e-9, atol=1e-9)
    old = torch.cat(e.values)
    new = (old + torch.randn(len(old), generator=torch.Generator().manual_seed(0)).double()).requires_grad_()
    x = LossInputs(
        sequence=torch.zeros(len(old), dtype=torch.long),
        mask=torch.ones(len(old), dtype=torch.bool),
        logprobs=torch.zeros(len(old)),
        new_values=new,
        token_columns={"values": old, "returns": expected},
    )
    bind_fields(VALUE_LOSSES["ppo"], config)(x)[0].mean().backward()
    ours, new.grad = new.grad, None
    held = old + (new - old).clamp(-clip, clip)
    torch.maximum((new - expected) ** 2, (held - expected) ** 2).mean().backward()
    torch.testing.assert_close(2 * ours, new.grad, rtol=1e-9, atol=1e-12)  # RL2's has no ½; ours agrees with Tunix


def test_every_preset_has_a_source_to_be_compared_with():
    assert {*FORMULAS, "trl_grpo", "trl_rloo"} == set(presets.PRESETS)


def test_the_kl_of_reinforce_pp_baseline_where_it_is_felt():
    e = Example(1, size=4)
    close(whet(presets.reinforce_pp_baseline(beta=0.1), e), of_source(reinforce_pp_baseline(e, 0.1), e))


def test_dppo_s_ratio_may_be_cut_off():
    e = Example(1, size=4)
    rows = []
    for rho, now, old, a in zip(e.rho, e.now, e.old, centred(e), strict=True):
        moved = now.detach().exp() - old.exp()
        kept = moved <= 0.2 if a > 0 else moved >= -0.2
        rows.append(torch.where(kept, -rho.detach().clamp(max=5.0) * a * now, 0.0).sum() / LONGEST)
    found = whet(presets.dppo(policy_loss_fn="cispo-trl", epsilon_high=5.0), e)
    close(found, of_source(sum(rows) / e.number, e))


def test_equation_8_of_dapo_is_a_mean_over_prompts_and_its_code_one_over_tokens():
    e = Example(1)
    rows = [clipped(rho, a, 0.2, 0.28) for rho, a in zip(e.rho, scaled(e), strict=True)]
    by_prompt = (mean_of_tokens(rows[:3]) + mean_of_tokens(rows[3:])) / 2
    found = whet(presets.dapo(loss_agg_mode="prompt-mean-token-mean"), e)
    close(found, of_source(by_prompt, e))
    assert float(found[0]) != pytest.approx(float(dapo(e).detach()), rel=1e-3)


def test_rl2_s_other_choices():
    # its DeepSeek preset: norm_var, k3 in the loss, a mean over sequences; its KL in the reward is of all tokens
    e = Example(2, size=4)
    config = presets.rl2_reinforce(
        norm_var=True, kl_type="loss", kl_loss_mode="k3", beta=0.1, loss_agg_mode="sequence-mean-token-mean"
    )
    rows = [
        clipped(rho, a) + 0.1 * ((now - ref) + (ref - now).exp() - 1)
        for rho, a, now, ref in zip(e.rho, scaled(e, torch.finfo(torch.float32).eps), e.now, e.ref, strict=True)
    ]
    close(whet(config, e), of_source(mean_of_means(rows), e))
    advantages = centred(e, with_kl(e, 0.1))
    rows = [clipped(rho, a) for rho, a in zip(e.rho, advantages, strict=True)]
    close(whet(presets.rl2_reinforce(beta=0.1), e), of_source(mean_of_tokens(rows), e))


# ---- TRL's own code --------------------------------------------------------------------------------------------------


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def of_trl(trainer, e, advantages):
    """Loss and gradient by completion of TRL's _compute_loss."""
    blank = torch.zeros(e.number, 1, dtype=torch.long)
    mask = padded([torch.ones(n, dtype=torch.long) for n in e.lengths])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(e.now), torch.zeros_like(mask).double(), None)
    batch = {
        "prompt_ids": blank,
        "prompt_mask": blank,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": padded(e.old),
        "ref_per_token_logps": padded(e.ref),
        "old_logps": padded(e.old).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    return of_source(trainer.run(batch), e)


def trl_advantages(e):
    """TRL's lines from the rewards of the functions to GRPO's advantages."""
    lines = statements_from(source("trl", "trainer/grpo_trainer.py"), "multi_objective_aggregation == 'sum", 2)
    this = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        reward_weights=torch.tensor(list(e.weights.values()), dtype=torch.float64),
        reward_funcs=list(e.weights),
    )
    names = {"torch": torch, "nanstd": function(source("trl", "trainer/utils.py"), "nanstd", torch=torch), "self": this,
             "rewards_per_func": torch.stack(list(e.table.values()), 1), "num_generations": e.size, "device": "cpu",
             "unscorable_mask": torch.zeros(e.number, dtype=torch.bool)}  # fmt: skip
    return run(lines, names)["advantages"]


def trl_rloo_advantages(e, beta):
    """TRL's lines from rewards and logprobs to RLOO's advantages, the KL among them."""
    tree = source("trl", "trainer/rloo_trainer.py")
    names = {"torch": torch, "self": SimpleNamespace(beta=beta), "gather": lambda x: x, "rewards": e.rewards,
             "old_per_token_logps": padded(e.old), "ref_per_token_logps": padded(e.ref), "num_generations": e.size,
             "completion_mask": padded([torch.ones(n) for n in e.lengths]).double()}  # fmt: skip
    names = run(statements_from(tree, "per_token_kl", 4), names)
    names["grouped_rewards"] = names["rewards"].view(-1, e.size)
    return run(statements_from(tree, "scorable_counts", 3), names)["advantages"]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_trl_grpo_is_trl_s_own_code(beta):
    for seed in range(3):
        e = Example(seed, size=4)
        fields = {"loss_type": "dapo", "epsilon": 0.2, "use_bias_correction_kl": True}
        trainer = trl_trainer("trl.trainer.grpo_trainer", "GRPOTrainer", **fields)
        trainer.beta = beta
        close(whet(presets.trl_grpo(beta=beta), e), of_trl(trainer, e, trl_advantages(e)))


def test_trl_rloo_is_trl_s_own_code():
    for seed in range(3):
        e = Example(seed, size=4)
        trainer = trl_trainer("trl.trainer.rloo_trainer", "RLOOTrainer")
        close(whet(presets.trl_rloo(), e), of_trl(trainer, e, trl_rloo_advantages(e, 0.05)))


def test_the_values_are_the_defaults_of_the_installed_trl():
    trainer = pytest.importorskip("trl.trainer.grpo_config")
    theirs = {f.name: f.default for f in dataclasses.fields(trainer.GRPOConfig)}
    ours = presets.trl_grpo()
    for name in ("num_generations", "num_iterations", "beta", "epsilon", "epsilon_high", "delta", "scale_rewards",
                 "importance_sampling_level", "use_bias_correction_kl", "mask_truncated_completions"):  # fmt: skip
        assert getattr(ours, name) == theirs[name], name
    assert (theirs["loss_type"], ours.loss_agg_mode) == ("dapo", "token-mean")
    theirs = {f.name: f.default for f in dataclasses.fields(pytest.importorskip("trl.trainer.rloo_config").RLOOConfig)}
    ours = presets.trl_rloo()
    for name in ("num_generations", "num_iterations", "beta", "epsilon", "epsilon_high", "mask_truncated_completions"):
        assert getattr(ours, name) == theirs[name], name
    assert not theirs["normalize_advantages"] and theirs["reward_clip_range"] is None
    gmpo = pytest.importorskip("trl.experimental.gmpo.gmpo_config").GMPOConfig
    assert presets.gmpo().epsilon == {f.name: f.default for f in dataclasses.fields(gmpo)}["epsilon"]
