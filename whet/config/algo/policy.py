"""PolicyConfig, all choices of a policy objective in one class, and GRPOConfig."""

from __future__ import annotations

from typing import ClassVar, Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.algo.unused_fields import check_fields_read
from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Name, Size, Text
from whet.errors import ConfigError, nearest

__all__ = ["NEED_GROUPS", "GRPOConfig", "PolicyConfig"]

NEED_GROUPS = (
    "drgrpo",
    "gdpo",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "scalerl",
    "turn_rloo",
)
"""The estimators that need groups of two or more: they would compare a single completion with itself."""
_CORRECTED = ("k1", "k3", "kl", "low_var_kl")
"""The estimates that use_bias_correction_kl gives the gradient of the KL."""
_POSITIVE_IN_LOSSES = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
_POSITIVE_IN_CORRECTIONS = (
    "dppo_threshold",
    "dppo_threshold_high",
    "kl_mask_threshold",
    "rejection_threshold",
    "sampler_is_threshold",
)
_LEVELS = ("token", "sequence", "geometric")
"""The levels of sampler_is."""


@config
class PolicyConfig(AlgorithmConfig):
    """An algorithm that trains a policy: advantage, surrogate, KL, entropy bonus and corrections are chosen separately.

    >>> PolicyConfig(epsilon=0.2, epsilon_high=0.28).clip_range
    (0.2, 0.28)
    """

    # the advantage estimators' keyword arguments
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo, grpo_passk: divide by the standard deviation of the rewards of the group, of the batch, or by nothing."""
    advantage_eps: Float = 1e-6
    """ε, added to the standard deviation (or mean) in the denominator. Tunix and verl have 1e-6, TRL has 1e-4."""
    advantage_ddof: Literal[0, 1] = 1
    """1 = the standard deviation divides by n - 1; 0 = it divides by n."""
    normalize_advantages: Bool = False
    """rloo: subtract the mean of all advantages of the batch, then divide by their standard deviation."""
    gamma: Float = 1.0
    """γ, the discount of a reward: per token in gae and reinforce_plus_plus, per turn in turn_rloo; 1.0 = none."""
    global_norm: Bool = False
    """reinforce: take mean and standard deviation over the whole batch instead of each group."""
    norm_var: Bool = False
    """reinforce: divide by the standard deviation."""

    # the policy losses' keyword arguments, and the aggregation
    importance_sampling_level: Literal["token", "sequence", "sequence-token", "sequence-sum"] = "token"
    """Level of the importance ratio: of each token, or of its sequence."""
    epsilon: Float = 0.2
    """ε: the ratio is clipped from below at 1 - ε; gmpo clips its log at -ε."""
    epsilon_high: Float | None = None
    """ε_high: the ratio is clipped from above at 1 + ε_high; gmpo clips its log at ε_high, cispo-trl the ratio at
    ε_high itself. None = epsilon."""
    epsilon_c: Float | None = None
    """ε_c of the dual clip: with a negative advantage A the loss is at most -ε_c·A. Greater than 1; None = off."""
    delta: Float | None = None
    """δ, the largest ratio in the unclipped term; None = off. From 1 + ε_high on it does the same as epsilon_c."""
    cispo_epsilon_low: Float | None = None
    """cispo: ε_low; weights are at least 1 - ε_low. None = no lower bound."""
    sapo_temperature_pos: Float = 1.0
    """sapo: τ for a positive advantage; the gradient fades sooner with a larger τ."""
    sapo_temperature_neg: Float = 1.05
    """sapo: τ for an advantage of 0 or below."""
    vespo_k_pos: Float = 2.0
    """vespo: k of w^k·exp(-λw), the weight of a sequence with the ratio w, for an advantage of 0 or above."""
    vespo_lambda_pos: Float = 3.0
    """vespo: λ for an advantage of 0 or above."""
    vespo_k_neg: Float = 3.0
    """vespo: k for a negative advantage."""
    vespo_lambda_neg: Float = 2.0
    """vespo: λ for a negative advantage."""
    teacher_coef: Float = 1.0
    """distillation: weight of log(teacher / policy), which is added to the advantage of each token."""
    gkd_beta: Float = 0.5
    """gkd: 0.0 = the forward KL (the policy covers all that the teacher does), 1.0 = the reverse KL (it seeks what the
    teacher finds likely), between them the Jensen-Shannon divergence. TRL calls it beta."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-mean"
    """How the losses of tokens become one loss: a name, or a function that computes the weight of every token."""
    loss_agg_norm: Float | None = None
    """The constant of sequence-mean-token-scale and sequence-mean-token-sum-norm; None = their default."""
    loss_agg_units: Literal["trained", "all"] = "trained"
    """The sequences (or prompts) that a mean over them counts: "trained" = those with a trained token, "all" = every
    one, as TRL does."""

    # the penalty for moving away from the reference
    beta: Float = 0.04
    """Weight of the KL to the reference. 0.0 = off, and no reference is loaded unless force_compute_kl is set."""
    kl_loss_mode: Name | Fn = "low_var_kl"
    """The KL estimate: a name, or a function of log(policy / reference). In the loss, the gradient of k1 does not
    depend on the reference."""
    kl_type: Literal["loss", "reward", "advantage"] = "loss"
    """Where the KL acts: "loss" = a term of the loss, "reward" = subtracted from each token's reward before the
    advantage estimator, "advantage" = subtracted from the advantage after it."""
    use_bias_correction_kl: Bool = False
    """Multiply the KL in the loss (k1 or k3) by the importance ratio policy / old policy, with its gradient."""
    target_kl: Float | None = None
    """Adapt beta after each step so that the KL of the sampled completions stays near this; None = beta is fixed."""
    kl_horizon: Float = 10_000.0
    """With target_kl: the number of completions over which beta changes by a fifth at most; a step never changes it by
    more."""
    force_compute_kl: Bool = False
    """Compute the KL to the reference as a metric also when beta is 0.0."""
    sync_ref_model: Bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_mixup_alpha: Float = 0.6
    """α of sync_ref_model: reference = α * policy + (1 - α) * reference; 1.0 = copy the policy."""
    ref_model_sync_steps: Count = 512
    """Steps (rollouts) between two moves of the reference with sync_ref_model."""

    # the entropy bonus
    entropy_coef: Float = 0.0
    """c, the weight of the entropy bonus of each token; 0.0 = no bonus."""
    use_adaptive_entropy: Bool = False
    """Adapt c after each update: entropy_coef_delta raises it if the mean entropy of the trained tokens was at most
    entropy_target, and lowers it otherwise. The bonus acts only if the entropy of the update before was at most the
    target."""
    entropy_coef_min: Float = 0.0
    """Smallest c of use_adaptive_entropy."""
    entropy_coef_max: Float = 1.0
    """Largest c of use_adaptive_entropy."""
    entropy_coef_delta: Float = 0.005
    """The change of c after each update with use_adaptive_entropy."""
    entropy_target: Float = 0.2
    """The entropy that use_adaptive_entropy aims at, in nats per token."""

    # weights and masks of tokens, for a sampler that differs from the trainer
    use_rollout_logps: Bool = True
    """Take the sampler's logprobs as the old logprobs; false = the trainer computes them from the weights at the start
    of the step."""
    sampler_is: Text | Fn | None = None
    """Correct for a sampler that differs from the trainer: weigh tokens by the ratio trainer / sampler, of each token
    or of whole sequences. A function of LossInputs or "package.module:function" computes the weights itself; None =
    off."""
    sampler_is_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside its bounds: "truncate" = clip it to the bound, "mask" = do not train on the
    token."""
    sampler_is_threshold: Float | None = 2.0
    """Upper bound of the weight of sampler_is; None = no bound."""
    sampler_is_lower: Float | None = None
    """Lower bound of the weight of sampler_is; None = no bound. IcePop is sampler_is_mode=mask with 0.5 here and a
    sampler_is_threshold of 5.0."""
    sampler_is_normalize: Bool = False
    """Divide the weight of sampler_is by its mean over the trained tokens of the step."""
    sampler_is_current: Bool = False
    """Compute the weight from the current policy instead of the policy at the start of the step (RL2's TIS)."""
    sampler_is_kl: Bool = False
    """Multiply the KL in the loss by the weight of sampler_is too (RL2's TIS)."""
    loss_masks: tuple[Name | Fn, ...] = ()
    """Masks that multiply the policy loss by 0 or 1: names, functions of LossInputs, "package.module:function"."""
    off_policy_mask_threshold: Float = 0.5
    """Threshold of loss_masks=[off-policy], in nats per token: it masks out completions that have a negative advantage
    and a mean log(sampler / policy) above this."""
    top_entropy_quantile: Float = 1.0
    """Share of the tokens of an optimizer step, those with the highest entropy, that loss_masks=[top-entropy] keeps."""
    dppo_threshold: Float = 0.2
    """Threshold of loss_masks=[dppo-tv] (in probability) and [dppo-kl] (in nats): they mask out tokens that have moved
    further than this in the direction of their advantage."""
    dppo_threshold_high: Float | None = None
    """Threshold of dppo-tv and dppo-kl for tokens with a positive advantage; None = dppo_threshold."""
    kl_mask_threshold: Float | None = None
    """Threshold of loss_masks=[sampler-kl], in nats: it masks out tokens with a larger log(policy / sampler)² / 2."""
    rejection_level: Literal["geometric", "sequence", "token"] = "geometric"
    """Level of the ratio trainer / sampler that loss_masks=[sampler-rejection] compares with its bounds."""
    rejection_threshold: Float | None = 1.001
    """Upper bound of the ratio of sampler-rejection: it masks out what lies above; None = no bound."""
    rejection_lower: Float | None = 0.999
    """Lower bound of the ratio of sampler-rejection: it masks out what lies below; None = no bound."""
    mask_truncated_completions: Bool = False
    """Mask out completions that were truncated at the length limit."""

    # dynamic sampling: groups without a learning signal are replaced by groups of other prompts
    dynamic_sampling: Bool = False
    """Leave out groups in which all rewards are equal, and sample more prompts until the step has as many groups as a
    batch has prompts. Needs trainer.max_steps."""
    max_num_gen_batches: Count = 10
    """With dynamic_sampling: the most batches of prompts that a step samples. A step that is still not full trains on
    the groups that it has."""
    group_reward_bounds: tuple[Float, Float] | None = None
    """(low, high): with dynamic_sampling, leave out groups with a mean reward outside the open interval low to high.
    None = leave out groups in which all rewards are equal."""

    # the groups
    num_generations: Size = 1
    """G, the completions of each prompt."""

    def __post_init__(self) -> None:
        """Checks each choice, the rules that concern several, and that every field that was set has an effect."""
        super().__post_init__()
        self._check_advantages()
        self._check_surrogate()
        self._check_kl()
        self._check_entropy()
        self._check_corrections()
        bounds = self.group_reward_bounds
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ConfigError(f"group_reward_bounds must be (low, high) with low < high, got {bounds!r}")
        check_fields_read(self)
        penalties = {
            f"kl_type='reward' with beta={self.beta}": bool(self.beta) and self.kl_type == "reward",
            "overlong_buffer.enable=True": self.overlong_buffer.enable,
        }
        for name, on in penalties.items():
            if on and self.advantage_estimator == "maxrl":
                raise ConfigError(
                    f"advantage_estimator='maxrl' is for rewards that are not negative, and {name} takes from them; "
                    "leave that out, or choose another estimator"
                )

    def _check_advantages(self) -> None:
        """Checks the estimators' ranges."""
        if self.advantage_eps < 0:
            raise ConfigError(f"advantage_eps must not be negative, got {self.advantage_eps!r}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be between 0 and 1, got {self.gamma!r}; 1.0 does not discount")

    def _check_surrogate(self) -> None:
        """Checks the ranges of the losses' arguments."""
        for name in ("epsilon", "epsilon_high", "cispo_epsilon_low"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value!r}")
        for name in _POSITIVE_IN_LOSSES:
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if not 0 <= self.gkd_beta <= 1:
            raise ConfigError(f"gkd_beta must be between 0 (forward KL) and 1 (reverse KL), got {self.gkd_beta!r}")
        if self.delta is not None and self.delta < 1:
            raise ConfigError(
                f"delta must be at least 1, got {self.delta!r}: below 1 no token with a positive advantage would have "
                "a gradient at the start; None = off"
            )
        if self.epsilon_c is not None and self.epsilon_c <= 1:
            raise ConfigError(f"epsilon_c must be greater than 1, got {self.epsilon_c!r}; None turns the dual clip off")
        if self.loss_agg_norm is not None and self.loss_agg_norm <= 0:
            raise ConfigError(f"loss_agg_norm: Invalid 'norm' value: must be positive, got {self.loss_agg_norm!r}")

    def _check_kl(self) -> None:
        """Checks the ranges of the KL's fields, and that they go together."""
        if self.beta < 0:
            raise ConfigError(f"beta must not be negative, got {self.beta!r}")
        if self.use_bias_correction_kl and self.kl_type != "loss":
            raise ConfigError(
                f"use_bias_correction_kl=True corrects the KL in the loss; kl_type={self.kl_type!r} measures "
                "the KL of the policy that sampled, which needs no correction; set use_bias_correction_kl=False"
            )
        mode = self.keywords["kl_loss_mode"]
        if self.use_bias_correction_kl and mode in self.CHOICES["kl_loss_mode"] and mode not in _CORRECTED:
            raise ConfigError(
                f"use_bias_correction_kl=True with kl_loss_mode={mode!r} has a wrong gradient: with the "
                "importance ratio, only k1 and k3 have the gradient of the KL; take kl_loss_mode='low_var_kl', or "
                "leave the correction off"
            )
        for name in ("target_kl", "kl_horizon"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if self.target_kl is not None and self.beta == 0:
            raise ConfigError(
                f"target_kl={self.target_kl!r} adapts beta from where it starts, and beta=0.0 stays 0.0; set beta, or "
                "target_kl=None"
            )
        if self.sync_ref_model and not (self.beta or self.force_compute_kl):
            raise ConfigError(
                "sync_ref_model=True moves a reference that nothing reads; set beta above 0.0, or force_compute_kl=True"
            )
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ConfigError(
                f"ref_model_mixup_alpha must be above 0 and at most 1, got {self.ref_model_mixup_alpha!r}; 1.0 = a copy"
            )

    def _check_entropy(self) -> None:
        """Checks the ranges of the entropy bonus."""
        for name in ("entropy_coef_min", "entropy_coef_max", "entropy_target"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef_min={self.entropy_coef_min!r} must be at most entropy_coef_max={self.entropy_coef_max!r}"
            )
        if not self.entropy_coef_delta > 0:
            raise ConfigError(f"entropy_coef_delta must be positive, got {self.entropy_coef_delta!r}; 0.005 is usual")
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef!r}, where use_adaptive_entropy starts, must be between "
                f"entropy_coef_min={self.entropy_coef_min!r} and entropy_coef_max={self.entropy_coef_max!r}"
            )

    def _check_corrections(self) -> None:
        """Checks the ranges of the corrections, and that each mask would leave something out."""
        if isinstance(self.sampler_is, str) and self.sampler_is not in _LEVELS and ":" not in self.sampler_is:
            near = nearest(self.sampler_is, _LEVELS)
            raise ConfigError(
                f"sampler_is should be None, 'token', 'sequence' or 'geometric'. Received: {self.sampler_is!r}{near}"
            )
        for name in _POSITIVE_IN_CORRECTIONS:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}; leave it out for the default")
        for name in ("sampler_is", "rejection"):
            lower, upper = getattr(self, f"{name}_lower"), getattr(self, f"{name}_threshold")
            if lower is not None and (lower <= 0 or (upper is not None and lower >= upper)):
                raise ConfigError(
                    f"{name}_lower={lower!r} must be positive and below {name}_threshold={upper!r}; None = no bound"
                )
        lower, upper = self.sampler_is_lower, self.sampler_is_threshold
        if self.sampler_is in _LEVELS and self.sampler_is_mode == "mask" and not (lower or 0) <= 1 <= (upper or 1):
            raise ConfigError(
                f"sampler_is_mode='mask' with sampler_is_lower={lower!r} and sampler_is_threshold={upper!r} masks out "
                "tokens on which sampler and trainer agree (ratio 1): the bounds must include 1"
            )
        if self.off_policy_mask_threshold < 0:
            raise ConfigError(f"off_policy_mask_threshold must not be negative, got {self.off_policy_mask_threshold!r}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ConfigError(
                f"top_entropy_quantile must be above 0 and at most 1, got {self.top_entropy_quantile!r}; 1.0 keeps all"
            )
        if self.sampler_is_normalize and self.sampler_is_current:
            raise ConfigError(
                "sampler_is_normalize=True divides by a mean over the whole step, and sampler_is_current=True has no "
                "such mean: turn one of the two off"
            )
        if "top-entropy" in self.loss_masks and self.top_entropy_quantile == 1:
            raise ConfigError(
                "loss_masks=[top-entropy] keeps all tokens at top_entropy_quantile=1.0, and costs a pass; set it below "
                "1 (0.2 is usual), or leave the mask out"
            )
        if "sampler-rejection" in self.loss_masks and self.rejection_lower is None and self.rejection_threshold is None:
            raise ConfigError(
                "loss_masks=[sampler-rejection] needs rejection_lower or rejection_threshold, for example "
                "0.999 and 1.001"
            )
        if "sampler-kl" in self.loss_masks and self.kl_mask_threshold is None:
            raise ConfigError("loss_masks=[sampler-kl] needs kl_mask_threshold, in nats (0.02, for example)")

    def check_groups(self) -> None:
        """Raises ConfigError if each prompt has one completion and something compares it with its group."""
        if self.num_generations <= 1 and self.advantage_estimator in NEED_GROUPS:
            raise ConfigError(
                f"num_generations must be greater than 1, got {self.num_generations}: "
                "a completion is compared with its group"
            )
        if self.num_generations <= 1 and self.dynamic_sampling and self.group_reward_bounds is None:
            raise ConfigError(
                "dynamic_sampling with num_generations=1 would leave out every group, since one reward is equal to "
                "itself; set group_reward_bounds, or dynamic_sampling=false"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε, ε_high), ε_high with its default filled in."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high


@config
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation (arXiv:2402.03300) and its relatives.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    whet.errors.ConfigError: num_generations must be greater than 1, got 1: a completion is compared with its group
    """

    REFUSED: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "clip_range_value",
            "critic_updates",
            "critic_warmup_steps",
            "gae_lambda",
            "value_loss_agg_mode",
            "value_loss_fn",
            "vf_coef",
            "whiten_advantages",
        ),
        "GRPO has no critic; leave it out, or train with PPO (whet ppo, PPOConfig)",
    )

    num_generations: Size = 2
    """G, the completions of each prompt. 1 needs an advantage_estimator that does not compare within the group."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.advantage_estimator == "gae":
            raise ConfigError(
                "advantage_estimator='gae' needs the values of a critic, and GRPO has none; train with PPO (whet ppo, "
                "PPOConfig), or choose an estimator that reads only rewards (grpo, rloo, reinforce_plus_plus)"
            )
        self.check_groups()
