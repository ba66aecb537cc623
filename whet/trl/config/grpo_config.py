"""GRPOConfig: TRL's, with every field; fields_grpo.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.errors import ConfigError
from whet.trl.config.arguments import dataclass_of
from whet.trl.config.field import Table
from whet.trl.config.grpo import COMPAT, GRPO_FIELDS, OLD_GRPO_FIELDS
from whet.trl.config.training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.config.rl import RLArguments
from whet.trl.config.translate import grpo

__all__ = ["GRPOConfig"]


class _GRPO(RLArguments):
    """What GRPOConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **GRPO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_GRPO_FIELDS}
    COMPAT = COMPAT

    METHOD = "GRPO"

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"}

    def _check(self) -> None:
        """TRL's rules, and what of its values is not there."""
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if (self.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
            raise ConfigError("liger_kernel_config: fused_linear_cross_entropy is not for GRPO; leave it out")
        super()._check()

    def to_whet(self) -> Any:
        """The algorithm as whet's own configuration."""
        return grpo(self)


GRPOConfig: type[_GRPO] = dataclass_of(
    "GRPOConfig",
    _GRPO,
    """TRL's GRPOConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> GRPOConfig(num_generations=6, per_device_train_batch_size=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: generation_batch_size (8) must be divisible by num_generations (6). Nearest that work: ...
    """,
)
