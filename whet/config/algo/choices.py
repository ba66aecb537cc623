"""The names that each field accepts, and when to choose each. Help, docs/algorithms.md and error messages show them.

The functions themselves are in whet.ops, which needs torch; a test compares the names.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CHOICES"]

CHOICES: Mapping[str, Mapping[str, str]] = {
    "advantage_estimator": {
        "grpo": "the usual one: against the group's mean, in units of scale_rewards",
        "drgrpo": "Dr. GRPO: without a deviation, which favours very easy and very hard prompts",
        "rloo": "against the mean of the others: unbiased, also for small groups",
        "opo": "against the mean by length, the baseline of least variance on policy",
        "scalerl": "in units of the batch's deviation: large runs, prompts of unequal difficulty",
        "gdpo": "several reward functions of unlike size or spread, each normalised by itself",
        "grpo_passk": "to raise pass@k rather than pass@1: only the best of a group is rewarded",
        "maxrl": "rewards of 0 and 1: prompts that are seldom solved weigh more",
        "reinforce": "RL2's: subtract the mean of the group or, with global_norm, of the batch",
        "reinforce_plus_plus": "groups of one: returns of tokens, whitened over the batch; with kl_type=reward",
        "reinforce_plus_plus_baseline": "groups, whitened over the batch and not in each",
        "remax": "groups of one: against the greedy completion, which is sampled in addition",
        "gae": "a critic: PPO",
    },
    "policy_loss_fn": {
        "grpo": "the usual one: the clipped surrogate; GSPO and RLOO by importance_sampling_level",
        "ppo": "the same by another name",
        "gspo-token": "the ratio of the sequence with each token's own gradient; mixtures of experts",
        "gmpo": "outliers among the ratios of tokens: their geometric mean",
        "cispo": "long answers: no token loses its gradient to the clip, only weight",
        "cispo-trl": "to repeat a run of TRL's loss_type=cispo, which caps the ratio at ε_high itself",
        "cispo-torchrl": "to repeat a run of TorchRL's CISPOLoss",
        "sapo": "a gate that closes softly instead of a clip; several updates of each rollout",
        "vespo": "samples of an older policy, weighted by whole sequences without a clip",
        "reinforce": "one update of each rollout, or a correction that does what a ratio would",
        "distillation": "a stronger teacher of the same vocabulary; rewards may be added",
        "gkd": "only such a teacher: more to learn from each token, a teacher pass in every update",
    },
    "value_loss_fn": {
        "ppo": "the usual one: squared error, held near the value at rollout",
        "ppo-rl2": "the same without its ½: to repeat a run of RL2's",
    },
    "importance_sampling_level": {
        "token": "the usual one",
        "sequence": "GSPO: the mean of the log-ratios; long answers, mixtures of experts",
        "sequence-token": "GSPO-token: the same value, each token's own gradient; advantages per token",
        "sequence-sum": "RLOO of TRL: the sum of the log-ratios; short answers",
    },
    "loss_agg_mode": {
        "sequence-mean-token-mean": "every completion counts the same, its tokens less the longer it is (GRPO)",
        "token-mean": "every token counts the same (DAPO); long answers",
        "sequence-mean-token-scale": "divided by a constant, so that length changes no token's weight (Dr. GRPO)",
        "seq-mean-token-sum": "sums of tokens: longer answers move the policy more",
        "sequence-mean-token-sum-norm": "the same divided by loss_agg_norm",
        "prompt-mean-token-mean": "every prompt counts the same (ScaleRL)",
    },
    "kl_loss_mode": {
        "low_var_kl": "the usual one: k3, never negative, pulls towards the reference",
        "k3": "the same by another name",
        "mse_kl": "k2: in the loss, its mean gradient is that of the KL",
        "k2": "the same by another name",
        "kl": "k1: in rewards and advantages, where it is unbiased; in the loss it does not pull",
        "k1": "the same by another name",
        "abs": "a distance that is never negative and grows slowly",
        "low_var_kl+": "the value of k3 with the gradient of k2",
        "k3+": "the same by another name",
        "kl+": "the value of k1 with the gradient of k2",
        "k1+": "the same by another name",
        "abs+": "the value of abs with the gradient of k2",
    },
    "sampler_is": {
        "token": "an engine of other kernels or dtype (vLLM, SGLang): truncated importance sampling",
        "sequence": "the same for whole completions: unbiased, of large variance for long ones",
        "geometric": "the same, as the mean of the log-ratios: between the two",
    },
    "loss_masks": {
        "off-policy": "several updates of each rollout: bad completions the policy has left behind",
        "top-entropy": "long reasoning: the tokens at which the model decides",
        "dppo-tv": "instead of a clip: tokens that moved too far in probability",
        "dppo-kl": "the same by their KL",
        "sampler-kl": "tokens on which sampler and policy disagree",
        "sampler-rejection": "whole completions on which sampler and trainer disagree",
    },
}
"""Field -> name -> when to choose it."""
