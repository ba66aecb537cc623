"""The algorithm: the section algo. One class for each choice of an objective, and one for each algorithm.

An algorithm's class inherits from the classes of its choices.
A new field belongs in the class of its choice; every function with a keyword-only argument of that name receives it.
presets has the choices of published methods.
"""

from whet.config.algo import presets
from whet.config.algo.advantage import NEED_GROUPS, AdvantageFields
from whet.config.algo.base import AlgorithmConfig, OverlongBuffer
from whet.config.algo.correction import CorrectionFields
from whet.config.algo.entropy import EntropyFields
from whet.config.algo.grpo import GRPOConfig
from whet.config.algo.kl import KLFields
from whet.config.algo.policy import PolicyConfig
from whet.config.algo.ppo import PPOConfig
from whet.config.algo.preference import PreferenceConfig, RewardModelConfig
from whet.config.algo.selection import SelectionFields
from whet.config.algo.surrogate import SurrogateFields

__all__ = [
    "NEED_GROUPS",
    "AdvantageFields",
    "AlgorithmConfig",
    "CorrectionFields",
    "EntropyFields",
    "GRPOConfig",
    "KLFields",
    "OverlongBuffer",
    "PPOConfig",
    "PolicyConfig",
    "PreferenceConfig",
    "RewardModelConfig",
    "SelectionFields",
    "SurrogateFields",
    "presets",
]
