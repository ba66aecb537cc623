"""GRPOConfig: group-relative policy optimisation."""

from __future__ import annotations

from typing import Any, Literal

from whet.config.algo.policy import PolicyConfig
from whet.config.base import config
from whet.config.fields import Size, Text
from whet.errors import ConfigError

__all__ = ["GRPOConfig"]


@config
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation (arXiv:2402.03300) and its relatives.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    whet.errors.ConfigError: num_generations must be greater than 1, got 1: a completion is compared with its group
    """

    num_generations: Size = 2
    """G, the completions of each prompt. 1 needs an advantage_estimator that does not compare within the group."""
    loss_algo: Literal["grpo", "gspo-token"] | Text = "grpo"
    """The importance ratio: of each token (grpo) or of the whole sequence (gspo-token)."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.loss_algo not in ("grpo", "gspo-token"):
            raise ConfigError(f"loss_algo should be either grpo or gspo-token. Received: {self.loss_algo}")
        self.check_groups()
        if self.loss_algo != "grpo" and self.policy_loss_fn != "grpo":
            raise ConfigError(
                f"loss_algo={self.loss_algo!r} and policy_loss_fn={self.policy_loss_fn!r} both choose the loss; "
                "leave one at 'grpo'"
            )

    @property
    def loss_name(self) -> Any:
        """The name of the policy loss, from loss_algo (Tunix's field) or policy_loss_fn."""
        return self.loss_algo if self.policy_loss_fn == "grpo" else self.policy_loss_fn
