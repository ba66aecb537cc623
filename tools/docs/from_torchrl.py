"""docs/from-torchrl.md: every option of TorchRL's objectives, and what whet.torchrl does with it."""

from __future__ import annotations

from tools.docs.table import legend, table
from whet.compat.field import Field

__all__ = ["DEFECTS", "REQUIRED", "TORCHRL", "page"]

REQUIRED = "(required)"
"""The default of an option that has none."""


_MEAN = "the mean over trained tokens; there over all places, prompt and padding included, or 0 at those"
_KL = "aggregated as the objective is; there a mean over all places, whatever `aggregation` says"
_GATHER: dict[str, Field] = {
    "grpo_size": Field(REQUIRED, note="0 and less are refused; so is 1, unless steps are pooled"),
    "prompt_key": Field("query", note='None is "query"'),
    "rewards_key": Field(("next", "reward")),
    "advantage_key": Field("advantage"),
    "done_key": Field(("next", "done")),
    "verbose": Field(False, "differs", "accepted without effect: `get_stats()` says what is held"),
    "trajectory_return": Field(None, note='None pools the steps of all trajectories; `mc_advantage`: "sum"'),
    "keep_return_bounds": Field(None),
    "candidate_group_size": Field(None),
    "candidate_selection_min_size": Field(None),
    "candidate_selector": Field(None, note="TorchRL's own selectors may be given too"),
}

TORCHRL: dict[str, dict[str, Field]] = {
    "GRPOLoss": {
        "actor_network": Field(None, "differs", "also any module that returns logprobs, or (logprobs, entropy)"),
        "clip_epsilon": Field(0.2, note="ε_low below 1; `DAPO`: (0.2, 0.28); `CISPOLoss`: (1, 0.2), unbounded"),
        "kl_mask_threshold": Field(None, note="at most 0 is refused; there it is as None"),
        "aggregation": Field("token_mean", note="an unknown one is refused; `prompt_mean` is 0-d, there (1,)"),
        "entropy_bonus": Field(True, note="of the trained tokens' logits alone: no masked copy of all of them"),
        "samples_mc_entropy": Field(1),
        "entropy_coeff": Field(0.01, note="a mapping of heads is refused when the loss is made"),
        "gamma": Field(None, "refused", "accepted there, and never used"),
        "reduction": Field(None, "differs", '"sum" sums over the trained tokens; there it is the mean'),
        "clip_value": Field(None, "refused", "accepted there, and never used"),
        "kl_to_ref_coeff": Field(None, note="a negative one is refused; there it is as None"),
        "kl_to_inference_coeff": Field(None),
        "device": Field(None),
        "masking_strategy": Field("sft", note='"generic" leaves out a first token whose logprob was recorded as 0.0'),
        "ref_log_prob_padding_side": Field("left"),
        "ref_log_prob_padding_value": Field(0.0),
        "kwargs": Field(REQUIRED, "refused", "an unknown option is an error that names the nearest"),
    },
    "GRPOLoss.set_keys": {
        "advantage": Field("advantage", note="(B, T, 1), (B, 1, 1); also (B,), (B, 1), (B, T). Ragged: on the left"),
        "action": Field(("tokens", "full")),
        "sample_log_prob": Field(
            ("log_probs", "full"), note="where it is missing, `('log_probs', 'response')` is laid at the right end"
        ),
        "ref_log_probs": Field(("next", "ref_log_probs", "full")),
    },
    "GRPOLossOutput": {
        "loss_objective": Field(REQUIRED),
        "clip_fraction": Field(REQUIRED, "differs", _MEAN),
        "kl_approx": Field(REQUIRED, "differs", _MEAN),
        "ESS": Field(REQUIRED, note="1 where nothing is trained; there NaN"),
        "entropy": Field(None, "differs", _MEAN),
        "loss_entropy": Field(None),
        "loss_kl_to_ref": Field(None, "differs", _KL),
        "kl_to_ref": Field(None, "differs", _MEAN),
        "loss_kl_to_inference": Field(None, "differs", _KL),
        "kl_to_inference": Field(None, "differs", _MEAN),
    },
    "MCAdvantage": _GATHER,
    "MCAdvantageSelector": {
        "strategy": Field("balanced"),
        "max_combinations": Field(100_000),
        "in_keys": Field(None),
    },
    "torchrl.objectives.llm": {
        "CISPOLoss": Field(REQUIRED, "differs", "the policy gradient weighted by a clipped, constant ratio"),
        "CISPOLossOutput": Field(REQUIRED),
        "DAPO": Field(REQUIRED, "differs", "DAPO's own clip range"),
        "DAPOLossOutput": Field(REQUIRED),
        "DistillationLoss": Field(REQUIRED, "absent", "policy_loss_fn distillation or gkd of a whet run"),
        "DistillationLossOutput": Field(REQUIRED, "absent", "with it"),
        "GRPOLoss": Field(REQUIRED),
        "GRPOLossOutput": Field(REQUIRED, "differs", "`.loss`, `.sum(reduce=True)`, `.mean(reduce=True)` are the loss"),
        "LLMLossOutput": Field(REQUIRED),
        "MCAdvantage": Field(REQUIRED),
        "MCAdvantageSelector": Field(REQUIRED),
        "RayMCAdvantage": Field(REQUIRED, "absent", "a RayReplayBuffer takes transform_factory=MCAdvantage"),
        "SFTLoss": Field(REQUIRED, "absent", "`whet sft`"),
        "SFTLossOutput": Field(REQUIRED, "absent", "with it"),
        "k3_kl_token_estimate": Field(REQUIRED, "absent", '`whet.ops.kl_divergence(..., mode="k3")`'),
    },
}
"""Class, or what else has names -> name -> what it is here."""

OWN = {
    "GRPOLoss": ("compat",),
    "GRPOLoss.set_keys": ("mask",),
    "GRPOLossOutput": ("loss",),
    "MCAdvantage": ("compat", "max_queued_groups", "group_timeout", "clock"),
    "torchrl.objectives.llm": ("Trajectory", "mc_advantage"),
}
"""What whet has besides."""

DEFECTS: tuple[tuple[str, str], ...] = (
    (
        "`CISPOLoss` has no stop-gradient and no log π: a clipped token gets no gradient, the opposite of CISPO",
        "the ratio is a constant that weighs −A log π; such runs can be repeated with policy_loss_fn=cispo-torchrl",
    ),
    (
        "`TransformersWrapper` records a logprob of 0.0 for the first generated token, so that fresh data look off "
        "policy (ESS 0.7 in the test)",
        "where the first recorded logprob of every row is exactly 0.0 it is taken as not recorded: a ratio of 1",
    ),
    (
        "in tokens mode the wrapper writes no `('log_probs', 'full')`, and the loss raises KeyError on it",
        "the response's logprobs are laid at the right end of the row",
    ),
    (
        "the recipe trains on `loss.mean(reduce=True)`, the mean over all fields, metrics included: the gradient is "
        "divided by 4, by 6 with the entropy bonus, by 10 with both KLs",
        "`.mean(reduce=True)` is the loss; a learning rate that was tuned there is divided by the same number here",
    ),
    (
        "the KLs, kl_approx, clip_fraction and entropy divide by all places: the longer the prompts, the smaller the "
        "KL's weight",
        "they divide by the trained tokens",
    ),
    (
        "unknown keywords are swallowed; an unknown aggregation or reduction is the token mean; `DAPO()` is "
        "`GRPOLoss()`",
        "unknown names raise with the nearest; DAPO has its range",
    ),
    (
        "`kl_mask_threshold` is documented as a distance from the reference; it is one from the sampler",
        "the same distance, documented as what it is",
    ),
    (
        "advantages of different lengths are padded on the right, all else on the left",
        "on the left",
    ),
    (
        'masking_strategy="generic" trains the first token, for which TransformersWrapper records a logprob of 0.0, '
        "under a flat distribution (ESS 0.9 in the test)",
        "where the first recorded logprob of every row is exactly 0.0 the first tokens are left out",
    ),
    (
        "an actor of tensordict's, ProbabilisticTensorDictSequential, is asked for `logits_key`, which it refuses",
        "get_dist(tensordict) alone is called",
    ),
    (
        "`TransformersWrapper(pad_model_input=False)` runs rows under a mask that is not causal",
        "nothing can be done about it in a loss: leave pad_model_input at True",
    ),
    (
        "`MCAdvantage` pools the rewards of all steps by default: with one reward at the end, long trajectories weigh "
        "more in mean and deviation",
        'the same by default; trajectory_return="sum" compares trajectories, and is what mc_advantage does',
    ),
    ("a group of equal rewards keeps rounding noise, one of a single value is NaN", "advantages are exactly 0"),
    ("incomplete groups are held for ever", "max_queued_groups and group_timeout, and counters of what was given up"),
    (
        "with several writers and local queues, groups never fill up",
        "share_memory_ raises with what to do instead",
    ),
    (
        "masking strategies give logprobs of shapes that don't fit those recorded, and say little about it",
        "all are of the whole row; where they are not, the error has both shapes and the key",
    ),
    (
        "how the total is had differs from loss to loss: SFTLoss sums with metrics in it, DistillationLoss must not be "
        "summed",
        "`out.loss`, always",
    ),
    (
        "the recipe's accumulation makes its first optimizer step one micro-batch early",
        "not the loss's business; in whet's own runs weights are made once for a whole step",
    ),
    ("KLComputation fails on the dense reward of its own docstring", "absent; kl_type=reward in a whet run"),
    ("TopKRewardSelector fails on two trajectories end to end", "absent; MCAdvantage's candidates, which it takes"),
    (
        "AdaptiveKLController documents KLs and needs negated penalties: positive KLs always lower the coefficient",
        "absent; target_kl in a whet run takes the KL itself",
    ),
    (
        "SFTLoss notices missing assistant tokens only where every row lacks them, and changes a dict it is given",
        "absent; `whet sft` names or counts each row that has nothing to train",
    ),
    ("a reward that is missing, or NaN, fails late or not at all", "DataError when the trajectory is given"),
    (
        "an advantage that is NaN gives NaN gradients, a batch of which nothing is trained a loss of 0 or NaN, both in "
        "silence",
        "DataError for an advantage of a trained token that is not finite; a warning, and a loss of 0",
    ),
)
"""What TorchRL 0.14.1 does, and what whet does in its place. Each was seen by running it, or read in its source."""

_INTRO = """# From TorchRL

One import changes: `torchrl.objectives.llm` becomes `whet.torchrl` (the [extra](getting-started.md#install)
`torchrl` brings tensordict). Losses are modules over a TensorDict, computed by the same functions that whet's own runs
use; nothing is imported from TorchRL, and its actors, collectors and replay buffers work with them.

```python
import torch
from tensordict import TensorDict
from whet.torchrl import GRPOLoss, MCAdvantage

def rollout(prompt, tokens, reward):  # one row: a trajectory of one step
    done, reward = torch.tensor([[True]]), torch.tensor([[[reward]]])
    return TensorDict({
        "query": [prompt],
        "tokens": {"full": torch.tensor([tokens])},
        "log_probs": {"full": torch.full((1, len(tokens)), -1.0)},
        "next": {"reward": reward, "done": done},
    }, [1])

groups = MCAdvantage(grpo_size=2)
assert groups.inv(rollout("2+2=", [7, 4], 1.0)) is None  # the group waits
batch = groups.inv(rollout("2+2=", [7, 5], 0.0))  # and is full

class Policy(torch.nn.Module):  # any module that yields logprobs; or a TorchRL actor
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(10))

    def forward(self, data):
        logp = self.logits.log_softmax(0)
        entropy = -(logp.exp() * logp).sum().expand(data["tokens", "full"].shape)
        return logp[data["tokens", "full"]], entropy

loss = GRPOLoss(Policy(), clip_epsilon=(0.2, 0.28), kl_to_inference_coeff=0.05)
out = loss(batch)
out.loss.backward()  # loss_objective + loss_entropy + loss_kl_to_inference
print(out.ESS, out.clip_fraction)
```

{legend}

The total loss is `out.loss`, the sum of the fields that begin with `loss_`. `out.sum(reduce=True)` and
`out.mean(reduce=True)` are it too, whatever else is logged. `loss_objective`, `loss_entropy`, `ESS` and their
gradients equal TorchRL 0.14.1's to 1e-6, and so do all fields where every place of the batch is trained. Log-ratios
are clamped to ±20; advantages are in fp32.

`mc_advantage` does what MCAdvantage does, without TensorDicts:

```python
import torch
from whet.torchrl import Trajectory, mc_advantage

stream = (Trajectory(group=i % 2, rewards=torch.tensor([float(i)])) for i in range(8))
groups = mc_advantage(stream, 4, max_queued_groups=100, group_timeout=600.0)
for group in groups:
    print([(t.group, advantages.tolist()) for t, advantages in group])
print(groups.get_stats()["written_groups"], groups.get_stats()["evicted_groups"])
```

As the transform of a ReplayBuffer, MCAdvantage must be made after TorchRL has been imported, which is when it becomes a
Transform: `ReplayBuffer(storage=..., transform=MCAdvantage(4), batch_size=16)`.
"""
_2025 = """## The version of 2025

`GRPOLoss(actor, compat="0.9")` and `MCAdvantage(4, compat="0.9")` keep the keys and formulas that TorchRL's main branch
had in May and June of 2025, on the way to 0.9, for runs that are to be repeated. The releases 0.9.0 and 0.10 themselves
have today's keys and objective: for those leave `compat` out.

- keys `advantage`, `action` = "tokens_response", `sample_log_prob` = "log_probs", `ref_log_prob` = ("next",
  "ref_log_prob"); MCAdvantage groups by "text";
- trained is what has a recorded logprob other than 0;
- objective, entropy and its bonus, clip_fraction and kl_approx are means over all places, padding counted (`reduction`:
  mean, sum or none, which gives [B, T]); the KLs are means over the trained tokens; ESS is that of the rows at each
  place, reduced likewise;
- `aggregation`, `kl_mask_threshold`, `masking_strategy` and the padding of reference logprobs are not options.

Its MCAdvantage never emptied a group, so that later trajectories gave it out again; whet's does.

A whet run logs the same diagnostics: [the run folder](run-folder.md) has `sampling/ess` (ESS), `sampling/kl_approx`,
`sampling/kl_to_inference`, `kl` (kl_to_ref), `entropy/token_mean` and `clip_ratio/region_mean`, of GRPO and PPO alike.
"""


def page() -> str:
    """The text of docs/from-torchrl.md."""
    rows = [field for fields in TORCHRL.values() for field in fields.values()]
    parts = [_INTRO.replace("{legend}", legend(rows))]
    for title, fields in TORCHRL.items():
        if all(field.default == REQUIRED for field in fields.values()):
            heads = ["name", "here", "note"]
            rows = [(f"`{name}`", field.state, field.note) for name, field in fields.items()]
        else:
            heads = ["option", "default in TorchRL", "here", "note"]
            rows = [(f"`{name}`", _default(field), field.state, field.note) for name, field in fields.items()]
        parts.append(f"## {title}\n\n{table(heads, rows)}\n")
        if title in OWN:
            parts.append(f"whet's own: {', '.join(f'`{name}`' for name in OWN[title])}.\n")
    parts.append(_2025)
    parts.append(f"## Where TorchRL 0.14.1 errs\n\n{table(['there', 'here'], DEFECTS)}\n")
    return "\n".join(parts)


def _default(field: Field) -> str:
    return REQUIRED if field.default == REQUIRED else f"`{field.default!r}`"
