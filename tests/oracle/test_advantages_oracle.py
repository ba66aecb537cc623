"""Advantages against loops written from the papers, against the peers' installed code, and against recorded numbers.

Peers leave rounding noise where rewards are equal, and treat groups of one in their own ways: see the tests by name.
"""

import functools
import math
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import advantage_inputs
from peer_code import function, run, source, statements_from
from torch import tensor

from whet.ops import ADVANTAGE_ESTIMATORS, estimate, gdpo_advantages, grpo_advantages, reinforce_advantages
from whet.rewards.length import overlong

EPS = 1e-6
NAN = math.nan

# ---- loops from the papers and verl's formulas, in plain floats ------------------------------------------------------


def whiten(values, trained):
    """(x - mean) / sqrt(var + 1e-8) over the trained tokens of all sequences; 0 elsewhere and where all are equal."""
    kept = [v for row, m in zip(values, trained, strict=True) for v, t in zip(row, m, strict=True) if t]
    if len(kept) < 2 or max(kept) == min(kept):
        return [[0.0] * len(row) for row in values]
    mean, var = statistics.fmean(kept), statistics.variance(kept)
    return [
        [(v - mean) / math.sqrt(var + 1e-8) if t else 0.0 for v, t in zip(row, m, strict=True)]
        for row, m in zip(values, trained, strict=True)
    ]


def of_group(name, rewards, lengths, everyone):
    """Advantages of one group's rewards, none of them NaN."""
    n, mean = len(rewards), statistics.fmean(rewards)
    if name == "reinforce" and n == 1:
        return [r - statistics.fmean(everyone) for r in rewards]
    if n < 2 or max(rewards) == min(rewards):
        return [0.0] * n
    first, second = sorted(rewards)[-1], sorted(rewards)[-2]
    deviation = statistics.stdev(rewards)
    weighted = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / max(sum(lengths), 1)
    return {
        "drgrpo": lambda: [r - mean for r in rewards],
        "grpo": lambda: [(r - mean) / (deviation + EPS) for r in rewards],
        "grpo_passk": lambda: [(first - second) / (deviation + EPS) if r == first else 0.0 for r in rewards],
        "maxrl": lambda: [(r - mean) / (mean + EPS) for r in rewards],
        "opo": lambda: [r - weighted for r in rewards],
        "reinforce": lambda: [r - mean for r in rewards],
        "rloo": lambda: [r - (sum(rewards) - r) / (n - 1) for r in rewards],
    }[name]()


def by_group(name, rewards, groups, lengths):
    out = [0.0] * len(rewards)
    everyone = [r for r in rewards if not math.isnan(r)]
    for g in set(groups):
        own = [j for j, other in enumerate(groups) if other == g and not math.isnan(rewards[j])]
        found = of_group(name, [rewards[j] for j in own], [lengths[j] for j in own], everyone) if own else []
        for j, a in zip(own, found, strict=True):
            out[j] = a
    return out


def of_turns(rewards, groups, trained, token_rewards):
    """The return from each turn on, less the mean of the others' of the group; an ended one's last."""
    turns, returns = [], []
    for r, row, m in zip(rewards, token_rewards, trained, strict=True):
        starts = [t and not (i and m[i - 1]) for i, t in enumerate(m)]
        turns.append([max(sum(starts[: i + 1]) - 1, 0) for i in range(len(m))])
        each = [sum(x for x, k in zip(row, turns[-1], strict=True) if k == turn) for turn in range(max(turns[-1]) + 1)]
        each[-1] += r
        returns.append([sum(each[k:]) for k in range(len(each))])
    out = []
    for j, (of, m) in enumerate(zip(turns, trained, strict=True)):
        others = [i for i, g in enumerate(groups) if g == groups[j] and i != j and not math.isnan(rewards[i])]
        row = []
        for k, t in zip(of, m, strict=True):
            peers = [returns[i][min(k, len(returns[i]) - 1)] for i in others]
            alone = not peers or math.isnan(rewards[j]) or not t
            row.append(0.0 if alone else returns[j][k] - statistics.fmean(peers))
        out.append(row)
    return out


def naive(name, rewards, groups, trained, token_rewards, greedy):
    """One list of advantages per trajectory; token_rewards and trained are lists per trajectory too."""
    lengths = [sum(m) for m in trained]
    totals = [r + sum(t) for r, t in zip(rewards, token_rewards, strict=True)]
    given = [[t and not math.isnan(r) for t in m] for r, m in zip(rewards, trained, strict=True)]
    if name in ("reinforce_plus_plus", "remax"):
        values = []
        for j, (r, row, m) in enumerate(zip(rewards, token_rewards, trained, strict=True)):
            ahead, back, pending = 0.0, [0.0] * len(m), 0.0 if math.isnan(r) else r
            for t in reversed(range(len(m))):
                pending += row[t]
                if m[t]:
                    ahead = pending + 0.9 * ahead if name == "reinforce_plus_plus" else pending + ahead
                    back[t], pending = ahead, 0.0
            if any(m):  # what came before the first trained token is that one's
                back[m.index(True)] += pending
            values.append(back if name == "reinforce_plus_plus" else [b - greedy[groups[j]] for b in back])
        if name == "reinforce_plus_plus":
            return whiten(values, given)
        return [[v if t else 0.0 for v, t in zip(row, m, strict=True)] for row, m in zip(values, given, strict=True)]
    if name == "turn_rloo":
        return of_turns(rewards, groups, trained, token_rewards)
    if name == "reinforce_plus_plus_baseline":
        centred = by_group("drgrpo", totals, groups, lengths)
        return whiten([[a] * len(m) for a, m in zip(centred, trained, strict=True)], given)
    if name in ("scalerl", "gdpo"):
        z = by_group("drgrpo" if name == "scalerl" else "grpo", rewards if name == "gdpo" else totals, groups, lengths)
        if name == "gdpo":  # the rewards of tokens are a function of their own
            sums = [NAN if math.isnan(r) else sum(t) for r, t in zip(rewards, token_rewards, strict=True)]
            z = [a + b for a, b in zip(z, by_group("grpo", sums, groups, lengths), strict=True)]
        kept = [a for a, r in zip(z, rewards, strict=True) if not math.isnan(r)]
        mean = statistics.fmean(kept) if name == "gdpo" and kept else 0.0
        std = statistics.stdev(kept) if len(kept) > 1 else 0.0
        flat = not kept or max(kept) == min(kept)
        each = [0.0 if math.isnan(r) or flat else (a - mean) / (std + EPS) for a, r in zip(z, rewards, strict=True)]
    else:
        each = by_group(name, totals, groups, lengths)
    return [[a] * len(m) for a, m in zip(each, trained, strict=True)]


@pytest.mark.spread(24)
@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - {"gae"}))
@pytest.mark.parametrize("seed", range(6))
def test_estimators_equal_the_loop(name, seed):
    rng = random.Random(seed)
    number = rng.randint(1, 30)
    groups = sorted(rng.randint(0, 6) for _ in range(number))
    groups = [sorted(set(groups)).index(g) for g in groups]
    rewards = [rng.choice([0.0, 1.0, 0.9, abs(rng.gauss(0, 3)), NAN]) for _ in range(number)]
    trained = [[rng.random() < 0.8 for _ in range(rng.randint(1, 5))] for _ in range(number)]
    give = abs if seed % 2 else (lambda r: 0.0)  # maxrl takes no negative ones
    token_rewards = [[give(rng.gauss(0, 1)) for _ in m] for m in trained]
    greedy = [rng.random() for _ in set(groups)]
    x = advantage_inputs(
        rewards, groups, [len(m) for m in trained], [t for m in trained for t in m],
        token_rewards=tensor([t for row in token_rewards for t in row], dtype=torch.float64) if seed % 2 else None,
        greedy_rewards=tensor(greedy, dtype=torch.float64),
    )  # fmt: skip
    options = {"gamma": 0.9} if name == "reinforce_plus_plus" else {}
    found = estimate(functools.partial(ADVANTAGE_ESTIMATORS[name], **options), x)[x.mask].tolist()
    want = naive(name, rewards, groups, trained, token_rewards, greedy)
    flat = [a for row, m in zip(want, trained, strict=True) for a, t in zip(row, m, strict=True) if t]
    assert found == pytest.approx(flat, rel=1e-6, abs=1e-7)


# ---- the peers' own code ---------------------------------------------------------------------------------------------

# 3 prompts of 4 completions, two reward functions; of group 1 the fourth row is scored by neither, the third by one
TABLE = [[1.0, 0.2], [0.0, 0.7], [0.0, 0.1], [1.0, 0.4], [0.0, 3.0], [1.0, -1.0], [1.0, NAN], [NAN, NAN],
         [0.5, 2.0], [0.25, 2.0], [0.0, 2.0], [0.75, -2.0]]  # fmt: skip
WEIGHTS = {"a": 1.0, "b": 0.5}
TRL = {
    "group": [
        0.75411919,
        -0.57667938,
        -1.1089988,
        0.931559,
        0.99980004,
        -0.99980004,
        0.0,
        0.0,
        0.80398095,
        0.48238857,
        0.16079619,
        -1.44716572,
    ],
    "batch": [
        0.72287376,
        -0.55278581,
        -1.06304964,
        0.8929617,
        0.85043971,
        -0.85043971,
        0.0,
        0.0,
        1.06304964,
        0.63782979,
        0.21260993,
        -1.91348936,
    ],
    "none": [0.425, -0.325, -0.625, 0.525, 0.5, -0.5, 0.0, 0.0, 0.625, 0.375, 0.125, -1.125],
    "gdpo": [
        0.78222604,
        -0.27486588,
        -1.79694636,
        1.2895862,
        -1.07557366,
        0.30040955,
        0.77516412,
        0.0,
        0.85562212,
        -0.18422761,
        -1.22407733,
        0.55268282,
    ],
    "rloo": [0.56666667, -0.43333333, -0.83333333, 0.7, 0.75, -0.75, 0.0, 0.0, 0.83333333, 0.5, 0.16666667, -1.5],
}
"""TRL 1.16 on TABLE."""


def table():
    """The columns of TABLE, and their weighted sums."""
    columns = {name: tensor([row[i] for row in TABLE], dtype=torch.float64) for i, name in enumerate(WEIGHTS)}
    both = torch.stack(list(columns.values()))
    total = (both.nan_to_num() * tensor(list(WEIGHTS.values()), dtype=torch.float64)[:, None]).sum(0)
    return columns, torch.where(both.isnan().all(0), torch.nan, total)


def ours(case, eps=1e-4):
    columns, total = table()
    groups = torch.arange(12) // 4
    if case == "gdpo":
        x = advantage_inputs(total, groups, table=columns, reward_weights=WEIGHTS)
        return gdpo_advantages(x, advantage_eps=eps).tolist()
    if case == "rloo":
        return ADVANTAGE_ESTIMATORS["rloo"](total, groups).tolist()
    return grpo_advantages(total, groups, scale_rewards=case, advantage_eps=eps).tolist()


def theirs(case):
    """TRL's own statements on TABLE."""
    nanstd = function(source("trl", "trainer/utils.py"), "nanstd", torch=torch)
    both = tensor(TABLE, dtype=torch.float64)
    _, total = table()
    if case == "rloo":
        lines = statements_from(source("trl", "trainer/rloo_trainer.py"), "scorable_counts", 3)
        names = {"torch": torch, "rewards": total, "grouped_rewards": total.view(-1, 4), "num_generations": 4}
        return run(lines, names)["advantages"].nan_to_num(nan=0.0).tolist()
    lines = statements_from(source("trl", "trainer/grpo_trainer.py"), "multi_objective_aggregation == 'sum", 2)
    this = SimpleNamespace(
        multi_objective_aggregation="normalize_then_sum" if case == "gdpo" else "sum_then_normalize",
        scale_rewards=case,
        reward_weights=tensor(list(WEIGHTS.values()), dtype=torch.float64),
        reward_funcs=list(WEIGHTS),
    )
    unscorable = both.isnan().all(1)
    names = {"torch": torch, "nanstd": nanstd, "self": this, "rewards_per_func": both, "unscorable_mask": unscorable,
             "num_generations": 4, "device": "cpu"}  # fmt: skip
    return run(lines, names)["advantages"].tolist()


@pytest.mark.parametrize("case", sorted(TRL))
def test_as_recorded_from_trl(case):
    assert ours(case) == pytest.approx(TRL[case], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("case", sorted(TRL))
def test_as_trl_itself_computes(case):
    assert ours(case) == pytest.approx(theirs(case), rel=1e-6, abs=1e-6)


def test_where_rewards_are_equal_trl_leaves_noise_and_whet_nothing():
    rewards = torch.full((7,), 0.9)
    noise = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # TRL's line in fp32: 0.000594 each
    assert noise.abs().max() > 1e-4
    assert grpo_advantages(rewards, torch.zeros(7, dtype=torch.long), advantage_eps=1e-4).tolist() == [0.0] * 7


def test_async_grpo_takes_the_deviation_of_the_population():
    rewards = [1.0, 0.0, 0.25, NAN]
    got = grpo_advantages(tensor(rewards), torch.zeros(4, dtype=torch.long), advantage_eps=1e-8, advantage_ddof=0)
    # mean 5/12, squares (49 + 25 + 4) / 144 = 13/24, / 3
    std = math.sqrt(13 / 72)
    assert got.tolist() == pytest.approx([7 / 12 / std, -5 / 12 / std, -1 / 6 / std, 0], rel=1e-6)
    lines = statements_from(source("trl", "experimental/async_grpo/async_rollout_worker.py"), "scored_mask", 3)
    found = run(lines, {"np": np, "rewards": np.array(rewards)})["advantages"]
    assert got.tolist() == pytest.approx(found.tolist(), rel=1e-6)


MC = {
    (1.0, 0.0, 0.25, 3.0): [-0.04596385, -0.78138554, -0.59753013, 1.42487955],
    (0.57450044, 0.09968603, 0.7419659): [0.30749887, -1.11763918, 0.81014025],
}
"""TorchRL 0.14.1, MCAdvantage(trajectory_return="sum"): (r - mean) / max(std, 1e-6)."""


@pytest.mark.parametrize("rewards", MC)
def test_torchrl_bounds_the_deviation_where_whet_adds_nothing(rewards):
    got = grpo_advantages(tensor(rewards), torch.zeros(len(rewards), dtype=torch.long), advantage_eps=0.0).tolist()
    assert got == pytest.approx(MC[rewards], rel=1e-5)
    llm = pytest.importorskip("torchrl.objectives.llm")
    tensordict = pytest.importorskip("tensordict")
    group = llm.MCAdvantage(grpo_size=len(rewards), prompt_key="query", trajectory_return="sum")
    for r in rewards:
        step = tensordict.TensorDict({"reward": tensor([[r]]), "done": tensor([[True]])}, [1])
        done = group.inv(tensordict.TensorDict({"query": "a", "next": step}, [1]))
    assert got == pytest.approx(done["advantage"].flatten().tolist(), rel=1e-5)


def test_below_the_bound_torchrl_and_whet_differ():
    rewards = tensor([0.0, 1e-7], dtype=torch.float64)  # deviation 7.07e-8: TorchRL divides by 1e-6
    bounded = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
    assert bounded.tolist() == pytest.approx([-0.05, 0.05])
    found = grpo_advantages(rewards, tensor([0, 0]), advantage_eps=0.0)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


R = [0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", R, [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]),
        ("drgrpo", R, [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747]),
        ("rloo", [1.0, 2, 3, 4, 5, 6], [-1.5, 0, 1.5, -1.5, 0, 1.5]),
    ],
)
def test_recorded_from_tunix(name, rewards, expected):
    got = ADVANTAGE_ESTIMATORS[name](tensor(rewards), tensor([0, 0, 0, 1, 1, 1]))
    assert got.tolist() == pytest.approx(expected, abs=2e-6)


def test_tunix_gives_nothing_to_leave_one_out_of_one():
    assert ADVANTAGE_ESTIMATORS["rloo"](tensor([1.0, 2, 3]), tensor([0, 1, 2])).tolist() == [0, 0, 0]


def test_recorded_from_trl_on_right_and_wrong():
    got = grpo_advantages(tensor([1.0, 0, 0, 1]), tensor([0, 0, 0, 0]), advantage_eps=1e-4)
    assert got.tolist() == pytest.approx([0.8659, -0.8659, -0.8659, 0.8659], abs=5e-5)


@pytest.mark.parametrize("global_norm", [False, True])
@pytest.mark.parametrize("norm_var", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_rl2s_formula(size, norm_var, global_norm):
    """RL2's estimator in fp32 as its source has it: the mean of the batch for groups of one, of the group else."""
    rewards = tensor(R)
    rows = rewards[None] if size == 1 or global_norm else rewards.view(-1, size)
    baseline, std = rows.mean(-1, keepdim=True), rows.std(-1, keepdim=True)
    want = ((rows - baseline) / (std + torch.finfo(torch.float32).eps) if norm_var else rows - baseline).flatten()
    options = {"global_norm": global_norm, "norm_var": norm_var, "advantage_eps": torch.finfo(torch.float32).eps}
    got = reinforce_advantages(rewards, torch.arange(6) // size, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# ---- the punishment of overlong completions --------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "tunix"), [(70, 0.0), (80, 0.0), (90, -5.0), (100, -10.0), (110, -15.0)])
def test_overlong_is_tunixs_with_a_floor(length, tunix):
    options = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_buffer_penalty": 10.0}
    assert overlong([[0] * length], **options) == [max(tunix, -10.0)]


@pytest.mark.parametrize(("most", "buffer"), [(100, 20), (7, 7), (50, 1)])
def test_overlong_is_trls(most, buffer):
    theirs = function(source("trl", "rewards/other_rewards.py"), "_SoftOverlongPunishment")(most, buffer)
    ids = [[0] * n for n in range(0, 2 * most)]
    ours = overlong(ids, max_response_length=most, overlong_buffer_length=buffer)
    assert ours == pytest.approx(theirs(completion_ids=ids))
