"""PolicyConfig: the choices of which every policy objective is made."""

from __future__ import annotations

from typing import Any

from whet.config.algo.advantage import AdvantageFields
from whet.config.algo.correction import CorrectionFields
from whet.config.algo.entropy import EntropyFields
from whet.config.algo.kl import KLFields
from whet.config.algo.selection import SelectionFields
from whet.config.algo.surrogate import SurrogateFields
from whet.config.base import config
from whet.config.fields import Size

__all__ = ["PolicyConfig"]


@config
class PolicyConfig(SelectionFields, CorrectionFields, EntropyFields, KLFields, SurrogateFields, AdvantageFields):
    """An algorithm that trains a policy: advantage, surrogate, KL, entropy bonus, corrections, each chosen on its own.

    >>> PolicyConfig(epsilon=0.2, epsilon_high=0.28).clip_range
    (0.2, 0.28)
    """

    num_generations: Size = 1
    """G: completions of each prompt."""

    @property
    def loss_name(self) -> Any:
        """What chooses the policy loss: a name or a function."""
        return self.policy_loss_fn
