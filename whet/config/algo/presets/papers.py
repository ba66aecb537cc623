"""Methods as their papers have them. Symbols: g the group (prompt) of completion i, G its size, N all completions, n_i
the tokens of one, ρ = π/π_old of a token, A the advantage, sg without gradient; a loss is minimised.

"Not verified" is a value that a paper may state, and that was found neither there nor in its authors' code: it is a
usual one. Where a paper adds nothing to the deviation that it divides by, 1e-6 is added to it here (advantage_eps),
and the deviation is that of a sample.
"""

from __future__ import annotations

from typing import Any

from whet.config.algo.policy import GRPOConfig
from whet.config.algo.ppo import PPOConfig

__all__ = [
    "cispo",
    "dapo",
    "deepseek_grpo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gspo",
    "luspo",
    "opo",
    "ppo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "scale_rl",
    "vespo",
]

_SCALED = {"advantage_estimator": "grpo", "scale_rewards": "group", "advantage_eps": 1e-6, "advantage_ddof": 1}
"""A_i = (r_i − mean_g(r)) / (std_g(r) + 1e-6)."""
_CLIPPED = {"policy_loss_fn": "grpo", "importance_sampling_level": "token", "epsilon": 0.2}
"""−min(ρ A, clip(ρ, 0.8, 1.2) A) at each token."""
_NO_KL = {"beta": 0.0, "kl_type": "loss", "kl_loss_mode": "low_var_kl"}
"""None; where beta is set all the same, GRPO's."""
_KL_IN_REWARD = {"kl_type": "reward", "kl_loss_mode": "k1"}
"""r_t −= β (log π_old − log π_ref) at each token."""
_OF_SEQUENCES = {"loss_agg_mode": "sequence-mean-token-mean"}
_OF_TOKENS = {"loss_agg_mode": "token-mean"}
_SUMS = {"loss_agg_mode": "seq-mean-token-sum"}


def deepseek_grpo(**changes: Any) -> GRPOConfig:
    """GRPO, as DeepSeekMath introduced it.

    A_i = (r_i − mean_g(r)) / std_g(r);
    L = (1/N) Σ_i (1/n_i) Σ_t [−min(ρ A, clip(ρ, 1 ± ε) A) + β (π_ref/π − log(π_ref/π) − 1)].
    Args: changes: fields in place of these.
    Source: arXiv:2402.03300, equations 3 and 4, section 4.1.2 (outcome supervision); β = 0.04, 64 completions of each
        prompt and a single update of each rollout: section 4.2. ε is not stated: 0.2.

    >>> deepseek_grpo().num_generations
    64
    """
    fields = {"num_generations": 64, **_SCALED, **_CLIPPED, **_NO_KL, "beta": 0.04, **_OF_SEQUENCES}
    return GRPOConfig(**{**fields, **changes})


def dr_grpo(**changes: Any) -> GRPOConfig:
    """Dr. GRPO: GRPO without its divisions by the length of a completion and by the deviation of rewards.

    A_i = r_i − mean_g(r); L = (1/N) Σ_i (1/T) Σ_t −min(ρ A, clip(ρ, 1 ± ε) A), T the longest completion allowed
    (rollout.max_tokens_to_generate, or loss_agg_norm).
    Args: changes: fields in place of these.
    Source: arXiv:2503.20783, section 3; the paper's equation has no 1/T, its code divides by that constant. ε = 0.2, 8
        completions and no KL: table 6.

    >>> dr_grpo().loss_agg_mode
    'sequence-mean-token-scale'
    """
    fields = {"num_generations": 8, "advantage_estimator": "drgrpo", **_CLIPPED, **_NO_KL}
    return GRPOConfig(**{**fields, "loss_agg_mode": "sequence-mean-token-scale", **changes})


def dapo(**changes: Any) -> GRPOConfig:
    """DAPO: a higher upper clip, a mean over tokens, dynamic sampling, and a soft penalty on long completions.

    A_i = (r_i − mean_g(r)) / std_g(r); L = Σ_i Σ_t −min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) / Σ_i n_i;
    r_i includes the penalty of OverlongBuffer. It needs trainer.max_steps.
    Args: changes: fields in place of these; overlong_buffer's max_response_length is usually
        rollout.max_tokens_to_generate.
    Source: arXiv:2503.14476, equations 8 to 13; ε = 0.2, ε_high = 0.28, 16 completions, a buffer of 4096 tokens before
        20480: section 4.1; no KL: section 2.3. Equation 8 divides by the tokens of one group, so that the mean of it
        over prompts is loss_agg_mode="prompt-mean-token-mean"; the authors' code (verl), Tunix and TRL divide by the
        tokens of the batch, and so does this. Overlong filtering is mask_truncated_completions, off here: the authors'
        scripts have the soft penalty instead. The bound on batches of prompts (max_num_gen_batches) is whet's.

    >>> dapo().clip_range, dapo(epsilon_high=0.3).clip_range
    ((0.2, 0.28), (0.2, 0.3))
    """
    fields = {
        "num_generations": 16,
        **_SCALED,
        **_CLIPPED,
        "epsilon_high": 0.28,
        **_NO_KL,
        **_OF_TOKENS,
        "dynamic_sampling": True,
        "overlong_buffer": {
            "enable": True,
            "overlong_buffer_length": 4096,
            "overlong_buffer_penalty": 1.0,
            "max_response_length": 20480,
        },
    }
    return GRPOConfig(**{**fields, **changes})


def gspo(**changes: Any) -> GRPOConfig:
    """GSPO: the ratio and its clip are those of the whole sequence.

    s_i = exp((1/n_i) Σ_t log ρ); L = (1/N) Σ_i −min(s A, clip(s, 1 − ε, 1 + ε_high) A), A as in GRPO.
    Args: changes: fields in place of these.
    Source: arXiv:2507.18071, equations 5 to 7; ε = 3e-4 and ε_high = 4e-4: section 5.1, with four mini-batches of each
        rollout (trainer.mini_batch_size a quarter of the step). No KL: an author's word at verl. The number of
        completions is not stated: 8.

    >>> gspo().clip_range
    (0.0003, 0.0004)
    """
    fields = {"num_generations": 8, **_SCALED, **_CLIPPED, **_NO_KL, **_OF_SEQUENCES}
    fields = {**fields, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    return GRPOConfig(**{**fields, **changes})


def rloo(**changes: Any) -> GRPOConfig:
    """RLOO: REINFORCE on whole completions, each against the mean of the others.

    R_i = r_i − β Σ_t (log π_old − log π_ref); A_i = R_i − (Σ_g R − R_i)/(G − 1); L = (1/N) Σ_i −A_i Σ_t log π.
    Args: changes: fields in place of these.
    Source: arXiv:2402.14740, section 2; β = 0.03 and 2 or 4 completions: appendix
        C and the experiments, as TRL's paper index has them.

    >>> rloo().policy_loss_fn
    'reinforce'
    """
    fields = {"num_generations": 4, "advantage_estimator": "rloo", "policy_loss_fn": "reinforce", "beta": 0.03}
    return GRPOConfig(**{**fields, **_KL_IN_REWARD, **_SUMS, **changes})


def cispo(**changes: Any) -> GRPOConfig:
    """CISPO: the clipped ratio is a constant weight, so that no token loses its gradient.

    L = Σ_i Σ_t −sg(min(ρ, 1 + ε_high)) A log π / Σ_i n_i, A as in GRPO.
    Args: changes: fields in place of these; cispo_epsilon_low sets the lower bound.
    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5, section 3.1: no lower bound, no KL. Neither ε_high
        nor the number of completions is stated in sections 3 to 5: 4.0, ScaleRL's cap of 5, and 16, DAPO's. The paper
        adds DAPO's dynamic sampling and length penalty: dynamic_sampling=True, overlong_buffer={"enable": True}.

    >>> cispo().epsilon_high
    4.0
    """
    fields = {"num_generations": 16, **_SCALED, "policy_loss_fn": "cispo", "epsilon_high": 4.0, **_NO_KL, **_OF_TOKENS}
    return GRPOConfig(**{**fields, **changes})


def scale_rl(**changes: Any) -> GRPOConfig:
    """ScaleRL's loss: a truncated ratio as a constant weight, advantages by the batch's deviation, prompts weigh alike.

    a_i = r_i − mean_g(r), A_i = a_i / std(a) over the batch;
    L = mean over prompts of Σ_{i in g} Σ_t −sg(min(ρ, ε_max)) A log π / Σ_{i in g} n_i.
    Prompts whose rewards are all equal are left out and not replaced: dynamic_sampling with one batch of prompts, which
    needs trainer.max_steps.
    Args: changes: fields in place of these.
    Source: arXiv:2510.13786, sections 3.2 and 4; 16 completions and no KL: section 2; ε_max = 5.0 as TRL's paper
        index has it, where appendix A.17 finds 4, 5 and 8 alike.
        Left out: the filter of prompts that have become easy, interruptions of long completions, asynchrony.

    >>> scale_rl().loss_agg_mode
    'prompt-mean-token-mean'
    """
    fields = {
        "num_generations": 16,
        "advantage_estimator": "scalerl",
        "advantage_eps": 1e-6,
        "advantage_ddof": 1,
        "policy_loss_fn": "cispo-trl",
        "importance_sampling_level": "token",
        "epsilon_high": 5.0,
        **_NO_KL,
        "loss_agg_mode": "prompt-mean-token-mean",
        "dynamic_sampling": True,
        "max_num_gen_batches": 1,
    }
    return GRPOConfig(**{**fields, **changes})


def reinforce_pp(**changes: Any) -> GRPOConfig:
    """REINFORCE++: no group; what each token earns, whitened over the batch, under PPO's clip.

    r_t = −β (log π_old − log π_ref), and r_i at the last token; G_t = Σ_{s ≥ t} r_s; A_t = (G_t − mean)/std over the
    tokens of the batch; L = (1/N) Σ_i (1/n_i) Σ_t −min(ρ A, clip(ρ, 1 ± ε) A).
    Args: changes: fields in place of these.
    Source: arXiv:2501.03262v9, equations 1, 4 and 5, algorithm 1. It states neither β nor ε: 0.01 of the authors'
        script (OpenRLHF's train_reinforce_llama_ray.sh), and 0.2, the default of OpenRLHF.

    >>> reinforce_pp().num_generations
    1
    """
    fields = {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus", "gamma": 1.0, **_CLIPPED}
    return GRPOConfig(**{**fields, **_KL_IN_REWARD, "beta": 0.01, **_OF_SEQUENCES, **changes})


def reinforce_pp_baseline(**changes: Any) -> GRPOConfig:
    """REINFORCE++-baseline: reward less the group's mean, whitened over the batch, and k2 in the loss.

    a_i = r_i − mean_g(r), A_i = (a_i − mean)/std over the tokens of the batch;
    L = (1/N) Σ_i (1/n_i) Σ_t [−min(ρ A, clip(ρ, 1 ± ε) A) + β (log π − log π_ref)²/2].
    Args: changes: fields in place of these.
    Source: arXiv:2501.03262v9, equations 1 and 6 to 8. It states neither β, ε nor the number of completions: 1e-5 and
        8 of the authors' script (OpenRLHF's train_reinforce_baseline_hybrid_engine.sh), and 0.2, its default.

    >>> reinforce_pp_baseline().kl_loss_mode
    'k2'
    """
    fields = {"num_generations": 8, "advantage_estimator": "reinforce_plus_plus_baseline", **_CLIPPED}
    kl = {"kl_type": "loss", "kl_loss_mode": "k2", "beta": 1e-5}
    return GRPOConfig(**{**fields, **kl, **_OF_SEQUENCES, **changes})


def sapo(**changes: Any) -> GRPOConfig:
    """SAPO: a sigmoid of the ratio in place of the clip.

    L = (1/N) Σ_i (1/n_i) Σ_t −A σ(τ (ρ − 1)) 4/τ, τ = 1.0 where A > 0, else 1.05; A as in GRPO.
    Args: changes: fields in place of these.
    Source: arXiv:2511.20347, equations 5 and 6, without a KL; τ as TRL's paper index has them. The number of
        completions: not verified, 8.

    >>> sapo().sapo_temperature_neg
    1.05
    """
    fields = {"num_generations": 8, **_SCALED, "policy_loss_fn": "sapo", "importance_sampling_level": "token"}
    temperatures = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    return GRPOConfig(**{**fields, **temperatures, **_NO_KL, **_OF_SEQUENCES, **changes})


def gmpo(**changes: Any) -> GRPOConfig:
    """GMPO: the geometric mean of a completion's ratios, each clipped on the side that the advantage points to.

    L = (1/N) Σ_i −A exp((1/n_i) Σ_t c_t), c_t = min(log ρ, ε) where A > 0, else max(log ρ, −ε); A as in GRPO.
    Args: changes: fields in place of these.
    Source: arXiv:2507.20673; the range (e^-0.4, e^0.4) as TRL's GMPOConfig has it from the paper; 8 completions and no
        KL: the authors' script.

    >>> gmpo().epsilon
    0.4
    """
    fields = {"num_generations": 8, **_SCALED, "policy_loss_fn": "gmpo", "epsilon": 0.4, **_NO_KL, **_OF_SEQUENCES}
    return GRPOConfig(**{**fields, **changes})


def luspo(**changes: Any) -> GRPOConfig:
    """LUSPO: GSPO whose sequences count by their length.

    L = (1/N) Σ_i n_i · −min(s A, clip(s, 1 − ε, 1 + ε_high) A), s and A as in GSPO.
    Args: changes: fields in place of these.
    Source: arXiv:2602.05261, equations 6 and 7, without a KL; ε = 2e-3, ε_high = 2.5e-3 and 8 completions:
        section 5.1.

    >>> luspo().loss_agg_mode
    'seq-mean-token-sum'
    """
    return gspo(**{**_SUMS, "epsilon": 2e-3, "epsilon_high": 2.5e-3, **changes})


def vespo(**changes: Any) -> GRPOConfig:
    """VESPO: a smooth weight of the whole sequence's ratio in place of a clip.

    L = Σ_i Σ_t −sg(φ(w_i)) A log π / Σ_i n_i, φ(w) = w^k exp(λ − λ w), w_i = Π_t ρ; k = 2, λ = 3 where A ≥ 0, else
    k = 3, λ = 2; A as in GRPO.
    Args: changes: fields in place of these; sampler_is="token" is a factor of w.
    Source: arXiv:2602.10693; k, λ and the mean over tokens are TRL's, as are the bounds of log w; k, λ, 8 completions
        and no KL: the authors' script.

    >>> vespo().vespo_k_neg
    3.0
    """
    shape = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    fields = {"num_generations": 8, **_SCALED, "policy_loss_fn": "vespo", **shape, **_NO_KL, **_OF_TOKENS}
    return GRPOConfig(**{**fields, **changes})


def opo(**changes: Any) -> GRPOConfig:
    """OPO: the plain policy gradient, exactly on policy, against the baseline of least variance.

    A_i = r_i − Σ_g n r / Σ_g n; L = (1/N) Σ_i −A_i Σ_t log π. One update of each rollout.
    Args: changes: fields in place of these.
    Source: arXiv:2505.23585: exact on-policy training, no KL and no entropy bonus (the abstract, and the authors'
        README); the baseline: verl's page of it, which the abstract names. The number of completions: not verified, 8.
        verl's recipe of it takes the mean over tokens: loss_agg_mode="token-mean".

    >>> opo().num_iterations
    1
    """
    fields = {"num_generations": 8, "num_iterations": 1, "advantage_estimator": "opo", "policy_loss_fn": "reinforce"}
    return GRPOConfig(**{**fields, **_NO_KL, **_SUMS, **changes})


def remax(**changes: Any) -> GRPOConfig:
    """ReMax: REINFORCE with the reward of a greedy completion of the same prompt as the baseline.

    A_i = r_i − r(greedy); L = (1/N) Σ_i −A_i Σ_t log π.
    Args: changes: fields in place of these; with beta a KL (k1) comes into the rewards of tokens.
    Source: arXiv:2310.10505, algorithm 1: one completion of each prompt, no KL. The authors' scripts (liziniu/ReMax)
        have β = 0.05 at each token, not summed over those after it, and rewards discounted by 0.99 a token.

    >>> remax().num_generations
    1
    """
    fields = {"num_generations": 1, "advantage_estimator": "remax", "policy_loss_fn": "reinforce", "beta": 0.0}
    return GRPOConfig(**{**fields, **_KL_IN_REWARD, **_SUMS, **changes})


def gdpo(**changes: Any) -> GRPOConfig:
    """GDPO: GRPO for several rewards, each normalised in its group by itself, their sum by the batch.

    z_k = (r_k − mean_g(r_k)) / std_g(r_k) of each reward function; R = Σ_k w_k z_k; A = (R − mean(R)) / std(R) over the
    batch; L = Σ_i Σ_t −min(ρ A, clip(ρ, 1 ± ε) A) / Σ_i n_i.
    Args: changes: fields in place of these; reward_weights are the w.
    Source: arXiv:2601.05242, equations 4 to 7. 4 completions: section 4.1; ε = 0.2, no KL and the mean over tokens: the
        authors' code (verl-GDPO of NVlabs/GDPO), where equation 3, GRPO's, has a mean within each completion. Section
        4.2 has 16 completions and DAPO's bounds.

    >>> gdpo(reward_weights=(1.0, 0.5)).advantage_estimator
    'gdpo'
    """
    fields = {"num_generations": 4, **_SCALED, "advantage_estimator": "gdpo", **_CLIPPED, **_NO_KL, **_OF_TOKENS}
    return GRPOConfig(**{**fields, **changes})


def dppo(**changes: Any) -> GRPOConfig:
    """DPPO (Binary-TV): no clip of the ratio; tokens whose probability has moved too far are left out.

    A_i = r_i − mean_g(r); L = (1/N) Σ_i (1/T) Σ_t −m ρ A, m = 0 where A > 0 and π − π_old > δ, or A ≤ 0 and
    π_old − π > δ; else 1; T the longest completion allowed, as in dr_grpo.
    Args: changes: fields in place of these; loss_masks=("dppo-kl",), dppo_threshold=0.05 is its Binary-KL.
        policy_loss_fn="cispo-trl", epsilon_high=5.0 cuts the ratio off at 5, as the runs of appendix E do.
    Source: arXiv:2602.04879, equations 12 and 13; the equation has no 1/T, the authors' script (verl's
        examples/dppo_trainer/run_qwen30b_dppo.sh) divides by that constant, and has no KL. A: appendix C.1; δ = 0.2
        and 16 completions: appendix E.

    >>> dppo().loss_masks
    ('dppo-tv',)
    """
    fields = {"num_generations": 16, "advantage_estimator": "drgrpo", **_CLIPPED, "epsilon": 1e9, **_NO_KL}
    fields = {**fields, "loss_agg_mode": "sequence-mean-token-scale"}
    return GRPOConfig(**{**fields, "loss_masks": ("dppo-tv",), "dppo_threshold": 0.2, **changes})


def ppo(**changes: Any) -> PPOConfig:
    """PPO with a critic, as it is used on language models: a KL in the reward, generalised advantages, a clip.

    r_t = −β (log π_old − log π_ref), and r_i at the last token; δ_t = r_t + γ V_{t+1} − V_t, A_t = Σ_k (γλ)^k δ_{t+k},
    whitened over the batch; L = Σ −min(ρ A, clip(ρ, 1 ± ε) A) / Σ_i n_i; the critic's
    Σ ½ max((v − R)², (clip(v, V ± c) − R)²) / Σ_i n_i, R = A + V before whitening.
    Args: changes: fields in place of these.
    Source: arXiv:1707.06347, equations 7, 11 and 12; ε = 0.2: table 1, λ = 0.95: table 3, where γ is 0.99. γ = 1 and
        β = 0.02: InstructGPT, arXiv:2203.02155, appendix C.4. The whitening, c = 0.2 and the mean over
        tokens are usual in code, in neither paper.

    >>> ppo().gae_lambda, ppo(gae_lambda=1.0).gae_lambda
    (0.95, 1.0)
    """
    fields = {
        "num_generations": 1,
        "advantage_estimator": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "whiten_advantages": True,
        **_CLIPPED,
        "policy_loss_fn": "ppo",
        **_KL_IN_REWARD,
        "beta": 0.02,
        "value_loss_fn": "ppo",
        "clip_range_value": 0.2,
        **_OF_TOKENS,
    }
    return PPOConfig(**{**fields, **changes})
