"""GRPOLearner: group-relative policy optimisation, and its relatives, which differ by names in the configuration.

    A_i = (r_i - mean_g r) / (std_g r + eps)                       advantage_estimator, per trajectory
    l_t = -min(ρ_t A, clip(ρ_t, 1 - ε, 1 + ε_high) A) + β KL_t     policy_loss_fn, per token; ρ_t = π / π_old
    L   = Σ_t w_t l_t                                              loss_agg_mode, as weights w made once per mini-batch

All stages are PolicyLearner's (policy.py); the clip is in ops/policy_losses/clipped.py.
Source: DeepSeekMath, arXiv:2402.03300; agrees with Tunix's GRPOLearner but for the two points in policy.py.
"""

from __future__ import annotations

from whet.cluster import RLCluster
from whet.config import GRPOConfig, RolloutConfig
from whet.errors import ConfigError
from whet.learners.policy import PolicyLearner

__all__ = ["GRPOLearner", "check_temperature"]


class GRPOLearner(PolicyLearner):
    """Trains the actor by GRPO: see RLLearner for the arguments.

    Raises: ConfigError: greedy sampling, in which the completions of a group can't differ; as PolicyLearner.

    Example: GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), reward_fns=[exact]).train(rows)
    """

    CONFIG = GRPOConfig
    algo_config: GRPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self, cluster: RLCluster) -> None:
        """Raises ConfigError where all completions of a group would be the same."""
        super().check(cluster)
        check_temperature(cluster.rollout_for())


def check_temperature(rollout: RolloutConfig) -> None:
    """Raises ConfigError where all completions of a group would be the same."""
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0 draws the same completion algo.num_generations times: all completions of a group "
            "are equal, and nothing is learned; set one above 0 (1.0), and eval: {temperature: 0.0} for evaluation"
        )
