"""The algorithm: the section algo. A class for each algorithm.

Every function with a keyword-only argument of a field's name receives it. presets has the choices of published methods.
"""

from whet.config.algo import presets
from whet.config.algo.base import AlgorithmConfig, OverlongBuffer
from whet.config.algo.policy import NEED_GROUPS, GRPOConfig, PolicyConfig
from whet.config.algo.ppo import PPOConfig
from whet.config.algo.preference import PreferenceConfig, RewardModelConfig

__all__ = [
    "NEED_GROUPS",
    "AlgorithmConfig",
    "GRPOConfig",
    "OverlongBuffer",
    "PPOConfig",
    "PolicyConfig",
    "PreferenceConfig",
    "RewardModelConfig",
    "presets",
]
