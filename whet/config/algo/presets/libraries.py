"""What other libraries compute with their defaults: their loss and gradient, under whet's names."""

from __future__ import annotations

from typing import Any

from whet.config.algo.policy import GRPOConfig
from whet.config.algo.ppo import PPOConfig

__all__ = ["rl2_ppo", "rl2_reinforce", "trl_grpo", "trl_rloo"]


def trl_grpo(**changes: Any) -> GRPOConfig:
    """GRPO as TRL's GRPOConfig has it by default.

    A_i = (r_i − mean_g(r)) / (std_g(r) + 1e-4), the deviation of a sample (n − 1);
    L = Σ_i Σ_t [−min(ρ A, clip(ρ, 0.8, 1.2) A) + β ρ k3] / Σ_i n_i, ρ = π/π_old of the token; β = 0, so no KL.
    Args: changes: fields in place of these. With beta the KL is k3 times the ratio (use_bias_correction_kl), as in TRL.
    Source: TRL 1.16, grpo_config.py and GRPOTrainer._compute_loss: num_generations 8, loss_type "dapo", beta 0.0,
        epsilon 0.2, scale_rewards "group", use_bias_correction_kl True, num_iterations 1. TRL corrects for vLLM by
        sequence_mask at 3.0: sampler_is="sequence", sampler_is_mode="mask", sampler_is_threshold=3.0, which is not set
        here, since without vLLM it corrects nothing.

    >>> trl_grpo().advantage_eps, trl_grpo(num_generations=4).num_generations
    (0.0001, 4)
    """
    fields = {
        "num_generations": 8,
        "advantage_estimator": "grpo",
        "scale_rewards": "group",
        "advantage_eps": 1e-4,
        "advantage_ddof": 1,
        "policy_loss_fn": "grpo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "beta": 0.0,
        "kl_loss_mode": "low_var_kl",
        "kl_type": "loss",
        "use_bias_correction_kl": True,
        "loss_agg_mode": "token-mean",
    }
    return GRPOConfig(**{**fields, **changes})


def trl_rloo(**changes: Any) -> GRPOConfig:
    """RLOO as TRL's RLOOConfig has it by default.

    R_i = r_i − β Σ_t (log π_old − log π_ref), A_i = R_i − mean of the other R of the group;
    L = mean_i −min(ρ_i A_i, clip(ρ_i, 0.8, 1.2) A_i), ρ_i = Π_t π/π_old, the ratio of the whole completion.
    Args: changes: fields in place of these.
    Source: TRL 1.16, rloo_config.py and RLOOTrainer: num_generations 2, beta 0.05, epsilon 0.2, num_iterations 1,
        normalize_advantages False, no reward_clip_range. Here Σ_t log ρ is held in ±20.

    >>> trl_rloo().importance_sampling_level
    'sequence-sum'
    """
    fields = {
        "num_generations": 2,
        "advantage_estimator": "rloo",
        "policy_loss_fn": "grpo",
        "importance_sampling_level": "sequence-sum",
        "epsilon": 0.2,
        "beta": 0.05,
        "kl_loss_mode": "kl",
        "kl_type": "reward",
        "loss_agg_mode": "sequence-mean-token-mean",
        "loss_agg_units": "all",
    }
    return GRPOConfig(**{**fields, **changes})


def rl2_reinforce(**changes: Any) -> GRPOConfig:
    """REINFORCE as RL2 has it by default: Dr. GRPO with a mean over tokens, and without groups that agree.

    A_i = R_i − mean_g(R), R the sum of the rewards of the trajectory;
    L = Σ_i Σ_t −min(ρ A, clip(ρ, 0.8, 1.2) A) / Σ_i n_i, ρ = π/π_old of the token.
    Groups whose rewards are all equal are left out and not replaced (dynamic_filtering), which is dynamic_sampling with
    one batch of prompts here; it needs trainer.max_steps.
    Args: changes: fields in place of these. beta is a KL in the reward (k1), as in RL2; norm_var=True divides by the
        deviation + 1.19e-7; RL2's DeepSeek preset is norm_var=True, kl_type="loss", kl_loss_mode="k3",
        loss_agg_mode="sequence-mean-token-mean".
    Source: RL2 at its head of May 2026: adv.estimator reinforce, avg_level token, clip 0.2, kl.coef 0, kl.type reward,
        kl.reward_estimator k1, entropy.coef 0, tis_coef 0, update_per_rollout 1, dynamic_filtering true. Its
        responses_per_prompt is to be set by its user: 8 here.

    >>> rl2_reinforce(norm_var=True).norm_var
    True
    """
    fields = {
        "num_generations": 8,
        "advantage_estimator": "reinforce",
        "global_norm": False,
        "norm_var": False,
        "advantage_eps": 2.0**-23,
        "advantage_ddof": 1,
        "policy_loss_fn": "grpo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "beta": 0.0,
        "kl_loss_mode": "k1",
        "kl_type": "reward",
        "loss_agg_mode": "token-mean",
        "dynamic_sampling": True,
        "max_num_gen_batches": 1,
    }
    return GRPOConfig(**{**fields, **changes})


def rl2_ppo(**changes: Any) -> PPOConfig:
    """PPO as RL2 has it with adv.estimator=gae.

    δ_t = r_t + γ V_{t+1} − V_t, A_t = Σ_k (γλ)^k δ_{t+k}, γ = λ = 1, whitened over the trained tokens;
    L = Σ −min(ρ A, clip(ρ, 0.8, 1.2) A) / Σ_i n_i; the critic's max((v − R)², (clip(v, V ± 0.5) − R)²), the same mean.
    Args: changes: fields in place of these. beta is a KL in the reward (k1): its README's PPO has one.
    Source: RL2 at its head of May 2026: clip 0.2, critic.clip 0.5, avg_level token, kl.coef 0; adv.gamma and adv.lamda
        1.0 in its ppo.yaml. dynamic_filtering, on by default there, is for groups, which PPO does not need: off.

    >>> rl2_ppo().clip_range_value
    0.5
    """
    fields = {
        "num_generations": 1,
        "advantage_estimator": "gae",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "whiten_advantages": True,
        "policy_loss_fn": "ppo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "beta": 0.0,
        "kl_loss_mode": "k1",
        "kl_type": "reward",
        "value_loss_fn": "ppo-rl2",
        "value_loss_agg_mode": "token-mean",
        "clip_range_value": 0.5,
        "loss_agg_mode": "token-mean",
    }
    return PPOConfig(**{**fields, **changes})
