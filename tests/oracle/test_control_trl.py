"""KL, corrections, masks and entropy control against TRL's own code, where TRL is installed: values and gradients."""

import ast
import collections
import functools
import inspect
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from helpers import completion, prompt

from whet.config import GRPOConfig, PolicyConfig
from whet.learners.kl_controller import KLController
from whet.learners.sampler_mismatch import compare_sampler
from whet.metrics import Mean
from whet.ops import (
    CORRECTIONS,
    PolicyObjective,
    aggregate,
    clipped_surrogate,
    entropy_rank,
    high_entropy_mask,
    off_policy_mask,
    reference_kl,
    token_weights,
)
from whet.types import Group, LossInputs, TokenBatch

trainer = pytest.importorskip("trl.trainer.grpo_trainer")
Trainer = trainer.GRPOTrainer
ROWS, WIDTH = 5, 7


def padded(seed=0, rows=ROWS):
    """Columns [rows, WIDTH] as TRL has them: right padded, float64; advantages [rows]."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) * 2 - 0.05
    lengths = torch.randint(1, WIDTH + 1, (rows, 1), generator=g)
    return SimpleNamespace(
        mask=(torch.arange(WIDTH) < lengths).long(),
        logprobs=draw().requires_grad_(),
        old=draw(),
        ref=draw(),
        sampler=draw(),
        entropy=(-draw()).requires_grad_(),
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
    )


def packed(p, rows=None, **columns):
    """The same tokens as whet has them: end to end, without padding. Returns: the inputs and where they lie."""
    rows = slice(None) if rows is None else rows
    mask = p.mask[rows].bool()
    flat = lambda x: x[rows][mask]
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    return LossInputs(
        sequence=sequence,
        mask=torch.ones(len(sequence), dtype=torch.bool),
        logprobs=flat(p.logprobs),
        old_logprobs=flat(p.old),
        ref_logprobs=flat(p.ref),
        sampler_logprobs=flat(p.sampler),
        advantages=p.advantages[rows][sequence],
        entropy=flat(p.entropy),
        token_columns={n: flat(c) for n, c in columns.items()},
    )


def theirs(p, *, rows=None, accumulate=1, control=None, correction=None, level="token", **args):
    """TRL's _compute_loss of a micro-batch, on given logprobs and entropies."""
    settings = {
        "beta": 0.0, "use_bias_correction_kl": False, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0, "use_adaptive_entropy": False, "delta": None, "entropy_target": 0.2,
        "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, **args,
    }  # fmt: skip
    rows = slice(None) if rows is None else rows
    whole = lambda x, **kw: x
    made = SimpleNamespace(
        args=SimpleNamespace(**settings, steps_per_generation=1),
        accelerator=SimpleNamespace(
            gather=whole, reduce=whole, pad_across_processes=whole, num_processes=1, sync_gradients=True
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **kw: (p.logprobs[rows], p.entropy[rows], None),
        aux_loss_enabled=False,
        importance_sampling_level=level,
        loss_type="bnpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=accumulate,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0 or settings["use_adaptive_entropy"],
        _last_world_entropy=math.inf,
        _entropy_window_stats=None,
        **{n: settings[n] for n in ("beta", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef")},
        use_adaptive_entropy=settings["use_adaptive_entropy"],
    )
    made.get_off_policy_mask = Trainer.get_off_policy_mask
    made.get_high_entropy_mask = functools.partial(Trainer.get_high_entropy_mask, made)
    made = made if control is None else control(made)
    inputs = {
        "prompt_ids": torch.zeros(len(p.mask[rows]), 1).long(),
        "prompt_mask": torch.ones(len(p.mask[rows]), 1).long(),
        "completion_ids": torch.zeros_like(p.mask[rows]),
        "completion_mask": p.mask[rows],
        "advantages": p.advantages[rows],
        "old_per_token_logps": p.old[rows],
        "ref_per_token_logps": p.ref[rows],
        "sampling_per_token_logps": p.sampler[rows],
        "importance_sampling_ratio": correction,
    }
    return Trainer._compute_loss(made, None, inputs), made


def ours(objective, x):
    """The token mean of an objective."""
    return aggregate(objective(x)[0], token_weights(x.mask, x.sequence, "token-mean"))


def same_loss_and_gradient(p, mine, other):
    """Values and gradients of logprobs and entropies to 1e-6."""
    assert mine.item() == pytest.approx(other.item(), rel=1e-6)
    wrt = [p.logprobs, p.entropy]
    grads = [torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True) for loss in (mine, other)]
    for a, b in zip(*grads, strict=True):
        a, b = (torch.zeros_like(p.logprobs) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b * p.mask, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correct", [False, True])
def test_the_kl_in_the_loss_with_and_without_bias_correction(seed, correct, level):
    p = padded(seed)
    at = {"importance_sampling_level": level}
    kl = functools.partial(reference_kl, kl_loss_mode="k3", use_bias_correction_kl=correct, **at)
    mine = ours(PolicyObjective(surrogate=functools.partial(clipped_surrogate, **at), kl=kl, beta=0.3), packed(p))
    same_loss_and_gradient(p, mine, theirs(p, beta=0.3, use_bias_correction_kl=correct, level=level)[0])


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_the_off_policy_mask(threshold):
    p = padded(0)
    mask = functools.partial(off_policy_mask, off_policy_mask_threshold=threshold)
    x = packed(p)
    assert 0 < mask(x).mean() < 1
    mine = ours(PolicyObjective(surrogate=clipped_surrogate, factors=(mask,)), x)
    same_loss_and_gradient(p, mine, theirs(p, off_policy_mask_threshold=threshold)[0])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_mask_of_high_entropies(share):
    p = padded(2)
    rank = torch.zeros_like(p.old)
    rank[p.mask.bool()] = entropy_rank(p.entropy.detach()[p.mask.bool()], torch.ones(int(p.mask.sum())).bool())
    x = packed(p, entropy_rank=rank)
    factor = functools.partial(high_entropy_mask, top_entropy_quantile=share)
    mine = ours(PolicyObjective(surrogate=clipped_surrogate, factors=(factor,)), x)
    same_loss_and_gradient(p, mine, theirs(p, top_entropy_quantile=share)[0])


def test_the_quantile_is_of_the_optimizer_step_here_and_of_each_micro_batch_there():
    p = padded(4, rows=4)
    with torch.no_grad():
        p.entropy[:2] += 5.0  # the tokens of the first micro-batch are all less certain than those of the second
        p.mask[:] = 1
    rank = torch.zeros_like(p.old)
    rank[p.mask.bool()] = entropy_rank(p.entropy.detach()[p.mask.bool()], torch.ones(int(p.mask.sum())).bool())
    made = theirs(p)[1]
    kept_there = [
        int(Trainer.get_high_entropy_mask(made, p.entropy[rows], p.mask[rows], 0.5).sum())
        for rows in (slice(0, 2), slice(2, 4))
    ]
    kept_here = [
        int(high_entropy_mask(packed(p, rows, entropy_rank=rank), top_entropy_quantile=0.5).sum())
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert (kept_here, kept_there) == ([14, 0], [7, 7])


def correction_of(old, sampler, mask, *, mode, low, high):
    """The importance ratio as TRL's generation step makes it, and its metrics: its own statements on given logprobs."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Trainer._generate_and_score_completions)))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and any(part in ast.unparse(node) for part in ("per_sequence_logps_diff", "delta"))
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
    ]  # fmt: skip
    assert len(blocks) == 2
    metrics = {"train": collections.defaultdict(list)}
    names = {
        "self": SimpleNamespace(
            accelerator=SimpleNamespace(gather=lambda x: x),
            _metrics=metrics,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
        "mode": "train",
        "device": "cpu",
        "nanmin": torch.min,
        "nanmax": torch.max,
        "torch": torch,
        "math": math,
        "completion_mask": mask,
        "tool_mask": None,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampler,
    }
    exec(compile(ast.Module(sorted(blocks, key=lambda n: n.lineno), []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"], {name: value for name, (value,) in metrics["train"].items()}


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "nan"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.6, 1.5)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_importance_sampling_of_each_mode(mode, low, high, unknown):
    p = padded(3)
    if unknown:
        p.sampler[0, 0] = math.nan
    ratio, _ = correction_of(p.old, p.sampler, p.mask, mode=mode, low=low, high=high)
    level, how = mode.split("_")
    factor = functools.partial(CORRECTIONS[level], sampler_is_mode=how, sampler_is_threshold=high, sampler_is_lower=low)
    x = packed(p)
    torch.testing.assert_close(factor(x), ratio.expand(ROWS, WIDTH)[p.mask.bool()], rtol=1e-6, atol=1e-12)
    mine = ours(PolicyObjective(surrogate=clipped_surrogate, factors=(factor,)), x)
    same_loss_and_gradient(p, mine, theirs(p, correction=ratio)[0])


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "nan"])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate", "sequence_mask"])
def test_what_is_logged_of_the_importance_sampling(mode, unknown):
    p = padded(3)
    if unknown:
        p.sampler[0, 0] = math.nan
    _, logged = correction_of(p.old, p.sampler, p.mask, mode=mode, low=0.6, high=1.5)
    x, (level, how) = packed(p), mode.split("_")
    lengths = torch.bincount(x.sequence).tolist()
    done = tuple(completion([0] * n, g) for g, n in enumerate(lengths))
    batch = TokenBatch.from_groups([Group(prompt=prompt("a"), completions=done)])
    batch = batch.replace(old_logprobs=x.old_logprobs, sampler_logprobs=x.sampler_logprobs)
    config = GRPOConfig(sampler_is=level, sampler_is_mode=how, sampler_is_threshold=1.5, sampler_is_lower=0.6)
    found = {name: metric.value for name, metric in compare_sampler(batch, config)[1].items()}
    of_ratio = {
        f"sampling/importance_sampling_ratio/{n}": found[f"sampler_is/weight_{n}"] for n in ("mean", "min", "max")
    }
    of_gap = {
        f"sampling/sampling_logp_difference/{n}": found[f"sampler_trainer/logp_diff_{n}"] for n in ("mean", "max")
    }
    assert of_ratio | of_gap == pytest.approx(logged, rel=1e-6)


def test_the_entropy_bonus_is_under_the_token_weights_here_and_a_token_mean_there():
    p = padded(5)
    objective = PolicyObjective(surrogate=clipped_surrogate, entropy_coef=0.3)
    same_loss_and_gradient(p, ours(objective, packed(p)), theirs(p, entropy_coef=0.3)[0])
    x = packed(p)
    weights = token_weights(x.mask, x.sequence, "sequence-mean-token-mean")
    losses = [PolicyObjective(surrogate=clipped_surrogate, entropy_coef=c)(x)[0] for c in (0.0, 1.0)]
    bonus = [aggregate(loss, weights).item() for loss in losses]
    there = [theirs(p, control=grpo, entropy_coef=c)[0].item() for c in (0.0, 1.0)]
    assert bonus[0] == pytest.approx(there[0])
    by_sequence = torch.stack([row[m.bool()].mean() for row, m in zip(p.entropy.detach(), p.mask)]).mean()
    assert bonus[0] - bonus[1] == pytest.approx(by_sequence.item())
    assert there[0] - there[1] == pytest.approx(p.entropy.detach()[p.mask.bool()].mean().item())


def grpo(made):
    made.loss_type = "grpo"
    return made


@pytest.mark.parametrize("target", [0.5, 1.05, 5.0])
def test_the_adaptive_entropy_coefficient_step_by_step(target):
    settings = {
        "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": target, "entropy_coef_delta": 0.015,
        "entropy_coef_min": 0.01, "entropy_coef_max": 0.05,
    }  # fmt: skip
    mine, there = KLController(PolicyConfig(**settings)), None
    for seed in range(5):
        p = padded(seed)
        loss, there = theirs(p, control=lambda new, before=there: carried(new, before), **settings)
        objective = PolicyObjective(surrogate=clipped_surrogate, entropy_coef=mine.loss_entropy_coef)
        same_loss_and_gradient(p, ours(objective, packed(p)), loss)
        entropy = p.entropy.detach()[p.mask.bool()]
        mine.after_update({"entropy/token_mean": Mean(entropy.sum().item(), len(entropy))})
        assert (mine.entropy_coef, mine.entropy) == pytest.approx((there.entropy_coef, there._last_world_entropy))


def carried(new, before):
    """TRL's controller goes on from where the last step left it."""
    if before is not None:
        new.entropy_coef, new._last_world_entropy = before.entropy_coef, before._last_world_entropy
    return new


def test_the_reference_moves_as_trls_callback_moves_it():
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    torch.manual_seed(0)
    policy, ref, mine = (torch.nn.Linear(3, 2) for _ in range(3))
    mine.load_state_dict(ref.state_dict())
    callbacks.SyncRefModelCallback._sync_target_model(policy, ref, 0.6)
    with torch.no_grad():
        for a, b in zip(mine.parameters(), policy.parameters()):
            a.lerp_(b, 0.6)  # what ModelWorker.load_weights does
    for a, b in zip(mine.parameters(), ref.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
