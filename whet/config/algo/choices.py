"""The names that each field accepts, and when to choose each: for help, docs/algorithms.md and error messages.

The functions themselves are in whet.ops, which needs torch; a test compares the names.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CHOICES"]

CHOICES: Mapping[str, Mapping[str, str]] = {
    "advantage_estimator": {
        "grpo": "the usual one; it compares with the group's mean, in units of scale_rewards",
        "drgrpo": "Dr. GRPO; it has no deviation, which favours very easy and very hard prompts",
        "rloo": "it compares with the mean of the others, which is unbiased, also in small groups",
        "turn_rloo": "rloo for each turn of an episode; for environments that reward turns",
        "opo": "it compares with the mean by length, which has the least variance on policy",
        "scalerl": "it divides by the batch's deviation; for large runs, prompts of unequal difficulty",
        "gdpo": "it normalises each reward function by itself; for functions of unlike spread",
        "grpo_passk": "it rewards only the best of a group, to raise pass@k rather than pass@1",
        "maxrl": "it gives prompts that are seldom solved more weight; for rewards of 0 and 1",
        "reinforce": "RL2's; it subtracts the mean of the group or, with global_norm, of the batch",
        "reinforce_plus_plus": "it whitens returns of tokens; for groups of one, with kl_type=reward",
        "reinforce_plus_plus_baseline": "it subtracts the group's mean and whitens over the batch",
        "remax": "it compares with a greedy completion, sampled in addition; for groups of one",
        "gae": "PPO's; it needs a critic",
    },
    "policy_loss_fn": {
        "grpo": "the usual one, the clipped surrogate; importance_sampling_level makes it GSPO or RLOO",
        "ppo": "another name of grpo",
        "gspo-token": "it uses the sequence's ratio with each token's own gradient; for mixtures of experts",
        "gmpo": "it uses the geometric mean of the ratios of tokens, which bounds outliers",
        "cispo": "it clips a token's weight and keeps its gradient; for long answers",
        "cispo-trl": "it repeats TRL's loss_type=cispo, which caps the ratio at ε_high itself",
        "cispo-torchrl": "it repeats TorchRL's CISPOLoss",
        "sapo": "it uses a smooth gate instead of a hard clip; for several updates of each rollout",
        "vespo": "it weighs whole sequences without a clip; for samples of an older policy",
        "reinforce": "it uses no ratio; for one update of each rollout, or with sampler_is",
        "distillation": "it learns from a stronger teacher of the same vocabulary, and from rewards",
        "gkd": "it learns only from such a teacher, with a teacher pass in every update",
    },
    "value_loss_fn": {
        "ppo": "the usual one, the squared error, clipped near the value at rollout",
        "ppo-rl2": "it repeats RL2's, which has no factor ½",
    },
    "importance_sampling_level": {
        "token": "the usual one, a ratio for each token",
        "sequence": "GSPO's, the mean of the log-ratios; for long answers and mixtures of experts",
        "sequence-token": "GSPO-token's, the same value with each token's own gradient; for advantages per token",
        "sequence-sum": "RLOO's in TRL, the sum of the log-ratios; for short answers",
    },
    "loss_agg_mode": {
        "sequence-mean-token-mean": "every completion counts the same, and a token counts less in a longer one (GRPO)",
        "token-mean": "every token counts the same (DAPO); for long answers",
        "sequence-mean-token-scale": "it divides by a constant, so that length changes no token's weight (Dr. GRPO)",
        "seq-mean-token-sum": "it sums tokens, so that longer answers move the policy more",
        "sequence-mean-token-sum-norm": "it sums tokens and divides by loss_agg_norm",
        "prompt-mean-token-mean": "every prompt counts the same (ScaleRL)",
    },
    "kl_loss_mode": {
        "low_var_kl": "the usual one, k3; it is never negative and pulls towards the reference",
        "k3": "another name of low_var_kl",
        "mse_kl": "k2; in the loss, its mean gradient is that of the KL",
        "k2": "another name of mse_kl",
        "kl": "k1; it is unbiased in rewards and advantages, and does not pull in the loss",
        "k1": "another name of kl",
        "abs": "it is never negative and grows slowly",
        "low_var_kl+": "it has the value of k3 and the gradient of k2",
        "k3+": "another name of low_var_kl+",
        "kl+": "it has the value of k1 and the gradient of k2",
        "k1+": "another name of kl+",
        "abs+": "it has the value of abs and the gradient of k2",
    },
    "sampler_is": {
        "token": "truncated importance sampling; for an engine with other kernels or dtype (vLLM, SGLang)",
        "sequence": "it weighs whole completions; it is unbiased, and has a large variance for long ones",
        "geometric": "it weighs whole completions by the mean of the log-ratios; it is between the other two",
    },
    "loss_masks": {
        "off-policy": "it masks bad completions that the policy has left behind; for several updates",
        "top-entropy": "it keeps only the tokens at which the model decides; for long reasoning",
        "dppo-tv": "it masks tokens that have moved too far in probability, instead of a clip",
        "dppo-kl": "it masks tokens that have moved too far in KL, instead of a clip",
        "sampler-kl": "it masks tokens on which sampler and policy disagree",
        "sampler-rejection": "it masks completions on which sampler and trainer disagree",
    },
}
"""Field -> name -> what it does, and when to choose it."""
